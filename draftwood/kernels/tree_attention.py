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

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.device import gpu_of
from draftwood.kernels.overlap import can_overlap, launch_options, starts_early, wait
from draftwood.kernels.tree_attention_reference import AttentionBatch, tree_attention_reference

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # macOS has no Triton; the reference serves there
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))

__all__ = [
    "AttentionBatch",
    "LaunchPlan",
    "plan_invariant",
    "plan_launch",
    "tree_attention",
    "tree_attention_reference",
    "tree_attention_triton",
]

SMALLEST_CHUNK = 256
"""Keys; a smaller chunk costs more in partial results than a program of its own gains. Half as many where a program has
a multiprocessor to itself."""

MERGED_CHUNKS = 16
"""Most chunks that a merging program adds up at once, for so many rows that it loads MERGED_VALUES in all."""

MERGED_VALUES = 8192

FILLED = 0.75
"""Of the multiprocessors, at least, where a program has one to itself."""

INVARIANT_CHUNK = 1024
"""Keys of every chunk where results must not depend on the batch."""


@dataclass(frozen=True)
class LaunchPlan:
    """How a launch is cut into programs. It follows from shapes and the device alone, so a captured graph stays right
    when the lengths change; the chunks depend on the lengths and are chosen on the device."""

    row_tile: int  # packed rows (node x group) of one program, a power of two >= 16
    key_tile: int  # keys of one iteration over the prefix, a power of two >= 16 that divides PAGE
    warps: int
    stages: int
    slots: int  # programs that the device holds at a time; requests are cut so as to fill them once
    min_chunk: int  # pages, smallest chunk
    fixed_chunk: int = 0  # pages of every chunk; 0: chosen from the lengths of the whole batch
    descriptors: bool = False  # tiles of the prefix are loaded through tensor descriptors (Hopper and later)
    early: bool = False  # starts before the kernel before has ended (Hopper and later, see ``overlap``)


@dataclass(frozen=True)
class _Device:
    """What a plan needs to know about a GPU, for one dtype of queries."""

    multiprocessors: int
    shared_bytes: int  # of a program
    tensor_cores: bool
    hopper: bool


def plan_launch(query: Tensor, key_cache: Tensor, batch: AttentionBatch) -> LaunchPlan:
    """Plan from shapes. Mean rows per request give the row tile, which decides everything else.

    Measured on an H200 (`docs/kernels.md`): 16 rows win where every one of many requests has a plain row; else 64 rows
    do, as wgmma starts there and two programs share a multiprocessor; 128 rows never win. Where the rows of a request
    fit one tile and equal chunks leave few multiprocessors without one, there are half as many chunks, one program to a
    multiprocessor: these read no slower and are merged faster, if at all. A launch for few requests also starts early.
    With ``requests`` rounded up for a captured graph a request may have more rows than the mean says, which costs time,
    nothing else.
    """
    rows, q_heads, _ = query.shape
    kv_heads, requests = key_cache.shape[1], batch.block_table.shape[0]
    group, device = q_heads // kv_heads, _device(query)
    wgmma = device.hopper and device.tensor_cores
    plain = rows <= requests and group <= 16
    heads = requests * kv_heads
    few = 4 * heads <= device.multiprocessors
    filled = device.multiprocessors // heads * heads >= FILLED * device.multiprocessors
    alone = wgmma and rows * group <= 64 * requests and filled and (few or not plain)
    if not device.tensor_cores or (plain and not alone):
        row_tile = 16
    elif wgmma:
        row_tile = 64
    else:
        row_tile = 32 if rows * group <= 32 * requests else 64
    plan = _plan(query, key_cache, row_tile, device, alone=alone)
    return replace(plan, early=few and starts_early(query))


