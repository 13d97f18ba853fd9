"""The dense forward of a head that fills blocks: the reference for the drafter, and what tiny heads are trained by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftwood.runtime.heads import EagleHead


def block_forward(head: EagleHead, embedded: Tensor, fused: Tensor, masks: int) -> Tensor:
    """What the LM head reads, [rows, hidden], of rows whose last ``masks`` see all and each other, the rest what comes
    before; embedded, fused [rows, hidden]. The head has one layer."""
    [layer], config = head.layers, head.config
    taken, x = head.entry(embedded, fused)
    seen = torch.tril(torch.ones(len(x), len(x), dtype=torch.bool))
    seen[len(x) - masks :] = True
    dim = config.hidden_size // config.num_attention_heads
    rotation = LlamaRotaryEmbedding(config)(x[None], torch.arange(len(x))[None])
    projections = (layer.query, layer.key, layer.value)
    query, key, value = (p(taken).unflatten(-1, (-1, dim)).transpose(0, 1)[None] for p in projections)
    query, key = apply_rotary_pos_emb(query, key, *rotation)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    read, _ = head.exit(head.feed_forward(layer, x, out[0].transpose(0, 1).flatten(1)))
    return read
