"""Products of a few rows with a weight matrix: a program streams some rows of the weights past all rows of the input.

With at most ``MOST_ROWS`` rows such a product is the reading of its weights, and what lies between two of them (norms,
sums, activations: kernels of 2 to 4 us that read little) costs as much as a matrix of 8 to 16 MB. So the small
operations move into the products' last lines, and of a layer's kernels between attention and attention four products
are left:

residual sum   ``linear_add`` adds its product to ``hidden`` and also writes what the next norm needs: the sum times the
               norm's weight, and each program's share of the sums of squares.
norm           RMSNorm(h) w = (h w) / rms(h), and a factor of a whole row can be applied after the product as well:
               ``Normed`` carries h w and the shares, and the product that takes it divides its result.
SwiGLU         ``linear_swiglu`` computes gate and up for the same columns.

Sums are taken in a fixed order, and a row's result does not depend on the other rows. Where rounding differs from norm,
product and sum one after the other, there is one rounding less.
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types.
# ruff: noqa: PLR0912, PLR0915, RUF005
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.kernels.device import Gpu, gpu_of
from draftwood.kernels.overlap import launch_options, starts_early

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # macOS has no Triton; the references serve there
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))

ROWS = (16, 32, 64)
"""Numbers of rows that are computed, whatever fewer there are."""

MOST_ROWS = ROWS[-1]

FEWEST_PROGRAMS, FEWEST_LONG_PROGRAMS = 64, 96
"""Of a product; with fewer, the input is cut as well (measured on an H200). The latter for a LONG input."""

LONG = 64 * 4096
"""Numbers that a program reads of an input, rows times size, from which on more programs are worth adding up parts."""

MOST_SPLITS = 4

LOADED_BYTES = {1: 164 << 10, 2: 200 << 10}
"""In shared memory of a program, most, by the matrices (measured on an H200)."""

MOST_STAGES = 8

MOST_AHEAD = 256
"""Inputs whose weights are loaded at a time (measured on an H200: 128 and 512 are slower)."""

FEWEST_AHEAD = {16: 64, 32: 256}
"""The same, at least, by the rows that are computed: pieces are loaded one after the other, and smaller ones, or those
of more rows, are streamed (measured on an H200)."""

RESERVED_BYTES = 2048
"""Of a program's shared memory, for sums and barriers."""

MOST_TILES = 96
"""Of a product whose input is cut."""


HOPPER = Gpu(multiprocessors=132, shared_bytes=227 << 10, capability=9)


@dataclass(frozen=True, slots=True)
class Normed:
    """A norm's output that still lacks the division by each row's root mean square; ``squares`` None: it lacks none."""

    scaled: Tensor  # [rows, size], the norm's input times its weight
    squares: Tensor | None  # float32 [shares, rows or more], sums of squares of the norm's input, in shares
    eps: float


def _factor(x: Normed) -> Tensor | float:
    """1 / rms of each row, float32 [rows, 1]."""
    if x.squares is None:
        return 1.0
    rows, size = x.scaled.shape
    return torch.rsqrt(x.squares[:, :rows].sum(0) / size + x.eps).unsqueeze(1)


