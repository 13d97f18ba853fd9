"""The controller: keeps the wanted number of workers in every pool. Knows no Ray; what it needs is a ``Fleet``.

A *member* is an actor of a pool, by its worker id ``POOL-NUMBER``; numbers are never used again. Every ``check_s``
the controller compares the members with what is wanted, creates what lacks and drains what is too many. Ray restarts
an actor whose process dies; the controller replaces what Ray does not: an actor that could not start, that was
killed, or that the router has missed for too long.

It keeps no state of its own that it could lose: a restarted controller finds the actors by their names, and the
sizes wanted in the router's status.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from draftwood.config import ScalingSettings
from draftwood.errors import DraftwoodError
from draftwood.telemetry import get_logger
from router.autoscaling import Autoscaler, Decision, Look, Signals
from router.scaling import PoolLimits, PoolState, check_counts
from router.state import WorkerState

HANDOVER_S = 5.0
"""For a draft worker's sessions to be given to others before it stops."""
HANDOVER_POLL_S = 0.1
FIRST_BACKOFF_S, MOST_BACKOFF_S = 1.0, 60.0
"""Wait after a worker could not start, doubled with each that could not."""

BLIND_LOOKS = 10
"""So many looks left out are a gap: how long a worker was away before it is not held against it."""
ROOM_S = 300.0
"""How long the number of workers that there are nodes for is believed."""

Stage = Literal["starting", "loading", "ready", "lost"]
STAGES: dict[str, Stage] = {"STARTING": "loading", "READY": "ready", "LOST": "lost", "DRAINING": "lost"}

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one worker is."""

    role: str
    worker_id: str
    stage: Stage
    address: str = ""


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """What the starting process must know."""

    routers: dict[str, str]  # addresses of those that have served, by id
    error: str  # what keeps a worker from starting
    wanted: int  # workers, of all pools
    workers: tuple[Progress, ...]


class Fleet(Protocol):
    """The actors and the routers, as the controller reaches them. Every method but ``create`` may raise Unavailable.

    What is told to the routers is told to all; a method fails only if none of them answers.
    """

    async def actors(self) -> dict[str, bool]:
        """Worker ids of the actors that exist, and whether each has been told to stop."""

    async def existing(self) -> set[str]:
        """Worker ids of the actors that exist."""

    async def ensure_routers(self) -> dict[str, str]:
        """Creates the routers that are not there; addresses of those that serve, by id, once one does."""

    def create(self, pool: str, worker_id: str) -> None:
        """Creates an actor of that pool; returns at once."""

    async def born(self, worker_id: str) -> None:
        """Waits until the actor serves, over restarts. Raises Unavailable ACTOR_FAILED."""

    async def stop(self, worker_id: str, grace_s: float) -> None:
        """Lets the worker's server drain and end."""

    async def kill(self, worker_id: str) -> None:
        """Ends the actor for good, if it is there."""

    async def workers(self) -> list[WorkerState]:
        """The workers that the routers know, each as the one sees it that knows most of it."""

    async def drain(self, worker_id: str) -> None:
        """Tells the routers to use the worker for nothing new."""

    async def remove(self, worker_id: str) -> None:
        """Tells the routers to forget the worker and to fence it."""

    async def publish(self, pools: Sequence[PoolState]) -> None:
        """Tells the routers how the pools are."""

    async def request_nodes(self, counts: Mapping[str, int]) -> None:
        """Asks Ray's autoscaler for the nodes of so many workers of each pool, in place of what was asked before.

        Of pools that are not named, none.
        """

    async def published(self) -> dict[str, int]:
        """The sizes wanted that the routers were told last; empty if they were not."""


@dataclass(slots=True)
class Member:
    """One actor of a pool."""

    worker_id: str
    birth: asyncio.Task[None] | None = None
    leaving: asyncio.Task[None] | None = None
    created_s: float = 0.0
    seen: bool = False  # the router has known it
    lost_since: float | None = None


@dataclass(slots=True)
class Pool:
    """One pool's books."""

    limits: PoolLimits
    wanted: int
    signals: Signals
    members: dict[str, Member] = field(default_factory=dict)
    next_number: int = 0
    error: str = ""
    backoff_s: float = 0.0
    create_after: float = 0.0
    room: int | None = None  # workers that there are nodes for, as far as it is known
    room_until: float = 0.0
    decision: Decision | None = None

    @property
    def staying(self) -> list[Member]:
        return [member for member in self.members.values() if not member.leaving]

    def new_id(self) -> str:
        self.next_number += 1
        return f"{self.limits.name}-{self.next_number - 1}"


