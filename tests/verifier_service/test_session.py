"""A session's lengths, and which drafts are worth waiting for."""

from __future__ import annotations

import dataclasses

import pytest

from draftwood.acceptance import Ending
from draftwood.parameters import ProcessorParams, Rule, SamplingParams
from verifier_service.session import AttachedDraft, GenerateRequest, Session


def session(resume: tuple[int, ...] = (), **more: object) -> Session:
    fields = {"sampling": SamplingParams(1.0), "ending": Ending(frozenset(), 10), "max_nodes": 4} | more
    request = GenerateRequest("s", b"t", (1, 2, 3), resume, **fields)  # type: ignore[arg-type]
    return Session(request, admitted_s=7.5, live_nodes=6)


def test_the_lengths_follow_the_text() -> None:
    s = session(resume=(4, 5))
    assert (s.generated, s.remaining, s.pending, s.decoding) == (2, 8, 5, False)
    assert (s.committed_s, s.tree.epoch) == (7.5, 0)
    s.cached = 3
    assert (s.pending, s.decoding) == (2, False)
    s.cached = 4
    assert (s.pending, s.decoding) == (1, True)
    s.tree.commit([6, 7, 8])
    assert s.tokens == [1, 2, 3, 4, 5, 6, 7, 8], "the tree appends to the session's own text"
    assert (s.generated, s.remaining, s.pending, s.decoding) == (5, 5, 4, False)


def test_a_session_begins_with_nothing_done() -> None:
    s = session()
    assert (s.cached, s.published, s.node_room, s.served, s.budget, s.drafts) == (0, 0, 0, 0, 0, {})
    assert (s.history, s.matcher) == (None, None)
    numbers = [value for value in dataclasses.asdict(s.stats).values() if isinstance(value, int | float)]
    assert numbers and not any(numbers)


def test_a_session_runs_while_it_holds_pages() -> None:
    s = session()
    assert not s.running
    s.pages = [0]
    assert s.running is True
    s.pages = []
    assert s.running is False


def test_a_request_with_a_deadline_counts_twice_and_none_has_one_unasked() -> None:
    assert (session().request.deadline_ms, session().request.weight) == (0, 1)
    assert [session(deadline_ms=ms).request.weight for ms in (1, 5000)] == [2, 2]


def test_what_processes_the_logits_counts_resumed_tokens_as_generated() -> None:
    s = session(resume=(4,), sampling=SamplingParams(1.0, processors=ProcessorParams(presence_penalty=1.0)))
    assert s.history is not None
    assert s.history.output_tokens == 1
    s.tree.commit([5, 4])
    tokens, occurrences = s.history.counted()
    assert (tokens.tolist(), occurrences.tolist()) == ([4, 5], [2, 1]), "the text since the prompt, as it grows"


def test_a_draft_that_has_missed_three_steps_in_a_row_is_lagging() -> None:
    draft = AttachedDraft(1)
    assert (draft.complete_epoch, draft.known, draft.asleep, draft.misses, draft.lagging) == (-1, 0, False, 0, False)
    for misses in range(5):
        draft.misses = misses
        assert draft.lagging == (misses >= 3), "one late round may happen to anybody, three in a row do not"


def test_drafts_are_awaited_while_their_round_is_open_and_nodes_are_wanted() -> None:
    s = session()
    early, late = AttachedDraft(1), AttachedDraft(2)
    s.drafts = {0: early, 1: late}
    assert s.awaited() == [] and not s.has_drafted
    s.budget = 1
    assert s.awaited() == [early, late]
    early.complete_epoch = 0
    assert s.awaited() == [late] and s.has_drafted
    late.misses = 3
    assert s.awaited() == []
    s.tree.commit([9])
    assert s.awaited() == [early], "the next epoch is a round of its own"
    s.drafts = {}
    assert not s.has_drafted


@pytest.mark.parametrize("rule", Rule)
def test_at_temperature_zero_every_rule_is_greedy_and_nothing_is_sampled(rule: Rule) -> None:
    warm, cold = session(rule=rule).request, session(rule=rule, sampling=SamplingParams()).request
    assert (warm.effective_rule, cold.effective_rule) == (rule, Rule.GREEDY)
    assert (warm.sampled, cold.sampled) == (rule is Rule.REJECTION, False)
    assert session().request.rule is Rule.SHARED_NOISE


def test_sampled_nodes_are_kept_apart_by_the_rule_alone() -> None:
    assert session(rule=Rule.REJECTION).tree._sampled
    assert not session().tree._sampled and not session(rule=Rule.REJECTION, sampling=SamplingParams()).tree._sampled


def test_the_live_tree_holds_as_many_nodes_as_it_is_told() -> None:
    assert session().tree._capacity == 6
