"""A ticket holds for one session, one worker and a while, and for nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import PermissionDenied
from draftwood.tickets import LIFETIME_S, check_ticket, issue_ticket, new_key

KEY = b"k" * 32
TICKET = issue_ticket(KEY, "s", "worker", 10.0)


def refusal(ticket: bytes, key: bytes = KEY, session: str = "s", worker: str = "worker", age_s: float = 10.0) -> str:
    with pytest.raises(PermissionDenied) as caught:
        check_ticket(ticket, key, session, worker, age_s)
    assert caught.value.field == "join.ticket"
    return caught.value.reason


@pytest.mark.parametrize("age_s", [0.0, 10.0, 10.0 + LIFETIME_S])
def test_a_ticket_holds_until_it_expires(age_s: float) -> None:
    check_ticket(TICKET, KEY, "s", "worker", age_s)


def test_an_expired_ticket_is_refused() -> None:
    assert refusal(TICKET, age_s=10.01 + LIFETIME_S) == "TICKET_EXPIRED"
    assert refusal(TICKET, age_s=1e9) == "TICKET_EXPIRED"


def test_a_ticket_of_another_session_worker_or_key_is_refused() -> None:
    assert refusal(TICKET, session="t") == "TICKET"
    assert refusal(TICKET, worker="other") == "TICKET"
    assert refusal(TICKET, key=b"l" * 32) == "TICKET"


def test_worker_and_session_do_not_run_into_each_other() -> None:
    ticket = issue_ticket(KEY, "bc", "a", 0.0)
    assert refusal(ticket, session="c", worker="ab") == "TICKET"


def test_without_a_key_nothing_is_let_in() -> None:
    assert refusal(b"", key=b"") == "TICKET"
    assert refusal(issue_ticket(b"", "s", "worker", 0.0), key=b"") == "TICKET"


def test_a_later_expiry_cannot_be_written_in() -> None:
    assert refusal(b"\xff\xff\xff\xff" + TICKET[4:]) == "TICKET"


@given(st.integers(0, 8 * len(TICKET) - 1))
def test_every_bit_counts(bit: int) -> None:
    changed = bytearray(TICKET)
    changed[bit // 8] ^= 1 << bit % 8
    assert refusal(bytes(changed)) == "TICKET"


@given(st.binary(max_size=64))
def test_any_other_bytes_are_refused(ticket: bytes) -> None:
    assert ticket == TICKET or refusal(ticket) == "TICKET"


def test_a_session_of_months_still_gives_tickets() -> None:
    check_ticket(issue_ticket(KEY, "s", "w", 49 * 86400), KEY, "s", "w", 49 * 86400)
    issue_ticket(KEY, "s", "w", 1e9)


def test_keys_are_new_each_time() -> None:
    assert len({new_key() for _ in range(100)}) == 100 and len(new_key()) == 32
