"""Any Hugging Face causal LM with our paged tree attention in place of its own.

Models that skip transformers' attention interface in silence are found by a probe forward that counts the calls, and
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftwood.errors import FailedPrecondition, InvalidArgument, NotFound
from draftwood.features import FINAL, Features
from draftwood.kernels.children import top_children_triton
from draftwood.kernels.commit import commit_kv
from draftwood.kernels.frontier import DrawShape, next_frontier
from draftwood.kernels.sampling import choose_tokens
from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import Forward, Padding, Ragged, Rows, assemble
from draftwood.runtime.decoder import ATTENTION, FeatureStore, HfDecoder, computes_in_bfloat16, make_decoder
from draftwood.runtime.draws import MOST_FIRSTS, Draw, Drawn, DrawStaging, first_rows
from draftwood.runtime.graphs import COMMON, NOTHING, Computed, Picks, StepGraphs, bucket_of
from draftwood.runtime.pages import PagePool
from draftwood.runtime.reduced import ReducedVocabulary
from draftwood.sampling import first_children


def resolve_device(name: str) -> torch.device:
    """ "auto" is the first CUDA GPU if there is one, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device, *, guesses: bool = False) -> torch.dtype:
    """ "auto" is float32 on the CPU and bfloat16 on a GPU.

    A model that only ``guesses`` is bfloat16 on a CPU that computes in it, too: half the bytes. Others emulate it, and
    a level of 8 rows takes twice as long as in float32.
    """
    if name == "auto":
        half = device.type != "cpu" or (guesses and computes_in_bfloat16())
        return torch.bfloat16 if half else torch.float32
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
    """A model with random weights of the given shape, made where it will live; for tests and for measuring."""
    torch.manual_seed(seed)
    shape = AutoConfig.for_model(**config)
    with device:
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation=ATTENTION)
    return model.to(device).eval()


