"""Sampling parameters and log probabilities over the real wire."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwood.runtime.text import TextCodec
from tests.services.models import END_OF_TURN, Models
from tests.services.stack import Cluster, Stack, Text, slow_down

PROMPT = "The sea is green, the grass is"


async def slow_cluster(stack: Stack) -> Cluster:
    """A target slow enough for a draft to be there in time, on a busy machine too."""
    cluster = await stack.cluster(draft_wait_ms=1000)
    slow_down(cluster.verifier, 0.01)
    return cluster


def hf_model(models: Models) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float64)


@pytest.mark.parametrize("speculate", [False, True])
async def test_greedy_text_is_what_transformers_generates_with_its_own_processors(
    stack: Stack, speculate: bool
) -> None:
    """Its ``generate`` as it is: bias, repetition penalty, bad words and least length, in its own order."""
    cluster = await slow_cluster(stack)
    model, codec = hf_model(stack.models), cluster.verifier.loaded.codec
    ids = torch.tensor([codec.encode(PROMPT)])
    plain: list[int] = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)[
        0, ids.shape[1] :
    ].tolist()
    words = [plain[2:4], plain[5:6]]
    bias = {plain[0]: -1.5, END_OF_TURN: 12.0, 300: 2.5}
    want = model.generate(
        ids,
        max_new_tokens=48,
        min_new_tokens=24,
        do_sample=False,
        repetition_penalty=1.3,
        sequence_bias=[[[token], value] for token, value in bias.items()],
        bad_words_ids=words,
    )[0, ids.shape[1] :].tolist()
    text = Text()
    async for event in cluster.client.generate(
        PROMPT,
        max_tokens=48,
        min_tokens=24,
        repetition_penalty=1.3,
        logit_bias=bias,
        bad_words=words,
        speculate=speculate,
    ):
        text.tokens += getattr(event, "tokens", ())
        text.accepted += getattr(event, "accepted", 0)
    assert text.tokens == want
    assert len(want) >= 24 and want[: len(plain)] != plain
    assert bool(text.accepted) == speculate


async def test_log_probabilities_with_and_without_drafts(stack: Stack) -> None:
    """The raw distribution's, whatever is done to the logits afterwards; as many as tokens and as usage says."""
    cluster = await slow_cluster(stack)
    options: dict[str, Any] = {
        "max_tokens": 40, "temperature": 0.8, "seed": 4, "top_k": 5, "repetition_penalty": 1.5, "logprobs": True,
        "top_logprobs": 3, "ignore_eos": True,
    }  # fmt: skip
    drafted = await cluster.speculative(PROMPT, **options)
    plain = await cluster.speculative(PROMPT, speculate=False, **options)
    assert drafted.tokens == plain.tokens and drafted.accepted > 0
    ours, others = ([entry for chunk in text.chunks for entry in chunk.logprobs] for text in (drafted, plain))
    assert len(ours) == len(others) == len(drafted.tokens) == 40
    assert drafted.finished and drafted.finished.usage.completion_tokens == 40
    codec = cluster.verifier.loaded.codec
    prompt = codec.encode(PROMPT)
    logits = hf_model(stack.models)(torch.tensor([[*prompt, *drafted.tokens]])).logits[0]
    for k, (entry, other) in enumerate(zip(ours, others, strict=True)):
        raw = logits[len(prompt) - 1 + k].log_softmax(-1)
        assert entry.logprob == pytest.approx(raw[drafted.tokens[k]].item(), abs=1e-5)
        top = raw.topk(3)
        assert [alternative.token for alternative in entry.top] == top.indices.tolist()
        assert [alternative.logprob for alternative in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)
        assert [a.token for a in entry.top] == [a.token for a in other.top]
        both = zip((entry, *entry.top), (other, *other.top), strict=True)
        assert all(mine.logprob == pytest.approx(theirs.logprob, rel=1e-6) for mine, theirs in both)
        assert all(a.text == codec._fast.decode([a.token], skip_special_tokens=False) for a in entry.top)


async def test_log_probabilities_come_only_when_asked_for(stack: Stack) -> None:
    cluster = await stack.cluster()
    none = await cluster.speculative(PROMPT, max_tokens=6)
    alone = await cluster.speculative(PROMPT, max_tokens=6, logprobs=True)
    assert all(chunk.logprobs == () for chunk in none.chunks)
    entries = [entry for chunk in alone.chunks for entry in chunk.logprobs]
    assert len(entries) == len(alone.tokens) and all(entry.top == () for entry in entries)
    assert all(-math.inf < entry.logprob <= 0 for entry in entries)


async def test_bad_words_given_as_text_do_not_come(stack: Stack) -> None:
    cluster = await stack.cluster()
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.5, "seed": 2, "ignore_eos": True}
    free = await cluster.speculative(PROMPT, **options)
    words = sorted({piece.strip() for piece in free.pieces if piece.strip().isalpha() and piece.isascii()})[:3]
    codec = cluster.verifier.loaded.codec
    spelled = [ids for word in words for ids in codec.spellings(word)]
    assert len(spelled) == 6 and sum(contains(free.tokens, ids) for ids in spelled) >= 3
    text = await cluster.speculative(PROMPT, bad_words=words, **options)
    assert not any(contains(text.tokens, ids) for ids in spelled)
    assert text.tokens == await cluster.plain(PROMPT, bad_words=words, **options)


def contains(tokens: list[int], ids: list[int]) -> bool:
    return any(tokens[k : k + len(ids)] == ids for k in range(len(tokens)))


def test_spellings_of_a_word(models: Models) -> None:
    codec = TextCodec(models.target)
    for word in ("sky", " sky", "   sky"):
        assert codec.spellings(word) == [codec.encode("sky"), codec.encode(" sky")]
    assert codec.spellings("\n") == [codec.encode("\n"), codec.encode(" \n")]
    assert codec.spellings("  ") == codec.spellings("") == [[]]


async def test_min_tokens_holds_the_end_back_and_no_longer(stack: Stack) -> None:
    cluster: Cluster = await stack.cluster()
    eager = {"logit_bias": {END_OF_TURN: 100.0}, "max_tokens": 20}
    assert (await cluster.speculative(PROMPT, **eager)).tokens == [END_OF_TURN]
    held = await cluster.speculative(PROMPT, min_tokens=7, **eager)
    assert len(held.tokens) == 8 and held.tokens[7] == END_OF_TURN and END_OF_TURN not in held.tokens[:7]
    assert held.finished and held.finished.reason == "stop" and held.finished.usage.completion_tokens == 8
    through = await cluster.speculative(PROMPT, min_tokens=7, ignore_eos=True, **eager)
    assert through.tokens == [END_OF_TURN] * 20, "what does not end the text is not held back"
