"""The nodes that drafts have sent for one session: one trie, and where each draft's node ids are in it.

place     where a node id is: ``>= 0`` a node of the trie (0 is the anchor), ``<= -2`` committed at position
          ``-2 - place`` of the text, GONE dropped.

Ids are never renumbered. Growth names the epoch that it was drawn in: its nodes are walked along what has been
committed since, those below the new anchor live on, the rest is dropped and counted as stale. So late, cut, doubled and
lost messages cost speed only.

Sampled nodes (the rejection rule) are never merged, and their scores are those of their ranks among their siblings,
whatever the draft says: a tree that is cut by them is cut by its structure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwood import tree as tt
from draftwood.acceptance import sibling_score
from draftwood.errors import InvalidArgument
from draftwood.parameters import Rule
from draftwood.tree import GONE, FloatArray, IndexArray, IntArray, Proposal, TokenTree
from verifier_service.calibration import Calibration

REMEMBERED_EPOCHS = 64
REMEMBERED_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class Nodes:
    """One draft's new nodes: ids count up from ``first_id``; a parent is an earlier id, or 0 for the epoch's anchor."""

    epoch: int
    first_id: int
    parent: IndexArray  # [n]
    token: IntArray  # [n]
    score: FloatArray  # [n]
    drawn: Mapping[int, Proposal] = field(default_factory=dict)  # by parent id: what children were sampled from


def check_growth(nodes: Nodes, epoch: int, rule: Rule) -> None:
    """Raises InvalidArgument TREE_EPOCH for nodes of an epoch to come, TREE_BAD_Q for what the rule has no use for."""
    if nodes.epoch > epoch:
        message = f"epoch {nodes.epoch} is ahead of the session's {epoch}"
        raise InvalidArgument("TREE_EPOCH", message, field="growth.epoch")
    sampled = rule is Rule.REJECTION
    if len(nodes.token) and bool(nodes.drawn) != sampled:
        message = f"rule {rule.name} {'needs' if sampled else 'takes no'} distributions that nodes were sampled from"
        raise InvalidArgument("TREE_BAD_Q", message, field="growth.drawn")


@dataclass(slots=True)
class _Draft:
    calibration: Calibration
    places: dict[int, int] = field(default_factory=dict)
    last_id: int = 0


class LiveTree:
    """The trie below the session's anchor; shares the list of committed tokens with the session, which appends."""

    def __init__(self, tokens: list[int], capacity: int, *, sampled: bool = False) -> None:
        self._text = tokens
        self._capacity = capacity
        self._sampled = sampled
        self._anchors = deque([len(tokens) - 1], maxlen=REMEMBERED_EPOCHS)  # positions, the current epoch's last
        self._drafts: dict[int, _Draft] = {}
        self._clear()
        self.epoch = 0

    def _clear(self) -> None:
        self._parent, self._token, self._score = [-1], [self._text[-1]], [0.0]
        self._raw, self._origin = [0.0], [GONE]
        self._drawn: list[Proposal | None] = [None]
        self._child: dict[tuple[int, int], int] = {}

    @property
    def size(self) -> int:
        return len(self._parent)

    def tree(self) -> TokenTree:
        """The trie with calibrated scores."""
        parent, token = np.array(self._parent, np.int32), np.array(self._token, np.int32)
        return TokenTree(parent, token, np.array(self._score, np.float32))

    def drawn(self, nodes: IndexArray) -> list[Proposal | None]:
        """What each of the nodes was sampled from."""
        return [self._drawn[node] for node in nodes.tolist()]

    def attach(self, draft: int, calibration: Calibration) -> None:
        self._drafts[draft] = _Draft(calibration)

    def detach(self, draft: int) -> None:
        """Forgets the draft's ids; its nodes stay, they are as good as any."""
        self._drafts.pop(draft, None)

    def grow(self, draft: int, nodes: Nodes) -> int:
        """Adds nodes; returns how many were stale: seen before, on a branch not taken, or beyond the capacity."""
        view = self._drafts[draft]
        calibrated = view.calibration.apply(nodes.score).tolist()
        columns = (nodes.parent.tolist(), nodes.token.tolist(), nodes.score.tolist(), calibrated)
        stale = 0
        for node_id, (parent, token, raw, score) in enumerate(zip(*columns, strict=True), start=nodes.first_id):
            if node_id <= view.last_id:
                stale += 1
                continue
            above = self._epoch_anchor(nodes.epoch) if parent == 0 else view.places.get(parent, GONE)
            edge = self._by_rank(above, view.calibration) if self._sampled else (raw, score)
            place = self._add(above, token, edge[0], edge[1], draft, nodes.drawn.get(parent))
            stale += place == GONE
            if place != GONE:
                view.places[node_id] = place
        view.last_id = max(view.last_id, nodes.first_id + len(nodes.token) - 1)
        return stale

    def _by_rank(self, above: int, calibration: Calibration) -> tuple[float, float]:
        """Raw and calibrated score of the next child of ``above``."""
        raw = np.array([sibling_score(self._parent.count(above))], np.float32)
        return float(raw[0]), float(calibration.apply(raw)[0])

    def _epoch_anchor(self, epoch: int) -> int:
        age = self.epoch - epoch
        return self._committed(self._anchors[-1 - age]) if 0 <= age < len(self._anchors) else GONE

    def _committed(self, position: int) -> int:
        return 0 if position == len(self._text) - 1 else -2 - position

    def _add(self, above: int, token: int, raw: float, score: float, draft: int, drawn: Proposal | None) -> int:
        if above <= -2:  # the parent is committed: so is this node, or it is on a branch not taken
            position = -1 - above
            return self._committed(position) if self._text[position] == token else GONE
        if above == GONE:
            return GONE
        at = GONE if self._sampled else self._child.get((above, token), GONE)
        if at != GONE:
            self._score[at] = max(self._score[at], score)
        elif self.size < self._capacity:
            at = self.size
            self._child.setdefault((above, token), at)
            self._parent.append(above)
            self._token.append(token)
            self._score.append(score)
            self._raw.append(raw)
            self._origin.append(draft)
            self._drawn.append(drawn)
        return at

    def learn(self, verified: IndexArray, path: Sequence[int]) -> None:
        """Tells the calibrations what became of the verified nodes whose parent was reached by the accepted path."""
        reached, taken = {0, *path}, set(path)
        by_draft: dict[int, list[int]] = {}
        for node in verified.tolist():
            if node and self._parent[node] in reached and self._origin[node] in self._drafts:
                by_draft.setdefault(self._origin[node], []).append(node)
        for draft, nodes in by_draft.items():
            raw = np.array([self._raw[n] for n in nodes], np.float32)
            self._drafts[draft].calibration.observe(raw, np.array([n in taken for n in nodes]))

    def node_ids(self, draft: int, path: Sequence[int]) -> tuple[int, ...]:
        """This draft's ids of the nodes on ``path`` (anchor excluded), 0 where it did not draw one."""
        view = self._drafts.get(draft)
        ids = {place: node_id for node_id, place in view.places.items()} if view else {}
        return tuple(ids.get(node, 0) for node in path)

    def commit(self, tokens: Sequence[int]) -> None:
        """Follows the text by ``tokens``, which are appended to it here; what hangs below the new anchor lives on."""
        walked, node = [0], 0
        for token in tokens:
            node = self._child.get((node, token), GONE) if node != GONE else GONE
            walked.append(node)
        first = len(self._text) - 1  # position of the old anchor
        self._text.extend(tokens)
        self._anchors.append(len(self._text) - 1)
        self.epoch += 1
        moved = self._reroot(node)
        moved.update({n: self._committed(first + k) for k, n in enumerate(walked) if n != GONE})
        oldest = len(self._text) - REMEMBERED_POSITIONS
        for view in self._drafts.values():
            places = ((i, moved.get(p, GONE) if p >= 0 else p) for i, p in view.places.items())
            view.places = {i: p for i, p in places if p >= 0 or (p != GONE and -2 - p >= oldest)}

    def _reroot(self, anchor: int) -> dict[int, int]:
        """Makes ``anchor`` the root (GONE: an empty trie); returns where the nodes below it went."""
        if anchor == GONE:
            self._clear()
            return {}
        below, index = tt.reroot(self.tree(), anchor)
        keep = np.nonzero(index != GONE)[0].tolist()
        self._parent, self._token, self._score = below.parent.tolist(), below.token.tolist(), below.score.tolist()
        self._raw, self._origin = [self._raw[n] for n in keep], [self._origin[n] for n in keep]
        self._drawn = [self._drawn[n] for n in keep]
        edges = list(zip(self._parent, self._token, strict=True))
        self._child = {edges[n]: n for n in range(len(edges) - 1, 0, -1)}  # of equal siblings the first
        return {n: int(index[n]) for n in keep}
