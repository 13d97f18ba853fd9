"""Actors on a local Ray, with scripted servers: placement, restart, fencing, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.client import DraftwoodClient, Finished
from draftwood.config import ClusterConfig, DraftPool, RouterSection, RouterSettings, VerifierPool, VerifierSettings
from draftwood.errors import Unavailable
from router.pools import Cluster, Progress
from router.registry import Role

SERVERS = {
    "router": "router.server:RouterServer",
    "verifier": "tests.router.scripted:ScriptedVerifier",
    "draft": "tests.router.scripted:ScriptedDraft",
}


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
    return ClusterConfig(
        name="test",
        router=RouterSection(settings=RouterSettings(reconnect_s=0.1)),
        verifiers=[VerifierPool(settings=VerifierSettings(name="scripted"))],
        drafts=[DraftPool(count=2)],
    )


@pytest.mark.ray
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="counts processes through /proc")
async def test_a_clusters_life(importable_tests: None) -> None:
    before = children()
    cluster, told = Cluster(config(), SERVERS), list[Progress]()
    try:
        address = await cluster.start(told.append)
        await cluster.wait_ready(60, told.append)
        assert {step.worker_id for step in told if step.stage == "ready"} == {
            "router-0",
            "verifier-0",
            "draft-0",
            "draft-1",
        }
        await answers(address)
        await replaces_a_killed_worker(cluster, "draft-1")
        await outlives_the_router(cluster, address)
        await names_what_cannot_start(cluster)
    finally:
        await cluster.stop(0.5)
    await asyncio.sleep(0.5)
    assert children() - before == set()


async def answers(address: str) -> None:
    async with DraftwoodClient(address) as client:
        events = [event async for event in client.generate("hi", max_tokens=5)]
    assert isinstance(events[-1], Finished) and events[-1].usage.completion_tokens == 5


async def replaces_a_killed_worker(cluster: Cluster, worker_id: str) -> None:
    address, incarnation, pid = await cluster.info(worker_id)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while (worker := (await cluster.workers())[worker_id]).address == address or worker.health != "READY":
            await asyncio.sleep(0.1)
    assert (await cluster.info(worker_id))[1] != incarnation
    router = cluster._actors["router-0"]
    with pytest.raises(Exception, match="has been replaced"):
        await router.register.remote(Role.DRAFT.value, worker_id, address, incarnation)
    assert len(await cluster.workers()) == 3


async def outlives_the_router(cluster: Cluster, address: str) -> None:
    """A restarted router is found where it was, and its workers find it."""
    os.kill((await cluster.info("router-0"))[2], signal.SIGKILL)
    await asyncio.sleep(0.5)
    async with DraftwoodClient(address) as client, asyncio.timeout(30):
        while True:
            try:
                state = await client.status()
                if [worker.health for worker in (*state.verifiers, *state.drafts)] == ["ready"] * 3:
                    break
            except Unavailable:
                pass
            await asyncio.sleep(0.2)
    await answers(address)


async def names_what_cannot_start(cluster: Cluster) -> None:
    spec = cluster._specs["verifier-0"]
    unloadable = spec.settings.model_copy(update={"model": "missing"})
    for broken, told in (
        (replace(spec, worker_id="verifier-8", server="tests.router.scripted:Nothing"), "Nothing"),
        (replace(spec, worker_id="verifier-9", settings=unloadable), "MODEL_UNKNOWN: there is no model"),
    ):
        cluster._specs[broken.worker_id] = broken
        cluster._actors[broken.worker_id] = cluster._create(broken)
        with pytest.raises(Unavailable, match=f"ACTOR_FAILED: {broken.worker_id} does not start: .*{told}"):
            await cluster.wait_ready(30)
        del cluster._specs[broken.worker_id]
