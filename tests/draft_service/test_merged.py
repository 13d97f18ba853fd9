"""Drafters merged in one worker: what is sent is what its parts would send, as one trie."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from draft_service.drafter import Drafter
from draft_service.drafters.merged import MergedDrafter
from draft_service.drafters.ngram import NgramDrafter
from draftwood.config import DraftSettings
from draftwood.errors import FailedPrecondition, InvalidArgument
from draftwood.features import FINAL, FeatureRequest
from draftwood.parameters import Rule
from draftwood.runtime.model import ModelRuntime
from draftwood.vocabulary import Vocabulary
from tests.draft_service.test_conformance import REJECTED, Follower, make, random_commit, work_until_idle
from tests.draft_service.test_lm import GREEDY, Oracle, make_runtime


@pytest.fixture
def runtime() -> Iterator[ModelRuntime]:
    """Every page must be back at the end."""
    runtime = make_runtime()
    yield runtime
    assert runtime.pool.free == runtime.pool.total


MANY = 200
KINDS = [("best_first", "ngram"), ("chain", "kary", "suffix")]


@pytest.mark.parametrize("budget", [MANY, 5])
@pytest.mark.parametrize("kinds", KINDS)
def test_the_likeliest_of_what_the_parts_send_is_sent_once(
    kinds: tuple[str, ...], budget: int, runtime: ModelRuntime
) -> None:
    rnd, oracle = random.Random(4), Oracle(runtime)
    parts = [make(kind, runtime, lookahead_levels=0) for kind in kinds]
    merged = MergedDrafter([make(kind, runtime, lookahead_levels=0) for kind in kinds])
    text = [3, 1, 4, 1, 5, 9, 3, 1, 4]

    def follow(drafter: Drafter) -> Follower:
        return Follower(drafter, text[:], GREEDY, budget=budget, max_nodes=MANY).open()

    alone, together = [follow(part) for part in parts], follow(merged)
    known: dict[tuple[int, ...], float] = {}  # all that the parts have sent, by whole text
    sent = 0
    for _ in range(10):
        work_until_idle(merged, [together])
        for part, each in zip(parts, alone, strict=True):
            work_until_idle(part, [each])
            for behind, score in each.scores.items():
                path = (*each.tokens, *behind)
                known[path] = max(score, known.get(path, -math.inf))
        union = {path[len(together.tokens) :] for path in known if path[: len(together.tokens)] == (*together.tokens,)}
        union -= {()}
        assert together.live() == union if budget == MANY else together.live() <= union
        for behind, score in together.scores.items():
            assert score == pytest.approx(known[(*together.tokens, *behind)], abs=1e-5)
        if together.scores and budget == 5 and together.live() == set(together.scores):
            survival = {p: sum(known[(*together.tokens, *p[: k + 1])] for k in range(len(p))) for p in union}
            left = [survival[path] for path in union - together.live()]
            assert min(survival[path] for path in together.live()) >= max(left, default=-math.inf) - 1e-5
        sent += len(together.scores)
        tokens = random_commit(rnd, together, oracle)
        known = {path: score for path, score in known.items() if len(path) > len(together.tokens)}
        for each in (*alone, together):
            each.commit(tokens)
    assert sent > 20
    for drafter in (*parts, merged):
        drafter.close((1, 1))


def test_a_part_that_others_wait_for_holds_up_no_round(runtime: ModelRuntime) -> None:
    """Rounds out of step: whoever lacks a lookup alone has it after a level of the others at most."""
    merged = MergedDrafter([make("best_first", runtime), NgramDrafter(DraftSettings(kind="ngram"))])
    followers = [Follower(merged, [k, 1, 4, k, 1], GREEDY, key=(1, k)).open() for k in range(1, 5)]
    by_key = {follower.key: follower for follower in followers}
    lacked, answers = dict.fromkeys(by_key, 0), list[tuple[int, Follower]]()
    for turn in range(300):
        for due, follower in [answer for answer in answers if answer[0] <= turn]:
            answers.remove((due, follower))
            follower.commit([turn % 7])
        for key, session in merged._sessions.items():
            lacked[key] = lacked[key] + 1 if session.drawing == {1} else 0
            assert lacked[key] <= 2
        for key, growth in merged.work():
            by_key[key].take(growth)
            if growth.complete:
                answers.append((turn + 1 + (3 * key[1] + turn) % 5, by_key[key]))
    assert min(follower.epoch for follower in followers) > 10
    for follower in followers:
        merged.close(follower.key)


def test_under_rejection_each_part_that_can_samples_its_share(runtime: ModelRuntime) -> None:
    merged = MergedDrafter([make(kind, runtime) for kind in ("best_first", "ngram", "kary")])
    assert merged.rules == (Rule.REJECTION,)
    follower = Follower(merged, [3, 1, 4, 3, 1], REJECTED, Rule.REJECTION, budget=9).open()
    growths = []
    while merged.wants_work() and not follower.complete:
        for _, growth in merged.work():
            follower.take(growth)
            growths.append(growth)
    assert [len(g.token) for g in growths] == [5, 4] and [g.complete for g in growths] == [False, True]
    merged.close(follower.key)


def test_what_no_part_can_do_is_not_offered_and_vocabularies_must_agree(runtime: ModelRuntime) -> None:
    lookup = NgramDrafter(DraftSettings(kind="ngram"))
    both = MergedDrafter([lookup, make("suffix", runtime)])
    assert (both.rules, both.vocabulary, both.model) == ((), None, "ngram+suffix")
    one, other = make("chain", runtime), make("kary", runtime)
    assert MergedDrafter([lookup, one]).vocabulary == one.vocabulary
    assert one.vocabulary is not None
    other.vocabulary = Vocabulary(("x", *one.vocabulary.tokens[1:]), frozenset(), one.vocabulary.vocab_size)
    with pytest.raises(FailedPrecondition, match="tokens differ"):
        MergedDrafter([one, lookup, other])


def test_parts_that_work_on_features_are_fed_and_must_agree_on_them(runtime: ModelRuntime) -> None:
    merged = make("merged_eagle", runtime)
    assert merged.features == FeatureRequest((FINAL,), 32)
    with pytest.raises(InvalidArgument, match="different features") as caught:
        MergedDrafter([make("eagle", runtime), make("eagle3", runtime)])
    assert (caught.value.reason, caught.value.field) == ("CONFIG", "parts")
