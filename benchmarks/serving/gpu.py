"""The services on a GPU, end to end: processes, gRPC, SmolLM2; text against the CPU's, speed with drafts and without.

Starts a verifier, two draft workers (language model; n-gram) and a router as processes without Ray. In float32 the
token ids are held against those of the CPU's reference path; in bfloat16 speculation is held against plain decoding.
Every difference is listed with its margin: the gap, in nats, between the two best candidates of the float32 target.

Then the same with SmolLM2 in the shape of an 8B model (``enlarged``): its texts, and so what drafts can guess, at what
a step of such a model costs. All processes share the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from enlarged import enlarge
from results import ROOT, Check, write
from transformers import AutoTokenizer

from draftwood.acceptance import Ending
from draftwood.client import Chunk, DraftwoodClient, Finished, Message
from draftwood.config import VerifierSettings
from draftwood.demo import PROMPTS
from draftwood.noise import GumbelCache
from draftwood.parameters import SamplingParams
from draftwood.runtime.demo_model import demo_target
from draftwood.runtime.model import ModelRuntime, load_model
from draftwood.runtime.shapes import shape
from draftwood.runtime.text import TextCodec, end_tokens
from draftwood.sampling import margins
from verifier_service.engine import Engine
from verifier_service.session import GenerateRequest

TOKENS = 96
NEAR_TIE = 1e-4
RULES = (SamplingParams(), SamplingParams(temperature=0.8, seed=1), SamplingParams(temperature=0.8, seed=2))
CLIENTS = (1, 8, 32)
IN_A_ROW = 4
"""Prompts that each client sends, one after the other."""
READY_S = 240.0
LARGE = "llama-8b"
LARGE_CLIENTS = (1, 8)
SETTLING, PAIRS = 6, 10
"""Pairs that are not counted, of a second or two each, and those that are: at first it is not known what drafts are
worth."""
AHEAD = ("--lookahead_levels", "6")
"""A level on a GPU is short beside the verifier's step."""
VOCAB = 49152
DEVICE = os.environ.get("DRAFTWOOD_BENCH_DEVICE", "cuda")
"""Another device only to try the script itself."""
CPU = torch.device("cpu")

Case = tuple[str, SamplingParams]
CASES: list[Case] = [(prompt, rule) for rule in RULES for prompt in PROMPTS]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    seconds: float
    steps: int


# --- the reference ---


def cpu_answers(runtime: ModelRuntime, codec: TextCodec) -> list[list[int]]:
    """Plain decoding by the reference path, float32: token ids of every case."""
    settings = VerifierSettings(max_sessions=64, kv_pages=512)
    engine = Engine(runtime, settings, token_count=VOCAB)
    ending = end_tokens(demo_target(), None)
    for k, (prompt, rule) in enumerate(CASES):
        ids = tuple(codec.render([{"role": "user", "content": prompt}]))
        engine.submit(GenerateRequest(str(k), b"", ids, (), rule, Ending(ending, TOKENS), 1))
    out: list[list[int]] = [[] for _ in CASES]
    while engine.sessions:
        for emitted in engine.step().emitted:
            out[int(emitted.session_id)] += emitted.tokens
    return out


def flips(
    model: torch.nn.Module, codec: TextCodec, want: Sequence[list[int]], got: Sequence[list[int]]
) -> list[dict[str, Any]]:
    """The first difference of each case, with the float32 margin there."""
    found = []
    for (prompt, rule), a, b in zip(CASES, want, got, strict=True):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        ids = torch.tensor([[*codec.render([{"role": "user", "content": prompt}]), *a[:at]]])
        with torch.inference_mode():
            logits = model(ids).logits[:, -1]
        margin = float(margins(logits, rule, [ids.shape[1]], GumbelCache(VOCAB, CPU))[0])
        found.append({"prompt": prompt, "temperature": rule.temperature, "token": at, "margin": margin})
    return found


# --- the services ---


@contextlib.asynccontextmanager
async def services(dtype: str, logs: Path, target: str = "demo") -> AsyncIterator[DraftwoodClient]:
    """The four processes on the GPU, and a client of the router."""
    at = [f"127.0.0.1:{_free_port()}" for _ in range(4)]
    options = ["--device", DEVICE, "--dtype", dtype, "--kv_pages", "1024", "--model", target]
    commands = [
        ["verifier_service", "--listen", at[0], *options],
        ["draft_service", "--listen", at[1], "--kind", "lm", "--device", DEVICE, "--kv_pages", "1024", *AHEAD],
        ["draft_service", "--listen", at[2], "--kind", "ngram"],
        ["router", "--listen", at[3], "--verifier", at[0], "--draft", at[1], "--draft", at[2]],
    ]
    with contextlib.ExitStack() as exits:
        for command in commands:
            log = exits.enter_context((logs / f"{command[0]}-{command[2][-5:]}.log").open("w"))
            process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stdout=log, stderr=log)
            exits.callback(process.wait)
            exits.callback(process.terminate)
        async with DraftwoodClient(at[3]) as client:
            await _ready(client)
            yield client


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _ready(client: DraftwoodClient) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            state = await client.status()
            workers = [*state.verifiers, *state.drafts]
            if len(workers) == 3 and all(worker.health == "ready" for worker in workers):
                return
        await asyncio.sleep(0.5)
    raise TimeoutError(f"the services were not ready within {READY_S:g} s")


