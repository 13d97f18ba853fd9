"""The client library against a router with scripted workers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from draftwood.choices import choice_seed
from draftwood.client import RESUME_PAUSE_S, Chunk, DraftwoodClient, Event, Finished, Message, Started
from draftwood.config import RouterSettings
from draftwood.errors import DraftwoodError, Internal, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from draftwood.rpc.server import RpcServer
from draftwood.v1 import draft_pb2, router_pb2, verifier_pb2
from draftwood.wire import error_to_proto
from router.server import RouterServer
from tests.router.harness import ScriptedCluster, until
from tests.router.scripted import scripted_text, scripted_token


@pytest.fixture
async def cluster() -> AsyncIterator[ScriptedCluster]:
    async with AsyncExitStack() as stack:
        yield ScriptedCluster(stack)


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Chunk) for token in event.tokens]


async def collect(client: DraftwoodClient, prompt: Any = "one two", **options: Any) -> list[Event]:
    return [event async for event in client.generate(prompt, **options)]


async def test_yields_plain_values(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier()])
    async with DraftwoodClient(cluster.address) as client:
        events = await collect(client, seed=5, max_tokens=4)
    first, last = events[0], events[-1]
    assert isinstance(first, Started) and (first.model, first.seed, first.prompt_tokens) == ("m", 5, 2)
    assert isinstance(last, Finished) and last.reason == "length"
    assert last.usage.completion_tokens == 4 and last.usage.accepted_length == 1.0
    assert tokens_of(events) == scripted_text(5, 4)
    assert events[1] == Chunk(0, (scripted_text(5, 1)[0],), (f"{scripted_text(5, 1)[0]} ",), 0)


async def test_sends_every_parameter(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    chat = [Message("system", "be brief"), Message("user", "hi")]
    async with DraftwoodClient(cluster.address) as client:
        await collect(
            client,
            chat,
            model="m",
            max_tokens=2,
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={7: -2.0, 11: 0.5},
            bad_words=["sea", [3, 4]],
            min_tokens=1,
            logprobs=True,
            top_logprobs=2,
            seed=9,
            stop=["a", "b c"],
            stop_token_ids=[4, 5],
            include_stop_str_in_output=True,
            ignore_eos=True,
            skip_special_tokens=False,
            json_schema={"type": "object"},
            speculate=False,
            max_nodes=6,
        )
        await collect(client, [1, 2, 3], max_tokens=1, stop="one")
    chatted, by_ids = (request.generation for request in verifier.log.requests)
    assert chatted == verifier_pb2.Generation(
        chat=verifier_pb2.Chat(
            messages=[
                verifier_pb2.ChatMessage(role="system", content="be brief"),
                verifier_pb2.ChatMessage(role="user", content="hi"),
            ]
        ),
        max_tokens=2,
        sampling=verifier_pb2.Sampling(
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={7: -2.0, 11: 0.5},
            bad_words=[
                verifier_pb2.BadWord(text="sea"),
                verifier_pb2.BadWord(token_ids=verifier_pb2.TokenIds(ids=[3, 4])),
            ],
            min_tokens=1,
            logprobs=True,
            top_logprobs=2,
            seed=9,
        ),
        stop=["a", "b c"],
        stop_token_ids=[4, 5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        constraint=verifier_pb2.Constraint(json_schema='{"type": "object"}'),
        speculation=verifier_pb2.Speculation(disabled=True, max_nodes=6),
    )
    assert list(by_ids.token_ids.ids) == [1, 2, 3]
    assert by_ids.sampling == verifier_pb2.Sampling(seed=by_ids.sampling.seed), "what is not said is not sent"
    assert list(by_ids.stop) == ["one"] and not by_ids.HasField("skip_special_tokens") and not by_ids.HasField("n")


async def test_constraints_are_sent_as_they_are(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    options: list[dict[str, Any]] = [
        {"json_schema": "{}"}, {"json_object": True}, {"regex": ""}, {"grammar": 'start: "a"'}, {},
    ]  # fmt: skip
    async with DraftwoodClient(cluster.address) as client:
        for option in options:
            await collect(client, max_tokens=1, **option)
        with pytest.raises(InvalidArgument, match="regex and grammar are given") as refusal:
            await collect(client, regex="a", grammar='start: "a"')
    assert refusal.value.reason == "CONSTRAINT"
    sent = [request.generation for request in verifier.log.requests]
    assert [generation.constraint for generation in sent[:4]] == [verifier_pb2.Constraint(**o) for o in options[:4]]
    assert [generation.HasField("constraint") for generation in sent] == [True] * 4 + [False]


async def test_a_prompt_of_mixed_parts_is_refused(cluster: ScriptedCluster) -> None:
    await cluster.serve([])
    async with DraftwoodClient(cluster.address) as client:
        with pytest.raises(InvalidArgument, match="PROMPT"):
            await collect(client, [1, Message("user", "hi")])


async def test_raises_what_the_router_says(cluster: ScriptedCluster) -> None:
    verdict = ResourceExhausted("PAGES", "none left", retry_after_ms=70)
    await cluster.serve([await cluster.verifier(verdict=verdict)])
    async with DraftwoodClient(cluster.address) as client:
        with pytest.raises(NotFound, match="MODEL_UNKNOWN"):
            await collect(client, model="x")
        with pytest.raises(ResourceExhausted, match="PAGES") as refusal:
            await collect(client, max_tokens=3)
    assert refusal.value.retry_after_ms == 70


async def test_an_unreachable_router_is_named_at_once() -> None:
    async with DraftwoodClient("127.0.0.1:1") as client:
        for ask in (client.status(), client.models(), collect(client)):
            begun = time.monotonic()
            with pytest.raises(Unavailable, match=r"ROUTER_UNREACHABLE.*127\.0\.0\.1:1"):
                await ask
            assert time.monotonic() - begun < 5


async def test_status_and_models(cluster: ScriptedCluster) -> None:
    verifier, draft = await cluster.verifier(), await cluster.draft("ngram")
    await cluster.serve([verifier], [draft])
    async with DraftwoodClient(cluster.address) as client:
        state = await client.status()
        assert [(v.address, v.health, v.model) for v in state.verifiers] == [(verifier.address, "ready", "m")]
        assert [(d.address, d.health, d.kind) for d in state.drafts] == [(draft.address, "ready", "ngram")]
        assert [model.name for model in await client.models()] == ["m"]
        await collect(client, max_tokens=1)
        async for watched in client.watch_status():
            assert watched.incarnation == state.incarnation
            if watched.requests_total == 1:
                break


async def restart(cluster: ScriptedCluster, pause_s: float) -> RouterServer:
    """Kills the router and puts another one where it was."""
    settings = cluster.router._settings
    await cluster.router.stop(0.0)
    await asyncio.sleep(pause_s)
    again = RouterServer(RouterSettings.model_validate(settings.model_dump() | {"listen": cluster.address}))
    await again.start()
    return again


async def test_goes_on_when_the_router_is_restarted(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier(step_s=0.02)
    await cluster.serve([verifier])
    async with DraftwoodClient(cluster.address) as client:
        answering = asyncio.create_task(collect(client, max_tokens=60))
        await until(lambda: bool(verifier.log.requests))
        await asyncio.sleep(0.3)
        again = await restart(cluster, pause_s=0.3)
        events = await answering
    (started,) = (event for event in events if isinstance(event, Started))
    assert tokens_of(events) == scripted_text(started.seed, 60)
    resumed = verifier.log.requests[-1].generation
    assert 0 < len(resumed.resume_tokens) < 60 and resumed.sampling.seed == started.seed
    assert [event.offset for event in events if isinstance(event, Chunk)] == list(range(60))
    await again.stop(0.0)


async def test_each_of_n_texts_goes_on_when_the_router_is_restarted(cluster: ScriptedCluster) -> None:
    """By value, one by one; a text that has ended is not asked for again."""
    verifier = await cluster.verifier(step_s=0.02)
    await cluster.serve([verifier])
    async with DraftwoodClient(cluster.address) as client:
        answering = asyncio.create_task(collect(client, max_tokens=60, temperature=1.0, n=3))
        await until(lambda: len(verifier.log.requests) == 3)
        await asyncio.sleep(0.3)
        again = await restart(cluster, pause_s=0.3)
        events = await answering
    for k in range(3):
        own = [event for event in events if event.index == k]
        (started,) = (event for event in own if isinstance(event, Started))
        assert own[0] is started and isinstance(own[-1], Finished)
        assert tokens_of(own) == scripted_text(started.seed, 60)
        assert [event.offset for event in own if isinstance(event, Chunk)] == list(range(60))
    resumed = [request.generation for request in verifier.log.requests[3:]]
    assert len(resumed) == 3 and all(0 < len(generation.resume_tokens) < 60 for generation in resumed)
    assert not any(generation.HasField("n") for generation in resumed)
    await again.stop(0.0)


class SkippingRouter:
    """Leaves out a token."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.RouterServiceGenerateResponse]:
        events = [
            verifier_pb2.GenerationEvent(started=verifier_pb2.Started(seed=1)),
            verifier_pb2.GenerationEvent(chunk=verifier_pb2.Chunk(offset=0, tokens=[1], pieces=["a"])),
            verifier_pb2.GenerationEvent(chunk=verifier_pb2.Chunk(offset=2, tokens=[3], pieces=["c"])),
        ]
        for event in events:
            yield router_pb2.RouterServiceGenerateResponse(event=event)

    async def GetStatus(self, request: Any, context: Any) -> Any: ...

    async def WatchStatus(self, request: Any, context: Any) -> Any: ...

    async def ListModels(self, request: Any, context: Any) -> Any: ...

    async def ScalePool(self, request: Any, context: Any) -> Any: ...


