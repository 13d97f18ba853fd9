"""Who serves a session: pure choices over snapshots of the pools.

Load is work in hand over capacity: 0 idle, 1 full, above 1 queueing. Randomness is passed in.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

FEW = 2
"""Up to so many candidates are all compared; above, two drawn at random are (power of two choices)."""


@dataclass(frozen=True, slots=True)
class VerifierView:
    """A verifier that takes requests, as the balancer sees it."""

    key: str
    model: str
    sessions: int  # running and waiting, those of other routers included
    capacity: int

    @property
    def load(self) -> float:
        return self.sessions / max(self.capacity, 1)


@dataclass(frozen=True, slots=True)
class DraftView:
    """A draft worker that takes sessions, as the balancer sees it."""

    key: str
    kind: str
    sessions: int
    capacity: int  # 0: no limit

    @property
    def load(self) -> float:
        return self.sessions / self.capacity if self.capacity else 0.0

    @property
    def full(self) -> bool:
        return bool(self.capacity) and self.sessions >= self.capacity


def choose_verifier(candidates: Sequence[VerifierView], model: str, rng: random.Random) -> VerifierView | None:
    """The less loaded of two of the model's verifiers; the first on a tie; None if there is none."""
    fitting = [view for view in candidates if view.model == model]
    if len(fitting) > FEW:
        fitting = rng.sample(fitting, FEW)
    return min(fitting, key=lambda view: view.load, default=None)


def choose_drafts(
    candidates: Sequence[DraftView], count: int, *, serving: Collection[str] = (), kinds: Collection[str] = ()
) -> list[DraftView]:
    """Up to ``count`` more draft workers for a session: kinds it has not got yet first, then the least loaded.

    ``serving`` names the workers that are out of the question (they serve it already, or refused), ``kinds`` the
    kinds it has. Full workers are never chosen.
    """
    free = sorted((view for view in candidates if not view.full and view.key not in serving), key=lambda v: v.load)
    chosen: list[DraftView] = []
    have = set(kinds)
    while free and len(chosen) < count:
        best = next((view for view in free if view.kind not in have), free[0])
        free.remove(best)
        have.add(best.kind)
        chosen.append(best)
    return chosen
