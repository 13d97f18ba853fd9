"""Commit: move the keys and values of accepted tree nodes to their final slots, over all layers in one launch.

Words
-----
flat slot  ``page_id * PAGE + offset``: place of one token in the pool, the same in every layer.
move       one token from a source slot to a target slot; keys are stored rotated by their tree position, so a move
           is all that a commit needs.
path       the moves of one request, ``[move_start[r], move_start[r + 1])``.

Invariant of a path: in the request's own slot numbers (not flat slots, whose pages are scattered) sources rise strictly
and ``target <= source``. So a target is never the source of a later move, and chunks of a path done in order are safe.
Within a chunk targets and sources may alias: it is loaded whole before it is stored. Paths of different requests
touch different slots.
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


def commit_kv_reference(cache: Tensor, source: Tensor, target: Tensor, move_start: Tensor) -> None:
    """Move slots in place: gather everything, then scatter.

    cache [layers, 2, pages, kv_heads, PAGE, head_dim]; source, target int64 [moves], flat slots; move_start int32
    [requests + 1]. Moves outside ``[move_start[0], move_start[requests])`` are padding and ignored.
    """
    page = cache.shape[4]
    moves = slice(int(move_start[0]), int(move_start[-1]))
    old, new = source[moves], target[moves]
    cache[:, :, new // page, :, new % page] = cache[:, :, old // page, :, old % page]


@triton.jit(do_not_specialize=["pages"])
def _commit_kernel(
    cache,
    source,
    target,
    move_start,
    pages,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MOVES: tl.constexpr,
):
    """One program: a whole path in one head of one layer's keys or values."""
    request = tl.program_id(0)
    plane = (tl.program_id(1) // KV_HEADS).to(tl.int64) * pages
    head = tl.program_id(1) % KV_HEADS
    end = tl.load(move_start + request + 1)
    dim = tl.arange(0, DIMS)[None, :]
    for first in range(tl.load(move_start + request), end, MOVES):
        move = first + tl.arange(0, MOVES)
        old = tl.load(source + move, mask=move < end, other=0)
        new = tl.load(target + move, mask=move < end, other=0)
        moved = (old != new)[:, None] & (dim < HEAD_DIM)
        old_at = ((plane + old // PAGE) * KV_HEADS + head) * PAGE + old % PAGE
        new_at = ((plane + new // PAGE) * KV_HEADS + head) * PAGE + new % PAGE
        values = tl.load(cache + old_at[:, None] * HEAD_DIM + dim, mask=moved)
        tl.debug_barrier()  # a warp's target may be another warp's source
        tl.store(cache + new_at[:, None] * HEAD_DIM + dim, values, mask=moved)


def commit_kv_triton(cache: Tensor, source: Tensor, target: Tensor, move_start: Tensor) -> None:
    """As ``commit_kv_reference``, in one launch and without synchronisation; paths keep the module's invariant."""
    layers, _, pages, kv_heads, page, head_dim = cache.shape
    assert cache.is_contiguous()
    dims = triton.next_power_of_2(head_dim)
    grid = (move_start.shape[0] - 1, layers * 2 * kv_heads)
    with torch.cuda.device_of(cache):
        _commit_kernel[grid](
            cache, source, target, move_start, pages,
            KV_HEADS=kv_heads, PAGE=page, HEAD_DIM=head_dim, DIMS=dims, MOVES=max(1, 1024 // dims), num_warps=4,
        )  # fmt: skip


def commit_kv(cache: Tensor, source: Tensor, target: Tensor, move_start: Tensor) -> None:
    """Move slots where the cache lives: the kernel on CUDA, the reference elsewhere. See the reference."""
    commit = commit_kv_triton if cache.is_cuda else commit_kv_reference
    commit(cache, source, target, move_start)
