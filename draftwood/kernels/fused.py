"""The small operations between a decoder layer's matrix products, each one launch: residual sum with RMSNorm, rotary
embedding with the write to the paged cache, and SwiGLU.

Numbers are rounded where transformers' modules of the Llama family round: a norm is float32 inside and cast to the
model's dtype before its weight is applied; cosines and sines are float32 and cast; every product and sum of the
rotation is one of the model's dtype (the reference rounds the last two at once).
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.kernels.overlap import launch_options, starts_early, wait

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has no Triton; the reference serves there
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))


def add_rms_norm_reference(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rows: Tensor | None = None
) -> Tensor:
    """Adds ``delta`` to ``hidden`` and returns the sum's RMSNorm (arXiv:1910.07467), [rows or wanted, size].

    hidden, delta [rows, size], contiguous; weight [size]; rows int64 [wanted]: the rows to return, None for all.
    ``hidden`` becomes the sum, unless ``rows`` are given: then what it holds afterwards is not defined.
    """
    if delta is not None:
        hidden.add_(delta)
    if rows is not None:
        hidden = hidden.index_select(0, rows)
    return _normed(hidden, eps).mul_(weight)


def _normed(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


@triton.jit
def _add_rms_norm_kernel(
    hidden,
    delta,
    weight,
    rows,
    out,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PICK: tl.constexpr,
):
    """One program: one row."""
    at = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype = out.dtype.element_ty
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(rows + at) if PICK else at
    x = tl.load(hidden + row * SIZE + column, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        if not PICK:
            tl.store(hidden + row * SIZE + column, x, mask=inside)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(dtype)
    tl.store(out + at * SIZE + column, (normed.to(tl.float32) * scale).to(dtype), mask=inside)


def add_rms_norm_triton(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rows: Tensor | None = None
) -> Tensor:
    """As ``add_rms_norm_reference``, in one launch."""
    count, size = hidden.shape if rows is None else (len(rows), hidden.shape[1])
    assert hidden.is_contiguous() and (delta is None or delta.is_contiguous())
    out = torch.empty((count, size), dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(size)
    with torch.cuda.device_of(hidden):
        _add_rms_norm_kernel[(count,)](
            hidden, hidden if delta is None else delta, weight, hidden if rows is None else rows, out, eps,
            SIZE=size, BLOCK=block, ADD=delta is not None, PICK=rows is not None,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rows: Tensor | None = None
) -> Tensor:
    """Sum and norm where the tensors live: the kernel on CUDA, the reference elsewhere. See the reference."""
    run = add_rms_norm_triton if hidden.is_cuda else add_rms_norm_reference
    return run(hidden, delta, weight, eps, rows)


def rotation_table(inverse_frequency: Tensor, scaling: float, positions: int, dtype: torch.dtype) -> Tensor:
    """[positions, 2, head_dim]: cosines, and sines with a negated first half, so that a rotation of x is
    ``x * cosines + swapped(x) * sines`` with the halves of x swapped (RoFormer, arXiv:2104.09864).

    inverse_frequency float32 [head_dim / 2], radians a position; ``scaling`` multiplies cosines and sines.
    """
    position = torch.arange(positions, device=inverse_frequency.device, dtype=torch.float32)
    angle = position[:, None] * inverse_frequency.float()
    cos, sin = angle.cos() * scaling, angle.sin() * scaling
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1).to(dtype)


@dataclass(frozen=True)
class Heads:
    """What the heads of one forward's layers have in common. A row's heads are query, key and value heads, in order."""

    query: int
    kv: int
    table: Tensor  # [positions, 2, head_dim], see `rotation_table`
    position: Tensor  # int32 [rows], below `positions`
    page_id: Tensor  # int64 [rows], page that the row's key and value are written to
    page_offset: Tensor  # int64 [rows], offset in that page

    @cached_property
    def rotations(self) -> tuple[Tensor, Tensor]:
        """Factors of the rows' heads and of their swapped halves, [rows, heads, head_dim], for the reference: a value
        head's are 1 and 0, so that all heads are done at once."""
        picked = self.table.index_select(0, self.position)
        shape = (len(picked), self.query + 2 * self.kv, picked.shape[2])
        cos, sin = picked.new_ones(shape), picked.new_zeros(shape)
        cos[:, : -self.kv], sin[:, : -self.kv] = picked[:, :1], picked[:, 1:]
        return cos, sin


