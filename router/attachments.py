"""The draft workers of one session: attached beside the token path, replaced when lost, detached at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from draftwood.errors import DraftwoodError, ResourceExhausted, Unavailable
from draftwood.rpc.status import from_rpc_error
from draftwood.rpc.tracing import outgoing_metadata
from draftwood.telemetry import get_logger
from draftwood.tickets import issue_ticket
from draftwood.v1 import draft_pb2, draft_pb2_grpc
from router.registry import Health, Worker, being_cancelled, reached
from router.state import RouterState

CONTROL_TIMEOUT_S = 5.0
REST_S = 1.0
"""How long a worker that could not take a session is left alone by that session."""
IDLE_S = 60.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Session:
    """One attempt of a generation at one verifier."""

    session_id: str
    ticket_key: bytes = field(repr=False)  # that its drafts' tickets are made with
    verifier_address: str
    model: str


class Attachments:
    """Keeps up to ``wanted`` draft workers on a session for as long as it lasts."""

    def __init__(self, state: RouterState, session: Session, wanted: int) -> None:
        self._state = state
        self._registry = state.registry
        self._session = session
        self._wanted = wanted
        self._attached: dict[Worker, str] = {}  # with the incarnation that was asked
        self._asked: set[Worker] = set()  # may have joined: must be told to leave
        self._resting: dict[Worker, float] = {}  # until this time
        self._owed = 0  # lost and not yet replaced
        self._keeper: asyncio.Task[None] | None = None
        self._started_s = 0.0

    def start(self) -> None:
        """Called when the session starts."""
        self._started_s = time.monotonic()
        if self._wanted and not self._keeper:
            self._keeper = self._state.background.spawn(self._keep())

    def release(self) -> None:
        """Ends the session for its drafts; returns at once."""
        if self._keeper:
            self._keeper.cancel()
            self._state.background.spawn(self._detach_all(self._keeper))

    def helped(self, accepted: float) -> None:
        """So many draft tokens a step were accepted: those that serve the session share the credit."""
        for worker in self._attached:
            worker.helped(accepted)

    async def _keep(self) -> None:
        while True:
            change = self._registry.change()
            self._drop_lost()
            await self._fill()
            await self._leave_draining()
            await reached(change, REST_S if len(self._attached) < self._wanted else IDLE_S)

    def _drop_lost(self) -> None:
        for worker in [worker for worker in self._attached if not self._serves(worker)]:
            self._let_go(worker)
            self._owed += worker.health is not Health.DRAINING

    def _serves(self, worker: Worker) -> bool:
        there = self._registry.alive(worker) and worker.health is not Health.DRAINING
        return there and worker.incarnation == self._attached[worker]

    async def _leave_draining(self) -> None:
        """Detaches workers that leave their pool, once others have taken over."""
        leaving = [w for w in self._asked - self._attached.keys() if w.health is Health.DRAINING]
        self._asked.difference_update(leaving)
        await asyncio.gather(*(self._detach(worker) for worker in leaving if self._registry.alive(worker)))

    async def _fill(self) -> None:
        workers = self._missing()
        while workers:
            await asyncio.gather(*(self._attach(worker) for worker in workers))
            self._drop_lost()
            workers = self._missing()

    def _missing(self) -> list[Worker]:
        return self._state.chooser.drafts(
            self._session.model,
            self._wanted - len(self._attached),
            serving=_addresses(self._attached.keys() | self._at_rest()),
            kinds={worker.draft.kind for worker in self._attached if worker.draft},
        )

    def _at_rest(self) -> set[Worker]:
        now = time.monotonic()
        return {worker for worker, until in self._resting.items() if until > now}

    async def _attach(self, worker: Worker) -> None:
        self._asked.add(worker)
        request = draft_pb2.AttachRequest(
            session_id=self._session.session_id,
            ticket=self._ticket(worker),
            verifier_address=self._session.verifier_address,
        )
        worker.sessions += 1  # counted while it is on its way, so that a burst spreads
        self._attached[worker] = worker.incarnation
        began = time.monotonic()
        try:
            await _stub(worker).Attach(request, timeout=CONTROL_TIMEOUT_S, metadata=outgoing_metadata())
        except (grpc.RpcError, DraftwoodError) as error:
            self._refused(worker, error if isinstance(error, DraftwoodError) else from_rpc_error(error))
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            self._refused(worker, Unavailable("WORKER_LOST", f"{worker.address} has left the pool"))
        else:
            worker.took((time.monotonic() - began) * 1e3)
            self._state.chooser.succeeded(worker)
            self._count_reattachment()

    def _ticket(self, worker: Worker) -> bytes:
        session = self._session
        age_s = time.monotonic() - self._started_s
        return issue_ticket(session.ticket_key, session.session_id, worker.incarnation, age_s)

    def _refused(self, worker: Worker, error: DraftwoodError) -> None:
        self._let_go(worker)
        self._state.chooser.failed(worker, error)
        if error.reason == "TOKENIZER_MISMATCH":
            worker.unfit.add(self._session.model)
        passing = isinstance(error, ResourceExhausted | Unavailable)
        self._resting[worker] = time.monotonic() + REST_S if passing else float("inf")
        log.info("draft_not_attached", address=worker.address, session=self._session.session_id, error=str(error))

    def _count_reattachment(self) -> None:
        if self._owed:
            self._owed -= 1
            self._state.counters.draft_reattachments += 1

    def _let_go(self, worker: Worker) -> None:
        if worker in self._attached:
            del self._attached[worker]
            worker.sessions -= 1

    async def _detach_all(self, keeper: asyncio.Task[None]) -> None:
        await asyncio.gather(keeper, return_exceptions=True)
        for worker in tuple(self._attached):
            self._let_go(worker)
        await asyncio.gather(*(self._detach(worker) for worker in self._asked if self._registry.alive(worker)))

    async def _detach(self, worker: Worker) -> None:
        request = draft_pb2.DetachRequest(session_id=self._session.session_id)
        try:
            await _stub(worker).Detach(request, timeout=CONTROL_TIMEOUT_S, metadata=outgoing_metadata())
        except grpc.RpcError as error:
            log.info("draft_not_detached", address=worker.address, error=str(from_rpc_error(error)))
        except asyncio.CancelledError:  # it has left the pool meanwhile
            if being_cancelled():
                raise


def _addresses(workers: Iterable[Worker]) -> set[str]:
    return {worker.address for worker in workers}


def _stub(worker: Worker) -> Any:
    return draft_pb2_grpc.DraftServiceStub(worker.channel)  # type: ignore[no-untyped-call]
