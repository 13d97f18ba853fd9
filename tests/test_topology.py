"""Topologies against direct definitions: what is drawn with a scripted model; optimal shapes against brute force."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from draftwood import tree as tt
from draftwood.config import DraftSettings
from draftwood.topology import (
    EAGLE1,
    BestFirst,
    ExpandRerank,
    Fixed,
    Sequoia,
    Topology,
    View,
    best_size,
    chain,
    expected,
    from_choices,
    kary,
    likeliest,
)
from draftwood.tree import TokenTree

Path = tuple[int, ...]
MOST_LEVELS = 40


class Drawing:
    """Draws as a drafter does, with a scripted model: the child of rank r is token r, its probability is random."""

    def __init__(self, topology: Topology, seed: int) -> None:
        self.topology, self.seed = topology, seed
        self.prefix: Path = ()  # of the anchor, from the first
        self.tree = TokenTree.root(0)
        self.expanded: set[Path] = set()
        self.step_ms: tuple[tuple[int, float], ...] = ()
        self.level_ms, self.turn_ms = 0.0, 0.0

    def log_chances(self, path: Path) -> list[float]:
        rnd = random.Random(f"{self.seed} {path}")
        weights = sorted((rnd.random() ** 3 + 1e-3 for _ in range(self.topology.width)), reverse=True)
        return [math.log(w / sum(weights) * 0.95) for w in weights]

    def paths(self) -> list[Path]:
        """Of each node of the tree, from the first anchor on."""
        return [
            (*self.prefix, *(int(self.tree.token[n]) for n in tt.path(self.tree, k))) for k in range(self.tree.size)
        ]

    def expand(self, nodes: Sequence[int]) -> None:
        paths = self.paths()
        for node in nodes:
            assert paths[node] not in self.expanded
            self.expanded.add(paths[node])
            ranks = np.arange(self.topology.width)
            scores = np.array(self.log_chances(paths[node]), np.float32)
            self.tree = tt.extend(self.tree, np.full(len(ranks), node), ranks, scores)

    def view(self, budget: int, room: int, level: int) -> View:
        unexpanded = np.array([path not in self.expanded for path in self.paths()])
        unexpanded[0] = False
        reach, depth = tt.log_survival(self.tree), tt.depths(self.tree)
        return View(self.tree, reach, depth, unexpanded, budget, room, level, self.step_ms, self.level_ms, self.turn_ms)

    def round(self, budget: int, room: int = 99) -> set[Path]:
        """Paths sent, from the anchor on."""
        if self.prefix not in self.expanded:
            self.expand([0])
        for level in range(MOST_LEVELS):
            view = self.view(budget, room, level)
            nodes = self.topology.frontier(view)
            if not len(nodes):
                break
            assert view.unexpanded[nodes].all() and (view.depth[nodes] < room).all()
            self.expand(nodes.tolist())
        else:
            raise AssertionError("a round does not end")
        chosen = self.topology.chosen(self.view(budget, room, level))
        assert chosen[0] == 0 and (np.diff(chosen) > 0).all() and len(chosen) <= budget + 1
        assert np.isin(self.tree.parent[chosen[1:]], chosen).all(), "closed under parents"
        return {path[len(self.prefix) :] for path in np.array(self.paths(), object)[chosen[1:]]}

    def commit(self, path: Path) -> None:
        """Moves the anchor down a path; off the tree it starts over."""
        walked = tt.walk(self.tree, path)
        self.prefix += path
        on_tree = len(walked) == len(path)
        self.tree = tt.reroot(self.tree, walked[-1])[0] if on_tree else TokenTree.root(path[-1])
        if not on_tree:
            self.expanded = set()


def paths_of(shape: TokenTree) -> list[Path]:
    """Ranks on the path to each node, the anchor left out."""
    return [tuple(int(shape.token[n]) for n in tt.path(shape, k)) for k in range(1, shape.size)]


# By likelihood


@pytest.mark.parametrize("level_ms", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_level_is_drawn_if_tokens_come_no_slower_by_it(seed: int, level_ms: float) -> None:
    """Each level is weighed by hand: its nodes' reach in its time, against the tokens of the round in the round's."""
    drawing = Drawing(BestFirst(width=4, beam=6, depth=8), seed)
    drawing.level_ms, drawing.turn_ms = level_ms, 10.0
    budget, levels = 16, 0
    drawing.expand([0])
    while len(nodes := drawing.topology.frontier(drawing.view(budget, 99, levels))):
        _assert_worth(drawing, nodes, budget, levels, worth=True)
        drawing.expand(nodes.tolist())
        levels += 1
    level_ms, drawing.level_ms = drawing.level_ms, 0.0
    left_out = drawing.topology.frontier(drawing.view(budget, 99, levels))
    drawing.level_ms = level_ms
    if len(left_out):
        _assert_worth(drawing, left_out, budget, levels, worth=False)


def _assert_worth(drawing: Drawing, nodes: np.ndarray, budget: int, levels: int, *, worth: bool) -> None:
    reach = sorted(map(math.exp, tt.log_survival(drawing.tree)), reverse=True)
    tokens = sum(reach[: budget + 1])
    adds = sum(math.exp(tt.log_survival(drawing.tree)[n]) for n in nodes)
    assert (adds / drawing.level_ms >= tokens / (drawing.turn_ms + levels * drawing.level_ms)) == worth


def test_the_dearer_a_level_the_fewer_are_drawn() -> None:
    def levels(level_ms: float) -> int:
        drawing = Drawing(BestFirst(width=4, beam=6, depth=8), seed=1)
        drawing.level_ms, drawing.turn_ms = level_ms, 10.0
        return len({len(path) for path in drawing.round(budget=32)})

    drawn = [levels(level_ms) for level_ms in (0.01, 1.0, 3.0, 30.0)]
    assert drawn == sorted(drawn, reverse=True) and drawn[0] > drawn[-1] >= 1


# Shapes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_kary_has_every_path_of_ranks_below_the_branching(branching: list[int]) -> None:
    want = {p for d in range(1, len(branching) + 1) for p in product(*map(range, branching[:d]))}
    shape = kary(branching, 400)
    assert set(paths_of(shape)) == want and shape.size == len(want) + 1
    sums = [sum(p) for p in paths_of(shape)]
    assert sums == sorted(sums), "a smaller budget keeps first choices"


def test_named_shapes() -> None:
    assert paths_of(chain(3)) == [(0,), (0, 0), (0, 0, 0)]
    assert set(paths_of(from_choices(EAGLE1))) == set(EAGLE1) and len(EAGLE1) == 25


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [0]], r"\[0\] occurs twice"),
        ([[0, 1]], r"\[0, 1\] needs its parent \[0\]"),
        ([[0], [-1]], r"\[-1\]"),
        ([[]], "path of ranks"),
    ],
)
def test_choices_that_are_no_tree_are_refused(choices: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_choices(choices)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 5), st.data())
def test_a_shape_is_drawn_as_it_is_through_commits(seed: int, budget: int, room: int, data: st.DataObject) -> None:
    """After a commit, within the tree or not, the shape hangs from the new anchor as far as budget and room go."""
    shape = data.draw(st.sampled_from([kary([3, 2, 2], 60), from_choices(EAGLE1), chain(6)]))
    want = {path for path in paths_of(shape)[:budget] if len(path) <= room}
    drawing = Drawing(Fixed(shape), seed)
    for _ in range(3):
        assert drawing.round(budget, room) == want
        rank = data.draw(st.integers(0, drawing.topology.width))  # the last one is no child
        drawing.commit(data.draw(st.sampled_from([(rank,), (0, rank), (0, 0, 0)])))


def test_a_shape_expands_inner_nodes_only() -> None:
    drawing = Drawing(Fixed(kary([2, 2], 6)), seed=1)
    drawing.round(6)
    assert drawing.expanded == {(), (0,), (1,)}
    drawing = Drawing(Fixed(chain(5)), seed=1)
    drawing.round(3)
    assert drawing.expanded == {(), (0,), (0, 0)}


# Dynamic trees


def best_paths(drawing: Drawing, count: int, depth: int) -> set[Path]:
    """The likeliest paths of the whole tree of this depth, by a heap."""
    heap, out = [(0.0, ())], set[Path]()
    while heap and len(out) <= count:
        cost, path = heapq.heappop(heap)
        out.add(path)
        if len(path) < depth:
            for rank, score in enumerate(drawing.log_chances(path)):
                heapq.heappush(heap, (cost - score, (*path, rank)))
    return out - {()}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 24), st.integers(1, 4))
def test_best_first_finds_the_likeliest_nodes(seed: int, budget: int, depth: int) -> None:
    drawing = Drawing(BestFirst(width=4, beam=99, depth=99), seed)
    drawing.topology = BestFirst(width=4, beam=99, depth=99)
    assert drawing.round(budget, room=depth) == best_paths(drawing, budget, depth)


def test_best_first_stops_at_what_is_unlikely_and_at_what_its_budget_is_worth() -> None:
    drawing = Drawing(BestFirst(width=4, beam=99, depth=99, min_survival=0.999), seed=1)
    drawing.round(24)
    assert drawing.expanded == {()}
    drawing = Drawing(BestFirst(width=4, beam=2, depth=99, nodes_per_level=4), seed=1)
    drawing.round(8)
    assert 1 < len(drawing.expanded) <= 1 + 2 * 2, "two levels of two"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 4), st.integers(1, 5))
def test_expand_and_rerank_is_that_of_eagle_2(seed: int, budget: int, beam: int, depth: int) -> None:
    drawing = Drawing(ExpandRerank(width=3, beam=beam, depth=depth), seed)
    level: list[tuple[float, Path]] = [(0.0, ())]
    everything: list[tuple[float, Path]] = []
    for _ in range(depth + 1):
        level = [(cost - s, (*p, r)) for cost, p in level for r, s in enumerate(drawing.log_chances(p))]
        everything += level
        level = sorted(level)[:beam]
    want = {path for _, path in sorted(everything)[:budget]}
    assert drawing.round(budget) == want


@pytest.mark.parametrize(
    "topology", [BestFirst(3, 3, 6), ExpandRerank(3, 3, 3), Sequoia(3, 4, 12), Fixed(kary([3, 2], 9))]
)
def test_rounds_go_on_through_commits(topology: Topology) -> None:
    """``round`` holds what is sent to budget, room and closure."""
    rnd = random.Random(3)
    drawing = Drawing(topology, seed=4)
    for _ in range(20):
        sent = sorted(drawing.round(rnd.randint(1, 12), rnd.randint(1, 5)))
        assert sent
        drawing.commit((*rnd.choice(sent), rnd.randint(0, 3)))


# Sequoia


def by_programme(chance: np.ndarray, nodes: int, levels: int) -> float:
    """Sequoia's recursion: the most tokens that a tree of so many nodes, anchor included, is expected to write."""

    @cache
    def tree(n: int, levels: int) -> float:
        return 1.0 + children(n - 1, 0, levels)

    @cache
    def children(n: int, rank: int, levels: int) -> float:
        if n == 0 or rank == len(chance) or levels == 0:
            return 0.0
        takes = (chance[rank] * tree(k, levels - 1) + children(n - k, rank + 1, levels) for k in range(1, n + 1))
        return max(children(n, rank + 1, levels), *takes)

    return tree(nodes, levels)


