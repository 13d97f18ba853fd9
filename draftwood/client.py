"""The client library: streams a generation from a router and survives the router's loss.

Offsets are checked on every chunk, so a caller sees each token once and in order or gets an error. When the
connection breaks in mid-stream, the client asks again by value (prompt, parameters, the model, seed and rule named in
``Started`` and the tokens it has), first at the other routers that it was given, until one answers or
``resume_timeout_s`` is over; noise is keyed by position, so the text goes on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

import grpc
import grpc.aio

from draftwood.choices import choice_seed, merged
from draftwood.config import ClientSettings, load_client_settings
from draftwood.errors import DraftwoodError, Internal, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from draftwood.rpc.router_line import RouterLine, RouterLines
from draftwood.rpc.status import from_rpc_error
from draftwood.rpc.tracing import Metadata, check_request_id, outgoing_metadata
from draftwood.v1 import draft_pb2, router_pb2, router_pb2_grpc, verifier_pb2
from draftwood.wire import error_from_proto

STATUS_TIMEOUT_S = 10.0
RESUME_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


Prompt = str | Sequence[Message] | Sequence[int]
"""Text as it stands, a chat for the target's template, or token ids."""
BadWord = str | Sequence[int]
"""A text, tokenized by the target's tokenizer with and without a leading space, or token ids."""