class Controller:
    """Owns the pools' sizes. All methods run on one event loop."""

    def __init__(
        self,
        limits: Sequence[PoolLimits],
        counts: Mapping[str, int],
        fleet: Fleet,
        settings: ScalingSettings,
        clock: Callable[[], float] = time.monotonic,
        *,
        asks_for_nodes: bool = False,
    ) -> None:
        auto = settings.auto
        self._pools = {pool.name: Pool(pool, counts[pool.name], Signals(pool.role, auto)) for pool in limits}
        self._autoscaler = Autoscaler(auto, settings.budget)
        self._autoscale_at = 0.0
        self._asks_for_nodes = asks_for_nodes
        self._asked: dict[str, int] | None = None  # for nodes; None: whatever a former controller has
        self._fleet = fleet
        self._settings = settings
        self._clock = clock
        self._workers: dict[str, WorkerState] = {}
        self._looked_s = self._seeing_since_s = -math.inf
        self._changed = asyncio.Event()
        self.adopted = False
        """Whether ``run`` has taken over what a former controller left: sizes set before that would be lost."""
        self.routers: dict[str, str] = {}  # addresses by id
        self.router_error = ""

    async def run(self) -> None:
        """Keeps the pools until it is cancelled."""
        while True:
            try:
                self.routers |= await self._fleet.ensure_routers()
                self.router_error = ""
                if not self.adopted:
                    await self.adopt()
                    self.adopted = True
                await self.tick()
            except DraftwoodError as error:
                self.router_error = "" if self.routers else str(error)
                log.warning("controller_waits", error=str(error))
            except Exception:
                log.exception("controller_tick_failed")
            await self._pause()

    async def adopt(self) -> None:
        """Takes over the actors that a former controller has left, and the sizes that it wanted."""
        wanted = await self._fleet.published()
        states = {state.worker_id: state for state in await self._fleet.workers()}
        found = await self._fleet.actors()
        for worker_id in sorted(found):
            name, _, number = worker_id.rpartition("-")
            if (pool := self._pools.get(name)) and number.isdecimal():
                member = pool.members[worker_id] = Member(worker_id, created_s=self._clock())
                pool.next_number = max(pool.next_number, int(number) + 1)
                state = states.get(worker_id)
                if found[worker_id] or (state and state.health == "DRAINING"):
                    self._let_go(pool, member)
                else:
                    self._expect(pool, member)
        took_over = any(pool.members for pool in self._pools.values())
        for name, pool in self._pools.items():
            if name in wanted:
                pool.wanted = pool.limits.clamp(wanted[name])
            elif took_over:
                pool.wanted = pool.limits.clamp(len(pool.staying))

    async def tick(self) -> None:
        """One look at the workers, and what follows from it."""
        self._workers = {state.worker_id: state for state in await self._fleet.workers()}
        existing = await self._fleet.existing()
        self._note_look()
        self._autoscale()
        await self._request_nodes()
        for pool in self._pools.values():
            await self._drop_dead(pool, existing)
            await self._drop_lost(pool)
            self._fill(pool)
            self._shrink(pool)
        await self._fleet.publish(self.states())

    def _note_look(self) -> None:
        now = self._clock()
        if now - self._looked_s > BLIND_LOOKS * self._settings.check_s:
            self._seeing_since_s = now
        self._looked_s = now
        for pool in self._pools.values():
            for member in pool.members.values():
                member.seen = member.seen or member.worker_id in self._workers

    def _seen_for(self, since_s: float) -> float:
        """Seconds since then, or since the last gap."""
        return self._clock() - max(since_s, self._seeing_since_s)

    def scale(self, asked: Mapping[str, int]) -> tuple[PoolState, ...]:
        """Sets the sizes wanted, all or none. Raises POOL_UNKNOWN, POOL_LIMIT."""
        limits = [pool.limits for pool in self._pools.values()]
        wanted = {name: pool.wanted for name, pool in self._pools.items()}
        granted = check_counts(limits, wanted, asked, self._settings.budget)
        for name in asked:
            pool = self._pools[name]
            pool.wanted, pool.error, pool.backoff_s, pool.create_after = granted[name], "", 0.0, 0.0
        log.info("scaled", asked=dict(asked), before=wanted)
        self._changed.set()
        return self.states()

    def _autoscale(self) -> None:
        """Lets the autoscaler look at the pools, and does what it decides unless it runs dry."""
        auto, now = self._settings.auto, self._clock()
        if auto.mode == "off" or now < self._autoscale_at:
            return
        self._autoscale_at = now + auto.fast_s
        looks = [self._look(pool) for pool in self._pools.values()]
        for pool, decision in zip(self._pools.values(), self._autoscaler.decide(now, looks), strict=True):
            if decision.changes or pool.decision is None or decision.reason != pool.decision.reason:
                told = {"mode": auto.mode, "before": decision.before, "wanted": decision.wanted}
                log.info("autoscaling", pool=decision.pool, reason=decision.reason, **told, **decision.inputs)
            pool.decision = decision
            if auto.mode == "on":
                pool.wanted = decision.wanted

    def _look(self, pool: Pool) -> Look:
        states = [self._workers[m.worker_id] for m in pool.staying if m.worker_id in self._workers]
        loads = [state.load for state in states if state.load]
        return Look(pool.limits, pool.wanted, pool.signals.read(loads), len(loads), self._room(pool))

    def _room(self, pool: Pool) -> int | None:
        """Without Ray's autoscaler a worker that finds no node shows how many there are nodes for."""
        if self._asks_for_nodes:
            return None
        now = self._clock()
        late = [m for m in pool.staying if not m.seen and self._seen_for(m.created_s) > self._settings.auto.place_s]
        if late:
            pool.room, pool.room_until = len(pool.staying) - len(late), now + ROOM_S
        elif now >= pool.room_until:
            pool.room = None
        return pool.room

    async def _request_nodes(self) -> None:
        """An absolute target that holds until the next: told whenever it changes.

        Only while a worker lacks: one that is there holds its node by itself, and Ray may meet a request beside it by
        a node that is idle, which then never goes.
        """
        lacking = any(self._state(pool).ready < pool.wanted for pool in self._pools.values())
        counts = {name: pool.wanted for name, pool in self._pools.items()} if lacking else {}
        if self._asks_for_nodes and counts != self._asked:
            await self._fleet.request_nodes(counts)
            log.info("nodes_requested", before=self._asked, workers=counts)
            self._asked = counts

    def states(self) -> tuple[PoolState, ...]:
        return tuple(self._state(pool) for pool in self._pools.values())

    def status(self) -> ControllerStatus:
        errors = [self.router_error, *(pool.error for pool in self._pools.values())]
        workers = [self._progress(pool, member) for pool in self._pools.values() for member in pool.staying]
        wanted = sum(pool.wanted for pool in self._pools.values())
        return ControllerStatus(dict(self.routers), next(filter(None, errors), ""), wanted, tuple(workers))

    async def stop(self) -> None:
        """Ends what the controller does beside ``run``; the actors stay."""
        tasks = [task for pool in self._pools.values() for m in pool.members.values() for task in (m.birth, m.leaving)]
        running = [task for task in tasks if task]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _pause(self) -> None:
        """Until the next look is due, or the sizes are set anew."""
        try:
            async with asyncio.timeout(self._settings.check_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    async def _drop_dead(self, pool: Pool, existing: set[str]) -> None:
        """Forgets members whose actor is gone, or could not start."""
        for member in pool.staying:
            failed = member.birth and member.birth.done() and not member.birth.cancelled() and member.birth.exception()
            if failed:
                self._back_off(pool, failed)
                await self._end(pool, member)
            elif member.worker_id not in existing:
                log.warning("actor_gone", worker_id=member.worker_id)
                await self._end(pool, member)
            elif self._starts_again(member):
                self._expect(pool, member)

    def _starts_again(self, member: Member) -> bool:
        """Whether Ray has restarted the process: it may not come to serve this time."""
        state = self._workers.get(member.worker_id)
        born = member.birth is not None and member.birth.done() and not member.birth.cancelled()
        return born and state is not None and state.health == "STARTING"

    def _back_off(self, pool: Pool, error: BaseException) -> None:
        pool.error = str(error)
        pool.backoff_s = min(max(FIRST_BACKOFF_S, 2 * pool.backoff_s), MOST_BACKOFF_S)
        pool.create_after = self._clock() + pool.backoff_s
        log.warning("worker_not_started", pool=pool.limits.name, error=pool.error, next_try_s=pool.backoff_s)

    async def _drop_lost(self, pool: Pool) -> None:
        """Ends members that the router has missed for too long: their process hangs, or their node is gone."""
        now = self._clock()
        for member in pool.staying:
            state = self._workers.get(member.worker_id)
            if not member.seen or (state and state.health != "LOST"):
                member.lost_since = None
            elif member.lost_since is None:
                member.lost_since = now
            elif self._seen_for(member.lost_since) >= self._settings.replace_lost_s:
                log.warning("worker_given_up", worker_id=member.worker_id, lost_s=now - member.lost_since)
                await self._end(pool, member)

    async def _end(self, pool: Pool, member: Member) -> None:
        if member.birth:
            member.birth.cancel()
        await self._fleet.kill(member.worker_id)
        await self._fleet.remove(member.worker_id)
        del pool.members[member.worker_id]

    def _fill(self, pool: Pool) -> None:
        if self._clock() < pool.create_after:
            return
        while len(pool.staying) < pool.wanted:
            member = Member(pool.new_id(), created_s=self._clock())
            pool.members[member.worker_id] = member
            self._fleet.create(pool.limits.name, member.worker_id)
            self._expect(pool, member)
            log.info("worker_created", worker_id=member.worker_id, pool=pool.limits.name)

    def _expect(self, pool: Pool, member: Member) -> None:
        async def born() -> None:
            await self._fleet.born(member.worker_id)
            pool.error, pool.backoff_s = "", 0.0

        member.birth = asyncio.create_task(born())

    def _shrink(self, pool: Pool) -> None:
        surplus = len(pool.staying) - pool.wanted
        for member in sorted(pool.staying, key=self._worth)[: max(surplus, 0)]:
            self._let_go(pool, member)

    def _worth(self, member: Member) -> tuple[bool, int, int]:
        """Who leaves first: workers that are not ready, then those with few sessions, then the youngest."""
        state = self._workers.get(member.worker_id)
        ready = state is not None and state.health == "READY"
        return ready, state.sessions if state else 0, -int(member.worker_id.rpartition("-")[2])

    def _let_go(self, pool: Pool, member: Member) -> None:
        if member.birth:
            member.birth.cancel()
        member.leaving = asyncio.create_task(self._leave(pool, member))

    async def _leave(self, pool: Pool, member: Member) -> None:
        """Drains a member, then ends it. What fails on the way keeps it from nothing."""
        log.info("worker_leaves", worker_id=member.worker_id, pool=pool.limits.name)
        for act in (self._drained, self._fleet.kill, self._fleet.remove):
            try:
                await act(member.worker_id)
            except DraftwoodError as error:
                log.warning("worker_leaves_roughly", worker_id=member.worker_id, error=str(error))
        del pool.members[member.worker_id]
        log.info("worker_left", worker_id=member.worker_id, pool=pool.limits.name)

    async def _drained(self, worker_id: str) -> None:
        await self._fleet.drain(worker_id)
        if self._role(worker_id) == "draft":
            await self._handed_over(worker_id)
        await self._fleet.stop(worker_id, self._settings.drain_s)

    async def _handed_over(self, worker_id: str) -> None:
        """Waits until a draft worker has no sessions any more."""
        end = self._clock() + HANDOVER_S
        while self._clock() < end:
            states = {state.worker_id: state for state in await self._fleet.workers()}
            if worker_id not in states or not states[worker_id].sessions:
                return
            await asyncio.sleep(HANDOVER_POLL_S)

    def _role(self, worker_id: str) -> str:
        return self._pools[worker_id.rpartition("-")[0]].limits.role

    def _state(self, pool: Pool) -> PoolState:
        staying = pool.staying
        ready = sum(self._progress(pool, member).stage == "ready" for member in staying)
        leaving = len(pool.members) - len(staying)
        decision = f"{self._settings.auto.mode}: {pool.decision}" if pool.decision else ""
        return PoolState(pool.limits, pool.wanted, len(staying), ready, leaving, pool.error, decision)

    def _progress(self, pool: Pool, member: Member) -> Progress:
        state = self._workers.get(member.worker_id)
        stage = STAGES[state.health] if state else "starting"
        return Progress(pool.limits.role, member.worker_id, stage, state.address if state else "")
