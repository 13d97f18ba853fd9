"""The commit kernel and its reference against moves made one by one on a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.kernels.commit import commit_kv, commit_kv_reference, commit_kv_triton

Commit = Callable[[Tensor, Tensor, Tensor, Tensor], None]

CUDA = torch.cuda.is_available()
COMMIT = [
    pytest.param(commit_kv_reference, "cpu", id="reference"),
    pytest.param(
        commit_kv_triton, "cpu", id="kernel", marks=pytest.mark.skipif(CUDA, reason="compiled on a machine with a GPU")
    ),
    pytest.param(
        commit_kv,
        "cuda",
        id="compiled",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")],
    ),
]
FENCE = 4096


@dataclass(frozen=True)
class Path:
    context: int
    nodes: Sequence[int]  # accepted tail nodes, rising; node i sits in slot context + i and moves to its rank


@dataclass(frozen=True)
class Pool:
    buffer: Tensor
    cache: Tensor  # [layers, 2, pages, kv_heads, PAGE, head_dim] inside the buffer
    source: Tensor
    target: Tensor
    move_start: Tensor

    def check(self, commit: Commit) -> None:
        """Commit, and compare the whole buffer (canaries too) with moves made from a copy."""
        expected, before = self.buffer.clone(), self.cache.clone()
        page = self.cache.shape[4]
        inner = expected[FENCE:-FENCE].view(self.cache.shape)
        first, last = int(self.move_start[0]), int(self.move_start[-1])
        for old, new in zip(self.source[first:last].tolist(), self.target[first:last].tolist(), strict=True):
            inner[:, :, new // page, :, new % page] = before[:, :, old // page, :, old % page]
        commit(self.cache, self.source, self.target, self.move_start)
        assert torch.equal(self.buffer, expected)


def build(
    paths: Sequence[Path],
    *,
    page: int = 16,
    head_dim: int = 64,
    layers: int = 2,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Pool:
    """Requests in scattered pages; the index lists end in padding moves that must not happen."""
    rng = np.random.default_rng(len(paths))
    used = [(p.context + max(p.nodes, default=0)) // page + 1 for p in paths]
    ids = rng.permutation(sum(used) + 2)
    source, target, move_start = [], [], [0]
    for path, count in zip(paths, used, strict=True):
        table, ids = ids[:count], ids[count:]
        for rank, node in enumerate(path.nodes):
            old, new = path.context + node, path.context + rank
            source.append(table[old // page] * page + old % page)
            target.append(table[new // page] * page + new % page)
        move_start.append(len(source))
    shape = (layers, 2, sum(used) + 2, kv_heads, page, head_dim)
    size = int(np.prod(shape))
    buffer = torch.randn(size + 2 * FENCE, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    return Pool(
        buffer=buffer,
        cache=buffer[FENCE:-FENCE].view(shape),
        source=torch.tensor([*source, 0, 1], dtype=torch.int64, device=device),
        target=torch.tensor([*target, 1, 0], dtype=torch.int64, device=device),
        move_start=torch.tensor(move_start, dtype=torch.int32, device=device),
    )


def random_path(rng: np.random.Generator, context: int, nodes: int, accepted: int) -> Path:
    return Path(context, sorted(rng.choice(nodes, accepted, replace=False).tolist()))


@pytest.mark.parametrize(("commit", "device"), COMMIT)
@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_accepted_paths_move_to_the_end_of_the_context(commit: Commit, device: str, page: int, head_dim: int) -> None:
    rng = np.random.default_rng(page)
    paths = [random_path(rng, int(rng.integers(0, 3 * page)), 40, n) for n in (1, 2, 5, 9)]
    build(paths, page=page, head_dim=head_dim, device=device).check(commit)


@pytest.mark.parametrize(("commit", "device"), COMMIT)
def test_every_target_but_the_first_is_another_moves_source(commit: Commit, device: str) -> None:
    build([Path(13, range(1, 30)), Path(0, range(1, 17))], device=device).check(commit)


@pytest.mark.parametrize(("commit", "device"), COMMIT)
def test_requests_without_moves_and_paths_already_in_place(commit: Commit, device: str) -> None:
    build([Path(5, []), Path(9, range(6)), Path(3, [0, 1, 4, 6]), Path(8, [])], device=device).check(commit)


@pytest.mark.parametrize(("commit", "device"), COMMIT)
@pytest.mark.parametrize("accepted", [63, 64, 65, 512])
def test_whole_subtrees_are_rerooted(commit: Commit, device: str, accepted: int) -> None:
    rng = np.random.default_rng(accepted)
    paths = [random_path(rng, 27, 700, accepted), Path(1, range(1, accepted + 1))]
    build(paths, page=64, layers=1, kv_heads=1, device=device).check(commit)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_many_layers_heads_and_requests_compiled(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    paths = [random_path(rng, int(rng.integers(0, 900)), 600, n) for n in (1, 8, 33, 64, 200, 512)]
    paths += [Path(int(rng.integers(0, 90)), range(1, 300)) for _ in range(10)]
    pool = build(paths, page=64, head_dim=128, layers=16, kv_heads=8, dtype=dtype, device="cuda")
    pool.check(commit_kv)
