"""The router against scripted workers over real gRPC, in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from draftwood.config import VerifierSettings
from draftwood.errors import FailedPrecondition, Internal, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from draftwood.rpc.status import from_rpc_error
from draftwood.tickets import check_ticket
from draftwood.v1 import router_pb2, verifier_pb2
from router.registry import Role
from router.scaling import PoolLimits, PoolState
from router.server import LONGEST_DEADLINE_S
from tests.router.harness import ScriptedCluster, until
from tests.router.scripted import ScriptedVerifier, scripted_text


@pytest.fixture
async def cluster() -> AsyncIterator[ScriptedCluster]:
    async with AsyncExitStack() as stack:
        yield ScriptedCluster(stack)


async def test_streams_the_verifiers_text(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier()])
    answer = await cluster.generate(9)
    assert answer.tokens == scripted_text(5, 9)
    assert [chunk.pieces[0] for chunk in answer.chunks] == [f"{token} " for token in answer.tokens]
    (started,) = answer.started
    assert (started.model, started.seed, started.prompt_tokens) == ("m", 5, 2)
    assert answer.finished and answer.finished.usage.completion_tokens == 9 and answer.status is None


async def test_a_request_without_a_seed_gets_one_and_is_told(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    one, two = [await cluster.generate(4, sampling=verifier_pb2.Sampling(temperature=1)) for _ in range(2)]
    assert one.started[0].seed != two.started[0].seed
    assert one.tokens == scripted_text(one.started[0].seed, 4)
    assert verifier.log.requests[0].generation.sampling.temperature == 1


async def test_forwards_what_is_left_of_the_deadline(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    for timeout_s in (7.0, None):
        await cluster.generate(1, timeout=timeout_s)
    bounded_s, unbounded_s = verifier.log.deadlines
    assert bounded_s is not None and 5.0 < bounded_s < 7.5
    assert unbounded_s is None or unbounded_s > LONGEST_DEADLINE_S


async def test_unknown_model_names_the_served_ones(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier("m"), await cluster.verifier("n")])
    answer = await cluster.generate(model="x")
    assert answer.error.reason == "MODEL_UNKNOWN" and "m, n" in answer.error.message
    assert answer.status.status == "NOT_FOUND" and answer.status.reason == "MODEL_UNKNOWN"


async def test_the_model_may_be_left_out_only_if_one_is_served(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier("m"), await cluster.verifier("n")])
    answer = await cluster.generate()
    assert isinstance(answer.error, InvalidArgument) and answer.error.reason == "MODEL_REQUIRED"
    assert (await cluster.generate(2, model="n")).started[0].model == "n"
    models = await cluster.stub.ListModels(router_pb2.ListModelsRequest())
    assert sorted(model.name for model in models.models) == ["m", "n"]


async def test_no_ready_verifier_is_unavailable_with_a_hint(cluster: ScriptedCluster) -> None:
    await cluster.serve([])
    answer = await cluster.generate()
    assert isinstance(answer.error, Unavailable) and answer.error.reason == "NO_VERIFIER"
    assert answer.error.retry_after_ms > 0 and answer.status.retry_after_ms > 0


async def test_a_worker_counts_once_it_is_healthy(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await verifier.set_serving(False)
    router = cluster.serve([verifier])
    serving = asyncio.create_task(router)
    await asyncio.sleep(0.2)
    assert [worker.health for worker in cluster.router.workers()] == ["STARTING"]
    await verifier.set_serving(True)
    await serving
    assert (await cluster.generate(3)).tokens == scripted_text(5, 3)


async def test_over_the_cap_the_refusal_comes_at_once(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier(step_s=0.05)], max_requests=2)
    running = [asyncio.create_task(cluster.generate(20)) for _ in range(2)]
    await until(lambda: cluster.router._state.counters.requests == 2)
    begun = time.monotonic()
    refused = await cluster.generate()
    assert time.monotonic() - begun < 0.5
    assert isinstance(refused.error, ResourceExhausted) and refused.error.reason == "QUEUE_FULL"
    assert refused.status.status == "RESOURCE_EXHAUSTED" and refused.status.retry_after_ms > 0
    assert [answer.tokens for answer in await asyncio.gather(*running)] == [scripted_text(5, 20)] * 2
    assert (await cluster.generate(1)).finished


async def test_a_verdict_goes_in_band_and_then_as_status(cluster: ScriptedCluster) -> None:
    verdict = InvalidArgument("MAX_TOKENS", "too many", field="generation.max_tokens")
    other = await cluster.verifier()
    await cluster.serve([await cluster.verifier(verdict=verdict, verdict_at=3), other])
    refused = await cluster.generate(9)
    assert other.log.requests == []
    assert refused.tokens == scripted_text(5, 3)
    for told in (refused.error, refused.status):
        assert (type(told), told.reason, told.field) == (InvalidArgument, "MAX_TOKENS", "generation.max_tokens")
    status = await cluster.status()
    assert (status.requests_failed, status.verifier_migrations) == (1, 0)


async def test_cancel_reaches_verifier_and_drafts(cluster: ScriptedCluster) -> None:
    verifier, draft = await cluster.verifier(step_s=0.02), await cluster.draft()
    await cluster.serve([verifier], [draft])
    call = cluster.call(1000)
    async for response in call:
        if response.event.HasField("chunk") and draft.attached:
            break
    call.cancel()
    await until(lambda: bool(verifier.log.cancelled) and bool(draft.detached))
    assert verifier.log.cancelled == draft.detached == [verifier.log.requests[0].session_id]
    await until(lambda: cluster.router._state.counters.requests == 0)
    status = await cluster.status()
    assert (status.verifiers[0].sessions, status.drafts[0].sessions, status.requests_failed) == (0, 0, 0)


async def test_drafts_of_distinct_kinds_are_attached_each_with_a_ticket_of_its_own(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier(step_s=0.02)
    drafts = [await cluster.draft("lm"), await cluster.draft("lm"), await cluster.draft("ngram")]
    await cluster.serve([verifier], drafts, drafts_per_session=2)
    answer = await cluster.generate(30)
    assert answer.tokens == scripted_text(5, 30)
    assert any(chunk.accepted == 2 for chunk in answer.chunks)
    (request,) = verifier.log.requests
    attached = [entry for draft in drafts for entry in draft.history]
    assert sorted(draft.settings.kind for draft in drafts if draft.history) == ["lm", "ngram"]
    assert {(e.session_id, e.verifier_address) for e in attached} == {(request.session_id, verifier.address)}
    assert len(request.ticket) == 32
    for draft in drafts:
        for entry in draft.history:
            check_ticket(entry.ticket, request.ticket, request.session_id, draft.incarnation, 0.0)
    assert len({entry.ticket for entry in attached}) == 2, "each worker has its own"
    await until(lambda: not any(draft.attached for draft in drafts))


async def test_without_speculation_nobody_is_attached_nor_could_be(cluster: ScriptedCluster) -> None:
    verifier, draft = await cluster.verifier(step_s=0.01), await cluster.draft()
    await cluster.serve([verifier], [draft])
    await cluster.generate(10, speculation=verifier_pb2.Speculation(disabled=True))
    assert draft.history == [] and verifier.log.requests[0].ticket == b""


async def test_a_draft_that_hangs_does_not_hold_up_the_tokens(cluster: ScriptedCluster) -> None:
    verifier, draft = await cluster.verifier(), await cluster.draft(hang=True)
    await cluster.serve([verifier], [draft])
    begun = time.monotonic()
    assert (await cluster.generate(10)).tokens == scripted_text(5, 10)
    assert time.monotonic() - begun < 2


async def test_a_lost_draft_is_replaced(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier(step_s=0.02)
    drafts = [await cluster.draft(), await cluster.draft()]
    await cluster.serve([verifier], drafts, drafts_per_session=1)
    answering = asyncio.create_task(cluster.generate(150))
    await until(lambda: any(draft.attached for draft in drafts))
    first = next(draft for draft in drafts if draft.attached)
    other = next(draft for draft in drafts if draft is not first)
    await first.stop()
    await until(lambda: bool(other.attached))
    assert (await answering).tokens == scripted_text(5, 150)
    assert (await cluster.status()).draft_reattachments == 1
    assert [draft.health for draft in (await cluster.status()).drafts].count(router_pb2.HEALTH_LOST) == 1


async def test_a_draft_that_refuses_is_passed_over(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier(step_s=0.02)
    unfit = await cluster.draft(refusal=FailedPrecondition("TOKENIZER_MISMATCH", "other tokens"))
    fit = await cluster.draft()
    await cluster.serve([verifier], [unfit, fit], drafts_per_session=1)
    answering = asyncio.create_task(cluster.generate(60))
    await until(lambda: bool(fit.attached))
    assert (await answering).tokens == scripted_text(5, 60)
    assert (await cluster.status()).draft_reattachments == 0


@pytest.mark.parametrize("repeat_from", [None, 2])
async def test_a_dead_verifier_is_replaced_without_a_seam(cluster: ScriptedCluster, repeat_from: int | None) -> None:
    dying = await cluster.verifier(step_s=0.01, die_at=7)
    heir = await cluster.verifier(repeat_from=repeat_from)
    await cluster.serve([dying, heir])
    answer = await cluster.generate(20)
    assert answer.tokens == scripted_text(5, 20)
    assert len(answer.started) == 1 and answer.status is None
    (replayed,) = heir.log.requests
    # What the dying server had still in its hands is lost with it, and asked for again.
    delivered = list(replayed.generation.resume_tokens)
    assert 0 < len(delivered) <= 7 and delivered == scripted_text(5, len(delivered))
    assert replayed.generation.sampling.seed == 5 and replayed.generation.text == "one two"
    assert replayed.session_id != answer.started[0].session_id
    assert answer.finished and answer.finished.usage.completion_tokens == 20
    status = await cluster.status()
    assert status.verifier_migrations == 1
    assert [verifier.health for verifier in status.verifiers] == [router_pb2.HEALTH_LOST, router_pb2.HEALTH_READY]


async def test_a_verifier_that_dies_before_its_last_word_is_asked_elsewhere(cluster: ScriptedCluster) -> None:
    dying, heir = await cluster.verifier(step_s=0.01, die_at=8), await cluster.verifier()
    await cluster.serve([dying, heir])
    answer = await cluster.generate(8)
    assert answer.tokens == scripted_text(5, 8)
    assert answer.finished and answer.finished.reason == verifier_pb2.FINISH_REASON_LENGTH and heir.log.requests


async def test_drafts_follow_the_session_to_its_new_verifier(cluster: ScriptedCluster) -> None:
    dying, heir = await cluster.verifier(step_s=0.02, die_at=12), await cluster.verifier(step_s=0.02)
    draft = await cluster.draft()
    await cluster.serve([dying, heir], [draft])
    assert (await cluster.generate(40)).tokens == scripted_text(5, 40)
    assert [entry.verifier_address for entry in draft.history] == [dying.address, heir.address]
    await until(lambda: draft.detached == [entry.session_id for entry in draft.history])


async def test_a_replay_waits_for_a_verifier_of_the_same_model(cluster: ScriptedCluster) -> None:
    dying = await cluster.verifier("m", die_at=5)
    await cluster.serve([dying, await cluster.verifier("other")])
    answering = asyncio.create_task(cluster.generate(10, model="m"))
    await until(lambda: "LOST" in {worker.health for worker in cluster.router.workers()})
    await asyncio.sleep(0.1)
    assert not answering.done()
    late = await cluster.verifier("m")
    cluster.router.register("verifier", "late", late.address, late.incarnation)
    assert (await answering).tokens == scripted_text(5, 10)


async def test_the_wait_for_a_verifier_is_bounded(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier(step_s=0.01, die_at=4)], migrate_wait_s=0.3)
    answer = await cluster.generate(10)
    assert 0 < len(answer.tokens) <= 4 and answer.tokens == scripted_text(5, len(answer.tokens))
    assert answer.error.reason == "NO_VERIFIER" and answer.status.reason == "NO_VERIFIER"


@pytest.mark.parametrize("reason", ["QUEUE_FULL", "CALLS_FULL"])
async def test_a_text_that_has_begun_waits_for_room(cluster: ScriptedCluster, reason: str) -> None:
    dying = await cluster.verifier(step_s=0.01, die_at=4)
    await cluster.serve([dying], migrate_wait_s=10)
    answering = asyncio.create_task(cluster.generate(12))
    await until(lambda: bool(dying.log.requests))
    full = await cluster.verifier(verdict=ResourceExhausted(reason, "many are waiting already", retry_after_ms=1000))
    cluster.router.register("verifier", "full", full.address, full.incarnation)
    await until(lambda: len(full.log.requests) > 2)
    full.script.verdict = None
    answer = await answering
    assert answer.tokens == scripted_text(5, 12) and answer.status is None


async def test_the_wait_for_room_is_bounded(cluster: ScriptedCluster) -> None:
    dying = await cluster.verifier(step_s=0.01, die_at=4)
    await cluster.serve([dying], migrate_wait_s=0.5)
    answering = asyncio.create_task(cluster.generate(12))
    await until(lambda: bool(dying.log.requests))
    full = await cluster.verifier(verdict=ResourceExhausted("QUEUE_FULL", "many are waiting already"))
    cluster.router.register("verifier", "full", full.address, full.incarnation)
    answer = await answering
    assert 0 < len(answer.tokens) <= 4 and answer.status.reason == "QUEUE_FULL" and len(full.log.requests) > 2


async def test_a_new_text_goes_to_a_verifier_with_room(cluster: ScriptedCluster) -> None:
    """Load reports are up to a second old: who looks idle may be full."""
    full = [await cluster.verifier(verdict=ResourceExhausted("QUEUE_FULL", "many"), max_sessions=64) for _ in range(2)]
    free = await cluster.verifier(max_sessions=2)
    await cluster.serve([*full, free])
    for _ in range(4):
        assert (await cluster.generate(5)).tokens == scripted_text(5, 5)
    assert sum(len(verifier.log.requests) for verifier in full) >= 4
    free.script.verdict = full[0].script.verdict
    answer = await cluster.generate(5)
    assert answer.status.reason == "QUEUE_FULL" and not answer.tokens, "at once, as it has not begun"


async def test_a_silent_verifier_loses_its_lease_and_its_sessions(cluster: ScriptedCluster) -> None:
    """A process that hangs keeps its connections: only its silence tells."""
    hanging, heir = await cluster.verifier(hang_at=6), await cluster.verifier()
    await cluster.serve([])
    cluster.router._links._lease_s = 0.5
    for name, worker in (("v0", hanging), ("v1", heir)):
        cluster.router.register("verifier", name, worker.address, worker.incarnation)
        await until(lambda: {worker.health for worker in cluster.router.workers()} == {"READY"})
    answering = asyncio.create_task(cluster.generate(15))
    await until(lambda: bool(hanging.log.requests))
    hanging.script.silent = True
    assert (await answering).tokens == scripted_text(5, 15)
    assert [worker.health for worker in cluster.router.workers()] == ["LOST", "READY"]


async def test_a_replaced_worker_is_fenced_and_its_sessions_move(cluster: ScriptedCluster) -> None:
    old, new = await cluster.verifier(hang_at=6), await cluster.verifier()
    await cluster.serve([])
    cluster.router.register("verifier", "v0", old.address, old.incarnation)
    await until(lambda: [worker.health for worker in cluster.router.workers()] == ["READY"])
    answering = asyncio.create_task(cluster.generate(15))
    await until(lambda: bool(old.log.requests))
    cluster.router.register("verifier", "v0", new.address, new.incarnation)
    assert (await answering).tokens == scripted_text(5, 15)
    assert [worker.address for worker in cluster.router.workers()] == [new.address]
    with pytest.raises(FailedPrecondition, match="replaced"):
        cluster.router.register("verifier", "v0", old.address, old.incarnation)


async def test_an_address_that_answers_as_somebody_else_is_not_used(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([])
    cluster.router.register("verifier", "v0", verifier.address, "not-its-incarnation")
    await asyncio.sleep(0.4)
    assert [worker.health for worker in cluster.router.workers()] == ["STARTING"]
    assert (await cluster.generate()).error.reason == "NO_VERIFIER"


async def test_a_draining_verifier_gets_no_new_requests(cluster: ScriptedCluster) -> None:
    leaving, staying = await cluster.verifier(), await cluster.verifier()
    await cluster.serve([leaving, staying])
    leaving.script.draining = True
    await until(lambda: "DRAINING" in {worker.health for worker in cluster.router.workers()})
    for _ in range(4):
        assert (await cluster.generate(2)).finished
    assert not leaving.log.requests


async def test_a_restarted_static_worker_is_found_again(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    await verifier.stop()
    await until(lambda: cluster.router.workers()[0].health == "LOST")
    again = ScriptedVerifier(VerifierSettings(name="m", listen=verifier.address))
    await again.start()
    await until(lambda: cluster.router.workers()[0].health == "READY")
    assert (await cluster.generate(3)).tokens == scripted_text(5, 3)
    await again.stop()


async def test_status_is_watched_until_the_router_stops(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier()], [await cluster.draft()])
    watch = cluster.stub.WatchStatus(router_pb2.WatchStatusRequest())
    first = (await watch.read()).status
    assert first.incarnation == cluster.router.incarnation
    assert (first.verifiers[0].health, first.drafts[0].draft.kind) == (router_pb2.HEALTH_READY, "ngram")
    await cluster.generate(2)
    await until_status(watch, lambda status: status.requests_total == 1)
    await cluster.router.stop(1.0)
    while (message := await watch.read()) is not grpc.aio.EOF:
        assert message.status


async def until_status(watch: Any, condition: Callable[[router_pb2.Status], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition((await watch.read()).status):
            pass


async def test_stop_lets_running_requests_finish_and_takes_no_new_ones(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier(step_s=0.02)])
    answering = asyncio.create_task(cluster.generate(20))
    await until(lambda: cluster.router._state.counters.requests == 1)
    stopping: Awaitable[None] = asyncio.create_task(cluster.router.stop(5.0))
    await asyncio.sleep(0.05)
    assert (await cluster.generate(2)).error.reason == "DRAINING"
    assert (await answering).tokens == scripted_text(5, 20)
    await stopping


async def test_a_draft_that_leaves_hands_its_sessions_over_first(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier(step_s=0.02)
    drafts = [await cluster.draft(), await cluster.draft()]
    await cluster.serve([verifier], drafts, drafts_per_session=1)
    answering = asyncio.create_task(cluster.generate(150))
    await until(lambda: any(draft.attached for draft in drafts))
    leaving = next(draft for draft in drafts if draft.attached)
    staying = next(draft for draft in drafts if draft is not leaving)
    cluster.router.drain(leaving.address)
    await until(lambda: bool(leaving.detached))
    assert staying.attached, "another has it before the first one leaves it"
    assert (await answering).tokens == scripted_text(5, 150)
    status = await cluster.status()
    assert status.draft_reattachments == 0, "nothing was lost"
    assert sorted(draft.health for draft in status.drafts) == [router_pb2.HEALTH_READY, router_pb2.HEALTH_DRAINING]
    assert (await cluster.generate(20)).tokens == scripted_text(5, 20) and len(leaving.history) == 1


async def test_a_draft_that_leaves_without_an_answer_costs_no_later_replacement(cluster: ScriptedCluster) -> None:
    """Its channel is closed while it is told; the keeper of the session's drafts goes on."""
    verifier, drafts = await cluster.verifier(step_s=0.02), [await cluster.draft() for _ in range(3)]
    await cluster.serve([verifier], drafts, drafts_per_session=1)
    answering = asyncio.create_task(cluster.generate(400))
    await until(lambda: any(draft.attached for draft in drafts))
    first = next(draft for draft in drafts if draft.attached)
    first.script.hang_up = True
    cluster.router.drain(first.address)
    await until(lambda: bool(first.leaving))
    cluster.router.remove(first.address)
    second = next(draft for draft in drafts if draft.attached and draft is not first)
    await second.stop()
    third = next(draft for draft in drafts if draft not in (first, second))
    await until(lambda: bool(third.attached))
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


