"""Trains Medusa heads for a target on text that the target wrote (arXiv:2401.10774, Medusa-1: the target is frozen).

``python models/train/medusa.py --target demo --corpus corpus --out medusa --seconds 300``

Head k reads the feature behind the target's final norm at place i and guesses token i + 2 + k by one residual block and
the target's LM head, which is no part of the checkpoint. The loss of head k counts ``--fade`` to the power of k; it is
the cross-entropy to the target's distribution there (``learn.py``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import load_facts
from learn import Corpus, add_arguments, distance, load_corpus, train
from safetensors.torch import save_file
from target import Target
from torch import Tensor, nn

from draftwood.runtime.demo_model import DEMO
from draftwood.runtime.heads import FINAL_NORM

SCORED_ROWS = 16


class Block(nn.Module):
    """A residual block; it changes nothing to begin with."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(nn.Module):
    def __init__(self, heads: int, blocks: int, size: int) -> None:
        super().__init__()
        self.medusa_head = nn.ModuleList(nn.Sequential(*(Block(size) for _ in range(blocks))) for _ in range(heads))

    def forward(self, feature: Tensor) -> list[Tensor]:
        """What the LM head reads for each head, [rows, length - heads, hidden], of features [rows, length, hidden]."""
        feature = feature[:, : -len(self.medusa_head)].float()
        return [head(feature) for head in self.medusa_head]


def head_loss(read: Tensor, lm_head: Tensor, top: Tensor, logprob: Tensor) -> Tensor:
    return distance(F.linear(read, lm_head), top, logprob)


def top_1(medusa: Medusa, target: Target, lm_head: Tensor, corpus: Corpus) -> list[float]:
    """How often each head's likeliest token is the target's."""
    hits: list[list[Tensor]] = [[] for _ in medusa.medusa_head]
    for k in range(0, len(corpus.tokens), SCORED_ROWS):
        part = corpus.rows(k, k + SCORED_ROWS)
        for head, read in enumerate(medusa(target.features(part.tokens, (FINAL_NORM,)))):
            top = part.top[:, 1 + head : 1 + head + read.shape[1], 0]
            hits[head].append((F.linear(read, lm_head).argmax(dim=-1) == top).float().mean())
    return [float(torch.stack(found).mean()) for found in hits]


def save_medusa(medusa: Medusa, folder: Path, target: str) -> None:
    """As float16 in Medusa's layout; the LM heads, which are the target's, are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().half().cpu().contiguous() for name, value in medusa.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    heads = medusa.medusa_head
    config = {
        "base_model_name_or_path": target,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": len(heads[0]),  # type: ignore[arg-type]
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rows=32, rate=1e-3)
    parser.add_argument("--target", default=DEMO)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--fade", type=float, default=0.8)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(chosen.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.load(chosen.target, device, compiled=chosen.compile)
    vocab_size = load_facts(chosen.corpus)["vocab_size"]
    corpus = load_corpus(chosen.corpus, np.arange(vocab_size), device, own_tokens=False)
    lm_head = target.lm_head[:vocab_size]
    medusa = Medusa(chosen.heads, chosen.blocks, int(target.config.hidden_size)).to(device)
    size = sum(p.numel() for p in medusa.parameters())
    print(f"{corpus.tokens.numel() / 1e6:.1f} M tokens, heads of {size / 1e6:.2f} M parameters", flush=True)
    measured = torch.compile(head_loss, dynamic=False) if chosen.compile else head_loss

    def loss_of(batch: Corpus) -> Tensor:
        loss = torch.zeros((), device=device)
        for head, read in enumerate(medusa(target.features(batch.tokens, (FINAL_NORM,)))):
            places = slice(1 + head, 1 + head + read.shape[1])
            loss = loss + chosen.fade**head * measured(read, lm_head, batch.top[:, places], batch.logprob[:, places])
        return loss

    def score(held_out: Corpus) -> str:
        return "top 1 by head " + " ".join(f"{v:.4f}" for v in top_1(medusa, target, lm_head, held_out))

    train(medusa, loss_of, corpus, chosen, score, lambda: save_medusa(medusa, chosen.out, chosen.target))


if __name__ == "__main__":
    main()
