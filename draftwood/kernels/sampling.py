"""Sampling: the target's token of every row of logits, and its log-probability, in one pass over each row.

The rule is that of ``draftwood.sampling`` without top-k and top-p. At temperature 0 it is the argmax, lowest id on
ties; else the argmax of (logit - max) / T + g, where g is Gumbel noise keyed by (seed, position): Philox4x32-10 (Salmon
et al., SC 2011) with key = the seed's two halves and counter = (token // 4, 0, position's two halves), word token % 4
of the output, mapped by -log(-log((word + 1/2) / 2^32)) in float64 and rounded to float32. The ids are exactly those
of that arithmetic, but hardly any of it is done:

chunk  A program reads its part of a row once and keeps its maximum and its sum of exponentials (needed anyway, for
       the log-probability). With p a token's term of that sum and v = 1 - (word + 1/2) / 2^32, the token's perturbed
       score is log p - log(-log(1 - v)), at most log(p / v) as -log(1 - v) >= v. The difference of the two floats' bit
       patterns is that logarithm, in units of 2^-23 log 2, up to 0.087 log 2: the *key*. Each lane keeps the quad of
       tokens (one block of the counter) with the largest key, and the largest key of all the others. Only quads kept
       to the end are scored, in float32.
merge  Puts the chunks of a row together. A score in float32 is within half of ``_DOUBT`` of the exact one, so if no
       other token can come closer to the best than that, the best is right. Otherwise (a tie, or two good quads in one
       lane: one row in 4000) the chunks in doubt are read again, and what is good enough scored by the exact rule.

Exponents, scores and ``_DOUBT`` are in units of log 2, relative to the largest logit.

Why ``_DOUBT`` holds. A score that matters is at most 38 below the largest logit, as no noise is above 32.5 or below
-5.1. Its exponent carries four roundings (difference, product, and two in 1 / T * log2 e), and so does the merge's move
of it to the row's maximum: 2 * 38 * 2^-22 = 2e-5, and 3e-6 for the sum. The two logarithms are within 2^-22, absolute
or relative: 1.6e-5 (as -log(1 - v) >= 1/64 where it is a logarithm) and 8e-6. The exact rule's own float32 roundings
are below 8e-6. Together 6e-5.
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types.
# ruff: noqa: PLR0915
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has no Triton; the reference serves there
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))
    tl = SimpleNamespace(constexpr=lambda value: value)

_MASK = 0xFFFFFFFF
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_LOG2E = tl.constexpr(math.log2(math.e))
_NO_TOKEN = tl.constexpr(2**31 - 1)
_DOUBT = tl.constexpr(1.2e-4)
_SLACK = tl.constexpr(2.0**-10)  # of bounds: _DOUBT, and what rounding does to both sides
_REACH = tl.constexpr(-38.0)  # exponents below it cannot win: the best score is above -5.1, all noise below 32.5
_NO_KEY = tl.constexpr(-(2**30))
_KEY_TO_SCORE = tl.constexpr(32.0 + 0.087 - 0.528)  # v counts 2^-32; error of the bit patterns; log2 log2 e


def choose_tokens_reference(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The target's token of each row of logits [rows, columns], and its log-probability.

    temperature [rows], float32 (float64 for float64 logits), 0 is greedy, else not below float32's smallest normal
    number; seed, position int64 [rows], the bits of a uint64; position is the absolute index, in the sequence, of the
    token being chosen. Columns from ``vocab_size`` on are padding and never looked at.

    Returns tokens int64 [rows] and logprob float32 [rows], under softmax(logits / T), T = 1 if greedy. A row that
    holds a NaN or has no finite maximum has token -1 and log-probability NaN.
    """
    wide = logits[:, :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
    noisy = temperature > 0
    divisor = torch.where(noisy, temperature, 1).to(wide.dtype).unsqueeze(1)
    shifted = (wide - wide.amax(dim=-1, keepdim=True)) / divisor
    scores = torch.where(noisy.unsqueeze(1), shifted, wide)
    for row in noisy.nonzero().flatten().tolist():
        scores[row] += _gumbel_reference(seed[row], position[row], scores.shape[1])
    bad = ~scores.amax(dim=-1).isfinite()
    tokens = scores.argmax(dim=-1)
    logprob = shifted.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.masked_fill(bad, -1), logprob.float().masked_fill(bad, math.nan)


def _gumbel_reference(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Noise of one row, float32 [vocab_size]; seed and position are int64 scalars."""
    c0 = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=seed.device)
    c1, c2, c3 = torch.zeros_like(c0), position & _MASK, (position >> 32) & _MASK
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wrap at 64 bits, whose pattern is that of the unsigned product
        c0, c1 = ((right >> 32) & _MASK) ^ c1 ^ k0, right & _MASK
        c2, c3 = ((left >> 32) & _MASK) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    words = torch.stack((c0, c1, c2, c3), dim=1).flatten()[:vocab_size]
    return -(-((words.double() + 0.5) * 2.0**-32).log()).log().float()


@triton.jit
def _philox(block, seed, position):
    """The four uint32 words of the tokens 4 * block to 4 * block + 3; block uint32, seed and position int64 scalars."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = block
    c1 = tl.zeros_like(block)
    c2 = position.to(tl.uint32)
    c3 = (position >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        left = c0.to(tl.uint64) * 0xD2511F53
        right = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = right.to(tl.uint32)
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = left.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _word(column, seed, position):
    """The uint32 words of the tokens ``column``, any block of them."""
    w0, w1, w2, w3 = _philox((column // 4).to(tl.uint32), seed, position)
    low = tl.where(column % 2 == 0, w0, w1)
    high = tl.where(column % 2 == 0, w2, w3)
    return tl.where(column % 4 < 2, low, high)


@triton.jit
def _gumbel(word):
    """Noise as the exact rule has it, float32."""
    uniform = (word.to(tl.float64) + 0.5) * 2.0**-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _rarity(word):
    """v = 1 - (word + 1/2) / 2^32 in (0, 1), float32; small where the noise is large."""
    return (~word).to(tl.float32) * 2.0**-32 + 2.0**-33


@triton.jit
def _score(exponent, word):
    """Perturbed score in float32."""
    v = _rarity(word)
    near = v * (1.0 + v * (0.5 + v * (1.0 / 3.0))) * _LOG2E
    return exponent - tl.log2(tl.where(v < 1.0 / 64.0, near, -tl.log2(1.0 - v)))


@triton.jit
def _key(p, word):
    """Upper bound of a token's score, up to ``_KEY_TO_SCORE``, int32."""
    return p.to(tl.int32, bitcast=True) - (~word).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _max4(a, b, c, d):
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def _first_of(value, a, b, c, d, quad):
    """Lowest token that holds ``value``; a, b, c, d belong to the tokens 0, 1, 2, 3 of each quad."""
    at = tl.where(d == value, 4 * quad + 3, _NO_TOKEN)
    at = tl.where(c == value, 4 * quad + 2, at)
    at = tl.where(b == value, 4 * quad + 1, at)
    return tl.min(tl.where(a == value, 4 * quad, at))


@triton.jit
def _best_two(a, b, c, d, quad):
    """Largest value, the lowest token that holds it, and the largest value of the other tokens."""
    best = tl.max(_max4(a, b, c, d))
    token = _first_of(best, a, b, c, d, quad)
    a = tl.where(4 * quad == token, -float("inf"), a)
    b = tl.where(4 * quad + 1 == token, -float("inf"), b)
    c = tl.where(4 * quad + 2 == token, -float("inf"), c)
    d = tl.where(4 * quad + 3 == token, -float("inf"), d)
    return best, token, tl.max(_max4(a, b, c, d))


@triton.jit
def _load_tile(row, first, end, columns, TILE: tl.constexpr):
    """Logits of the tile at ``first``; nothing is read if it lies behind ``end``."""
    # Loads of one quad a thread, also of 16 bits: wider ones put two quads side by side, in a layout that the counters
    # would have to be brought to through shared memory.
    column = tl.max_contiguous(first + tl.arange(0, TILE), 4)
    return tl.load(row + column, mask=column < tl.where(first < end, columns, 0), other=-float("inf"))


@triton.jit
def _quads(x, first, vocab_size, QUADS: tl.constexpr):
    """A tile as float32, the four tokens of each quad apart; -inf from ``vocab_size`` on."""
    if first + 4 * QUADS > vocab_size:
        x = tl.where(first + tl.arange(0, 4 * QUADS) < vocab_size, x, -float("inf"))
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [QUADS, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _exponent(row, token, vocab_size, base, scale):
    x = tl.load(row + token, mask=token < vocab_size, other=-float("inf"))
    return (x.to(tl.float32) - base) * scale


@triton.jit
def _score_kept(row, keys, quads, second, vocab_size, base, scale, seed, position, LANES: tl.constexpr):
    """Scores one quad in every four lanes: best score, its token, and a bound on the score of any other token."""
    packed = tl.reshape(keys.to(tl.int64) * 4294967296 + quads, [4, LANES])
    top = tl.max(packed, axis=0)
    rest = tl.max(tl.where(packed == top[None, :], tl.full([4, LANES], -(2**62), tl.int64), packed))
    second = tl.maximum(tl.max(second), (rest >> 32).to(tl.int32))
    quad = top.to(tl.int32)
    w0, w1, w2, w3 = _philox(quad.to(tl.uint32), seed, position)
    best, token, other = _best_two(
        _score(_exponent(row, 4 * quad, vocab_size, base, scale), w0),
        _score(_exponent(row, 4 * quad + 1, vocab_size, base, scale), w1),
        _score(_exponent(row, 4 * quad + 2, vocab_size, base, scale), w2),
        _score(_exponent(row, 4 * quad + 3, vocab_size, base, scale), w3),
        quad,
    )
    return best, token, tl.maximum(other, second.to(tl.float32) * 2.0**-23 + _KEY_TO_SCORE)


@triton.jit
def _chunk_kernel(
    logits,
    stride,
    columns,
    vocab_size,
    temperature,
    seed,
    position,
    floats,
    tokens,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: a chunk of a row. Leaves top, total, best and second in floats [4, rows, CHUNKS]."""
    QUADS: tl.constexpr = TILE // 4
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    heat = tl.load(temperature + row)
    noisy = heat > 0
    scale = 1.0 / tl.where(noisy, tl.maximum(heat, _TINY), 1.0) * _LOG2E
    seed = tl.load(seed + row)
    position = tl.load(position + row)
    at = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, QUADS)
    top = -float("inf")
    token = -1
    total = tl.zeros([QUADS], tl.float32)
    keys = tl.full([QUADS], _NO_KEY, tl.int32)
    second = tl.full([QUADS], _NO_KEY, tl.int32)
    quads = lane + chunk * CHUNK // 4
    end = tl.minimum((chunk + 1) * CHUNK, vocab_size)
    ahead = _load_tile(at, chunk * CHUNK, end, columns, TILE)
    for first in range(chunk * CHUNK, end, TILE):
        quad = first // 4 + lane
        x0, x1, x2, x3 = _quads(ahead, first, vocab_size, QUADS)
        ahead = _load_tile(at, first + TILE, end, columns, TILE)
        tile_top = tl.max(_max4(x0, x1, x2, x3))
        if tile_top > top:
            fall = (top - tile_top) * scale
            total *= tl.exp2(fall)
            drop = (tl.maximum(fall, -64.0) * 2.0**23).to(tl.int32)
            keys = tl.maximum(keys + drop, _NO_KEY)
            second = tl.maximum(second + drop, _NO_KEY)
            top = tile_top
            if heat <= 0:
                token = _first_of(top, x0, x1, x2, x3, quad)
        base = tl.where(top == -float("inf"), 0.0, top)  # -inf - -inf would be NaN
        p0 = tl.exp2((x0 - base) * scale)
        p1 = tl.exp2((x1 - base) * scale)
        p2 = tl.exp2((x2 - base) * scale)
        p3 = tl.exp2((x3 - base) * scale)
        total += (p0 + p1) + (p2 + p3)
        if noisy & ((tile_top - base) * scale >= _REACH):
            w0, w1, w2, w3 = _philox(quad.to(tl.uint32), seed, position)
            key = _max4(_key(p0, w0), _key(p1, w1), _key(p2, w2), _key(p3, w3))
            quads = tl.where(key > keys, quad, quads)
            second = tl.maximum(second, tl.minimum(keys, key))
            keys = tl.maximum(keys, key)
    best = -float("inf")
    other = -float("inf")
    if noisy & (top > -float("inf")):
        best, token, other = _score_kept(
            at, keys, quads, second, vocab_size, top, scale, seed, position, LANES=QUADS // 4
        )
    slot = row * CHUNKS + chunk
    plane = tl.num_programs(1) * CHUNKS
    tl.store(tokens + slot, token)
    tl.store(floats + slot, top)
    tl.store(floats + plane + slot, tl.sum(total))
    tl.store(floats + 2 * plane + slot, best)
    tl.store(floats + 3 * plane + slot, other)


@triton.jit
def _exact_token(row, vocab_size, heat, seed, position, top, best, floats, plane, CHUNK, CHUNKS, TILE: tl.constexpr):
    """Argmax of the exact rule over the chunks that may hold it, lowest id on ties; ``floats`` are the row's."""
    scale = 1.0 / heat * _LOG2E
    reach = tl.exp2(-best + _SLACK)
    exact = -float("inf")
    token = -1
    for chunk in range(CHUNKS):
        bound = tl.maximum(tl.load(floats + 2 * plane + chunk), tl.load(floats + 3 * plane + chunk))
        if bound + (tl.load(floats + chunk) - top) * scale >= best - _DOUBT:
            for first in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab_size), TILE):
                column = first + tl.arange(0, TILE)
                x = tl.load(row + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
                word = _word(column, seed, position)
                if tl.max(tl.exp2((x - top) * scale) * reach - _rarity(word)) >= 0:
                    score = tl.div_rn(x - top, tl.zeros_like(x) + heat) + _gumbel(word)
                    tile_best = tl.max(score)
                    if tile_best > exact:
                        token = tl.min(tl.where(score == tile_best, column, _NO_TOKEN))
                        exact = tile_best
    return token


@triton.jit
def _merge_kernel(
    logits,
    stride,
    vocab_size,
    temperature,
    seed,
    position,
    floats,
    tokens,
    out_token,
    out_logprob,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: a row, from its chunks."""
    row = tl.program_id(0)
    plane = tl.num_programs(0) * CHUNKS
    lane = tl.arange(0, LANES)
    slot = row * CHUNKS + lane
    real = lane < CHUNKS
    heat = tl.load(temperature + row)
    noisy = heat > 0
    heat = tl.where(noisy, tl.maximum(heat, _TINY), 1.0)
    at = logits + row.to(tl.int64) * stride
    candidates = tl.load(tokens + slot, mask=real, other=-1)
    tops = tl.load(floats + slot, mask=real, other=-float("inf"))
    totals = tl.load(floats + plane + slot, mask=real, other=0.0)
    bests = tl.load(floats + 2 * plane + slot, mask=real, other=-float("inf"))
    others = tl.load(floats + 3 * plane + slot, mask=real, other=-float("inf"))
    top = tl.max(tops)
    base = tl.where(top == -float("inf"), 0.0, top)
    fall = (tops - base) * (1.0 / heat * _LOG2E)
    total = tl.sum(totals * tl.exp2(fall))  # NaN if any logit is
    good = (top > -float("inf")) & (top < float("inf")) & (total >= 0)
    token = tl.min(tl.where((tops == top) & (candidates >= 0), candidates, _NO_TOKEN))
    if noisy & good:
        bests += fall
        best = tl.max(bests)
        token = tl.min(tl.where(bests == best, candidates, _NO_TOKEN))
        rest = tl.maximum(tl.max(others + fall), tl.max(tl.where(candidates == token, -float("inf"), bests)))
        if rest >= best - _DOUBT:
            key = tl.load(seed + row)
            place = tl.load(position + row)
            chunks = floats + row * CHUNKS
            token = _exact_token(at, vocab_size, heat, key, place, top, best, chunks, plane, CHUNK, CHUNKS, TILE)
    chosen = tl.load(at + token, mask=good, other=0.0).to(tl.float32)
    logprob = (chosen - base) / heat - tl.log(total)
    tl.store(out_token + row, tl.where(good, token, -1).to(tl.int64))
    tl.store(out_logprob + row, tl.where(good, logprob, float("nan")))


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How rows are cut; a function of shapes alone, so that a captured graph stays right."""

    tile: int  # tokens that a program handles at a time
    chunk: int  # tokens of a program, a multiple of the tile
    chunks: int  # programs a row
    warps: int

    @classmethod
    def of(cls, rows: int, vocab_size: int, tile: int = 2048, programs: int = 528, warps: int = 4) -> SamplingPlan:
        """At most ``programs`` in all, if the rows allow it: four a multiprocessor of an H200 run there at once."""
        tiles = -(-vocab_size // tile)
        chunk = -(-tiles // min(tiles, max(1, programs // max(1, rows))))
        return cls(tile, chunk * tile, -(-tiles // chunk), warps)


def choose_tokens_triton(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    vocab_size: int,
    plan: SamplingPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``choose_tokens_reference`` for logits of at most 32 bits, in two launches and without synchronisation."""
    rows, columns = logits.shape
    assert logits.stride(1) == 1 and vocab_size <= columns and logits.element_size() <= 4
    plan = plan or SamplingPlan.of(rows, vocab_size)
    out_token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    out_logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    floats = torch.empty(4, rows, plan.chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, plan.chunks, dtype=torch.int32, device=logits.device)
    if not rows:
        return out_token, out_logprob
    with torch.cuda.device_of(logits):
        _chunk_kernel[plan.chunks, rows](
            logits, logits.stride(0), columns, vocab_size, temperature, seed, position, floats, tokens,
            CHUNK=plan.chunk, CHUNKS=plan.chunks, TILE=plan.tile, num_warps=plan.warps,
        )  # fmt: skip
        # The exact rule rounds product and sum apart, so they must not be fused.
        _merge_kernel[rows,](
            logits, logits.stride(0), vocab_size, temperature, seed, position, floats, tokens, out_token, out_logprob,
            CHUNK=plan.chunk, CHUNKS=plan.chunks, LANES=triton.next_power_of_2(plan.chunks), TILE=1024, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out_token, out_logprob


def choose_tokens(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The target's tokens where the logits live: the kernel on CUDA, the reference elsewhere and for float64."""
    choose = choose_tokens_triton if logits.is_cuda and logits.element_size() <= 4 else choose_tokens_reference
    return choose(logits, temperature, seed, position, vocab_size)
