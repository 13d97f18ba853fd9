"""How many nodes a step verifies. Pure: times and counts come in, numbers go out.

width       nodes of a session's tree that a step verifies; 0 is plain decoding.
T(rows)     seconds of a step over that many rows, measured at start and kept current.
load level  bit length of the number of sessions in the step.
gain        expected tokens of a step: one per session and the survival of every node verified.

All candidate nodes of the batch are sorted by survival and the n are admitted that maximise gain over time (the
admission argument of DSpark, carried over to trees). Survival falls along paths, so any cut leaves valid trees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

SLOW = 0.02
"""Weight of one step in the usual time of steps with nodes, once there are many."""

DWELL_STEPS = 12
"""Steps for which drafts stay on or off at least."""

SHUT_BELOW, OPEN_ABOVE = 1.0, 1.02
"""Advantages over plain decoding at which drafts are switched off and on."""

CLEARLY, CLEAR_STEPS = 1.1, 8
"""Measured advantage at which drafts that are on stay so, and steps that it takes to measure it."""

WARY, MOST_WARY = 0.04, 5
"""How much more of an advantage must be predicted for each time in a row that drafts were on and lost time."""

TRIAL_SHARE = 0.02
"""Of the time, at most, that goes to finding out again that drafts do not pay."""

SETTLING_STEPS = 3
"""Steps after switching on that do not count: drafts catch up, their scores are not calibrated."""

SMOOTH = 0.1
"""Weight of one step in the running means."""

CARRIED_STEPS = 4.0
"""Steps that what is known already counts for when drafts are switched on, or a load level is new: the first steps
after that, and those mostly of prefill, tell little alone."""

FOLLOW, HESITATE, FOLLOW_STEPS = 0.25, 0.04, 20
"""Weights of one step in the advantage: while drafts are on and for so many steps at a new load level, and else.

