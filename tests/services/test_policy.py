"""The router's caps on the verifier, and requests in a hurry, through the real servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draftwood.v1 import draft_pb2, verifier_pb2, verifier_pb2_grpc
from tests.services.stack import Cluster, Stack, collect, engine_of, slow_down, until

OPTIONS: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 5}


async def set_policy(stack: Stack, cluster: Cluster, setter: str = "", **caps: int) -> None:
    stub: Any = verifier_pb2_grpc.VerifierServiceStub(await stack.channel(cluster.verifier))
    policy = verifier_pb2.Policy(**caps)  # type: ignore[arg-type]
    await stub.SetPolicy(verifier_pb2.VerifierServiceSetPolicyRequest(policy=policy, setter=setter))


async def test_policy_caps_the_nodes_of_a_step_and_changes_no_token(stack: Stack) -> None:
    cluster = await stack.cluster()
    slow_down(cluster.verifier, 0.01)
    want = await cluster.plain("The sky is", **OPTIONS)
    for caps, least, most in (
        ({}, 3, 16),
        ({"max_session_nodes": 2}, 1, 2),
        ({"max_step_nodes": 0}, 0, 0),
        ({}, 3, 16),
    ):
        await set_policy(stack, cluster, **caps)
        text = await cluster.speculative("The sky is", **OPTIONS)
        assert text.tokens == want and text.finished is not None
        usage = text.finished.usage
        assert usage.nodes_verified <= most * usage.steps
        assert usage.nodes_verified >= 0.3 * least * usage.steps


async def test_policy_lifted_in_mid_text_wakes_the_drafts(stack: Stack) -> None:
    cluster = await stack.cluster()
    slow_down(cluster.verifier, 0.01)
    options = OPTIONS | {"max_tokens": 120}
    want = await cluster.plain("The sky is", **options)
    await set_policy(stack, cluster, max_session_nodes=0)
    task = asyncio.create_task(cluster.speculative("The sky is", **options))
    await until(lambda: any(s.generated > 40 and s.drafts for s in cluster.engine.sessions.values()))
    assert all(s.stats.verified == 0 for s in cluster.engine.sessions.values())
    await set_policy(stack, cluster)
    text = await task
    assert text.tokens == want and text.finished is not None
    assert text.finished.usage.nodes_accepted > 10


async def test_depth_is_capped_at_the_verifier_and_draft_workers_draw_no_deeper(stack: Stack) -> None:
    """The draft worker keeps to it as well: a round takes it one forward a level."""
    cluster = await stack.cluster([{"nodes_per_level": 0, "lookahead_levels": 0, "depth": 6}], canary=False)
    slow_down(cluster.verifier, 0.01)
    want = await cluster.plain("The sky is", **OPTIONS)
    sent: dict[int | None, float] = {}
    for depth in (None, 1, 2, None):
        await set_policy(stack, cluster, **({} if depth is None else {"max_depth": depth}))
        text = await cluster.speculative("The sky is", **OPTIONS)
        assert text.tokens == want and text.finished is not None
        usage = text.finished.usage
        assert len(usage.verified_by_depth) <= (depth or 16) and usage.nodes_verified > 0
        sent[depth] = usage.nodes_drafted / usage.steps
    assert len(text.finished.usage.verified_by_depth) > 2
    assert sent[1] <= 4, "four children of the anchor are all that a level has"


async def test_chains_are_drawn_when_they_are_asked_for(stack: Stack) -> None:
    cluster = await stack.cluster([{"nodes_per_level": 0, "lookahead_levels": 0}], canary=False)
    slow_down(cluster.verifier, 0.01)
    want = await cluster.plain("The sky is", **OPTIONS)
    await set_policy(stack, cluster, growth=draft_pb2.GROWTH_RULE_CHAIN)
    text = await cluster.speculative("The sky is", **OPTIONS)
    assert text.tokens == want and text.finished is not None
    by_depth = text.finished.usage.verified_by_depth
    assert len(by_depth) > 1 and all(count <= text.finished.usage.steps for count in by_depth), by_depth
    await set_policy(stack, cluster)
    text = await cluster.speculative("The sky is", **OPTIONS)
    assert text.tokens == want and text.finished is not None
    by_depth = text.finished.usage.verified_by_depth
    assert by_depth[0] > text.finished.usage.steps, "and trees again when not"


async def test_a_draft_that_comes_later_hears_of_the_policy(stack: Stack) -> None:
    verifier = await stack.verifier(canary=False)
    slow_down(verifier, 0.01)
    channel = await stack.channel(verifier)
    stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
    policy = verifier_pb2.Policy(growth=draft_pb2.GROWTH_RULE_CHAIN, max_depth=2)
    await stub.SetPolicy(verifier_pb2.VerifierServiceSetPolicyRequest(policy=policy))
    draft = await stack.draft(nodes_per_level=0, lookahead_levels=0)
    router = await stack.router([verifier], [draft])
    text = await collect(await stack.client(router), "The sky is", **OPTIONS)
    assert text.finished is not None
    usage = text.finished.usage
    assert usage.nodes_drafted <= 2 * (usage.steps + 1) and usage.nodes_verified > usage.steps / 2


async def test_a_routers_policy_lapses_and_an_operators_stays(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_service.policy.LEASE_S", 0.3)
    monkeypatch.setattr("verifier_service.server.LEASE_S", 0.3)
    cluster = await stack.cluster(drafts=())
    planner = cluster.engine.planner
    await set_policy(stack, cluster, max_session_nodes=8, max_depth=5)
    await set_policy(stack, cluster, setter="a router", max_session_nodes=2, max_depth=1)
    assert (planner.policy.max_session_nodes, planner.max_depth) == (2, 1)
    await until(lambda: (planner.policy.max_session_nodes, planner.max_depth) == (8, 5), 3.0)
    (state,) = (await cluster.client.status()).verifiers
    await asyncio.sleep(0.2)
    (state,) = (await cluster.client.status()).verifiers
    assert state.cap == "8 nodes, depth 5"


async def test_the_router_narrows_an_overloaded_verifier_and_lets_go_of_it(stack: Stack) -> None:
    """The policy's whole way: load report, decision, cap at the verifier and back, with texts as without it."""
    verifier = await stack.verifier(max_sessions=2)
    slow_down(verifier, 0.02)
    draft = await stack.draft()
    policy = {"look_s": 0.05, "narrow_s": 0.1, "widen_s": 0.3, "queue_wait_ms": 100.0}
    router = await stack.router([verifier], [draft], width_policy=policy)
    client = await stack.client(router)
    planner = engine_of(verifier).planner
    want = (await collect(client, "The sky is", speculate=False, **OPTIONS)).tokens
    caps: list[int | None] = []
    tasks = [asyncio.create_task(collect(client, "The sky is", **OPTIONS)) for _ in range(12)]
    while not all(task.done() for task in tasks):
        caps.append(planner.policy.max_session_nodes)
        await asyncio.sleep(0.01)
    assert all(task.result().tokens == want for task in tasks)
    assert caps[0] is None and min(cap or 64 for cap in caps) <= 4, "narrowed under the load"
    caps_of = lambda: (planner.policy.max_session_nodes, planner.max_depth)  # noqa: E731
    await until(lambda: caps_of() == (None, verifier.settings.max_depth), 5.0, "the caps are lifted")
    (state,) = (await client.status()).verifiers
    assert state.decision.startswith("on: no cap"), state.decision


