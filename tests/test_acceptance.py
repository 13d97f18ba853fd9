"""The walk against a string oracle, the end of a text token by token, and the promise: drafts never change the text."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.acceptance import Emission, Ending, FinishReason, Walk, emit, walk
from draftwood.noise import GumbelCache
from draftwood.parameters import SamplingParams
from draftwood.sampling import draft_children, target_tokens
from draftwood.tree import TokenTree

VOCAB = 5
NOISE = GumbelCache(VOCAB, "cpu", capacity=4096)


def tree_of(parent: Sequence[int], token: Sequence[int], score: Sequence[float] | None = None) -> TokenTree:
    columns = (np.asarray(parent, np.int32), np.asarray(token, np.int32))
    return TokenTree(*columns, np.asarray(score if score is not None else [0.0] * len(parent), np.float32))


def prefixes(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from below the anchor to each node."""
    found: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parent[1:].tolist(), tree.token[1:].tolist(), strict=True):
        found.append((*found[parent], token))
    return found


# The walk


def string_walk(tree: TokenTree, target: Sequence[int]) -> Walk:
    """Naive: write the target's text token by token, for as long as the text written is a path of the tree."""
    node_of = {prefix: node for node, prefix in enumerate(prefixes(tree))}
    text: tuple[int, ...] = ()
    path: list[int] = []
    while True:
        text = (*text, target[node_of[text]])
        if text not in node_of:
            return Walk(tuple(path), text)
        path.append(node_of[text])


def all_tries(nodes: int, tokens: int) -> list[TokenTree]:
    parents = itertools.product([-1], *(range(i) for i in range(1, nodes)))
    columns = itertools.product(parents, itertools.product(range(tokens), repeat=nodes - 1))
    trees = [tree_of(parent, (0, *token)) for parent, token in columns]
    return [tree for tree in trees if len(set(prefixes(tree))) == nodes]


@pytest.mark.parametrize(("nodes", "tokens"), [(1, 3), (2, 3), (3, 3), (4, 3), (5, 2)])
def test_walk_of_every_small_trie_under_every_target(nodes: int, tokens: int) -> None:
    tries = all_tries(nodes, tokens)
    assert tries
    for tree in tries:
        for target in itertools.product(range(tokens), repeat=nodes):
            assert walk(tree, target) == string_walk(tree, target)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 64))
def test_walk_of_random_tries(seed: int, nodes: int) -> None:
    rng = random.Random(seed)
    tree = random_trie(rng, nodes, lambda prefix: rng.randrange(3))
    target = [rng.randrange(3) for _ in range(tree.size)]
    result = walk(tree, np.array(target))
    assert result == string_walk(tree, target)
    assert len(result.tokens) == len(result.path) + 1
    assert result.last == (result.path[-1] if result.path else 0)


def test_of_equal_siblings_the_lowest_index_wins() -> None:
    tree = tree_of([-1, 0, 0, 2, 1], [9, 4, 4, 5, 6])
    assert walk(tree, [4, 6, 5, 0, 7]) == Walk((1, 4), (4, 6, 7))
    assert walk(tree, [4, 5, 5, 0, 7]) == Walk((1,), (4, 5))


def test_a_child_far_behind_its_parent_is_found() -> None:
    tree = tree_of([-1, 0, 0, 0, 1, 2, 3, 1], [9, 1, 2, 3, 4, 4, 4, 5])
    assert walk(tree, [1, 5, 0, 0, 0, 0, 0, 8]) == Walk((1, 7), (1, 5, 8))


def test_the_anchor_alone_is_plain_decoding() -> None:
    assert walk(tree_of([-1], [9]), [3]) == Walk((), (3,))


def test_a_node_without_a_valid_target_ends_the_walk() -> None:
    assert walk(tree_of([-1, 0, 1], [9, 1, 2]), [1, -1, 2]) == Walk((1,), (1, -1))


def test_a_target_of_the_wrong_length_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="2 target tokens for 3 nodes"):
        walk(tree_of([-1, 0, 0], [9, 1, 2]), [1, 1])