async def answer(client: DraftwoodClient, case: Case, *, speculate: bool) -> Answer:
    prompt, rule = case
    tokens: list[int] = []
    began, steps = time.perf_counter(), 0
    options = {"temperature": rule.temperature, "seed": rule.seed, "max_tokens": TOKENS, "speculate": speculate}
    async for event in client.generate([Message("user", prompt)], **options):
        if isinstance(event, Chunk):
            tokens += event.tokens
        elif isinstance(event, Finished):
            steps = event.usage.steps
    return Answer(tokens, time.perf_counter() - began, steps)


async def at_once(client: DraftwoodClient, clients: int, *, speculate: bool) -> dict[str, float]:
    """Tokens/s of so many clients at once, greedy; and tokens a step."""

    async def one(first: int) -> list[Answer]:
        cases = [CASES[(first + k) % len(PROMPTS)] for k in range(IN_A_ROW)]
        return [await answer(client, case, speculate=speculate) for case in cases]

    began = time.perf_counter()
    answers = [a for some in await asyncio.gather(*(one(k) for k in range(clients))) for a in some]
    tokens = sum(len(a.tokens) for a in answers)
    return {"tokens_per_s": tokens / (time.perf_counter() - began), "accepted": tokens / sum(a.steps for a in answers)}


async def measure(client: DraftwoodClient, counts: Sequence[int]) -> dict[str, Any]:
    """Speed with drafts and without, paired, by number of clients; medians of the pairs after those that settle.

    Every other pair begins without drafts, so that a drift of the machine cancels.
    """
    out: dict[str, Any] = {}
    for clients in counts:
        pairs = []
        for k in range(SETTLING + PAIRS):
            order = (True, False) if k % 2 == 0 else (False, True)
            seen = {speculate: await at_once(client, clients, speculate=speculate) for speculate in order}
            pairs.append((seen[True], seen[False]))
        ratios = [drafted["tokens_per_s"] / plain["tokens_per_s"] for drafted, plain in pairs[SETTLING:]]
        out[f"clients_{clients}"] = {
            "tokens_per_s": round(statistics.median(p[0]["tokens_per_s"] for p in pairs[SETTLING:]), 1),
            "plain_tokens_per_s": round(statistics.median(p[1]["tokens_per_s"] for p in pairs[SETTLING:]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(r, 3) for r in ratios],
            "accepted": round(statistics.median(p[0]["accepted"] for p in pairs[SETTLING:]), 3),
        }
        print(clients, out[f"clients_{clients}"], flush=True)
    return out


async def answers(client: DraftwoodClient) -> dict[str, list[list[int]]]:
    """Token ids of every case, with drafts and without."""
    return {
        kind: [(await answer(client, case, speculate=kind == "drafts")).tokens for case in CASES]
        for kind in ("drafts", "plain")
    }


def save_large(folder: Path) -> None:
    """SmolLM2 in the large shape, and its tokenizer."""
    device = torch.device(DEVICE)
    small = load_model(str(demo_target()), CPU, torch.float32).to(device)
    large = enlarge(small, shape(LARGE), device, torch.bfloat16)
    large.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_target()).save_pretrained(folder)
    del large
    gc.collect()
    torch.cuda.empty_cache()


async def main() -> bool:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="of SmolLM2 in its own shape")
    chosen = parser.parse_args()
    logs = Path(os.environ.get("OUT", ROOT / "build")) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    codec = TextCodec(str(demo_target()))
    model = load_model(str(demo_target()), CPU, torch.float32)
    reference = cpu_answers(ModelRuntime(model, kv_pages=512, page_tokens=64), codec)
    judge = type(model).from_pretrained(demo_target(), dtype=torch.float32, attn_implementation="sdpa").eval()
    got: dict[str, dict[str, list[list[int]]]] = {}
    speeds: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        async with services(dtype, logs) as client:
            got[dtype] = await answers(client)
            against = reference if dtype == "float32" else got[dtype]["plain"]
            print(dtype, "differences:", flips(judge, codec, against, got[dtype]["drafts"]), flush=True)
            if dtype == "bfloat16":
                speeds = await measure(client, chosen.clients)
    with tempfile.TemporaryDirectory() as folder:
        save_large(Path(folder))
        async with services("bfloat16", logs, folder) as client:
            got[LARGE], large_speeds = await answers(client), await measure(client, LARGE_CLIENTS)
    wide = {kind: flips(judge, codec, reference, got["float32"][kind]) for kind in ("drafts", "plain")}
    narrow = flips(judge, codec, got["bfloat16"]["plain"], got["bfloat16"]["drafts"])
    large = flips(judge, codec, got[LARGE]["plain"], got[LARGE]["drafts"])
    wrong = [f for found in wide.values() for f in found if f["margin"] >= NEAR_TIE]
    checks = [
        Check("gpu/float32_differences", float(len(wrong)), "==", 0.0),
        Check("gpu/bfloat16_largest_flip_margin", max((f["margin"] for f in narrow), default=0.0), "<=", 0.25),
        Check("gpu/speedup", speeds["clients_1"]["ratio"], ">=", 1.0),
        Check("gpu/8b_largest_flip_margin", max((f["margin"] for f in large), default=0.0), "<=", 0.25),
        Check("gpu/8b_speedup", large_speeds["clients_1"]["ratio"], ">=", 1.5),
        Check("gpu/8b_vs_plain_min", min(found["ratio"] for found in large_speeds.values()), ">=", 0.97),
    ]
    details = {
        "cases": len(CASES),
        "tokens_per_case": TOKENS,
        "float32_near_tie_flips": wide,
        "bfloat16_flips_of_drafts_against_plain": narrow,
        "bfloat16_speed": speeds,
        "8b_flips_of_drafts_against_plain": large,
        "8b_speed": large_speeds,
    }
    return write("gpu", checks, details)


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
