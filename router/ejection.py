"""Outlier ejection: a worker that keeps failing is left alone for a while, then tried with one session.

A worker is *closed* (used), *ejected*, or *half open*: its time is over and one session, the *probe*, may try it. A
probe that succeeds closes it, one that fails ejects it for twice as long. What is lost, full or draining is not in the
pool at all; ejection is for workers that look well and are not. Time is passed in as a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FAILURES = 3
"""Failures in a row that eject a worker."""
FIRST_S, MOST_S = 5.0, 300.0
"""First and longest time of being ejected."""
PROBE_S = 30.0
"""A probe that has not ended by then is forgotten, and another may try."""
MOST_EJECTED = 0.5
"""Share of a pool that may be ejected; the last worker never is."""


@dataclass(slots=True)
class Record:
    """What is known of one worker."""

    failures: int = 0  # in a row
    ejections: int = 0  # without a success in between
    ejected_at: float = 0.0
    until: float | None = None  # None: closed
    probed_at: float | None = None


@dataclass(slots=True)
class Ejection:
    """The records of one pool, by a key that changes when the worker is another process."""

    clock: Callable[[], float]
    _records: dict[str, Record] = field(default_factory=dict)

    def admitted(self, pool: Sequence[str]) -> set[str]:
        """Which of the pool may be given a session now. Never none, unless the pool is empty.

        If more than the cap are ejected, those for longest are let back.
        """
        out = [key for key in pool if not self._usable(key)]
        allowed = max(min(math.floor(MOST_EJECTED * len(pool)), len(pool) - 1), 0)
        out.sort(key=lambda key: self._records[key].ejected_at, reverse=True)
        return set(pool) - set(out[:allowed])

    def began(self, key: str) -> None:
        """The worker was given a session."""
        record = self._records.get(key)
        if record and record.until is not None and record.until <= self.clock():
            record.probed_at = self.clock()

    def succeeded(self, key: str) -> None:
        self._records.pop(key, None)

    def failed(self, key: str) -> bool:
        """Returns whether this ejects the worker."""
        record = self._records.setdefault(key, Record())
        record.failures += 1
        record.probed_at = None
        ejected = record.until is not None and record.until > self.clock()
        if ejected or (record.until is None and record.failures < FAILURES):
            return False
        record.ejected_at = self.clock()
        record.until = record.ejected_at + min(FIRST_S * 2.0**record.ejections, MOST_S)
        record.ejections += 1
        return True

    def forget(self, key: str) -> None:
        """The worker has left its pool."""
        self._records.pop(key, None)

    def _usable(self, key: str) -> bool:
        record = self._records.get(key)
        if record is None or record.until is None:
            return True
        probing = record.probed_at is not None and self.clock() - record.probed_at < PROBE_S
        return self.clock() >= record.until and not probing
