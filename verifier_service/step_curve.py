"""T(rows) as a draft worker can use it: what a step takes if every running session has so many rows in it.

A topology that weighs tokens against time (Sequoia, arXiv:2402.12374) needs the curve of the verifier's hardware. With
S sessions a draft's n nodes cost T(S * (1 + n)), as the others' trees grow with the same topology; so the curve moves
with the load as well as with the machine.
"""

from __future__ import annotations

import numpy as np

from verifier_service.width import GRID, StepTimes

MOVED = 0.1
"""Relative change of a point from which on the curve is told anew."""

CHECK_S = 1.0
"""Seconds between two looks at it."""

StepMs = tuple[tuple[int, float], ...]
"""Rows of each session, and milliseconds of the step; rows ascending."""


class StepCurve:
    """What one draft worker has been told. For the engine's thread."""

    def __init__(self, times: StepTimes, most_nodes: int) -> None:
        self._times = times
        self._rows = np.array([rows for rows in GRID if rows <= most_nodes] + [most_nodes + 1])
        self._told = np.zeros(len(self._rows))
        self._looked_s = -np.inf

    def news(self, sessions: int, now: float) -> StepMs | None:
        """The curve with so many sessions running, if it has moved since it was told; ``now``: clock time."""
        if now - self._looked_s < CHECK_S:
            return None
        self._looked_s = now
        took_ms = 1e3 * self._times(max(1, sessions) * self._rows, max(1, sessions).bit_length())
        if np.all(np.abs(took_ms - self._told) <= MOVED * self._told):
            return None
        self._told = took_ms
        return tuple(zip(self._rows.tolist(), took_ms.tolist(), strict=True))
