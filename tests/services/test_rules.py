"""The rules over the real wire: the real draft worker samples, the verifier judges, the reply says what was done."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood.client import DraftwoodClient
from draftwood.errors import DraftwoodError, InvalidArgument
from tests.services.stack import Stack, collect, engine_of, until, verifier_request, verifier_stub
from tests.services.wire import HandDraft

WARM: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.9}


async def test_rejection_with_a_real_draft_runs_accepts_and_ends(stack: Stack) -> None:
    cluster = await stack.cluster()
    texts, accepted = [], 0
    for seed in range(6):
        text = await cluster.speculative("The sky is", seed=seed, rule="rejection", **WARM)
        assert text.started and (text.started.rule, text.started.lossy) == ("rejection", False)
        assert text.finished and text.finished.reason == "length" and len(text.tokens) == 60
        accepted += text.accepted
        texts.append(tuple(text.tokens))
    assert len(set(texts)) == 6 and accepted > 60
    assert cluster.engine.totals.refused == 0, "what our draft says it sampled from is taken"
    await cluster.is_idle()


async def test_without_drafts_rejection_is_the_same_text_for_the_same_seed(stack: Stack) -> None:
    cluster = await stack.cluster()
    one, again, other = [await cluster.plain("one", seed=s, rule="rejection", **WARM) for s in (4, 4, 5)]
    assert one == again != other
    part = await cluster.plain("one", seed=4, rule="rejection", **WARM | {"max_tokens": 20})
    assert part == one[:20]


async def test_greedy_text_is_that_of_every_rule(stack: Stack) -> None:
    cluster = await stack.cluster()
    options = WARM | {"temperature": 0.0}
    want, accepted = await cluster.plain("The sky is", **options), 0
    for rule in ("", "greedy", "shared_noise", "rejection", "typical"):
        text = await cluster.speculative("The sky is", rule=rule, **options)
        accepted += text.accepted
        assert text.tokens == want
        assert text.started and (text.started.rule, text.started.lossy) == ("greedy", False)
    assert accepted > 0, "of each text it is a matter of timing"


async def test_typical_is_marked_lossy_and_loses_nothing_without_drafts(stack: Stack) -> None:
    cluster = await stack.cluster(typical_epsilon=0.02, typical_delta=1.0)
    accepted = {"typical": 0, "shared_noise": 0}
    for rule in accepted:
        for seed in range(4):
            text = await cluster.speculative("The sky is", seed=seed, rule=rule, **WARM)
            assert text.started and (text.started.rule, text.started.lossy) == (rule, rule == "typical")
            assert len(text.tokens) == 60
            accepted[rule] += text.accepted
            if rule == "typical":
                plain = await cluster.plain("The sky is", seed=seed, rule=rule, **WARM)
                assert plain == await cluster.plain("The sky is", seed=seed, **WARM), "nothing is lost without drafts"
    assert all(accepted.values()), "how many is a matter of timing"


async def test_the_servers_rule_holds_where_a_request_names_none(stack: Stack) -> None:
    cluster = await stack.cluster(rule="rejection")
    for asked, got in (("", "rejection"), ("shared_noise", "shared_noise"), ("typical", "typical")):
        text = await cluster.speculative("one", seed=1, rule=asked, **WARM)
        assert text.started and text.started.rule == got and len(text.tokens) == 60


async def test_an_ngram_draft_is_not_used_under_rejection_and_another_is(stack: Stack) -> None:
    cluster = await stack.cluster([{"kind": "ngram"}], canary=False)
    text = await cluster.speculative("one two one two one two", seed=1, rule="rejection", **WARM)
    assert len(text.tokens) == 60 and text.accepted == 0
    assert cluster.drafts[0].loaded.core.nodes_drafted == 0 and not cluster.attached
    both = await stack.cluster([{"kind": "ngram"}, {}], canary=False)
    text = await both.speculative("one two one two one two", seed=1, rule="rejection", **WARM)
    assert text.accepted > 0
    assert both.drafts[0].loaded.core.nodes_drafted == 0 < both.drafts[1].loaded.core.nodes_drafted
    await both.is_idle()


async def test_the_draft_is_told_why_it_cannot_join(stack: Stack) -> None:
    verifier = await stack.verifier()
    channel = await stack.channel(verifier)
    request = verifier_request("s", b"t", max_tokens=400, ignore_eos=True)
    request.generation.sampling.temperature = 1.0
    request.generation.speculation.rule = 3
    call = verifier_stub(channel).Generate(request)
    await until(lambda: "s" in engine_of(verifier).sessions)
    draft = HandDraft(channel)
    await draft.hello()
    await draft.ask_to_join("s", b"t", 1)
    error = await draft.error()
    assert (error.reason, error.field, error.status) == (
        "RULE_UNSUPPORTED", "hello.draft.rules", "FAILED_PRECONDITION",
    )  # fmt: skip
    able = HandDraft(channel)
    await able.hello(rules=[3])
    start = await able.join("s", b"t", 1)
    assert (start.rule, start.seed) == (3, 0)
    for each in (draft, able, call):
        (each.close if isinstance(each, HandDraft) else each.cancel)()


async def test_a_rule_of_no_meaning_is_refused_by_the_client(stack: Stack) -> None:
    client = DraftwoodClient("127.0.0.1:1")
    with pytest.raises(InvalidArgument) as refused:
        await collect(client, "x", rule="majority")
    assert (refused.value.reason, refused.value.field) == ("RULE", "rule")
    await client.close()
    cluster = await stack.cluster()
    with pytest.raises(DraftwoodError) as warm:
        await cluster.speculative("x", rule="greedy", temperature=0.5)
    assert (warm.value.reason, warm.value.field) == ("RULE", "generation.speculation.rule")
