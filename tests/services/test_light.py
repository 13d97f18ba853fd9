"""Router and n-gram draft worker with nothing installed but what the light image has, and a verifier beside them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from draftwood.client import DraftwoodClient
from tests.services.stack import Stack, collect, until

ROOT = Path(__file__).resolve().parents[2]
OURS = {"draftwood", "draft_service", "router", "verifier_service"}
BLOCKED = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv[0] = {module!r}
{body}
"""
MODELS = {"torch", "transformers", "tokenizers", "triton", "llguidance"}


def not_in_the_image() -> set[str]:
    """Top-level modules that are installed here and not in the image."""
    lines = (ROOT / "deploy" / "docker" / "light.txt").read_text().splitlines()
    brought = {path.name for path in Path(find_spec("ray").origin).parent.joinpath("thirdparty_files").iterdir()}
    there = {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}
    return {
        module
        for module, owners in packages_distributions().items()
        if module not in OURS | brought and not there & {canonicalize_name(owner) for owner in owners}
    }


def blocked(module: str, body: str) -> list[str]:
    return [sys.executable, "-c", BLOCKED.format(blocked=not_in_the_image(), module=module, body=body)]


@asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[str]:
    """The module as a program; its address, once it is ready."""
    command = blocked(module, f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)")
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        address = ""
        async with asyncio.timeout(60):
            while not (line := (await process.stdout.readline()).decode()).endswith("is ready\n"):
                assert line, f"{module} has ended: {process.returncode}"
                address = line.split()[-1]
        yield address
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 40) == 0


async def test_router_and_ngram_draft_need_no_torch(stack: Stack) -> None:
    assert not_in_the_image() >= MODELS, "else nothing is shown"
    verifier = await stack.verifier()
    async with (
        running("draft_service", "--kind", "ngram", "--load_interval_s", "0.05") as draft,
        running("router", "--verifier", verifier.address, "--draft", draft) as router,
        DraftwoodClient(router) as client,
    ):
        state = await client.status()
        while [worker.health for worker in (*state.verifiers, *state.drafts)] != ["ready"] * 2:
            await asyncio.sleep(0.05)
            state = await client.status()
        prompt = [5, 6, 7, 8] * 6
        options = {"max_tokens": 64, "ignore_eos": True}
        drafted = await collect(client, prompt, **options)
        plain = await collect(client, prompt, speculate=False, **options)
        assert drafted.tokens == plain.tokens and drafted.finished.usage.nodes_drafted > 0
        await until(lambda: not verifier.loaded.engine.sessions)


async def test_what_a_ray_node_imports_is_in_the_image() -> None:
    """The head's: the command line, and the modules that Ray's actors of router and n-gram draft unpickle."""
    body = "import draftwood.cli, router.pools, router.server, router.supervisor, draft_service.server, ray"
    process = await asyncio.create_subprocess_exec(*blocked("node", body), env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert await asyncio.wait_for(process.wait(), 60) == 0
