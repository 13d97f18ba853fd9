"""The verifier's gRPC server: requests and drafts' streams in, text and commits out.

The servicer decodes, calls the engine's thread, and encodes. The engine speaks first in values; protobuf ends here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftwood.acceptance import FinishReason
from draftwood.config import VerifierSettings
from draftwood.errors import DraftwoodError, InvalidArgument, Unavailable
from draftwood.parameters import Rule
from draftwood.rpc.access import server_access
from draftwood.rpc.server import RpcServer
from draftwood.rpc.tracing import start_tracing
from draftwood.rpc.watching import watched
from draftwood.runtime.demo_model import DEMO, TARGET_NAME, demo_target
from draftwood.runtime.model import ModelRuntime, load_model, resolve_device, resolve_dtype
from draftwood.runtime.text import TextCodec, TextStream, end_tokens
from draftwood.runtime.worker import Worker
from draftwood.telemetry import METRICS, MOST_DEPTH, get_logger, serve_metrics
from draftwood.v1 import draft_pb2, verifier_pb2
from draftwood.vllm_names import add_vllm_names
from draftwood.vocabulary import Vocabulary
from draftwood.wire import Drawing, error_to_proto, tokenizer_to_proto
from verifier_service.canary import TEXT as CANARY_TEXT
from verifier_service.canary import Canary, learn_canary
from verifier_service.constraints import GrammarCompiler
from verifier_service.engine import Engine, Outcome
from verifier_service.policy import LEASE_S, PolicyBook, Terms, terms_from_proto, terms_to_proto
from verifier_service.requests import check_request, rule_to_proto
from verifier_service.session import Emitted, Ended, Stats, TokenLogprobs
from verifier_service.speculation import DraftLink, Target

log = get_logger(__name__)

REASONS = {
    FinishReason.STOP: verifier_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: verifier_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: verifier_pb2.FINISH_REASON_CANCELLED,
}
LAPSE_SLACK_S = 0.1
"""A lease is over by then, however coarse the clock is."""
LAST_WORDS_S = 0.5
"""For streams that are ending by themselves when the server stops; load streams and idle drafts never do."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that exists once the model is there."""

    name: str
    codec: TextCodec
    vocabulary: Vocabulary
    end_tokens: frozenset[int]
    grammars: GrammarCompiler
    engine: Engine
    canary: Canary | None


class Admitted:
    """The session has its pages and runs."""


Event = Admitted | Emitted | Ended | DraftwoodError


