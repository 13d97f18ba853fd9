"""The token tree against oracles that walk parents one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood import tree as tt
from draftwood.tree import GONE, TokenTree


@st.composite
def trees(draw: st.DrawFn, vocab: int = 4, most: int = 40) -> TokenTree:
    """A random trie: siblings carry different tokens."""
    parents, tokens, scores = [-1], [draw(st.integers(0, vocab - 1))], [0.0]
    used: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.integers(0, len(parents) - 1))
        token = draw(st.integers(0, vocab - 1))
        if (parent, token) not in used:
            used.add((parent, token))
            parents.append(parent)
            tokens.append(token)
            scores.append(draw(st.floats(-4, 0, width=32)))
    return TokenTree.of(parents, tokens, scores)


def path_of(tree: TokenTree, node: int) -> list[int]:
    nodes = []
    while node != -1:
        nodes.insert(0, node)
        node = int(tree.parent[node])
    return nodes


def strings(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Token path of every node (anchor left out) and its score."""
    return {tuple(int(tree.token[i]) for i in path_of(tree, n)[1:]): float(tree.score[n]) for n in range(tree.size)}


@given(trees())
def test_derived_values_follow_the_parents(tree: TokenTree) -> None:
    paths = [path_of(tree, node) for node in range(tree.size)]
    assert tt.depths(tree).tolist() == [len(p) - 1 for p in paths]
    assert np.allclose(tt.log_survival(tree), [tree.score[p].astype(float).sum() for p in paths], atol=1e-5)
    rows = tt.ancestors(tree)
    assert [np.nonzero(row)[0].tolist() for row in rows] == [sorted(p) for p in paths]
    assert [tt.path(tree, n) for n in range(tree.size)] == [p[1:] for p in paths]


@given(trees(), st.integers(0, 70))
def test_mask_words_hold_shifted_ancestor_bits(tree: TokenTree, shift: int) -> None:
    words = tt.pack_words(tt.ancestors(tree), shift)
    assert words.dtype == np.int32
    for node, row in enumerate(words.view(np.uint32)):
        bits = sum(int(word) << 32 * i for i, word in enumerate(row))
        assert bits == (1 << shift) - 1 | sum(1 << shift + j for j in path_of(tree, node))


@given(trees())
def test_links_enumerate_children_in_order(tree: TokenTree) -> None:
    first, sibling = tt.links(tree)
    assert sibling[0] == -1
    for node in range(tree.size):
        listed, child = [], int(first[node])
        while child != -1:
            listed.append(child)
            child = int(sibling[child])
        assert listed == np.nonzero(tree.parent == node)[0].tolist()


def test_mask_words_begin_at_the_first_bit_if_not_shifted() -> None:
    assert tt.pack_words(np.array([[True, False], [True, True]])).tolist() == [[1], [3]]


def test_siblings_that_may_repeat_are_inserted_as_they_come() -> None:
    tree, index = tt.insert(TokenTree.root(5), [0, 0, -2], [1, 1, 1], [-1.0, -0.5, -2.0], 9, repeats=True)
    assert tree.parent.tolist() == [-1, 0, 0, 1] and tree.token.tolist() == [5, 1, 1, 1] and index.tolist() == [1, 2, 3]
    assert tree.score.tolist() == [0, -1.0, -0.5, -2.0]
    merged, index = tt.insert(TokenTree.root(5), [0, 0, -2], [1, 1, 1], [-1.0, -0.5, -2.0], 9)
    assert merged.token.tolist() == [5, 1, 1] and index.tolist() == [1, 1, 2] and merged.score[1] == -0.5


@given(trees(), st.data())
def test_extend_hangs_new_nodes_below_those_that_are_there(tree: TokenTree, data: st.DataObject) -> None:
    new = data.draw(st.lists(st.tuples(st.integers(0, tree.size - 1), st.floats(-4, 0, width=32)), max_size=9))
    parent, token = np.array([p for p, _ in new], np.int64), np.arange(10, 10 + len(new))  # tokens that are new
    grown = tt.extend(tree, parent, token, np.array([s for _, s in new]))
    want = {(*strings_of(tree, p), 10 + k): s for k, (p, s) in enumerate(new)}
    assert strings(grown) == strings(tree) | want and grown.size == tree.size + len(new)
    assert (grown.parent.dtype, grown.token.dtype, grown.score.dtype) == (np.int32, np.int32, np.float32)


