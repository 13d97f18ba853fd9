"""From the rows that sessions want computed to the flat tensors of one forward.

All integers of a forward lie in one int32 buffer, field behind field, so that they reach the device in one copy; the
tensors of the forward are views of it. ``Shape`` gives the sizes of the fields and so their places: the same shape has
the same places, which is what lets a captured graph read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.kernels.tree_attention import AttentionBatch
from draftwood.parameters import SamplingParams
from draftwood.tree import BoolArray, IntArray

Indices = NDArray[np.int64]

WORD_BITS = 32
LEAST_HEAT = float(np.finfo(np.float32).tiny)
"""Temperatures between 0, which is greedy, and this one count as this one."""

_ALIGN = 4
"""Fields start at multiples of so many int32: kernels are compiled for pointers that are multiples of 16 bytes."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One session's part of a forward: n query rows, written to the slots behind its prefix and tail.

    ``context`` tokens of the cache are seen by every row. ``visible`` says what each row sees of the tail: the slots
    that earlier forwards filled and this forward's own rows, in slot order. Row k is written to slot
    ``visible.shape[1] - n + k + context``.
    """

    pages: Sequence[int]  # page ids of the session, in slot order
    context: int  # tokens
    token: IntArray  # [n]
    tail_position: IntArray  # [tail + n], positions of all tail slots, this forward's rows last
    visible: BoolArray  # [n, tail + n]
    logits_from: int = 0  # logits are wanted of the rows from here on
    spare: int = 0  # slots behind the last row's for which there are mask words and pages, too


@dataclass(frozen=True, slots=True)
class ChoiceRows:
    """What the choice of a token at each wanted row depends on."""

    temperature: Tensor  # float64 [wanted], 0 is greedy
    seed: Tensor  # int64 [wanted], the bits of a uint64
    position: Tensor  # int64 [wanted], position of the token that is chosen


@dataclass(frozen=True, slots=True)
class Forward:
    """The tensors of one forward, padding rows last."""

    input_ids: Tensor  # int64 [rows]
    attention: AttentionBatch
    logits_rows: Tensor  # int64 [wanted]
    choice: ChoiceRows


@dataclass(frozen=True, slots=True)
class Padding:
    """Rows are filled up to a multiple of ``multiple``; the fill writes its keys and values to ``page_id``."""

    multiple: int
    page_id: int

    def missing(self, count: int) -> int:
        """Rows to add; none to a single one, whose products are of another kind."""
        return -count % self.multiple if count > 1 else 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a forward's fields: just large enough, or a bucket that smaller forwards are padded to."""

    rows: int
    requests: int
    words: int  # mask words of a row
    columns: int  # of the block table
    wanted: int  # rows whose logits are computed

    @property
    def ints(self) -> int:
        """Size of the whole buffer, int32."""
        return _layout(self)[-1].end


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    dtype: str
    dims: tuple[int, ...]
    begin: int  # in int32
    end: int


@lru_cache(maxsize=256)
def _layout(shape: Shape) -> tuple[_Field, ...]:
    """The block table comes last: of its rows, only those in use need to be copied."""
    row, want, request = (shape.rows,), (shape.wanted,), (shape.requests,)
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_ids": ("int64", row),
        "page_id": ("int64", row),
        "page_offset": ("int64", row),
        "logits_rows": ("int64", want),
        "seed": ("int64", want),
        "chosen_position": ("int64", want),
        "temperature": ("float64", want),
        "row_start": ("int32", (shape.requests + 1,)),
        "context": ("int32", request),
        "keys": ("int32", request),
        "position": ("int32", row),
        "words": ("int32", (shape.rows, shape.words)),
        "tail_position": ("int32", (shape.requests, WORD_BITS * shape.words)),
        "block_table": ("int32", (shape.requests, shape.columns)),
    }
    fields, begin = [], 0
    for name, (dtype, dims) in sizes.items():
        end = begin + int(np.prod(dims)) * np.dtype(dtype).itemsize // 4
        fields.append(_Field(name, dtype, dims, begin, end))
        begin = end + -end % _ALIGN
    return tuple(fields)


