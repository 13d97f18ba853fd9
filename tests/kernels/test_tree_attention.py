"""The tree-attention kernel and its reference against a dense float64 oracle that walks the parents of each row.

On a machine without a GPU the kernel runs in Triton's interpreter (see ``tests/conftest.py``); with one it is compiled
and the ``gpu`` cases run. Every slot that a request does not own holds NaN, every unused block-table entry a page that
does not exist, and every buffer lies between canaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.kernels import tree_attention as module
from draftwood.kernels.tree_attention import (
    AttentionBatch,
    LaunchPlan,
    plan_invariant,
    plan_launch,
    tree_attention,
    tree_attention_reference,
    tree_attention_triton,
)

Attend = Callable[..., Tensor]

CUDA = torch.cuda.is_available()
interpreted = pytest.mark.skipif(CUDA, reason="kernels are compiled on a machine with a GPU")


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")(test))


PAGE_A_CHUNK = LaunchPlan(
    row_tile=16, key_tile=16, warps=4, stages=1, slots=8, min_chunk=1, fixed_chunk=1
)  # fmt: skip
"""Every page a chunk of its own, whatever else is in the batch."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NO_PAGE = 2**31 - 1
FENCE = 4096


@dataclass(frozen=True)
class Request:
    context: int
    parents: Sequence[int]  # of every node in the tail, -1: hangs on the committed prefix
    new: int | None = None  # the last `new` nodes are rows of this forward, the others are cached already; None: all

    @property
    def keys(self) -> int:
        return self.context + len(self.parents)

    @property
    def rows(self) -> range:
        return range(0 if self.new is None else len(self.parents) - self.new, len(self.parents))

    def lineage(self, node: int) -> list[int]:
        """The node and its ancestors in the tail."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path

    def position(self, node: int) -> int:
        return self.context + len(self.lineage(node)) - 1


@dataclass(frozen=True)
class Geometry:
    group: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    page: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Case:
    requests: Sequence[Request]
    geometry: Geometry
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    sinks: Tensor | None
    batch: AttentionBatch
    keys: Sequence[Tensor]  # per request [keys, kv_heads, head_dim], in slot order
    values: Sequence[Tensor]
    fences: Fences

    def run(self, attend: Attend) -> Tensor:
        out = self.run_unchecked(attend)
        self.fences.check()
        return out

    def run_unchecked(self, attend: Attend) -> Tensor:
        g = self.geometry
        options = {"scale": g.scale, "window": g.window, "softcap": g.softcap, "sinks": self.sinks}
        return attend(self.query, self.key_cache, self.value_cache, self.batch, **options)


def canary_of(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else NO_PAGE


class Fences:
    """Hands out tensors that lie between canaries, and checks the canaries."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def put(self, values: Tensor) -> Tensor:
        canary = canary_of(values.dtype)
        buffer = torch.full((values.numel() + 2 * FENCE,), canary, dtype=values.dtype, device=self.device)
        self.buffers.append((buffer, buffer[:FENCE].clone()))
        inner = buffer[FENCE : FENCE + values.numel()].view(values.shape)
        inner.copy_(values)
        return inner

    def check(self) -> None:
        for buffer, canary in self.buffers:
            for side in (buffer[:FENCE], buffer[-FENCE:]):
                assert torch.equal(side.view(torch.uint8), canary.view(torch.uint8)), "written outside a buffer"


def random_tree(rng: np.random.Generator, nodes: int) -> list[int]:
    return [-1] + [int(rng.integers(-1 if rng.random() < 0.1 else 0, i)) for i in range(1, nodes)]


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


def mask_words(request: Request, page: int, width: int) -> np.ndarray:
    """int64 [tail, width]; row = parent's row plus its own bit, the roots' parent sees the context from base on."""
    begin = request.context % page
    rows = np.zeros((len(request.parents), width * 32), dtype=bool)
    for node, parent in enumerate(request.parents):
        rows[node] = rows[parent] if parent >= 0 else np.arange(width * 32) < begin
        rows[node, begin + node] = True
    return (rows.reshape(-1, width, 32) << np.arange(32)).sum(2)


