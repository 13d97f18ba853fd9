"""The controller against a fleet in memory, looked at tick by tick, on a clock that the tests turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from draftwood.config import AutoscalingSettings, ScalingSettings
from draftwood.errors import InvalidArgument, Unavailable
from router.autoscaling import WorkerLoad
from router.controller import Controller
from router.scaling import PoolLimits, PoolState
from router.state import WorkerState

LIMITS = [PoolLimits("verifier", "verifier", 1, 3, 4.0), PoolLimits("draft", "draft", 0, None, 1.0)]
SETTINGS = ScalingSettings(replace_lost_s=10, drain_s=7)
ROLES = {"verifier": "verifier", "draft": "draft"}


@dataclass
class MemoryFleet:
    """Actors are names, the router is a dictionary; what happens is in ``told``, in order."""

    routed: dict[str, WorkerState] = field(default_factory=dict)  # the workers that the router knows
    told: list[str] = field(default_factory=list)
    names: dict[str, bool] = field(default_factory=dict)  # of actors; whether they stop
    births: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    states: tuple[PoolState, ...] = ()
    unborn: bool = False  # actors start when the test says so
    router_lost: bool = False
    draining: asyncio.Event = field(default_factory=asyncio.Event)  # lets ``stop`` return

    async def actors(self) -> dict[str, bool]:
        return dict(self.names)

    async def existing(self) -> set[str]:
        return set(self.names)

    async def ensure_routers(self) -> dict[str, str]:
        return {"router-0": "router:1"}

    def create(self, pool: str, worker_id: str) -> None:
        self.told.append(f"create {worker_id}")
        self.names[worker_id] = False
        self.births[worker_id] = asyncio.get_running_loop().create_future()
        if not self.unborn:
            self.ready(worker_id)

    def ready(self, worker_id: str, health: str = "READY", sessions: int = 0) -> None:
        role = worker_id.rpartition("-")[0]
        self.routed[worker_id] = WorkerState(role, worker_id, f"{worker_id}:1", health, sessions)
        if not self.births[worker_id].done():
            self.births[worker_id].set_result(None)

    async def born(self, worker_id: str) -> None:
        await self.births.setdefault(worker_id, asyncio.get_running_loop().create_future())

    async def stop(self, worker_id: str, grace_s: float) -> None:
        self.told.append(f"stop {worker_id} {grace_s:g}")
        await self.draining.wait()

    async def kill(self, worker_id: str) -> None:
        self.told.append(f"kill {worker_id}")
        self.names.pop(worker_id, None)

    async def workers(self) -> list[WorkerState]:
        if self.router_lost:
            raise Unavailable("ACTOR_FAILED", "router-0 does not answer")
        return list(self.routed.values())

    async def drain(self, worker_id: str) -> None:
        self.told.append(f"drain {worker_id}")
        if worker_id in self.routed:
            self.routed[worker_id] = replace(self.routed[worker_id], health="DRAINING")

    async def remove(self, worker_id: str) -> None:
        self.told.append(f"remove {worker_id}")
        self.routed.pop(worker_id, None)

    async def publish(self, pools: Sequence[PoolState]) -> None:
        self.states = tuple(pools)

    async def request_nodes(self, counts: Mapping[str, int]) -> None:
        self.told.append(f"nodes {dict(counts)}")

    async def published(self) -> dict[str, int]:
        return {state.limits.name: state.wanted for state in self.states}


class Bench:
    """A controller, its fleet and its clock."""

    def __init__(self, fleet: MemoryFleet | None = None, **counts: int) -> None:
        self.fleet = fleet or MemoryFleet()
        self.now = 0.0
        self.controller = Controller(LIMITS, {"verifier": 1, "draft": 1} | counts, self.fleet, SETTINGS, self.clock)

    def clock(self) -> float:
        return self.now

    async def tick(self, after_s: float = 0.0) -> None:
        self.now += after_s
        await self.controller.tick()
        await asyncio.sleep(0)

    async def told(self, after_s: float = 0.0) -> list[str]:
        """What one tick, and what it has set going, tells the fleet."""
        self.fleet.told.clear()
        await self.tick(after_s)
        for _ in range(20):
            await asyncio.sleep(0)
        return list(self.fleet.told)

    async def over(self, seconds: int) -> list[str]:
        """What is told in so many looks, a second apart."""
        return [told for _ in range(seconds) for told in await self.told(after_s=1)]

    def state(self, pool: str) -> PoolState:
        return next(state for state in self.controller.states() if state.limits.name == pool)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(draft=2)
    yield made
    await made.controller.stop()


async def test_creates_what_is_wanted_once(bench: Bench) -> None:
    assert await bench.told() == ["create verifier-0", "create draft-0", "create draft-1"]
    assert await bench.told() == []
    assert [(s.wanted, s.present, s.ready) for s in bench.fleet.states] == [(1, 1, 1), (2, 2, 2)]


async def test_one_pool_grows_and_the_other_is_untouched(bench: Bench) -> None:
    await bench.tick()
    bench.controller.scale({"draft": 4})
    assert await bench.told() == ["create draft-2", "create draft-3"]


async def test_a_size_that_is_refused_changes_nothing(bench: Bench) -> None:
    await bench.tick()
    with pytest.raises(InvalidArgument, match="its max 3"):
        bench.controller.scale({"draft": 4, "verifier": 4})
    assert await bench.told() == []
    assert (bench.state("draft").wanted, bench.state("verifier").wanted) == (2, 1)


async def test_a_verifier_drains_before_it_goes(bench: Bench) -> None:
    bench.controller.scale({"verifier": 2})
    await bench.tick()
    bench.fleet.ready("verifier-0", sessions=3)
    bench.fleet.ready("verifier-1", sessions=1)
    bench.controller.scale({"verifier": 1})
    assert await bench.told() == ["drain verifier-1", "stop verifier-1 7"], "the one with fewer sessions"
    assert (bench.state("verifier").present, bench.state("verifier").draining) == (1, 1)
    assert await bench.told() == [], "it has its time"
    bench.fleet.draining.set()
    assert await bench.told() == ["kill verifier-1", "remove verifier-1"]
    assert bench.state("verifier").draining == 0 and set(bench.fleet.routed) == {"verifier-0", "draft-0", "draft-1"}


async def test_a_draft_worker_is_stopped_when_its_sessions_have_been_handed_over(bench: Bench) -> None:
    await bench.tick()
    bench.fleet.ready("draft-0", sessions=2)
    bench.fleet.ready("draft-1", sessions=5)
    bench.controller.scale({"draft": 1})
    assert await bench.told() == ["drain draft-0"]
    bench.fleet.ready("draft-0", "DRAINING", sessions=0)
    await asyncio.sleep(0.25)
    assert await bench.told() == [] and "draft-0" in bench.fleet.names
    bench.fleet.draining.set()
    assert await bench.told() == ["kill draft-0", "remove draft-0"]


async def test_sessions_that_nobody_takes_over_hold_a_draft_worker_up_for_a_while_only(bench: Bench) -> None:
    await bench.tick()
    for worker_id in ("draft-0", "draft-1"):
        bench.fleet.ready(worker_id, sessions=2)
    bench.controller.scale({"draft": 0})
    await bench.tick()
    bench.now += 6
    await asyncio.sleep(0.25)
    assert [told for told in bench.fleet.told if told.startswith("stop draft")] == ["stop draft-1 7", "stop draft-0 7"]


async def test_who_is_not_ready_leaves_first(bench: Bench) -> None:
    await bench.tick()
    bench.fleet.unborn = True
    bench.controller.scale({"draft": 3})
    await bench.tick()
    bench.controller.scale({"draft": 2})
    assert (await bench.told())[0] == "drain draft-2"


async def test_a_worker_that_is_wanted_again_is_a_new_one(bench: Bench) -> None:
    await bench.tick()
    bench.controller.scale({"draft": 1})
    await bench.tick()
    bench.controller.scale({"draft": 2})
    assert "create draft-2" in await bench.told()


async def test_an_actor_that_is_gone_is_replaced_and_fenced(bench: Bench) -> None:
    await bench.tick()
    del bench.fleet.names["draft-0"]
    assert await bench.told() == ["kill draft-0", "remove draft-0", "create draft-2"]


async def test_one_that_is_lost_for_too_long_is_replaced(bench: Bench) -> None:
    await bench.tick()
    bench.fleet.ready("verifier-0", "LOST")
    assert await bench.told() == [] and await bench.over(9) == []
    bench.fleet.ready("verifier-0")
    assert await bench.over(5) == [], "it was back"
    bench.fleet.ready("verifier-0", "LOST")
    assert await bench.told() == []
    assert await bench.over(10) == ["kill verifier-0", "remove verifier-0", "create verifier-1"]


async def test_one_that_the_router_has_forgotten_is_lost_too(bench: Bench) -> None:
    await bench.tick()
    await bench.tick()
    del bench.fleet.routed["draft-1"]
    assert await bench.told() == []
    assert await bench.over(10) == ["kill draft-1", "remove draft-1", "create draft-2"]


async def test_one_that_was_restarted_and_does_not_start_again_is_replaced(bench: Bench) -> None:
    """Ray restarts the process; its model may not load this time."""
    await bench.tick()
    await bench.tick()
    bench.fleet.ready("verifier-0", "LOST")
    await bench.over(2)
    bench.fleet.births["verifier-0"] = asyncio.get_running_loop().create_future()
    bench.fleet.routed["verifier-0"] = replace(bench.fleet.routed["verifier-0"], health="STARTING")
    assert await bench.over(30) == [], "it loads"
    bench.fleet.births["verifier-0"].set_exception(Unavailable("ACTOR_FAILED", "no memory"))
    assert await bench.over(5) == ["kill verifier-0", "remove verifier-0", "create verifier-1"]
    assert bench.state("verifier").ready == 1


async def test_one_that_waits_for_a_node_is_given_its_time(bench: Bench) -> None:
    bench.fleet.unborn = True
    await bench.tick()
    assert await bench.told(after_s=1000) == []


async def test_a_router_that_is_away_costs_no_worker(bench: Bench) -> None:
    await bench.tick()
    bench.fleet.router_lost = True
    with pytest.raises(Unavailable):
        await bench.tick(after_s=100)
    bench.fleet.router_lost = False
    assert await bench.told() == []


async def test_what_was_held_against_a_worker_before_the_routers_were_away_is_not_any_more(bench: Bench) -> None:
    """They come back knowing nobody; workers register with them one after another, within seconds."""
    await bench.tick()
    bench.fleet.ready("verifier-0", "LOST")
    assert await bench.over(8) == []
    verifier = bench.fleet.routed.pop("verifier-0")
    bench.now += 100
    assert await bench.over(8) == [], "for nobody saw it meanwhile"
    bench.fleet.routed["verifier-0"] = replace(verifier, health="READY")
    assert await bench.over(20) == []
    del bench.fleet.routed["verifier-0"]
    assert await bench.over(12) == ["kill verifier-0", "remove verifier-0", "create verifier-1"]


async def test_what_cannot_start_is_told_and_tried_again_ever_more_rarely(bench: Bench) -> None:
    bench.fleet.unborn = True
    await bench.tick()
    waits = []
    for _ in range(8):
        failing = next(name for name in bench.fleet.names if name.startswith("verifier"))
        bench.fleet.births[failing].set_exception(Unavailable("ACTOR_FAILED", "no such model"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await bench.told() == [f"kill {failing}", f"remove {failing}"]
        assert "no such model" in bench.controller.status().error == bench.state("verifier").error
        waited = 0.0
        while not await bench.told(after_s=0.5):
            waited += 0.5
        waits.append(waited + 0.5)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    bench.fleet.ready(next(name for name in bench.fleet.names if name.startswith("verifier")))
    await bench.tick()
    await bench.tick()
    assert bench.controller.status().error == ""


async def test_a_restarted_controller_takes_over(bench: Bench) -> None:
    bench.controller.scale({"draft": 3})
    await bench.tick()
    again = Bench(bench.fleet)
    await again.controller.adopt()
    assert again.state("draft").wanted == 3, "what was wanted last, not what the file says"
    assert await again.told() == []
    again.controller.scale({"draft": 4})
    assert await again.told() == ["create draft-3"]
    await again.controller.stop()


async def test_without_a_word_from_the_router_it_wants_what_is_there(bench: Bench) -> None:
    bench.controller.scale({"draft": 3})
    await bench.tick()
    bench.fleet.states = ()
    again = Bench(bench.fleet)
    await again.controller.adopt()
    assert (again.state("draft").wanted, again.state("verifier").wanted) == (3, 1)
    await again.controller.stop()


async def test_a_restarted_controller_ends_what_was_leaving(bench: Bench) -> None:
    bench.controller.scale({"draft": 3})
    await bench.tick()
    bench.fleet.names["draft-1"] = True
    bench.fleet.ready("draft-2", "DRAINING")
    bench.fleet.draining.set()
    again = Bench(bench.fleet)
    await again.controller.adopt()
    told = await again.told()
    assert {"kill draft-1", "kill draft-2"} <= set(told)
    assert told[-2:] == ["create draft-3", "create draft-4"] or "create draft-4" in told
    await again.controller.stop()


async def test_runs_on_until_it_is_cancelled() -> None:
    bench = Bench()
    bench.fleet.router_lost = True
    running = asyncio.create_task(bench.controller.run())
    await asyncio.sleep(0.05)
    bench.fleet.router_lost = False
    bench.controller.scale({"draft": 2})
    async with asyncio.timeout(5):
        while bench.state("draft").ready < 2:
            await asyncio.sleep(0.01)
    assert bench.controller.status().routers == {"router-0": "router:1"} and not bench.controller.status().error
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bench.controller.stop()


class Autoscaled(Bench):
    """A bench whose workers tell of their load."""

    def __init__(
        self, mode: Literal["dry_run", "on"], *, asks_for_nodes: bool = False, fleet: MemoryFleet | None = None
    ) -> None:
        super().__init__(fleet)
        auto = AutoscalingSettings(mode=mode, fast_s=1, rest_s=5, slow_s=5, down_window_s=30, place_s=20)
        settings = SETTINGS.model_copy(update={"auto": auto})
        counts = {"verifier": 1, "draft": 2}
        self.controller = Controller(LIMITS, counts, self.fleet, settings, self.clock, asks_for_nodes=asks_for_nodes)

    def loaded(self, idle_share: float) -> None:
        """All draft workers are busy but for that share of their time."""
        for name, state in self.fleet.routed.items():
            if state.role == "draft":
                load = WorkerLoad(name, 2, 8, idle_share=idle_share)
                self.fleet.routed[name] = replace(state, health="READY", load=load)


async def test_a_pool_grows_with_its_load_and_the_other_does_not() -> None:
    bench = Autoscaled("on")
    await bench.tick(1)
    bench.loaded(idle_share=0.0)
    assert await bench.told(1) == []
    assert await bench.told(1) == ["create draft-2"]
    decision = bench.state("draft").decision
    assert decision.startswith("on: 2 to 3: needs more: busy (busy 1.33") and bench.state("verifier").wanted == 1
    await bench.controller.stop()


async def test_and_shrinks_by_draining() -> None:
    bench = Autoscaled("on")
    bench.fleet.draining.set()
    await bench.tick(1)
    told: list[str] = []
    for _ in range(40):
        bench.loaded(idle_share=1.0)
        told += await bench.told(1)
    assert told[:4] == ["drain draft-1", "stop draft-1 7", "kill draft-1", "remove draft-1"] or "drain draft-1" in told
    assert bench.state("draft").wanted == 1
    await bench.controller.stop()


async def test_a_dry_run_decides_and_changes_nothing() -> None:
    bench = Autoscaled("dry_run")
    await bench.tick(1)
    for _ in range(2):
        bench.loaded(idle_share=0.0)
        assert await bench.told(1) == []
    assert bench.state("draft").wanted == 2 and bench.state("draft").decision.startswith("dry_run: 2 to 3: needs more")
    await bench.controller.stop()


async def test_nodes_are_asked_for_as_one_absolute_target() -> None:
    bench = Autoscaled("on", asks_for_nodes=True)
    bench.fleet.draining.set()

    async def nodes() -> list[str]:
        return [told for told in await bench.told(1) if told.startswith("nodes")]

    assert await nodes() == ["nodes {'verifier': 1, 'draft': 2}"]
    assert await nodes() == ["nodes {}"], "all are there and hold their nodes themselves"
    bench.fleet.unborn = True
    bench.controller.scale({"draft": 3})
    assert await nodes() == ["nodes {'verifier': 1, 'draft': 3}"]
    assert await nodes() == [], "it holds until the worker is there"
    bench.fleet.ready("draft-2")
    assert await nodes() == ["nodes {}"]
    bench.controller.scale({"draft": 1})
    assert [told for _ in range(5) for told in await nodes()] == [], "or a request might keep a node that is idle"
    await bench.controller.stop()


async def test_a_restarted_controller_takes_its_predecessors_request_back() -> None:
    former = Autoscaled("on", asks_for_nodes=True)
    former.fleet.unborn = True
    assert "nodes {'verifier': 1, 'draft': 2}" in await former.told(1)
    await former.controller.stop()
    for worker_id in list(former.fleet.names):
        former.fleet.ready(worker_id)
    heir = Autoscaled("on", asks_for_nodes=True, fleet=former.fleet)
    await heir.controller.adopt()
    assert await heir.told(1) == ["nodes {}"] and await heir.told(1) == []
    await heir.controller.stop()


async def test_without_an_autoscaler_of_nodes_a_pool_stays_within_what_is_there() -> None:
    bench = Autoscaled("on")
    await bench.tick(1)
    bench.fleet.unborn = True
    bench.loaded(idle_share=0.0)
    await bench.told(1)
    await bench.told(1)
    assert bench.state("draft").wanted == 3 and bench.state("draft").present == 3
    told: list[str] = []
    for _ in range(25):
        told += await bench.told(1)
    assert bench.state("draft").wanted == 2 and "drain draft-2" in told, "no node takes the third"
    bench.fleet.draining.set()
    for _ in range(100):
        assert not [t for t in await bench.told(1) if t.startswith("create")], "it is not tried again at once"
    await bench.controller.stop()


async def test_the_first_looks_after_the_routers_were_away_shrink_nothing() -> None:
    """Of two busy workers one has registered again, and one seemed to be enough."""
    bench = Autoscaled("on")
    await bench.tick(1)
    for _ in range(40):
        bench.loaded(idle_share=0.5)
        assert await bench.told(1) == []
    away = bench.fleet.routed.pop("draft-1")
    bench.now += 40
    assert await bench.told(1) == []
    bench.fleet.routed["draft-1"] = away
    for _ in range(40):
        bench.loaded(idle_share=0.5)
        assert await bench.told(1) == []
    assert bench.state("draft").wanted == 2
    await bench.controller.stop()


async def test_a_worker_that_starts_while_the_routers_are_away_has_a_node() -> None:
    bench = Autoscaled("on")
    await bench.tick(1)
    bench.controller.scale({"draft": 3})
    bench.fleet.unborn = True
    assert await bench.told(1) == ["create draft-2"]
    bench.now += 40
    assert await bench.over(15) == []
    bench.fleet.ready("draft-2")
    assert await bench.over(10) == [] and bench.state("draft").wanted == 3
    await bench.controller.stop()


async def test_sizes_can_be_set_once_the_former_controllers_are_known() -> None:
    """Taking over sets the sizes to what was wanted before: one that was set earlier would be lost."""
    former = Bench(draft=2)
    await former.tick()
    former.fleet.router_lost = True
    heir = Controller(LIMITS, {"verifier": 1, "draft": 1}, former.fleet, SETTINGS)
    running = asyncio.create_task(heir.run())
    await asyncio.sleep(0.05)
    assert not heir.adopted
    former.fleet.router_lost = False
    async with asyncio.timeout(5):
        while not heir.adopted:
            await asyncio.sleep(0.01)
    heir.scale({"draft": 3})
    await asyncio.sleep(1.2 * SETTINGS.check_s)
    assert {state.limits.name: state.wanted for state in heir.states()} == {"verifier": 1, "draft": 3}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await heir.stop()
    await former.controller.stop()
