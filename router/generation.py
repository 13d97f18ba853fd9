"""One request from admission to its last token, over as many verifiers as it takes.

A *verdict* is what a verifier says about the request, in-band or as a status of its own: it goes to the client. A
*loss* is a verifier that cannot go on: a broken stream, UNAVAILABLE or INTERNAL without a word in-band. After a loss
the rest of the generation is asked for at another verifier of the same model.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import grpc.aio

from draftwood.errors import DraftwoodError, Internal, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from draftwood.rpc.status import from_rpc_error
from draftwood.rpc.tracing import outgoing_metadata
from draftwood.telemetry import get_logger
from draftwood.tickets import new_key
from draftwood.v1 import router_pb2, verifier_pb2, verifier_pb2_grpc
from draftwood.wire import error_from_proto
from router.affinity import beginnings
from router.attachments import Attachments, Session
from router.progress import Progress
from router.registry import Registry, Worker, being_cancelled
from router.state import RouterState

MAX_FUTILE_REPLAYS = 3
"""Verifiers that a request may lose in a row without a token in between."""
FULL = ("QUEUE_FULL", "CALLS_FULL")
"""Verdicts on the verifier as it is now: another may have room, and so may it in a moment."""
END_TIMEOUT_S = 1.0
RETRY_MS = 500

log = get_logger(__name__)

Event = verifier_pb2.GenerationEvent
VerifierCall = grpc.aio.UnaryStreamCall[
    verifier_pb2.VerifierServiceGenerateRequest, verifier_pb2.VerifierServiceGenerateResponse
]


class VerifierLost(Exception):
    """The verifier cannot go on with the session; ``error`` is what the client hears if nobody can."""

    def __init__(self, error: DraftwoodError) -> None:
        super().__init__(str(error))
        self.error = error


class Generation:
    """A request on its way; ``events`` is used once."""

    def __init__(
        self, state: RouterState, request: router_pb2.RouterServiceGenerateRequest, remaining_s: float | None
    ) -> None:
        self._state = state
        self._registry = state.registry
        self._settings = state.settings
        self._model = resolve_model(state.registry, request.model)
        self._progress = Progress(request.generation)
        self._prompt = beginnings(request.generation)
        self._plain = request.generation.speculation.disabled
        self._deadline = None if remaining_s is None else time.monotonic() + remaining_s
        self._session_id = ""  # the first one; the client knows the generation by it
        self._futile = 0
        self._full: set[Worker] = set()  # that have had no room, since the last wait
        self._wait_until: float | None = None  # for room; None: none was lacking

    async def events(self) -> AsyncGenerator[Event]:
        """What the client is to receive. Raises DraftwoodError."""
        worker = self._choose()
        if worker is None:
            raise no_verifier(self._model)
        while True:
            try:
                async with aclosing(self._serve(worker)) as events:
                    async for event in events:
                        yield event
                return
            except VerifierLost as lost:
                self._state.chooser.failed(worker, lost.error)
                worker = await self._replacement(worker, lost)
            except DraftwoodError as verdict:
                self._state.chooser.failed(worker, verdict)
                if not (isinstance(verdict, ResourceExhausted) and verdict.reason in FULL):
                    raise
                worker = await self._with_room(worker, verdict)

    async def _serve(self, worker: Worker) -> AsyncGenerator[Event]:
        """One verifier's part. Raises VerifierLost, or the verifier's verdict."""
        session = Session(uuid.uuid4().hex, b"" if self._plain else new_key(), worker.address, self._model)
        self._session_id = self._session_id or session.session_id
        wanted = 0 if self._plain else self._settings.drafts_per_session
        drafts = Attachments(self._state, session, wanted)
        with self._open(worker, session) as call:
            try:
                async with aclosing(self._heard(call)) as events:
                    async for event in events:
                        if event.HasField("started"):
                            drafts.start()
                        if event.HasField("finished"):
                            self._learn(worker, drafts, event.finished.usage)
                        if admitted := self._admit(event):
                            yield admitted
            finally:
                drafts.release()

    async def _heard(self, call: VerifierCall) -> AsyncGenerator[Event]:
        """The verifier's events up to ``finished``; its in-band error is raised."""
        while True:
            event = await self._read(call)
            if event.HasField("error"):
                await _end(call)
                raise _judged(error_from_proto(event.error), in_band=True)
            yield event
            if event.HasField("finished"):
                await _end(call)
                return

    async def _read(self, call: VerifierCall) -> Event:
        try:
            message = await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable("DEADLINE", "the request's own deadline is over") from error
            raise _judged(from_rpc_error(error), in_band=False) from error
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise VerifierLost(Unavailable("VERIFIER_LOST", "the verifier has left the pool")) from None
        if isinstance(message, verifier_pb2.VerifierServiceGenerateResponse):
            return message.event
        raise VerifierLost(Internal("VERIFIER_LOST", "the verifier ended its answer without a last word"))

    def _admit(self, event: Event) -> Event | None:
        admitted = self._progress.admit(event)
        if admitted and admitted.HasField("started"):
            admitted.started.session_id = self._session_id
        if admitted and admitted.HasField("chunk"):
            self._futile, self._wait_until = 0, None
            self._full.clear()
        return admitted

    @contextmanager
    def _open(self, worker: Worker, session: Session) -> Iterator[VerifierCall]:
        request = verifier_pb2.VerifierServiceGenerateRequest(
            generation=self._progress.request(), session_id=session.session_id, ticket=session.ticket_key
        )
        call: VerifierCall = _stub(worker).Generate(request, timeout=self._remaining_s(), metadata=outgoing_metadata())
        worker.calls.add(call)
        worker.sessions += 1
        try:
            yield call
        finally:
            worker.sessions -= 1
            worker.calls.discard(call)
            call.cancel()

    async def _replacement(self, lost_worker: Worker, lost: VerifierLost) -> Worker:
        """Another verifier, waited for; in the second round the lost one will do if it is back."""
        self._futile += 1
        if self._futile > MAX_FUTILE_REPLAYS:
            raise lost.error
        end = time.monotonic() + self._settings.migrate_wait_s
        avoid = {lost_worker}
        while not (worker := self._choose(avoid)):
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise no_verifier(self._model) from lost
            await self._registry.changed(min(left_s, self._settings.reconnect_s))
            avoid.clear()
        self._state.counters.verifier_migrations += 1
        log.warning("generation moved", lost=lost_worker.address, to=worker.address, reason=lost.error.reason)
        return worker

    async def _with_room(self, full: Worker, verdict: ResourceExhausted) -> Worker:
        """Another verifier than those that are full; a text that has begun also waits for one of them.

        Raises the verdict if there is none, for the text that has begun after ``migrate_wait_s``.
        """
        self._full.add(full)
        if self._wait_until is None:
            self._wait_until = time.monotonic() + self._settings.migrate_wait_s
        while not (worker := self._choose(self._full)):
            left_s = self._wait_until - time.monotonic()
            if not self._progress.tokens or left_s <= 0:
                raise verdict
            await asyncio.sleep(min(left_s, self._settings.reconnect_s))
            self._full.clear()
        return worker

    def _choose(self, avoid: Collection[Worker] = ()) -> Worker | None:
        return self._state.chooser.verifier(self._model, self._prompt, avoid)

    def _learn(self, worker: Worker, drafts: Attachments, usage: verifier_pb2.Usage) -> None:
        """The verifier has done its part, and told what the drafts' guesses came to."""
        self._state.chooser.succeeded(worker)
        if usage.nodes_verified:
            drafts.helped(usage.nodes_accepted / usage.steps)

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)


