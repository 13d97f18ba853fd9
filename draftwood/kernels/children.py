"""A draft's children of every row of logits, its likeliest tokens, with log-probabilities, in one pass over each row.

chunk  A program reads its part of a row once and leaves its maximum, its sum of exponentials and its ``BRANCH`` largest
       tokens, lowest id on ties.
merge  A program a row picks the largest among those of all chunks.
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has no Triton; the reference serves there
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))
    tl = SimpleNamespace(constexpr=lambda value: value)

_CHUNK = 4096
_NO_TOKEN = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def top_children_reference(logits: Tensor, branch: int) -> tuple[Tensor, Tensor]:
    """The ``branch`` likeliest tokens of each row of logits [rows, vocab]: int64, and log-probabilities, float32.

    Both [rows, branch], best first, lowest id on ties. Where there is none (rows with NaN or without a finite maximum,
    fewer possible tokens than ``branch``) the token is -1 and the value float32's lowest.
    """
    wide = logits.float()
    order = wide.sort(dim=-1, descending=True, stable=True).indices[:, :branch]
    scores = wide.log_softmax(dim=-1).gather(1, order).clamp(max=0.0)
    missing = torch.nn.functional.pad(~scores.isfinite(), (0, branch - order.shape[1]), value=True)
    tokens, scores = (torch.nn.functional.pad(x, (0, branch - order.shape[1])) for x in (order, scores))
    return tokens.masked_fill(missing, -1), scores.masked_fill(missing, torch.finfo(torch.float32).min)


@triton.jit
def _chunk_kernel(
    logits, stride, vocab_size, totals, values, tokens, BRANCH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """One program: a chunk of a row. totals [2, rows, CHUNKS]: maximum, sum; the others [rows, CHUNKS, BRANCH]."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab_size, other=-float("inf"))
    x = x.to(tl.float32)
    slot = row * CHUNKS + chunk
    best = tl.max(x)
    base = tl.where(best == -float("inf"), 0.0, best)  # -inf - -inf would be NaN
    tl.store(totals + slot, best)
    tl.store(totals + tl.num_programs(1) * CHUNKS + slot, tl.sum(tl.exp(x - base)))
    for k in tl.static_range(BRANCH):
        token = tl.min(tl.where(x == best, column, _NO_TOKEN))
        tl.store(values + slot * BRANCH + k, best)
        tl.store(tokens + slot * BRANCH + k, token)
        x = tl.where(column == token, -float("inf"), x)
        best = tl.max(x)


@triton.jit
def _merge_kernel(
    totals, values, tokens, out_token, out_score,
    BRANCH: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One program: a row, from its chunks."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    tops = tl.load(totals + row * CHUNKS + lane, mask=lane < CHUNKS, other=-float("inf"))
    sums = tl.load(totals + (tl.num_programs(0) + row) * CHUNKS + lane, mask=lane < CHUNKS, other=0.0)
    top = tl.max(tops)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(sums * tl.exp(tops - base))  # NaN if any logit is
    good = (top > -float("inf")) & (top < float("inf")) & (total >= 0)
    log_total = tl.log(total)
    slot = tl.arange(0, SLOTS)
    real = slot < CHUNKS * BRANCH
    x = tl.load(values + row * CHUNKS * BRANCH + slot, mask=real, other=-float("inf"))
    token = tl.load(tokens + row * CHUNKS * BRANCH + slot, mask=real, other=_NO_TOKEN)
    for k in tl.static_range(BRANCH):
        best = tl.max(x)
        first = tl.min(tl.where(x == best, token, _NO_TOKEN))
        there = good & (best > -float("inf"))
        score = tl.minimum(best - base - log_total, 0.0)
        tl.store(out_token + row * BRANCH + k, tl.where(there, first, -1).to(tl.int64))
        tl.store(out_score + row * BRANCH + k, tl.where(there, score, _LOWEST))
        x = tl.where(token == first, -float("inf"), x)


def top_children_triton(logits: Tensor, branch: int) -> tuple[Tensor, Tensor]:
    """As the reference, for logits of at most 32 bits, in two launches and without synchronisation."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and logits.element_size() <= 4
    chunks = -(-vocab_size // _CHUNK)
    out_token = torch.empty(rows, branch, dtype=torch.int64, device=logits.device)
    out_score = torch.empty(rows, branch, dtype=torch.float32, device=logits.device)
    totals = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    values = torch.empty(rows, chunks, branch, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, chunks, branch, dtype=torch.int32, device=logits.device)
    if not rows:
        return out_token, out_score
    with torch.cuda.device_of(logits):
        _chunk_kernel[chunks, rows](
            logits, logits.stride(0), vocab_size, totals, values, tokens,
            BRANCH=branch, CHUNK=_CHUNK, CHUNKS=chunks, num_warps=4,
        )  # fmt: skip
        _merge_kernel[rows,](
            totals, values, tokens, out_token, out_score, BRANCH=branch, CHUNKS=chunks,
            LANES=triton.next_power_of_2(chunks), SLOTS=triton.next_power_of_2(chunks * branch), num_warps=1,
        )  # fmt: skip
    return out_token, out_score
