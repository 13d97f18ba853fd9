"""From the rows that sessions want computed to the flat tensors of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.kernels.tree_attention import AttentionBatch
from draftwood.tree import BoolArray, IntArray, pack_words


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


@dataclass(frozen=True, slots=True)
class Forward:
    """The tensors of one forward, padding rows last."""

    input_ids: Tensor  # int64 [rows]
    attention: AttentionBatch
    logits_rows: Tensor  # int64 [wanted]


@dataclass(frozen=True, slots=True)
class Padding:
    """Rows are filled up to a multiple of ``multiple``; the fill writes its keys and values to ``page_id``."""

    multiple: int
    page_id: int

    def missing(self, count: int) -> int:
        """Rows to add; none to a single one, whose products are of another kind."""
        return -count % self.multiple if count > 1 else 0


def assemble(parts: Sequence[Rows], page: int, device: torch.device, padding: Padding) -> Forward:
    """Flattens the parts, in order; ``page`` is the cache's page size in tokens.

    Padding rows come last: token 0 at position 0, seeing nothing. Padding of the wanted rows repeats the last one.
    """
    counts = [len(part.token) for part in parts]
    keys = [part.context + part.visible.shape[1] for part in parts]
    packed = [pack_words(part.visible, part.context % page) for part in parts]
    slots = np.concatenate([np.arange(k - n, k) for k, n in zip(keys, counts, strict=True)])
    owner = np.repeat(np.arange(len(parts)), counts)
    tables = _block_table(parts, keys, page)
    starts = np.concatenate([[0], np.cumsum(counts)])
    wanted = [np.arange(s + part.logits_from, s + n) for s, part, n in zip(starts, parts, counts, strict=False)]

    def on_device(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    wanted_rows = np.concatenate(wanted)
    fill, more = padding.missing(len(slots)), padding.missing(len(wanted_rows))
    width = max(words.shape[1] for words in packed)
    words = np.concatenate([np.pad(w, ((0, 0), (0, width - w.shape[1]))) for w in packed])
    page_id = tables[owner, slots // page]
    position = np.concatenate([p.tail_position[-n:] for p, n in zip(parts, counts, strict=True)])
    attention = AttentionBatch(
        row_start=on_device(starts, torch.int32),
        context=on_device(np.array([part.context for part in parts]), torch.int32),
        keys=on_device(np.array(keys), torch.int32),
        words=on_device(np.pad(words, ((0, fill), (0, 0))), torch.int32),
        block_table=on_device(tables, torch.int32),
        position=on_device(np.pad(position, (0, fill)), torch.int32),
        tail_position=on_device(_tail_positions(parts, page, width * 32), torch.int32),
        page_id=on_device(np.pad(page_id, (0, fill), constant_values=padding.page_id), torch.int64),
        page_offset=on_device(np.pad(slots % page, (0, fill)), torch.int64),
    )
    ids = on_device(np.pad(np.concatenate([part.token for part in parts]), (0, fill)), torch.int64)
    wanted_rows = np.concatenate([wanted_rows, np.repeat(wanted_rows[-1:], more)])
    return Forward(ids, attention, on_device(wanted_rows, torch.int64))


def _block_table(parts: Sequence[Rows], keys: Sequence[int], page: int) -> NDArray[np.int32]:
    used = [-(-k // page) for k in keys]
    table = np.zeros((len(parts), max(used) + 1), np.int32)  # the last column is never used: it may be loaded ahead
    for row, (part, count) in enumerate(zip(parts, used, strict=True)):
        if count > len(part.pages):
            raise AssertionError(f"{keys[row]} tokens do not fit the session's {len(part.pages)} pages")
        table[row, :count] = part.pages[:count]
    return table


def _tail_positions(parts: Sequence[Rows], page: int, columns: int) -> NDArray[np.int32]:
    """Positions of the slots from each request's base on; slots of the prefix have their own index as position."""
    out = np.zeros((len(parts), columns), np.int32)
    for row, part in enumerate(parts):
        shift = part.context % page
        out[row, :shift] = np.arange(part.context - shift, part.context)
        out[row, shift : shift + len(part.tail_position)] = part.tail_position
    return out
