"""From queue to end: capacity, cancelling, ending, resuming, readiness; and that everything is given back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
import torch
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from draft_service.server import DraftServer
from draftwood.client import Message
from draftwood.config import VerifierSettings
from draftwood.errors import DraftwoodError, Internal, ResourceExhausted
from draftwood.rpc.status import from_rpc_error
from draftwood.telemetry import METRICS
from draftwood.v1 import draft_pb2, draft_pb2_grpc, verifier_pb2
from tests.services.stack import (
    EXACT,
    Cluster,
    Forward,
    Stack,
    Text,
    attach_request,
    collect,
    engine_of,
    health,
    refused,
    sessions_of,
    slow_down,
    tokens_of,
    until,
    verifier_request,
    verifier_stub,
    wrap_forwards,
)
from tests.services.wire import HandDraft, ScriptedVerifier
from verifier_service.server import VerifierServer

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "ignore_eos": True}
GREEDY: dict[str, Any] = {"ignore_eos": True}


# --- capacity


async def test_requests_wait_for_pages_and_finish_in_order(stack: Stack) -> None:
    """12 pages of 16 tokens; each request starts with one and grows to 3 or 4, so some run and the others wait."""
    cluster = await stack.cluster(kv_pages=12, max_step_tokens=64)
    options = {"max_tokens": 40, **SAMPLED}
    want = await cluster.plain("The sky is", **options)

    async def one(k: int) -> str:
        await asyncio.sleep(0.02 * k)
        text = await cluster.speculative("The sky is", **options)
        assert text.tokens == want
        return text.started.session_id

    slow_down(cluster.verifier, 0.01)
    work = asyncio.gather(*(one(k) for k in range(9)))
    running, waiting, admitted = await watched(work, cluster)
    assert 3 <= running <= 6 and waiting >= 2
    assert admitted == work.result()
    await cluster.is_idle()


async def watched(work: Any, cluster: Cluster) -> tuple[int, int, list[str]]:
    """Most sessions running and waiting at once while ``work`` goes on, and all that ran in order of admission."""
    running = waiting = 0
    admitted: dict[str, None] = {}
    while not work.done():
        running, waiting = max(running, len(cluster.engine.sessions)), max(waiting, len(cluster.engine.waiting))
        admitted.update(dict.fromkeys(cluster.engine.sessions))
        await asyncio.sleep(0.002)
    await work
    return running, waiting, list(admitted)


async def test_sessions_over_the_limit_wait(stack: Stack) -> None:
    cluster = await stack.cluster(max_sessions=3)
    slow_down(cluster.verifier, 0.002)
    options = {"max_tokens": 40, **GREEDY}
    want = await cluster.plain("one two", **options)
    work = asyncio.gather(*(cluster.speculative("one two", **options) for _ in range(9)))
    running, waiting, _ = await watched(work, cluster)
    assert running == 3 and waiting >= 4
    assert all(text.tokens == want for text in work.result())
    assert sum(text.accepted > 0 for text in work.result()) >= 6, "those that waited have drafts, too"
    await cluster.is_idle()


async def test_request_larger_than_the_cache_is_refused_for_good(stack: Stack) -> None:
    cluster = await stack.cluster(kv_pages=12, max_step_tokens=64)
    with pytest.raises(ResourceExhausted) as caught:
        await cluster.speculative("The sky is", max_tokens=300)
    assert (caught.value.reason, caught.value.retry_after_ms) == ("KV_FULL", 0)
    assert len((await cluster.speculative("The sky is", max_tokens=20, **GREEDY)).tokens) == 20
    await cluster.is_idle()


async def test_full_queue_refuses_at_once_with_a_hint(stack: Stack) -> None:
    cluster = await stack.cluster(max_sessions=1, max_waiting=2)
    slow_down(cluster.verifier, 0.005)
    options = {"max_tokens": 40, **GREEDY}
    work = [asyncio.create_task(cluster.speculative("one two", **options)) for _ in range(3)]
    await until(lambda: len(cluster.engine.waiting) == 2)
    began = time.monotonic()
    with pytest.raises(ResourceExhausted) as caught:
        await cluster.speculative("one two", **options)
    assert time.monotonic() - began < 0.5
    assert caught.value.reason == "QUEUE_FULL" and caught.value.retry_after_ms > 0
    texts = await asyncio.gather(*work)
    assert len({tuple(text.tokens) for text in texts}) == 1
    await cluster.is_idle()


async def test_draft_worker_takes_no_more_sessions_than_it_may(stack: Stack) -> None:
    cluster = await stack.cluster([{"max_sessions": 2}], canary=False)
    slow_down(cluster.verifier, 0.003)
    want = await cluster.plain("one two", max_tokens=60, **SAMPLED)
    work = asyncio.gather(*(cluster.speculative("one two", max_tokens=60, **SAMPLED) for _ in range(6)))
    most = 0
    while not work.done():
        most = max(most, cluster.attached)
        await asyncio.sleep(0.002)
    assert all(text.tokens == want for text in await work)
    assert 1 <= most <= 2
    await cluster.is_idle()


# --- cancelling


@pytest.mark.parametrize("state", ["queued", "prefill", "streaming"])
async def test_cancel_gives_everything_back(stack: Stack, state: str) -> None:
    cluster = await stack.cluster(max_sessions=1 if state == "queued" else 8, max_step_tokens=16)
    slow_down(cluster.verifier, 0.01)
    if state == "queued":
        first = asyncio.create_task(cluster.speculative("one", max_tokens=150, **GREEDY))
        await until(lambda: len(cluster.engine.sessions) == 1)
    text = Text()
    prompt: Any = [5, 9, 13] * 100 if state == "prefill" else "The sky is"
    task = asyncio.create_task(cluster.speculative(prompt, text, max_tokens=200, **SAMPLED))
    if state == "queued":
        await until(lambda: len(cluster.engine.waiting) == 1)
    elif state == "prefill":
        await until(lambda: any(0 < s.cached < 200 for s in cluster.engine.sessions.values()))
    else:
        await until(lambda: len(text.tokens) > 20 and cluster.attached == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if state == "queued":
        await until(lambda: not cluster.engine.waiting, 2.0)
        assert len((await first).tokens) == 150
    await cluster.is_idle(2.0)
    assert not cluster.verifier._streams
    assert (await cluster.speculative("The sky is", max_tokens=8, **SAMPLED)).finished


async def test_cancel_at_any_moment_leaves_no_ghost(stack: Stack) -> None:
    """Bug kind 20: 60 clients leave at moments from before the first byte to after the last."""
    cluster = await stack.cluster()
    slow_down(cluster.verifier, 0.001)

    async def leave_after(k: int) -> None:
        task = asyncio.create_task(cluster.speculative("The sky is", max_tokens=30, **SAMPLED))
        await asyncio.wait([task], timeout=0.003 * k)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for base in range(0, 60, 6):
        await asyncio.gather(*(leave_after(base + k) for k in range(6)))
    await cluster.is_idle(2.0)
    assert not cluster.verifier._streams
    assert not any(link._sessions for link in cluster.drafts[0]._links.values())


@pytest.mark.parametrize("how", ["finished", "cancelled"])
async def test_verifier_tells_its_drafts_to_stop(stack: Stack, how: str) -> None:
    """Without a router, so that nobody else tells them."""
    verifier, draft = await stack.verifier(), await stack.draft()
    slow_down(verifier, 0.005)
    call = verifier_stub(await stack.channel(verifier)).Generate(
        verifier_request("s", b"t", max_tokens=40, ignore_eos=True)
    )
    await until(lambda: "s" in engine_of(verifier).sessions)
    worker: Any = draft_pb2_grpc.DraftServiceStub(await stack.channel(draft))
    await worker.Attach(attach_request(draft, "s", b"t", verifier.address))
    await until(lambda: sessions_of(draft) == 1)
    if how == "cancelled":
        call.cancel()
    else:
        assert len(await tokens_of(call)) == 40
    await until(lambda: not engine_of(verifier).sessions and not sessions_of(draft), 2.0)
    assert not any(link.sessions for link in draft._links.values())
    pool: Any = draft.loaded.core.drafter._runtime.pool  # type: ignore[attr-defined]
    await until(lambda: pool.free == pool.total, 2.0)


async def test_detach_before_the_start_arrives_leaves_no_session_in_the_worker(stack: Stack) -> None:
    """The verifier's answer to Join crosses our Leave: the worker must not take the session up again."""
    cluster = await stack.cluster()
    slow_down(cluster.verifier, 0.05)  # the engine's thread is busy, so Start takes a while
    channel = await stack.channel(cluster.verifier)
    call = verifier_stub(channel).Generate(verifier_request("s", b"t", max_tokens=30, ignore_eos=True))
    await until(lambda: "s" in cluster.engine.sessions)
    worker: Any = draft_pb2_grpc.DraftServiceStub(await stack.channel(cluster.drafts[0]))
    request = attach_request(cluster.drafts[0], "s", b"t", cluster.verifier.address)
    await worker.Attach(request)
    await worker.Detach(draft_pb2.DetachRequest(session_id="s"))
    for _ in range(5):
        attach = worker.Attach(request)
        await until(lambda: any("s" in link._sessions for link in cluster.drafts[0]._links.values()))
        attach.cancel()
        await worker.Detach(draft_pb2.DetachRequest(session_id="s"))
    assert len(await tokens_of(call)) == 30
    await cluster.is_idle(2.0)