def test_bug_5_greedy_takes_the_second_child_when_it_is_the_argmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.5, 0.0, 0.0]] * 3)
    target, _ = target_tokens(logits, SamplingParams(), [0, 1, 1], NOISE)
    tree = tree_of([-1, 0, 0], [0, 1, 2], [0.0, -0.1, -2.0])
    assert walk(tree, target.numpy()) == Walk((2,), (2, 2))
    first_only = tree_of([-1, 0], [0, 1], [0.0, -0.1])
    assert walk(first_only, target[:2].numpy()) == Walk((), (2,))


def test_bug_5_sampling_does_not_prefer_the_childs_order_or_score() -> None:
    """Both children in the tree, the better scored first: each is accepted as often as the target picks it."""
    n, logits = 4000, torch.tensor([0.0, 1.0, 2.0, -math.inf, -math.inf])
    tree = tree_of([-1, 0, 0], [0, 0, 1], [0.0, -0.1, -3.0])
    counts = np.zeros(VOCAB)
    for seed in range(n):
        target, _ = target_tokens(logits.expand(3, -1), SamplingParams(1.0, seed=seed), [5, 6, 6], NOISE)
        counts[walk(tree, target.numpy()).tokens[0]] += 1
    expected = n * torch.softmax(logits, 0).numpy()[:3]
    assert chi_square(counts[:3], expected) < 13.82  # 0.1 %, 2 degrees of freedom


# The end of a text


def token_by_token(run: Sequence[int], generated: int, ending: Ending) -> Emission:
    """Naive: the plain decoder's loop, checking after each token."""
    for count, token in enumerate(run, start=1):
        if token in ending.stop_token_ids:
            return Emission(count, FinishReason.STOP, token)
        if generated + count == ending.max_tokens:
            return Emission(count, FinishReason.LENGTH)
    return Emission(len(run), None)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 6), max_size=12),
    st.frozensets(st.integers(0, 6), max_size=2),
    st.integers(0, 20),
    st.integers(1, 12),
)
def test_emit_equals_the_plain_decoders_loop(run: list[int], stops: frozenset[int], before: int, left: int) -> None:
    ending = Ending(stops, before + left)
    assert emit(run, before, ending) == token_by_token(run, before, ending)


def stream(runs: Sequence[Sequence[int]], ending: Ending) -> tuple[list[int], FinishReason | None]:
    out: list[int] = []
    for run in runs:
        emission = emit(run, len(out), ending)
        out += run[: emission.count]
        if emission.finish is not None:
            return out, emission.finish
    return out, None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=6), st.integers(1, 20))
def test_how_a_text_is_cut_into_runs_does_not_matter(runs: list[list[int]], max_tokens: int) -> None:
    ending = Ending(frozenset({3, 7}), max_tokens)
    singles = [[token] for run in runs for token in run]
    assert stream(runs, ending) == stream(singles, ending)


@pytest.mark.parametrize("j", range(5))
def test_bug_13_nothing_follows_an_end_token_in_the_middle_of_a_run(j: int) -> None:
    run = [10, 11, 12, 13, 14]
    assert emit(run, 100, Ending(frozenset({run[j]}), 1000)) == Emission(j + 1, FinishReason.STOP, run[j])


@pytest.mark.parametrize(
    ("budget", "emission"),
    [
        (3, Emission(2, FinishReason.STOP, 2)),
        (2, Emission(2, FinishReason.STOP, 2)),
        (1, Emission(1, FinishReason.LENGTH)),
    ],
)
def test_bug_14_the_earliest_of_stop_and_cap_wins(budget: int, emission: Emission) -> None:
    a, stop, b, c = 1, 2, 3, 4
    ending = Ending(frozenset({stop}), 50)
    assert emit([a, stop, b, c], 50 - budget, ending) == emission


def test_bug_15_exactly_max_tokens_are_delivered() -> None:
    out, finish = stream([[1] * 5] * 3, Ending(frozenset(), 8))
    assert (len(out), finish) == (8, FinishReason.LENGTH)
    assert emit([1] * 5, 0, Ending(frozenset(), 8)) == Emission(5, None)
    assert emit([1] * 5, 5, Ending(frozenset(), 8)) == Emission(3, FinishReason.LENGTH)


def test_nothing_is_emitted_at_or_beyond_the_cap() -> None:
    for generated in (8, 9):
        for run in ([], [1], [2, 2]):
            assert emit(run, generated, Ending(frozenset({2}), 8)) == Emission(0, FinishReason.LENGTH)


