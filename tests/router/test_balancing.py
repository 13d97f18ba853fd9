from __future__ import annotations

import random

import pytest

from router.balancing import DraftView, VerifierView, choose_drafts, choose_verifier


def verifier(key: str, sessions: int, capacity: int = 10, model: str = "m") -> VerifierView:
    return VerifierView(key, model, sessions, capacity)


def draft(key: str, kind: str = "lm", sessions: int = 0, capacity: int = 4) -> DraftView:
    return DraftView(key, kind, sessions, capacity)


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
        views = [verifier("worst", 9), *(verifier(f"v{i}", i) for i in range(4))]
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


class TestChooseDrafts:
    def test_prefers_distinct_kinds_over_low_load(self) -> None:
        views = [draft("lm0", sessions=0), draft("lm1", sessions=1), draft("ng", "ngram", sessions=3)]
        assert keys(choose_drafts(views, 2)) == ["lm0", "ng"]

    def test_then_takes_the_least_loaded(self) -> None:
        views = [draft("a", sessions=3), draft("b", sessions=1), draft("c", sessions=2)]
        assert keys(choose_drafts(views, 2)) == ["b", "c"]

    def test_a_replacement_brings_the_missing_kind(self) -> None:
        views = [draft("lm1"), draft("ng", "ngram", sessions=2)]
        assert keys(choose_drafts(views, 1, serving={"lm0"}, kinds={"lm"})) == ["ng"]

    @pytest.mark.parametrize("capacity, expected", [(2, []), (3, ["a"]), (0, ["a"])])
    def test_never_takes_a_full_worker(self, capacity: int, expected: list[str]) -> None:
        assert keys(choose_drafts([draft("a", sessions=2, capacity=capacity)], 1)) == expected

    def test_never_takes_one_that_serves_already(self) -> None:
        assert keys(choose_drafts([draft("a"), draft("b")], 2, serving={"a"})) == ["b"]

    @pytest.mark.parametrize("count", [0, -1])
    def test_takes_none_when_none_is_wanted(self, count: int) -> None:
        assert choose_drafts([draft("a")], count) == []
