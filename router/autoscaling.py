"""How many workers each pool is to have. Pure: loads and times come in, decisions with their reasons go out.

signal      a measure of one pool over its target: 1 is as it should be, 2 is twice as much.
pressure    the largest signal of a pool.
need        workers at which the pressure would be right.

Each pool goes by signals of its own. A GPU's utilisation is none: it is near 100 % under any batching.

- *Fast loop*, every ``fast_s``: if the need has been above the size in two looks, the size becomes the need.
- *Slow loop*, every ``slow_s``: if the largest need of the last ``down_window_s``, by pressures smoothed over a few
  looks, is below the size, the size falls towards it by a quarter, at least by one. A pool that had to grow again soon
  after it has shrunk waits twice as long the next time. A window with a gap tells nothing and begins anew: the first
  looks after one, as when the routers were away, see few of the workers and little of the load.

So a pool grows within seconds and shrinks within minutes. Between ``SLACK`` and 1 the pressure changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from draftwood.config import AutoscalingSettings
from router.scaling import PoolLimits

SLACK = 0.7
"""Pressure below which fewer workers would do."""
MOST_GROWTH = 2.0
"""Factor by which one decision may grow a pool."""
CONFIRMING = 2
"""Looks in a row that must agree before a pool grows."""
SHRINK_SHARE = 0.25
MOST_PATIENCE = 4.0
MOST_GAP = 0.5
"""Of the down window that may pass between two looks."""
SMOOTH = 0.2
"""Weight of one look in the pressure that the slow loop goes by."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a ready worker's last load report says; fields of the other role are 0."""

    worker_id: str
    sessions: int  # running and waiting
    capacity: int  # 0: no limit
    queue_wait_ms: float = 0.0  # verifiers: how long the request that waits for longest has waited
    step_ms: float = 0.0
    steps: int = 0  # since the worker's start
    narrow_steps: int = 0  # of these, at the smallest width because of load
    pages_held: float = 0.0  # share of KV pages
    idle_share: float = 1.0  # drafts: share of the last second without work


