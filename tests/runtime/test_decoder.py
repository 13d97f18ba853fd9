"""The fused decoder against transformers' own modules, on every kind of model it takes and on those it must leave."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from forwards import VOCAB, random_parts
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from draftwood.errors import NotFound
from draftwood.runtime.batch import Rows
from draftwood.runtime.decoder import Decoder, FusedDecoder, HfDecoder, is_fusable, make_decoder
from draftwood.runtime.model import ModelRuntime, random_model
from draftwood.runtime.shapes import SHAPES, shape

CPU = torch.device("cpu")
PAGE, PAGES = 16, 96
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512,
}  # fmt: skip
SHORT = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": False},
    "llama-one-kv-head": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3": {
        "rope_parameters": SHORT
        | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "mistral": {"model_type": "mistral", "sliding_window": 20},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": SHORT | {"rope_type": "yarn", "factor": 4.0}},
    "qwen3": {
        "model_type": "qwen3", "head_dim": 32, "num_attention_heads": 6, "attention_bias": True,
        "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip
LEFT: dict[str, dict[str, Any]] = {
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "other activation": {"hidden_act": "gelu"},
    "other family": {"model_type": "gemma2", "head_dim": 16},
}


def lively(config: dict[str, Any], dtype: torch.dtype, device: torch.device = CPU) -> PreTrainedModel:
    """Random weights in which biases, norms and every projection matter."""
    model = random_model(TINY | config, device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
            else:
                parameter.mul_(8)
    return model


def computed(runtime: ModelRuntime, decoder: Decoder, parts: Sequence[Rows]) -> tuple[Tensor, Tensor]:
    """Logits of the wanted rows, and the cache after a forward over a random one."""
    own, runtime.decoder = runtime.decoder, decoder
    generator = torch.Generator().manual_seed(0)
    runtime.cache.copy_(torch.randn(runtime.cache.shape, generator=generator))
    logits = runtime.forward(parts).clone()
    runtime.decoder = own
    return logits, runtime.cache[:, :, :PAGES].clone()  # the last page is the padding rows' own


def runtime_of(model: PreTrainedModel) -> ModelRuntime:
    return ModelRuntime(model, kv_pages=PAGES, page_tokens=PAGE, graphs=False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("device", "dtype", "error"),
    [
        ("cpu", torch.float64, 1e-12),
        ("cpu", torch.float32, 3e-5),
        pytest.param("cuda", torch.float32, 3e-5, marks=ON_GPU),
    ],
    ids=["cpu-float64", "cpu-float32", "cuda-float32"],
)
def test_the_fused_decoder_equals_transformers(name: str, device: str, dtype: torch.dtype, error: float) -> None:
    model = lively(MODELS[name], dtype, torch.device(device))
    plain = HfDecoder(copy.deepcopy(model))
    runtime = runtime_of(model)
    assert isinstance(runtime.decoder, FusedDecoder)
    rng = np.random.default_rng(3)
    for most_rows in (1, 9, 30):
        parts = random_parts(rng, 5, PAGE, most_rows, 60)
        want, got = (computed(runtime, decoder, parts) for decoder in (plain, runtime.decoder))
        torch.testing.assert_close(got, want, rtol=error, atol=error)
    assert len(want[0]) > 5
    assert want[0].std() > 0.1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=ON_GPU),
        pytest.param("cuda", torch.float16, marks=ON_GPU),
    ],
    ids=["cpu-bfloat16", "cuda-bfloat16", "cuda-float16"],
)
def test_in_half_precision_it_is_as_near_to_float64_as_transformers(name: str, device: str, dtype: torch.dtype) -> None:
    model = lively(MODELS[name], dtype, torch.device(device))
    exact = runtime_of(copy.deepcopy(model).to("cpu").double())
    plain = HfDecoder(copy.deepcopy(model))
    runtime = runtime_of(model)
    parts = random_parts(np.random.default_rng(4), 8, PAGE, 20, 60)
    want, _ = computed(exact, exact.decoder, parts)
    other, got = (computed(runtime, decoder, parts)[0].cpu().double() - want for decoder in (plain, runtime.decoder))
    assert got.square().mean().sqrt() < 1.25 * other.square().mean().sqrt()


@pytest.mark.parametrize("why", LEFT)
def test_other_models_run_in_their_own_code(why: str) -> None:
    runtime = runtime_of(lively(LEFT[why], torch.float32))
    assert isinstance(runtime.decoder, HfDecoder)
    assert runtime.decoder.layers_seen == [0, 1]


def test_a_model_with_layers_of_another_class_is_left() -> None:
    class Quantised(nn.Linear):
        pass

    model = lively({}, torch.float32)
    assert is_fusable(model)
    model.model.layers[1].mlp.down_proj = Quantised(96, 64, bias=False)
    assert not is_fusable(model)


def test_unpacked_weights_are_views_of_ours_and_the_model_stays_whole() -> None:
    model = lively(MODELS["llama-biased"], torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    make_decoder(model, 64)
    attention = model.model.layers[0].self_attn
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert sum(storages.values()) == held
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_packed_weights_are_taken_from_the_model() -> None:
    model = lively({"tie_word_embeddings": False}, torch.float32)
    decoder = make_decoder(model, 64)
    assert isinstance(decoder, FusedDecoder)
    if decoder.row_multiple != 1:
        pytest.skip("no packed products on this machine")
    projections = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert {p.weight.numel() for p in projections} == {0}
    assert model.model.embed_tokens.weight.numel() == VOCAB * 64


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_layer_is_few_torch_calls_on_a_cpu() -> None:
    """Small models on a CPU are mostly the overhead of calls: transformers' modules make 84 of them a layer."""
    totals = []
    for layers in (2, 3):
        runtime = runtime_of(lively({"num_hidden_layers": layers}, torch.bfloat16))
        part = Rows([0], 8, np.arange(4, dtype=np.int32), np.arange(8, 12, dtype=np.int32), np.tri(4, dtype=np.bool_))
        with _Count() as count:
            runtime.forward([part])
        totals.append(count.calls.total())
    assert totals[1] - totals[0] <= 50


def test_shapes_have_the_sizes_of_their_names() -> None:
    billions = {"llama-8b": 8.03, "qwen3-0.6b": 0.596, "smollm2-135m": 0.1345}
    assert billions.keys() == SHAPES.keys()
    for name, size in billions.items():
        model = random_model(shape(name), torch.device("meta"), torch.bfloat16)
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(size, rel=2e-3)
        assert is_fusable(model)
    with pytest.raises(NotFound, match="llama-8b"):
        shape("llama-9b")
