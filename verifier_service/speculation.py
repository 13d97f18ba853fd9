"""The verifier's end of one draft worker's stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from draftwood.config import VerifierSettings
from draftwood.errors import DraftwoodError, FailedPrecondition, InvalidArgument
from draftwood.features import check_offer
from draftwood.parameters import Rule
from draftwood.rpc.handlers import DecodeFailure
from draftwood.runtime.worker import Worker
from draftwood.telemetry import METRICS, get_logger
from draftwood.v1 import draft_pb2
from draftwood.vocabulary import Vocabulary, check
from draftwood.wire import (
    PROTOCOL_VERSION,
    Drawing,
    FeatureChunk,
    SessionCommit,
    SessionGrowth,
    decode_growth,
    drawing_to_proto,
    encode_chunk,
    encode_commits,
    error_to_proto,
    feature_request_from_proto,
    smaller_caps,
    tokenizer_from_proto,
    tokenizer_to_proto,
)
from verifier_service.canary import Canary, CanaryFeatures, CanaryResult, Trial
from verifier_service.engine import Engine, Outcome, StartInfo
from verifier_service.live_tree import Nodes
from verifier_service.requests import rule_to_proto
from verifier_service.step_curve import StepCurve

log = get_logger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
MOST_FEATURE_BYTES = 4 << 20
"""Features in one message, but for those that a single commit carries beyond; the rest follows in further messages."""
MOST_IN_HAND = 16
"""Messages of one draft that wait for the engine; the draft's further ones wait on the wire."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the stream is joined to."""

    incarnation: str
    model: str
    vocabulary: Vocabulary
    engine: Engine
    worker: Worker[Outcome]
    settings: VerifierSettings
    canary: Canary | None


