"""The promise over the real wire: with drafts, whatever they are, the text is the target's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwood.client import Message
from draftwood.telemetry import METRICS
from draftwood.v1 import draft_pb2
from tests.services.models import SHORT_CONTEXT, SIZE
from tests.services.stack import (
    Cluster,
    Stack,
    Text,
    engine_of,
    slow_down,
    tokens_of,
    until,
    verifier_request,
    verifier_stub,
)
from tests.services.wire import HandDraft

PROMPTS: list[Any] = [
    "The sky is blue",
    "one",
    [Message("user", "Why is the sea green?")],
    [5, 7, 11, 5, 7, 11, 5, 7],
    "One two three four five six seven eight nine ten. " * 4,
    [Message("system", "Be brief."), Message("user", "café 東京 🙂")],
    [319],
    "greener, greener, greener, greener",
]
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.2, "top_k": 40, "seed": 2**64 - 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": 0},
    {
        "temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.02, "seed": 5, "presence_penalty": 0.4,
        "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {7: 2.0, 290: -3.0},
        "bad_words": ["sea", "the sky", [5, 7]], "min_tokens": 8,
    },
]  # fmt: skip


async def compare(cluster: Cluster, tokens: int, at_once: int = 8) -> int:
    """Every prompt under every rule, with and without drafts; returns the number of accepted guesses."""
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: Any, rule: dict[str, Any]) -> int:
        async with gate:
            options = {"max_tokens": tokens, "ignore_eos": True} | rule
            plain = await cluster.plain(prompt, **options)
            text = await cluster.speculative(prompt, **options)
            assert text.tokens == plain, f"{prompt!r} {rule}"
            assert len(plain) == tokens
            return text.accepted

    return sum(await asyncio.gather(*(one(p, r) for r in RULES for p in PROMPTS)))


async def test_eight_clients_with_an_lm_and_an_ngram_draft(stack: Stack) -> None:
    cluster = await stack.cluster([{}, {"kind": "ngram", "depth": 6}])
    accepted = await compare(cluster, 32)
    assert accepted > len(PROMPTS) * len(RULES) * 32 * 0.2, "the drafts were hardly ever right: nothing was shown"
    assert all(draft.loaded.core.nodes_drafted for draft in cluster.drafts)
    await cluster.is_idle()


async def test_adaptive_width_and_float32_as_a_user_starts_it(stack: Stack) -> None:
    cluster = await stack.cluster([{}, {"kind": "ngram"}], width="adaptive", dtype="auto", page_tokens=64)
    await compare(cluster, 16)
    await cluster.is_idle()


async def test_padded_vocabulary_of_the_draft_is_harmless(stack: Stack) -> None:
    cluster = await stack.cluster([{"model": str(stack.models.padded)}])
    assert cluster.drafts[0].loaded.info.tokenizer.vocab_size > SIZE
    assert await compare(cluster, 16) > 0


async def test_draft_with_a_shorter_context_stops_at_its_limit_and_the_session_goes_on(stack: Stack) -> None:
    """Bug kind 31: a draft for 64 tokens beside a target for 512, texts of 300; a gauge says that it has stopped."""
    cluster = await stack.cluster([{"model": str(stack.models.short)}])
    slow_down(cluster.verifier, 0.002)
    gauge = METRICS.outgrown_sessions._value
    for rule in RULES[:2]:
        options = {"max_tokens": 300, "ignore_eos": True} | rule
        plain = await cluster.plain("The sky is", **options)
        text = Text()
        task = asyncio.create_task(cluster.speculative("The sky is", text, **options))
        await until(lambda text=text: len(text.tokens) > 150)  # type: ignore[misc]
        assert gauge.get() == 1
        await task
        assert text.tokens == plain and len(plain) == 300 and text.started
        limit = SHORT_CONTEXT - text.started.prompt_tokens
        assert sum(c.accepted for c in text.chunks if c.offset < limit) > 0
        assert sum(c.accepted for c in text.chunks if c.offset > limit + 4) == 0
        await cluster.is_idle()
        assert gauge.get() == 0
    long = "The grass is greener. " * 12  # longer than the draft's context from the start
    options = {"max_tokens": 40, "ignore_eos": True}
    assert (await cluster.speculative(long, **options)).tokens == await cluster.plain(long, **options)
    await cluster.is_idle()
    assert cluster.drafts[0].loaded.core.sessions == 0 and cluster.engine.totals.refused == 0


@pytest.mark.parametrize(("verifier_nodes", "draft_nodes"), [(8, 16), (16, 8)])
async def test_the_smaller_cap_of_nodes_is_negotiated(stack: Stack, verifier_nodes: int, draft_nodes: int) -> None:
    """Bug kind 33: nothing is refused, no step verifies more than the smaller cap, and no forward has more rows."""
    cluster = await stack.cluster(
        [{"max_nodes": draft_nodes}], max_live_nodes=verifier_nodes + 1, max_nodes=verifier_nodes
    )
    runtime, rows = cluster.engine.runtime, list[int]()
    forward = runtime.forward

    def counting(parts: Any) -> Any:
        rows.extend(len(part.token) for part in parts if part.logits_from == 0)
        return forward(parts)

    runtime.forward = counting  # type: ignore[method-assign]
    options = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    text = await cluster.speculative("The sky is", **options)
    assert text.tokens == await cluster.plain("The sky is", **options)
    assert text.accepted > 0
    assert cluster.engine.totals.refused == 0
    usage = text.finished.usage
    assert usage.nodes_verified <= 8 * usage.steps
    assert 1 < max(rows) <= 9


@pytest.mark.parametrize(("verifier_nodes", "draft_nodes"), [(8, 16), (16, 8), (8, 0)])
async def test_a_round_of_more_nodes_than_the_smaller_cap_is_refused(
    stack: Stack, verifier_nodes: int, draft_nodes: int
) -> None:
    """Bug kind 33: whichever side is the smaller, Welcome names its cap, a tree of as many nodes is taken and one of
    one node more is not; the session goes on."""
    verifier = await stack.verifier(max_live_nodes=verifier_nodes)
    slow_down(verifier, 0.01)
    channel = await stack.channel(verifier)
    want = await tokens_of(verifier_stub(channel).Generate(verifier_request("plain", max_tokens=60, ignore_eos=True)))
    call = verifier_stub(channel).Generate(verifier_request("s", b"t", max_tokens=60, ignore_eos=True))
    await until(lambda: "s" in engine_of(verifier).sessions)
    hand = HandDraft(channel)
    welcome = await hand.hello(caps=draft_pb2.Caps(max_nodes=draft_nodes))
    assert welcome.caps.max_nodes == 8
    start = await hand.join("s", b"t", 1)
    await hand.grow(epoch=start.epoch, parent=[0] * 8, token=[*range(8)])
    await hand.grow(epoch=start.epoch, first_id=9, parent=[0] * 9, token=[*range(9)])
    error = await hand.error()
    assert (error.status, error.reason, error.field) == ("INVALID_ARGUMENT", "TREE_TOO_LARGE", "growth.count[0]")
    assert "9" in error.message and "8" in error.message
    assert engine_of(verifier).totals.refused == 1
    assert await tokens_of(call) == want
    hand.close()


async def test_greedy_text_is_what_transformers_itself_generates(stack: Stack) -> None:
    """The oracle from outside: the target's own attention and cache, no code of ours."""
    cluster = await stack.cluster()
    model = AutoModelForCausalLM.from_pretrained(stack.models.target, dtype=torch.float64)
    for prompt in ("The sky is blue", "one two three"):
        ids = cluster.verifier.loaded.codec.encode(prompt)
        want = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None)
        text = await cluster.speculative(prompt, max_tokens=64, ignore_eos=True)
        assert text.tokens == want[0, len(ids) :].tolist()


async def test_pieces_are_the_text_and_never_split_a_character(stack: Stack) -> None:
    """Bug kind 18."""
    cluster = await stack.cluster()
    tokenizer, incomplete = cluster.verifier.loaded.codec._fast, 0
    for seed in range(12):
        text = await cluster.speculative("café 東京 🙂", max_tokens=30, ignore_eos=True, temperature=1.5, seed=seed)
        whole = tokenizer.decode(text.tokens, skip_special_tokens=True)
        assert "".join(text.pieces) == whole
        incomplete += whole.endswith("\ufffd")
    assert incomplete, "no text ended in the middle of a character"


async def test_speculation_off_asks_no_draft(stack: Stack) -> None:
    cluster = await stack.cluster()
    await cluster.plain("The sky is", max_tokens=40, ignore_eos=True)
    assert cluster.drafts[0].loaded.core.nodes_drafted == 0
    assert engine_of(cluster.verifier).totals.verified == 0
