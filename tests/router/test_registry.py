from __future__ import annotations

import asyncio
import time

import pytest

from draftwood.errors import DraftwoodError, FailedPrecondition
from draftwood.v1 import draft_pb2, verifier_pb2
from router.registry import Health, Registry, Role, Worker


class Recorder:
    def __init__(self) -> None:
        self.joined: list[str] = []
        self.left: list[str] = []
        self.registry = Registry(
            on_join=lambda worker: self.joined.append(worker.address),
            on_leave=lambda worker: self.left.append(worker.address),
        )


class CancelledCall:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> bool:
        self.cancelled = True
        return True


@pytest.fixture
def pools() -> Recorder:
    return Recorder()


def only(registry: Registry, role: Role = Role.VERIFIER) -> Worker:
    (worker,) = registry.workers(role)
    return worker


def make_ready(registry: Registry, worker: Worker, running: int = 0) -> None:
    worker.model = verifier_pb2.ModelInfo(name="m")
    worker.draft = draft_pb2.DraftInfo(kind="lm")
    worker.verifier_load = verifier_pb2.VerifierServiceWatchLoadResponse(running=running, waiting=1, max_sessions=4)
    worker.draft_load = draft_pb2.DraftServiceWatchLoadResponse(sessions=running, max_sessions=4)
    registry.set_health(worker, Health.READY)


def test_a_restarted_worker_replaces_its_former_self(pools: Recorder) -> None:
    pools.registry.register(Role.DRAFT, "d0", "h:1", "first")
    old = only(pools.registry, Role.DRAFT)
    call = CancelledCall()
    old.calls.add(call)
    pools.registry.register(Role.DRAFT, "d0", "h:2", "second")
    assert only(pools.registry, Role.DRAFT).address == "h:2"
    assert pools.left == ["h:1"]
    assert not pools.registry.alive(old) and call.cancelled


def test_a_replaced_incarnation_can_never_come_back(pools: Recorder) -> None:
    pools.registry.register(Role.DRAFT, "d0", "h:1", "first")
    pools.registry.register(Role.DRAFT, "d0", "h:2", "second")
    with pytest.raises(FailedPrecondition) as refusal:
        pools.registry.register(Role.DRAFT, "d0", "h:1", "first")
    assert refusal.value.reason == "FENCED"
    assert only(pools.registry, Role.DRAFT).incarnation == "second"


def test_registering_again_changes_nothing(pools: Recorder) -> None:
    pools.registry.register(Role.VERIFIER, "v0", "h:1", "one")
    worker = only(pools.registry)
    pools.registry.register(Role.VERIFIER, "v0", "h:1", "one")
    assert only(pools.registry) is worker and pools.joined == ["h:1"]


def test_a_new_process_at_a_known_address_replaces_who_was_there(pools: Recorder) -> None:
    pools.registry.register(Role.DRAFT, "d0", "h:1", "one")
    pools.registry.register(Role.DRAFT, "d1", "h:1", "two")
    assert only(pools.registry, Role.DRAFT).worker_id == "d1"


def test_a_static_worker_may_register_later(pools: Recorder) -> None:
    pools.registry.add_static(Role.VERIFIER, "h:1")
    pools.registry.identify(only(pools.registry), "one")
    pools.registry.register(Role.VERIFIER, "v0", "h:1", "one")
    pools.registry.register(Role.VERIFIER, "v0", "h:1", "one")
    assert only(pools.registry).worker_id == "v0"


def test_a_foreign_process_behind_a_registered_address_is_refused(pools: Recorder) -> None:
    pools.registry.register(Role.VERIFIER, "v0", "h:1", "one")
    with pytest.raises(FailedPrecondition, match="another process"):
        pools.registry.identify(only(pools.registry), "two")


@pytest.mark.parametrize("missing", ["worker_id", "address", "incarnation"])
def test_incomplete_registrations_are_refused(pools: Recorder, missing: str) -> None:
    words = {"worker_id": "v0", "address": "h:1", "incarnation": "one", missing: ""}
    with pytest.raises(DraftwoodError, match="registers with"):
        pools.registry.register(Role.VERIFIER, **words)
    assert pools.registry.workers() == []


def test_only_ready_workers_are_offered_to_the_balancer(pools: Recorder) -> None:
    pools.registry.add_static(Role.VERIFIER, "h:1")
    pools.registry.add_static(Role.DRAFT, "h:2")
    verifier, draft = only(pools.registry), only(pools.registry, Role.DRAFT)
    assert pools.registry.verifier_views() == [] and pools.registry.draft_views("m", ()) == []
    make_ready(pools.registry, verifier, running=2)
    make_ready(pools.registry, draft, running=2)
    assert [view.load for view in pools.registry.verifier_views()] == [0.75]
    assert [view.load for view in pools.registry.draft_views("m", ())] == [0.5]
    for state in (Health.DRAINING, Health.LOST):
        pools.registry.set_health(verifier, state)
        pools.registry.set_health(draft, state)
        assert pools.registry.verifier_views() == [] and pools.registry.draft_views("m", ()) == []


def test_own_sessions_count_before_the_worker_reports_them(pools: Recorder) -> None:
    pools.registry.add_static(Role.DRAFT, "h:2")
    worker = only(pools.registry, Role.DRAFT)
    make_ready(pools.registry, worker)
    worker.sessions = 4
    assert pools.registry.draft_views("m", ())[0].full


def test_a_lost_worker_keeps_its_model_known(pools: Recorder) -> None:
    pools.registry.add_static(Role.VERIFIER, "h:1")
    make_ready(pools.registry, only(pools.registry))
    pools.registry.lost(only(pools.registry))
    assert list(pools.registry.models()) == ["m"] and only(pools.registry).health is Health.LOST


async def test_waiters_wake_on_every_change_and_at_the_timeout(pools: Recorder) -> None:
    waiting = asyncio.create_task(pools.registry.changed(10))
    await asyncio.sleep(0)
    pools.registry.add_static(Role.VERIFIER, "h:1")
    await asyncio.wait_for(waiting, 1)
    start = time.monotonic()
    await pools.registry.changed(0.05)
    assert 0.04 < time.monotonic() - start < 1