class DraftLink:
    """Reads the draft's messages and writes ours: one reader, one sender, answers collected while a send is on."""

    def __init__(self, link_id: int, target: Target) -> None:
        self.link_id = link_id
        self._target = target
        self._caps = draft_pb2.Caps()
        self._outbox = draft_pb2.SpeculateResponse()
        self._commits: deque[SessionCommit] = deque()
        self._features: deque[FeatureChunk] = deque()
        self._wake = asyncio.Event()
        self._failure: DraftwoodError | None = None
        self._draft = draft_pb2.DraftInfo()
        self._trial: Trial | None = None  # until its result is there; the engine's thread alone touches it
        self.canary: CanaryResult | None = None
        self._curve = StepCurve(target.engine.planner.times, target.settings.max_nodes)
        self._loop = asyncio.get_running_loop()

    async def serve(self, requests: AsyncIterator[object]) -> AsyncGenerator[draft_pb2.SpeculateResponse, None]:
        """The whole stream, from Hello until the draft ends it; raises DraftwoodError if the two do not fit."""
        welcome = self._welcome(await anext(requests, None))
        try:
            yield draft_pb2.SpeculateResponse(welcome=welcome)
            async with aclosing(self._converse(requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._target.worker.post(lambda: self._target.engine.close_link(self.link_id))

    async def _converse(self, requests: AsyncIterator[object]) -> AsyncGenerator[draft_pb2.SpeculateResponse, None]:
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            while not reader.done():
                await self._wake.wait()
                self._wake.clear()
                if response := self._take():
                    yield response
            reader.result()
        finally:
            reader.cancel()

    def _welcome(self, first: object) -> draft_pb2.Welcome:
        """Answers Hello; raises FailedPrecondition if the two sides do not fit, InvalidArgument if it is no Hello."""
        if isinstance(first, DecodeFailure):
            raise first.error
        if not isinstance(first, draft_pb2.SpeculateRequest) or not first.HasField("hello"):
            raise FailedPrecondition("HELLO_MISSING", "the first message on the stream must be Hello", field="hello")
        hello, target = first.hello, self._target
        if hello.protocol_version != PROTOCOL_VERSION:
            message = f"protocol version {hello.protocol_version} is not spoken here, {PROTOCOL_VERSION} is"
            raise FailedPrecondition("PROTOCOL_VERSION", message, field="hello.protocol_version")
        if hello.draft.HasField("tokenizer"):
            check(target.vocabulary, tokenizer_from_proto(hello.draft.tokenizer))
        asked = feature_request_from_proto(hello.draft.features) if hello.draft.HasField("features") else None
        runtime, settings = target.engine.runtime, target.settings
        if asked:
            check_offer(asked, runtime.features.layers if runtime.features else (), runtime.hidden_size, target.model)
        ours = draft_pb2.Caps(
            max_nodes=settings.max_live_nodes,
            max_depth=settings.max_depth,
            max_sessions=settings.max_sessions,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_context_tokens=target.engine.context_limit,
        )
        self._caps = smaller_caps(ours, hello.draft.caps)
        self._draft = hello.draft
        rules = frozenset(rule for rule in Rule if rule_to_proto(rule) in hello.draft.rules)
        target.worker.post(lambda: target.engine.open_link(self.link_id, self._model, rules, asked))
        log.info("draft joined", kind=hello.draft.kind, model=hello.draft.model, incarnation=hello.draft.incarnation)
        welcome = draft_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            incarnation=target.incarnation,
            model=target.model,
            tokenizer=tokenizer_to_proto(target.vocabulary.fingerprint()),
            caps=self._caps,
        )
        if target.canary:
            known = CanaryFeatures.of(target.canary, runtime, asked) if asked else None
            self._trial = trial = Trial(target.canary, self._caps.max_nodes, settings.max_live_nodes, known)
            welcome.canary.session_id, welcome.canary.ticket = trial.session_id, trial.ticket
        return welcome

    @property
    def incarnation(self) -> str:
        """Of the draft worker; empty before its Hello."""
        return self._draft.incarnation

    @property
    def _model(self) -> str:
        """The name that the draft model's calibrations and metrics go by."""
        return f"{self._draft.kind}:{self._draft.model}"

    # --- from the draft ---

    async def _read(self, requests: AsyncIterator[object]) -> None:
        in_hand = asyncio.Semaphore(MOST_IN_HAND)

        def handled() -> None:
            self._loop.call_soon_threadsafe(in_hand.release)

        async for request in requests:
            await in_hand.acquire()
            if isinstance(request, DecodeFailure):
                self._refuse(request.error)
            elif isinstance(request, draft_pb2.SpeculateRequest):
                self._handle(request)
            self._target.worker.post(handled)

    def _handle(self, request: draft_pb2.SpeculateRequest) -> None:
        for join in request.joins:
            self._join(join)
        if request.HasField("growth"):
            self._grow(request)
        for leave in request.leaves:
            self._leave(leave.handle)
        if request.HasField("error"):
            log.warning("draft reports an error", reason=request.error.reason, message=request.error.message)

    def _join(self, join: draft_pb2.Join) -> None:
        session_id, ticket, handle = join.session_id, join.ticket, join.handle

        def run() -> None:
            self._tell_times()
            try:
                start = self._join_any(session_id, ticket, handle)
            except DraftwoodError as error:
                self._loop.call_soon_threadsafe(self._refuse, error, handle)
            else:
                self._loop.call_soon_threadsafe(self._start, start)

        self._target.worker.post(run)

    def _join_any(self, session_id: str, ticket: bytes, handle: int) -> StartInfo:
        """Joins a session or the canary; on the engine's thread. Raises DraftwoodError."""
        engine, trial = self._target.engine, self._trial
        if trial and handle == trial.handle:
            raise InvalidArgument("HANDLE", f"handle {handle} is in use for the canary", field="join.handle")
        if not trial or session_id != trial.session_id:
            engine.check_ticket(session_id, ticket, self.incarnation)
            return engine.join(self.link_id, handle, session_id)
        if handle in engine.handles(self.link_id):
            raise InvalidArgument("HANDLE", f"handle {handle} is in use", field="join.handle")
        return trial.join(handle, ticket)

    def _grow(self, request: draft_pb2.SpeculateRequest) -> None:
        vocab_size = len(self._target.vocabulary.tokens)
        try:
            growths, refusals = decode_growth(request.growth, vocab_size=vocab_size, max_nodes=self._caps.max_nodes)
        except DraftwoodError as error:
            self._refuse(error)
            return
        for refusal in refusals:
            self._refuse(refusal.error, refusal.handle)
        METRICS.nodes["drafted"].inc(sum(len(g.token) for g in growths))
        self._target.worker.post(lambda: self._grow_all(growths))

    def _tell_times(self) -> None:
        """Says what steps take, if that has moved; on the engine's thread. A full width asks for all nodes anyhow."""
        engine = self._target.engine
        told = self._target.settings.width == "adaptive"
        if told and (news := self._curve.news(len(engine.running), engine.clock())):
            times = draft_pb2.StepTimes(rows=[rows for rows, _ in news], ms=[ms for _, ms in news])
            self._loop.call_soon_threadsafe(self._queue_times, times)

    def _queue_times(self, times: draft_pb2.StepTimes) -> None:
        self._outbox.step_times.CopyFrom(times)
        self._wake.set()

    def _grow_all(self, growths: Sequence[SessionGrowth]) -> None:
        self._tell_times()
        for growth in growths:
            nodes = Nodes(growth.epoch, growth.first_id, growth.parent, growth.token, growth.score, growth.drawn)
            try:
                if self._trial and growth.handle == self._trial.handle:
                    self._try(self._trial, nodes, complete=growth.complete)
                else:
                    self._target.engine.grow(self.link_id, growth.handle, nodes, complete=growth.complete)
            except DraftwoodError as error:
                self._loop.call_soon_threadsafe(self._refuse, error, growth.handle)

    def _try(self, trial: Trial, nodes: Nodes, *, complete: bool) -> None:
        """Takes a growth of the canary's; on the engine's thread. Raises DraftwoodError."""
        commit = trial.grow(nodes, complete=complete)
        if trial.result:
            self._trial = None
            assert trial.handle is not None
            self._loop.call_soon_threadsafe(self._tried, trial.handle, trial.result)
        elif commit:
            self._loop.call_soon_threadsafe(self.tell, [commit], [])

    def _tried(self, handle: int, result: CanaryResult) -> None:
        """The draft has been tried: nothing follows but that it is seen."""
        self.canary = result
        self.tell([], [handle])
        METRICS.canary_share(self._model).set(result.share)
        METRICS.canary_failures.inc(result.failed)
        say = log.warning if result.failed else log.info
        event = "canary failed" if result.failed else "canary passed"
        say(event, model=self._model, incarnation=self.incarnation, taken=result.taken, steps=result.steps)

    def _leave(self, handle: int) -> None:
        def run() -> None:
            if self._trial and handle == self._trial.handle:
                self._trial = None
            else:
                self._target.engine.leave(self.link_id, handle)

        self._target.worker.post(run)

    # --- to the draft ---

    def tell(
        self, commits: Sequence[SessionCommit], stops: Sequence[int], features: Sequence[FeatureChunk] = ()
    ) -> None:
        """Queues what a step has to say; all of it goes into one message, unless its features are too many."""
        self._commits += commits
        self._features += features
        self._outbox.stops.extend(draft_pb2.Stop(handle=handle) for handle in stops)
        self._wake.set()

    def ask_to_draw(self, drawing: Drawing) -> None:
        """Says how to draw from now on; after the welcome."""
        self._outbox.drawing.CopyFrom(drawing_to_proto(drawing))
        self._wake.set()

    def drain(self) -> None:
        """Says that no more sessions are taken here."""
        self._outbox.drain.SetInParent()
        self._wake.set()

    def _start(self, start: StartInfo) -> None:
        self._outbox.starts.append(
            draft_pb2.Start(
                handle=start.handle,
                epoch=start.epoch,
                tokens=start.tokens,
                seed=start.seed,
                rule=rule_to_proto(start.rule),
                temperature=start.temperature,
                budget=start.budget,
                remaining_tokens=start.remaining,
            )
        )
        self._features += start.features
        self._wake.set()

    def _refuse(self, error: DraftwoodError, handle: int | None = None) -> None:
        log.warning("draft message refused", reason=error.reason, error=error.message, field=error.field)
        METRICS.nodes["refused"].inc()
        self._target.engine.totals.refused += 1
        self._outbox.errors.append(draft_pb2.SessionError(handle=handle, error=error_to_proto(error)))
        self._wake.set()

    def _take(self) -> draft_pb2.SpeculateResponse | None:
        response, self._outbox = self._outbox, draft_pb2.SpeculateResponse()
        commits, room = list[SessionCommit](), MOST_FEATURE_BYTES
        while self._commits and room > 0:
            commits.append(self._commits.popleft())
            room -= len(commits[-1].features)
            METRICS.features["commit"].inc(commits[-1].feature_count)
            METRICS.feature_bytes["commit"].inc(len(commits[-1].features))
        if commits:
            response.commits.CopyFrom(encode_commits(commits))
        while self._features and room > 0:
            chunk = self._features.popleft()
            response.features.append(encode_chunk(chunk))
            room -= len(chunk.data)
            METRICS.features["chunk"].inc(chunk.count)
            METRICS.feature_bytes["chunk"].inc(len(chunk.data))
        if self._commits or self._features:
            self._wake.set()
        return response if response.ByteSize() else None
