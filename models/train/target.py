"""The target as training needs it: features at all places of a text, embedding, LM head and final norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwood.runtime.demo_model import DEMO, demo_target
from draftwood.runtime.heads import FINAL_NORM


class Target:
    """A Llama-like causal LM, frozen."""

    @classmethod
    def load(cls, name: str, device: torch.device, *, compiled: bool) -> Self:
        """In float16 on a GPU: bfloat16 is too coarse for near-ties."""
        path = str(demo_target()) if name == DEMO else name
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        return cls(model.to(device).eval(), compiled=compiled)

    def __init__(self, model: PreTrainedModel, *, compiled: bool = False) -> None:
        model.requires_grad_(False)
        self.config: Any = model.config
        self.embedding: Tensor = model.get_input_embeddings().weight  # [vocab_size, hidden]
        self.lm_head: Tensor = model.get_output_embeddings().weight  # [vocab_size, hidden]
        self._body = model.model
        self.final_norm: Tensor = self._body.norm.weight  # [hidden]
        # All layers are alike: one compilation serves them all.
        self._layer: Callable[..., Tensor] = torch.compile(_layer, dynamic=False) if compiled else _layer

    @torch.no_grad()
    def features(self, tokens: Tensor, taps: tuple[int, ...]) -> Tensor:
        """[rows, length, taps * hidden] of texts [rows, length], as ``draftwood.runtime.heads`` counts taps."""
        layers, body = int(self.config.num_hidden_layers), self._body
        with torch.autocast(tokens.device.type, enabled=False):
            position = torch.arange(tokens.shape[1], device=tokens.device)[None]
            x = body.embed_tokens(tokens)
            rotation = body.rotary_emb(x, position)
            found = {0: x}
            deepest = layers if FINAL_NORM in taps else max(taps)
            for number in range(deepest):
                x = self._layer(body.layers[number], x, position, rotation)
                found[number + 1] = x
            if FINAL_NORM in taps:
                found[FINAL_NORM] = body.norm(x)
        return torch.cat([found[k] for k in taps], dim=-1)


def _layer(layer: Any, x: Tensor, position: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    out = layer(x, attention_mask=None, position_ids=position, position_embeddings=rotation)
    return out[0] if isinstance(out, tuple) else out
