"""Actors on a local Ray, with scripted servers: placement, restart, fencing, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwood.client import Chunk, ClusterState, DraftwoodClient, Finished, PoolState
from draftwood.config import (
    AutoscalingSettings,
    ClusterConfig,
    DraftPool,
    RouterSection,
    RouterSettings,
    ScalingSettings,
    VerifierPool,
    VerifierSettings,
)
from draftwood.errors import Unavailable
from router.cluster import Cluster
from router.controller import Progress
from router.pools import import_ray
from router.registry import Role
from router.state import WorkerState
from tests.router.scripted import scripted_text

SERVERS = {
    "router": "router.server:RouterServer",
    "verifier": "tests.router.scripted:SlowVerifier",
    "draft": "tests.router.scripted:ScriptedDraft",
}
PATIENCE_S = 60.0
"""For what is to happen at all: a start of processes takes 1 to 15 s, as the machine is."""


def children() -> set[int]:
    """Process ids of all descendants of this process."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # gone meanwhile
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


@pytest.fixture
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors' processes find the scripted servers."""
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))


def config() -> ClusterConfig:
    unloadable = VerifierSettings(name="scripted", model="missing")
    unbindable = VerifierSettings(name="scripted", listen="203.0.113.1:0", insecure=True)
    return ClusterConfig(
        name="test",
        router=RouterSection(count=2, settings=RouterSettings(reconnect_s=0.1)),
        verifiers=[
            VerifierPool(name="verifier", max=2, settings=VerifierSettings(name="scripted")),
            VerifierPool(name="unloadable", count=0, max=1, settings=unloadable),
            VerifierPool(name="unbindable", count=0, max=1, settings=unbindable),
        ],
        drafts=[DraftPool(count=2, max=2)],
        scaling=ScalingSettings(
            drain_s=1,
            auto=AutoscalingSettings(mode="on", fast_s=0.5, down_window_s=3, slow_s=1, rest_s=5, place_s=60),
        ),
    )


def actor(worker_id: str) -> Any:
    return import_ray().get_actor(f"test/{worker_id}", namespace="draftwood")


async def workers() -> dict[str, WorkerState]:
    return {state.worker_id: state for state in await actor("router-0").workers.remote()}


@pytest.mark.ray
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="counts processes through /proc")
async def test_a_clusters_life(importable_tests: None) -> None:
    """Bug kind 42: whoever is killed comes back with its server, is found again, and its former self is fenced."""
    before = children()
    cluster, told = Cluster(config(), SERVERS), list[Progress]()
    try:
        address = await cluster.start(told.append)
        await cluster.wait_ready(PATIENCE_S, told.append)
        assert {step.worker_id for step in told if step.stage == "ready"} == {
            "router-0",
            "router-1",
            "verifier-0",
            "draft-0",
            "draft-1",
        }
        await answers(address)
        await grows_with_its_load_and_shrinks_again(address)
        await replaces_a_killed_worker("draft-1")
        await outlives_the_router(address)
        await outlives_the_controller(address)
        await names_what_cannot_start(cluster, address)
    finally:
        await cluster.stop(0.5)
    await asyncio.sleep(0.5)
    assert children() - before == set()


def client_of(address: str) -> DraftwoodClient:
    """Knows all routers, as ``draftwood --address`` would."""
    return DraftwoodClient(*address.split(","))


async def answers(address: str) -> None:
    async with client_of(address) as client:
        events = [event async for event in client.generate("hi", max_tokens=5)]
    assert isinstance(events[-1], Finished) and events[-1].usage.completion_tokens == 5


async def grows_with_its_load_and_shrinks_again(address: str) -> None:
    """A verifier has eight sessions at most, and twelve texts come."""
    async with client_of(address) as client:
        enough = asyncio.Event()
        texts = [asyncio.create_task(answer_until(enough, client, seed)) for seed in range(12)]
        grown = await status_when(address, lambda state: named(state, "verifier").ready == 2)
        assert named(grown, "verifier").decision.startswith("on: ")
        enough.set()
        await asyncio.gather(*texts)
        shrunk = await status_when(address, lambda state: ready(state) == {"verifier": 1, "draft": 2})
        assert named(shrunk, "verifier").wanted == 1 and shrunk.requests_failed == 0


async def answer(client: DraftwoodClient, seed: int) -> list[int]:
    events = [event async for event in client.generate("hi", max_tokens=120, seed=seed)]
    return [token for event in events if isinstance(event, Chunk) for token in event.tokens]


