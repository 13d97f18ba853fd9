"""What a drafter is: something that grows trees for many sessions at once.

Words
-----
round      the nodes drawn for one epoch, from a commit until the draft says ``complete``.
budget     nodes that the verifier wants in a round; 0: none for now.
growth     nodes that go out together; ids count up from 1 per session and are never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from draftwood.features import FeatureRequest, Features
from draftwood.parameters import Rule, SamplingParams
from draftwood.tree import GONE, TokenTree
from draftwood.vocabulary import Vocabulary
from draftwood.wire import Drawing, SessionGrowth

StepMs = tuple[tuple[int, float], ...]
"""What a step of the verifier takes: rows of each session, ascending, and milliseconds. (): unknown."""

Key = tuple[int, int]
"""A session at this worker: (link to a verifier, handle on it)."""


@dataclass(frozen=True, slots=True)
class SessionStart:
    """What the verifier tells when a draft joins."""

    epoch: int
    tokens: tuple[int, ...]  # committed
    sampling: SamplingParams
    budget: int
    vocab_size: int  # real tokens of the target
    max_nodes: int
    max_depth: int
    max_context_tokens: int
    rule: Rule = Rule.SHARED_NOISE  # at a temperature above 0
    step_ms: StepMs = ()
    drawing: Drawing = field(default_factory=Drawing)


@dataclass(frozen=True, slots=True)
class SessionCommitted:
    """What the verifier tells after a step."""

    epoch: int
    length: int
    tokens: tuple[int, ...]
    budget: int
    step_ms: StepMs = ()
    drawing: Drawing = field(default_factory=Drawing)  # a wish: what does not keep to it is drawn for nothing

    def check_follows(self, known: int) -> None:
        """Raises ValueError unless a text of ``known`` tokens goes on with these."""
        if known + len(self.tokens) != self.length:
            raise ValueError(f"{known} + {len(self.tokens)} tokens do not make {self.length}")


@dataclass(eq=False)
class RoundSession:
    """What a drafter that draws each round at once keeps of a session."""

    start: SessionStart
    tokens: list[int]  # committed
    epoch: int
    budget: int
    due: bool = True
    drawing: Drawing = field(init=False)

    def __post_init__(self) -> None:
        self.drawing = self.start.drawing

    @property
    def room(self) -> int:
        """Depth that a tree may have."""
        depth = self.drawing.room(self.start.max_depth)
        return min(depth, self.budget, self.start.max_context_tokens - len(self.tokens))

    def follow(self, committed: SessionCommitted) -> None:
        """Moves on, after which a round is due."""
        self.tokens.extend(committed.tokens)
        self.epoch, self.budget, self.due = committed.epoch, committed.budget, True
        self.drawing = committed.drawing


class Drafter(Protocol):
    """Used by one thread. Every method returns quickly but ``work``, which runs at most one forward."""

    kind: str
    model: str
    vocabulary: Vocabulary | None  # None: works on ids alone
    rules: tuple[Rule, ...]  # those that need more than ids and that it can draw for
    features: FeatureRequest | None  # what it works on besides the text

    def open(self, key: Key, start: SessionStart) -> None:
        """Takes a session."""

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        """Moves a session on; unknown keys are ignored. A gap in the text raises ValueError."""

    def feed(self, key: Key, first: int, features: Features) -> None:
        """Takes features of the positions from ``first`` on, as they come: each position once, those before an anchor
        before the commit that names it unless they are many. Unknown keys are ignored; a position that comes again
        raises ValueError. Only for drafters that ask for features.
        """

    def close(self, key: Key) -> None:
        """Drops a session; unknown keys are ignored."""

    def wants_work(self) -> bool:
        """True if ``work`` has something to do now."""

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        """Grows trees by one level, all sessions at once; returns what is to be sent."""


@dataclass
class Numbering:
    """Which nodes of a session's tree have been sent, and under which ids. Node 0, the anchor, is 0 on the wire."""

    ids: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # [tree.size], -1: not sent
    next_id: int = 1

    def extend(self, tree: TokenTree) -> None:
        """Follows a tree that has grown."""
        self.ids = np.concatenate([self.ids, np.full(tree.size - len(self.ids), -1, np.int64)])

    def restart(self, index: np.ndarray | None) -> None:
        """Follows a re-rooted tree: ``index`` says where each old node went; None: only the anchor is left."""
        old, keep = self.ids, np.zeros(0, np.int64) if index is None else np.nonzero(index >= 0)[0]
        self.ids = np.concatenate([np.zeros(1, np.int64), old[keep][1:]])

    def growth(
        self, tree: TokenTree, nodes: Sequence[int], epoch: int, handle: int, *, complete: bool
    ) -> SessionGrowth:
        """Numbers those of ``nodes`` (ascending, closed under parents) that have not been sent, and packs them."""
        fresh = [node for node in nodes if self.ids[node] < 0]
        first = self.next_id
        self.ids[fresh] = np.arange(first, first + len(fresh))
        self.next_id += len(fresh)
        parent = self.ids[tree.parent[fresh]] if fresh else np.zeros(0, np.int64)
        return SessionGrowth(handle, epoch, first, parent, tree.token[fresh], tree.score[fresh], complete)


@dataclass
class RedrawnNumbering(Numbering):
    """Of trees that are drawn anew below each anchor: a node that was sent and lives on goes by the id that it has."""

    sent: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent's id, token) -> id; parents come first

    def follow(self, tokens: Sequence[int]) -> None:
        """Starts over below the anchor that committed tokens lead to."""
        self.restart(None)
        anchor = 0
        for token in tokens:
            anchor = self.sent.get((anchor, token), GONE)
        before, self.sent = self.sent, {}
        alive = {anchor: 0}
        for (parent, token), own in before.items():
            if parent in alive and anchor != GONE:
                self.sent[alive[parent], token] = own
                alive[own] = own

    def extend(self, tree: TokenTree) -> None:
        """Follows a tree that has grown; those of the new nodes that the verifier has get their ids."""
        first = len(self.ids)
        super().extend(tree)
        for node in range(first, tree.size):
            self.ids[node] = self.sent.get((int(self.ids[tree.parent[node]]), int(tree.token[node])), -1)

    def growth(
        self, tree: TokenTree, nodes: Sequence[int], epoch: int, handle: int, *, complete: bool
    ) -> SessionGrowth:
        growth = super().growth(tree, nodes, epoch, handle, complete=complete)
        edges = zip(growth.parent.tolist(), growth.token.tolist(), strict=True)
        self.sent.update((edge, growth.first_id + k) for k, edge in enumerate(edges))
        return growth
