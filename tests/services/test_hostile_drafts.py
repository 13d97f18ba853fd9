"""Drafts change speed, never text: killed, stopped, lying, late, silent or shouting, nobody's text notices."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwood.client import Message
from draftwood.errors import DraftwoodError
from draftwood.rpc.status import from_rpc_error
from draftwood.v1 import draft_pb2, draft_pb2_grpc, tree_pb2
from draftwood.wire import tokenizer_to_proto
from tests.services.models import SIZE
from tests.services.stack import (
    Cluster,
    Stack,
    Text,
    collect,
    engine_of,
    slow_down,
    tokens_of,
    until,
    verifier_request,
    verifier_stub,
)
from tests.services.wire import HandDraft, ScriptedVerifier
from verifier_service.server import VerifierServer

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "ignore_eos": True}
LONGEST_GAP_S = 1.0


# --- processes that die and stall


class Process:
    """``python -m`` of a role; ``address`` is what it prints."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.address = ""

    async def ready(self) -> None:
        assert self.child.stdout is not None
        async with asyncio.timeout(60):
            self.address = (await self.child.stdout.readline()).decode().split()[-1]
            assert b"ready" in await self.child.stdout.readline()

    def send(self, number: signal.Signals) -> None:
        self.child.send_signal(number)


@asynccontextmanager
async def processes(*wanted: tuple[str, dict[str, Any]]) -> AsyncIterator[list[Process]]:
    """Modules with their settings, started together; they end, whatever has been done to them."""
    started = [Process(await spawn(module, **settings)) for module, settings in wanted]
    try:
        for each in started:
            await each.ready()
        yield started
    finally:
        for each in started:
            if each.child.returncode is None:
                each.child.kill()
            await each.child.wait()


async def spawn(module: str, **settings: Any) -> asyncio.subprocess.Process:
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


async def test_killed_and_stalled_draft_workers_are_not_noticed(stack: Stack) -> None:
    """One worker at a time: the first is killed, the second takes over, is stopped, wakes up and serves again."""
    draft = {"kind": "lm", "model": stack.models.draft, "threads": 1, "depth": 4, "load_interval_s": 0.05}
    verifier = await stack.verifier()
    slow_down(verifier, 0.005)
    async with processes(("draft_service", draft), ("draft_service", draft)) as (killed, stalled):
        router = await stack.router([verifier], [killed.address, stalled.address], drafts_per_session=1)
        cluster = Cluster(verifier, [], router, await stack.client(router))
        options = {"max_tokens": 400, **SAMPLED}
        want = await cluster.plain("The sky is", **options)
        text = Text()
        task = asyncio.create_task(cluster.speculative("The sky is", text, **options))
        await until(lambda: text.accepted > 5)
        killed.send(signal.SIGKILL)
        before = text.accepted
        await until(lambda: text.accepted > before + 20, what="the other worker's guesses are accepted")
        stalled.send(signal.SIGSTOP)
        at_stop = len(text.tokens)
        await until(lambda: len(text.tokens) > at_stop + 40)
        stalled.send(signal.SIGCONT)
        assert len(text.tokens) < 380, "the worker must wake while the text is being written"
        assert (await task).tokens == want
        assert text.longest_gap_s < LONGEST_GAP_S
        status = await cluster.client.status()
        assert [d.health for d in status.drafts] == ["lost", "ready"]
        assert status.draft_reattachments == 1
        assert engine_of(verifier).totals.refused == 0, "what comes late is stale, not wrong"
        again = await cluster.speculative("The sky is", **options | {"max_tokens": 100})
        assert again.tokens == want[:100]
        assert again.accepted > 5, "the worker that woke up serves again"
        await until(lambda: not engine_of(verifier).sessions)
        await ends_on_sigterm(stalled)


async def test_killed_verifier_is_replaced_and_the_text_goes_on(stack: Stack) -> None:
    """Same text, no token twice, none missing; the next one ends on SIGTERM although the router listens."""
    options = {"model": stack.models.target, "name": "tiny", "threads": 1, "dtype": "float64", "load_interval_s": 0.05}
    async with processes(("verifier_service", options), ("verifier_service", options)) as (first, second):
        router = await stack.router([first.address, second.address])
        client = await stack.client(router)
        want = await collect(client, "The sky is", max_tokens=400, **SAMPLED)
        text = Text()
        task = asyncio.create_task(collect(client, "The sky is", text, max_tokens=400, **SAMPLED))
        await until(lambda: len(text.tokens) > 40)
        serving = next(w.address for w in router._registry.workers() if w.sessions)
        killed, left = (first, second) if serving == first.address else (second, first)
        killed.send(signal.SIGKILL)
        assert (await task).tokens == want.tokens
        assert (await client.status()).verifier_migrations == 1
        await ends_on_sigterm(left)


