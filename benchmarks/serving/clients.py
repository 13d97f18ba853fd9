"""Drafts against plain decoding with 1 to 16 clients, paired on one cluster in one run: the ratio curve on a CPU.

Starts the demo cluster (SmolLM2 on the CPU, two draft workers). For each number of clients it alternates: all of them
with drafts, all of them without. Each sends its next prompt when the last one is answered, and answers differ in length
as in use: of equal ones all begin and end together, and plain decoding alone keeps them so. Tokens count that arrive
within ``WINDOW_S`` from when the last client has its first token, so that no time counts in which fewer are served; a
text that has not ended by then is cancelled and compared as far as it came. The results are written after each number
of clients. About twelve minutes on two quiet cores.

    python benchmarks/serving/clients.py [--clients 1 2 4 8 16] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import ROOT, Check, write
from rich.console import Console
from serving.demo import CONFIG, START_TIMEOUT_S

from draftwood.client import Chunk, DraftwoodClient, Message
from draftwood.config import load_cluster_config
from draftwood.console import watch_start
from draftwood.demo import PROMPTS
from router.cluster import Cluster

CLIENTS = (1, 2, 4, 8, 16)
WINDOW_S = 10.0
SHORTEST, LONGEST = 32, 96
"""Tokens of an answer."""


@dataclass
class Served:
    """What some clients were sent."""

    tokens: int = 0  # within the window
    begun: set[int] = field(default_factory=set)  # clients that have had a token
    window: tuple[float, float] | None = None  # clock times, once all have begun
    texts: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by client and number

    def receive(self, who: tuple[int, int], tokens: list[int]) -> None:
        now = time.perf_counter()
        self.begun.add(who[0])
        self.texts.setdefault(who, []).extend(tokens)
        if self.window and now < self.window[1]:
            self.tokens += len(tokens)


async def main() -> bool:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
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
    """Pairs of windows with and without drafts, after one that is not counted: drafts are judged anew at each load."""
    await _serve(client, count, speculate=True)
    ratios, plain, same = [], [], True
    for k in range(rounds):
        seen = {}
        for speculate in (True, False) if k % 2 == 0 else (False, True):
            seen[speculate] = await _serve(client, count, speculate=speculate)
        ratios.append(seen[True].tokens / seen[False].tokens)
        plain.append(seen[False].tokens / WINDOW_S)
        same &= _agree(seen[True], seen[False])
        with_drafts = seen[True].tokens / WINDOW_S
        print(f"{count:3} clients, round {k + 1}: {with_drafts:.1f} tokens/s, plain {plain[-1]:.1f}", flush=True)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(r, 3) for r in ratios],
        "plain_tokens_s": round(statistics.median(plain), 1),
        "identical": same,
    }


async def _serve(client: DraftwoodClient, count: int, *, speculate: bool) -> Served:
    """So many clients for a window; afterwards nobody is served."""
    served = Served()
    tasks = [asyncio.create_task(_ask(client, served, k, speculate)) for k in range(count)]
    try:
        while len(served.begun) < count:
            await asyncio.wait(tasks, timeout=0.01, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()  # says why
        now = time.perf_counter()
        served.window = (now, now + WINDOW_S)
        await asyncio.wait(tasks, timeout=WINDOW_S, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if not isinstance(end, asyncio.CancelledError):
            raise RuntimeError(f"a client ended by itself: {end!r}")
    while (await client.status()).requests:
        await asyncio.sleep(0.05)
    return served


async def _ask(client: DraftwoodClient, served: Served, who: int, speculate: bool) -> None:
    """One client: the same prompts and lengths whatever the round."""
    for k in itertools.count():
        prompt = PROMPTS[(who + 3 * k) % len(PROMPTS)]
        most = random.Random(f"{who} {k}").randint(SHORTEST, LONGEST)
        async for event in client.generate([Message("user", prompt)], max_tokens=most, speculate=speculate):
            if isinstance(event, Chunk):
                served.receive((who, k), event.tokens)


def _agree(one: Served, other: Served) -> bool:
    """All texts that both have seen are the same as far as both came."""
    both = one.texts.keys() & other.texts.keys()
    pairs = [(one.texts[who], other.texts[who]) for who in both]
    return bool(pairs) and all(all(map(int.__eq__, a, b)) for a, b in pairs)


def _write(curve: dict[str, Any]) -> bool:
    checks = [
        Check("verifier/cpu_vs_plain_min", min(point["ratio"] for point in curve.values()), ">=", 0.97),
        Check("verifier/cpu_identical", float(all(point["identical"] for point in curve.values())), "==", 1.0),
    ]
    details = {
        "clients": curve,
        "config": str(CONFIG.relative_to(ROOT)),
        "request_mix": f"everyday chat prompts, greedy, {SHORTEST} to {LONGEST} tokens, sent in a row by each client",
        "window_s": WINDOW_S,
        "baseline": "the same verifier without drafts, in the same run",
    }
    return write("clients", checks, details)


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