async def answer_until(enough: asyncio.Event, client: DraftwoodClient, seed: int) -> None:
    while not enough.is_set():
        assert await answer(client, seed) == scripted_text(seed, 120)


async def replaces_a_killed_worker(worker_id: str) -> None:
    address, incarnation, pid = await actor(worker_id).info.remote()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while (worker := (await workers())[worker_id]).address == address or worker.health != "READY":
            await asyncio.sleep(0.1)
    assert (await actor(worker_id).info.remote())[1] != incarnation
    with pytest.raises(Exception, match="has been replaced"):
        await actor("router-0").register.remote(Role.DRAFT.value, worker_id, address, incarnation)
    assert len(await workers()) == 3


async def outlives_the_router(address: str) -> None:
    """Texts go on at the other one; a restarted router is found where it was, and its workers and the controller too.

    With both dead the pools are what they were as soon as one is back.
    """
    one, other = address.split(",")
    async with DraftwoodClient(one, other) as client:
        texts = [asyncio.create_task(answer(client, seed)) for seed in range(4)]
        await asyncio.sleep(0.3)
        await kill_router("router-0")
        await answers(other)
        await answers(address)
        assert [await text for text in texts] == [scripted_text(seed, 120) for seed in range(4)]
    await knows_its_workers(one)
    for router_id in ("router-0", "router-1"):
        await kill_router(router_id)
    for each in (one, other):
        await knows_its_workers(each)
    await answers(address)


async def kill_router(router_id: str) -> None:
    os.kill((await actor(router_id).info.remote())[2], signal.SIGKILL)


async def knows_its_workers(address: str) -> None:
    state = await status_when(address, lambda state: ready(state) == {"verifier": 1, "draft": 2})
    await status_when(address, lambda state: [w.health for w in (*state.verifiers, *state.drafts)] == ["ready"] * 3)
    assert sum(pool.wanted for pool in state.pools) == 3


async def outlives_the_controller(address: str) -> None:
    """A restarted controller finds the workers as they are, and wants what was wanted."""
    async with client_of(address) as client:
        await client.scale({"draft": 1})
        await status_when(address, lambda state: ready(state)["draft"] == 1 and len(state.drafts) == 1)
        before = await workers()
        os.kill(await actor("controller-0").info.remote(), signal.SIGKILL)
        pools = await scaled_when_it_is_back(client)
    assert {pool.name: pool.wanted for pool in pools if pool.wanted} == {"verifier": 1, "draft": 2}
    await status_when(address, lambda state: ready(state) == {"verifier": 1, "draft": 2})
    after = await workers()
    assert before.keys() < after.keys() and all(after[name].address == before[name].address for name in before)


async def scaled_when_it_is_back(client: DraftwoodClient) -> tuple[PoolState, ...]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await client.scale({"draft": 2})
            except Unavailable as error:
                assert error.reason == "NO_CONTROLLER" and error.retry_after_ms
                await asyncio.sleep(0.2)


async def names_what_cannot_start(cluster: Cluster, address: str) -> None:
    async with client_of(address) as client:
        for pool, reason in (("unloadable", "MODEL_UNKNOWN: there is no model"), ("unbindable", "BIND")):
            await client.scale({pool: 1})
            with pytest.raises(Unavailable, match=f"ACTOR_FAILED: .*{pool}-0 does not start: .*{reason}"):
                await cluster.wait_ready(PATIENCE_S)
            state = await status_when(address, lambda state, name=pool: bool(named(state, name).error))  # type: ignore[misc]
            assert reason in named(state, pool).error
            await client.scale({pool: 0})
            await status_when(address, lambda state, name=pool: not named(state, name).error)  # type: ignore[misc]
        await cluster.wait_ready(PATIENCE_S)


def named(state: ClusterState, name: str) -> PoolState:
    return next(pool for pool in state.pools if pool.name == name)


def ready(state: ClusterState) -> dict[str, int]:
    return {pool.name: pool.ready for pool in state.pools if pool.wanted}


async def status_when(address: str, holds: Callable[[ClusterState], bool]) -> ClusterState:
    async with client_of(address) as client, asyncio.timeout(PATIENCE_S):
        while True:
            try:
                state = await client.status()
                if state.pools and holds(state):
                    return state
            except Unavailable:
                pass
            await asyncio.sleep(0.1)
