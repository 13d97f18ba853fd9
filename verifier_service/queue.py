"""Requests that wait for pages or a session, the most urgent first.

A request is due ``deadline_ms`` after its arrival, one without a deadline ``PATIENCE_S`` after it. So a stream of
urgent requests delays another by ``PATIENCE_S`` at most.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from verifier_service.session import GenerateRequest

PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    due_s: float
    arrived_s: float
    request: GenerateRequest


class AdmissionQueue:
    """Ordered by when they are due, equal ones by arrival."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: GenerateRequest, now: float) -> None:
        patience_s = min(PATIENCE_S, request.deadline_ms / 1e3) if request.deadline_ms else PATIENCE_S
        insort(self._waiting, _Waiting(now + patience_s, now, request), key=lambda waiting: waiting.due_s)

    def longest_wait_s(self, now: float) -> float:
        """How long the request that arrived first of those here has waited; 0 if there is none."""
        return max((now - waiting.arrived_s for waiting in tuple(self._waiting)), default=0.0)

    @property
    def first(self) -> GenerateRequest:
        return self._waiting[0].request

    def pop(self) -> GenerateRequest:
        return self._waiting.pop(0).request

    def drop(self, session_id: str) -> None:
        """Takes a request out, if it is there."""
        self._waiting = [w for w in self._waiting if w.request.session_id != session_id]
