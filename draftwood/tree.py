"""The token tree: the one definition that every part shares.

Words
-----
anchor    the last committed token. It is node 0, the root; its parent is -1 and its score 0.
node      one guessed token under a parent; parents come before their children.
score     the draft's estimate of log P(the target picks this token, given that its parent is reached), <= 0.
survival  the product of edge probabilities from the anchor to a node; never larger than its parent's.
size      number of nodes, the anchor included; a tree of size 1 is plain decoding.

A tree is three parallel arrays. Everything else (depth, mask words, links, paths) is derived here and never sent.
Trees of several drafts are merged into one trie, in which a (parent, token) pair occurs once (SpecInfer,
arXiv:2305.09781). Ranges are half-open. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
IndexArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

GONE = -1
"""Where an index map sends a node that is no longer in the tree."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """What a draft sampled a node's children from: a sparse distribution, every token not listed having none.

    Both sides divide the weights, as they are on the wire, by their sum, and so have the same numbers.
    """

    token: NDArray[np.int64]  # [k] ascending
    weight: NDArray[Any]  # float32 [k], > 0
    prob: NDArray[Any] = field(init=False)  # float64 [k], sums to 1; rational weights (dtype object) stay so

    def __post_init__(self) -> None:
        wide = self.weight.astype(np.promote_types(self.weight.dtype, np.float64))
        object.__setattr__(self, "prob", wide / wide.sum())

    def of(self, token: NDArray[np.integer]) -> NDArray[Any]:
        """Probabilities of listed tokens."""
        return np.asarray(self.prob[np.searchsorted(self.token, token)])


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Parallel arrays; node 0 is the anchor."""

    parent: IntArray  # [n], parent[0] == -1, parent[i] < i
    token: IntArray  # [n]
    score: FloatArray  # [n], score[0] == 0

    @property
    def size(self) -> int:
        return len(self.parent)

    @classmethod
    def root(cls, anchor: int) -> TokenTree:
        """The tree of plain decoding: the anchor alone."""
        return cls(np.array([-1], np.int32), np.array([anchor], np.int32), np.zeros(1, np.float32))

    @classmethod
    def of(cls, parent: Sequence[int], token: Sequence[int], score: Sequence[float] | None = None) -> TokenTree:
        """Builds a tree from plain sequences; raises ValueError if they are not a tree."""
        scores = np.zeros(len(parent), np.float32) if score is None else np.asarray(score, np.float32)
        tree = cls(np.asarray(parent, np.int32), np.asarray(token, np.int32), scores)
        index = np.arange(tree.size)
        if not tree.size or len(tree.token) != tree.size or len(scores) != tree.size:
            raise ValueError(f"columns differ in length or are empty: {len(parent)}, {len(tree.token)}, {len(scores)}")
        if tree.parent[0] != -1 or (tree.parent[1:] < 0).any() or (tree.parent >= index).any():
            raise ValueError(f"parents must come before their children and node 0 must be the only root: {parent}")
        return tree


def accumulate(parent: IntArray, value: NDArray[np.float64] | IndexArray) -> NDArray[np.float64] | IndexArray:
    """Sum of ``value`` over each node's path from the anchor to itself; [n] in, [n] out; by pointer doubling."""
    total = value.copy()
    above = parent.astype(np.int64)
    while (live := above >= 0).any():
        total = total + np.where(live, total[above], 0)  # the anchor's parent, -1, is an index as well, and unused
        above = np.where(live, above[above], above)
    return total


def depths(tree: TokenTree) -> IndexArray:
    """Depth of each node, the anchor's being 0; int64 [n]. A node's position is committed length - 1 + depth."""
    return accumulate(tree.parent, np.ones(tree.size, np.int64)).astype(np.int64) - 1


def ranks(tree: TokenTree) -> IndexArray:
    """Place of each node among its siblings in ascending index order, 0 the first; int64 [n]."""
    order = np.argsort(tree.parent, kind="stable")
    _, count = np.unique(tree.parent, return_counts=True)
    rank = np.empty(tree.size, np.int64)
    rank[order] = np.arange(tree.size) - np.repeat(np.cumsum(count) - count, count)
    return rank


def log_survival(tree: TokenTree, score: NDArray[np.float64] | FloatArray | None = None) -> NDArray[np.float64]:
    """Log of each node's survival, float64 [n]; ``score`` replaces the tree's own, e.g. when calibrated."""
    edge = tree.score if score is None else score
    return accumulate(tree.parent, edge.astype(np.float64)).astype(np.float64)


def ancestors(tree: TokenTree) -> BoolArray:
    """bool [n, n]: entry (i, j) says that j is i or an ancestor of i: ``row(i) = row(parent(i)) | bit(i)``."""
    depth = depths(tree)
    rows = np.zeros((tree.size, tree.size), np.bool_)
    for level in range(int(depth.max()) + 1):
        at = np.nonzero(depth == level)[0]
        if level:
            rows[at] = rows[tree.parent[at]]
        rows[at, at] = True
    return rows


