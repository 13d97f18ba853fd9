"""``draftwood up`` on a Ray cluster that is running, with the example for hosts of one's own: three nodes, here on one
machine, with the labels that the README's commands give them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwood.client import DraftwoodClient
from draftwood.config import load_cluster_config
from router.pools import import_ray
from tests.services.models import Models, make_models
from tests.services.stack import collect

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "examples" / "on-premises.yaml"
pytestmark = pytest.mark.ray


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Of all of Ray's processes and of the command line: a token, and where our modules are."""
    import_ray(local=True)  # one token for all tests of this process: Ray reads it once
    ours = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "XDG_STATE_HOME": str(tmp_path),
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }
    for role in ("ROUTER", "VERIFIER", "DRAFT"):  # the nodes are reached by their IP, which is no loopback address
        ours[f"DRAFTWOOD_{role}_INSECURE"] = "true"
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    return {**os.environ}


@pytest.fixture
def ray_cluster(environment: dict[str, str]) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    size = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "num_cpus": 1, "labels": {"pool": "router"}})
    try:
        for pool in ("verifier", "draft"):
            cluster.add_node(num_cpus=1, labels={"pool": pool}, object_store_memory=80 << 20)
        yield cluster
    finally:
        cluster.shutdown()


def write_config(path: Path, address: str, models: Models) -> Path:
    """The example, at that Ray, with models that are there."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["ray"]["address"] = address
    del config["router"]["settings"]["metrics_port"]
    (verifier,) = config["verifiers"]
    verifier["settings"] |= {"model": str(models.target), "threads": 1, "metrics_port": 0}
    for draft in config["drafts"]:
        draft["settings"]["metrics_port"] = 0
        if draft["settings"]["kind"] == "lm":
            draft["settings"]["model"] = str(models.draft)
    config["router"]["settings"]["listen"] = "127.0.0.1:0"
    path.write_text(yaml.safe_dump(config))
    return path


async def draftwood(*arguments: str) -> str:
    """What the command prints; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from draftwood.cli import main; main()", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 150)
    assert process.returncode == 0, err.decode() + out.decode()
    return out.decode()


def pool_of_actors(address: str, environment: dict[str, str]) -> dict[str, str]:
    """The label of the node that each of our live actors is on, by worker id."""
    import ray

    ray.init(address=address, namespace="look", log_to_driver=False, logging_level="error")
    try:
        labels = {node["NodeID"]: node["Labels"]["pool"] for node in ray.nodes()}
        actors = [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
        named = {actor["Name"].replace("/", "-").removeprefix("on-premises-"): actor for actor in actors}
        return {name: labels[actor["Address"]["NodeID"]] for name, actor in named.items()}
    finally:
        ray.shutdown()


async def test_up_finds_a_running_ray_and_leaves_it_running(
    ray_cluster: Any, environment: dict[str, str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = write_config(tmp_path / "c.yaml", ray_cluster.address, make_models(tmp_path_factory.mktemp("models")))
    wanted = load_cluster_config(config)
    out = await draftwood("up", "--config", str(config), "--timeout", "120")
    try:
        assert "verifier  ready     1 of 1" in out and "draft     ready     2 of 2" in out
        address = out.partition("router serves at ")[2].split()[0]
        host = address.rpartition(":")[0]
        assert host not in ("127.0.0.1", "localhost", "0.0.0.0"), "other hosts can reach it"
        where = await asyncio.to_thread(pool_of_actors, ray_cluster.address, environment)
        workers = {name: pool for name, pool in where.items() if not name.startswith("controller")}
        assert sorted(workers.values()) == ["draft", "draft", "router", "verifier"]
        assert all(name.startswith(pool) for name, pool in workers.items()), workers
        async with DraftwoodClient(address) as client:
            drafted = await collect(client, "The sky is", max_tokens=32, ignore_eos=True)
            plain = await collect(client, "The sky is", max_tokens=32, ignore_eos=True, speculate=False)
        assert drafted.tokens == plain.tokens and len(plain.tokens) == 32
        assert host in await draftwood("status", "--name", wanted.name)
    finally:
        await draftwood("down", "--name", wanted.name)
    left = await asyncio.to_thread(pool_of_actors, ray_cluster.address, environment)
    assert left == {}, "nothing of ours is left, and Ray still answers"


async def test_a_ray_that_is_not_there_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("name: nowhere\nray: {address: '127.0.0.1:1'}\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from draftwood.cli import main; main()", "up", "--config", str(config),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1 and "START_FAILED: RAY_UNREACHABLE: no Ray at 127.0.0.1:1" in err.decode(), out
