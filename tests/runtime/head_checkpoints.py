"""Writes small checkpoints of draft heads in the published layouts, with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.runtime.heads import TargetShape

Tensors = dict[str, Tensor]
HEADS, KV_HEADS, INNER = 4, 2, 48
"""Sizes of all layers; head_dim is a quarter of the width."""


def save(folder: Path, config: Mapping[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """Norms' weights lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.1 * noise if "norm" in name else noise / shape[-1] ** 0.5
    return found


def layer_config(size: int, target: TargetShape) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "vocab_size": target.vocab_size,
    }


def layer_shapes(name: str, size: int, in_size: int) -> dict[str, tuple[int, ...]]:
    """Of a layer without its input norm."""
    kv = size // HEADS * KV_HEADS
    return {
        f"{name}.self_attn.q_proj.weight": (size, in_size),
        f"{name}.self_attn.k_proj.weight": (kv, in_size),
        f"{name}.self_attn.v_proj.weight": (kv, in_size),
        f"{name}.self_attn.o_proj.weight": (size, size),
        f"{name}.post_attention_layernorm.weight": (size,),
        f"{name}.mlp.gate_proj.weight": (INNER, size),
        f"{name}.mlp.up_proj.weight": (INNER, size),
        f"{name}.mlp.down_proj.weight": (size, INNER),
    }


def vocabulary(tokens: int, target: TargetShape, seed: int = 0) -> Tensors:
    """``d2t`` and ``t2d`` of ``tokens`` of the target's tokens."""
    ids = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(seed))[:tokens].sort().values
    marks = torch.zeros(target.vocab_size, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(tokens), "t2d": marks}


def medusa(target: TargetShape, heads: int = 3, blocks: int = 1) -> tuple[dict[str, Any], Tensors]:
    """FasterDecoding/Medusa's own layout; the file is ``medusa_lm_head.pt``."""
    size, shapes = target.hidden_size, {}
    for head in range(heads):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (size, size)
            shapes[f"{head}.{block}.linear.bias"] = (size,)
        shapes[f"{head}.{blocks}.weight"] = (target.vocab_size, size)
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "some/target"}
    return config, random_weights(shapes)


def eagle(target: TargetShape, layers: int = 1) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-1 and 2 of SafeAILab; the file is ``pytorch_model.bin``."""
    size = target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (target.vocab_size, size),
        "fc.weight": (size, 2 * size),
        "fc.bias": (size,),
    }
    for layer in range(layers):
        shapes |= layer_shapes(f"layers.{layer}", size, size)
        if layer:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (size,)
    return layer_config(size, target) | {"num_hidden_layers": layers, "bias": True}, random_weights(shapes)


def eagle3(target: TargetShape, tokens: int, size: int | None = None) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-3 of SafeAILab; with ``size`` narrower than the target, it brings an embedding of its own."""
    width = size or target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, 3 * target.hidden_size),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        **layer_shapes("midlayer", width, 2 * width),
        "norm.weight": (width,),
        "lm_head.weight": (tokens, width),
    }
    config = layer_config(width, target) | {"draft_vocab_size": tokens}
    if width != target.hidden_size:
        shapes["embed_tokens.weight"] = (target.vocab_size, width)
        config["target_hidden_size"] = target.hidden_size
    return config, random_weights(shapes) | vocabulary(tokens, target)


def mtp(target: TargetShape) -> tuple[dict[str, Any], Tensors]:
    """MiMo's module in the target's own checkpoint, of which one other tensor is there."""
    size, module = target.hidden_size, "model.mtp_layers.0"
    norms = ("token", "hidden", "input", "final")
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{module}.{name}_layernorm.weight": (size,) for name in norms},
        f"{module}.input_proj.weight": (size, 2 * size),
        **layer_shapes(module, size, size),
        **{f"{module}.self_attn.{name}_proj.bias": (size // (1 if name == "q" else 2),) for name in "qkv"},
        "model.norm.weight": (size,),
    }
    config = layer_config(size, target) | {"model_type": "mimo", "num_hidden_layers": 8, "num_nextn_predict_layers": 1}
    return config, random_weights(shapes)


def speculators_eagle(target: TargetShape) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-1 as the library speculators writes it."""
    layer, tensors = eagle(target)
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    for old, new in names.items():
        tensors = {new + k.removeprefix(old) if k.startswith(old) else k: t for k, t in tensors.items()}
    extra = {"transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": False, "fusion_bias": True}
    return speculators("eagle", layer) | extra, tensors


def speculators_eagle3(target: TargetShape, tokens: int, **fields: Any) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-3 as the library speculators writes it."""
    layer, tensors = eagle3(target, tokens)
    del layer["draft_vocab_size"]
    tensors = {k.replace("midlayer.", "layers.0."): t for k, t in tensors.items()}
    features = tensors["fc.weight"].shape[1]
    if fields.get("norm_before_fc"):
        tensors |= random_weights({"input_norm.weight": (features,)}, seed=1)
    if fields.get("fc_norm"):
        tensors |= random_weights({f"fc_norm.{k}.weight": (target.hidden_size,) for k in range(3)}, seed=2)
    return speculators("eagle3", layer) | {"draft_vocab_size": tokens, "target_hidden_size": None} | fields, tensors


def speculators(kind: str, layer: dict[str, Any]) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
    }
