"""How many nodes a step verifies. Pure: times and counts come in, numbers go out.

width       nodes of a session's tree that a step verifies; 0 is plain decoding.
T(rows)     seconds of a step over that many rows, measured at start and kept current.
load level  bit length of the number of sessions in the step.
gain        expected tokens of a step: one per session and the survival of every node verified.

All candidate nodes of the batch are sorted by survival and the n are admitted that maximise gain over time (the
admission argument of DSpark, carried over to trees). Survival falls along paths, so any cut leaves valid trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SLOW = 0.02
"""Weight of one step in the usual time of steps with nodes, once there are many."""

DWELL_STEPS = 16
"""Steps for which the regime (load level, drafts on or off) is held at least."""

GRID = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Policy:
    """Caps that the router sets on top of the verifier's own settings; None: no cap, 0: plain decoding."""

    max_session_nodes: int | None = None
    max_step_nodes: int | None = None

    def session_nodes(self, own: int) -> int:
        """Most nodes of one session in a step, ``own`` being the verifier's limit."""
        return own if self.max_session_nodes is None else min(own, self.max_session_nodes)

    def step_nodes(self, own: int) -> int | None:
        """Most nodes of a step, ``own`` being the verifier's limit (0: none); None: no limit."""
        caps = [cap for cap in (own or None, self.max_step_nodes) if cap is not None]
        return min(caps, default=None)


class StepTimes:
    """T(rows) by linear interpolation between points measured at start, and by the last slope beyond them.

    It need not rise: a matrix product of 2 rows may take longer than one of 8. What the measurement lacks (attention
    over many sessions and long contexts, a busier machine) is a factor on all points, learnt from the steps of each
    load level.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        self._rows = np.asarray(rows, np.float64)
        self._seconds = np.asarray(seconds, np.float64)
        self._factors: dict[int, float] = {}
        self._plain_factors: dict[int, float] = {}
        self._tree_factors: dict[int, tuple[float, int]] = {}  # slow mean over steps with nodes, and their number

    def observe(self, rows: int, seconds: float, load: int, weight: float = 0.1, *, plain: bool = False) -> None:
        """Learns from a step of ``seconds`` over ``rows`` rows at a load level; ``plain``: one row a session."""
        if seconds <= 0:
            return
        factor = seconds / float(self._measured(np.array([rows]))[0])
        if plain:
            self._plain_factors[load] = _follow(self._plain_factors.get(load, factor), factor, 0.3, most=2)
        else:
            mean, count = self._tree_factors.get(load, (factor, 0))
            self._tree_factors[load] = _follow(mean, factor, max(SLOW, 1 / (count + 1)), most=2), count + 1
        factor = min(10.0, factor)
        self._factors[load] = _follow(self._factors.get(load, factor), factor, weight, most=4)

    def __call__(self, rows: NDArray[np.int64], load: int) -> NDArray[np.float64]:
        """Seconds of steps over ``rows`` rows at a load level."""
        return self._measured(rows) * self._factors.get(load, 1.0)

    def knows_plain(self, load: int) -> bool:
        """Whether a plain step has been seen at this load level."""
        return load in self._plain_factors

    def plain(self, sessions: int, load: int) -> float:
        """Seconds of a step of plain decoding."""
        factor = self._plain_factors.get(load, self._factors.get(load, 1.0))
        return float(self._measured(np.array([sessions]))[0]) * factor

    def drift(self, rows: int, seconds: float, load: int) -> float:
        """How many times its usual time a step with nodes took.

        That is the machine's doing and not the drafts': plain decoding would have taken as much longer.
        """
        if load not in self._tree_factors:
            return 1.0
        usual = float(self._measured(np.array([rows]))[0]) * self._tree_factors[load][0]
        return float(np.clip(seconds / usual, 0.5, 4.0))

    def _measured(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        grid, seconds = self._rows, self._seconds
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (grid[-1] - grid[-2])) if len(grid) > 1 else seconds[0] / grid[0]
        out: NDArray[np.float64] = np.interp(rows, grid, seconds) + slope * np.maximum(0, rows - grid[-1])
        return out


def _follow(mean: float, seen: float, weight: float, most: float) -> float:
    """Moves a running mean towards what was seen, which counts as ``most`` times the mean at most."""
    return mean + weight * (min(seen, most * mean) - mean)


def admit(log_reach: Sequence[NDArray[np.float64]], step_s: NDArray[np.float64], overhead_s: float) -> float:
    """The nodes that pay, as the lowest log survival admitted (+inf: none).

    ``log_reach[s]`` are the log survivals of session s's nodes, the anchor left out; ``step_s[n]`` is the time of a
    step with n nodes, for n from 0 to all of them; ``overhead_s`` is what it costs besides (waiting, host work).
    """
    if not any(len(reach) for reach in log_reach):
        return np.inf
    reach = np.concatenate(log_reach)
    order = np.argsort(-reach, kind="stable")
    gain = len(log_reach) + np.concatenate([[0.0], np.cumsum(np.exp(reach[order]))])
    count = int(np.argmax(gain / (step_s + overhead_s)))
    return float(reach[order[count - 1]]) if count else np.inf


@dataclass
class SpeculationGate:
    """Switches drafts off while they do not pay, all costs counted, and tries again after a while. One a load level.

    The measured tokens per second of steps with drafts are held against sessions / T(sessions), what plain decoding
    would give. A choice is held for ``dwell`` steps, twice as long after each failed trial (vllm#49548 shows what the
    lack of such a hold does).
    """

    trial_steps: int = 16
    settling_steps: int = 3  # not counted at the start of a trial: drafts catch up, their scores are not calibrated
    first_dwell: int = 32
    longest_dwell: int = 512
    worth: float = 1.0
    overhead_s: float = 0.0  # what a step with drafts costs besides the forward, mean of the last ones
    _tokens: float = 0.0
    _plain: float = 0.0
    _steps: int = 0
    _settled: int = 0
    _hold: int = 0
    _dwell: int = field(default=0)

    @property
    def open(self) -> bool:
        return self._hold == 0

    @property
    def advantage(self) -> float:
        """Tokens of recent steps with drafts over what plain decoding would have given in the same time."""
        return self._tokens / self._plain if self._plain else 1.0

    def record(
        self, tokens: int, seconds: float, forward_s: float, plain_rate: float, *, held: bool = False
    ) -> bool:
        """One finished step: tokens committed, seconds since the step before it, tokens/s of plain decoding.

        Returns whether drafts have been switched on or off by it; never while ``held``.
        """
        if not self.open:
            self._hold = max(self._hold - 1, int(held))
            return self.open
        if self._settled < self.settling_steps:
            self._settled += 1
            return False
        self.overhead_s += 0.1 * (max(0.0, seconds - forward_s) - self.overhead_s)
        keep = 1 - 1 / self.trial_steps
        self._tokens = self._tokens * keep + tokens
        self._plain = self._plain * keep + seconds * plain_rate
        self._steps += 1
        if self._steps >= self.trial_steps and self.advantage < self.worth and not held:
            self._dwell = min(self.longest_dwell, max(self.first_dwell, 2 * self._dwell))
            self._hold, self._steps, self._settled, self._tokens, self._plain = self._dwell, 0, 0, 0.0, 0.0
            return True
        if self._steps >= 8 * self.trial_steps:
            self._dwell = 0
        return False
