"""The live tree against an oracle that knows texts only: whatever drafts send and whenever, nodes are in place."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from draftwood import tree as tt
from draftwood.acceptance import sibling_score
from draftwood.errors import InvalidArgument
from draftwood.parameters import Rule
from draftwood.tree import Proposal
from verifier_service.calibration import Calibration
from verifier_service.live_tree import LiveTree, Nodes, check_growth

Text = tuple[int, ...]


def nodes(
    epoch: int,
    first: int,
    parent: list[int],
    token: list[int],
    score: list[float] | None = None,
    drawn: dict[int, Proposal] | None = None,
) -> Nodes:
    scores = np.array(score or [-0.5] * len(token), np.float32)
    return Nodes(epoch, first, np.array(parent, np.int64), np.array(token, np.int32), scores, drawn or {})


def node_texts(live: LiveTree, committed: Text) -> list[Text]:
    tree = live.tree()
    return [(*committed, *(int(tree.token[n]) for n in tt.path(tree, node))) for node in range(tree.size)]


@dataclass
class Oracle:
    """Every node is a text. A node lives as long as its text is one that may still be written."""

    text: Text
    capacity: int
    anchors: list[Text] = field(default_factory=list)  # by epoch
    live: dict[Text, float] = field(default_factory=dict)  # score
    places: dict[int, dict[int, Text]] = field(default_factory=lambda: {0: {}, 1: {}})  # by draft and id
    last: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})

    def __post_init__(self) -> None:
        self.anchors.append(self.text)

    def grow(self, draft: int, new: Nodes, calibrated: list[float]) -> int:
        stale = 0
        columns = zip(new.parent.tolist(), new.token.tolist(), calibrated, strict=True)
        for own, (parent, token, score) in enumerate(columns, new.first_id):
            if own <= self.last[draft]:
                stale += 1
                continue
            above = self.anchors[new.epoch] if parent == 0 else self.places[draft].get(parent)
            text = None if above is None else (*above, token)
            if text is None or not self.possible(text) or not self.keep(text, score):
                stale += 1
            else:
                self.places[draft][own] = text
        self.last[draft] = max(self.last[draft], new.first_id + len(new.token) - 1)
        return stale

    def possible(self, text: Text) -> bool:
        shorter = min(len(text), len(self.text))
        return text[:shorter] == self.text[:shorter] and (len(text) <= len(self.text) or text[:-1] in self.above())

    def above(self) -> set[Text]:
        return {self.text, *self.live}

    def keep(self, text: Text, score: float) -> bool:
        if len(text) > len(self.text):
            if text not in self.live and len(self.live) + 1 >= self.capacity:
                return False
            self.live[text] = max(score, self.live.get(text, score))
        return True

    def commit(self, tokens: Text) -> None:
        self.text += tokens
        self.anchors.append(self.text)
        size = len(self.text)
        self.live = {t: s for t, s in self.live.items() if len(t) > size and t[:size] == self.text}
        for places in self.places.values():
            for own in [i for i, t in places.items() if not (self.text[: len(t)] == t or t in self.live)]:
                del places[own]


@pytest.mark.parametrize("capacity", [200, 9])
@pytest.mark.parametrize("seed", range(25))
def test_nodes_are_where_their_texts_say(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    text = [1, 2, 0]
    live, oracle, calibration = LiveTree(text, capacity), Oracle((1, 2, 0), capacity), Calibration()
    for draft in (0, 1):
        live.attach(draft, calibration)
    met = 0
    for _ in range(100):
        draft = rng.randrange(2)
        first = max(1, oracle.last[draft] + rng.choice([1, 1, 1, 1, -2, 0, 3]))
        count = rng.randrange(8)
        parents = [rng.choice([0, 0, 0, *range(max(1, first + k - 6), first + k)]) for k in range(count)]
        score = [-rng.random() for _ in range(count)]
        epoch = max(0, len(oracle.anchors) - 1 - rng.choice([0, 0, 0, 1, 2]))
        new = nodes(epoch, first, parents, [rng.randrange(3) for _ in range(count)], score)
        calibrated = calibration.apply(new.score).tolist() if count else []
        assert live.grow(draft, new) == oracle.grow(draft, new, calibrated)
        if rng.random() < 0.4:
            tree = live.tree()
            path = tt.path(tree, rng.randrange(tree.size))[: rng.randrange(3)]
            below = tree.token[tree.parent == (path[-1] if path else 0)].tolist()
            tokens = (*(int(tree.token[n]) for n in path), rng.choice([*below, *below, rng.randrange(3)]))
            found = node_texts(live, oracle.text)
            for link in (0, 1):
                ids = live.node_ids(link, path)
                for n, own in zip(path, ids, strict=True):
                    drew = found[n] in oracle.places[link].values()
                    assert (own > 0) == drew and (not own or oracle.places[link][own] == found[n])
            live.commit(tokens)
            oracle.commit(tokens)
            met += bool(oracle.live)
        tree, found = live.tree(), node_texts(live, oracle.text)
        assert tuple(text) == oracle.text and live.epoch == len(oracle.anchors) - 1
        assert live.size == tree.size == len(found) == len(set(found)) <= capacity
        assert tree.token[0] == text[-1] and tree.score[0] == 0
        scores = dict(zip(found[1:], tree.score[1:].tolist(), strict=True))
        assert scores == pytest.approx(oracle.live)
    assert met > 0


def test_an_unknown_draft_drew_nothing() -> None:
    live = LiveTree([5], 10)
    live.attach(0, Calibration())
    live.grow(0, nodes(0, 1, [0], [3]))
    assert live.node_ids(0, [1]) == (1,)
    assert live.node_ids(7, [1]) == (0,)
    live.detach(0)
    assert live.node_ids(0, [1]) == (0,) and live.size == 2, "nodes stay when their draft has left"
    live.detach(0)


def test_growth_of_a_future_epoch_or_of_one_64_ago_is_stale() -> None:
    live = LiveTree([5], 10)
    live.attach(0, Calibration())
    for _ in range(64):
        live.commit([5])
    assert live.grow(0, nodes(0, 1, [0], [5])) == 1, "as many anchors are remembered as there are epochs, no more"
    assert live.grow(0, nodes(1, 2, [0], [5])) == 0
    assert live.grow(0, nodes(65, 3, [0], [5])) == 1
    assert live.grow(0, nodes(64, 4, [0], [6])) == 0
    assert live.size == 2


def test_committed_nodes_are_known_for_512_positions() -> None:
    live = LiveTree([5], 10)
    live.attach(0, Calibration())
    live.grow(0, nodes(0, 1, [0, 1], [6, 7]))
    live.commit([6] + [9] * 511)  # node 1 is at position 1 of 513, 512 of which are remembered
    assert live.grow(0, nodes(1, 3, [1, 2], [9, 9])) == 1, "node 1 is on the text, node 2 is not"
    live.commit([9])
    assert live.grow(0, nodes(2, 5, [1], [9])) == 1


def test_an_id_that_has_become_the_anchor_of_a_long_text_is_known() -> None:
    live = LiveTree([5] * 600, 10)
    live.attach(0, Calibration())
    live.grow(0, nodes(0, 1, [0, 1], [6, 7]))
    live.commit([6])
    assert live.grow(0, nodes(0, 3, [1, 2], [8, 9])) == 0
    assert (live.tree().parent.tolist(), live.tree().token.tolist()) == ([-1, 0, 0, 1], [6, 7, 8, 9])


def test_a_late_child_of_the_committed_text_that_agrees_with_it_is_no_new_node() -> None:
    live = LiveTree([5], 10)
    live.attach(0, Calibration())
    live.grow(0, nodes(0, 1, [0], [6]))
    live.commit([6, 7, 8])
    assert live.grow(0, nodes(0, 2, [1, 1, 2, 3, 4, 6], [7, 6, 8, 9, 9, 1])) == 2, "6 behind 6, and what hangs below it"
    assert live.tree().token.tolist() == [8, 9, 1]


@dataclass
class Recorder(Calibration):
    """Halves every chance, and notes outcomes."""

    seen: list[tuple[float, bool]] = field(default_factory=list)

    def apply(self, score: np.ndarray) -> np.ndarray:
        return (score + np.log(0.5)).astype(np.float32)

    def observe(self, score: np.ndarray, taken: np.ndarray) -> None:
        assert score.dtype == np.float32
        self.seen += zip(score.tolist(), taken.tolist(), strict=True)


def test_calibrations_learn_from_nodes_whose_parents_were_reached() -> None:
    live, mine, theirs = LiveTree([5], 20), Recorder(), Recorder()
    live.attach(0, mine)
    live.attach(1, theirs)
    live.grow(0, nodes(0, 1, [0, 0, 1, 2, 3], [1, 2, 3, 4, 5], [-0.25, -0.5, -0.75, -1.0, -1.25]))
    live.grow(1, nodes(0, 1, [0, 0], [1, 3], [-2.0, -3.0]))  # the first is draft 0's already
    assert live.tree().score[1:3].tolist() == pytest.approx([-0.25 + np.log(0.5), -0.5 + np.log(0.5)])
    live.learn(np.array([0, 1, 2, 3, 4, 6]), [1, 3])
    assert mine.seen == [(-0.25, True), (-0.5, False), (-0.75, True)]
    assert theirs.seen == [(-3.0, False)]
    live.detach(1)
    live.learn(np.array([0, 5, 6]), [1, 3])
    assert mine.seen[3:] == [(-1.25, False)] and len(theirs.seen) == 1
    live.learn(np.array([0]), [])


def test_raw_scores_follow_their_nodes_when_the_tree_is_rerooted() -> None:
    live, recorder = LiveTree([5], 20), Recorder()
    live.attach(0, recorder)
    live.grow(0, nodes(0, 1, [0, 0, 2, 3, 3], [1, 2, 3, 4, 5], [-0.25, -0.5, -0.75, -1.0, -1.5]))
    live.commit([2, 3])
    live.learn(np.array([0, 1, 2]), [2])
    assert recorder.seen == [(-1.0, False), (-1.5, True)]
    assert live.node_ids(0, [1, 2]) == (4, 5)
    assert live.tree().score.tolist() == pytest.approx([0, -1.0 + np.log(0.5), -1.5 + np.log(0.5)])


# Sampled nodes

Q = Proposal(np.array([1, 2]), np.array([0.5, 0.5], np.float32))
R = Proposal(np.array([1, 3]), np.array([0.25, 0.75], np.float32))


def sampled(capacity: int = 20) -> LiveTree:
    live = LiveTree([5], capacity, sampled=True)
    live.attach(0, Recorder())
    live.attach(1, Recorder())
    return live


def test_equal_sampled_siblings_stay_apart_and_know_what_they_were_sampled_from() -> None:
    live = sampled()
    assert live.grow(0, nodes(0, 1, [0, 0, 0, 2], [1, 1, 2, 1], drawn={0: Q, 2: R})) == 0
    assert live.grow(1, nodes(0, 1, [0], [1], drawn={0: R})) == 0
    tree = live.tree()
    assert tree.token.tolist() == [5, 1, 1, 2, 1, 1] and tree.parent.tolist() == [-1, 0, 0, 0, 2, 0]
    assert live.drawn(np.array([0, 1, 3, 4, 5])) == [None, Q, Q, R, R]
    assert (live.node_ids(0, [2, 4]), live.node_ids(1, [5])) == ((2, 4), (1,))


def test_scores_of_sampled_nodes_are_those_of_their_ranks_whatever_the_draft_says() -> None:
    live = sampled()
    live.grow(0, nodes(0, 1, [0, 0, 1], [1, 2, 1], [-9.0, -0.1, -0.2], {0: Q, 1: Q}))
    live.grow(1, nodes(0, 1, [0], [1], [-0.0], {0: R}))
    want = [sibling_score(rank) + np.log(0.5) for rank in (0, 1, 0, 2)]
    assert live.tree().score[1:].tolist() == pytest.approx(want)
    live.learn(np.arange(5), [1])
    recorder = live._drafts[0].calibration
    assert isinstance(recorder, Recorder)
    assert recorder.seen == [(np.float32(sibling_score(0)), True), (np.float32(sibling_score(1)), False), (
        np.float32(sibling_score(0)), False,
    )]  # fmt: skip


def test_of_equal_sampled_siblings_the_first_is_the_committed_one() -> None:
    live = sampled()
    live.grow(0, nodes(0, 1, [0, 0, 1, 2, 2, 1], [1, 1, 2, 1, 1, 2], drawn={0: Q, 1: Q, 2: R}))
    live.commit([1])
    tree = live.tree()
    assert tree.token.tolist() == [1, 2, 2] and live.drawn(np.arange(3)) == [Q, Q, Q]
    live.commit([2])
    assert live.tree().token.tolist() == [2] and live.drawn(np.arange(1)) == [Q]
    live.commit([1])
    assert live.drawn(np.arange(1)) == [None]


def test_late_sampled_nodes_below_the_committed_text_all_live_on() -> None:
    """Two late nodes agree with the text: the children of both hang below the anchor now."""
    live = sampled()
    live.commit([1])
    stale = live.grow(0, nodes(0, 1, [0, 0, 0, 1, 2, 3], [1, 1, 2, 1, 3, 1], drawn={0: Q, 1: Q, 2: R, 3: Q}))
    assert stale == 2 and live.tree().token.tolist() == [1, 1, 3] and live.drawn(np.arange(3)) == [None, Q, R]


def test_no_more_sampled_nodes_than_fit() -> None:
    live = sampled(capacity=3)
    assert live.grow(0, nodes(0, 1, [0, 0, 0, 3], [1, 1, 2, 1], drawn={0: Q, 3: Q})) == 2
    assert live.size == 3


@pytest.mark.parametrize("rule", list(Rule))
def test_growth_of_epochs_to_come_or_with_distributions_that_the_rule_has_no_use_for_is_refused(rule: Rule) -> None:
    q = Proposal(np.array([1, 2]), np.array([0.5, 0.5]))
    own, other = ({0: q}, {}) if rule is Rule.REJECTION else ({}, {0: q})
    check_growth(nodes(3, 1, [0], [1], drawn=own), 3, rule)
    check_growth(nodes(3, 1, [], []), 3, rule)
    with pytest.raises(InvalidArgument, match="epoch 4 is ahead of the session's 3") as ahead:
        check_growth(nodes(4, 1, [0], [1], drawn=own), 3, rule)
    assert (ahead.value.reason, ahead.value.field) == ("TREE_EPOCH", "growth.epoch")
    with pytest.raises(InvalidArgument, match=rule.name) as wrong:
        check_growth(nodes(3, 1, [0], [1], drawn=other), 3, rule)
    assert (wrong.value.reason, wrong.value.field) == ("TREE_BAD_Q", "growth.drawn")
