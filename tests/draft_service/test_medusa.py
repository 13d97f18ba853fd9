"""Medusa's drafter against its heads computed by hand."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafter import SessionCommitted, SessionStart
from draft_service.drafters.medusa import MedusaDrafter
from draftwood.config import DraftSettings
from draftwood.features import FINAL, FeatureRequest
from draftwood.noise import gumbel
from draftwood.parameters import SamplingParams
from draftwood.runtime.head_runtime import MedusaRuntime, as_tensor
from draftwood.runtime.heads import MedusaHeads
from draftwood.runtime.heads_checkpoint import load_heads
from draftwood.vocabulary import Vocabulary
from draftwood.wire import SessionGrowth
from tests.draft_service.test_eagle import CPU, HIDDEN, TARGET, features_of, make_tables
from tests.draft_service.test_lm import CONTEXT, GREEDY, KEY, SAMPLED, VOCAB
from tests.runtime import head_checkpoints as checkpoints

REQUEST = FeatureRequest((FINAL,), HIDDEN)
TEXT = [3, 1, 4, 1, 5, 9]
HEADS = 4


@cache
def make_heads() -> MedusaHeads:
    config, tensors = checkpoints.medusa(TARGET, HEADS, blocks=2)
    tensors = {name: (3 * t if t.shape[0] == VOCAB else t) for name, t in tensors.items()}
    with TemporaryDirectory() as folder:
        path = checkpoints.save(Path(folder), config, tensors, "medusa_lm_head.pt")
        heads = load_heads(str(path), TARGET, CPU, torch.float64)
    assert isinstance(heads, MedusaHeads)
    return heads


def make_drafter(**settings: Any) -> MedusaDrafter:
    vocabulary = Vocabulary(tuple(str(i) for i in range(VOCAB)), frozenset(), VOCAB)
    chosen = DraftSettings(**({"kind": "medusa", "depth": HEADS} | settings))
    return MedusaDrafter(MedusaRuntime(make_heads(), make_tables()), chosen, "tiny", vocabulary, REQUEST)


def scores(text: list[int], sampling: SamplingParams) -> torch.Tensor:
    """What the heads say behind a text, [HEADS, VOCAB]."""
    feature = as_tensor(features_of(text, len(text) - 2, len(text) - 1, 1), CPU, torch.float64)
    out = []
    for depth, head in enumerate(make_heads().heads):
        x = feature
        for block in head.blocks:
            assert block.bias is not None
            x = x + torch.nn.functional.silu(x @ block.weight.T + block.bias)
        assert head.lm_head is not None
        logits = (x @ head.lm_head.T)[0].float()
        if not sampling.greedy:
            logits = (logits - logits.max()) / sampling.temperature
            logits = logits + gumbel(sampling.seed, len(text) + depth, VOCAB, "cpu")
        out.append(torch.log_softmax(logits, dim=-1))
    return torch.stack(out)


def draw(drafter: MedusaDrafter, text: list[int], sampling: SamplingParams = GREEDY, budget: int = 12) -> SessionGrowth:
    drafter.open(KEY, SessionStart(0, tuple(text), sampling, budget, VOCAB, 24, 8, CONTEXT))
    assert not drafter.wants_work(), "it waits for the newest feature"
    drafter.feed(KEY, 0, features_of(text, 0, len(text) - 1, 1))
    [(_, growth)] = drafter.work()
    assert growth.complete and not drafter.wants_work()
    return growth


def paths_of(growth: SessionGrowth) -> dict[tuple[int, ...], float]:
    """Score of each node's own edge, by its path."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    out = {}
    for own, (parent, token) in enumerate(zip(growth.parent.tolist(), growth.token.tolist(), strict=True), 1):
        paths[own] = (*paths[parent], token)
        out[paths[own]] = float(growth.score[own - 1])
    return out


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "noise"])
def test_the_likeliest_paths_are_sent(sampling: SamplingParams) -> None:
    """Of all products of the heads' five likeliest tokens; head k guesses the place k behind the anchor."""
    found, want = paths_of(draw(make_drafter(branch=5), TEXT, sampling)), scores(TEXT, sampling)
    top = [row.topk(5).indices.tolist() for row in want]
    chance = {
        path: sum(float(want[depth, token]) for depth, token in enumerate(path))
        for depth in range(1, HEADS + 1)
        for path in product(*top[:depth])
    }
    best = sorted(chance, key=lambda path: -chance[path])[:12]
    assert set(found) == set(best)
    for path, score in found.items():
        assert score == pytest.approx(float(want[len(path) - 1, path[-1]]), abs=1e-4)


def test_a_shape_is_filled_with_the_ranks_of_each_head() -> None:
    want = scores(TEXT, GREEDY)
    choices = [[0], [1], [0, 0], [0, 2], [0, 0, 1]]
    found = paths_of(draw(make_drafter(topology="choices", choices=choices), TEXT))
    top = [row.topk(3).indices.tolist() for row in want]
    assert set(found) == {tuple(top[depth][rank] for depth, rank in enumerate(path)) for path in choices}
    product_ = paths_of(draw(make_drafter(topology="kary", branching=[2, 3]), TEXT))
    assert set(product_) == {(a,) for a in top[0][:2]} | set(product(top[0][:2], top[1]))


@pytest.mark.parametrize("budget", [1, 3])
def test_a_shape_is_cut_to_the_budget(budget: int) -> None:
    found = paths_of(draw(make_drafter(topology="kary", branching=[2, 3]), TEXT, budget=budget))
    assert len(found) == budget and math.isfinite(sum(found.values()))


def test_only_the_feature_before_the_anchor_counts() -> None:
    drafter = make_drafter()
    first = draw(drafter, TEXT)
    tokens = (int(first.token[0]), 7, 8)
    text = [*TEXT, *tokens]
    drafter.commit(KEY, SessionCommitted(1, len(text), tokens, 12))
    assert not drafter.wants_work()
    drafter.feed(KEY, len(TEXT) - 1, features_of(text, len(TEXT) - 1, len(text) - 1, 1))
    [(_, growth)] = drafter.work()
    fresh = draw(make_drafter(), text)
    assert np.array_equal(growth.token, fresh.token) and np.array_equal(growth.score, fresh.score)
    assert growth.first_id == len(first.token) + 1


def test_sessions_at_once_draw_what_each_draws_alone() -> None:
    texts, rules = [TEXT, [7, 7, 2], [1, 2, 3, 4]], [GREEDY, SAMPLED, GREEDY]
    together = make_drafter()
    for k, (text, rule) in enumerate(zip(texts, rules, strict=True)):
        together.open((1, k), SessionStart(0, tuple(text), rule, 12, VOCAB, 24, 8, CONTEXT))
        together.feed((1, k), 0, features_of(text, 0, len(text) - 1, 1))
    grown = dict(together.work())
    for k, (text, rule) in enumerate(zip(texts, rules, strict=True)):
        alone = draw(make_drafter(), text, rule)
        assert np.array_equal(grown[1, k].token, alone.token)
        np.testing.assert_allclose(grown[1, k].score, alone.score, atol=1e-6)