async def test_a_draft_that_dies_while_another_is_left_is_replaced_at_once(cluster: ScriptedCluster) -> None:
    verifier, drafts = await cluster.verifier(step_s=0.02), [await cluster.draft() for _ in range(4)]
    await cluster.serve([verifier], drafts, drafts_per_session=2)
    answering = asyncio.create_task(cluster.generate(400))
    await until(lambda: sum(bool(draft.attached) for draft in drafts) == 2)
    leaving, dying = (draft for draft in drafts if draft.attached)
    spare = [draft for draft in drafts if not draft.attached]
    leaving.script.hang_up = True
    cluster.router.drain(leaving.address)
    await until(lambda: bool(leaving.leaving))
    await dying.stop()
    await asyncio.sleep(0.3)
    leaving.script.hang_up = False
    await until(lambda: all(draft.attached for draft in spare))
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


async def test_a_draft_that_leaves_is_left_even_if_nobody_takes_over(cluster: ScriptedCluster) -> None:
    verifier, draft = await cluster.verifier(step_s=0.02), await cluster.draft()
    await cluster.serve([verifier], [draft])
    answering = asyncio.create_task(cluster.generate(60))
    await until(lambda: bool(draft.attached))
    cluster.router.drain(draft.address)
    await until(lambda: bool(draft.detached) and not draft.attached)
    assert (await answering).tokens == scripted_text(5, 60)


