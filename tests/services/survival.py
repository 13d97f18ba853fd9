"""What a cluster must survive, played on real processes under live sessions: short as tests, long as a benchmark.

Every scenario keeps sessions running that compare each text with what the target wrote alone, and returns what it saw.
Moments and victims are drawn from a seeded generator.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwood.client import ClusterState, DraftwoodClient
from tests.services.models import Models
from tests.services.processes import Processes, Service, Sessions, all_ready, settled_at, status_at, stopped

SETTINGS: dict[str, dict[str, Any]] = {
    "verifier": {
        "name": "tiny", "dtype": "float64", "width": "full", "max_nodes": 16, "page_tokens": 16, "kv_pages": 1024,
        "threads": 1, "load_interval_s": 0.1, "canary": "false",
    },
    "draft": {"threads": 1, "depth": 4, "page_tokens": 16, "load_interval_s": 0.1},
    "router": {"reconnect_s": 0.1},
}  # fmt: skip
LATEST_S = 1.5
"""A kill shows in gaps that begin by then."""
LONGEST_PAUSE_S = 0.5
"""Between what was restarted being back, and the next kill."""


@dataclass
class Seen:
    """What a scenario saw."""

    kills: int = 0
    texts: int = 0
    wrong: list[str] = field(default_factory=list)  # errors, and texts that differ
    refused: int = 0  # new texts that nobody could begin
    gaps_s: list[float] = field(default_factory=list)  # the longest of each session at each kill
    plain_gaps_s: list[float] = field(default_factory=list)  # of all sessions without drafts
    back_s: list[float] = field(default_factory=list)  # from a kill until all is ready again
    exits: list[int | None] = field(default_factory=list)  # codes of processes that were told to end
    lag_s: float = 0.0  # longest that the clients' own process was held up
    migrations: int = 0  # as far as routers that were not killed know
    reattachments: int = 0


@dataclass
class Fleet:
    """A cluster of processes and a client that knows all of its routers."""

    processes: Processes
    verifiers: list[Service]
    drafts: list[Service]
    routers: list[Service]
    client: DraftwoodClient

    async def settled(self) -> None:
        """All are ready, in the eyes of each router."""
        await settled_at(*(each.address for each in self.routers))

    async def replaced(self, service: Service) -> float:
        """Seconds until a process in place of one that has ended is ready."""
        began = time.monotonic()
        await asyncio.to_thread(self.processes.restart, service)  # forking may take a while; clients go on
        await self.settled()
        return time.monotonic() - began

    async def busiest(self, among: Sequence[Service]) -> Service:
        """The one with most sessions, as soon as one has some: alike workers may well have all or none."""
        sessions: dict[str, int] = {}
        while not any(sessions.get(each.address) for each in among):
            await asyncio.sleep(0.02)
            if state := await status_at(self.routers[0].address):
                sessions = {v.address: v.running for v in state.verifiers} | {
                    d.address: d.sessions for d in state.drafts
                }
        return max(among, key=lambda each: sessions.get(each.address, 0))

    async def counted(self) -> tuple[int, int]:
        """Migrations and reattachments that the routers have made since their start."""
        states = [state for router in self.routers if (state := await status_at(router.address))]
        return sum(s.verifier_migrations for s in states), sum(s.draft_reattachments for s in states)

    async def idle(self, timeout_s: float = 5.0) -> None:
        """No session, no page and no attachment is left anywhere."""
        async with asyncio.timeout(timeout_s):
            while busy := [state for router in self.routers if not idle(state := await status_at(router.address))]:
                await asyncio.sleep(0.05)
        assert not busy


def idle(state: ClusterState | None) -> bool:
    return (
        state is not None
        and all_ready(state)
        and not state.requests
        and all(not v.running and not v.waiting and v.free_pages == v.total_pages for v in state.verifiers)
        and not any(draft.sessions for draft in state.drafts)
    )


@contextmanager
def started(
    models: Models, folder: Path, *, verifiers: int = 2, drafts: Sequence[str] = ("lm", "lm", "ngram"),
    routers: int = 2, **router: Any,
) -> Iterator[Processes]:  # fmt: skip
    """The processes; ended at the end, whatever state they are in."""
    processes = Processes(folder)
    try:
        target = {"model": models.target, **SETTINGS["verifier"]}
        own = {"model": models.draft, **SETTINGS["draft"]}
        verifying = [processes.start("verifier", **target) for _ in range(verifiers)]
        drafting = [processes.start("draft", kind=kind, **own) for kind in drafts]
        pools = {"verifiers": [each.address for each in verifying], "drafts": [each.address for each in drafting]}
        for _ in range(routers):
            processes.start("router", **pools, **SETTINGS["router"], **router)
        yield processes
    finally:
        processes.end()


@asynccontextmanager
async def connected(processes: Processes) -> AsyncIterator[Fleet]:
    """What was started, once it is ready, and a client of it."""
    by_role = {role: [each for each in processes.services if each.role == role] for role in SETTINGS}
    async with DraftwoodClient(*(each.address for each in by_role["router"])) as client:
        cluster = Fleet(processes, by_role["verifier"], by_role["draft"], by_role["router"], client)
        await cluster.settled()
        yield cluster


@asynccontextmanager
async def live(cluster: Fleet, seen: Seen, **options: Any) -> AsyncIterator[Sessions]:
    """Live sessions; at the end each has finished its text, and the cluster is idle."""
    sessions = Sessions(cluster.client, **options)
    before = await cluster.counted()
    began = time.monotonic()
    await sessions.start()
    seen.plain_gaps_s = [at - before for chunks in sessions.arrivals for before, at in chunks if at >= began]
    watch = asyncio.create_task(late(seen))
    try:
        await sessions.some_texts()
        yield sessions
        await sessions.some_texts()
    finally:
        watch.cancel()
        await sessions.stop()
    seen.texts, seen.wrong, seen.refused = sessions.texts, sessions.wrong, sessions.refused
    await cluster.idle()
    after = await cluster.counted()
    seen.migrations, seen.reattachments = after[0] - before[0], after[1] - before[1]


async def late(seen: Seen) -> None:
    """Watches by how much this process, the clients', is held up: gaps contain it."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.05)
        seen.lag_s = max(seen.lag_s, time.monotonic() - began - 0.05)