@dataclass(frozen=True, slots=True)
class HostArrays:
    """The fields of a forward as writable views of a buffer on the host; what they mean is said at ``Forward``."""

    input_ids: Indices
    page_id: Indices
    page_offset: Indices
    logits_rows: Indices
    seed: Indices
    chosen_position: Indices
    temperature: NDArray[np.float64]
    row_start: IntArray
    context: IntArray
    keys: IntArray
    position: IntArray
    words: IntArray
    tail_position: IntArray
    block_table: IntArray


def host_arrays(buffer: NDArray[np.int32], shape: Shape) -> HostArrays:
    """Views of the start of ``buffer``."""
    fields: dict[str, Any] = {f.name: buffer[f.begin : f.end].view(f.dtype).reshape(f.dims) for f in _layout(shape)}
    return HostArrays(**fields)


def forward_tensors(buffer: Tensor, shape: Shape) -> Forward:
    """Views of the start of ``buffer``, int32."""
    t = {f.name: buffer[f.begin : f.end].view(getattr(torch, f.dtype)).view(f.dims) for f in _layout(shape)}
    attention = AttentionBatch(
        row_start=t["row_start"],
        context=t["context"],
        keys=t["keys"],
        words=t["words"],
        block_table=t["block_table"],
        position=t["position"],
        tail_position=t["tail_position"],
        page_id=t["page_id"],
        page_offset=t["page_offset"],
    )
    choice = ChoiceRows(t["temperature"], t["seed"], t["chosen_position"])
    return Forward(t["input_ids"], attention, t["logits_rows"], choice)


