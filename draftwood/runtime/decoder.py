"""The forward of a loaded model over flat rows, with our attention and our paged cache.

``FusedDecoder`` runs the Llama family from the loaded weights: nine kernels a layer on a GPU (one more where attention
splits its keys; six in bfloat16 for up to 64 rows), about twenty torch calls and the attention's on a CPU.

``HfDecoder`` leaves any other model's code as it is: our function is registered with transformers' attention
interface, position ids and the step's metadata are passed as keyword arguments, and the model keeps no cache of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from draftwood.features import FINAL
from draftwood.kernels.fused import Heads, add_rms_norm, rotate_and_write, rotation_table, swiglu
from draftwood.kernels.linear import MOST_ROWS, Normed, linear, linear_add, linear_swiglu, loads_ahead, plan_linear
from draftwood.kernels.tree_attention import AttentionBatch, tree_attention

ATTENTION = "draftwood_tree"


class Decoder(Protocol):
    """A forward without synchronisation with the host, so that it can be captured in a CUDA graph."""

    row_multiple: int
    """Numbers of rows between its multiples cost more than the next multiple."""

    def __call__(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        logits_rows: Tensor,
        features: FeatureStore | None = None,
    ) -> Tensor:
        """Logits [len(logits_rows), vocab_size] of some rows; keys and values of all rows go into the cache, and
        their features into the store, if there is one.

        input_ids int64 [rows]; cache [layers, 2, pages, kv_heads, PAGE, head_dim]; logits_rows int64 [wanted].
        """
        ...


@dataclass(frozen=True, slots=True)
class FeatureStore:
    """Features (``draftwood.features``) of the tokens in a paged cache: each lies where its key and value do."""

    layers: tuple[int, ...]
    planes: Tensor  # bfloat16 [layers, pages, PAGE, hidden_size]

    def write(self, layer: int, hidden: Tensor, batch: AttentionBatch) -> None:
        """Keeps the hidden states [rows, hidden_size] of a forward's rows, if the layer is one of ours."""
        if layer in self.layers:
            plane = self.planes[self.layers.index(layer)]
            plane[batch.page_id, batch.page_offset] = hidden.to(plane.dtype)


def make_decoder(model: PreTrainedModel, max_positions: int) -> Decoder:
    """The fastest decoder that serves the model. Positions of all rows must be below ``max_positions``."""
    return FusedDecoder(model, max_positions) if is_fusable(model) else HfDecoder(model)


def _row_multiple(model: PreTrainedModel) -> int:
    """A CPU's unpacked products are up to half slower for row counts between the multiples of four."""
    return 4 if model.device.type == "cpu" else 1


FUSED_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the length of the text."""


def is_fusable(model: PreTrainedModel) -> bool:
    """Whether ``FusedDecoder`` computes what the model's own code does: decided by its classes and shapes."""
    if type(model) not in FUSED_MODELS:
        return False
    config, attention = model.config, model.model.layers[0].self_attn
    kernels_know = model.device.type == "cpu" or model.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return (
        kernels_know
        and config.hidden_act == "silu"
        and config.num_attention_heads % config.num_key_value_heads == 0
        and model.model.rotary_emb.rope_type in FIXED_ROPES
        and 2 * len(model.model.rotary_emb.inv_freq) == attention.head_dim
        and all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear) or hasattr(m, "in_features"))
    )


class Projection:
    """A linear layer over the weights of one or more of the model's, one below the other: x [rows, in] -> [rows, out].

    On a CPU the weights are packed once, which halves the time of a product with few rows, and the model's own are
    gone (empty). Elsewhere the model's own become views of ours. Either way they are held once, but for a head
    that is tied to the embedding: a CPU holds it packed too.
    """

    def __init__(self, *linears: Any, tied: bool = False) -> None:
        weight = torch.cat([m.weight for m in linears]) if len(linears) > 1 else linears[0].weight
        self.packed = _packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS) if self.packed else weight
        self.bias = None if linears[0].bias is None else torch.cat([m.bias for m in linears])
        if not tied:
            for linear, view in zip(linears, weight.split([m.out_features for m in linears]), strict=True):
                linear.weight = nn.Parameter(weight.new_empty(0) if self.packed else view, requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)


