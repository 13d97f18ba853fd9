"""The fused kernels and their references against transformers' own modules, with canaries around what they write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftwood.kernels.fused import (
    Heads,
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rotate_and_write,
    rotate_and_write_reference,
    rotate_and_write_triton,
    rotation_table,
    swiglu,
    swiglu_reference,
    swiglu_triton,
)

CUDA = torch.cuda.is_available()
FENCE = 512
EPS = 1e-5


@dataclass(frozen=True)
class Run:
    """One way to run the three operations."""

    norm: Callable[..., Tensor]
    rotate: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    device: str


REFERENCE = Run(add_rms_norm_reference, rotate_and_write_reference, swiglu_reference, "cpu")
INTERPRETED = Run(add_rms_norm_triton, rotate_and_write_triton, swiglu_triton, "cpu")
COMPILED = Run(add_rms_norm, rotate_and_write, swiglu, "cuda")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")]
NO_GPU = pytest.mark.skipif(CUDA, reason="compiled on a machine with a GPU")

CASES = [
    pytest.param(REFERENCE, torch.float32, id="reference-float32"),
    pytest.param(REFERENCE, torch.float64, id="reference-float64"),
    pytest.param(REFERENCE, torch.bfloat16, id="reference-bfloat16"),
    pytest.param(INTERPRETED, torch.float32, id="kernel-float32", marks=NO_GPU),
    pytest.param(INTERPRETED, torch.float16, id="kernel-float16", marks=NO_GPU),
    *[
        pytest.param(COMPILED, dtype, id=f"compiled-{str(dtype)[6:]}", marks=ON_GPU)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ],
]
ULPS = {torch.float64: 8e-15, torch.float32: 1e-6, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
"""About two units in the last place, of values around 1."""


def assert_near(got: Tensor, want: Tensor, times: float = 1.0) -> None:
    tolerance = ULPS[want.dtype] * times
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@dataclass
class Fenced:
    """A random tensor inside a larger buffer whose other elements must not change."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    seed: int = 0
    tensor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = torch.Size(self.shape).numel()
        buffer = torch.randn(size + 2 * FENCE, generator=torch.Generator().manual_seed(self.seed))
        self.buffer = buffer.to(self.dtype).to(self.device)
        self.before = self.buffer.clone()
        self.tensor = self.buffer[FENCE:-FENCE].view(self.shape)

    def assert_fence_stands(self) -> None:
        for part in (slice(0, FENCE), slice(-FENCE, None)):
            assert torch.equal(self.buffer[part], self.before[part])


@pytest.mark.parametrize(("run", "dtype"), CASES)
@pytest.mark.parametrize("size", [32, 96, 576, 2048])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("picked", [True, False])
def test_sum_and_norm_equal_transformers(run: Run, dtype: torch.dtype, size: int, added: bool, picked: bool) -> None:
    hidden = Fenced((5, size), dtype, run.device)
    delta = Fenced((5, size), dtype, run.device, seed=1).tensor * 3 if added else None
    module = LlamaRMSNorm(size, EPS).to(dtype).to(run.device)
    module.weight.data = Fenced((size,), dtype, run.device, seed=2).tensor
    rows = torch.tensor([4, 1, 1], device=run.device) if picked else None
    total = hidden.tensor.clone() if delta is None else hidden.tensor + delta
    want = module(total if rows is None else total[rows]).detach()
    got = run.norm(hidden.tensor, delta, module.weight.detach(), EPS, rows)
    assert_near(got, want, times=4)
    hidden.assert_fence_stands()
    if rows is None:
        assert torch.equal(hidden.tensor, total)


@pytest.mark.parametrize(("run", "dtype"), CASES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 96), (5, 1, 128), (8, 2, 256), (2, 1, 8)]
)
@pytest.mark.parametrize("normed", [True, False])
def test_rotation_and_write_equal_transformers(
    run: Run, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    rows, pages, page = 5, 4, 16
    qkv = Fenced((rows, (q_heads + 2 * kv_heads) * head_dim), dtype, run.device)
    cache = Fenced((2, pages, kv_heads, page, head_dim), dtype, run.device, seed=1)
    query, key, value = (
        part.unflatten(1, (-1, head_dim)).transpose(0, 1)[None]
        for part in qkv.tensor.clone().split([q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
    )
    norm = None
    if normed:
        modules = [LlamaRMSNorm(head_dim, EPS).to(dtype).to(run.device) for _ in range(2)]
        for seed, module in enumerate(modules, 2):
            module.weight.data = Fenced((head_dim,), dtype, run.device, seed=seed).tensor
        query, key = modules[0](query).detach(), modules[1](key).detach()
        weights = [m.weight.detach().expand(n, -1) for m, n in zip(modules, (q_heads, kv_heads), strict=True)]
        norm = torch.cat(weights)
    position = torch.tensor([0, 7, 7, 8191, 500], dtype=torch.int32, device=run.device)
    page_id = torch.tensor([3, 0, 0, 2, 3], device=run.device)
    page_offset = torch.tensor([0, 5, 15, 9, 1], device=run.device)
    config = LlamaConfig(
        hidden_size=q_heads * head_dim, num_attention_heads=q_heads, head_dim=head_dim, max_position_embeddings=8192
    )
    rope = LlamaRotaryEmbedding(config).to(run.device)
    query, key = apply_rotary_pos_emb(query, key, *rope(qkv.tensor, position[None].long()))
    expected = cache.tensor.clone()
    for row in range(rows):
        at = (int(page_id[row]), slice(None), int(page_offset[row]))
        expected[0][at], expected[1][at] = key[0, :, row], value[0, :, row]

    heads = Heads(
        q_heads,
        kv_heads,
        rotation_table(rope.inv_freq, rope.attention_scaling, 8192, dtype),
        position,
        page_id,
        page_offset,
    )
    got = run.rotate(qkv.tensor, cache.tensor, heads, norm, EPS)
    # A product rounded before the sum can be large where the sum is small.
    assert_near(got, query[0].transpose(0, 1), times=8)
    assert_near(cache.tensor, expected, times=8)
    assert torch.equal(cache.tensor[1], expected[1])
    for fenced in (qkv, cache):
        fenced.assert_fence_stands()


@pytest.mark.parametrize(("run", "dtype"), CASES)
@pytest.mark.parametrize("size", [8, 96, 513, 1536])
def test_swiglu_equals_silu_and_product(run: Run, dtype: torch.dtype, size: int) -> None:
    gate_up = Fenced((3, 2 * size), dtype, run.device)
    gate_up.tensor.mul_(4)
    gate, up = gate_up.tensor.clone().chunk(2, 1)
    assert_near(run.swiglu(gate_up.tensor), F.silu(gate) * up, times=16)
    gate_up.assert_fence_stands()


def test_table_of_scaled_frequencies_scales_both_factors() -> None:
    table = rotation_table(torch.tensor([1.0, 0.25]), 2.0, 3, torch.float64)
    angle = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.25])
    want = torch.stack([angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], 1)], 1) * 2
    torch.testing.assert_close(table, want.double())
