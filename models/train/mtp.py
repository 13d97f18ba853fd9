"""Fits an MTP module for a target by least squares on text that the target wrote: no gradients, minutes on a CPU.

``python models/train/mtp.py --target demo --corpus corpus --out mtp``

The module has MiMo's layout, with a layer that adds nothing: what guesses is ``input_proj``, the linear map from the
target's feature at a place and the next token's embedding, both normed, to the hidden state at the next place, in
front of the target's final norm. Drafting a chain, the module reads what it has guessed instead of features; so it is
fitted again, with its own guesses of the fit before beside the features, once for each further place of ``--steps``.

A module of a target that was trained with one guesses better; this one shows the method where there is none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import rounds
from safetensors.torch import save_file
from target import Target
from torch import Tensor

from draftwood.runtime.demo_model import DEMO
from draftwood.runtime.heads import FINAL_NORM
from draftwood.runtime.heads_checkpoint import MTP_MODULE

ROWS = 8
"""Dialogues whose features are computed at a time."""
INNER = 64
"""Width inside the layer, which adds nothing."""
LEAST_WEIGHT = 1e-3
"""Of the final norm: what a smaller one scales is not told from nothing."""


class Sums:
    """What least squares needs of inputs [..., 2 * hidden] and wanted outputs [..., hidden]."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        self.inputs = torch.zeros(2 * hidden, 2 * hidden, dtype=torch.float64, device=device)
        self.both = torch.zeros(2 * hidden, hidden, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor, wanted: Tensor) -> None:
        x, y = inputs.flatten(0, -2).double(), wanted.flatten(0, -2).double()
        self.inputs += x.T @ x
        self.both += x.T @ y

    def solved(self, damping: float) -> Tensor:
        """The weight [hidden, 2 * hidden]; ``damping`` in units of an input's mean square."""
        ridge = damping * self.inputs.diagonal().mean() * torch.eye(len(self.inputs), device=self.inputs.device)
        return torch.linalg.solve(self.inputs + ridge, self.both).T.float()


class Module:
    """The fitted map beside the target's embedding and final norm."""

    def __init__(self, target: Target) -> None:
        self._embedding, self.final_norm = target.embedding.float(), target.final_norm.float()
        self.eps = float(target.config.rms_norm_eps)
        self.weight: Tensor | None = None  # [hidden, 2 * hidden]

    def inputs(self, features: Tensor, tokens: Tensor) -> Tensor:
        """[rows, n, 2 * hidden] of features [rows, n, hidden] at n places and the tokens [rows, n] behind them."""
        embedded = self._embedding[tokens]
        return torch.cat([self._normed(features.float()), self._normed(embedded)], dim=-1)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps)

    def chain(self, features: Tensor, tokens: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and outputs of each place of a chain begun at all places: [rows, length - steps, ...] each.

        What a step puts out stands in for the feature that the next one reads; the outputs are empty before the fit.
        """
        length = tokens.shape[1] - steps
        read = features[:, :length]
        for step in range(steps):
            inputs = self.inputs(read, tokens[:, 1 + step : 1 + step + length])
            if self.weight is None:
                yield inputs, inputs.new_empty(0)
                return
            read = self._normed(F.linear(inputs, self.weight)) * self.final_norm
            yield inputs, read


def fit(module: Module, target: Target, tokens: Tensor, steps: int, damping: float) -> None:
    """Once for one place, and once more for each further one that a chain has."""
    hidden = len(module.final_norm)
    scale = module.final_norm.sign() * module.final_norm.abs().clamp(min=LEAST_WEIGHT)
    for drafted in range(1, steps + 1):
        sums = Sums(hidden, tokens.device)
        for some in tokens.split(ROWS):
            features = target.features(some, (FINAL_NORM,)).float()
            wanted = features / scale
            for step, (inputs, _) in enumerate(module.chain(features, some, drafted)):
                sums.add(inputs, wanted[:, 1 + step : 1 + step + inputs.shape[1]])
        module.weight = sums.solved(damping)


def top_1(module: Module, target: Target, tokens: Tensor, steps: int) -> list[float]:
    """How often the likeliest token is the target's, at each place of a chain; tokens are those of the text."""
    hits: list[list[Tensor]] = [[] for _ in range(steps)]
    head = target.lm_head.float()
    for some in tokens.split(1):
        features = target.features(some, (FINAL_NORM,)).float()
        best = F.linear(features, head).argmax(dim=-1)
        for step, (_, read) in enumerate(module.chain(features, some, steps)):
            guessed = F.linear(read, head).argmax(dim=-1)
            hits[step].append((guessed == best[:, 1 + step : 1 + step + guessed.shape[1]]).float().mean())
    return [float(torch.stack(found).mean()) for found in hits]


def save_mtp(module: Module, folder: Path, config: Any, name: str) -> None:
    """As float16 in MiMo's layout, without the target's own tensors."""
    assert module.weight is not None
    folder.mkdir(parents=True, exist_ok=True)
    hidden = len(module.final_norm)
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    ones, nothing = torch.ones(hidden), torch.zeros
    layer = {
        **{f"self_attn.{p}_proj.weight": nothing(dim, hidden) for p in "qkv"},
        **{f"self_attn.{p}_proj.bias": nothing(dim) for p in "qkv"},
        "self_attn.o_proj.weight": nothing(hidden, dim),
        "mlp.gate_proj.weight": nothing(INNER, hidden),
        "mlp.up_proj.weight": nothing(INNER, hidden),
        "mlp.down_proj.weight": nothing(hidden, INNER),
        **{f"{p}_layernorm.weight": ones.clone() for p in ("token", "hidden", "input", "post_attention")},
        "final_layernorm.weight": module.final_norm,
        "input_proj.weight": module.weight,
    }
    state = {f"{MTP_MODULE}{k}": v.half().cpu().contiguous() for k, v in layer.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    written = {
        "model_type": "mimo",
        "target": name,
        "num_nextn_predict_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": int(config.num_hidden_layers),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": dim,
        "hidden_act": "silu",
        "rms_norm_eps": module.eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that write.py made")
    parser.add_argument("--out", type=Path, required=True, help="folder of what is fitted")
    parser.add_argument("--target", default=DEMO)
    parser.add_argument("--steps", type=int, default=3, help="places that are drafted in a row")
    parser.add_argument("--damping", type=float, default=0.01)
    parser.add_argument("--held-out", type=int, default=4, help="dialogues that are not fitted, the last ones")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.load(chosen.target, device, compiled=False)
    written = [np.array(each.tokens, np.int64) for each in rounds(chosen.corpus)]
    tokens = torch.from_numpy(np.concatenate(written)).to(device)
    module = Module(target)
    fit(module, target, tokens[: -chosen.held_out], chosen.steps, chosen.damping)
    save_mtp(module, chosen.out, target.config, chosen.target)
    scores = " ".join(f"{v:.4f}" for v in top_1(module, target, tokens[-chosen.held_out :], chosen.steps))
    print(f"{tokens.numel() / 1e6:.3f} M tokens; top 1 by step {scores}", flush=True)


if __name__ == "__main__":
    main()