@dataclass(frozen=True, slots=True)
class Started:
    session_id: str
    model: str
    seed: int
    prompt_tokens: int
    rule: str = ""  # the one in force
    lossy: bool = False  # drafts may change the text
    index: int = 0  # which of the n texts; of every event


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that the target could have chosen."""

    token: int
    logprob: float
    text: str  # of the token by itself


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability before any processing, and the likeliest tokens at its place, best first."""

    logprob: float
    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one verify step; the first ``accepted`` had been guessed by a draft."""

    offset: int  # generated tokens before this chunk
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]  # text that can be delivered with each token
    accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if asked for
    index: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    steps: int
    nodes_verified: int
    nodes_accepted: int
    nodes_stale: int
    first_token_s: float
    total_s: float
    cached_prompt_tokens: int = 0
    nodes_drafted: int = 0  # these and the following: of the last verifier, if there were several
    late_rounds: int = 0  # times that a step did not wait long enough for a draft
    draft_wait_s: float = 0.0  # spent waiting for drafts
    mean_width: float = 0.0  # nodes verified in a step
    width_reason: str = ""  # what set the width of the last step
    verified_by_depth: tuple[int, ...] = ()  # nodes, the anchor's children first
    accepted_by_depth: tuple[int, ...] = ()

    @property
    def accepted_length(self) -> float:
        """Mean tokens of a verify step."""
        return self.completion_tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    reason: Literal["stop", "length", "cancelled", "unspecified"]
    usage: Usage
    stop: int | str | None = None  # the stop token or stop string that ended the text
    index: int = 0


Event = Started | Chunk | Finished


@dataclass(frozen=True, slots=True)
class ModelState:
    """A served model."""

    name: str
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class VerifierState:
    address: str
    health: str  # starting, ready, lost, draining
    model: str
    device: str
    running: int
    waiting: int
    max_sessions: int
    free_pages: int
    total_pages: int
    step_ms: float
    width: float
    steps: int
    tokens: int
    nodes_verified: int
    nodes_accepted: int
    cap: str = ""  # of the policy in force there, as "8 nodes, depth 4, chains"; empty: none
    decision: str = ""  # of the router's width policy, the last one


@dataclass(frozen=True, slots=True)
class DraftState:
    address: str
    health: str
    kind: str
    model: str
    sessions: int
    max_sessions: int
    nodes_drafted: int
    idle_share: float
    round_ms: float
    canary: float | None = None  # share of right best guesses at the verifier where it is lowest; None: not tried
    canary_failed: bool = False  # at one verifier or more


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool that a controller keeps."""

    name: str
    role: str  # draft, verifier
    wanted: int
    present: int  # those that start included, those that leave not
    ready: int
    draining: int
    min: int
    max: int | None  # None: no limit but the budget
    error: str = ""  # why a worker could not start; empty once one has
    decision: str = ""  # of the autoscaler, the last one


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What the router knows of its pools."""

    incarnation: str
    verifiers: tuple[VerifierState, ...]
    drafts: tuple[DraftState, ...]
    requests: int
    requests_total: int
    requests_failed: int
    draft_reattachments: int
    verifier_migrations: int
    pools: tuple[PoolState, ...] = ()  # none without a controller


class DraftwoodClient:
    """Talks to one router, and to another of the same cluster when that is lost.

    Usable as an async context manager. Every method raises DraftwoodError.
    """

    def __init__(self, *addresses: str, settings: ClientSettings | None = None, resume_timeout_s: float = 30.0) -> None:
        """``addresses``: host:port of the cluster's routers; a client begins with any of them, so that clients spread.

        ``settings``: certificates and token; by default what the environment says (``DRAFTWOOD_CA`` and so on).

        Raises InvalidArgument CONFIG if they cannot be used, or would send a token over the network in plain text.
        """
        self._resume_timeout_s = resume_timeout_s
        self._lines = RouterLines(addresses, settings or load_client_settings())

    async def __aenter__(self) -> DraftwoodClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._lines.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        max_tokens: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float | None = None,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        bad_words: Sequence[BadWord] = (),
        min_tokens: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        stop_token_ids: Sequence[int] = (),
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
        n: int | None = None,
        json_schema: Mapping[str, Any] | str | None = None,
        json_object: bool = False,
        regex: str | None = None,
        grammar: str | None = None,
        speculate: bool = True,
        max_nodes: int = 0,
        deadline_ms: int = 0,
        rule: str = "",
        request_id: str = "",
    ) -> AsyncGenerator[Event]:
        """The target's answer: ``Started``, ``Chunk`` by ``Chunk``, ``Finished``. ``max_tokens`` 0: no limit.

        With ``n`` the events of n texts come as they are written, told apart by their ``index``.
        docs/sampling.md says what the sampling parameters mean, their ranges and their order.
        ``deadline_ms``: how soon the answer is wanted (0: no hurry); it orders the verifier's queue and cuts nothing.
        ``rule`` says how guesses are accepted: "greedy", "shared_noise", "rejection", "typical"; empty: the server's.
        ``json_schema`` (an object or its text), ``json_object``, ``regex`` and ``grammar`` constrain the text; one of
        them at most. ``request_id`` is what the services' logs and traces call the request; empty: a random one.
        """
        generation = verifier_pb2.Generation(
            sampling=verifier_pb2.Sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                repetition_penalty=repetition_penalty,
                logit_bias=logit_bias,
                bad_words=[_bad_word(word) for word in bad_words],
                min_tokens=min_tokens,
                seed=seed,
                logprobs=logprobs,
                top_logprobs=top_logprobs,
            ),
            max_tokens=max_tokens,
            stop=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=stop_token_ids,
            include_stop_str_in_output=include_stop_str_in_output,
            ignore_eos=ignore_eos,
            skip_special_tokens=None if skip_special_tokens else False,
            n=n,
            speculation=verifier_pb2.Speculation(disabled=not speculate, max_nodes=max_nodes, rule=_rule(rule)),
            deadline_ms=deadline_ms,
            constraint=_constraint(json_schema, json_object, regex, grammar),
        )
        _set_prompt(generation, prompt)
        request = router_pb2.RouterServiceGenerateRequest(model=model, generation=generation)
        metadata = outgoing_metadata(check_request_id(request_id or uuid.uuid4().hex))
        several = n is not None and n > 1
        answer = self._choices(request, metadata) if several else self._resumed(request, metadata)
        async with aclosing(answer) as events:
            async for event in events:
                yield event

    async def status(self) -> ClusterState:
        answer: router_pb2.GetStatusResponse = await self._ask("GetStatus", router_pb2.GetStatusRequest())
        return _cluster_state(answer.status)

    async def watch_status(self) -> AsyncIterator[ClusterState]:
        """The status now and about once a second."""
        refusals = 0
        while True:
            line = self._lines.current
            call = _stub(line).WatchStatus(router_pb2.WatchStatusRequest(), metadata=line.metadata())
            try:
                async for answer in call:
                    refusals = 0
                    yield _cluster_state(answer.status)
                return
            except grpc.RpcError as error:
                refusals += 1
                if not self._may_try_another(line, meant := _explained(line, error), refusals):
                    raise meant from error
            finally:
                call.cancel()

    async def models(self) -> tuple[ModelState, ...]:
        answer: router_pb2.ListModelsResponse = await self._ask("ListModels", router_pb2.ListModelsRequest())
        return tuple(_model_state(model) for model in answer.models)

    async def scale(self, counts: Mapping[str, int]) -> tuple[PoolState, ...]:
        """Sets how many workers pools are to have, by name; all of them or, if one is refused, none.

        Returns all pools at once; ``status`` shows what follows. A worker too many drains before it goes.
        """
        request = router_pb2.ScalePoolRequest(counts=counts)
        answer: router_pb2.ScalePoolResponse = await self._ask("ScalePool", request)
        return tuple(_pool_state(pool) for pool in answer.pools)

    async def _ask(self, method: str, request: object) -> Any:
        refusals = 0
        while True:
            line = self._lines.current
            try:
                return await getattr(_stub(line), method)(request, timeout=STATUS_TIMEOUT_S, metadata=line.metadata())
            except grpc.RpcError as error:
                refusals += 1
                if not self._may_try_another(line, meant := _explained(line, error), refusals):
                    raise meant from error

    def _may_try_another(self, line: RouterLine, error: DraftwoodError, refusals: int) -> bool:
        """Turns to the next router if it may answer otherwise; False once all have been tried."""
        if not _of_this_router(error):
            return False
        self._lines.leave(line)
        return refusals < len(self._lines)

    async def _choices(
        self, request: router_pb2.RouterServiceGenerateRequest, metadata: Metadata
    ) -> AsyncGenerator[Event]:
        """The events of several texts; after a break each that has not ended goes on as a request of its own."""
        if not request.generation.sampling.HasField("seed"):
            request.generation.sampling.seed = secrets.randbits(64)
        singles = [_single(request, index) for index in range(request.generation.n)]
        started, finished = set[int](), set[int]()
        refusals = 0
        while not started:
            line = self._lines.current
            try:
                async with aclosing(self._call(line, request, singles, metadata)) as events:
                    async for event in events:
                        if isinstance(event, Started):
                            started.add(event.index)
                        elif isinstance(event, Finished):
                            finished.add(event.index)
                        yield event
                return
            except (Unavailable, NotFound) as error:
                refusals += 1
                if not self._may_try_another(line, error, refusals) and not started:
                    raise
        left = [index for index in range(len(singles)) if index not in finished]
        rest = [self._resumed(singles[index], metadata, broken=True, started=index in started) for index in left]
        async with aclosing(merged(rest)) as indexed:
            async for place, event in indexed:
                yield replace(event, index=left[place])

    async def _resumed(
        self,
        request: router_pb2.RouterServiceGenerateRequest,
        metadata: Metadata,
        *,
        broken: bool = False,
        started: bool = False,
    ) -> AsyncGenerator[Event]:
        """The events of one text over as many calls as it takes; ``request`` grows with what has come.

        ``broken``: the text has been asked for before, by a call that broke; ``started``: its ``Started`` has come.
        """
        give_up = (
            time.monotonic() + self._resume_timeout_s if broken else 0.0
        )  # the break is then worth no more waiting
        refusals = 0  # calls in a row of which nothing came
        while True:
            line = self._lines.current
            refused = True  # nothing of this call has been served yet
            try:
                async with aclosing(self._call(line, request, [request], metadata)) as events:
                    async for event in events:
                        refused, refusals = False, 0
                        if isinstance(event, Chunk):
                            give_up = 0.0
                        if isinstance(event, Started):
                            if started:
                                continue
                            started = True
                        yield event
                return
            except (Unavailable, ResourceExhausted, NotFound) as error:
                refusals += 1
                elsewhere = self._may_try_another(line, error, refusals)
                if started or broken:
                    give_up = give_up or time.monotonic() + self._resume_timeout_s
                    if not _passes(error, refused=refused) or time.monotonic() >= give_up:
                        raise
                elif not elsewhere:
                    raise
            if not elsewhere:
                refusals = 0
                await asyncio.sleep(RESUME_PAUSE_S)

    async def _call(
        self,
        line: RouterLine,
        request: router_pb2.RouterServiceGenerateRequest,
        singles: Sequence[router_pb2.RouterServiceGenerateRequest],
        metadata: Metadata,
    ) -> AsyncGenerator[Event]:
        """One call's events; raises its in-band error rather than its status. ``singles`` grow, each with its text."""
        call = _stub(line).Generate(request, metadata=(*line.metadata(), *metadata))
        said: DraftwoodError | None = None
        running = len(singles)
        try:
            async for answer in call:
                if answer.event.HasField("error"):
                    said = error_from_proto(answer.event.error)
                    continue
                event = _event(answer.event)
                if isinstance(event, Started):
                    _keep_choices(singles, event)
                if isinstance(event, Chunk):
                    _check_and_keep(singles, event)
                running -= isinstance(event, Finished)
                yield event
        except grpc.RpcError as error:
            if running:
                raise said or _explained(line, error) from error
        finally:
            call.cancel()
        if running:
            raise said or Unavailable("TRANSPORT", f"{line.address} ended the answer without a last word")


