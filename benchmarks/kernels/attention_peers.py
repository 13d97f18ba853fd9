"""The peers of the tree-attention benchmark: FlashInfer, torch's SDPA with a dense mask, FlexAttention.

A contestant is a function of a layer's index that returns [rows, q_heads, head_dim]. What a peer may prepare once a
forward (plans, masks, its own layout of the cache) is prepared outside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[[int], Tensor]
WORKSPACE_BYTES = 512 * 2**20


class Shape(Protocol):
    """What the peers read of a cell of the benchmark."""

    @property
    def requests(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def tree(self) -> Tensor: ...
    @property
    def query(self) -> Tensor: ...
    @property
    def caches(self) -> list[tuple[Tensor, Tensor]]: ...
    @property
    def batch(self) -> Any: ...


class FlashInfer:
    """FlashInfer 0.6 in the ways it can check a tree: a custom mask over all keys (FA2), or a pass over the prefix
    (FA3 or FA2), a ragged pass over the tree, and a merge; single nodes need no mask at all."""

    def __init__(self, q_heads: int, kv_heads: int, head_dim: int, page: int, scale: float) -> None:
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        import flashinfer  # type: ignore[import-not-found, unused-ignore]

        self.flashinfer, self.page = flashinfer, page
        self.heads = (q_heads, kv_heads, head_dim)
        self.options = {"sm_scale": scale, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self.masked = paged(_workspace(), "HND", backend="fa2")
        self.plain = paged(_workspace(), "HND", backend="fa2")
        self.prefix = {name: paged(_workspace(), "HND", backend=name) for name in ("fa3", "fa2")}
        self.ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend="fa2")

    def modes(self, cell: Shape) -> dict[str, Call]:
        modes = {"flashinfer_mask": self._mask(cell), **self._two_passes(cell)}
        return modes | ({"flashinfer_plain": self._plain(cell)} if cell.nodes == 1 else {})

    def _mask(self, cell: Shape) -> Call:
        mask = dense_mask(cell).flatten().repeat(cell.requests)
        self._plan_paged(self.masked, cell, cell.keys, custom_mask=mask)
        return lambda layer: self.masked.run(cell.query, cell.caches[layer])

    def _plain(self, cell: Shape) -> Call:
        self._plan_paged(self.plain, cell, cell.keys, causal=False)
        return lambda layer: self.plain.run(cell.query, cell.caches[layer])

    def _two_passes(self, cell: Shape) -> dict[str, Call]:
        rows = torch.arange(cell.requests + 1, dtype=torch.int32, device="cuda") * cell.nodes
        tree = cell.tree.flatten().repeat(cell.requests)
        self.ragged.plan(rows, rows, *self.heads, custom_mask=tree, **self.options)
        tails = [(_tail(k, cell), _tail(v, cell)) for k, v in cell.caches]

        def both(wrapper: Any) -> Call:
            def call(layer: int) -> Tensor:
                a = wrapper.run(cell.query, cell.caches[layer], return_lse=True)
                b = self.ragged.run(cell.query, *tails[layer], return_lse=True)
                merged: Tensor = self.flashinfer.merge_state(*a, *b)[0]
                return merged

            return call

        for wrapper in self.prefix.values():
            self._plan_paged(wrapper, cell, cell.context, causal=False)
        return {f"flashinfer_prefix_{name}": both(wrapper) for name, wrapper in self.prefix.items()}

    def _plan_paged(self, wrapper: Any, cell: Shape, keys: int, **options: Any) -> None:
        used = -(-keys // self.page)
        each = torch.arange(cell.requests + 1, dtype=torch.int32, device="cuda")
        pages = cell.batch.block_table[:, :used].reshape(-1).contiguous()
        last = torch.full((cell.requests,), keys - (used - 1) * self.page, dtype=torch.int32, device="cuda")
        wrapper.plan(each * cell.nodes, each * used, pages, last, *self.heads, self.page, **options, **self.options)


def _workspace() -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _tail(cache: Tensor, cell: Shape) -> Tensor:
    """Keys or values of the tree [requests * nodes, kv_heads, head_dim]."""
    rows = contiguous(cache, cell)[:, :, cell.context :]
    return rows.transpose(1, 2).flatten(0, 1).contiguous()


def contiguous(cache: Tensor, cell: Shape) -> Tensor:
    """Keys or values [requests, kv_heads, keys, head_dim], out of their pages."""
    pages = cell.batch.block_table[:, :-1].long()
    return cache[pages].transpose(1, 2).flatten(2, 3)[:, :, : cell.keys].contiguous()


def _layers(cell: Shape) -> list[tuple[Tensor, Tensor]]:
    return [(contiguous(k, cell), contiguous(v, cell)) for k, v in cell.caches]


def dense_mask(cell: Shape) -> Tensor:
    """bool [nodes, keys]"""
    mask = torch.ones(cell.nodes, cell.keys, dtype=torch.bool, device="cuda")
    mask[:, cell.context :] = cell.tree
    return mask


def by_head(cell: Shape) -> Tensor:
    """Queries [requests, q_heads, nodes, head_dim]"""
    return cell.query.view(cell.requests, cell.nodes, *cell.query.shape[1:]).transpose(1, 2)


def by_row(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(0, 1)


def _mask_of_all(cell: Shape) -> Tensor:
    """bool [requests, 1, nodes, keys], as models make it: every request has its own tree."""
    return dense_mask(cell).expand(cell.requests, 1, -1, -1).contiguous()


def sdpa_repeated(cell: Shape) -> Call:
    """SDPA without ``enable_gqa``: keys and values repeated for every query head first, which is timed too."""
    layers = _layers(cell)
    mask, query, group = _mask_of_all(cell), by_head(cell), cell.query.shape[1] // cell.caches[0][0].shape[1]

    def call(layer: int) -> Tensor:
        k, v = (x.repeat_interleave(group, dim=1) for x in layers[layer])
        return by_row(F.scaled_dot_product_attention(query, k, v, attn_mask=mask))

    return call


def sdpa_gqa(cell: Shape) -> Call:
    """SDPA with ``enable_gqa``."""
    layers = _layers(cell)
    mask, query = _mask_of_all(cell), by_head(cell)

    def call(layer: int) -> Tensor:
        k, v = layers[layer]
        return by_row(F.scaled_dot_product_attention(query, k, v, attn_mask=mask, enable_gqa=True))

    return call


def sdpa_packed(cell: Shape) -> Call:
    """SDPA with the query heads of a group packed into rows by hand; no model does it, but it is SDPA's best."""
    layers = _layers(cell)
    kv_heads = cell.caches[0][0].shape[1]
    group, head_dim = cell.query.shape[1] // kv_heads, cell.query.shape[2]
    query = by_head(cell).reshape(cell.requests, kv_heads, group * cell.nodes, head_dim)
    mask = _mask_of_all(cell).repeat(1, 1, group, 1)

    def call(layer: int) -> Tensor:
        k, v = layers[layer]
        out = F.scaled_dot_product_attention(query, k, v, attn_mask=mask)
        return by_row(out.view(cell.requests, kv_heads * group, cell.nodes, head_dim))

    return call