async def ends_on_sigterm(process: Process) -> None:
    """Soon, although a router's streams are open."""
    began = time.monotonic()
    process.send(signal.SIGTERM)
    assert await asyncio.wait_for(process.child.wait(), 10) == 0
    assert time.monotonic() - began < 5


# --- drafts that lie


class HostileDraft:
    """Answers each commit by a seeded script: valid random trees, garbage, old epochs, doubles, silence, churn."""

    def __init__(self, hand: HandDraft, seed: int) -> None:
        self.hand = hand
        self.random = random.Random(seed)
        self.next_id = 1
        self.handle = 0
        self.epochs = 0
        self.old: list[tree_pb2.Growth] = []

    async def serve(self, session_id: str) -> None:
        """Until the verifier says Stop, or the session is over."""
        start = await self.hand.join(session_id, b"t", 1)
        self.handle = start.handle
        await self.answer(start.epoch)
        while True:
            message = await self.hand.hear()
            if message.stops:
                return
            if message.HasField("commits"):
                self.epochs = message.commits.epoch[-1]
                await self.answer(self.epochs)

    async def answer(self, epoch: int) -> None:
        for _ in range(self.random.randint(0, 3)):
            what = self.random.choice([self.tree, self.tree, self.tree, self.double, self.stale, self.garbage])
            await self.hand.say(what(epoch))

    def tree(self, epoch: int) -> draft_pb2.SpeculateRequest:
        """A valid tree of random tokens that claim to be certain."""
        n = self.random.randint(0, 40)
        grown = tree_pb2.Growth(
            handle=[self.handle], epoch=[epoch], first_id=[self.next_id], parent_base=[self.next_id - 1], count=[n],
            complete=[self.random.random() < 0.7],
            parent=[self.random.randint(0, k) for k in range(n)],
            token=[self.random.randrange(SIZE) for _ in range(n)],
            score=[-self.random.random() * 0.01 for _ in range(n)],
        )  # fmt: skip
        self.next_id += n
        self.old.append(grown)
        return draft_pb2.SpeculateRequest(growth=grown)

    def double(self, epoch: int) -> draft_pb2.SpeculateRequest:
        return draft_pb2.SpeculateRequest(growth=self.random.choice(self.old) if self.old else None)

    def stale(self, epoch: int) -> draft_pb2.SpeculateRequest:
        return self.tree(self.random.randint(0, epoch))

    def garbage(self, epoch: int) -> Any:
        grown = self.tree(epoch).growth
        match self.random.randrange(5):
            case 0:
                return self.random.randbytes(40)
            case 1:
                grown.epoch[0] = epoch + 1000
            case 2:
                grown.score.append(0.5)
            case 3:
                grown.token[:] = [SIZE + 5] * len(grown.token)
            case _:
                grown.parent[:] = [9] * len(grown.parent)
        return draft_pb2.SpeculateRequest(growth=grown)


async def test_hostile_drafts_change_no_token_of_anyone(stack: Stack) -> None:
    """Bug kind 3 too: six sessions with hostile drafts, two others with a good one, all at once."""
    cluster = await stack.cluster()
    want = await cluster.plain("The sky is", max_tokens=80, **SAMPLED)
    stub = verifier_stub(await stack.channel(cluster.verifier))
    sampling = {"temperature": 0.9, "seed": 11}

    async def attacked(k: int) -> list[int]:
        request = verifier_request(f"v{k}", b"t", max_tokens=80, ignore_eos=True, sampling=sampling)
        answer = asyncio.create_task(tokens_of(stub.Generate(request)))
        hostile = HostileDraft(HandDraft(await stack.channel(cluster.verifier)), k)
        await hostile.hand.hello()
        serving = asyncio.create_task(hostile.serve(f"v{k}"))
        tokens = await answer
        await asyncio.wait_for(serving, 5)
        assert hostile.epochs > 20, "the draft was hardly ever heard"
        hostile.hand.close()
        return tokens

    results = await asyncio.gather(
        *(attacked(k) for k in range(6)),
        *(cluster.speculative("The sky is", max_tokens=80, **SAMPLED) for _ in range(2)),
    )
    assert [r if isinstance(r, list) else r.tokens for r in results] == [want] * 8
    totals = cluster.engine.totals
    assert totals.refused > 20 and totals.stale > 100, "the attack was too mild"
    await cluster.is_idle()


