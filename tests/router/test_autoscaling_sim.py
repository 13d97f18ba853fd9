"""The autoscaler over time: 100 seeded scenarios of two pools whose demand steps up and down.

A scenario has three stretches of constant mean demand, with arrivals and durations at random, and workers that take
their time to start. Bounds, of every scenario:

- up: the pool has what the new demand needs within ``up_bound_s``: for each doubling that is missing, two looks, the
  start of a worker and the rest after growing, and a moment for sessions to build up.
- down: it is within one worker of what the lower demand needs at its peaks, by the autoscaler's own slack, within
  ``down_bound_s``: the window, and ``slow_s`` for each step down.
- oscillation: at constant demand, once settled, the size turns at most ``MOST_TURNS`` times.
- the limits and the budget hold at every moment.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from draftwood.config import AutoscalingSettings
from router.autoscaling import MOST_PATIENCE, SLACK, Autoscaler, Look, Signals, WorkerLoad
from router.scaling import PoolLimits

SCENARIOS = 100
TICK_S = 2.0
STRETCH_S = 600.0
SETTINGS = AutoscalingSettings(mode="on", fast_s=TICK_S, down_window_s=60.0, slow_s=10.0, rest_s=10.0)
TEXT_S = 15.0
PEAK = 2.5
"""Standard deviations of demand above its mean that a stretch reaches now and then."""
MOST_TURNS = 2
MOST_LATE = 0.15
"""Share of the scenarios in which the pool had flapped before, so that the window was longer."""
BUDGET = 60.0


@dataclass
class Pool:
    """Verifiers or draft workers over one stream of sessions; each worker has ``slots``."""

    limits: PoolLimits
    slots: int
    start_s: float
    share: float  # of the sessions' load that this pool bears: 1 is all slots taken when all sessions run
    wanted: int
    ready: int = 0
    starting: list[float] = field(default_factory=list)  # when each will be ready
    sizes: list[int] = field(default_factory=list)

    def advance(self, now: float) -> None:
        """As the controller does: starts what lacks, lets go what is too many, those that start first."""
        while self.ready + len(self.starting) < self.wanted:
            self.starting.append(now + self.start_s)
        while self.ready + len(self.starting) > self.wanted:
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1
        self.ready += sum(at <= now for at in self.starting)
        self.starting = [at for at in self.starting if at > now]


class World:
    """One scenario."""

    def __init__(self, seed: int, settings: AutoscalingSettings = SETTINGS) -> None:
        rng = self.rng = random.Random(seed)
        self.settings = settings
        self.now = 0.0
        demands = [rng.uniform(0.5, 2.5), rng.uniform(3.0, 9.0), rng.uniform(0.5, 2.5)]
        self.demands = demands if seed % 2 else [demands[1], demands[0], demands[1] * 0.7 + 1]  # in verifiers' slots
        slots = rng.choice([8, 16, 32])
        first = max(1, round(self.demands[0] / 0.85))
        self.verifiers = Pool(PoolLimits("verifier", "verifier", 1, 16, 2.0), slots, rng.uniform(4, 40), 1.0, first)
        self.drafts = Pool(
            PoolLimits("draft", "draft", 1, 16, 1.0), slots, rng.uniform(2, 15), rng.uniform(0.3, 1), first
        )
        self.pools = [self.verifiers, self.drafts]
        for pool in self.pools:
            pool.ready = pool.wanted
        self.autoscaler = Autoscaler(settings, BUDGET)
        self.signals = [Signals(pool.limits.role, settings) for pool in self.pools]
        self.running: list[float] = []  # when each ends
        self.waiting: deque[float] = deque()  # when each came
        self.steps = self.narrow = 0

    def run(self) -> None:
        while self.now < 3 * STRETCH_S:
            self.now += TICK_S
            self._sessions()
            for pool in self.pools:
                pool.advance(self.now)
            looks = [
                Look(pool.limits, pool.wanted, signals.read(self._loads(pool)), pool.ready)
                for pool, signals in zip(self.pools, self.signals, strict=True)
            ]
            for pool, decision in zip(self.pools, self.autoscaler.decide(self.now, looks), strict=True):
                pool.wanted = decision.wanted
                pool.sizes.append(pool.wanted)
                assert pool.limits.clamp(pool.wanted) == pool.wanted
            assert sum(pool.limits.cost * pool.wanted for pool in self.pools) <= BUDGET

    def _demand(self) -> float:
        return self.demands[min(int(self.now / STRETCH_S), 2)]

    def _sessions(self) -> None:
        self.running = [end for end in self.running if end > self.now]
        mean = self._demand() * self.verifiers.slots / TEXT_S * TICK_S
        arrivals = max(0, round(self.rng.gauss(mean, math.sqrt(mean))))
        self.waiting.extend([self.now] * arrivals)
        slots = self.verifiers.ready * self.verifiers.slots
        while self.waiting and len(self.running) < slots:
            self.waiting.popleft()
            self.running.append(self.now + self.rng.expovariate(1 / TEXT_S))

    def _loads(self, pool: Pool) -> list[WorkerLoad]:
        """Sessions spread evenly; above three quarters of its slots a verifier has no time for drafts."""
        if not pool.ready:
            return []
        slots = pool.ready * pool.slots
        if pool is self.drafts:
            busy = min(1.0, len(self.running) * pool.share / slots)
            told = spread(round(len(self.running) * pool.share), pool.ready)
            return [WorkerLoad(f"d{k}", each, pool.slots, idle_share=1 - busy) for k, each in enumerate(told)]
        load = (len(self.running) + len(self.waiting)) / slots
        self.steps += 100
        self.narrow += 100 if load > 0.95 else 0
        wait_ms = (self.now - self.waiting[0]) * 1e3 if self.waiting else 0.0
        sessions = len(self.running) + len(self.waiting)
        return [
            WorkerLoad(f"v{k}", each, pool.slots, wait_ms, 20.0, self.steps, self.narrow, min(load, 1.0))
            for k, each in enumerate(spread(sessions, pool.ready))
        ]

    def needed(self, stretch: int, deviations: float = 0.0) -> float:
        """Verifiers at which the sessions' signal is at its target, with so many standard deviations of demand more."""
        deviation = math.sqrt(self.demands[stretch] / self.verifiers.slots)
        return (self.demands[stretch] + deviations * deviation) / self.settings.sessions

    def sizes(self, stretch: int) -> list[int]:
        each = int(STRETCH_S / TICK_S)
        return self.verifiers.sizes[stretch * each : (stretch + 1) * each]


