"""Draft heads at work: an ``EagleHead`` over a paged cache of its own, and the tables that heads borrow of the target.

What the head computes is said in ``heads.py``, whose ``dense_forward`` is the reference; the operations between its
products are those of the target's decoder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import cached_file

from draftwood.errors import FailedPrecondition, NotFound
from draftwood.features import FINAL, FeatureRequest, Features
from draftwood.kernels.fused import Heads, add_rms_norm, rotate_and_write, rotation_table, swiglu
from draftwood.kernels.tree_attention import AttentionBatch, tree_attention
from draftwood.runtime.batch import Padding, Ragged, Rows, assemble
from draftwood.runtime.decoder import Projection
from draftwood.runtime.heads import FINAL_NORM, Affine, EagleHead, Layer, MedusaHeads
from draftwood.runtime.pages import PagePool
from draftwood.runtime.reduced import ReducedVocabulary

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TargetTables:
    """What heads use of the target where they bring none of their own; [vocab_size, hidden_size] each."""

    embedding: Tensor
    lm_head: Tensor

    @classmethod
    def load(cls, path: str, device: torch.device, dtype: torch.dtype) -> TargetTables:
        """Reads the two tensors of a checkpoint in safetensors and no others; raises NotFound MODEL_UNKNOWN."""
        embedding = _read_tensor(path, EMBEDDING)
        if embedding is None:
            raise NotFound("MODEL_UNKNOWN", f"no tensor {EMBEDDING} can be read from {path!r}, the heads' target")
        lm_head = _read_tensor(path, LM_HEAD)
        tied = lm_head is None
        embedding = embedding.to(device, dtype)
        return cls(embedding, embedding if tied or lm_head is None else lm_head.to(device, dtype))


def _read_tensor(path: str, name: str) -> Tensor | None:
    try:
        index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
        file = json.loads(Path(index).read_text())["weight_map"].get(name) if index else "model.safetensors"
        found = file and cached_file(path, file, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise NotFound("MODEL_UNKNOWN", f"no model can be loaded from {path!r}, the heads' target: {error}") from error
    if not found:
        return None
    with safe_open(found, framework="pt") as tensors:
        return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118


def feature_request(taps: Sequence[int], hidden_size: int, target: str) -> FeatureRequest:
    """What heads of these taps ask a verifier for; raises FailedPrecondition MODEL_UNSUPPORTED for the embedding."""
    if 0 in taps:
        raise FailedPrecondition("MODEL_UNSUPPORTED", f"taps {list(taps)}: a target's embedding is no feature of its")
    return FeatureRequest(tuple(FINAL if tap == FINAL_NORM else tap for tap in taps), hidden_size, target)


def as_tensor(features: Features, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[positions, layers * hidden_size]."""
    bits = torch.from_numpy(features.reshape(len(features), -1).view("<i2"))
    return bits.view(torch.bfloat16).to(device, dtype)


@dataclass(frozen=True, slots=True)
class FeatureRows(Rows):
    """Rows of a head: what each token's row takes beside its embedding."""

    states: Tensor = field(kw_only=True)  # [n, hidden]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor | None
    qkv: Projection
    head_norm: Tensor | None  # [q_heads + kv_heads, head_dim]
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


