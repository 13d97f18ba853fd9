"""The small model inside a large shape, which ``benchmarks/serving/gpu.py`` serves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "serving"))

from enlarged import enlarge

CPU = torch.device("cpu")
SMALL = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 40, "vocab_size": 50, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
LARGE = {
    "model_type": "llama", "hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 12,
    "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 96, "vocab_size": 80, "tie_word_embeddings": False,
}  # fmt: skip


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    for weight in model.parameters():  # larger than at the start of a training, so that attention and norms matter
        weight.data = weight.data * 8 if weight.dim() > 1 else torch.rand_like(weight) + 0.5
    return model


@torch.no_grad()
def test_logits_are_the_small_models() -> None:
    small = small_model()
    large = enlarge(small, LARGE, CPU, torch.float32)
    large.set_attn_implementation("eager")
    ids = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(2))
    want, got = small(ids).logits, large(ids).logits
    assert got.shape == (2, 17, 80) and want.std() > 0.5
    torch.testing.assert_close(got[..., :50], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, value", [("hidden_size", 12), ("num_key_value_heads", 1), ("vocab_size", 49)])
def test_a_shape_that_is_too_small_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} {value}"):
        enlarge(small_model(), LARGE | {name: value}, CPU, torch.float32)
