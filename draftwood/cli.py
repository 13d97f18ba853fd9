"""The command line: ``draftwood up``, ``down``, ``status``, ``scale``, ``generate``, ``chat``, ``demo``,
``bench drafters``."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

# gRPC reads it when it is imported; at its default it tells of every connection that a server closes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from draftwood.client import Chunk, ClusterState, DraftwoodClient, Finished, Message, Prompt, Started
from draftwood.config import ClientSettings, ClusterConfig, load_client_settings, load_cluster_config
from draftwood.console import (
    StartView,
    logprob_table,
    pool_table,
    show_chunk,
    status_tables,
    summary,
    watch_start,
    worker_totals,
)
from draftwood.errors import DraftwoodError, NotFound, Unavailable

DEMO_CONFIG = Path(__file__).parents[1] / "deploy" / "examples" / "demo.yaml"
POLL_S = 0.2
STOP_TIMEOUT_S = 60.0

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
bench = typer.Typer(no_args_is_help=True, help="Measures on this machine.")
app.add_typer(bench, name="bench")
console = Console()

Config = Annotated[Path, typer.Option(help="cluster file (YAML)")]
Name = Annotated[str, typer.Option(help="name of a cluster started with `draftwood up`")]
Address = Annotated[
    str, typer.Option(help="routers' host:port, several with commas; empty: the routers of the cluster `--name`")
]
MaxTokens = Annotated[int, typer.Option(min=0, help="most tokens to generate; 0: no limit")]
Temperature = Annotated[float, typer.Option(min=0, help="0: greedy")]
Seed = Annotated[int | None, typer.Option(min=0, help="seed of the sampling; a random one if left out")]
Stop = Annotated[list[str] | None, typer.Option(help="string that ends the text; may be given several times")]
Speculate = Annotated[bool, typer.Option(help="let drafts guess; the text is the same either way")]


CONNECTION: ContextVar[ClientSettings | None] = ContextVar("connection", default=None)
"""How the running command reaches the router."""

Ca = Annotated[Path | None, typer.Option(help="CA certificates (PEM) of the router's; $DRAFTWOOD_CA")]
Cert = Annotated[Path | None, typer.Option(help="own certificate (PEM); $DRAFTWOOD_CERT")]
Key = Annotated[Path | None, typer.Option(help="its private key (PEM); $DRAFTWOOD_KEY")]
TokenFile = Annotated[Path | None, typer.Option(help="file with the bearer token; $DRAFTWOOD_TOKEN_FILE")]
Tls = Annotated[bool | None, typer.Option("--tls", help="TLS with public CAs; --ca implies it; $DRAFTWOOD_TLS")]
ServerName = Annotated[str | None, typer.Option(help="name in the router's certificate; $DRAFTWOOD_SERVER_NAME")]
CONNECTION_OPTIONS = {
    "ca": Ca,
    "cert": Cert,
    "key": Key,
    "token_file": TokenFile,
    "tls": Tls,
    "server_name": ServerName,
}


def connecting(command: Callable[..., None]) -> Callable[..., None]:
    """Adds to a command that speaks to a router the options for how to do so."""

    @wraps(command)
    def connected(**given: Any) -> None:
        CONNECTION.set(load_client_settings(**{name: given.pop(name) for name in CONNECTION_OPTIONS}))
        command(**given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in CONNECTION_OPTIONS.items()
    ]
    connected.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    connected.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
    return connected


def _client(addresses: str) -> DraftwoodClient:
    return DraftwoodClient(*addresses.split(","), settings=CONNECTION.get())


def main() -> None:
    """Entry point of the console script: one clear line for every error, exit code 1."""
    try:
        app()
    except DraftwoodError as error:
        print(f"error: {error}{_advice(error)}", file=sys.stderr)
        raise SystemExit(1) from error


@app.command()
@connecting
def up(
    config: Config,
    foreground: Annotated[bool, typer.Option(help="stay in the foreground until Ctrl-C")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="longest wait until all is ready, seconds")] = 600.0,
) -> None:
    """Starts the cluster of a file: router, verifiers, draft workers."""
    cluster = load_cluster_config(config)
    run(_hold_cluster(cluster, timeout) if foreground else _start_supervisor(cluster, config.resolve(), timeout))


@app.command()
def down(name: Name = "default") -> None:
    """Stops a cluster started with `draftwood up`."""
    from router.supervisor import is_running

    record = _record(name)
    os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while is_running(record.pid):
        if time.monotonic() > deadline:
            raise Unavailable("STOP_TIMEOUT", f"process {record.pid} runs on after {STOP_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    console.print(f"{name} is down", highlight=False)


@app.command()
@connecting
def status(
    name: Name = "default",
    address: Address = "",
    watch: Annotated[bool, typer.Option(help="show it until Ctrl-C")] = False,
) -> None:
    """Shows the router's pools."""
    run(_show_status(address or _record(name).address, watch))


