"""The pools and counters as the wire's ``Status``, and as the controller sees them."""

from __future__ import annotations

from draftwood.v1 import router_pb2
from router.autoscaling import WorkerLoad
from router.registry import Role, Worker
from router.scaling import PoolState
from router.state import RouterState, WorkerState
from router.width_control import caps_to_proto


def router_status(state: RouterState, incarnation: str) -> router_pb2.Status:
    registry, counters = state.registry, state.counters
    return router_pb2.Status(
        incarnation=incarnation,
        verifiers=[verifier_status(worker, state) for worker in registry.workers(Role.VERIFIER)],
        drafts=[draft_status(worker) for worker in registry.workers(Role.DRAFT)],
        requests=counters.requests,
        requests_total=counters.requests_total,
        requests_failed=counters.requests_failed,
        draft_reattachments=counters.draft_reattachments,
        verifier_migrations=counters.verifier_migrations,
        pools=map(pool_status, state.pools.states),
    )


def pool_status(pool: PoolState) -> router_pb2.PoolStatus:
    return router_pb2.PoolStatus(
        name=pool.limits.name,
        role=pool.limits.role,
        wanted=pool.wanted,
        present=pool.present,
        ready=pool.ready,
        draining=pool.draining,
        min=pool.limits.min,
        max=pool.limits.max,
        error=pool.error,
        decision=pool.decision,
    )


def worker_state(worker: Worker) -> WorkerState:
    load = worker_load(worker)
    sessions = max(worker.sessions, load.sessions if load else 0)
    ready = load if worker.ready else None
    return WorkerState(worker.role.value, worker.worker_id, worker.address, worker.health.name, sessions, ready)


def worker_load(worker: Worker) -> WorkerLoad | None:
    """The last load report; None if there is none yet."""
    if draft := worker.draft_load:
        return WorkerLoad(worker.worker_id, draft.sessions, draft.max_sessions, idle_share=draft.idle_share)
    if load := worker.verifier_load:
        return WorkerLoad(
            worker.worker_id,
            load.running + load.waiting,
            load.max_sessions,
            queue_wait_ms=load.queue_wait_ms,
            step_ms=load.step_ms,
            steps=load.steps,
            narrow_steps=load.narrow_steps,
            pages_held=1 - load.free_pages / load.total_pages if load.total_pages else 0.0,
        )
    return None


def verifier_status(worker: Worker, state: RouterState) -> router_pb2.VerifierStatus:
    decision = state.widths.get(worker.incarnation)
    return router_pb2.VerifierStatus(
        address=worker.address,
        health=f"HEALTH_{worker.health.name}",
        model=worker.model,
        load=worker.verifier_load,
        sessions=worker.sessions,
        policy=caps_to_proto(decision.caps) if decision else None,
        decision=f"{state.settings.width_policy.mode}: {decision}" if decision else "",
    )


def draft_status(worker: Worker) -> router_pb2.DraftStatus:
    return router_pb2.DraftStatus(
        address=worker.address,
        health=f"HEALTH_{worker.health.name}",
        draft=worker.draft,
        load=worker.draft_load,
        sessions=worker.sessions,
    )
