"""``draftwood bench drafters``: every way of drafting on the same texts, over services started for it.

One verifier serves throughout, behind a tap that reads its stream (``draftwood.tap``); each method has a draft worker
of its own, one after the other. Each text is written once without drafts, and then once by each method, which must
write the same. The verifier verifies all nodes that it is sent, so that what is accepted does not depend on times.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from draftwood.client import Chunk, DraftwoodClient, Finished, Message, Usage
from draftwood.config import DraftSettings, RouterSettings
from draftwood.errors import DraftwoodError, Internal, InvalidArgument, Unavailable
from draftwood.tap import Tally, Tap
from draftwood.telemetry import configure_logging

TASKS = Path(__file__).parent / "tasks.yaml"
TEMPERATURES = (0.0, 0.6, 1.0)
READY_S = 300.0
POLL_S = 0.05
WARM_UP_TOKENS = 12
DRAFT_WAIT_MS = 3000.0
"""Rounds are waited for, whatever they take: a draft's time is a figure of its own."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is compared, and on what."""

    methods: dict[str, dict[str, Any]]  # settings by name
    tasks: dict[str, list[str]]  # prompts by kind
    temperatures: tuple[float, ...] = TEMPERATURES
    tokens: int = 48  # of a text
    nodes: int = 25  # of a tree
    verifier: tuple[tuple[str, Any], ...] = ()  # further settings
    draft: tuple[tuple[str, Any], ...] = ()  # further settings of every draft worker


@dataclass(frozen=True, slots=True)
class Text:
    """One answer."""

    tokens: tuple[int, ...]
    usage: Usage

    @property
    def token_s(self) -> float:
        """Seconds a token, from the first on."""
        return (self.usage.total_s - self.usage.first_token_s) / max(1, len(self.tokens) - 1)


Key = tuple[str, str, float]
"""Task, prompt and temperature of a text."""


def load_tasks(names: Sequence[str] = (), prompts: int = 0) -> dict[str, list[str]]:
    """Prompts by kind of task: all kinds without names, the first ``prompts`` of each (0: all).

    Raises InvalidArgument CONFIG for a name that the file has not.
    """
    tasks: dict[str, list[str]] = yaml.safe_load(TASKS.read_text(encoding="utf-8"))
    if unknown := [name for name in names if name not in tasks]:
        raise InvalidArgument("CONFIG", f"no task {unknown[0]!r}; there are {', '.join(tasks)}", field="task")
    return {name: tasks[name][: prompts or None] for name in names or tasks}


async def compare(options: Options, console: Console, keep: Callable[[dict[str, Any]], None]) -> None:
    """Runs it; gives ``keep`` what has been found after each method. One that cannot be started has a reason instead.

    Raises DraftwoodError if the verifier cannot be started.
    """
    configure_logging("bench", json=False, level="ERROR")  # of the router that runs here
    asked = [(task, prompt) for task, prompts in options.tasks.items() for prompt in prompts]
    texts = [(task, prompt, temperature) for task, prompt in asked for temperature in options.temperatures]
    settings = {
        "width": "full", "max_nodes": options.nodes, "max_live_nodes": max(512, 4 * options.nodes), "kv_pages": 64,
        "draft_wait_ms": DRAFT_WAIT_MS, "max_context_tokens": 2048,
    } | dict(options.verifier)  # fmt: skip
    async with (
        _service("verifier_service", "DRAFTWOOD_VERIFIER_", settings) as verifier,
        _tapped(verifier) as (tap, address),
    ):
        async with _client(address, ()) as client:
            await _answer(client, texts[0], WARM_UP_TOKENS, False)
            plain = {key: await _answer(client, key, options.tokens, False) for key in texts}
        console.print(f"plain decoding: {len(texts)} texts", highlight=False)
        methods: dict[str, Any] = {}
        found = {
            "tokens": options.tokens,
            "nodes": options.nodes,
            "temperatures": list(options.temperatures),
            "prompts": {task: len(prompts) for task, prompts in options.tasks.items()},
            "plain_tokens_per_s": round(_rate(plain.values()), 2),
            "methods": methods,
        }
        for name, chosen in options.methods.items():
            try:
                methods[name] = await _measure(options, chosen, tap, address, plain)
            except (DraftwoodError, ValueError) as error:
                methods[name] = {"settings": chosen, "skipped": _reason(error)}
            console.print(f"{name}: {methods[name].get('skipped') or 'done'}", highlight=False, markup=False)
            keep(found)


