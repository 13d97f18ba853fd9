"""A verifier overloaded and relieved again: 1 to 64 clients and back, on real processes, watched once a second.

The demo's models on a Ray of their own: router, one verifier of eight sessions, two draft workers. Each client asks for
its next text when it has the last one. What is watched is the status that anybody can ask for: nodes that a session has
verified in a step (by the counters), the cap in force, how many run and wait, and what the router's policy says.

    python benchmarks/serving/ramp.py                  about four minutes
    python benchmarks/serving/ramp.py --plot           docs/ramp.svg from the last results
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import FOLDER, ROOT, Check, write
from rich.console import Console
from serving.demo import CONFIG, START_TIMEOUT_S

from draftwood.client import Chunk, ClusterState, DraftwoodClient, Message
from draftwood.config import ClusterConfig, load_cluster_config
from draftwood.console import watch_start
from draftwood.demo import PROMPTS
from draftwood.errors import DraftwoodError
from router.cluster import Cluster

STAGES = ((1, 20), (4, 15), (16, 20), (64, 45), (16, 20), (4, 15), (1, 45))
"""Clients, and for how many seconds there are so many."""
TOKENS = 24
SETTLED = 0.5
"""Of a stage, the part that is not counted: the last stage's requests still wait, and gate and policy follow."""
UNCAPPED = 64
PLOT = ROOT / "docs" / "ramp.svg"


@dataclass
class Sample:
    """One look at the status."""

    at_s: float
    stage: int
    clients: int
    running: int
    waiting: int
    width: float  # nodes a session and step since the look before
    step_ms: float
    tokens: int  # since the look before
    cap: str  # in force; empty: none
    decision: str


@dataclass
class Ramp:
    """The clients, and what they got."""

    client: DraftwoodClient
    expected: dict[str, list[int]] = field(default_factory=dict)
    texts: int = 0
    differing: int = 0
    failed: list[str] = field(default_factory=list)
    wanted: int = 0  # clients

    async def learn(self) -> None:
        """What the target alone writes."""
        for prompt in PROMPTS:
            self.expected[prompt] = await self._answer(prompt, speculate=False)

    async def serve(self, number: int) -> None:
        """One client, for as long as so many are wanted."""
        turn = number
        while number < self.wanted:
            prompt = PROMPTS[turn % len(PROMPTS)]
            turn += 1
            try:
                self.differing += await self._answer(prompt, speculate=True) != self.expected[prompt]
                self.texts += 1
            except DraftwoodError as error:
                self.failed.append(str(error))

    async def _answer(self, prompt: str, *, speculate: bool) -> list[int]:
        tokens: list[int] = []
        async for event in self.client.generate([Message("user", prompt)], max_tokens=TOKENS, speculate=speculate):
            if isinstance(event, Chunk):
                tokens += event.tokens
        return tokens


async def main() -> bool:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", action="store_true", help="draw the last results and end")
    if parser.parse_args().plot:
        plot(json.loads((FOLDER / "ramp.json").read_text())["details"]["samples"])
        return True
    config = ramp_config()
    cluster = Cluster(config)
    try:
        await watch_start(Console(), cluster, config, START_TIMEOUT_S)
        async with DraftwoodClient(cluster.address) as client:
            ramp = Ramp(client)
            await ramp.learn()
            samples = await climb(ramp)
    finally:
        await cluster.stop()
    plot([asdict(sample) for sample in samples])
    return write("ramp", checks(ramp, samples), details(ramp, samples))


def ramp_config() -> ClusterConfig:
    """The demo's cluster, whose verifier leaves the width to gate and policy."""
    config = load_cluster_config(CONFIG)
    config.name = "ramp"
    config.router.settings.max_requests = 128
    config.verifiers[0].settings.max_step_nodes = 0
    config.verifiers[0].settings.kv_pages = 96
    return config


async def climb(ramp: Ramp) -> list[Sample]:
    samples: list[Sample] = []
    running: dict[int, asyncio.Task[None]] = {}
    before, began = await ramp.client.status(), time.monotonic()
    for stage, (clients, seconds) in enumerate(STAGES):
        ramp.wanted = clients
        for number in range(clients):
            if number not in running or running[number].done():
                running[number] = asyncio.create_task(ramp.serve(number))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(1.0)
            now = await ramp.client.status()
            samples.append(_sample(before, now, time.monotonic() - began, stage, clients))
            before = now
        last = samples[-1]
        print(f"{clients:3} clients: {stage_width(samples, stage):.2f} nodes a session, cap {last.cap or 'none'}", flush=True)
        print(f"             {last.decision}", flush=True)
    ramp.wanted = 0
    await asyncio.gather(*running.values())
    return samples


