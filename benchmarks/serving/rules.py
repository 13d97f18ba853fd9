"""Acceptance at one position under each rule, with 1, 2, 4 and 8 children: the figures of docs/exactness.md.

The demo target answers the everyday prompts at temperature 1. At each place of these answers, p is the target's
distribution of the next token and q the draft's, both at temperature 1, and

plain         the children are the likeliest of q, and the target samples p without regard to them: p's sum over them
shared noise  the children are the likeliest of log q + g, the target takes the likeliest of log p + g: drawn
rejection     the children are samples of q, and SpecInfer's multi-step rejection decides: drawn

with the code that serves. ``truncated`` is rejection with q cut as a draft worker cuts it (``q_top_k``, ``q_top_p``).
Standard errors are those over texts. ``--of-design`` names the draft whose figures are known from elsewhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Check, write
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwood.acceptance import UniformDice, multi_step, sample_children
from draftwood.config import DraftSettings
from draftwood.noise import GumbelCache
from draftwood.parameters import SamplingParams
from draftwood.runtime.demo_model import demo_draft, demo_target
from draftwood.runtime.reduced import ReducedVocabulary
from draftwood.runtime.text import TextCodec, end_tokens
from draftwood.sampling import draft_children, target_tokens
from draftwood.tree import Proposal

ROOT = Path(__file__).parents[2]
CHILDREN = (1, 2, 4, 8)
ANSWER_TOKENS = 40
SEEDS = 2
"""Draws of the noise at each place."""
RUNS = 16
"""Draws of the rejection rule at each place."""
KNOWN = {
    "plain": (0.31, 0.42, 0.51, 0.60),
    "shared_noise": (0.45, 0.60, 0.72, 0.81),
    "rejection": (0.50, 0.59, 0.68, 0.75),
}
"""Figures of the draft ``--of-design``, rounded to hundredths."""
NOISE = 3.0
"""Standard errors that a figure may be off by, on top of the rounding."""


def answers(target: PreTrainedModel, codec: TextCodec) -> list[tuple[int, list[int]]]:
    """Prompt length and whole text of each prompt's answer at temperature 1."""
    lines = (ROOT / "models" / "train" / "everyday.txt").read_text().splitlines()
    ends = end_tokens(target.name_or_path, target.config.eos_token_id)
    torch.manual_seed(7)
    found = []
    for line in lines:
        if line.startswith("#"):
            continue
        prompt = codec.render([{"role": "user", "content": line}])
        out = target.generate(
            torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            eos_token_id=sorted(ends), pad_token_id=0,
        )  # fmt: skip
        found.append((len(prompt), out[0].tolist()))
    return found