class VerifierServer:
    """One verifier process: gRPC in front, the engine's thread behind."""

    def __init__(self, settings: VerifierSettings) -> None:
        self.settings = settings
        self.incarnation = uuid.uuid4().hex
        self.failure: BaseException | None = None
        self.draining = False
        self._rpc = RpcServer(access=server_access(settings))
        self._rpc.add(verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"], self)
        self._worker: Worker[Outcome] = Worker("verifier-engine", self._publish)
        self._loaded: Loaded | None = None
        self._streams: dict[str, asyncio.Queue[Event]] = {}
        self._idle = asyncio.Event()  # no request is being served
        self._idle.set()
        self._links: dict[int, DraftLink] = {}
        self._link_count = 0
        self._policies = PolicyBook(time.monotonic)
        self._terms = Terms()  # in force
        self._loading: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> str:
        """Binds the port and returns host:port; the model loads behind it, health turns SERVING when it is warm."""
        self._loop = asyncio.get_running_loop()
        serve_metrics(self.settings.metrics_host, self.settings.metrics_port)
        start_tracing("verifier", self.settings.traces)
        address = await self._rpc.start(self.settings.listen)
        self._loading = asyncio.create_task(self._load())
        return address

    async def ready(self) -> None:
        """Waits until the model serves; raises what made it fail."""
        assert self._loading is not None
        await asyncio.shield(self._loading)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new work, tells the drafts, gives running requests the grace, and ends."""
        self.draining = True
        for link in self._links.values():
            link.drain()
        if self._loading is not None:
            self._loading.cancel()
        await self._rpc.set_serving(False)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        await self._rpc.stop(min(grace_s, LAST_WORDS_S))
        await asyncio.to_thread(self._worker.stop)
        if self._loaded is not None:
            self._loaded.grammars.close()

    async def _load(self) -> None:
        try:
            self._loaded = await asyncio.wrap_future(self._worker.start(self._load_model, lambda made: made.engine))
            if self.settings.vllm_metrics:
                add_vllm_names(METRICS, self._loaded.name)
            await self._rpc.set_serving(True)
            log.info("serving", model=self._loaded.name)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = error
            log.exception("the model cannot be served", model=self.settings.model)
            raise

    def _load_model(self) -> Loaded:
        """Loads, warms up and measures; runs on the engine's thread."""
        settings = self.settings
        if settings.threads:
            torch.set_num_threads(settings.threads)
        path: str | Path = demo_target() if settings.model == DEMO else settings.model
        device = resolve_device(settings.device)
        model = load_model(str(path), device, resolve_dtype(settings.dtype, device))
        codec = TextCodec(path)
        runtime = ModelRuntime(
            model,
            kv_pages=settings.kv_pages,
            page_tokens=settings.page_tokens,
            longest_tokens=settings.max_context_tokens + settings.max_nodes + 1,
            features=settings.features,
        )
        vocabulary = codec.vocabulary(runtime.vocab_size)
        engine = Engine(runtime, settings, token_count=len(vocabulary.tokens))
        runtime.capture(len(vocabulary.tokens))
        name = settings.name or (TARGET_NAME if settings.model == DEMO else Path(settings.model).name)
        ends = end_tokens(path, model.config.eos_token_id)
        canary = None
        if settings.canary:
            canary = learn_canary(runtime, codec.encode(CANARY_TEXT), engine.token_count, engine.context_limit)
            log.info("canary learnt" if canary else "no canary: its text has no room here")
        return Loaded(name, codec, vocabulary, ends, GrammarCompiler(codec, ends), engine, canary)

    @property
    def loaded(self) -> Loaded:
        """The model; raises Unavailable LOADING or DRAINING when requests cannot be taken."""
        if self.draining:
            raise Unavailable("DRAINING", "this verifier is shutting down", retry_after_ms=1000)
        if self._loaded is None:
            raise Unavailable("LOADING", f"model {self.settings.model!r} is still loading", retry_after_ms=1000)
        return self._loaded

    # --- from the engine's thread ---

    def _publish(self, outcome: Outcome) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._dispatch, outcome)

    def _dispatch(self, outcome: Outcome) -> None:
        """Hands an outcome to the streams it concerns: one message a draft worker, one event a session."""
        for link_id in outcome.commits.keys() | outcome.stops.keys() | outcome.features.keys():
            link = self._links.get(link_id)
            if link:
                features = outcome.features.get(link_id, [])
                link.tell(outcome.commits.get(link_id, []), outcome.stops.get(link_id, []), features)
        for session_id in outcome.admitted:
            self._deliver(session_id, Admitted())
        for emitted in outcome.emitted:
            self._deliver(emitted.session_id, emitted)
        for ended in outcome.ended:
            self._deliver(ended.session_id, ended)
        for session_id, error in outcome.failed:
            self._deliver(session_id, error)
        assert self._loop is not None
        self._loop.call_soon(self._count, outcome)  # behind the streams, which have been woken

    def _deliver(self, session_id: str, event: Event) -> None:
        stream = self._streams.get(session_id)
        if stream:
            stream.put_nowait(event)

    def _count(self, outcome: Outcome) -> None:
        assert self._loaded is not None
        engine = self._loaded.engine
        METRICS.sessions["running"].set(len(engine.sessions) - len(engine.preempted))
        METRICS.sessions["preempted"].set(len(engine.preempted))
        METRICS.sessions["waiting"].set(len(engine.waiting))
        METRICS.kv_pages["free"].set(engine.runtime.pool.free)
        METRICS.kv_pages["cached"].set(engine.runtime.pool.cached)
        METRICS.kv_pages["session"].set(engine.runtime.pool.held)
        if outcome.step_s:
            METRICS.steps.inc()
            METRICS.step_seconds.observe(outcome.step_s)
            METRICS.nodes["verified"].inc(outcome.verified)
            METRICS.step_width[outcome.width_reason].inc()
            for part, seconds in outcome.spent_s.items():
                METRICS.step_parts[part].inc(seconds)
            for above, count in enumerate(outcome.depths):
                if count:
                    METRICS.verified_depth[above].inc(count)
            for emitted in outcome.emitted:
                for depth in range(1, emitted.accepted + 1):
                    METRICS.accepted_depth[min(depth, MOST_DEPTH) - 1].inc()
        METRICS.tokens.inc(sum(len(e.tokens) for e in outcome.emitted))
        METRICS.nodes["accepted"].inc(sum(e.accepted for e in outcome.emitted))
        for ended in outcome.ended:
            METRICS.texts[ended.reason.value].inc()
        METRICS.prompt_tokens.inc(sum(e.prompt_tokens for e in outcome.ended))
        METRICS.cached_prompt_tokens.inc(sum(e.stats.cached_prompt for e in outcome.ended))

    # --- VerifierService ---

    async def Generate(
        self, request: verifier_pb2.VerifierServiceGenerateRequest, context: Any
    ) -> AsyncGenerator[verifier_pb2.VerifierServiceGenerateResponse, None]:
        try:
            with watched("verifier", session=request.session_id) as watch:
                async with aclosing(self._generate(request)) as events:
                    async for event in events:
                        watch.see(event)
                        yield verifier_pb2.VerifierServiceGenerateResponse(event=event)
        except DraftwoodError as error:  # in-band first: a status may be lost when a stream ends
            event = verifier_pb2.GenerationEvent(error=error_to_proto(error))
            yield verifier_pb2.VerifierServiceGenerateResponse(event=event)
            raise

    async def _generate(
        self, message: verifier_pb2.VerifierServiceGenerateRequest
    ) -> AsyncGenerator[verifier_pb2.GenerationEvent, None]:
        loaded = self.loaded
        checked = await asyncio.to_thread(
            check_request,
            message,
            loaded.codec,
            token_count=len(loaded.vocabulary.tokens),
            context_limit=loaded.engine.context_limit,
            max_nodes=self.settings.max_nodes,
            end_tokens=loaded.end_tokens,
            seed=secrets.randbits(64),
            rule=Rule(self.settings.rule),
        )
        resumed = checked.resumed
        request = await loaded.grammars.attach(checked.request)
        if request.session_id in self._streams:
            raise InvalidArgument("SESSION_EXISTS", f"session {request.session_id!r} is running", field="session_id")
        stream = self._streams[request.session_id] = asyncio.Queue()
        self._idle.clear()
        started = verifier_pb2.Started(
            session_id=request.session_id,
            model=loaded.name,
            seed=request.sampling.seed,
            prompt_tokens=len(request.prompt),
            rule=rule_to_proto(request.effective_rule),
            lossy=request.effective_rule.lossy,
        )
        try:
            if resumed.finish:  # the tokens to resume from are the whole text
                yield verifier_pb2.GenerationEvent(started=started)
                prompt, generated = len(request.prompt), len(request.resume)
                ended = Ended(request.session_id, resumed.finish, prompt, generated, 0.0, Stats(), stop=resumed.stop)
                yield verifier_pb2.GenerationEvent(finished=_finished(ended))
                return
            submitted = self._worker.call(lambda: self._publish(loaded.engine.submit(request)))
            await asyncio.wrap_future(submitted)
            admitted = await stream.get()  # only now may drafts join
            if isinstance(admitted, DraftwoodError):
                raise admitted
            yield verifier_pb2.GenerationEvent(started=started)
            while not isinstance(event := await stream.get(), Ended):
                yield _chunk(event, checked.text, loaded.codec)
            yield verifier_pb2.GenerationEvent(finished=_finished(event))
        finally:
            del self._streams[request.session_id]
            if not self._streams:
                self._idle.set()
            self._worker.post(lambda: self._publish(loaded.engine.cancel(request.session_id)))

    async def Speculate(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncGenerator[draft_pb2.SpeculateResponse, None]:
        try:
            async with aclosing(self._speculate(requests)) as responses:
                async for response in responses:
                    yield response
        except DraftwoodError as error:  # in-band first, as above
            yield draft_pb2.SpeculateResponse(errors=[draft_pb2.SessionError(error=error_to_proto(error))])
            raise

    async def _speculate(self, requests: AsyncIterator[Any]) -> AsyncGenerator[draft_pb2.SpeculateResponse, None]:
        loaded = self.loaded
        self._link_count += 1
        engine, canary = loaded.engine, loaded.canary
        target = Target(self.incarnation, loaded.name, loaded.vocabulary, engine, self._worker, self.settings, canary)
        link = self._links[self._link_count] = DraftLink(self._link_count, target)
        if self._terms.drawing != Drawing():
            link.ask_to_draw(self._terms.drawing)
        try:
            async with aclosing(link.serve(requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            del self._links[link.link_id]

    async def GetModelInfo(
        self, request: verifier_pb2.VerifierServiceGetModelInfoRequest, context: Any
    ) -> verifier_pb2.VerifierServiceGetModelInfoResponse:
        loaded = self.loaded
        runtime = loaded.engine.runtime
        model = verifier_pb2.ModelInfo(
            name=loaded.name,
            incarnation=self.incarnation,
            tokenizer=tokenizer_to_proto(loaded.vocabulary.fingerprint()),
            caps=draft_pb2.Caps(
                max_nodes=self.settings.max_nodes,
                max_depth=self.settings.max_depth,
                max_sessions=self.settings.max_sessions,
                max_context_tokens=loaded.engine.context_limit,
            ),
            dtype=str(runtime.dtype).removeprefix("torch."),
            device=str(runtime.device),
        )
        return verifier_pb2.VerifierServiceGetModelInfoResponse(model=model)

    async def SetPolicy(
        self, request: verifier_pb2.VerifierServiceSetPolicyRequest, context: Any
    ) -> verifier_pb2.VerifierServiceSetPolicyResponse:
        engine = self.loaded.engine
        self._policies.set(request.setter, terms_from_proto(request.policy))
        self._follow_policies(engine)
        if request.setter:
            asyncio.get_running_loop().call_later(LEASE_S + LAPSE_SLACK_S, self._follow_policies, engine)
        await asyncio.wrap_future(self._worker.call(lambda: None))  # behind what was posted: it is in force
        return verifier_pb2.VerifierServiceSetPolicyResponse()

    def _follow_policies(self, engine: Engine) -> None:
        """Has the engine and the drafts follow what is in force now, if that has changed."""
        terms, before = self._policies.in_force(), self._terms
        if terms == before or self.draining:
            return
        self._terms = terms
        log.info("policy", nodes=terms.nodes.max_session_nodes, step_nodes=terms.nodes.max_step_nodes,
                 depth=terms.drawing.max_depth, chain=terms.drawing.chain)  # fmt: skip
        self._worker.post(lambda: engine.set_policy(terms.nodes, terms.drawing.max_depth))
        if terms.drawing != before.drawing:
            for link in self._links.values():
                link.ask_to_draw(terms.drawing)

    async def WatchLoad(
        self, request: verifier_pb2.VerifierServiceWatchLoadRequest, context: Any
    ) -> AsyncGenerator[verifier_pb2.VerifierServiceWatchLoadResponse, None]:
        while True:
            yield self._load_report()
            await asyncio.sleep(self.settings.load_interval_s)

    def _load_report(self) -> verifier_pb2.VerifierServiceWatchLoadResponse:
        report = verifier_pb2.VerifierServiceWatchLoadResponse(
            incarnation=self.incarnation, max_sessions=self.settings.max_sessions, draining=self.draining
        )
        if self._loaded is not None:
            engine, totals = self._loaded.engine, self._loaded.engine.totals  # plain numbers: read without the thread
            pool = engine.runtime.pool
            preempted = len(engine.preempted)
            report.running, report.waiting = len(engine.sessions) - preempted, len(engine.waiting) + preempted
            report.preempted, report.preemptions = preempted, totals.preemptions
            report.free_pages, report.total_pages = pool.available, pool.total
            report.cached_pages = pool.cached
            report.steps, report.tokens = totals.steps, totals.tokens
            report.nodes_verified, report.nodes_accepted = totals.verified, totals.accepted
            report.nodes_stale, report.growths_refused = totals.stale, totals.refused
            report.step_ms, report.width = totals.step_s * 1e3, totals.width
            report.narrow_steps = totals.narrow
            report.queue_wait_ms = engine.waiting.longest_wait_s(engine.clock()) * 1e3
            report.policy.CopyFrom(terms_to_proto(self._terms))
            report.canaries.extend(_canary(link) for link in self._links.values() if link.canary)
        return report


def _canary(link: DraftLink) -> verifier_pb2.CanaryResult:
    result = link.canary
    assert result is not None
    return verifier_pb2.CanaryResult(
        incarnation=link.incarnation, taken=result.taken, steps=result.steps, failed=result.failed
    )


def _chunk(event: Event, text: TextStream, codec: TextCodec) -> verifier_pb2.GenerationEvent:
    """One step's tokens with their text; raises the error that ended the session."""
    if isinstance(event, DraftwoodError):
        raise event
    assert isinstance(event, Emitted)
    chunk = verifier_pb2.Chunk(
        offset=event.offset,
        tokens=event.tokens,
        pieces=event.pieces if event.pieces is not None else _pieces(event, text),
        accepted=event.accepted,
        logprobs=[_logprobs(token, codec) for token in event.logprobs],
    )
    return verifier_pb2.GenerationEvent(chunk=chunk)


def _pieces(event: Emitted, text: TextStream) -> tuple[str, ...]:
    """The text of a step's tokens where there are no stop strings: the end is known, only its text is not."""
    last = len(event.tokens) - 1
    for k, token in enumerate(event.tokens):
        text.feed(token, event.finish if k == last else None)
    return text.take()


def _logprobs(token: TokenLogprobs, codec: TextCodec) -> verifier_pb2.TokenLogprobs:
    top = [
        verifier_pb2.TokenAlternative(token=other, logprob=logprob, text=codec.token_text(other))
        for other, logprob in token.top
    ]
    return verifier_pb2.TokenLogprobs(logprob=token.logprob, top=top)


def _finished(event: Ended) -> verifier_pb2.Finished:
    stats = event.stats
    usage = verifier_pb2.Usage(
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        steps=stats.steps,
        nodes_verified=stats.verified,
        nodes_accepted=stats.accepted,
        nodes_stale=stats.stale,
        first_token_s=stats.first_token_s,
        total_s=event.total_s,
        cached_prompt_tokens=stats.cached_prompt,
        nodes_drafted=stats.drafted,
        late_rounds=stats.late,
        draft_wait_s=stats.wait_s,
        mean_width=stats.verified / stats.steps if stats.steps else 0.0,
        width_reason=f"WIDTH_REASON_{stats.width_reason.upper()}",
        verified_by_depth=_without_last_zeros(stats.verified_by_depth),
        accepted_by_depth=_without_last_zeros(stats.accepted_by_depth),
    )
    finished = verifier_pb2.Finished(reason=REASONS[event.reason], usage=usage)
    if isinstance(event.stop, str):
        finished.stop_string = event.stop
    elif event.stop is not None:
        finished.stop_token_id = event.stop
    return finished


def _without_last_zeros(counts: Sequence[int]) -> Sequence[int]:
    return counts[: max((k + 1 for k, count in enumerate(counts) if count), default=0)]
