"""A draft with fewer tokens than its target (FR-Spec, arXiv:2502.14856; EAGLE-3, arXiv:2503.01840).

Most tokens of a large vocabulary are rarely written, and a small model spends most of its parameters and time on them.
Such a draft's ``config.json`` has

target_token_ids    the target's ids of the draft's tokens: token k of the draft is ``target_token_ids[k]``. Ascending,
                    so that the lower id on one side is the lower one on the other.
target_vocab_size   ids that the target has, padding included.

The draft's next row stands for all tokens that it lacks, on the way in. Its output and the padding behind it are never
looked at: what the draft lacks it cannot propose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import FailedPrecondition


class ReducedVocabulary:
    """The tokens that a draft has kept of its target's."""

    def __init__(self, target_ids: Sequence[int], target_size: int, rows: int) -> None:
        """``rows`` of the draft's embedding; raises FailedPrecondition MODEL_UNSUPPORTED if they cannot be meant."""
        kept = np.array(target_ids, np.int64)
        if kept.ndim != 1 or not len(kept) or (np.diff(kept) <= 0).any():
            raise _unsupported("target_token_ids are not ascending")
        if kept[0] < 0 or kept[-1] >= target_size:
            raise _unsupported(f"target_token_ids go from {kept[0]} to {kept[-1]}, target_vocab_size is {target_size}")
        if len(kept) >= rows:
            raise _unsupported(f"{len(kept)} target_token_ids and one row for all others, but {rows} rows")
        self.target_ids: NDArray[np.int64] = kept
        self.target_size = target_size
        self._own = np.full(target_size, len(kept), np.int32)
        self._own[kept] = np.arange(len(kept))

    @classmethod
    def of(cls, config: Any) -> ReducedVocabulary | None:
        """That of a model's configuration; None if it has all its target's tokens."""
        ids = getattr(config, "target_token_ids", None)
        if ids is None:
            return None
        size = getattr(config, "target_vocab_size", None)
        if not isinstance(size, int):
            raise _unsupported("it has target_token_ids, but no target_vocab_size")
        return cls(ids, size, int(config.vocab_size))

    def to_draft(self, tokens: NDArray[Any]) -> NDArray[np.int32]:
        """The draft's ids of the target's; any shape."""
        own: NDArray[np.int32] = self._own[tokens]
        return own

    def to_target(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The target's ids of proposed tokens, -1 where there is none; any shape."""
        return np.where(tokens < 0, -1, self.target_ids[tokens])

    def count_below(self, target_id: int) -> int:
        """Tokens of the draft whose id in the target is below ``target_id``: the first ones."""
        return int(np.searchsorted(self.target_ids, target_id))


def _unsupported(why: str) -> FailedPrecondition:
    return FailedPrecondition("MODEL_UNSUPPORTED", f"reduced vocabulary: {why}")