async def _measure(
    options: Options, chosen: dict[str, Any], tap: Tap, address: str, plain: dict[Key, Text]
) -> dict[str, Any]:
    base = {"max_nodes": options.nodes, "kv_pages": 64, "lookahead_levels": 0}
    given = base | dict(options.draft) | chosen
    DraftSettings(**given)  # says what is wrong with them before a process is started
    cells = []
    async with _service("draft_service", "DRAFTWOOD_DRAFT_", given) as draft, _client(address, (draft,)) as client:
        await _answer(client, next(iter(plain)), WARM_UP_TOKENS, True)
        for temperature in options.temperatures:
            for task in options.tasks:
                tap.reset()
                keys = [key for key in plain if key[0] == task and key[2] == temperature]
                written = {key: await _answer(client, key, options.tokens, True) for key in keys}
                cells.append({"task": task, "temperature": temperature} | figures(written, plain, tap.tally))
    return {"settings": chosen, "cells": cells}


def _reason(error: Exception) -> str:
    """One line."""
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error).splitlines()[0]
    return text.removeprefix("Value error, ")


def figures(written: dict[Key, Text], plain: dict[Key, Text], tally: Tally) -> dict[str, Any]:
    """Of one method on one kind of task at one temperature."""
    tokens = sum(len(text.tokens) for text in written.values())
    steps = sum(text.usage.steps for text in written.values())
    deepest = max(tally.asked, default=-1) + 1
    taken = sum(tally.ranks.values())
    return {
        "tokens": tokens,
        "steps": steps,
        "tokens_per_forward": round(tokens / max(1, steps), 3),
        "rounds": tally.rounds,
        "round_tokens": tally.tokens,
        "acceptance_length": round(tally.tokens / max(1, tally.rounds), 3),
        "asked_by_depth": [tally.asked[d] for d in range(deepest)],
        "accepted_by_depth": [tally.taken[d] for d in range(deepest)],
        "accepted_by_rank": [tally.ranks[r] for r in range(max(tally.ranks, default=-1) + 1)],
        "accepted": taken,
        "nodes_per_round": round(tally.nodes / max(1, tally.rounds), 2),
        "draft_ms": round(1e3 * statistics.median(tally.round_s), 2) if tally.round_s else None,
        "bytes_up": tally.bytes_up,
        "bytes_down": tally.bytes_down,
        "bytes_per_round": round((tally.bytes_up + tally.bytes_down) / max(1, tally.rounds), 1),
        "speed": round(_rate(written.values()) / _rate([plain[key] for key in written]), 3),
        "identical": sum(text.tokens == plain[key].tokens for key, text in written.items()),
        "texts": len(written),
    }


def _rate(texts: Iterable[Text]) -> float:
    """Tokens a second behind the first."""
    each_s = [text.token_s for text in texts]
    return len(each_s) / max(1e-9, sum(each_s))


# --- services ---