class BreakingRouter(SkippingRouter):
    """Breaks the first call: one of its texts has ended, one has begun, one has not. Is not back at once."""

    def __init__(self) -> None:
        self.asked: list[router_pb2.RouterServiceGenerateRequest] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.RouterServiceGenerateResponse]:
        self.asked.append(request)
        first = len(self.asked) == 1
        if 1 < len(self.asked) < 4:
            raise Unavailable("LOADING", "not yet")
        for event in self.broken() if first else self.whole(request.generation):
            yield router_pb2.RouterServiceGenerateResponse(event=event)
        if first:
            raise Unavailable("TRANSPORT", "broken")

    def broken(self) -> list[verifier_pb2.GenerationEvent]:
        chunk = verifier_pb2.Chunk(offset=0, tokens=[1], pieces=["a"])
        finished = verifier_pb2.Finished(stop_string="a", reason=verifier_pb2.FINISH_REASON_STOP)
        return [
            verifier_pb2.GenerationEvent(started=self.started(0), index=0),
            verifier_pb2.GenerationEvent(started=self.started(2), index=2),
            verifier_pb2.GenerationEvent(chunk=chunk, index=2),
            verifier_pb2.GenerationEvent(chunk=chunk, index=0),
            verifier_pb2.GenerationEvent(finished=finished, index=0),
        ]

    def started(self, index: int) -> verifier_pb2.Started:
        seed = choice_seed(self.asked[0].generation.sampling.seed, index)
        return verifier_pb2.Started(seed=seed, model="m", rule=draft_pb2.RULE_REJECTION)

    def whole(self, generation: verifier_pb2.Generation) -> list[verifier_pb2.GenerationEvent]:
        have = len(generation.resume_tokens)
        chunk = verifier_pb2.Chunk(offset=have, tokens=[1] * (4 - have), pieces=["a"] * (4 - have))
        finished = verifier_pb2.Finished(stop_token_id=7, reason=verifier_pb2.FINISH_REASON_STOP)
        return [
            verifier_pb2.GenerationEvent(started=verifier_pb2.Started(seed=generation.sampling.seed)),
            verifier_pb2.GenerationEvent(chunk=chunk),
            verifier_pb2.GenerationEvent(finished=finished),
        ]