class HeadRuntime:
    """One ``EagleHead``, its paged KV cache ``[layers, 2, pages, kv_heads, page_tokens, head_dim]`` and its page pool.

    Slot and position of a row are those of its feature: the row of the text's token i + 1 is at i. One thread only.
    """

    def __init__(self, head: EagleHead, tables: TargetTables, *, kv_pages: int, page_tokens: int) -> None:
        config, embedding = head.config, tables.embedding if head.embedding is None else head.embedding
        self.device, self.dtype = embedding.device, embedding.dtype
        self.max_context_tokens = int(getattr(config, "max_position_embeddings", 1 << 30))
        self.pool = PagePool(kv_pages, page_tokens)
        self.target_size = len(tables.embedding)
        self.reduced: ReducedVocabulary | None = None
        if head.target_ids is not None:
            self.reduced = ReducedVocabulary(head.target_ids.tolist(), self.target_size, len(head.target_ids) + 1)
        self.handed = torch.empty(0)
        """What the wanted rows of the last forward hand down to their children, [wanted, hidden]."""
        self._head, self._embedding = head, embedding
        self._query_heads = int(config.num_attention_heads)
        self._kv_heads = int(getattr(config, "num_key_value_heads", None) or self._query_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self._query_heads)
        self._layers = [_layer(layer, self._query_heads, self._kv_heads) for layer in head.layers]
        shape = (len(self._layers), 2, kv_pages + 1, self._kv_heads, page_tokens, head_dim)
        self._cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._padding = Padding(1, kv_pages)
        rope = LlamaRotaryEmbedding(config).to(self.device)
        positions = min(kv_pages * page_tokens, self.max_context_tokens) + 1
        self._table = rotation_table(rope.inv_freq, float(rope.attention_scaling), positions, self.dtype)
        self._eps, self._scale = float(config.rms_norm_eps), head_dim**-0.5
        self._lm_head = _projection(Affine(self._lm_head_of(head, tables)))

    @staticmethod
    def _lm_head_of(head: EagleHead, tables: TargetTables) -> Tensor:
        if head.lm_head is not None:
            return head.lm_head
        if head.target_ids is None:
            return tables.lm_head
        return tables.lm_head[torch.from_numpy(head.target_ids).to(tables.lm_head.device)]

    @torch.inference_mode()
    def fuse(self, features: Features) -> Tensor:
        """What rows take of committed positions' features: [positions, hidden]."""
        return self._head.fused(as_tensor(features, self.device, self.dtype))

    @torch.inference_mode()
    def forward(self, parts: Sequence[Rows]) -> Tensor:
        """Runs ``FeatureRows`` and returns the wanted rows' logits, [wanted, tokens], parts in order."""
        ragged = Ragged(parts, self.pool.page_tokens)
        states = torch.cat([part.states for part in parts if isinstance(part, FeatureRows)])
        forward = assemble(ragged, self.device, self._padding)
        taken, x = self._head.entry(self._embedding[forward.input_ids], states)
        x = x.clone() if x is states else x
        batch = forward.attention
        heads = Heads(self._query_heads, self._kv_heads, self._table, batch.position, batch.page_id, batch.page_offset)
        for number, (layer, plane) in enumerate(zip(self._layers, self._cache.unbind(0), strict=True)):
            if number:
                taken = self._head.normed(x, layer.input_norm)
            seen = self._attend(layer.qkv(taken), layer, plane, batch, heads)
            normed = add_rms_norm(x, layer.out(seen), layer.mlp_norm, self._eps)
            x = x + layer.down(swiglu(layer.gate_up(normed)))
        z, self.handed = self._head.exit(x.index_select(0, forward.logits_rows))
        return self._lm_head(z)

    def _attend(self, qkv: Tensor, layer: _Layer, plane: Tensor, batch: AttentionBatch, heads: Heads) -> Tensor:
        query = rotate_and_write(qkv, plane, heads, layer.head_norm, self._eps)
        keys, values = plane.unbind(0)
        return tree_attention(query, keys, values, batch, scale=self._scale).flatten(1)


def _layer(layer: Layer, query_heads: int, kv_heads: int) -> _Layer:
    head_norm = None
    if layer.query_norm is not None and layer.key_norm is not None:
        head_norm = torch.cat([layer.query_norm.expand(query_heads, -1), layer.key_norm.expand(kv_heads, -1)])
    return _Layer(
        layer.input_norm,
        _projection(layer.query, layer.key, layer.value),
        head_norm,
        _projection(layer.out),
        layer.mlp_norm,
        _projection(layer.gate, layer.up),
        _projection(layer.down),
    )


def _projection(*parts: Affine) -> Projection:
    """The weights stay the head's: what ``Projection`` takes over are modules of ours."""
    linears = []
    for part in parts:
        outer, inner = part.weight.shape
        linear = nn.Linear(inner, outer, bias=part.bias is not None, device="meta")
        linear.weight = nn.Parameter(part.weight, requires_grad=False)
        if part.bias is not None:
            linear.bias = nn.Parameter(part.bias, requires_grad=False)
        linears.append(linear)
    return Projection(*linears)


@dataclass(frozen=True, slots=True)
class Block:
    """What the configuration of a head that fills blocks says beyond that of EAGLE: ``block_size`` and
    ``mask_token_id``."""

    size: int  # places, the anchor's own guess included
    mask_token: int

    @classmethod
    def load(cls, path: str, target_size: int) -> Block:
        """Of a folder or hub id whose heads have been loaded; raises FailedPrecondition MODEL_UNSUPPORTED."""
        config = json.loads(Path(str(cached_file(path, "config.json"))).read_text())
        size, mask = config.get("block_size"), config.get("mask_token_id")
        if not isinstance(size, int) or size < 2:
            raise FailedPrecondition("MODEL_UNSUPPORTED", f"{path!r}: block_size is {size!r}, at least 2 is needed")
        if not isinstance(mask, int) or not 0 <= mask < target_size:
            why = f"{path!r}: mask_token_id is {mask!r}, the target has {target_size} tokens"
            raise FailedPrecondition("MODEL_UNSUPPORTED", why)
        return cls(size, mask)


class MedusaRuntime:
    """``MedusaHeads``, ready to guess. One thread only."""

    reduced: ReducedVocabulary | None = None

    def __init__(self, heads: MedusaHeads, tables: TargetTables) -> None:
        self.device, self.dtype = tables.lm_head.device, tables.lm_head.dtype
        self.heads = len(heads.heads)
        self._heads = heads.heads
        shared = _projection(Affine(tables.lm_head)) if any(head.lm_head is None for head in heads.heads) else None
        self._lm_heads = [shared if h.lm_head is None else _projection(Affine(h.lm_head)) for h in heads.heads]

    @torch.inference_mode()
    def forward(self, features: Tensor, depth: int) -> Tensor:
        """Logits of the first ``depth`` heads, [rows, depth, vocab_size], from features [rows, hidden]."""
        found = []
        for head, lm_head in zip(self._heads[:depth], self._lm_heads[:depth], strict=True):
            assert lm_head is not None
            found.append(lm_head(head.hidden(features)))
        return torch.stack(found, 1)
