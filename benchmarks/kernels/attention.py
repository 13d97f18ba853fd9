"""Tree attention on a GPU: against what the memory and the tensor cores allow, and against its peers on the same data.

    python benchmarks/kernels/attention.py

Every kernel is checked against float64 on every shape first, and then timed by replaying a CUDA graph (peers that do
not allow capture would be timed eagerly, and say so). Caches are rotated within a graph, as a model's layers do it,
so that keys come from memory and not from L2. Packed rows are nodes x group of one request.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kernels.attention_peers import FlashInfer, flex_attention, sdpa_gqa, sdpa_packed, sdpa_repeated
from benchmarks.results import Check, write
from draftwood.kernels.tree_attention import AttentionBatch, plan_launch, tree_attention

SHAPES = ((1, 2048), (1, 8192), (1, 32768), (8, 8192), (16, 4096), (32, 4096))  # requests, context
NODES = (1, 8, 16, 32, 64, 256)
Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
GROUP = Q_HEADS // KV_HEADS
SCALE = HEAD_DIM**-0.5
LARGE_BYTES = 60e6  # keys and values of a layer from which on the bounds on bandwidth and FLOP rate hold
FEW_ROWS, MANY_ROWS = 64, 256  # packed rows: where memory is the limit, and where tensor cores are
ROTATED_BYTES = 512 * 2**20
WORST_ERROR = 5e-3  # ours, relative to float64, Frobenius; bfloat16 operands give about 2e-3
WORST_PEER_ERROR = 1e-2
FLEX_CELLS = ((1, 8192, 16), (8, 8192, 16), (16, 4096, 16))


@dataclass(frozen=True)
class Ceilings:
    copy_bytes_per_us: float  # read and written
    gemm_flops_per_us: float


@dataclass(frozen=True)
class Cell:
    """One shape with its data. All requests have the same context and the same tree."""

    requests: int
    context: int
    nodes: int
    tree: Tensor  # bool [nodes, nodes], row i sees itself and its ancestors
    query: Tensor  # [requests * nodes, q_heads, head_dim]
    caches: list[tuple[Tensor, Tensor]]  # keys, values [pages, kv_heads, PAGE, head_dim]; one pair a layer
    batch: AttentionBatch

    @property
    def keys(self) -> int:
        return self.context + self.nodes

    @property
    def bytes(self) -> int:
        return self.requests * self.keys * KV_HEADS * HEAD_DIM * 2 * 2

    @property
    def flops(self) -> float:
        return 4.0 * self.requests * Q_HEADS * self.nodes * HEAD_DIM * self.keys

    @property
    def packed_rows(self) -> int:
        return self.nodes * GROUP

    def floor_us(self, ceilings: Ceilings) -> float:
        return max(self.bytes / ceilings.copy_bytes_per_us, self.flops / ceilings.gemm_flops_per_us)


def ancestors(nodes: int) -> Tensor:
    """bool [nodes, nodes] of a tree with four children at the root and two everywhere else."""
    parent = [-1] + [0 if i <= 4 else (i - 1) // 2 for i in range(1, nodes)]
    seen = torch.eye(nodes, dtype=torch.bool)
    for i in range(1, nodes):
        seen[i] |= seen[parent[i]]
    return seen


def make_cell(requests: int, context: int, nodes: int) -> Cell:
    torch.manual_seed(context + 1000 * requests + nodes)
    used = -(-(context + nodes) // PAGE)
    layers = max(1, ROTATED_BYTES // (requests * used * KV_HEADS * PAGE * HEAD_DIM * 4))
    shape = (layers, 2, requests * used, KV_HEADS, PAGE, HEAD_DIM)
    pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    tree = ancestors(nodes)
    query = torch.randn(requests * nodes, Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    caches = [(layer[0], layer[1]) for layer in pool]
    return Cell(requests, context, nodes, tree.cuda(), query, caches, make_batch(requests, context, tree, used))


def make_batch(requests: int, context: int, tree: Tensor, used: int) -> AttentionBatch:
    """Pages are scattered; the context ends at a page's edge."""
    nodes, width = len(tree), -(-len(tree) // 32)
    bits = torch.zeros(nodes, width * 32, dtype=torch.int64)
    bits[:, :nodes] = tree
    words = (bits.view(nodes, width, 32) << torch.arange(32)).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words)
    table = torch.zeros(requests, used + 1, dtype=torch.int32)
    table[:, :used] = torch.randperm(requests * used).view(requests, used)
    depth = tree.sum(1) - 1
    tail = torch.zeros(requests, 32 * width)
    tail[:, :nodes] = context + depth
    slots = context + torch.arange(nodes)

    def put(values: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        return values.to(device="cuda", dtype=dtype)

    return AttentionBatch(
        row_start=put(torch.arange(requests + 1) * nodes),
        context=put(torch.full((requests,), context)),
        keys=put(torch.full((requests,), context + nodes)),
        words=put(words.repeat(requests, 1)),
        block_table=put(table),
        position=put((context + depth).repeat(requests)),
        tail_position=put(tail),
        page_id=put(table[:, slots // PAGE].flatten(), torch.int64),
        page_offset=put((slots % PAGE).repeat(requests), torch.int64),
    )


def ours(cell: Cell) -> Callable[[int], Tensor]:
    return lambda layer: tree_attention(cell.query, *cell.caches[layer], cell.batch, scale=SCALE)


def exact(cell: Cell) -> Tensor:
    """Dense float64 attention of the first layer, request by request."""
    outs = []
    seen = torch.ones(cell.nodes, cell.keys, dtype=torch.bool, device="cuda")
    seen[:, cell.context :] = cell.tree
    for r in range(cell.requests):
        pages = cell.batch.block_table[r, :-1].long()
        k, v = (c[pages].transpose(0, 1).flatten(1, 2)[:, : cell.keys].double() for c in cell.caches[0])
        q = cell.query[r * cell.nodes : (r + 1) * cell.nodes].double().view(cell.nodes, KV_HEADS, GROUP, HEAD_DIM)
        scores = torch.einsum("nhgd,hkd->hgnk", q, k) * SCALE
        weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hgnk,hkd->nhgd", weights, v).reshape(cell.nodes, Q_HEADS, HEAD_DIM))
    return torch.cat(outs)


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


def replay_us(call: Callable[[int], Tensor], layers: int, budget_us: float = 1500.0) -> tuple[float, str]:
    """Median time of a call over replays of a graph that goes through all layers, and how it was timed."""
    call(0)
    estimate = _events_us(lambda: call(0), 1)
    rounds = max(1, min(64, round(budget_us / estimate / layers)))

    def everything() -> None:
        for i in range(rounds * layers):
            call(i % layers)

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            everything()
    except RuntimeError:
        torch.cuda.synchronize()
        return _events_us(everything, rounds * layers), "eager"
    graph.replay()
    return _events_us(graph.replay, rounds * layers), "graph"


def _events_us(run: Callable[[], object], calls: int, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return median(times)


def measure_ceilings() -> Ceilings:
    a = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty_like(a)
    copy_us = _events_us(lambda: [b.copy_(a) for _ in range(3)], 3)
    x, y = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    gemm_us = _events_us(lambda: [x @ y for _ in range(3)], 3)
    return Ceilings(2 * a.nbytes / copy_us, 2 * 8192**3 / gemm_us)


def contestants(cell: Cell, flashinfer: FlashInfer) -> dict[str, Callable[[int], Tensor]]:
    """Ours, the modes of FlashInfer, and SDPA with a dense mask in three ways."""
    dense = {"sdpa_repeated": sdpa_repeated, "sdpa_gqa": sdpa_gqa, "sdpa_packed": sdpa_packed}
    return {"ours": ours(cell), **flashinfer.modes(cell), **{name: make(cell) for name, make in dense.items()}}


def check_all(flashinfer: FlashInfer) -> dict[str, float]:
    """Largest error of each contestant over all shapes; ends the program if one is wrong."""
    worst: dict[str, float] = {}
    for requests, context in SHAPES:
        for nodes in NODES:
            cell = make_cell(requests, context, nodes)
            reference = exact(cell)
            for name, call in contestants(cell, flashinfer).items():
                found = error(call(0), reference)
                if not found < (WORST_ERROR if name == "ours" else WORST_PEER_ERROR):
                    raise SystemExit(f"{name} is wrong at {requests} x {context} x {nodes}: {found:.2e}")
                worst[name] = max(worst.get(name, 0.0), found)
    return worst


def measure(cell: Cell, ceilings: Ceilings, flashinfer: FlashInfer) -> dict[str, Any]:
    times: dict[str, float] = {}
    eager = []
    for name, call in contestants(cell, flashinfer).items():
        times[name], how = replay_us(call, len(cell.caches))
        eager += [name] if how == "eager" else []
    own = times["ours"]
    plan = plan_launch(cell.query, cell.caches[0][0], cell.batch)
    return {
        "requests": cell.requests,
        "context": cell.context,
        "nodes": cell.nodes,
        "packed_rows": cell.packed_rows,
        "kv_bytes": cell.bytes,
        "us": {name: round(us, 2) for name, us in times.items()},
        "timed_eagerly": eager,
        "row_tile": plan.row_tile,
        "bytes_floor_us": cell.bytes / ceilings.copy_bytes_per_us,
        "bandwidth_fraction": cell.bytes / own / ceilings.copy_bytes_per_us,
        "tflops": cell.flops / own / 1e6,
        "roofline_fraction": cell.floor_us(ceilings) / own,
        "over_flashinfer": own / min(us for name, us in times.items() if name.startswith("flashinfer")),
        "under_sdpa": min(times["sdpa_repeated"], times["sdpa_gqa"]) / own,
    }


def show(row: dict[str, Any]) -> None:
    us = row["us"]
    best = min((us[name], name.removeprefix("flashinfer_")) for name in us if name.startswith("flashinfer"))
    sdpa = min(us["sdpa_repeated"], us["sdpa_gqa"])
    print(
        f"{row['requests']:>2} x {row['context']:>5} x {row['nodes']:>3}  {us['ours']:7.1f} us  "
        f"bytes {row['bandwidth_fraction']:.2f}  {row['tflops']:4.0f} TF  roofline {row['roofline_fraction']:.2f}  "
        f"flashinfer {best[0]:7.1f} ({best[1]})  sdpa {sdpa:7.1f} packed {us['sdpa_packed']:7.1f}",
        flush=True,
    )


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    large = [row for row in rows if row["kv_bytes"] >= LARGE_BYTES]
    few = [row["bandwidth_fraction"] for row in large if row["packed_rows"] <= FEW_ROWS]
    many = [row["tflops"] for row in large if row["packed_rows"] >= MANY_ROWS]
    over = [row["over_flashinfer"] for row in rows]
    return [
        Check("kernel/bandwidth_fraction_min", min(few), ">=", 0.80),
        Check("kernel/tflops_min", min(many), ">=", 400),
        Check("kernel/vs_flashinfer_geomean", 1 / geomean(over), ">=", 1.3),
        Check("kernel/vs_flashinfer_worst", max(over), "<=", 1.05),
        Check("kernel/vs_sdpa_geomean", geomean([row["under_sdpa"] for row in rows]), ">=", 6.0),
    ]


def flex_rows(limit_s: float) -> list[dict[str, Any]]:
    """FlexAttention on a few shapes, as long as compiling them takes no longer than ``limit_s`` together."""
    rows = []
    for shape, call in flex_attention([make_cell(*shape) for shape in FLEX_CELLS], limit_s):
        cell = make_cell(*shape)
        found = error(call(0), exact(cell))
        assert found < WORST_PEER_ERROR, f"FlexAttention is wrong at {shape}: {found}"
        rows.append({"shape": shape, "us": replay_us(call, 1)[0], "ours_us": replay_us(ours(cell), 1)[0]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flex-seconds", type=float, default=60.0, help="time for compiling FlexAttention")
    options = parser.parse_args()
    flashinfer = FlashInfer(Q_HEADS, KV_HEADS, HEAD_DIM, PAGE, SCALE)
    errors = check_all(flashinfer)
    ceilings = measure_ceilings()
    print(f"copy {ceilings.copy_bytes_per_us / 1e6:.2f} TB/s, GEMM {ceilings.gemm_flops_per_us / 1e6:.0f} TFLOP/s")
    rows = []
    for requests, context in SHAPES:
        for nodes in NODES:
            rows.append(measure(make_cell(requests, context, nodes), ceilings, flashinfer))
            show(rows[-1])
    details = {
        "geometry": {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page": PAGE, "dtype": "bfloat16"},
        "copy_tb_s": ceilings.copy_bytes_per_us / 1e6,
        "gemm_tflops": ceilings.gemm_flops_per_us / 1e6,
        "flashinfer": flashinfer.flashinfer.__version__,
        "largest_error": errors,
        "bounds_hold_from_kv_bytes": LARGE_BYTES,
        "tflops_min_at_any_size": min(row["tflops"] for row in rows if row["packed_rows"] >= MANY_ROWS),
        "grid": rows,
        "flex_attention": flex_rows(options.flex_seconds),
    }
    sys.exit(0 if write("attention", checks(rows), details) else 1)


if __name__ == "__main__":
    main()