async def test_after_a_break_only_the_texts_that_have_not_ended_are_asked_for() -> None:
    server, router = RpcServer(), BreakingRouter()
    server.add(router_pb2.DESCRIPTOR.services_by_name["RouterService"], router)
    address = await server.start("127.0.0.1:0")
    async with DraftwoodClient(address) as client:
        events = await collect(client, n=3, temperature=1.0, seed=5)
    await server.stop(0.0)
    assert router.asked[0].generation.n == 3
    begun, unseen = (choice_seed(5, 2), 1), (choice_seed(5, 1), 0)
    asked = [request.generation for request in router.asked[1:]]
    assert sorted((g.sampling.seed, len(g.resume_tokens)) for g in asked) == sorted([begun, unseen] * 2)
    chosen = {(len(r.generation.resume_tokens), r.model, r.generation.speculation.rule) for r in router.asked[1:]}
    assert chosen == {(1, "m", draft_pb2.RULE_REJECTION), (0, "", draft_pb2.RULE_UNSPECIFIED)}
    for k, stop, length in ((0, "a", 1), (1, 7, 4), (2, 7, 4)):
        own = [event for event in events if event.index == k]
        assert [type(event) for event in (own[0], own[-1])] == [Started, Finished]
        assert sum(isinstance(event, Started) for event in own) == 1 and len(tokens_of(own)) == length
        assert isinstance(own[-1], Finished) and own[-1].stop == stop


