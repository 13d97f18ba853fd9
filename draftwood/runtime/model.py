"""Any Hugging Face causal LM with our paged tree attention in place of its own.

The model's code stays as it is: our function is registered with transformers' attention interface, position ids and
the step's metadata are passed as keyword arguments, and the model keeps no cache of its own. Models that skip the
interface in silence are found by a probe forward that counts the calls, and refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftwood.errors import FailedPrecondition, NotFound
from draftwood.kernels.commit import commit_kv
from draftwood.kernels.tree_attention import AttentionBatch, tree_attention
from draftwood.runtime.batch import Padding, Rows, assemble
from draftwood.runtime.pages import PagePool

ATTENTION = "draftwood_tree"


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


def resolve_device(name: str) -> torch.device:
    """ "auto" is the first CUDA GPU if there is one, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on the CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_model(path: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Loads a causal LM by path or hub id; raises NotFound MODEL_UNKNOWN naming it if there is none."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=ATTENTION)
    except (OSError, ValueError) as error:
        raise NotFound("MODEL_UNKNOWN", f"no causal language model can be loaded from {path!r}: {error}") from error
    return model.to(device).eval()


def random_model(config: dict[str, Any], device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model with random weights of the given shape, for tests and for measuring."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype, attn_implementation=ATTENTION)
    return model.to(device).eval()


class ModelRuntime:
    """A model, its paged KV cache ``[layers, 2, pages, kv_heads, page_tokens, head_dim]`` and its page pool.

    One thread only. A forward writes the keys and values of its rows; nothing else but ``move`` changes the cache.
    """

    def __init__(self, model: PreTrainedModel, *, kv_pages: int, page_tokens: int) -> None:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size = int(config.vocab_size)
        self.max_context_tokens = int(getattr(config, "max_position_embeddings", 1 << 30))
        self.layers = int(config.num_hidden_layers)
        self.pool = PagePool(kv_pages, page_tokens)
        # One page more than the pool hands out: padding rows write there.
        shape = (self.layers, 2, kv_pages + 1, kv_heads, page_tokens, head_dim)
        # A CPU's matrix products are up to half slower for row counts between the multiples of four.
        self.padding = Padding(4 if model.device.type == "cpu" else 1, kv_pages)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._probe()

    def _probe(self) -> None:
        """One forward that must reach our attention once a layer; also the warm-up."""
        pages = self.pool.take(2)
        rows = Rows(pages, 0, np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.tri(2, dtype=np.bool_))
        seen: list[int] = []
        try:
            self.forward([rows], seen)
        except (TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise self._unsupported(f"its forward failed with our attention: {error}") from error
        finally:
            self.pool.give(pages)
        if sorted(seen) != list(range(self.layers)):
            raise self._unsupported(f"{len(seen)} of its {self.layers} layers call the attention interface")

    def _unsupported(self, why: str) -> FailedPrecondition:
        return FailedPrecondition("MODEL_UNSUPPORTED", f"{self.model.config.model_type}: {why}")

    @torch.inference_mode()
    def forward(self, parts: Sequence[Rows], layers_seen: list[int] | None = None) -> Tensor:
        """Runs the rows of all parts and returns the wanted rows' logits, [wanted, vocab_size], parts in order."""
        batch = assemble(parts, self.pool.page_tokens, self.device, self.padding)
        wanted = sum(len(part.token) - part.logits_from for part in parts)
        step = _Step(self.cache, batch.attention, [] if layers_seen is None else layers_seen)
        out = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.attention.position[None].long(),
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            draftwood_step=step,
        )
        logits: Tensor = out.logits[0, :wanted]
        return logits

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> None:
        """Moves keys and values between slots: one (pages, source slots, target slots) a session, all layers.

        Within one session sources and targets ascend and no target is beyond its source.
        """
        page = self.pool.page_tokens
        source: list[int] = []
        target: list[int] = []
        starts = [0]
        for pages, old, new in moves:
            source.extend(pages[slot // page] * page + slot % page for slot in old)
            target.extend(pages[slot // page] * page + slot % page for slot in new)
            starts.append(len(source))
        if source:
            tensor = [torch.tensor(x, dtype=torch.int64, device=self.device) for x in (source, target)]
            commit_kv(self.cache, tensor[0], tensor[1], torch.tensor(starts, dtype=torch.int32, device=self.device))