def test_an_empty_run_changes_nothing() -> None:
    assert emit([], 3, Ending(frozenset({2}), 8)) == Emission(0, None)


# Stop strings


@dataclass
class Letters:
    """A growing text of one letter a token, searched by ``in``; a stop token has no letter."""

    strings: Sequence[str]
    text: str = ""

    def feed(self, token: int, end: FinishReason | None) -> str | None:
        if end is not FinishReason.STOP:
            self.text += "abc"[token]
        return next((string for string in self.strings if string in self.text), None)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    st.integers(0, 2),
    st.integers(1, 12),
)
def test_a_text_ends_with_the_token_that_completes_a_stop_string(
    run: list[int], strings: list[str], before: int, left: int
) -> None:
    """Against the plain decoder's loop over whole texts; token 3 is a stop token."""
    want, written = Emission(len(run), None), ""
    for count, token in enumerate(run, start=1):
        written += "" if token == 3 else "abc"[token]
        found = [string for string in strings if written.endswith(string)]
        if token != 3 and found:
            want = Emission(count, FinishReason.STOP, next(string for string in strings if string in written))
        elif token == 3:
            want = Emission(count, FinishReason.STOP, 3)
        elif count == left:
            want = Emission(count, FinishReason.LENGTH)
        else:
            continue
        break
    text = Letters(strings)
    assert emit(run, before, Ending(frozenset({3}), before + left), text) == want
    assert text.text == "".join("abc"[token] for token in run[: want.count] if token != 3), "fed what is emitted"


def test_a_stop_string_that_is_completed_at_the_cap_is_why_the_text_ends() -> None:
    assert emit([0, 1, 2], 5, Ending(frozenset(), 7), Letters(["ab"])) == Emission(2, FinishReason.STOP, "ab")
    assert emit([0, 1, 2], 5, Ending(frozenset(), 7), Letters(["abc"])) == Emission(2, FinishReason.LENGTH)


# The promise


@lru_cache(maxsize=100_000)
def scripted_logits(prefix: tuple[int, ...]) -> torch.Tensor:
    """The scripted target: a table from prefix to logits, float32 [VOCAB], rounded so that ties occur."""
    logits = np.random.default_rng([len(prefix), *prefix]).normal(scale=1.5, size=VOCAB)
    return torch.from_numpy(logits.round(1)).float()


def choose(texts: Sequence[tuple[int, ...]], params: SamplingParams) -> list[int]:
    """The target's token behind each text."""
    tokens, bad = target_tokens(torch.stack([*map(scripted_logits, texts)]), params, [*map(len, texts)], NOISE)
    assert not bad.any()
    return tokens.tolist()


def decode_plain(prompt: tuple[int, ...], params: SamplingParams, ending: Ending) -> tuple[list[int], FinishReason]:
    text = prompt
    while True:
        text = (*text, *choose([text], params))
        if text[-1] in ending.stop_token_ids:
            return list(text[len(prompt) :]), FinishReason.STOP
        if len(text) - len(prompt) == ending.max_tokens:
            return list(text[len(prompt) :]), FinishReason.LENGTH


def random_trie(rng: random.Random, nodes: int, guess: Callable[[tuple[int, ...]], int]) -> TokenTree:
    """Up to ``nodes`` nodes under random parents, each with the token ``guess`` gives for its parent's path."""
    parent, token = [-1], [0]
    paths: list[tuple[int, ...]] = [()]
    for _ in range(nodes - 1):
        at = rng.randrange(len(parent))
        path = (*paths[at], guess(paths[at]))
        if path not in paths:
            parent.append(at)
            token.append(path[-1])
            paths.append(path)
    return tree_of(parent, token, [0.0] + [-rng.random() for _ in parent[1:]])


def prune(tree: TokenTree, rng: random.Random) -> TokenTree:
    """A random connected part: whoever loses its parent goes with it."""
    place = {0: 0}
    for node in range(1, tree.size):
        if int(tree.parent[node]) in place and rng.random() < 0.8:
            place[node] = len(place)
    kept = list(place)
    parent = [-1] + [place[int(tree.parent[node])] for node in kept[1:]]
    return tree_of(parent, tree.token[kept].tolist(), tree.score[kept].tolist())


