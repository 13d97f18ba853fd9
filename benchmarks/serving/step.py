"""One step of the model runtime on a GPU against its floor, and against transformers on the same weights' shape.

floor   the larger of (bytes of the streamed weights and of the keys and values) at the speed of a device copy, and
        (operations of the matrix products and of attention) at the rate of a large matrix product, both measured in
        the same run.
step    one forward over the n nodes of one request's tree behind a context of 2048 tokens, logits of all nodes
        included, as the replay of its CUDA graph. ``choose`` is the same with the choice of tokens.
host    wall time of a whole ``choose`` call from an idle device (assembly, copy, replay, ids back) less the device's
        time for the replay in that same call. The check holds the worst of all numbers of nodes.

``python benchmarks/serving/step.py [--profile] [--no-peers]``
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from results import Check, write
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.decoder import HfDecoder
from draftwood.runtime.demo_model import demo_draft
from draftwood.runtime.model import ModelRuntime, load_model, random_model
from draftwood.runtime.shapes import shape
from draftwood.tree import TokenTree, ancestors, depths

CUDA = torch.device("cuda")
DTYPE = torch.bfloat16
CONTEXT = 2048
NODES = (1, 16, 64, 256)
BOUNDS = {1: 1.25, 16: 1.25, 64: 1.25, 256: 1.4}
PAGE = 64
BRANCH = 3
RULE = SamplingParams(temperature=0.8, seed=1)


# --- time ---


def median_ms(run: Callable[[], object], calls: int, rounds: int = 5) -> float:
    """Device time of one call, events around ``calls`` of them."""
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def wall_ms(run: Callable[[], object], calls: int = 30) -> float:
    """Wall time of one call from an idle device to an idle device."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def host_ms(run: Callable[[], object], calls: int = 30) -> float:
    """What a call that replays a graph and waits for its result takes besides the replay's time on the device."""
    replay = torch.cuda.CUDAGraph.replay
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        begin.record()
        replay(graph)
        end.record()

    times = []
    torch.cuda.CUDAGraph.replay = timed  # type: ignore[method-assign]
    try:
        for _ in range(calls):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            wall = (time.perf_counter() - began) * 1e3
            end.synchronize()
            times.append(wall - begin.elapsed_time(end))
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    return statistics.median(times)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def ceilings() -> dict[str, float]:
    """Speed of a device copy, bytes read plus written, and rate of a large bf16 matrix product, on random data."""
    source = torch.empty(2 << 30, dtype=torch.int32, device=CUDA).random_()
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), 5)
    copied = 2 * source.numel() * source.element_size()
    a, b = (torch.randn(8192, 8192, dtype=DTYPE, device=CUDA) for _ in range(2))
    product_ms = median_ms(lambda: a @ b, 10)
    return {"copy_tb_s": copied / copy_ms / 1e9, "tflop_s": 2 * 8192**3 / product_ms / 1e9}


# --- what a step must do ---


def floor_ms(config: Any, nodes: int, context: int, machine: dict[str, float]) -> float:
    """``config`` is the model's; all of its products but the embedding stream their weights once."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = config.hidden_size * (2 * q + 2 * kv) + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    keys = context + nodes
    moved = 2 * (weights + config.num_hidden_layers * 2 * kv * keys)
    done = 2 * nodes * weights + config.num_hidden_layers * 4 * nodes * keys * q
    return max(moved / machine["copy_tb_s"], done / machine["tflop_s"]) / 1e9


# --- our runtime ---


def tree_rows(pages: Sequence[int], context: int, nodes: int) -> Rows:
    """A full tree of ``nodes`` nodes, the anchor included."""
    parent = np.array([-1] + [k // BRANCH for k in range(nodes - 1)], np.int32)
    token = np.random.default_rng(nodes).integers(5, 1000, nodes).astype(np.int32)
    tree = TokenTree(parent, token, np.where(parent < 0, 0.0, -0.1 * np.arange(nodes)).astype(np.float32))
    return Rows(pages, context, token, (context + depths(tree)).astype(np.int32), ancestors(tree))


def runtime_of(model: PreTrainedModel, *, fused: bool = True) -> tuple[ModelRuntime, list[int]]:
    """A runtime whose cache holds random keys and values, and the pages of one session."""
    pages = (CONTEXT + 512) // PAGE
    runtime = ModelRuntime(model, kv_pages=2 * pages, page_tokens=PAGE, longest_tokens=8192)
    if not fused:
        runtime.decoder = HfDecoder(model)
    runtime.cache.normal_()
    return runtime, runtime.pool.take(pages * PAGE)


def replay_ms(runtime: ModelRuntime, run: Callable[[], object], calls: int) -> float:
    run()
    assert runtime.graphs is not None and runtime.graphs.last is not None, "the forward was not captured"
    graph = runtime.graphs.last
    graph.replay()
    return median_ms(graph.replay, calls)


def measure_target(runtime: ModelRuntime, pages: list[int], machine: dict[str, float]) -> dict[str, Any]:
    """Times of steps over one request, by nodes."""
    found: dict[str, Any] = {}
    for nodes in NODES:
        parts = [tree_rows(pages, CONTEXT, nodes)]
        forward_ms = replay_ms(runtime, lambda parts=parts: runtime.forward(parts), 20)  # type: ignore[misc]
        choose = lambda parts=parts: runtime.choose(parts, [RULE], runtime.vocab_size)  # noqa: E731
        choose_ms = replay_ms(runtime, choose, 20)
        floor = floor_ms(runtime.model.config, nodes, CONTEXT, machine)
        found[f"n{nodes}"] = {
            "forward_ms": forward_ms, "choose_ms": choose_ms, "wall_ms": wall_ms(choose), "host_ms": host_ms(choose),
            "floor_ms": floor, "over_floor": forward_ms / floor,
        }  # fmt: skip
    return found


def measure_level(runtime: ModelRuntime, pages: list[int], machine: dict[str, float]) -> dict[str, float]:
    """A draft's level: eight rows behind the context."""
    parts = [tree_rows(pages, CONTEXT, 8)]
    run = lambda: runtime.forward(parts)  # noqa: E731
    return {
        "level_ms": replay_ms(runtime, run, 50),
        "wall_ms": wall_ms(run),
        "floor_ms": floor_ms(runtime.model.config, 8, CONTEXT, machine),
    }