async def test_attach_is_idempotent(stack: Stack) -> None:
    cluster = await stack.cluster()
    slow_down(cluster.verifier, 0.01)
    channel = await stack.channel(cluster.verifier)
    call = verifier_stub(channel).Generate(verifier_request("s", b"t", max_tokens=60, ignore_eos=True))
    await until(lambda: "s" in cluster.engine.sessions)
    worker: Any = draft_pb2_grpc.DraftServiceStub(await stack.channel(cluster.drafts[0]))
    request = attach_request(cluster.drafts[0], "s", b"t", cluster.verifier.address)
    await asyncio.gather(*(worker.Attach(request) for _ in range(4)))
    await until(lambda: sessions_of(cluster.drafts[0]) == 1)
    assert cluster.engine.totals.refused == 0
    await worker.Detach(draft_pb2.DetachRequest(session_id="s"))
    await until(lambda: sessions_of(cluster.drafts[0]) == 0, 2.0)
    assert len(await tokens_of(call)) == 60


# --- ending and resuming


@pytest.mark.parametrize("rule", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_resumed_text_goes_on_as_it_would_have(stack: Stack, rule: dict[str, Any]) -> None:
    cluster = await stack.cluster()
    whole = await cluster.speculative("The sky is", max_tokens=40, **rule)
    stub = verifier_stub(await stack.channel(cluster.verifier))
    for cut in (1, 7, 39):
        request = verifier_request(
            f"cut{cut}", b"t", max_tokens=40, ignore_eos=True, resume_tokens=whole.tokens[:cut],
            sampling=verifier_pb2.Sampling(temperature=rule.get("temperature", 0.0), seed=whole.started.seed),
        )  # fmt: skip
        answers = [a.event async for a in stub.Generate(request)]
        chunks = [e.chunk for e in answers if e.HasField("chunk")]
        assert chunks[0].offset == cut
        assert [t for c in chunks for t in c.tokens] == whole.tokens[cut:]
        assert answers[-1].finished.usage.completion_tokens == 40


@pytest.mark.parametrize(("ending", "reason"), [({"max_tokens": 3}, 2), ({"max_tokens": 9, "stop_token_ids": [7]}, 1)])
async def test_resumed_text_that_is_whole_ends_at_once(stack: Stack, ending: dict[str, Any], reason: int) -> None:
    """The client lost its router between the last token and the last word."""
    cluster = await stack.cluster([])
    stub = verifier_stub(await stack.channel(cluster.verifier))
    request = verifier_request("whole", b"t", resume_tokens=[4, 5, 7], **ending)
    events = [answer.event async for answer in stub.Generate(request)]
    assert [event.WhichOneof("event") for event in events] == ["started", "finished"]
    assert events[-1].finished.reason == reason
    assert events[-1].finished.usage.completion_tokens == 3
    await cluster.is_idle()


async def test_seed_that_the_server_chose_is_named_and_repeats_the_text(stack: Stack) -> None:
    """Bug kind 9."""
    cluster = await stack.cluster()
    texts = [await cluster.speculative("The sky is", max_tokens=30, temperature=1.0) for _ in range(4)]
    assert len({text.started.seed for text in texts}) == 4
    assert len({tuple(text.tokens) for text in texts}) == 4, "unseeded requests are independent"
    again = await cluster.plain("The sky is", max_tokens=30, temperature=1.0, seed=texts[0].started.seed)
    assert again == texts[0].tokens


async def test_stop_token_inside_an_accepted_run_ends_the_text_there(stack: Stack) -> None:
    """Bug kinds 13, 14 and 15: every first occurrence of a token in 40, as stop token."""
    cluster = await stack.cluster()
    whole = await cluster.speculative("The sky is", max_tokens=40, **SAMPLED)
    inside = [c.offset + k for c in whole.chunks for k in range(c.accepted)]
    firsts = [at for at in inside if whole.tokens.index(whole.tokens[at]) == at][:12]
    assert len(firsts) >= 8
    cut_runs = 0
    for at in firsts:
        text = await cluster.speculative("The sky is", max_tokens=40, stop_token_ids=[whole.tokens[at]], **SAMPLED)
        assert text.tokens == whole.tokens[: at + 1]
        assert text.finished.reason == "stop"
        assert text.finished.usage.completion_tokens == at + 1 == len(text.pieces)
        cut_runs += text.chunks[-1].accepted == len(text.chunks[-1].tokens)
    assert cut_runs, "no run was cut: nothing was shown"
    await cluster.is_idle()


async def test_model_s_own_end_token_ends_the_text_unless_it_is_ignored(stack: Stack) -> None:
    cluster = await stack.cluster()
    ended = 0
    for seed in (7, 8, 9):
        options = {"max_tokens": 60, "temperature": 0.9, "seed": seed}
        on = await cluster.speculative("The sky is", ignore_eos=True, **options)
        text = await cluster.speculative("The sky is", **options)
        end = on.tokens.index(1) + 1 if 1 in on.tokens else 60
        assert text.tokens == on.tokens[:end]
        assert text.finished.reason == ("stop" if end < 60 or text.tokens[-1] == 1 else "length")
        ended += 1 in on.tokens
    assert ended, "no text had an end token: nothing was shown"


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 13])
async def test_max_tokens_is_exact_and_usage_is_what_was_delivered(stack: Stack, tokens: int) -> None:
    """Bug kind 15."""
    cluster = await stack.cluster()
    text = await cluster.speculative("The sky is", max_tokens=tokens, **SAMPLED)
    usage = text.finished.usage
    assert len(text.tokens) == tokens == usage.completion_tokens
    assert text.finished.reason == "length"
    assert usage.steps == len(text.chunks)
    assert text.accepted <= usage.nodes_accepted <= usage.nodes_verified
    assert usage.prompt_tokens == text.started.prompt_tokens
    assert 0 < usage.first_token_s <= usage.total_s