def _stub(line: RouterLine) -> Any:
    return router_pb2_grpc.RouterServiceStub(line.channel())  # type: ignore[no-untyped-call]


def _explained(line: RouterLine, error: grpc.RpcError) -> DraftwoodError:
    meant = from_rpc_error(error)
    if isinstance(meant, Unavailable) and meant.reason == "TRANSPORT":
        where = f"{line.address}{line.how}"
        return Unavailable("ROUTER_UNREACHABLE", f"no router at {where} ({meant.message})")
    return meant


def _of_this_router(error: DraftwoodError) -> bool:
    """Whether another router may answer otherwise, as may this one later: just started, it knows no verifiers yet."""
    return isinstance(error, Unavailable) or error.reason == "MODEL_UNKNOWN"


def _passes(error: DraftwoodError, *, refused: bool) -> bool:
    """Whether a text that has begun may go on later, or elsewhere; ``refused``: nothing of the call was served."""
    return _of_this_router(error) or (refused and isinstance(error, ResourceExhausted))


def _constraint(
    json_schema: Mapping[str, Any] | str | None, json_object: bool, regex: str | None, grammar: str | None
) -> verifier_pb2.Constraint | None:
    """Raises InvalidArgument CONSTRAINT if there is more than one."""
    schema = json_schema if json_schema is None or isinstance(json_schema, str) else json.dumps(json_schema)
    options = {"json_schema": schema, "json_object": json_object or None, "regex": regex, "grammar": grammar}
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) > 1:
        raise InvalidArgument("CONSTRAINT", f"{' and '.join(given)} are given, one is taken", field="constraint")
    return verifier_pb2.Constraint(**given) if given else None  # type: ignore[arg-type]