PACKED_FOR_ROWS = 16
"""A hint: the layout serves any number of rows."""


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN has a packed product for these weights."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and computes_in_bfloat16())


def computes_in_bfloat16() -> bool:
    """Whether oneDNN's products in bfloat16 are the CPU's own (from AVX-512 on) and not emulated."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights and constants of one decoder layer."""

    input_norm: Tensor
    qkv: Projection
    head_norm: Tensor | None  # [q_heads + kv_heads, head_dim]
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    scale: float
    window: int  # tokens, 0: none


class FusedDecoder:
    """The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

    Takes over the model's weights (see ``Projection``): on a CPU the model itself computes nothing any more.
    """

    def __init__(self, model: PreTrainedModel, max_positions: int) -> None:
        model.requires_grad_(False)
        config, body = model.config, model.model
        rope, tied = body.rotary_emb, model.lm_head.weight is body.embed_tokens.weight
        self._query_heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._eps = float(config.rms_norm_eps)
        self._table = rotation_table(rope.inv_freq, float(rope.attention_scaling), max_positions, model.dtype)
        self._embedding = body.embed_tokens.weight
        self._layers = [_layer(model, layer) for layer in body.layers[: config.num_hidden_layers]]
        self._norm = body.norm.weight
        self._head = Projection(model.lm_head, tied=tied)
        self._folds = (
            model.device.type == "cuda" and model.dtype == torch.bfloat16 and all(map(_is_foldable, self._layers))
        )
        self.row_multiple = 1 if self._head.packed else _row_multiple(model)
        if self._head.packed:
            for parameter in model.parameters():  # what is left would keep the file of all weights mapped
                parameter.data = parameter.data.clone()
        elif model.device.type == "cuda":
            torch.cuda.empty_cache()  # the parts left holes that the wholes did not fit

    def __call__(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        logits_rows: Tensor,
        features: FeatureStore | None = None,
    ) -> Tensor:
        heads = Heads(self._query_heads, self._kv_heads, self._table, batch.position, batch.page_id, batch.page_offset)
        hidden = self._embedding[input_ids]
        run = self._run_folded if self._folds and len(input_ids) <= MOST_ROWS else self._run
        delta = run(hidden, batch, heads, cache, features)
        if features is None or FINAL not in features.layers:
            return self._head(add_rms_norm(hidden, delta, self._norm, self._eps, logits_rows))
        normed = add_rms_norm(hidden, delta, self._norm, self._eps)
        features.write(FINAL, normed, batch)
        return self._head(normed.index_select(0, logits_rows))

    def _run(
        self, hidden: Tensor, batch: AttentionBatch, heads: Heads, cache: Tensor, features: FeatureStore | None
    ) -> Tensor | None:
        """All layers; ``hidden`` becomes what the last one adds its result to, and the result is returned."""
        delta: Tensor | None = None
        for below, (layer, plane) in enumerate(zip(self._layers, cache.unbind(0), strict=True)):
            normed = add_rms_norm(hidden, delta, layer.input_norm, self._eps)
            if features and below:
                features.write(below, hidden, batch)
            seen = self._attend(layer.qkv(normed), layer, plane, batch, heads)
            normed = add_rms_norm(hidden, layer.out(seen), layer.mlp_norm, self._eps)
            delta = layer.down(swiglu(layer.gate_up(normed)))
        return delta

    def _run_folded(
        self, hidden: Tensor, batch: AttentionBatch, heads: Heads, cache: Tensor, features: FeatureStore | None
    ) -> None:
        """All layers, for a few rows: norms, sums and activations are part of the products."""
        x = Normed(add_rms_norm(hidden, None, self._layers[0].input_norm, self._eps), None, self._eps)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        planes = cache.unbind(0)
        eager = loads_ahead(self._layers[0].out.weight, len(hidden))
        for done, (layer, plane, next_norm) in enumerate(zip(self._layers, planes, next_norms, strict=True), start=1):
            qkv = linear(x, layer.qkv.weight, layer.qkv.bias)
            seen = self._attend(qkv, layer, plane, batch, heads, eager=eager)
            x = linear_add(seen, layer.out.weight, hidden, layer.mlp_norm, self._eps)
            x = linear_add(linear_swiglu(x, layer.gate_up.weight), layer.down.weight, hidden, next_norm, self._eps)
            if features and done < len(self._layers):
                features.write(done, hidden, batch)

    def _attend(
        self, qkv: Tensor, layer: _Layer, plane: Tensor, batch: AttentionBatch, heads: Heads, *, eager: bool = False
    ) -> Tensor:
        query = rotate_and_write(qkv, plane, heads, layer.head_norm, self._eps)
        keys, values = plane.unbind(0)
        seen = tree_attention(query, keys, values, batch, scale=layer.scale, window=layer.window, eager=eager)
        return seen.flatten(1)


