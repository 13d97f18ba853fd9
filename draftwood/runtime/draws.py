"""Several levels of a draft's trees in one go: what the host writes before the first level and reads after the last.

Words
-----
draw   some levels of one tree, each a forward of ``beam`` rows over the cache. The host gives the rows of the first
       level and what it knows of the tree; the device picks the rows of all others (``draftwood.kernels.frontier``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.kernels.frontier import (
    AMONG,
    ANCHOR,
    BEAM,
    BEFORE,
    LEVELS,
    ROOM,
    TAIL,
    DrawBuffers,
    DrawShape,
    drawn_fields,
    given_fields,
)
from draftwood.runtime.batch import Rows
from draftwood.runtime.staging import Staging
from draftwood.tree import BoolArray, IntArray, pack_words

MOST_FIRSTS = 64
"""Likeliest nodes of a tree that a draw knows of: more than are among the best of a budget matters to none."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One tree before some levels are drawn. Arrays of n have an entry for each row of the first level, arrays of m
    for the likeliest nodes of the tree but the anchor, those rows' own among them."""

    rows: Rows  # of the first level, at least 1; their context has a token at least
    row_reach: NDArray[np.float32]  # [n], log survival; -inf: the row's children do not count
    row_depth: IntArray  # [n]
    token: IntArray  # [m], as the model knows them
    depth: IntArray  # [m]
    reach: NDArray[np.float32]  # [m]
    unexpanded: BoolArray  # [m]
    seen: BoolArray  # [m, tail + n], what the row of a node's parent sees of the tail
    anchor: int  # its position
    levels: int
    beam: int  # nodes of a level at most
    room: int  # depth that an expanded node may not have
    among: int  # likeliest nodes that it must be among, the anchor counted
    least: float  # survival of a level's nodes together at least
    before: int = 0  # levels of the round once the first one is done
    level_share: float = 0.0  # time of a level by that of the verifier's turn; 0: what it brings for it does not matter


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came of a draw. Candidate c is node c of the given ones, or the child c - ``MOST_FIRSTS`` of the rows."""

    token: NDArray[np.int32]  # [levels, beam, branch], children; -1: none
    score: NDArray[np.float32]  # [levels, beam, branch]
    chosen: NDArray[np.int32]  # [levels, beam], the candidate of each row, -1: none; of the first level: -1
    seen: BoolArray  # [levels, beam, tail slots], what each row sees

    @property
    def levels(self) -> int:
        return len(self.token)


class DrawStaging:
    """The buffers of draws of one shape, and the host's side of them."""

    def __init__(self, shape: DrawShape, device: torch.device) -> None:
        fields, line = given_fields(shape)
        self.shape = shape
        self._line = line
        self._staging = Staging(shape.requests * line, device)
        self.buffers = DrawBuffers.over(shape, self._staging.device.view(shape.requests, line))
        self._drawn = drawn_fields(shape)[0]
        sides = [torch.from_numpy(host).view(shape.requests, line) for host in self._staging.host]
        self._host = [{name: field.of(side).numpy() for name, field in fields.items()} for side in sides]

    def write(self, draws: Sequence[Draw], page: int) -> int:
        """Fills the host's next side and returns it."""
        side = self._staging.take()
        host = self._host[side]
        host["limits"][:] = 0
        host["row_reach"][:], host["reach"][:] = -np.inf, -np.inf
        for r, draw in enumerate(draws):
            n, m = len(draw.rows.token), len(draw.token)
            limits = host["limits"][r]
            limits[LEVELS], limits[BEAM], limits[ROOM], limits[AMONG] = draw.levels, draw.beam, draw.room, draw.among
            limits[TAIL], limits[ANCHOR], limits[BEFORE] = draw.rows.visible.shape[1], draw.anchor, draw.before
            host["worth"][r] = draw.least, draw.level_share
            host["row_reach"][r, :n], host["row_depth"][r, :n] = draw.row_reach, draw.row_depth
            for name in ("token", "depth", "reach"):
                host[name][r, :m] = getattr(draw, name)
            host["open"][r, :m] = draw.unexpanded
            words = pack_words(draw.seen, draw.rows.context % page)
            host["seen"][r, :m] = 0
            host["seen"][r, :m, : words.shape[1]] = words
        return side

    def upload(self, side: int) -> None:
        """Copies a side to the device, without waiting."""
        self._staging.upload(side, self.shape.requests * self._line)

    def read(self, draws: Sequence[Draw], page: int) -> list[Drawn]:
        """What came of the draws; waits for the device."""
        shape, count = self.shape, len(draws)
        lines = self.buffers.drawn[:count].cpu()
        found = {name: field.of(lines).numpy() for name, field in self._drawn.items()}
        out = []
        for r, draw in enumerate(draws):
            levels = int(found["done"][r, 0])
            by_row = (levels, shape.beam)
            token, score = (
                found[name][r, : levels * shape.beam * shape.branch].reshape(*by_row, shape.branch)
                for name in ("token", "score")
            )
            words = found["seen"][r, : levels * shape.beam]
            bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(np.bool_)
            chosen = found["chosen"][r, :levels].copy()
            chosen[0] = -1
            out.append(Drawn(token, score, chosen, bits[:, draw.rows.context % page :].reshape(*by_row, -1)))
        return out


def first_rows(draw: Draw, beam: int) -> Rows:
    """The rows of the first level, filled up to ``beam`` with some that see the context alone."""
    rows, tail = draw.rows, draw.rows.visible.shape[1]
    missing = beam - len(rows.token)
    none = np.zeros(missing, np.int32)
    visible = np.zeros((beam, tail + missing), np.bool_)
    visible[: len(rows.token), :tail] = rows.visible
    token, position = np.concatenate([rows.token, none]), np.concatenate([rows.tail_position, none])
    return Rows(rows.pages, rows.context, token, position, visible, spare=(draw.levels - 1) * beam)
