"""The rules of acceptance: each lossless one enumerated in rational arithmetic, and sampled against its law."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.acceptance import (
    ACCEPTANCE_STREAM,
    UniformDice,
    Walk,
    multi_step,
    reject,
    rejection_targets,
    sample_children,
    sibling_score,
    typical_targets,
    walk,
)
from draftwood.noise import gumbel_rows, uniform_rows
from draftwood.parameters import Rule, SamplingParams
from draftwood.sampling import process_logits
from draftwood.tree import Proposal, TokenTree
from tests.chi_square import p_value

TOKENS = 3
NODES = 6  # the anchor included
Text = tuple[int, ...]
Law = Callable[[Text], tuple[Fraction, ...]]


def law(name: str, zeros: bool = True) -> Law:
    """A table from prefix to a distribution over the tokens, small fractions, with zeros among them."""

    @cache
    def of(text: Text) -> tuple[Fraction, ...]:
        rng = random.Random(f"{name}{text}")
        weights = [rng.randrange(0 if zeros else 1, 4) for _ in range(TOKENS)]
        weights[rng.randrange(TOKENS)] += 1
        return tuple(Fraction(w, sum(weights)) for w in weights)

    return of


@cache
def proposal(q: tuple[Fraction, ...]) -> Proposal:
    support = [t for t, chance in enumerate(q) if chance]
    return Proposal(np.array(support), np.array([q[t] for t in support], object))


def shapes(nodes: int) -> Iterator[tuple[int, ...]]:
    """Parents of all ordered trees: children in the order of their indices, level by level."""
    for parents in itertools.product(*(range(i) for i in range(1, nodes))):
        if list(parents) == sorted(parents):
            yield (-1, *parents)


def test_all_ordered_trees_are_there() -> None:
    assert [len(list(shapes(n))) for n in range(1, NODES + 1)] == [1, 1, 2, 5, 14, 42]  # Catalan's numbers


@dataclass
class EveryDecision:
    """Dice that fall every way: one run after another until all have been seen, each with its exact probability."""

    weight: Fraction = Fraction(1)
    _script: tuple[int, ...] = ()
    _at: int = 0
    _todo: list[tuple[int, ...]] = field(default_factory=lambda: [()])

    def runs(self) -> Iterator[None]:
        while self._todo:
            self._script, self._at, self.weight = self._todo.pop(), 0, Fraction(1)
            yield

    def _decide(self, chances: Sequence[tuple[Any, Fraction]]) -> Any:
        open_ = [(outcome, chance) for outcome, chance in chances if chance > 0]
        assert sum(chance for _, chance in open_) == 1
        if self._at == len(self._script):
            self._todo += [(*self._script, k) for k in range(1, len(open_))]
            self._script += (0,)
        outcome, chance = open_[self._script[self._at]]
        self._at += 1
        self.weight *= chance
        return outcome

    def accepts(self, sibling: int, probability: np.ndarray) -> np.ndarray:
        (chance,) = probability
        return np.array([self._decide([(True, Fraction(chance)), (False, 1 - Fraction(chance))])])

    def draw(self, weight: np.ndarray) -> np.ndarray:
        total = sum(weight)
        return np.array([self._decide([(t, Fraction(w) / total) for t, w in enumerate(weight)])])


@dataclass
class Ledger:
    """What came out, and with which probability."""

    mass: dict[Text, Fraction] = field(default_factory=lambda: defaultdict(Fraction))

    def add(self, run: Text, weight: Fraction) -> None:
        self.mass[run] += weight

    def is_the_targets(self, p: Law) -> bool:
        """Whether, after each text that the walk goes on behind, the next token has exactly the target's chances."""
        begun: dict[Text, Fraction] = defaultdict(Fraction)  # the run starts with this text
        behind: dict[Text, Fraction] = defaultdict(Fraction)  # and goes on
        for run, weight in self.mass.items():
            for n in range(len(run)):
                begun[run[: n + 1]] += weight
                behind[run[:n]] += weight
        assert sum(self.mass.values()) == 1
        return all(
            begun[(*text, y)] == weight * p(text)[y] for text, weight in list(behind.items()) for y in range(TOKENS)
        )