class Ragged:
    """The parts of one forward, counted.

    Small arrays cost by the call and not by the element, so numbers of a request are gathered in Python.
    """

    def __init__(self, parts: Sequence[Rows], page: int) -> None:
        """``page`` is the cache's page size in tokens."""
        self.parts = parts
        self.page = page
        counts = [len(part.token) for part in parts]
        self.keys = [part.context + part.visible.shape[1] for part in parts]
        self.reserved = [keys + part.spare for keys, part in zip(self.keys, parts, strict=True)]  # tokens
        self.row_start = [0, *accumulate(counts)]
        self.rows = self.row_start[-1]
        self.owner = np.repeat(np.arange(len(parts)), counts)  # [rows]
        self.pages_used = [-(-tokens // page) for tokens in self.reserved]
        self.wanted = np.arange(self.rows)  # rows whose logits are wanted
        if any(part.logits_from for part in parts):
            first = np.array([start + part.logits_from for start, part in zip(self.row_start, parts, strict=False)])
            self.wanted = self.wanted[self.wanted >= first[self.owner]]

    def shape(self, padding: Padding | None = None) -> Shape:
        """Just large enough, but for the padding of rows and of wanted rows."""
        wanted, page = len(self.wanted), self.page
        tails = (tokens - part.context // page * page for tokens, part in zip(self.reserved, self.parts, strict=True))
        return Shape(
            rows=self.rows + (padding.missing(self.rows) if padding else 0),
            requests=len(self.parts),
            words=max(1, (max(tails) + WORD_BITS - 1) // WORD_BITS),
            columns=max(self.pages_used) + 1,  # the last is never used: it may be loaded ahead
            wanted=wanted + (padding.missing(wanted) if padding else 0),
        )

    def used_ints(self, shape: Shape) -> int:
        """How much of a buffer of ``shape`` a forward of these parts reads, int32."""
        return shape.ints - (shape.requests - len(self.parts)) * shape.columns

    def write(self, host: HostArrays, scratch_page: int, rules: Sequence[SamplingParams] = ()) -> None:
        """Fills all fields, in the order of the parts.

        Padding rows come last: token 0 at position 0, seeing nothing, written to ``scratch_page``. Padding of the
        wanted rows repeats the last one. Padding requests are empty. ``rules`` has one entry a part, or none at all.
        """
        self._write_requests(host)
        self._write_rows(host)
        self._write_words(host.words)
        self._write_wanted(host, rules)
        if self.rows < len(host.position):
            for field in (host.input_ids, host.page_offset, host.position, host.words):
                field[self.rows :] = 0
            host.page_id[self.rows :] = scratch_page

    def _write_requests(self, host: HostArrays) -> None:
        n, page = len(self.parts), self.page
        host.row_start[: n + 1], host.row_start[n + 1 :] = self.row_start, self.rows
        host.context[:n], host.context[n:] = [part.context for part in self.parts], 0
        host.keys[:n], host.keys[n:] = self.keys, 0
        # Slots of the prefix have their own index as position.
        base = np.array([[part.context // page * page] for part in self.parts])
        host.tail_position[:n] = base + np.arange(host.tail_position.shape[1])
        for r, part, used in zip(range(n), self.parts, self.pages_used, strict=True):
            if used > len(part.pages):
                raise AssertionError(f"{self.reserved[r]} tokens do not fit the session's {len(part.pages)} pages")
            host.block_table[r, :used], host.block_table[r, used:] = part.pages[:used], 0
            at = part.context % page
            host.tail_position[r, at : at + len(part.tail_position)] = part.tail_position

    def _write_rows(self, host: HostArrays) -> None:
        ahead = np.array([keys - end for keys, end in zip(self.keys, self.row_start[1:], strict=True)])
        page, offset = np.divmod(np.arange(self.rows) + ahead[self.owner], self.page)
        host.page_id[: self.rows] = host.block_table[self.owner, page]
        host.page_offset[: self.rows] = offset
        for start, end, part in zip(self.row_start, self.row_start[1:], self.parts, strict=False):
            host.input_ids[start:end] = part.token
            host.position[start:end] = part.tail_position[len(part.tail_position) - len(part.token) :]

    def _write_words(self, words: IntArray) -> None:
        """Bit j of a row's words is what it sees of slot base + j; slots of the prefix in the first page are seen."""
        bits = np.zeros((self.rows, words.shape[1] * WORD_BITS), np.bool_)
        for start, end, part in zip(self.row_start, self.row_start[1:], self.parts, strict=False):
            if at := part.context % self.page:
                bits[start:end, :at] = True
            bits[start:end, at : at + part.visible.shape[1]] = part.visible
        words[: self.rows] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    def _write_wanted(self, host: HostArrays, rules: Sequence[SamplingParams]) -> None:
        n = len(self.wanted)
        host.logits_rows[:n], host.logits_rows[n:] = self.wanted, self.wanted[-1] if n else 0
        np.add(host.position[host.logits_rows], 1, out=host.chosen_position)
        if not rules:
            return
        heats = [rule.temperature and max(rule.temperature, LEAST_HEAT) for rule in rules]
        seeds = np.array([rule.seed for rule in rules], np.uint64).view(np.int64)
        if len(rules) == 1:
            host.temperature[:], host.seed[:] = heats[0], seeds[0]
        else:
            owner = self.owner[host.logits_rows]
            host.temperature[:], host.seed[:] = np.array(heats)[owner], seeds[owner]


def assemble(
    ragged: Ragged,
    device: torch.device,
    padding: Padding,
    rules: Sequence[SamplingParams] = (),
    shape: Shape | None = None,
) -> Forward:
    """A forward in tensors of its own, no larger than it needs if no ``shape`` is given."""
    shape = shape or ragged.shape(padding)
    buffer = np.zeros(shape.ints, np.int32)
    ragged.write(host_arrays(buffer, shape), padding.page_id, rules)
    return forward_tensors(torch.from_numpy(buffer).to(device), shape)