async def test_a_verifier_that_leaves_finishes_what_it_has_and_gets_no_more(cluster: ScriptedCluster) -> None:
    leaving, staying = await cluster.verifier(step_s=0.02), await cluster.verifier()
    await cluster.serve([leaving])
    answering = asyncio.create_task(cluster.generate(40))
    await until(lambda: bool(leaving.log.requests))
    cluster.router.register("verifier", "v1", staying.address, staying.incarnation)
    await until(lambda: [w.health for w in cluster.router.workers()] == ["READY"] * 2)
    cluster.router.drain(leaving.address)
    await asyncio.sleep(0.15)  # load reports that say nothing of leaving change nothing
    for _ in range(4):
        assert (await cluster.generate(2)).finished
    assert (await answering).tokens == scripted_text(5, 40)
    assert len(leaving.log.requests) == 1 and (await cluster.status()).verifier_migrations == 0


async def test_a_worker_that_is_removed_is_forgotten_and_fenced(cluster: ScriptedCluster) -> None:
    going, staying = await cluster.verifier(step_s=0.02), await cluster.verifier()
    await cluster.serve([])
    cluster.router.register("verifier", "v0", going.address, going.incarnation)
    await until(lambda: [w.health for w in cluster.router.workers()] == ["READY"])
    answering = asyncio.create_task(cluster.generate(40))
    await until(lambda: bool(going.log.requests))
    cluster.router.register("verifier", "v1", staying.address, staying.incarnation)
    await until(lambda: [w.health for w in cluster.router.workers()] == ["READY"] * 2)
    cluster.router.remove("v0")
    cluster.router.remove("v0")
    assert (await answering).tokens == scripted_text(5, 40), "replayed on the other"
    assert [worker.worker_id for worker in cluster.router.workers()] == ["v1"]
    with pytest.raises(FailedPrecondition, match="replaced"):
        cluster.router.register("verifier", "v0", going.address, going.incarnation)


