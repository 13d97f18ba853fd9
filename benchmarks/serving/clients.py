"""Drafts against plain decoding with 1 to 16 clients, paired on one cluster in one run: the ratio curve on a CPU.

Starts the demo cluster (SmolLM2 on the CPU, two draft workers). For each number of clients it alternates: all of them
with drafts, all of them without; each client sends its next prompt when the last one is answered. The results are
written after each number of clients. About ten minutes on two quiet cores.

    python benchmarks/serving/clients.py [--clients 1 2 4 8 16] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import ROOT, Check, write
from rich.console import Console
from serving.demo import CONFIG, START_TIMEOUT_S, TOKENS, serve_clients

from draftwood.client import DraftwoodClient
from draftwood.config import load_cluster_config
from draftwood.console import watch_start
from router.cluster import Cluster

ANSWERS = {1: 3, 2: 3, 4: 3, 8: 3, 16: 2}
"""Prompts that each client sends in a round, by the number of clients."""


async def main() -> bool:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=list(ANSWERS))
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    config = load_cluster_config(CONFIG)
    cluster = Cluster(config)
    curve: dict[str, Any] = {}
    ok = False
    try:
        await watch_start(Console(), cluster, config, START_TIMEOUT_S)
        async with DraftwoodClient(cluster.address) as client:
            for count in chosen.clients:
                curve[str(count)] = await _measure(client, count, chosen.rounds)
                ok = _write(curve)
    finally:
        await cluster.stop()
    return ok


async def _measure(client: DraftwoodClient, count: int, rounds: int) -> dict[str, Any]:
    """Pairs of rounds with and without drafts, after one that is not counted: drafts are judged anew at each load."""
    each = ANSWERS.get(count, 2)
    await serve_clients(client, count, each, speculate=True)
    drafted_s, plain_s, same = [], [], True
    for k in range(rounds):
        seen = {}
        for speculate in (True, False) if k % 2 == 0 else (False, True):
            seen[speculate] = await serve_clients(client, count, each, speculate=speculate)
        drafted_s.append(seen[True][0])
        plain_s.append(seen[False][0])
        same &= seen[True][1] == seen[False][1]
        print(f"{count:3} clients, round {k + 1}: drafts {drafted_s[-1]:.2f} s, plain {plain_s[-1]:.2f} s", flush=True)
    tokens = sum(map(len, seen[False][1]))
    ratios = [plain / drafted for drafted, plain in zip(drafted_s, plain_s, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(r, 3) for r in ratios],
        "plain_tokens_s": round(tokens / statistics.median(plain_s), 1),
        "identical": same,
    }


def _write(curve: dict[str, Any]) -> bool:
    checks = [
        Check("verifier/cpu_vs_plain_min", min(point["ratio"] for point in curve.values()), ">=", 0.97),
        Check("verifier/cpu_identical", float(all(point["identical"] for point in curve.values())), "==", 1.0),
    ]
    details = {
        "clients": curve,
        "config": str(CONFIG.relative_to(ROOT)),
        "request_mix": f"everyday chat prompts, greedy, {TOKENS} tokens each, sent in a row by each client",
        "baseline": "the same verifier without drafts, in the same run",
    }
    return write("clients", checks, details)


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