async def test_drafts_that_join_and_leave_all_the_time_cannot_hold_the_text_up(stack: Stack) -> None:
    """Whoever joins is waited for; two that only ever join must not be waited for ever."""
    cluster = await stack.cluster([])
    stub = verifier_stub(await stack.channel(cluster.verifier))
    answer = asyncio.create_task(tokens_of(stub.Generate(verifier_request("v", b"t", max_tokens=30, ignore_eos=True))))
    hands = [HandDraft(await stack.channel(cluster.verifier)) for _ in range(2)]

    async def churn(hand: HandDraft, pause_s: float) -> None:
        await hand.hello()
        for handle in range(1, 10**6):
            await hand.ask_to_join("v", b"t", handle)
            await asyncio.sleep(pause_s)
            await hand.say(draft_pb2.SpeculateRequest(leaves=[draft_pb2.Leave(handle=handle)]))

    churning = [asyncio.create_task(churn(hand, 0.02 + 0.007 * k)) for k, hand in enumerate(hands)]
    assert len(await asyncio.wait_for(answer, 30 * 0.15 + 2)) == 30
    for task, hand in zip(churning, hands, strict=True):
        task.cancel()
        hand.close()


async def test_flood_of_growth_starves_nobody(stack: Stack) -> None:
    cluster = await stack.cluster()
    want = await cluster.plain("The sky is", max_tokens=60, **SAMPLED)
    hand = HandDraft(await stack.channel(cluster.verifier))
    await hand.hello()
    shout = draft_pb2.SpeculateRequest(
        growth=tree_pb2.Growth(
            handle=[9] * 2000, epoch=[0] * 2000, first_id=[1] * 2000, parent_base=[0] * 2000, count=[1] * 2000,
            complete=[True] * 2000, parent=[0] * 2000, token=[5] * 2000, score=[-0.5] * 2000,
        )
    ).SerializeToString()  # fmt: skip

    async def flood() -> None:
        while True:
            await hand.call.write(shout)

    flooding = asyncio.create_task(flood())
    await until(lambda: cluster.engine.totals.stale > 10_000)
    text = await cluster.speculative("The sky is", max_tokens=60, **SAMPLED)
    assert text.tokens == want
    assert text.longest_gap_s < LONGEST_GAP_S and text.finished.usage.total_s < 15
    flooding.cancel()
    hand.close()
    await cluster.is_idle()


async def test_drafts_that_hang_up_at_any_moment_leave_no_link(stack: Stack) -> None:
    """Right after Hello, in the middle of Welcome, after joining."""
    cluster = await stack.cluster([])
    slow_down(cluster.verifier, 0.005)
    channel = await stack.channel(cluster.verifier)
    request = verifier_request("v", b"t", max_tokens=60, ignore_eos=True)
    answer = asyncio.create_task(tokens_of(verifier_stub(channel).Generate(request)))
    await until(lambda: "v" in cluster.engine.sessions)
    hello = draft_pb2.Hello(protocol_version=1)
    for k in range(60):
        hand = HandDraft(channel)
        await hand.say(draft_pb2.SpeculateRequest(hello=hello))
        if k % 3:
            await asyncio.sleep(0.0005 * k / 3)
        if k % 3 == 2:
            await hand.ask_to_join("v", b"t", 1)
        hand.close()
    assert len(await answer) == 60
    await until(lambda: not cluster.engine._links and not cluster.verifier._links, 2.0, "all links are gone")


async def test_draft_that_hangs_up_while_welcome_is_being_written_leaves_no_link(stack: Stack) -> None:
    """The servicer called as gRPC calls it: closed where it hands out its first message."""
    verifier = await stack.verifier()

    async def requests() -> AsyncIterator[draft_pb2.SpeculateRequest]:
        yield draft_pb2.SpeculateRequest(hello=draft_pb2.Hello(protocol_version=1))
        await asyncio.sleep(30)

    stream = verifier.Speculate(requests(), None)
    assert (await anext(stream)).HasField("welcome")
    await until(lambda: len(engine_of(verifier)._links) == 1)
    await stream.aclose()
    await until(lambda: not engine_of(verifier)._links and not verifier._links, 2.0, "the link is gone")


async def test_draft_that_never_reads_is_no_burden(stack: Stack) -> None:
    cluster = await stack.cluster([])
    stub = verifier_stub(await stack.channel(cluster.verifier))
    hand = HandDraft(await stack.channel(cluster.verifier))
    await hand.hello()
    want = await cluster.plain("The sky is", max_tokens=150, **SAMPLED)
    sampling = {"temperature": 0.9, "seed": 11}
    request = verifier_request("v", b"t", max_tokens=150, ignore_eos=True, sampling=sampling)
    answer = asyncio.create_task(tokens_of(stub.Generate(request)))
    await until(lambda: "v" in cluster.engine.sessions)
    await hand.ask_to_join("v", b"t", 1)
    assert await asyncio.wait_for(answer, 10) == want
    hand.close()
    await until(lambda: not cluster.engine._links)


