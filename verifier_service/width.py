"""How many nodes a step verifies. Pure: times and counts come in, numbers go out.

width       nodes of a session's tree that a step verifies; 0 is plain decoding.
T(rows)     seconds of a step over that many rows, measured at start and kept current.
gain        expected tokens of a step: one per session and the survival of every node verified.

All candidate nodes of the batch are sorted by survival and the n are admitted that maximise gain over time (the
admission argument of DSpark, carried over to trees). Survival falls along paths, so any cut leaves valid trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class StepTimes:
    """T(rows) by linear interpolation between measured points, and by the last slope beyond them.

    It need not rise: a matrix product of 2 rows may take longer than one of 8. All points drift together (longer
    contexts, a busier machine); a point's own correction is slow.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        self._rows = np.asarray(rows, np.float64)
        self._seconds = np.asarray(seconds, np.float64)
        self._drift = 1.0

    def observe(self, rows: int, seconds: float, drift_weight: float = 0.1, point_weight: float = 0.03) -> None:
        """Moves all points, and the two around ``rows`` a little more, towards a measured step."""
        scale = min(4.0, seconds / float(self(np.array([rows]))[0]))
        self._drift *= 1 + drift_weight * (scale - 1)
        right = int(np.clip(np.searchsorted(self._rows, rows), 0, len(self._rows) - 1))
        for point in {right, max(0, right - 1) if self._rows[right] > rows else right}:
            self._seconds[point] *= 1 + point_weight * (scale - 1)

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of steps over ``rows`` rows."""
        grid, seconds = self._rows, self._seconds
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (grid[-1] - grid[-2])) if len(grid) > 1 else seconds[0] / grid[0]
        out: NDArray[np.float64] = np.interp(rows, grid, seconds) + slope * np.maximum(0, rows - grid[-1])
        return out * self._drift


def admit(log_reach: Sequence[NDArray[np.float64]], fixed_rows: int, times: StepTimes, overhead_s: float) -> float:
    """The nodes that pay, as the lowest log survival admitted (+inf: none).

    ``log_reach[s]`` are the log survivals of session s's nodes, the anchor left out; ``fixed_rows`` are the rows that
    run anyway; ``overhead_s`` is what the step costs besides the forward (waiting for drafts, host work).
    """
    if not any(len(reach) for reach in log_reach):
        return np.inf
    reach = np.concatenate(log_reach)
    order = np.argsort(-reach, kind="stable")
    gain = len(log_reach) + np.concatenate([[0.0], np.cumsum(np.exp(reach[order]))])
    count = int(np.argmax(gain / (times(fixed_rows + np.arange(len(gain))) + overhead_s)))
    return float(reach[order[count - 1]]) if count else np.inf


@dataclass
class SpeculationGate:
    """Switches drafts off while they do not pay, all costs counted, and tries again after a while.

    The measured tokens per second of steps with drafts are held against sessions / T(sessions), what plain decoding
    would give. A choice is held for ``dwell`` steps, twice as long after each failed trial (vllm#49548 shows what the
    lack of such a hold does).
    """

    trial_steps: int = 16
    first_dwell: int = 32
    longest_dwell: int = 512
    worth: float = 1.0
    _tokens: float = 0.0
    _plain: float = 0.0
    _steps: int = 0
    _hold: int = 0
    _dwell: int = field(default=0)

    @property
    def open(self) -> bool:
        return self._hold == 0

    @property
    def advantage(self) -> float:
        """Tokens of recent steps with drafts over what plain decoding would have given in the same time."""
        return self._tokens / self._plain if self._plain else 1.0

    def record(self, tokens: int, seconds: float, plain_rate: float) -> None:
        """One finished step: tokens committed, seconds since the step before it, tokens/s of plain decoding."""
        if not self.open:
            self._hold -= 1
            return
        keep = 1 - 1 / self.trial_steps
        self._tokens = self._tokens * keep + tokens
        self._plain = self._plain * keep + seconds * plain_rate
        self._steps += 1
        if self._steps >= self.trial_steps and self.advantage < self.worth:
            self._dwell = min(self.longest_dwell, max(self.first_dwell, 2 * self._dwell))
            self._hold, self._steps, self._tokens, self._plain = self._dwell, 0, 0.0, 0.0
        elif self._steps >= 8 * self.trial_steps:
            self._dwell = 0

    def reset(self) -> None:
        """Forgets everything; call it when the load has changed."""
        self._tokens = self._plain = 0.0
        self._steps = self._hold = self._dwell = 0