def flex_attention(cells: Sequence[Shape], limit_s: float) -> Iterator[tuple[tuple[int, int, int], Call]]:
    """FlexAttention, compiled for each shape, until the time is over; shapes that do not compile are left out."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    attend = torch.compile(flex, dynamic=False)
    start = time.perf_counter()
    for cell in cells:
        if time.perf_counter() - start > limit_s:
            return
        seen, context, nodes = cell.tree, cell.context, cell.nodes

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor, seen: Tensor = seen, context: int = context) -> Tensor:
            return (k < context) | seen[q, (k - context).clamp(0, len(seen) - 1)]

        k, v = (contiguous(x, cell) for x in cell.caches[0])
        try:
            mask = create_block_mask(
                lambda b, h, q, k, f=visible: f(b, h, q, k), None, None, nodes, cell.keys, device="cuda"
            )

            def call(layer: int, cell: Shape = cell, k: Tensor = k, v: Tensor = v, mask: Any = mask) -> Tensor:
                return by_row(attend(by_head(cell).contiguous(), k, v, block_mask=mask, enable_gqa=True))

            call(0)
        except Exception as failure:  # whatever the compiler raises
            print(
                f"FlexAttention does not compile at {cell.requests} x {cell.context} x {cell.nodes}: {failure!r:.200}"
            )
            continue
        yield (cell.requests, cell.context, nodes), call
