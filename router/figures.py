"""What the router's metrics say of its pools and requests, read when they are scraped."""

from __future__ import annotations

from functools import partial

from draftwood.telemetry import METRICS
from router.registry import Health, Role
from router.state import RouterState


def publish_figures(state: RouterState) -> None:
    """From now on this process's metrics tell of that router."""
    METRICS.requests_running.set_function(lambda: state.counters.requests)
    METRICS.draft_reattachments.set_function(lambda: state.counters.draft_reattachments)
    METRICS.verifier_migrations.set_function(lambda: state.counters.verifier_migrations)
    for role, gauge in METRICS.ejected.items():
        gauge.set_function(partial(state.chooser.ejected, Role(role)))
    for (role, health), gauge in METRICS.workers.items():
        gauge.set_function(partial(_count, state, Role(role), Health[health.upper()]))


def _count(state: RouterState, role: Role, health: Health) -> int:
    return sum(worker.role is role and worker.health is health for worker in state.registry.workers())
