"""What one tree-attention forward is told (``AttentionBatch``), and the attention itself in plain torch.

The words (row, slot, context, tail, base, words) are defined in ``tree_attention.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """What one forward needs to know about its rows. All tensors live on the device of the cache."""

    row_start: Tensor  # int32 [requests + 1]
    context: Tensor  # int32 [requests], tokens
    keys: Tensor  # int32 [requests], tokens: context and tail together
    words: Tensor  # int32 [rows, words], mask bits from `base` on
    block_table: Tensor  # int32 [requests, pages], page ids; at least one column more than any request uses
    position: Tensor  # int32 [rows], position of the row's token
    tail_position: Tensor  # int32 [requests, 32 * words], position of the token in slot base + j
    page_id: Tensor  # int64 [rows], page that the row's key and value are written to
    page_offset: Tensor  # int64 [rows], offset in that page

    @cached_property
    def host(self) -> HostLists:
        """The per-request numbers as Python lists; for the reference only, as it synchronises."""
        return HostLists(self.row_start.tolist(), self.context.tolist(), self.keys.tolist())

    @cached_property
    def reference_plans(self) -> dict[tuple[Blocks, int, int, torch.dtype], list[ReferenceGroup]]:
        """Plans of the reference, made once a forward and shared by all layers of the same geometry."""
        return {}


@dataclass(frozen=True)
class HostLists:
    row_start: list[int]
    context: list[int]
    keys: list[int]


@dataclass(frozen=True)
class Blocks:
    """How the (page, head) blocks of a cache [pages, kv_heads, PAGE, head_dim] lie: by pages, or by heads."""

    pages: int
    kv_heads: int
    page: int
    by_head: bool

    @staticmethod
    def of(cache: Tensor) -> Blocks:
        pages, kv_heads, page, _ = cache.shape
        return Blocks(pages, kv_heads, page, kv_heads > 1 and cache.stride(1) > cache.stride(0))

    def places(self, table: Tensor) -> Tensor:
        """Places of the blocks of pages [requests, pages], int64 [requests * kv_heads * pages]."""
        heads, table = torch.arange(self.kv_heads, device=table.device).view(1, -1, 1), table.unsqueeze(1)
        places = heads * self.pages + table if self.by_head else table * self.kv_heads + heads
        return places.flatten()

    def reads_in_place(self, pages: Tensor) -> bool:
        """Whether pages [pages] are neighbours, in order, and each head's lie side by side."""
        return (self.by_head or self.kv_heads == 1) and bool((pages[1:] == pages[:-1] + 1).all())


@dataclass(frozen=True)
class ReferenceGroup:
    """Requests that the reference computes together: about as many pages each, all padded to the longest."""

    requests: int
    whole: bool  # the group is the batch: all its rows, in order
    rows: Tensor  # int64 [requests * n], row of the batch; padding repeats the request's first row
    real: Tensor | None  # int64, places in `rows` that are no padding; None: all
    blocks: Tensor  # int64 [requests * kv_heads * pages], (page, head) blocks of the cache
    first: int | None  # the only request's first page, if all that follow are its neighbours and are read in place
    keys: int  # keys of the longest request
    stale: list[tuple[int, int]]  # requests of fewer keys than the longest, and how many keys they have
    mask: Tensor | None  # additive [requests, 1, group * n, keys]; None: every row sees every key


MOST_PADDED_ROWS = 32
"""Requests with more rows (prefill) are computed one by one."""

LEAST_RUN = 8
"""So are requests with at least so many pages, all neighbours: their keys and values need not be gathered."""


