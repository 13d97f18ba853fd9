"""Who serves a session: pure choices over snapshots of the pools. Randomness is passed in.

*Load* is work in hand over capacity: 0 idle, 1 full, above 1 queueing. *Cost* is what a session has to expect of a
worker, the less the better: of a verifier the time of a step, of a draft worker the time of a round for what its
guesses are worth. A cost is known only as well as the last load report, so a few candidates drawn at random are
compared and not all of them: if all routers took the best, it would be the worst by the next report (power of choices).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

FEW = 3
"""Candidates drawn at random that are compared. In the simulation two leave larger gaps between equal verifiers with
any number of routers, and all of them lead to swings when there are many routers (docs/architecture.md)."""

QUEUEING = 4.0
"""How many times as costly a full verifier is with as much work again waiting."""

KNOWN_PREFIX_WORTH = 0.5
"""Share of its cost that a verifier is forgiven if it knows a thousand tokens of the prompt: one that costs more than
twice as much as another is not chosen for what it has cached."""

USUAL_STEP_MS, USUAL_TURN_MS, USUAL_ACCEPTED = 20.0, 20.0, 0.5
"""Taken of workers that have not told yet if none has."""

LEAST_ACCEPTED = 0.05
"""Draft tokens a step that a worker is taken to bring at least."""


@dataclass(frozen=True, slots=True)
class VerifierView:
    """A verifier that takes requests, as the balancer sees it."""

    key: str
    model: str
    sessions: int  # running and waiting, those of other routers included
    capacity: int
    step_ms: float = 0.0  # mean of the last steps; 0: none yet
    pages_held: float = 0.0  # share of KV pages that sessions hold

    @property
    def load(self) -> float:
        """Of sessions or of pages, whichever there is less room for."""
        return max(self.sessions / max(self.capacity, 1), self.pages_held)


@dataclass(frozen=True, slots=True)
class DraftView:
    """A draft worker that takes sessions, as the balancer sees it."""

    key: str
    kind: str
    sessions: int
    capacity: int  # 0: no limit
    round_ms: float = 0.0  # usual time of a round at the worker; 0: none yet
    rtt_ms: float = 0.0  # of a call from the router; 0: not measured
    accepted: float | None = None  # draft tokens accepted a step in sessions that it served; None: not known

    @property
    def load(self) -> float:
        return self.sessions / self.capacity if self.capacity else 0.0

    @property
    def full(self) -> bool:
        return bool(self.capacity) and self.sessions >= self.capacity


def choose_verifier(
    candidates: Sequence[VerifierView], model: str, rng: random.Random, known: Mapping[str, float] | None = None
) -> VerifierView | None:
    """The least costly of a few of the model's verifiers and the one that knows most of the prompt; None without any.

    ``known`` is how much of the prompt a verifier has seen before, 0 to 1, by key. Ties go to the first.
    """
    fitting = [view for view in candidates if view.model == model]
    known = known or {}
    usual_ms = _mean([view.step_ms for view in fitting if view.step_ms]) or USUAL_STEP_MS
    compared = fitting
    if len(fitting) > FEW:
        compared = rng.sample(fitting, FEW)
        most = max(fitting, key=lambda view: known.get(view.key, 0.0))
        if known.get(most.key, 0.0):
            compared.append(most)
    return min(compared, key=lambda view: verifier_cost(view, known.get(view.key, 0.0), usual_ms), default=None)


def verifier_cost(view: VerifierView, known: float, usual_ms: float) -> float:
    """Milliseconds of a step that one more session has to expect, waiting and what it need not compute included."""
    load = view.load + 1 / max(view.capacity, 1)
    waiting = 1 + QUEUEING * max(load - 1, 0.0)
    saved = KNOWN_PREFIX_WORTH * known if load <= 1 else 0.0
    return (view.step_ms or usual_ms) * (1 + load) * waiting * (1 - saved)


def choose_drafts(
    candidates: Sequence[DraftView],
    count: int,
    rng: random.Random,
    *,
    serving: Collection[str] = (),
    kinds: Collection[str] = (),
) -> list[DraftView]:
    """Up to ``count`` more draft workers for a session: kinds it has not got yet first, each the least costly of a few.

    ``serving`` names the workers that are out of the question (they serve it already, or refused), ``kinds`` the
    kinds it has. Full workers are never chosen.
    """
    free = [view for view in candidates if not view.full and view.key not in serving]
    usual_ms = _mean([view.round_ms + view.rtt_ms for view in free if view.round_ms]) or USUAL_TURN_MS
    usual_accepted = _mean([view.accepted for view in free if view.accepted is not None]) or USUAL_ACCEPTED
    chosen: list[DraftView] = []
    have = set(kinds)
    while free and len(chosen) < count:
        compared = [view for view in free if view.kind not in have] or free
        if len(compared) > FEW:
            compared = rng.sample(compared, FEW)
        best = min(compared, key=lambda view: draft_cost(view, usual_ms, usual_accepted))
        free.remove(best)
        have.add(best.kind)
        chosen.append(best)
    return chosen


def draft_cost(view: DraftView, usual_ms: float, usual_accepted: float) -> float:
    """Milliseconds from a commit to a tree with one more session, per draft token that is accepted."""
    turn_ms = view.round_ms + view.rtt_ms if view.round_ms else usual_ms
    accepted = usual_accepted if view.accepted is None else view.accepted
    return turn_ms * (1 + view.load) / max(accepted, LEAST_ACCEPTED)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