def all_trees(width: int, nodes: int, levels: int) -> set[frozenset[Path]]:
    """Every tree of so many nodes, as sets of paths of ranks."""
    found: set[frozenset[Path]] = {frozenset()}
    for _ in range(nodes):
        found = {
            tree | {(*path, rank)}
            for tree in found
            for path in (*tree, ())
            for rank in range(width)
            if len(path) < levels and (*path, rank) not in tree
        }
    return found


chances = st.lists(st.floats(0.01, 1), min_size=1, max_size=5).map(lambda c: np.array(c) / max(1.0, sum(c)))


@settings(max_examples=25, deadline=None)
@given(chances.map(lambda c: c[:3]), st.integers(1, 5), st.integers(1, 3))
def test_the_likeliest_shape_is_the_best_of_all_trees(chance: np.ndarray, nodes: int, levels: int) -> None:
    shape = likeliest(np.tile(np.log(chance), (levels, 1)), nodes)
    best = max(
        sum(math.prod(chance[r] for r in p) for p in tree) for tree in all_trees(len(chance), nodes, levels) or [()]
    )
    room = sum(len(chance) ** d for d in range(1, levels + 1))
    assert shape.size - 1 == min(nodes, room)
    if nodes <= room:
        assert expected(shape)[-1] == pytest.approx(1 + best, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(chances, st.integers(1, 20), st.integers(1, 5))
def test_the_likeliest_shape_is_that_of_the_dynamic_programme_at_every_size(
    chance: np.ndarray, nodes: int, levels: int
) -> None:
    written = expected(likeliest(np.tile(np.log(chance), (levels, 1)), nodes))
    assert written == pytest.approx([by_programme(chance, n + 1, levels) for n in range(len(written))], rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(chances, st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_the_likeliest_shape_is_at_least_as_good_as_kary(chance: np.ndarray, branching: list[int]) -> None:
    branching = [min(k, len(chance)) for k in branching]
    paths = paths_of(kary(branching, 200))
    written = 1 + sum(math.prod(chance[r] for r in p) for p in paths)
    best = likeliest(np.tile(np.log(chance), (len(branching), 1)), len(paths))
    assert expected(best)[-1] >= written - 1e-5


def test_the_likeliest_shape_over_a_block_follows_each_positions_chances() -> None:
    shape = likeliest(np.log([[0.9, 0.05], [0.5, 0.4]]), 3)
    assert paths_of(shape) == [(0,), (0, 0), (0, 1)]


def test_best_size_is_where_tokens_per_time_are_most() -> None:
    shape = likeliest(np.tile(np.log([0.6, 0.2, 0.1]), (6, 1)), 40)
    curve = [(1, 10.0), (8, 11.0), (16, 18.0)]

    def duration(rows: int) -> float:
        return 10 + (rows - 1) / 7 if rows <= 8 else 11 + (rows - 8) * 7 / 8

    rates = [written / duration(n + 1) for n, written in enumerate(expected(shape))]
    assert best_size(shape, curve) == int(np.argmax(rates)) == 7
    assert best_size(shape, [(1, 10.0), (2, 10.0)]) == 40, "nodes that cost nothing are all taken"
    assert best_size(shape, [(1, 1.0), (2, 9.0)]) == 0


def test_sequoia_measures_acceptance_and_solves_anew_when_it_moves() -> None:
    topology = Sequoia(4, 6, 16)
    before = topology.shape
    topology.observe([])
    assert topology.shape is before, "nothing has moved"
    true = np.array([0.15, 0.3, 0.25, 0.05])
    rnd = np.random.default_rng(1)
    for _ in range(1500):
        topology.observe(rnd.choice([0, 1, 2, 3, -1], size=3, p=[*true, 1 - true.sum()]).tolist())
    assert topology.chance == pytest.approx(true, abs=0.04)
    assert topology.chance == pytest.approx(topology.solved, abs=0.021)
    want = likeliest(np.tile(np.log(topology.solved), (6, 1)), 16)
    assert set(paths_of(topology.shape)) == set(paths_of(want)) != set(paths_of(before))
    for _ in range(3000):
        topology.observe([0])
    assert topology.chance[0] > 0.75, "the past fades"
    topology.observe([7, 4])  # ranks that no shape of this width has: none of ours was taken
    assert topology.width == 4


def test_sequoia_of_a_step_time_curve_is_no_larger_than_pays() -> None:
    curve = [(1, 10.0), (6, 10.5), (7, 20.0)]
    topology = Sequoia(4, 6, 32, curve)
    assert best_size(topology.shape, curve) == 5
    assert len(Drawing(topology, seed=2).round(20)) == 5
    assert len(Drawing(topology, seed=2).round(3)) == 3


def test_sequoia_follows_the_step_time_that_the_verifier_tells() -> None:
    """A view says what steps take at its verifier; settings, where there are any, come first. Acceptance counts too."""
    topology, given = Sequoia(4, 6, 32), Sequoia(4, 6, 32, [(1, 10.0), (6, 10.5), (7, 20.0)])
    cheap, dear = ((1, 10.0), (40, 10.0)), ((1, 10.0), (4, 10.5), (5, 20.0))

    def size(of: Sequoia, step_ms: tuple[tuple[int, float], ...]) -> int:
        drawing = Drawing(of, seed=2)
        drawing.step_ms = step_ms
        return len(drawing.round(20))

    assert [size(topology, curve) for curve in ((), cheap, dear, cheap)] == [20, 20, 3, 20]
    assert size(given, cheap) == 5
    for _ in range(400):
        topology.observe([-1, -1, -1])
    assert size(topology, dear) == 1, "less and less is accepted: one node, so that it goes on to be measured"


# Settings


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"topology": "star"}, "star"),
        ({"topology": "kary"}, "branching"),
        ({"topology": "kary", "branching": [4, 0]}, "greater than 0"),
        ({"topology": "kary", "branching": [4, 4, 4]}, "makes 84 nodes, the limit is 64"),
        ({"topology": "kary", "branching": [1] * 9}, r"9 levels, the limit is 8 \(depth\)"),
        ({"topology": "choices"}, "choices"),
        ({"topology": "choices", "choices": [[0], [1, 0]]}, r"\[1, 0\] needs its parent \[1\]"),
        ({"topology": "choices", "choices": [[64]]}, "65 children of one node, the limit is 64"),
        ({"topology": "eagle1", "depth": 4}, r"5 levels, the limit is 4 \(depth\)"),
        ({"topology": "eagle1", "max_nodes": 24}, r"25 nodes, the limit is 24 \(max_nodes\)"),
        ({"topology": "sequoia", "step_ms": [(1, 2.0)]}, "two points or more"),
        ({"topology": "sequoia", "step_ms": [(4, 2.0), (2, 3.0)]}, r"\[4, 2\]"),
        ({"topology": "sequoia", "step_ms": [(1, 2.0), (2, -3.0)]}, "greater than 0"),
        ({"branch": 65}, "less than or equal to 64"),
        ({"topology": "chain", "branch": 3}, "branch is of topology best_first or .* or sequoia, not of chain"),
        ({"branching": [2]}, "branching is of topology kary, not of best_first"),
        ({"kind": "mtp"}, "kind mtp draws a chain of 1 to 3 nodes, got topology best_first of depth 8"),
        ({"kind": "mtp", "topology": "chain", "depth": 4}, "1 to 3 nodes, got topology chain of depth 4"),
        ({"topology": "chain", "nodes_per_level": 3}, "nodes_per_level"),
        ({"ngram_min": 6}, "ngram_min is 6, the limit is ngram_max = 5"),
        ({"suffix_min": 17}, "suffix_min is 17, the limit is suffix_max = 16"),
        ({"kind": "merged"}, "needs 2 parts or more, got 0"),
        ({"kind": "merged", "parts": [{"kind": "ngram"}]}, "needs 2 parts or more, got 1"),
        ({"kind": "merged", "parts": [{"kind": "ngram"}, {"kind": "merged"}]}, "got 'merged'"),
        ({"kind": "merged", "parts": [{"kind": "ngram"}, {"model": "demo"}]}, "got None"),
        ({"kind": "merged", "parts": [{"kind": "ngram"}, {"kind": "lm", "depth": 0}]}, "greater than 0"),
        ({"kind": "merged", "parts": [{"kind": "ngram"}, {"kind": "lm", "beams": 1}]}, "beams"),
        ({"parts": [{"kind": "ngram"}]}, "parts is of kind merged, not of lm"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DraftSettings(**chosen)


def test_parts_take_what_the_worker_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_DRAFT_PARTS", '[{"kind": "lm"}, {"kind": "lm", "model": "other", "depth": 5}]')
    monkeypatch.setenv("DRAFTWOOD_DRAFT_KIND", "merged")
    one, two = DraftSettings(depth=3, topology="chain").part_settings()
    assert (one.kind, one.model, one.depth, one.topology) == ("lm", "demo", 3, "chain")
    assert (two.kind, two.model, two.depth, two.topology) == ("lm", "other", 5, "chain")