def pack_words(visible: BoolArray, shift: int = 0) -> IntArray:
    """Packs bool [rows, columns] into int32 [rows, words], bit j of a row being column j - shift.

    The first ``shift`` bits are set (slots of the prefix that share a page with the tail), unused ones are not.
    """
    rows, columns = visible.shape
    words = max(1, -(-(columns + shift) // 32))
    bits = np.zeros((rows, words * 32), np.bool_)
    bits[:, :shift] = True
    bits[:, shift : shift + columns] = visible
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def links(tree: TokenTree) -> tuple[IntArray, IntArray]:
    """First child and next sibling of each node, -1 if none; children of one parent in ascending index order."""
    first = np.full(tree.size, -1, np.int32)
    sibling = np.full(tree.size, -1, np.int32)
    for node in range(tree.size - 1, 0, -1):
        parent = tree.parent[node]
        sibling[node] = first[parent]
        first[parent] = node
    return first, sibling


def path(tree: TokenTree, node: int) -> list[int]:
    """Nodes from just below the anchor to ``node``, both ends included; empty for the anchor."""
    nodes: list[int] = []
    while node > 0:
        nodes.append(node)
        node = int(tree.parent[node])
    return nodes[::-1]


def walk(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """Nodes below the anchor that carry ``tokens``, as far as the tree has them; of equal siblings the first."""
    walked: list[int] = []
    for token in tokens:
        children = np.nonzero((tree.parent == (walked[-1] if walked else 0)) & (tree.token == token))[0]
        if not len(children):
            break
        walked.append(int(children[0]))
    return walked


def select(tree: TokenTree, keep: IndexArray) -> TokenTree:
    """The tree of the nodes ``keep`` (ascending, closed under parents, the anchor included), renumbered."""
    index = np.full(tree.size + 1, GONE, np.int32)  # one more for the anchor's parent, which is -1
    index[keep] = np.arange(len(keep), dtype=np.int32)
    return TokenTree(index[tree.parent[keep]], tree.token[keep], tree.score[keep])


def best(tree: TokenTree, nodes: int, log_reach: NDArray[np.float64] | None = None) -> IndexArray:
    """Indices (ascending) of the anchor and the ``nodes`` likeliest others; int64.

    Survival falls along paths and ties go to the smaller depth, so the choice is closed under parents.
    """
    reach = log_survival(tree) if log_reach is None else log_reach
    order = np.lexsort((np.arange(tree.size), depths(tree), -reach))
    return np.sort(order[: nodes + 1])


def reroot(tree: TokenTree, anchor: int) -> tuple[TokenTree, IndexArray]:
    """The subtree below node ``anchor``, which becomes the anchor; and where each old node went, int64 [n]."""
    keep = np.nonzero(ancestors(tree)[:, anchor])[0]
    index = np.full(tree.size, GONE, np.int64)
    index[keep] = np.arange(len(keep))
    parent = np.where(keep == anchor, -1, index[tree.parent[keep]]).astype(np.int32)
    score = np.where(keep == anchor, np.float32(0), tree.score[keep])
    return TokenTree(parent, tree.token[keep], score), index


def extend(tree: TokenTree, parent: IndexArray, token: IndexArray, score: NDArray[Any]) -> TokenTree:
    """Adds new nodes below nodes of the tree, as they are: none may be in the trie already (see ``insert``)."""
    return TokenTree(
        np.concatenate([tree.parent, parent.astype(np.int32)]),
        np.concatenate([tree.token, token.astype(np.int32)]),
        np.concatenate([tree.score, score.astype(np.float32)]),
    )


def insert(
    tree: TokenTree,
    parent: Sequence[int],
    token: Sequence[int],
    score: Sequence[float],
    capacity: int,
    *,
    repeats: bool = False,
) -> tuple[TokenTree, IndexArray]:
    """Adds nodes to the trie; equal (parent, token) become one node, which keeps the larger score, unless ``repeats``.

    ``parent[k] >= 0`` is a node of ``tree``, ``parent[k] == -2 - j`` the j-th new node (j < k), -1 a node that is gone:
    its children go too. No more than ``capacity`` nodes are kept. Returns the tree and the index of each new node
    (GONE if it was not kept), int64 [m].
    """
    parents, tokens, scores = tree.parent.tolist(), tree.token.tolist(), tree.score.tolist()
    known = {(p, t): i for i, (p, t) in enumerate(zip(parents, tokens, strict=True))}
    index: list[int] = []
    for p, t, s in zip(parent, token, score, strict=True):
        above = p if p >= GONE else index[-2 - p]
        at = GONE if above == GONE or repeats else known.get((above, t), GONE)
        if at != GONE:
            scores[at] = max(scores[at], s)
        elif above != GONE and len(parents) < capacity:
            at = known[above, t] = len(parents)
            parents.append(above)
            tokens.append(t)
            scores.append(s)
        index.append(at)
    grown = TokenTree(np.array(parents, np.int32), np.array(tokens, np.int32), np.array(scores, np.float32))
    return grown, np.array(index, np.int64)


def merge(trees: Sequence[TokenTree]) -> tuple[TokenTree, list[IndexArray]]:
    """One trie of several trees with the same anchor, and where each tree's nodes are in it."""
    if len({int(tree.token[0]) for tree in trees}) != 1:
        raise ValueError(f"trees to merge need one anchor, got {sorted({int(tree.token[0]) for tree in trees})}")
    merged, maps = TokenTree.root(int(trees[0].token[0])), []
    for tree in trees:
        below = [0 if p == 0 else -1 - int(p) for p in tree.parent[1:]]
        capacity = merged.size + tree.size
        merged, index = insert(merged, below, tree.token[1:].tolist(), tree.score[1:].tolist(), capacity)
        maps.append(np.concatenate([np.zeros(1, np.int64), index]))
    return merged, maps
