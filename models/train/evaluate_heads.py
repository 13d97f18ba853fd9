"""How many tokens a forward of the target yields with trees of draft heads.

``python models/train/evaluate_heads.py --heads models/smollm2-135m-eagle --name eagle``

Over the target's greedy answers (at most 128 tokens) to the prompts of ``everyday.txt``, in float32:

top1     How often the heads' likeliest token is the target's, by depth below the last committed token, where the tokens
         between are the answer's.
trees    Mean tokens a forward, the target's own included, with trees of 8 to 64 nodes (the last committed token not
         counted). EAGLE: dynamic trees of EAGLE-2 (arXiv:2406.16858): each level expands the ``--beam`` likeliest nodes
         by ``--branch`` children, and the likeliest nodes of all are sent. Medusa: the likeliest nodes by the product
         of the heads' probabilities.

Results go to ``benchmarks/results/heads.json``, beside those of other heads.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from evaluate import BUDGETS, Text, answers, kept_answers
from results import FOLDER, write
from target import Target
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftwood.runtime.demo_model import DEMO, demo_target
from draftwood.runtime.heads import EagleHead, Layer, MedusaHeads, TargetShape
from draftwood.runtime.heads_checkpoint import load_heads
from draftwood.runtime.model import resolve_device
from draftwood.runtime.text import TextCodec

MEDUSA_CHILDREN = 10
DEPTHS = 5

Nodes = dict[tuple[int, int], int]
"""Children by (parent, token); node 0 is the last committed token."""


class Drafts(Protocol):
    """What heads guess in one text."""

    def tree(self, committed: int, budget: int) -> Nodes:
        """A tree below the last of ``committed`` tokens."""

    def guesses(self, committed: int, depth: int) -> list[int]:
        """The likeliest token at each of ``depth`` places, if those before it are the text's."""


@dataclass
class Level:
    """Nodes that were expanded together."""

    keys: list[Tensor]  # of each layer, [nodes, kv_heads, dim]
    values: list[Tensor]
    handed_down: Tensor  # [nodes, hidden]
    logprob: Tensor  # [nodes, tokens]


@dataclass
class Found:
    """Nodes that were found, in the order of levels; node 0 is the root."""

    parent: list[int] = field(default_factory=lambda: [0])
    token: list[int] = field(default_factory=lambda: [-1])
    score: list[float] = field(default_factory=lambda: [0.0])

    def add(self, parent: int, token: int, score: float) -> int:
        self.parent.append(parent)
        self.token.append(token)
        self.score.append(score)
        return len(self.score) - 1

    def best(self, budget: int) -> Nodes:
        """The likeliest nodes: a child is never likelier than its parent, so they are a tree."""
        kept = sorted(range(1, len(self.score)), key=lambda node: -self.score[node])[:budget]
        return {(self.parent[node], self.token[node]): node for node in kept}


