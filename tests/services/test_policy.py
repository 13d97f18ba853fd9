"""The router's caps on the verifier, and requests in a hurry, through the real servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draftwood.v1 import verifier_pb2, verifier_pb2_grpc
from tests.services.stack import Cluster, Stack, slow_down, until

OPTIONS: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 5}


async def set_policy(stack: Stack, cluster: Cluster, **caps: int) -> None:
    stub: Any = verifier_pb2_grpc.VerifierServiceStub(await stack.channel(cluster.verifier))
    policy = verifier_pb2.Policy(**caps)
    await stub.SetPolicy(verifier_pb2.VerifierServiceSetPolicyRequest(policy=policy))


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
