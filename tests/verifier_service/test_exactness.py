"""The promise: token for token what the target alone writes, whatever the drafts do. Tiny float64 models."""

import random

import pytest
from scripted import VOCAB, ScriptedDraft, make_engine, plain_decode, request, run, tiny_model

from draftwood.parameters import SamplingParams

TOKENS = 64


def many(seed: int, count: int, length: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rnd = random.Random(seed)
    prompts = [[rnd.randrange(VOCAB) for _ in range(length)] for _ in range(count)]
    rules = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=11),
        SamplingParams(temperature=1.3, top_k=20, seed=2**63 + 5),
        SamplingParams(temperature=1.0, top_p=0.9, seed=3),
    ]
    return prompts, [rules[k % len(rules)] if k % 2 else rules[0] for k in range(count)]


@pytest.mark.parametrize("shape", ["llama", "qwen3", "mistral"])
def test_thousand_prompts_with_misbehaving_drafts_differ_in_no_token(shape: str) -> None:
    """1,000 prompts x 64 tokens over the three shapes: random trees, growth in pieces, late, doubled, dropped."""
    model = tiny_model(shape)
    differing = accepted = 0
    for length, count in ((1, 84), (15, 84), (16, 83), (37, 83)):
        prompts, rules = many(length, count, length)
        want = plain_decode(model, prompts, TOKENS, rules)
        requests = [request(f"s{k}", p, TOKENS, s) for k, (p, s) in enumerate(zip(prompts, rules, strict=True))]
        truth = {f"s{k}": [*p, *w] for k, (p, w) in enumerate(zip(prompts, want, strict=True))}
        engine = make_engine(model)
        drafts = [ScriptedDraft(random.Random(length + link), truth, link) for link in range(2)]
        got = run(engine, requests, drafts, at_once=24)
        differing += sum(a != b for k, w in enumerate(want) for a, b in zip(got[f"s{k}"], w, strict=True))
        accepted += engine.totals.accepted
    assert differing == 0
    assert accepted > 334 * TOKENS * 0.3, "the drafts were hardly ever right, so the test showed nothing"
