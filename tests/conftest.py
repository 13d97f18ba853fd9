"""What must be said before libraries are imported: without a GPU, Triton kernels run in Triton's interpreter; threads
of OpenMP that wait do not spin, as the services have it, too."""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
