"""Do two tokenizers mean the same by the same ids?

Draft and target exchange token ids, so ids must name the same tokens on both sides. They are compared by content over
the *shared range*, the ids that both sides have: the side with more tokens hashes as many of its own as the other has
and compares. Rows of the output beyond the last token (padding of the embedding) are no tokens and may differ.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from draftwood.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What one side tells the other about its tokenizer.

    ``size`` tokens without padding, ``sha256`` over all of them, ``vocab_size`` rows of the output with padding,
    ``special_ids`` ascending.
    """

    size: int
    sha256: bytes
    vocab_size: int
    special_ids: tuple[int, ...]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one model.

    ``tokens`` by id, padding excluded; an id that names nothing is "". ``vocab_size`` is the number of rows of the
    model's output, padding included.
    """

    tokens: tuple[str, ...]
    special_ids: frozenset[int]
    vocab_size: int

    def sha256(self, size: int) -> bytes:
        """Digest of the first ``size`` tokens, each as its UTF-8 length (uint32, little-endian) and bytes."""
        digest = hashlib.sha256()
        for token in self.tokens[:size]:
            data = token.encode()
            digest.update(struct.pack("<I", len(data)) + data)
        return digest.digest()

    def fingerprint(self) -> Fingerprint:
        size = len(self.tokens)
        return Fingerprint(size, self.sha256(size), self.vocab_size, tuple(sorted(self.special_ids)))


def check(mine: Vocabulary, theirs: Fingerprint) -> None:
    """Raises FailedPrecondition TOKENIZER_MISMATCH unless both sides agree over the shared range.

    Only the side with at least as many tokens as the other can compare the tokens, so both sides must call this; the
    special ids of the shared range are compared by either.
    """
    shared = min(len(mine.tokens), theirs.size)
    if shared == 0:
        raise _mismatch("there are no shared tokens", mine, theirs)
    if shared == theirs.size and mine.sha256(shared) != theirs.sha256:
        raise _mismatch(f"the first {shared} tokens differ", mine, theirs)
    differing = {i for i in mine.special_ids.symmetric_difference(theirs.special_ids) if i < shared}
    if differing:
        raise _mismatch(f"id {min(differing)} is special on one side only", mine, theirs)


def _mismatch(what: str, mine: Vocabulary, theirs: Fingerprint) -> FailedPrecondition:
    return FailedPrecondition(
        "TOKENIZER_MISMATCH",
        f"{what}: {len(mine.tokens)} tokens in {mine.vocab_size} rows here, "
        f"{theirs.size} in {theirs.vocab_size} at the peer",
    )
