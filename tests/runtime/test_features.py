"""Features against the hidden states of transformers' own modules, through chunks, trees and moves."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from forwards import VOCAB
from test_decoder import LEFT, MODELS, ON_GPU, TINY, lively
from torch import Tensor

from draftwood.errors import InvalidArgument
from draftwood.features import FINAL, FeatureRequest
from draftwood.runtime.batch import Rows
from draftwood.runtime.decoder import FusedDecoder
from draftwood.runtime.model import ModelRuntime

PAGE = 16
LAYERS = (2, FINAL, 1)
KINDS: dict[str, dict[str, Any]] = {name: MODELS[name] for name in ("llama", "qwen3")} | {"left": LEFT["other family"]}
TEXT = np.random.default_rng(2).integers(0, VOCAB, 40).astype(np.int32)


def chain(pages: list[int], first: int, token: np.ndarray, wanted: bool) -> Rows:
    at = np.arange(first, first + len(token), dtype=np.int32)
    return Rows(pages, first, token, at, np.tri(len(token), dtype=np.bool_), len(token) - wanted)


def tree(pages: list[int], first: int, token: np.ndarray) -> Rows:
    """An anchor, a wrong child of it, and a chain of right ones below the anchor."""
    depth = np.array([0, 1, *range(1, len(token))], np.int32)
    visible = np.tri(len(token) + 1, dtype=np.bool_)
    visible[2:, 1] = False
    return Rows(pages, first, np.insert(token, 1, token[1] ^ 1), first + depth, visible)


def as_numbers(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).double()


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float64), ("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=ON_GPU)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_hidden_states_of_the_committed_text(kind: str, device: str, dtype: torch.dtype) -> None:
    model = lively(KINDS[kind] | {"num_hidden_layers": 3}, dtype, torch.device(device))
    config = copy.deepcopy(model.config)
    dense = type(model)._from_config(config, dtype=dtype, attn_implementation="eager").to(device).eval()
    dense.load_state_dict(model.state_dict())
    runtime = ModelRuntime(model, kv_pages=8, page_tokens=PAGE, features=LAYERS)
    assert isinstance(runtime.decoder, FusedDecoder) == (kind != "left")
    pages = runtime.pool.take(60)
    runtime.forward([chain(pages, 0, TEXT[:21], wanted=False)])
    runtime.forward([chain(pages, 21, TEXT[21:30], wanted=True)])
    runtime.forward([tree(pages, 30, TEXT[30:36])])
    runtime.move([(pages, [32, 33, 34, 35, 36], [31, 32, 33, 34, 35])])
    runtime.forward([chain(pages, 36, TEXT[36:], wanted=True)])
    early, late = runtime.read_features([(pages, 0, 7), (pages, 7, 40)])
    assert early.shape == (7, 3, 64) and late.shape == (33, 3, 64)
    with torch.inference_mode():
        inputs = torch.from_numpy(TEXT[None].astype(np.int64)).to(device)
        states = dense(inputs, output_hidden_states=True, use_cache=False).hidden_states
    got = as_numbers(np.concatenate([early, late]))
    error = 0.1 if dtype == torch.bfloat16 else 2**-7
    for k, layer in enumerate(LAYERS):
        want = states[-1 if layer == FINAL else layer][0].double().cpu()
        torch.testing.assert_close(got[:, k], want, rtol=error, atol=error * float(want.std()))
        assert want.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_what_is_kept(kind: str) -> None:
    logits = []
    for features in ((), (FINAL,), (1,)):
        model = lively(KINDS[kind] | {"num_hidden_layers": 3}, torch.float32)
        runtime = ModelRuntime(model, kv_pages=8, page_tokens=PAGE, features=features)
        assert (runtime.features is None) == (not features)
        logits.append(runtime.forward([tree(runtime.pool.take(40), 0, TEXT[:8])]).clone())
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("layers", [[2], [FINAL, -1], [1, 1]])
def test_layers_that_the_model_has_not_are_refused(layers: list[int]) -> None:
    assert TINY["num_hidden_layers"] == 2
    with pytest.raises(InvalidArgument, match=r"from 0 [(]final[)] to 1") as caught:
        ModelRuntime(lively({}, torch.float32), kv_pages=4, page_tokens=PAGE, features=layers)
    assert (caught.value.reason, caught.value.field) == ("CONFIG", "features")


def test_a_request_knows_its_size_and_its_bytes() -> None:
    request = FeatureRequest((1, 2, FINAL), 4)
    assert request.position_bytes == 3 * 4 * 2
    states = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    assert np.array_equal(request.decode(states.tobytes()), states)
    with pytest.raises(ValueError, match="reshape"):
        request.decode(b"\0" * 26)