def sampled_trees(
    parents: tuple[int, ...], q_of: Callable[[Text, int], tuple[Fraction, ...]]
) -> Iterator[tuple[TokenTree, list[Text], list[Proposal | None], Fraction]]:
    """Every tree of this shape that a draft may sample: texts of the nodes, what they were sampled from, and chance.

    ``q_of`` gives the distribution of a node's child of a certain rank.
    """
    ranks = [parents[:n].count(parents[n]) for n in range(len(parents))]
    for tokens in itertools.product(range(TOKENS), repeat=len(parents) - 1):
        texts: list[Text] = [()]
        drawn: list[Proposal | None] = [None]
        weight = Fraction(1)
        for n, token in enumerate(tokens, 1):
            q = q_of(texts[parents[n]], ranks[n])
            texts.append((*texts[parents[n]], token))
            drawn.append(proposal(q))
            weight *= q[token]
        if weight:
            yield TokenTree.of(parents, (0, *tokens)), texts, drawn, weight


def every_run(
    tree: TokenTree, drawn: Sequence[Proposal | None], texts: Sequence[Text], p: Law
) -> Iterator[tuple[Text, Fraction]]:
    """What the rule may emit for this tree, once per way to get there, and with which probability."""
    dice = EveryDecision()
    for _ in dice.runs():
        targets = rejection_targets(tree, drawn, lambda n: np.array(p(texts[n]), object), lambda depth: dice)
        taken = walk(tree, targets)
        assert taken.tokens == (*(int(tree.token[n]) for n in taken.path), taken.tokens[-1])
        yield taken.tokens, dice.weight


def rejection_ledger(
    parents: tuple[int, ...],
    p: Law,
    q_of: Callable[[Text, int], tuple[Fraction, ...]],
    *,
    told: Callable[[Text, int], tuple[Fraction, ...]] | None = None,
    cut: Callable[[TokenTree], list[int]] | None = None,
) -> Ledger:
    """All that can happen with one shape. ``told``: what the draft says q is; ``cut``: nodes that are verified."""
    ledger = Ledger()
    for tree, texts, drawn, weight in sampled_trees(parents, q_of):
        kept = list(range(tree.size)) if cut is None else cut(tree)
        place = {old: new for new, old in enumerate(kept)}
        small = TokenTree.of([-1, *(place[int(tree.parent[n])] for n in kept[1:])], tree.token[kept].tolist())
        if told:
            drawn = [None, *(proposal(told(texts[int(tree.parent[n])], 0)) for n in range(1, tree.size))]
        for run, chance in every_run(small, [drawn[n] for n in kept], [texts[n] for n in kept], p):
            ledger.add(run, weight * chance)
    return ledger


LAWS = [("plain", False), ("sparse", True), ("other", True)]


@pytest.mark.parametrize(("name", "zeros"), LAWS)
def test_rejection_is_exact_for_every_tree(name: str, zeros: bool) -> None:
    p, q = law(f"p {name}", zeros), law(f"q {name}", zeros)
    for nodes in range(1, NODES + 1):
        for parents in shapes(nodes):
            assert rejection_ledger(parents, p, lambda text, rank: q(text)).is_the_targets(p), parents


def test_rejection_is_exact_for_siblings_of_several_drafts() -> None:
    """Each sibling is held against the distribution that it was itself sampled from."""
    p, q = law("p"), [law("q a"), law("q b", zeros=False)]
    for parents in [s for nodes in range(3, NODES) for s in shapes(nodes)]:
        assert rejection_ledger(parents, p, lambda text, rank: q[rank % 2](text)).is_the_targets(p), parents


def test_rejection_is_exact_when_a_tree_is_cut_by_its_structure() -> None:
    p, q = law("p"), law("q")
    by_index = [lambda tree, most=most: list(range(min(most, tree.size))) for most in range(1, NODES)]
    for parents in shapes(5):
        for cut in by_index:
            assert rejection_ledger(parents, p, lambda text, rank: q(text), cut=cut).is_the_targets(p), parents


