"""The width policy over time: 100 seeded scenarios of verifiers and draft workers whose load steps up and down.

The policy is the real one. A simulated verifier takes as many nodes as pay by its own step times, as a gate does, and
no more than its cap; a step takes longer the more rows it has; draft workers take a forward a level for all their
sessions, and are shared by all verifiers. A scenario has three stretches of constant mean load, the middle one heavy.
Bounds, of every scenario unless a mean is named, are below.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from draftwood.config import WidthPolicySettings
from router.width_policy import Caps, DraftLook, VerifierLook, WidthPolicy

SCENARIOS = 100
STRETCH_S = 180
MOST_TURNS = 4
"""Turns of a verifier's caps in the second half of a stretch."""
WITHIN_TARGET = 0.9
"""Share of the looks of that half in which a step keeps its target, within a tenth."""
RECOVERED_MEAN_S, RECOVERED_MOST_S = 60.0, 120.0
"""From the end of the heavy load until no cap is left."""
NARROWED_MOST_S = 20.0
"""From its beginning until a cap is set, if one is needed."""
NOISE = 0.03
GAIN = 2.5 * (1 - np.exp(-np.arange(65) / 10))  # tokens that w nodes add to a session's step


@dataclass
class Verifier:
    base_ms: float
    row_ms: float
    slots: int
    demand: float = 0.0  # sessions that there are, those that wait included
    cap: Caps = field(default_factory=Caps)
    steps: float = 0.0
    nodes: float = 0.0
    waited_ms: float = 0.0
    history: list[Caps] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)

    @property
    def running(self) -> int:
        return max(1, min(round(self.demand), self.slots))

    def times_ms(self) -> np.ndarray:
        """Of steps with 0 to 64 nodes a session."""
        return self.base_ms + self.row_ms * self.running * (1 + np.arange(65))

    @property
    def width(self) -> int:
        """What pays, and no more than the cap."""
        own = int(np.argmax(self.running * (1 + GAIN) / self.times_ms()))
        return own if self.cap.nodes is None else min(own, self.cap.nodes)

    def levels(self) -> int:
        """Forwards of a round."""
        own = self.width if self.cap.chain else 1 + self.width // 3
        return min(own, 8 if self.cap.depth is None else self.cap.depth)


