"""Draft workers are tried on a known text as their stream begins: sound ones pass, broken ones are seen at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.core import DraftCore
from draft_service.drafter import Drafter, Key, SessionCommitted, SessionStart
from draft_service.server import DraftServer, make_drafter
from draftwood.client import DraftState
from draftwood.config import DraftSettings
from draftwood.telemetry import METRICS
from draftwood.v1 import draft_pb2
from draftwood.wire import SessionGrowth
from tests.services.models import SIZE, Models
from tests.services.stack import FAST, Cluster, Stack, engine_of, until, verifier_request, verifier_stub
from tests.services.wire import HandDraft
from verifier_service.canary import LEAST_SHARE, MOST_TOKENS, CanaryResult
from verifier_service.server import VerifierServer

SAMPLED: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.9, "seed": 3}


class BrokenDrafter:
    """A real drafter between two faults: in what it hears, and in what it says."""

    def __init__(self, real: Drafter, hear: Callable[[int], int], say: Callable[[int], int]) -> None:
        self.real, self.hear, self.say = real, hear, say
        self.kind, self.model, self.vocabulary, self.rules = real.kind, "broken", real.vocabulary, real.rules
        self.features = real.features

    def open(self, key: Key, start: SessionStart) -> None:
        self.real.open(key, replace(start, tokens=tuple(map(self.hear, start.tokens))))

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        self.real.commit(key, replace(committed, tokens=tuple(map(self.hear, committed.tokens))))

    def close(self, key: Key) -> None:
        self.real.close(key)

    def wants_work(self) -> bool:
        return self.real.wants_work()

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        return [(key, replace(g, token=self.say(g.token))) for key, g in self.real.work()]  # type: ignore[arg-type]


class BrokenServer(DraftServer):
    hear = staticmethod(lambda token: token)
    say = staticmethod(lambda token: token)

    def _make_core(self) -> DraftCore:
        return DraftCore(BrokenDrafter(make_drafter(self.settings), self.hear, self.say))


class OtherTokens(BrokenServer):
    """Its model takes and gives ids that are one too high."""

    hear = staticmethod(lambda token: (token + 1) % SIZE)
    say = staticmethod(lambda token: (token + 1) % SIZE)


class ShiftedPositions(DraftServer):
    """Its model sees each text without the last token: its guesses come one place late."""

    def _make_core(self) -> DraftCore:
        class Late(BrokenDrafter):
            def open(self, key: Key, start: SessionStart) -> None:
                self.held = {key: start.tokens[-1]} | getattr(self, "held", {})
                self.real.open(key, replace(start, tokens=start.tokens[:-1]))

            def commit(self, key: Key, committed: SessionCommitted) -> None:
                if key in self.held:
                    tokens = (self.held[key], *committed.tokens)
                    self.held[key] = tokens[-1]
                    self.real.commit(key, replace(committed, tokens=tokens[:-1], length=committed.length - 1))

        return DraftCore(Late(make_drafter(self.settings), lambda t: t, lambda t: t))


def stranger(models: Models) -> str:
    """A model of the draft's shape with weights of its own, and the draft's tokenizer."""
    folder = models.draft.parent / "stranger-draft"
    model = AutoModelForCausalLM.from_pretrained(models.draft)
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.std())
    model.save_pretrained(folder)
    return str(folder)


async def result_of(verifier: VerifierServer) -> CanaryResult:
    """Of the one draft worker that has joined."""
    await until(lambda: any(link.canary for link in verifier._links.values()), what="the canary has a result")
    (link,) = verifier._links.values()
    assert link.canary
    return link.canary


async def status_of(cluster: Cluster) -> DraftState:
    """Of the one draft worker, once the router has heard of its canary."""
    for _ in range(200):
        (draft,) = (await cluster.client.status()).drafts
        if draft.canary is not None:
            break
        await asyncio.sleep(0.02)
    return draft


async def of_workers(stack: Stack, *workers: DraftServer) -> Cluster:
    verifier = await stack.verifier()
    router = await stack.router([verifier], workers)
    return Cluster(verifier, list(workers), router, await stack.client(router))


def counted() -> tuple[float, float]:
    """Failures, and tokens that verifiers here have committed."""
    return METRICS.canary_failures._value.get(), METRICS.tokens._value.get()


async def test_a_sound_draft_passes_and_nothing_else_notices(stack: Stack) -> None:
    cluster = await stack.cluster()
    failures, tokens = counted()
    text = await cluster.speculative("The sky is", **SAMPLED)
    result = await result_of(cluster.verifier)
    assert result.share > 2 * LEAST_SHARE and not result.failed
    assert counted() == (failures, tokens + 60), "the canary's text is no session's"
    assert text.tokens == await cluster.plain("The sky is", **SAMPLED)
    await until(lambda: not cluster.attached, what="the canary has ended for the draft, too")
    assert METRICS.canary_share("lm:tiny-draft")._value.get() == result.share
    assert cluster.engine.totals.refused == 0
    shown = await status_of(cluster)
    assert shown.canary == pytest.approx(result.share) and not shown.canary_failed
    await cluster.is_idle()


@pytest.mark.parametrize("broken", ["weights", "tokens", "positions"])
async def test_a_broken_draft_fails_and_the_text_is_the_same(stack: Stack, models: Models, broken: str) -> None:
    settings = {"model": str(models.draft), "threads": 1, "depth": 4, "page_tokens": 16, **FAST}
    kinds = {"weights": DraftServer, "tokens": OtherTokens, "positions": ShiftedPositions}
    if broken == "weights":
        settings |= {"model": stranger(models), "tokenizer": str(models.draft)}
    cluster = await of_workers(stack, await stack.start(kinds[broken](DraftSettings(**settings))))
    failures, _ = counted()
    text = await cluster.speculative("The sky is", **SAMPLED)
    result = await result_of(cluster.verifier)
    assert result.failed and result.share < LEAST_SHARE and result.steps > MOST_TOKENS / 2
    assert counted()[0] == failures + 1
    assert text.tokens == await cluster.plain("The sky is", **SAMPLED)
    assert (await status_of(cluster)).canary_failed
    again = await cluster.speculative("The sky is", **SAMPLED)
    assert again.tokens == text.tokens and counted()[0] == failures + 1, "once a stream"
    await cluster.is_idle()


async def test_the_canary_takes_no_sessions_place(stack: Stack) -> None:
    draft, drafting = await stack.draft(max_sessions=1), threading.Event()
    draft._worker.post(lambda: drafting.wait(5.0))  # so that the canary is not over before we look
    cluster = await of_workers(stack, draft)
    task = asyncio.create_task(cluster.speculative("The sky is", **SAMPLED | {"max_tokens": 400}))
    await until(lambda: any(len(link._sessions) == 2 for link in draft._links.values()), what="session and canary")
    assert draft._sessions == draft._load_report(0.0).sessions == 1
    drafting.set()
    assert len((await task).tokens) == 400
    assert (await result_of(cluster.verifier)).steps


async def test_a_draft_that_knows_nothing_of_the_canary_serves_as_ever(stack: Stack) -> None:
    verifier = await stack.verifier()
    channel = await stack.channel(verifier)
    call = verifier_stub(channel).Generate(verifier_request("s", b"t", max_tokens=20, ignore_eos=True))
    draft = HandDraft(channel)
    welcome = await draft.hello()
    assert welcome.canary.session_id and welcome.canary.ticket
    await until(lambda: "s" in engine_of(verifier).sessions)
    assert (await draft.join("s", b"t", 1)).tokens
    draft.close()
    await until(lambda: not verifier._links)
    call.cancel()
    assert engine_of(verifier).totals.refused == 0


async def test_the_canarys_handle_is_its_own_and_its_ticket_needed(stack: Stack) -> None:
    verifier = await stack.verifier()
    channel = await stack.channel(verifier)
    call = verifier_stub(channel).Generate(verifier_request("s", b"t", max_tokens=400, ignore_eos=True))
    draft = HandDraft(channel)
    canary = (await draft.hello()).canary
    await draft.join("s", b"t", 1)
    await draft.show_ticket(canary.session_id, b"wrong", 2)
    assert (await draft.error()).reason == "TICKET"
    await draft.show_ticket(canary.session_id, canary.ticket, 1)
    assert (await draft.error()).reason == "HANDLE"
    await draft.show_ticket(canary.session_id, canary.ticket, 2)
    start = await draft.start()
    assert (start.epoch, start.temperature, start.rule) == (0, 0.0, draft_pb2.RULE_GREEDY)
    assert start.remaining_tokens == MOST_TOKENS and start.budget
    await draft.ask_to_join("other", b"t", 2)
    assert (await draft.error()).reason == "HANDLE"
    await draft.grow(handle=2, epoch=7)
    assert (await draft.error()).reason == "TREE_EPOCH"
    await draft.say(draft_pb2.SpeculateRequest(leaves=[draft_pb2.Leave(handle=2)]))
    await draft.show_ticket(canary.session_id, canary.ticket, 3)
    assert (await draft.error()).reason == "SESSION_UNKNOWN", "given up once, it is over"
    assert not any(link.canary for link in verifier._links.values())
    draft.close()
    call.cancel()


async def test_without_a_canary_none_is_offered(stack: Stack) -> None:
    verifier = await stack.verifier(canary=False)
    draft = HandDraft(await stack.channel(verifier))
    assert not (await draft.hello()).HasField("canary")
    draft.close()
    await asyncio.sleep(0)
