"""Tokens a step for each way of drafting, at the same number of nodes, on texts that the target writes.

The demo target writes each text greedily and alone. Each drafter then draws round after round for the same texts, and
what of its tree carries the text is accepted, as a verifier would that checks every node; so a method costs no forward
of the target, and all see the same text. Texts follow each other in one worker, so that what is learnt from them is
learnt as in service. No level is drawn ahead.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Check, write
from transformers import AutoModelForCausalLM

from draft_service.drafter import Drafter, SessionCommitted, SessionStart
from draft_service.server import make_drafter
from draftwood.config import DraftSettings
from draftwood.demo import PROMPTS
from draftwood.features import Features
from draftwood.parameters import SamplingParams
from draftwood.runtime.demo_model import demo_target
from draftwood.runtime.text import TextCodec

TOKENS = 48
NODES = 25
"""As many as EAGLE-1's static tree has."""
DEPTH = 8
COPYING = (
    "Repeat this line five times: All work and no play makes Jack a dull boy.",
    "Correct the spelling and write the text again: The quik brown fox jumps over the lazy dog. The dog sleaps on.",
    "Write this list again in the same order, one item a line: apples, pears, plums, cherries, grapes, figs, dates.",
    "Copy this function and add a docstring: def area(width, height): return width * height",
)
KARY = ([5, 4], [4, 2, 1], [3, 2, 1, 1], [5, 1, 1, 1, 1], [4, 1, 1, 1, 1, 1], [3, 1, 1, 1, 1, 1, 1, 1])
LM: dict[str, Any] = {"kind": "lm", "lookahead_levels": 0}
METHODS: dict[str, dict[str, Any]] = {
    "chain": LM | {"topology": "chain"},
    "eagle1": LM | {"topology": "eagle1"},
    **{f"kary {k}": LM | {"topology": "kary", "branching": k} for k in KARY},
    "sequoia": LM | {"topology": "sequoia", "branch": 16},
    "expand_rerank": LM | {"topology": "expand_rerank", "branch": 8, "beam": 8},
    "best_first": LM,
    "ngram": {"kind": "ngram"},
    "suffix": {"kind": "suffix"},
    "best_first + ngram": {"kind": "merged", "parts": [LM, {"kind": "ngram"}]},
    "best_first + suffix": {"kind": "merged", "parts": [LM, {"kind": "suffix"}]},
}


@dataclass(frozen=True)
class Figures:
    """What a method gave."""

    tokens_a_step: float
    by_text: list[float]
    round_ms: float


def main() -> bool:
    codec = TextCodec(demo_target())
    prompts = [codec.render([{"role": "user", "content": text}]) for text in (*PROMPTS, *COPYING)]
    texts = write_texts(prompts)
    found = {name: measure(chosen, prompts, texts, codec) for name, chosen in METHODS.items()}
    rate = {name: figures.tokens_a_step for name, figures in found.items()}
    best_kary = max((name for name in rate if name.startswith("kary")), key=rate.__getitem__)
    merged = "best_first + suffix"
    singles = max(rate["best_first"], rate["suffix"])
    checks = [
        Check("drafters/dynamic_over_static", round(rate["expand_rerank"] / rate["eagle1"], 3), ">=", 1.0),
        Check("drafters/sequoia_over_kary", round(rate["sequoia"] / rate[best_kary], 3), ">=", 1.0),
        Check("drafters/merged_over_best_single", round(rate[merged] / singles, 3), ">=", 1.0),
    ]
    details = {
        "request_mix": f"{len(PROMPTS)} everyday chat prompts and {len(COPYING)} that ask for a copy, greedy, "
        f"{TOKENS} tokens each, one after the other; trees of up to {NODES} nodes and {DEPTH} levels",
        "best_kary": best_kary,
        "methods": {
            name: {
                "tokens_a_step": round(f.tokens_a_step, 3),
                "everyday": round(statistics.harmonic_mean(f.by_text[: len(PROMPTS)]), 3),
                "copying": round(statistics.harmonic_mean(f.by_text[len(PROMPTS) :]), 3),
                "round_ms": round(f.round_ms, 2),
            }
            for name, f in found.items()
        },
    }
    return write("drafters", checks, details)


def write_texts(prompts: Sequence[list[int]]) -> list[list[int]]:
    """What the target writes after each prompt; shorter than ``TOKENS`` if it ends."""
    model = AutoModelForCausalLM.from_pretrained(demo_target(), dtype=torch.float32)
    return [
        model.generate(torch.tensor([p]), max_new_tokens=TOKENS, do_sample=False)[0, len(p) :].tolist() for p in prompts
    ]


def measure(
    chosen: dict[str, Any], prompts: Sequence[list[int]], texts: Sequence[list[int]], codec: TextCodec
) -> Figures:
    settings = DraftSettings(**({"max_nodes": NODES, "depth": DEPTH, "kv_pages": 64} | chosen))
    drafter, steps, spent_s = make_drafter(settings), [], 0.0
    for k, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        count, took_s = follow(drafter, (0, k), prompt, text)
        steps.append(count)
        spent_s += took_s
    by_text = [len(text) / count for text, count in zip(texts, steps, strict=True)]
    return Figures(sum(map(len, texts)) / sum(steps), by_text, 1e3 * spent_s / sum(steps))


def follow(
    drafter: Drafter,
    key: tuple[int, int],
    prompt: list[int],
    text: list[int],
    nodes: int = NODES,
    depth: int = DEPTH,
    features: Features | None = None,
) -> tuple[int, float]:
    """Steps for one text, and the seconds that the drafter drew. ``features`` are those of prompt and text."""
    start = SessionStart(0, tuple(prompt), SamplingParams(), nodes, 49152, nodes, depth, 2048)
    drafter.open(key, start)
    if features is not None:
        drafter.feed(key, 0, features[: len(prompt) - 1])
    paths: dict[int, tuple[int, ...]] = {}  # node id -> tokens from the prompt on
    done, steps, spent_s = 0, 0, 0.0
    while done < len(text):
        began = time.perf_counter()
        growths = []
        while drafter.wants_work():
            growths += drafter.work()
        spent_s += time.perf_counter() - began
        for _, growth in growths:
            for k, (parent, token) in enumerate(zip(growth.parent.tolist(), growth.token.tolist(), strict=True)):
                paths[growth.first_id + k] = (*(paths[parent] if parent else text[:done]), token)
        right = [p for p in paths.values() if p == tuple(text[: len(p)])]
        end = min(len(text), max(map(len, right), default=done) + 1)
        steps += 1
        if features is not None:
            drafter.feed(key, len(prompt) + done - 1, features[len(prompt) + done - 1 : len(prompt) + end - 1])
        drafter.commit(key, SessionCommitted(steps, len(prompt) + end, tuple(text[done:end]), nodes))
        done = end
        paths = {i: p for i, p in paths.items() if len(p) > done and p[:done] == tuple(text[:done])}
    drafter.close(key)
    return steps, spent_s


if __name__ == "__main__":
    sys.exit(not main())
