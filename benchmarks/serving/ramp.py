"""A verifier overloaded and relieved again: 1 to 64 clients and back, on real processes, watched once a second.

Two clusters, each a Ray of its own with a router, one verifier of eight sessions and two draft workers:

- *demo*: the demo's models; gate and policy together, as anybody would run it.
- *policy*: tiny models and a verifier that takes every node it gets (`width: full`), so that nothing but the router's
  policy narrows.

Each client asks for its next text when it has the last one. What is watched is the status that anybody can ask for:
nodes that a session has verified in a step (by the counters), the cap in force, how many run and wait, and what the
policy says.

    python benchmarks/serving/ramp.py                  about seven minutes
    python benchmarks/serving/ramp.py --only policy    one of the two; the other one's part is kept
    python benchmarks/serving/ramp.py --plot           docs/ramp.svg from the last results
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from results import FOLDER, ROOT, Check, write
from rich.console import Console
from serving.demo import CONFIG, START_TIMEOUT_S

from draftwood.client import Chunk, ClusterState, DraftwoodClient, Message, Prompt
from draftwood.config import (
    ClusterConfig,
    DraftPool,
    DraftSettings,
    RouterSection,
    RouterSettings,
    VerifierPool,
    VerifierSettings,
    load_cluster_config,
)
from draftwood.console import watch_start
from draftwood.demo import PROMPTS
from draftwood.errors import DraftwoodError
from router.cluster import Cluster
from tests.services.models import Models, make_models
from tests.services.stack import EXACT, FAST

Stages = Sequence[tuple[int, int]]
"""Clients, and for how many seconds there are so many."""
STAGES: dict[str, Stages] = {
    "demo": ((1, 20), (4, 15), (16, 20), (64, 45), (16, 20), (4, 15), (1, 45)),
    "policy": ((1, 12), (4, 10), (16, 15), (64, 30), (16, 15), (4, 10), (1, 45)),
}
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
    prompts: Sequence[str]
    options: dict[str, Any]
    chat: bool
    expected: dict[str, list[int]] = field(default_factory=dict)
    texts: int = 0
    differing: int = 0
    failed: list[str] = field(default_factory=list)
    wanted: int = 0  # clients

    async def learn(self) -> None:
        """What the target alone writes."""
        for prompt in self.prompts:
            self.expected[prompt] = await self._answer(prompt, speculate=False)

    async def serve(self, number: int) -> None:
        """One client, for as long as so many are wanted."""
        turn = number
        while number < self.wanted:
            prompt = self.prompts[turn % len(self.prompts)]
            turn += 1
            try:
                self.differing += await self._answer(prompt, speculate=True) != self.expected[prompt]
                self.texts += 1
            except DraftwoodError as error:
                self.failed.append(str(error))

    async def _answer(self, prompt: str, *, speculate: bool) -> list[int]:
        tokens: list[int] = []
        asked: Prompt = [Message("user", prompt)] if self.chat else prompt
        async for event in self.client.generate(asked, speculate=speculate, **self.options):
            if isinstance(event, Chunk):
                tokens += event.tokens
        return tokens


async def main() -> bool:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", action="store_true", help="draw the last results and end")
    parser.add_argument("--only", choices=STAGES)
    chosen = parser.parse_args()
    known = json.loads((FOLDER / "ramp.json").read_text())["details"] if (FOLDER / "ramp.json").exists() else {}
    runs: dict[str, Any] = {name: known[name] for name in STAGES if name in known}
    if not chosen.plot:
        with tempfile.TemporaryDirectory(prefix="dw-models-") as folder:
            for name in [chosen.only] if chosen.only else list(STAGES):
                runs[name] = await run(name, Path(folder))
    plot(runs)
    if chosen.plot:
        return True
    about = {
        "bounds": "width falls: mean width of the settled half at 64 clients over that at 1 client; recovers: the "
        f"last stage's over the first's; a cap of {UNCAPPED} is none; lifted: after the last stage's beginning"
    }
    return write("ramp", [check for name, part in runs.items() for check in checks(name, part)], about | runs)


async def run(name: str, folder: Path) -> dict[str, Any]:
    """One cluster, up the ramp and down again."""
    config = demo_config() if name == "demo" else policy_config(make_models(folder))
    cluster = Cluster(config)
    try:
        await watch_start(Console(), cluster, config, START_TIMEOUT_S)
        async with DraftwoodClient(cluster.address) as client:
            demo = Ramp(client, PROMPTS, {"max_tokens": 24}, chat=True)
            tiny = Ramp(
                client, [f"count {k} {k}" for k in range(8)], {"max_tokens": 200, "ignore_eos": True}, chat=False
            )
            ramp = demo if name == "demo" else tiny
            await ramp.learn()
            samples = await climb(ramp, STAGES[name])
    finally:
        await cluster.stop()
    return details(ramp, samples, STAGES[name])


def demo_config() -> ClusterConfig:
    """The demo's cluster, whose verifier leaves the width to gate and policy."""
    config = load_cluster_config(CONFIG)
    config.name = "ramp-demo"
    config.router.settings.max_requests = 128
    config.verifiers[0].settings.max_step_nodes = 0
    config.verifiers[0].settings.kv_pages = 96
    return config


