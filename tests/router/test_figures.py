"""What the router's metrics say of pools, ejections and choices."""

from __future__ import annotations

import random

import pytest

from draftwood.errors import Internal
from draftwood.telemetry import METRICS, MOST_POOLS, Metrics
from draftwood.v1 import draft_pb2, verifier_pb2
from router.chooser import Chooser
from router.ejection import FAILURES
from router.registry import Health, Registry, Role
from router.scaling import PoolLimits, PoolState
from router.state import Pools


def value(name: str, /, **labels: str) -> float:
    found = METRICS.registry.get_sample_value(name, labels)
    assert found is not None, (name, labels)
    return found


def pool(name: str, role: str, wanted: int, ready: int = 0) -> PoolState:
    return PoolState(PoolLimits(name, role, 0, None, 1.0), wanted, present=wanted, ready=ready, draining=1)


def test_pools_are_told_with_the_changes_of_their_sizes() -> None:
    pools = Pools()
    before = {change: value("draftwood_pool_changes_total", role="draft", change=change) for change in ("up", "down")}
    pools.publish((pool("copies", "draft", 2, ready=1), pool("large", "verifier", 1)))
    assert value("draftwood_pool_workers", name="copies", count="wanted") == 2
    assert value("draftwood_pool_workers", name="copies", count="ready") == 1
    assert value("draftwood_pool_workers", name="large", count="draining") == 1
    for wanted in (4, 4, 3, 5):
        pools.publish((pool("copies", "draft", wanted),))
    assert value("draftwood_pool_changes_total", role="draft", change="up") == before["up"] + 2
    assert value("draftwood_pool_changes_total", role="draft", change="down") == before["down"] + 1
    assert pools.states == (pool("copies", "draft", 5),)


def test_pools_beyond_the_most_share_a_name() -> None:
    metrics = Metrics()
    for k in range(MOST_POOLS + 5):
        metrics.pool_workers(f"p{k}")["wanted"].set(k)
    names = {s.labels["name"] for family in metrics.registry.collect() for s in family.samples if "name" in s.labels}
    assert len(names) == MOST_POOLS + 1 and "other" in names


class Bench:
    """A registry with ready workers and the chooser over it."""

    def __init__(self, verifiers: int, drafts: int) -> None:
        self.now = 0.0
        self.registry = Registry(on_join=lambda worker: None, on_leave=lambda worker: None)
        self.chooser = Chooser(self.registry, random.Random(1), clock=lambda: self.now)
        for role, count in ((Role.VERIFIER, verifiers), (Role.DRAFT, drafts)):
            for k in range(count):
                name = f"{role}{k}"
                self.registry.register(role, name, name, f"incarnation of {name}")
                worker = self.registry.by_address(name)
                worker.model = verifier_pb2.ModelInfo(name="m") if role is Role.VERIFIER else None
                worker.draft = draft_pb2.DraftInfo(kind="ngram") if role is Role.DRAFT else None
                worker.verifier_load = verifier_pb2.VerifierServiceWatchLoadResponse(max_sessions=8)
                worker.draft_load = draft_pb2.DraftServiceWatchLoadResponse(max_sessions=8)
                self.registry.set_health(worker, Health.READY)

    def chosen(self, role: str, by: str) -> float:
        return value("draftwood_choices_total", role=role, by=by)


@pytest.mark.parametrize(("count", "by"), [(0, "none"), (1, "only"), (3, "cost")])
def test_choices_of_verifiers_are_counted_by_what_decided(count: int, by: str) -> None:
    bench = Bench(count, 0)
    before = bench.chosen("verifier", by)
    assert (bench.chooser.verifier("m", [b"beginning"]) is None) == (count == 0)
    assert bench.chosen("verifier", by) == before + 1


def test_a_verifier_chosen_for_what_it_knows_is_counted_as_such() -> None:
    bench = Bench(3, 0)
    bench.chooser.verifier("m", [b"beginning"])
    before = bench.chosen("verifier", "prefix")
    bench.chooser.verifier("m", [b"beginning"])
    assert bench.chosen("verifier", "prefix") == before + 1


@pytest.mark.parametrize(("count", "by", "more"), [(0, "none", 1), (2, "only", 2), (4, "cost", 2)])
def test_choices_of_draft_workers_are_counted(count: int, by: str, more: int) -> None:
    bench = Bench(1, count)
    before = bench.chosen("draft", by)
    bench.chooser.drafts("m", 2, serving=(), kinds=())
    assert bench.chosen("draft", by) == before + more
    bench.chooser.drafts("m", 0, serving=(), kinds=())
    assert bench.chosen("draft", by) == before + more, "none is wanted, so none is chosen"


def test_ejections_and_who_is_out_now_are_told() -> None:
    bench = Bench(3, 0)
    worker = bench.registry.by_address("verifier0")
    before = value("draftwood_ejections_total", role="verifier")
    for _ in range(FAILURES):
        assert bench.chooser.ejected(Role.VERIFIER) == 0
        bench.chooser.failed(worker, Internal("INTERNAL", "a step failed"))
    assert bench.chooser.ejected(Role.VERIFIER) == 1 and bench.chooser.ejected(Role.DRAFT) == 0
    assert value("draftwood_ejections_total", role="verifier") == before + 1
    bench.now = 6.0
    assert bench.chooser.ejected(Role.VERIFIER) == 0, "its time is over: the next session tries it"