def by_token(tree: TokenTree) -> list[int]:
    """Nodes but those that carry token 0: a cut that looks at what was sampled."""
    kept = [0]
    for n in range(1, tree.size):
        if int(tree.parent[n]) in kept and tree.token[n] != 0:
            kept.append(n)
    return kept


def merged(tree: TokenTree) -> list[int]:
    """Of equal siblings only the first."""
    kept = [0]
    edges: set[tuple[int, int]] = set()
    for n in range(1, tree.size):
        edge = int(tree.parent[n]), int(tree.token[n])
        if edge[0] in kept and edge not in edges:
            edges.add(edge)
            kept.append(n)
    return kept


def test_the_enumeration_sees_a_cut_by_tokens_and_a_merge_of_equal_siblings() -> None:
    p, q = law("p plain", zeros=False), law("q plain", zeros=False)
    q_of = lambda text, rank: q(text)  # noqa: E731
    assert not rejection_ledger((-1, 0), p, q_of, cut=by_token).is_the_targets(p)
    assert not rejection_ledger((-1, 0, 0, 0), p, q_of, cut=merged).is_the_targets(p)


def test_bug_7_the_enumeration_sees_a_q_that_is_not_what_was_sampled_from() -> None:
    p, q = law("p plain", zeros=False), law("q plain", zeros=False)
    assert not rejection_ledger((-1, 0), p, lambda text, rank: q(text), told=lambda text, rank: p(text)).is_the_targets(
        p
    )


def test_bug_5_the_enumeration_sees_favourites_passed_off_as_samples() -> None:
    """The top child of q, as for the greedy rule, judged as if it had been sampled."""
    p, q = law("p plain", zeros=False), law("q plain", zeros=False)

    def favourite(text: Text, rank: int) -> tuple[Fraction, ...]:
        best = max(range(TOKENS), key=lambda t: q(text)[t])
        return tuple(Fraction(t == best) for t in range(TOKENS))

    assert not rejection_ledger((-1, 0), p, favourite, told=lambda text, rank: q(text)).is_the_targets(p)


# Greedy and shared noise: a token per node, whatever the tree


def tries(nodes: int) -> Iterator[tuple[TokenTree, list[Text]]]:
    """All trees of this size without equal siblings."""
    seen = set()
    for parents in shapes(nodes):
        for tokens in itertools.product(range(TOKENS), repeat=nodes - 1):
            texts: list[Text] = [()]
            for n, token in enumerate(tokens, 1):
                texts.append((*texts[parents[n]], token))
            if len(set(texts)) == nodes and frozenset(texts) not in seen:
                seen.add(frozenset(texts))
                yield TokenTree.of(parents, (0, *tokens)), texts


def test_all_tries_are_there() -> None:
    assert [sum(1 for _ in tries(n)) for n in range(1, NODES + 1)] == [1, 3, 12, 55, 273, 1428]  # ternary trees


@pytest.mark.parametrize("nodes", range(1, NODES + 1))
def test_shared_noise_by_its_reduction_is_exact_for_every_tree(nodes: int) -> None:
    """Given the tree, the noise of a position makes the target's token at each of its nodes a sample of p there.

    The walk sees one node a position, so the tokens on it are independent samples. Nodes that it does not visit have
    tokens that it cannot have and must not matter.
    """
    p = law("p")
    for tree, texts in tries(nodes):
        ledger, node_of = Ledger(), {text: n for n, text in enumerate(texts)}
        dice = EveryDecision()
        for _ in dice.runs():
            targets, text = [TOKENS + n for n in range(nodes)], ()
            while text in node_of:
                (y,) = dice.draw(np.array(p(text), object))
                targets[node_of[text]] = int(y)
                text = (*text, int(y))
            taken = walk(tree, targets)
            assert taken.tokens == text
            ledger.add(taken.tokens, dice.weight)
        assert ledger.is_the_targets(p), texts


@pytest.mark.parametrize("nodes", range(1, NODES + 1))
def test_greedy_is_exact_for_every_tree(nodes: int) -> None:
    """The point mass on the argmax, lowest id on ties: the run is the beginning of the one greedy text."""
    for name in ("p", "plain", "sparse", "other"):
        p = law(name)
        best = cache(lambda text, p=p: p(text).index(max(p(text))))
        for tree, texts in tries(nodes):
            run = walk(tree, [best(text) for text in texts]).tokens
            assert all(run[n] == best(run[:n]) for n in range(len(run)))
            assert run not in texts and run[:-1] in texts, "as long as the tree allows"


