"""The token rules against naive references, and that no row depends on padding, neighbours or the batch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.errors import InvalidArgument
from draftwood.noise import GumbelCache, gumbel
from draftwood.parameters import SamplingParams
from draftwood.sampling import draft_children, margins, process_logits, target_tokens

GREEDY = SamplingParams()
LOWEST = torch.finfo(torch.float32).min


def random_logits(rows: int, vocab: int, *, scale: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def cache(vocab: int) -> GumbelCache:
    return GumbelCache(vocab, "cpu")


# Processors


def kept_tokens(row: list[float], params: SamplingParams) -> set[int]:
    """Naive: sort, cut at k, then add up from the top until p is reached."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: params.top_k or None]
    weights = [math.exp((row[i] - row[order[0]]) / params.temperature) for i in order]
    mass = 0.0
    kept: set[int] = set()
    for token, weight in zip(order, weights, strict=True):
        if params.top_p == 1 or mass < params.top_p * sum(weights) or not kept:
            kept.add(token)
        mass += weight
    return kept


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 12),
    st.sampled_from([0.013, 0.31, 0.57, 0.83, 0.991, 1.0]),
)
def test_processors_equal_the_naive_ones_with_many_ties(
    row: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(temperature, min(top_k, len(row)), top_p)
    logits = torch.tensor([row, row[::-1]], dtype=torch.float64)
    for source, processed in zip(logits.tolist(), process_logits(logits, params), strict=True):
        kept = kept_tokens(source, params)
        assert set(processed.isfinite().nonzero().flatten().tolist()) == kept
        expected = torch.tensor([(v - max(source)) / temperature for v in source], dtype=torch.float64)
        index = torch.tensor(sorted(kept))
        torch.testing.assert_close(processed[index], expected[index])


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, [0]), (0.5, [0, 1]), (0.500001, [0, 1, 2]), (0.75, [0, 1, 2])])
def test_the_top_p_set_ends_where_p_is_reached_exactly(top_p: float, kept: list[int]) -> None:
    processed = process_logits(torch.zeros(1, 4), SamplingParams(1.0, top_p=top_p))
    assert processed[0].isfinite().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 8.0])
def test_top_p_of_flat_rows_goes_beyond_the_head(scale: float) -> None:
    """Rows whose set is wider than the values sorted first, next to rows whose set is narrower."""
    logits = random_logits(3, 5000, scale=scale).double()
    logits[1] *= 20
    params = SamplingParams(1.0, top_p=0.9)
    processed = process_logits(logits, params)
    for row, out in zip(logits.tolist(), processed, strict=True):
        assert set(out.isfinite().nonzero().flatten().tolist()) == kept_tokens(row, params)


@pytest.mark.parametrize(
    "params", [SamplingParams(0.7, 40), SamplingParams(1.0, 0, 0.95), SamplingParams(1.3, 40, 0.9)]
)
def test_a_row_is_processed_alike_alone_and_in_a_batch(params: SamplingParams) -> None:
    logits = random_logits(9, 3000)
    logits[::2] *= 0.05
    logits[4] = math.nan
    batch = process_logits(logits, params)
    for i in (0, 1, 2, 3, 5, 8):
        assert torch.equal(batch[i], process_logits(logits[i : i + 1], params)[0])


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(0.5, 3, 0.9)])
def test_logits_are_at_least_float32(given_dtype: torch.dtype, dtype: torch.dtype, params: SamplingParams) -> None:
    assert process_logits(random_logits(2, 9).to(given_dtype), params).dtype == dtype


def test_logits_are_not_written_to() -> None:
    logits = random_logits(2, 100)
    before = logits.clone()
    params = SamplingParams(0.5, 3, 0.9)
    process_logits(logits, params)
    target_tokens(logits, params, [0, 1], cache(100))
    draft_children(logits, params, [0, 1], cache(100), 2)
    assert torch.equal(logits, before)


# The target's token


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 3, 31, 63, 64, 777, 49_000])
def test_greedy_takes_the_lowest_id_of_a_tie(dtype: torch.dtype, first: int) -> None:
    logits = random_logits(3, 49_152).clamp_(max=5.0).to(dtype)
    for tied in (first, first + 1, 49_100, 49_151):
        logits[:, tied] = 9.0
    tokens, bad = target_tokens(logits, GREEDY, [0, 1, 2], cache(49_152))
    assert tokens.tolist() == [first] * 3
    assert not bad.any()


def test_sampling_takes_the_argmax_of_logits_and_noise_at_the_tokens_position() -> None:
    logits = random_logits(4, 50)
    params = SamplingParams(0.8, seed=2**63 + 1)
    positions = [7, 8, 7, 2**33]
    tokens, _ = target_tokens(logits, params, positions, cache(50))
    for row, position, token in zip(logits, positions, tokens, strict=True):
        noise = gumbel(params.seed, position, 50, "cpu")
        assert token == (torch.log_softmax(row.double() / 0.8, 0) + noise).argmax()


