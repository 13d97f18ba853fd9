"""Topologies: in which shape a draft's tree is drawn.

Words
-----
expand     to run the draft's model on a node, which gives it the topology's ``width`` likeliest children.
frontier   the nodes to expand next; a level is the expansion of one frontier in one forward.
rank       place of a node among its siblings, 0 the first.
shape      a tree that is fixed before anything is drawn: a ``TokenTree`` whose tokens are ranks. Its nodes are in the
           order of their worth, so that its first n nodes are the shape for a budget of n.

A topology answers two questions about a tree that is being drawn: which nodes to expand now, and which to send. All
children of an expanded node stay in the tree, those not sent too: after a commit their parent may be the anchor, which
wants more of them.

chain, kary, choices, eagle1   fixed shapes: ``Fixed``.
sequoia                        the best fixed shape for the acceptance by rank as measured: ``Sequoia``.
best_first                     the likeliest nodes of the whole tree, level by level: ``BestFirst``.
expand_rerank                  the likeliest nodes of the newest level, and a choice among all at the end (EAGLE-2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftwood import tree as tt
from draftwood.tree import GONE, BoolArray, IndexArray, TokenTree

EAGLE1 = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
"""The static tree of EAGLE-1 (arXiv:2401.15077), as ranks on the path to each of its 25 nodes."""

PRIOR_TRIALS = 20.0
MOST_TRIALS = 2000.0
MOVED = 0.02
"""Change of a rank's measured acceptance from which on the best shape is solved for anew."""

MOST_CURVES = 64
"""Step times for which the best size is kept."""

NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What a topology sees of a tree while it is drawn."""

    tree: TokenTree
    reach: NDArray[np.float64]  # log survival, [tree.size]
    depth: IndexArray  # [tree.size]
    unexpanded: BoolArray  # [tree.size]; the anchor counts as expanded
    budget: int  # nodes to send
    room: int  # depth that no node may exceed
    level: int = 0  # frontiers that have been expanded in this round
    step_ms: tuple[tuple[int, float], ...] = ()  # what a step of the verifier takes, as for ``best_size``
    level_ms: float = 0.0  # what a level takes; 0: not known
    turn_ms: float = 0.0  # from a tree's sending to the commit that answers it; 0: not known


class Topology(Protocol):
    """Used by one thread, for many sessions."""

    @property
    def width(self) -> int:
        """Children of an expanded node."""

    def frontier(self, view: View) -> IndexArray:
        """Unexpanded nodes of less than ``view.room`` depth to expand now, best first; none: the round is drawn."""

    def chosen(self, view: View) -> IndexArray:
        """The anchor and the nodes to send, at most ``view.budget``; ascending, closed under parents."""

    def observe(self, ranks: Sequence[int]) -> None:
        """Learns which child of each expanded node the text went on with, by rank; -1: none of them."""


# By likelihood


@dataclass(frozen=True, slots=True)
class BestFirst:
    """Expands the likeliest nodes of the whole tree as long as their children could be among the best ``budget``.

    A level of nodes that are together reached with less than ``min_survival`` is not worth its forward, and a budget is
    worth one level for ``nodes_per_level`` nodes (0: ``depth``). At most ``beam`` nodes and half of the budget are
    expanded in a level (best-first growth, as in OPT-Tree, arXiv:2406.17276, and SpecExec, arXiv:2406.02532).

    Where times are known, a level is drawn only if tokens come no slower by it (``pays``): a fast verifier whose steps
    cost little more for many nodes would otherwise ask for more levels than it should wait for.
    """

    width: int
    beam: int
    depth: int
    nodes_per_level: int = 0
    min_survival: float = 0.0

    def most(self, budget: int) -> int:
        """Nodes of a level at most."""
        return min(self.beam, -(-budget // 2))

    def levels(self, budget: int) -> int:
        """Levels of a round at most."""
        return min(budget // self.nodes_per_level if self.nodes_per_level else self.depth, self.depth)

    def frontier(self, view: View) -> IndexArray:
        if view.level >= self.levels(view.budget):
            return NONE
        nodes = self.likeliest(view, view.budget)
        return nodes if pays(nodes, view) else NONE

    def likeliest(self, view: View, among: int) -> IndexArray:
        """The likeliest unexpanded nodes that are themselves among the best ``among``; none if they are unlikely."""
        reach = view.reach
        floor = float(np.partition(reach, -among - 1)[-among - 1]) if len(reach) > among else -np.inf
        open_nodes = np.nonzero(view.unexpanded & (reach > floor) & (view.depth < view.room))[0]
        order = open_nodes[np.argsort(-reach[open_nodes], kind="stable")]
        nodes = order[: self.most(view.budget)]
        return nodes if float(np.exp(reach[nodes]).sum()) >= self.min_survival else NONE

    def chosen(self, view: View) -> IndexArray:
        return tt.best(view.tree, view.budget, view.reach)

    def observe(self, ranks: Sequence[int]) -> None:
        return


@dataclass(frozen=True, slots=True)
class ExpandRerank:
    """EAGLE-2 (arXiv:2406.16858): on each of ``depth`` levels the ``beam`` likeliest nodes of that level alone are
    expanded; the likeliest of all nodes are sent."""

    width: int
    beam: int
    depth: int

    def frontier(self, view: View) -> IndexArray:
        for depth in range(1, min(self.depth + 1, view.room)):
            level = np.nonzero(view.depth == depth)[0]
            best = level[np.argsort(-view.reach[level], kind="stable")][: self.beam]
            if len(nodes := best[view.unexpanded[best]]):
                return nodes
        return NONE

    def chosen(self, view: View) -> IndexArray:
        return tt.best(view.tree, view.budget, view.reach)

    def observe(self, ranks: Sequence[int]) -> None:
        return


def pays(nodes: IndexArray, view: View) -> bool:
    """Whether a level that expands ``nodes`` brings at least as many tokens in its time as the round does without it.

    A level adds a token at most where the text goes through one of its nodes. The round's time is that of its levels so
    far and of the verifier's turn.
    """
    if not view.level_ms or not view.turn_ms:
        return True
    written = np.exp(np.sort(view.reach)[-view.budget - 1 :]).sum()  # the anchor's own token among them
    round_ms = view.turn_ms + view.level * view.level_ms
    return bool(np.exp(view.reach[nodes]).sum() * round_ms >= written * view.level_ms)


# By shape


def from_choices(choices: Sequence[Sequence[int]]) -> TokenTree:
    """The shape of Medusa's sparse choice lists (arXiv:2401.10774): the ranks on the path to each node.

    Nodes are put in the order of the sum of these ranks, then of depth. Raises ValueError for a path that is empty,
    has a rank below 0, occurs twice, or whose parent is missing.
    """
    paths = sorted((tuple(choice) for choice in choices), key=lambda path: (sum(path), len(path), path))
    place: dict[tuple[int, ...], int] = {(): 0}
    for path in paths:
        if not path or min(path) < 0:
            raise ValueError(f"a choice is a path of ranks from 0 on, got {list(path)}")
        if path in place:
            raise ValueError(f"choice {list(path)} occurs twice")
        if path[:-1] not in place:
            raise ValueError(f"choice {list(path)} needs its parent {list(path[:-1])}, which is missing")
        place[path] = len(place)
    return TokenTree.of([-1, *(place[path[:-1]] for path in paths)], [0, *(path[-1] for path in paths)])


def kary(branching: Sequence[int], most: int) -> TokenTree:
    """The shape <k1, k2, ...>: each node of depth d - 1 has kd children (SpecInfer, arXiv:2305.09781).

    It is Medusa's Cartesian product where the children come from heads that do not see the path. Raises ValueError for
    more than ``most`` nodes.
    """
    size = int(np.cumprod(np.array(branching, object)).sum())
    if size > most:
        raise ValueError(f"{list(branching)} makes {size} nodes, the limit is {most}")
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        if len(path) < len(branching):
            paths += [(*path, rank) for rank in range(branching[len(path)])]
    return from_choices(paths[1:])


def chain(depth: int) -> TokenTree:
    """The shape of ``depth`` nodes below each other."""
    return kary([1] * depth, depth)


def likeliest(log_chance: NDArray[np.float64], nodes: int) -> TokenTree:
    """The best shape of ``nodes`` nodes if the child of rank r at depth d + 1 is taken with ``exp(log_chance[d, r])``.

    This is the tree that Sequoia's dynamic programme (arXiv:2402.12374) finds, with as many levels as there are rows.
    What a tree is expected to accept is the sum of its nodes' survivals, and these fall along paths, so the ``nodes``
    likeliest paths are a tree, and none is better. With a row for each position it is the best tree over a block whose
    positions have been drawn at once. Scores are the log chances.
    """
    width = log_chance.shape[1]
    tree, reach, newest = TokenTree.root(0), np.zeros(1), np.zeros(1, np.int64)
    for chance in log_chance:
        parent, rank = np.repeat(newest, width), np.tile(np.arange(width), len(newest))
        first = tree.size
        tree = tt.extend(tree, parent, rank, chance[rank])
        reach = np.concatenate([reach, reach[parent] + chance[rank]])
        newest = first + np.argsort(-reach[first:], kind="stable")[:nodes]
    order = np.lexsort((np.arange(tree.size), tt.depths(tree), -reach))[: nodes + 1]
    index = np.empty(tree.size + 1, np.int32)
    index[order], index[-1] = np.arange(len(order)), -1
    return TokenTree(index[tree.parent[order]], tree.token[order], tree.score[order])


def expected(shape: TokenTree) -> NDArray[np.float64]:
    """Tokens that a step is expected to write with the first n nodes of a shape with scores, for n from 0 on."""
    return np.asarray(np.cumsum(np.exp(tt.log_survival(shape))))


def best_size(shape: TokenTree, step_ms: Sequence[tuple[int, float]]) -> int:
    """The number of nodes that gives the most tokens per time, in a shape with scores.

    ``step_ms`` are two points (rows of a step, milliseconds) or more, rows ascending; it is linear between them, and
    goes on as between the last two.
    """
    rows, duration = np.array(step_ms, float).T
    written = expected(shape)
    at = np.arange(1, len(written) + 1)
    beyond = np.maximum(at - rows[-1], 0) * (duration[-1] - duration[-2]) / (rows[-1] - rows[-2])
    return int(np.argmax(written / (np.interp(at, rows, duration) + beyond)))


class Fixed:
    """Draws a shape: expands its inner nodes, and sends its nodes and no others."""

    def __init__(self, shape: TokenTree, width: int = 0) -> None:
        """``width`` 0: as many children as the shape has."""
        self.width = width or int(shape.token.max()) + 1
        self.shape = shape

    @property
    def shape(self) -> TokenTree:
        return self._shape

    @shape.setter
    def shape(self, shape: TokenTree) -> None:
        self._shape = shape
        self._child = np.full((shape.size + 1, self.width), GONE, np.int64)  # the last row: of nodes without a place
        self._child[shape.parent[1:], shape.token[1:]] = np.arange(1, shape.size)

    def places(self, view: View) -> IndexArray:
        """Where each node of the tree is in the shape, GONE: nowhere; [tree.size]."""
        parent, rank = view.tree.parent, tt.ranks(view.tree)
        place = np.full(view.tree.size, GONE, np.int64)
        place[0] = 0
        for depth in range(1, int(view.depth.max()) + 1):
            nodes = np.nonzero((view.depth == depth) & (rank < self.width))[0]
            place[nodes] = self._child[place[parent[nodes]], rank[nodes]]
        return place

    def frontier(self, view: View) -> IndexArray:
        inner = np.zeros(self.shape.size + 1, np.bool_)
        inner[self.shape.parent[1 : view.budget + 1]] = True
        place = self.places(view)
        nodes = np.nonzero(inner[place] & view.unexpanded & (view.depth < view.room))[0]
        return np.asarray(nodes[np.argsort(place[nodes])])

    def chosen(self, view: View) -> IndexArray:
        place = self.places(view)
        return np.nonzero((place != GONE) & (place <= view.budget))[0]

    def observe(self, ranks: Sequence[int]) -> None:
        return


class Sequoia(Fixed):
    """The best shape of at most ``depth`` levels for the acceptance by rank, which is measured as texts go on.

    Sequoia (arXiv:2402.12374). Until something is measured, ``PRIOR_TRIALS`` trials of a usual draft count. Where it is
    known what steps take, by ``step_ms`` or else by the view, no more nodes are drawn than give the most tokens per
    time (``best_size``): the shape's nodes are in the order of their worth, so that its first n are the best of n.
    """

    def __init__(self, width: int, depth: int, nodes: int, step_ms: Sequence[tuple[int, float]] = ()) -> None:
        first = 0.6
        rest = [(1 - first) * 0.75 / (rank * (rank + 1)) for rank in range(1, width)]
        self._hits = PRIOR_TRIALS * np.array([first, *rest])
        self._trials = PRIOR_TRIALS
        self._depth, self._nodes, self._step_ms = depth, nodes, tuple(step_ms)
        self._sizes: dict[tuple[tuple[int, float], ...], int] = {}  # of the present shape
        self.solved = self.chance
        super().__init__(self._solve(), width)

    @property
    def chance(self) -> NDArray[np.float64]:
        """Share of expanded nodes whose child of each rank was taken, [width]."""
        return np.asarray(self._hits / self._trials)

    def frontier(self, view: View) -> IndexArray:
        return super().frontier(self._worthwhile(view))

    def chosen(self, view: View) -> IndexArray:
        return super().chosen(self._worthwhile(view))

    def _worthwhile(self, view: View) -> View:
        """With a budget of no more than pays."""
        step_ms = self._step_ms or view.step_ms
        if not step_ms:
            return view
        if step_ms not in self._sizes:
            self._sizes[step_ms] = max(1, best_size(self.shape, step_ms))  # one, or nothing would be measured any more
        return replace(view, budget=min(view.budget, self._sizes[step_ms]))

    def observe(self, ranks: Sequence[int]) -> None:
        if len(self._sizes) > MOST_CURVES:
            self._sizes = {}
        taken = [rank for rank in ranks if 0 <= rank < self.width]
        self._trials += len(ranks)
        self._hits += np.bincount(taken, minlength=self.width)
        if self._trials > MOST_TRIALS:
            self._trials, self._hits = self._trials / 2, self._hits / 2
        if np.abs(self.chance - self.solved).max() > MOVED:
            self.solved = self.chance
            self.shape, self._sizes = self._solve(), {}

    def _solve(self) -> TokenTree:
        log_chance = np.log(np.clip(self.solved, 1e-6, 1.0))
        return likeliest(np.tile(log_chance, (self._depth, 1)), self._nodes)
