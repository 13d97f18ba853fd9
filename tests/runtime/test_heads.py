"""Draft heads of each published layout, against the layouts' own arithmetic written with transformers' layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_checkpoints as written
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from draftwood.errors import FailedPrecondition, NotFound
from draftwood.runtime.heads import FINAL_NORM, EagleHead, MedusaHeads, TargetShape, dense_forward
from draftwood.runtime.heads_checkpoint import load_heads

TARGET = TargetShape(hidden_size=32, layers=12, vocab_size=80)
CPU = torch.device("cpu")
ROWS = 7


def load(folder: Path, target: TargetShape = TARGET) -> MedusaHeads | EagleHead:
    return load_heads(str(folder), target, CPU, torch.float32)


def load_eagle(folder: Path, target: TargetShape = TARGET) -> EagleHead:
    head = load(folder, target)
    assert isinstance(head, EagleHead)
    return head


def own_config(config: dict[str, Any]) -> LlamaConfig:
    sizes = {k: v for k, v in config.items() if k.startswith(("num_", "hidden_size", "inter", "rms", "vocab", "rope"))}
    found = LlamaConfig(**sizes)
    found._attn_implementation = "sdpa"
    return found


def causal() -> Tensor:
    return torch.full((1, 1, ROWS, ROWS), float("-inf")).triu(1)


def state(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


class Eagle3Layer(nn.Module):
    """The layer of EAGLE-3 by transformers' parts."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.self_attn = LlamaAttention(config, 0)
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            setattr(self.self_attn, f"{name}_proj", nn.Linear(2 * size, heads * dim, bias=False))
        self.self_attn.v_proj = nn.Linear(2 * size, config.num_key_value_heads * dim, bias=False)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, hidden: Tensor, *, residual_normed: bool) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if residual_normed else hidden
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)[None]
        rotation = self.rotary(joined, torch.arange(ROWS)[None])
        hidden = residual + self.self_attn(joined, rotation, causal())[0][0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def eagle3_expected(config: dict[str, Any], tensors: dict[str, Tensor], embedded: Tensor, fused: Tensor) -> Tensor:
    shape = own_config(config.get("transformer_layer_config", config))
    layer = Eagle3Layer(shape)
    prefix = "midlayer." if any(k.startswith("midlayer.") for k in tensors) else "layers.0."
    layer.load_state_dict(state(tensors, prefix))
    return layer(embedded, fused, residual_normed=config.get("norm_before_residual", False))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


# What is loaded computes what the layout's own code does


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa(tmp_path: Path, prefix: str) -> None:
    config, tensors = written.medusa(TARGET, heads=3, blocks=2)
    written.save(tmp_path, config, {prefix + k: t for k, t in tensors.items()}, "medusa_lm_head.pt")
    heads = load(tmp_path)
    assert isinstance(heads, MedusaHeads)
    assert heads.taps == (FINAL_NORM,)
    feature = torch.randn(5, TARGET.hidden_size)
    for number, head in enumerate(heads.heads):
        x = feature
        for block in range(2):
            weight, bias = (tensors[f"{number}.{block}.linear.{part}"] for part in ("weight", "bias"))
            x = x + F.silu(x @ weight.T + bias)
        torch.testing.assert_close(head.hidden(feature), x)
        assert head.lm_head is not None
        torch.testing.assert_close(head.lm_head, tensors[f"{number}.2.weight"])


def test_medusa_may_have_more_heads_than_it_says(tmp_path: Path) -> None:
    config, tensors = written.medusa(TARGET, heads=5)
    heads = load(written.save(tmp_path, config | {"medusa_num_heads": 2}, tensors, "medusa_lm_head.pt"))
    assert isinstance(heads, MedusaHeads)
    assert len(heads.heads) == 5


@pytest.mark.parametrize("layers", [1, 2])
def test_eagle(tmp_path: Path, layers: int) -> None:
    config, tensors = written.eagle(TARGET, layers)
    head = load_eagle(written.save(tmp_path, config, tensors, "pytorch_model.bin"))
    assert head.taps == (FINAL_NORM,)
    assert head.lm_head is None
    assert head.target_ids is None
    check_eagle(head, config, tensors)


def check_eagle(head: EagleHead, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    shape = own_config(config)
    embedded, feature = torch.randn(2, ROWS, TARGET.hidden_size)
    x = F.linear(torch.cat([embedded, feature], dim=-1), tensors["fc.weight"], tensors["fc.bias"])[None]
    rotation = LlamaRotaryEmbedding(shape)(x, torch.arange(ROWS)[None])
    for number in range(config["num_hidden_layers"]):
        layer = LlamaDecoderLayer(shape, number)
        if not number:
            layer.input_layernorm = nn.Identity()
        layer.load_state_dict(state(tensors, f"layers.{number}."))
        x = layer(x, attention_mask=causal(), position_embeddings=rotation)
    read, handed_down = dense_forward(head, embedded, head.fused(feature))
    torch.testing.assert_close(read, x[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(handed_down, read)
    assert head.embedding is not None
    torch.testing.assert_close(head.embedding, tensors["embed_tokens.weight"])


def test_eagle3(tmp_path: Path) -> None:
    config, tensors = written.eagle3(TARGET, tokens=40)
    head = load_eagle(written.save(tmp_path, config, tensors))
    assert head.taps == (2, 6, 9)
    assert head.embedding is None
    check_eagle3(head, config, tensors)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    assert head.lm_head is not None
    torch.testing.assert_close(head.lm_head, tensors["lm_head.weight"])


def check_eagle3(head: EagleHead, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    features = torch.randn(ROWS, 3 * TARGET.hidden_size)
    normed = features
    if config.get("norm_before_fc"):
        normed = rms(features, tensors["input_norm.weight"])
    if config.get("fc_norm"):
        parts = features.split(TARGET.hidden_size, dim=-1)
        normed = torch.cat([rms(x, tensors[f"fc_norm.{k}.weight"]) for k, x in enumerate(parts)], dim=-1)
    fused = F.linear(normed, tensors["fc.weight"])
    torch.testing.assert_close(head.fused(features), fused)
    embedded = torch.randn(ROWS, int(head.config.hidden_size))
    y = eagle3_expected(config, tensors, embedded, fused)
    read, handed_down = dense_forward(head, embedded, fused)
    z = rms(y, tensors["norm.weight"])
    torch.testing.assert_close(read, z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(handed_down, z if config.get("norm_output") else y, rtol=1e-4, atol=1e-5)


def test_eagle3_narrower_than_the_target(tmp_path: Path) -> None:
    config, tensors = written.eagle3(TARGET, tokens=40, size=16)
    head = load_eagle(written.save(tmp_path, config, tensors))
    check_eagle3(head, config, tensors)
    assert head.embedding is not None
    torch.testing.assert_close(head.embedding, tensors["embed_tokens.weight"])


def test_eagle3_tokens_in_any_order_become_ascending(tmp_path: Path) -> None:
    config, tensors = written.eagle3(TARGET, tokens=40)
    shuffled = torch.randperm(40)
    ids = (tensors["d2t"] + torch.arange(40))[shuffled]
    changed = {"d2t": ids - torch.arange(40), "lm_head.weight": tensors["lm_head.weight"][shuffled]}
    head = load_eagle(written.save(tmp_path, config, tensors | changed))
    assert head.target_ids is not None and head.lm_head is not None
    assert head.target_ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    torch.testing.assert_close(head.lm_head, tensors["lm_head.weight"])


def test_eagle3_with_all_tokens_and_named_layers(tmp_path: Path) -> None:
    config, tensors = written.eagle3(TARGET, tokens=TARGET.vocab_size)
    del tensors["d2t"], tensors["t2d"]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 4, 11]}
    head = load_eagle(written.save(tmp_path, config, tensors))
    assert head.target_ids is None
    assert head.taps == (1, 5, 12)


def test_eagle3_without_an_lm_head_uses_the_targets(tmp_path: Path) -> None:
    config, tensors = written.eagle3(TARGET, tokens=40)
    del tensors["lm_head.weight"]
    head = load_eagle(written.save(tmp_path, config, tensors))
    assert head.lm_head is None
    assert head.target_ids is not None and len(head.target_ids) == 40


def test_speculators_eagle(tmp_path: Path) -> None:
    config, tensors = written.speculators_eagle(TARGET)
    head = load_eagle(written.save(tmp_path, config, tensors))
    assert head.taps == (FINAL_NORM,)
    check_eagle(head, *written.eagle(TARGET))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_before_residual": True},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 12]},
    ],
)
def test_speculators_eagle3(tmp_path: Path, fields: dict[str, Any]) -> None:
    config, tensors = written.speculators_eagle3(TARGET, tokens=40, **fields)
    head = load_eagle(written.save(tmp_path, config, tensors))
    assert head.taps == tuple(fields.get("eagle_aux_hidden_state_layer_ids", (2, 6, 9)))
    check_eagle3(head, config, tensors)


def test_a_layer_with_biases_and_norms_of_its_heads(tmp_path: Path) -> None:
    config, tensors = written.eagle(TARGET)
    attention = "layers.0.self_attn"
    extra = {f"{attention}.{k}_norm.weight": (8,) for k in "qk"} | {f"{attention}.q_proj.bias": (32,)}
    tensors |= written.random_weights(extra, seed=3)
    head = load_eagle(written.save(tmp_path, config | {"model_type": "qwen3", "head_dim": 8}, tensors))
    (layer,) = head.layers
    assert layer.query.bias is not None and layer.query_norm is not None and layer.key_norm is not None
    embedded, fused = torch.randn(2, ROWS, TARGET.hidden_size)
    with_norms, _ = dense_forward(head, embedded, fused)
    for name in extra:
        del tensors[name]
    without, _ = dense_forward(load_eagle(written.save(tmp_path, config, tensors)), embedded, fused)
    assert not torch.allclose(with_norms, without)


def test_weights_in_several_files(tmp_path: Path) -> None:
    config, tensors = written.eagle3(TARGET, tokens=40)
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in halves.items():
        written.save(tmp_path, config, {name: tensors[name] for name in part}, file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_eagle3(load_eagle(tmp_path), config, tensors)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(NotFound, match=r"model-2\.safetensors is missing"):
        load(tmp_path)


def test_weights_are_cast(tmp_path: Path) -> None:
    config, tensors = written.eagle3(TARGET, tokens=40)
    head = load_heads(str(written.save(tmp_path, config, tensors)), TARGET, CPU, torch.bfloat16)
    assert isinstance(head, EagleHead)
    assert head.layers[0].gate.weight.dtype == torch.bfloat16


# What does not fit is refused


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFound, match=r"there is none of model\.safetensors"):
        load(tmp_path)


Change = tuple[dict[str, Any], dict[str, tuple[int, ...] | None]]
"""Fields of the configuration, and tensors: a new shape, None: left out."""


def refused(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], change: Change) -> str:
    fields, shapes = change
    changed = tensors | {k: torch.zeros(s) for k, s in shapes.items() if s is not None}
    left = {k: t for k, t in changed.items() if shapes.get(k, ()) is not None}
    written.save(folder, config | fields, left)
    with pytest.raises(FailedPrecondition) as caught:
        load(folder)
    assert caught.value.reason == "MODEL_UNSUPPORTED"
    return caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (({"medusa_num_heads": 4}, {}), "medusa_num_heads is 4, but there are tensors of 3 heads"),
        (({"medusa_num_heads": 0}, {}), "medusa_num_heads is 0"),
        (({"medusa_num_layers": 2}, {}), "0.1.linear.weight is missing"),
        (({}, {"1.1.weight": (79, 32)}), "1.1.weight is [79, 32], the configuration says [80, 32]"),
        (({}, {"0.0.linear.weight": (32, 16)}), "0.0.linear.weight is [32, 16]"),
        (({}, {"other": (1,)}), "1 tensors have no place in this layout: other"),
    ],
)
def test_medusa_that_does_not_fit(tmp_path: Path, change: Change, message: str) -> None:
    assert message in refused(tmp_path, *written.medusa(TARGET), change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (({"hidden_size": 64}, {}), "hidden_size is 64, the target's is 32"),
        (({"vocab_size": 81}, {}), "vocab_size is 81, the target's is 80"),
        (({"hidden_act": "gelu"}, {}), "hidden_act is 'gelu'"),
        (({"model_type": "gpt2"}, {}), "model_type is 'gpt2'"),
        (({"intermediate_size": None}, {}), "intermediate_size is None"),
        (({"intermediate_size": 50}, {}), "mlp.gate_proj.weight is [48, 32], the configuration says [50, 32]"),
        (({"num_hidden_layers": 2}, {}), "layers.1.input_layernorm.weight is missing"),
        (({"num_key_value_heads": 3}, {}), "no multiple of num_key_value_heads 3"),
        (({}, {"fc.weight": (32, 96)}), "fc.weight is [32, 96]"),
        (({}, {"fc.weight": None, "fc.bias": None}), "no layout of draft heads that is known"),
        (({}, {"layers.0.mlp.up_proj.weight": None}), "layers.0.mlp.up_proj.weight is missing"),
    ],
)
def test_eagle_that_does_not_fit(tmp_path: Path, change: Change, message: str) -> None:
    assert message in refused(tmp_path, *written.eagle(TARGET), change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (({"draft_vocab_size": 41}, {}), "d2t is [40], draft_vocab_size is 41"),
        (({"draft_vocab_size": 0}, {}), "draft_vocab_size is 0"),
        (({}, {"d2t": None}), "draft_vocab_size is 40, the target has 80 tokens: d2t is missing"),
        (({}, {"t2d": (79,)}), "t2d marks other tokens"),
        (({}, {"t2d": (80,)}), "t2d marks other tokens"),
        (({}, {"lm_head.weight": (80, 32)}), "lm_head.weight is [80, 32], the configuration says [40, 32]"),
        (({"target_hidden_size": 48}, {}), "target_hidden_size is 48, the target's is 32"),
        (({"norm_before_fc": True}, {}), "input_norm.weight is missing"),
        (({}, {"fc.weight": (32, 64)}), "fc.weight is [32, 64], the configuration says [32, 96]"),
        (({}, {"midlayer.hidden_norm.weight": None}), "layers.0.hidden_norm.weight is missing"),
        (({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 12]}}, {}), "behind [2, 6, 13] layers"),
    ],
)
def test_eagle3_that_does_not_fit(tmp_path: Path, change: Change, message: str) -> None:
    assert message in refused(tmp_path, *written.eagle3(TARGET, tokens=40), change)


