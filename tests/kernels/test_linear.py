"""Products of a few rows and what is folded into them, against float64 and with canaries around what they write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.kernels.device import Gpu
from draftwood.kernels.linear import (
    HOPPER,
    MOST_ROWS,
    LinearPlan,
    Normed,
    linear,
    linear_add,
    linear_add_reference,
    linear_add_triton,
    linear_reference,
    linear_swiglu,
    linear_swiglu_reference,
    linear_swiglu_triton,
    linear_triton,
    plan_linear,
)

CUDA = torch.cuda.is_available()
EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Run:
    """One way to run the three products."""

    linear: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    add: Callable[..., Normed]
    device: str


REFERENCE = Run(linear_reference, linear_swiglu_reference, linear_add_reference, "cpu")
INTERPRETED = Run(linear_triton, linear_swiglu_triton, linear_add_triton, "cpu")
COMPILED = Run(linear, linear_swiglu, linear_add, "cuda")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")]
NO_GPU = pytest.mark.skipif(CUDA, reason="compiled on a machine with a GPU")
CASES = [
    pytest.param(REFERENCE, torch.float32, id="reference-float32"),
    pytest.param(INTERPRETED, torch.float32, id="kernel-float32", marks=NO_GPU),
    pytest.param(INTERPRETED, torch.float16, id="kernel-float16", marks=NO_GPU),
    *[pytest.param(COMPILED, t, id=f"compiled-{str(t)[6:]}", marks=ON_GPU) for t in (torch.float16, torch.bfloat16)],
]
ROWS = [1, 5, 16, 17, 33, MOST_ROWS]


def near(got: Tensor, want: Tensor) -> None:
    """Relative error of the whole, and nothing that is not finite."""
    assert got.isfinite().all()
    error = (got.double() - want).norm() / want.norm()
    assert error < TOLERANCE[got.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize(("run", "dtype"), CASES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inner", "outer"), [(256, 64), (192, 128), (64, 512)])
def test_a_layers_products_equal_norm_product_and_sum(
    run: Run, dtype: torch.dtype, rows: int, inner: int, outer: int
) -> None:
    """attention out -> + hidden -> norm -> SwiGLU -> + hidden -> norm -> next product, in float64."""
    torch.manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape) / shape[-1] ** 0.5).to(run.device, dtype)

    seen, out, down = draw(rows, outer), draw(inner, outer), draw(inner, outer)
    gate_up, after = draw(2 * outer, inner), draw(outer, inner)
    bias, hidden = draw(outer), 3 * draw(rows, inner)
    gains = [1 + draw(inner) for _ in range(2)]
    fenced = torch.full((rows + 2, inner), float("nan"), dtype=dtype, device=run.device)
    fenced[1:-1] = hidden
    inside = fenced[1:-1]

    first = run.add(seen, out, inside, gains[0], EPS)
    active = run.swiglu(first, gate_up)
    second = run.add(active, down, inside, gains[1], EPS)
    got = run.linear(second, after, bias)

    wide = hidden.double() + seen.double() @ out.double().T
    gate, up = (F.rms_norm(wide, (inner,), gains[0].double(), EPS) @ gate_up.double().T).chunk(2, 1)
    near(active, F.silu(gate) * up)
    wide = wide + F.silu(gate) * up @ down.double().T
    near(inside, wide)
    near(got, F.rms_norm(wide, (inner,), gains[1].double(), EPS) @ after.double().T + bias.double())
    assert fenced[0].isnan().all() and fenced[-1].isnan().all(), "rows beyond the last one were written"


@pytest.mark.parametrize(("run", "dtype"), CASES)
def test_a_row_does_not_depend_on_its_neighbours(run: Run, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 256).to(run.device, dtype)
    weight = torch.randn(64, 256).to(run.device, dtype)
    hidden = torch.randn(9, 64).to(run.device, dtype)
    gain = torch.ones(64).to(run.device, dtype)
    several, alone = hidden.clone(), hidden[4:5].clone()
    all_of_them = run.add(x, weight, several, gain, EPS)
    one = run.add(x[4:5].contiguous(), weight, alone, gain, EPS)
    if run is not REFERENCE:  # torch's products of one row and of several differ
        assert torch.equal(several[4:5], alone) and torch.equal(all_of_them.scaled[4:5], one.scaled)
        assert all_of_them.squares is not None and one.squares is not None
        assert torch.equal(all_of_them.squares[:, 4], one.squares[:, 0])


@pytest.mark.parametrize("shared_bytes", [64 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("rows", [1, 17, MOST_ROWS])
@pytest.mark.parametrize(
    "sizes", [(4096, 6144, 1), (4096, 14336, 2), (14336, 4096, 1), (1024, 3072, 2), (576, 960, 1), (128, 512, 2)]
)
def test_plans_cut_whole_tiles(sizes: tuple[int, int, int], rows: int, shared_bytes: int) -> None:
    inner, outer, matrices = sizes
    plan = plan_linear(*sizes, rows, replace(HOPPER, shared_bytes=shared_bytes))
    assert isinstance(plan, LinearPlan) and plan.rows >= rows
    assert outer % plan.tile == 0 and inner % (plan.step * plan.splits) == 0
    if plan.ahead:
        assert inner // plan.splits % plan.ahead == 0
        assert 2 * inner // plan.splits * (plan.tile * matrices + plan.rows) < shared_bytes
    else:
        assert plan.stages * 2 * plan.step * (plan.tile * matrices + plan.rows) <= shared_bytes


def splits_of(*sizes: int) -> int:
    plan = plan_linear(*sizes)
    assert plan is not None
    return plan.splits


def test_an_input_is_cut_where_there_would_be_few_programs() -> None:
    assert splits_of(3072, 1024, 1) == 4
    assert [splits_of(14336, 4096, 1, rows) for rows in (16, 32, 64)] == [1, 2, 2]
    assert [splits_of(4096, 4096, 1, rows) for rows in (16, 32, 64)] == [1, 1, 2]


def ahead_of(sizes: tuple[int, int, int], rows: int, device: Gpu = HOPPER) -> int:
    plan = plan_linear(*sizes, rows, device)
    assert plan is not None
    return plan.ahead


def test_weights_are_loaded_ahead_where_all_programs_fit_the_device() -> None:
    small = [(1024, 4096, 1), (2048, 1024, 1), (1024, 3072, 2), (3072, 1024, 1)]
    large = [(4096, 6144, 1), (4096, 4096, 1), (4096, 14336, 2), (14336, 4096, 1)]
    for rows in (8, 32):
        assert [ahead_of(sizes, rows) for sizes in small] == [256, 256, 256, 256]
        assert [ahead_of(sizes, rows) for sizes in large] == [0, 0, 0, 0]
    for sizes in small:
        assert not ahead_of(sizes, MOST_ROWS) and not ahead_of(sizes, 8, replace(HOPPER, capability=8))
    small_pieces = (576, 960, 1)
    assert ahead_of(small_pieces, 16) == 64 and not ahead_of(small_pieces, 32)


def test_sizes_that_are_no_whole_tiles_have_no_plan() -> None:
    assert plan_linear(100, 64, 1) is None and plan_linear(128, 100, 1) is None
    assert plan_linear(4096, 4096, 1, MOST_ROWS + 1) is None
