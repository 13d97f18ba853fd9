"""The small kernels of a step on a GPU: sampling, commit and tree builder, each checked before it is timed.

Everything is timed by replay of a CUDA graph of many calls, inputs rotating through more memory than the L2 holds; a
figure is the median of ``REPLAYS`` replays over the calls in one.

``sampling/over_read`` is the worse of greedy bfloat16 and shared noise float32 at 64 rows of a Llama 3 vocabulary,
over the time in which a kernel that only reduces each row to its maximum reads the same logits. The details have all
four variants, on flat and on peaked logits, and also over the bytes at copy speed.
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
import triton.language as tl
from results import Check, write
from torch import Tensor

from draftwood.kernels.commit import commit_kv, commit_kv_reference
from draftwood.kernels.sampling import choose_tokens
from draftwood.kernels.tree_build import TreeArrays, build_tree, build_tree_reference, words_needed
from draftwood.noise import GumbelCache
from draftwood.parameters import SamplingParams
from draftwood.sampling import target_tokens

ROWS, VOCAB = 64, 128_256
LAYERS, KV_HEADS, PAGE, HEAD_DIM = 32, 8, 64, 128  # the 8B shape
ROTATION_BYTES = 300e6
REPLAYS = 30

Call = Callable[[], object]


def replayed_us(calls: Sequence[Call]) -> float:
    """Microseconds a call, all of them in one graph."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times[5:]))