class Draft:
    """A draft model's logits over the target's vocabulary."""

    def __init__(self, path: Path, vocab: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._reduced = ReducedVocabulary.of(self._model.config)
        self._vocab = vocab

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[length, vocab], -inf where the draft has no such token."""
        if self._reduced is None:
            return self._model(torch.tensor([tokens])).logits[0, :, : self._vocab]
        own = torch.from_numpy(self._reduced.to_draft(np.array(tokens))).long()
        kept = torch.from_numpy(self._reduced.target_ids)
        out = torch.full((len(tokens), self._vocab), -torch.inf)
        out[:, kept] = self._model(own[None]).logits[0, :, : len(kept)]
        return out


def at_places(p: Tensor, q: Tensor, positions: Sequence[int], noise: GumbelCache) -> Iterator[dict[str, list[float]]]:
    """Acceptance with each number of children, by rule, of each row of the logits p and q [places, vocab]."""
    plain = plain_top(p, q)
    shared = shared_noise(p, q, positions, noise)
    random = np.random.default_rng(5)
    settings = DraftSettings()
    cut = SamplingParams(1.0, settings.q_top_k, settings.q_top_p)
    for k, row in enumerate(p):
        target = row.double().softmax(dim=-1).numpy()
        yield {
            "plain": plain[k].tolist(),
            "shared_noise": shared[k].tolist(),
            "rejection": rejection(target, q[k], SamplingParams(1.0), random),
            "truncated": rejection(target, q[k], cut, random),
        }


def plain_top(p: Tensor, q: Tensor) -> Tensor:
    best = q.topk(max(CHILDREN), dim=-1).indices
    covered = p.softmax(dim=-1).gather(1, best).cumsum(dim=-1)
    return covered[:, [n - 1 for n in CHILDREN]]


def shared_noise(p: Tensor, q: Tensor, positions: Sequence[int], noise: GumbelCache) -> NDArray[np.float64]:
    hits = np.zeros((len(p), len(CHILDREN)))
    for seed in range(SEEDS):
        params = SamplingParams(temperature=1.0, seed=seed)
        chosen, bad = target_tokens(p, params, positions, noise)
        assert not bad.any()
        children, _ = draft_children(q, params, positions, noise, max(CHILDREN))
        right = (children == chosen[:, None]).numpy()
        hits += np.stack([right[:, :n].any(axis=1) for n in CHILDREN], axis=1)
    return hits / SEEDS


def rejection(p: NDArray[Any], q: Tensor, params: SamplingParams, random: np.random.Generator) -> list[float]:
    """Share of runs in which one of the children is taken."""
    most = max(CHILDREN)
    tokens, proposals = sample_children(q[None], params, most * RUNS, random)
    drawn = proposals[0]
    assert isinstance(drawn, Proposal)
    children = tokens.reshape(RUNS, most)
    dice = UniformDice(random.random((RUNS, most + 1)))
    chosen = (multi_step(p, children[:, :n], [drawn] * n, dice) for n in CHILDREN)
    return [
        float((children[:, :n] == took[:, None]).any(axis=1).mean()) for n, took in zip(CHILDREN, chosen, strict=True)
    ]


def figures(by_text: Sequence[NDArray[np.float64]]) -> dict[str, list[float]]:
    """Mean over all places, and its standard error over texts; by text [places, children]."""
    sums, places = np.array([t.sum(axis=0) for t in by_text]), np.array([len(t) for t in by_text])
    mean = sums.sum(axis=0) / places.sum()
    spread = sums - mean * places[:, None]
    count = len(by_text)
    error = np.sqrt((spread**2).sum(axis=0) * count / (count - 1)) / places.sum()
    return {"accepted": mean.round(4).tolist(), "standard_error": error.round(4).tolist()}


@torch.inference_mode()
def measure(target: PreTrainedModel, draft: Draft, texts: Sequence[tuple[int, list[int]]]) -> dict[str, Any]:
    vocab = int(target.config.vocab_size)
    noise = GumbelCache(vocab, "cpu", capacity=4)
    rows: dict[str, list[NDArray[np.float64]]] = {}
    for number, (first, text) in enumerate(texts):
        places = slice(first - 1, len(text) - 1)
        p = target(torch.tensor([text])).logits[0, places, :vocab]
        # Texts do not share their noise: each has positions of its own.
        positions = range(1000 * number + first, 1000 * number + len(text))
        found = list(at_places(p, draft.logits(text)[places], positions, noise))
        for rule in found[0]:
            rows.setdefault(rule, []).append(np.array([place[rule] for place in found]))
    return {rule: figures(by_text) for rule, by_text in rows.items()}


def off_by(found: dict[str, Any]) -> float:
    """The largest difference to what is known, less the rounding, in standard errors."""
    return max(
        max(0.0, abs(value - known) - 0.005) / error
        for rule, figures in KNOWN.items()
        for value, error, known in zip(found[rule]["accepted"], found[rule]["standard_error"], figures, strict=True)
    )


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, default=demo_draft())
    parser.add_argument("--of-design", type=Path, help="the draft of which the known figures are")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # beside others, threads that wait for each other take longer
    target = AutoModelForCausalLM.from_pretrained(demo_target(), dtype=torch.float32).eval()
    then = time.monotonic()
    texts = answers(target, TextCodec(demo_target()))
    details: dict[str, Any] = {
        "request_mix": f"{len(texts)} everyday prompts, answered at temperature 1 with up to {ANSWER_TOKENS} tokens",
        "places": sum(len(text) - first for first, text in texts),
        "children": CHILDREN,
    }
    vocab = int(target.config.vocab_size)
    checks = []
    for name, path in (("draft", chosen.draft), ("of_design", chosen.of_design)):
        if path:
            details[name] = measure(target, Draft(path, vocab), texts)
            print(name, details[name], f"{time.monotonic() - then:.0f} s", flush=True)
    shared, rejected = (details["draft"][rule]["accepted"] for rule in ("shared_noise", "rejection"))
    checks.append(Check("rules/shared_noise_over_rejection_k4", round(shared[2] / rejected[2], 3), ">=", 1.0))
    if chosen.of_design:
        details["known"] = KNOWN
        checks.append(Check("rules/off_by_standard_errors", round(off_by(details["of_design"]), 2), "<=", NOISE))
    return write("rules", checks, details)


if __name__ == "__main__":
    sys.exit(not main())
