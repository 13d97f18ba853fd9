"""Tokens a forward of the target with a head on its features and a dynamic tree, on the everyday prompts.

``python benchmarks/serving/eagle.py --head FOLDER``

The demo target answers the 24 prompts of ``models/train/everyday.txt`` greedily (at most 128 tokens each). Then the
head draws round after round for the same texts: EAGLE-2's tree, of which the likeliest nodes are sent. What of it
carries the text is accepted, as a verifier would that checks every node, and the features of the accepted tokens
follow, as bfloat16 like on the wire. A forward yields what is accepted and the target's own token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "models" / "train"))

from evaluate import answers, kept_answers
from results import Check, write
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_service.drafter import Drafter, SessionCommitted, SessionStart
from draft_service.server import make_drafter
from draftwood.config import DraftSettings
from draftwood.features import FINAL, FeatureRequest, Features
from draftwood.parameters import SamplingParams
from draftwood.runtime.demo_model import demo_target
from draftwood.runtime.text import TextCodec

NODES = 32
DEPTH = 14
CHECK = "drafters/eagle2_accepted_n32"


@torch.inference_mode()
def features_of(target: PreTrainedModel, tokens: Sequence[int], request: FeatureRequest) -> Features:
    """Of all tokens, by one forward of the target."""
    states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    picked = torch.stack([states[-1 if layer == FINAL else layer][0] for layer in request.layers], 1)
    return picked.bfloat16().view(torch.int16).numpy().view(np.uint16)


def follow(
    drafter: Drafter,
    key: tuple[int, int],
    prompt: list[int],
    text: list[int],
    nodes: int,
    depth: int,
    features: Features,
) -> tuple[int, float]:
    """Steps for one text, and the seconds that the drafter drew. ``features`` are those of prompt and text."""
    start = SessionStart(0, tuple(prompt), SamplingParams(), nodes, 49152, nodes, depth, 2048)
    drafter.open(key, start)
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
        drafter.feed(key, len(prompt) + done - 1, features[len(prompt) + done - 1 : len(prompt) + end - 1])
        drafter.commit(key, SessionCommitted(steps, len(prompt) + end, tuple(text[done:end]), nodes))
        done = end
        paths = {i: p for i, p in paths.items() if len(p) > done and p[:done] == tuple(text[:done])}
    drafter.close(key)
    return steps, spent_s


def main(arguments: Sequence[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True, help="folder of the head")
    parser.add_argument("--every", type=int, default=1, help="look at one prompt in so many")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--beam", type=int, default=10)
    parser.add_argument("--branch", type=int, default=10)
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--answers", type=Path, help="file that keeps the target's answers from one run to the next")
    parser.add_argument("--greedy-temperature", type=float, default=0.85, help="as the setting of that name")
    chosen = parser.parse_args(arguments)
    settings = DraftSettings(
        kind="eagle", model=chosen.head, topology="expand_rerank", max_nodes=chosen.nodes, beam=chosen.beam,
        branch=chosen.branch, depth=chosen.depth, kv_pages=64, greedy_temperature=chosen.greedy_temperature,
    )  # fmt: skip
    drafter = make_drafter(settings)
    assert drafter.features is not None
    target = AutoModelForCausalLM.from_pretrained(demo_target(), dtype=torch.float32).eval()
    texts = kept_answers(chosen.answers, lambda: answers(target, TextCodec(demo_target())))[:: chosen.every]
    tokens = steps = 0
    drew_s = 0.0
    for k, (prompt, answer) in enumerate(texts):
        features = features_of(target, [*prompt, *answer], drafter.features)
        taken, spent_s = follow(drafter, (0, k), prompt, answer, chosen.nodes, chosen.depth + 1, features)
        tokens, steps, drew_s = tokens + len(answer), steps + taken, drew_s + spent_s
        print(f"{len(answer)} tokens in {taken} forwards, {tokens / steps:.3f} tokens a forward so far", flush=True)
    details = {
        "tree": {"nodes": chosen.nodes, "beam": chosen.beam, "branch": chosen.branch, "depth": chosen.depth},
        "greedy_temperature": chosen.greedy_temperature,
        "texts": len(texts),
        "tokens": tokens,
        "forwards": steps,
        "round_ms": round(1e3 * drew_s / steps, 1),
        "feature_bytes_a_token": drafter.features.position_bytes,
        "layers": list(drafter.features.layers),
    }
    print(details)
    if (chosen.nodes, chosen.every) != (NODES, 1):
        return True
    return write("eagle", [Check(CHECK, round(tokens / steps, 3), ">=", 3.8)], details)


if __name__ == "__main__":
    sys.exit(not main())
