"""Several drafters in one worker: their trees are merged by shared prefix into one (SpecInfer, arXiv:2305.09781).

Each part draws as if it were alone. When all have completed their rounds, the likeliest nodes of the trie of all that
they have sent are sent on. Under the rejection rule nothing may be merged or chosen by what was sampled: the budget is
shared out, and each part's nodes go on as they are, with what they were sampled from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from draft_service.drafter import Drafter, Key, Numbering, SessionCommitted, SessionStart
from draftwood import tree as tt
from draftwood.errors import InvalidArgument
from draftwood.features import FeatureRequest, Features
from draftwood.parameters import Rule
from draftwood.tree import GONE, TokenTree
from draftwood.vocabulary import Vocabulary, check
from draftwood.wire import SessionGrowth

MOST_NODES = 4096
"""Nodes kept of a session's trie."""

REMEMBERED_IDS = 1 << 14
"""Of a part whose nodes are passed on as they are."""


@dataclass(eq=False)
class _Session:
    start: SessionStart
    length: int  # tokens committed
    epoch: int
    budget: int
    tree: TokenTree
    places: dict[int, dict[int, int]]  # of each part that draws: its ids -> node of the trie, or our id if sampled
    drawing: set[int] = field(default_factory=set)  # parts whose round is open
    numbering: Numbering = field(default_factory=Numbering)

    @property
    def sampled(self) -> bool:
        return self.start.rule is Rule.REJECTION and not self.start.sampling.greedy

    def shares(self) -> Mapping[int, int]:
        """The budget of each part that draws."""
        if not self.sampled:
            return dict.fromkeys(self.places, self.budget)
        count = len(self.places)
        return {part: (self.budget + k) // count for k, part in enumerate(sorted(self.places, reverse=True))}


class MergedDrafter:
    """Drafts with all of its parts."""

    kind = "merged"

    def __init__(self, parts: Sequence[Drafter]) -> None:
        """Raises FailedPrecondition TOKENIZER_MISMATCH if the parts' tokens differ, and InvalidArgument CONFIG if they
        ask for different features.
        """
        self._parts = parts
        self._latest = len(parts) - 1  # the part that has worked last
        self.model = "+".join(part.model or part.kind for part in parts)
        known = sorted((p.vocabulary for p in parts if p.vocabulary is not None), key=lambda v: v.vocab_size)
        for smaller, larger in pairwise(known):
            check(smaller, larger.fingerprint())
            check(larger, smaller.fingerprint())
        self.vocabulary: Vocabulary | None = known[0] if known else None
        self.rules: tuple[Rule, ...] = tuple({rule: None for part in parts for rule in part.rules})
        asked = list(dict.fromkeys(part.features for part in parts if part.features))
        if len(asked) > 1:
            message = f"parts that work on different features of the target cannot be merged: {asked[0]}, {asked[1]}"
            raise InvalidArgument("CONFIG", message, field="parts")
        self.features: FeatureRequest | None = asked[0] if asked else None
        self._sessions: dict[Key, _Session] = {}

    def open(self, key: Key, start: SessionStart) -> None:
        session = _Session(start, len(start.tokens), start.epoch, start.budget, TokenTree.root(start.tokens[-1]), {})
        able = [k for k, part in enumerate(self._parts) if not session.sampled or start.rule in part.rules]
        session.places = {k: {} for k in able}
        self._sessions[key] = session
        for k, budget in session.shares().items():
            self._parts[k].open(key, replace(start, budget=budget))
        session.drawing = {k for k, budget in session.shares().items() if budget}

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        session.length, session.epoch, session.budget = committed.length, committed.epoch, committed.budget
        for k, budget in session.shares().items():
            self._parts[k].commit(key, replace(committed, budget=budget))
        session.drawing = {k for k, budget in session.shares().items() if budget}
        if session.sampled:
            recent = session.numbering.next_id - REMEMBERED_IDS
            for k, ids in session.places.items():
                session.places[k] = {theirs: own for theirs, own in ids.items() if own >= recent}
        else:
            self._follow(session, committed.tokens)

    def _follow(self, session: _Session, tokens: Sequence[int]) -> None:
        walked = tt.walk(session.tree, tokens)
        if len(walked) < len(tokens):
            session.tree = TokenTree.root(tokens[-1])
            session.places = {k: {} for k in session.places}
            session.numbering.restart(None)
            return
        session.tree, index = tt.reroot(session.tree, walked[-1])
        for ids in session.places.values():
            moved = {i: int(index[node]) for i, node in ids.items()}
            ids.clear()
            ids.update((i, node) for i, node in moved.items() if node > 0)
        session.numbering.restart(index)

    def feed(self, key: Key, first: int, features: Features) -> None:
        session = self._sessions.get(key)
        for k in session.places if session else ():
            if self._parts[k].features:
                self._parts[k].feed(key, first, features)

    def close(self, key: Key) -> None:
        if self._sessions.pop(key, None):
            for part in self._parts:
                part.close(key)

    def wants_work(self) -> bool:
        return any(part.wants_work() for part in self._parts)

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        """Work of one part: one that is waited for, if there is any; each in its turn."""
        waited = {k for session in self._sessions.values() for k in session.drawing}
        able = [k for k, part in enumerate(self._parts) if part.wants_work()]
        if not able:
            return []
        able.sort(key=lambda k: (k not in waited, (k - self._latest - 1) % len(self._parts)))
        k = self._latest = able[0]
        return [out for key, growth in self._parts[k].work() for out in self._take(key, k, growth)]

    def _take(self, key: Key, part: int, growth: SessionGrowth) -> list[tuple[Key, SessionGrowth]]:
        session = self._sessions[key]
        if growth.complete:
            session.drawing.discard(part)
        if session.sampled:
            return [(key, self._pass_on(session, part, growth))]
        self._insert(session, part, growth)
        if session.drawing:
            return []
        nodes = tt.best(session.tree, min(session.budget, session.start.max_nodes)).tolist()
        return [(key, session.numbering.growth(session.tree, nodes, session.epoch, key[1], complete=True))]

    def _insert(self, session: _Session, part: int, growth: SessionGrowth) -> None:
        ids, first = session.places[part], growth.first_id
        parents = [
            0 if p == 0 else -2 - (p - first) if p >= first else ids.get(p, GONE) for p in growth.parent.tolist()
        ]
        tokens, scores = growth.token.tolist(), growth.score.tolist()
        session.tree, index = tt.insert(session.tree, parents, tokens, scores, MOST_NODES)
        ids.update((first + j, node) for j, node in enumerate(index.tolist()) if node != GONE)
        session.numbering.extend(session.tree)

    def _pass_on(self, session: _Session, part: int, growth: SessionGrowth) -> SessionGrowth:
        """The part's nodes under ids of ours."""
        ids, first = session.places[part], session.numbering.next_id
        session.numbering.next_id += len(growth.token)
        ids.update((growth.first_id + j, first + j) for j in range(len(growth.token)))
        ids[0] = 0
        return replace(
            growth,
            first_id=first,
            parent=np.array([ids[p] for p in growth.parent.tolist()], np.int64),
            drawn={ids[p]: q for p, q in growth.drawn.items()},
            complete=not session.drawing,
        )
