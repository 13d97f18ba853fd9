"""Noise: bit-exact against the published vectors and a scalar Philox, and a function of seed, position, token alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.noise import GumbelCache, gumbel, gumbel_rows, philox4x32

MASK = 0xFFFFFFFF
word = st.integers(0, MASK)
uint64 = st.integers(0, 2**64 - 1)


def hash_words(counter: tuple[int, ...], key: tuple[int, ...], device: str = "cpu") -> list[int]:
    c = [torch.tensor([w], device=device) for w in counter]
    k = [torch.tensor([w], device=device) for w in key]
    return [int(w) for w in philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))]


def scalar_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x32-10 in Python integers, written from the paper's round function."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ((MASK,) * 4, (MASK,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, ...], answer: list[int]) -> None:
    assert hash_words(counter, key) == answer


@settings(deadline=None)
@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_hash_equals_scalar_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert hash_words(counter, key) == scalar_philox(counter, key)


@settings(max_examples=30, deadline=None)
@given(uint64, uint64)
def test_layout_of_key_and_counter(seed: int, position: int) -> None:
    noise = gumbel(seed, position, 11, "cpu")
    for token in range(11):
        counter = (token // 4, 0, position & MASK, position >> 32)
        w = scalar_philox(counter, (seed & MASK, seed >> 32))[token % 4]
        expected = -math.log(-math.log((w + 0.5) / 2**32))
        assert noise[token].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_uniforms_lie_in_the_middle_of_their_steps() -> None:
    """At the top of the range half a step of the uniform shows: 0.5 in a few thousand."""
    noise = gumbel(2, 9, 2**20, "cpu")
    token = int(noise.argmax())
    w = scalar_philox((token // 4, 0, 9, 0), (2, 0))[token % 4]
    assert noise[token].item() == pytest.approx(-math.log(-math.log1p((w + 0.5 - 2**32) / 2**32)), abs=2e-6)
    assert noise[token].item() != pytest.approx(-math.log(-math.log1p((w - 2**32) / 2**32)), abs=2e-6)


def test_a_larger_vocabulary_has_the_same_prefix() -> None:
    whole = gumbel(7, 3, 4099, "cpu")
    for vocab in (1, 2, 3, 4, 5, 63, 64, 1000, 4097):
        assert torch.equal(gumbel(7, 3, vocab, "cpu"), whole[:vocab])


def test_a_batch_equals_its_rows() -> None:
    seeds, positions = [0, 1, 1, 2**64 - 1], [0, 5, 2**32 + 5, 2**64 - 1]
    batch = gumbel_rows(seeds, positions, 1001, "cpu")
    assert batch.dtype == torch.float32
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert torch.equal(batch[i], gumbel(seed, position, 1001, "cpu"))


def test_every_half_of_seed_and_position_matters() -> None:
    rows = gumbel_rows([0, 1, 2**32, 0, 0], [0, 0, 0, 1, 2**32], 64, "cpu")
    assert len({tuple(row.tolist()) for row in rows}) == 5


def test_values_are_finite_at_both_ends_of_the_hash() -> None:
    for w in (0, MASK):
        assert math.isfinite(-math.log(-math.log((w + 0.5) / 2**32)))
    assert gumbel_rows([3] * 20, list(range(20)), 50_000, "cpu").isfinite().all()


def test_moments_are_those_of_the_standard_gumbel_distribution() -> None:
    noise = gumbel_rows([11] * 16, list(range(16)), 65_536, "cpu").double()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert (noise <= 0).double().mean().item() == pytest.approx(math.exp(-1), abs=0.002)


def test_neighbouring_positions_and_tokens_are_uncorrelated() -> None:
    noise = gumbel_rows([11] * 2, [40, 41], 65_536, "cpu").double()
    along_tokens = torch.stack([noise[0, :-1], noise[0, 1:]])
    for pair in (noise, along_tokens):
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 4 / math.sqrt(65_536)


def test_cache_returns_the_noise_and_makes_it_once() -> None:
    cache = GumbelCache(100, "cpu", capacity=4)
    row = cache.row(5, 9)
    assert torch.equal(row, gumbel(5, 9, 100, "cpu"))
    assert cache.row(5, 9) is row


def test_cache_is_bounded_and_drops_the_longest_unused() -> None:
    cache = GumbelCache(10, "cpu", capacity=2)
    first, second = cache.row(1, 0), cache.row(1, 1)
    assert cache.row(1, 0) is first
    cache.row(1, 2)
    assert len(cache) == 2
    assert cache.row(1, 0) is first
    again = cache.row(1, 1)
    assert again is not second
    assert torch.equal(again, second)


def test_more_pairs_than_the_capacity_in_one_call() -> None:
    cache = GumbelCache(10, "cpu", capacity=2)
    pairs = [(1, 0), (1, 1), (2, 0), (1, 0), (3, 3)]
    seeds, positions = [seed for seed, _ in pairs], [position for _, position in pairs]
    cache.row(1, 1)
    assert torch.equal(cache.rows(seeds, positions), gumbel_rows(seeds, positions, 10, "cpu"))
    assert len(cache) == 2


def test_equal_pairs_share_one_row_and_no_pairs_give_no_rows() -> None:
    cache = GumbelCache(10, "cpu")
    shared = cache.rows([1] * 3, [4] * 3)
    assert shared.shape == (3, 10)
    assert shared.data_ptr() == cache.row(1, 4).data_ptr()
    assert cache.rows([], []).shape == (0, 10)


def test_a_missing_row_brings_the_next_positions_with_it() -> None:
    cache = GumbelCache(10, "cpu", capacity=8, ahead=4)
    made = cache.rows([1, 1], [5, 6])
    assert torch.equal(made, gumbel_rows([1, 1], [5, 6], 10, "cpu"))
    assert len(cache) == 5
    for position in range(5, 10):
        assert torch.equal(cache.row(1, position), gumbel(1, position, 10, "cpu"))
    assert len(cache) == 5
    assert torch.equal(cache.row(1, 2**64 - 1), gumbel(1, 2**64 - 1, 10, "cpu"))


def test_what_is_asked_for_survives_what_comes_with_it() -> None:
    cache = GumbelCache(10, "cpu", capacity=2, ahead=4)
    row = cache.row(1, 5)
    assert len(cache) == 2
    assert cache.row(1, 5) is row


def test_a_cached_row_does_not_keep_its_batch_alive() -> None:
    cache = GumbelCache(64, "cpu", capacity=1)
    cache.rows([1] * 8, list(range(8)))
    assert cache.row(1, 7).untyped_storage().nbytes() == 64 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_hash_is_bit_equal_and_noise_within_an_ulp() -> None:
    for counter, key, answer in KNOWN_ANSWERS:
        assert hash_words(counter, key, "cuda") == answer
    seeds, positions = [2**64 - 1 - i for i in range(32)], [2**31 * i for i in range(32)]
    cpu, gpu = gumbel_rows(seeds, positions, 49_152, "cpu"), gumbel_rows(seeds, positions, 49_152, "cuda").cpu()
    differing = (cpu != gpu).sum().item()
    assert differing <= 1e-6 * cpu.numel(), f"{differing} of {cpu.numel()} values differ"
    torch.testing.assert_close(gpu, cpu, rtol=2**-23, atol=2**-23)