def test_a_token_outside_the_processed_set_is_never_taken() -> None:
    logits = random_logits(1, 20, scale=0.5).expand(400, -1)
    params = SamplingParams(1.0, top_k=3, seed=1)
    tokens, _ = target_tokens(logits, params, list(range(400)), cache(20))
    assert set(tokens.tolist()) == set(logits[0].topk(3).indices.tolist())


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-30, 1e-6])
def test_a_tiny_temperature_neither_overflows_nor_changes_the_argmax(temperature: float) -> None:
    logits = random_logits(20, 300, scale=1e4)
    params = SamplingParams(temperature, seed=3)
    tokens, bad = target_tokens(logits, params, list(range(20)), cache(300))
    assert torch.equal(tokens, logits.argmax(dim=1))
    assert not bad.any()
    children, scores = draft_children(logits, params, list(range(20)), cache(300), 3)
    assert torch.equal(children[:, 0], tokens)
    assert scores.isfinite().all()


@pytest.mark.parametrize("filler", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, 5, 0.9)])
def test_columns_of_padding_are_never_looked_at(filler: float, params: SamplingParams) -> None:
    """Bug kind 34."""
    logits = random_logits(6, 64)
    padded = torch.cat([logits, torch.full((6, 10), filler)], dim=1)
    positions = list(range(6))
    expected, _ = target_tokens(logits, params, positions, cache(64))
    tokens, bad = target_tokens(padded, params, positions, cache(74), vocab_size=64)
    assert torch.equal(tokens, expected)
    assert not bad.any()
    for got, want in zip(
        draft_children(padded, params, positions, cache(74), 4, vocab_size=64),
        draft_children(logits, params, positions, cache(64), 4),
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0), SamplingParams(1.0, 5), SamplingParams(1.0, 0, 0.9)])
def test_bug_35_a_bad_row_is_reported_and_touches_no_other(params: SamplingParams) -> None:
    logits = random_logits(6, 40)
    clean, _ = target_tokens(logits, params, list(range(6)), cache(40))
    logits[0, 17] = math.nan
    logits[2] = math.nan
    logits[3] = -math.inf
    logits[4, 39] = math.inf
    tokens, bad = target_tokens(logits, params, list(range(6)), cache(40))
    assert bad.tolist() == [True, False, True, True, True, False]
    assert tokens.tolist() == [-1, clean[1], -1, -1, -1, clean[5]]


def test_a_row_with_impossible_tokens_is_not_bad() -> None:
    logits = torch.full((1, 30), -math.inf)
    logits[0, [4, 9]] = torch.tensor([1.0, 2.0])
    for params in (GREEDY, SamplingParams(1.0), SamplingParams(1.0, 10, 0.9)):
        tokens, bad = target_tokens(logits, params, [0], cache(30))
        assert tokens.item() in (4, 9)
        assert not bad.any()


def test_sampled_tokens_have_the_distribution_p() -> None:
    """Chi-square over positions of one seed; 0.1 % critical value for 7 degrees of freedom."""
    n, logits = 6000, random_logits(1, 8, scale=1.0)
    params = SamplingParams(0.9, seed=123)
    tokens, _ = target_tokens(logits.expand(n, -1), params, list(range(n)), cache(8))
    expected = n * torch.softmax(logits[0].double() / 0.9, 0)
    observed = torch.bincount(tokens, minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.32


def test_margins_are_the_gap_to_the_second_candidate() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.5], [2.0, 2.0, 0.0]])
    assert margins(logits, GREEDY, [0, 1], cache(3)).tolist() == [0.5, 0.0]
    params = SamplingParams(0.5, seed=4)
    for i, gap in enumerate(margins(logits, params, [8, 9], cache(3)).tolist()):
        best, second, _ = sorted((logits[i] / 0.5 + gumbel(4, 8 + i, 3, "cpu")).tolist(), reverse=True)
        assert gap == pytest.approx(best - second, abs=1e-5)


# The draft's children


def naive_children(row: Tensor, branch: int) -> tuple[list[int], list[float]]:
    values = row.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:branch]
    return order, torch.log_softmax(row.double(), 0)[order].tolist()


@pytest.mark.parametrize("vocab", [4, 63, 64, 65, 200, 1024, 5001])
@pytest.mark.parametrize("branch", [1, 2, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_children_are_the_first_of_q_or_of_q_and_noise(vocab: int, branch: int, ties: bool) -> None:
    logits = random_logits(5, vocab, seed=vocab)
    logits = logits.round() if ties else logits
    noise = cache(vocab)
    for params in (GREEDY, SamplingParams(0.7, seed=9)):
        tokens, scores = draft_children(logits, params, [3, 4, 3, 3, 6], noise, branch)
        assert (tokens.dtype, scores.dtype) == (torch.int64, torch.float32)
        for i, position in enumerate([3, 4, 3, 3, 6]):
            row = logits[i] if params.greedy else (logits[i] - logits[i].max()) / 0.7 + noise.row(9, position)
            order, log_probs = naive_children(row, branch)
            assert tokens[i].tolist() == order
            assert scores[i].tolist() == pytest.approx(log_probs, abs=1e-5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.0, 1.5]), min_size=1, max_size=300), st.integers(1, 9))