def tree_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Plain torch tree attention, a few requests of about the same length at a time.

    query [rows, q_heads, head_dim]; key_cache, value_cache [pages, kv_heads, PAGE, head_dim]; ``scale`` multiplies
    the scores; ``window`` > 0 lets a row see keys at positions > its own - window only; ``softcap`` > 0 squashes
    scores to softcap * tanh(score / softcap); ``sinks`` [q_heads] are logits that take part in the softmax and carry
    no value. A cache in float8_e4m3fn holds keys / ``key_scale`` and values / ``value_scale``.
    Returns [rows, q_heads, head_dim] in the dtype of ``query``.
    """
    _, q_heads, head_dim = query.shape
    kv_heads = key_cache.shape[1]
    heads = q_heads // kv_heads
    key = (Blocks.of(key_cache), heads, window, query.dtype)
    if key not in batch.reference_plans:
        batch.reference_plans[key] = _plan_groups(batch, *key)
    out: Tensor | None = None
    for group in batch.reference_plans[key]:
        k = _gather(key_cache, group, query.dtype, key_scale)
        v = _gather(value_cache, group, query.dtype, value_scale)
        picked = query if group.whole else query.index_select(0, group.rows)
        q = picked.view(group.requests, -1, kv_heads, heads, head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(group.requests, kv_heads, -1, head_dim)
        if softcap or sinks is not None:
            o = _explicit(q, k, v, group.mask, scale, softcap, sinks)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
        o = o.view(group.requests, kv_heads, heads, -1, head_dim).permute(0, 3, 1, 2, 4).reshape(-1, q_heads, head_dim)
        if group.whole:
            return o
        if out is None:
            out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        if group.real is None:
            out.index_copy_(0, group.rows, o)
        else:
            out.index_copy_(0, group.rows[group.real], o[group.real])
    return torch.zeros_like(query) if out is None else out


def _gather(cache: Tensor, group: ReferenceGroup, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values [requests, kv_heads, keys, head_dim]: in place, or by one index_select of whole blocks."""
    pages, kv_heads, page, head_dim = cache.shape
    narrow = cache.element_size() == 1
    raw = cache.view(torch.uint8) if narrow else cache
    raw = raw if raw.is_contiguous() else raw.transpose(0, 1)
    if group.first is not None:
        begin = group.first * page
        picked = raw.view(kv_heads, pages * page, head_dim)[None, :, begin : begin + group.keys]
    else:
        picked = raw.view(pages * kv_heads, -1).index_select(0, group.blocks)
        picked = picked.view(group.requests, kv_heads, -1, head_dim)[:, :, : group.keys]
    if narrow:
        picked = (picked.view(cache.dtype).float() * scale).to(dtype)
    for request, keys in group.stale:  # what other sessions left there may not be finite, and 0 * NaN is NaN
        picked[request, :, keys:].zero_()
    return picked


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention over q [requests, kv_heads, group * n, head_dim] with a soft cap or sinks."""
    scores = (q @ k.transpose(2, 3)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        each = scores.shape[2] * k.shape[1] // len(sinks)
        sink = sinks.to(scores.dtype).view(1, k.shape[1], -1, 1).expand(len(scores), -1, -1, each)
        scores = torch.cat([scores, sink.reshape(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return weights[..., : k.shape[2]] @ v


def _plan_groups(
    batch: AttentionBatch, lie: Blocks, heads: int, window: int, dtype: torch.dtype
) -> list[ReferenceGroup]:
    host = batch.host
    counts = [end - begin for begin, end in zip(host.row_start, host.row_start[1:], strict=False)]
    alike: dict[tuple[int, int], list[int]] = {}
    for r, n in enumerate(counts):
        if n:
            pages = -(-host.keys[r] // lie.page)
            in_place = pages >= LEAST_RUN and lie.reads_in_place(batch.block_table[r, :pages])
            alone = n > MOST_PADDED_ROWS or in_place
            alike.setdefault(((pages - 1).bit_length(), r if alone else -1), []).append(r)
    return [_plan_group(batch, members, lie, heads, window, dtype) for members in alike.values()]


def _plan_group(
    batch: AttentionBatch, members: list[int], lie: Blocks, heads: int, window: int, dtype: torch.dtype
) -> ReferenceGroup:
    host, device, page = batch.host, batch.words.device, lie.page
    counts = [host.row_start[r + 1] - host.row_start[r] for r in members]
    lengths = [host.keys[r] for r in members]
    n, keys = max(counts), max(lengths)
    places = [
        host.row_start[r] + (i if i < count else 0) for r, count in zip(members, counts, strict=True) for i in range(n)
    ]
    padded, rows = min(counts) < n, torch.tensor(places, device=device)
    real = torch.tensor([k for k in range(len(places)) if k % n < counts[k // n]], device=device) if padded else None
    held = torch.tensor([-(-length // page) for length in lengths], device=device).unsqueeze(1)
    table = batch.block_table[members, : -(-keys // page)].long()
    # A shorter request has no such page: its first one stands in, and `stale` hides it.
    table = torch.where(torch.arange(table.shape[1], device=device) < held, table, table[:, :1])
    first = int(table[0, 0]) if len(members) == 1 and lie.reads_in_place(table[0]) else None
    stale = [(k, length) for k, length in enumerate(lengths) if length < keys]
    visible = _visible(batch, members, rows, keys, page, window)
    mask = None
    if not bool(visible.all()):
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        mask = mask.unsqueeze(1).expand(-1, heads, -1, -1).reshape(len(members), 1, heads * n, keys)
    whole = not padded and len(places) == len(batch.words)
    return ReferenceGroup(len(members), whole, rows, real, lie.places(table), first, keys, stale, mask)


def _visible(batch: AttentionBatch, members: list[int], rows: Tensor, keys: int, page: int, window: int) -> Tensor:
    """What the rows of some requests see, bool [requests, n, keys]."""
    host, device = batch.host, rows.device
    numbers = [[host.context[r] // page * page, host.keys[r]] for r in members]
    base, own = torch.tensor(numbers, dtype=torch.int32, device=device).unsqueeze(2).unbind(1)  # each [requests, 1]
    slot = torch.arange(keys, dtype=torch.int32, device=device)
    bit = slot - base  # [requests, keys]
    last = 32 * batch.words.shape[1] - 1
    at = bit.clamp(0, last)
    words = batch.words.index_select(0, rows).view(len(members), -1, batch.words.shape[1])
    word = words.gather(2, (at >> 5).long().unsqueeze(1).expand(-1, words.shape[1], -1))
    visible = ((word >> (at & 31).unsqueeze(1)) & 1).bool() | (bit < 0).unsqueeze(1)
    visible &= ((slot < own) & (bit <= last)).unsqueeze(1)
    if window:
        there = torch.where(bit < 0, slot, batch.tail_position[members].gather(1, at.long()))
        visible &= there.unsqueeze(1) > batch.position.index_select(0, rows).view(len(members), -1, 1) - window
    return visible