def policy_config(models: Models) -> ClusterConfig:
    verifier = EXACT | {
        "model": str(models.target),
        "name": "tiny",
        "kv_pages": 256,
        "max_sessions": 8,
        "canary": False,
    }
    draft = {"model": str(models.draft), "threads": 1, "page_tokens": 16, "lookahead_levels": 0} | FAST
    return ClusterConfig(
        name="ramp-policy",
        router=RouterSection(settings=RouterSettings(max_requests=128)),
        verifiers=[VerifierPool(settings=VerifierSettings(**verifier))],
        drafts=[DraftPool(count=2, settings=DraftSettings(**draft))],
    )


async def climb(ramp: Ramp, stages: Stages) -> list[Sample]:
    samples: list[Sample] = []
    running: dict[int, asyncio.Task[None]] = {}
    before, began = await ramp.client.status(), time.monotonic()
    for stage, (clients, seconds) in enumerate(stages):
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
        width = stage_width(samples, stage)
        print(f"{clients:3} clients: {width:.2f} nodes a session, cap {last.cap or 'none'}", flush=True)
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


def checks(name: str, part: dict[str, Any]) -> list[Check]:
    """Of one run, by its details; the policy's own have its name in theirs."""
    stages, kind = part["stages"], "" if name == "demo" else f"_{name}"
    peak = max(stages, key=lambda stage: stage["clients"])
    first, last = stages[0]["width"], stages[-1]["width"]
    found = [
        Check(f"pools/ramp{kind}_width_falls", round(peak["width"] / first, 3), "<=", 0.5),
        Check(f"pools/ramp{kind}_width_recovers", round(last / first, 3), ">=", 0.8),
        Check(f"pools/ramp{kind}_failed_requests", float(part["failed"]), "==", 0.0),
        Check(f"pools/ramp{kind}_texts_that_differ", float(part["differing"]), "==", 0.0),
    ]
    if name == "policy":
        found.append(Check("pools/ramp_policy_cap_lifted_s", part["cap_lifted_s"], "<=", 30.0))
    return found


def details(ramp: Ramp, samples: list[Sample], stages: Stages) -> dict[str, Any]:
    last = [sample for sample in samples if sample.stage == len(stages) - 1]
    lifted = next((k for k in range(len(last)) if all(not sample.cap for sample in last[k:])), None)
    return {
        "texts": ramp.texts,
        "failed": len(ramp.failed),
        "failures": ramp.failed[:10],
        "differing": ramp.differing,
        "cap_lifted_s": round(last[lifted].at_s - last[0].at_s, 1) if lifted is not None else 1e9,
        "stages": [_stage(samples, k, clients, seconds) for k, (clients, seconds) in enumerate(stages)],
        "request_mix": f"{'chat prompts' if ramp.chat else 'texts'}, greedy, {ramp.options['max_tokens']} tokens each, "
        "sent in a row by each client",
        "decisions": _decisions(samples),
        "samples": [{k: v for k, v in asdict(sample).items() if k != "decision"} for sample in samples],
    }


def _decisions(samples: list[Sample]) -> list[str]:
    """What the policy said at each change of the cap, with the second."""
    changed = [(a, b) for a, b in pairwise(samples) if a.cap != b.cap]
    return [f"{now.at_s:.0f} s: {now.decision}" for _, now in changed]


def _stage(samples: list[Sample], stage: int, clients: int, seconds: int) -> dict[str, Any]:
    own = [sample for sample in samples if sample.stage == stage]
    return {
        "clients": clients,
        "seconds": seconds,
        "width": round(stage_width(samples, stage), 2),
        "tokens_s": round(sum(s.tokens for s in own) / (own[-1].at_s - own[0].at_s), 1),
        "smallest_cap": min(cap_of(s.cap) for s in own),
    }


def plot(runs: dict[str, Any]) -> None:
    """Clients, and below them width and cap, over time, one column a run."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "draftwood", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    titles = {"demo": "demo's models: gate and policy", "policy": "tiny models, width full: the policy alone"}
    figure, axes = plt.subplots(
        2, len(runs), figsize=(5 * len(runs), 5), sharex="col", squeeze=False, layout="constrained"
    )
    for column, (name, part) in enumerate(runs.items()):
        samples, (above, below) = part["samples"], axes[:, column]
        at = [sample["at_s"] for sample in samples]
        above.set_title(titles[name], fontsize=10)
        above.step(at, [s["clients"] for s in samples], where="pre", color="#1a1a1a", label="clients")
        above.step(at, [s["running"] for s in samples], where="pre", color="#1f6fb2", label="sessions that run")
        above.step(at, [s["waiting"] for s in samples], where="pre", color="#d9822b", label="requests that wait")
        caps, widths = [cap_of(s["cap"]) for s in samples], [s["width"] for s in samples]
        below.step(at, caps, where="pre", color="#d9822b", label=f"cap ({UNCAPPED}: none)")
        below.step(at, widths, where="pre", color="#1f6fb2", label="nodes verified a session and step")
        below.set_yscale("symlog", base=2, linthresh=1)
        below.set_ylim(0, 4 * UNCAPPED)  # the legend above the lines
        below.set_xlabel("seconds")
        for each in (above, below):
            each.legend(loc="upper right", fontsize=7, frameon=False)
            each.spines[["top", "right"]].set_visible(False)
    figure.savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