def build(
    requests: Sequence[Request],
    geometry: Geometry,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padding_rows: int = 0,
    padding_requests: int = 0,
    spare_pages: int = 3,
) -> Case:
    """A batch with random queries, keys and values in scattered pages. Requests draw their own data, by place."""
    page, kv_heads, head_dim = geometry.page, geometry.kv_heads, geometry.head_dim
    used = [-(-r.keys // page) for r in requests]
    count, columns = len(requests) + padding_requests, max(used) + 1
    pages = sum(used) + spare_pages
    ids = pages - 1 - np.random.default_rng(seed).permutation(sum(used) + min(spare_pages, 3))
    width = max(-(-(r.keys - r.context // page * page) // 32) for r in requests)
    table = np.full((count, columns), NO_PAGE, dtype=np.int64)
    caches = torch.full((2, pages, kv_heads, page, head_dim), float("nan"), dtype=dtype, device=device)
    tail_position = np.full((count, width * 32), NO_PAGE, dtype=np.int64)
    words, position, page_id, page_offset, query, logical = [], [], [], [], [], []
    for r, request in enumerate(requests):
        table[r, : used[r]], ids = ids[: used[r]], ids[used[r] :]
        draw = torch.Generator().manual_seed(1000 * seed + r)
        kv = torch.randn(2, request.keys, kv_heads, head_dim, generator=draw).to(dtype)
        slots = np.arange(request.keys)
        caches[:, table[r, slots // page], :, slots % page] = kv.transpose(0, 1).to(device)
        logical.append(kv.to(device))
        query.append(torch.randn(len(request.rows), kv_heads * geometry.group, head_dim, generator=draw).to(dtype))
        words.append(mask_words(request, page, width)[request.rows])
        base = request.context // page * page
        at = [*range(base, request.context), *map(request.position, range(len(request.parents)))]
        tail_position[r, : len(at)] = at
        position += [request.position(node) for node in request.rows]
        here = request.context + np.array(request.rows)
        page_id.append(table[r, here // page])
        page_offset.append(here % page)
    row_start = np.cumsum([0] + [len(r.rows) for r in requests] + [0] * padding_requests)
    fences = Fences(device)

    def put(values: object, kind: torch.dtype = torch.int32) -> Tensor:
        array = np.asarray(values)
        return fences.put(torch.from_numpy(array.astype(np.int64)).to(kind))

    batch = AttentionBatch(
        row_start=put(row_start),
        context=put([r.context for r in requests] + [0] * padding_requests),
        keys=put([r.keys for r in requests] + [0] * padding_requests),
        words=put(np.concatenate([*words, np.zeros((padding_rows, width), dtype=np.int64)])),
        block_table=put(table),
        position=put(position + [0] * padding_rows),
        tail_position=put(tail_position),
        page_id=put(np.concatenate(page_id), torch.int64),
        page_offset=put(np.concatenate(page_offset), torch.int64),
    )
    padding = torch.full((padding_rows, kv_heads * geometry.group, head_dim), float("nan"), dtype=dtype)
    sinks = torch.randn(kv_heads * geometry.group, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Case(
        requests=requests,
        geometry=geometry,
        query=fences.put(torch.cat([*query, padding])),
        key_cache=fences.put(caches[0]),
        value_cache=fences.put(caches[1]),
        sinks=fences.put(sinks) if geometry.sinks else None,
        batch=batch,
        keys=[kv[0] for kv in logical],
        values=[kv[1] for kv in logical],
        fences=fences,
    )


def oracle(case: Case) -> Tensor:
    """Dense float64 attention, request by request, from the logical keys and the parents alone."""
    g, first, outs = case.geometry, 0, []
    for request, keys, values in zip(case.requests, case.keys, case.values, strict=True):
        n = len(request.rows)
        seen = torch.zeros(n, request.keys, dtype=torch.bool)
        seen[:, : request.context] = True
        there = torch.tensor([*range(request.context), *map(request.position, range(len(request.parents)))])
        for i, node in enumerate(request.rows):
            seen[i, [request.context + a for a in request.lineage(node)]] = True
            if g.window:
                seen[i] &= there > request.position(node) - g.window
        q = case.query[first : first + n].double()
        k, v = (x.double().repeat_interleave(g.group, dim=1) for x in (keys, values))
        scores = torch.einsum("nhd,khd->hnk", q, k) * g.scale
        if g.softcap:
            scores = g.softcap * torch.tanh(scores / g.softcap)
        weights = scores.masked_fill(~seen.to(scores.device), -torch.inf).exp()
        norm = weights.sum(2)
        if case.sinks is not None:
            norm = norm + case.sinks.double().exp()[:, None]
        outs.append(torch.einsum("hnk,khd->nhd", weights / norm[:, :, None], v))
        first += n
    padding = torch.zeros_like(case.query[first:], dtype=torch.float64)
    return torch.cat([*outs, padding])


def kernel(case: Case, **plan: int) -> Tensor:
    """The Triton kernel with parts of its plan replaced."""
    planned = plan_launch(case.query, case.key_cache, case.batch)
    return case.run(partial(tree_attention_triton, plan=replace(planned, **plan)))


def assert_right(out: Tensor, case: Case) -> None:
    assert out.dtype == case.query.dtype
    close = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(out.double(), oracle(case), rtol=close, atol=close)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: waking a second thread costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def fenced_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the launcher allocates starts as NaN and lies between canaries too."""
    plain, fences = torch.empty, Fences("cpu")

    def empty(*shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        fences.device = str(device)
        return fences.put(plain(*shape, dtype=dtype, device=device).fill_(canary_of(dtype)))

    monkeypatch.setattr(module, "torch", _TorchWith(empty))
    yield
    fences.check()


class _TorchWith:
    """The torch module with its own ``empty``, as seen by the module under test."""

    def __init__(self, empty: Attend) -> None:
        self.empty = empty

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def mixed(seed: int, page: int, largest: int = 24) -> list[Request]:
    """Plain rows, a chain, trees, a prefill chunk, and a level of a tree whose earlier levels are cached."""
    rng = np.random.default_rng(seed)
    levels = random_tree(rng, 19)
    return [
        Request(2 * page + 5, [-1]),
        Request(page - 1, random_tree(rng, int(rng.integers(2, largest)))),
        Request(0, chain(page + 9)),
        Request(page + 1, chain(5)),
        Request(0, [-1]),
        Request(3 * page, levels, new=6),
        Request(int(rng.integers(1, 3 * page)), random_tree(rng, largest)),
    ]


ATTEND = [
    pytest.param(tree_attention_reference, id="reference"),
    pytest.param(tree_attention_triton, id="kernel", marks=interpreted),
]
GEOMETRIES = [
    Geometry(group=1, head_dim=64, page=16),
    Geometry(group=3, head_dim=64, page=16, kv_heads=2),
    Geometry(group=4, head_dim=128, page=32),
    Geometry(group=5, head_dim=96, page=64),
    Geometry(group=7, head_dim=256, page=32),
    Geometry(group=8, head_dim=96, page=16),
]
OPTIONS = [
    Geometry(group=3, window=7),
    Geometry(group=3, window=1),
    Geometry(group=4, window=40, page=32, head_dim=96),
    Geometry(group=2, softcap=2.0),
    Geometry(group=2, sinks=True),
    Geometry(group=5, window=20, softcap=5.0, sinks=True, kv_heads=2),
]


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("geometry", GEOMETRIES + OPTIONS, ids=str)
def test_ragged_batches_of_every_kind_match_the_oracle(attend: Attend, geometry: Geometry) -> None:
    case = build(mixed(1, geometry.page), geometry)
    assert_right(case.run(attend), case)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("page", [16, 32, 64])
def test_random_trees_of_up_to_seventy_nodes(attend: Attend, page: int) -> None:
    rng = np.random.default_rng(page)
    sizes = [1, 70, *(int(n) for n in rng.integers(2, 70, 2))]
    requests = [Request(int(rng.integers(0, 70)), random_tree(rng, n)) for n in sizes]
    case = build(requests, Geometry(group=2, page=page), seed=page)
    assert_right(case.run(attend), case)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("page", [16, 32, 64])
def test_contexts_and_tails_that_end_at_page_edges(attend: Attend, page: int) -> None:
    rng = np.random.default_rng(page)
    contexts = [0, 1, page - 1, page, page + 1, 2 * page - 1, 2 * page]
    requests = [Request(c, random_tree(rng, n)) for c in contexts for n in (1, page - c % page, page - c % page + 1)]
    case = build(requests, Geometry(group=1, page=page))
    assert_right(case.run(attend), case)


@pytest.mark.parametrize("attend", ATTEND)
def test_a_prefill_chunk_spans_many_mask_words_beside_small_trees(attend: Attend) -> None:
    rng = np.random.default_rng(0)
    case = build([Request(0, chain(290)), Request(37, random_tree(rng, 9)), Request(21, chain(70))], Geometry())
    assert case.batch.words.shape[1] > 8
    assert_right(case.run(attend), case)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("window", [0, 5])
def test_drafting_level_by_level_sees_the_cached_levels(attend: Attend, window: int) -> None:
    levels = [[-1] * 3, [0, 0, 1, 2, 2], [3, 4, 4, 6, 7, 7], [8, 8, 9, 13]]
    parents: list[int] = []
    for level in levels:
        parents = parents + level
        requests = [Request(c, parents, new=len(level)) for c in (0, 15, 30)]
        case = build(requests, Geometry(group=3, window=window))
        assert_right(case.run(attend), case)


def by_head(case: Case, neighbours: Sequence[int]) -> Case:
    """The same with caches that lie in memory by heads, and with the pages of some requests in a row."""
    old, pages = case.batch.block_table.long(), len(case.key_cache)
    order = [int(page) for r in neighbours for page in old[r] if page != NO_PAGE]
    order += [page for page in range(pages) if page not in order]
    place = torch.empty(pages, dtype=torch.long)
    place[torch.tensor(order)] = torch.arange(pages)
    table = torch.where(old == NO_PAGE, old, place[old.clamp(max=pages - 1)]).int()
    caches = [
        case.fences.put(cache[order].transpose(0, 1).contiguous()).transpose(0, 1)
        for cache in (case.key_cache, case.value_cache)
    ]
    return replace(case, key_cache=caches[0], value_cache=caches[1], batch=replace(case.batch, block_table=table))


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("window", [0, 40])
def test_the_reference_reads_neighbouring_pages_in_place(kv_heads: int, window: int) -> None:
    """Long and short requests, prefill beside trees; what is read in place and what is gathered is the same."""
    rng = np.random.default_rng(3)
    requests = [Request(290, random_tree(rng, 9)), Request(131, chain(60)), Request(7, chain(2)), Request(300, [-1])]
    case = build(requests, Geometry(kv_heads=kv_heads, window=window, group=3))
    for neighbours in ([], [0], [0, 1], [2, 3], [3, 1, 0, 2]):
        moved = by_head(case, neighbours)
        out = moved.run(tree_attention_reference)
        assert_right(out, moved)
        groups = [group for plan in moved.batch.reference_plans.values() for group in plan]
        alone = {int(group.rows[0]) for group in groups if group.first is not None}
        long = {int(moved.batch.row_start[r]) for r in neighbours if r != 2}
        assert long <= alone


@interpreted
@pytest.mark.parametrize(("slots", "fixed_chunk"), [(1, 0), (9, 0), (30, 0), (1, 1), (1, 3)])
@pytest.mark.parametrize("geometry", [Geometry(window=18), Geometry(sinks=True, head_dim=96, softcap=3.0)], ids=str)
def test_any_number_of_chunks_gives_the_same_answer(geometry: Geometry, slots: int, fixed_chunk: int) -> None:
    rng = np.random.default_rng(slots)
    contexts = [0, 17, 63, 64, 110]
    case = build([Request(c, random_tree(rng, 3) + list(range(2, 7))) for c in contexts], geometry, padding_rows=20)
    assert_right(kernel(case, slots=slots, min_chunk=1, fixed_chunk=fixed_chunk), case)


@interpreted
def test_one_long_request_in_a_bucket_of_many_is_cut_into_many_chunks() -> None:
    case = build([Request(430, chain(3))], Geometry(kv_heads=2), padding_rows=5, padding_requests=15)
    assert_right(kernel(case, slots=64, min_chunk=1), case)


@interpreted
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize(("row_tile", "key_tile"), [(16, 64), (32, 16), (128, 32)])
def test_any_tiling_gives_the_same_answer(row_tile: int, key_tile: int, descriptors: bool) -> None:
    case = build(mixed(2, 64, largest=12)[3:], Geometry(group=3, page=64))
    tiling = {"row_tile": row_tile, "key_tile": key_tile, "descriptors": descriptors}
    assert_right(kernel(case, **tiling, slots=16, min_chunk=1), case)


@interpreted
def test_half_precision() -> None:
    case = build(mixed(3, 16), Geometry(group=4, head_dim=64), dtype=torch.float16)
    assert_right(case.run(tree_attention_triton), case)


@interpreted
def test_queries_may_be_a_strided_view() -> None:
    case = build(mixed(4, 16, largest=6), Geometry(group=2, kv_heads=2))
    rows, heads, head_dim = case.query.shape
    by_head = torch.full((heads, rows, 3 * head_dim), float("nan"))
    by_head[:, :, head_dim : 2 * head_dim] = case.query.transpose(0, 1)
    view = replace(case, query=by_head[:, :, head_dim : 2 * head_dim].transpose(0, 1))
    assert_right(view.run(tree_attention_triton), case)
    assert_right(view.run(tree_attention_reference), case)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("neighbours", [1, 7, 31])
def test_bug_3_neighbours_full_of_nan_change_no_bit(attend: Attend, neighbours: int) -> None:
    if attend is tree_attention_triton:
        attend = partial(attend, plan=PAGE_A_CHUNK)
    rng = np.random.default_rng(neighbours)
    request = Request(37, random_tree(rng, 9))
    others = [Request(int(rng.integers(0, 40)), random_tree(rng, int(rng.integers(1, 9)))) for _ in range(neighbours)]
    alone, together = build([request], Geometry(group=3)), build([request, *others], Geometry(group=3))
    foreign = torch.ones(len(together.key_cache), dtype=torch.bool)
    foreign[together.batch.block_table[0, :3].long()] = False
    for cache in (together.key_cache, together.value_cache):
        cache[foreign] = float("nan")
    together.query[9:] = float("nan")
    assert torch.equal(alone.run(attend), together.run(attend)[:9])


def beside_a_useless_sibling(window: int, dtype: torch.dtype) -> tuple[Case, Case]:
    """A chain, and the same chain with a sibling before its first node."""
    geometry, context, nodes = Geometry(group=3, window=window), 21, 5
    plain = build([Request(context, chain(nodes))], geometry, dtype=dtype)
    other = build([Request(context, [-1, -1, *range(1, nodes)])], geometry, dtype=dtype, seed=1)
    slots = np.array([*range(context), *range(context + 1, context + 1 + nodes)])
    table = other.batch.block_table[0].numpy()
    for cache, values in ((other.key_cache, plain.keys[0]), (other.value_cache, plain.values[0])):
        cache[table[slots // geometry.page], :, slots % geometry.page] = values
    other.query[1:] = plain.query
    return plain, other


@pytest.mark.parametrize("window", [0, 3])
def test_bug_6_a_sibling_before_a_chain_changes_no_bit_of_it(window: int) -> None:
    """Sums over one more (masked) key may be grouped otherwise, so bits are compared after rounding from float64."""
    plain, other = beside_a_useless_sibling(window, torch.float64)
    alone, beside = plain.run(tree_attention_reference), other.run(tree_attention_reference)
    assert torch.equal(alone.float(), beside[1:].float())


@interpreted
@pytest.mark.parametrize("window", [0, 3])
def test_bug_6_in_the_kernel(window: int) -> None:
    plain, other = beside_a_useless_sibling(window, torch.float32)
    alone, beside = plain.run(tree_attention_triton), other.run(tree_attention_triton)
    torch.testing.assert_close(beside[1:], alone, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("window", [0, 3])
def test_bug_6_where_sums_are_exact_no_bit_differs(attend: Attend, window: int) -> None:
    """Queries of zeros weigh all keys alike and the values are whole numbers, so that no grouping rounds."""
    plain, other = beside_a_useless_sibling(window, torch.float32)
    for case in (plain, other):
        case.query.zero_()
        case.value_cache.copy_((8 * case.value_cache).round())
    alone, beside = plain.run(attend), other.run(attend)[1:]
    assert torch.equal(alone, beside) and alone.std() > 0.1


def mixed_trees(batch_size: int) -> list[Request]:
    """Alternating plain rows and small trees."""
    rng = np.random.default_rng(batch_size)
    return [
        Request(int(rng.integers(0, 20)), random_tree(rng, int(rng.integers(2, 7))) if r % 2 else [-1])
        for r in range(batch_size)
    ]


def bucket(size: int) -> int:
    return 1 << (size - 1).bit_length()


def assert_padding_changes_nothing(attend: Attend, batch_size: int, geometry: Geometry, device: str) -> None:
    """Buckets of 1, 2, 4, 8... rows and requests: padding rows come out as zeros, the others as without padding."""
    requests = mixed_trees(batch_size)
    eager = build(requests, geometry, device=device)
    rows = len(eager.query)
    padded = build(
        requests, geometry, device=device,
        padding_rows=bucket(rows) - rows, padding_requests=bucket(batch_size) - batch_size,
    )  # fmt: skip
    out = padded.run(attend)
    assert_right(out, padded)
    assert torch.equal(out[:rows], eager.run(attend))


def test_bug_28_every_batch_size_in_its_bucket_in_the_reference() -> None:
    for batch_size in range(1, 66):
        assert_padding_changes_nothing(tree_attention_reference, batch_size, Geometry(), "cpu")


@interpreted
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 9, 33])
def test_bug_28_batch_sizes_in_their_bucket_in_the_kernel(batch_size: int) -> None:
    attend = partial(tree_attention_triton, plan=PAGE_A_CHUNK)
    assert_padding_changes_nothing(attend, batch_size, Geometry(), "cpu")


def narrowed(case: Case, key_scale: float, value_scale: float) -> Case:
    """The case with its cache in float8_e4m3fn; what the oracle reads is rounded likewise."""

    def stored(x: Tensor, scale: float) -> Tensor:
        return (x.float() / scale).to(torch.float8_e4m3fn)

    def read(x: Tensor, scale: float) -> Tensor:
        return stored(x, scale).float() * scale

    return replace(
        case,
        key_cache=stored(case.key_cache, key_scale),
        value_cache=stored(case.value_cache, value_scale),
        keys=[read(k, key_scale) for k in case.keys],
        values=[read(v, value_scale) for v in case.values],
    )


def assert_narrow_cache_is_right(attend: Attend, geometry: Geometry, dtype: torch.dtype, device: str = "cpu") -> None:
    case = narrowed(build(mixed(6, geometry.page), geometry, dtype=dtype, device=device), 0.02, 0.5)
    assert_right(case.run(partial(attend, key_scale=0.02, value_scale=0.5)), case)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("geometry", [Geometry(group=3), Geometry(head_dim=96, softcap=3.0, sinks=True)], ids=str)
def test_a_cache_of_eight_bits(attend: Attend, geometry: Geometry) -> None:
    assert_narrow_cache_is_right(attend, geometry, torch.float16)


@interpreted
def test_every_finite_value_of_eight_bits_is_read_exactly() -> None:
    """One key per value: its product with a query of ones, alone in the softmax, returns the value as it is."""
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    rows = len(every)
    case = build([Request(0, [-1])] * rows, Geometry(group=1), dtype=torch.float16)
    stored = every.view(torch.float8_e4m3fn)
    values = case.value_cache.clone().to(torch.float8_e4m3fn)
    values[case.batch.block_table[:, 0].long(), 0, 0] = stored[:, None].expand(-1, 64)
    keys = torch.zeros_like(case.key_cache).to(torch.float8_e4m3fn)
    out = tree_attention_triton(case.query, keys, values, case.batch, scale=1.0)
    assert torch.equal(out[:, 0, :], stored[:, None].to(torch.float16).expand(-1, 64))


def assert_alone_as_in_company(geometry: Geometry, longest: int, chunk: int, dtype: torch.dtype, device: str) -> None:
    """The same bits for a request alone and as the first of 33, whatever lengths the others have."""
    rng = np.random.default_rng(5)
    request = Request(longest - 3, random_tree(rng, 9))
    others = [Request(int(rng.integers(0, longest)), random_tree(rng, int(rng.integers(1, 9)))) for _ in range(32)]
    alone, together = (
        build(requests, geometry, dtype=dtype, device=device) for requests in ([request], [request, *others])
    )

    def attend(case: Case) -> Tensor:
        plan = replace(plan_invariant(case.query, case.key_cache), fixed_chunk=chunk)
        return case.run(partial(tree_attention_triton, plan=plan))

    assert torch.equal(attend(alone), attend(together)[: len(request.rows)])


@interpreted
def test_with_the_invariant_plan_the_rest_of_the_batch_changes_no_bit() -> None:
    assert_alone_as_in_company(Geometry(group=3), longest=70, chunk=2, dtype=torch.float32, device="cpu")


def test_the_plan_reads_shapes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(mixed(8, 16), Geometry())
    expected = plan_launch(case.query, case.key_cache, case.batch)
    for name in ("row_start", "context", "keys", "words", "position", "tail_position"):
        getattr(case.batch, name).fill_(0)
    assert plan_launch(case.query, case.key_cache, case.batch) == expected


@interpreted
def test_on_the_cpu_the_chooser_takes_the_reference() -> None:
    case = build(mixed(5, 16), Geometry(softcap=4.0, sinks=True, window=9))
    assert torch.equal(case.run(tree_attention), case.run(tree_attention_reference))


# On a GPU ---------------------------------------------------------------------------------------------------------


def serving(seed: int) -> list[Request]:
    """A step of a busy verifier: long contexts, trees of up to 64 nodes, plain rows and a prefill chunk."""
    rng = np.random.default_rng(seed)
    trees = [Request(int(rng.integers(100, 4000)), random_tree(rng, int(rng.integers(8, 65)))) for _ in range(6)]
    return [*trees, Request(3000, [-1]), Request(513, chain(300)), Request(2048, random_tree(rng, 200), new=40)]


@gpu
@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [(g, dtype) for dtype in (torch.bfloat16, torch.float32) for g in GEOMETRIES + OPTIONS]
    + [(g, torch.float16) for g in GEOMETRIES],
    ids=str,
)
def test_compiled_ragged_batches_match_the_oracle(geometry: Geometry, dtype: torch.dtype) -> None:
    small = build(mixed(1, geometry.page), geometry, dtype=dtype, device="cuda")
    assert_right(small.run(tree_attention), small)
    large = build(serving(1), replace(geometry, kv_heads=4), dtype=dtype, device="cuda")
    assert_right(large.run(tree_attention), large)


def at_page_edges(seed: int, page: int) -> list[Request]:
    """Contexts of 0 to 32k around the edges of pages and mask words, with trees of 1 to 256 nodes."""
    rng = np.random.default_rng(seed)
    contexts = [0, 1, page - 1, page, page + 1, 31, 32, 33, 1024, 4095, 8191 + page // 2, 32767, 32768 - page]
    return [Request(c, random_tree(rng, int(2 ** rng.uniform(0, 8)))) for c in contexts]


@gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("options", [{}, {"window": 600, "sinks": True}], ids=["plain", "window and sinks"])
def test_compiled_head_sizes_groups_and_page_edges(head_dim: int, group: int, options: dict[str, int]) -> None:
    page = 64 if head_dim < 256 else 32
    geometry = Geometry(group=group, kv_heads=2, head_dim=head_dim, page=page, **options)
    case = build(at_page_edges(group, page), geometry, dtype=torch.bfloat16, device="cuda", padding_rows=7)
    assert_right(case.run(tree_attention), case)
    plain = build([Request(r.context, [-1]) for r in case.requests], geometry, dtype=torch.bfloat16, device="cuda")
    assert_right(plain.run(tree_attention), plain)


@gpu
@pytest.mark.parametrize("geometry", GEOMETRIES + OPTIONS, ids=str)
def test_compiled_cache_of_eight_bits(geometry: Geometry) -> None:
    assert_narrow_cache_is_right(tree_attention, geometry, torch.float16, "cuda")
    assert_narrow_cache_is_right(tree_attention, geometry, torch.bfloat16, "cuda")


@gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiled_with_the_invariant_plan_the_rest_of_the_batch_changes_no_bit(head_dim: int) -> None:
    geometry = Geometry(group=4, kv_heads=2, page=64, head_dim=head_dim)
    assert_alone_as_in_company(geometry, longest=5000, chunk=16, dtype=torch.bfloat16, device="cuda")


@gpu
@pytest.mark.parametrize("geometry", [Geometry(group=4, kv_heads=8, page=64, head_dim=d) for d in (64, 128)], ids=str)
@pytest.mark.parametrize("new", [1, 9])
def test_the_plan_knows_how_many_programs_fit(geometry: Geometry, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build([Request(900, chain(9), new=new)], geometry, dtype=torch.bfloat16, device="cuda")
    made = []
    launch = module._tree_attention_kernel

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: made.append(launch[grid](*args, **options))

    monkeypatch.setattr(module, "_tree_attention_kernel", Spy())
    case.run(tree_attention)
    device = torch.cuda.get_device_properties(0)
    plan = plan_launch(case.query, case.key_cache, case.batch)
    registers = -(-made[0].n_regs // 8) * 8 * 32 * plan.warps
    fit = min(65536 // registers, device.shared_memory_per_multiprocessor // (made[0].metadata.shared + 1024))
    assert made[0].n_spills == 0
    assert plan.slots <= device.multi_processor_count * fit


@pytest.mark.parametrize(
    ("requests", "nodes", "alone"),
    [
        *[(1, 1, True), (4, 1, True), (2, 16, True), (8, 16, True), (13, 16, True), (16, 16, True)],
        *[(8, 1, False), (1, 32, False), (6, 16, False), (9, 16, False), (12, 16, False), (17, 16, False)],
    ],
)
def test_a_program_has_a_multiprocessor_where_equal_chunks_fill_the_device(
    requests: int, nodes: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU, 32 query heads and 8 key/value heads."""
    hopper = module._Device(multiprocessors=132, shared_bytes=227 << 10, tensor_cores=True, hopper=True)
    monkeypatch.setattr(module, "_device", lambda query: hopper)
    query, cache = (torch.empty(*size, dtype=torch.bfloat16) for size in ((requests * nodes, 32, 128), (1, 8, 64, 128)))
    zeros = torch.zeros(requests, 40, dtype=torch.int32)
    plan = plan_launch(query, cache, AttentionBatch(zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros))
    assert (plan.slots == 132) == alone
    assert (plan.stages == 4) == alone


@gpu
@pytest.mark.parametrize("batch_size", range(1, 66))
def test_bug_28_every_batch_size_in_its_bucket_compiled(batch_size: int) -> None:
    attend = partial(tree_attention_triton, plan=replace(PAGE_A_CHUNK, stages=2))
    assert_padding_changes_nothing(attend, batch_size, Geometry(kv_heads=2), "cuda")


@gpu
@pytest.mark.parametrize("slots", [1, 40, 264, 2000])
@pytest.mark.parametrize("page", [16, 64])
def test_compiled_chunks_give_the_same_answer(slots: int, page: int) -> None:
    case = build(
        serving(2), Geometry(group=4, head_dim=128, page=page, kv_heads=2), device="cuda", dtype=torch.bfloat16
    )
    assert_right(kernel(case, slots=slots, min_chunk=1), case)


@gpu
def test_a_captured_graph_follows_the_lengths_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch", torch)  # the fences would be captured too
    rng = np.random.default_rng(0)
    geometry = Geometry(group=4, head_dim=128, page=64, kv_heads=2)
    trees = [random_tree(rng, 16) for _ in range(4)]
    first, second = (
        build([Request(c, t) for c, t in zip(contexts, trees, strict=True)], geometry, seed=s, device="cuda")
        for s, contexts in enumerate([(40, 3000, 1, 777), (777, 40, 3000, 1)])
    )
    first.run(tree_attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = first.run_unchecked(tree_attention)
    graph.replay()
    assert_right(out, first)
    for field in ("row_start", "context", "keys", "words", "block_table", "position", "tail_position"):
        getattr(first.batch, field).copy_(getattr(second.batch, field))
    for name in ("query", "key_cache", "value_cache"):
        getattr(first, name).copy_(getattr(second, name))
    graph.replay()
    assert_right(out, second)


@gpu
def test_offsets_beyond_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    geometry = Geometry(group=4, head_dim=128, page=64, kv_heads=8)
    spare = 2**31 // (8 * 64 * 128) + 8
    case = build(serving(3)[:3], geometry, device="cuda", dtype=torch.bfloat16, spare_pages=spare)
    assert case.key_cache.numel() > 2**31
    assert_right(case.run(tree_attention), case)
