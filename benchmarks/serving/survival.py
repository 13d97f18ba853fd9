"""Deaths of every service, measured on real processes under live sessions whose texts must not change.

Scenarios and processes are those of ``tests/services/survival.py``; the models are tiny, so that two cores carry 16
sessions and what is measured is the recovery. Each part is run alone and takes a few minutes; its figures replace
those of its last run in ``benchmarks/results/survival.json``, and the checks are over all parts.

A *gap* is the time that a client waits for a chunk of its text, be it the first or the next, and in which a kill lies
or which begins soon after one: the longest of each session within 1.5 s of each kill. What plain decoding needs is in
it. Restarted processes start on the same two cores meanwhile; they are forked with their libraries loaded, so a restart
is shorter than usual.

    python benchmarks/serving/survival.py [--drafts] [--verifiers] [--routers] [--hangs] [--drains]
                                           [--cancels] [--controllers]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from results import FOLDER, Check, commit, write

from draftwood.client import DraftwoodClient
from draftwood.config import (
    ClusterConfig,
    DraftPool,
    DraftSettings,
    RouterSection,
    RouterSettings,
    VerifierPool,
    VerifierSettings,
)
from draftwood.errors import Unavailable
from router.cluster import Cluster
from router.pools import import_ray
from tests.services import survival
from tests.services.models import Models, make_models
from tests.services.processes import Sessions
from tests.services.stack import Stack
from tests.services.storm import STATES, Storm, storm
from tests.services.survival import Fleet, Seen, all_killed, connected, drained, hung, killed, percentile

DRAFT_KILLS, VERIFIER_KILLS, ROUTER_KILLS = 100, 30, 20
TERMS = 20
CONTROLLER_KILLS = 5
START_TIMEOUT_S = 120.0
CANCELS = 2000
LEASE_S = 3.0
HANGS = 5


async def drafts(cluster: Fleet) -> dict[str, Any]:
    return told(await killed(cluster, cluster.drafts, DRAFT_KILLS))


async def verifiers(cluster: Fleet) -> dict[str, Any]:
    """Of two; the last two die at once."""
    one_by_one = told(await killed(cluster, cluster.verifiers, VERIFIER_KILLS - 2))
    return added(one_by_one, told(await all_killed(cluster, cluster.verifiers)))


async def routers(cluster: Fleet) -> dict[str, Any]:
    """Of two; the last two die at once."""
    one_by_one = told(await killed(cluster, cluster.routers, ROUTER_KILLS - 2))
    return added(one_by_one, told(await all_killed(cluster, cluster.routers)))


async def hangs(cluster: Fleet) -> dict[str, Any]:
    """SIGSTOP of a verifier until its sessions have moved, then SIGCONT."""
    return told(await hung(cluster, cluster.verifiers, HANGS, LEASE_S + 1.0)) | {"lease_s": LEASE_S}


async def drains(cluster: Fleet) -> dict[str, Any]:
    """SIGTERM of verifiers, routers and draft workers in turn."""
    victims = [*cluster.verifiers, *cluster.routers, cluster.drafts[0]]
    return told(await drained(cluster, victims, TERMS))


async def cancels(models: Models) -> dict[str, Any]:
    """In one process, where nothing of the services is hidden."""
    async with AsyncExitStack() as exits:
        stack = Stack(models, exits)
        left, baselines, errors = Counter[str](), list[float](), list[str]()
        for slow in (False, True):
            made = await storm(stack, slow_draft=slow)
            states = [state for state in STATES if slow == (state == "awaiting draft")]
            await until_left(made, states, CANCELS // len(STATES) + 1)
            left += made.left
            errors += made.errors
            baselines += made.baselines_s
    return {
        "cancels": sum(left.values()),
        "by_state": dict(left),
        "wrong": len(errors),
        "first_wrong": errors[:3],
        "batches": len(baselines),
        "baseline_max_s": round(max(baselines), 3),
        "baseline_p50_s": round(percentile(baselines, 0.5), 3),
    }


async def until_left(made: Storm, states: list[str], each: int) -> None:
    for state in states:
        while made.left[state] < each:
            await made.batch(state)


async def controllers(models: Models) -> dict[str, Any]:
    """SIGKILL of the controller's actor on Ray under live sessions; back, it sizes the draft pool anew each time.

    Whoever is there stays: the workers' processes are the same before and after, but for those scaled.
    """
    cluster = Cluster(on_ray(models))
    back: list[float] = []
    try:
        address = await cluster.start()
        await cluster.wait_ready(START_TIMEOUT_S)
        async with DraftwoodClient(*address.split(",")) as client:
            sessions = Sessions(client)
            await sessions.start()
            for k in range(CONTROLLER_KILLS):
                before = {each.address for each in (await client.status()).verifiers}
                os.kill(await actor("controller-0").info.remote(), signal.SIGKILL)
                began = time.monotonic()
                await scaled(client, 1 + (k + 1) % 2)
                back.append(time.monotonic() - began)
                assert {each.address for each in (await client.status()).verifiers} == before
                await sessions.some_texts()
            await sessions.stop()
    finally:
        await cluster.stop()
    wrong = {"wrong": len(sessions.wrong), "first_wrong": sessions.wrong[:3]}
    return {"kills": len(back), "texts": sessions.texts, "back_max_s": round(max(back), 2)} | wrong


def on_ray(models: Models) -> ClusterConfig:
    target = VerifierSettings(model=str(models.target), **survival.SETTINGS["verifier"])
    drafts = DraftSettings(kind="ngram", load_interval_s=0.1)
    return ClusterConfig(
        name="survival",
        router=RouterSection(count=2, settings=RouterSettings(reconnect_s=0.1)),
        verifiers=[VerifierPool(settings=target)],
        drafts=[DraftPool(max=2, settings=drafts)],
    )


def actor(worker_id: str) -> Any:
    return import_ray().get_actor(f"survival/{worker_id}", namespace="draftwood")


async def scaled(client: DraftwoodClient, drafts: int) -> None:
    """Asks until a controller answers, and returns when the pool has the size."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            with suppress(Unavailable):
                await client.scale({"draft": drafts})
                break
            await asyncio.sleep(0.1)
        while not any(pool.name == "draft" and pool.ready == drafts for pool in (await client.status()).pools):
            await asyncio.sleep(0.1)


