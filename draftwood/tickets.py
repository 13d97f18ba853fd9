"""Tickets: what a draft worker shows a verifier to join a session.

The router draws a key for each session, hands it to the session's verifier with the request, and makes of it one
ticket a draft worker that it attaches. A ticket holds for one session, one worker (its incarnation) and for
``LIFETIME_S``; nothing outlives the session, so there is nothing to store or to rotate.

Time is counted from the session's start, which verifier and router each measure with a clock of their own: their
clocks need not agree.

Layout, big-endian: uint32 age in milliseconds at which it expires, then the first 16 bytes of
HMAC-SHA256(key, age, worker's length as uint32, worker, session).
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Final

from draftwood.errors import PermissionDenied

KEY_BYTES: Final = 32
LIFETIME_S: Final = 60.0
_MAC_BYTES: Final = 16
_AGE: Final = struct.Struct(">I")
_LATEST_MS: Final = 2**32 - 1  # 49 days; a ticket of an older session does not expire before the session


def new_key() -> bytes:
    """The secret of one session."""
    return secrets.token_bytes(KEY_BYTES)


def issue_ticket(key: bytes, session_id: str, worker: str, age_s: float) -> bytes:
    """A ticket for the worker of that incarnation, for a session that started ``age_s`` seconds ago."""
    expiry = _AGE.pack(min(int((age_s + LIFETIME_S) * 1e3), _LATEST_MS))
    return expiry + _mac(key, expiry, session_id, worker)


def check_ticket(ticket: bytes, key: bytes, session_id: str, worker: str, age_s: float) -> None:
    """Raises PermissionDenied TICKET if the ticket was not made for this session and worker, TICKET_EXPIRED if too old.

    An empty ``key`` fits no ticket.
    """
    expiry, mac = ticket[: _AGE.size], ticket[_AGE.size :]
    right = len(expiry) == _AGE.size and hmac.compare_digest(mac, _mac(key, expiry, session_id, worker))
    if not (key and right):
        message = f"no ticket of session {session_id!r} for worker {worker!r}"
        raise PermissionDenied("TICKET", message, field="join.ticket")
    expired_ms = int(age_s * 1e3) - _AGE.unpack(expiry)[0]
    if expired_ms > 0:
        message = f"the ticket of session {session_id!r} has expired {expired_ms} ms ago"
        raise PermissionDenied("TICKET_EXPIRED", message, field="join.ticket")


def _mac(key: bytes, expiry: bytes, session_id: str, worker: str) -> bytes:
    name = worker.encode()
    return hmac.digest(key, expiry + _AGE.pack(len(name)) + name + session_id.encode(), "sha256")[:_MAC_BYTES]
