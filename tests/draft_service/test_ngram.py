"""The n-gram drafter: proposes what followed the same words before, and knows how far to trust that."""

from __future__ import annotations

from typing import Any

import pytest

from draft_service.drafter import SessionCommitted, SessionStart
from draft_service.drafters.ngram import NgramDrafter
from draftwood.config import DraftSettings
from draftwood.parameters import SamplingParams
from draftwood.wire import SessionGrowth

KEY = (1, 7)
PHRASE = [3, 1, 4, 1, 5, 9, 2, 6]


def make(tokens: list[int], budget: int = 8, max_depth: int = 32, **settings: Any) -> NgramDrafter:
    drafter = NgramDrafter(DraftSettings(kind="ngram", **settings))
    drafter.open(KEY, SessionStart(0, tuple(tokens), SamplingParams(), budget, 100, 64, max_depth, 4096))
    return drafter


def draw(drafter: NgramDrafter) -> SessionGrowth:
    assert drafter.wants_work()
    [(key, growth)] = drafter.work()
    assert key == KEY and growth.handle == KEY[1] and growth.complete
    assert not drafter.wants_work()
    return growth


def chain(growth: SessionGrowth) -> list[int]:
    """Tokens of the first path."""
    tokens, above = [], 0
    for k, (parent, token) in enumerate(zip(growth.parent.tolist(), growth.token.tolist(), strict=True)):
        assert parent < growth.first_id + k
        if parent == above:
            tokens.append(token)
            above = growth.first_id + k
    return tokens


def test_repeated_text_is_continued() -> None:
    growth = draw(make([*PHRASE, 50, 3, 1, 4]))
    assert chain(growth) == [1, 5, 9, 2, 6, 50, 3, 1]
    assert (growth.score < 0).all() and (growth.score[1:] <= growth.score[0]).all()


def test_fresh_text_gets_no_guess() -> None:
    for length in range(1, 30):
        growth = draw(make(list(range(length))))
        assert len(growth.token) == 0 and growth.complete


def test_longest_match_wins_and_the_latest_comes_first() -> None:
    assert chain(draw(make([1, 2, 3, 70, 9, 2, 3, 71, 1, 2, 3])))[0] == 70
    growth = draw(make([2, 3, 70, 8, 2, 3, 71, 9, 2, 3]))
    roots = [t for p, t in zip(growth.parent.tolist(), growth.token.tolist(), strict=True) if p == 0]
    assert set(roots) == {70, 71}, "other continuations are branches"


@pytest.mark.parametrize(("budget", "depth", "nodes"), [(3, 32, 3), (8, 2, 2), (1, 32, 1)])
def test_budget_and_depth_are_respected(budget: int, depth: int, nodes: int) -> None:
    assert len(draw(make([*PHRASE, 50, 3, 1, 4], budget, depth)).token) == nodes


def test_ids_count_up_over_commits_and_the_index_follows_the_text() -> None:
    drafter = make([*PHRASE, 50, 3, 1, 4])
    first = draw(drafter)
    drafter.commit(KEY, SessionCommitted(1, 14, (1, 5), 8))
    second = draw(drafter)
    assert second.first_id == first.first_id + len(first.token) and second.epoch == 1
    assert chain(second)[0] == 9
    drafter.commit(KEY, SessionCommitted(2, 15, (60,), 8))
    assert len(draw(drafter).token) == 0, "the text has left the repetition"
    drafter.commit(KEY, SessionCommitted(3, 22, (3, 1, 4, 1, 5, 60, 3), 0))
    assert not drafter.wants_work(), "nothing was asked for"
    drafter.commit(KEY, SessionCommitted(4, 23, (1,), 8))
    assert chain(draw(drafter))[0] == 4


def test_trust_is_learnt_from_what_was_taken() -> None:
    def trust_after(right: bool) -> float:
        drafter = make([*PHRASE, *PHRASE])
        for epoch in range(1, 25):
            growth = draw(drafter)
            tokens = drafter._sessions[KEY].tokens
            token = chain(growth)[0]
            assert token == PHRASE[len(tokens) % 8]
            if right:
                committed = [token]
            else:  # another token, then the phrase from its start, so that there is a guess again
                committed = [token, *PHRASE[(len(tokens) + 1) % 8 :]]
                committed[0] = 99
                committed += PHRASE
            drafter.commit(KEY, SessionCommitted(epoch, len(tokens) + len(committed), tuple(committed), 8))
        return float(draw(drafter).score[0])

    start = float(draw(make([*PHRASE, *PHRASE])).score[0])
    assert trust_after(right=False) < start - 0.3
    assert trust_after(right=True) > start


def test_gap_in_the_text_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="do not make 9"):
        make([1, 2]).commit(KEY, SessionCommitted(1, 9, (3,), 4))


def test_closed_sessions_are_forgotten() -> None:
    drafter = make([*PHRASE, 50, 3, 1, 4])
    drafter.close(KEY)
    drafter.close(KEY)
    drafter.commit(KEY, SessionCommitted(1, 1, (1,), 4))
    assert not drafter.wants_work() and drafter.work() == []
