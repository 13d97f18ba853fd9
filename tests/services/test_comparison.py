"""``draftwood bench drafters`` as a user runs it, over processes that it starts, with the tiny models."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import yaml

from draftwood.tap import Tap
from tests.services.models import Models
from tests.services.stack import Stack, collect

COMMAND = (sys.executable, "-c", "from draftwood.cli import main; main()", "bench", "drafters")


async def test_the_tap_changes_nothing_and_counts_what_is_accepted(stack: Stack) -> None:
    verifier, draft = await stack.verifier(), await stack.draft()
    tap = Tap(verifier.address)
    stack.exits.push_async_callback(tap.stop)
    router = await stack.router([await tap.start()], [draft])
    client = await stack.client(router)
    for prompt in ("The sky is blue", "One two three"):
        tap.reset()
        text = await collect(client, prompt, max_tokens=40, ignore_eos=True)
        assert text.tokens == (await collect(client, prompt, max_tokens=40, ignore_eos=True, speculate=False)).tokens
        assert text.finished and text.accepted > 0
        tally, last = tap.tally, text.chunks[-1].accepted  # the last step ends the text: no commit follows
        assert text.accepted - last >= sum(tally.taken.values()) == sum(tally.ranks.values()) > 0
        assert 0 < tally.rounds <= text.finished.usage.steps and tally.bytes_up > 0 < tally.bytes_down
        assert len(tally.round_s) >= tally.rounds


async def test_compares_methods_and_says_why_one_is_left_out(models: Models, tmp_path: Path) -> None:
    tiny = {"model": str(models.draft), "page_tokens": 16, "threads": 1, "depth": 4}
    (tmp_path / "methods.yaml").write_text(
        yaml.safe_dump({
            "tiny": {"kind": "lm"} | tiny,
            "missing": {"kind": "lm", "model": str(tmp_path / "nothing")},
            "large": {"kind": "lm", "topology": "kary", "branching": [9, 9]},
        })
    )  # fmt: skip
    output = tmp_path / "out.json"
    arguments = [
        "--settings", str(tmp_path / "methods.yaml"), "--output", str(output), "--model", str(models.target),
        "--tokens", "60", "--nodes", "8", "--task", "chat", "--temperature", "0", "--temperature", "0.6",
    ]  # fmt: skip
    said = await run(*arguments, "--method", "tiny", "--method", "missing", "--method", "large")
    found = json.loads(output.read_text())
    assert "cells" in found["methods"]["tiny"], found["methods"]["tiny"]
    assert [(c["task"], c["temperature"]) for c in found["methods"]["tiny"]["cells"]] == [("chat", 0.0), ("chat", 0.6)]
    assert all(c["identical"] == c["texts"] == 1 and c["rounds"] for c in found["methods"]["tiny"]["cells"])
    assert "nothing" in found["methods"]["missing"]["skipped"]
    assert "makes 90 nodes, the limit is 8" in found["methods"]["large"]["skipped"]
    assert "tiny" in said and "2/2" in said and "the limit is 8" in said
    await run(*arguments, "--add", "--method", "ngram", "--verifier", "page_tokens=16")
    assert set(json.loads(output.read_text())["methods"]) == {"tiny", "missing", "large", "ngram"}


async def run(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, env=os.environ | {"COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    return out.decode()