# --- tokenizers


async def test_real_draft_worker_with_another_tokenizer_never_joins(stack: Stack) -> None:
    """Bug kind 34, the verifier's refusal: a session without a draft, and an error for whoever attaches."""
    cluster = await stack.cluster([{"model": str(stack.models.swapped)}])
    await assert_attach_fails(stack, cluster.drafts[0].address, cluster.verifier.address)
    want = await cluster.plain("The sky is", max_tokens=40, **SAMPLED)
    text = await cluster.speculative("The sky is", max_tokens=40, **SAMPLED)
    assert text.tokens == want and text.accepted == 0
    assert cluster.drafts[0].loaded.core.nodes_drafted == 0
    await cluster.is_idle()


PAIRS: dict[str, tuple[str, str, bool]] = {  # target, draft, and whether they fit
    "equal": ("target", "draft", True),
    "target padded": ("padded_target", "draft", True),
    "draft padded": ("target", "padded", True),
    "both padded": ("padded_target", "padded", True),
    "same size, two ids swapped": ("target", "swapped", False),
    "padded, two ids swapped": ("padded_target", "swapped", False),
    "draft has extra special tokens": ("target", "extra", True),
    "target has extra special tokens": ("extra_target", "draft", True),
}


@pytest.mark.parametrize("pair", PAIRS)
async def test_bug_34_pairs_of_vocabularies(stack: Stack, pair: str) -> None:
    """Padding is harmless: its rows, though the largest, are never chosen, guessed or refused. A real difference is
    FAILED_PRECONDITION at Hello, and the session goes on without the draft."""
    target, draft, fits = PAIRS[pair]
    cluster = await stack.cluster(
        [{"model": str(getattr(stack.models, draft))}], model=str(getattr(stack.models, target))
    )
    if not fits:
        await assert_attach_fails(stack, cluster.drafts[0].address, cluster.verifier.address)
    model = AutoModelForCausalLM.from_pretrained(getattr(stack.models, target), dtype=torch.float64)
    ids = cluster.verifier.loaded.codec.encode("The sky is")
    whole = copy.deepcopy(model)
    model.resize_token_embeddings(len(cluster.verifier.loaded.vocabulary.tokens))  # without the rows of padding
    want = model.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False, eos_token_id=None)
    assert target != "padded_target" or (whole(want).logits.argmax(dim=-1) >= SIZE).any(), "padding is quiet"
    greedy = await cluster.speculative("The sky is", max_tokens=48, ignore_eos=True)
    assert greedy.tokens == want[0, len(ids) :].tolist()
    sampled = await cluster.speculative("The sky is", max_tokens=48, **SAMPLED)
    assert sampled.tokens == await cluster.plain("The sky is", max_tokens=48, **SAMPLED)
    assert (max(greedy.tokens + sampled.tokens) >= SIZE) == (target == "extra_target")
    if target != "extra_target":  # there the draft leaves with the first token that it has no row for
        assert (greedy.accepted + sampled.accepted > 0) == fits
    if fits:
        assert cluster.engine.totals.refused == 0
    assert (cluster.drafts[0].loaded.core.nodes_drafted > 0) == fits
    await cluster.is_idle()


@pytest.mark.parametrize("fault", ["TOKENIZER_MISMATCH", "PROTOCOL_VERSION"])
async def test_real_draft_worker_refuses_a_verifier_that_does_not_fit(stack: Stack, fault: str) -> None:
    """The draft's own check, against a verifier that would take it."""
    draft = await stack.draft()

    async def lax(requests: Any) -> Any:
        async for request in requests:
            assert request.HasField("hello")
            tokenizer = tokenizer_to_proto(draft.loaded.core.drafter.vocabulary.fingerprint())
            if fault == "TOKENIZER_MISMATCH":
                tokenizer.sha256 = bytes(32)
            version = 1 if fault == "TOKENIZER_MISMATCH" else 2
            yield draft_pb2.SpeculateResponse(
                welcome=draft_pb2.Welcome(protocol_version=version, tokenizer=tokenizer, caps=draft_pb2.Caps())
            )

    verifier = await stack.start(ScriptedVerifier(lax))
    await assert_attach_fails(stack, draft.address, verifier.address, fault)
    assert not any(message.joins for message in verifier.heard)


