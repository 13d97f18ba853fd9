"""Dependent launch, from Hopper on: a kernel starts while the one before it ends.

A forward of few rows is a hundred or more short kernels one after the other, and each starts 1 to 2 us after the last
one's end. A kernel that is launched with ``launch_options`` may start once all programs of the kernel before have
called ``tl.extra.cuda.gdc_launch_dependents`` or ended. It does what depends on no other kernel, and its ``gdc_wait``
returns when the kernel before has ended and its memory is visible. Every program of a kernel so launched waits, so that
a kernel's end is also the end of all before it. What is read before the wait must not be written by a kernel that lets
its dependents start early.

Programs that start early take the places that the kernel before leaves, which are not evenly spread: kernels that are
bound by memory let their dependents start when their own reading is done. Where a kernel's programs and the next one's
fit the device together, it is eager: it lets them start before it waits itself. Several kernels then stand ready one
behind the other, and weights, lengths and page ids are read while those before them compute. From a layer's first
product to attention all are.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.device import gpu_of

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has no Triton
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))

MOST_ROWS = 64
"""Of a forward whose kernels start early. With more rows a kernel has several programs to a multiprocessor, and those
of the next one among them cost more than they save (measured on an H200)."""


def _is_hopper(device: torch.device) -> bool:
    return gpu_of(device).capability >= 9


def can_overlap(tensor: Tensor) -> bool:
    """Whether the GPU of a tensor, if it is on one, knows dependent launch."""
    return tensor.is_cuda and _is_hopper(tensor.device)


def starts_early(x: Tensor) -> bool:
    """Whether the kernel over these rows [rows, ...] is launched to start early."""
    return len(x) <= MOST_ROWS and can_overlap(x)


def launch_options(early: bool) -> dict[str, Any]:
    """What to launch a kernel with that starts early."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def wait(eager: tl.constexpr):
    """In a kernel that starts early: waits for the kernel before, and lets the next one start; first if ``eager``."""
    if eager:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    if not eager:
        tl.extra.cuda.gdc_launch_dependents()
