"""The two pools: who is there, in which state, and whose word still counts.

A *worker* is one process start of a verifier or draft worker. Its ``worker_id`` survives restarts, its
``incarnation`` does not. Registering a worker under a known id or address replaces the old entry; an incarnation
that has been replaced once is *fenced*: it can never register again, and what was open on it is broken off.
All methods run on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio

from draftwood.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from draftwood.v1 import draft_pb2, verifier_pb2
from router.balancing import DraftView, VerifierView

MAX_WORKERS = 1024
MAX_FENCED = 4096
SMOOTH = 0.2
"""Weight of the last value in running means."""


class Role(enum.StrEnum):
    VERIFIER = "verifier"
    DRAFT = "draft"


class Health(enum.IntEnum):
    """Numbers of the wire's ``Health``."""

    STARTING = 1
    READY = 2
    LOST = 3
    DRAINING = 4


class Call(Protocol):
    """A call that can be broken off."""

    def cancel(self) -> bool: ...


@dataclass(eq=False)
class Worker:
    """One member of a pool; compared by identity, so that a restarted worker is another one."""

    role: Role
    worker_id: str
    address: str
    static: bool = False  # known by its address alone, whoever answers there
    incarnation: str = ""  # empty until a static worker has told it
    channel: grpc.aio.Channel | None = None  # opened by the worker's link
    health: Health = Health.STARTING
    model: verifier_pb2.ModelInfo | None = None  # verifiers, once known
    draft: draft_pb2.DraftInfo | None = None  # draft workers, once known
    verifier_load: verifier_pb2.VerifierServiceWatchLoadResponse | None = None
    draft_load: draft_pb2.DraftServiceWatchLoadResponse | None = None
    sessions: int = 0  # of this router
    sessions_told: int = 0  # of this router, when the last load report came
    leaving: bool = False  # the controller takes it out of its pool
    rtt_ms: float = 0.0  # of calls to it, a running mean; 0: none yet
    accepted: float | None = None  # drafts: draft tokens a step of sessions that it served, a running mean
    unfit: set[str] = field(default_factory=set)  # drafts: models whose tokenizer is another one
    calls: set[Call] = field(default_factory=set)

    @property
    def ready(self) -> bool:
        return self.health is Health.READY

    def break_calls(self) -> None:
        """Cancels what is open on the worker; their owners see it as the worker's loss."""
        for call in tuple(self.calls):
            call.cancel()

    def verifier_view(self) -> VerifierView | None:
        if not (self.ready and self.model and self.verifier_load):
            return None
        load = self.verifier_load
        sessions = self._sessions_now(load.running + load.waiting)
        held = 1 - load.free_pages / load.total_pages if load.total_pages else 0.0
        return VerifierView(self.address, self.model.name, sessions, load.max_sessions, load.step_ms, held)

    def draft_view(self, canary_failed: bool) -> DraftView | None:
        if not (self.ready and self.draft and self.draft_load):
            return None
        load = self.draft_load
        sessions = self._sessions_now(load.sessions)
        accepted = 0.0 if canary_failed else self.accepted
        kind = self.draft.kind
        return DraftView(self.address, kind, sessions, load.max_sessions, load.round_ms, self.rtt_ms, accepted)

    def _sessions_now(self, told: int) -> int:
        """What it told, and what this router has added or taken away since."""
        return max(self.sessions, told + self.sessions - self.sessions_told)

    def took(self, call_ms: float) -> None:
        """A call to the worker has taken so long."""
        self.rtt_ms = _smooth(self.rtt_ms, call_ms) if self.rtt_ms else call_ms

    def helped(self, accepted: float) -> None:
        """A session that it served has ended, with so many draft tokens a step."""
        self.accepted = accepted if self.accepted is None else _smooth(self.accepted, accepted)


def _smooth(mean: float, value: float) -> float:
    return mean + SMOOTH * (value - mean)


