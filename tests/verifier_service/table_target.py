"""A scripted target: logits from a table by everything that a row sees, read from a paged cache that holds tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.runtime.batch import Rows
from draftwood.runtime.pages import PagePool

POSITIONS = 256


@dataclass(frozen=True)
class Table:
    """Rows of logits, float64, chosen by a hash of (position, token) over all that a row sees, itself included."""

    logits: NDArray[np.float64]  # [entries, vocab]
    mix: NDArray[np.uint64]  # [positions, vocab]

    @classmethod
    def random(cls, vocab: int, seed: int = 0, entries: int = 4096, spread: float = 2.0) -> Table:
        rng = np.random.default_rng(seed)
        mix = rng.integers(0, 2**63, (POSITIONS, vocab), np.uint64)
        return cls(rng.normal(0, spread, (entries, vocab)), mix)

    def rows(self, key: NDArray[np.uint64]) -> NDArray[np.float64]:
        return self.logits[(key >> np.uint64(17)) % np.uint64(len(self.logits))]

    def after(self, text: Sequence[int]) -> NDArray[np.float64]:
        """The row of a text, computed from the text itself."""
        return self.rows(self.mix[np.arange(len(text)), list(text)].sum(keepdims=True))[0]


class TableRuntime:
    """What the engine uses of a ``ModelRuntime``. A row that sees a wrong slot gets the wrong logits."""

    def __init__(self, table: Table, *, kv_pages: int = 512, page_tokens: int = 16) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float64
        self.vocab_size = table.logits.shape[1]
        self.max_context_tokens = POSITIONS
        self.pool = PagePool(kv_pages, page_tokens)
        self.poison: Any = None
        """Called with (position, own token) of each wanted row and its logits, which it may change."""
        self._table = table
        self._cache = np.zeros(kv_pages * page_tokens, np.int64)
        self._position = np.zeros(kv_pages * page_tokens, np.int64)

    def forward(self, parts: Sequence[Rows]) -> Tensor:
        return torch.from_numpy(np.concatenate([self._part(part) for part in parts]))

    def _part(self, part: Rows) -> NDArray[np.float64]:
        n, tail = part.visible.shape
        slots = self._slots(part.pages, np.arange(part.context + tail))
        own = slots[len(slots) - n :]
        self._cache[own], self._position[own] = part.token, part.tail_position[tail - n :]
        seen = self._table.mix[self._position[slots], self._cache[slots]]
        prefix, behind = seen[: part.context].sum(), seen[part.context :]
        key = prefix + np.where(part.visible, behind, np.uint64(0)).sum(axis=1)
        logits = self._table.rows(key[part.logits_from :])
        if self.poison:
            rows = zip(part.tail_position[tail - n :].tolist(), part.token.tolist(), strict=True)
            for row, where in zip(logits, list(rows)[part.logits_from :], strict=True):
                self.poison(*where, row)
        return logits

    def move(self, moves: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> None:
        for pages, old, new in moves:
            source, target = self._slots(pages, np.array(old)), self._slots(pages, np.array(new))
            self._cache[target], self._position[target] = self._cache[source], self._position[source]

    def _slots(self, pages: Sequence[int], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self.pool.page_tokens
        return np.asarray(pages)[slots // size] * size + slots % size
