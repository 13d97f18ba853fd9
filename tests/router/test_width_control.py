"""What verifiers are told of the width policy, over real gRPC, on a clock that the tests turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from draftwood.config import WidthPolicySettings
from draftwood.errors import Unavailable
from draftwood.telemetry import METRICS
from draftwood.v1 import draft_pb2, verifier_pb2
from router.registry import Health, Role
from router.width_control import RENEW_S, WidthControl
from tests.router.harness import ScriptedCluster, until
from tests.router.scripted import ScriptedVerifier

SETTINGS = WidthPolicySettings(step_ms=10.0)


@pytest.fixture
async def cluster() -> AsyncIterator[ScriptedCluster]:
    async with AsyncExitStack() as stack:
        yield ScriptedCluster(stack)


class Control:
    """A control over the router's own registry, looked at by hand; its verifier's load is what the test says."""

    def __init__(self, cluster: ScriptedCluster, settings: WidthPolicySettings = SETTINGS) -> None:
        self.now = 0.0
        self.registry = cluster.router._registry
        self.control = WidthControl(self.registry, "us", settings, lambda: self.now)
        self.steps = 0

    async def looks(self, count: int, step_ms: float) -> None:
        for _ in range(count):
            self.now += 1.0
            self.steps += 20
            for worker in self.registry.workers(Role.VERIFIER):
                worker.verifier_load = verifier_pb2.VerifierServiceWatchLoadResponse(
                    incarnation=worker.incarnation, running=4, step_ms=step_ms, steps=self.steps,
                    nodes_verified=80 * self.steps, max_sessions=8,
                )  # fmt: skip
            await self.control.look()


async def served(cluster: ScriptedCluster) -> ScriptedVerifier:
    verifier = await cluster.verifier()
    await cluster.serve([verifier], width_policy={"mode": "off"})
    (worker,) = cluster.router._registry.workers(Role.VERIFIER)
    await until(lambda: worker.health is Health.READY)
    cluster.router._links._tasks[worker].cancel()  # its reports are the test's
    await asyncio.sleep(0)
    worker.health = Health.READY
    return verifier


async def test_a_verifier_that_leaves_while_it_is_told_ends_nothing(cluster: ScriptedCluster) -> None:
    """Its channel is closed, and with it the call."""
    hanging, other = await cluster.verifier(hang_policy=True), await cluster.verifier()
    await cluster.serve([hanging, other], width_policy={"mode": "off"})
    registry = cluster.router._registry
    await until(lambda: all(worker.ready for worker in registry.workers(Role.VERIFIER)))
    control = Control(cluster, WidthPolicySettings(step_ms=10.0, look_s=0.05))
    for worker in registry.workers(Role.VERIFIER):
        cluster.router._links._tasks[worker].cancel()
        await asyncio.sleep(0)
        worker.health = Health.READY
    looking = asyncio.create_task(control.looks(3, 100.0))
    await until(lambda: bool(hanging.log.policies))
    cluster.router.remove(hanging.address)
    await looking
    assert other.log.policies and not hanging.joined


async def test_a_verifier_is_told_of_changes_and_renewed(cluster: ScriptedCluster) -> None:
    verifier = await served(cluster)
    control = Control(cluster)
    await control.looks(10, 5.0)
    assert verifier.log.policies == [], "nothing to say"
    narrower = METRICS.policy_changes["narrower"]._value.get()
    await control.looks(2, 100.0)
    (request,) = verifier.log.policies
    assert request.setter == "us" and request.policy.max_session_nodes == 16
    assert METRICS.policy_changes["narrower"]._value.get() == narrower + 1
    assert METRICS.policy_nodes._value.get() == 16 and METRICS.policy_capped["nodes"]._value.get() == 1
    assert METRICS.policy_pressure["step_time"]._value.get() == pytest.approx(10.0)
    await control.looks(40, 9.0)
    told = verifier.log.policies
    assert len(told) > 3 and all(request.setter == "us" for request in told)
    assert [r.policy.max_session_nodes for r in told[:2]] == [16, 16], "renewed before anything has changed"


async def test_what_it_has_lifted_it_says_once(cluster: ScriptedCluster) -> None:
    verifier = await served(cluster)
    control = Control(cluster)
    await control.looks(5, 5.0)
    await control.looks(8, 100.0)
    await control.looks(60, 1.0)
    last = verifier.log.policies[-1].policy
    assert not last.HasField("max_session_nodes") and last.growth == draft_pb2.GROWTH_RULE_UNSPECIFIED
    count = len(verifier.log.policies)
    await control.looks(int(3 * RENEW_S), 1.0)
    assert len(verifier.log.policies) == count


async def test_a_verifier_that_did_not_hear_is_told_again(cluster: ScriptedCluster) -> None:
    verifier = await served(cluster)
    control = Control(cluster)
    verifier.script.policy_error = Unavailable("LOADING", "not now")
    await control.looks(5, 5.0)
    await control.looks(4, 100.0)
    asked = len(verifier.log.policies)
    assert asked >= 2, "tried at each look"
    verifier.script.policy_error = None
    await control.looks(1, 100.0)
    assert len(verifier.log.policies) == asked + 1
    await control.looks(1, 100.0)
    assert len(verifier.log.policies) <= asked + 2


async def test_a_dry_run_decides_and_sends_nothing(cluster: ScriptedCluster) -> None:
    verifier = await served(cluster)
    control = Control(cluster, SETTINGS.model_copy(update={"mode": "dry_run"}))
    await control.looks(5, 5.0)
    await control.looks(5, 100.0)
    (decision,) = control.control.decisions.values()
    assert decision.caps.nodes is not None and verifier.log.policies == []


async def test_the_status_shows_decisions_with_their_inputs(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier], width_policy={"look_s": 0.05})
    async with asyncio.timeout(5):
        while not (status := await cluster.status()).verifiers[0].decision:
            await asyncio.sleep(0.02)
    assert status.verifiers[0].decision.startswith("on: no cap: queue_wait: as it should be (queue_wait 0.00,")
    assert status.verifiers[0].policy == verifier_pb2.Policy()
