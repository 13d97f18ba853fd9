"""A small Llama inside the shape of a large one: it writes what the small one writes, at what the large one costs.

A large model whose text drafts can guess cannot be had everywhere; one of random weights writes noise. So the small
model's weights are laid into the large shape's, and everything else is random but where it would be read:

hidden      The first columns are the small model's. Matrices that write to the rest of the residual stream are zeros
            there, so it stays zero; a norm's mean over more columns is made up for in its weight and epsilon.
heads       Query head g of group j stays so. A head of k times the size has the small one's rotation in every k-th
            dimension of each half, at the same frequencies; keys are zeros elsewhere. Output columns of other heads are
            zeros.
neurons     Others count, but down's columns of them are zeros.
layers      Those after the small model's add zeros.
vocabulary  Rows beyond the small model's are padding, which is never chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftwood.runtime.model import random_model


def enlarge(small: LlamaForCausalLM, shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """The same function in the sizes of ``shape``, a configuration; ValueError where the small model does not fit."""
    own = small.config
    like = {"rope_parameters": own.rope_parameters, "max_position_embeddings": own.max_position_embeddings}
    specials = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    share = own.hidden_size / shape["hidden_size"]
    large = random_model(shape | like | specials | {"rms_norm_eps": own.rms_norm_eps * share}, device, dtype)
    _check_fits(own, large.config)
    with torch.no_grad():
        _fill(large.model.embed_tokens.weight.zero_(), small.model.embed_tokens.weight)
        _fill(large.lm_head.weight, small.lm_head.weight)
        _fill(large.model.norm.weight, small.model.norm.weight * share**0.5)
        for number, layer in enumerate(large.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            if number < own.num_hidden_layers:
                _fill_layer(layer, small.model.layers[number], own, large.config, share**0.5)
    return large


def _check_fits(own: Any, large: Any) -> None:
    names = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "intermediate_size", "vocab_size")
    for name in names:
        if getattr(own, name) > getattr(large, name):
            raise ValueError(f"{name} {getattr(large, name)} is less than the small model's {getattr(own, name)}")
    groups = [c.num_attention_heads // c.num_key_value_heads for c in (own, large)]
    if groups[0] > groups[1] or large.head_dim % own.head_dim:
        raise ValueError(f"groups {groups}, heads of {own.head_dim} and {large.head_dim} dimensions do not fit")


def _fill(target: Tensor, source: Tensor) -> None:
    """Lays a matrix or vector into the beginning of a larger one."""
    target[tuple(slice(n) for n in source.shape)] = source.to(target)


def _fill_layer(layer: Any, small: Any, own: Any, large: Any, norm_scale: float) -> None:
    attention, taken = layer.self_attn, small.self_attn
    dim, wide = own.head_dim, large.head_dim
    group, wide_group = (c.num_attention_heads // c.num_key_value_heads for c in (own, large))
    heads = torch.arange(own.num_attention_heads)
    query_heads = heads // group * wide_group + heads % group
    kv_heads = torch.arange(own.num_key_value_heads)
    half = torch.arange(dim // 2) * (wide // dim)
    rotated, plain = torch.cat([half, half + wide // 2]), torch.arange(dim)
    query_rows = (query_heads[:, None] * wide + rotated).flatten()
    key_rows = (kv_heads[:, None] * wide + rotated).flatten()
    value_rows = (kv_heads[:, None] * wide + plain).flatten()
    out_columns = (query_heads[:, None] * wide + plain).flatten()
    size, device = own.hidden_size, attention.q_proj.weight.device
    attention.k_proj.weight[: own.num_key_value_heads * wide].zero_()
    scale = (wide / dim) ** 0.5  # scores are divided by the root of the head's size
    for rows, weight, factor in (
        (query_rows, "q_proj", scale),
        (key_rows, "k_proj", 1.0),
        (value_rows, "v_proj", 1.0),
    ):
        target, source = getattr(attention, weight).weight, getattr(taken, weight).weight
        target[rows.to(device), :size] = (source * factor).to(target)
    out = attention.o_proj.weight
    out[:size, out_columns.to(device)] = taken.o_proj.weight.to(out)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _fill(getattr(layer.mlp, name).weight, getattr(small.mlp, name).weight)
    for name in ("input_layernorm", "post_attention_layernorm"):
        _fill(getattr(layer, name).weight, getattr(small, name).weight * norm_scale)