@dataclass(frozen=True, slots=True)
class Look:
    """One pool at one time."""

    limits: PoolLimits
    wanted: int
    signals: Mapping[str, float]  # by name; empty: nobody is ready
    ready: int
    room: int | None = None  # most workers that there are nodes for; None: not known to be limited

    @property
    def pressure(self) -> float:
        return max(self.signals.values(), default=0.0)

    @property
    def need(self) -> int:
        """Workers that the pressure calls for; as many as are wanted if nobody is ready."""
        return self.need_at(self.pressure)

    def need_at(self, pressure: float) -> int:
        if not self.signals:
            return self.wanted
        if pressure > 1:
            return max(self.wanted, math.ceil(self.ready * min(pressure, MOST_GROWTH)))
        return min(max(self.ready, self.wanted), math.ceil(self.ready * pressure / SLACK))

    def clamp(self, count: int) -> int:
        """Within the pool's limits and the room; one worker stays, or nobody could tell what is needed."""
        most = count if self.room is None else min(count, max(self.room, 0))
        return max(self.limits.clamp(most), 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one pool, and why; ``inputs`` is all that it was decided from."""

    pool: str
    before: int
    wanted: int
    reason: str
    inputs: Mapping[str, float]

    @property
    def changes(self) -> bool:
        return self.wanted != self.before

    def __str__(self) -> str:
        told = ", ".join(f"{name} {value:.2f}" for name, value in self.inputs.items())
        return f"{self.before} to {self.wanted}: {self.reason} ({told})"


@dataclass(slots=True)
class Memory:
    """What is remembered of one pool."""

    last: deque[int] = field(default_factory=lambda: deque(maxlen=CONFIRMING))  # needs
    pressure: float | None = None  # smoothed
    needs: deque[tuple[float, int]] = field(default_factory=deque)  # by it, with their times, of the down window
    since_s: float | None = None  # since when there are needs without a gap
    grown_s: float = -math.inf
    shrunk_s: float = -math.inf
    patience: float = 1.0  # times the down window

    def window_s(self, settings: AutoscalingSettings) -> float:
        return settings.down_window_s * self.patience


class Autoscaler:
    """Decides for all pools together; called every ``fast_s``."""

    def __init__(self, settings: AutoscalingSettings, budget: float | None) -> None:
        self._settings = settings
        self._budget = budget
        self._memories: dict[str, Memory] = {}

    def decide(self, now: float, looks: Sequence[Look]) -> list[Decision]:
        """One decision a pool, in their order. The sizes decided on are taken to be carried out."""
        wished = {look.limits.name: self._wish(now, look) for look in looks}
        granted = within_budget(looks, {name: size for name, (size, _) in wished.items()}, self._budget)
        decisions = []
        for look in looks:
            name = look.limits.name
            size, reason = wished[name]
            if granted[name] < size:
                reason += f", but the budget of {self._budget:g} allows {granted[name]}"
            self._remember(now, look, granted[name])
            decisions.append(self._decision(look, granted[name], reason))
        return decisions

    def _wish(self, now: float, look: Look) -> tuple[int, str]:
        """The size that the pool should have if it were alone, and why."""
        memory = self._memories.setdefault(look.limits.name, Memory())
        if not look.wanted:
            return 0, "switched off"
        self._observe(now, look, memory)
        if look.wanted != (allowed := look.clamp(look.wanted)):
            return allowed, "its limits or the nodes allow no other size"
        grown = look.clamp(min(memory.last) if len(memory.last) == CONFIRMING else 0)
        if grown > look.wanted:
            if now - memory.grown_s < self._settings.rest_s:
                return look.wanted, "grew a moment ago"
            return grown, f"needs more: {_largest(look.signals)}"
        floor = look.clamp(max((need for _, need in memory.needs), default=look.wanted))
        if floor < look.wanted:
            return self._shrunk(now, look, memory, floor)
        held = look.need > look.wanted
        return look.wanted, "needs more, but its limits or the nodes allow none" if held else "as it should be"

    def _observe(self, now: float, look: Look, memory: Memory) -> None:
        latest = memory.needs[-1][0] if memory.needs else -math.inf
        if memory.since_s is None or now - latest > MOST_GAP * memory.window_s(self._settings):
            memory.needs.clear()
            memory.since_s = now
        memory.last.append(look.need)
        before = look.pressure if memory.pressure is None else memory.pressure
        memory.pressure = before + SMOOTH * (look.pressure - before)
        memory.needs.append((now, look.need_at(memory.pressure)))
        while memory.needs and memory.needs[0][0] <= now - memory.window_s(self._settings):
            memory.needs.popleft()

    def _shrunk(self, now: float, look: Look, memory: Memory, floor: int) -> tuple[int, str]:
        window_s = memory.window_s(self._settings)
        assert memory.since_s is not None
        if now - memory.since_s < window_s or now - memory.grown_s < window_s:
            return look.wanted, f"could be {floor}, but not for {window_s:g} s yet"
        if now - memory.shrunk_s < self._settings.slow_s:
            return look.wanted, f"could be {floor}, but shrank a moment ago"
        step = max(1, math.floor(SHRINK_SHARE * look.wanted))
        return max(floor, look.wanted - step), f"needs {floor} at most for {window_s:g} s"

    def _remember(self, now: float, look: Look, size: int) -> None:
        memory = self._memories[look.limits.name]
        window_s = memory.window_s(self._settings)
        if size > look.wanted:
            flapped = now - memory.shrunk_s < window_s
            memory.patience = min(2 * memory.patience, MOST_PATIENCE) if flapped else 1.0
            memory.grown_s = now
        elif size < look.wanted:
            memory.shrunk_s = now

    def _decision(self, look: Look, size: int, reason: str) -> Decision:
        memory = self._memories[look.limits.name]
        floor = max((need for _, need in memory.needs), default=0)
        books = {"ready": float(look.ready), "need": float(look.need), "most needed lately": float(floor)}
        if look.room is not None:
            books["room"] = float(look.room)
        return Decision(look.limits.name, look.wanted, size, reason, {**look.signals, **books})


def within_budget(looks: Sequence[Look], wished: Mapping[str, int], budget: float | None) -> dict[str, int]:
    """The sizes that the budget allows: what shrinks frees its cost, what grows does so worker by worker, the pool
    under the highest pressure for its size first. Nobody shrinks for another."""
    if budget is None:
        return dict(wished)
    granted = {look.limits.name: min(look.wanted, wished[look.limits.name]) for look in looks}
    spent = sum(look.limits.cost * granted[look.limits.name] for look in looks)
    while growing := [
        look
        for look in looks
        if granted[look.limits.name] < wished[look.limits.name] and spent + look.limits.cost <= budget
    ]:
        neediest = max(growing, key=lambda look: look.pressure * look.ready / max(granted[look.limits.name], 1))
        granted[neediest.limits.name] += 1
        spent += neediest.limits.cost
    return granted


class Signals:
    """Turns the load reports of a pool's workers into its signals."""

    def __init__(self, role: str, settings: AutoscalingSettings) -> None:
        self._role = role
        self._settings = settings
        self._counted: dict[str, tuple[int, int]] = {}  # steps and narrow steps of each worker at the last look

    def read(self, loads: Sequence[WorkerLoad]) -> dict[str, float]:
        """By name; empty if nobody is ready."""
        if not loads:
            return {}
        settings = self._settings
        sessions = _mean(load.sessions / load.capacity for load in loads if load.capacity)
        common = {"sessions": sessions / settings.sessions}
        if self._role == "draft":
            return {"busy": _mean(1 - load.idle_share for load in loads) / settings.draft_busy, **common}
        signals = {
            "queue wait": max(load.queue_wait_ms for load in loads) / settings.queue_wait_ms,
            "minimum width": self._narrow_share(loads) / settings.narrow_share,
            "pages held": _mean(load.pages_held for load in loads) / settings.pages_held,
            **common,
        }
        if settings.step_ms:
            signals["step time"] = _mean(load.step_ms for load in loads) / settings.step_ms
        return signals

    def _narrow_share(self, loads: Sequence[WorkerLoad]) -> float:
        """Of the steps since the last look, those at the smallest width."""
        steps = narrow = 0
        for load in loads:
            before = self._counted.get(load.worker_id, (load.steps, load.narrow_steps))
            steps += max(load.steps - before[0], 0)
            narrow += max(load.narrow_steps - before[1], 0)
        self._counted = {load.worker_id: (load.steps, load.narrow_steps) for load in loads}
        return narrow / steps if steps else 0.0


def _largest(signals: Mapping[str, float]) -> str:
    return max(signals, key=lambda name: signals[name])


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
