"""A drafter behind a bridge: what it is told is the text, and what is proposed is what it has drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafter import Key, SessionCommitted, SessionStart
from draft_service.drafters.bridged import BridgedDrafter
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.spelling import Speller, split_character
from draftwood.vocabulary import Vocabulary
from draftwood.wire import SessionGrowth
from tests import tiny_tokenizers as tiny

KEY = (1, 1)
MAKERS = {"byte_level": tiny.byte_level, "byte_fallback": tiny.byte_fallback, "characters": tiny.characters}
PAIRS = [("byte_level", "byte_fallback"), ("byte_fallback", "byte_level"), ("characters", "byte_level"),
         ("byte_level", "characters")]  # fmt: skip
"""Draft and target."""
Paths = list[list[int]]
RUNS = st.lists(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=5), min_size=1, max_size=6)
SEVERAL = st.lists(st.tuples(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=4), RUNS), min_size=1, max_size=6)


@cache
def speller(kind: str) -> Speller:
    tokenizer = MAKERS[kind]()
    return Speller(tokenizer, {tokenizer.token_to_id(tiny.SPECIAL): chr(256)}, kind)


@dataclass
class Scripted:
    """Draws the paths that it is given, each token with the same probability below its parent."""

    paths: Paths = field(default_factory=list)
    share: float = 0.25
    told: list[int] = field(default_factory=list)
    key: Key | None = None
    epoch: int = 0
    next_id: int = 1
    due: bool = False
    kind = "scripted"
    model = "scripted"
    vocabulary: Vocabulary | None = None
    rules: tuple[Rule, ...] = ()

    def open(self, key: Key, start: SessionStart) -> None:
        assert self.key is None and start.sampling.greedy and start.rule is Rule.SHARED_NOISE
        self.key, self.told, self.epoch, self.due = key, list(start.tokens), start.epoch, start.budget > 0

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        committed.check_follows(len(self.told))
        assert key == self.key and committed.tokens
        self.told += committed.tokens
        self.epoch, self.due = committed.epoch, committed.budget > 0

    def close(self, key: Key) -> None:
        assert self.key in (None, key)

    def wants_work(self) -> bool:
        return self.due

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        assert self.key
        self.due, first = False, self.next_id
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for path in self.paths:
            for depth in range(1, len(path) + 1):
                nodes.setdefault(tuple(path[:depth]), self.next_id + len(nodes) - 1)
        drawn = [p for p in nodes if p]
        self.next_id += len(drawn)
        columns = np.array([nodes[p[:-1]] for p in drawn], np.int64), np.array([p[-1] for p in drawn], np.int32)
        scores = np.full(len(drawn), math.log(self.share), np.float32)
        return [(self.key, SessionGrowth(self.key[1], self.epoch, first, *columns, scores, True))]


@dataclass
class Verifier:
    """Follows the text and what is proposed for it."""

    drafter: BridgedDrafter
    target: Speller
    tokens: list[int]
    budget: int = 64
    epoch: int = 0
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)  # whole texts in tokens
    scores: dict[tuple[int, ...], float] = field(default_factory=dict)

    def open(self, max_depth: int = 16) -> Verifier:
        start = SessionStart(
            0, tuple(self.tokens), SamplingParams(temperature=0.7, seed=3), self.budget, len(self.target), 64,
            max_depth, 4096,
        )  # fmt: skip
        self.drafter.open(KEY, start)
        return self

    def commit(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.epoch += 1
        self.scores = {}
        committed = SessionCommitted(self.epoch, len(self.tokens), tuple(tokens), self.budget)
        self.drafter.commit(KEY, committed)

    def draw(self) -> list[tuple[int, ...]]:
        """What is live below the anchor when the round is complete, likeliest first, as tokens behind the text."""
        complete = False
        while self.drafter.wants_work():
            for key, growth in self.drafter.work():
                assert key == KEY and growth.epoch == self.epoch and not complete
                complete = growth.complete
                self._take(growth)
        assert complete, "a round ends"
        n = len(self.tokens)
        return [p[n:] for p in self.paths.values() if len(p) > n and list(p[:n]) == self.tokens]

    def _take(self, growth: SessionGrowth) -> None:
        columns = zip(growth.parent.tolist(), growth.token.tolist(), growth.score.tolist(), strict=True)
        for own, (parent, token, score) in enumerate(columns, growth.first_id):
            above = tuple(self.tokens) if parent == 0 else self.paths[parent]
            assert own not in self.paths and parent < own and score <= 0 and math.isfinite(score)
            assert list(above[: len(self.tokens)]) == self.tokens and (*above, token) not in self.paths.values()
            self.paths[own] = (*above, token)
            self.scores[self.paths[own][len(self.tokens) :]] = score


def pair(draft: str, target: str, paths: Paths | None = None, **scripted: float) -> tuple[Scripted, BridgedDrafter]:
    inner = Scripted(paths or [], **scripted)
    size = len(speller(target))
    vocabulary = Vocabulary(tuple(map(str, range(size))), frozenset(), size)
    return inner, BridgedDrafter(inner, speller(draft), speller(target), vocabulary)


def is_text(spelling: str) -> bool:
    """Whether all its bytes are characters, none of which has a special token within."""
    try:
        for part in spelling.split(chr(256)):
            part.encode("latin-1").decode()
    except UnicodeDecodeError:
        return False
    return True


def ids(side: Speller, text: str) -> list[int]:
    return side.tokens(text.encode().decode("latin-1"), "")


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@settings(max_examples=120, deadline=None)
@given(prompt=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=8), rounds=SEVERAL)
def test_any_texts_and_any_trees(
    draft: str, target: str, prompt: list[int], rounds: list[tuple[list[int], Paths]]
) -> None:
    """The draft knows the whole characters of the text; what is proposed begins what it has drawn behind them."""
    ours, theirs = speller(draft), speller(target)
    inner, drafter = pair(draft, target)
    verifier = Verifier(drafter, theirs, [t % len(theirs) for t in prompt]).open()
    drawn: list[str] = []  # whole texts
    for run, paths in rounds:
        inner.paths = [[t % len(ours) for t in path] for path in paths]
        live = verifier.draw()
        text = theirs.spell(verifier.tokens, "")
        whole, _ = split_character(text)
        if draft != "characters" and is_text(whole):
            assert ours.spell(inner.told, "") == whole
        drawn += [whole + ours.spell(path, whole) for path in inner.paths]
        for path in live:
            proposed = text + theirs.spell(path, text)
            assert any(each.startswith(proposed) for each in drawn)
        token = [t % len(theirs) for t in run]
        verifier.commit([*live[0], *token[:1]] if live and len(run) > 2 else token)
    drafter.close(KEY)


@pytest.mark.parametrize(("draft", "target"), PAIRS[:2])
def test_the_drawn_text_is_proposed_in_the_targets_own_tokens(draft: str, target: str) -> None:
    ours, theirs = speller(draft), speller(target)
    text, more = "Hello w\u00f6rld, na\u00efve", " caf\u00e9; \u6771\u4eac \U0001f642 a"
    whole = ids(theirs, text + more)
    prompt = ids(theirs, text)
    assert whole[: len(prompt)] == prompt
    _, drafter = pair(draft, target, [ours.tokens(spell(more), spell(text))], share=0.9)
    live = Verifier(drafter, theirs, prompt, budget=64).open(max_depth=64).draw()
    assert max(live, key=len) == tuple(whole[len(prompt) :])


def spell(text: str) -> str:
    return text.encode().decode("latin-1")


def test_a_tokens_survival_is_that_of_all_texts_that_have_it() -> None:
    """Two ways of the draft to write one token, and one that goes on to another."""
    theirs = speller("characters")
    assert theirs.tokens("the", "") == [theirs.tokens("th", "")[0], theirs.tokens("e", "")[0]]
    ours = speller("byte_level")
    t, h, e, i = (ours.tokens(c, "")[0] for c in "thei")
    inner, drafter = pair("byte_level", "characters", [[t, h, e], [t, h, i], [t, i]], share=0.5)
    verifier = Verifier(drafter, theirs, theirs.tokens("o", "")).open()
    verifier.draw()
    th, only_t = theirs.tokens("th", "")[0], theirs.tokens("t", "")[0]
    # t .5, of which th .25 and ti .25: th, the pair, has .25; t alone has ti's .25 and nothing left of its own.
    assert math.exp(verifier.scores[th,]) == pytest.approx(0.25)
    assert math.exp(verifier.scores[only_t,]) == pytest.approx(0.25)
    assert math.exp(verifier.scores[th, theirs.tokens("e", "")[0]]) == pytest.approx(0.5)
    assert inner.told == ours.tokens("o", "")


def test_half_a_character_is_gone_on_with() -> None:
    """The target has committed one byte of an emoji: the draft's guess of the emoji is the other three."""
    ours, theirs = speller("byte_fallback"), speller("byte_level")
    smile = spell("\U0001f642")
    byte = next(k for k in range(len(theirs)) if theirs.piece(k, "a") == smile[:1])
    prompt = [*ids(theirs, "a "), byte]
    paths = [ours.tokens(smile + "a", spell("a ")), ids(ours, "no")]
    inner, drafter = pair("byte_fallback", "byte_level", paths, share=0.9)
    verifier = Verifier(drafter, theirs, prompt).open()
    live = verifier.draw()
    assert ours.spell(inner.told, "") == "a ", "what is no character yet is not told"
    assert live and all((smile[1:] + "a").startswith(theirs.spell(path, "")) for path in live), "no other text"
    rest = max(live, key=len)
    verifier.commit(rest)
    verifier.draw()
    assert ours.spell(inner.told, "") == "a " + smile + "a"