# Distributions: 40 cases of 200,000 draws

DRAWS = 200_000
REJECTION_CASES, NOISE_CASES = 32, 8
ALPHA = 0.01 / (REJECTION_CASES + NOISE_CASES)  # Bonferroni
VOCAB = 6


def test_the_p_value_is_that_of_the_tables() -> None:
    expected = np.full(11, 1000.0)
    moved = expected + np.sqrt(23.21 * 1000 / 2) * np.array([1, -1] + [0] * 9)  # 1 % at 10 degrees of freedom
    assert p_value(moved, expected) == pytest.approx(0.01, rel=0.03)
    assert p_value(expected, expected) > 0.99


@dataclass(frozen=True)
class Case:
    """A target, a draft and a shape, all drawn from ``number``."""

    number: int

    @property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng([7, self.number])

    def logits(self, *text: int) -> torch.Tensor:
        rng = np.random.default_rng([self.number, len(text), *text])
        return torch.from_numpy(rng.normal(scale=1.5, size=VOCAB)).float()

    def draft_logits(self, *text: int) -> torch.Tensor:
        rng = np.random.default_rng([1, self.number, len(text), *text])
        return 0.7 * self.logits(*text) + torch.from_numpy(rng.normal(scale=0.8, size=VOCAB)).float()

    @property
    def target(self) -> SamplingParams:
        top_k, top_p = [(0, 1.0), (4, 1.0), (0, 0.9), (5, 0.95)][self.number % 4]
        return SamplingParams([1.0, 0.7, 1.4][self.number % 3], top_k, top_p, seed=self.number)

    @property
    def draft(self) -> SamplingParams:
        """Truncated as a draft does it, without knowing of the target's truncation."""
        top_k, top_p = [(0, 1.0), (3, 1.0), (0, 0.8), (2, 1.0), (1, 1.0)][self.number % 5]
        return SamplingParams(self.target.temperature, top_k, top_p)

    @property
    def children(self) -> tuple[int, int]:
        """Children of the anchor and of each of them."""
        return 1 + self.number % 4, 1 + self.number // 4 % 3

    def p(self, *text: int) -> np.ndarray:
        return process_logits(self.logits(*text)[None], self.target)[0].double().softmax(0).numpy()

    def joint(self) -> np.ndarray:
        return np.stack([self.p()[t] * self.p(t) for t in range(VOCAB)])


def children(case: Case, count: int, runs: int, rng: np.random.Generator, *text: int) -> tuple[np.ndarray, Proposal]:
    """What a draft samples below ``text`` in each of the runs [runs, count]."""
    tokens, proposals = sample_children(case.draft_logits(*text)[None], case.draft, runs * count, rng)
    assert proposals[0] is not None
    return tokens.reshape(runs, count), proposals[0]


def two_tokens(case: Case, told: Callable[[Proposal], Proposal] = lambda q: q) -> np.ndarray:
    """Counts [VOCAB, VOCAB] of the first two tokens by the rejection rule; seeds differ, or positions do."""
    rng, seeds, places = case._rng, range(DRAWS), [17] * DRAWS
    if case.number % 2:
        seeds, places = [case.number] * DRAWS, range(2**33, 2**33 + 2 * DRAWS, 2)  # type: ignore[assignment]
    wide, deep = case.children
    first_u = uniform_rows(seeds, places, wide + 1, ACCEPTANCE_STREAM).numpy()
    second_u = uniform_rows(seeds, [place + 1 for place in places], deep + 1, ACCEPTANCE_STREAM).numpy()
    tokens, q = children(case, wide, DRAWS, rng)
    first = multi_step(case.p(), tokens, [told(q)] * wide, UniformDice(first_u))
    guessed = (tokens == first[:, None]).any(axis=1)
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for token in range(VOCAB):
        for on_tree in (True, False):  # below a node, or in a step of its own without a tree
            runs = np.flatnonzero((first == token) & (guessed == on_tree))
            if len(runs):
                below, q = children(case, deep if on_tree else 0, len(runs), rng, token)
                second = multi_step(case.p(token), below, [told(q)] * below.shape[1], UniformDice(second_u[runs]))
                counts[token] += np.bincount(second, minlength=VOCAB)
    return counts


