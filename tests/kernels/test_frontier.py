"""The kernel that picks a draft's next frontier, level after level, against its reference: all that either writes.

On a machine without a GPU the kernel runs in Triton's interpreter (see ``tests/conftest.py``); with one it is compiled.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

from draftwood.kernels.frontier import (
    AMONG,
    ANCHOR,
    BEAM,
    BEFORE,
    LEVEL,
    LEVELS,
    ROOM,
    TAIL,
    DrawBuffers,
    DrawShape,
    given_fields,
    next_frontier_reference,
    next_frontier_triton,
)
from draftwood.kernels.tree_attention import AttentionBatch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PAGE, VOCAB = 16, 100
SMALL = DrawShape(requests=3, beam=3, branch=2, levels=4, firsts=8, words=2)
SHAPES = [
    SMALL,
    DrawShape(requests=1, beam=1, branch=1, levels=5, firsts=4, words=1),
    DrawShape(requests=4, beam=6, branch=4, levels=9, firsts=64, words=12),
]


@dataclass
class State:
    """All that a launch reads and writes."""

    buffers: DrawBuffers
    input_ids: torch.Tensor
    batch: AttentionBatch

    def to(self, device: str) -> State:
        lines = (self.buffers.given, self.buffers.drawn, self.buffers.scratch)
        batch = AttentionBatch(**{f.name: getattr(self.batch, f.name).to(device) for f in fields(AttentionBatch)})
        return State(DrawBuffers(self.buffers.shape, *(x.to(device) for x in lines)), self.input_ids.to(device), batch)

    def arrays(self) -> dict[str, torch.Tensor]:
        found = {f.name: getattr(self.batch, f.name) for f in fields(AttentionBatch)}
        for kind, parts in (("given", self.buffers.of_given), ("drawn", self.buffers.of_drawn)):
            found |= {f"{kind}.{name}": part for name, part in parts.items()}
        found |= {f"scratch.{name}": part for name, part in self.buffers.of_scratch.items()}
        return found | {"input_ids": self.input_ids}


def random_state(shape: DrawShape, seed: int) -> State:
    """Trees of any size behind texts of any length; some requests have nothing to draw."""
    rng = np.random.default_rng(seed)
    rows, room = shape.requests * shape.beam, 32 * shape.words - shape.levels * shape.beam
    buffers = DrawBuffers.over(shape, torch.zeros(shape.requests, given_fields(shape)[1], dtype=torch.int32))
    context = rng.integers(1, 3 * PAGE, shape.requests)
    columns = (3 * PAGE + room + shape.levels * shape.beam) // PAGE + 2
    table = rng.permutation(shape.requests * columns).reshape(shape.requests, columns)
    given = {name: field.numpy() for name, field in buffers.of_given.items()}
    given["row_reach"][:], given["reach"][:] = -np.inf, -np.inf
    words = rng.integers(-(2**31), 2**31, (rows, shape.words))
    for r in range(shape.requests):
        known, tail = rng.integers(0, shape.firsts + 1), rng.integers(1, max(2, room - PAGE))
        limits = given["limits"][r]
        limits[LEVELS] = rng.integers(0, shape.levels + 1)
        limits[BEAM], limits[ROOM] = rng.integers(1, shape.beam + 1), rng.integers(1, 6)
        limits[AMONG], limits[TAIL], limits[ANCHOR] = rng.integers(1, 40), tail, context[r] - 1
        limits[BEFORE], given["worth"][r] = rng.integers(0, 4), (rng.choice([0, 0.1, 0.5]), rng.choice([0, 0.1, 0.4]))
        given["row_reach"][r] = np.where(rng.random(shape.beam) < 0.8, -rng.exponential(1.0, shape.beam), -np.inf)
        given["row_depth"][r] = rng.integers(0, 3, shape.beam)
        given["token"][r, :known] = rng.integers(0, VOCAB, known)
        given["depth"][r, :known] = rng.integers(1, 5, known)
        given["reach"][r, :known] = -rng.exponential(2.0, known)
        given["open"][r, :known] = rng.integers(0, 2, known)
        given["seen"][r] = rng.integers(-(2**31), 2**31, given["seen"][r].shape)

    def put(values: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(dtype)

    batch = AttentionBatch(
        row_start=put(np.arange(shape.requests + 1) * shape.beam),
        context=put(context),
        keys=put(context + 1),
        words=put(words),
        block_table=put(table),
        position=put(rng.integers(0, 99, rows)),
        tail_position=put(rng.integers(0, 99, (shape.requests, 32 * shape.words))),
        page_id=put(rng.integers(0, 9, rows), torch.int64),
        page_offset=put(rng.integers(0, PAGE, rows), torch.int64),
    )
    return State(buffers, put(rng.integers(0, VOCAB, rows), torch.int64), batch)


def random_children(shape: DrawShape, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(1000 + seed)
    size = (shape.requests * shape.beam, shape.branch)
    tokens = np.where(rng.random(size) < 0.9, rng.integers(0, VOCAB, size), -1)
    return torch.from_numpy(tokens), torch.from_numpy(-rng.exponential(1.0, size).astype(np.float32))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "chain", "large"])
def test_the_kernel_writes_what_the_reference_writes(shape: DrawShape, seed: int) -> None:
    want = random_state(shape, seed)
    got = copy.deepcopy(want).to(DEVICE)
    for level in range(shape.levels + 1):
        children = random_children(shape, seed + 100 * level)
        next_frontier_reference(want.buffers, *children, want.input_ids, want.batch, PAGE)
        next_frontier_triton(got.buffers, *(x.to(DEVICE) for x in children), got.input_ids, got.batch, PAGE)
        for name, value in want.arrays().items():
            found = got.arrays()[name].cpu()
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_level_is_the_likeliest_open_nodes_that_count(seed: int = 3) -> None:
    """By hand: one request, three rows with two children each, and two nodes from before."""
    state = random_state(SMALL, seed)
    given = {name: field.numpy() for name, field in state.buffers.of_given.items()}
    given["limits"][1:, LEVELS] = 0
    given["limits"][0, :7] = [0, 3, 3, 9, 9, 3, 20]  # level, levels, beam, room, among, tail, anchor's position
    given["worth"][0] = 0.0
    given["row_reach"][0], given["row_depth"][0] = [-0.1, -1.0, -np.inf], [1, 1, 1]
    given["reach"][0], given["open"][0] = -np.inf, 0
    given["token"][0, :2], given["depth"][0, :2], given["reach"][0, :2] = [50, 51], [1, 2], [-0.5, -0.2]
    given["open"][0, :2] = [1, 0]
    tokens = torch.arange(18).view(9, 2)
    scores = torch.tensor([[-0.3, -2.0], [-0.05, -3.0], [-0.01, -0.02]]).repeat(3, 1)
    state.batch.context[0], state.batch.words[:3] = 21, torch.tensor([[0b11111 | 1 << 5 + k, 0] for k in range(3)])
    next_frontier_triton(*_on(DEVICE, state, tokens, scores))
    # Children: -0.4, -2.1 of the first row, -1.05, -4 of the second, none of the third; -0.5 from before.
    assert state.buffers.of_drawn["chosen"][0, 1].tolist() == [8, 0, 10]
    assert state.input_ids[:3].tolist() == [0, 50, 2]
    assert state.batch.position[:3].tolist() == [22, 21, 22]
    assert state.batch.words[0].tolist() == [0b11111 | 1 << 5 | 1 << 8, 0], "its parent's row, and itself"
    assert state.batch.words[2].tolist() == [0b11111 | 1 << 6 | 1 << 10, 0]
    assert state.batch.keys[0] == 21 + 3 + 3
    assert state.batch.page_offset[:3].tolist() == [8, 9, 10]
    assert state.buffers.of_given["limits"][0, [LEVEL, TAIL]].tolist() == [1, 6]


def _on(device: str, state: State, *children: torch.Tensor) -> tuple[object, ...]:
    """Arguments of a launch; on a GPU what it writes is copied back into ``state`` by ``to``."""
    moved = state.to(device)
    state.buffers, state.input_ids, state.batch = moved.buffers, moved.input_ids, moved.batch
    return (state.buffers, *(x.to(device) for x in children), state.input_ids, state.batch, PAGE)
