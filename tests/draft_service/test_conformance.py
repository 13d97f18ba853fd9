"""What every drafter must do, whatever its kind and topology."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from draft_service.drafter import Drafter, SessionCommitted, SessionStart
from draft_service.drafters.bridged import BridgedDrafter
from draft_service.drafters.lm import LmDrafter
from draft_service.drafters.lookup import LookupDrafter
from draft_service.drafters.merged import MergedDrafter
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafters.suffix import SuffixDrafter
from draftwood.config import DraftSettings
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.head_runtime import HeadRuntime
from draftwood.runtime.model import ModelRuntime
from draftwood.runtime.spelling import Speller
from draftwood.vocabulary import Vocabulary
from draftwood.wire import SessionGrowth
from tests.draft_service.test_block import make_drafter as make_block
from tests.draft_service.test_eagle import features_of, make_head, make_tables, request_of
from tests.draft_service.test_eagle import make_drafter as make_eagle
from tests.draft_service.test_lm import CONTEXT, GREEDY, SAMPLED, VOCAB, Oracle, make_runtime
from tests.draft_service.test_medusa import make_drafter as make_medusa
from tests.tiny_tokenizers import few_tokens

LM: dict[str, dict[str, Any]] = {
    "best_first": {},
    "expand_rerank": {},
    "sequoia": {"branch": 5},
    "sequoia_sized": {"topology": "sequoia", "branch": 5, "step_ms": [(1, 1.0), (8, 1.1), (20, 4.0)]},
    "chain": {},
    "kary": {"branching": [3, 2, 1, 1]},
    "choices": {"choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]},
    "eagle1": {"depth": 5},
}
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle", "topology": "expand_rerank"},
    "eagle3": {"kind": "eagle", "topology": "best_first"},
    "mtp": {"kind": "mtp", "topology": "chain", "depth": 3},
    "block": {"kind": "block", "topology": "best_first"},
    "medusa": {"kind": "medusa", "topology": "best_first"},
    "medusa_choices": {"kind": "medusa"} | LM["choices"] | {"topology": "choices"},
}
METHODS = [*LM, *HEADS, "ngram", "suffix", "bridged", "merged", "merged_suffix", "merged_eagle"]
LEARNING = {"sequoia", "sequoia_sized", "ngram", "suffix", "merged", "merged_suffix", "merged_eagle"}
"""What these draw depends on what other sessions' texts have shown."""
MERGED = {
    "merged": ("best_first", "ngram"), "merged_suffix": ("best_first", "suffix"), "merged_eagle": ("eagle", "ngram"),
}  # fmt: skip
BY_IDS_ALONE = {"ngram", "suffix", "bridged", "merged_eagle", *HEADS}
"""These cannot sample for the rejection rule."""
WITHOUT_PAGES = {"ngram", "suffix", "medusa", "medusa_choices"}
BASE: dict[str, Any] = {
    "depth": 4, "beam": 3, "max_nodes": 25, "page_tokens": 16, "min_level_survival": 0.01,
    "ngram_min": 1, "suffix_min": 1,
}  # fmt: skip
SAMPLING = (GREEDY, SAMPLED)
REJECTED = SamplingParams(temperature=0.8)


def bridged(inner: Drafter) -> BridgedDrafter:
    """The draft has a token a character, some of which the target has not; the target has some pairs of them, too."""
    pairs, letters = ["he", "th", "in", "er", "oo", "o,", "Ġw", "ll"], "xyzXYZq!?*#@%&$~"
    draft, target = few_tokens(VOCAB, [], letters, 7), few_tokens(VOCAB, pairs, letters)
    vocabulary = Vocabulary(tuple(str(target.id_to_token(i)) for i in range(VOCAB)), frozenset(), VOCAB)
    return BridgedDrafter(inner, Speller(draft, {}, "draft"), Speller(target, {}, "target"), vocabulary)


def make(method: str, runtime: ModelRuntime, **settings: Any) -> Drafter:
    if method == "bridged":
        return bridged(make("best_first", runtime, **settings))
    if method in MERGED:
        return MergedDrafter([make(part, runtime, **settings) for part in MERGED[method]])
    if method in ("ngram", "suffix"):
        chosen = DraftSettings(**(BASE | {"kind": method} | settings))
        return NgramDrafter(chosen) if method == "ngram" else SuffixDrafter(chosen)
    if method in HEADS:
        return make_on_features(method, runtime.pool.total, **(BASE | HEADS[method] | settings))
    chosen = DraftSettings(**(BASE | {"topology": method} | LM[method] | settings))
    vocabulary = Vocabulary(tuple(str(i) for i in range(VOCAB)), frozenset(), VOCAB)
    return LmDrafter(runtime, chosen, "tiny", vocabulary, random=np.random.default_rng(5))