@asynccontextmanager
async def _service(module: str, prefix: str, settings: dict[str, Any]) -> AsyncIterator[str]:
    """A service of ours in a process of its own; its address once it is ready. Raises Unavailable START_FAILED."""
    given = {f"{prefix}{name.upper()}": v if isinstance(v, str) else json.dumps(v) for name, v in settings.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, env=os.environ | given, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said: list[str] = []
    reading = asyncio.create_task(_drain(process.stderr, said.append))
    try:
        async with asyncio.timeout(READY_S):
            address = await _await_ready(process, said)
        yield address
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
        await reading


async def _await_ready(process: asyncio.subprocess.Process, said: Sequence[str]) -> str:
    assert process.stdout is not None
    address = ""
    while line := (await process.stdout.readline()).decode():
        if " listens on " in line:
            address = line.split()[-1]
        if line.rstrip().endswith("is ready"):
            return address
    await process.wait()
    await asyncio.sleep(POLL_S)
    reasons = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    raise Unavailable("START_FAILED", reasons[-1] if reasons else f"exit code {process.returncode}")


async def _drain(stream: asyncio.StreamReader | None, keep: Callable[[str], None]) -> None:
    assert stream is not None
    async for line in stream:
        keep(line.decode(errors="replace").strip())


@asynccontextmanager
async def _tapped(verifier: str) -> AsyncIterator[tuple[Tap, str]]:
    tap = Tap(verifier)
    address = await tap.start()
    try:
        yield tap, address
    finally:
        await tap.stop()


@asynccontextmanager
async def _client(verifier: str, drafts: Sequence[str]) -> AsyncIterator[DraftwoodClient]:
    """A client of a router over these; all of them are ready."""
    from router.server import RouterServer

    router = RouterServer(RouterSettings(verifiers=[verifier], drafts=list(drafts), reconnect_s=0.1))
    address = await router.start()
    try:
        async with asyncio.timeout(READY_S):
            while not all(worker.health == "READY" for worker in router.workers()):
                await asyncio.sleep(POLL_S)
        async with DraftwoodClient(address) as client:
            yield client
    finally:
        await router.stop(0.5)


async def _answer(client: DraftwoodClient, key: Key, tokens: int, speculate: bool) -> Text:
    _, prompt, temperature = key
    written: list[int] = []
    asked = client.generate(
        [Message("user", prompt)], max_tokens=tokens, temperature=temperature, seed=1 if temperature else None,
        speculate=speculate,
    )  # fmt: skip
    async for event in asked:
        if isinstance(event, Chunk):
            written += event.tokens
        elif isinstance(event, Finished):
            return Text(tuple(written), event.usage)
    raise Internal("NO_END", f"the answer to {prompt!r} ended without its last word")


# --- what is shown ---


def total(cells: Sequence[dict[str, Any]], task: str = "", temperature: float | None = None) -> dict[str, Any]:
    """Figures of several cells together."""
    chosen = [c for c in cells if task in ("", c["task"]) and temperature in (None, c["temperature"])]
    rounds = max(1, sum(c["rounds"] for c in chosen))
    times = [c["draft_ms"] for c in chosen if c["draft_ms"] is not None]
    return {
        "acceptance_length": sum(c["round_tokens"] for c in chosen) / rounds,
        "tokens_per_forward": sum(c["tokens"] for c in chosen) / max(1, sum(c["steps"] for c in chosen)),
        "draft_ms": statistics.median(times) if times else 0.0,
        "bytes_per_round": sum(c["bytes_up"] + c["bytes_down"] for c in chosen) / rounds,
        "speed": statistics.harmonic_mean([c["speed"] for c in chosen]),
        "identical": sum(c["identical"] for c in chosen),
        "texts": sum(c["texts"] for c in chosen),
        "by_depth": _by_depth(chosen),
        "by_rank": _columns(chosen, "accepted_by_rank"),
    }


def _columns(cells: Sequence[dict[str, Any]], name: str) -> list[int]:
    longest = max((len(c[name]) for c in cells), default=0)
    return [sum(c[name][k] for c in cells if k < len(c[name])) for k in range(longest)]


def _by_depth(cells: Sequence[dict[str, Any]]) -> list[float]:
    """Share of nodes reached whose children held the next token, by the children's depth."""
    asked, taken = _columns(cells, "asked_by_depth"), _columns(cells, "accepted_by_depth")
    return [round(hits / count, 3) for hits, count in zip(taken, asked, strict=True) if count]


def comparison_table(found: dict[str, Any]) -> Table:
    """One line a method; below, those that were left out and why."""
    temperatures = found["temperatures"]
    skipped = {name: method["skipped"] for name, method in found["methods"].items() if "skipped" in method}
    title = f"tokens a round by temperature; trees of {found['nodes']} nodes, {found['tokens']} tokens a text"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.caption = Line("\n".join(f"{name}: {reason}" for name, reason in skipped.items())) if skipped else None
    table.add_column("method", overflow="fold")
    for column in (*(f"T={t:g}" for t in temperatures), "a step", "draft ms", "bytes", "speed", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, method in found["methods"].items():
        if name in skipped:
            continue
        cells = method["cells"]
        whole = total(cells)
        lengths = [f"{total(cells, temperature=t)['acceptance_length']:.2f}" for t in temperatures]
        table.add_row(
            name, *lengths, f"{whole['tokens_per_forward']:.2f}", f"{whole['draft_ms']:.1f}",
            f"{whole['bytes_per_round']:.0f}", f"{whole['speed']:.2f}x", f"{whole['identical']}/{whole['texts']}",
        )  # fmt: skip
    return table


def load_methods(path: Path) -> dict[str, dict[str, Any]]:
    """Further methods, or others by the same name: settings by name, as YAML."""
    methods: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return methods


def save(file: Path, found: dict[str, Any], earlier: dict[str, Any] | None = None) -> None:
    """Writes what has been found, with the methods of an earlier run; raises as ``merged``."""
    file.write_text(json.dumps(merged(found, earlier) if earlier else found, indent=1) + "\n")


def merged(found: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """With the methods of an earlier run on the same texts; raises InvalidArgument CONFIG for one on others."""
    same = ("tokens", "nodes", "temperatures", "prompts")
    if differing := [name for name in same if earlier.get(name) != found[name]]:
        name = differing[0]
        message = f"the file's run has {name} {earlier.get(name)}, this one {found[name]}"
        raise InvalidArgument("CONFIG", message, field=name)
    return found | {"methods": earlier["methods"] | found["methods"]}