def plan_invariant(query: Tensor, key_cache: Tensor) -> LaunchPlan:
    """A plan with which a row's result is the same bit for bit whatever else is in the batch: its tiles, chunks and
    order of sums follow from the model's geometry and the row's own context."""
    plan = _plan(query, key_cache, 16, _device(query))
    return replace(plan, fixed_chunk=-(-INVARIANT_CHUNK // key_cache.shape[2]))


def _plan(query: Tensor, key_cache: Tensor, row_tile: int, device: _Device, *, alone: bool = False) -> LaunchPlan:
    """``alone``: one program to a multiprocessor, which loads further ahead."""
    page, head_dim = key_cache.shape[2:]
    dims, item_bytes = 1 << (head_dim - 1).bit_length(), key_cache.element_size()
    # A tile of keys, and one of values, must fit registers: more of them where tensor cores do the work.
    key_tile = min(page, max(16, (8192 if device.tensor_cores else 4096) // dims))
    warps = 8 if (row_tile > 16 and dims > 128) or (dims > 64 and not device.tensor_cores) else 4
    query_bytes, tile_bytes = row_tile * dims * query.element_size(), 2 * key_tile * dims * item_bytes
    stages = max(1, min(4 if alone else 3, (device.shared_bytes - query_bytes) // tile_bytes))
    buffers = stages if row_tile >= 64 else max(1, stages - 1)  # mma.sync keeps one tile in registers
    by_shared = device.shared_bytes // (query_bytes + buffers * tile_bytes)
    by_registers = (3 if row_tile == 16 else 2) * 4 // warps
    return LaunchPlan(
        row_tile=row_tile,
        key_tile=key_tile,
        warps=warps,
        stages=stages,
        slots=device.multiprocessors * (1 if alone else max(1, min(by_shared, by_registers))),
        min_chunk=-(-SMALLEST_CHUNK // (2 * page if alone else page)),
        descriptors=device.hopper and device.tensor_cores and item_bytes == 2,
    )


def _device(query: Tensor) -> _Device:
    """Triton uses tensor cores from Ampere on, for dtypes of two bytes."""
    narrow = query.element_size() <= 2
    if not query.is_cuda:
        return _Device(multiprocessors=4, shared_bytes=65536, tensor_cores=narrow, hopper=False)
    gpu = gpu_of(query.device)
    return _Device(gpu.multiprocessors, gpu.shared_bytes, gpu.capability >= 8 and narrow, gpu.capability >= 9)


@triton.jit
def _size(context, keys, window, PAGE: tl.constexpr, WINDOW: tl.constexpr):
    """First prefix page that any row can see, end of the full prefix pages, pages that the tail weighs."""
    stop = context // PAGE
    first = context * 0
    if WINDOW:
        first = tl.minimum(tl.maximum(context - window + 1, 0) // PAGE, stop)
    return first, stop, tl.cdiv(keys - stop * PAGE, PAGE)


@triton.jit
def _chunk_count(pages, tail_pages, chunk):
    """Chunks of a request: the last takes the tail, which counts as at most one chunk's pages."""
    return tl.maximum(tl.cdiv(pages + tl.minimum(tail_pages, chunk), chunk), 1)


@triton.jit
def _choose_chunk(
    tiles,
    pages,
    tail_pages,
    kv_heads,
    slots,
    places,
    MIN_CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Pages of a chunk, from the work of the whole batch: the cut of the longest request that ends soonest when
    ``slots`` programs run at a time and starting one costs as much as two pages; no more than ``places`` items."""
    j = tl.arange(0, CANDIDATES)
    cuts = tl.where(j < 4, j + 1, (4 + j % 4) << tl.maximum(j // 4 - 1, 0))  # 1 2 3 4 4 5 6 7 8 10 12 14 16 20...
    longest = tl.max(tl.where(tiles > 0, pages + tl.minimum(tail_pages, 4), 0), 0)
    chunk = tl.where(j == 0, 1 << 20, tl.maximum(tl.cdiv(longest, cuts), MIN_CHUNK))
    count = _chunk_count(pages[:, None], tail_pages[:, None], chunk[None, :])
    total = tl.sum(tiles[:, None] * count, 0)
    waves = tl.cdiv(total * kv_heads, slots)
    cost = tl.minimum(waves * (tl.minimum(chunk, longest) + 2), 1 << 25) * 32 + j
    cost = tl.where((total > places) & (j > 0), 2147483647, cost)
    best = tl.min(cost, 0) % 32
    return tl.sum(tl.where(j == best, chunk, 0), 0)


@triton.jit
def _assign(
    item,
    row_start,
    context,
    key_count,
    rows,
    requests,
    window,
    kv_heads,
    slots,
    places,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    REQUESTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Request, row tile, key/value head and chunk of a program, pages of a chunk, chunks of the request, and the tile's
    first place in its head's partial results. Items run over requests, chunks, heads and tiles (fastest: tiles that
    share keys run together); the request after the last one stands for the padding rows, or no work at all."""
    r = tl.arange(0, REQUESTS)
    real = r < requests
    begin = tl.load(row_start + r, mask=real, other=0)
    end = tl.load(row_start + r + 1, mask=real, other=0)
    prefix = tl.load(context + r, mask=real, other=0)
    keys = tl.load(key_count + r, mask=real, other=0)
    first, stop, tail_pages = _size(prefix, keys, window, PAGE, WINDOW)
    tiles = tl.cdiv((end - begin) * GROUP, ROW_TILE)
    padding = tl.cdiv((rows - tl.load(row_start + requests)) * GROUP, ROW_TILE)
    if FIXED_CHUNK:
        chunk_pages = FIXED_CHUNK
    else:
        chunk_pages = _choose_chunk(
            tiles, stop - first, tail_pages, kv_heads, slots, places - padding, MIN_CHUNK, CANDIDATES
        )  # fmt: skip
    chunks = _chunk_count(stop - first, tail_pages, chunk_pages)
    ends = tl.cumsum(tiles * chunks * kv_heads, 0)
    before = (ends <= item) & real
    request = tl.sum(before.to(tl.int32), 0)
    local = item - tl.max(tl.where(before, ends, 0), 0)
    split = tl.sum(tl.where(before & (chunks > 1), tiles * chunks, 0), 0)
    here = r == request
    own_chunks = tl.sum(tl.where(here, chunks, 0), 0)
    own_tiles = tl.sum(tl.where(here, tiles, 0), 0)
    own_tiles = tl.where(request < requests, own_tiles, tl.maximum(padding, 1))
    tile, rest = local % own_tiles, local // own_tiles
    kv_head, chunk = rest % kv_heads, rest // kv_heads
    return request, tile, kv_head, chunk, chunk_pages, own_chunks, split + tile * own_chunks


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
def _widen(x, dtype: tl.constexpr):
    """e4m3 bytes as float16 of 1 / 256 of their value, for any GPU: both formats share sign and exponent order."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _load_keys(block, inside, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr):
    """A tile of keys [TILE, DIMS] that starts at pointer ``block``."""
    at = tl.arange(0, TILE)
    dim = tl.arange(0, DIMS)
    where = block + at[:, None] * HEAD_DIM + dim[None, :]
    if PARTIAL:
        x = tl.load(where, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0)
    elif DIMS != HEAD_DIM:
        x = tl.load(where, mask=(dim < HEAD_DIM)[None, :], other=0)
    else:
        x = tl.load(where)
    return x


@triton.jit
def _load_tile(
    cache, blocks, slot, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """Keys or values [TILE, DIMS] from ``slot`` on, all of them in use."""
    if DESCRIPTORS:
        x = blocks.load([slot, 0])
    else:
        x = _load_keys(cache + slot.to(tl.int64) * HEAD_DIM, None, HEAD_DIM, DIMS, TILE, False)
    return x


@triton.jit
def _attend(
    q,  # [rows, dims]
    k,  # [keys, dims]
    v,  # [keys, dims]
    best,  # fp32 [rows], highest score so far, log2 domain
    total,  # fp32 [rows], sum of 2 ** (score - best)
    acc,  # fp32 [rows, dims]
    visible,  # bool [rows, keys]; read if MASKED
    scale,
    cap,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One step of the online softmax over a tile of keys."""
    scores = tl.dot(q, tl.trans(_widen(k, q.dtype)), input_precision="ieee")
    if SOFTCAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0))
        scale = 1.0
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1) * scale)
    shift = highest
    if MASKED:  # a row that has seen no key yet must not compute -inf minus -inf
        shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores * scale - shift[:, None])
    fade = tl.exp2(best - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), _widen(v, q.dtype), acc * fade[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit(do_not_specialize=["rows", "requests", "word_count", "columns", "window", "slots", "places"])
def _tree_attention_kernel(
    query,
    key_cache,
    value_cache,
    key_blocks,  # tensor descriptor over all keys [slots, head_dim] if DESCRIPTORS
    value_blocks,
    out,
    partial,  # fp32 [kv_heads, places, ROW_TILE, head_dim], normalised
    partial_log,  # fp32 [kv_heads, places, ROW_TILE], log2 of the softmax sum
    merge_from,  # int32 [rows * GROUP, 2], first partial row and number of partial rows, ROW_TILE apart
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
    value_scale,
    cap,
    window,
    slots,
    places,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    REQUESTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EARLY: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program: a tile of packed rows, a key/value head, a chunk of the prefix; the last chunk takes the tail."""
    if EARLY:  # the merging programs may take places as soon as none of ours waits for one; they wait for our end
        tl.extra.cuda.gdc_launch_dependents()
    request, tile, kv_head, chunk, chunk_pages, chunks, place = _assign(
        tl.program_id(0), row_start, context, key_count, rows, requests, window, KV_HEADS, slots, places,
        GROUP, PAGE, ROW_TILE, REQUESTS, CANDIDATES, MIN_CHUNK, FIXED_CHUNK, WINDOW,
    )  # fmt: skip
    begin = tl.load(row_start + request)
    end = tl.load(row_start + request + 1, mask=request < requests, other=rows)
    keys = tl.load(key_count + request, mask=request < requests, other=0)
    prefix = tl.load(context + request, mask=request < requests, other=0)
    first_page, stop_page, tail_pages = _size(prefix, keys, window, PAGE, WINDOW)
    table = block_table + request.to(tl.int64) * columns
    tiles: tl.constexpr = PAGE // KEY_TILE
    if FIXED_CHUNK:
        start, stop = chunk * chunk_pages, (chunk + 1) * chunk_pages
    else:  # as even as whole pages allow, the tail counted with the last chunk
        weighed = stop_page - first_page + tl.minimum(tail_pages, chunk_pages)
        some = tl.maximum(chunks, 1)  # of the padding rows none
        start, stop = weighed * chunk // some, weighed * (chunk + 1) // some
    start = tl.minimum(first_page + start, stop_page) * tiles
    stop = tl.minimum(first_page + stop, stop_page) * tiles
    page_id = tl.load(table + start // tiles, mask=request < requests, other=0)
    tail_id = tl.load(table + stop_page, mask=request < requests, other=0)
    if EARLY:  # so far nothing depends on the kernel before
        tl.extra.cuda.gdc_wait()
    packed_rows = (end - begin) * GROUP
    packed = tile * ROW_TILE + tl.arange(0, ROW_TILE)
    if (tile * ROW_TILE >= packed_rows) | ((request == requests) & (chunk > 0)):
        return
    valid = packed < packed_rows
    row = (begin + packed // GROUP).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    dim = tl.arange(0, DIMS)
    filled = valid[:, None] & (dim < HEAD_DIM)[None, :]
    out_at = (row * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
    if SPLIT:  # noqa: SIM102 (one is known when compiling, the other is not)
        if (kv_head == 0) & (chunk == 0):
            at_merge = merge_from + 2 * (row * GROUP + packed % GROUP)
            tl.store(at_merge, place * ROW_TILE + tl.arange(0, ROW_TILE), mask=valid)
            tl.store(at_merge + 1, tl.where(request == requests, 1, chunks) + tl.zeros_like(packed), mask=valid)
    if request == requests:
        tl.store(out + out_at, tl.zeros([ROW_TILE, DIMS], out.dtype.element_ty), mask=filled)
        return

    q_at = row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + q_at, mask=filled, other=0.0)
    if key_cache.dtype.element_ty == tl.uint8:
        q = q.to(tl.float16)
    best = tl.full([ROW_TILE], float("-inf"), tl.float32)
    total = tl.zeros([ROW_TILE], tl.float32)
    acc = tl.zeros([ROW_TILE, DIMS], tl.float32)
    if SINKS:  # noqa: SIM102 (as above)
        if chunk == 0:
            best = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            total = tl.full([ROW_TILE], 1.0, tl.float32)
    here = tl.zeros([ROW_TILE], tl.int32)
    if WINDOW:
        here = tl.load(position + row, mask=valid, other=0)
    block = PAGE * HEAD_DIM

    at = tl.arange(0, KEY_TILE)
    for step in range(start, stop):
        # Carried, so that the loads of keys and values do not wait for the load of their page id.
        next_id = tl.load(table + (step + 1) // tiles)
        slot = (page_id * KV_HEADS + kv_head) * PAGE + step % tiles * KEY_TILE
        k = _load_tile(key_cache, key_blocks, slot, HEAD_DIM, DIMS, KEY_TILE, DESCRIPTORS)
        v = _load_tile(value_cache, value_blocks, slot, HEAD_DIM, DIMS, KEY_TILE, DESCRIPTORS)
        visible = (step * KEY_TILE + at)[None, :] > (here - window)[:, None]
        best, total, acc = _attend(q, k, v, best, total, acc, visible, scale, cap, WINDOW, SOFTCAP)
        page_id = next_id

    if chunk == chunks - 1:
        base = stop_page * PAGE
        end = keys
        if end - base > 64:
            end = tl.minimum(end, base + 32 * _tail_end(words, row, valid, word_count))
        at_tail = tl.arange(0, TAIL_TILE)
        page_id = tail_id
        for slot in range(base, end, TAIL_TILE):
            next_id = tl.load(table + (slot + TAIL_TILE) // PAGE)
            offset = (page_id.to(tl.int64) * KV_HEADS + kv_head) * block + slot % PAGE * HEAD_DIM
            inside = slot + at_tail < keys
            word = tl.load(words + row * word_count + (slot - base) // 32, mask=valid, other=0)
            visible = ((word[:, None] >> ((slot - base) % 32 + at_tail)[None, :]) & 1) != 0
            if WINDOW:
                there_at = request.to(tl.int64) * (32 * word_count) + slot - base + at_tail
                there = tl.load(tail_position + there_at, mask=inside, other=0)
                visible = visible & (there[None, :] > (here - window)[:, None])
            k = _load_keys(key_cache + offset, inside, HEAD_DIM, DIMS, TAIL_TILE, True)
            v = _load_keys(value_cache + offset, inside, HEAD_DIM, DIMS, TAIL_TILE, True)
            best, total, acc = _attend(q, k, v, best, total, acc, visible, scale, cap, True, SOFTCAP)
            page_id = next_id

    total = tl.where(total > 0.0, total, 1.0)  # a chunk in which a row sees no key has best = -inf
    normal = acc * (value_scale / total)[:, None]
    row = (tl.load(row_start + request) + packed // GROUP).to(tl.int64)  # again, not kept in registers all the time
    filled = (packed < packed_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    out_at = (row * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
    if SPLIT:
        if chunks > 1:
            at_partial = (kv_head.to(tl.int64) * places + place + chunk) * ROW_TILE + tl.arange(0, ROW_TILE)
            tl.store(partial + at_partial[:, None] * HEAD_DIM + dim[None, :], normal, mask=filled)
            tl.store(partial_log + at_partial, best + tl.log2(total), mask=valid)
        else:
            tl.store(out + out_at, normal.to(out.dtype.element_ty), mask=filled)
    else:
        tl.store(out + out_at, normal.to(out.dtype.element_ty), mask=filled)


@triton.jit(do_not_specialize=["packed_rows", "places"])
def _merge_kernel(
    out,
    partial,
    partial_log,
    merge_from,
    packed_rows,
    places,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
    EAGER: tl.constexpr,
):
    """Add up the chunks of a few packed rows, each weighted by its softmax sum, CHUNKS at a time."""
    if EARLY:
        wait(EAGER)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    packed = tl.program_id(0) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    inside = packed < packed_rows
    first = tl.load(merge_from + 2 * packed, mask=inside, other=0)
    chunks = tl.load(merge_from + 2 * packed + 1, mask=inside, other=1)
    most = tl.max(chunks, 0)
    if most == 1:
        return
    dim = tl.arange(0, DIMS)
    each = tl.arange(0, CHUNKS)
    best = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, DIMS], tl.float32)
    for chunk in range(0, most, CHUNKS):
        there = chunk + each[None, :] < chunks[:, None]
        at = kv_head.to(tl.int64) * places * ROW_TILE + first[:, None] + (chunk + each[None, :]) * ROW_TILE
        log = tl.load(partial_log + at, mask=there, other=float("-inf"))
        filled = there[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        values = tl.load(partial + at[:, :, None] * HEAD_DIM + dim[None, None, :], mask=filled, other=0.0)
        highest = tl.maximum(best, tl.max(log, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(log - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None] + tl.sum(weight[:, :, None] * values, 1)
        best = highest
    normal = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    row = (packed // GROUP * (kv_heads * GROUP) + kv_head * GROUP + packed % GROUP).to(tl.int64)
    filled = (chunks > 1)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + row[:, None] * HEAD_DIM + dim[None, :], normal.to(out.dtype.element_ty), mask=filled)


LOG2_E = 1.4426950408889634
MOST_CANDIDATES = 32


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
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    plan: LaunchPlan | None = None,
    eager: bool = False,
) -> Tensor:
    """As ``tree_attention_reference``, in two launches, or one where no request can be long. No synchronisation,
    graph-safe.

    The caches are contiguous and of the dtype of ``query`` or float8_e4m3fn; the last dimension of ``query`` is
    contiguous; ``scale`` is positive. Every row's position is at least its request's ``context``. Rows after
    ``row_start[requests]`` are padding and come out as zeros. ``plan`` replaces the one made from shapes;
    ``eager``: see ``overlap``.
    """
    rows, q_heads, head_dim = query.shape
    _, kv_heads, page, _ = key_cache.shape
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and query.stride(2) == 1 and scale > 0
    requests, columns = batch.block_table.shape
    plan = plan or plan_launch(query, key_cache, batch)
    group, dims = q_heads // kv_heads, triton.next_power_of_2(head_dim)
    if key_cache.element_size() == 1:  # the kernel reads e4m3 as float16 of 1 / 256 of its value
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        key_scale, value_scale = 256.0 * key_scale, 256.0 * value_scale
    # With a soft cap the kernel needs 2 ** (2 * log2(e) * score / softcap) for its tanh.
    log_scale = LOG2_E * scale * key_scale * (2.0 / softcap if softcap else 1.0)
    split = columns > (plan.fixed_chunk or plan.min_chunk)
    items = _most_items(plan, rows * group, requests, columns, kv_heads)
    places = (kv_heads, items if split else 0, plan.row_tile)
    out = torch.empty((rows, q_heads, head_dim), dtype=query.dtype, device=query.device)
    partial = torch.empty((*places, head_dim), dtype=torch.float32, device=query.device)
    partial_log = torch.empty(places, dtype=torch.float32, device=query.device)
    merge_from = torch.empty((rows * group if split else 0, 2), dtype=torch.int32, device=query.device)
    key_blocks, value_blocks = (_blocks(cache, plan) for cache in (key_cache, value_cache))
    early = can_overlap(query)
    width = triton.next_power_of_2(requests)
    with torch.cuda.device_of(query):
        _tree_attention_kernel[(items * kv_heads,)](
            query, key_cache, value_cache, key_blocks, value_blocks, out, partial, partial_log, merge_from,
            batch.row_start, batch.context, batch.keys, batch.words, batch.block_table, batch.position,
            batch.tail_position, query if sinks is None else sinks, rows, requests, batch.words.shape[1], columns,
            query.stride(0), query.stride(1), log_scale, value_scale, LOG2_E * softcap, window, plan.slots, items,
            GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIMS=dims, PAGE=page, ROW_TILE=plan.row_tile,
            KEY_TILE=plan.key_tile, TAIL_TILE=min(32, plan.key_tile), REQUESTS=width,
            CANDIDATES=max(2, min(MOST_CANDIDATES, 2048 // width)), MIN_CHUNK=plan.min_chunk,
            FIXED_CHUNK=plan.fixed_chunk, SPLIT=split, DESCRIPTORS=plan.descriptors, EARLY=early, WINDOW=window > 0,
            SOFTCAP=softcap > 0, SINKS=sinks is not None, num_warps=plan.warps, num_stages=plan.stages,
            **launch_options(plan.early),
        )  # fmt: skip
        if split:
            chunk_tile, merge_rows = _merge_tile(plan, rows * group, requests, columns, kv_heads, dims)
            _merge_kernel[-(-rows * group // merge_rows), kv_heads](
                out, partial, partial_log, merge_from, rows * group, items,
                GROUP=group, HEAD_DIM=head_dim, DIMS=dims, ROW_TILE=plan.row_tile, MERGE_ROWS=merge_rows,
                CHUNKS=chunk_tile, EARLY=early, EAGER=eager, num_warps=4, **launch_options(early),
            )  # fmt: skip
    return out


def _most_items(plan: LaunchPlan, packed_rows: int, requests: int, columns: int, kv_heads: int) -> int:
    """Work items of a key/value head, at most; the device never chooses chunks that would make more."""
    tiles = packed_rows // plan.row_tile + requests + 1  # the last one for padding rows
    if plan.fixed_chunk:
        return tiles * (-(-columns // plan.fixed_chunk) + 1)
    return max(tiles, plan.slots // kv_heads)


def _merge_tile(
    plan: LaunchPlan, packed_rows: int, requests: int, columns: int, kv_heads: int, dims: int
) -> tuple[int, int]:
    """Chunks and packed rows that a merging program adds up at once: as many chunks as a tile is likely cut into, and
    not very few where one request may be much longer than the others."""
    tiles = max(requests, packed_rows // plan.row_tile, 1)
    likely = min(plan.slots // (kv_heads * tiles), columns // plan.min_chunk + 1)
    chunks = min(MERGED_CHUNKS, max(2 if requests == 1 else 4, triton.next_power_of_2(likely)))
    if plan.fixed_chunk:
        chunks = 8  # whatever the batch
    return chunks, max(1, MERGED_VALUES // dims // chunks)


def _blocks(cache: Tensor, plan: LaunchPlan) -> Any:
    """The cache as a table of keys that is read ``key_tile`` at a time, if the plan wants descriptors."""
    if not plan.descriptors:
        return cache
    head_dim = cache.shape[3]
    tile = [plan.key_tile, triton.next_power_of_2(head_dim)]
    return TensorDescriptor(cache, [cache.numel() // head_dim, head_dim], [head_dim, 1], tile)


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
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    invariant: bool = False,
    eager: bool = False,
) -> Tensor:
    """Tree attention where the tensors live: the kernel on CUDA, the reference elsewhere. See the reference.

    ``invariant``: on CUDA, a row's result is the same bit for bit whatever else is in the batch, at some cost in time.
    ``eager``: the kernel after this one has much to load that no kernel before it writes (``overlap``).
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    options |= {"key_scale": key_scale, "value_scale": value_scale}
    if not query.is_cuda:
        return tree_attention_reference(query, key_cache, value_cache, batch, **options)
    plan = plan_invariant(query, key_cache) if invariant else None
    return tree_attention_triton(query, key_cache, value_cache, batch, **options, plan=plan, eager=eager)
