"""Loads draft heads (``heads.py``) from published checkpoints.

The layout is told from ``config.json`` and the tensors' names:

Medusa       ``medusa_num_heads``; tensors ``H.B.linear.weight`` and ``.bias`` of block B of head H, ``H.BLOCKS.weight``
             its LM head, in ``medusa_lm_head.pt`` or with the prefix ``medusa_head.``. There may be more heads than
             the configuration says, as some published ones say two and have five.
EAGLE-1/2    A Llama configuration of the layer; ``fc``, ``layers.N``, ``embed_tokens``. One feature, behind the
             target's final norm.
EAGLE-3      The same with ``draft_vocab_size`` or ``midlayer``; ``fc`` over three features, ``d2t`` (what to add to a
             token's id to get the target's), ``t2d`` (bool, which of the target's tokens the draft has), ``norm``,
             ``lm_head``. The features are those behind 2, half of all, and all but 3 of the target's layers, unless
             ``eagle_config.eagle_aux_hidden_state_layer_ids`` names the layers, counted from 0, whose output they are
             (as SGLang reads it). An ``lm_head`` that is left out is those rows of the target's.
MTP          ``num_nextn_predict_layers``, in the target's own checkpoint: ``model.mtp_layers.0``, a layer of Qwen2
             (MiMo). ``input_proj`` takes the normed feature, behind the target's final norm, before the normed
             embedding; what ``final_layernorm`` puts out is handed down.
speculators  ``speculators_model_type`` "eagle" or "eagle3"; the configuration of the layers is
             ``transformer_layer_config``. ``eagle_aux_hidden_state_layer_ids`` counts the layers before the feature
             (as vLLM reads it).

Whatever is missing, left over, of another shape than the configuration says or does not fit the target is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import cached_file

from draftwood.errors import FailedPrecondition, NotFound
from draftwood.runtime.heads import FINAL_NORM, Affine, EagleHead, Layer, MedusaHead, MedusaHeads, TargetShape

FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
)
"""Where weights may be; the first that is there counts."""

LAYER_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
"""What is taken of a layer's configuration."""

SPECULATORS_NAMES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
MTP_MODULE = "model.mtp_layers.0."
IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
"""Tensors that follow from the configuration."""


def load_heads(path: str, target: TargetShape, device: torch.device, dtype: torch.dtype) -> MedusaHeads | EagleHead:
    """Heads by folder or hub id.

    Raises NotFound MODEL_UNKNOWN if nothing is there, FailedPrecondition MODEL_UNSUPPORTED if it cannot be meant or
    does not fit the target.
    """
    config = _read_config(path)
    tensors = _Tensors(_read_weights(path), device, dtype)
    kind = config.get("speculators_model_type")
    heads: MedusaHeads | EagleHead
    if kind is not None or "speculators_config" in config:
        heads = _speculators(kind, config, tensors, target)
    elif "num_nextn_predict_layers" in config:
        heads = _mtp(config, tensors, target)
    elif "medusa_num_heads" in config:
        heads = _medusa(config, tensors, target)
    elif "draft_vocab_size" in config or tensors.any("midlayer."):
        heads = _eagle3(config, config, tensors, target, _eagle3_taps(config, target))
    elif tensors.any("fc."):
        heads = _eagle(config, tensors, target)
    else:
        raise _unsupported(f"{path}: no layout of draft heads that is known (Medusa, EAGLE, EAGLE-3, MTP, speculators)")
    tensors.check_all_taken()
    return heads


# Files


def _read_config(path: str) -> dict[str, Any]:
    found = _find(path, "config.json")
    if found is None:
        raise NotFound("MODEL_UNKNOWN", f"no draft heads can be loaded from {path!r}: there is no config.json")
    config: dict[str, Any] = json.loads(Path(found).read_text())
    return config


def _read_weights(path: str) -> dict[str, Tensor]:
    for name in FILES:
        found = _find(path, name)
        if found is None:
            continue
        if not name.endswith(".json"):
            return _read_file(found)
        shards = sorted(set(json.loads(Path(found).read_text())["weight_map"].values()))
        missing = [shard for shard in shards if _find(path, shard) is None]
        if missing:
            raise NotFound("MODEL_UNKNOWN", f"no draft heads can be loaded from {path!r}: {missing[0]} is missing")
        return {k: v for shard in shards for k, v in _read_file(str(_find(path, shard))).items()}
    raise NotFound("MODEL_UNKNOWN", f"no draft heads can be loaded from {path!r}: there is none of {', '.join(FILES)}")


