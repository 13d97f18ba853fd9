"""A target without a model: its cache holds tokens, and what comes next is a hash of the tokens that a row reads there.

So a page that is shared wrongly, reused too early or moved to the wrong place changes the text, at once and for good.
Every forward checks who writes where, and fills what is free with canaries before it reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from draftwood.config import VerifierSettings
from draftwood.runtime.batch import Rows
from draftwood.runtime.pages import PagePool
from verifier_service.engine import Engine
from verifier_service.width import StepTimes

VOCAB = 13
CANARY = -77


def next_token(text: Sequence[int]) -> int:
    return zlib.crc32(np.array(text, np.int32).tobytes()) % VOCAB


def oracle(prompt: Sequence[int], tokens: int) -> list[int]:
    """What the target alone writes behind ``prompt``."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(next_token(text))
    return text[len(prompt) :]


class TableRuntime:
    """Stands in for ``ModelRuntime`` on a CPU."""

    def __init__(self, pages: int, page_tokens: int = 16) -> None:
        self.pool = PagePool(pages, page_tokens)
        self.device = torch.device("cpu")
        self.features = None
        self.max_context_tokens = 4096
        self.slots = np.full((pages, page_tokens), CANARY)
        self.computed = 0  # rows
        self.during: Callable[[], None] = lambda: None  # called in the middle of a forward
        self.sick = False  # the next forward yields no finite logits

    def forward(self, parts: Sequence[Rows]) -> Tensor:
        page = self.pool.page_tokens
        assert parts, "a forward of no rows"
        self.slots[self.pool._free] = CANARY
        writers: dict[int, int] = {}
        for k, part in enumerate(parts):
            n, tail = part.visible.shape
            for row, slot in enumerate(range(part.context + tail - n, part.context + tail)):
                at = part.pages[slot // page]
                assert self.pool.is_private(at), f"page {at} is written but shared"
                assert writers.setdefault(at, k) == k, f"page {at} is written by two"
                self.slots[at, slot % page] = part.token[row]
            self.computed += n
        self.during()
        wanted = [self._read(part, row) for part in parts for row in range(part.logits_from, len(part.token))]
        logits = torch.full((len(wanted), VOCAB), -1.0, dtype=torch.float64)
        for k, text in enumerate(wanted):
            logits[k, next_token(text)] = torch.nan if self.sick else 1.0
        self.sick = False
        return logits

    def _read(self, part: Rows, row: int) -> list[int]:
        seen = [*range(part.context), *(part.context + np.flatnonzero(part.visible[row])).tolist()]
        page = self.pool.page_tokens
        text = [int(self.slots[part.pages[slot // page], slot % page]) for slot in seen]
        assert CANARY not in text, "a slot is read that nobody has written"
        return text

    def move(self, moves: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> None:
        page = self.pool.page_tokens
        for pages, old, new in moves:
            assert all(self.pool.is_private(pages[slot // page]) for slot in [*old, *new])
            for a, b in zip(old, new, strict=True):
                self.slots[pages[b // page], b % page] = self.slots[pages[a // page], a % page]


def table_engine(pages: int, **settings: object) -> Engine:
    """An engine over a ``TableRuntime``; its clock stands still and every node it has is verified."""
    chosen = {"width": "full", "max_nodes": 12, "page_tokens": 16, "draft_wait_ms": 0, "max_waiting": 4096} | settings
    runtime = TableRuntime(pages)
    times = StepTimes([1, 512], [1.0, 2.0])
    checked = VerifierSettings(**chosen)  # type: ignore[arg-type]
    return Engine(runtime, checked, token_count=VOCAB, times=times, clock=lambda: 0.0)  # type: ignore[arg-type]