async def test_gives_up_when_no_router_comes_back(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier(step_s=0.02)])
    got: list[Event] = []
    async with DraftwoodClient(cluster.address, resume_timeout_s=0.6) as client:
        with pytest.raises(Unavailable, match="ROUTER_UNREACHABLE"):
            async for event in client.generate("a", max_tokens=500):
                got.append(event)
                if len(got) == 5:
                    await cluster.router.stop(0.0)
                    begun = time.monotonic()
    assert 0.5 < time.monotonic() - begun < 5
    assert len(got) >= 5


async def test_leaving_the_loop_cancels_the_request(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier(step_s=0.02)
    await cluster.serve([verifier])
    async with DraftwoodClient(cluster.address) as client:
        events = client.generate("a", max_tokens=500)
        async for event in events:
            if isinstance(event, Chunk):
                break
        await events.aclose()
        await until(lambda: bool(verifier.log.cancelled))


async def test_a_missing_token_is_an_error_not_a_text() -> None:
    server = RpcServer()
    server.add(router_pb2.DESCRIPTOR.services_by_name["RouterService"], SkippingRouter())
    address = await server.start("127.0.0.1:0")
    async with DraftwoodClient(address) as client:
        with pytest.raises(Internal, match="CHUNK_GAP"):
            await collect(client)
    await server.stop(0.0)


class StubRouter(SkippingRouter):
    """Answers as it is told to: raises, or breaks after so many tokens of a text, which are those of its seed."""

    def __init__(self, *answers: DraftwoodError | int, model: str = "m") -> None:
        self.answers = list(answers)
        self.asked: list[router_pb2.RouterServiceGenerateRequest] = []
        self.model = model

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.RouterServiceGenerateResponse]:
        self.asked.append(request)
        answer = self.answers.pop(0) if self.answers else 12
        if isinstance(answer, DraftwoodError):
            yield router_pb2.RouterServiceGenerateResponse(
                event=verifier_pb2.GenerationEvent(error=error_to_proto(answer))
            )
            raise answer
        generation = request.generation
        started = verifier_pb2.Started(seed=generation.sampling.seed, model=request.model or self.model)
        yield router_pb2.RouterServiceGenerateResponse(event=verifier_pb2.GenerationEvent(started=started))
        for at in range(len(generation.resume_tokens), answer):
            chunk = verifier_pb2.Chunk(offset=at, tokens=[scripted_token(generation.sampling.seed, at)], pieces=["a"])
            yield router_pb2.RouterServiceGenerateResponse(event=verifier_pb2.GenerationEvent(chunk=chunk))
        if answer < 12:
            raise Unavailable("TRANSPORT", "broken")
        finished = verifier_pb2.Finished(reason=verifier_pb2.FINISH_REASON_LENGTH)
        yield router_pb2.RouterServiceGenerateResponse(event=verifier_pb2.GenerationEvent(finished=finished))

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return router_pb2.GetStatusResponse(status=router_pb2.Status(incarnation=self.model))

    async def WatchStatus(self, request: Any, context: Any) -> Any:
        for answer in self.answers:
            raise answer  # type: ignore[misc]
        yield router_pb2.WatchStatusResponse(status=router_pb2.Status(incarnation=self.model))


NO_VERIFIER = Unavailable("NO_VERIFIER", "no verifier is ready", retry_after_ms=500)
UNKNOWN = NotFound("MODEL_UNKNOWN", "'m' is not served")


@asynccontextmanager
async def client_of(*routers: StubRouter, first: int = 0, **options: Any) -> AsyncIterator[DraftwoodClient]:
    """A client of these routers, in this order from ``first`` on."""
    servers, addresses = [], []
    for router in routers:
        server = RpcServer()
        server.add(router_pb2.DESCRIPTOR.services_by_name["RouterService"], router)
        addresses.append(await server.start("127.0.0.1:0"))
        servers.append(server)
    async with DraftwoodClient(*addresses, **options) as client:
        client._lines._at = first
        yield client
    for server in servers:
        await server.stop(0.0)


