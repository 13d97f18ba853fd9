"""Products of a few rows with a weight matrix: a program streams some rows of the weights past all rows of the input.

With at most ``MOST_ROWS`` rows such a product is the reading of its weights, and what lies between two of them (norms,
sums, activations: kernels of 2 us that read nothing) costs as much as a matrix of 8 MB. So the small operations move
into the products' last lines, and of a layer's kernels between attention and attention four products are left:

residual sum   ``linear_add`` adds its product to ``hidden`` and also writes what the next norm needs: the sum times the
               norm's weight, and each program's share of the sums of squares.
norm           RMSNorm(h) w = (h w) / rms(h), and a factor of a whole row can be applied after the product as well:
               ``Normed`` carries h w and the shares, and the product that takes it divides its result.
SwiGLU         ``linear_swiglu`` computes gate and up for the same columns.

Sums are taken in a fixed order, and a row's result does not depend on the other rows. Where rounding differs from norm,
product and sum one after the other, there is one rounding less.
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has no Triton; the references serve there
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))

MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Normed:
    """A norm's output that still lacks the division by each row's root mean square; ``squares`` None: it lacks none."""

    scaled: Tensor  # [rows, size], the norm's input times its weight
    squares: Tensor | None  # float32 [shares, MOST_ROWS], sums of squares of the norm's input, in shares
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
    squares = torch.zeros(1, MOST_ROWS, device=x.device)
    squares[0, : len(x)] = hidden.float().square().sum(1)
    return Normed((hidden.float() * gain.float()).to(hidden.dtype), squares, eps)


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    weight,
    bias,  # [out]; read if BIAS
    squares_in,  # read if NORM
    hidden,  # read and written if ADD
    gain,  # read if ADD
    out,
    squares_out,  # written if ADD
    rows,
    eps,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    SHARES: tl.constexpr,
    LANES: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program: ``TILE`` columns of the output, for all rows."""
    row = tl.arange(0, ROWS)
    real = row < rows
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = tl.arange(0, STEP)
    dtype = out.dtype.element_ty
    w_at = weight + column.to(tl.int64)[:, None] * INNER + at[None, :]
    x_at = x + row[None, :] * INNER + at[:, None]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    up = tl.zeros([TILE, ROWS], tl.float32)
    for step in range(0, INNER, STEP):
        xs = tl.load(x_at + step, mask=real[None, :], other=0.0)
        acc = tl.dot(tl.load(w_at + step), xs, acc)
        if GATED:
            up = tl.dot(tl.load(w_at + OUTER * INNER + step), xs, up)
    if NORM:
        share = tl.arange(0, LANES)
        squares = tl.load(squares_in + share[:, None] * ROWS + row[None, :], mask=(share < SHARES)[:, None], other=0.0)
        factor = tl.rsqrt(tl.sum(squares, 0) / INNER + eps)
        acc = acc * factor[None, :]
        up = up * factor[None, :]
    if BIAS:
        acc += tl.load(bias + column).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    out_at = row[None, :] * OUTER + column[:, None]
    if ADD:
        total = (tl.load(hidden + out_at, mask=real[None, :], other=0.0).to(tl.float32) + acc).to(dtype)
        tl.store(hidden + out_at, total, mask=real[None, :])
        wide = total.to(tl.float32)
        tl.store(squares_out + tl.program_id(0) * ROWS + row, tl.sum(wide * wide, 0))
        acc = wide * tl.load(gain + column).to(tl.float32)[:, None]
    tl.store(out + out_at, acc.to(dtype), mask=real[None, :])


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How a product is cut: columns of a program, inputs of an iteration, warps, stages."""

    tile: int
    step: int
    warps: int
    stages: int


def plan_linear(inner: int, outer: int, matrices: int) -> LinearPlan | None:
    """A plan for ``matrices`` products [outer, inner] of one input; None if the sizes are not whole tiles.

    Rows of 512 bytes at a time are what memory serves best; three tiles of them in flight in each of two programs of a
    multiprocessor keep it busy.
    """
    step = next((s for s in (256, 128, 64) if inner % s == 0), 0)
    if outer % 32 or not step:
        return None
    buffers = 3 if matrices == 1 else 2  # of 256 inputs
    return LinearPlan(tile=32, step=step, warps=4, stages=buffers * 256 // step + 1)


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
    plan = plan or plan_linear(inner, outer, 1 + gated)
    assert plan and rows <= MOST_ROWS and x.scaled.is_contiguous() and weight.is_contiguous()
    out = torch.empty((rows, outer), dtype=weight.dtype, device=weight.device)
    programs = outer // plan.tile
    squares = None if hidden is None else torch.empty((programs, MOST_ROWS), dtype=torch.float32, device=weight.device)
    shares = 1 if x.squares is None else len(x.squares)
    with torch.cuda.device_of(weight):
        _few_rows_kernel[(programs,)](
            x.scaled, weight, weight if bias is None else bias, weight if x.squares is None else x.squares,
            weight if hidden is None else hidden, weight if gain is None else gain, out,
            weight if squares is None else squares, rows, x.eps,
            INNER=inner, OUTER=outer, ROWS=MOST_ROWS, TILE=plan.tile, STEP=plan.step, SHARES=shares,
            LANES=triton.next_power_of_2(shares), BIAS=bias is not None, NORM=x.squares is not None, GATED=gated,
            ADD=hidden is not None, num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
    return out, squares


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
