"""How well a draft guesses, against the draft that it would replace.

``python models/train/evaluate.py --draft models/smollm2-135m-draft --corpus corpus [--before old-draft]``

heldout    How often the target's greedy token is among the draft's likeliest 1, 2, 4 and 8, over all places of held-out
           dialogues (the last of the corpus), and over those whose next token the target drew.
everyday   The same over the target's greedy answers (at most 128 tokens) to the 24 prompts of ``everyday.txt``.
trees      Mean tokens a forward of the target on every fourth of these answers (``--every``): trees of 8 to 64 nodes,
           grown by the draft's scores alone; the tokens accepted and the target's own.
times      On the CPU, medians in float32: a forward of 1 to 16 tokens behind 256, and a level of a tree, which is a
           forward of 6 and the search for its children.

The target is computed in float32. Results go to ``benchmarks/results/draft.json``; runs of single ``--parts`` add to it
as long as the draft is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import rounds
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_service.drafter import SessionStart
from draft_service.drafters.lm import LmDrafter
from draftwood.config import DraftSettings
from draftwood.noise import GumbelCache
from draftwood.runtime.batch import Rows
from draftwood.runtime.demo_model import DEMO, demo_target
from draftwood.runtime.model import ModelRuntime, load_model, resolve_device
from draftwood.runtime.reduced import ReducedVocabulary
from draftwood.runtime.text import TextCodec, end_tokens
from draftwood.sampling import SamplingParams, draft_children

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
from results import FOLDER, Check, write  # noqa: E402

ANSWER_TOKENS = 128
RANKS = (1, 2, 4, 8)
BUDGETS = (8, 16, 32, 64)
PARTS = ("heldout", "everyday", "trees", "times")
CONTEXT = 256
LEVEL_ROWS = 6
ROWS = (1, 2, 4, 6, 8, 16)
GROWTH = {"beam": 16, "branch": 8, "depth": 16, "nodes_per_level": 0, "min_level_survival": 0.0, "lookahead_levels": 0}
"""Settings of trees that nothing but their budget ends."""

Text = tuple[list[int], list[int]]
"""Prompt and answer, in tokens."""


def hits(draft: PreTrainedModel, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Whether each place's wanted token is among the draft's likeliest ``RANKS``: bool [rows, length, ranks]."""
    reduced = ReducedVocabulary.of(draft.config)
    if reduced is None:
        logits = draft(tokens).logits.float()
    else:
        own = torch.from_numpy(reduced.to_draft(tokens.cpu().numpy())).long().to(tokens.device)
        wanted = torch.from_numpy(reduced.to_draft(wanted.cpu().numpy())).long().to(tokens.device)
        lacking = wanted == len(reduced.target_ids)
        logits = draft(own).logits[..., : len(reduced.target_ids)].float()
        wanted = wanted.clamp(max=logits.shape[-1] - 1)
    better = (logits > logits.gather(-1, wanted[..., None])).sum(dim=-1)
    if reduced is not None:
        better = better.masked_fill(lacking, logits.shape[-1])
    return better[..., None] < torch.tensor(RANKS, device=tokens.device)


def share(found: Tensor) -> dict[str, float]:
    """[places, ranks] as fractions."""
    return {f"top{k}": round(v, 4) for k, v in zip(RANKS, found.double().mean(dim=0).tolist(), strict=True)}


def held_out(
    drafts: dict[str, PreTrainedModel], target: PreTrainedModel, corpus: Path, rows: int
) -> dict[str, dict[str, dict[str, float]]]:
    *_, last = rounds(corpus)
    found: dict[str, list[Tensor]] = {name: [] for name in drafts}
    drawn: list[Tensor] = []
    for first in range(-rows, 0, 4):
        picked = slice(first, first + 4 or None)
        tokens = torch.from_numpy(last.tokens[picked].astype(np.int64)).to(target.device)
        greedy = target(tokens).logits[:, :-1].argmax(dim=-1)
        drawn.append(torch.from_numpy(last.drawn[picked][:, 1:].copy()).flatten())
        for name, draft in drafts.items():
            found[name].append(hits(draft, tokens[:, :-1], greedy).flatten(0, 1).cpu())
    mask = torch.cat(drawn)
    whole = {name: torch.cat(parts) for name, parts in found.items()}
    return {name: {"drawn": share(x[mask]), "all_places": share(x)} for name, x in whole.items()}