def top_children(logits: Tensor, branch: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, and their log-probabilities, where the logits live: the kernel on CUDA,
    ``first_children`` elsewhere. See either."""
    return (top_children_triton if logits.is_cuda else first_children)(logits, branch)


DRAWS = (1, 2, 4, 8, 16)
"""Trees drawn at once for which a service captures graphs before it says that it is ready."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens of the wanted rows of a forward; the tensors are valid until the next one."""

    tokens: NDArray[np.int64]  # [wanted], -1 where the logits were not finite
    logprob: Tensor  # float32 [wanted], of the token under the row's distribution
    logits: Tensor  # [wanted, vocab_size]


class ModelRuntime:
    """A model, its paged KV cache ``[layers, 2, pages, kv_heads, page_tokens, head_dim]`` and its page pool.

    One thread only. A forward writes the keys and values of its rows; nothing else but ``move`` changes the cache.
    On a GPU forwards of up to 256 rows are CUDA graphs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_pages: int,
        page_tokens: int,
        longest_tokens: int | None = None,
        graphs: bool = True,
        features: Sequence[int] = (),
    ) -> None:
        """Sequences of more than ``longest_tokens`` (None: whatever fits the cache) are computed without graphs.

        ``features`` are the layers whose hidden states are kept (``draftwood.features``). Raises FailedPrecondition
        MODEL_UNSUPPORTED for a model that cannot be served, InvalidArgument CONFIG for a layer that it has not.
        """
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
        self.reduced = ReducedVocabulary.of(model.config)
        on_cpu = self.device.type == "cpu"
        self.pool = PagePool(kv_pages, page_tokens, prefer_runs=on_cpu)
        # One page more than the pool hands out: padding rows write there.
        shape = (self.layers, 2, kv_pages + 1, kv_heads, page_tokens, head_dim)
        if on_cpu:  # a head's pages side by side, so that neighbouring pages are read in place
            shape = (*shape[:2], kv_heads, kv_pages + 1, *shape[4:])
        cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.cache = cache.transpose(2, 3) if on_cpu else cache  # [layers, 2, pages, kv_heads, page, head_dim]
        self.hidden_size = int(config.hidden_size)
        self.features = self._feature_store(tuple(features))
        self.decoder = make_decoder(model, kv_pages * page_tokens)
        self.padding = Padding(self.decoder.row_multiple, kv_pages)
        self.graphs: StepGraphs | None = None
        self._draws: dict[DrawShape, DrawStaging] = {}
        self._probe()
        if graphs and self.device.type == "cuda":
            columns = min(kv_pages, self.pool.pages_for(longest_tokens or self.max_context_tokens)) + 1
            self.graphs = StepGraphs(self._compute, self.device, columns=columns, scratch_page=kv_pages)

    def _feature_store(self, layers: tuple[int, ...]) -> FeatureStore | None:
        if not layers:
            return None
        if wrong := [layer for layer in layers if not FINAL <= layer < self.layers or layers.count(layer) > 1]:
            message = f"layer {wrong[0]} of {list(layers)}: they are different ones from 0 (final) to {self.layers - 1}"
            raise InvalidArgument("CONFIG", message, field="features")
        shape = (len(layers), *self.cache.shape[2:3], self.pool.page_tokens, self.hidden_size)
        return FeatureStore(layers, torch.zeros(shape, dtype=torch.bfloat16, device=self.device))

    def _probe(self) -> None:
        """One forward that must reach our attention once a layer; also the warm-up."""
        pages = self.pool.take(2)
        rows = Rows(pages, 0, np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.tri(2, dtype=np.bool_))
        try:
            self.forward([rows])
        except (TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise self._unsupported(f"its forward failed with our attention: {error}") from error
        finally:
            self.pool.give(pages)
        if isinstance(self.decoder, HfDecoder) and sorted(self.decoder.layers_seen) != list(range(self.layers)):
            seen = len(self.decoder.layers_seen)
            raise self._unsupported(f"{seen} of its {self.layers} layers call the attention interface")

    def _unsupported(self, why: str) -> FailedPrecondition:
        return FailedPrecondition("MODEL_UNSUPPORTED", f"{self.model.config.model_type}: {why}")

    def forward(self, parts: Sequence[Rows]) -> Tensor:
        """Runs the rows of all parts and returns the wanted rows' logits, [wanted, vocab_size], parts in order.

        Does not wait for the device. The logits are valid until the next forward.
        """
        ragged = Ragged(parts, self.pool.page_tokens)
        return self._run(ragged).logits[: len(ragged.wanted)]

    def choose(self, parts: Sequence[Rows], rules: Sequence[SamplingParams], vocab_size: int) -> Chosen:
        """As ``forward``, and chooses a token at each wanted row by the part's rule; waits for the tokens.

        Of a rule, temperature and seed count; top-k and top-p are up to the caller, who has the logits. ``vocab_size``
        is the number of real tokens.
        """
        ragged = Ragged(parts, self.pool.page_tokens)
        wanted = len(ragged.wanted)
        computed = self._run(ragged, rules, Picks(vocab_size))
        assert computed.tokens is not None and computed.logprob is not None
        return Chosen(computed.tokens[:wanted].cpu().numpy(), computed.logprob[:wanted], computed.logits[:wanted])

    def children(self, parts: Sequence[Rows], vocab_size: int, branch: int) -> tuple[Tensor, Tensor]:
        """As ``forward``, and picks the likeliest tokens of each wanted row among the first ``vocab_size``.

        Tokens int64 and log-probabilities float32, [wanted, branch], as ``draftwood.kernels.children`` gives them. They
        are valid until the next forward.
        """
        ragged = Ragged(parts, self.pool.page_tokens)
        wanted = len(ragged.wanted)
        computed = self._run(ragged, picks=Picks(vocab_size, branch))
        assert computed.tokens is not None and computed.logprob is not None
        return computed.tokens[:wanted], computed.logprob[:wanted]

    def draw(self, draws: Sequence[Draw], vocab_size: int, *, branch: int, beam: int, most_levels: int) -> list[Drawn]:
        """Some levels of each tree, as ``draftwood.kernels.frontier`` picks them; waits for the device once.

        Every session's pages have room for ``beam`` rows a level behind what it has. ``most_levels`` is a limit of any
        draw's, the same from call to call: buffers and graphs are made for it.
        """
        page = self.pool.page_tokens
        ragged = Ragged([first_rows(draw, beam) for draw in draws], page)
        exact = ragged.shape()
        rounded = bucket_of(exact, exact.columns) or exact
        shape = DrawShape(rounded.requests, beam, branch, most_levels, MOST_FIRSTS, rounded.words)
        staging = self._draws.get(shape)
        if staging is None:
            staging = self._draws[shape] = DrawStaging(shape, self.device)
        side, levels = staging.write(draws, page), max(draw.levels for draw in draws)
        self._run(ragged, picks=Picks(vocab_size, branch, shape), upload=lambda: staging.upload(side), times=levels)
        return staging.read(draws, page)

    def capture(self, vocab_size: int = 0, branch: int = 0, sizes: Iterable[tuple[int, int]] = COMMON) -> None:
        """Captures graphs for forwards of (rows, requests), and compiles ``move``, before they are wanted.

        With ``vocab_size`` for ``choose``, with ``branch`` besides for ``children``, with neither for ``forward``. The
        forwards run on the scratch page.
        """
        for rows, requests in sizes if self.graphs else ():
            ends = np.arange(requests + 1) * rows // requests
            parts = [self._dummy(int(n)) for n in np.diff(ends)]
            self._run(Ragged(parts, self.pool.page_tokens), [SamplingParams()] * requests, Picks(vocab_size, branch))
        self.move([([self.padding.page_id], [0], [0])])

    def capture_draws(
        self, vocab_size: int, *, branch: int, beam: int, most_levels: int, counts: Iterable[int] = DRAWS
    ) -> None:
        """Captures graphs for ``draw`` of so many trees, before they are wanted; they run on the scratch page."""
        none, one, page = np.zeros(0, np.int32), np.zeros(1, np.int32), self.padding.page_id
        rows = Rows([page] * self.pool.pages_for(1 + 2 * beam), 1, one, one, np.ones((1, 1), np.bool_))
        seen, reach = np.zeros((0, 1), np.bool_), np.zeros(1, np.float32)
        draw = Draw(rows, reach, one, none, none, reach[:0], none > 0, seen, 0, 2, beam, 9, 9, 0.0)
        for count in counts if self.graphs else ():
            self.draw([draw] * count, vocab_size, branch=branch, beam=beam, most_levels=most_levels)

    def _dummy(self, rows: int) -> Rows:
        at = np.arange(rows, dtype=np.int32)
        pages = [self.padding.page_id] * self.pool.pages_for(rows)
        return Rows(pages, 0, np.zeros(rows, np.int32), at, np.tri(rows, dtype=np.bool_))

    @torch.inference_mode()
    def _run(
        self,
        ragged: Ragged,
        rules: Sequence[SamplingParams] = (),
        picks: Picks = NOTHING,
        upload: Callable[[], None] = lambda: None,
        times: int = 1,
    ) -> Computed:
        """By a graph if there is one for it; see ``StepGraphs.run``."""
        if self.graphs and (bucket := self.graphs.bucket(ragged.shape())):
            computed = self.graphs.run(bucket, ragged, rules, picks, upload, times)
            if computed is not None:
                return computed
        shape = replace(ragged.shape(self.padding), words=picks.draw.words) if picks.draw else None
        forward = assemble(ragged, self.device, self.padding, rules, shape)
        upload()
        for _ in range(times - 1):
            self._compute(forward, picks)
            forward = replace(forward, attention=replace(forward.attention))  # which keeps what it has worked out
        return self._compute(forward, picks)

    def _compute(self, forward: Forward, picks: Picks) -> Computed:
        logits = self.decoder(forward.input_ids, forward.attention, self.cache, forward.logits_rows, self.features)
        if not picks.vocab_size:
            return Computed(logits)
        if picks.branch:
            tokens, scores = top_children(logits[:, : picks.vocab_size], picks.branch)
            if picks.draw:
                buffers = self._draws[picks.draw].buffers
                next_frontier(
                    buffers, tokens, scores.float(), forward.input_ids, forward.attention, self.pool.page_tokens
                )
            return Computed(logits, tokens, scores)
        choice = forward.choice
        heat = choice.temperature.to(torch.promote_types(logits.dtype, torch.float32))
        return Computed(logits, *choose_tokens(logits, heat, choice.seed, choice.position, picks.vocab_size))

    @torch.inference_mode()
    def read_features(self, spans: Sequence[tuple[Sequence[int], int, int]]) -> list[Features]:
        """Features of the slots [first, end) of each (pages, first, end), of all layers kept; waits for the device."""
        assert self.features is not None
        slots = [np.arange(first, end) for _, first, end in spans]
        flat = [self._flat(pages, at) for (pages, *_), at in zip(spans, slots, strict=True)]
        index = torch.from_numpy(np.concatenate(flat)).to(self.device)
        picked = self.features.planes.flatten(1, 2)[:, index].transpose(0, 1).contiguous()
        whole = picked.view(torch.int16).cpu().numpy().view(np.uint16)
        return np.split(whole, np.cumsum([len(at) for at in slots])[:-1])

    def _flat(self, pages: Sequence[int], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the cache of a session's slots, counted over all pages."""
        page, offset = np.divmod(slots, self.pool.page_tokens)
        return np.array(pages, np.int64)[page] * self.pool.page_tokens + offset

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> None:
        """Moves keys, values and features between slots: one (pages, source slots, target slots) a session, all layers.

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
            # One buffer, one copy: sources and targets as int64, the starts as int32 behind them. An even number of
            # moves keeps all three at multiples of 16 bytes: the kernel is compiled for that once.
            if len(source) % 2:
                source.append(0)
                target.append(0)
            count, start_ints = len(source), np.array(starts + [0] * (len(starts) % 2), np.int32)
            buffer = np.concatenate([np.array(source + target, np.int64), start_ints.view(np.int64)])
            moved = torch.from_numpy(buffer).to(self.device)
            starts_there = moved[2 * count :].view(torch.int32)[: len(starts)]
            commit_kv(self.cache, moved[:count], moved[count : 2 * count], starts_there)
            if self.features:
                places = self.features.planes.flatten(1, 2)
                places[:, moved[count : count + starts[-1]]] = places[:, moved[: starts[-1]]]