def _is_foldable(layer: _Layer) -> bool:
    """Whether the layer's products can take in what lies between them."""
    if any(projection.bias is not None for projection in (layer.out, layer.gate_up, layer.down)):
        return False
    sizes = [(p.weight.shape, 1) for p in (layer.qkv, layer.out, layer.down)]
    inner, gate_up = layer.gate_up.weight.shape[1], layer.gate_up.weight.shape[0] // 2
    sizes.append(((gate_up, inner), 2))
    return all(plan_linear(i, o, n, rows) for (o, i), n in sizes for rows in (1, MOST_ROWS))


def _layer(model: PreTrainedModel, layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    # Mistral's attention reads its window from the configuration.
    owner = model.config if type(model) is MistralForCausalLM else attention
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=Projection(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=_head_norm(model, attention) if hasattr(attention, "q_norm") else None,
        out=Projection(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=Projection(mlp.gate_proj, mlp.up_proj),
        down=Projection(mlp.down_proj),
        scale=float(attention.scaling),
        window=getattr(owner, "sliding_window", None) or 0,
    )


def _head_norm(model: PreTrainedModel, attention: Any) -> Tensor:
    """Norm weights [q_heads + kv_heads, head_dim] of all heads that are normed."""
    query, kv = model.config.num_attention_heads, model.config.num_key_value_heads
    return torch.cat([attention.q_norm.weight.expand(query, -1), attention.k_norm.weight.expand(kv, -1)])


@dataclass
class _Step:
    """What the attention function needs in one forward; travels through the model as a keyword argument."""

    cache: Tensor
    batch: AttentionBatch
    layers_seen: list[int] = field(default_factory=list)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    draftwood_step: _Step,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, q_heads, rows, head_dim], key and value [1, kv_heads, rows, ...]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    step, batch = draftwood_step, draftwood_step.batch
    step.layers_seen.append(layer)
    keys, values = step.cache[layer, 0], step.cache[layer, 1]
    keys[batch.page_id, :, batch.page_offset] = key[0].transpose(0, 1)
    values[batch.page_id, :, batch.page_offset] = value[0].transpose(0, 1)
    out = tree_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attend)


class HfDecoder:
    """Any causal LM that honours transformers' attention interface."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.row_multiple = _row_multiple(model)
        self.layers_seen: list[int] = []
        """Layers that reached our attention in the last forward, in order."""

    def __call__(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        logits_rows: Tensor,
        features: FeatureStore | None = None,
    ) -> Tensor:
        step = _Step(cache, batch)
        self.layers_seen = step.layers_seen
        out = self._model(
            input_ids=input_ids[None],
            position_ids=batch.position[None].long(),
            use_cache=False,
            logits_to_keep=logits_rows,
            output_hidden_states=features is not None,
            draftwood_step=step,
        )
        if features:
            for layer in features.layers:
                features.write(layer, out.hidden_states[-1 if layer == FINAL else layer][0], batch)
        logits: Tensor = out.logits[0]
        return logits
