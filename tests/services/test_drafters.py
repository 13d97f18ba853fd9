"""Every kind of drafter and topology over the real wire: other trees, the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from draftwood.errors import FailedPrecondition
from draftwood.rpc.status import from_rpc_error
from draftwood.v1 import draft_pb2, draft_pb2_grpc
from tests.services.stack import (
    Cluster,
    Stack,
    attach_request,
    engine_of,
    slow_down,
    tokens_of,
    verifier_request,
    verifier_stub,
)
from tests.services.wire import HandDraft
from verifier_service.width import StepTimes

METHODS: dict[str, dict[str, Any]] = {
    "best_first": {},
    "expand_rerank": {"topology": "expand_rerank"},
    "sequoia": {"topology": "sequoia", "branch": 6},
    "chain": {"topology": "chain"},
    "kary": {"topology": "kary", "branching": [3, 2, 1]},
    "choices": {"topology": "choices", "choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "eagle1": {"topology": "eagle1", "depth": 5},
    "suffix": {"kind": "suffix"},
    "merged": {"kind": "merged", "parts": [{"kind": "lm"}, {"kind": "ngram"}, {"kind": "suffix"}]},
}
PROMPTS: list[Any] = ["The sky is blue", [5, 7, 11, 5, 7, 11, 5, 7]]
RULES: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 7}]


async def texts(cluster: Cluster, tokens: int = 24) -> int:
    """All prompts under all rules, which must be what the target alone writes; returns the accepted guesses."""
    accepted = 0
    for prompt in PROMPTS:
        for rule in RULES:
            options = {"max_tokens": tokens, "ignore_eos": True} | rule
            text = await cluster.speculative(prompt, **options)
            assert text.tokens == await cluster.plain(prompt, **options), f"{prompt!r} {rule}"
            accepted += text.accepted
    return accepted


@pytest.mark.parametrize("method", METHODS)
async def test_text_is_the_targets_whatever_draws(stack: Stack, method: str) -> None:
    cluster = await stack.cluster([METHODS[method]])
    accepted = sum([await texts(cluster) for _ in range(2 if method == "suffix" else 1)])
    assert accepted > 0, "nothing was shown"
    assert cluster.drafts[0].loaded.core.nodes_drafted and cluster.engine.totals.refused == 0
    await cluster.is_idle()


HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle", "topology": "expand_rerank"},
    "eagle3": {"kind": "eagle"},
    "mtp": {"kind": "mtp", "topology": "chain", "depth": 3},
    "block": {"kind": "block"},
    "medusa": {"kind": "medusa"},
    "medusa_choices": {"kind": "medusa"} | METHODS["choices"],
}


@pytest.mark.parametrize("method", HEADS)
async def test_text_is_the_targets_whatever_head_draws_on_its_features(
    stack: Stack, heads: dict[str, Path], method: str
) -> None:
    target = str(stack.models.deep_target)
    draft = HEADS[method] | {"model": str(heads[method.removesuffix("_choices")]), "target": target}
    cluster = await stack.cluster([draft], model=target, features=[0, 2, 4, 5])
    slow_down(cluster.verifier, 0.004)  # no text ends before the draft has joined
    assert await texts(cluster) > 0, "nothing was shown"
    assert cluster.drafts[0].loaded.core.nodes_drafted and cluster.engine.totals.refused == 0
    [canary] = cluster.verifier._load_report().canaries
    assert canary.steps > 0, "the canary's features are told, too: no round ends without"
    await cluster.is_idle()


async def test_a_head_whose_features_the_verifier_cannot_give_is_refused(stack: Stack, heads: dict[str, Path]) -> None:
    """The text is written without it; the worker's stream ends with the reason."""
    target = str(stack.models.deep_target)
    verifier = await stack.verifier(model=target, features=[2])
    draft = await stack.draft(kind="eagle", model=str(heads["eagle"]), target=target)
    channel = await stack.channel(draft)
    stub = draft_pb2_grpc.DraftServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        await stub.Attach(attach_request(draft, "s", b"t", verifier.address))
    reason = from_rpc_error(caught.value)
    assert isinstance(reason, FailedPrecondition) and reason.reason == "FEATURES_UNAVAILABLE"
    assert reason.field == "hello.draft.features.layers"
    router = await stack.router([verifier], [draft])
    cluster = Cluster(verifier, [draft], router, await stack.client(router))
    assert await texts(cluster) == 0