@pytest.mark.parametrize("number", range(REJECTION_CASES))
def test_bug_5_and_7_rejection_has_the_targets_distribution(number: int) -> None:
    case = Case(number)
    assert p_value(two_tokens(case), DRAWS * case.joint()) > ALPHA


@pytest.mark.parametrize("number", range(REJECTION_CASES, REJECTION_CASES + NOISE_CASES))
def test_bug_5_shared_noise_has_the_targets_distribution(number: int) -> None:
    case = Case(number)
    first = _gumbel_choice(case, range(DRAWS), [17] * DRAWS)
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for token in range(VOCAB):
        seeds = np.flatnonzero(first == token).tolist()
        if seeds:
            second = _gumbel_choice(case, seeds, [18] * len(seeds), token)
            counts[token] = np.bincount(second, minlength=VOCAB)
    assert p_value(counts, DRAWS * case.joint()) > ALPHA


def _gumbel_choice(case: Case, seeds: Sequence[int], places: Sequence[int], *text: int) -> np.ndarray:
    noise = gumbel_rows(seeds, places, VOCAB, "cpu")
    return (process_logits(case.logits(*text)[None], case.target) + noise).argmax(dim=-1).numpy()


def test_bug_7_a_q_before_its_processors_is_seen_in_the_distribution() -> None:
    """The kind itself: sampled at temperature 0.5 among the top 4, reported as if at temperature 1 among all."""
    case = Case(0)
    raw = case.draft_logits().double().softmax(0).numpy()

    def told(q: Proposal) -> Proposal:
        return Proposal(np.arange(VOCAB), np.maximum(raw**2, 1e-9).astype(np.float32))

    assert p_value(two_tokens(case, told), DRAWS * case.joint()) < 1e-9


# The pieces


def test_a_drafts_children_are_independent_samples_of_what_it_says() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.5, -math.inf, 0.0], [math.nan] * 6, [0.0, -math.inf, 9.0, 0.0, 0.0, 0.0]])
    params = SamplingParams(0.5, top_k=3)
    tokens, (q, none, other) = sample_children(logits, params, 40_000, np.random.default_rng(3), vocab_size=5)
    assert q is not None and none is None and (tokens[1] == -1).all()
    assert (
        q.token.tolist() == [1, 2, 3] and q.weight.dtype == np.float32 and q.prob.sum() == pytest.approx(1, abs=1e-15)
    )
    want = process_logits(logits[:1, :5], params).softmax(-1)[0, q.token].numpy()
    np.testing.assert_allclose(q.prob, want, rtol=1e-6)
    assert other is not None and other.token.tolist() == [0, 2, 3] and set(tokens[2]) == {2}
    pairs = np.zeros((5, 5))
    np.add.at(pairs, (tokens[0, ::2], tokens[0, 1::2]), 1)
    expected = np.zeros((5, 5))
    expected[np.ix_(q.token, q.token)] = 20_000 * np.outer(q.prob, q.prob)
    assert p_value(pairs, expected) > 0.001


def test_what_a_draft_sends_and_what_is_read_are_the_same_numbers() -> None:
    _, (q,) = sample_children(torch.randn(1, 50), SamplingParams(0.9, top_p=0.9), 2, np.random.default_rng(0))
    assert q is not None
    read = Proposal(q.token.copy(), np.array(q.weight.tolist(), np.float32))
    assert (read.prob == q.prob).all() and (q.of(q.token[::-1]) == q.prob[::-1]).all()


def test_the_draw_never_takes_a_token_without_weight() -> None:
    weight = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    uniform = np.array([[0.0], [0.2999], [0.3], [1 - 2**-53]])
    assert UniformDice(uniform).draw(weight).tolist() == [1, 1, 3, 3]
    assert UniformDice(uniform).draw(weight / 3).tolist() == [1, 1, 3, 3]