@app.command()
@connecting
def scale(
    counts: Annotated[list[str], typer.Argument(help="POOL=COUNT, such as draft=4 verifier=2")],
    name: Name = "default",
    address: Address = "",
) -> None:
    """Sets how many workers pools have; those too many finish or hand over what they do, then go."""
    run(_scale(address or _record(name).address, _pool_counts(counts)))


@app.command()
@connecting
def generate(
    prompt: Annotated[str, typer.Argument(help="what to ask")],
    *,
    name: Name = "default",
    address: Address = "",
    model: Annotated[str, typer.Option(help="served model; may be left out if there is one")] = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="keep the k most likely tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="keep the likeliest tokens of this mass")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="keep tokens with this share of the likeliest's p")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="off the logits of tokens in the answer, -2 to 2")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="the same for each occurrence, -2 to 2")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="factor on tokens of prompt and answer; 1: none")] = 1.0,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS, added to a token's logit; repeatable")] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="text that must not come; repeatable")] = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="tokens before the answer may end")] = 0,
    seed: Seed = None,
    rule: Annotated[
        str,
        typer.Option(help="how guesses are accepted: shared_noise, rejection, typical (lossy); empty: the server's"),
    ] = "",
    stop: Stop = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(min=0, help="id that ends the text; several times")] = None,
    include_stop: Annotated[bool, typer.Option(help="show the stop string, too")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="go on past the model's own end tokens")] = False,
    skip_special: Annotated[bool, typer.Option(help="leave special tokens out of the text")] = True,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="texts to write; above 1 with a temperature only")] = 1,
    top_logprobs: Annotated[
        int | None, typer.Option(min=0, help="show each token's log probability and so many alternatives")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="file with a JSON schema that the answer must meet")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="the answer must be a JSON object")] = False,
    regex: Annotated[str | None, typer.Option(help="regular expression that the whole answer must match")] = None,
    grammar: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="file with a grammar for the answer (Lark syntax)")
    ] = None,
    raw: Annotated[bool, typer.Option(help="the prompt is text to go on with, not a question")] = False,
    speculate: Speculate = True,
) -> None:
    """Streams the answer to one prompt; tokens that a draft had guessed are coloured."""
    options = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "logit_bias": _logit_bias(logit_bias or []),
        "bad_words": bad_word or [],
        "min_tokens": min_tokens,
        "seed": seed,
        "rule": rule,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
        "include_stop_str_in_output": include_stop,
        "ignore_eos": ignore_eos,
        "skip_special_tokens": skip_special,
        "n": n,
        "logprobs": top_logprobs is not None,
        "top_logprobs": top_logprobs or 0,
        "json_schema": json_schema and json_schema.read_text(),
        "json_object": json_object,
        "regex": regex,
        "grammar": grammar and grammar.read_text(),
        "speculate": speculate,
    }
    asked: Prompt = prompt if raw else [Message("user", prompt)]
    run(_generate(address or _record(name).address, asked, options))


