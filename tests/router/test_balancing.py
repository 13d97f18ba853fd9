from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router.balancing import USUAL_STEP_MS, DraftView, VerifierView, choose_drafts, choose_verifier


def verifier(key: str, sessions: int, capacity: int = 10, model: str = "m") -> VerifierView:
    return VerifierView(key, model, sessions, capacity)


def draft(
    key: str,
    kind: str = "lm",
    sessions: int = 0,
    capacity: int = 4,
    round_ms: float = 0.0,
    rtt_ms: float = 0.0,
    accepted: float | None = None,
) -> DraftView:
    return DraftView(key, kind, sessions, capacity, round_ms, rtt_ms, accepted)


def keys(views: list[DraftView]) -> list[str]:
    return [view.key for view in views]


class TestChooseVerifier:
    def test_takes_the_less_loaded_per_capacity(self) -> None:
        busy_but_big = verifier("big", sessions=6, capacity=64)
        chosen = choose_verifier([verifier("small", sessions=2, capacity=4), busy_but_big], "m", random.Random(0))
        assert chosen is busy_but_big

    def test_takes_the_first_of_equals(self) -> None:
        chosen = choose_verifier([verifier("a", 1), verifier("b", 1)], "m", random.Random(0))
        assert chosen and chosen.key == "a"

    def test_serves_the_model_that_was_asked_for(self) -> None:
        views = [verifier("a", 0, model="other"), verifier("b", 9)]
        chosen = choose_verifier(views, "m", random.Random(0))
        assert chosen and chosen.key == "b"
        assert choose_verifier(views, "third", random.Random(0)) is None

    def test_never_takes_the_worst_of_many_and_spreads_over_the_rest(self) -> None:
        views = [verifier("worst", 9), verifier("as bad", 9), *(verifier(f"v{i}", i) for i in range(4))]
        rng = random.Random(1)
        chosen = [choose_verifier(views, "m", rng) for _ in range(200)]
        names = {view.key for view in chosen if view}
        assert names == {"v0", "v1", "v2", "v3"}

    def test_is_a_function_of_the_random_source(self) -> None:
        views = [verifier(f"v{i}", 0) for i in range(8)]
        one, two = random.Random(5), random.Random(5)
        assert [choose_verifier(views, "m", one) for _ in range(20)] == [
            choose_verifier(views, "m", two) for _ in range(20)
        ]

    def test_a_slow_verifier_gets_less(self) -> None:
        slow, fast = VerifierView("slow", "m", 1, 10, step_ms=40), VerifierView("fast", "m", 8, 10, step_ms=20)
        assert choose_verifier([slow, fast], "m", random.Random(0)) is fast
        assert choose_verifier([slow, replace(fast, sessions=14)], "m", random.Random(0)) is slow, "it queues"

    def test_pages_that_are_held_count_as_load(self) -> None:
        full = VerifierView("full", "m", 1, 10, pages_held=0.9)
        assert choose_verifier([full, verifier("free", 5)], "m", random.Random(0)) == verifier("free", 5)

    def test_what_is_known_of_the_prompt_outweighs_some_load(self) -> None:
        views = [verifier("a", 2), verifier("b", 5)]
        for known, expected in (({}, "a"), ({"b": 1.0}, "b"), ({"b": 0.1}, "a"), ({"a": 1.0, "b": 1.0}, "a")):
            chosen = choose_verifier(views, "m", random.Random(0), known)
            assert chosen and chosen.key == expected, known

    def test_what_is_known_never_outweighs_twice_the_cost(self) -> None:
        views = [verifier("a", 0), VerifierView("b", "m", 0, 10, step_ms=USUAL_STEP_MS * 2.1)]
        chosen = choose_verifier([replace(views[0], step_ms=USUAL_STEP_MS), views[1]], "m", random.Random(0), {"b": 1})
        assert chosen and chosen.key == "a"

    def test_a_queueing_verifier_is_not_chosen_for_what_it_knows(self) -> None:
        chosen = choose_verifier([verifier("a", 7), verifier("b", 10)], "m", random.Random(0), {"b": 1.0})
        assert chosen and chosen.key == "a"

    def test_who_knows_the_prompt_is_always_compared(self) -> None:
        views = [verifier(f"v{i}", 3) for i in range(20)]
        rng = random.Random(0)
        assert {choose_verifier(views, "m", rng, {"v13": 0.9}) for _ in range(50)} == {views[13]}


class TestChooseDrafts:
    def test_prefers_distinct_kinds_over_low_load(self) -> None:
        views = [draft("lm0", sessions=0), draft("lm1", sessions=1), draft("ng", "ngram", sessions=3)]
        for seed in range(10):
            assert {view.kind for view in choose_drafts(views, 2, random.Random(seed))} == {"lm", "ngram"}

    def test_then_takes_the_less_loaded(self) -> None:
        views = [draft("a", sessions=3), draft("b", sessions=1)]
        assert keys(choose_drafts(views, 2, random.Random(0))) == ["b", "a"]

    def test_of_many_never_takes_the_worst_and_spreads_over_the_rest(self) -> None:
        views = [draft("worst", sessions=3), *(draft(f"d{i}") for i in range(4))]
        rng = random.Random(1)
        assert {keys(choose_drafts(views, 1, rng))[0] for _ in range(200)} == {"d0", "d1", "d2", "d3"}

    @pytest.mark.parametrize(
        "better, worse",
        [
            (draft("a", round_ms=8), draft("b", round_ms=9)),
            (draft("a", round_ms=8, rtt_ms=1), draft("b", round_ms=8, rtt_ms=30)),
            (draft("a", round_ms=12, accepted=2.0), draft("b", round_ms=8, accepted=1.0)),
            (draft("a", round_ms=30, accepted=1.0), draft("b", round_ms=8, accepted=0.0)),
            (draft("a", sessions=3, round_ms=8), draft("b", sessions=0, round_ms=20)),
            (draft("new"), draft("b", sessions=3, round_ms=8)),
        ],
    )
    def test_weighs_round_round_trip_acceptance_and_load(self, better: DraftView, worse: DraftView) -> None:
        for views in ([better, worse], [worse, better]):
            assert choose_drafts(views, 1, random.Random(0)) == [better]

    def test_a_replacement_brings_the_missing_kind(self) -> None:
        views = [draft("lm1"), draft("ng", "ngram", sessions=2)]
        assert keys(choose_drafts(views, 1, random.Random(0), serving={"lm0"}, kinds={"lm"})) == ["ng"]

    @pytest.mark.parametrize("capacity, expected", [(2, []), (3, ["a"]), (0, ["a"])])
    def test_never_takes_a_full_worker(self, capacity: int, expected: list[str]) -> None:
        assert keys(choose_drafts([draft("a", sessions=2, capacity=capacity)], 1, random.Random(0))) == expected

    def test_never_takes_one_that_serves_already(self) -> None:
        assert keys(choose_drafts([draft("a"), draft("b")], 2, random.Random(0), serving={"a"})) == ["b"]

    @pytest.mark.parametrize("count", [0, -1])
    def test_takes_none_when_none_is_wanted(self, count: int) -> None:
        assert choose_drafts([draft("a")], count, random.Random(0)) == []
