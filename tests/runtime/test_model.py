"""The runtime's choice of tokens, and its moves of keys and values, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from forwards import VOCAB, random_parts

from draftwood.kernels.children import top_children_reference
from draftwood.noise import GumbelCache
from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.decoder import computes_in_bfloat16
from draftwood.runtime.model import ModelRuntime, random_model, resolve_dtype
from draftwood.sampling import target_tokens

CPU = torch.device("cpu")
PAGE = 16


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=str)
def runtime(request: pytest.FixtureRequest) -> ModelRuntime:
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB,
    }  # fmt: skip
    made = ModelRuntime(random_model(config, CPU, request.param), kv_pages=64, page_tokens=PAGE)
    made.cache.normal_(generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_is_the_type_that_the_device_computes_in(device: str, guesses: bool) -> None:
    """On a CPU a draft is bfloat16 only where that is no emulation; a target never is."""
    half = device == "cuda" or (guesses and computes_in_bfloat16())
    assert resolve_dtype("auto", torch.device(device), guesses=guesses) == (torch.bfloat16 if half else torch.float32)
    assert resolve_dtype("float16", torch.device(device), guesses=guesses) == torch.float16


def test_a_chosen_token_is_the_rules(runtime: ModelRuntime) -> None:
    rng = np.random.default_rng(1)
    parts = [replace(part, logits_from=min(k, 1)) for k, part in enumerate(random_parts(rng, 5, PAGE, 7, 40))]
    heats = (0.0, 0.6, 1.3, 1e-300, 0.0)
    rules = [SamplingParams(temperature=t, seed=2**64 - 1 - k) for k, t in enumerate(heats)]
    chosen = runtime.choose(parts, rules, VOCAB - 3)
    logits = runtime.forward(parts)
    assert torch.equal(chosen.logits, logits)
    first, noise = 0, GumbelCache(VOCAB, CPU)
    for part, rule in zip(parts, rules, strict=True):
        n = len(part.token) - part.logits_from
        at = [int(p) + 1 for p in part.tail_position[len(part.tail_position) - n :]] if n else []
        if n:
            want, _ = target_tokens(logits[first : first + n], rule, at, noise, vocab_size=VOCAB - 3)
            assert chosen.tokens[first : first + n].tolist() == want.tolist()
        first += n
    assert first == len(chosen.tokens) == len(chosen.logprob) > 5
    assert (chosen.logprob <= 0).all()


def test_a_forward_that_wants_nothing_chooses_nothing(runtime: ModelRuntime) -> None:
    at = np.arange(5, dtype=np.int32)
    part = Rows([0], 0, at, at, np.tri(5, dtype=np.bool_), logits_from=5)
    assert runtime.choose([part], [SamplingParams()], VOCAB).tokens.tolist() == []
    assert all(found.shape == (0, 4) for found in runtime.children([part], VOCAB, 4))


def test_children_are_the_likeliest_tokens_of_the_wanted_rows(runtime: ModelRuntime) -> None:
    rng = np.random.default_rng(2)
    parts = [replace(part, logits_from=min(k, 1)) for k, part in enumerate(random_parts(rng, 5, PAGE, 7, 40))]
    tokens, scores = runtime.children(parts, VOCAB - 3, 4)
    want_tokens, want_scores = top_children_reference(runtime.forward(parts)[:, : VOCAB - 3], 4)
    assert torch.equal(tokens, want_tokens)
    torch.testing.assert_close(scores, want_scores)


def test_moves_go_where_the_pages_say(runtime: ModelRuntime) -> None:
    before = runtime.cache.clone()
    moves = [([5, 2], [10, 17, 20], [9, 10, 11]), ([], [], []), ([7], [3], [2])]
    runtime.move(moves)
    want = before.clone()
    for pages, old, new in moves:
        for a, b in zip(old, new, strict=True):
            want[:, :, pages[b // PAGE], :, b % PAGE] = before[:, :, pages[a // PAGE], :, a % PAGE]
    assert torch.equal(runtime.cache, want)
    assert not torch.equal(before, want)