def _sample(before: ClusterState, now: ClusterState, at_s: float, stage: int, clients: int) -> Sample:
    (old,), (new,) = before.verifiers, now.verifiers
    session_steps = max(1, new.running) * (new.steps - old.steps)
    width = (new.nodes_verified - old.nodes_verified) / session_steps if session_steps else 0.0
    return Sample(
        round(at_s, 1), stage, clients, new.running, new.waiting, round(width, 2), round(new.step_ms, 1),
        new.tokens - old.tokens, new.cap, new.decision,
    )  # fmt: skip


def stage_width(samples: list[Sample], stage: int) -> float:
    """Mean over the stage's settled part."""
    own = [sample for sample in samples if sample.stage == stage]
    return statistics.mean(sample.width for sample in own[int(SETTLED * len(own)) :])


def cap_of(cap: str) -> int:
    """Nodes of a session; ``UNCAPPED`` without a cap."""
    words = cap.split()
    return int(words[0]) if len(words) > 1 and words[1].startswith("nodes") else UNCAPPED


def checks(ramp: Ramp, samples: list[Sample]) -> list[Check]:
    peak = max(range(len(STAGES)), key=lambda stage: STAGES[stage][0])
    first, last = stage_width(samples, 0), stage_width(samples, len(STAGES) - 1)
    least = min(cap_of(sample.cap) for sample in samples if sample.stage == peak)
    return [
        Check("pools/ramp_width_falls", round(stage_width(samples, peak) / first, 3), "<=", 0.5),
        Check("pools/ramp_width_recovers", round(last / first, 3), ">=", 0.8),
        Check("pools/ramp_cap_at_peak", float(least), "<=", 4.0),
        Check("pools/ramp_cap_lifted", float(cap_of(samples[-1].cap)), "==", float(UNCAPPED)),
        Check("pools/ramp_failed_requests", float(len(ramp.failed)), "==", 0.0),
        Check("pools/ramp_texts_that_differ", float(ramp.differing), "==", 0.0),
    ]


def details(ramp: Ramp, samples: list[Sample]) -> dict[str, Any]:
    by_stage: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_stage[sample.stage].append(sample)
    stages = [
        {
            "clients": STAGES[stage][0],
            "seconds": STAGES[stage][1],
            "width": round(stage_width(samples, stage), 2),
            "tokens_s": round(sum(s.tokens for s in own) / (own[-1].at_s - own[0].at_s), 1),
            "smallest_cap": min(cap_of(s.cap) for s in own),
        }
        for stage, own in by_stage.items()
    ]
    return {
        "texts": ramp.texts,
        "failures": ramp.failed[:10],
        "stages": stages,
        "bounds": "width falls: mean width of the settled half at 64 clients over that at 1 client; recovers: the last "
        f"stage's over the first's; a cap of {UNCAPPED} is none",
        "config": f"{CONFIG.relative_to(ROOT)} with max_step_nodes 0 and kv_pages 96; the router's width policy as it comes",
        "request_mix": f"everyday chat prompts, greedy, {TOKENS} tokens each, sent in a row by each client",
        "samples": [asdict(sample) for sample in samples],
    }


def plot(samples: list[dict[str, Any]]) -> None:
    """Clients, and below them width and cap, over time."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "draftwood"
    from matplotlib import pyplot as plt

    at = [sample["at_s"] for sample in samples]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    above.step(at, [s["clients"] for s in samples], where="pre", color="#1a1a1a", label="clients")
    above.step(at, [s["running"] for s in samples], where="pre", color="#1f6fb2", label="sessions that run")
    above.step(at, [s["waiting"] for s in samples], where="pre", color="#d9822b", label="requests that wait")
    below.step(at, [cap_of(s["cap"]) for s in samples], where="pre", color="#d9822b", label=f"cap ({UNCAPPED}: none)")
    below.step(at, [max(s["width"], 0.1) for s in samples], where="pre", color="#1f6fb2", label="nodes verified a session")
    below.set_yscale("log", base=2)
    below.set_xlabel("seconds")
    for axes in (above, below):
        axes.legend(loc="upper right", fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
