from __future__ import annotations

import random

import pytest

from draftwood.errors import DraftwoodError, Internal, InvalidArgument, ResourceExhausted, Unavailable
from draftwood.v1 import draft_pb2, verifier_pb2
from router.chooser import Chooser
from router.ejection import FAILURES, FIRST_S
from router.registry import Health, Registry, Role, Worker


class Bench:
    """Two idle verifiers and two draft workers, and a clock to turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.registry = Registry(on_join=lambda worker: None, on_leave=lambda worker: None)
        self.chooser = Chooser(self.registry, random.Random(0), clock=lambda: self.now)
        for role in (Role.VERIFIER, Role.DRAFT):
            for k in range(2):
                address = f"{role}-{k}"
                self.registry.register(role, address, address, f"incarnation of {address}")
                worker = self.registry.by_address(address)
                worker.model, worker.draft = verifier_pb2.ModelInfo(name="m"), draft_pb2.DraftInfo(kind="lm")
                worker.verifier_load = verifier_pb2.VerifierServiceWatchLoadResponse(max_sessions=8)
                worker.draft_load = draft_pb2.DraftServiceWatchLoadResponse(max_sessions=8)
                self.registry.set_health(worker, Health.READY)

    def worker(self, address: str) -> Worker:
        return self.registry.by_address(address)

    def verifier(self) -> str:
        chosen = self.chooser.verifier("m", [])
        assert chosen
        return chosen.address

    def drafts(self) -> list[str]:
        return [worker.address for worker in self.chooser.drafts("m", 1, (), ())]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_nothing_is_kept_of_workers_that_have_left(bench: Bench) -> None:
    """Their broken calls are told of after they have gone."""
    for _ in range(3):
        old = bench.worker("verifier-0")
        bench.registry.register(Role.VERIFIER, old.worker_id, old.address, f"after {old.incarnation}")
        bench.chooser.forget(old)
        bench.chooser.failed(old, Unavailable("VERIFIER_LOST", "it has left the pool"))
    assert not bench.chooser._ejection._records


@pytest.mark.parametrize(
    ("error", "ejects"),
    [
        (Unavailable("TRANSPORT", "broken"), True),
        (Internal("INTERNAL", "a step failed"), True),
        (Unavailable("DRAINING", "it goes"), False),
        (Unavailable("LOADING", "it comes"), False),
        (Unavailable("DEADLINE", "the client's"), False),
        (ResourceExhausted("QUEUE_FULL", "many"), False),
        (InvalidArgument("SAMPLING", "the client's"), False),
    ],
)
def test_failures_eject_and_refusals_do_not(bench: Bench, error: DraftwoodError, ejects: bool) -> None:
    assert bench.verifier() == "verifier-0"
    for _ in range(FAILURES):
        bench.chooser.failed(bench.worker("verifier-0"), error)
    assert bench.verifier() == ("verifier-1" if ejects else "verifier-0")
    bench.now = FIRST_S
    assert bench.verifier() == "verifier-0", "the probe"
    if ejects:
        assert bench.verifier() == "verifier-1", "one at a time"
        bench.chooser.succeeded(bench.worker("verifier-0"))
        assert bench.verifier() == "verifier-0"


def test_another_process_at_the_same_address_is_not_ejected(bench: Bench) -> None:
    for _ in range(FAILURES):
        bench.chooser.failed(bench.worker("verifier-0"), Unavailable("TRANSPORT", "broken"))
    bench.worker("verifier-0").incarnation = "another"
    assert bench.verifier() == "verifier-0"


def test_drafts_are_ejected_by_themselves(bench: Bench) -> None:
    for _ in range(FAILURES):
        bench.chooser.failed(bench.worker("draft-0"), Unavailable("TRANSPORT", "no answer"))
    assert bench.drafts() == ["draft-1"] and bench.verifier() == "verifier-0"


def test_a_draft_that_failed_its_canary_comes_last(bench: Bench) -> None:
    assert bench.drafts() == ["draft-0"]
    load = bench.worker("verifier-1").verifier_load
    assert load
    load.canaries.add(incarnation="incarnation of draft-0", taken=0, steps=16, failed=True)
    assert bench.drafts() == ["draft-1"]


def test_a_draft_that_does_not_fit_the_model_is_left_out(bench: Bench) -> None:
    bench.worker("draft-0").unfit.add("m")
    assert bench.drafts() == ["draft-1"]
    assert bench.chooser.drafts("other", 1, (), ())[0].address == "draft-0"


def test_own_sessions_count_from_the_last_report_on(bench: Bench) -> None:
    """Several routers: what the report tells is all of theirs, what came since is this one's."""
    worker = bench.worker("verifier-0")
    assert worker.verifier_load
    worker.verifier_load.running, worker.sessions, worker.sessions_told = 5, 3, 2
    view = worker.verifier_view()
    assert view and view.sessions == 6
    worker.sessions = 0
    view = worker.verifier_view()
    assert view and view.sessions == 3


def test_avoids_the_one_that_was_lost(bench: Bench) -> None:
    chosen = bench.chooser.verifier("m", [], {bench.worker("verifier-0")})
    assert chosen and chosen.address == "verifier-1"