async def test_a_draft_of_another_tokenizer_is_asked_once_for_each_model(cluster: ScriptedCluster) -> None:
    verifiers = [await cluster.verifier("m", step_s=0.01), await cluster.verifier("n", step_s=0.01)]
    unfit = await cluster.draft(refusal=FailedPrecondition("TOKENIZER_MISMATCH", "other tokens"))
    await cluster.serve(verifiers, [unfit])
    (draft,) = cluster.router._registry.workers(Role.DRAFT)
    for model, unfit_for in (("m", {"m"}), ("n", {"m", "n"})):
        assert (await cluster.generate(10, model=model)).finished
        assert draft.unfit == unfit_for
    unfit.script.refusal = None
    assert (await cluster.generate(10, model="m")).finished and unfit.history == [], "it is not asked again"


async def test_what_was_wrong_with_a_draft_is_forgotten_when_it_is_another_process(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier(step_s=0.02)
    wrong = await cluster.draft(refusal=FailedPrecondition("TOKENIZER_MISMATCH", "other tokens"))
    await cluster.serve([verifier], [wrong])
    (worker,) = cluster.router._registry.workers(Role.DRAFT)
    assert (await cluster.generate(10)).finished and worker.unfit == {"m"}
    await wrong.stop()
    await until(lambda: not worker.ready)
    right = await cluster.draft(listen=wrong.address)
    right.verifiers = wrong.verifiers
    await until(lambda: worker.ready and worker.incarnation == right.incarnation)
    assert (await cluster.generate(20)).finished and len(right.history) == 1


async def test_a_verifier_that_keeps_failing_is_left_alone(cluster: ScriptedCluster) -> None:
    """It looks well, and idle, so that all would go there."""
    failing = await cluster.verifier(verdict=Internal("INTERNAL", "a step failed"), max_sessions=64)
    sound = await cluster.verifier(max_sessions=2)
    await cluster.serve([failing, sound])
    answers = [await cluster.generate(5) for _ in range(10)]
    assert [answer.error is not None for answer in answers] == [True] * 3 + [False] * 7
    assert all(answer.tokens == scripted_text(5, 5) for answer in answers[3:])


async def test_pools_are_scaled_through_the_router(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier()])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.ScalePool(router_pb2.ScalePoolRequest(counts={"draft": 2}))
    assert from_rpc_error(caught.value).reason == "NO_CONTROLLER"
    assert not (await cluster.status()).pools
    state = PoolState(PoolLimits("draft", "draft", 1, None, 1.0), 2, 3, 1, 1, "no such model", "off")
    asked: list[Mapping[str, int]] = []

    async def scale(counts: Mapping[str, int]) -> list[PoolState]:
        asked.append(counts)
        if counts.get("lm"):
            raise NotFound("POOL_UNKNOWN", "there is no pool 'lm'", field="counts")
        return [state]

    cluster.router.pools.scale, cluster.router.pools.states = scale, (state,)
    answer = await cluster.stub.ScalePool(router_pb2.ScalePoolRequest(counts={"draft": 2, "verifier": 0}))
    told = router_pb2.PoolStatus(
        name="draft", role="draft", wanted=2, present=3, ready=1, draining=1, min=1, error="no such model",
        decision="off",
    )  # fmt: skip
    assert asked == [{"draft": 2, "verifier": 0}] and list(answer.pools) == [told] == list(
        (await cluster.status()).pools
    )
    assert not answer.pools[0].HasField("max")
    for counts, reason in (({"lm": 1}, "POOL_UNKNOWN"), ({}, "POOL_LIMIT")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.ScalePool(router_pb2.ScalePoolRequest(counts=counts))
        error = from_rpc_error(caught.value)
        assert (error.reason, error.field) == (reason, "counts")
