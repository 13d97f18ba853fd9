"""The draft worker's end of its one stream to a verifier."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from draft_service.core import DraftCore, Outcome
from draft_service.drafter import SessionCommitted, SessionStart, StepMs
from draftwood.credentials import Role, role_host
from draftwood.errors import DraftwoodError, FailedPrecondition, InvalidArgument, Unavailable
from draftwood.parameters import Rule, SamplingParams
from draftwood.rpc.channel import Dialer
from draftwood.rpc.status import from_rpc_error
from draftwood.rpc.tracing import NO_SPAN, Span, begin_span
from draftwood.runtime.worker import Worker
from draftwood.telemetry import get_logger
from draftwood.v1 import draft_pb2
from draftwood.v1.verifier_pb2_grpc import VerifierServiceStub
from draftwood.vocabulary import check
from draftwood.wire import (
    PROTOCOL_VERSION,
    Drawing,
    FeatureChunk,
    SessionGrowth,
    decode_chunk,
    decode_commits,
    decode_step_times,
    drawing_from_proto,
    encode_growth,
    error_from_proto,
    tokenizer_from_proto,
)

log = get_logger(__name__)

RULES: dict[draft_pb2.Rule, Rule] = {getattr(draft_pb2, f"RULE_{rule.name}"): rule for rule in Rule}


@dataclass(frozen=True, slots=True)
class _Attached:
    handle: int
    started: asyncio.Future[None]
    span: Span  # from the join to whatever ends the session for us


class VerifierLink:
    """All sessions of one verifier, multiplexed on one stream. It ends with the stream; the owner makes a new one."""

    def __init__(
        self,
        link_id: int,
        address: str,
        info: draft_pb2.DraftInfo,
        core: DraftCore,
        worker: Worker[Outcome],
        dialer: Dialer,
    ) -> None:
        self.link_id = link_id
        self.address = address
        self.draining = False
        self._info = info
        self._core = core
        self._worker = worker
        self._dialer = dialer
        self._handles = itertools.count(1)
        self._sessions: dict[str, _Attached] = {}
        self._step_ms: StepMs = ()
        self._drawing = Drawing()
        self._canary = ""  # the session that the verifier tries our guesses on; nobody has attached us to it
        self._welcome: asyncio.Future[draft_pb2.Welcome] = asyncio.get_running_loop().create_future()
        self._outbox = draft_pb2.SpeculateRequest()
        self._growths: list[SessionGrowth] = []
        self._wake = asyncio.Event()
        self._closed = False
        # In a context of its own: the stream outlives the request that it is opened for.
        self.task = asyncio.create_task(self._run(), context=contextvars.Context())

    # --- for the service ---

    @property
    def sessions(self) -> int:
        """Sessions that are attached, or about to be."""
        return len(self._sessions) - (self._canary in self._sessions)

    async def attach(self, session_id: str, ticket: bytes) -> None:
        """Joins a session and returns when the verifier has started it; raises its refusal."""
        if session_id not in self._sessions:
            self._join(session_id, ticket, begin_span("draft.session", session=session_id, verifier=self.address))
        await asyncio.shield(self._sessions[session_id].started)

    def _join(self, session_id: str, ticket: bytes, span: Span) -> None:
        attached = _Attached(next(self._handles), asyncio.get_running_loop().create_future(), span)
        self._sessions[session_id] = attached
        self._outbox.joins.append(draft_pb2.Join(session_id=session_id, ticket=ticket, handle=attached.handle))
        self._wake.set()

    def detach(self, session_id: str) -> None:
        attached = self._sessions.pop(session_id, None)
        if attached:
            self._outbox.leaves.append(draft_pb2.Leave(handle=attached.handle))
            self._wake.set()
            self._drop(attached.handle)
            attached.span.end(ended="detached")
            if not attached.started.done():
                attached.started.set_result(None)

    def tell(self, growths: Sequence[SessionGrowth], leaves: Sequence[int]) -> None:
        """Queues what a level has to send; all of it goes into one message."""
        self._growths += growths
        self._outbox.leaves.extend(draft_pb2.Leave(handle=handle) for handle in leaves)
        self._forget(set(leaves))
        self._wake.set()

    def close(self) -> None:
        """Ends the stream."""
        self._closed = True
        self._wake.set()

    # --- the stream ---

    async def _run(self) -> None:
        """Opens the stream and follows it to its end; whoever waits for an answer then gets the reason."""
        reason: DraftwoodError = Unavailable("TRANSPORT", f"the stream to {self.address} has ended")
        try:
            async with self._dialer.open(self.address, role_host(Role.VERIFIER)) as channel:
                call = VerifierServiceStub(channel).Speculate(self._send())  # type: ignore[no-untyped-call]
                async for response in call:
                    self._handle(response)
        except grpc.RpcError as error:
            reason = from_rpc_error(error)
        except DraftwoodError as error:
            reason = error
        finally:
            self._closed = True
            self._end(reason)

    def _end(self, reason: DraftwoodError) -> None:
        log.info("stream to verifier ended", verifier=self.address, reason=reason.reason, error=reason.message)
        waiting: list[asyncio.Future[object]] = [self._welcome, *(a.started for a in self._sessions.values())]  # type: ignore[list-item]
        for future in waiting:
            if not future.done():
                future.set_exception(reason)
                future.exception()  # nobody may be waiting any more
        for attached in self._sessions.values():
            attached.span.end(ended=reason.reason)
        self._sessions.clear()
        self._worker.post(lambda: self._core.close_link(self.link_id))

    async def _send(self) -> AsyncIterator[draft_pb2.SpeculateRequest]:
        """Hello alone, and once the verifier has answered it, whatever gathers."""
        yield draft_pb2.SpeculateRequest(hello=draft_pb2.Hello(protocol_version=PROTOCOL_VERSION, draft=self._info))
        await asyncio.wait([self._welcome])
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            request, self._outbox = self._outbox, draft_pb2.SpeculateRequest()
            if self._growths:
                request.growth.CopyFrom(encode_growth(self._growths))
                self._growths = []
            if request.ByteSize():
                yield request

    def _handle(self, response: draft_pb2.SpeculateResponse) -> None:
        if response.HasField("welcome"):
            self._greet(response.welcome)
        if response.HasField("step_times"):
            self._step_ms = decode_step_times(response.step_times)
        if response.HasField("drawing"):
            self._drawing = drawing_from_proto(response.drawing)
        for start in response.starts:
            self._start(start)
        if response.HasField("commits"):
            self._commit(response.commits)
        if response.features:
            self._feed([decode_chunk(chunk) for chunk in response.features])
        for stop in response.stops:
            self._drop(stop.handle)
        self._forget({stop.handle for stop in response.stops})
        self.draining |= response.HasField("drain")
        for error in response.errors:
            self._refused(error)

    def _greet(self, welcome: draft_pb2.Welcome) -> None:
        """Checks that the verifier fits; raises FailedPrecondition, which ends the stream."""
        vocabulary = self._core.drafter.vocabulary
        if welcome.protocol_version != PROTOCOL_VERSION:
            message = f"the verifier speaks protocol version {welcome.protocol_version}, we speak {PROTOCOL_VERSION}"
            raise FailedPrecondition("PROTOCOL_VERSION", message)
        if vocabulary is not None:
            check(vocabulary, tokenizer_from_proto(welcome.tokenizer))
        self._welcome.set_result(welcome)
        if welcome.HasField("canary"):
            self._canary = welcome.canary.session_id
            self._join(self._canary, welcome.canary.ticket, NO_SPAN)

    def _start(self, start: draft_pb2.Start) -> None:
        """Takes a session up, unless it has been detached while the verifier's answer was on its way."""
        attached = next((a for a in self._sessions.values() if a.handle == start.handle), None)
        if attached is None:
            return
        welcome = self._welcome.result()
        session = SessionStart(
            epoch=start.epoch,
            tokens=tuple(start.tokens),
            sampling=SamplingParams(temperature=start.temperature, seed=start.seed),
            budget=start.budget,
            vocab_size=welcome.tokenizer.size,
            max_nodes=welcome.caps.max_nodes,
            max_depth=welcome.caps.max_depth,
            max_context_tokens=welcome.caps.max_context_tokens,
            rule=RULES.get(start.rule, Rule.SHARED_NOISE),
            step_ms=self._step_ms,
            drawing=self._drawing,
        )
        loop, handle = asyncio.get_running_loop(), start.handle

        def run() -> None:
            if not self._core.open((self.link_id, handle), session):
                loop.call_soon_threadsafe(self.tell, (), [handle])

        self._worker.post(run)
        if not attached.started.done():
            attached.started.set_result(None)
            attached.span.event("started", tokens=len(start.tokens))

    def _commit(self, message: draft_pb2.Commits) -> None:
        """Hands over all sessions' commits at once, so that the next level takes them together."""
        commits = decode_commits(message)
        loop, step_ms, drawing = asyncio.get_running_loop(), self._step_ms, self._drawing

        def run() -> None:
            for c in commits:
                committed = SessionCommitted(c.epoch, c.length, c.tokens, c.budget, step_ms, drawing)
                if not self._core.commit((self.link_id, c.handle), committed):
                    loop.call_soon_threadsafe(self.tell, (), [c.handle])

        self._feed(
            [
                FeatureChunk(c.handle, c.length - 1 - c.feature_count, c.feature_count, c.features)
                for c in commits
                if c.feature_count
            ]
        )
        self._worker.post(run)

    def _feed(self, chunks: Sequence[FeatureChunk]) -> None:
        """Hands features over; raises InvalidArgument FEATURES if they are not what was asked for."""
        request = self._core.drafter.features
        if not chunks or request is None:
            return
        for chunk in chunks:
            if len(chunk.data) != chunk.count * request.position_bytes:
                expected = f"{chunk.count} positions of {request.position_bytes} bytes"
                raise InvalidArgument("FEATURES", f"{len(chunk.data)} bytes, but {expected}", field="features.data")
        loop, decoded = asyncio.get_running_loop(), [request.decode(chunk.data) for chunk in chunks]

        def run() -> None:
            for chunk, features in zip(chunks, decoded, strict=True):
                if not self._core.feed((self.link_id, chunk.handle), chunk.first, features):
                    loop.call_soon_threadsafe(self.tell, (), [chunk.handle])

        self._worker.post(run)

    def _refused(self, error: draft_pb2.SessionError) -> None:
        reason = error_from_proto(error.error)
        log.warning("verifier refuses", verifier=self.address, reason=reason.reason, error=reason.message)
        if not error.HasField("handle"):
            if not self._welcome.done():
                raise reason
            return
        for session_id, attached in list(self._sessions.items()):
            if attached.handle == error.handle and not attached.started.done():
                attached.started.set_exception(reason)
                attached.started.exception()
                attached.span.end(ended=reason.reason)
                del self._sessions[session_id]

    def _forget(self, handles: set[int]) -> None:
        for attached in self._sessions.values():
            if attached.handle in handles:
                attached.span.end(ended="stopped")
        self._sessions = {name: a for name, a in self._sessions.items() if a.handle not in handles}

    def _drop(self, handle: int) -> None:
        self._worker.post(lambda: self._core.close((self.link_id, handle)))
