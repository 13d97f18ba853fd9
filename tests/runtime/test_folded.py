"""The decoder for a few rows, whose norms, sums and activations are folded into its products, against the plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forwards import VOCAB, random_parts

from draftwood.kernels import overlap
from draftwood.runtime.decoder import FusedDecoder
from draftwood.runtime.model import ModelRuntime, random_model

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB,
}  # fmt: skip
CUDA = torch.cuda.is_available()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_folded_products_give_the_same_logits_and_cache(kind: str) -> None:
    """On a CPU by the references, over weights that are not packed; qwen2 has biases."""
    model = random_model({"model_type": kind} | SHAPE, torch.device("cpu"), torch.float64)
    runtime = ModelRuntime(model, kv_pages=64, page_tokens=16)
    decoder = runtime.decoder
    assert isinstance(decoder, FusedDecoder) and not decoder._folds
    runtime.cache.normal_(generator=torch.Generator().manual_seed(0))
    start = runtime.cache.clone()
    parts = random_parts(np.random.default_rng(3), 3, 16, 4, 60)
    want, cache = runtime.forward(parts), runtime.cache.clone()
    runtime.cache.copy_(start)
    decoder._folds = True
    torch.testing.assert_close(runtime.forward(parts), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(runtime.cache, cache, rtol=1e-4, atol=1e-5)
    assert not torch.equal(runtime.cache, start)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_folded_products_are_as_near_to_float32_as_the_plain_ones(kind: str) -> None:
    shape = {"model_type": kind} | SHAPE | {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
    low, wide = (random_model(shape, torch.device("cuda"), t) for t in (torch.bfloat16, torch.float32))
    wide.load_state_dict({name: value.float() for name, value in low.state_dict().items()})
    runtimes = [ModelRuntime(model, kv_pages=64, page_tokens=16, graphs=False) for model in (low, wide)]
    runtimes[0].cache.normal_(generator=torch.Generator(device="cuda").manual_seed(0))
    runtimes[1].cache.copy_(runtimes[0].cache)
    parts = random_parts(np.random.default_rng(3), 3, 16, 4, 60)
    want, folded = runtimes[1].forward(parts), runtimes[0].forward(parts).float()
    decoder = runtimes[0].decoder
    assert isinstance(decoder, FusedDecoder) and decoder._folds
    decoder._folds = False
    plain = runtimes[0].forward(parts).float()
    assert not torch.equal(folded, plain), "the products were not folded"
    assert (folded - want).norm() < 1.3 * (plain - want).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("requests", "rows"), [(1, 1), (1, 8), (3, 5), (1, 16), (2, 16), (4, 16)])
def test_kernels_that_start_early_change_no_bit(
    kind: str, requests: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty forwards by graph, issued one behind the other: whatever kernels read before those before them have ended
    must not be theirs. With weights that are loaded ahead (small) and with some that are not (wide)."""
    for size in (512, 2048):
        found = {}
        for early in (True, False):
            monkeypatch.setattr(overlap, "_is_hopper", lambda device, early=early: early)
            shape = {"model_type": kind} | SHAPE | {"hidden_size": size, "intermediate_size": 3 * size, "head_dim": 64}
            model = random_model(shape | {"num_hidden_layers": 8}, torch.device("cuda"), torch.bfloat16)
            runtime = ModelRuntime(model, kv_pages=64, page_tokens=64, longest_tokens=2048)
            assert isinstance(runtime.decoder, FusedDecoder) and runtime.decoder._folds
            runtime.cache.normal_(generator=torch.Generator(device="cuda").manual_seed(0))
            rng = np.random.default_rng(requests + rows)
            logits = [runtime.forward(random_parts(rng, requests, 64, rows, 700)).clone() for _ in range(40)]
            found[early] = [*logits, runtime.cache[:, :, :64].clone()]
        assert all(map(torch.equal, found[True], found[False]))
