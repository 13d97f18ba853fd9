"""Pools that grow and shrink on a cluster whose nodes come and go, and the simulations' bounds.

Ray's own autoscaler (v2) with its fake node provider on this machine: each node is a raylet with the label of its pool
and room for one worker. Real services with tiny models, 16 sessions that ask for their texts again and again. Draft
workers go from 1 to 3 and back while the one verifier stays the same process, then the other way round.

Up: from ``scale`` until the workers are ready, on nodes that had to be started. Down: from ``scale`` until those too
many have drained, ended, and their nodes are gone.

    python benchmarks/serving/scaling.py               about three minutes
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from results import ROOT, Check, write

from draftwood.client import ClusterState, DraftwoodClient
from draftwood.config import ActorSettings, ClusterConfig
from router.cluster import Cluster
from router.pools import import_ray
from tests.router import test_autoscaling_sim as autoscaling_sim
from tests.router import test_balancing_sim as balancing_sim
from tests.router import test_width_policy_sim as width_sim
from tests.services.models import Models, make_models
from tests.services.test_scaling import LABEL, SESSIONS, Clients, config, settled, sizes, worker_of

HEAD_ID = "f" * 51 + "00000"
"""The node id that the fake node provider takes for the head's."""
IDLE_S = 6.0
"""After which Ray's autoscaler ends a node that nobody needs."""
MOST = 3
UP_S, DOWN_S = 15.0, 30.0
END_S = 20.0


def main() -> bool:
    simulated = simulations()
    with tempfile.TemporaryDirectory(prefix="dw-models-") as folder:
        models = make_models(Path(folder))
        with fake_nodes() as address:
            measured = asyncio.run(scale_both(cluster_config(address, models)))
    figures = {kind: max(step[kind] for step in measured["steps"]) for kind in ("up_s", "down_s")}
    checks = [
        Check("pools/scale_up_s", round(figures["up_s"], 1), "<=", UP_S),
        Check("pools/scale_down_s", round(figures["down_s"], 1), "<=", DOWN_S),
        Check("pools/scale_wrong_texts", float(len(measured["wrong"])), "==", 0.0),
        Check("pools/scale_failed_requests", float(measured["failed"]), "==", 0.0),
        Check("pools/scale_other_pool_touched", float(measured["touched"]), "==", 0.0),
        *simulated.pop("checks"),
    ]
    return write("pools", checks, {"scaling": measured, "sessions": SESSIONS, "simulations": simulated})


# --- simulations


def simulations() -> dict[str, Any]:
    """The bounds that the tests hold, as figures."""
    gaps = [balancing_sim.scenario(seed).run() for seed in range(balancing_sim.SCENARIOS)]
    worlds, widths = autoscaling_sim.worlds(), width_sim.worlds()
    turns = [autoscaling_sim.turns(settled_part(world.sizes(k))) for world in worlds for k in range(3)]
    took, shares = [], []
    for seed, world in enumerate(worlds):
        stretch = 1 if seed % 2 else 2
        least = int(world.needed(stretch))
        took.append(autoscaling_sim.first_s(world.sizes(stretch), least, float("inf")))
        shares.append(took[-1] / autoscaling_sim.up_bound_s(world, stretch))
    imbalance, swings = max(r.gap for r in gaps), max(r.swings_a_minute for r in gaps)
    recovered = [width_sim.recovered_s(w) for w in widths if any(c.nodes for v in w.verifiers for c in v.history)]
    return {
        "checks": [
            Check("pools/imbalance_max", round(imbalance, 3), "<=", balancing_sim.WORST_GAP),
            Check("pools/swings_a_minute_max", round(swings, 2), "<=", balancing_sim.SWINGS_A_MINUTE),
            Check("pools/oscillation_max", float(max(turns)), "<=", autoscaling_sim.MOST_TURNS),
            Check("pools/time_to_target_max", round(max(shares), 3), "<=", 1.0),
            Check("pools/width_turns_max", float(max(map(width_sim.most_turns, widths))), "<=", width_sim.MOST_TURNS),
            Check("pools/width_recovered_s_max", float(max(recovered)), "<=", width_sim.RECOVERED_MOST_S),
        ],
        "scenarios": len(gaps),
        "imbalance_mean": round(statistics.mean(r.gap for r in gaps), 3),
        "time_to_target_s": {"mean": round(statistics.mean(took), 1), "max": max(took)},
        "bounds": "imbalance: mean over time of the fullest less the emptiest verifier's load; oscillation: turns of a "
        "pool's size in the settled half of a stretch of ten minutes; time to target: seconds from the rise of demand "
        "until the pool has what it needs, over the bound of the scenario (starts of workers, rests and looks)",
    }


