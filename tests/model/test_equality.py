"""The promise on SmolLM2-135M-Instruct, float32: greedy against transformers' generate, sampled against ourselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from in_process import CPU, load_target, make_drafters, make_engine, prompts, serve
from transformers import AutoModelForCausalLM

from draftwood.acceptance import Ending
from draftwood.noise import GumbelCache
from draftwood.parameters import SamplingParams
from draftwood.runtime.demo_model import demo_target
from draftwood.runtime.model import ModelRuntime
from draftwood.runtime.text import TextCodec, end_tokens
from draftwood.sampling import margins
from verifier_service.session import GenerateRequest

TOKENS = 128
AT_ONCE = 8
NEAR_TIE = 1e-4
"""A flip is excused, and listed, if the two best candidates lie closer than this."""

pytestmark = [pytest.mark.model, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[ModelRuntime, TextCodec]]:
    yield load_target()


@pytest.fixture(scope="module")
def transformers_model() -> torch.nn.Module:
    """The same weights with transformers' own attention and cache."""
    return AutoModelForCausalLM.from_pretrained(demo_target(), dtype=torch.float32, attn_implementation="sdpa").eval()


def requests(texts: list[list[int]], sampling: SamplingParams) -> list[GenerateRequest]:
    ending = Ending(end_tokens(demo_target(), None), TOKENS)
    return [GenerateRequest(f"s{k}", b"t", tuple(p), (), sampling, ending, 10) for k, p in enumerate(texts)]


def generated(model: torch.nn.Module, texts: list[list[int]]) -> list[list[int]]:
    """What transformers' generate writes greedily behind several prompts at once, which are padded on the left."""
    size, ends = max(map(len, texts)), end_tokens(demo_target(), None)
    ids = torch.tensor([[0] * (size - len(text)) + text for text in texts])
    seen = torch.tensor([[0] * (size - len(text)) + [1] * len(text) for text in texts])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=seen, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)  # type: ignore[operator]
    rows = out[:, size:].tolist()
    return [row[: next((k + 1 for k, token in enumerate(row) if token in ends), TOKENS)] for row in rows]


def flips(
    model: torch.nn.Module,
    texts: list[list[int]],
    want: list[list[int]],
    got: list[list[int]],
    sampling: SamplingParams,
) -> list[str]:
    """Lists each first difference with its margin; fails on one that is no near-tie."""
    listed = []
    for k, (prompt, a, b) in enumerate(zip(texts, want, got, strict=True)):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        text = torch.tensor([[*prompt, *a[:at]]])
        with torch.inference_mode():
            logits = model(text).logits[:, -1]
        margin = float(margins(logits, sampling, [text.shape[1]], GumbelCache(49152, CPU))[0])
        listed.append(f"prompt {k}, token {at}: margin {margin:.2e}")
        assert margin < NEAR_TIE, listed[-1]
    print(f"{len(listed)} near-tie flips", *listed, sep="\n")
    return listed


def test_greedy_equals_transformers_generate(
    target: tuple[ModelRuntime, TextCodec], transformers_model: torch.nn.Module
) -> None:
    runtime, codec = target
    texts = prompts(codec)
    served = serve(make_engine(runtime), requests(texts, SamplingParams()), make_drafters(codec))
    want = [
        text for k in range(0, len(texts), AT_ONCE) for text in generated(transformers_model, texts[k : k + AT_ONCE])
    ]
    got = [served.tokens[f"s{k}"] for k in range(len(texts))]
    assert len(flips(transformers_model, texts, want, got, SamplingParams())) <= 2
    assert sum(map(len, got)) / served.steps > 1.8, "the drafts were of little use, so the test showed little"


@pytest.mark.parametrize("seed", [1, 2**40 + 7, 2**64 - 1])
def test_sampled_equals_plain_decoding(
    target: tuple[ModelRuntime, TextCodec], transformers_model: torch.nn.Module, seed: int
) -> None:
    runtime, codec = target
    texts = prompts(codec)
    sampling = SamplingParams(temperature=0.8, seed=seed)
    plain = serve(make_engine(runtime), requests(texts, sampling))
    drafted = serve(make_engine(runtime), requests(texts, sampling), make_drafters(codec))
    want, got = ([run.tokens[f"s{k}"] for k in range(len(texts))] for run in (plain, drafted))
    assert len(flips(transformers_model, texts, want, got, sampling)) <= 2
    assert drafted.steps < 0.7 * plain.steps