class EagleDrafts:
    """An EAGLE head in one text, the rows of the whole text computed once: as committed, none sees a later one."""

    def __init__(self, head: EagleHead, target: Target, tokens: list[int], shape: tuple[int, int, int]) -> None:
        """``shape``: children of a node, nodes expanded in a level, levels."""
        self._head, self._embedding = head, target.embedding if head.embedding is None else head.embedding
        self._branch, self._beam, self._depth = shape
        lm_head = target.lm_head if head.lm_head is None else head.lm_head
        ids = torch.arange(len(lm_head)) if head.target_ids is None else torch.from_numpy(head.target_ids)
        self._ids = ids.to(lm_head.device)
        self._lm_head = lm_head[self._ids] if head.lm_head is None else lm_head
        self._rope = LlamaRotaryEmbedding(head.config).to(lm_head.device)
        self._tokens = torch.tensor(tokens, device=lm_head.device)
        fused = head.fused(target.features(self._tokens[None], head.taps)[0])
        count = len(tokens) - 1
        seen = torch.ones(count, count, dtype=torch.bool, device=lm_head.device).tril()
        places = torch.arange(1, len(tokens), device=lm_head.device)
        self._text = self._rows(self._tokens[1:], fused[:-1], places, [], seen)  # row i: token i + 1

    def _rows(self, tokens: Tensor, fused: Tensor, places: Tensor, before: list[Level], seen: Tensor) -> Level:
        """Rows [n] that see rows of ``before`` and of themselves: seen bool [n, all rows]."""
        head, keys, values = self._head, [], []
        taken, x = head.entry(F.embedding(tokens, self._embedding), fused)
        cosine, sine = (t[0, :, None] for t in self._rope(x[None], places[None]))
        for number, layer in enumerate(head.layers):
            if number:
                taken = head.normed(x, layer.input_norm)
            query, key, value = self._projected(layer, taken)
            query, key = query * cosine + _turned(query) * sine, key * cosine + _turned(key) * sine
            keys.append(key)
            values.append(value)
            key, value = (
                torch.cat([*(getattr(level, name)[number] for level in before), own])
                for name, own in (("keys", key), ("values", value))
            )
            query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
            x = head.feed_forward(layer, x, attended[0].transpose(0, 1).flatten(1))
        read, handed_down = head.exit(x)
        return Level(keys, values, handed_down, F.linear(read, self._lm_head).log_softmax(dim=-1))

    def _projected(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, head = self._head.config, self._head
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        query, key, value = (p(x).view(len(x), -1, dim) for p in (layer.query, layer.key, layer.value))
        return head.normed(query, layer.query_norm), head.normed(key, layer.key_norm), value

    def _until(self, committed: int) -> Level:
        """The text's rows up to the last committed token."""
        text, rows = self._text, committed - 1
        return Level([k[:rows] for k in text.keys], [v[:rows] for v in text.values], text.handed_down, text.logprob)

    def tree(self, committed: int, budget: int) -> Nodes:
        found, levels, rows = Found(), [self._until(committed)], committed - 1
        frontier, logprob = [0], self._text.logprob[rows - 1 : rows]
        handed_down = self._text.handed_down[rows - 1 : rows]
        seen = torch.ones(1, rows, dtype=torch.bool, device=logprob.device)  # of the frontier
        for depth in range(1, self._depth + 1):
            best = logprob.topk(self._branch)
            children = [
                (found.add(node, int(self._ids[index]), found.score[node] + score), place)
                for place, node in enumerate(frontier)
                for index, score in zip(best.indices[place].tolist(), best.values[place].tolist(), strict=True)
            ]
            if depth == self._depth:
                break
            picked = sorted(children, key=lambda child: -found.score[child[0]])[: self._beam]
            frontier, above = [node for node, _ in picked], [place for _, place in picked]
            seen = torch.cat([seen[above], torch.eye(len(picked), dtype=torch.bool, device=seen.device)], dim=1)
            tokens = torch.tensor([found.token[node] for node in frontier], device=seen.device)
            level = self._rows(tokens, handed_down[above], torch.full_like(tokens, rows + depth), levels, seen)
            levels.append(level)
            handed_down, logprob = level.handed_down, level.logprob
        return found.best(budget)

    def guesses(self, committed: int, depth: int) -> list[int]:
        levels, rows = [self._until(committed)], committed - 1
        handed_down, logprob = self._text.handed_down[rows - 1 : rows], self._text.logprob[rows - 1 : rows]
        chosen = [int(self._ids[logprob[0].argmax()])]
        for k in range(min(depth, len(self._tokens) - committed) - 1):
            token, place = self._tokens[committed + k : committed + k + 1], torch.tensor([committed + k])
            seen = torch.ones(1, committed + k, dtype=torch.bool, device=token.device)
            level = self._rows(token, handed_down, place.to(token.device), levels, seen)
            levels.append(level)
            handed_down = level.handed_down
            chosen.append(int(self._ids[level.logprob[0].argmax()]))
        return chosen


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)