def rotate_and_write_reference(
    qkv: Tensor, cache: Tensor, heads: Heads, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Rotates queries and keys to their positions, writes keys and values to the cache, returns the queries
    [rows, q_heads, head_dim].

    qkv [rows, (q_heads + 2 * kv_heads) * head_dim], contiguous, is overwritten; cache [2, pages, kv_heads, PAGE,
    head_dim] is one layer's; norm [q_heads + kv_heads, head_dim] are weights of an RMSNorm of each head before its
    rotation. Rows of the same slot (padding) leave any one's key and value there.
    """
    x = qkv.view(len(qkv), -1, cache.shape[-1])
    if norm is not None:
        turned = x[:, : len(norm)]
        torch.mul(_normed(turned, eps), norm, out=turned)
    cos, sin = heads.rotations
    x = torch.addcmul(x * cos, x.roll(x.shape[2] // 2, 2), sin)
    cache[:, heads.page_id, :, heads.page_offset] = x[:, heads.query :].unflatten(1, (2, heads.kv))
    return x[:, : heads.query]


@triton.jit
def _rotate_and_write_kernel(
    qkv,
    cache,
    table,
    position,
    page_id,
    page_offset,
    norm,
    pages,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # power of two >= HEAD_DIM / 2
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: a few heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    dtype = qkv.dtype.element_ty
    is_query = (head < Q_HEADS)[:, None]
    is_value = (head >= Q_HEADS + KV_HEADS)[:, None]
    filled = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (dim < half)[None, :]
    # What the step's batch and the weights say does not depend on the kernel before.
    angle = table + tl.load(position + row).to(tl.int64) * (2 * HEAD_DIM) + dim
    cos = tl.load(angle, mask=dim < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + HEAD_DIM + half, mask=dim < half, other=0.0).to(tl.float32)[None, :]
    kv_head = head - Q_HEADS
    plane = (kv_head // KV_HEADS).to(tl.int64) * pages + tl.load(page_id + row)
    slot = (plane * KV_HEADS + kv_head % KV_HEADS) * PAGE + tl.load(page_offset + row)
    if NORM:
        weight = norm + head[:, None] * HEAD_DIM + dim[None, :]
        weighted = filled & (is_value == 0)
        weight_1 = tl.load(weight, mask=weighted, other=0.0).to(tl.float32)
        weight_2 = tl.load(weight + half, mask=weighted, other=0.0).to(tl.float32)
    if EARLY:
        wait(True)
    there = qkv + (row * (Q_HEADS + 2 * KV_HEADS) + head)[:, None] * HEAD_DIM + dim[None, :]
    raw_1 = tl.load(there, mask=filled, other=0.0)
    raw_2 = tl.load(there + half, mask=filled, other=0.0)
    x_1 = raw_1.to(tl.float32)
    x_2 = raw_2.to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(x_1 * x_1, 1) + tl.sum(x_2 * x_2, 1)) / HEAD_DIM + eps)[:, None]
        x_1 = ((x_1 * factor).to(dtype).to(tl.float32) * weight_1).to(dtype).to(tl.float32)
        x_2 = ((x_2 * factor).to(dtype).to(tl.float32) * weight_2).to(dtype).to(tl.float32)
    out_1 = ((x_1 * cos).to(dtype).to(tl.float32) - (x_2 * sin).to(dtype).to(tl.float32)).to(dtype)
    out_2 = ((x_2 * cos).to(dtype).to(tl.float32) + (x_1 * sin).to(dtype).to(tl.float32)).to(dtype)
    out_1 = tl.where(is_value, raw_1, out_1)
    out_2 = tl.where(is_value, raw_2, out_2)
    tl.debug_barrier()  # queries are rotated in place, and another warp may have them to load
    tl.store(there, out_1, mask=filled & is_query)
    tl.store(there + half, out_2, mask=filled & is_query)
    to = cache + slot[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, out_1, mask=filled & (is_query == 0))
    tl.store(to + half, out_2, mask=filled & (is_query == 0))


HEADS_TILE = 16
"""Of a program (measured on an H200: with 4 a step of 96 rows takes 1.3 % longer)."""


def rotate_and_write_triton(
    qkv: Tensor, cache: Tensor, heads: Heads, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """As ``rotate_and_write_reference``, in one launch; the queries are a view of ``qkv``."""
    _, pages, kv_heads, page, head_dim = cache.shape
    count = heads.query + 2 * kv_heads
    assert qkv.is_contiguous() and cache.is_contiguous() and heads.kv == kv_heads
    early = starts_early(qkv)
    with torch.cuda.device_of(qkv):
        _rotate_and_write_kernel[(len(qkv), -(-count // HEADS_TILE))](
            qkv, cache, heads.table, heads.position, heads.page_id, heads.page_offset, qkv if norm is None else norm,
            pages, eps,
            Q_HEADS=heads.query, KV_HEADS=kv_heads, PAGE=page, HEAD_DIM=head_dim,
            HALF=triton.next_power_of_2(head_dim // 2), TILE=HEADS_TILE, NORM=norm is not None,
            EARLY=early, num_warps=8 if head_dim > 128 else 4, **launch_options(early),
        )  # fmt: skip
    return qkv.view(len(qkv), count, head_dim)[:, : heads.query]


def rotate_and_write(qkv: Tensor, cache: Tensor, heads: Heads, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Rotation and write where the tensors live: the kernel on CUDA, the reference elsewhere. See the reference."""
    run = rotate_and_write_triton if qkv.is_cuda else rotate_and_write_reference
    return run(qkv, cache, heads, norm, eps)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [rows, size], of gate_up [rows, 2 * size], contiguous (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate).mul_(up)


@triton.jit
def _swiglu_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program: a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype = out.dtype.element_ty
    there = gate_up + row * (2 * SIZE) + column
    gate = tl.load(there, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(there + SIZE, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + column, (silu * up).to(dtype), mask=inside)


SWIGLU_BLOCK = 512


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """As ``swiglu_reference``, in one launch."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    with torch.cuda.device_of(gate_up):
        _swiglu_kernel[(rows, -(-size // SWIGLU_BLOCK))](gate_up, out, SIZE=size, BLOCK=SWIGLU_BLOCK, num_warps=2)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU where the tensor lives: the kernel on CUDA, the reference elsewhere. See the reference."""
    return (swiglu_triton if gate_up.is_cuda else swiglu_reference)(gate_up)