def test_a_child_is_accepted_below_its_ratio_and_not_at_it() -> None:
    p, q = np.array([0.25, 0.75]), Proposal(np.array([0, 1]), np.array([0.5, 0.5], np.float32))
    uniform = np.array([[0.9, 0.4999], [0.9, 0.5], [0.9, 0.9999], [0.0, 0.9]])
    child = np.array([[0], [0], [1], [0]])
    assert multi_step(p, child, [q], UniformDice(uniform)).tolist() == [0, 1, 1, 1]


def test_runs_that_have_their_token_keep_it_while_others_go_on() -> None:
    """Also token 0, and also if the next child would be accepted."""
    p, q = np.array([0.25, 0.75]), Proposal(np.array([0, 1]), np.array([0.5, 0.5], np.float32))
    uniform = np.array([[0.9, 0.1, 0.0], [0.9, 0.9, 0.0]])
    assert multi_step(p, np.array([[0, 1], [0, 1]]), [q, q], UniformDice(uniform)).tolist() == [0, 1]


def test_every_sibling_and_every_depth_has_a_number_of_its_own() -> None:
    logits, params = torch.zeros(6, 2), [SamplingParams(1.0, seed=s) for s in range(30)]
    unlikely = Proposal(np.array([0, 1]), np.array([0.999, 0.001], np.float32))
    fan = TokenTree.of([-1, *[0] * 5], [0] * 6)
    assert {reject(fan, [None, *[unlikely] * 5], logits, each, 5)[0] for each in params} == {0, 1}
    certain = Proposal(np.array([0]), np.array([1.0], np.float32))
    chain = TokenTree.of([-1, *range(5)], [0] * 6)
    logits[:, 1] = -math.inf
    assert reject(chain, [None, *[certain] * 5], logits, params[0], 5) == [0] * 6