def _find(path: str, name: str) -> str | None:
    try:
        found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise NotFound("MODEL_UNKNOWN", f"no draft heads can be loaded from {path!r}: {error}") from error
    return found


def _read_file(file: str) -> dict[str, Tensor]:
    if file.endswith(".safetensors"):
        return load_file(file)
    state: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return state


# Tensors


class _Tensors:
    """Tensors by name, each taken once and with the shape that it must have."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._left = {name: t for name, t in tensors.items() if not name.endswith(IGNORED_ENDINGS)}
        self._device, self._dtype = device, dtype

    def any(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._left)

    def rename(self, prefixes: Mapping[str, str]) -> None:
        """Replaces prefixes of names."""
        for old, new in prefixes.items():
            self._left = {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in self._left.items()}

    def keep(self, prefix: str) -> None:
        """Leaves out all others, and the prefix."""
        self._left = {k.removeprefix(prefix): v for k, v in self._left.items() if k.startswith(prefix)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that must be there."""
        if name not in self._left:
            raise _unsupported(f"the tensor {name} is missing")
        return tuple(self._left[name].shape)

    def raw(self, name: str) -> Tensor | None:
        """As it is in the file."""
        return self._left.pop(name, None)

    def take(self, name: str, *shape: int) -> Tensor:
        if self.shape(name) != shape:
            raise _unsupported(f"the tensor {name} is {list(self.shape(name))}, the configuration says {list(shape)}")
        return self._left.pop(name).to(self._device, self._dtype)

    def maybe(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if name in self._left else None

    def affine(self, name: str, out_size: int, in_size: int) -> Affine:
        """With a bias if there is one."""
        return Affine(self.take(f"{name}.weight", out_size, in_size), self.maybe(f"{name}.bias", out_size))

    def check_all_taken(self) -> None:
        if self._left:
            raise _unsupported(f"{len(self._left)} tensors have no place in this layout: {', '.join(_few(self._left))}")


def _few(names: Iterable[str]) -> list[str]:
    listed = sorted(names)
    return listed[:4] + ["..."] * (len(listed) > 4)


# Medusa


def _medusa(config: Mapping[str, Any], tensors: _Tensors, target: TargetShape) -> MedusaHeads:
    tensors.rename({"medusa_head.": "", "medusa_heads.": ""})
    blocks, size = _number(config, "medusa_num_layers", default=1), target.hidden_size
    heads: list[MedusaHead] = []
    while tensors.any(f"{len(heads)}."):
        name = str(len(heads))
        heads.append(
            MedusaHead(
                tuple(tensors.affine(f"{name}.{block}.linear", size, size) for block in range(blocks)),
                tensors.maybe(f"{name}.{blocks}.weight", target.vocab_size, size),
            )
        )
    said = _number(config, "medusa_num_heads")
    if len(heads) < said:
        raise _unsupported(f"medusa_num_heads is {said}, but there are tensors of {len(heads)} heads")
    return MedusaHeads((FINAL_NORM,), tuple(heads))


# EAGLE


def _eagle(config: Mapping[str, Any], tensors: _Tensors, target: TargetShape) -> EagleHead:
    shape = _shape(config, target)
    size = int(shape.hidden_size)
    if size != target.hidden_size:
        raise _unsupported(f"hidden_size is {size}, the target's is {target.hidden_size}")
    return EagleHead(
        config=shape,
        taps=(FINAL_NORM,),
        embedding=tensors.maybe("embed_tokens.weight", target.vocab_size, size),
        embedding_norm=None,
        feature_norm=None,
        fuse_norm=None,
        fuse=None,
        fc=tensors.affine("fc", size, 2 * size),
        layers=_layers(shape, tensors, size),
        norm=tensors.maybe("norm.weight", size),
        lm_head=tensors.maybe("lm_head.weight", target.vocab_size, size),
        target_ids=None,
    )


def _eagle3(
    config: Mapping[str, Any],
    layer_config: Mapping[str, Any],
    tensors: _Tensors,
    target: TargetShape,
    taps: tuple[int, ...],
) -> EagleHead:
    """``config`` has what concerns the heads, ``layer_config`` the sizes of the layers."""
    tensors.rename({"midlayer.": "layers.0."})
    shape = _shape(layer_config, target)
    size, features = int(shape.hidden_size), len(taps) * target.hidden_size
    _check_taps(taps, target)
    said = config.get("target_hidden_size") or target.hidden_size
    if said != target.hidden_size:
        raise _unsupported(f"target_hidden_size is {said}, the target's is {target.hidden_size}")
    embedding = tensors.maybe("embed_tokens.weight", target.vocab_size, size)
    target_ids, order = _target_ids(config, tensors, target)
    tokens = target.vocab_size if target_ids is None else len(target_ids)
    lm_head = tensors.maybe("lm_head.weight", tokens, size)
    if size != target.hidden_size and (embedding is None or lm_head is None):
        why = "embed_tokens and lm_head cannot be the target's"
        raise _unsupported(f"hidden_size is {size}, the target's is {target.hidden_size}: {why}")
    fuse_norm = None
    if config.get("norm_before_fc"):
        fuse_norm = tensors.take("input_norm.weight", features)[None]
    if config.get("fc_norm"):
        norms = [tensors.take(f"fc_norm.{k}.weight", target.hidden_size) for k in range(len(taps))]
        fuse_norm = torch.stack(norms)
    return EagleHead(
        config=shape,
        taps=taps,
        embedding=embedding,
        embedding_norm=tensors.take("layers.0.input_layernorm.weight", size),
        feature_norm=tensors.take("layers.0.hidden_norm.weight", size),
        fuse_norm=fuse_norm,
        fuse=tensors.affine("fc", size, features),
        fc=None,
        layers=_layers(shape, tensors, 2 * size),
        norm=tensors.take("norm.weight", size),
        lm_head=lm_head if lm_head is None or order is None else lm_head[order.to(lm_head.device)],
        target_ids=target_ids,
        residual_normed=bool(config.get("norm_before_residual", False)),
        hands_down_normed=bool(config.get("norm_output", False)),
    )


def _mtp(config: Mapping[str, Any], tensors: _Tensors, target: TargetShape) -> EagleHead:
    """The first module; the rest of the checkpoint is the target's."""
    tensors.keep(MTP_MODULE)
    tensors.rename({"self_attn.": "layers.0.self_attn.", "mlp.": "layers.0.mlp."})
    tensors.rename({f"{name}_layernorm.": f"layers.0.{name}_layernorm." for name in ("input", "post_attention")})
    shape, size = _shape({**config, "model_type": "qwen2", "num_hidden_layers": 1}, target), target.hidden_size
    project = tensors.affine("input_proj", size, 2 * size)
    return EagleHead(
        config=shape,
        taps=(FINAL_NORM,),
        embedding=None,
        embedding_norm=tensors.take("token_layernorm.weight", size),
        feature_norm=tensors.take("hidden_layernorm.weight", size),
        fuse_norm=None,
        fuse=None,
        fc=Affine(project.weight.roll(size, 1), project.bias),  # the embedding first
        layers=_layers(shape, tensors, size),
        norm=tensors.take("final_layernorm.weight", size),
        lm_head=None,
        target_ids=None,
        hands_down_normed=True,
    )


def _speculators(kind: Any, config: Mapping[str, Any], tensors: _Tensors, target: TargetShape) -> EagleHead:
    layer_config = config.get("transformer_layer_config")
    if kind not in ("eagle", "eagle3") or not isinstance(layer_config, Mapping):
        raise _unsupported(
            f'speculators_model_type is {kind!r}: "eagle" and "eagle3", with a transformer_layer_config, can be loaded'
        )
    if kind == "eagle":
        if config.get("layernorms"):
            raise _unsupported("layernorms is true: the layout does not say what is handed down past the last norm")
        tensors.rename(SPECULATORS_NAMES)
        return _eagle(layer_config, tensors, target)
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    return _eagle3(config, layer_config, tensors, target, _default_taps(target) if taps is None else tuple(taps))


def _default_taps(target: TargetShape) -> tuple[int, ...]:
    return (2, target.layers // 2, target.layers - 3)


def _eagle3_taps(config: Mapping[str, Any], target: TargetShape) -> tuple[int, ...]:
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return _default_taps(target) if ids is None else tuple(k + 1 for k in ids)


def _check_taps(taps: Sequence[Any], target: TargetShape) -> None:
    if not taps or not all(isinstance(k, int) and 0 <= k <= target.layers for k in taps):
        raise _unsupported(f"features behind {list(taps)} layers are asked for, the target has {target.layers}")


def _target_ids(
    config: Mapping[str, Any], tensors: _Tensors, target: TargetShape
) -> tuple[NDArray[np.int64] | None, Tensor | None]:
    """The target's ids of the draft's tokens, ascending, and the draft's order of them if that was another."""
    count = _number(config, "draft_vocab_size", default=target.vocab_size)
    offsets, marks = tensors.raw("d2t"), tensors.raw("t2d")
    if offsets is None:
        if count != target.vocab_size:
            raise _unsupported(
                f"draft_vocab_size is {count}, the target has {target.vocab_size} tokens: d2t is missing"
            )
        return None, None
    if tuple(offsets.shape) != (count,):
        raise _unsupported(f"the tensor d2t is {list(offsets.shape)}, draft_vocab_size is {count}")
    ids = torch.arange(count) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(set(ids.tolist())) < count:
        raise _unsupported(f"d2t does not lead to {count} different ones of the target's {target.vocab_size} tokens")
    if marks is not None:
        meant = torch.zeros(target.vocab_size, dtype=torch.bool)
        meant[ids] = True
        if tuple(marks.shape) != tuple(meant.shape) or not torch.equal(marks.bool(), meant):
            raise _unsupported("t2d marks other tokens than those that d2t leads to")
    order = ids.argsort()
    return ids[order].numpy(), order


# Layers


def _shape(config: Mapping[str, Any], target: TargetShape) -> Any:
    """The layers' configuration, as transformers has it."""
    kind = config.get("model_type", "llama")
    if kind not in LAYER_TYPES:
        raise _unsupported(f"model_type is {kind!r}: layers of {', '.join(LAYER_TYPES)} can be loaded")
    for field in ("hidden_size", "intermediate_size", "num_attention_heads"):
        _number(config, field)
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported(f"hidden_act is {config['hidden_act']!r}: silu is known")
    if config.get("vocab_size", target.vocab_size) != target.vocab_size:
        raise _unsupported(f"vocab_size is {config['vocab_size']}, the target's is {target.vocab_size}")
    fields = {name: config[name] for name in SHAPE_FIELDS if config.get(name) is not None}
    try:
        return AutoConfig.for_model(kind, **{"num_hidden_layers": 1, "vocab_size": target.vocab_size} | fields)
    except (TypeError, ValueError, KeyError) as error:
        raise _unsupported(f"the configuration of the layers cannot be read: {error}") from error


def _number(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field, default)
    if not isinstance(value, int) or value < 1:
        raise _unsupported(f"{field} is {value!r}, it must be a whole number of at least 1")
    return value


def _layers(shape: Any, tensors: _Tensors, first_in: int) -> tuple[Layer, ...]:
    """All layers; query, key and value of the first take ``first_in`` numbers."""
    return tuple(
        _layer(shape, tensors, f"layers.{k}", int(shape.hidden_size) if k else first_in, first=not k)
        for k in range(int(shape.num_hidden_layers))
    )


def _layer(shape: Any, tensors: _Tensors, name: str, in_size: int, *, first: bool) -> Layer:
    size, inner, heads = int(shape.hidden_size), int(shape.intermediate_size), int(shape.num_attention_heads)
    dim = int(getattr(shape, "head_dim", None) or size // heads)
    kv_heads = int(getattr(shape, "num_key_value_heads", None) or heads)
    if heads % kv_heads:
        raise _unsupported(f"num_attention_heads is {heads}, no multiple of num_key_value_heads {kv_heads}")
    attention, input_norm = f"{name}.self_attn", f"{name}.input_layernorm.weight"
    return Layer(
        input_norm=tensors.maybe(input_norm, size) if first else tensors.take(input_norm, size),
        query=tensors.affine(f"{attention}.q_proj", heads * dim, in_size),
        key=tensors.affine(f"{attention}.k_proj", kv_heads * dim, in_size),
        value=tensors.affine(f"{attention}.v_proj", kv_heads * dim, in_size),
        query_norm=tensors.maybe(f"{attention}.q_norm.weight", dim),
        key_norm=tensors.maybe(f"{attention}.k_norm.weight", dim),
        out=tensors.affine(f"{attention}.o_proj", size, heads * dim),
        mlp_norm=tensors.take(f"{name}.post_attention_layernorm.weight", size),
        gate=tensors.affine(f"{name}.mlp.gate_proj", inner, size),
        up=tensors.affine(f"{name}.mlp.up_proj", inner, size),
        down=tensors.affine(f"{name}.mlp.down_proj", size, inner),
    )


def _unsupported(why: str) -> FailedPrecondition:
    return FailedPrecondition("MODEL_UNSUPPORTED", f"draft heads: {why}")