async def test_token_that_the_draft_lacks_costs_only_that_session_its_draft(stack: Stack) -> None:
    """A target may have more tokens than its draft: no forward of the draft may meet one."""
    draft = await stack.draft()

    async def larger(requests: Any) -> Any:
        """Starts two sessions; the first has an unknown token in its prompt, the other gets one later."""
        tokenizer = tokenizer_to_proto(draft.loaded.core.drafter.vocabulary.fingerprint())
        tokenizer.size, tokenizer.vocab_size = SIZE + 8, SIZE + 8
        async for request in requests:
            if request.HasField("hello"):
                caps = draft_pb2.Caps(max_nodes=16, max_depth=8, max_context_tokens=100)
                welcome = draft_pb2.Welcome(protocol_version=1, tokenizer=tokenizer, caps=caps)
                yield draft_pb2.SpeculateResponse(welcome=welcome)
            for join in request.joins:
                tokens = [5, SIZE + 3] if join.session_id == "bad" else [5, 6]
                start = draft_pb2.Start(handle=join.handle, tokens=tokens, budget=8, remaining_tokens=50)
                yield draft_pb2.SpeculateResponse(starts=[start])
            for handle, epoch in zip(request.growth.handle, request.growth.epoch, strict=True):
                token = 7 if epoch < 3 else SIZE + 3
                commits = draft_pb2.Commits(
                    handle=[handle], epoch=[epoch + 1], length=[3 + epoch], accepted=[0], count=[1], budget=[8],
                    token=[token],
                )  # fmt: skip
                yield draft_pb2.SpeculateResponse(commits=commits)

    verifier = await stack.start(ScriptedVerifier(larger))
    stub: Any = draft_pb2_grpc.DraftServiceStub(await stack.channel(draft))
    for name in ("good", "bad"):
        await stub.Attach(draft_pb2.AttachRequest(session_id=name, ticket=b"t", verifier_address=verifier.address))
    await until(lambda: sum(len(m.leaves) for m in verifier.heard) == 2, what="both are left in the end")
    epochs = [epoch for m in verifier.heard for epoch in m.growth.epoch]
    assert epochs == [0, 1, 2, 3], "the good one was drawn for until it met the token"
    assert draft.loaded.core.sessions == 0


async def assert_attach_fails(stack: Stack, draft: str, verifier: str, reason: str = "TOKENIZER_MISMATCH") -> None:
    error = await attach_error(stack, draft, verifier)
    assert (error.status, error.reason) == ("FAILED_PRECONDITION", reason)


async def attach_error(stack: Stack, draft: str, verifier: str) -> DraftwoodError:
    channel = await stack.channel(Address(draft))
    request = draft_pb2.AttachRequest(session_id="s", ticket=b"t", verifier_address=verifier)
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        await stub.Attach(request, timeout=5)
    return from_rpc_error(caught.value)


class Address:
    def __init__(self, address: str) -> None:
        self.address = address


# --- the wire


class RecordingVerifier(VerifierServer):
    """Keeps the growth that drafts send."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.growths: list[tree_pb2.Growth] = []

    async def Speculate(self, requests: Any, context: Any) -> Any:
        async def tapped() -> Any:
            async for request in requests:
                if isinstance(request, draft_pb2.SpeculateRequest) and request.HasField("growth"):
                    self.growths.append(request.growth)
                yield request

        async for response in super().Speculate(tapped(), context):
            yield response


@pytest.mark.parametrize("sessions", [1, 8])
async def test_a_round_costs_eight_bytes_a_node_and_sixty_four_a_session(stack: Stack, sessions: int) -> None:
    verifier: Any = await stack.verifier(RecordingVerifier)
    slow_down(verifier, 0.01)
    draft = await stack.draft()
    client = await stack.client(await stack.router([verifier], [draft]))
    prompts = [[Message("user", f"The sky is {k}")] for k in range(sessions)]
    await asyncio.gather(*(collect(client, p, max_tokens=100, **SAMPLED) for p in prompts))
    drawn = [g for g in verifier.growths if len(g.parent)]
    assert max(len(g.handle) for g in drawn) >= min(sessions, 4), "rounds of several sessions share a message"
    for each in drawn:
        assert each.ByteSize() <= 8 * len(each.parent) + 64 * len(each.handle)
    nodes, sent = sum(len(g.parent) for g in drawn), sum(g.ByteSize() for g in drawn)
    rounds = sum(len(g.handle) for g in drawn)
    assert nodes > 50
    assert sent <= 8 * nodes + 16 * rounds, f"{sent} bytes for {nodes} nodes in {rounds} rounds"
