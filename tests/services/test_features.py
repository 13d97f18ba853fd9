"""The target's hidden states over the real wire: to whom asked for them, each position once, and right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwood.errors import FailedPrecondition
from draftwood.features import FINAL, FeatureRequest, Features
from draftwood.rpc.status import from_rpc_error
from draftwood.telemetry import METRICS
from draftwood.v1 import draft_pb2, draft_pb2_grpc, verifier_pb2
from draftwood.wire import feature_request_to_proto
from tests.services.stack import (
    Stack,
    attach_request,
    engine_of,
    slow_down,
    tokens_of,
    until,
    verifier_request,
    verifier_stub,
)
from tests.services.wire import HandDraft, ScriptedVerifier
from verifier_service import features, speculation
from verifier_service.server import VerifierServer

HIDDEN = 32
ONE, THREE = FeatureRequest((FINAL,), HIDDEN), FeatureRequest((1, 5, 3), HIDDEN)
PROMPT = [k * 7 % 300 + 2 for k in range(53)]
TOKENS = 40
OPTIONS: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}


def reference(model: Path, text: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """By transformers' own forward, float64 [positions, layers, hidden]."""
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    with torch.inference_mode():
        states = dense(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    return torch.stack([states[-1 if layer == FINAL else layer][0] for layer in layers], 1)


def sent() -> dict[str, tuple[float, float]]:
    """Positions and bytes by the metrics."""
    return {
        part: (METRICS.features[part]._value.get(), METRICS.feature_bytes[part]._value.get())  # type: ignore[index]
        for part in ("commit", "chunk")
    }


@dataclass
class Listener:
    """A draft by hand that guesses from a known text, one wrong sibling first, and puts the features together."""

    hand: HandDraft
    request: FeatureRequest
    text: list[int]  # what will be written, prompt included
    known: dict[int, Features] = field(default_factory=dict)  # by position
    next_id: int = 1
    accepted: int = 0
    in_commits: int = 0
    tokens: int = 0  # of commits
    length: int = 0

    def _take(self, first: int, count: int, data: bytes) -> None:
        states = self.request.decode(data)
        assert len(states) == count
        for position, state in enumerate(states, first):
            assert position not in self.known, "each position once"
            self.known[position] = state

    async def _guess(self, epoch: int) -> None:
        run = self.text[self.length : self.length + 3]
        if len(run) == 3:
            wrong = run[0] ^ 1
            parent, token = [0, 0, 2, 3], [wrong, *run]
            base, self.next_id = self.next_id, self.next_id + 4
            await self.hand.grow(epoch=epoch, first_id=base, parent_base=base - 1, parent=parent, token=token)

    async def serve(self, key: bytes, handle: int = 1) -> None:
        start = await self.hand.join("s", key, handle)
        self.length = len(start.tokens)
        self._hear(self.hand.heard[-1])
        await self._guess(start.epoch)
        while True:
            message = await self.hand.hear()
            self._hear(message)
            if message.stops:
                return
            if message.HasField("commits"):
                await self._guess(message.commits.epoch[-1])

    def _hear(self, message: draft_pb2.SpeculateResponse) -> None:
        if message.HasField("commits"):
            commits = message.commits
            assert list(commits.feature_count) in ([], list(commits.count)), "one for each token, whatever the step"
            self.length = commits.length[-1]
            self.accepted += commits.accepted[-1]
            self.tokens += commits.count[-1]
            if commits.feature_count:
                count = commits.feature_count[-1]
                self.in_commits += count
                self._take(self.length - 1 - count, count, commits.features)
        for chunk in message.features:
            self._take(chunk.first, chunk.count, chunk.data)


async def listen(
    stack: Stack, verifier: VerifierServer, request: FeatureRequest, *, after: int = 0, slow_s: float = 0.01
) -> Listener:
    """Serves one request, joining once ``after`` tokens have been written, and checks all that has been told."""
    channel = await stack.channel(verifier)
    text = PROMPT + await tokens_of(
        verifier_stub(channel).Generate(verifier_request("plain", prompt=PROMPT, **OPTIONS))
    )
    before = sent()
    slow_down(verifier, slow_s)
    call = verifier_stub(channel).Generate(verifier_request("s", b"t", PROMPT, **OPTIONS))
    hand = HandDraft(channel)
    await hand.hello(features=feature_request_to_proto(request))
    written = 0
    while written < after:
        written += len((await call.read()).event.chunk.tokens)
    listener = Listener(hand, request, text)
    await listener.serve(b"t")
    hand.close()
    call.cancel()
    want = reference(Path(verifier.settings.model), text[: listener.length - 1], request.layers)
    assert sorted(listener.known) == list(range(len(want))), "all positions before the last anchor that was told"
    got = torch.from_numpy(np.stack([listener.known[k] for k in range(len(want))]).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-3)
    positions, size = (np.array(sent()["commit"]) - np.array(before["commit"])).tolist()
    assert positions == listener.in_commits == listener.tokens
    assert size == listener.tokens * request.position_bytes == listener.tokens * len(request.layers) * HIDDEN * 2
    chunked, chunk_size = (np.array(sent()["chunk"]) - np.array(before["chunk"])).tolist()
    assert chunked == len(want) - listener.in_commits and chunk_size == chunked * request.position_bytes
    return listener


@pytest.mark.parametrize("request_", [ONE, THREE], ids=["one", "three"])
async def test_each_position_comes_once_and_is_the_targets_hidden_state(stack: Stack, request_: FeatureRequest) -> None:
    """The prompt's come in chunks, those of accepted nodes with the commit that moves them. The plain run has left the
    prompt's pages in the cache, so that most of them are found there."""
    verifier = await stack.verifier(model=str(stack.models.deep_target), features=[3, 0, 1, 5], canary=False)
    listener = await listen(stack, verifier, request_)
    assert listener.accepted > 10


async def test_whoever_joins_late_is_told_what_came_before(stack: Stack) -> None:
    verifier = await stack.verifier(features=[FINAL], prefix_cache=False, canary=False)
    listener = await listen(stack, verifier, ONE, after=9)
    assert listener.tokens < TOKENS - 9


async def test_much_is_cut_into_chunks_and_messages(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CHUNK_BYTES", 5 * ONE.position_bytes)
    monkeypatch.setattr(speculation, "MOST_FEATURE_BYTES", 7 * ONE.position_bytes)
    verifier = await stack.verifier(features=[FINAL], canary=False)
    listener = await listen(stack, verifier, ONE)
    told = [[chunk.count for chunk in message.features] for message in listener.hand.heard]
    assert max(count for counts in told for count in counts) == 5
    assert sum(bool(counts) for counts in told) > 4 and max(map(sum, told)) <= 10


async def test_whoever_sleeps_is_told_with_the_commit_that_wakes_it(stack: Stack) -> None:
    """Capped to plain decoding for a while, no nodes are wanted; ``listen`` checks that nothing was missed."""
    verifier = await stack.verifier(features=[FINAL], canary=False)
    stub = verifier_stub(await stack.channel(verifier))

    async def nap() -> None:
        sessions = engine_of(verifier).sessions
        await until(lambda: "s" in sessions and bool(sessions["s"].drafts) and sessions["s"].generated > 4)
        await stub.SetPolicy(verifier_pb2.VerifierServiceSetPolicyRequest(policy={"max_session_nodes": 0}))
        await until(lambda: sessions["s"].generated > 20)
        await stub.SetPolicy(verifier_pb2.VerifierServiceSetPolicyRequest())

    napping = asyncio.create_task(nap())
    listener = await listen(stack, verifier, ONE, slow_s=0.02)
    await napping
    counts = [count for message in listener.hand.heard for count in message.commits.feature_count]
    assert max(counts) > 8, "more than a step can bring"


async def test_features_of_another_size_end_the_drafts_stream(stack: Stack, heads: dict[str, Path]) -> None:
    async def lying(requests: AsyncIterator[Any]) -> AsyncGenerator[draft_pb2.SpeculateResponse, None]:
        hello = (await anext(requests)).hello
        assert list(hello.draft.features.layers) == [FINAL] and hello.draft.features.hidden_size == HIDDEN
        tokenizer = hello.draft.tokenizer
        yield draft_pb2.SpeculateResponse(welcome=draft_pb2.Welcome(protocol_version=1, tokenizer=tokenizer))
        await anext(requests)
        chunk = draft_pb2.FeatureChunk(handle=1, first=0, count=2, data=b"\0" * 100)
        yield draft_pb2.SpeculateResponse(features=[chunk])
        await asyncio.sleep(30)

    verifier = await stack.start(ScriptedVerifier(lying))
    draft = await stack.draft(kind="eagle", model=str(heads["eagle"]), target=str(stack.models.deep_target))
    worker: Any = draft_pb2_grpc.DraftServiceStub(await stack.channel(draft))
    with pytest.raises(grpc.RpcError) as caught:
        await worker.Attach(attach_request(draft, "s", b"t", verifier.address), timeout=5)
    reason = from_rpc_error(caught.value)
    assert (reason.reason, reason.field) == ("FEATURES", "features.data")


@pytest.mark.parametrize(
    ("offered", "asked", "field", "word"),
    [
        ([], ONE, "", "off here"),
        ([1], ONE, ".layers", r"layer 0 is asked for, those offered are \[1\]"),
        ([0, 1], FeatureRequest((0, 1), HIDDEN), ".layers", "1 or 3 different ones"),
        ([0, 1], FeatureRequest((0, 1, 1), HIDDEN), ".layers", "1 or 3 different ones"),
        ([0], FeatureRequest((0,), 64), ".hidden_size", "size 64 are asked for, the target's have 32"),
        ([0], FeatureRequest((0,), HIDDEN, "other"), ".target", "made for target 'other', this is 'tiny'"),
    ],
    ids=["off", "layer", "two", "twice", "size", "target"],
)
async def test_what_cannot_be_given_is_refused_at_hello(
    stack: Stack, offered: list[int], asked: FeatureRequest, field: str, word: str
) -> None:
    verifier = await stack.verifier(features=offered)
    hand = HandDraft(await stack.channel(verifier))
    await hand.hello(features=feature_request_to_proto(asked))
    assert not hand.heard[-1].HasField("welcome")
    said = hand.heard[-1].errors[0].error
    assert (said.reason, said.field) == ("FEATURES_UNAVAILABLE", f"hello.draft.features{field}")
    with pytest.raises(FailedPrecondition, match=word) as caught:
        await hand.hear()
    assert caught.value.reason == "FEATURES_UNAVAILABLE"


async def test_whoever_asks_for_none_is_told_none(stack: Stack) -> None:
    verifier = await stack.verifier(features=[FINAL])
    channel, before = await stack.channel(verifier), sent()
    call = verifier_stub(channel).Generate(verifier_request("s", b"t", PROMPT, **OPTIONS))
    hand = HandDraft(channel)
    await hand.hello()
    await hand.join("s", b"t", 1)
    while not hand.heard[-1].stops:
        await hand.hear()
    assert sent() == before
    assert not any(message.features or message.commits.features for message in hand.heard)
    hand.close()
    call.cancel()