async def test_text_to_the_end_of_the_context(stack: Stack) -> None:
    cluster = await stack.cluster()
    options = {"max_tokens": 0, "ignore_eos": True}
    prompt = [5, 9, 13] * 150
    text = await cluster.speculative(prompt, **options)
    assert len(text.tokens) == 512 - 450 and text.finished.reason == "length"
    assert text.tokens == await cluster.plain(prompt, **options)


# --- our own failures


@pytest.mark.parametrize("rule", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_nan_in_one_session_s_cache_ends_that_session_alone(stack: Stack, rule: dict[str, Any]) -> None:
    """Bug kinds 3 and 35: told and counted; whoever gets the poisoned pages next must not notice either."""
    cluster = await stack.cluster(kv_pages=40)
    counter = METRICS.rpc["draftwood.v1.VerifierService/Generate", "INTERNAL"]._value
    counted = counter.get()
    slow_down(cluster.verifier, 0.003)
    want = await cluster.plain("one two", max_tokens=100, **rule)
    others = [asyncio.create_task(cluster.speculative("one two", max_tokens=100, **rule)) for _ in range(2)]
    call = verifier_stub(await stack.channel(cluster.verifier)).Generate(
        verifier_request("sick", b"t", max_tokens=200, ignore_eos=True)
    )
    await until(lambda: "sick" in cluster.engine.sessions and cluster.engine.sessions["sick"].generated > 5)

    def poison() -> None:
        page = cluster.engine.sessions["sick"].pages[0]
        cluster.engine.runtime.cache[0, 1, page, :, 0] = torch.nan

    await asyncio.wrap_future(cluster.verifier._worker.call(poison))
    refusal = await refused(call)
    assert (refusal.said.status, refusal.said.reason) == ("INTERNAL", "NAN_LOGITS")
    assert refusal.status.reason == "NAN_LOGITS"
    assert counter.get() == counted + 1
    for other in others:
        assert (await other).tokens == want
    after = await asyncio.gather(*(cluster.speculative("one two", max_tokens=100, **rule) for _ in range(4)))
    assert all(text.tokens == want for text in after)
    await cluster.is_idle()


async def test_failing_step_ends_its_sessions_and_the_engine_goes_on(stack: Stack) -> None:
    cluster = await stack.cluster()
    want = await cluster.plain("one two", max_tokens=20, **GREEDY)
    runtime = cluster.engine.runtime
    forward, calls = runtime.forward, 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("the device is on fire at 0xdeadbeef")
        return forward(*arguments)

    runtime.forward = failing  # type: ignore[method-assign]
    with pytest.raises(Internal) as caught:
        await cluster.speculative("one two", max_tokens=20, **GREEDY)
    assert caught.value.reason == "INTERNAL" and "0xdeadbeef" not in caught.value.message
    await cluster.is_idle()
    assert (await cluster.speculative("one two", max_tokens=20, **GREEDY)).tokens == want


async def test_failing_drafter_gives_its_sessions_up_and_the_text_goes_on(stack: Stack) -> None:
    cluster = await stack.cluster()
    slow_down(cluster.verifier, 0.003)
    want = await cluster.plain("one two", max_tokens=60, **GREEDY)
    drafter: Any = cluster.drafts[0].loaded.core.drafter
    calls = 0

    def failing(forward: Forward) -> Forward:
        def run(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 9 == 0:
                raise RuntimeError("broken")
            return forward(*arguments)

        return run

    wrap_forwards(cluster.drafts[0], failing)
    for _ in range(3):
        assert (await cluster.speculative("one two", max_tokens=60, **GREEDY)).tokens == want
    assert calls >= 9
    await cluster.is_idle()
    pool = drafter._runtime.pool
    assert pool.free == pool.total


# --- readiness


class HeldVerifier(VerifierServer):
    """Loads only when told."""

    def __init__(self, settings: VerifierSettings) -> None:
        super().__init__(settings)
        self.go = asyncio.Event()

    async def _load(self) -> None:
        await self.go.wait()
        await super()._load()


async def test_health_says_serving_only_after_the_warm_up(stack: Stack) -> None:
    settings = VerifierSettings(model=str(stack.models.target), name="tiny", **EXACT)
    verifier: Any = HeldVerifier(settings)
    stack.exits.push_async_callback(verifier.stop, 0.5)
    verifier.address = await verifier.start()
    channel = await stack.channel(verifier)
    seen: list[int] = []

    async def watch() -> None:
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            seen.append(answer.status)  # noqa: PERF401

    watcher = asyncio.create_task(watch())
    await until(lambda: bool(seen))
    response = health_pb2.HealthCheckResponse
    assert seen == [response.NOT_SERVING] == [await health(verifier)]
    refusal = await refused(verifier_stub(channel).Generate(verifier_request("early")))
    assert (refusal.said.status, refusal.said.reason) == ("UNAVAILABLE", "LOADING")
    assert refusal.status.reason == "LOADING" and refusal.status.retry_after_ms > 0
    draft = HandDraft(channel)
    assert (await draft.error()).reason == "LOADING"
    verifier.go.set()
    await verifier.ready()
    await until(lambda: len(seen) == 2)
    assert seen[-1] == response.SERVING == await health(verifier)
    assert engine_of(verifier).totals.steps == 0
    assert len(await tokens_of(verifier_stub(channel).Generate(verifier_request("now", max_tokens=4)))) <= 4
    watcher.cancel()


async def test_model_that_is_not_there_is_named_and_never_serves(stack: Stack) -> None:
    settings = VerifierSettings(model="/nowhere/at-all", **EXACT)
    verifier: Any = VerifierServer(settings)
    stack.exits.push_async_callback(verifier.stop, 0.5)
    verifier.address = await verifier.start()
    with pytest.raises(DraftwoodError) as caught:
        await verifier.ready()
    assert (caught.value.status, caught.value.reason) == ("NOT_FOUND", "MODEL_UNKNOWN")
    assert "/nowhere/at-all" in caught.value.message
    assert await health(verifier) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_stopping_is_quick_although_others_listen(stack: Stack) -> None:
    """Open load streams and an idle draft's stream must not hold a server for its whole grace."""
    cluster = await stack.cluster()
    await cluster.speculative("one", max_tokens=8)
    for server in (cluster.drafts[0], cluster.verifier):
        began = time.monotonic()
        await server.stop(20.0)
        assert time.monotonic() - began < 3.0, type(server).__name__


async def test_stopping_lets_a_running_text_finish_and_refuses_new_ones(stack: Stack) -> None:
    cluster = await stack.cluster()
    slow_down(cluster.verifier, 0.01)
    want = await cluster.plain("one two", max_tokens=30, **GREEDY)
    text = Text()
    task = asyncio.create_task(cluster.speculative("one two", text, max_tokens=30, **GREEDY))
    await until(lambda: bool(text.tokens))
    stub = verifier_stub(await stack.channel(cluster.verifier))
    await stub.GetModelInfo(verifier_pb2.VerifierServiceGetModelInfoRequest())
    stopping = asyncio.create_task(cluster.verifier.stop(20.0))
    await until(lambda: cluster.verifier.draining)
    refusal = await refused(stub.Generate(verifier_request("late")))
    assert refusal.status.status == "UNAVAILABLE"
    assert (await task).tokens == want
    await asyncio.wait_for(stopping, 3.0)


async def test_a_verifier_that_drained_and_was_restarted_is_served_again(stack: Stack) -> None:
    """Its address is the same, and what the former process said counts no more."""
    drained = asyncio.Event()

    async def script(requests: Any) -> Any:
        await anext(requests)
        caps = draft_pb2.Caps(max_nodes=8, max_depth=8, max_context_tokens=100)
        yield draft_pb2.SpeculateResponse(welcome=draft_pb2.Welcome(protocol_version=1, caps=caps))
        async for request in requests:
            for join in request.joins:
                start = draft_pb2.Start(handle=join.handle, tokens=[1, 2, 3], budget=2)
                yield draft_pb2.SpeculateResponse(starts=[start])
                if not drained.is_set():
                    drained.set()
                    yield draft_pb2.SpeculateResponse(drain=draft_pb2.Drain())
                    return

    former = await stack.start(ScriptedVerifier(script))
    draft: DraftServer = await stack.draft(kind="ngram")
    worker: Any = draft_pb2_grpc.DraftServiceStub(await stack.channel(draft))
    request = draft_pb2.AttachRequest(session_id="a", ticket=b"t", verifier_address=former.address)
    await worker.Attach(request, timeout=5)
    await until(lambda: all(link.task.done() for link in draft._links.values()))
    await former.stop(0.1)
    heir = await stack.start(ScriptedVerifier(script, former.address))
    await worker.Attach(draft_pb2.AttachRequest(session_id="b", ticket=b"t", verifier_address=heir.address), timeout=5)
    await until(lambda: any(message.HasField("growth") for message in heir.heard))


async def test_draft_worker_stops_while_a_verifier_hangs(stack: Stack) -> None:
    """A verifier that never answers Hello must not keep a task of the worker alive."""

    async def silent(requests: Any) -> Any:
        async for _ in requests:
            pass
        await asyncio.sleep(30)
        yield

    hole = await stack.start(ScriptedVerifier(silent))
    draft: DraftServer = await stack.draft(kind="ngram")
    worker: Any = draft_pb2_grpc.DraftServiceStub(await stack.channel(draft))
    request = draft_pb2.AttachRequest(session_id="s", ticket=b"t", verifier_address=hole.address)
    with pytest.raises(grpc.RpcError) as caught:
        await worker.Attach(request, timeout=0.3)
    assert from_rpc_error(caught.value).reason == "TRANSPORT"
    await draft.stop(0.2)
    assert all(link.task.done() for link in draft._links.values())


# --- reflection


async def test_client_made_from_reflection_alone_gets_the_same_tokens(stack: Stack) -> None:
    cluster = await stack.cluster()
    want = await collect(cluster.client, [Message("user", "Hi")], max_tokens=20, temperature=0.8, seed=5)

    def call(address: str) -> list[int]:
        """Knows the service's name and the fields' names, nothing else."""
        with grpc.insecure_channel(address) as channel:
            pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            service = pool.FindServiceByName("draftwood.v1.RouterService")
            method = service.methods_by_name["Generate"]
            request = message_factory.GetMessageClass(method.input_type)()
            request.generation.chat.messages.add(role="user", content="Hi")
            request.generation.max_tokens = 20
            request.generation.sampling.temperature = 0.8
            request.generation.sampling.seed = 5
            stream = channel.unary_stream(
                f"/{service.full_name}/{method.name}",
                request_serializer=lambda m: m.SerializeToString(),
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
            )
            return [token for answer in stream(request) for token in answer.event.chunk.tokens]

    assert await asyncio.to_thread(call, cluster.router.address) == want.tokens