def spread(sessions: int, workers: int) -> list[int]:
    return [sessions // workers + (k < sessions % workers) for k in range(workers)]


def up_bound_s(world: World, stretch: int) -> float:
    doublings = math.ceil(math.log2(max(world.needed(stretch) / max(world.sizes(stretch - 1)[-1], 1), 1))) + 1
    return 2 * TEXT_S + doublings * (2 * TICK_S + SETTINGS.rest_s + world.verifiers.start_s)


def down_bound_s(world: World, stretch: int, patience: float) -> float:
    steps = world.sizes(stretch - 1)[-1] - math.ceil(world.needed(stretch))
    return 4 * TEXT_S + patience * SETTINGS.down_window_s + (steps + 1) * SETTINGS.slow_s


def first_s(sizes: list[int], low: float, high: float) -> float:
    """When the size is first within; infinity if never."""
    return next((k * TICK_S for k, size in enumerate(sizes) if low <= size <= high), math.inf)


def turns(sizes: list[int]) -> int:
    changes = [b - a for a, b in pairwise(sizes) if b != a]
    return sum((a > 0) != (b > 0) for a, b in pairwise(changes))


def worlds() -> list[World]:
    made = [World(seed) for seed in range(SCENARIOS)]
    for world in made:
        world.run()
    return made


@pytest.fixture(scope="module")
def ran() -> list[World]:
    return worlds()


def test_it_has_what_is_needed_soon_after_demand_rises(ran: list[World]) -> None:
    took = []
    for seed, world in enumerate(ran):
        stretch = 1 if seed % 2 else 2
        least = math.floor(world.needed(stretch))
        seconds = first_s(world.sizes(stretch), least, math.inf)
        took.append(seconds)
        assert seconds <= up_bound_s(world, stretch), (seed, seconds)
    print(f"up: mean {sum(took) / len(took):.0f} s, longest {max(took):.0f} s")


def test_it_gives_back_what_is_not_needed_soon_after_demand_falls(ran: list[World]) -> None:
    took, late = [], 0
    for seed, world in enumerate(ran):
        stretch = 2 if seed % 2 else 1
        most = math.ceil(world.needed(stretch, PEAK) / SLACK) + 1
        seconds = first_s(world.sizes(stretch), 0, most)
        took.append(seconds)
        late += seconds > down_bound_s(world, stretch, 1.0)
        assert seconds <= down_bound_s(world, stretch, MOST_PATIENCE), (seed, seconds)
    print(f"down: mean {sum(took) / len(took):.0f} s, longest {max(took):.0f} s, {late} needed patience")
    assert late <= SCENARIOS * MOST_LATE


def test_it_does_not_oscillate_at_constant_demand(ran: list[World]) -> None:
    seen = []
    for world in ran:
        for stretch in range(3):
            settled = world.sizes(stretch)[len(world.sizes(stretch)) // 2 :]
            seen.append(turns(settled))
    print(f"turns in {STRETCH_S / 2:.0f} s: mean {sum(seen) / len(seen):.2f}, most {max(seen)}")
    assert max(seen) <= MOST_TURNS


def test_once_settled_nobody_waits(ran: list[World]) -> None:
    """The size is never below what is needed, but for a moment."""
    for seed, world in enumerate(ran):
        for stretch in range(3):
            settled = world.sizes(stretch)[len(world.sizes(stretch)) // 2 :]
            short = sum(size < math.floor(world.needed(stretch)) for size in settled) / len(settled)
            assert short <= 0.05, (seed, stretch, short)


def test_draft_workers_follow_their_own_signals(ran: list[World]) -> None:
    """Of two worlds alike but for what drafting costs, the one with dearer drafting has more draft workers."""
    for world in ran:
        settled = world.drafts.sizes[-20:]
        needed = world.demands[2] * world.drafts.share / SETTINGS.draft_busy
        assert needed - 1 <= sum(settled) / 20 <= needed / 0.7 + 3


def test_a_scenario_is_a_function_of_its_seed() -> None:
    one, two = World(7), World(7)
    one.run()
    two.run()
    assert one.verifiers.sizes == two.verifiers.sizes and one.drafts.sizes == two.drafts.sizes