Predictions for drafts that are off swing with every session that comes and goes, and nothing corrects them.
"""

PRIOR_TOKENS, TOKEN_STEPS = 64.0, 256
"""Tokens that are taken to have come as expected at first, and steps over which those written are counted."""

LEAST_PLAIN_STEPS, PLAIN_STEPS, OVERHEAD_STEPS = 3, 5, 15
"""Last steps whose median is the time of plain decoding, and what drafts cost besides the forward: one step that was
held up must not keep drafts off, as nothing is learnt while they are."""

GRID = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)


Factor = TypeVar("Factor")
Default = TypeVar("Default")


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
        self._plain_factors: dict[int, deque[float]] = {}  # of the last plain steps; the median counts
        self._tree_factors: dict[int, tuple[float, int]] = {}  # slow mean over steps with nodes, and their number

    def observe(self, rows: int, seconds: float, load: int, weight: float = 0.1, *, plain: bool = False) -> None:
        """Learns from a step of ``seconds`` over ``rows`` rows at a load level; ``plain``: one row a session."""
        if seconds <= 0:
            return
        factor = seconds / float(self.at_start(np.array([rows]))[0])
        if plain:
            self._plain_factors.setdefault(load, deque(maxlen=PLAIN_STEPS)).append(factor)
        else:
            mean, count = self._tree_factors.get(load, (factor, 0))
            self._tree_factors[load] = _follow(mean, factor, max(SLOW, 1 / (count + 1)), most=2), count + 1
        factor = min(10.0, factor)
        self._factors[load] = _follow(self._factors.get(load, factor), factor, weight, most=4)

    def __call__(self, rows: NDArray[np.int64], load: int) -> NDArray[np.float64]:
        """Seconds of steps over ``rows`` rows at a load level."""
        return self.at_start(rows) * self.slowness(load)

    def knows_plain(self, load: int) -> bool:
        """Whether enough plain steps have been seen at this load level."""
        return len(self._plain_factors.get(load, ())) >= LEAST_PLAIN_STEPS

    def plain(self, sessions: int, load: int) -> float:
        """Seconds of a step of plain decoding."""
        seen = _nearest(self._plain_factors, load, None)
        factor = median(seen) if seen else self.slowness(load)
        return float(self.at_start(np.array([sessions]))[0]) * factor

    def drift(self, rows: int, seconds: float, load: int) -> float:
        """How many times its usual time a step with nodes took.

        That is the machine's doing and not the drafts': plain decoding would have taken as much longer.
        """
        if load not in self._tree_factors:
            return 1.0
        usual = float(self.at_start(np.array([rows]))[0]) * self._tree_factors[load][0]
        return float(np.clip(seconds / usual, 0.5, 4.0))

    def slowness(self, load: int) -> float:
        """How many times as long as at the start steps take lately at this load level."""
        return _nearest(self._factors, load, 1.0)

    def at_start(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """T(rows) as it was measured."""
        grid, seconds = self._rows, self._seconds
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (grid[-1] - grid[-2])) if len(grid) > 1 else seconds[0] / grid[0]
        out: NDArray[np.float64] = np.interp(rows, grid, seconds) + slope * np.maximum(0, rows - grid[-1])
        return out


def _nearest(factors: dict[int, Factor], load: int, default: Default) -> Factor | Default:
    """What is known of the load level, or of the one next to it of which something is."""
    return factors[min(factors, key=lambda known: abs(known - load))] if factors else default


def _follow(mean: float, seen: float, weight: float, most: float) -> float:
    """Moves a running mean towards what was seen, which counts as ``most`` times the mean at most."""
    return mean + weight * (min(seen, most * mean) - mean)


def admit(
    log_reach: Sequence[NDArray[np.float64]], step_s: NDArray[np.float64], overhead_s: float, prefill: float = 0.0
) -> float:
    """The nodes that pay, as the lowest log survival admitted (+inf: none).

    ``log_reach[s]`` are the log survivals of session s's nodes, the anchor left out; ``step_s[n]`` is the time of a
    step with n nodes, for n from 0 to all of them; ``overhead_s`` is what it costs besides (waiting, host work).
    ``prefill`` is what the step's chunk is worth, in tokens: nodes make it wait, too.
    """
    if not any(len(reach) for reach in log_reach):
        return np.inf
    reach = np.concatenate(log_reach)
    order = np.argsort(-reach, kind="stable")
    gain = len(log_reach) + prefill + np.concatenate([[0.0], np.cumsum(np.exp(reach[order]))])
    count = int(np.argmax(gain / (step_s + overhead_s)))
    return float(reach[order[count - 1]]) if count else np.inf


@dataclass(frozen=True, slots=True)
class Situation:
    """Who is served: decoding sessions, the load level, and nodes that a session may have verified.

    ``reading`` sessions have prefill left, and a chunk of it takes ``chunk_s``.
    """

    sessions: int
    load: int
    share: int
    reading: int = 0
    chunk_s: float = 0.0


class Outlook:
    """What drafts would be worth at any load: the advantage over plain decoding that T and the usual trees predict."""

    def __init__(self, most_nodes: int) -> None:
        self.overhead_s = 0.0  # what a step with drafts costs besides the forward, median of the last ones
        self._overheads: deque[float] = deque(maxlen=OVERHEAD_STEPS)
        self._plain_overheads: dict[int, deque[float]] = {}  # by load level
        self._written, self._expected = PRIOR_TOKENS, PRIOR_TOKENS  # tokens of the last few hundred steps with nodes
        self._gain = np.zeros(most_nodes + 1)  # by width: tokens that a session's nodes add to a step
        self._looks = 0

    def observe(self, log_reach: Sequence[NDArray[np.float64]]) -> None:
        """Learns from the candidates of one step: the log survivals of each session's nodes."""
        drawn = [reach for reach in log_reach if len(reach)]
        if not drawn:
            return
        counts = np.array([len(reach) for reach in drawn])
        falling = np.full((len(drawn), len(self._gain) - 1), np.inf)
        for row, reach in zip(falling, drawn, strict=True):
            row[: len(reach)] = -reach
        falling.sort(axis=1)
        gain = np.cumsum(np.exp(-falling), axis=1)
        unknown = np.arange(falling.shape[1]) >= counts[:, None]
        gain = np.where(unknown, np.maximum(gain, self._gain[1:]), gain)
        self._looks += 1
        self._gain[1:] += max(SMOOTH, 1 / self._looks) * (gain.mean(axis=0) - self._gain[1:])

    @property
    def truth(self) -> float:
        """Tokens written for each one expected: the best of many estimates are more often too high than too low."""
        return self._written / self._expected

    def observe_tokens(self, written: int, expected: float) -> None:
        keep = 1 - 1 / TOKEN_STEPS
        self._written, self._expected = self._written * keep + written, self._expected * keep + expected

    def observe_overhead(self, seconds: float) -> None:
        self._overheads.append(max(0.0, seconds))
        self.overhead_s = median(self._overheads)

    def observe_plain_overhead(self, seconds: float, load: int) -> None:
        self._plain_overheads.setdefault(load, deque(maxlen=OVERHEAD_STEPS)).append(max(0.0, seconds))

    def plain_overhead_s(self, load: int) -> float:
        """What a step without drafts costs besides the forward, at a load level: planning, answers.

        On a GPU that is a good part of a step. Steps with drafts have it as well.
        """
        seen = _nearest(self._plain_overheads, load, None)
        return median(seen) if seen else 0.0

    def advantage(self, at: Situation, times: StepTimes) -> float:
        """Work a second with drafts over that without, at the best width that the share allows.

        A chunk of prefill is worth its time, a token what one costs once all sessions decode: while most of them
        still read, drafts for the few others keep all of those waiting.
        By T as it was at the start: what has been learnt since comes and goes with the machine's other work, and not
        at the same time for plain steps, which are rare while drafts are on.
        """
        gain = self._gain[: at.share + 1]
        decode_s = times.at_start(at.sessions * (1 + np.arange(len(gain))))
        everyone, slowness, plain_s = at.sessions + at.reading, times.slowness(at.load), self.plain_overhead_s(at.load)
        token_s = (times.at_start(np.array([everyone])) + plain_s / slowness) / everyone
        work = at.sessions * (1 + gain) * token_s + at.chunk_s
        rate = work / (decode_s + at.chunk_s + max(self.overhead_s, plain_s) / slowness)
        return float(rate.max() * (decode_s[0] + at.chunk_s + plain_s / slowness) / work[0])