def test_special_tokens_of_both_go_over_and_others_are_left_out() -> None:
    ours, theirs = speller("byte_level"), speller("byte_fallback")
    end, other_end = ours.tokens(chr(256), "")[0], theirs.tokens(chr(256), "")[0]
    unknown = next(k for k in range(len(theirs)) if theirs.piece(k, "a") is None)
    inner, drafter = pair("byte_level", "byte_fallback", [[end]], share=0.9)
    verifier = Verifier(drafter, theirs, [*ids(theirs, "a"), other_end, unknown]).open()
    assert verifier.draw() == [(other_end,)]
    assert inner.told == [*ours.tokens("a", ""), end]


def test_a_text_that_the_draft_cannot_read_gets_no_guess_until_it_can() -> None:
    theirs = speller("byte_level")
    inner, drafter = pair("characters", "byte_level", [[0]])
    verifier = Verifier(drafter, theirs, ids(theirs, "\u6771")).open()
    assert verifier.draw() == [] and inner.key is None
    verifier.commit(ids(theirs, "he"))
    assert verifier.draw() and inner.told == speller("characters").tokens("he", "")
    drafter.close(KEY)


def test_a_budget_of_nothing_and_caps() -> None:
    theirs = speller("byte_level")
    inner, drafter = pair("byte_fallback", "byte_level", [ids(speller("byte_fallback"), "abcdefgh")], share=0.9)
    verifier = Verifier(drafter, theirs, ids(theirs, "xyz"), budget=0).open(max_depth=3)
    assert not drafter.wants_work() and inner.told
    verifier.budget = 64
    verifier.commit(ids(theirs, "a"))
    assert max(map(len, verifier.draw())) == 3
    verifier.budget = 2
    verifier.commit(ids(theirs, "zz"))
    assert len(verifier.draw()) <= 2


def test_the_drafts_tree_is_kept_where_the_text_follows_it() -> None:
    """The draft is told the tokens of its own path, though it would cut the text otherwise."""
    ours, theirs = speller("byte_fallback"), speller("byte_level")
    cut = [t for c in "llo" for t in ours.tokens(c, "a")]
    assert ours.tokens("llo", "a") != cut
    inner, drafter = pair("byte_fallback", "byte_level", [[*cut, *ours.tokens("w", "a")]], share=0.9)
    verifier = Verifier(drafter, theirs, ids(theirs, "he")).open()
    verifier.draw()
    inner.paths = []
    verifier.commit(theirs.tokens("llo", "he"))
    assert inner.told[-3:] == cut
    assert [theirs.spell(path, "") for path in verifier.draw()] == ["w"], "what hung below the path lives on"