def _set_prompt(generation: verifier_pb2.Generation, prompt: Prompt) -> None:
    """Raises InvalidArgument PROMPT for a mixture of messages and ids."""
    if isinstance(prompt, str):
        generation.text = prompt
    elif all(isinstance(part, Message) for part in prompt):
        turns = [verifier_pb2.ChatMessage(role=m.role, content=m.content) for m in prompt if isinstance(m, Message)]
        generation.chat.CopyFrom(verifier_pb2.Chat(messages=turns))
    elif all(isinstance(part, int) for part in prompt):
        generation.token_ids.CopyFrom(verifier_pb2.TokenIds(ids=[part for part in prompt if isinstance(part, int)]))
    else:
        raise InvalidArgument("PROMPT", "a prompt is a text, messages, or token ids", field="prompt")


def _single(request: router_pb2.RouterServiceGenerateRequest, index: int) -> router_pb2.RouterServiceGenerateRequest:
    """The request for one of several texts alone."""
    single = router_pb2.RouterServiceGenerateRequest()
    single.CopyFrom(request)
    single.generation.ClearField("n")
    single.generation.sampling.seed = choice_seed(request.generation.sampling.seed, index)
    return single


def _bad_word(word: BadWord) -> verifier_pb2.BadWord:
    if isinstance(word, str):
        return verifier_pb2.BadWord(text=word)
    return verifier_pb2.BadWord(token_ids=verifier_pb2.TokenIds(ids=word))


