"""The pools and counters as the wire's ``Status``."""

from __future__ import annotations

from draftwood.v1 import router_pb2
from router.registry import Role, Worker
from router.state import RouterState


def router_status(state: RouterState, incarnation: str) -> router_pb2.Status:
    registry, counters = state.registry, state.counters
    return router_pb2.Status(
        incarnation=incarnation,
        verifiers=[verifier_status(worker) for worker in registry.workers(Role.VERIFIER)],
        drafts=[draft_status(worker) for worker in registry.workers(Role.DRAFT)],
        requests=counters.requests,
        requests_total=counters.requests_total,
        requests_failed=counters.requests_failed,
        draft_reattachments=counters.draft_reattachments,
        verifier_migrations=counters.verifier_migrations,
    )


def verifier_status(worker: Worker) -> router_pb2.VerifierStatus:
    return router_pb2.VerifierStatus(
        address=worker.address,
        health=f"HEALTH_{worker.health.name}",
        model=worker.model,
        load=worker.verifier_load,
        sessions=worker.sessions,
    )


def draft_status(worker: Worker) -> router_pb2.DraftStatus:
    return router_pb2.DraftStatus(
        address=worker.address,
        health=f"HEALTH_{worker.health.name}",
        draft=worker.draft,
        load=worker.draft_load,
        sessions=worker.sessions,
    )