class MedusaDrafts:
    """Medusa heads in one text."""

    def __init__(self, heads: MedusaHeads, target: Target, tokens: list[int]) -> None:
        feature = target.features(torch.tensor([tokens], device=target.lm_head.device), heads.taps)[0]
        self._best = []  # of each head: likeliest tokens and their log-probabilities, [places, MEDUSA_CHILDREN]
        for head in heads.heads:
            logits = F.linear(head.hidden(feature), target.lm_head if head.lm_head is None else head.lm_head)
            self._best.append(logits.log_softmax(dim=-1).topk(MEDUSA_CHILDREN))

    def tree(self, committed: int, budget: int) -> Nodes:
        place, found, kept = committed - 2, Found(), 0
        queue, depths, nodes = [(0.0, 0)], {0: 0}, Nodes()
        while queue and kept <= budget:
            _, node = heapq.heappop(queue)
            if node:
                nodes[found.parent[node], found.token[node]] = node
            kept += 1
            if depths[node] == len(self._best):
                continue
            best = self._best[depths[node]]
            for token, score in zip(best.indices[place].tolist(), best.values[place].tolist(), strict=True):
                child = found.add(node, token, found.score[node] + score)
                depths[child] = depths[node] + 1
                heapq.heappush(queue, (-found.score[child], child))
        return nodes

    def guesses(self, committed: int, depth: int) -> list[int]:
        return [int(best.indices[committed - 2, 0]) for best in self._best[:depth]]


def tokens_a_forward(texts: Sequence[Text], drafts: Sequence[Drafts], budget: int) -> float:
    forwards = 0
    for (prompt, answer), draft in zip(texts, drafts, strict=True):
        done = 0
        while done < len(answer):
            nodes, node = draft.tree(len(prompt) + done, budget), 0
            while done < len(answer) and (node, answer[done]) in nodes:
                node = nodes[node, answer[done]]
                done += 1
            done += 1
            forwards += 1
    return sum(len(answer) for _, answer in texts) / forwards


def top_1(texts: Sequence[Text], drafts: Sequence[Drafts]) -> list[float]:
    """By depth, over every fourth place."""
    hits: list[list[bool]] = [[] for _ in range(DEPTHS)]
    for (prompt, answer), draft in zip(texts, drafts, strict=True):
        for done in range(0, len(answer), 4):
            found = draft.guesses(len(prompt) + done, DEPTHS)
            for depth, (guess, token) in enumerate(zip(found, answer[done:], strict=False)):
                hits[depth].append(guess == token)
    return [round(sum(found) / len(found), 4) for found in hits if found]


def earlier() -> dict[str, Any]:
    """What is known of other heads."""
    file = FOLDER / "heads.json"
    found: dict[str, Any] = json.loads(file.read_text())["details"] if file.exists() else {}
    return found


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", required=True, help="folder of the heads")
    parser.add_argument("--name", required=True, help="of the heads in the results")
    parser.add_argument("--target", default=DEMO)
    parser.add_argument("--branch", type=int, default=8)
    parser.add_argument("--beam", type=int, default=8)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--every", type=int, default=1, help="one answer in so many")
    parser.add_argument("--answers", type=Path, help="file that keeps the target's answers from one run to the next")
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS, help="nodes of the trees")
    chosen = parser.parse_args(arguments)
    device = resolve_device("auto")
    path = str(demo_target()) if chosen.target == DEMO else chosen.target
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    texts = kept_answers(chosen.answers, lambda: answers(model, TextCodec(path)))[:: chosen.every]
    target = Target(model)
    heads = load_heads(chosen.heads, TargetShape.of(model.config), device, torch.float32)
    shape = (chosen.branch, chosen.beam, chosen.depth)
    drafts: list[Drafts] = [
        EagleDrafts(heads, target, prompt + answer, shape)
        if isinstance(heads, EagleHead)
        else MedusaDrafts(heads, target, prompt + answer)
        for prompt, answer in texts
    ]
    weights = Path(chosen.heads) / "model.safetensors"
    details: dict[str, Any] = {
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "answers": len(texts),
        "tokens": sum(len(answer) for _, answer in texts),
        "top1_by_depth": top_1(texts, drafts),
        "trees": {},
    }
    if isinstance(heads, EagleHead):
        details |= {"branch": chosen.branch, "beam": chosen.beam, "depth": chosen.depth}
    print(details, flush=True)
    for budget in chosen.budgets:
        details["trees"][f"n{budget}"] = round(tokens_a_forward(texts, drafts, budget), 3)
        print(budget, details["trees"][f"n{budget}"], flush=True)
    write("heads", [], earlier() | {chosen.name: details})
    return 0


if __name__ == "__main__":
    sys.exit(main())