@dataclass(slots=True)
class _Level:
    """Steps with drafts at a load level, means."""

    earned: float
    took: float
    owed: float  # what had been predicted of a step that takes as long
    seen: float = 0.0  # weight of the steps since drafts were switched on

    def record(self, earned: float, took: float, predicted: float, weight: float) -> None:
        self.seen += weight
        share = weight * max(SMOOTH, 1 / (CARRIED_STEPS + self.seen))
        self.earned += share * (earned - self.earned)
        self.took += share * (took - self.took)
        self.owed += share * (predicted * took - self.owed)

    @property
    def shortfall(self) -> float:
        return self.earned / self.owed

    @property
    def pays(self) -> bool:
        """Whether drafts clearly do, whatever is predicted: a prediction that has just become better falls too far,
        as what falls short was learnt from the ones before."""
        return self.seen >= CLEAR_STEPS and self.earned > CLEARLY * self.took


@dataclass(slots=True)
class _Trials:
    """What came of having drafts on at a load level."""

    hold: int = 0  # steps for which they stay off after the last time
    failures: int = 0  # times in a row that they lost time
    lost: float = 0.0  # since they were switched on, in plain steps: time that they have cost more than earned

    def end(self, first_hold: int, longest_hold: int) -> None:
        """Drafts are switched off."""
        self.hold = max(min(longest_hold, max(first_hold, 2 * self.hold)), int(self.lost / TRIAL_SHARE))
        self.failures = self.failures + 1 if self.lost > 0 else 0


