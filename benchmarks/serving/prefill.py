"""A 4,000-token prompt that arrives amid eight decoding sessions: what it does to their inter-token time.

The real engine with SmolLM2 on the CPU, in process and without drafts. Rounds with and without the long prompt
alternate; a round without has as many steps as its partner, so that both see the same machine and the same contexts.

    python benchmarks/serving/prefill.py [--rounds 2] [--prompt 4000]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the services do, before torch is loaded

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Check, write

from draftwood.acceptance import Ending
from draftwood.config import VerifierSettings
from draftwood.parameters import SamplingParams
from draftwood.runtime.demo_model import demo_target
from draftwood.runtime.model import ModelRuntime, load_model
from verifier_service.engine import Engine
from verifier_service.session import GenerateRequest

SESSIONS = 8
TOKENS = 49152
WARM_STEPS = 30


@dataclass
class Round:
    """Gaps between the tokens of the eight sessions, seconds; and what became of the long prompt."""

    gaps_s: list[float] = field(default_factory=list)
    steps: int = 0
    first_token_s: float = 0.0


def main() -> bool:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--max-steps", type=int, default=2000)
    chosen = parser.parse_args()
    model = load_model(str(demo_target()), torch.device("cpu"), torch.float32)
    runtime = ModelRuntime(model, kv_pages=512, page_tokens=64)
    engine = Engine(runtime, VerifierSettings(), token_count=TOKENS)
    pairs = []
    for k in range(chosen.rounds):
        disturbed = serve(engine, chosen.prompt, chosen.max_steps, seed=k)
        quiet = serve(engine, 0, disturbed.steps, seed=k)
        pairs.append((disturbed, quiet))
        print(f"round {k + 1}: {_figures(disturbed, quiet)}", flush=True)
    both = Round([g for d, _ in pairs for g in d.gaps_s]), Round([g for _, q in pairs for g in q.gaps_s])
    ratio = float(np.percentile(both[0].gaps_s, 99) / np.percentile(both[1].gaps_s, 99))
    details = {
        "prompt_tokens": chosen.prompt,
        "sessions": SESSIONS,
        "rounds": [_figures(disturbed, quiet) for disturbed, quiet in pairs],
        "baseline": "the same engine, the same sessions, without the long prompt, in alternation",
    }
    return write("prefill", [Check("verifier/prefill_itl_ratio", round(ratio, 3), "<=", 1.5)], details)


def serve(engine: Engine, prompt: int, most_steps: int, seed: int) -> Round:
    """Eight sessions decode; then the long prompt arrives, if any, until its first token or ``most_steps``.

    Texts are those of the seed: the engine would find the pages of a prompt that it has read before.
    """
    rnd = np.random.default_rng(seed)
    for k in range(SESSIONS):
        _submit(engine, f"s{k}", rnd.integers(5, TOKENS, 40), 1 << 11)
    for _ in range(WARM_STEPS):
        engine.step()
    if prompt:
        _submit(engine, "long", rnd.integers(5, TOKENS, prompt), 8)
    seen, began = Round(), time.perf_counter()
    last = dict.fromkeys((f"s{k}" for k in range(SESSIONS)), began)
    while seen.steps < most_steps and not seen.first_token_s:
        outcome = engine.step()
        now = time.perf_counter()
        seen.steps += 1
        if seen.steps % 100 == 0:
            print(f"  step {seen.steps}, {now - began:.0f} s", flush=True)
        assert not outcome.failed
        for e in outcome.emitted:
            if e.session_id == "long":
                seen.first_token_s = now - began
            else:
                seen.gaps_s.append(now - last[e.session_id])
                last[e.session_id] = now
    for session_id in list(engine.sessions):
        engine.cancel(session_id)
    return seen


def _submit(engine: Engine, name: str, prompt: np.ndarray, tokens: int) -> None:
    ending = Ending(frozenset(), tokens)
    engine.submit(GenerateRequest(name, b"", tuple(prompt.tolist()), (), SamplingParams(), ending, 0))


def _figures(disturbed: Round, quiet: Round) -> dict[str, Any]:
    out: dict[str, Any] = {"steps": disturbed.steps, "first_token_s": round(disturbed.first_token_s, 2)}
    for name, seen in (("disturbed", disturbed), ("quiet", quiet)):
        for percent in (50, 99):
            out[f"{name}_p{percent}_ms"] = round(float(np.percentile(seen.gaps_s, percent)) * 1e3, 2)
        last = seen.gaps_s[-len(seen.gaps_s) // 4 :]
        out[f"{name}_last_quarter_p50_ms"] = round(float(np.percentile(last, 50)) * 1e3, 2)
    return out


if __name__ == "__main__":
    sys.exit(not main())
