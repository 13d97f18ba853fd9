"""The tree builder and its reference against ``draftwood.tree``, all buffers between canaries.

On a machine without a GPU the kernel runs in Triton's interpreter (see ``tests/conftest.py``); with one it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from draftwood.kernels.tree_build import (
    MaskLayout,
    TreeArrays,
    build_tree,
    build_tree_reference,
    build_tree_triton,
    words_needed,
)
from draftwood.tree import TokenTree, ancestors, depths, links, pack_words

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BUILD = [
    pytest.param(build_tree_reference, id="reference"),
    pytest.param(build_tree_triton, id="compiled" if CUDA else "kernel", marks=[pytest.mark.gpu] if CUDA else []),
]
FENCE, CANARY = 64, 77
MASK_TYPES = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}


@dataclass(frozen=True)
class Batch:
    parents: Sequence[Sequence[int]]
    contexts: Sequence[int]
    padding: int = 0

    @property
    def starts(self) -> list[int]:
        return [0, *np.cumsum([len(p) for p in self.parents]).tolist()]

    @property
    def trees(self) -> list[TokenTree]:
        return [TokenTree.of(parents, range(len(parents))) for parents in self.parents]

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        flat = [p for parents in self.parents for p in parents] + [5] * self.padding
        lists = (flat, self.starts, list(self.contexts))
        parent, row_start, context = (torch.tensor(values, dtype=torch.int32, device=device) for values in lists)
        return parent, row_start, context

    def expected(self, page: int, words: int) -> dict[str, NDArray[np.integer]]:
        """Every array of ``TreeArrays``, from the definitions of ``draftwood.tree``."""
        rows = self.starts[-1] + self.padding
        want: dict[str, NDArray[np.integer]] = {
            "words": np.zeros((rows, words), np.int32),
            "position": np.zeros(rows, np.int32),
            "tail_position": np.zeros((len(self.parents), 32 * words), np.int32),
            **{name: np.full(rows, -1, np.int64) for name in ("first_child", "next_sibling", "flat_row")},
        }
        for request, (tree, context, start) in enumerate(zip(self.trees, self.contexts, self.starts, strict=False)):
            at, shift = slice(start, start + tree.size), context % page
            packed = pack_words(ancestors(tree), shift)
            want["words"][at, : packed.shape[1]] = packed
            want["position"][at] = context + depths(tree)
            want["tail_position"][request, :shift] = np.arange(context - shift, context)
            want["tail_position"][request, shift : shift + tree.size] = context + depths(tree)
            want["first_child"][at], want["next_sibling"][at] = links(tree)
            want["flat_row"][at] = np.arange(start, start + tree.size)
        return want

    def expected_mask(self, layout: MaskLayout) -> NDArray[np.integer]:
        parts = []
        for tree, context in zip(self.trees, self.contexts, strict=True):
            seen = ancestors(tree)
            if layout == MaskLayout.BITS:
                parts.append((seen * (1 << np.arange(tree.size, dtype=np.int64))).sum(1))
            elif layout == MaskLayout.FULL:
                parts.append(np.concatenate([np.ones((tree.size, context), np.bool_), seen], axis=1).ravel())
            else:
                parts.append(seen.ravel())
        return np.concatenate(parts).astype(np.int64)


@contextmanager
def fenced(like: Tensor) -> Iterator[Tensor]:
    """A buffer of canaries; they must be as they were around it afterwards."""
    buffer = torch.full((like.numel() + 2 * FENCE,), CANARY, dtype=torch.int64, device=like.device).to(like.dtype)
    before = buffer.clone()
    yield buffer[FENCE:-FENCE].view(like.shape)
    for part in (slice(None, FENCE), slice(-FENCE, None)):
        assert buffer[part].tolist() == before[part].tolist()


def check(
    build: Callable[..., None],
    batch: Batch,
    page: int = 64,
    nodes: int = 256,
    layout: MaskLayout = MaskLayout.NONE,
    device: str = DEVICE,
) -> None:
    words = words_needed(nodes, page)
    mask = None
    if layout != MaskLayout.NONE:
        bits = next(bits for bits in (8, 16, 32, nodes) if bits >= nodes)
        size, dtype = len(batch.expected_mask(layout)), MASK_TYPES[bits] if layout == MaskLayout.BITS else torch.bool
        mask = torch.zeros(size + FENCE, dtype=torch.int64, device=device).to(dtype)
        mask[size:] = 1
    options = {} if build is build_tree_reference else {"nodes": nodes}
    empty = TreeArrays.empty(batch.starts[-1] + batch.padding, len(batch.parents), words, device)
    buffers = [fenced(getattr(empty, field.name)) for field in fields(TreeArrays)]
    out = TreeArrays(*(buffer.__enter__() for buffer in buffers))
    build(*batch.inputs(device), out, page=page, layout=layout, mask=mask, **options)
    for name, want in batch.expected(page, words).items():
        np.testing.assert_array_equal(getattr(out, name).cpu().numpy(), want, err_msg=name)
    if mask is not None:
        np.testing.assert_array_equal(mask[:-FENCE].cpu().to(torch.int64).numpy(), batch.expected_mask(layout))
        assert mask[-FENCE:].cpu().to(torch.int64).eq(1).all()
    for buffer in buffers:
        buffer.__exit__(None, None, None)


def random_parents(rng: np.random.Generator, nodes: int) -> list[int]:
    return [-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, nodes))]


@st.composite
def batches(draw: st.DrawFn, most: int = 40) -> Batch:
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=4))
    parents = [[-1, *(draw(st.integers(0, i - 1)) for i in range(1, n))] for n in sizes]
    contexts = draw(st.lists(st.integers(0, 150), min_size=len(sizes), max_size=len(sizes)))
    return Batch(parents, contexts, draw(st.integers(0, 3)))


@pytest.mark.parametrize("build", BUILD)
@settings(max_examples=25, deadline=None)
@given(batch=batches(), page=st.sampled_from([16, 32, 64]))
def test_random_batches(build: Callable[..., None], batch: Batch, page: int) -> None:
    check(build, batch, page, nodes=40)


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("layout", [MaskLayout.FULL, MaskLayout.TREE, MaskLayout.BITS])
@settings(max_examples=10, deadline=None)
@given(batch=batches(most=32))
def test_mask_layouts(build: Callable[..., None], layout: MaskLayout, batch: Batch) -> None:
    check(build, batch, nodes=32, layout=layout)


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("nodes", [8, 16, 32])
def test_packed_masks_are_as_narrow_as_the_trees(build: Callable[..., None], nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    check(build, Batch([random_parents(rng, nodes)] * 3, [5, 0, 64]), nodes=nodes, layout=MaskLayout.BITS)


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("kind", ["chain", "star", "random"])
def test_trees_of_256_nodes(build: Callable[..., None], kind: str) -> None:
    rng = np.random.default_rng(1)
    parents = {"chain": range(-1, 255), "star": [-1] + [0] * 255, "random": random_parents(rng, 256)}[kind]
    layout = MaskLayout.FULL if kind == "random" else MaskLayout.NONE
    check(build, Batch([list(parents), [-1]], [1023, 64], padding=40), layout=layout)


@pytest.mark.parametrize("build", BUILD)
def test_requests_without_nodes_and_contexts_at_the_edges_of_pages_and_words(build: Callable[..., None]) -> None:
    edges = [0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 127]
    rng = np.random.default_rng(2)
    check(build, Batch([random_parents(rng, 1 + i % 5) for i in range(len(edges))], edges, padding=5), nodes=8)


@pytest.mark.parametrize("build", BUILD)
def test_empty_slots_of_a_static_batch(build: Callable[..., None]) -> None:
    """Slots behind the real requests start and end at the end of the rows, with context 0."""
    parent, row_start, context = (
        torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([-1, 0, 0, 9], [0, 3, 3, 3], [70, 0, 0])
    )
    out = TreeArrays.empty(4, 3, 4, DEVICE)
    build(parent, row_start, context, out, page=64)
    assert out.position.tolist() == [70, 71, 71, 0]
    assert out.flat_row.tolist() == [0, 1, 2, -1]
    assert out.first_child.tolist() == [1, -1, -1, -1]
    assert not out.words[3].any() and not out.tail_position[1:].any()


def test_dispatch_allocates_and_fills_given_buffers() -> None:
    inputs = Batch([[-1, 0]], [3]).inputs(DEVICE)
    made = build_tree(*inputs, page=16, words=2, nodes=2)
    given = TreeArrays.empty(2, 1, 2, DEVICE)
    assert build_tree(*inputs, page=16, words=2, nodes=2, out=given) is given
    assert given.words.tolist() == made.words.tolist() == [[15, 0], [31, 0]]
