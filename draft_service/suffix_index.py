"""An index over the newest tokens of a growing text, by what precedes each: bounded memory, constant time a token.

Positions are linked to the one before whose ``shortest`` preceding tokens have the same hash, newest first, as in the
match finder of LZ77 compressors; a query follows the links and compares. Text and links are rings, so the oldest
tokens are forgotten as new ones come. What is found are the longest matches among the newest ``most``, as in a suffix
automaton over the same tokens, which could not forget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SEPARATOR = -1
"""Stands between two texts; no match and no continuation goes beyond it."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class SuffixIndex:
    """The newest ``capacity`` tokens; 20 to 28 bytes for each."""

    def __init__(self, capacity: int, shortest: int) -> None:
        bits = max(1, (capacity - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._text = np.zeros(capacity, np.int32)
        self._before = np.zeros(capacity, np.int64)  # 1 + the position before with the same hash, 0: none
        self._newest = np.zeros(1 << bits, np.int64)  # by hash: 1 + the newest position, 0: none
        self._capacity, self._shortest = capacity, shortest
        self.size = 0  # tokens that were ever added

    @property
    def oldest(self) -> int:
        """First position that is still known."""
        return max(0, self.size - self._capacity)

    def add(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        for first in range(0, len(tokens), self._capacity):
            self._add(np.asarray(tokens[first : first + self._capacity], np.int32))

    def _add(self, tokens: np.ndarray) -> None:
        first, known = self.size, min(self.size - self.oldest, self._shortest)
        context = np.concatenate([self.read(first - known, known), tokens])
        self._text[np.arange(first, first + len(tokens)) % self._capacity] = tokens
        self.size += len(tokens)
        behind = first - known + self._shortest  # the first position with enough tokens before it
        for at, key in enumerate(self._hashes(context[:-1]), start=behind):
            self._before[at % self._capacity] = self._newest[key]
            self._newest[key] = at + 1

    def _hashes(self, tokens: np.ndarray) -> list[int]:
        """Of each run of ``shortest`` tokens."""
        runs = len(tokens) - self._shortest + 1
        wide = tokens.astype(np.int64).astype(np.uint64)
        total = np.zeros(max(0, runs), np.uint64)
        for k in range(self._shortest):
            total = total * _MULTIPLIER + wide[k : k + len(total)] + np.uint64(1)
        hashes: list[int] = ((total * _MULTIPLIER) >> self._shift).tolist()
        return hashes

    def read(self, position: int, count: int) -> np.ndarray:
        """Up to ``count`` tokens from a known position on, int32."""
        return self._text[np.arange(position, min(position + count, self.size)) % self._capacity]

    def matches(self, context: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Positions where ``context`` was followed by something, and how many of its last tokens match there.

        Of the newest ``most`` that may match; newest first, at least ``shortest`` tokens each.
        """
        if len(context) < self._shortest or not most:
            return []
        found: list[tuple[int, int]] = []
        wanted = np.asarray(context, np.int32)
        [key] = self._hashes(wanted[-self._shortest :])
        at = int(self._newest[key]) - 1
        for _ in range(most):
            if at < self.oldest + self._shortest:
                break
            length = min(len(wanted), at - self.oldest)
            differs = np.nonzero(self.read(at - length, length)[::-1] != wanted[len(wanted) - length :][::-1])[0]
            matching = int(differs[0]) if len(differs) else length
            if matching >= self._shortest:
                found.append((at, matching))
            at = int(self._before[at % self._capacity]) - 1
        return found