class World:
    """One scenario."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        base_ms, row_ms, slots = rng.uniform(5, 40), rng.uniform(0.02, 0.3), rng.choice([16, 32, 64])
        self.verifiers = [Verifier(base_ms, row_ms, slots) for _ in range(rng.randint(1, 4))]
        self.workers, self.level_ms = rng.randint(1, 3), rng.uniform(1, 4)
        light, heavy = 2.0, slots * rng.uniform(0.8, 2.0)
        self.demands = [light, heavy, light]
        at_light, at_heavy = (Verifier(base_ms, row_ms, slots, demand) for demand in (light, heavy))
        self.target_ms = max(  # with room at a light load, and for the fewest nodes at the heavy one
            1.2 * float(at_light.times_ms()[at_light.width]), 1.15 * float(at_heavy.times_ms()[2])
        )
        self.settings = WidthPolicySettings(step_ms=self.target_ms)
        self.policy = WidthPolicy(self.settings)

    def run(self) -> None:
        for second in range(3 * STRETCH_S):
            demand = self.demands[second // STRETCH_S]
            for verifier in self.verifiers:
                verifier.demand = max(1.0, self.rng.gauss(demand, demand**0.5 / 4))
            self.look(float(second))

    def look(self, now: float) -> None:
        looks = []
        for k, verifier in enumerate(self.verifiers):
            step_ms = float(verifier.times_ms()[verifier.width]) * self.rng.gauss(1, NOISE)
            verifier.step_times.append(step_ms)
            verifier.waited_ms = verifier.waited_ms + 1e3 if verifier.demand > verifier.slots + 1 else 0.0
            verifier.steps += 1e3 / step_ms
            verifier.nodes += 1e3 / step_ms * verifier.running * verifier.width
            counted = round(verifier.steps), round(verifier.nodes)
            looks.append(VerifierLook(f"v{k}", "m", verifier.running, verifier.waited_ms, step_ms, *counted))
        decisions = self.policy.decide(now, looks, {"m": self.drafts()})
        for look, verifier in zip(looks, self.verifiers, strict=True):
            verifier.cap = decisions[look.key].caps
            verifier.history.append(verifier.cap)

    def drafts(self) -> list[DraftLook]:
        sessions = sum(verifier.running for verifier in self.verifiers) // self.workers
        round_ms = max(v.levels() for v in self.verifiers) * self.level_ms * (1 + sessions / 40)
        busy = min(1.0, len(self.verifiers) / self.workers * round_ms / self.verifiers[0].step_times[-1])
        return [DraftLook("lm", sessions, busy) for _ in range(self.workers)]


@pytest.fixture(scope="module")
def ran() -> list[World]:
    return worlds()


def worlds() -> list[World]:
    made = [World(seed) for seed in range(SCENARIOS)]
    for world in made:
        world.run()
    return made


def stretch(history: list[Caps], k: int) -> list[Caps]:
    return history[k * STRETCH_S : (k + 1) * STRETCH_S]


def turns(history: list[Caps]) -> int:
    """Changes of direction of the cap on nodes."""
    sizes = [64 if caps.nodes is None else caps.nodes for caps in history]
    ways = [b > a for a, b in pairwise(sizes) if b != a]
    return sum(a != b for a, b in pairwise(ways))


def recovered_s(world: World) -> int:
    """From the end of the heavy load until the last cap on nodes is lifted."""
    late = [stretch(v.history, 2) for v in world.verifiers]
    return max(next((k for k, caps in enumerate(each) if caps.nodes is None), STRETCH_S) for each in late)


def most_turns(world: World) -> int:
    halves = [stretch(v.history, k)[STRETCH_S // 2 :] for v in world.verifiers for k in range(3)]
    return max(map(turns, halves))


def test_a_light_load_has_no_cap_on_nodes(ran: list[World]) -> None:
    for seed, world in enumerate(ran):
        for verifier in world.verifiers:
            assert all(caps.nodes is None for caps in stretch(verifier.history, 0)), seed


def test_a_heavy_load_is_narrowed_until_steps_keep_their_target(ran: list[World]) -> None:
    told = 0
    for seed, world in enumerate(ran):
        for verifier in world.verifiers:
            heavy, times = stretch(verifier.history, 1), verifier.step_times[STRETCH_S : 2 * STRETCH_S]
            pressed = next((k for k, ms in enumerate(times) if ms > 1.1 * world.target_ms), None)
            if pressed is not None:
                first = next(k for k, caps in enumerate(heavy) if caps.nodes is not None)
                assert first - pressed <= NARROWED_MOST_S, seed
                kept = [ms <= 1.1 * world.target_ms for ms in times[STRETCH_S // 2 :]]
                assert sum(kept) >= WITHIN_TARGET * len(kept), (seed, sum(kept) / len(kept))
                told += 1
    print(f"{told} verifiers pressed")
    assert told > SCENARIOS / 4, "enough of the scenarios need it"


def test_caps_are_gone_soon_after_the_heavy_load(ran: list[World]) -> None:
    took = [recovered_s(world) for world in ran if any(c.nodes for v in world.verifiers for c in v.history)]
    print(f"{len(took)} capped; recovered after {sum(took) / len(took):.0f} s on average, {max(took)} s at most")
    assert len(took) > SCENARIOS / 2
    assert sum(took) / len(took) <= RECOVERED_MEAN_S and max(took) <= RECOVERED_MOST_S


def test_caps_do_not_swing_at_constant_load(ran: list[World]) -> None:
    seen = [most_turns(world) for world in ran]
    print(f"turns in {STRETCH_S / 2:.0f} s: mean {sum(seen) / len(seen):.2f}, most {max(seen)}")
    assert max(seen) <= MOST_TURNS


def test_draft_workers_are_relieved_if_fewer_levels_can_do_it(ran: list[World]) -> None:
    """Where they are overloaded at the heavy load, depth is capped for all verifiers of the model."""
    seen = 0
    for world in ran:
        late = [stretch(v.history, 1)[STRETCH_S // 2 :] for v in world.verifiers]
        if any(caps.depth is not None for each in late for caps in each):
            seen += 1
            assert all(any(caps.depth is not None for caps in each) for each in late)
            assert not any(caps.chain for each in late for caps in each if caps.depth is not None)
    assert seen > 5


def test_a_scenario_is_a_function_of_its_seed() -> None:
    one, two = World(7), World(7)
    one.run()
    two.run()
    assert [v.history for v in one.verifiers] == [v.history for v in two.verifiers]