@app.command()
@connecting
def chat(
    name: Name = "default",
    address: Address = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Talks with the target, turn by turn; /quit ends."""
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop or ()}
    run(_chat(address or _record(name).address, options))


@app.command()
def demo(
    config: Config = DEMO_CONFIG,
    max_tokens: Annotated[int, typer.Option(min=2, help="tokens per answer")] = 64,
    timeout: Annotated[float, typer.Option(min=1, help="longest wait until all is ready, seconds")] = 600.0,
) -> None:
    """Starts a small cluster here, answers eight prompts with and without drafts, compares, and stops it."""
    from draftwood.demo import run_demo

    if not run(run_demo(console, load_cluster_config(config), max_tokens, timeout)):
        raise typer.Exit(1)


@bench.command()
def drafters(
    method: Annotated[list[str] | None, typer.Option(help="way of drafting; repeatable; all if left out")] = None,
    task: Annotated[list[str] | None, typer.Option(help="kind of task; repeatable; all if left out")] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="repeatable; 0, 0.6 and 1 if left out")] = None,
    tokens: Annotated[int, typer.Option(min=4, help="tokens of each text")] = 48,
    prompts: Annotated[int, typer.Option(min=0, help="prompts of each kind of task; 0: all")] = 1,
    nodes: Annotated[int, typer.Option(min=1, max=255, help="most nodes of a tree")] = 25,
    settings: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="further methods: draft settings by name (YAML)")
    ] = None,
    model: Annotated[str, typer.Option(help='target: path, hub id, or "demo"')] = "demo",
    verifier: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, a setting of the verifier besides; repeatable")
    ] = None,
    output: Annotated[Path, typer.Option(help="file that the figures go to (JSON)")] = Path("drafters.json"),
    add: Annotated[bool, typer.Option("--add", help="keep the other methods of that file")] = False,
) -> None:
    """Compares ways of drafting on the same texts, through services started here: acceptance, time, bytes, speed."""
    from draftwood.comparison import TEMPERATURES, Options, compare, comparison_table, load_methods, load_tasks, save
    from draftwood.methods import choose, drafting_methods

    known = drafting_methods() | (load_methods(settings) if settings else {})
    options = Options(
        choose(method or [], known), load_tasks(task or [], prompts), tuple(temperature or TEMPERATURES), tokens, nodes,
        verifier=(("model", model), *map(_setting, verifier or [])),
    )  # fmt: skip
    earlier = json.loads(output.read_text()) if add and output.exists() else None
    run(compare(options, console, lambda found: save(output, found, earlier)))
    console.print(comparison_table(json.loads(output.read_text())))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs to the end; Ctrl-C ends with exit code 130."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _setting(option: str) -> tuple[str, str]:
    """Raises BadParameter for an option that is not NAME=VALUE."""
    name, sign, value = option.partition("=")
    if not name or not sign:
        raise typer.BadParameter(f"{option!r} is not NAME=VALUE, as in kv_pages=64", param_hint="--verifier")
    return name, value


def _logit_bias(options: list[str]) -> dict[int, float]:
    """Raises BadParameter for an option that is not ID=BIAS."""
    biases: dict[int, float] = {}
    for option in options:
        match = re.fullmatch(r"(\d+)=(-?\d+(?:\.\d+)?)", option)
        if not match:
            raise typer.BadParameter(f"{option!r} is not ID=BIAS, as in 42=-5", param_hint="--logit-bias")
        biases[int(match[1])] = float(match[2])
    return biases


def _pool_counts(arguments: list[str]) -> dict[str, int]:
    """Raises BadParameter for an argument that is not POOL=COUNT, and for a pool that comes twice."""
    counts: dict[str, int] = {}
    for argument in arguments:
        match = re.fullmatch(r"([a-z][a-z0-9-]*)=(\d{1,6})", argument)
        if not match or match[1] in counts:
            fault = "names a pool a second time" if match else "is not POOL=COUNT, as in draft=4"
            raise typer.BadParameter(f"{argument!r} {fault}", param_hint="COUNTS")
        counts[match[1]] = int(match[2])
    return counts


def _advice(error: DraftwoodError) -> str:
    if error.reason in ("ROUTER_UNREACHABLE", "NO_CLUSTER"):
        return "; start a cluster with: draftwood up --config deploy/examples/demo.yaml"
    return ""


def _record(name: str) -> Any:
    """The running cluster of that name. Raises NotFound NO_CLUSTER."""
    from router.supervisor import read_record, state_path

    record = read_record(state_path(name))
    if record is None:
        raise NotFound("NO_CLUSTER", f"no cluster named {name!r} is running here, and no --address was given")
    return record


async def _hold_cluster(config: ClusterConfig, timeout_s: float) -> None:
    from router.cluster import Cluster
    from router.supervisor import STOP_GRACE_S, stop_signal

    cluster = Cluster(config)
    try:
        await watch_start(console, cluster, config, timeout_s)
        stopping = stop_signal()
        _say_ready(cluster.address, f"--address {cluster.address}", "Ctrl-C")
        await stopping.wait()
    finally:
        await cluster.stop(STOP_GRACE_S)


async def _start_supervisor(config: ClusterConfig, path: Path, timeout_s: float) -> None:
    from router.supervisor import MODULE, read_record, state_path

    state = state_path(config.name)
    if read_record(state):
        raise Unavailable("ALREADY_UP", f"a cluster named {config.name!r} is running; see: draftwood status")
    state.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = state.with_suffix(".log")
    command = [sys.executable, "-m", MODULE, "--config", str(path), "--state", str(state)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        async with asyncio.timeout(timeout_s):
            address = await _await_ready(config, state, process, log)
    except (TimeoutError, DraftwoodError, asyncio.CancelledError) as error:
        await asyncio.to_thread(_end, process)
        if isinstance(error, TimeoutError):
            raise Unavailable("NOT_READY", f"not ready after {timeout_s:g} s; its log: {log}") from error
        raise
    name = "" if config.name == "default" else f"--name {config.name}"
    _say_ready(address, name, f"draftwood down {name}".strip())


async def _await_ready(config: ClusterConfig, state: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    """Follows the start; returns the routers' addresses. Raises Unavailable START_FAILED when the supervisor ends."""
    from router.supervisor import read_record

    with StartView(console, worker_totals(config)) as view:
        routers = [f"router-{k}" for k in range(config.router.count)]
        for router in routers:
            view.update("router", router, "starting")
        while not (record := read_record(state)):
            _check(process, log)
            await asyncio.sleep(POLL_S)
        for router in routers:
            view.update("router", router, "ready")
        async with _client(record.address) as client:
            while not view.ready:
                _check(process, log)
                _update(view, await client.status())
                await asyncio.sleep(POLL_S)
    return str(record.address)


def _update(view: StartView, state: ClusterState) -> None:
    for role, workers in (("verifier", state.verifiers), ("draft", state.drafts)):
        for worker in workers:
            stage = "ready" if worker.health == "ready" else "lost" if worker.health == "lost" else "loading"
            view.update(role, worker.address, stage)  # type: ignore[arg-type]


def _check(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
        told = said[-1].removeprefix("error: ") if said else f"exit code {process.returncode}"
        raise Unavailable("START_FAILED", f"{told}; its log: {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _say_ready(address: str, where: str, stop: str) -> None:
    routers = "router serves" if "," not in address else "routers serve"
    console.print(f"{routers} at {address.replace(',', ', ')}", highlight=False)
    console.print(f'try:  draftwood generate {where} "Why is the sky blue?"'.replace("  ", " "), highlight=False)
    console.print(f"stop: {stop}", highlight=False)


async def _show_status(address: str, watch: bool) -> None:
    async with _client(address) as client:
        if not watch:
            console.print(*status_tables(await client.status()), sep="\n")
            return
        with Live(console=console) as live:
            async for state in client.watch_status():
                live.update(Group(*status_tables(state)))


async def _scale(address: str, counts: dict[str, int]) -> None:
    async with _client(address) as client:
        console.print(pool_table(await client.scale(counts)))


async def _generate(address: str, prompt: Prompt, options: dict[str, Any]) -> None:
    async with _client(address) as client:
        if options["n"] > 1:
            await _show_texts(client, prompt, options)
        else:
            await _stream(client, prompt, options)


async def _show_texts(client: DraftwoodClient, prompt: Prompt, options: dict[str, Any]) -> None:
    """Each of several texts when it is whole, with its seed: streamed, they would run into each other."""
    started: dict[int, Started] = {}
    chunks: defaultdict[int, list[Chunk]] = defaultdict(list)
    async for event in client.generate(prompt, **options):
        if isinstance(event, Started):
            started[event.index] = event
        elif isinstance(event, Chunk):
            chunks[event.index].append(event)
        else:
            console.print(f"text {event.index}, seed {started[event.index].seed}:", style="bold", highlight=False)
            for chunk in chunks.pop(event.index, []):
                show_chunk(console, chunk)
            console.print(f"\n{summary(event)}", style="dim", highlight=False)


async def _stream(client: DraftwoodClient, prompt: Prompt, options: dict[str, Any]) -> str:
    """Shows the answer as it comes and a summary; returns its text."""
    pieces: list[str] = []
    chunks: list[Chunk] = []
    async for event in client.generate(prompt, **options):
        if isinstance(event, Chunk):
            pieces += event.pieces
            chunks.append(event)
            show_chunk(console, event)
        elif isinstance(event, Finished):
            console.print(f"\n{summary(event)}", style="dim", highlight=False)
            if options.get("logprobs"):
                console.print(logprob_table(chunks))
    return "".join(pieces)


async def _chat(address: str, options: dict[str, Any]) -> None:
    history: list[Message] = []
    async with _client(address) as client:
        await client.models()  # says at once if nobody is there
        with suppress(EOFError):
            while (line := (await asyncio.to_thread(console.input, "[bold]you>[/] ")).strip()) != "/quit":
                if line:
                    history = await _turn(client, history, line, options)


async def _turn(client: DraftwoodClient, history: list[Message], line: str, options: dict[str, Any]) -> list[Message]:
    """The history with the new turn and its answer; as it was if there is none."""
    asked = [*history, Message("user", line)]
    try:
        return [*asked, Message("assistant", await _stream(client, asked, options))]
    except DraftwoodError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return history