def _rule(name: str) -> draft_pb2.Rule:
    number = getattr(draft_pb2, f"RULE_{name.upper() or 'UNSPECIFIED'}", None)
    if number is None:
        known = ", ".join(each.removeprefix("RULE_").lower() for each in draft_pb2.Rule.keys()[1:])
        raise InvalidArgument("RULE", f"rule {name!r} is none of {known}", field="rule")
    return number  # type: ignore[no-any-return]


def _keep_choices(singles: Sequence[router_pb2.RouterServiceGenerateRequest], started: Started) -> None:
    """Writes into the text's request what was chosen for it, so that it goes on with the same wherever it is resumed.

    Raises Internal CHUNK_GAP for a text that was not asked for.
    """
    single = _text_of(singles, started.index)
    single.model = started.model
    single.generation.sampling.seed = started.seed
    single.generation.speculation.rule = _rule(started.rule)


def _text_of(
    singles: Sequence[router_pb2.RouterServiceGenerateRequest], index: int
) -> router_pb2.RouterServiceGenerateRequest:
    if index >= len(singles):
        raise Internal("CHUNK_GAP", f"chunk of text {index}, but {len(singles)} were asked for")
    return singles[index]


def _check_and_keep(singles: Sequence[router_pb2.RouterServiceGenerateRequest], chunk: Chunk) -> None:
    """Adds the chunk to what has been received. Raises Internal CHUNK_GAP if it does not fit behind it."""
    generation = _text_of(singles, chunk.index).generation
    received = len(generation.resume_tokens)
    if chunk.offset != received:
        raise Internal("CHUNK_GAP", f"chunk at offset {chunk.offset}, but {received} tokens came before")
    generation.resume_tokens.extend(chunk.tokens)


def _event(event: verifier_pb2.GenerationEvent) -> Event:
    index = event.index
    if event.HasField("started"):
        started = event.started
        rule = draft_pb2.Rule.Name(started.rule).removeprefix("RULE_").lower()
        told = (started.session_id, started.model, started.seed, started.prompt_tokens)
        return Started(*told, rule, started.lossy, index=index)
    if event.HasField("chunk"):
        chunk = event.chunk
        logprobs = tuple(_logprobs(token) for token in chunk.logprobs)
        return Chunk(chunk.offset, tuple(chunk.tokens), tuple(chunk.pieces), chunk.accepted, logprobs, index=index)
    finished = event.finished
    kind = finished.WhichOneof("stop")
    stop = getattr(finished, kind) if kind else None
    return Finished(_REASONS[finished.reason], _usage(finished.usage), stop=stop, index=index)


def _logprobs(token: verifier_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token.logprob, tuple(Alternative(each.token, each.logprob, each.text) for each in token.top))


