"""The sampling kernel and its reference against ``draftwood.sampling`` on the same device, id for id.

On a machine without a GPU the kernel runs in Triton's interpreter (see ``tests/conftest.py``); with one it is compiled.
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftwood.kernels.sampling import (
    SamplingPlan,
    _gumbel,
    _word,
    choose_tokens,
    choose_tokens_reference,
    choose_tokens_triton,
)
from draftwood.noise import GumbelCache, gumbel, gumbel_rows
from draftwood.parameters import SamplingParams
from draftwood.sampling import target_tokens

Choose = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")]
interpreted = pytest.mark.skipif(CUDA, reason="compiled on a machine with a GPU")


def in_small_chunks(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The kernel with chunks of two tiles of 256 tokens, so that a small vocabulary has many."""
    plan = SamplingPlan(tile=256, chunk=512, chunks=-(-vocab_size // 512), warps=4)
    return choose_tokens_triton(logits, temperature, seed, position, vocab_size, plan)


CHOOSE = [
    pytest.param(choose_tokens_reference, "cpu", id="reference"),
    pytest.param(in_small_chunks, "cpu", id="kernel", marks=interpreted),
    pytest.param(in_small_chunks, "cuda", id="compiled", marks=gpu),
    pytest.param(choose_tokens, "cuda", id="dispatched", marks=gpu),
]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy's, of wrapping and infinite values
TEMPERATURES = [0.0, 1.0, 0.7, 0.01, 2.0, 10.0, 3e-38, 0.3]


class Rows:
    """Logits with a temperature, a seed and a position each; vocabulary columns are followed by poisoned padding."""

    def __init__(self, logits: Tensor, temperature: list[float], device: str, padding: int = 13) -> None:
        count = len(logits)
        generator = torch.Generator().manual_seed(count)
        poison = torch.full((count, padding), math.inf, dtype=logits.dtype)
        poison[:, ::2] = math.nan
        self.vocab = logits.shape[1]
        self.logits = torch.cat([logits.cpu(), poison], dim=1).to(device)
        self.temperature = torch.tensor([temperature[i % len(temperature)] for i in range(count)], device=device)
        self.seed = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(device)
        self.position = torch.randint(0, 2**40, (count,), generator=generator).to(device)

    def run(self, choose: Choose) -> tuple[Tensor, Tensor]:
        return choose(self.logits, self.temperature, self.seed, self.position, self.vocab)

    def expected(self) -> Tensor:
        noise = GumbelCache(self.vocab, self.logits.device)
        tokens = []
        for row in range(len(self.logits)):
            params = SamplingParams(self.temperature[row].item(), seed=int(self.seed[row]) % 2**64)
            at = [int(self.position[row])]
            tokens.append(target_tokens(self.logits[row : row + 1], params, at, noise, vocab_size=self.vocab)[0])
        return torch.cat(tokens)

    def noise(self) -> Tensor:
        seeds = [seed % 2**64 for seed in self.seed.tolist()]
        return gumbel_rows(seeds, self.position.tolist(), self.vocab, self.logits.device)

    def check(self, choose: Choose) -> None:
        tokens, logprob = self.run(choose)
        assert torch.equal(tokens, self.expected())
        divisor = torch.where(self.temperature > 0, self.temperature, 1).double().unsqueeze(1)
        wide = self.logits[:, : self.vocab].double()
        exact = ((wide - wide.amax(1, keepdim=True)) / divisor).log_softmax(1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprob.double(), exact, rtol=1e-5, atol=1e-5)


def gaussian(rows: int, vocab: int, spread: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(dtype)


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
@pytest.mark.parametrize("vocab", [1, 3, 50, 513, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ids_and_log_probabilities(choose: Choose, device: str, vocab: int, dtype: torch.dtype) -> None:
    Rows(gaussian(len(TEMPERATURES), vocab, dtype=dtype), TEMPERATURES, device).check(choose)


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
@pytest.mark.parametrize("temperature", [1.0, 0.25, 0.7])
@pytest.mark.parametrize("jitter", [0.0, 1e-6, 1e-4, 0.02])
def test_rows_in_which_every_token_nearly_wins(choose: Choose, device: str, temperature: float, jitter: float) -> None:
    """Logits that cancel the noise: float32 roundings decide, or the wrong quads are kept."""
    rows = Rows(torch.zeros(6, 1100), [temperature], device)
    rows.logits[:, : rows.vocab] = (gaussian(6, 1100, jitter).to(device) - rows.noise()) * temperature
    rows.check(choose)


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
@pytest.mark.parametrize("apart", [1, 4, 64, 256, 512], ids="{} columns apart".format)
@pytest.mark.parametrize("jitter", [0.0, 0.02])
def test_two_tokens_that_may_win(choose: Choose, device: str, apart: int, jitter: float) -> None:
    """In one quad, in two, in lanes that are folded together, in one lane of two tiles, in two chunks."""
    rows = Rows(torch.full((24, 1100), -200.0), [1.0], device)
    row = torch.arange(24, device=device)
    first = 4 * torch.randint(0, 16, (24,), generator=torch.Generator().manual_seed(apart)).to(device)
    noise = rows.noise()
    rows.logits[row, first] = 0
    rows.logits[row, first + apart] = noise[row, first] - noise[row, first + apart]
    rows.logits[row, first + apart] += gaussian(24, 1, jitter).to(device)[:, 0]
    rows.check(choose)


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
def test_noise_wins_from_far_below_the_largest_logit(choose: Choose, device: str) -> None:
    places = gumbel_rows([7] * 600, range(600), 1024, device)
    height, position = places.amax(dim=1).topk(8)  # 10 and more above the usual
    rows = Rows(torch.full((8, 1024), -200.0), [1.0], device)
    rows.seed[:], rows.position[:] = 7, position
    row, winner = torch.arange(8, device=device), places[position].argmax(dim=1)
    favourite = winner ^ 256  # in the other tile of the chunk
    rows.logits[row, favourite] = 0
    rows.logits[row, winner] = places[position, favourite] - height + 1e-3
    rows.check(choose)


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
def test_ties_go_to_the_lowest_id(choose: Choose, device: str) -> None:
    logits = gaussian(8, 1500).round().clamp(max=4)
    logits[3] = 0.0
    logits[3, 1::2] = -0.0
    Rows(logits, [0.0], device).check(choose)


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
@pytest.mark.parametrize("rising", [True, False])
def test_the_maximum_moves_in_every_tile(choose: Choose, device: str, rising: bool) -> None:
    slope = torch.arange(1500.0) / 100
    logits = gaussian(8, 1500, 0.5) + (slope if rising else -slope)
    Rows(logits, TEMPERATURES, device).check(choose)


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
def test_peaked_rows_and_excluded_tokens(choose: Choose, device: str) -> None:
    logits = gaussian(8, 1500)
    logits[:, 700] += 25
    logits[:4, :600] = -math.inf  # a whole chunk and part of the next
    logits[4:, 1:] = -math.inf
    Rows(logits, [0.0, 1.0, 0.3, 5.0], device).check(choose)


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_a_token(choose: Choose, device: str, temperature: float) -> None:
    """Bug kind 35."""
    logits = gaussian(7, 1500)
    logits[0] = math.nan
    logits[1, 3] = math.nan
    logits[2, 1499] = math.nan
    logits[3] = -math.inf
    logits[4, 900] = math.inf
    logits[5, 512:1024] = math.nan  # nothing else in a chunk
    rows = Rows(logits, [temperature], device)
    tokens, logprob = rows.run(choose)
    assert tokens[:6].tolist() == [-1] * 6
    assert logprob[:6].isnan().all()
    assert tokens[6] == rows.expected()[6] != -1


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
def test_rows_may_lie_apart(choose: Choose, device: str) -> None:
    rows = Rows(gaussian(8, 601), TEMPERATURES, device)
    apart = torch.full((16, rows.logits.shape[1]), math.nan, device=device)
    apart[::2] = rows.logits
    rows.logits = apart[::2]
    rows.check(choose)


@pytest.mark.parametrize(("choose", "device"), CHOOSE)
def test_no_rows(choose: Choose, device: str) -> None:
    tokens, logprob = Rows(torch.empty(0, 50), TEMPERATURES, device).run(choose)
    assert tokens.shape == logprob.shape == (0,)


def test_float64_logits_are_compared_in_float64() -> None:
    logits = torch.zeros(2, 40, dtype=torch.float64)
    logits[:, 17] = 1e-12
    rows = Rows(logits, [0.0, 0.7], "cpu")
    rows.temperature = rows.temperature.double()
    assert torch.equal(rows.run(choose_tokens)[0], rows.expected())
    assert rows.run(choose_tokens)[0][0] == 17


@triton.jit
def _noise_kernel(seed, position, out, TOKENS: tl.constexpr):
    column = tl.arange(0, TOKENS)
    tl.store(out + column, _gumbel(_word(column, tl.load(seed), tl.load(position))))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 77, 2**32 + 5, 2**63 + 9])
def test_noise_is_the_shared_noise(seed: int, position: int) -> None:
    out = torch.empty(1024, device=DEVICE)
    signed = [torch.tensor([(n + 2**63) % 2**64 - 2**63], device=DEVICE) for n in (seed, position)]
    _noise_kernel[1,](*signed, out, TOKENS=1024)
    assert torch.equal(out, gumbel(seed, position, 1024, DEVICE))


@given(rows=st.integers(1, 300), vocab=st.integers(1, 300_000))
def test_chunks_cover_the_vocabulary_without_empty_ones(rows: int, vocab: int) -> None:
    plan = SamplingPlan.of(rows, vocab)
    assert plan.chunk % plan.tile == 0
    assert (plan.chunks - 1) * plan.chunk < vocab <= plan.chunks * plan.chunk
    assert plan.chunks * rows <= max(528, rows)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_many_rows_of_a_large_vocabulary_compiled(dtype: torch.dtype, spread: float) -> None:
    rows = Rows(gaussian(512, 128_256, spread, dtype), [1.0, 0.0, 0.7, 1.3], "cuda", padding=16)
    assert torch.equal(rows.run(choose_tokens)[0], rows.expected())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
def test_a_graph_follows_its_inputs() -> None:
    rows, fresh = (Rows(gaussian(8, vocab)[:, :3000], TEMPERATURES, "cuda") for vocab in (3000, 3001))
    run = partial(rows.run, choose_tokens)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = run()
    rows.logits.copy_(fresh.logits)
    rows.temperature.copy_(fresh.temperature.flip(0))
    rows.seed.copy_(fresh.seed + 1)
    graph.replay()
    assert torch.equal(tokens, rows.expected())