async def killed(cluster: Fleet, victims: Sequence[Service], kills: int, seed: int = 1, **options: Any) -> Seen:
    """SIGKILL of one of the victims, so many times; a process takes its place, and when it is ready comes the next."""
    seen, rng = Seen(), random.Random(seed)
    moments = []
    async with live(cluster, seen, **options) as sessions:
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(0, LONGEST_PAUSE_S))
            victim = rng.choice(victims)
            moments.append(time.monotonic())
            await asyncio.to_thread(cluster.processes.kill, victim)
            seen.back_s.append(await cluster.replaced(victim))
        await asyncio.sleep(LATEST_S)
    seen.kills = kills
    seen.gaps_s = [gap for moment in moments for gap in sessions.gaps(moment, moment + LATEST_S)]
    return seen


async def all_killed(cluster: Fleet, victims: Sequence[Service], **options: Any) -> Seen:
    """SIGKILL of all of them at once: what has begun waits until one is back, what has not is refused."""
    seen = Seen(kills=len(victims))
    async with live(cluster, seen, **options) as sessions:
        moment = time.monotonic()
        for act in (cluster.processes.kill, cluster.processes.restart):
            for victim in victims:
                await asyncio.to_thread(act, victim)
        await cluster.settled()
        seen.back_s.append(time.monotonic() - moment)
    seen.gaps_s = sessions.gaps(moment, moment + LATEST_S)
    return seen


async def hung(cluster: Fleet, victims: Sequence[Service], times: int, for_s: float, **options: Any) -> Seen:
    """SIGSTOP of the busiest for so long, then SIGCONT: what it had in hand must change nothing when it goes on."""
    seen = Seen(kills=times)
    moments = []
    async with live(cluster, seen, **options) as sessions:
        for _ in range(times):
            victim = await cluster.busiest(victims)
            moments.append(time.monotonic())
            with stopped(victim):
                await asyncio.sleep(for_s)
            await cluster.settled()
            await sessions.some_texts()
    seen.gaps_s = [gap for moment in moments for gap in sessions.gaps(moment, moment + for_s)]
    return seen


async def drained(cluster: Fleet, victims: Sequence[Service], times: int, **options: Any) -> Seen:
    """SIGTERM under load, to one after the other; the process ends by itself, and another takes its place."""
    seen = Seen(kills=times)
    async with live(cluster, seen, **options) as sessions:
        for k in range(times):
            victim = victims[k % len(victims)]
            began = time.monotonic()
            os.kill(victim.pid, signal.SIGTERM)
            seen.exits.append(await cluster.processes.ended(victim))
            seen.back_s.append(time.monotonic() - began)
            await cluster.replaced(victim)
    seen.gaps_s = sessions.gaps(0.0, time.monotonic())
    return seen


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
