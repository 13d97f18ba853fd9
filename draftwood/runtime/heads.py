"""Draft heads on the target's features, in one form whatever checkpoint they come from.

``heads_checkpoint.load_heads`` reads the published layouts into the classes below; whoever drafts with heads needs no
other names than theirs. Tensors are ``[out, in]`` as in ``torch.nn.Linear``.

Words
-----
feature    A hidden state of the target at one place of the text. Which ones heads work on is said by ``taps``: k >= 0
           is what the target's first k layers put out, residual included and not normed (0: the embedding's output);
           ``FINAL_NORM`` is the output of the target's final norm, that is, what its LM head reads.
place      A token's index in the text, from 0. The target's row at place i holds token i; its feature is that of
           place i, its logits choose token i + 1.
target's   Embedding and LM head of the target, used where the heads bring none (``embedding``, ``lm_head`` are None).
           The target's final norm is no part of its LM head: heads have a ``norm`` of their own or none.

Medusa (arXiv:2401.10774)
-------------------------
Head k (from 0) at the feature of place i guesses token i + 2 + k: ``x = x + silu(block(x))`` for each block, then its
LM head. Token i + 1 is the target's own. The feature of the last committed token is not known before the next forward
of the target, so with n tokens committed the newest feature is that of place n - 2, and head k guesses token n + k.

EAGLE-1/2 (arXiv:2401.15077, 2406.16858) and EAGLE-3 (arXiv:2503.01840)
----------------------------------------------------------------------
A row of the draft stands for token i + 1 and takes two things: the token's embedding and the feature of place i, one
place before it. Its output guesses token i + 2 and stands in for the feature of place i + 1 in the rows below. So the
first row is that of token 1; the row of the last committed token n - 1 takes the newest feature, that of place n - 2.

A row sees the rows of its text's earlier tokens and itself, in a tree its ancestors. Its rotary position is its token's
place (EAGLE's own code counts from one lower; rotary embeddings know differences only).

    e = embedding[token i + 1], by ``embedding_norm`` if there is one
    g = ``fused(features of place i)`` of a committed place; below it, what the parent's row hands down
    f = g by ``feature_norm`` if there is one
    fc given:  x = fc([e, f]), the residual is x; the first layer's q, k, v take x by ``input_norm`` if there is one
    fc None:   the first layer's q, k, v take [e, f], twice as wide; the residual is f if ``residual_normed``, else g
    further layers are plain Llama (Qwen) layers; y is the output of the last one
    z = y by ``norm`` if there is one; logits = LM head of z
    handed down to the children: z if ``hands_down_normed``, else y

Logit k is that of the target's token ``target_ids[k]``, of token k where that is None. With ``target_ids`` and without
``lm_head`` the LM head is those rows of the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

FINAL_NORM = -1
"""The tap behind the target's final norm."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What heads must fit."""

    hidden_size: int
    layers: int
    vocab_size: int  # rows of the embedding and of the LM head, padding included

    @classmethod
    def of(cls, config: Any) -> Self:
        """That of a model's configuration."""
        text = config.get_text_config()
        return cls(int(text.hidden_size), int(text.num_hidden_layers), int(text.vocab_size))


