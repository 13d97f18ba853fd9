"""Random parts of forwards: prefill chunks, plain rows and trees, with and without a tail of earlier forwards."""

from __future__ import annotations

import numpy as np

from draftwood.runtime.batch import Rows

VOCAB = 96


def ancestors(parents: list[int]) -> np.ndarray:
    """Which of the nodes each sees, itself included."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def random_part(rng: np.random.Generator, pages: list[int], context: int, tail: int, rows: int) -> Rows:
    """A random tree of ``tail`` cached nodes and ``rows`` new ones."""
    parents = [int(rng.integers(-1, node)) if node else -1 for node in range(tail + rows)]
    visible = ancestors(parents)
    position = context + visible.sum(axis=1) - 1
    return Rows(
        pages,
        context,
        rng.integers(0, VOCAB, rows).astype(np.int32),
        position.astype(np.int32),
        visible[tail:],
        logits_from=int(rng.integers(0, rows + 1)),
    )


def random_parts(rng: np.random.Generator, requests: int, page: int, most_rows: int, most_context: int) -> list[Rows]:
    """Parts of sessions that share no page."""
    free = list(rng.permutation(requests * (-(-(most_context + 2 * most_rows) // page) + 1)).tolist())
    parts = []
    for _ in range(requests):
        context, tail = int(rng.integers(0, most_context + 1)), int(rng.integers(0, most_rows))
        rows = int(rng.integers(1, most_rows + 1))
        pages = [free.pop() for _ in range(-(-(context + tail + rows) // page))]
        parts.append(random_part(rng, pages, context, tail, rows))
    return parts
