"""The demo's target and drafts on the canary: both drafts pass, and what is wrong with a draft shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from in_process import CPU, load_target, make_drafters

from draft_service.drafter import Drafter, SessionCommitted, SessionStart
from draft_service.drafters.lm import LmDrafter
from draftwood.config import DraftSettings
from draftwood.parameters import SamplingParams
from draftwood.runtime.demo_model import demo_draft
from draftwood.runtime.model import ModelRuntime, load_model
from verifier_service.canary import LEAST_SHARE, MOST_TOKENS, TEXT, Canary, CanaryResult, Trial, learn_canary
from verifier_service.live_tree import Nodes

pytestmark = pytest.mark.model
KEY = (0, 1)
VOCABULARY = 49152


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Canary, list[Drafter]]]:
    runtime, codec = load_target()
    choose, forwards = runtime.choose, []
    runtime.choose = lambda *args: forwards.append(args) or choose(*args)  # type: ignore[method-assign, func-returns-value]
    canary = learn_canary(runtime, codec.encode(TEXT), VOCABULARY, 2048)
    assert canary and len(forwards) == 1, "the start is not delayed"
    yield canary, make_drafters(codec)


def tried(canary: Canary, drafter: Drafter, fault: Callable[[int], int] = lambda token: token) -> CanaryResult:
    """The drafter's trial, with a fault in every token that it hears and says."""
    trial = Trial(canary, 64, 512)
    start = trial.join(KEY[1], trial.ticket)
    tokens = tuple(map(fault, start.tokens))
    told = SessionStart(start.epoch, tokens, SamplingParams(), start.budget, VOCABULARY, 64, 32, 2048)
    drafter.open(KEY, told)
    while trial.result is None:
        for key, g in drafter.work():
            token = g.token if fault(0) == 0 else (g.token + fault(0)) % VOCABULARY
            nodes = Nodes(g.epoch, g.first_id, g.parent, token, g.score)
            commit = trial.grow(nodes, complete=g.complete)
            if commit:
                tokens = tuple(map(fault, commit.tokens))
                drafter.commit(key, SessionCommitted(commit.epoch, commit.length, tokens, commit.budget))
    drafter.close(KEY)
    return trial.result


def test_the_target_repeats_the_text(scene: tuple[Canary, list[Drafter]]) -> None:
    """So that a lookup has something to find."""
    canary, _ = scene
    period = len(canary.prompt) // 2
    whole = [*canary.prompt, *canary.continuation]
    assert len(canary.continuation) == MOST_TOKENS
    assert whole[period:] == whole[:-period]


def test_both_drafts_of_the_demo_pass_by_far(scene: tuple[Canary, list[Drafter]]) -> None:
    canary, drafters = scene
    results = {drafter.kind: tried(canary, drafter) for drafter in drafters}
    assert {kind: result.failed for kind, result in results.items()} == {"lm": False, "ngram": False}
    assert min(result.share for result in results.values()) > 3 * LEAST_SHARE, results
    assert all(result.steps < MOST_TOKENS / 2 for result in results.values()), "several tokens a step"


def test_a_draft_that_names_tokens_by_other_ids_fails(scene: tuple[Canary, list[Drafter]]) -> None:
    canary, (lm, _) = scene
    result = tried(canary, lm, lambda token: (token + 1) % VOCABULARY)
    assert result.failed and result.share < LEAST_SHARE / 2, result


def test_a_draft_with_other_weights_fails(scene: tuple[Canary, list[Drafter]]) -> None:
    canary, (lm, _) = scene
    model = load_model(str(demo_draft()), CPU, torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.std())
    runtime = ModelRuntime(model, kv_pages=16, page_tokens=64)
    result = tried(canary, LmDrafter(runtime, DraftSettings(lookahead_levels=0), "stranger", lm.vocabulary))
    assert result.failed and result.taken <= 1, result
