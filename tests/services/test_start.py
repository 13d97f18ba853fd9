"""Start-up: libraries that do not get along show when they are imported, forked, or of another version."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from draftwood.client import DraftwoodClient
from tests.services.models import Models
from tests.services.processes import free_port, settled_at
from tests.services.stack import collect

ROOT = Path(__file__).resolve().parents[2]
ROLES = {
    "router": ("router.server", "router.pools"),
    "draft": ("draft_service.server",),
    "verifier": ("verifier_service.server", "draft_service.drafters.loading"),
}
TRANSPORT = ("grpc.aio", "google.protobuf.message", "ray")
IMPORTS = """
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
import grpc.aio, asyncio
async def answers():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 20)
    await server.stop(0)
asyncio.run(answers())
"""


async def imported(*names: str) -> str:
    """Imports the modules in that order in a fresh interpreter and opens a channel; what it says if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IMPORTS.format(names=names), env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return "" if process.returncode == 0 else f"{names}: {output.decode()[-600:]}"


async def test_bug_43_libraries_may_be_imported_in_any_order() -> None:
    """gRPC, protobuf and Ray each first and last, before our modules and after them; torch first and last."""
    rotated = [TRANSPORT[k:] + TRANSPORT[:k] for k in range(len(TRANSPORT))]
    orders = [(*order, *ROLES["router"], *ROLES["draft"]) for order in rotated]
    orders.append((*ROLES["draft"], *ROLES["router"], *TRANSPORT))
    orders += [("torch", *TRANSPORT, *ROLES["verifier"]), (*TRANSPORT, *ROLES["verifier"], "torch")]
    at_once = asyncio.Semaphore(2)

    async def one(names: tuple[str, ...]) -> str:
        async with at_once:
            return await imported(*names)

    failed = [said for said in await asyncio.gather(*map(one, orders)) if said]
    assert failed == []


async def test_bug_43_each_role_starts_as_a_program(models: Models) -> None:
    """In interpreters of their own, as their documentation has it; they serve a text together."""
    listen = {role: f"127.0.0.1:{free_port()}" for role in ROLES}
    own = ["--page_tokens", "16", "--threads", "1", "--load_interval_s", "0.1"]
    commands = {
        "verifier": ["verifier_service", "--model", str(models.target), *own],
        "draft": ["draft_service", "--model", str(models.draft), *own],
        "router": ["router", "--verifier", listen["verifier"], "--draft", listen["draft"]],
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    programs = [
        subprocess.Popen([sys.executable, "-m", *command, "--listen", listen[role]], env=environment)
        for role, command in commands.items()
    ]
    try:
        await settled_at(listen["router"])
        async with DraftwoodClient(listen["router"]) as client:
            text = await collect(client, "The sky is", max_tokens=30, ignore_eos=True)
        assert len(text.tokens) == 30
    finally:
        for program in programs:
            program.terminate()
    assert [program.wait(40) for program in programs] == [0, 0, 0]


def bounds(name: str) -> Requirement:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = (requirement for line in lines if (requirement := Requirement(line)).name == name)
    return found


@pytest.mark.parametrize(
    "name",
    ["grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "protobuf", "ray", "transformers"],
)
def test_bug_43_versions_have_both_bounds_and_the_pinned_one_lies_within(name: str) -> None:
    requirement = bounds(name)
    assert {specifier.operator for specifier in requirement.specifier} == {">=", "<"}
    pins = dict(
        line.strip().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert requirement.specifier.contains(pins[name].split(";")[0].strip())


def test_bug_43_the_oldest_version_that_is_allowed_is_the_one_that_code_was_generated_for() -> None:
    """Generated code refuses an older runtime when it is imported."""
    code = "".join(path.read_text() for path in (ROOT / "draftwood" / "v1").glob("*_pb2*.py"))
    grpc_versions = set(re.findall(r"^GRPC_GENERATED_VERSION = '(.+)'", code, re.MULTILINE))
    protobuf_versions = {".".join(found) for found in re.findall(r"Domain\.PUBLIC,\s*(\d+),\s*(\d+),\s*(\d+)", code)}
    for name, versions in (("grpcio", grpc_versions), ("protobuf", protobuf_versions)):
        (oldest,) = (Version(s.version) for s in bounds(name).specifier if s.operator == ">=")
        assert versions and all(Version(version) <= oldest for version in versions), name
