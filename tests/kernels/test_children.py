"""The kernel that picks a draft's children, and its reference, against the drafts' own rule on the CPU.

On a machine without a GPU the kernel runs in Triton's interpreter (see ``tests/conftest.py``); with one it is compiled.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.kernels.children import top_children_reference, top_children_triton
from draftwood.sampling import first_children

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")]
LOWEST = torch.finfo(torch.float32).min


def check(logits: torch.Tensor, branch: int) -> None:
    want = first_children(logits.float(), branch)
    for top in (top_children_reference, top_children_triton):
        tokens, scores = (t.cpu() for t in top(logits.to(DEVICE), branch))
        assert (tokens.dtype, scores.dtype) == (torch.int64, torch.float32)
        assert torch.equal(tokens, want[0]), top.__name__
        torch.testing.assert_close(scores, want[1], rtol=1e-5, atol=1e-4)  # of 150,000 summands


@pytest.mark.parametrize("vocab", [1, 3, 64, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("branch", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_likeliest_tokens_of_each_row(vocab: int, branch: int, dtype: torch.dtype) -> None:
    """Half precision ties often: the lowest id comes first."""
    torch.manual_seed(vocab)
    check((4 * torch.randn(3, vocab)).to(dtype), branch)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 6, 48, 256])
@pytest.mark.parametrize("vocab", [32_000, 49_152, 151_936])
def test_the_likeliest_tokens_of_each_row_of_real_vocabularies(rows: int, vocab: int) -> None:
    torch.manual_seed(rows)
    check((4 * torch.randn(rows, vocab)).bfloat16(), 4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.0]), min_size=1, max_size=80), st.integers(1, 6))
def test_ties_and_impossible_tokens(row: list[float], branch: int) -> None:
    check(torch.tensor([row, row[::-1]]), branch)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 8191])
def test_a_row_that_is_not_finite_has_no_children_and_the_others_theirs(poison: float, place: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 8192)
    logits[1] = -math.inf if poison == -math.inf else logits[1]
    logits[1, place] = poison
    check(logits, 3)
    tokens, scores = top_children_triton(logits.to(DEVICE), 3)
    assert tokens[1].tolist() == [-1] * 3 and scores[1].tolist() == [LOWEST] * 3


def test_rows_of_a_larger_matrix_and_none_at_all() -> None:
    torch.manual_seed(2)
    wide = torch.randn(4, 5000, device=DEVICE)
    tokens, _ = top_children_triton(wide[:, :300], 2)
    assert torch.equal(tokens.cpu(), first_children(wide[:, :300].float().cpu(), 2)[0])
    assert top_children_triton(wide[:0], 2)[0].shape == (0, 2)