def resolve_model(registry: Registry, name: str) -> str:
    """The served model that a request means. Raises MODEL_UNKNOWN, MODEL_REQUIRED, NO_VERIFIER."""
    served = sorted(registry.models())
    if not served:
        raise no_verifier(name)
    if not name and len(served) > 1:
        raise InvalidArgument("MODEL_REQUIRED", f"name one of the served models: {', '.join(served)}", field="model")
    if name and name not in served:
        raise NotFound("MODEL_UNKNOWN", f"{name!r} is not served; served: {', '.join(served)}", field="model")
    return name or served[0]


def no_verifier(model: str) -> Unavailable:
    which = f" of {model}" if model else ""
    return Unavailable("NO_VERIFIER", f"no verifier{which} is ready", retry_after_ms=RETRY_MS)


def _judged(error: DraftwoodError, *, in_band: bool) -> DraftwoodError | VerifierLost:
    """A verdict as it is; a loss wrapped. What a verifier says of itself when it goes (UNAVAILABLE) is a loss too."""
    lost = isinstance(error, Unavailable) or (isinstance(error, Internal) and not in_band)
    return VerifierLost(error) if lost else error


async def _end(call: VerifierCall) -> None:
    """Lets the call end by itself: a cancelled stream costs memory (grpc#43360)."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await call.read()
    except (grpc.RpcError, TimeoutError):
        pass
    except asyncio.CancelledError:  # the verifier has left the pool meanwhile
        if being_cancelled():
            raise


def _stub(worker: Worker) -> Any:
    return verifier_pb2_grpc.VerifierServiceStub(worker.channel)  # type: ignore[no-untyped-call]