@dataclass
class SpeculationGate:
    """Switches drafts off while they do not pay, all costs counted, and tries again after a while.

    The advantage is the predicted one at the present load, times how far the steps with drafts at that load have
    fallen short of their predictions; of a load not seen yet, what fell short at the nearest is taken, and half as
    much for each level between. Drafts go off below ``SHUT_BELOW``, unless what was measured says clearly that they
    pay, and on above ``OPEN_ABOVE``, or ``WARY`` more for each failure in a row, and every choice is held for
    ``DWELL_STEPS`` (vllm#49548 shows what the lack of such a hold does). As drafts that are off teach nothing, they
    are tried again after ``first_hold`` steps, and after twice as many each time that fails; but only when so many
    steps have passed that the time lost by the trial is no more than ``TRIAL_SHARE`` of theirs. What trials taught of a
    load says half as much of the next one, as above.
    """

    first_hold: int = 160
    longest_hold: int = 1280
    open: bool = True
    advantage: float = 1.0  # at the present load
    _steps: int = 0  # since the last change
    _settling: int = SETTLING_STEPS
    _records: int = 0  # since it was opened
    _levels: dict[int, _Level] = field(default_factory=dict)
    _trials: dict[int, _Trials] = field(default_factory=dict)
    _smooth: float = 0.0  # log advantage
    _load: int = -1
    _load_steps: int = 0  # at this load level

    def record(self, earned: float, took: float, predicted: float, load: int, weight: float = 1.0) -> None:
        """A step with drafts: its work and its time, each as a multiple of a plain step's, and the advantage predicted.

        Means of work and time are held against each other and not the mean of their ratios, as steps in which few
        of the sessions are ready alternate with those of all others. ``weight``, at most 1, is how much the step
        tells of its load.
        """
        if self.open:
            self._trials.setdefault(load, _Trials()).lost += took - earned
        if not self.open or self._settling:
            self._settling = max(0, self._settling - 1)
            return
        self._records += 1
        if load not in self._levels:
            self._levels[load] = _Level(predicted * took * float(np.exp(self._shortfall(load))), took, predicted * took)
        self._levels[load].record(earned, took, predicted, weight)

    def step(self, predicted: float, load: int) -> None:
        """One step has passed; ``predicted`` is the advantage predicted at the load of now."""
        self._steps += 1
        now = float(np.log(predicted)) + self._shortfall(load)
        self._load, self._load_steps = load, self._load_steps + 1 if load == self._load else 0
        weight = FOLLOW if self.open or self._load_steps < FOLLOW_STEPS else HESITATE
        self._smooth = self._smooth + weight * (now - self._smooth) if self._load_steps else now
        self.advantage = float(np.exp(self._smooth))
        if self._steps < DWELL_STEPS or (self.open and self._records < DWELL_STEPS - SETTLING_STEPS):
            return
        doubt = 0.05 if self._records < 2 * DWELL_STEPS and predicted > SHUT_BELOW else 0.0
        pays = load in self._levels and self._levels[load].pays
        if self.open and self.advantage < SHUT_BELOW - doubt and not pays:
            self._trials.setdefault(load, _Trials())
            for level, trials in self._trials.items():
                if level == load or trials.lost > 0:
                    trials.end(self.first_hold, self.longest_hold)
            self._change()
        elif not self.open:
            hold, failures = self._lessons(load)
            likely = self.advantage > OPEN_ABOVE + WARY * min(failures, MOST_WARY)
            if likely or self._steps >= hold:
                if likely and load in self._trials:
                    self._trials[load].hold = 0
                self._change()
        elif self._steps >= 8 * DWELL_STEPS and load in self._trials:
            self._trials[load].hold = 0

    def _lessons(self, load: int) -> tuple[float, float]:
        """Steps for which drafts stay off, and the number of failures that count."""
        if not self._trials:
            return self.first_hold, 0
        nearest = min(self._trials, key=lambda known: abs(known - load))
        share = 0.5 ** abs(nearest - load)
        return max(self.first_hold, self._trials[nearest].hold * share), self._trials[nearest].failures * share

    def _shortfall(self, load: int) -> float:
        """Log of measured over predicted."""
        if not self._levels:
            return 0.0
        nearest = min(self._levels, key=lambda known: abs(known - load))
        return float(np.log(self._levels[nearest].shortfall)) * 0.5 ** abs(nearest - load)

    def _change(self) -> None:
        self.open, self._steps = not self.open, 0
        if self.open:
            self._records, self._settling = 0, SETTLING_STEPS
            for level in self._levels.values():
                level.seen = 0.0
            for trials in self._trials.values():
                trials.lost = 0.0
