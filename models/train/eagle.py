"""Trains an EAGLE-3 head for a target on text that the target wrote (arXiv:2503.01840).

``python models/train/eagle.py --target demo --corpus corpus --out eagle --seconds 600``

The head reads the features behind 2, half of all, and all but 3 of the target's layers, each normed (``fc_norm``).
Embedding and LM head are the target's and no part of the checkpoint; of its tokens the head proposes those that the
text uses most. The first layer may be followed by plain ones (``--layers``).

Training-time test: the head is unrolled ``--steps`` times. In each step but the first, a row takes its parent's output
of the step before in place of the target's feature, as it does when it drafts. It sees true rows up to the place where
drafting began and, from there on, its ancestors of the steps before. The loss of step t counts ``--fade`` to the power
of t; it is the cross-entropy to the target's distribution (``learn.py``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from learn import Corpus, add_arguments, distance, kept_tokens, load_corpus, train
from safetensors.torch import save_file
from target import Target
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftwood.runtime.demo_model import DEMO

SCORED_ROWS = 16
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [length, head_dim]."""


class Norm(nn.Module):
    """Root mean square norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    cosine, sine = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-high, low], dim=-1) * sine


def seen_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention: query [rows, heads, length, dim], key and value [rows, groups, length, dim]."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def seen_later(query: Tensor, keys: Tensor, values: Tensor, known: Tensor) -> Tensor:
    """Row i sees rows up to i of the first step, and row i of each later one that is known.

    query [rows, heads, length, dim]; keys, values [steps, rows, groups, length, dim]; known bool [steps - 1].
    """
    rows, heads, length, dim = query.shape
    groups = keys.shape[2]
    query = query.view(rows, groups, heads // groups, length, dim) * dim**-0.5
    above = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ keys[0][:, :, None].transpose(-1, -2)).masked_fill(above, float("-inf"))
    own = torch.stack([(query * key[:, :, None]).sum(dim=-1) for key in keys[1:]], dim=-1)
    weights = torch.cat([scores, own.masked_fill(~known, float("-inf"))], dim=-1).softmax(dim=-1).to(query.dtype)
    out = weights[..., :length] @ values[0][:, :, None]
    for step, value in enumerate(values[1:]):
        out = out + weights[..., length + step, None] * value[:, :, None]
    return out.view(rows, heads, length, dim)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, in_size: int) -> None:
        super().__init__()
        dim, groups, heads = config.head_dim, config.num_key_value_heads, config.num_attention_heads
        self.q_proj = nn.Linear(in_size, heads * dim, bias=False)
        self.k_proj = nn.Linear(in_size, groups * dim, bias=False)
        self.v_proj = nn.Linear(in_size, groups * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)


class Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The first one takes the tokens' embeddings, too, and a feature that is normed before the residual."""

    def __init__(self, config: LlamaConfig, *, first: bool) -> None:
        super().__init__()
        size, eps, self.dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        self.self_attn = Attention(config, 2 * size if first else size)
        self.mlp = Mlp(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)
        self.hidden_norm = Norm(size, eps) if first else None

    def enter(self, embedded: Tensor | None, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual [rows, length, hidden]; query, key and value [rows, heads or groups, length, dim]."""
        if self.hidden_norm is None or embedded is None:
            taken = self.input_layernorm(x)
        else:
            x = self.hidden_norm(x)
            taken = torch.cat([self.input_layernorm(embedded), x], dim=-1)
        split, attention = (*x.shape[:2], -1, self.dim), self.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (p(taken).view(split).transpose(1, 2) for p in projections)
        return x, rotated(query, rotation).to(value.dtype), rotated(key, rotation).to(value.dtype), value

    def leave(self, x: Tensor, seen: Tensor) -> Tensor:
        """seen [rows, heads, length, dim]."""
        x = x + self.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


def step_loss(read: Tensor, head: Tensor, top: Tensor, logprob: Tensor) -> Tensor:
    return distance(F.linear(read, head), top, logprob)


@dataclass
class Pieces:
    """Functions that are compiled on their own: each serves all steps."""

    enter: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = Layer.enter
    leave: Callable[..., Tensor] = Layer.leave
    seen_later: Callable[..., Tensor] = seen_later
    loss: Callable[..., Tensor] = step_loss

    @classmethod
    def compiled(cls) -> Pieces:
        plain = cls()
        return cls(*(torch.compile(getattr(plain, f.name), dynamic=False) for f in fields(cls)))


class Eagle(nn.Module):
    """Its state has the names of the checkpoint."""

    def __init__(self, config: LlamaConfig, taps: tuple[int, ...]) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.taps = config, taps
        self.fc_norm = nn.ModuleList(Norm(size, eps) for _ in taps)
        self.fc = nn.Linear(len(taps) * size, size, bias=False)
        self.midlayer = Layer(config, first=True)
        self.layers = nn.ModuleDict({str(k): Layer(config, first=False) for k in range(1, config.num_hidden_layers)})
        self.norm = Norm(size, eps)
        self.rotary = LlamaRotaryEmbedding(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)

    def fused(self, features: Tensor) -> Tensor:
        """[rows, length, hidden] of features [rows, length, taps * hidden]."""
        parts = features.chunk(len(self.taps), dim=-1)
        return self.fc(torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], dim=-1))

    def unrolled(
        self, embedding: Tensor, tokens: Tensor, features: Tensor, steps: int, pieces: Pieces
    ) -> Iterator[Tensor]:
        """What the LM head reads in each step, [rows, length - steps, hidden].

        Row i of step t holds token 1 + i + t and guesses token 2 + i + t. tokens [rows, length], features
        [rows, length, taps * hidden].
        """
        length = tokens.shape[1] - steps
        x = self.fused(features[:, :length])
        cosine, sine = (t[0] for t in self.rotary(x, torch.arange(tokens.shape[1], device=x.device)[None]))
        layers = [self.midlayer, *self.layers.values()]
        keys: list[list[Tensor]] = [[] for _ in layers]
        values: list[list[Tensor]] = [[] for _ in layers]
        for step in range(steps):
            places = slice(1 + step, 1 + step + length)
            embedded = F.embedding(tokens[:, places], embedding).float()
            for number, layer in enumerate(layers):
                rotation = (cosine[places], sine[places])
                x, query, key, value = pieces.enter(layer, None if number else embedded, x, rotation)
                keys[number].append(key)
                values[number].append(value)
                if step:
                    spare = [torch.zeros_like(key)] * (steps - 1 - step)
                    known = torch.arange(1, steps, device=x.device) <= step
                    all_keys, all_values = (torch.stack(t[number] + spare) for t in (keys, values))
                    seen = pieces.seen_later(query, all_keys, all_values, known)
                else:
                    seen = seen_first(query, key, value)
                x = pieces.leave(layer, x, seen)
            yield self.norm(x)


def top_1(eagle: Eagle, target: Target, head: Tensor, corpus: Corpus, steps: int) -> list[float]:
    """How often the likeliest token is the target's, at each step; the tokens before it are those of the text."""
    hits: list[list[Tensor]] = [[] for _ in range(steps)]
    for k in range(0, len(corpus.tokens), SCORED_ROWS):
        part = corpus.rows(k, k + SCORED_ROWS)
        features = target.features(part.tokens, eagle.taps)
        for step, read in enumerate(eagle.unrolled(target.embedding, part.tokens, features, steps, Pieces())):
            top = part.top[:, 1 + step : 1 + step + read.shape[1], 0]
            hits[step].append((F.linear(read, head).argmax(dim=-1) == top).float().mean())
    return [float(torch.stack(found).mean()) for found in hits]


def save_eagle(eagle: Eagle, folder: Path, kept: np.ndarray, target: str) -> None:
    """As float16 in EAGLE-3's layout; what the target has is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().half().cpu().contiguous() for name, value in eagle.state_dict().items()}
    state = {name: value for name, value in state.items() if not name.endswith("inv_freq")}
    ids, vocab_size = torch.from_numpy(kept), eagle.config.vocab_size
    state["d2t"] = ids - torch.arange(len(kept))
    state["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    shape = eagle.config
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target": target,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_parameters["rope_theta"],
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(kept),
        "fc_norm": True,
        "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in eagle.taps]},
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_eagle(target: Target, layers: int, inner: int, taps: tuple[int, ...]) -> Eagle:
    """With the target's width, heads, rope and, to begin with, its final norm."""
    config = target.config
    shape = LlamaConfig(
        hidden_size=config.hidden_size, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings, rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]},
        vocab_size=config.vocab_size,
    )  # fmt: skip
    eagle = Eagle(shape, taps).to(target.embedding.device)
    with torch.no_grad():
        eagle.norm.weight.copy_(target.final_norm)
    return eagle


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rows=40, rate=1.5e-3)
    parser.add_argument("--vocabulary", type=int, default=12288, help="tokens that can be proposed")
    parser.add_argument("--target", default=DEMO)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--inner", type=int, default=3072, help="width inside the MLPs")
    parser.add_argument("--taps", type=int, nargs="+", help="layers of the target before each feature")
    parser.add_argument("--steps", type=int, default=6, help="places that are drafted in a row")
    parser.add_argument("--fade", type=float, default=0.85)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(chosen.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.load(chosen.target, device, compiled=chosen.compile)
    depth = target.config.num_hidden_layers
    eagle = make_eagle(target, chosen.layers, chosen.inner, tuple(chosen.taps or (2, depth // 2, depth - 3)))
    kept = kept_tokens(chosen.corpus, chosen.vocabulary)
    corpus = load_corpus(chosen.corpus, kept, device, own_tokens=False)
    head = target.lm_head[torch.from_numpy(kept).to(device)]
    size = sum(p.numel() for p in eagle.parameters())
    print(f"{corpus.tokens.numel() / 1e6:.1f} M tokens, a head of {size / 1e6:.2f} M parameters", flush=True)
    steps, pieces = chosen.steps, Pieces.compiled() if chosen.compile else Pieces()

    def loss_of(batch: Corpus) -> Tensor:
        features, loss = target.features(batch.tokens, eagle.taps), torch.zeros((), device=device)
        for step, read in enumerate(eagle.unrolled(target.embedding, batch.tokens, features, steps, pieces)):
            places = slice(1 + step, 1 + step + read.shape[1])
            loss = loss + chosen.fade**step * pieces.loss(read, head, batch.top[:, places], batch.logprob[:, places])
        return loss

    def score(held_out: Corpus) -> str:
        return "top 1 by step " + " ".join(f"{v:.4f}" for v in top_1(eagle, target, head, held_out, steps))

    train(eagle, loss_of, corpus, chosen, score, lambda: save_eagle(eagle, chosen.out, kept, chosen.target))


if __name__ == "__main__":
    main()
