"""Forwards by graph against the same forwards without: same logits, same cache, in any order and without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forwards import VOCAB, random_parts
from torch import Tensor

from draftwood.kernels.children import top_children_reference
from draftwood.kernels.tree_attention import AttentionBatch
from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import Ragged, Rows
from draftwood.runtime.draws import Draw
from draftwood.runtime.graphs import ROWS
from draftwood.runtime.model import DRAWS, ModelRuntime, random_model

PAGE, PAGES = 64, 160
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}  # fmt: skip
WINDOWED = CONFIG | {
    "model_type": "gemma2", "sliding_window": 64, "query_pre_attn_scalar": 64, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIGS = {"fused": CONFIG, "window": WINDOWED, "qwen3": CONFIG | {"model_type": "qwen3"}}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def runtime(config: dict[str, Any], *, graphs: bool, longest: int = 2048, seed: int = 0) -> ModelRuntime:
    model = random_model(config, torch.device("cuda"), torch.float32, seed)
    return ModelRuntime(model, kv_pages=PAGES, page_tokens=PAGE, longest_tokens=longest, graphs=graphs)


def forwards(seed: int, count: int) -> list[list[Rows]]:
    """Forwards of all buckets, each session prefilled first; the cache is random, as prefixes are not."""
    rng = np.random.default_rng(seed)
    sizes = [(1, 1), (1, 8), (3, 5), (1, 64), (1, 200), (16, 4), (20, 3), (1, 256), (2, 60)]
    return [random_parts(rng, *sizes[k % len(sizes)][:1], PAGE, sizes[k % len(sizes)][1], 300) for k in range(count)]


def fill(*runtimes: ModelRuntime) -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    noise = torch.randn(runtimes[0].cache.shape, generator=generator, device="cuda")
    for each in runtimes:
        each.cache.copy_(noise)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_graph_computes_what_the_forward_computes(name: str) -> None:
    plain, captured = (runtime(CONFIGS[name], graphs=g) for g in (False, True))
    fill(plain, captured)
    for parts in forwards(2, 27):
        want, got = plain.forward(parts), captured.forward(parts)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(captured.cache[:, :, :PAGES], plain.cache[:, :, :PAGES], rtol=1e-4, atol=1e-4)
    assert captured.graphs is not None and captured.graphs.count >= 8


def test_bug_28_every_batch_size_by_graph_is_the_eager_forward() -> None:
    """1 to 65 requests, trees and plain rows in turns; the CPU's counterpart is in ``test_batch.py``."""
    plain, captured = (runtime(CONFIG, graphs=g) for g in (False, True))
    fill(plain, captured)
    rng = np.random.default_rng(28)
    for requests in range(1, 66):
        parts = random_parts(rng, requests, PAGE, 3 if requests % 2 else 1, 50)
        torch.testing.assert_close(captured.forward(parts), plain.forward(parts), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(captured.cache[:, :, :PAGES], plain.cache[:, :, :PAGES], rtol=1e-4, atol=1e-4)


def test_the_next_forward_is_written_while_the_last_one_runs() -> None:
    """Forty forwards are issued behind a kernel that keeps the device busy; none may read another's numbers."""
    plain, captured = (runtime(CONFIG, graphs=g) for g in (False, True))
    fill(plain, captured)
    issued = forwards(3, 18)
    for parts in issued:
        captured.forward(parts)
    fill(plain, captured)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    got = [captured.forward(parts).clone() for parts in issued + issued]
    for parts, logits in zip(issued + issued, got, strict=True):
        torch.testing.assert_close(logits, plain.forward(parts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "context"), [(ROWS[-1] + 44, 0), (5, 2100)])
def test_what_fits_no_bucket_runs_without(rows: int, context: int) -> None:
    plain, captured = (runtime(CONFIG, graphs=g) for g in (False, True))
    fill(plain, captured)
    at = np.arange(context, context + rows, dtype=np.int32)
    part = Rows(list(range(40)), context, np.arange(rows, dtype=np.int32) % VOCAB, at, np.tri(rows, dtype=np.bool_))
    assert captured.graphs is not None and captured.graphs.bucket(Ragged([part], PAGE).shape()) is None
    torch.testing.assert_close(captured.forward([part]), plain.forward([part]), rtol=1e-4, atol=1e-4)


def test_a_forward_that_cannot_be_captured_runs_without() -> None:
    plain, captured = (runtime(CONFIG, graphs=g) for g in (False, True))
    inner = captured.decoder

    def waits(input_ids: Tensor, batch: AttentionBatch, cache: Tensor, logits_rows: Tensor, _: Any = None) -> Tensor:
        assert int(input_ids.max()) < VOCAB
        return inner(input_ids, batch, cache, logits_rows)

    captured.decoder = waits
    fill(plain, captured)
    for parts in forwards(4, 4):
        torch.testing.assert_close(captured.forward(parts), plain.forward(parts), rtol=1e-4, atol=1e-4)
    assert captured.graphs is not None and not captured.graphs.count


def test_a_chosen_token_is_the_rules() -> None:
    captured = runtime(CONFIG, graphs=True)
    fill(captured)
    for parts in forwards(5, 9):
        rules = [SamplingParams(temperature=0.7 * (k % 2), seed=k) for k in range(len(parts))]
        chosen = captured.choose(parts, rules, VOCAB - 6)
        counts = [len(p.token) - p.logits_from for p in parts]
        greedy = chosen.logits[:, : VOCAB - 6].argmax(dim=1).tolist()
        first = 0
        for rule, n in zip(rules, counts, strict=True):
            if rule.greedy:
                assert chosen.tokens[first : first + n].tolist() == greedy[first : first + n]
            first += n
        again = captured.choose(parts, rules, VOCAB - 6)
        assert again.tokens.tolist() == chosen.tokens.tolist() and max(again.tokens.tolist(), default=0) < VOCAB - 6


def test_children_picked_in_the_graph_are_those_of_its_logits() -> None:
    captured = runtime(CONFIG, graphs=True)
    fill(captured)
    for parts in forwards(6, 9):
        tokens, scores = (x.clone() for x in captured.children(parts, VOCAB - 6, 4))
        logits = captured.forward(parts)
        want_tokens, want_scores = top_children_reference(logits[:, : VOCAB - 6], 4)
        assert torch.equal(tokens, want_tokens)
        torch.testing.assert_close(scores, want_scores, rtol=1e-4, atol=1e-4)


def test_graphs_captured_ahead_leave_the_pages_alone() -> None:
    captured = runtime(CONFIG, graphs=True)
    fill(captured)
    before = captured.cache[:, :, :PAGES].clone()
    captured.capture(sizes=[(1, 1), (64, 1), (16, 16), (200, 3)])
    assert torch.equal(captured.cache[:, :, :PAGES], before)
    assert captured.graphs is not None and captured.graphs.count == 4


def draws(seed: int, count: int) -> list[Draw]:
    """Trees behind texts of any length, the last one a text of which two tokens are new."""
    rng = np.random.default_rng(seed)
    out = []
    for k, pages in zip(range(count), np.array_split(rng.permutation(PAGES), count), strict=True):
        context, rows, known = int(rng.integers(1, 200)), 1 if k else 2, int(rng.integers(0, 9))
        position = np.arange(context, context + rows, dtype=np.int32)
        token = rng.integers(0, VOCAB, rows).astype(np.int32)
        first = Rows(pages[:6].tolist(), context, token, position, np.tri(rows, dtype=np.bool_))
        known_reach = -rng.exponential(2.0, known).astype(np.float32)
        out.append(
            Draw(
                rows=first,
                row_reach=np.array([-np.inf, 0.0][-rows:], np.float32),
                row_depth=np.zeros(rows, np.int32),
                token=rng.integers(0, VOCAB, known).astype(np.int32),
                depth=np.ones(known, np.int32),
                reach=known_reach,
                unexpanded=rng.random(known) < 0.5,
                seen=np.zeros((known, rows), np.bool_),
                anchor=context + rows - 1,
                levels=int(rng.integers(1, 7)),
                beam=3,
                room=6,
                among=20,
                least=0.0,
            )
        )
    return out


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_levels_drawn_by_graphs_are_those_drawn_without(name: str, count: int) -> None:
    plain, captured = (runtime(CONFIGS[name], graphs=g) for g in (False, True))
    fill(plain, captured)
    for seed in range(3):
        given, how = draws(seed, count), {"branch": 3, "beam": 3, "most_levels": 7}
        want, got = (each.draw(given, VOCAB - 6, **how) for each in (plain, captured))
        for draw, one, other in zip(given, want, got, strict=True):
            assert other.levels == one.levels <= draw.levels
            assert np.array_equal(other.token, one.token) and np.array_equal(other.chosen, one.chosen)
            assert np.array_equal(other.seen, one.seen)
            np.testing.assert_allclose(other.score, one.score, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(captured.cache[:, :, :PAGES], plain.cache[:, :, :PAGES], rtol=1e-4, atol=1e-4)
    assert captured.graphs is not None and captured.graphs.count


def test_draws_captured_ahead_leave_the_pages_alone() -> None:
    captured = runtime(CONFIG, graphs=True)
    fill(captured)
    before = captured.cache[:, :, :PAGES].clone()
    captured.capture_draws(VOCAB, branch=3, beam=3, most_levels=7)
    assert torch.equal(captured.cache[:, :, :PAGES], before)
    assert captured.graphs is not None and captured.graphs.count == len(DRAWS)