def test_children_of_tied_rows_are_the_lowest_ids(row: list[float], branch: int) -> None:
    order = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))[:branch]
    tokens, scores = draft_children(torch.tensor([row]), GREEDY, [0], cache(len(row)), branch)
    assert tokens[0].tolist() == order + [-1] * (branch - len(order))
    assert (scores <= 0).all()
    assert scores.isfinite().all()
    assert (scores[0, len(order) :] == LOWEST).all()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_row_of_a_draft_has_no_children(params: SamplingParams, poison: float) -> None:
    logits = random_logits(3, 100)
    clean = draft_children(logits, params, [0, 0, 1], cache(100), 3)
    logits[1, 50] = poison
    tokens, scores = draft_children(logits, params, [0, 0, 1], cache(100), 3)
    assert tokens[1].tolist() == [-1] * 3
    assert scores[1].tolist() == [LOWEST] * 3
    for row in (0, 2):
        assert torch.equal(tokens[row], clean[0][row])
        assert torch.equal(scores[row], clean[1][row])


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
def test_a_draft_with_the_targets_logits_is_always_right(temperature: float) -> None:
    logits = random_logits(200, 500)
    params = SamplingParams(temperature, seed=77)
    positions = list(range(200))
    tokens, _ = target_tokens(logits, params, positions, cache(500))
    children, _ = draft_children(logits, params, positions, cache(500), 2)
    assert torch.equal(children[:, 0], tokens)


def test_noise_is_shared_so_a_near_draft_is_right_more_often_than_its_favourites() -> None:
    target = random_logits(1500, 60, scale=1.0)
    draft = target + random_logits(1500, 60, scale=0.3, seed=1)
    params, positions = SamplingParams(1.0, seed=5), list(range(1500))
    tokens, _ = target_tokens(target, params, positions, cache(60))
    hits = {
        rule: (draft_children(draft, replace(params, temperature=t), positions, cache(60), 1)[0][:, 0] == tokens)
        for rule, t in (("noise", 1.0), ("favourite", 0.0))
    }
    assert hits["noise"].double().mean() > 3 * hits["favourite"].double().mean()


# Parameters


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=10.1), "temperature"),
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=math.inf), "temperature"),
        (SamplingParams(temperature=-math.inf), "temperature"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(top_k=101), "top_k"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_p=-0.5), "top_p"),
        (SamplingParams(top_p=1.0001), "top_p"),
        (SamplingParams(top_p=math.nan), "top_p"),
        (SamplingParams(seed=-1), "seed"),
        (SamplingParams(seed=2**64), "seed"),
    ],
)
def test_values_out_of_range_are_refused_by_name(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        params.validate(100)
    assert (refused.value.reason, refused.value.field) == ("SAMPLING", f"sampling.{field}")
    assert str(getattr(params, field)) in refused.value.message


def test_the_ends_of_all_ranges_are_accepted() -> None:
    for params in (SamplingParams(), SamplingParams(10.0, 100, 1.0, 2**64 - 1), SamplingParams(5e-324, 1, 5e-324)):
        params.validate(100)
    counts = Counter(params.greedy for params in (SamplingParams(), SamplingParams(-0.0), SamplingParams(5e-324)))
    assert counts == {True: 2, False: 1}


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_picks_the_same_tokens(dtype: torch.dtype) -> None:
    logits = random_logits(48, 49_152).to(dtype)
    logits[0, [5, 60, 40_000]] = 99.0
    positions = [i // 3 for i in range(48)]
    for params in (
        GREEDY,
        SamplingParams(1.0, seed=5),
        SamplingParams(0.7, 50, 1.0, 6),
        SamplingParams(1.0, 0, 0.9, 7),
    ):
        cpu, cpu_bad = target_tokens(logits, params, positions, cache(49_152))
        gpu, gpu_bad = target_tokens(logits.cuda(), params, positions, GumbelCache(49_152, "cuda"))
        assert torch.equal(gpu.cpu(), cpu)
        assert torch.equal(gpu_bad.cpu(), cpu_bad)
        host = draft_children(logits, params, positions, cache(49_152), 4)
        device = draft_children(logits.cuda(), params, positions, GumbelCache(49_152, "cuda"), 4)
        assert torch.equal(device[0].cpu(), host[0])
        torch.testing.assert_close(device[1].cpu(), host[1])
