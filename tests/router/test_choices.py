"""Several texts of one request at the router, with scripted verifiers over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from draftwood.choices import choice_seed
from draftwood.errors import InvalidArgument
from draftwood.v1 import verifier_pb2
from tests.router.harness import Answer, ScriptedCluster, until
from tests.router.scripted import scripted_text

SAMPLED = verifier_pb2.Sampling(seed=5, temperature=1)


@pytest.fixture
async def cluster() -> AsyncIterator[ScriptedCluster]:
    async with AsyncExitStack() as stack:
        yield ScriptedCluster(stack)


async def answers(cluster: ScriptedCluster, tokens: int, n: int, **fields: Any) -> dict[int, Answer]:
    """What came of each text; an error is the last answer's."""
    texts = {k: Answer() for k in range(n)}
    try:
        async for response in cluster.call(tokens, n=n, sampling=SAMPLED, **fields):
            index = n - 1 if response.event.HasField("error") else response.event.index
            texts[index].take(response.event)
    except grpc.RpcError:
        assert texts[n - 1].error
    return texts


async def test_each_text_has_its_seed_its_tokens_and_its_end(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    for k, answer in (await answers(cluster, 12, 3)).items():
        seed = choice_seed(5, k)
        assert [started.seed for started in answer.started] == [seed]
        assert answer.tokens == scripted_text(seed, 12)
        assert answer.finished and answer.finished.usage.completion_tokens == 12
    assert not any(request.generation.HasField("n") for request in verifier.log.requests)
    assert len({request.session_id for request in verifier.log.requests}) == 3
    status = await cluster.status()
    assert (status.requests, status.requests_total, status.requests_failed) == (0, 1, 0)


async def test_a_dead_verifier_moves_its_texts_and_no_others(cluster: ScriptedCluster) -> None:
    dying, heir = await cluster.verifier(step_s=0.01, die_at=7, max_sessions=2), await cluster.verifier(step_s=0.01)
    await cluster.serve([dying, heir])
    texts = await answers(cluster, 20, 4)
    moved = [request for request in heir.log.requests if request.generation.resume_tokens]
    assert 1 <= len(moved) <= 3, "the dead verifier had some of the texts"
    for k, answer in texts.items():
        assert answer.tokens == scripted_text(choice_seed(5, k), 20) and len(answer.started) == 1
        assert answer.finished and answer.finished.usage.completion_tokens == 20
    assert (await cluster.status()).verifier_migrations == len(dying.log.requests)


async def test_a_verdict_on_one_text_ends_the_request_and_gives_all_back(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier(step_s=0.01, verdict=InvalidArgument("SAMPLING", "no"), verdict_at=3)
    await cluster.serve([verifier])
    texts = await answers(cluster, 1000, 3)
    assert texts[2].error.reason == "SAMPLING"
    await until(lambda: verifier._running == 0)
    status = await cluster.status()
    assert (status.requests, status.requests_failed, status.verifiers[0].sessions) == (0, 1, 0)


async def test_each_text_takes_a_place(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier(step_s=0.02)
    await cluster.serve([verifier], max_requests=4)
    running = asyncio.create_task(answers(cluster, 40, 3))
    await until(lambda: cluster.router._state.counters.requests == 3)
    assert (await cluster.generate(2, n=2, sampling=SAMPLED)).error.reason == "QUEUE_FULL"
    assert (await cluster.generate(2)).finished
    assert all(answer.finished for answer in (await running).values())
    refusal = await cluster.generate(2, n=5, sampling=SAMPLED)
    assert (refusal.error.reason, refusal.error.field) == ("CHOICES", "generation.n")
    assert len((await answers(cluster, 2, 4))[3].tokens) == 2


async def test_cancel_reaches_every_text(cluster: ScriptedCluster) -> None:
    verifier, draft = await cluster.verifier(step_s=0.02), await cluster.draft()
    await cluster.serve([verifier], [draft])
    call = cluster.call(1000, n=3, sampling=SAMPLED)
    await until(lambda: len(draft.attached) == 3)
    await call.read()
    call.cancel()
    await until(lambda: len(verifier.log.cancelled) == 3 and len(draft.detached) == 3)
    await until(lambda: cluster.router._state.counters.requests == 0)
