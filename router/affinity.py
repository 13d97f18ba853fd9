"""Which verifier has seen the beginning of a prompt: it is likely to have its KV pages cached.

A prompt is cut into pieces of a few pages' length; each *beginning* (the first piece, the first two, ...) is known by
a hash. Pieces that are not full do not count, as pages that are not full are not shared. The router does not tokenize,
so pieces are cut from what the client sent: the text, the chat's messages or the token ids. This is a guess at what is
cached, and a wrong one costs a prefill.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from draftwood.v1 import verifier_pb2

PIECE_BYTES = 512
"""About two pages of 64 tokens in plain English."""
MOST_PIECES = 8
"""A thousand tokens or so: who knows that much is worth as much as who knows more."""
MOST_BEGINNINGS = 1 << 16
HOLDERS = 4
"""Verifiers remembered for one beginning, the last ones that served it."""


def beginnings(generation: verifier_pb2.Generation) -> list[bytes]:
    """Hashes of the prompt's beginnings, the shortest first, at most ``MOST_PIECES``."""
    digest = hashlib.blake2b(digest_size=16)
    content = _content(generation)
    found = []
    for start in range(0, min(len(content) // PIECE_BYTES, MOST_PIECES) * PIECE_BYTES, PIECE_BYTES):
        digest.update(content[start : start + PIECE_BYTES])
        found.append(digest.copy().digest())
    return found


def _content(generation: verifier_pb2.Generation) -> bytes:
    """What decides the first tokens of the prompt, as bytes."""
    kind = generation.WhichOneof("prompt")
    if kind == "text":
        return generation.text.encode()
    message = generation.chat if kind == "chat" else generation.token_ids
    return message.SerializeToString(deterministic=True)


class Beginnings:
    """Remembers which verifiers were given which beginnings; the ones unused for longest are forgotten."""

    def __init__(self, most: int = MOST_BEGINNINGS) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def known(self, hashes: Sequence[bytes]) -> dict[str, float]:
        """How much of the prompt each verifier has been given before, by key, as a share of ``MOST_PIECES``; those
        that have been given none are left out."""
        shares: dict[str, float] = {}
        for count, beginning in enumerate(hashes, 1):
            holders = self._holders.get(beginning)
            if not holders:
                break
            shares.update(dict.fromkeys(holders, count / MOST_PIECES))
        return shares

    def served(self, hashes: Iterable[bytes], key: str) -> None:
        """The verifier of that key computes the prompt."""
        for beginning in hashes:
            others = [holder for holder in self._holders.pop(beginning, ()) if holder != key]
            self._holders[beginning] = (key, *others[: HOLDERS - 1])
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)