def make_on_features(method: str, kv_pages: int, **settings: Any) -> Drafter:
    if method.startswith("medusa"):
        return make_medusa(**settings)
    if method == "block":
        return make_block(kv_pages, **settings)
    head = make_head(method)
    own = HeadRuntime(head, make_tables(), kv_pages=kv_pages, page_tokens=16)
    return make_eagle(own, request_of(head), **settings)


@pytest.fixture
def runtime() -> Iterator[ModelRuntime]:
    """Every page must be back at the end."""
    runtime = make_runtime()
    yield runtime
    assert runtime.pool.free == runtime.pool.total


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(make_runtime())


@dataclass
class Follower:
    """One session as a verifier knows it; every growth is checked."""

    drafter: Drafter
    tokens: list[int]
    sampling: SamplingParams = GREEDY
    rule: Rule = Rule.SHARED_NOISE
    key: tuple[int, int] = (1, 1)
    budget: int = 12
    max_nodes: int = 20
    max_depth: int = 4
    max_context_tokens: int = CONTEXT
    epoch: int = 0
    last_id: int = 0
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)  # node id -> whole text up to the node
    scores: dict[tuple[int, ...], float] = field(default_factory=dict)  # the last round's, by tokens behind the text
    complete: bool = False

    def open(self) -> Follower:
        start = SessionStart(
            0, tuple(self.tokens), self.sampling, self.budget, VOCAB, self.max_nodes, self.max_depth,
            self.max_context_tokens, self.rule,
        )  # fmt: skip
        self.drafter.open(self.key, start)
        self.feed(0)
        return self

    def feed(self, first: int) -> None:
        """What a drafter that works on the target's features is told of the text, from ``first`` on."""
        if self.drafter.features and first < len(self.tokens) - 1:
            layers = len(self.drafter.features.layers)
            self.drafter.feed(self.key, first, features_of(self.tokens, first, len(self.tokens) - 1, layers))

    def commit(self, tokens: Sequence[int]) -> None:
        anchor = len(self.tokens) - 1
        self.tokens += tokens
        self.epoch += 1
        self.feed(anchor)
        self.scores, self.complete = {}, False
        self.drafter.commit(self.key, SessionCommitted(self.epoch, len(self.tokens), tuple(tokens), self.budget))

    def take(self, growth: SessionGrowth) -> None:
        assert (growth.handle, growth.epoch) == (self.key[1], self.epoch)
        assert not self.complete, "a round has ended and goes on"
        assert growth.first_id == self.last_id + 1, "ids count up without gaps"
        columns = zip(growth.parent.tolist(), growth.token.tolist(), growth.score.tolist(), strict=True)
        for own, (parent, token, score) in enumerate(columns, start=growth.first_id):
            assert 0 <= parent < own, "parents come first"
            above = tuple(self.tokens) if parent == 0 else self.paths[parent]
            assert above[: len(self.tokens)] == tuple(self.tokens), "nothing is sent below a branch not taken"
            known = not isinstance(self.drafter, LookupDrafter) and (*above, token) in self.paths.values()
            assert self.sampled or not known, "what lives on after a commit is not sent again"
            self.paths[own] = (*above, token)
            behind = self.paths[own][len(self.tokens) :]
            assert len(behind) <= self.max_depth and len(self.paths[own]) <= self.max_context_tokens
            assert np.isfinite(score) and score <= 0, "so survival never grows along a path"
            if self.sampled:
                assert token in growth.drawn[parent].token
            else:
                assert behind not in self.scores, "no node twice"
                assert not growth.drawn
            self.scores[behind] = score
        self.last_id += len(growth.token)
        self.complete = growth.complete
        assert len(self.scores) <= min(self.budget, self.max_nodes)

    @property
    def sampled(self) -> bool:
        return self.rule is Rule.REJECTION and not self.sampling.greedy

    def live(self) -> set[tuple[int, ...]]:
        """All that was sent below the anchor, as tokens behind it."""
        n = len(self.tokens)
        return {p[n:] for p in self.paths.values() if len(p) > n and p[:n] == tuple(self.tokens)}