@pytest.mark.parametrize("ids", [[0, 0], [-1, 1], [0, 80]])
def test_tokens_that_the_target_lacks(tmp_path: Path, ids: list[int]) -> None:
    config, tensors = written.eagle3(TARGET, tokens=2)
    tensors["d2t"] = torch.tensor(ids) - torch.arange(2)
    assert "d2t does not lead to 2 different ones" in refused(tmp_path, config, tensors, ({}, {}))


def test_narrow_heads_need_an_embedding_of_their_own(tmp_path: Path) -> None:
    config, tensors = written.eagle3(TARGET, tokens=40, size=16)
    message = refused(tmp_path, config, tensors, ({}, {"embed_tokens.weight": None}))
    assert "embed_tokens and lm_head cannot be the target's" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "mlp"}, "speculators_model_type is 'mlp'"),
        ({"speculators_model_type": None}, "speculators_model_type is None"),
        ({"transformer_layer_config": None}, "with a transformer_layer_config"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 13]}, "behind [0, 3, 13] layers are asked for, the target has 12"),
        ({"eagle_aux_hidden_state_layer_ids": []}, "behind [] layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight is [32, 96], the configuration says [32, 64]"),
    ],
)
def test_speculators_that_do_not_fit(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path, *written.speculators_eagle3(TARGET, tokens=40), (fields, {}))


def test_speculators_eagle_with_further_norms(tmp_path: Path) -> None:
    assert "layernorms is true" in refused(tmp_path, *written.speculators_eagle(TARGET), ({"layernorms": True}, {}))
