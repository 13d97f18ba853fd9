"""What all requests of one router share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from draftwood.config import RouterSettings
from draftwood.telemetry import METRICS, WorkerRole
from router.autoscaling import WorkerLoad
from router.chooser import Chooser
from router.registry import Registry
from router.scaling import PoolState
from router.width_policy import Decision


@dataclass(slots=True)
class Counters:
    """What the router has done since its start."""

    requests: int = 0  # being served
    requests_total: int = 0
    requests_failed: int = 0
    draft_reattachments: int = 0
    verifier_migrations: int = 0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker as the cluster's controller sees it."""

    role: str
    worker_id: str
    address: str
    health: str
    sessions: int  # of this router, and those of others that the worker tells of
    load: WorkerLoad | None = None  # of a worker that is ready


class Background:
    """Tasks that nobody awaits, kept until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Pools:
    """The pools that a controller keeps, and the way to it; a router without one has none."""

    def __init__(self) -> None:
        self.states: tuple[PoolState, ...] = ()
        self.scale: Callable[[Mapping[str, int]], Awaitable[Sequence[PoolState]]] | None = None

    def publish(self, states: tuple[PoolState, ...]) -> None:
        """The controller tells how they are; metrics follow."""
        before = {state.limits.name: state.wanted for state in self.states}
        for state in states:
            name, role = state.limits.name, cast(WorkerRole, state.limits.role)
            gauges = METRICS.pool_workers(name)
            gauges["wanted"].set(state.wanted)
            gauges["present"].set(state.present)
            gauges["ready"].set(state.ready)
            gauges["draining"].set(state.draining)
            if state.wanted != (size := before.get(name, state.wanted)):
                METRICS.pool_changes[role, "up" if state.wanted > size else "down"].inc()
        self.states = states


@dataclass(frozen=True, slots=True)
class RouterState:
    settings: RouterSettings
    registry: Registry
    chooser: Chooser
    counters: Counters = field(default_factory=Counters)
    background: Background = field(default_factory=Background)
    pools: Pools = field(default_factory=Pools)
    widths: Mapping[str, Decision] = field(default_factory=dict)  # of the width policy, by the verifier's incarnation