def work_until_idle(drafter: Drafter, followers: Sequence[Follower]) -> None:
    by_key = {f.key: f for f in followers}
    for _ in range(300):
        if not drafter.wants_work():
            assert all(f.complete or not f.budget for f in followers), "a round never ends"
            return
        for key, growth in drafter.work():
            by_key[key].take(growth)
    raise AssertionError("work does not end")


def target_text(oracle: Oracle, prompt: Sequence[int], sampling: SamplingParams, length: int) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(oracle.choice(text, sampling))
    return text


def random_commit(rnd: random.Random, follower: Follower, oracle: Oracle) -> list[int]:
    """Within the tree, outside of it, or first within and then outside."""
    live = sorted(follower.live())
    kind = rnd.choice(["within", "within", "outside", "both"])
    path = list(rnd.choice(live)) if live and kind != "outside" else []
    own = rnd.randrange(VOCAB) if kind != "within" else oracle.choice([*follower.tokens, *path], follower.sampling)
    return [*path, own]


@pytest.mark.parametrize("method", METHODS)
def test_growth_is_well_formed_through_commits_within_and_outside_the_tree(
    method: str, runtime: ModelRuntime, oracle: Oracle
) -> None:
    for seed, sampling in enumerate(SAMPLING):
        rnd = random.Random(seed)
        drafter = make(method, runtime, max_step_tokens=rnd.choice([7, 64]))
        follower = Follower(drafter, [3, 1, 4, 1, 5, 9, 3, 1, 4], sampling).open()
        for _ in range(12):
            work_until_idle(drafter, [follower])
            follower.budget = rnd.choice([0, 1, 2, 7, 20, 60])
            follower.commit(random_commit(rnd, follower, oracle))
        assert follower.last_id > (10 if method in ("chain", "mtp", "ngram", "suffix") else 40)
        drafter.close(follower.key)
        assert not drafter.wants_work()


@pytest.mark.parametrize("method", METHODS)
def test_after_a_commit_the_tree_is_one_for_the_new_text(method: str, runtime: ModelRuntime, oracle: Oracle) -> None:
    """The likeliest guess of a drafter that starts on the text as it is now is among what has been sent."""
    drafter = make(method, runtime)
    text = target_text(oracle, [3, 1, 4, 1, 5, 9, 3, 1, 4], GREEDY, 40)
    follower = Follower(drafter, text[:9]).open()
    within = 0
    for step in range(8):
        work_until_idle(drafter, [follower])
        fresh = make(method, runtime)
        other = Follower(fresh, list(follower.tokens), key=(2, 2)).open()
        work_until_idle(fresh, [other])
        fresh.close(other.key)
        if other.scores:
            first = max((p for p in other.scores if len(p) == 1), key=lambda p: other.scores[p])
            assert first in follower.live()
        rest = text[len(follower.tokens) :]
        run = [k for k in range(1, 4) if tuple(rest[:k]) in follower.live()]
        within += bool(run)
        follower.commit(rest[: max(run, default=0) + 1] if step % 4 < 3 else [rest[0] ^ 1])
        if step % 4 == 3:
            text = target_text(oracle, follower.tokens, GREEDY, len(text))
    assert within or method in BY_IDS_ALONE
    drafter.close(follower.key)


@pytest.mark.parametrize("method", METHODS)
def test_many_sessions_at_once_draw_what_each_draws_alone(method: str, runtime: ModelRuntime, oracle: Oracle) -> None:
    """Sessions are isolated. Where a drafter learns from all texts, before anything is committed."""
    prompts = [[7], [1, 2, 3, 1, 2], [5] * 20, list(range(30)), [3, 1, 4, 1, 5, 3, 1, 4]]
    texts = [target_text(oracle, p, SAMPLING[k % 2], len(p) + 12) for k, p in enumerate(prompts)]
    rounds = 1 if method in LEARNING else 4

    def run(members: Sequence[int]) -> list[list[dict[tuple[int, ...], float]]]:
        """Of each member, what is live after each round, with scores."""
        drafter = make(method, runtime)
        followers = [Follower(drafter, prompts[k][:], SAMPLING[k % 2], key=(k % 2, k)) for k in members]
        seen: list[list[dict[tuple[int, ...], float]]] = [[] for _ in members]
        for each in followers:
            each.open()
        for _ in range(rounds):
            work_until_idle(drafter, followers)
            for k, each, out in zip(members, followers, seen, strict=True):
                out.append(dict(each.scores))
                at = len(each.tokens)
                each.commit(texts[k][at : at + 1 + k % 3])
        for each in followers:
            drafter.close(each.key)
        return seen

    together = run(range(len(prompts)))
    for k, drawn in enumerate(together):
        [alone] = run([k])
        assert [set(r) for r in drawn] == [set(r) for r in alone]
        for one, other in zip(drawn, alone, strict=True):
            assert all(one[p] == pytest.approx(other[p], abs=1e-5) for p in one)


