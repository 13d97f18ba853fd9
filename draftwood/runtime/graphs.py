"""CUDA graphs of whole forwards: one per bucket, captured on first use, replayed after one copy from the host.

Words
-----
bucket   a ``Shape`` that forwards are padded to: rows, requests and mask words each rise to the next size of a short
         list. The block table has as many columns as the longest sequence needs, in all buckets.
staging  the buffer of all the integers of a forward (``draftwood.runtime.staging``), which the graphs read.

A captured forward holds no number of the forward it was captured with: all it knows of lengths it reads from the
staging buffer. The graphs share one memory pool and run on one stream, one after the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.frontier import DrawShape
from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import Forward, HostArrays, Ragged, Shape, forward_tensors, host_arrays
from draftwood.runtime.staging import Staging
from draftwood.telemetry import get_logger

log = get_logger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
REQUESTS = (1, 4, 8, 12, 16, 64, 256)
WORDS = (4, 12)
"""Mask words of a row. With pages of 64 tokens: tails of up to 65 tokens, and of up to 321."""

COMMON = tuple((rows, n) for n in REQUESTS if n <= 16 for rows in ROWS if n <= rows <= 128)
"""(rows, requests) of the forwards that a service captures before it says that it is ready."""

WARM_UPS = 2
"""Forwards before a capture: kernels are compiled and tuned, libraries get their workspaces."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What one forward computes, padding rows included. Of a graph: valid until the next forward."""

    logits: Tensor  # [wanted, vocab_size]
    tokens: Tensor | None = None  # int64 [wanted], or children [wanted, branch]; -1: none; None: none are wanted
    logprob: Tensor | None = None  # float32, as the tokens


@dataclass(frozen=True, slots=True)
class Picks:
    """What is picked from the logits behind a forward."""

    vocab_size: int = 0  # among so many tokens, the model's real ones; 0: nothing
    branch: int = 0  # the likeliest so many of each row (``draftwood.kernels.children``); 0: a token by the row's rule
    draw: DrawShape | None = None  # of children: the rows of the next level follow (``draftwood.kernels.frontier``)


NOTHING = Picks()

Compute = Callable[[Forward, Picks], Computed]


@dataclass(frozen=True, slots=True)
class _Views:
    """The staging buffers as the fields of one bucket."""

    host: tuple[HostArrays, HostArrays]
    device: Forward


class StepGraphs:
    """Runs forwards that fit a bucket. One thread, one stream."""

    def __init__(self, compute: Compute, device: torch.device, *, columns: int, scratch_page: int) -> None:
        """``columns`` of the block table, one more than the longest sequence needs; padding rows write to
        ``scratch_page``."""
        self._compute = compute
        self._columns = columns
        self._scratch_page = scratch_page
        self._device = device
        self._works = True
        self.last: torch.cuda.CUDAGraph | None = None
        """The graph of the last forward, to measure."""
        self._staging = Staging(Shape(ROWS[-1], REQUESTS[-1], WORDS[-1], columns, ROWS[-1]).ints, device)
        self._views: dict[Shape, _Views] = {}
        self._graphs: dict[tuple[Shape, Picks], tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def bucket(self, exact: Shape) -> Shape | None:
        """The bucket of a forward; None if it fits none."""
        return bucket_of(exact, self._columns) if self._works else None

    def run(
        self,
        bucket: Shape,
        ragged: Ragged,
        rules: Sequence[SamplingParams],
        picks: Picks,
        upload: Callable[[], None],
        times: int,
    ) -> Computed | None:
        """Replays the bucket's graph on new contents, without waiting for it; None if it cannot be captured.

        ``upload`` brings what else the graph reads. Of several ``times`` each goes on from what the last one left.
        """
        with torch.cuda.device(self._device):
            side = self._staging.take()
            views = self._views.get(bucket) or self._view(bucket)
            ragged.write(views.host[side], self._scratch_page, rules)
            captured = self._graphs.get((bucket, picks))
            for fresh in (True, False) if captured is None else (False,):
                self._staging.upload(side, ragged.used_ints(bucket))
                upload()
                if fresh and (captured := self._capture(bucket, views.device, picks)) is None:
                    return None
            assert captured is not None
            self.last, computed = captured
            for _ in range(times):
                self.last.replay()
            return computed

    @property
    def count(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def _view(self, bucket: Shape) -> _Views:
        first, second = (host_arrays(buffer, bucket) for buffer in self._staging.host)
        views = self._views[bucket] = _Views((first, second), forward_tensors(self._staging.device, bucket))
        return views

    def _capture(self, bucket: Shape, forward: Forward, picks: Picks) -> tuple[torch.cuda.CUDAGraph, Computed] | None:
        """Warms up on the contents at hand, which may change by it, and captures."""
        stream, graph, current = self._stream, torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._compute(forward, picks)
        current.wait_stream(stream)
        try:
            # A capture that fails leaves its stream the current one: the outer context puts that right.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                computed = self._compute(forward, picks)
        except RuntimeError as error:
            log.warning("the model's forward cannot be captured in a CUDA graph and runs without", error=str(error))
            self._works = False
            # A capture that fails leaves the random generator as if it still went on.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            return None
        captured = self._graphs[bucket, picks] = (graph, computed)
        return captured


def bucket_of(exact: Shape, columns: int) -> Shape | None:
    """The smallest bucket that a forward fits, with ``columns`` of the block table; None if there is none."""
    rows, requests, words = (
        _at_least(ROWS, exact.rows),
        _at_least(REQUESTS, exact.requests),
        _at_least(WORDS, exact.words),
    )
    if rows is None or requests is None or words is None or exact.columns > columns:
        return None
    return Shape(rows, requests, words, columns, wanted=rows)


def _at_least(sizes: Sequence[int], need: int) -> int | None:
    at = bisect_left(sizes, need)
    return sizes[at] if at < len(sizes) else None
