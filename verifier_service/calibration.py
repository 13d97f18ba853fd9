"""Online calibration of draft scores: how often a node of a given score was taken once its parent was reached.

One table per draft model and rule. A score's bucket starts out believing the draft (its own probability counts for
``PRIOR`` trials) and follows the outcomes; old ones fade by halving.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import FloatArray

BUCKETS = 12
PRIOR = 8.0
MOST_TRIALS = 400.0


class Calibration:
    """Maps a draft's edge scores (log-probabilities) to calibrated ones."""

    def __init__(self) -> None:
        self._trials = np.zeros(BUCKETS)
        self._hits = np.zeros(BUCKETS)

    def apply(self, score: FloatArray) -> FloatArray:
        """Calibrated log-probabilities, float32 [n], <= 0."""
        bucket = _bucket(score)
        believed = PRIOR * np.exp(score.astype(np.float64)) + self._hits[bucket]
        rate = believed / (PRIOR + self._trials[bucket])
        return np.log(np.clip(rate, 1e-6, 1.0)).astype(np.float32)

    def observe(self, score: FloatArray, taken: NDArray[np.bool_]) -> None:
        """Outcomes of nodes whose parents were reached: score [n], taken or not [n]."""
        bucket = _bucket(score)
        np.add.at(self._trials, bucket, 1.0)
        np.add.at(self._hits, bucket, taken.astype(np.float64))
        full = self._trials > MOST_TRIALS
        self._trials[full] /= 2
        self._hits[full] /= 2


def _bucket(score: FloatArray) -> NDArray[np.int64]:
    """Buckets of equal width in the square root of the probability: finer where most nodes are."""
    return np.minimum((np.exp(score.astype(np.float64) / 2) * BUCKETS).astype(np.int64), BUCKETS - 1)