@dataclass(frozen=True, slots=True)
class Affine:
    """A linear layer."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head."""

    blocks: tuple[Affine, ...]  # [hidden, hidden]
    lm_head: Tensor | None  # [vocab_size, hidden]; None: the target's

    def hidden(self, feature: Tensor) -> Tensor:
        """What the LM head reads, [..., hidden], from features [..., hidden]."""
        for block in self.blocks:
            feature = feature + F.silu(block(feature))
        return feature


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Heads that guess one place each."""

    taps: tuple[int, ...]  # one
    heads: tuple[MedusaHead, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """A transformer layer. The first one of EAGLE-3 has query, key and value weights [..., 2 * hidden]."""

    input_norm: Tensor | None  # [hidden]
    query: Affine
    key: Affine
    value: Affine
    query_norm: Tensor | None  # [head_dim], of each head (Qwen3)
    key_norm: Tensor | None  # [head_dim]
    out: Affine
    mlp_norm: Tensor  # [hidden]
    gate: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A small transformer over the target's features; also an MTP module, which is one with ``fc`` and all norms."""

    config: Any  # of transformers: sizes, heads, rope, rms_norm_eps of the layers
    taps: tuple[int, ...]
    embedding: Tensor | None  # [vocab_size, hidden]; None: the target's
    embedding_norm: Tensor | None  # [hidden]
    feature_norm: Tensor | None  # [hidden]
    fuse_norm: Tensor | None  # [1, taps * target hidden]: over all features at once; [taps, target hidden]: over each
    fuse: Affine | None  # [hidden, taps * target hidden]; None: there is one tap, and it is taken as it is
    fc: Affine | None  # [hidden, 2 * hidden]
    layers: tuple[Layer, ...]
    norm: Tensor | None  # [hidden]
    lm_head: Tensor | None  # [tokens, hidden]
    target_ids: NDArray[np.int64] | None  # [tokens], ascending; None: all of the target's
    residual_normed: bool = False
    hands_down_normed: bool = False

    def normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Root mean square norm; x itself without a weight."""
        return x if weight is None else F.rms_norm(x, weight.shape[-1:], weight, self.config.rms_norm_eps)

    def fused(self, features: Tensor) -> Tensor:
        """[..., hidden] of the features of committed places, [..., taps * target hidden] in the order of ``taps``."""
        if self.fuse_norm is not None:
            groups = features.reshape(*features.shape[:-1], *self.fuse_norm.shape)
            normed = F.rms_norm(groups, groups.shape[-1:], None, self.config.rms_norm_eps)
            features = (normed * self.fuse_norm).flatten(-2)
        return features if self.fuse is None else self.fuse(features)

    def entry(self, embedded: Tensor, fused: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's query, key and value take, and the residual beside them.

        embedded [..., hidden] are the tokens' embeddings, fused [..., hidden] what ``fused`` or a parent's row gave.
        """
        e, f = self.normed(embedded, self.embedding_norm), self.normed(fused, self.feature_norm)
        joined = torch.cat([e, f], dim=-1)
        if self.fc is None:
            return joined, f if self.residual_normed else fused
        x = self.fc(joined)
        return self.normed(x, self.layers[0].input_norm), x

    def feed_forward(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: x [..., hidden] is the residual, attended [..., q_heads * head_dim]."""
        x = x + layer.out(attended)
        y = self.normed(x, layer.mlp_norm)
        return x + layer.down(F.silu(layer.gate(y)) * layer.up(y))

    def exit(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """What the LM head reads and what is handed down to the children, of the last layer's output [..., hidden]."""
        z = self.normed(y, self.norm)
        return z, z if self.hands_down_normed else y


def dense_forward(head: EagleHead, embedded: Tensor, fused: Tensor) -> tuple[Tensor, Tensor]:
    """All rows of one text at once, by plain causal attention: the reference for those that keep a cache.

    embedded, fused [n, hidden] of tokens 1 to n and places 0 to n - 1. Returns ``exit`` of all rows, [n, hidden] each.
    """
    config = head.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotation = LlamaRotaryEmbedding(config)(embedded[None], 1 + torch.arange(len(embedded))[None])
    taken, x = head.entry(embedded, fused)
    for number, layer in enumerate(head.layers):
        if number:
            taken = head.normed(x, layer.input_norm)
        query, key, value = (p(taken).view(len(x), -1, dim) for p in (layer.query, layer.key, layer.value))
        query, key = head.normed(query, layer.query_norm), head.normed(key, layer.key_norm)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = head.feed_forward(layer, x, seen[0].transpose(0, 1).flatten(1))
    return head.exit(x)
