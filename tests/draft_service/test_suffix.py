"""The suffix index against brute force, and the drafter that guesses from all texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafter import SessionCommitted, SessionStart
from draft_service.drafters.suffix import SuffixDrafter
from draft_service.suffix_index import SuffixIndex
from draftwood.config import DraftSettings
from draftwood.parameters import SamplingParams
from draftwood.wire import SessionGrowth

KEY = (1, 7)
PHRASE = [3, 1, 4, 1, 5, 9, 2, 6]
MANY = 10**6


def brute_force(text: list[int], oldest: int, context: list[int], shortest: int) -> list[tuple[int, int]]:
    found = []
    for at in range(len(text) - 1, oldest + shortest - 1, -1):
        length = 0
        while length < min(len(context), at - oldest) and text[at - 1 - length] == context[-1 - length]:
            length += 1
        if length >= shortest:
            found.append((at, length))
    return found


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(-1, 2), max_size=30), max_size=8),
    st.integers(4, 40),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
)
def test_matches_are_those_of_the_tokens_still_known(
    pieces: list[list[int]], capacity: int, shortest: int, context: list[int]
) -> None:
    """Added piece by piece, before and after the ring has gone round."""
    index, text = SuffixIndex(capacity, shortest), list[int]()
    for piece in pieces:
        index.add(piece)
        text += piece
        oldest = max(0, len(text) - capacity)
        assert index.oldest == oldest
        want = brute_force(text, oldest, context, shortest) if len(context) >= shortest else []
        assert index.matches(context, MANY) == want
        assert all(index.read(at, 5).tolist() == text[at : at + 5] for at, _ in want)


def test_memory_is_bounded_and_the_newest_matches_come_first() -> None:
    index = SuffixIndex(1000, 2)
    arrays = [a for a in vars(index).values() if isinstance(a, np.ndarray)]
    for k in range(20):
        index.add([7, 8, k] * 300)
    assert [id(a) for a in vars(index).values() if isinstance(a, np.ndarray)] == [id(a) for a in arrays]
    assert sum(a.nbytes for a in arrays) <= 28.1 * 1000
    found = index.matches([7, 8], 5)
    assert len(found) == 5 and [int(index.read(at, 1)[0]) for at, _ in found] == [19] * 5


def make(**chosen: Any) -> SuffixDrafter:
    return SuffixDrafter(DraftSettings(**({"kind": "suffix", "suffix_min": 2} | chosen)))


def draw(drafter: SuffixDrafter, tokens: list[int], budget: int = 12, key: tuple[int, int] = KEY) -> SessionGrowth:
    """The first tree for a text."""
    drafter.open(key, SessionStart(0, tuple(tokens), SamplingParams(), budget, 100, 64, 32, 4096))
    [(drawn, growth)] = drafter.work()
    assert drawn == key and growth.complete
    return growth


def nodes(growth: SessionGrowth) -> dict[tuple[int, ...], float]:
    """Probability of each edge, by path of tokens."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    out = {}
    for k, (parent, token) in enumerate(zip(growth.parent.tolist(), growth.token.tolist(), strict=True)):
        paths[growth.first_id + k] = (*paths[parent], token)
        out[paths[growth.first_id + k]] = float(np.exp(growth.score[k]))
    return out


def test_a_texts_own_repetition_is_continued() -> None:
    growth = draw(make(), [*PHRASE, 50, 3, 1, 4])
    assert growth.token.tolist() == [1, 5, 9, 2, 6, 50, 3, 1]


def test_an_ended_text_is_continued_in_others_and_a_running_one_is_not() -> None:
    drafter = make()
    draw(drafter, [*PHRASE, 50], key=(1, 1))
    assert not nodes(draw(drafter, [70, 3, 1, 4], key=(1, 2))), "sessions that run are isolated"
    drafter.close((1, 1))
    assert draw(drafter, [70, 3, 1, 4], key=(1, 3)).token.tolist() == [1, 5, 9, 2, 6, 50], "and not into the next text"


def test_the_oldest_texts_are_forgotten_and_none_is_kept_if_so_set() -> None:
    for chosen, kept in (({"suffix_tokens": 100}, False), ({"suffix_tokens": 0}, False), ({}, True)):
        drafter = make(**chosen)
        draw(drafter, PHRASE, key=(1, 1))
        drafter.close((1, 1))
        draw(drafter, list(range(100, 195)), key=(1, 2))
        drafter.close((1, 2))
        assert bool(nodes(draw(drafter, [70, 3, 1, 4]))) == kept


def test_the_longest_match_decides_and_branches_share_its_trust() -> None:
    drafter = make()
    text = [1, 2, 3, 70, 9, 1, 2, 3, 70, 8, 1, 2, 3, 71, 9, 5, 2, 3, 72, 1, 2, 3]
    found = nodes(draw(drafter, text))
    first = {path[0]: p for path, p in found.items() if len(path) == 1}
    assert set(first) == {70, 71}, "72 follows a shorter match"
    assert first[70] == pytest.approx(2 * first[71], rel=1e-5)
    assert found[70, 9] == pytest.approx(found[70, 8], rel=1e-5)
    assert found[71, 9] > first[70], "the only continuation of a longer match"


def test_trust_is_learnt_at_each_depth_of_the_tree() -> None:
    def chance(right: int) -> list[float]:
        """Of the nodes of the next tree, after ten in which the first ``right`` of a run came true."""
        drafter = make(suffix_max=4)
        for k in range(10):
            drafter.close(KEY)
            draw(drafter, [*PHRASE, 50 + k, 3, 1])
            committed = [*PHRASE[2 : 2 + right], 99]
            drafter.commit(KEY, SessionCommitted(1, 11 + len(committed), tuple(committed), 8))
            drafter.work()
        drafter.close(KEY)
        return [float(p) for p in np.exp(draw(make_like(drafter), [*PHRASE, 80, 3, 1]).score[:3])]

    def make_like(drafter: SuffixDrafter) -> SuffixDrafter:
        fresh = make(suffix_max=4)
        fresh._trust = drafter._trust
        return fresh

    before = chance(right=5)
    none, one = chance(right=0), chance(right=1)
    assert none[0] < one[0] and one[1] < before[1] and one[0] == pytest.approx(before[0])


def test_separators_are_never_guessed() -> None:
    drafter = make()
    for k in range(3):
        draw(drafter, [3, 1, 4], key=(1, k))
        drafter.close((1, k))
    assert not len(draw(drafter, [9, 3, 1, 4]).token)