async def test_a_merged_worker_samples_for_rejection_with_its_parts_that_can(stack: Stack) -> None:
    parts = [{"kind": "lm"}, {"kind": "lm", "topology": "chain"}, {"kind": "ngram"}]
    cluster = await stack.cluster([{"kind": "merged", "parts": parts}], canary=False)
    accepted = 0
    for seed in range(4):
        options = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9, "seed": seed, "rule": "rejection"}
        text = await cluster.speculative("The sky is", **options)
        assert len(text.tokens) == 40
        accepted += text.accepted
    assert accepted > 0
    assert cluster.engine.totals.refused == 0, "what each part says it sampled from is taken under the merged ids"
    assert cluster.drafts[0].loaded.info.rules == [draft_pb2.RULE_REJECTION]
    await cluster.is_idle()


async def test_several_workers_on_one_session(stack: Stack) -> None:
    verifier = await stack.verifier()
    drafts = [await stack.draft(**d) for d in ({}, {"topology": "chain"}, {"kind": "suffix"})]
    router = await stack.router([verifier], drafts, drafts_per_session=3)
    cluster = Cluster(verifier, drafts, router, await stack.client(router))
    assert await texts(cluster) > 0
    assert all(draft.loaded.core.nodes_drafted for draft in drafts)
    assert cluster.engine.totals.refused == 0
    await cluster.is_idle()


async def test_what_two_workers_guess_is_one_node_at_the_verifier(stack: Stack) -> None:
    """A run of which one worker has drawn the first two tokens and another all three is accepted under ids of both."""
    verifier = await stack.verifier()
    channel = await stack.channel(verifier)
    options: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
    text = verifier.loaded.codec.encode("The sky is")
    text += await tokens_of(verifier_stub(channel).Generate(verifier_request("plain", **options)))
    slow_down(verifier, 0.02)
    call = verifier_stub(channel).Generate(verifier_request("s", b"t", **options))
    short, long = HandDraft(channel), HandDraft(channel)
    for hand in (short, long):
        await hand.hello()
        await hand.join("s", b"t", 1)
    for next_id in range(1, 90, 3):
        told, other = await same_epoch(short, long)
        if told.accepted[-1] == other.accepted[-1] == 3:
            break
        run = text[told.length[-1] :]
        base = {"epoch": told.epoch[-1], "first_id": next_id, "parent_base": next_id - 1}
        await short.grow(**base, parent=[0, 1], token=run[:2])
        await long.grow(**base, parent=[0, 1, 2], token=run[:3])
    first = told.node_id[-3]
    assert first > 0 and list(told.node_id[-3:]) == [first, first + 1, 0], "the third is not of the first worker"
    assert list(other.node_id[-3:]) == [first, first + 1, first + 2]
    for each in (short, long):
        each.close()
    call.cancel()


async def same_epoch(one: HandDraft, other: HandDraft) -> tuple[draft_pb2.Commits, draft_pb2.Commits]:
    """The next commit that both are told."""
    a, b = await one.commit(), await other.commit()
    while a.epoch[-1] != b.epoch[-1]:
        if a.epoch[-1] < b.epoch[-1]:
            a = await one.commit()
        else:
            b = await other.commit()
    return a, b


async def test_the_suffix_index_learns_from_ended_texts(stack: Stack) -> None:
    """The same question again is answered from the last answer."""
    cluster = await stack.cluster([{"kind": "suffix"}], canary=False)
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    first = await cluster.speculative("Green is the sea", **options)
    await cluster.is_idle()
    again = await cluster.speculative("Green is the sea", **options)
    assert again.tokens == first.tokens
    assert again.accepted > max(20, first.accepted)


async def test_the_verifiers_step_times_reach_the_draft_worker(stack: Stack) -> None:
    """Sequoia draws no more than pays there: two nodes on a verifier where a third would take a second."""
    verifier = await stack.verifier(width="adaptive", draft_wait_ms=1000.0)
    engine_of(verifier).planner.times = StepTimes([1, 2, 3, 4, 17], [0.01, 0.0101, 0.0102, 1.0, 1.1])
    draft = await stack.draft(topology="sequoia", branch=6)
    router = await stack.router([verifier], [draft])
    cluster = Cluster(verifier, [draft], router, await stack.client(router))
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    text = await cluster.speculative("The sky is blue", **options)
    assert text.tokens == await cluster.plain("The sky is blue", **options)
    [link] = draft._links.values()
    rows, ms = zip(*link._step_ms, strict=True)
    assert rows == (1, 2, 4, 8, 16, 17) and ms[2] > 20 * ms[1] > 0
    nodes = draft.loaded.core.nodes_drafted
    assert text.finished and 0 < text.finished.usage.nodes_drafted <= 2 * text.finished.usage.steps, nodes


async def test_a_verifier_of_full_width_tells_no_step_times(stack: Stack) -> None:
    cluster = await stack.cluster([{"topology": "sequoia", "branch": 6}])
    await cluster.speculative("The sky is blue", max_tokens=8, ignore_eos=True)
    [link] = cluster.drafts[0]._links.values()
    assert link._step_ms == ()