def decode_with_trees(
    prompt: tuple[int, ...], params: SamplingParams, ending: Ending, skill: float, rng: random.Random
) -> tuple[list[int], FinishReason, int]:
    """Speculative decoding with random, randomly pruned trees; a guess is right with probability ``skill``."""
    text, steps = prompt, 0
    while True:

        def guess(path: tuple[int, ...], text: tuple[int, ...] = text) -> int:
            return choose([text + path], params)[0] if rng.random() < skill else rng.randrange(VOCAB)

        tree = prune(random_trie(rng, rng.randrange(1, 14), guess), rng)
        target = choose([text + path for path in prefixes(tree)], params)
        run = walk(tree, target).tokens
        emission = emit(run, len(text) - len(prompt), ending)
        text, steps = (*text, *run[: emission.count]), steps + 1
        if emission.finish is not None:
            return list(text[len(prompt) :]), emission.finish, steps


RULES = [
    SamplingParams(),
    SamplingParams(1.0, seed=2**64 - 1),
    SamplingParams(0.6, 3, 1.0, 17),
    SamplingParams(1.4, 0, 0.7, 17),
    SamplingParams(1.0, 4, 0.9, 5),
]


@pytest.mark.parametrize("params", RULES, ids=str)
@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
def test_trees_never_change_the_text(params: SamplingParams, skill: float) -> None:
    rng = random.Random(repr((params, skill)))
    finishes, saved = set(), 0
    for case in range(12):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(1 + case % 3))
        ending = Ending(frozenset({4} if case % 2 else ()), 1 + 2 * case)
        plain = decode_plain(prompt, params, ending)
        *drafted, steps = decode_with_trees(prompt, params, ending, skill, rng)
        assert tuple(drafted) == plain
        finishes.add(plain[1])
        saved += len(plain[0]) - steps
    assert finishes == {FinishReason.STOP, FinishReason.LENGTH}
    assert saved > 0, "no tree was ever of use, so nothing was tested"


@pytest.mark.parametrize("params", RULES, ids=str)
def test_a_draft_that_shares_rule_and_noise_never_changes_the_text(params: SamplingParams) -> None:
    """Trees by ``draft_children`` of a blurred target: two levels, two children each."""
    prompt: tuple[int, ...] = (1, 2)
    ending = Ending(frozenset(), 40)
    text, steps = prompt, 0
    finish = None
    while finish is None:
        tree = TokenTree.root(text[-1])
        for node in (0, 1, 2):
            path = prefixes(tree)[node]
            blurred = (scripted_logits(text + path) + 0.2 * scripted_logits(path))[None]
            tokens, scores = draft_children(blurred, params, [len(text) + len(path)], NOISE, 2)
            columns = ([*tree.parent, node, node], [*tree.token, *tokens[0]], [*tree.score, *scores[0]])
            tree = tree_of(*columns)
        run = walk(tree, choose([text + path for path in prefixes(tree)], params)).tokens
        emission = emit(run, len(text) - len(prompt), ending)
        text, steps, finish = (*text, *run[: emission.count]), steps + 1, emission.finish
    assert list(text[2:]) == decode_plain(prompt, params, ending)[0]
    assert steps < 25


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def test_pairs_of_tokens_by_walk_have_the_joint_distribution_of_the_target() -> None:
    """Two tokens of 4,000 seeds, by trees that guess both at times; 0.1 % critical value for 24 degrees of freedom."""
    n, rng = 4000, random.Random(8)
    prompt: tuple[int, ...] = (3, 1)
    counts = np.zeros((VOCAB, VOCAB))
    for seed in range(n):
        params = SamplingParams(1.0, seed=seed)
        text = prompt
        while len(text) < 4:
            tree = random_trie(rng, 6, lambda path: rng.randrange(VOCAB))
            text += walk(tree, choose([text + path for path in prefixes(tree)], params)).tokens
        counts[text[2:4]] += 1
    first = torch.softmax(scripted_logits(prompt).double(), 0).numpy()
    second = [torch.softmax(scripted_logits((*prompt, token)).double(), 0).numpy() for token in range(VOCAB)]
    expected = n * first[:, None] * np.stack(second)
    assert expected.min() > 3
    assert chi_square(counts, expected) < 51.18
