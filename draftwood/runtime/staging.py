"""Integers on their way to the device: one buffer there and two on the host, which take turns, so that the next ones
can be written while the copy of the last is in flight."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Staging:
    """An int32 buffer on the device with two on the host, pinned for a GPU. One thread."""

    def __init__(self, ints: int, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self.device = torch.zeros(ints, dtype=torch.int32, device=device)
        self._sides = [torch.zeros(ints, dtype=torch.int32, pin_memory=gpu) for _ in range(2)]
        self.host: list[NDArray[np.int32]] = [side.numpy() for side in self._sides]
        self._copied = [torch.cuda.Event() if gpu else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._starts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by size and side: where to, and where from
        self._side = 0

    def take(self) -> int:
        """The host's side to write next; waits if its last copy is still in flight."""
        self._side ^= 1
        if event := self._copied[self._side]:
            event.synchronize()
        return self._side

    def upload(self, side: int, ints: int) -> None:
        """Copies the start of a side to the device, without waiting."""
        starts = self._starts.get((ints, side))
        if starts is None:
            starts = self._starts[ints, side] = self.device[:ints], self._sides[side][:ints]
        starts[0].copy_(starts[1], non_blocking=True)
        if event := self._copied[side]:
            event.record()