@given(trees(), st.integers(0, 50))
def test_best_is_a_connected_top_n(tree: TokenTree, nodes: int) -> None:
    keep = tt.best(tree, nodes)
    assert len(keep) == min(nodes + 1, tree.size) and keep[0] == 0
    assert set(tree.parent[keep[1:]].tolist()) <= set(keep.tolist())
    reach = tt.log_survival(tree)
    left = np.setdiff1d(np.arange(tree.size), keep)
    assert not len(left) or len(keep) == 1 or reach[left].max() <= reach[keep[1:]].min() + 1e-9
    pruned = tt.select(tree, keep)
    assert strings(pruned).items() <= strings(tree).items() and pruned.size == len(keep)


@given(trees(), st.data())
def test_reroot_keeps_exactly_what_hangs_below(tree: TokenTree, data: st.DataObject) -> None:
    anchor = data.draw(st.integers(0, tree.size - 1))
    below, index = tt.reroot(tree, anchor)
    prefix = tuple(int(tree.token[i]) for i in path_of(tree, anchor)[1:])
    want = {s[len(prefix) :]: v for s, v in strings(tree).items() if s[: len(prefix)] == prefix}
    want[()] = 0.0
    assert strings(below) == want
    for old, new in enumerate(index):
        assert (new == GONE) == (anchor not in path_of(tree, old))
        assert new == GONE or below.token[new] == tree.token[old]


@given(st.lists(trees(), min_size=1, max_size=4))
def test_merge_is_the_union_of_token_paths(many: list[TokenTree]) -> None:
    same = [TokenTree(t.parent, np.concatenate([[7], t.token[1:]]).astype(np.int32), t.score) for t in many]
    merged, maps = tt.merge(same)
    want: dict[tuple[int, ...], float] = {}
    for tree in same:
        for s, v in strings(tree).items():
            want[s] = max(v, want.get(s, -np.inf))
    assert strings(merged) == want
    for tree, index in zip(same, maps, strict=True):
        assert [strings_of(merged, int(i)) for i in index] == [strings_of(tree, n) for n in range(tree.size)]


def strings_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    return tuple(int(tree.token[i]) for i in path_of(tree, node)[1:])


def test_insert_drops_what_hangs_below_a_missing_parent_or_beyond_capacity() -> None:
    grown, index = tt.insert(TokenTree.root(5), [0, -1, -3, -2], [1, 2, 3, 4], [-1.0] * 4, capacity=10)
    assert index.tolist() == [1, GONE, GONE, 2] and strings(grown).keys() == {(), (1,), (1, 4)}
    full, index = tt.insert(grown, [2, 0], [9, 1], [-1.0, -0.5], capacity=3)
    assert index.tolist() == [GONE, 1] and full.size == 3 and full.score[1] == np.float32(-0.5)


@pytest.mark.parametrize("parent", [[0], [-1, 1], [-1, 2, 0], [-1, -1], [-1, 0, 3]])
def test_of_refuses_what_is_no_tree(parent: list[int]) -> None:
    with pytest.raises(ValueError, match="parents must come before"):
        TokenTree.of(parent, [0] * len(parent))


@pytest.mark.parametrize(
    ("parent", "token", "score"),
    [([], [], None), ([-1, 0], [5], None), ([-1], [5, 6], None), ([-1, 0], [5, 6], [0.0]), ([-1], [5], [0.0, -1.0])],
)
def test_of_refuses_columns_that_differ_in_length_or_are_empty(
    parent: list[int], token: list[int], score: list[float] | None
) -> None:
    with pytest.raises(ValueError, match="columns differ in length or are empty"):
        TokenTree.of(parent, token, score)


def test_merge_refuses_trees_of_different_anchors() -> None:
    with pytest.raises(ValueError, match=r"need one anchor, got \[5, 6\]"):
        tt.merge([TokenTree.root(6), TokenTree.root(5)])


@given(trees(), st.lists(st.integers(0, 3), max_size=5))
def test_ranks_and_walk_are_those_of_the_siblings_one_by_one(tree: TokenTree, tokens: list[int]) -> None:
    parents = tree.parent.tolist()
    assert tt.ranks(tree).tolist() == [parents[:n].count(p) for n, p in enumerate(parents)]
    known = {text: n for n in range(1, tree.size) for text in [tuple(tree.token[path_of(tree, n)[1:]].tolist())]}
    want = [known.get(tuple(tokens[: k + 1])) for k in range(len(tokens))]
    assert tt.walk(tree, tokens) == [n for n in want if n is not None]