@pytest.mark.parametrize("first", [0, 1])
async def test_goes_on_at_another_router_at_once_with_what_it_has(first: int) -> None:
    one, other = StubRouter(5), StubRouter(5)
    (one, other)[1 - first].answers = []
    async with client_of(one, other, first=first) as client:
        begun = time.monotonic()
        events = await collect(client, seed=3)
        assert time.monotonic() - begun < RESUME_PAUSE_S, "there is nothing to wait for"
    assert tokens_of(events) == scripted_text(3, 12) and sum(isinstance(e, Started) for e in events) == 1
    (again,) = (one, other)[1 - first].asked
    assert list(again.generation.resume_tokens) == scripted_text(3, 5) and again.model == "m"


async def test_a_text_that_has_begun_stays_with_its_model_and_seed() -> None:
    """Another router, or one that has just started, may know other models: nothing is left to its choice."""
    one, other = StubRouter(5, model="m"), StubRouter(model="n")
    async with client_of(one, other) as client:
        await collect(client, temperature=1.0, seed=9)
    assert (other.asked[0].model, other.asked[0].generation.sampling.seed) == ("m", 9)


async def test_a_text_that_has_begun_waits_for_a_router_that_knows_its_model() -> None:
    one, other = StubRouter(5, NO_VERIFIER, UNKNOWN), StubRouter(UNKNOWN, UNKNOWN, UNKNOWN)
    async with client_of(one, other) as client:
        assert tokens_of(await collect(client, seed=3)) == scripted_text(3, 12)
        with pytest.raises(NotFound):
            one.answers, other.answers = [UNKNOWN], [UNKNOWN]
            await collect(client, seed=3)


async def test_a_request_goes_to_the_next_router_if_one_cannot_serve() -> None:
    """Each is asked once; what a router refuses for good reason is not asked elsewhere."""
    draining, served = StubRouter(*[Unavailable("DRAINING", "the router is shutting down")] * 3), StubRouter()
    async with client_of(draining, served) as client:
        for _ in range(2):
            assert tokens_of(await collect(client, seed=4)) == scripted_text(4, 12)
        assert (len(draining.asked), len(served.asked)) == (1, 2), "it stays with the one that serves"
        assert len(await collect(client, n=2, seed=4, temperature=1.0)) > 0
    one, other = StubRouter(NO_VERIFIER, NO_VERIFIER), StubRouter(NO_VERIFIER, NO_VERIFIER)
    async with client_of(one, other) as client:
        with pytest.raises(Unavailable, match="NO_VERIFIER"):
            await collect(client)
        with pytest.raises(Unavailable, match="NO_VERIFIER"):
            await collect(client, n=2, temperature=1.0)
        assert (len(one.asked), len(other.asked)) == (2, 2)
    one, other = StubRouter(ResourceExhausted("CLIENT_TOKENS", "too many")), StubRouter()
    async with client_of(one, other) as client:
        with pytest.raises(ResourceExhausted):
            await collect(client)
    assert other.asked == []


async def test_status_comes_from_a_router_that_is_there() -> None:
    one, other = StubRouter(model="one"), StubRouter(NO_VERIFIER, model="other")
    async with client_of(one, other) as client:
        assert (await client.status()).incarnation == "one"
        client._lines._at = 1
        async for state in client.watch_status():
            assert state.incarnation == "one"
    async with DraftwoodClient("127.0.0.1:1", "127.0.0.1:2") as client:
        with pytest.raises(Unavailable, match="ROUTER_UNREACHABLE"):
            await client.status()
        with pytest.raises(Unavailable, match="ROUTER_UNREACHABLE"):
            await anext(client.watch_status())


async def test_a_client_needs_a_router_and_begins_with_any() -> None:
    with pytest.raises(InvalidArgument, match=r"CONFIG.*addresses"):
        DraftwoodClient()
    begun = set()
    for _ in range(64):
        async with DraftwoodClient("127.0.0.1:1", "127.0.0.1:2") as client:
            begun.add(client._lines.current.address)
    assert len(begun) == 2


async def test_a_router_that_does_not_answer_is_left_for_another() -> None:
    """One whose host takes connections and says nothing, as a process that hangs does."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server, router = RpcServer(), StubRouter()
        server.add(router_pb2.DESCRIPTOR.services_by_name["RouterService"], router)
        addresses = (f"127.0.0.1:{silent.getsockname()[1]}", await server.start("127.0.0.1:0"))
        async with DraftwoodClient(*addresses) as client:
            client._lines._at = 0
            begun = time.monotonic()
            assert tokens_of(await collect(client, seed=4)) == scripted_text(4, 12)
            assert time.monotonic() - begun < 8
        await server.stop(0.0)
