"""Tree attention over a paged KV cache: prefill chunks, plain rows, chains and trees in one ragged batch.

Words
-----
row       one query token; the rows of request r are ``[row_start[r], row_start[r + 1])``.
slot      place of one token's key and value in its request's pages: page ``slot // PAGE``, offset ``slot % PAGE``.
context   slots ``[0, context)`` hold the committed prefix that every row of the request sees.
tail      slots ``[context, keys)``: rows of this forward, and tree nodes of earlier ones that are still wanted.
base      ``context`` rounded down to a whole page: below it no mask is needed.
words     bit j of a row's mask words says that it sees slot ``base + j``; bits of slots below ``context`` are set.

Each row sees the prefix and its own ancestors in the tail (itself included), so a whole tree is checked in one forward
(SpecInfer, arXiv:2305.09781). Keys are stored rotated by their tree position, so a commit is a move.
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types.
# ruff: noqa: PLR0912, PLR0915
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has no Triton; the reference serves there
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))


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
    def reference_plans(self) -> dict[tuple[int, int, int, int, torch.dtype], list[ReferenceGroup]]:
        """Plans of the reference, made once a forward and shared by all layers of the same geometry."""
        return {}


@dataclass(frozen=True)
class HostLists:
    row_start: list[int]
    context: list[int]
    keys: list[int]


@dataclass(frozen=True)
class ReferenceGroup:
    """Requests that the reference computes together: as many pages each, rows padded to the longest."""

    requests: int
    rows: Tensor  # int64 [requests * n], row of the batch; padding repeats the request's first row
    real: Tensor | None  # int64, places in `rows` that are no padding; None: all
    blocks: Tensor  # int64 [requests * kv_heads * pages], (page, head) blocks of the cache
    keys: int  # keys of the longest request
    stale: Tensor | None  # bool [requests, 1, keys, 1], slots beyond the request's own keys; None: no such
    mask: Tensor | None  # additive [requests, 1, group * n, keys]; None: every row sees every key


MOST_PADDED_ROWS = 32
"""Requests with more rows (prefill) are computed one by one."""


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
) -> Tensor:
    """Plain torch tree attention, a few requests of about the same length at a time.

    query [rows, q_heads, head_dim]; key_cache, value_cache [pages, kv_heads, PAGE, head_dim]; ``scale`` multiplies
    the scores; ``window`` > 0 lets a row see keys at positions > its own - window only; ``softcap`` > 0 squashes
    scores to softcap * tanh(score / softcap); ``sinks`` [q_heads] are logits that take part in the softmax and carry
    no value. Returns [rows, q_heads, head_dim] in the dtype of ``query``.
    """
    _, q_heads, head_dim = query.shape
    kv_heads, page = key_cache.shape[1:3]
    heads = q_heads // kv_heads
    key = (page, kv_heads, heads, window, query.dtype)
    if key not in batch.reference_plans:
        batch.reference_plans[key] = _plan_groups(batch, page, kv_heads, heads, window, query.dtype)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    out[batch.host.row_start[-1] :] = 0
    for group in batch.reference_plans[key]:
        k, v = (_gather(cache, group) for cache in (key_cache, value_cache))
        q = query.index_select(0, group.rows).view(group.requests, -1, kv_heads, heads, head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(group.requests, kv_heads, -1, head_dim)
        if softcap or sinks is not None:
            o = _explicit(q, k, v, group.mask, scale, softcap, sinks)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
        o = o.view(group.requests, kv_heads, heads, -1, head_dim).permute(0, 3, 1, 2, 4).reshape(-1, q_heads, head_dim)
        if group.real is None:
            out.index_copy_(0, group.rows, o)
        else:
            out.index_copy_(0, group.rows[group.real], o[group.real])
    return out


def _gather(cache: Tensor, group: ReferenceGroup) -> Tensor:
    """Keys or values [requests, kv_heads, keys, head_dim]; one index_select, as (page, head) blocks are whole."""
    pages, kv_heads, _, head_dim = cache.shape
    picked = cache.view(pages * kv_heads, -1).index_select(0, group.blocks)
    picked = picked.view(group.requests, kv_heads, -1, head_dim)[:, :, : group.keys]
    # What other sessions left in the last page may not be finite, and 0 * NaN is NaN.
    return picked if group.stale is None else picked.masked_fill_(group.stale, 0)


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
    batch: AttentionBatch, page: int, kv_heads: int, heads: int, window: int, dtype: torch.dtype
) -> list[ReferenceGroup]:
    host = batch.host
    counts = [end - begin for begin, end in zip(host.row_start, host.row_start[1:], strict=False)]
    alike: dict[tuple[int, int], list[int]] = {}
    for r, n in enumerate(counts):
        if n:
            alike.setdefault((-(-host.keys[r] // page), -1 if n <= MOST_PADDED_ROWS else r), []).append(r)
    return [_plan_group(batch, members, page, kv_heads, heads, window, dtype) for members in alike.values()]


def _plan_group(
    batch: AttentionBatch, members: list[int], page: int, kv_heads: int, heads: int, window: int, dtype: torch.dtype
) -> ReferenceGroup:
    host, device = batch.host, batch.words.device
    first = torch.tensor([host.row_start[r] for r in members], device=device).unsqueeze(1)
    counts = torch.tensor([host.row_start[r + 1] - host.row_start[r] for r in members], device=device).unsqueeze(1)
    lengths = torch.tensor([host.keys[r] for r in members], device=device)
    n, keys = int(counts.max()), int(lengths.max())
    place = torch.arange(n, device=device).expand(len(members), n)
    rows = torch.where(place < counts, first + place, first).flatten()
    real = None if bool((counts == n).all()) else (place < counts).flatten().nonzero().squeeze(1)
    table = batch.block_table[members, : -(-keys // page)].long()
    blocks = table.unsqueeze(1) * kv_heads + torch.arange(kv_heads, device=device).view(1, -1, 1)
    stale = torch.arange(keys, device=device) >= lengths.unsqueeze(1)
    visible = torch.stack([_visible(batch, r, n, keys, page, window) for r in members])
    mask = None
    if not bool(visible.all()):
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        mask = mask.unsqueeze(1).expand(-1, heads, -1, -1).reshape(len(members), 1, heads * n, keys)
    return ReferenceGroup(
        len(members), rows, real, blocks.flatten(), keys, stale[:, None, :, None] if bool(stale.any()) else None, mask
    )


def _visible(batch: AttentionBatch, r: int, n: int, keys: int, page: int, window: int) -> Tensor:
    """What the rows of one request see, bool [n, keys]; padding rows see what the first row sees."""
    host = batch.host
    begin, end, own = host.row_start[r], host.row_start[r + 1], host.keys[r]
    base = host.context[r] // page * page
    words = batch.words[begin:end]
    bits = (words.unsqueeze(2) >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    prefix = torch.ones(end - begin, base, dtype=torch.bool, device=words.device)
    visible = torch.cat([prefix, bits.flatten(1).bool()], 1)[:, :own]
    if window:
        at = torch.arange(own, device=words.device, dtype=torch.int32)
        at[base:] = batch.tail_position[r, : own - base]
        visible = visible & (at.unsqueeze(0) > batch.position[begin:end].unsqueeze(1) - window)
    padded = F.pad(visible, (0, keys - own))
    return torch.cat([padded, padded[:1].expand(n - len(padded), -1)])


@dataclass(frozen=True)
class LaunchPlan:
    """How a launch is cut into programs. It follows from shapes and the device alone, so a captured graph stays right
    when the lengths change; what depends on the lengths is decided on the device."""

    row_tile: int  # packed rows (node x group) of one program, a power of two >= 16
    key_tile: int  # keys of one iteration over the prefix, a power of two >= 16 that divides PAGE
    splits: int  # most key chunks of a request
    min_chunk: int  # pages, smallest chunk worth a program of its own
    warps: int
    stages: int


def plan_launch(query: Tensor, key_cache: Tensor, batch: AttentionBatch) -> LaunchPlan:
    """Plan from shapes: mean packed rows per request give the row tile, idle multiprocessors give the splits."""
    rows, q_heads, head_dim = query.shape
    _, kv_heads, page, _ = key_cache.shape
    requests, columns = batch.block_table.shape
    packed, key_bytes = rows * (q_heads // kv_heads), 2 * head_dim * query.element_size()
    processors, shared_bytes, tensor_cores = _device_traits(query)
    row_tile = _row_tile(-(-packed // requests), head_dim) if tensor_cores else 16
    # A tile of keys, and one of values, must fit registers: more of them where tensor cores do the work.
    key_tile = min(page, 1 << ((8192 if tensor_cores else 4096) // head_dim).bit_length() - 1)
    programs = max(requests, -(-packed // row_tile)) * kv_heads
    min_chunk = -(-256 // page)
    return LaunchPlan(
        row_tile=row_tile,
        key_tile=key_tile,
        splits=min(-(-2 * processors // programs), -(-columns // min_chunk), 32),
        min_chunk=min_chunk,
        warps=8 if row_tile * head_dim >= 16384 or (head_dim > 64 and not tensor_cores) else 4,
        stages=max(1, min(3, (shared_bytes - row_tile * key_bytes // 2) // (key_tile * key_bytes))),
    )


def _row_tile(packed: int, head_dim: int) -> int:
    """Smallest tile that holds a mean request, as far as registers allow."""
    widest = 128 if head_dim <= 128 and packed >= 256 else 64
    return next((tile for tile in (16, 32, 64) if packed <= tile), widest)


def _device_traits(query: Tensor) -> tuple[int, int, bool]:
    """Multiprocessors, shared memory of a program in bytes, tensor cores for this dtype (Triton: from Ampere on)."""
    wide = query.element_size() > 2
    if not query.is_cuda:
        return 1, 65536, not wide
    device = torch.cuda.get_device_properties(query.device)
    shared_bytes = getattr(device, "shared_memory_per_block_optin", device.shared_memory_per_block)
    return device.multi_processor_count, shared_bytes, device.major >= 8 and not wide


@triton.jit
def _locate(row_start, tile, rows, requests, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Request of a row tile, the tile's first packed row in it, the request's first row and its packed row count.

    Tiles of request r start at ``row_start[r] * GROUP // TILE + r``: rising, and always enough for its rows. The
    request after the last stands for the padding rows.
    """
    low = 0
    high = requests
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(row_start + middle) * GROUP // TILE + middle <= tile:
            low = middle
        else:
            high = middle - 1
    begin = tl.load(row_start + low)
    end = tl.load(row_start + low + 1, mask=low < requests, other=0)
    end = tl.where(low < requests, end, rows)
    return low, (tile - begin * GROUP // TILE - low) * TILE, begin, (end - begin) * GROUP


@triton.jit
def _chunks(context, window, PAGE: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr, WINDOW: tl.constexpr):
    """First prefix page that any row can see, end of the full prefix pages, pages per chunk, chunks (at least one)."""
    stop = context // PAGE
    first = 0
    if WINDOW:
        first = tl.maximum(context - window + 1, 0) // PAGE
        first = tl.minimum(first, stop)
    size = tl.maximum(tl.cdiv(stop - first, SPLITS), MIN_CHUNK)
    return first, stop, size, tl.maximum(tl.cdiv(stop - first, size), 1)


@triton.jit
def _tail_end(words, row, valid, word_count):
    """Words up to the last one in which any row of the tile sees a key: rows of a prefill chunk skip later keys."""
    last = 0
    for first in range(0, word_count, 8):
        index = first + tl.arange(0, 8)
        inside = valid[:, None] & (index < word_count)[None, :]
        bits = tl.load(words + row[:, None] * word_count + index[None, :], mask=inside, other=0)
        last = tl.maximum(last, tl.max(tl.max(tl.where(bits != 0, index[None, :] + 1, 0), 1), 0))
    return last


@triton.jit
def _attend(
    q,  # [rows, dims]
    best,  # fp32 [rows], highest score so far, log2 domain
    total,  # fp32 [rows], sum of 2 ** (score - best)
    acc,  # fp32 [rows, dims]
    key_block,  # first element of the tile's keys
    value_block,
    visible,  # bool [rows, keys]; read if MASKED
    inside,  # bool [keys], slots that hold a key; read if PARTIAL
    scale,
    cap,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    PARTIAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One step of the online softmax over a tile of keys."""
    at = tl.arange(0, TILE)
    dim = tl.arange(0, DIMS)
    k_at = key_block + at[None, :] * HEAD_DIM + dim[:, None]
    v_at = value_block + at[:, None] * HEAD_DIM + dim[None, :]
    if PARTIAL:
        k = tl.load(k_at, mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif DIMS != HEAD_DIM:
        k = tl.load(k_at, mask=(dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if SOFTCAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    shift = highest
    if MASKED:  # a row that has seen no key yet must not compute -inf minus -inf
        shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(best - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return highest, total, acc


@triton.jit(do_not_specialize=["rows", "requests", "word_count", "columns", "window"])
def _tree_attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    partial,  # fp32 [splits, rows, q_heads, head_dim], normalised
    partial_log,  # fp32 [splits, rows, q_heads], log2 of the softmax sum
    row_start,
    context,
    key_count,
    words,
    block_table,
    position,
    tail_position,
    sinks,
    rows,
    requests,
    word_count,
    columns,
    query_row_stride,
    query_head_stride,
    scale,
    cap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    LONG_TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program: a tile of packed rows, a key/value head, a chunk of the prefix; the last chunk takes the tail."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    request, first_row, begin, packed_rows = _locate(row_start, tile, rows, requests, GROUP, ROW_TILE)
    if first_row >= packed_rows:
        return
    packed = first_row + tl.arange(0, ROW_TILE)
    valid = packed < packed_rows
    row = (begin + packed // GROUP).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    dim = tl.arange(0, DIMS)
    filled = valid[:, None] & (dim < HEAD_DIM)[None, :]
    out_at = (row * (kv_heads * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
    if request == requests:
        if chunk == 0:
            tl.store(out + out_at, tl.zeros([ROW_TILE, DIMS], out.dtype.element_ty), mask=filled)
        return
    prefix = tl.load(context + request)
    first_page, stop_page, chunk_pages, chunks = _chunks(prefix, window, PAGE, SPLITS, MIN_CHUNK, WINDOW)
    if chunk >= chunks:
        return

    q_at = row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + q_at, mask=filled, other=0.0)
    best = tl.full([ROW_TILE], float("-inf"), tl.float32)
    total = tl.zeros([ROW_TILE], tl.float32)
    acc = tl.zeros([ROW_TILE, DIMS], tl.float32)
    if SINKS:  # noqa: SIM102 (one is known when compiling, the other is not)
        if chunk == 0:
            best = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            total = tl.full([ROW_TILE], 1.0, tl.float32)
    here = tl.zeros([ROW_TILE], tl.int32)
    if WINDOW:
        here = tl.load(position + row, mask=valid, other=0)
    table = block_table + request.to(tl.int64) * columns
    block = PAGE * HEAD_DIM

    tiles: tl.constexpr = PAGE // KEY_TILE
    start = (first_page + chunk * chunk_pages) * tiles
    stop = tl.minimum(first_page + (chunk + 1) * chunk_pages, stop_page) * tiles
    at = tl.arange(0, KEY_TILE)
    page_id = tl.load(table + start // tiles)
    for step in range(start, stop):
        # Carried, so that the loads of keys and values do not wait for the load of their page id.
        next_id = tl.load(table + (step + 1) // tiles)
        offset = (page_id.to(tl.int64) * kv_heads + kv_head) * block + step % tiles * KEY_TILE * HEAD_DIM
        visible = (step * KEY_TILE + at)[None, :] > (here - window)[:, None]
        best, total, acc = _attend(
            q, best, total, acc, key_cache + offset, value_cache + offset, visible, at < KEY_TILE, scale, cap,
            HEAD_DIM, DIMS, KEY_TILE, WINDOW, False, SOFTCAP,
        )  # fmt: skip
        page_id = next_id

    base = stop_page * PAGE
    keys = tl.load(key_count + request)
    end = keys
    if LONG_TAIL:
        end = tl.minimum(keys, base + 32 * _tail_end(words, row, valid, word_count))
    end = tl.where(chunk == chunks - 1, end, base)
    at_tail = tl.arange(0, TAIL_TILE)
    page_id = tl.load(table + stop_page)
    for slot in range(base, end, TAIL_TILE):
        next_id = tl.load(table + (slot + TAIL_TILE) // PAGE)
        offset = (page_id.to(tl.int64) * kv_heads + kv_head) * block + slot % PAGE * HEAD_DIM
        inside = slot + at_tail < keys
        word = tl.load(words + row * word_count + (slot - base) // 32, mask=valid, other=0)
        visible = ((word[:, None] >> ((slot - base) % 32 + at_tail)[None, :]) & 1) != 0
        if WINDOW:
            there_at = request.to(tl.int64) * (32 * word_count) + slot - base + at_tail
            there = tl.load(tail_position + there_at, mask=inside, other=0)
            visible = visible & (there[None, :] > (here - window)[:, None])
        best, total, acc = _attend(
            q, best, total, acc, key_cache + offset, value_cache + offset, visible, inside, scale, cap,
            HEAD_DIM, DIMS, TAIL_TILE, True, True, SOFTCAP,
        )  # fmt: skip
        page_id = next_id

    total = tl.where(total > 0.0, total, 1.0)  # a chunk in which a row sees no key has best = -inf
    normal = acc / total[:, None]
    if SPLITS == 1:  # noqa: SIM114 (as above)
        tl.store(out + out_at, normal.to(out.dtype.element_ty), mask=filled)
    elif chunks == 1:
        tl.store(out + out_at, normal.to(out.dtype.element_ty), mask=filled)
    else:
        log_at = (chunk.to(tl.int64) * rows + row) * (kv_heads * GROUP) + head
        tl.store(partial + log_at[:, None] * HEAD_DIM + dim[None, :], normal, mask=filled)
        tl.store(partial_log + log_at, best + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["rows", "requests", "window"])
def _merge_kernel(
    out,
    partial,
    partial_log,
    row_start,
    context,
    rows,
    requests,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Add up the chunks of a few packed rows, each weighted by its softmax sum."""
    kv_head = tl.program_id(1)
    q_heads = tl.num_programs(1) * GROUP
    request, first_row, begin, packed_rows = _locate(row_start, tl.program_id(0), rows, requests, GROUP, ROW_TILE)
    if (request == requests) | (first_row >= packed_rows):
        return
    _, _, _, chunks = _chunks(tl.load(context + request), window, PAGE, SPLITS, MIN_CHUNK, WINDOW)
    if chunks == 1:
        return
    packed = first_row + tl.arange(0, ROW_TILE)
    valid = packed < packed_rows
    dim = tl.arange(0, DIMS)
    filled = valid[:, None] & (dim < HEAD_DIM)[None, :]
    at = (begin + packed // GROUP).to(tl.int64) * q_heads + kv_head * GROUP + packed % GROUP
    best = tl.full([ROW_TILE], float("-inf"), tl.float32)
    total = tl.zeros([ROW_TILE], tl.float32)
    acc = tl.zeros([ROW_TILE, DIMS], tl.float32)
    for chunk in range(chunks):
        log_at = at + (chunk * q_heads).to(tl.int64) * rows
        log = tl.load(partial_log + log_at, mask=valid, other=float("-inf"))
        values = tl.load(partial + log_at[:, None] * HEAD_DIM + dim[None, :], mask=filled, other=0.0)
        highest = tl.maximum(best, log)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(log - shift)
        fade = tl.exp2(best - shift)
        total = total * fade + weight
        acc = acc * fade[:, None] + weight[:, None] * values
        best = highest
    normal = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + at[:, None] * HEAD_DIM + dim[None, :], normal.to(out.dtype.element_ty), mask=filled)


MERGE_ROWS = 4
LOG2_E = 1.4426950408889634


def tree_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    plan: LaunchPlan | None = None,
) -> Tensor:
    """As ``tree_attention_reference``, in one launch, or two when keys are split. No synchronisation, graph-safe.

    The caches are contiguous and of the dtype of ``query``, whose last dimension is contiguous. Every row's position is
    at least its request's ``context``. Rows after ``row_start[requests]`` are padding and come out as zeros. ``plan``
    replaces the one made from shapes: for tuning, and to keep the order of sums fixed over batch sizes.
    """
    rows, q_heads, head_dim = query.shape
    _, kv_heads, page, _ = key_cache.shape
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and query.stride(2) == 1
    requests, columns = batch.block_table.shape
    plan = plan or plan_launch(query, key_cache, batch)
    group, dims = q_heads // kv_heads, triton.next_power_of_2(head_dim)
    out = torch.empty((rows, q_heads, head_dim), dtype=query.dtype, device=query.device)
    scratch = rows if plan.splits > 1 else 0
    partial = torch.empty((plan.splits, scratch, q_heads, head_dim), dtype=torch.float32, device=query.device)
    partial_log = torch.empty((plan.splits, scratch, q_heads), dtype=torch.float32, device=query.device)
    word_count = batch.words.shape[1]
    # With a soft cap the kernel needs 2 ** (2 * log2(e) * score / softcap) for its tanh.
    log_scale = LOG2_E * scale * (2.0 / softcap if softcap else 1.0)
    shared = {
        "GROUP": group, "HEAD_DIM": head_dim, "DIMS": dims, "PAGE": page,
        "SPLITS": plan.splits, "MIN_CHUNK": plan.min_chunk, "WINDOW": window > 0,
    }  # fmt: skip
    with torch.cuda.device_of(query):
        grid = (rows * group // plan.row_tile + requests + 1, kv_heads, plan.splits)
        _tree_attention_kernel[grid](
            query, key_cache, value_cache, out, partial, partial_log, batch.row_start, batch.context, batch.keys,
            batch.words, batch.block_table, batch.position, batch.tail_position, query if sinks is None else sinks,
            rows, requests, word_count, columns, query.stride(0), query.stride(1), log_scale, LOG2_E * softcap, window,
            **shared, ROW_TILE=plan.row_tile, KEY_TILE=plan.key_tile, TAIL_TILE=min(32, plan.key_tile),
            LONG_TAIL=word_count > 8, SOFTCAP=softcap > 0, SINKS=sinks is not None,
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        if plan.splits > 1:
            grid = (rows * group // MERGE_ROWS + requests + 1, kv_heads, 1)
            _merge_kernel[grid](
                out, partial, partial_log, batch.row_start, batch.context, rows, requests, window,
                **shared, ROW_TILE=MERGE_ROWS, num_warps=4,
            )  # fmt: skip
    return out


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Tree attention where the tensors live: the kernel on CUDA, the reference elsewhere. See the reference."""
    attend = tree_attention_triton if query.is_cuda else tree_attention_reference
    return attend(query, key_cache, value_cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