def test_a_rejected_token_is_never_taken_after_all() -> None:
    """Whatever the numbers: neither by an equal sibling nor by the draw."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        p, weights = rng.dirichlet(np.ones(4) * 0.5), rng.dirichlet(np.ones(4) * 0.5).astype(np.float32)
        q = Proposal(np.flatnonzero(weights), weights[weights > 0])
        uniform = rng.random((50, 4))
        child = q.token[rng.integers(len(q.token), size=(50, 1))].repeat(3, axis=1)
        chosen = multi_step(p, child, [q] * 3, UniformDice(uniform))
        once = multi_step(p, child[:, :1], [q], UniformDice(uniform))
        rejected = once != child[:, 0]
        assert (chosen[rejected] != child[rejected, 0]).all()


def test_a_draft_that_is_the_target_is_always_right() -> None:
    p = np.array([0.2, 0.3, 0.5])
    q = Proposal(np.arange(3), p)
    child = np.array([[0], [1], [2]])
    assert multi_step(p, child, [q], UniformDice(np.full((3, 2), 1 - 2**-53))).tolist() == [0, 1, 2]


def test_nothing_left_but_rounding_is_drawn_from_p() -> None:
    """p equals q, and a coin that is not allowed to says no."""

    class Refusing(UniformDice):
        def accepts(self, sibling: int, probability: np.ndarray) -> np.ndarray:
            return np.zeros(len(probability), np.bool_)

    p = np.array([0.0, 0.5, 0.5])
    q = Proposal(np.array([1, 2]), np.array([0.5, 0.5]))
    for number, token in ((0.4, 1), (0.6, 2)):
        assert multi_step(p, np.array([[1]]), [q], Refusing(np.array([[number]]))).tolist() == [token]


def test_nothing_is_decided_once_every_run_has_its_token() -> None:
    """The first child of one run and the second of the other are taken, token 0 among them: no third, and no draw."""

    @dataclass
    class Scripted:
        asked: list[int] = field(default_factory=list)

        def accepts(self, sibling: int, probability: np.ndarray) -> np.ndarray:
            self.asked.append(sibling)
            return np.array([sibling == 0, sibling == 1])

        def draw(self, weight: np.ndarray) -> np.ndarray:
            raise AssertionError("both runs have their token")

    p, q, dice = np.array([0.25, 0.75]), Proposal(np.array([0, 1]), np.array([0.5, 0.5])), Scripted()
    assert multi_step(p, np.array([[0, 1, 1], [0, 0, 1]]), [q] * 3, dice).tolist() == [0, 0]
    assert dice.asked == [0, 1]


ROWS = [[0.0, 1.0, 2.0, 0.5], [2.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]]
LOGITS = torch.tensor(ROWS)


def sampled_tree() -> tuple[TokenTree, list[Proposal | None]]:
    q = Proposal(np.arange(4), np.full(4, 0.25, np.float32))
    return TokenTree.of([-1, 0, 0, 1], [0, 2, 1, 0]), [None, q, q, q]


def test_rejection_is_a_function_of_seed_position_and_tree_alone() -> None:
    """Bug kind 9: the same again alone, other for other seeds and positions, and not that of the shared noise."""
    tree, drawn = sampled_tree()
    runs = {}
    for seed, position in itertools.product((1, 2**63 + 5), (3, 4, 2**32 + 3)):
        params = SamplingParams(1.0, seed=seed)
        found = [tuple(reject(tree, drawn, LOGITS, params, position)) for _ in range(2)]
        assert found[0] == found[1]
        runs[seed, position] = uniform_rows([seed], [position], 3, ACCEPTANCE_STREAM).tolist()
    assert len({str(run) for run in runs.values()}) == 6
    assert uniform_rows([1], [3], 3, 2).tolist() != runs[1, 3]


def test_rejection_follows_the_uniform_numbers_of_its_positions() -> None:
    """The walk by hand: sibling j at depth d goes by number 1 + j of position + d, the draw by number 0."""
    tree, (_, q, *_) = TokenTree.of([-1, 0, 0, 1, 1], [0, 0, 1, 1, 2]), sampled_tree()[1]
    drawn, logits = [None, q, q, q, q], torch.tensor([*ROWS, ROWS[0]]) / 2
    hits = set()
    for seed in range(60):
        params = SamplingParams(1.0, seed=seed)
        u = uniform_rows([seed] * 3, [9, 10, 11], 3, ACCEPTANCE_STREAM).numpy()
        want, node, depth = [-1] * 5, 0, 0
        while node is not None:
            left = logits[node].double().softmax(0).numpy()
            below = [n for n in range(1, 5) if tree.parent[n] == node]
            for rank, child in enumerate(below):
                if u[depth, 1 + rank] < left[tree.token[child]] / 0.25:
                    break
                left = np.maximum(left - 0.25, 0) / np.maximum(left - 0.25, 0).sum()
            else:
                want[node] = int(np.searchsorted(np.cumsum(left), u[depth, 0]))
                break
            want[node], node, depth = int(tree.token[child]), child, depth + 1
        assert reject(tree, drawn, logits, params, 9) == want
        hits.add(tuple(want))
    assert len(hits) >= 5


def test_rejection_without_a_tree_is_plain_sampling() -> None:
    root = TokenTree.root(0)
    counts = np.bincount([reject(root, [None], LOGITS[:1], SamplingParams(1.0, seed=s), 5)[0] for s in range(4000)])
    assert p_value(counts, 4000 * LOGITS[0].double().softmax(0).numpy()) > 0.001


def test_rejection_takes_the_processed_distribution() -> None:
    tree, drawn = sampled_tree()
    params = [SamplingParams(1.0, top_k=1, seed=s) for s in range(40)]
    assert {tuple(reject(tree, drawn, LOGITS, p, 5)) for p in params} == {(2, 0, -1, 3)}


def test_a_row_that_is_not_finite_ends_the_walk_by_rejection() -> None:
    """Bug kind 35."""
    tree, drawn = sampled_tree()
    logits = LOGITS.clone()
    logits[1, 3] = math.nan
    params = SamplingParams(1.0, top_k=1, seed=1)
    assert walk(tree, reject(tree, drawn, logits, params, 5)) == Walk((1,), (2, -1))
    logits[0] = -math.inf
    assert reject(tree, drawn, logits, params, 5) == [-1] * 4


def test_a_child_sampled_from_nothing_is_our_own_bug() -> None:
    tree, drawn = sampled_tree()
    with pytest.raises(AssertionError, match="a child of node 0 was sampled from nothing"):
        reject(tree, [*drawn[:2], None, drawn[3]], LOGITS, SamplingParams(1.0), 5)


def test_scores_by_rank_fall() -> None:
    scores = [sibling_score(rank) for rank in range(9)]
    assert scores == sorted(scores, reverse=True) and scores[0] == math.log(0.5) and scores[8] == math.log(0.0175)
    assert sum(map(math.exp, scores)) < 1


def test_only_typical_is_lossy() -> None:
    assert [rule for rule in Rule if rule.lossy] == [Rule.TYPICAL]


# Typical acceptance

TYPICAL = SamplingParams(1.0)


def log_rows(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_typical_takes_what_is_plausible_and_the_deepest_path() -> None:
    """p = .5 .3 .15 .05 has entropy 1.142: the bound is min(.3, .5 exp(-1.142)) = .16."""
    p = (0.5, 0.3, 0.15, 0.05)
    tree = TokenTree.of([-1, 0, 0, 2, 0], [0, 0, 1, 1, 2])
    own = [3, 3, 3, 3, 3]
    targets = typical_targets(tree, own, log_rows(*[p] * 5), TYPICAL, 0.3, 0.5)
    assert walk(tree, targets) == Walk((2, 3), (1, 1, 3))
    assert typical_targets(tree, own, log_rows(*[p] * 5), TYPICAL, 0.3, 0.97) == [0, 3, 3, 3, 3]  # bound .3 itself
    assert typical_targets(tree, own, log_rows(*[p] * 5), TYPICAL, 0.6, 3.0) == own
    wide = typical_targets(tree, own, log_rows(*[p] * 5), TYPICAL, 0.3, 0.01)
    assert walk(tree, wide) == Walk((2, 3), (1, 1, 3))


def test_typical_takes_the_likeliest_of_equally_deep_paths() -> None:
    p = (0.2, 0.35, 0.45)
    tree = TokenTree.of([-1, 0, 0, 0], [0, 0, 1, 2])
    assert typical_targets(tree, [0] * 4, log_rows(*[p] * 4), TYPICAL, 0.1, 1.0)[0] == 2
    even = (0.5, 0.5, 0.0)
    assert typical_targets(tree, [2] * 4, log_rows(*[even] * 4), TYPICAL, 0.1, 1.0)[0] == 0  # the first of equal ones


def test_typical_refuses_a_child_that_is_as_likely_as_the_bound() -> None:
    even = log_rows((0.5, 0.5), (0.5, 0.5))
    tree = TokenTree.of([-1, 0], [0, 0])
    assert typical_targets(tree, [1, 1], even, TYPICAL, 0.5, 9.0) == [1, 1]
    assert typical_targets(tree, [1, 1], even, TYPICAL, 0.4999, 9.0) == [0, 1]


def test_typical_never_refuses_the_targets_own_token() -> None:
    p = (0.9, 0.06, 0.04)
    tree = TokenTree.of([-1, 0, 1], [0, 2, 2])
    targets = typical_targets(tree, [2, 2, 1], log_rows(*[p] * 3), TYPICAL, 0.3, 0.09)
    assert walk(tree, targets) == Walk((1, 2), (2, 2, 1))


def test_typical_looks_at_the_processed_distribution() -> None:
    p = (0.5, 0.3, 0.2)
    tree = TokenTree.of([-1, 0], [0, 1])
    for params, first in ((TYPICAL, 1), (SamplingParams(1.0, top_k=1), 0), (SamplingParams(0.1), 0)):
        assert typical_targets(tree, [0, 0], log_rows(p, p), params, 0.25, 9.0)[0] == first


def test_typical_without_a_tree_and_without_a_number_is_the_targets_own() -> None:
    assert typical_targets(TokenTree.root(0), [2], LOGITS[:1], TYPICAL, 0.3, 0.09) == [2]
    tree = TokenTree.of([-1, 0], [0, 2])
    assert typical_targets(tree, [-1, 3], torch.full((2, 4), math.nan), TYPICAL, 0.3, 0.09) == [-1, 3]