@pytest.mark.parametrize("rule", [Rule.SHARED_NOISE, Rule.REJECTION])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_calls_and_seed_give_the_same_growth(
    method: str, rule: Rule, runtime: ModelRuntime, oracle: Oracle
) -> None:
    def run() -> list[tuple[int, list[int], list[int], list[float]]]:
        drafter = make(method, runtime)
        if rule is Rule.REJECTION and rule not in drafter.rules:
            return [(0, [], [], [])]
        sampling = REJECTED if rule is Rule.REJECTION else SAMPLED
        followers = [Follower(drafter, [3, 1, 4, 3, 1, k], sampling, rule, key=(1, k)) for k in range(3)]
        out = []
        for each in followers:
            each.open()
        for epoch in range(4):
            while drafter.wants_work():
                for key, g in drafter.work():
                    followers[key[1]].take(g)
                    out.append((g.handle, g.parent.tolist(), g.token.tolist(), g.score.tolist()))
            for each in followers:
                path = min(each.live() or {()})
                each.commit([*path[: epoch % 3], (each.tokens[-1] + epoch) % VOCAB])
        for each in followers:
            drafter.close(each.key)
        return out

    first = run()
    assert first == run() and first


@pytest.mark.parametrize("method", [m for m in METHODS if m not in BY_IDS_ALONE])
def test_under_rejection_what_is_sent_was_sampled_from_what_is_said(
    method: str, runtime: ModelRuntime, oracle: Oracle
) -> None:
    """``take`` finds each node's token in the distribution of its parent; siblings are in order of their rank."""
    rnd = random.Random(2)
    drafter = make(method, runtime)
    follower = Follower(drafter, [3, 1, 4, 3, 1], REJECTED, Rule.REJECTION).open()
    for _ in range(8):
        work_until_idle(drafter, [follower])
        follower.commit(random_commit(rnd, follower, oracle))
    assert follower.last_id > 20
    drafter.close(follower.key)


@pytest.mark.parametrize("method", METHODS)
def test_context_that_is_full_ends_the_drawing(method: str, runtime: ModelRuntime, oracle: Oracle) -> None:
    drafter = make(method, runtime)
    follower = Follower(drafter, [1, 2, 1, 2, 1, 2, 1], max_context_tokens=12).open()
    for _ in range(8):
        work_until_idle(drafter, [follower])
        follower.commit([2 if follower.tokens[-1] == 1 else 1])
    drafter.close(follower.key)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in WITHOUT_PAGES])
def test_full_page_pool_costs_guesses_and_nothing_else(method: str, oracle: Oracle) -> None:
    small = make_runtime(kv_pages=3)
    drafter = make(method, small)
    rich = Follower(drafter, [k % VOCAB for k in range(30)], key=(1, 1)).open()
    work_until_idle(drafter, [rich])
    poor = Follower(drafter, [k % VOCAB for k in range(20)], key=(1, 2)).open()
    work_until_idle(drafter, [rich, poor])
    assert rich.scores and not poor.scores, "complete, with no node"
    drafter.close(rich.key)
    poor.commit([5])
    work_until_idle(drafter, [poor])
    assert poor.scores
    drafter.close(poor.key)
    assert small.pool.free == small.pool.total == 3


@pytest.mark.parametrize("method", METHODS)
def test_bad_and_late_calls_touch_no_other_session(method: str, runtime: ModelRuntime) -> None:
    drafter = make(method, runtime)
    one = Follower(drafter, [1, 2, 3, 1, 2], key=(1, 1)).open()
    other = Follower(drafter, [1, 2, 3, 1, 2], key=(1, 2)).open()
    drafter.commit((9, 9), SessionCommitted(1, 9, (3,), 4))
    drafter.close((9, 9))
    with pytest.raises(ValueError, match="do not make 9"):
        drafter.commit(other.key, SessionCommitted(1, 9, (3,), 4))
    drafter.close(other.key)
    work_until_idle(drafter, [one])
    assert one.complete
    drafter.close(one.key)
    drafter.close(one.key)
    assert not drafter.wants_work() and drafter.work() == []