def answers(target: PreTrainedModel, codec: TextCodec) -> list[Text]:
    """The target's greedy answers to the everyday prompts."""
    lines = [line for line in (HERE / "everyday.txt").read_text().splitlines() if not line.startswith("#")]
    prompts = [codec.render([{"role": "user", "content": line}]) for line in lines]
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts], device=target.device)
    real = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=target.device)
    out = target.generate(padded, attention_mask=real, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=0)
    ends = end_tokens(target.name_or_path, target.config.eos_token_id)
    return [(ids, up_to_end(row, ends)) for ids, row in zip(prompts, out[:, longest:].tolist(), strict=True)]


def kept_answers(file: Path | None, make: Callable[[], list[Text]]) -> list[Text]:
    """Those in the file, if there is one; else made, and written there."""
    if file is not None and file.exists():
        return [(prompt, answer) for prompt, answer in json.loads(file.read_text())]
    found = make()
    if file is not None:
        file.write_text(json.dumps(found))
    return found


def up_to_end(answer: list[int], ends: frozenset[int]) -> list[int]:
    first = next((k for k, token in enumerate(answer) if token in ends), len(answer))
    return answer[: first + 1]


def everyday(draft: PreTrainedModel, texts: Sequence[Text]) -> dict[str, float]:
    found = []
    for prompt, answer in texts:
        tokens = torch.tensor([prompt + answer], device=draft.device)
        found.append(hits(draft, tokens[:, :-1], tokens[:, 1:])[0, len(prompt) - 1 :].cpu())
    return share(torch.cat(found))


def tokens_a_forward(drafter: LmDrafter, texts: Sequence[Text], vocab_size: int, budget: int) -> float:
    rounds_taken = sum(1 for text in texts for _ in steps(drafter, *text, vocab_size, budget))
    return sum(len(answer) for _, answer in texts) / rounds_taken


def steps(drafter: LmDrafter, prompt: list[int], answer: list[int], vocab_size: int, budget: int) -> Iterator[int]:
    """Tokens that each forward of the target yields, up to the answer's end."""
    done = 0
    while done < len(answer):
        start = SessionStart(
            0, tuple(prompt + answer[:done]), SamplingParams(), budget, vocab_size, budget, GROWTH["depth"] + 1, 8192
        )
        drafter.open((0, 0), start)
        grown = []
        while not grown:
            grown = drafter.work()
        drafter.close((0, 0))
        growth = grown[0][1]
        edges = zip(growth.parent.tolist(), growth.token.tolist(), strict=True)
        child = {edge: node for node, edge in enumerate(edges, growth.first_id)}
        node, accepted = 0, 0
        while done + accepted < len(answer) and (node, answer[done + accepted]) in child:
            node = child[node, answer[done + accepted]]
            accepted += 1
        done += accepted + 1
        yield accepted + 1


def make_drafter(path: str, codec: TextCodec, device: torch.device, vocab_size: int) -> LmDrafter:
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    runtime = ModelRuntime(load_model(path, device, dtype), kv_pages=64, page_tokens=64)
    settings = DraftSettings(max_nodes=max(BUDGETS), **GROWTH)  # type: ignore[arg-type]
    return LmDrafter(runtime, settings, Path(path).name, codec.vocabulary(vocab_size))


def times(paths: dict[str, str]) -> dict[str, dict[str, float]]:
    """Milliseconds; the drafts take turns, so that a drift of the machine hits all alike."""
    cpu = torch.device("cpu")
    runtimes = {
        name: ModelRuntime(load_model(path, cpu, torch.float32), kv_pages=8, page_tokens=64)
        for name, path in paths.items()
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in paths}
    for _ in range(5):
        for name, runtime in runtimes.items():
            for what, taken_ms in times_of(runtime).items():
                found[name].setdefault(what, []).append(taken_ms)
    return {name: {k: round(min(v), 3) for k, v in columns.items()} for name, columns in found.items()}


