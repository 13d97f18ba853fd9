"""What the width of a step and the type of a cache do to a text: nothing but what docs/exactness.md says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from lm_draft import LmDraft, lm_drafter
from pydantic import ValidationError
from scripted import VOCAB, make_engine, request, tiny_model
from torch import Tensor

from draftwood.config import DraftSettings, VerifierSettings
from draftwood.kernels.fused import Heads, rotate_and_write
from draftwood.kernels.tree_attention import AttentionBatch, tree_attention
from draftwood.noise import GumbelCache
from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.decoder import FusedDecoder
from draftwood.runtime.model import ModelRuntime
from draftwood.sampling import margins
from verifier_service.engine import Engine, Outcome
from verifier_service.live_tree import Nodes
from verifier_service.width import StepTimes

WIDTHS = [1, 2, 5, 17, 64]  # rows of a step; 1 is plain decoding
PROMPT = [5, 11, 2, 40, 7, 7, 3]
TOKENS = 192
GREEDY = SamplingParams()
RULES = [GREEDY, SamplingParams(temperature=0.8, seed=7)]
SHARE = {torch.float64: 1e-13, torch.float32: 5e-5, torch.bfloat16: 2**-5}
"""Most that a logit changes with the shape of the forward, as a share of the largest logit: docs/exactness.md."""


def logits_by_rows(runtime: ModelRuntime, text: list[int], width: int) -> Tensor:
    """Logits [len(text)] behind each token, by forwards of ``width`` rows, as trees that are always right have it."""
    pages = runtime.pool.take(len(text))
    out = []
    for first in range(0, len(text), width):
        n = min(width, len(text) - first)
        at = np.arange(first, first + n, dtype=np.int32)
        part = Rows(pages, first, np.array(text[first : first + n], np.int32), at, np.tri(n, dtype=np.bool_))
        out.append(runtime.forward([part]).clone())
    runtime.pool.give(pages)
    return torch.cat(out)


@cache
def runtime_of(shape: str, dtype: torch.dtype) -> ModelRuntime:
    return ModelRuntime(tiny_model(shape, dtype), kv_pages=64, page_tokens=16)


@dataclass
class Chain:
    """Guesses the next ``length`` tokens of a text that it knows, after every commit."""

    text: list[int]
    length: int
    next_id: int = 1

    def join(self, engine: Engine, name: str, handle: int) -> None:
        start = engine.join(0, handle, name)
        self.draw(engine, start.epoch, len(start.tokens))

    def hear(self, engine: Engine, outcome: Outcome) -> None:
        for commit in outcome.commits.get(0, []):
            self.draw(engine, commit.epoch, commit.length)

    def draw(self, engine: Engine, epoch: int, length: int) -> None:
        tokens = self.text[length:][: self.length]
        ids = range(self.next_id, self.next_id + len(tokens))
        self.next_id += len(tokens)
        parents = np.array([0, *ids][: len(tokens)], np.int64)
        nodes = Nodes(epoch, ids.start, parents, np.array(tokens, np.int32), np.full(len(tokens), -0.05, np.float32))
        engine.grow(0, 1, nodes, complete=True)

    def work(self, engine: Engine) -> None:
        """It has answered at once."""


def written(engine: Engine, rule: SamplingParams, tokens: int, draft: Chain | LmDraft | None = None) -> list[int]:
    """The text of one request."""
    got: list[int] = []
    engine.open_link(0, "draft")
    engine.submit(request("s", PROMPT, tokens, rule, max_nodes=63))
    if draft:
        draft.join(engine, "s", 1)
    while engine.sessions:
        if draft:
            draft.work(engine)
        outcome = engine.step()
        assert not outcome.failed
        got += [token for emitted in outcome.emitted for token in emitted.tokens]
        if draft:
            draft.hear(engine, outcome)
    assert engine.audit() == []
    return got


def parts_at(a: Sequence[int], b: Sequence[int]) -> int | None:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def margin_at(runtime: ModelRuntime, text: list[int], rule: SamplingParams) -> tuple[float, float]:
    """Gap of the two best candidates behind a text, and the most that one may be excused: twice the stated share."""
    logits = logits_by_rows(runtime, text, 1)[-1:]
    gap = float(margins(logits, rule, [len(text)], GumbelCache(VOCAB, "cpu"))[0])
    most = 2 * SHARE[runtime.dtype] * float(logits.abs().max())
    return gap, most / (rule.temperature or 1)


@pytest.mark.parametrize("dtype", SHARE, ids=str)
@pytest.mark.parametrize("shape", ["llama", "qwen3", "mistral", "wide"])
def test_bug_2_the_rows_of_a_forward_change_logits_by_no_more_than_is_stated(shape: str, dtype: torch.dtype) -> None:
    """The same 200 tokens in forwards of 1, 2, 5, 17 and 64 rows."""
    text = np.random.default_rng(1).integers(0, VOCAB, 200).tolist()
    runtime = runtime_of(shape, dtype)
    alone = logits_by_rows(runtime, text, 1).double()
    for width in WIDTHS[1:]:
        together = logits_by_rows(runtime, text, width).double()
        assert (together - alone).abs().max() <= SHARE[dtype] * alone.abs().max(), width


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", SHARE, ids=str)
@pytest.mark.parametrize("shape", ["llama", "mistral"])
def test_bug_2_texts_of_any_width_part_at_near_ties_alone(shape: str, dtype: torch.dtype, rule: SamplingParams) -> None:
    """Steps of 1, 2, 5, 17 and 64 rows. In float64, the reference setting, no token may differ."""
    plain = written(make_engine(tiny_model(shape, dtype)), rule, TOKENS)
    for width in WIDTHS[1:]:
        engine = make_engine(tiny_model(shape, dtype), max_nodes=63, max_depth=63)
        widest, forward = 0, engine.runtime.forward

        def counting(parts: Sequence[Rows], forward: Any = forward) -> Tensor:
            nonlocal widest
            widest = max([widest, *(len(part.token) for part in parts if part.context)])
            return forward(parts)  # type: ignore[no-any-return]

        engine.runtime.forward = counting  # type: ignore[method-assign]
        got = written(engine, rule, TOKENS, Chain(PROMPT + plain, width - 1))
        assert widest == width
        at = parts_at(plain, got)
        if at is None:
            continue
        gap, most = margin_at(runtime_of(shape, dtype), [*PROMPT, *plain[:at]], rule)
        print(f"{shape}, {dtype}, {width} rows: token {at} differs, margin {gap:.1e}, excused below {most:.1e}")
        assert dtype != torch.float64 and gap < most


# Types of caches


class NarrowKv(FusedDecoder):
    """Keys and values are rounded to eight bits as they are written, as an 8-bit cache would hold them."""

    def _attend(self, qkv: Tensor, layer: Any, plane: Tensor, batch: AttentionBatch, heads: Heads) -> Tensor:
        query = rotate_and_write(qkv, plane, heads, layer.head_norm, self._eps)
        plane.copy_(plane.to(torch.float8_e4m3fn))
        assert plane.isfinite().all(), "out of the range of eight bits"
        keys, values = plane.unbind(0)
        return tree_attention(query, keys, values, batch, scale=layer.scale, window=layer.window).flatten(1)


def typed(kind: str, draft: bool = False) -> ModelRuntime:
    """A runtime by the name of its type; "narrow" is float64 over a cache of eight bits. A draft's weights are noisy,
    so that it is right often, but not always."""
    dtype = torch.float64 if kind == "narrow" else getattr(torch, kind)
    model = tiny_model("wide", torch.float64)
    if draft:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                    parameter.add_(noise * 0.02 * parameter.std())
    runtime = ModelRuntime(model.to(dtype), kv_pages=64, page_tokens=16)
    if kind == "narrow":
        runtime.decoder = NarrowKv(runtime.model, 64 * 16)  # type: ignore[arg-type]
    return runtime


def typed_engine(kind: str) -> Engine:
    settings = VerifierSettings(width="full", max_nodes=12, page_tokens=16, draft_wait_ms=0)
    times = StepTimes([1, 512], [1.0, 2.0])
    return Engine(typed(kind), settings, token_count=VOCAB, times=times, clock=lambda: 0.0)


@cache
def plain_text(kind: str, rule: SamplingParams) -> list[int]:
    return written(typed_engine(kind), rule, 96)


PAIRS = [
    ("narrow", "float64"), ("float64", "narrow"), ("narrow", "narrow"), ("narrow", "bfloat16"), ("float32", "bfloat16"),
    ("float32", "float64"), ("bfloat16", "float32"), ("bfloat16", "narrow"),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_bug_11_each_model_has_its_own_cache_type_and_the_text_is_that_of_the_targets(
    target: str, draft: str, rule: SamplingParams
) -> None:
    """Eight bits beside full precision and the other way round: the text is plain decoding's over the same cache, and
    guesses are still taken."""
    engine, drafts = typed_engine(target), typed(draft, draft=True)
    for runtime, kind in ((engine.runtime, target), (drafts, draft)):
        assert str(runtime.cache.dtype) == str(runtime.dtype) == f"torch.{kind.replace('narrow', 'float64')}"
    plain = plain_text(target, rule)
    got = written(engine, rule, 96, LmDraft(lm_drafter(drafts, depth=4, branch=2, lookahead_levels=1)))
    at = parts_at(plain, got)
    if at is not None:
        gap, most = margin_at(typed(target), [*PROMPT, *plain[:at]], rule)
        assert target == "bfloat16" and gap < most, f"token {at}: margin {gap:.1e}"
    assert engine.totals.accepted > 30, "the draft was of little use"


def test_bug_11_the_type_of_a_cache_shows_in_the_text() -> None:
    """So that the equality above is one over the same type."""
    assert plain_text("narrow", GREEDY) != plain_text("float64", GREEDY)


@pytest.mark.parametrize("settings", [VerifierSettings, DraftSettings])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "fp8", "FLOAT32", ""])
def test_bug_11_a_type_that_is_not_served_is_refused_at_the_start(settings: type[Any], dtype: str) -> None:
    with pytest.raises(ValidationError, match="'auto', 'float64', 'float32', 'bfloat16' or 'float16'"):
        settings(dtype=dtype)
