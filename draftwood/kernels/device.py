"""What the kernels' plans need to know of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device."""

    multiprocessors: int
    shared_bytes: int  # that a program may have
    capability: int  # major number of its compute capability: 7 Turing, 8 Ampere and Ada, 9 Hopper


@lru_cache(maxsize=16)
def gpu_of(device: torch.device) -> Gpu:
    """A CUDA device, as the driver describes it."""
    found = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Gpu(found.multi_processor_count, shared_bytes, found.major)