PARTS: dict[str, Callable[[Fleet], Awaitable[dict[str, Any]]]] = {
    part.__name__: part for part in (drafts, verifiers, routers, hangs, drains)
}
ALONE: dict[str, Callable[[Models], Awaitable[dict[str, Any]]]] = {"cancels": cancels, "controllers": controllers}
"""Those that need no processes of the other kind."""


def told(seen: Seen) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "kills": seen.kills,
        "texts": seen.texts,
        "wrong": len(seen.wrong),
        "first_wrong": seen.wrong[:3],
        "refused": seen.refused,
        "failed": len(seen.wrong) + seen.refused,
        "gaps": len(seen.gaps_s),
        "migrations": seen.migrations,
        "reattachments": seen.reattachments,
        "back_max_s": round(max(seen.back_s, default=0.0), 3),
        "client_lag_max_s": round(seen.lag_s, 3),
        "exits": dict(Counter(map(str, seen.exits))),
    }
    for name, values in (("gap", seen.gaps_s), ("plain_gap", seen.plain_gaps_s)):
        shares = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        figures |= {f"{name}_{key}_s": round(percentile(values, share), 3) for key, share in shares if values}
    return figures


def added(figures: dict[str, Any], of_all: dict[str, Any]) -> dict[str, Any]:
    """The figures of kills one by one, and what all at once were to them."""
    whole = {key: figures[key] + of_all[key] for key in ("kills", "texts", "wrong")}
    return figures | whole | {"all_at_once": of_all}


async def main() -> bool:
    parser = argparse.ArgumentParser()
    for part in (*PARTS, *ALONE):
        parser.add_argument(f"--{part}", action="append_const", dest="parts", const=part)
    chosen = parser.parse_args().parts or [*PARTS, *ALONE]
    results = (
        json.loads((FOLDER / "survival.json").read_text())["details"] if (FOLDER / "survival.json").exists() else {}
    )
    ok = False
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        for part in chosen:
            began = time.monotonic()
            if part in ALONE:
                figures = await ALONE[part](models)
            else:
                with survival.started(models, Path(folder), lease_s=LEASE_S) as processes:
                    async with connected(processes) as cluster:
                        figures = await PARTS[part](cluster)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            run = {"took_s": round(time.monotonic() - began), "cores": os.cpu_count()}
            run["load_average"] = round(os.getloadavg()[1], 1)
            results[part] = figures | run | {"commit": commit(), "date": now}
            print(part, json.dumps(results[part]), flush=True)
            ok = write("survival", checks(results), results)
    return ok


def checks(results: dict[str, Any]) -> list[Check]:
    """Of the parts that have been run."""
    found = [
        ("drafts", "kills", "pools/draft_kills", ">=", DRAFT_KILLS),
        ("drafts", "gap_p99_s", "pools/draft_kill_gap_p99_s", "<=", 1.0),
        ("verifiers", "kills", "pools/verifier_kills", ">=", VERIFIER_KILLS),
        ("routers", "kills", "pools/router_kills", ">=", ROUTER_KILLS),
        ("hangs", "kills", "pools/verifier_hangs", ">=", HANGS),
        ("drains", "kills", "pools/drains", ">=", TERMS),
        ("drains", "failed", "pools/drains_failed_requests", "==", 0),
        ("controllers", "kills", "pools/controller_kills", ">=", CONTROLLER_KILLS),
        ("cancels", "cancels", "pools/cancels", ">=", CANCELS),
        ("cancels", "baseline_max_s", "pools/cancel_baseline_s", "<=", 2.0),
    ]
    wrong = sum(part.get("wrong", 0) for part in results.values())
    return [
        *(Check(name, results[part][key], op, bound) for part, key, name, op, bound in found if part in results),
        Check("pools/lost_or_doubled_tokens", wrong, "==", 0),
    ]


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