def copy_bytes_per_us() -> float:
    """Of a kernel that reads and writes each number once; a graph's own copy nodes are slower."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / replayed_us([partial(torch.neg, source, out=target)] * 4)


@triton.jit
def _read_kernel(logits, out, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """The plain one-pass reduction: the maximum of a chunk of a row."""
    top = tl.full([TILE], -float("inf"), tl.float32)
    for first in range(tl.program_id(0) * CHUNK, min((tl.program_id(0) + 1) * CHUNK, COLUMNS), TILE):
        column = first + tl.arange(0, TILE)
        at = logits + tl.program_id(1).to(tl.int64) * COLUMNS + column
        top = tl.maximum(top, tl.load(at, mask=column < COLUMNS, other=-float("inf")).to(tl.float32))
    tl.store(out + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(top))


def read_once(logits: Tensor, out: Tensor, chunk: int, tile: int) -> None:
    grid = (triton.cdiv(VOCAB, chunk), len(logits))
    _read_kernel[grid](logits, out, COLUMNS=VOCAB, CHUNK=chunk, TILE=tile, num_warps=4)


def read_us(sets: Sequence[Tensor]) -> float:
    """The best of a few ways to cut the rows."""
    out = torch.empty(ROWS * 128, device="cuda")
    shapes = [(16_384, 4096), (16_384, 2048), (8192, 4096), (32_768, 4096)]
    return min(replayed_us([partial(read_once, x, out, *shape) for x in sets]) for shape in shapes)


def logits_sets(dtype: torch.dtype, peaked: bool) -> list[Tensor]:
    """Flat: standard normal. Peaked: a bulk of deviation 2.5 and ten likely tokens 15 to 25 above its mean."""
    count = int(ROTATION_BYTES / (ROWS * VOCAB * dtype.itemsize)) + 1
    sets = []
    for _ in range(count):
        x = torch.randn(ROWS, VOCAB, device="cuda") * (2.5 if peaked else 1.0)
        if peaked:
            likely = torch.randint(0, VOCAB, (ROWS, 10), device="cuda")
            x.scatter_(1, likely, 15 + 10 * torch.rand(ROWS, 10, device="cuda"))
        sets.append(x.to(dtype))
    return sets


def sampling_inputs(temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.arange(ROWS, device="cuda", dtype=torch.int64) * 0x9E3779B97F4A7C15
    position = torch.arange(ROWS, device="cuda", dtype=torch.int64) + 1000
    return torch.full((ROWS,), temperature, device="cuda"), seed, position


def check_sampling(logits: Tensor, temperature: float) -> None:
    heat, seed, position = sampling_inputs(temperature)
    tokens, _ = choose_tokens(logits, heat, seed, position, VOCAB)
    cache = GumbelCache(VOCAB, "cuda")
    for row in range(ROWS):
        params = SamplingParams(temperature, seed=int(seed[row]) % 2**64)
        want, _ = target_tokens(logits[row : row + 1], params, [int(position[row])], cache)
        assert want.item() == tokens[row].item(), f"row {row}: {tokens[row].item()}, not {want.item()}"


def sampling(speed: float) -> tuple[float, list[dict[str, Any]]]:
    """The figure of the check, and all variants."""
    variants, held = [], []
    for dtype in (torch.bfloat16, torch.float32):
        for peaked in (False, True):
            sets = logits_sets(dtype, peaked)
            read, floor = read_us(sets), sets[0].nbytes / speed
            for name, temperature in (("greedy", 0.0), ("noise", 1.0)):
                for logits in sets[:3]:
                    check_sampling(logits, temperature)
                inputs = sampling_inputs(temperature)
                us = replayed_us([partial(choose_tokens, x, *inputs, VOCAB) for x in sets])
                variants.append(
                    {
                        "logits": "peaked" if peaked else "flat",
                        "dtype": str(dtype).removeprefix("torch."),
                        "rule": name,
                        "us": us,
                        "read_us": read,
                        "bytes_at_copy_speed_us": floor,
                        "over_read": us / read,
                        "over_bytes": us / floor,
                    }
                )
                if (dtype, name) in ((torch.bfloat16, "greedy"), (torch.float32, "noise")):
                    held.append(us / read)
    return max(held), variants


def paths(cache: Tensor, requests: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """``count`` batches of 8 moves a request, 40 slots of a page to its first 8, all in different pages."""
    moves = []
    for order in torch.randperm(cache.shape[2])[: count * requests].view(count, requests).tolist():
        start = torch.tensor(order, device="cuda").unsqueeze(1) * PAGE
        nodes = torch.tensor([9, 13, 17, 22, 28, 35, 37, 40], device="cuda")
        target = start + torch.arange(8, device="cuda")
        bounds = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * 8
        moves.append(((start + nodes).flatten(), target.flatten(), bounds))
    return moves


def commit() -> tuple[float, list[dict[str, Any]]]:
    """Microseconds to commit 8 tokens of one request, and of batches."""
    cache = torch.randn(LAYERS, 2, 1024, KV_HEADS, PAGE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    expected = cache[:, :, :40].clone()
    source, target = torch.arange(9, 2000, 64, device="cuda"), torch.arange(2, 2000, 64, device="cuda")
    bounds = torch.tensor([0, len(source)], device="cuda", dtype=torch.int32)
    commit_kv_reference(expected, source, target, bounds)
    commit_kv(cache, source, target, bounds)
    assert torch.equal(cache[:, :, :40], expected), "the commit kernel moved something else"
    variants = []
    for requests in (1, 4, 16):
        calls = [partial(commit_kv, cache, *moves) for moves in paths(cache, requests, 64)]
        moved = 2 * requests * 8 * LAYERS * 2 * KV_HEADS * HEAD_DIM * cache.element_size()
        us = replayed_us(calls)
        variants.append({"requests": requests, "tokens": 8, "us": us, "bytes": moved, "gb_s": moved / us / 1e3})
    return variants[0]["us"], variants


def trees() -> list[dict[str, Any]]:
    variants = []
    for name, requests, nodes in (("random", 1, 64), ("random", 64, 16), ("random", 1, 256), ("chain", 1, 256)):
        index = torch.arange(nodes)
        parent = index - 1 if name == "chain" else ((torch.rand(nodes) * index).long() - (index == 0).long())
        parent = parent.to(torch.int32).repeat(requests).cuda()
        row_start = (torch.arange(requests + 1) * nodes).to(torch.int32).cuda()
        context = torch.randint(0, 5000, (requests,), dtype=torch.int32).cuda()
        words = words_needed(nodes, PAGE)
        out, want = (TreeArrays.empty(requests * nodes, requests, words, d) for d in ("cuda", "cpu"))
        options: dict[str, Any] = {"page": PAGE, "words": words, "nodes": nodes, "out": out}
        build_tree(parent, row_start, context, **options)
        build_tree_reference(parent.cpu(), row_start.cpu(), context.cpu(), want, page=PAGE)
        assert torch.equal(out.words.cpu(), want.words) and torch.equal(out.next_sibling.cpu(), want.next_sibling)
        us = replayed_us([partial(build_tree, parent, row_start, context, **options)] * 50)
        variants.append({"tree": name, "requests": requests, "nodes": nodes, "us": us})
    return variants


def main() -> int:
    torch.manual_seed(0)
    speed = copy_bytes_per_us()
    over_read, sampled = sampling(speed)
    commit_us, committed = commit()
    built = trees()
    details = {"copy_tb_s": speed / 1e6, "sampling": sampled, "commit": committed, "tree_build": built}
    for row in [*sampled, *committed, *built]:
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    checks = [Check("commit/8_tokens_us", commit_us, "<=", 10), Check("sampling/over_read", over_read, "<=", 2)]
    return 0 if write("small-kernels", checks, details) else 1


if __name__ == "__main__":
    raise SystemExit(main())