def times_of(runtime: ModelRuntime) -> dict[str, float]:
    reduced = ReducedVocabulary.of(runtime.model.config)
    size = len(reduced.target_ids) if reduced else runtime.vocab_size
    noise = GumbelCache(size, runtime.device)
    pages = runtime.pool.take(CONTEXT + max(ROWS))
    found = {}
    for n in ROWS:
        at = np.arange(CONTEXT, CONTEXT + n, dtype=np.int32)
        rows = [Rows(pages, CONTEXT, np.ones(n, np.int32), at, np.tri(n, dtype=np.bool_))]
        found[f"forward{n}_ms"] = median_ms(partial(runtime.forward, rows))
        if n == LEVEL_ROWS:
            found["level_ms"] = median_ms(partial(level, runtime, rows, at.tolist(), noise, size))
    runtime.pool.give(pages)
    return found


def level(runtime: ModelRuntime, rows: list[Rows], positions: list[int], noise: GumbelCache, size: int) -> None:
    draft_children(runtime.forward(rows), SamplingParams(), positions, noise, 4, vocab_size=size)


def median_ms(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(25):
        then = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - then))
    return statistics.median(taken)


def earlier(sha256: str) -> dict[str, Any]:
    """What other runs have found of the same draft."""
    file = FOLDER / "draft.json"
    found: dict[str, Any] = json.loads(file.read_text())["details"] if file.exists() else {}
    return found if found.get("sha256") == sha256 else {"sha256": sha256}


def checks_of(details: dict[str, Any]) -> list[Check]:
    draft, before, checks = details.get("draft", {}), details.get("before", {}), []
    if "heldout" in draft:
        checks.append(Check("drafters/demo_top1_heldout", draft["heldout"]["all_places"]["top1"], ">=", 0.72))
    if "everyday" in draft:
        checks.append(Check("drafters/demo_top1_everyday", draft["everyday"]["top1"], ">=", 0.62))
    if "n64" in draft.get("trees", {}):
        checks.append(Check("drafters/demo_tokens_per_forward_n64", draft["trees"]["n64"], ">=", 3.5))
    if "times" in draft and "times" in before:
        ratio = draft["times"]["level_ms"] / before["times"]["level_ms"]
        checks.append(Check("drafters/demo_level_time_ratio", round(ratio, 3), "<=", 1.0))
    return checks


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True, help="folder of the draft")
    parser.add_argument("--before", help="folder of the draft that it would replace")
    parser.add_argument("--target", default=DEMO)
    parser.add_argument("--corpus", type=Path, help="written text, whose last dialogues were held out")
    parser.add_argument("--rows", type=int, default=64, help="held-out dialogues to look at")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--every", type=int, default=4, help="trees are grown on one answer in so many")
    parser.add_argument("--answers", type=Path, help="file that keeps the target's answers from one run to the next")
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS, help="nodes of the trees")
    chosen = parser.parse_args(arguments)
    device = resolve_device("auto")
    path = str(demo_target()) if chosen.target == DEMO else chosen.target
    paths = {"draft": chosen.draft} | ({"before": chosen.before} if chosen.before else {})
    details = earlier(hashlib.sha256((Path(chosen.draft) / "model.safetensors").read_bytes()).hexdigest())

    def note(part: str, name: str, found: dict[str, Any]) -> None:
        print(part, name, found, flush=True)
        details.setdefault(name, {}).setdefault(part, {}).update(found)

    if set(chosen.parts) - {"times"}:
        target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    if {"heldout", "everyday"} & set(chosen.parts):
        drafts = {
            n: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).to(device).eval() for n, p in paths.items()
        }
        if "heldout" in chosen.parts:
            for name, found in held_out(drafts, target, chosen.corpus, chosen.rows).items():
                note("heldout", name, found)
    if {"everyday", "trees"} & set(chosen.parts):
        codec = TextCodec(path)
        texts = kept_answers(chosen.answers, lambda: answers(target, codec))
        details["everyday_tokens"] = sum(len(answer) for _, answer in texts)
    if "everyday" in chosen.parts:
        for name, draft in drafts.items():
            note("everyday", name, everyday(draft, texts))
    if "trees" in chosen.parts:
        size = int(target.config.vocab_size)
        for name, folder in paths.items():
            drafter = make_drafter(folder, codec, device, size)
            for n in chosen.budgets:
                note("trees", name, {f"n{n}": round(tokens_a_forward(drafter, texts[:: chosen.every], size, n), 3)})
    if "times" in chosen.parts:
        for name, found in times(paths).items():
            note("times", name, found)
    return 0 if write("draft", checks_of(details), details) else 1


if __name__ == "__main__":
    sys.exit(main())