async def reached(event: asyncio.Event, timeout_s: float) -> None:
    """Waits for the event, at most ``timeout_s``. (``wait_for`` can lose a cancellation that comes with the event.)"""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def being_cancelled() -> bool:
    """Whether the running task itself is being cancelled.

    If not, its CancelledError is of a call that it awaits: on a channel that was closed as its worker left, or broken
    off.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Registry:
    """Owns the workers. ``on_join`` and ``on_leave`` tell who watches them."""

    def __init__(self, on_join: Callable[[Worker], None], on_leave: Callable[[Worker], None]) -> None:
        self._on_join = on_join
        self._on_leave = on_leave
        self._workers: dict[str, Worker] = {}  # by address
        self._fenced: OrderedDict[str, None] = OrderedDict()
        self._changed = asyncio.Event()

    def add_static(self, role: Role, address: str) -> None:
        """Adds a worker known by its address alone."""
        self._join(Worker(role, worker_id=address, address=address, static=True))

    def register(self, role: Role, worker_id: str, address: str, incarnation: str) -> None:
        """Adds a worker or replaces its former self; the same words twice change nothing.

        Raises FailedPrecondition FENCED, InvalidArgument WORKER_ID, ResourceExhausted POOL_FULL.
        """
        if not (worker_id and address and incarnation):
            raise InvalidArgument("WORKER_ID", "a worker registers with its id, its address and its incarnation")
        if incarnation in self._fenced:
            raise FailedPrecondition("FENCED", f"incarnation {incarnation} of {worker_id} has been replaced")
        known = self._workers.get(address)
        if known and (known.worker_id, known.incarnation) == (worker_id, incarnation):
            return
        for old in [w for w in self._workers.values() if w.address == address or w.worker_id == worker_id]:
            self._leave(old, fence=old.incarnation != incarnation)
        self._join(Worker(role, worker_id, address, incarnation=incarnation))

    def identify(self, worker: Worker, incarnation: str) -> None:
        """The process behind the worker's address has told its incarnation.

        A static worker takes it on; a registered one must match: raises FailedPrecondition FENCED if not.
        """
        if worker.static and worker.incarnation != incarnation:
            worker.incarnation = incarnation
            worker.unfit.clear()
            worker.accepted, worker.rtt_ms = None, 0.0
        if worker.incarnation != incarnation:
            raise FailedPrecondition("FENCED", f"{worker.address} is now another process than {worker.worker_id}")

    def drain(self, worker_id: str) -> None:
        """Nothing new for that worker from now on; drafts hand their sessions over. Unknown ones are no error."""
        for worker in self._named(worker_id):
            worker.leaving = True
            if worker.ready:
                self.set_health(worker, Health.DRAINING)

    def remove(self, worker_id: str) -> None:
        """Forgets the worker for good: its calls are broken off, its incarnation is fenced."""
        for worker in self._named(worker_id):
            self._leave(worker, fence=True)

    def _named(self, worker_id: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.worker_id == worker_id]

    def set_health(self, worker: Worker, health: Health) -> None:
        if worker.leaving and health is Health.READY:
            health = Health.DRAINING
        if worker.health is not health:
            worker.health = health
            self.notify()

    def lost(self, worker: Worker) -> None:
        """The worker's stream is broken: nothing on it is waited for any more."""
        if worker.health is not Health.STARTING:
            self.set_health(worker, Health.LOST)
        worker.break_calls()

    def alive(self, worker: Worker) -> bool:
        """Whether the worker is still in its pool and not lost."""
        return self.holds(worker) and worker.health in (Health.READY, Health.DRAINING)

    def by_address(self, address: str) -> Worker:
        return self._workers[address]

    def workers(self, role: Role | None = None) -> list[Worker]:
        return [worker for worker in self._workers.values() if role in (None, worker.role)]

    def models(self) -> dict[str, verifier_pb2.ModelInfo]:
        """Models served by a verifier that is or was ready, by name."""
        return {worker.model.name: worker.model for worker in self.workers(Role.VERIFIER) if worker.model}

    def verifier_views(self) -> list[VerifierView]:
        return [view for worker in self.workers(Role.VERIFIER) if (view := worker.verifier_view())]

    def draft_views(self, model: str, failed: Collection[str]) -> list[DraftView]:
        """Of the draft workers that may fit the model; ``failed`` are the incarnations that failed a canary."""
        fitting = (worker for worker in self.workers(Role.DRAFT) if model not in worker.unfit)
        return [view for worker in fitting if (view := worker.draft_view(worker.incarnation in failed))]

    def failed_canaries(self) -> set[str]:
        """Incarnations of the draft workers whose guesses on a canary were wrong."""
        loads = [worker.verifier_load for worker in self.workers(Role.VERIFIER) if worker.verifier_load]
        return {result.incarnation for load in loads for result in load.canaries if result.failed}

    def change(self) -> asyncio.Event:
        """Set when next any worker joins, leaves or changes its health."""
        return self._changed

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change, at the latest after ``timeout_s``."""
        await reached(self._changed, timeout_s)

    def holds(self, worker: Worker) -> bool:
        return self._workers.get(worker.address) is worker

    def notify(self) -> None:
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()

    def _join(self, worker: Worker) -> None:
        if len(self._workers) >= MAX_WORKERS:
            raise ResourceExhausted("POOL_FULL", f"{MAX_WORKERS} workers are registered", retry_after_ms=1000)
        self._workers[worker.address] = worker
        self._on_join(worker)
        self.notify()

    def _leave(self, worker: Worker, *, fence: bool) -> None:
        del self._workers[worker.address]
        if fence and worker.incarnation:
            self._fence(worker.incarnation)
        worker.health = Health.LOST
        worker.break_calls()
        self._on_leave(worker)
        self.notify()

    def _fence(self, incarnation: str) -> None:
        self._fenced[incarnation] = None
        while len(self._fenced) > MAX_FENCED:
            self._fenced.popitem(last=False)
