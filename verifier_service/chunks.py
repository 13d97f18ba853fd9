"""How many rows of prefill go along with a step, and who gets them. Pure.

A chunk is the largest that makes the step at most ``stretch`` times as long as it is without, but never less than
``LEAST_CHUNK`` rows, or ``LEAST_ROWS`` where a row costs much more than T(rows) says: decoding sessions keep their
pace, and prefill always gets on (Sarathi-Serve, arXiv:2403.02310). Where few decode while many read, those few wait
longer: a step is worth most when all are in it. For the same reason prompts that end go whole if the step then takes
at most ``WHOLE_STRETCH`` times as long: in smaller chunks they delay the others as much, and decode later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STRETCH, MOST_STRETCH = 1.35, 3.0
"""Times as long as without prefill that a step may take while one session reads, or few do, and at most."""

WHOLE_STRETCH = 2.0
"""Times as long that a step may take if prompts end with it."""

RISE, FALL = 0.3, 0.05
"""Weights of a step in the cost of a row: a chunk that was too large is felt by all, one that was too small by none."""

LEAST_CHUNK = 8
LEAST_ROWS = 4


class PrefillCost:
    """How many times what T(rows) says a row of prefill costs; behind a long prefix it is a good deal more."""

    def __init__(self) -> None:
        self._factor = 1.0

    def chunk(self, step_s: NDArray[np.float64], times_as_long: float = STRETCH) -> int:
        """Rows of prefill for a step that would take ``step_s[n]`` seconds with n of them, n from 0 to the most."""
        extra_s = np.maximum.accumulate(step_s - step_s[0]) * self._factor
        most = len(step_s) - 1
        least = max(LEAST_ROWS, round(LEAST_CHUNK / max(1.0, self._factor)))
        return min(most, max(least, int(np.searchsorted(extra_s, (times_as_long - 1) * step_s[0], side="right")) - 1))

    def observe(self, without_s: float, expected_s: float, seen_s: float) -> None:
        """A step with prefill took ``seen_s``; T(rows) says ``expected_s``, and ``without_s`` without prefill."""
        expected = max(expected_s - without_s, 0.02 * without_s)
        factor = float(np.clip((seen_s - without_s) / expected, 0.25, 50.0))
        change = min(factor, 4 * self._factor) - self._factor
        self._factor += (RISE if change > 0 else FALL) * change


def stretch(reading: int, decoding: int) -> float:
    """How many times as long as without prefill a step may take, by the sessions that read and those that decode."""
    return min(MOST_STRETCH, 1 + (STRETCH - 1) * max(1.0, 2 * (reading - 1) / decoding))


def split(pending: Sequence[int], chunk: int, whole: int, first: int = 0) -> list[int]:
    """Rows for sessions with so many ``pending``, who has waited longest first.

    Who has waited longest, then the shortest, go whole as far as they end within ``whole`` rows; if the first does not,
    it has up to ``LEAST_CHUNK`` of a chunk in any case. Where that comes to no more than ``chunk``, so many sessions
    share that evenly (``fair_split``) that no part of it is tiny.
    """
    counts, left = [0] * len(pending), whole
    if pending[0] > whole:
        counts[0] = min(LEAST_CHUNK, chunk, whole)
        left -= counts[0]
    for k in sorted(range(len(pending)), key=lambda k: (k > 0, pending[k])):
        if pending[k] > left:
            continue
        counts[k] = pending[k]
        left -= pending[k]
    if whole - left > chunk:
        return counts
    some = max(1, chunk // LEAST_CHUNK)
    while some < len(pending) and sum(pending[:some]) < chunk:
        some += 1
    return fair_split(pending[:some], chunk, first) + [0] * (len(pending) - some)


def fair_split(wanted: Sequence[int], total: int, first: int = 0) -> list[int]:
    """Max-min fair: nobody gets more than wanted, and who gets less than another gets all it wanted.

    Where an even split leaves a remainder, it goes one by one from number ``first`` (modulo their count) on.
    """
    got = [0] * len(wanted)
    start = first % max(1, len(wanted))
    hungry = [k for k in (*range(start, len(wanted)), *range(start)) if wanted[k] > 0]
    while hungry and total:
        each = total // len(hungry)
        for k in hungry if each else hungry[:total]:
            give = min(max(1, each), wanted[k] - got[k])
            got[k] += give
            total -= give
        hungry = [k for k in hungry if got[k] < wanted[k]]
    return got