def linear_reference(x: Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The norm's output times ``weight`` [out, size], plus ``bias`` [out]: [rows, out]."""
    out = (x.scaled.float() @ weight.float().T) * _factor(x)
    return (out if bias is None else out + bias.float()).to(weight.dtype)


def linear_swiglu_reference(x: Normed, gate_up: Tensor) -> Tensor:
    """silu(gate) * up [rows, out] of the norm's output; gate_up [2 * out, size], the gate's rows first."""
    gate, up = linear_reference(x, gate_up.float()).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def linear_add_reference(x: Tensor, weight: Tensor, hidden: Tensor, gain: Tensor, eps: float) -> Normed:
    """Adds x @ weight.T to ``hidden`` [rows, out], and normalises the sum with weight ``gain`` [out]."""
    hidden.copy_((hidden.float() + x.float() @ weight.float().T).to(hidden.dtype))
    squares = hidden.float().square().sum(1)[None]
    return Normed((hidden.float() * gain.float()).to(hidden.dtype), squares, eps)


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    weight,
    blocks,  # tensor descriptor over the weights, [TILE, AHEAD] at a time, if AHEAD
    bias,  # [out]; read if BIAS
    squares_in,  # read if NORM
    hidden,  # read and written if ADD
    gain,  # read if ADD
    out,
    squares_out,  # written if ADD
    partial,  # float32 [tiles, SPLITS, 1 + GATED, TILE, ROWS] if SPLITS > 1
    arrived,  # int32 [tiles], zeros before and after, if SPLITS > 1
    rows,
    eps,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARES: tl.constexpr,
    LANES: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
    EAGER: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One program: ``TILE`` columns of the output, for all rows, over one of ``SPLITS`` parts of the input; the last
    program of a tile to end adds the parts up, in order."""
    row = tl.arange(0, ROWS)
    real = row < rows
    tile = tl.program_id(0)
    column = tile * TILE + tl.arange(0, TILE)
    at = tl.arange(0, STEP)
    dtype = out.dtype.element_ty
    part: tl.constexpr = INNER // SPLITS
    first = tl.program_id(1) * part
    if EARLY and EAGER:
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD:  # all weights of the program, into shared memory; they depend on no kernel
        ahead = ()
        up_ahead = ()
        for k in tl.static_range(0, part, AHEAD):
            ahead = ahead + (blocks.load([tile * TILE, first + k]),)
            if GATED:
                up_ahead = up_ahead + (blocks.load([OUTER + tile * TILE, first + k]),)
    w_at = weight + column.to(tl.int64)[:, None] * INNER + at[None, :]
    x_at = x + row[None, :] * INNER + at[:, None]
    out_at = row[None, :] * OUTER + column[:, None]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if NORM:  # loaded ahead, so that the first weights do not wait for it, nor it for the last
        share = tl.arange(0, LANES)
        squares = tl.load(squares_in + share[:, None] * ROWS + row[None, :], mask=(share < SHARES)[:, None], other=0.0)
    if ADD and SPLITS == 1:
        before = tl.load(hidden + out_at, mask=real[None, :], other=0.0).to(tl.float32)
        scale = tl.load(gain + column).to(tl.float32)
    acc = tl.zeros([TILE, ROWS], tl.float32)
    up = tl.zeros([TILE, ROWS], tl.float32)
    if AHEAD:
        inputs = ()
        for k in tl.static_range(0, part, AHEAD):
            there = x + row[None, :] * INNER + (first + k + tl.arange(0, AHEAD))[:, None]
            inputs = inputs + (tl.load(there, mask=real[None, :], other=0.0),)
        for k in tl.static_range(part // AHEAD):
            acc = tl.dot(ahead[k], inputs[k], acc)
            if GATED:
                up = tl.dot(up_ahead[k], inputs[k], up)
    else:
        for step in range(first, first + part, STEP):
            xs = tl.load(x_at + step, mask=real[None, :], other=0.0)
            acc = tl.dot(tl.load(w_at + step), xs, acc)
            if GATED:
                up = tl.dot(tl.load(w_at + OUTER * INNER + step), xs, up)
    if EARLY and not EAGER:
        tl.extra.cuda.gdc_launch_dependents()
    if SPLITS > 1:
        size: tl.constexpr = TILE * ROWS
        each: tl.constexpr = (1 + GATED) * size
        parts = partial + tile.to(tl.int64) * (SPLITS * each) + tl.arange(0, TILE)[:, None] * ROWS + row[None, :]
        tl.store(parts + tl.program_id(1) * each, acc)
        if GATED:
            tl.store(parts + tl.program_id(1) * each + size, up)
        tl.debug_barrier()  # all of the part is written before it is counted
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived + tile, 0)
        acc = tl.load(parts, cache_modifier=".cg")
        if GATED:
            up = tl.load(parts + size, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            acc += tl.load(parts + split * each, cache_modifier=".cg")
            if GATED:
                up += tl.load(parts + split * each + size, cache_modifier=".cg")
    if ADD and SPLITS > 1:
        before = tl.load(hidden + out_at, mask=real[None, :], other=0.0).to(tl.float32)
        scale = tl.load(gain + column).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / INNER + eps)
        acc = acc * factor[None, :]
        up = up * factor[None, :]
    if BIAS:
        acc += tl.load(bias + column).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if ADD:
        total = (before + acc).to(dtype)
        tl.store(hidden + out_at, total, mask=real[None, :])
        wide = total.to(tl.float32)
        tl.store(squares_out + tile * ROWS + row, tl.sum(wide * wide, 0))
        acc = wide * scale[:, None]
    tl.store(out + out_at, acc.to(dtype), mask=real[None, :])


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How a product is cut."""

    rows: int  # that are computed
    tile: int  # columns of a program
    step: int  # inputs of an iteration
    splits: int  # parts of the input
    warps: int
    stages: int
    ahead: int = 0  # inputs at a time whose weights are loaded before the kernel before has ended; 0: streamed after it


def plan_linear(inner: int, outer: int, matrices: int, rows: int = 1, device: Gpu = HOPPER) -> LinearPlan | None:
    """A plan for ``matrices`` products [outer, inner] of one input, of two bytes a number; None if the sizes are not
    whole tiles.

    Measured on an H200: 64 columns to a program, lines of 256 bytes, and so many of them in flight that two programs of
    a multiprocessor keep memory busy. Small matrices are loaded as a whole, ahead.
    """
    tile = next((t for t in (64, 32) if outer % t == 0), 0)
    step = next((s for s in (128, 64) if inner % s == 0), 0)
    if not tile or not step or rows > MOST_ROWS:
        return None
    computed = next(size for size in ROWS if rows <= size)
    fewest = FEWEST_LONG_PROGRAMS if computed * inner >= LONG else FEWEST_PROGRAMS
    splits = 1
    while splits < MOST_SPLITS and outer // tile * splits < fewest and inner % (2 * splits * step) == 0:
        splits *= 2
    stage_bytes = 2 * step * (tile * matrices + computed)
    in_memory = min(LOADED_BYTES[matrices], device.shared_bytes) // stage_bytes
    iterations = inner // splits // step
    stages = max(1, min(MOST_STAGES, in_memory, iterations + 1))  # of which one less are on their way at a time
    plan = LinearPlan(computed, tile, step, splits, warps=4, stages=stages)
    return _ahead(plan, inner, outer, matrices, device) or plan


def _ahead(plan: LinearPlan, inner: int, outer: int, matrices: int, device: Gpu) -> LinearPlan | None:
    """The plan with the weights loaded ahead, if all programs fit the device with theirs in shared memory.

    On Hopper only: products read them where a tensor descriptor has put them. Later GPUs have not been tried.
    Of a product that is cut anyway a program takes at most half of it, so that one of the next product fits beside it.
    """
    splits = plan.splits
    if device.capability != 9 or plan.tile < 64 or plan.rows not in FEWEST_AHEAD:
        return None

    def held_bytes() -> int:
        return 2 * (inner // splits) * (plan.tile * matrices + plan.rows) + RESERVED_BYTES

    while (
        1 < splits < MOST_SPLITS and held_bytes() > device.shared_bytes // 2 and inner % (2 * splits * plan.step) == 0
    ):
        splits *= 2
    part = inner // splits
    ahead = min(MOST_AHEAD, part & -part)
    programs, places = outer // plan.tile * splits, device.shared_bytes // held_bytes() * device.multiprocessors
    if programs > places or ahead < FEWEST_AHEAD[plan.rows]:
        return None
    return replace(plan, splits=splits, ahead=ahead)


def _launch(
    x: Normed,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor | None,
    gain: Tensor | None,
    gated: bool,
    plan: LinearPlan | None,
) -> tuple[Tensor, Tensor | None]:
    rows, inner = x.scaled.shape
    outer = len(weight) // (1 + gated)
    plan = plan or plan_linear(inner, outer, 1 + gated, rows, _device(weight))
    assert plan and rows <= plan.rows and x.scaled.is_contiguous() and weight.is_contiguous()
    assert x.squares is None or x.squares.shape[1] == plan.rows
    out = torch.empty((rows, outer), dtype=weight.dtype, device=weight.device)
    tiles, split = outer // plan.tile, plan.splits > 1
    assert tiles <= MOST_TILES or not split
    squares, parts, arrived = None, out, out
    if hidden is not None:
        squares = torch.empty((tiles, plan.rows), dtype=torch.float32, device=weight.device)
    if split:
        size = (tiles, plan.splits, 1 + gated, plan.tile, plan.rows)
        parts = torch.empty(size, dtype=torch.float32, device=weight.device)
        arrived = _counters(weight.device, get_ident())
    shares = 1 if x.squares is None else len(x.squares)
    early = starts_early(x.scaled)
    eager = plan.ahead > 0 or (hidden is None and not gated)
    blocks: Any = weight
    if plan.ahead:
        blocks = TensorDescriptor(weight, list(weight.shape), [inner, 1], [plan.tile, plan.ahead])
    with torch.cuda.device_of(weight):
        _few_rows_kernel[(tiles, plan.splits)](
            x.scaled, weight, blocks, weight if bias is None else bias, weight if x.squares is None else x.squares,
            weight if hidden is None else hidden, weight if gain is None else gain, out,
            weight if squares is None else squares, parts, arrived, rows, x.eps,
            INNER=inner, OUTER=outer, ROWS=plan.rows, TILE=plan.tile, STEP=plan.step, SPLITS=plan.splits,
            SHARES=shares, LANES=triton.next_power_of_2(shares), BIAS=bias is not None, NORM=x.squares is not None,
            GATED=gated, ADD=hidden is not None, EARLY=early, EAGER=eager, AHEAD=plan.ahead, num_warps=plan.warps,
            num_stages=plan.stages, **launch_options(early),
        )  # fmt: skip
    return out, squares


def _device(weight: Tensor) -> Gpu:
    return gpu_of(weight.device) if weight.is_cuda else HOPPER


def loads_ahead(weight: Tensor, rows: int) -> bool:
    """Whether the product of so many rows with ``weight`` [out, in] loads it before the kernel before has ended."""
    outer, inner = weight.shape
    plan = plan_linear(inner, outer, 1, rows, _device(weight))
    return plan is not None and plan.ahead > 0


@lru_cache(maxsize=16)
def _counters(device: torch.device, thread: int) -> Tensor:
    """Zeros that every launch leaves zeros. A thread's launches follow one another, so that they can share them."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def linear_triton(x: Normed, weight: Tensor, bias: Tensor | None = None, plan: LinearPlan | None = None) -> Tensor:
    """As ``linear_reference``, in one launch."""
    return _launch(x, weight, bias, None, None, False, plan)[0]


def linear_swiglu_triton(x: Normed, gate_up: Tensor, plan: LinearPlan | None = None) -> Tensor:
    """As ``linear_swiglu_reference``, in one launch."""
    return _launch(x, gate_up, None, None, None, True, plan)[0]


def linear_add_triton(
    x: Tensor, weight: Tensor, hidden: Tensor, gain: Tensor, eps: float, plan: LinearPlan | None = None
) -> Normed:
    """As ``linear_add_reference``, in one launch."""
    out, squares = _launch(Normed(x, None, eps), weight, None, hidden, gain, False, plan)
    return Normed(out, squares, eps)


def linear(x: Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product where the weights live: the kernel on CUDA, the reference elsewhere. See the reference."""
    return (linear_triton if weight.is_cuda else linear_reference)(x, weight, bias)


def linear_swiglu(x: Normed, gate_up: Tensor) -> Tensor:
    """SwiGLU where the weights live: the kernel on CUDA, the reference elsewhere. See the reference."""
    return (linear_swiglu_triton if gate_up.is_cuda else linear_swiglu_reference)(x, gate_up)


def linear_add(x: Tensor, weight: Tensor, hidden: Tensor, gain: Tensor, eps: float) -> Normed:
    """Product, sum and norm where the weights live: the kernel on CUDA, the reference elsewhere. See the reference."""
    return (linear_add_triton if weight.is_cuda else linear_add_reference)(x, weight, hidden, gain, eps)
