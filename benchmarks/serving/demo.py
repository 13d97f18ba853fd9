"""The demo's speed-up, and eight clients at once, each paired with plain decoding on the same cluster in the same run.

Starts the demo cluster (Ray, router, verifier, two draft workers), then alternates: a prompt with drafts, the same
without; eight clients with drafts, the same eight without. Each client sends its next prompt when the last one is
answered, so that eight are served at once but for the end, and the time counts until the last answer of all.
"""

from __future__ import annotations

import asyncio
import io
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import ROOT, Check, write
from rich.console import Console

from draftwood.client import Chunk, DraftwoodClient, Message
from draftwood.config import load_cluster_config
from draftwood.console import watch_start
from draftwood.demo import PROMPTS, compare, judge
from router.cluster import Cluster

CONFIG = ROOT / "deploy" / "examples" / "demo.yaml"
TOKENS = 64
ROUNDS = 7
"""Pairs of eight clients; every other one begins without drafts, so that a drift of the machine cancels."""
PROMPTS_EACH = 3
SETTLING_ROUNDS = 1
"""Rounds of eight clients that are not counted: the verifier learns what drafts are worth at this load."""
START_TIMEOUT_S = 300.0


async def main() -> bool:
    config = load_cluster_config(CONFIG)
    cluster = Cluster(config)
    console = Console(file=io.StringIO())
    try:
        await watch_start(Console(), cluster, config, START_TIMEOUT_S)
        async with DraftwoodClient(cluster.address) as client:
            runs = [judge(await compare(console, client, TOKENS)) for _ in range(3)]
            for _ in range(SETTLING_ROUNDS):
                await serve_clients(client, len(PROMPTS), PROMPTS_EACH, speculate=True)
            pairs = []
            for k in range(ROUNDS):
                order = (True, False) if k % 2 == 0 else (False, True)
                seen = {
                    speculate: await serve_clients(client, len(PROMPTS), PROMPTS_EACH, speculate=speculate)
                    for speculate in order
                }
                pairs.append((seen[True], seen[False]))
    finally:
        await cluster.stop()
    same = all(run.identical for run in runs) and all(a[1] == b[1] for a, b in pairs)
    ratios = [plain[0] / drafted[0] for drafted, plain in pairs]
    checks = [
        Check("demo/identical", float(same), "==", 1.0),
        Check("demo/speedup", round(statistics.median(r.speedup for r in runs), 3), ">=", 1.3),
        Check("demo/clients8_ratio", round(statistics.median(ratios), 3), ">=", 1.0),
    ]
    details = {
        "speedups": [round(r.speedup, 3) for r in runs],
        "accepted": [round(r.accepted, 3) for r in runs],
        "clients8_ratios": [round(r, 3) for r in ratios],
        "clients8_plain_s": [round(plain[0], 2) for _, plain in pairs],
        "clients8_drafted_s": [round(drafted[0], 2) for drafted, _ in pairs],
        "config": str(CONFIG.relative_to(ROOT)),
        "request_mix": f"{len(PROMPTS)} everyday chat prompts, greedy, {TOKENS} tokens each; "
        f"of eight clients, each sends {PROMPTS_EACH} in a row",
        "baseline": "the same verifier without drafts, in the same run",
    }
    return write("demo", checks, details)


async def serve_clients(
    client: DraftwoodClient, count: int, prompts_each: int, *, speculate: bool
) -> tuple[float, list[list[int]]]:
    """So many clients with some prompts each, sent in a row: seconds until all are answered, and their tokens."""

    async def one(first: int) -> list[list[int]]:
        own = [PROMPTS[(first + k) % len(PROMPTS)] for k in range(prompts_each)]
        return [await _answer(client, prompt, speculate) for prompt in own]

    began = time.perf_counter()
    answers = await asyncio.gather(*(one(k) for k in range(count)))
    return time.perf_counter() - began, [tokens for client_answers in answers for tokens in client_answers]


async def _answer(client: DraftwoodClient, prompt: str, speculate: bool) -> list[int]:
    tokens: list[int] = []
    async for event in client.generate([Message("user", prompt)], max_tokens=TOKENS, speculate=speculate):
        if isinstance(event, Chunk):
            tokens += event.tokens
    return tokens


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
