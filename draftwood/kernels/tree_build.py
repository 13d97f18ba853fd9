"""Tree builder: from the parents of a ragged batch of trees to what a forward and a walk need, in one launch.

Words
-----
node    one row of a tree; node i of request r is row ``row_start[r] + i``. Its parent has a smaller index, -1: none.
context slots ``[0, context)`` hold the committed prefix; node i sits in slot context + i, at position context + depth.
base    context rounded down to a whole page; bit j of a node's mask words says that it sees slot base + j
        (see ``tree_attention``). A node sees the prefix, its ancestors and itself.

First child, next sibling and flat row are int64 and -1 where there is none, children in rising order: with N nodes in
every tree they are, seen as [requests, N], the ``retrieve_next_token``, ``retrieve_next_sibling`` and
``retrieve_index`` of SGLang's tree builder, and ``MaskLayout`` has its three masks.
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has no Triton; the reference serves there
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))

MOST_NODES = 256
_NODE_TILE = 32


class MaskLayout(enum.IntEnum):
    """A dense or packed mask beside the words, one request after the other without padding (n nodes each).

    NONE    no mask.
    FULL    bool [n, context + n], the prefix all true (SGLang's FULL_MASK).
    TREE    bool [n, n] (QLEN_ONLY).
    BITS    one uint8, uint16 or uint32 a node, bit j for node j (QLEN_ONLY_BITPACKING); trees of up to 8, 16, 32 nodes.
    """

    NONE = 0
    FULL = 1
    TREE = 2
    BITS = 3


@dataclass(frozen=True, slots=True)
class TreeArrays:
    """One entry a row. Padding rows, from ``row_start[requests]`` on, see nothing, are at position 0, have no kin."""

    words: Tensor  # int32 [rows, words], mask bits from `base` on
    position: Tensor  # int32 [rows]
    tail_position: Tensor  # int32 [requests, 32 * words], position of the token in slot base + j, 0 if there is none
    first_child: Tensor  # int64 [rows], node of the same tree
    next_sibling: Tensor  # int64 [rows], node of the same tree
    flat_row: Tensor  # int64 [rows], the row itself

    @classmethod
    def empty(cls, rows: int, requests: int, words: int, device: torch.device | str) -> TreeArrays:
        """Buffers for ``build_tree`` to fill; every element of them is written."""
        narrow = [(rows, words), (rows,), (requests, 32 * words)]
        return cls(
            *(torch.empty(shape, dtype=torch.int32, device=device) for shape in narrow),
            *(torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3)),
        )


def words_needed(nodes: int, page: int) -> int:
    """Mask words of a row in a tree of up to ``nodes`` nodes, wherever in a page the context ends."""
    return -(-(page - 1 + nodes) // 32)


def build_tree_reference(
    parent: Tensor,
    row_start: Tensor,
    context: Tensor,
    out: TreeArrays,
    *,
    page: int,
    layout: MaskLayout = MaskLayout.NONE,
    mask: Tensor | None = None,
) -> None:
    """Fill ``out``, and ``mask`` if there is a layout, node by node.

    parent int32 [rows]; row_start int32 [requests + 1]; context int32 [requests]. Trees have at most ``MOST_NODES``
    nodes and fit the words of ``out`` (``words_needed``). ``mask`` is flat and of the layout's dtype; what lies behind
    the last request's part is left as it is.
    """
    starts, contexts, parents = row_start.tolist(), context.tolist(), parent.tolist()
    for array, value in ((out.words, 0), (out.position, 0), (out.tail_position, 0)):
        array.fill_(value)
    for array in (out.first_child, out.next_sibling, out.flat_row):
        array.fill_(-1)
    done = 0
    for request, prefix in enumerate(contexts):
        first, end = starts[request], starts[request + 1]
        seen = _visible(parents[first:end])
        shift = prefix % page
        bits = torch.zeros(end - first, 32 * out.words.shape[1], dtype=torch.bool)
        bits[:, :shift] = True
        bits[:, shift : shift + end - first] = seen
        weights = torch.tensor([1 << j for j in range(31)] + [-(1 << 31)], dtype=torch.int64)
        out.words[first:end] = (bits.view(end - first, out.words.shape[1], 32) * weights).sum(-1).to(out.words)
        out.position[first:end] = (prefix - 1 + seen.sum(1)).to(out.position)
        out.tail_position[request, :shift] = torch.arange(prefix - shift, prefix).to(out.tail_position)
        out.tail_position[request, shift : shift + end - first] = out.position[first:end]
        _link(parents[first:end], out.first_child[first:end], out.next_sibling[first:end])
        out.flat_row[first:end] = torch.arange(first, end).to(out.flat_row)
        if mask is not None:
            part = _masked(seen, prefix, layout).flatten()
            mask[done : done + len(part)] = part.to(mask)
            done += len(part)


def _visible(parents: list[int]) -> Tensor:
    """bool [n, n]: entry (i, j) says that j is i or an ancestor of i."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, node] = True
    return seen


def _link(parents: list[int], first_child: Tensor, next_sibling: Tensor) -> None:
    for node in range(len(parents) - 1, -1, -1):
        if (parent := parents[node]) >= 0:
            next_sibling[node] = first_child[parent]
            first_child[parent] = node


def _masked(seen: Tensor, prefix: int, layout: MaskLayout) -> Tensor:
    if layout == MaskLayout.BITS:
        return (seen * (1 << torch.arange(len(seen)))).sum(1)
    before = torch.ones(len(seen), prefix if layout == MaskLayout.FULL else 0, dtype=torch.bool)
    return torch.cat([before, seen], dim=1)


@triton.jit
def _build_kernel(
    parent,
    row_start,
    context,
    rows,
    requests,
    words,
    position,
    tail_position,
    first_child,
    next_sibling,
    flat_row,
    mask,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    NODES: tl.constexpr,
    NODE_TILE: tl.constexpr,
    REQUEST_LANES: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One program: NODE_TILE nodes of a request; the programs of one request more fill the padding rows."""
    request = tl.program_id(0)
    real = request < requests
    first = tl.load(row_start + request)
    end_of_tree = tl.load(row_start + request + 1, mask=real, other=0)  # 0, before all rows, for the padding
    end = tl.where(real, end_of_tree, rows)
    prefix = tl.load(context + request, mask=real, other=0)
    shift = prefix % PAGE
    word = tl.arange(0, WORD_LANES)[None, :]
    # Bits of the prefix: all of the words below `shift`, and its lowest bits in the word that it ends in.
    before = tl.where(32 * word + 32 <= shift, -1, (1 << (tl.maximum(shift - 32 * word, 0) % 32)) - 1)
    other = tl.arange(0, NODES)[None, :]
    parent_of_other = tl.load(parent + first + other, mask=first + other < end_of_tree, other=-1)
    for at in range(first + tl.program_id(1) * NODE_TILE, end, tl.num_programs(1) * NODE_TILE):
        row = at + tl.arange(0, NODE_TILE)
        inside = row < end
        node = row - first
        of_tree = row < end_of_tree
        own_parent = tl.load(parent + row, mask=of_tree, other=-1)
        bits = tl.where(real, before, 0) + tl.zeros([NODE_TILE, WORD_LANES], tl.int32)
        seen = tl.zeros([NODE_TILE, NODES], tl.int1)
        depth = tl.full([NODE_TILE], -1, tl.int32)
        above = tl.where(of_tree, node, -1)
        while tl.max(above) >= 0:
            live = above >= 0
            bit = tl.where(live, above + shift, 0)
            here = live[:, None] & (word == (bit // 32)[:, None])
            bits |= tl.where(here, (1 << (bit % 32))[:, None], 0)
            if LAYOUT != 0:
                seen = seen | (other == above[:, None])
            depth += live.to(tl.int32)
            above = tl.load(parent + first + above, mask=live, other=-1)
        place = tl.where(real, prefix + depth, 0)
        tl.store(words + row.to(tl.int64)[:, None] * WORDS + word, bits, mask=inside[:, None] & (word < WORDS))
        tl.store(position + row, place, mask=inside)
        tail = tail_position + request.to(tl.int64) * (32 * WORDS) + shift
        tl.store(tail + node, place, mask=of_tree)
        child = tl.min(tl.where(parent_of_other == node[:, None], other, NODES), axis=1)
        sibling = (parent_of_other == own_parent[:, None]) & (other > node[:, None]) & (own_parent >= 0)[:, None]
        sibling = tl.min(tl.where(sibling, other, NODES), axis=1)
        tl.store(first_child + row, tl.where(child < NODES, child, -1).to(tl.int64), mask=inside)
        tl.store(next_sibling + row, tl.where(sibling < NODES, sibling, -1).to(tl.int64), mask=inside)
        tl.store(flat_row + row, tl.where(real, row, -1).to(tl.int64), mask=inside)
        if LAYOUT != 0 and real:
            _store_mask(mask, seen, row_start, context, request, node, end - first, NODES, REQUEST_LANES, LAYOUT)
    if real & (tl.program_id(1) == 0):
        slot = tl.arange(0, 32 * WORD_LANES)
        tail = tail_position + request.to(tl.int64) * (32 * WORDS) + slot
        outside = (slot < shift) | (slot >= shift + end - first)
        tl.store(tail, tl.where(slot < shift, prefix - shift + slot, 0), mask=outside & (slot < 32 * WORDS))


@triton.jit
def _store_mask(
    mask,
    seen,
    row_start,
    context,
    request,
    node,
    count,
    NODES: tl.constexpr,
    REQUEST_LANES: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The rows of ``seen`` [tile, NODES] in one of the layouts; a request begins where all before it end."""
    earlier = tl.arange(0, REQUEST_LANES)
    begin = tl.load(row_start + earlier, mask=earlier < request, other=0)
    sizes = (tl.load(row_start + earlier + 1, mask=earlier < request, other=0) - begin).to(tl.int64)
    other = tl.arange(0, NODES)[None, :]
    inside = node < count
    if LAYOUT == 3:
        packed = tl.sum(tl.where(seen, tl.full([1, 1], 1, tl.int64) << other, 0), axis=1)
        tl.store(mask + tl.sum(sizes) + node, packed.to(mask.dtype.element_ty), mask=inside)
    else:
        prefix = 0
        widths = sizes
        if LAYOUT == 1:
            prefix = tl.load(context + request)
            widths += tl.load(context + earlier, mask=earlier < request, other=0)
        row = mask + tl.sum(sizes * widths) + (node.to(tl.int64) * (prefix + count))[:, None]
        for column in range(0, prefix, NODES):
            true = tl.full(seen.shape, 1, tl.int1)
            tl.store(row + column + other, true, mask=inside[:, None] & (column + other < prefix))
        tl.store(row + prefix + other, seen, mask=inside[:, None] & (other < count))


def build_tree_triton(
    parent: Tensor,
    row_start: Tensor,
    context: Tensor,
    out: TreeArrays,
    *,
    page: int,
    nodes: int = MOST_NODES,
    layout: MaskLayout = MaskLayout.NONE,
    mask: Tensor | None = None,
) -> None:
    """As ``build_tree_reference``, in one launch and without synchronisation; no tree has more than ``nodes`` nodes."""
    assert nodes <= MOST_NODES and (mask is not None) == (layout != MaskLayout.NONE)
    rows, words = out.words.shape
    requests = context.shape[0]
    lanes = triton.next_power_of_2(max(nodes, _NODE_TILE))
    with torch.cuda.device_of(parent):
        _build_kernel[requests + 1, lanes // _NODE_TILE](
            parent, row_start, context, rows, requests, out.words, out.position, out.tail_position, out.first_child,
            out.next_sibling, out.flat_row, parent if mask is None else mask, PAGE=page, WORDS=words,
            WORD_LANES=triton.next_power_of_2(words), NODES=lanes, NODE_TILE=_NODE_TILE,
            REQUEST_LANES=triton.next_power_of_2(requests), LAYOUT=int(layout), num_warps=4,
        )  # fmt: skip


def build_tree(
    parent: Tensor,
    row_start: Tensor,
    context: Tensor,
    *,
    page: int,
    words: int,
    nodes: int = MOST_NODES,
    layout: MaskLayout = MaskLayout.NONE,
    mask: Tensor | None = None,
    out: TreeArrays | None = None,
) -> TreeArrays:
    """The arrays of a batch of trees, made where the parents live; see ``build_tree_reference``.

    ``words`` is the number of mask words a row; ``nodes`` bounds the size of a tree; ``out`` are buffers to fill.
    """
    out = out or TreeArrays.empty(len(parent), len(context), words, parent.device)
    if parent.is_cuda:
        build_tree_triton(parent, row_start, context, out, page=page, nodes=nodes, layout=layout, mask=mask)
    else:
        build_tree_reference(parent, row_start, context, out, page=page, layout=layout, mask=mask)
    return out