async def test_request_in_a_hurry_is_admitted_before_those_that_wait(stack: Stack) -> None:
    cluster = await stack.cluster(max_sessions=1)
    slow_down(cluster.verifier, 0.01)
    done: list[str] = []

    async def one(name: str, **more: Any) -> None:
        await cluster.speculative("The sky is", **OPTIONS, **more)
        done.append(name)

    tasks = [asyncio.create_task(one("running"))]
    await until(lambda: len(cluster.engine.sessions) == 1)
    for k, (name, more) in enumerate({"a": {}, "b": {}, "urgent": {"deadline_ms": 200}}.items(), 1):
        tasks.append(asyncio.create_task(one(name, **more)))
        await until(lambda k=k: len(cluster.engine.waiting) == k)  # type: ignore[misc]
    await asyncio.gather(*tasks)
    assert done == ["running", "urgent", "a", "b"]


@pytest.mark.parametrize("deadline_ms", [3_600_001, 2**32 - 1])
async def test_deadline_of_more_than_an_hour_is_refused(stack: Stack, deadline_ms: int) -> None:
    cluster = await stack.cluster(drafts=())
    with pytest.raises(Exception, match=f"{deadline_ms} ms; at most 3600000 ms") as caught:
        await cluster.speculative("x", max_tokens=2, deadline_ms=deadline_ms)
    assert caught.value.reason == "DEADLINE_TOO_LONG" and caught.value.field == "generation.deadline_ms"  # type: ignore[attr-defined]
