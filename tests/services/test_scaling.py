"""Both pools scaled on their own, under live sessions: real services on a Ray cluster of several nodes."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwood.client import Chunk, ClusterState, DraftwoodClient, Finished
from draftwood.config import (
    ActorSettings,
    ClusterConfig,
    DraftPool,
    DraftSettings,
    RaySettings,
    RouterSection,
    RouterSettings,
    ScalingSettings,
    VerifierPool,
    VerifierSettings,
)
from router.cluster import Cluster
from router.pools import import_ray
from tests.services.models import Models
from tests.services.stack import EXACT, FAST

SESSIONS = 16
TOKENS = 24
LABEL = "pool"
NODES: tuple[dict[str, Any], ...] = ({LABEL: "router"}, {LABEL: "verifier"}, {LABEL: "draft"})


@pytest.fixture
def ray_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of three nodes with labels, on this machine; the nodes' processes find the tests' modules."""
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    temp = tempfile.mkdtemp(prefix="dw-")
    monkeypatch.setenv("RAY_TMPDIR", temp)
    monkeypatch.setenv("RAY_enable_autoscaler_v2", "1")  # its requests for nodes carry labels
    import_ray(local=True)
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes(shutdown_at_exit=False)
    try:
        for label in NODES:
            nodes.add_node(num_cpus=1, labels=label, object_store_memory=80 << 20, include_dashboard=False)
        yield str(nodes.address)
    finally:
        import_ray().shutdown()
        nodes.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def config(address: str, models: Models) -> ClusterConfig:
    exact = EXACT | {"model": str(models.target), "name": "tiny", "kv_pages": 512, "canary": False, "insecure": True}
    draft = DraftSettings(
        model=str(models.draft), threads=1, depth=2, page_tokens=16, lookahead_levels=0, insecure=True, **FAST
    )
    place = {role: ActorSettings(label_selector={LABEL: role}) for role in ("router", "verifier", "draft")}
    return ClusterConfig(
        name="nodes",
        ray=RaySettings(address=address, autoscaler=True),
        router=RouterSection(settings=RouterSettings(reconnect_s=0.1, insecure=True), actor=place["router"]),
        verifiers=[VerifierPool(max=3, actor=place["verifier"], settings=VerifierSettings(**exact))],
        drafts=[DraftPool(max=3, actor=place["draft"], settings=draft)],
        scaling=ScalingSettings(drain_s=1.0),
    )


class Clients:
    """Sessions without end: each asks for its text again and again and compares it with the first answer."""

    def __init__(self, client: DraftwoodClient) -> None:
        self._client = client
        self._expected: list[list[int]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.texts = 0
        self.wrong: list[str] = []

    async def start(self) -> None:
        self._expected = [await self._answer(k, speculate=False) for k in range(SESSIONS)]
        self._tasks = [asyncio.create_task(self._repeat(k)) for k in range(SESSIONS)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def some_texts(self) -> None:
        """Until every session has had the time for another text."""
        async with asyncio.timeout(60):
            goal = self.texts + 2 * SESSIONS
            while self.texts < goal:
                await asyncio.sleep(0.02)

    async def _repeat(self, k: int) -> None:
        while True:
            try:
                if (answer := await self._answer(k, speculate=True)) != self._expected[k]:
                    self.wrong.append(f"{k}: {answer}")
            except Exception as error:
                self.wrong.append(f"{k}: {error}")
            self.texts += 1

    async def _answer(self, k: int, speculate: bool) -> list[int]:
        options = {"max_tokens": TOKENS, "seed": k, "temperature": 0.8 * (k % 2), "ignore_eos": True}
        tokens: list[int] = []
        async for event in self._client.generate(f"count {k} {k}", speculate=speculate, **options):  # type: ignore[arg-type]
            if isinstance(event, Chunk):
                tokens += event.tokens
            elif isinstance(event, Finished):
                return tokens
        raise AssertionError("no end")


async def settled(client: DraftwoodClient, holds: Callable[[ClusterState], bool]) -> ClusterState:
    async with asyncio.timeout(60):
        while True:
            state = await client.status()
            if holds(state):
                return state
            await asyncio.sleep(0.1)


def sizes(state: ClusterState) -> dict[str, tuple[int, int, int]]:
    """Wanted, ready, leaving."""
    return {pool.name: (pool.wanted, pool.ready, pool.draining) for pool in state.pools}


def nodes_of_actors() -> dict[str, str]:
    """The label of the node that each living actor is on, by worker id."""
    ray = import_ray()
    labels = {node["NodeID"]: node["Labels"].get(LABEL, "") for node in ray.nodes()}
    actors = ray._private.state.actors().values()
    alive = (actor for actor in actors if actor["State"] == "ALIVE" and actor["Name"].startswith("nodes/"))
    return {actor["Name"].removeprefix("nodes/"): labels[actor["Address"]["NodeID"]] for actor in alive}


def nodes_requested() -> dict[str, int]:
    """What Ray's autoscaler was asked for last: how many actors' needs, by the label of the nodes."""
    ray = import_ray()
    sdk = importlib.import_module("ray.autoscaler.v2.sdk")
    state = sdk.get_cluster_resource_state(ray._private.worker.global_worker.gcs_client)
    (constraint,) = state.cluster_resource_constraints
    asked = {}
    for entry in constraint.resource_requests:
        (selector,) = entry.request.label_selectors
        (label,) = selector.label_constraints
        asked[label.label_values[0]] = entry.count
    return asked


@pytest.mark.ray
async def test_each_pool_grows_and_shrinks_under_live_sessions(ray_address: str, models: Models) -> None:
    cluster = Cluster(config(ray_address, models))
    try:
        address = await cluster.start()
        await cluster.wait_ready(60)
        async with DraftwoodClient(address) as client:
            clients = Clients(client)
            await clients.start()
            try:
                for pool, other in (("draft", "verifier"), ("verifier", "draft")):
                    await grows_and_shrinks(client, clients, pool, other)
                assert clients.wrong == []
                state = await client.status()
                assert state.requests_failed == 0
            finally:
                await clients.stop()
    finally:
        await cluster.stop(0.5)


async def grows_and_shrinks(client: DraftwoodClient, clients: Clients, pool: str, other: str) -> None:
    """1 to 3 and back; the other pool's only worker stays the same process."""
    before = await worker_of(client, other)
    await client.scale({pool: 3})
    await settled(client, lambda _: nodes_requested() == {"router": 1, pool: 3, other: 1})
    await settled(client, lambda state: sizes(state)[pool] == (3, 3, 0))
    assert {node for worker, node in nodes_of_actors().items() if worker.startswith(pool)} == {pool}
    await settled(client, lambda _: nodes_requested() == {"router": 1})
    await clients.some_texts()
    state = await settled(client, lambda state: all_used(state, pool))
    assert sizes(state)[other] == (1, 1, 0)
    await client.scale({pool: 1})
    await settled(client, lambda state: sizes(state)[pool] == (1, 1, 0) and len(members(state, pool)) == 1)
    await clients.some_texts()
    assert await worker_of(client, other) == before


def members(state: ClusterState, pool: str) -> tuple[Any, ...]:
    return state.drafts if pool == "draft" else state.verifiers


def all_used(state: ClusterState, pool: str) -> bool:
    """Whether each worker of the pool has taken its part of the work."""
    if pool == "draft":
        return all(draft.nodes_drafted for draft in state.drafts)
    return all(verifier.tokens for verifier in state.verifiers)


async def worker_of(client: DraftwoodClient, pool: str) -> tuple[str, ...]:
    return tuple(worker.address for worker in members(await client.status(), pool))