_REASONS: dict[int, Literal["stop", "length", "cancelled", "unspecified"]] = {
    verifier_pb2.FINISH_REASON_UNSPECIFIED: "unspecified",
    verifier_pb2.FINISH_REASON_STOP: "stop",
    verifier_pb2.FINISH_REASON_LENGTH: "length",
    verifier_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


def _usage(usage: verifier_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        steps=usage.steps,
        nodes_verified=usage.nodes_verified,
        nodes_accepted=usage.nodes_accepted,
        nodes_stale=usage.nodes_stale,
        first_token_s=usage.first_token_s,
        total_s=usage.total_s,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        nodes_drafted=usage.nodes_drafted,
        late_rounds=usage.late_rounds,
        draft_wait_s=usage.draft_wait_s,
        mean_width=usage.mean_width,
        width_reason=verifier_pb2.WidthReason.Name(usage.width_reason).removeprefix("WIDTH_REASON_").lower(),
        verified_by_depth=tuple(usage.verified_by_depth),
        accepted_by_depth=tuple(usage.accepted_by_depth),
    )


def _cluster_state(status: router_pb2.Status) -> ClusterState:
    tried: defaultdict[str, list[verifier_pb2.CanaryResult]] = defaultdict(list)
    for verifier in status.verifiers:
        for result in verifier.load.canaries:
            tried[result.incarnation].append(result)
    return ClusterState(
        incarnation=status.incarnation,
        verifiers=tuple(_verifier_state(verifier) for verifier in status.verifiers),
        drafts=tuple(_draft_state(draft, tried[draft.draft.incarnation]) for draft in status.drafts),
        requests=status.requests,
        requests_total=status.requests_total,
        requests_failed=status.requests_failed,
        draft_reattachments=status.draft_reattachments,
        verifier_migrations=status.verifier_migrations,
        pools=tuple(_pool_state(pool) for pool in status.pools),
    )


def _pool_state(pool: router_pb2.PoolStatus) -> PoolState:
    return PoolState(
        name=pool.name,
        role=pool.role,
        wanted=pool.wanted,
        present=pool.present,
        ready=pool.ready,
        draining=pool.draining,
        min=pool.min,
        max=pool.max if pool.HasField("max") else None,
        error=pool.error,
        decision=pool.decision,
    )


def _health(health: router_pb2.Health) -> str:
    return router_pb2.Health.Name(health).removeprefix("HEALTH_").lower()


def _verifier_state(verifier: router_pb2.VerifierStatus) -> VerifierState:
    load = verifier.load
    return VerifierState(
        address=verifier.address,
        health=_health(verifier.health),
        model=verifier.model.name,
        device=verifier.model.device,
        running=load.running,
        waiting=load.waiting,
        max_sessions=load.max_sessions,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        step_ms=load.step_ms,
        width=load.width,
        steps=load.steps,
        tokens=load.tokens,
        nodes_verified=load.nodes_verified,
        nodes_accepted=load.nodes_accepted,
        cap=_cap(load.policy),
        decision=verifier.decision,
    )


def _cap(policy: verifier_pb2.Policy) -> str:
    told = {"max_session_nodes": "{} nodes", "max_step_nodes": "{} nodes a step", "max_depth": "depth {}"}
    said = [words.format(getattr(policy, name)) for name, words in told.items() if policy.HasField(name)]
    return ", ".join([*said, *(["chains"] if policy.growth == draft_pb2.GROWTH_RULE_CHAIN else [])])


def _draft_state(draft: router_pb2.DraftStatus, tried: Sequence[verifier_pb2.CanaryResult]) -> DraftState:
    load = draft.load
    return DraftState(
        address=draft.address,
        health=_health(draft.health),
        kind=draft.draft.kind,
        model=draft.draft.model,
        sessions=load.sessions,
        max_sessions=load.max_sessions,
        nodes_drafted=load.nodes_drafted,
        idle_share=load.idle_share,
        round_ms=load.round_ms,
        canary=min((result.taken / result.steps for result in tried if result.steps), default=None),
        canary_failed=any(result.failed for result in tried),
    )


def _model_state(model: verifier_pb2.ModelInfo) -> ModelState:
    return ModelState(
        name=model.name,
        dtype=model.dtype,
        device=model.device,
        vocab_size=model.tokenizer.vocab_size,
        max_context_tokens=model.caps.max_context_tokens,
    )