def settled_part(sizes_s: list[int]) -> list[int]:
    return sizes_s[len(sizes_s) // 2 :]


# --- nodes that come and go


@contextmanager
def fake_nodes() -> Iterator[str]:
    """A Ray head with the autoscaler and fake nodes of two kinds; the address of its GCS. Ends what it has started."""
    temp = tempfile.mkdtemp(prefix="dw-")
    import_ray(local=True)
    ip = import_ray().util.get_node_ip_address()
    address = f"{ip}:{free_port(ip)}"
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "RAY_TMPDIR": temp,
        "RAY_enable_autoscaler_v2": "1",
        "DRAFTWOOD_SCALING_RUN": (mark := secrets.token_hex(8)),
    }
    (path := Path(temp) / "cluster.json").write_text(json.dumps(autoscaling_config(address)))
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={address.rpartition(':')[2]}",
        f"--autoscaling-config={path}", "--num-cpus=1", f"--labels={LABEL}=router", "--include-dashboard=false",
        f"--object-store-memory={80 << 20}", "--disable-usage-stats",
    ]  # fmt: skip
    environment = os.environ | {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    }
    with (Path(temp) / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: listens(address), 60, f"Ray at {address}")
        yield address
    finally:
        import_ray().shutdown()
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(END_S)
        for pid in started_here(mark):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(temp, ignore_errors=True)


def autoscaling_config(address: str) -> dict[str, Any]:
    """Ray's cluster file, as its fake node provider wants it."""
    kinds = {
        role: {
            "resources": {"CPU": 1, "object_store_memory": 80 << 20},
            "labels": {LABEL: role},
            "node_config": {},
            "min_workers": 0,
            "max_workers": MOST,
        }
        for role in ("verifier", "draft")
    }
    head = {"resources": {"CPU": 1}, "labels": {LABEL: "router"}, "node_config": {}, "max_workers": 0}
    empty_lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "fake",
        "max_workers": 2 * MOST,
        "provider": {
            "type": "external",  # by its name Ray looks for a file that the package lacks
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
        },
        "available_node_types": kinds | {"ray.head.default": head},
        "head_node_type": "ray.head.default",
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in empty_lists},
    }


def free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return int(probe.getsockname()[1])


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, int(port))) == 0


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"{what} is not there after {timeout_s:g} s")
        time.sleep(0.2)


def started_here(mark: str) -> list[int]:
    """Processes that have our mark in their environment, but this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


# --- scaling


def cluster_config(address: str, models: Models) -> ClusterConfig:
    """That of the tests, with workers that fill a node each."""
    made = config(address, models)
    for pool in made.pools:
        role = "verifier" if pool in made.verifiers else "draft"
        pool.actor = ActorSettings(num_cpus=1, label_selector={LABEL: role})
    return made


async def scale_both(chosen: ClusterConfig) -> dict[str, Any]:
    cluster = Cluster(chosen)
    try:
        address = await cluster.start()
        await cluster.wait_ready(120)
        async with DraftwoodClient(address) as client:
            clients = Clients(client)
            await clients.start()
            try:
                steps, touched = [], 0
                for pool, other in (("draft", "verifier"), ("verifier", "draft")):
                    before = await worker_of(client, other)
                    steps.append(await up_and_down(client, clients, pool))
                    touched += await worker_of(client, other) != before
                state = await client.status()
                return {
                    "steps": steps,
                    "touched": touched,
                    "texts": clients.texts,
                    "wrong": clients.wrong[:10],
                    "failed": state.requests_failed,
                }
            finally:
                await clients.stop()
    finally:
        await cluster.stop(0.5)


async def up_and_down(client: DraftwoodClient, clients: Clients, pool: str) -> dict[str, Any]:
    up_s = await timed(client, pool, MOST, lambda state: sizes(state)[pool] == (MOST, MOST, 0))
    await clients.some_texts()
    down_s = await timed(client, pool, 1, lambda state: sizes(state)[pool] == (1, 1, 0) and nodes_of(pool) == 1)
    await clients.some_texts()
    print(f"{pool}: 1 to {MOST} in {up_s:.1f} s, back in {down_s:.1f} s", flush=True)
    return {"pool": pool, "up_s": up_s, "down_s": down_s}


async def timed(client: DraftwoodClient, pool: str, count: int, holds: Callable[[ClusterState], bool]) -> float:
    began = time.monotonic()
    await client.scale({pool: count})
    await settled(client, holds)
    return time.monotonic() - began


def nodes_of(pool: str) -> int:
    return sum(node["Alive"] and node["Labels"].get(LABEL) == pool for node in import_ray().nodes())


if __name__ == "__main__":
    sys.exit(not main())