def profile(runtime: ModelRuntime, parts: list[Rows], replays: int = 3) -> list[dict[str, Any]]:
    """Kernels of one step, dearest first."""
    runtime.forward(parts)
    assert runtime.graphs is not None and runtime.graphs.last is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            runtime.graphs.last.replay()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
    return [
        {"kernel": e.key[:110], "count": e.count / replays, "us": e.device_time_total / replays} for e in events[:24]
    ]


# --- matrix products alone ---


def products(machine: dict[str, float]) -> dict[str, Any]:
    """The 8B shape's matrix products by themselves, each over enough weights to miss the cache: share of the floor."""
    shapes = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
    found: dict[str, Any] = {}
    for name, (inner, outer) in shapes.items():
        weights = [
            torch.randn(outer, inner, dtype=DTYPE, device=CUDA) for _ in range(max(2, (1 << 28) // inner // outer))
        ]
        for rows in NODES:
            x = torch.randn(rows, inner, dtype=DTYPE, device=CUDA)
            bytes_ms = 2 * inner * outer / machine["copy_tb_s"] / 1e9
            floor = max(bytes_ms, 2 * rows * inner * outer / machine["tflop_s"] / 1e9)
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                graph = captured(lambda x=x, weights=weights: [F.linear(x, w) for w in weights])  # type: ignore[misc]
                found[f"{name}_n{rows}_{library}"] = round(floor / (median_ms(graph.replay, 3) / len(weights)), 3)
    torch.backends.cuda.preferred_blas_library("default")
    return found


# --- transformers ---


def peer_inputs(nodes: int, columns: int) -> dict[str, Tensor]:
    """A tree of ``nodes`` behind the context, with a dense mask over ``columns`` slots."""
    rows = tree_rows([], CONTEXT, nodes)
    mask = torch.zeros(1, 1, nodes, columns, dtype=torch.bool, device=CUDA)
    mask[..., :CONTEXT] = True
    mask[0, 0, :, CONTEXT : CONTEXT + nodes] = torch.from_numpy(rows.visible).to(CUDA)
    return {
        "input_ids": torch.from_numpy(rows.token).long().to(CUDA)[None],
        "position_ids": torch.from_numpy(rows.tail_position).long().to(CUDA)[None],
        "attention_mask": mask,
    }


def prefix() -> Tensor:
    return torch.randint(5, 1000, (1, CONTEXT), device=CUDA)


def peer_eager_ms(model: PreTrainedModel, nodes: int) -> float:
    """Wall time of transformers' forward with its growing cache."""
    cache = DynamicCache(config=model.config)
    model(input_ids=prefix(), past_key_values=cache, logits_to_keep=1)
    inputs = peer_inputs(nodes, CONTEXT + nodes)

    def step() -> None:
        model(**inputs, past_key_values=cache)
        cache.crop(-nodes)

    step()
    return wall_ms(step, 7)


@contextmanager
def layers_of(model: PreTrainedModel, count: int) -> Iterator[None]:
    """The model runs its first ``count`` layers only."""
    whole = model.config.num_hidden_layers
    model.config.num_hidden_layers = count
    try:
        yield
    finally:
        model.config.num_hidden_layers = whole


def peer_compiled_ms(model: PreTrainedModel, nodes: int) -> float:
    """Replay time of the compiled forward with a static cache: of 2 and of 4 layers, carried on to all of them.

    Compiling all layers at once takes minutes and makes each of them no faster.
    """
    inputs = peer_inputs(nodes, CONTEXT + 512)
    times = {}
    for count in (2, 4):
        with layers_of(model, count):
            torch._dynamo.reset()
            cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 512)
            model(input_ids=prefix(), past_key_values=cache, logits_to_keep=1)
            forward = torch.compile(model.forward, fullgraph=True, dynamic=False)

            def step(forward: Any = forward, cache: Any = cache) -> None:
                for layer in cache.layers:
                    layer.cumulative_length.fill_(CONTEXT)
                forward(**inputs, past_key_values=cache)

            times[count] = median_ms(captured(step).replay, 10)
    return times[2] + (model.config.num_hidden_layers - 2) * (times[4] - times[2]) / 2


def peers(config: dict[str, Any]) -> dict[str, Any]:
    with CUDA:
        named = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(named, dtype=DTYPE, attn_implementation="sdpa").eval()
    found: dict[str, Any] = {}
    plan = (("hf_eager", peer_eager_ms, (1, 64)), ("hf_compiled_static", peer_compiled_ms, (64,)))
    for name, measure, sizes in plan:
        for nodes in sizes:
            began = time.perf_counter()
            try:
                found[f"{name}_n{nodes}_ms"] = measure(model, nodes)
            except Exception as error:
                found[f"{name}_n{nodes}_ms"] = f"failed: {type(error).__name__}: {str(error)[:300]}"
            print(f"{name} n{nodes}: {found[f'{name}_n{nodes}_ms']} ({time.perf_counter() - began:.0f} s)", flush=True)
    return found


# --- all ---


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def measure_8b(arguments: argparse.Namespace, machine: dict[str, float], details: dict[str, Any]) -> None:
    model = random_model(shape("llama-8b"), CUDA, DTYPE)
    runtime, pages = runtime_of(model)
    details["8b"] = measure_target(runtime, pages, machine)
    print_table("8b", details["8b"])
    if arguments.profile:
        for nodes in (1, 64, 256):
            details[f"8b_kernels_n{nodes}"] = profile(runtime, [tree_rows(pages, CONTEXT, nodes)])
    if arguments.peers:
        plain, pages = runtime_of(model, fused=False)
        for nodes in (1, 64):
            parts = [tree_rows(pages, CONTEXT, nodes)]
            ms = replay_ms(plain, lambda parts=parts: plain.forward(parts), 10)  # type: ignore[misc]
            details["8b"][f"n{nodes}"]["hf_decoder_graph_ms"] = ms
            print(f"graph of transformers' own modules, n{nodes}: {ms:.3f} ms", flush=True)


def print_table(name: str, rows: dict[str, Any]) -> None:
    for key, row in rows.items():
        print(name, key, " ".join(f"{k} {v:.3f}" for k, v in row.items()), flush=True)


def measure_draft(model: PreTrainedModel, machine: dict[str, float]) -> dict[str, Any]:
    runtime, pages = runtime_of(model)
    found: dict[str, Any] = measure_level(runtime, pages, machine)
    print(" ".join(f"{k} {v:.4f}" for k, v in found.items()), flush=True)
    return found | {"kernels": profile(runtime, [tree_rows(pages, CONTEXT, 8)])}


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="record the kernels of a step")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave transformers out")
    arguments = parser.parse_args()
    machine = ceilings()
    print(machine, flush=True)
    details: dict[str, Any] = {"ceilings": machine}
    details["demo_draft"] = measure_draft(load_model(str(demo_draft()), CUDA, DTYPE), machine)
    details["0.6b"] = measure_draft(random_model(shape("qwen3-0.6b"), CUDA, DTYPE), machine)
    release()
    measure_8b(arguments, machine, details)
    release()
    if arguments.profile:
        details["products_share_of_floor"] = products(machine)
    if arguments.peers:
        details["peers"] = peers(shape("llama-8b"))
    target = details["8b"]
    checks = [Check(f"step/8b_over_floor_n{n}", target[f"n{n}"]["over_floor"], "<=", b) for n, b in BOUNDS.items()]
    checks += [
        Check("step/0.6b_draft_level_ms", details["0.6b"]["level_ms"], "<=", 0.6),
        Check("step/demo_draft_level_ms", details["demo_draft"]["level_ms"], "<=", 0.25),
        Check("step/host_ms", max(target[f"n{n}"]["host_ms"] for n in NODES), "<=", 0.5),
    ]
    return 0 if write("step", checks, details) else 1


if __name__ == "__main__":
    sys.exit(main())
