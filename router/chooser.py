"""Who serves a session, as the pools are now: snapshots, ejection, what is known of the prompt, and the choice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from draftwood.errors import DraftwoodError, Internal, Unavailable
from draftwood.telemetry import METRICS, ChoiceBy, get_logger
from router.affinity import Beginnings
from router.balancing import choose_drafts, choose_verifier
from router.ejection import Ejection
from router.registry import Registry, Role, Worker

NO_FAULT = ("DRAINING", "LOADING", "DEADLINE")
"""Ends that do not speak against a worker: it takes no sessions now, or the client's own time is over."""

log = get_logger(__name__)


class Chooser:
    """Chooses workers and learns from what comes of it; one a router."""

    def __init__(self, registry: Registry, rng: random.Random, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._rng = rng
        self._ejection = Ejection(clock)
        self._beginnings = Beginnings()

    def verifier(self, model: str, prompt: Sequence[bytes], avoid: Collection[Worker] = ()) -> Worker | None:
        """One of the model's verifiers but those to ``avoid``; ``prompt`` are the hashes of its beginnings."""
        others = {worker.address for worker in avoid}
        views = [view for view in self._registry.verifier_views() if view.model == model and view.key not in others]
        admitted = self._admitted(view.key for view in views)
        known = {key: share for key, share in self._beginnings.known(prompt).items() if key in admitted}
        view = choose_verifier([view for view in views if view.key in admitted], model, self._rng, known)
        if view is None:
            METRICS.choices["verifier", "none"].inc()
            return None
        by: ChoiceBy = "only" if len(admitted) == 1 else "prefix" if known.get(view.key) else "cost"
        METRICS.choices["verifier", by].inc()
        self._beginnings.served(prompt, view.key)
        return self._began(view.key)

    def drafts(self, model: str, count: int, serving: Collection[str], kinds: Collection[str]) -> list[Worker]:
        """Up to ``count`` more draft workers for a session of the model; see ``choose_drafts``."""
        failed = self._registry.failed_canaries()
        views = self._registry.draft_views(model, failed)
        admitted = self._admitted(view.key for view in views)
        free = [view for view in views if view.key in admitted]
        chosen = choose_drafts(free, count, self._rng, serving=serving, kinds=kinds)
        if count > 0:
            by: ChoiceBy = "none" if not chosen else "only" if len(chosen) == len(free) else "cost"
            METRICS.choices["draft", by].inc(max(1, len(chosen)))
        return [self._began(view.key) for view in chosen]

    def ejected(self, role: Role) -> int:
        """Ready workers of that role that are ejected now."""
        keys = [worker.incarnation for worker in self._registry.workers(role) if worker.ready]
        return len(keys) - len(self._ejection.admitted(keys))

    def succeeded(self, worker: Worker) -> None:
        self._ejection.succeeded(worker.incarnation)

    def failed(self, worker: Worker, error: DraftwoodError) -> None:
        """The worker could not do its part; what it refuses for good reason is no failure."""
        fault = isinstance(error, Unavailable | Internal) and error.reason not in NO_FAULT
        if fault and self._registry.holds(worker) and self._ejection.failed(worker.incarnation):
            METRICS.ejections[worker.role.value].inc()
            log.warning("worker_ejected", pool=worker.role.value, address=worker.address, error=str(error))

    def forget(self, worker: Worker) -> None:
        """The worker has left its pool."""
        self._ejection.forget(worker.incarnation)

    def _admitted(self, addresses: Iterable[str]) -> set[str]:
        by_incarnation = {self._registry.by_address(address).incarnation: address for address in addresses}
        return {by_incarnation[key] for key in self._ejection.admitted(list(by_incarnation))}

    def _began(self, address: str) -> Worker:
        worker = self._registry.by_address(address)
        self._ejection.began(worker.incarnation)
        return worker
