"""N-gram lookup: guesses that the text goes on as it did after the same words before. No weights.

The continuation of the longest earlier match is proposed, with those of other matches as branches (the idea of LLMA,
arXiv:2304.04487, on a tree). How far a match of a given length can be trusted is learnt from the commits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from draft_service.drafter import Key, Numbering, SessionCommitted, SessionStart
from draftwood import tree as tt
from draftwood.config import DraftSettings
from draftwood.parameters import Rule
from draftwood.tree import TokenTree
from draftwood.vocabulary import Vocabulary
from draftwood.wire import SessionGrowth

MOST_BRANCHES = 3
DECAY = 0.9
"""Trust in each further token of a continuation, relative to the one before."""


@dataclass
class _Session:
    start: SessionStart
    tokens: list[int]
    epoch: int
    budget: int
    seen: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> positions behind it, oldest first
    indexed: int = 0
    numbering: Numbering = field(default_factory=Numbering)
    guess: tuple[int, int] | None = None  # (match length, token) of the last first guess
    due: bool = True


class NgramDrafter:
    """A drafter without weights."""

    kind = "ngram"
    model = ""
    vocabulary: Vocabulary | None = None
    rules: tuple[Rule, ...] = ()

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._sessions: dict[Key, _Session] = {}
        lengths = range(settings.ngram_min, settings.ngram_max + 1)
        self._trials = dict.fromkeys(lengths, 4.0)
        self._hits = {n: 4.0 * (1 - 0.6**n) for n in lengths}  # what is believed before anything is seen

    def open(self, key: Key, start: SessionStart) -> None:
        self._sessions[key] = _Session(start, list(start.tokens), start.epoch, start.budget)

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        if len(session.tokens) + len(committed.tokens) != committed.length:
            raise ValueError(f"{len(session.tokens)} + {len(committed.tokens)} tokens do not make {committed.length}")
        if session.guess and committed.tokens:
            length, token = session.guess
            self._trials[length] += 1
            self._hits[length] += token == committed.tokens[0]
        session.tokens.extend(committed.tokens)
        session.epoch, session.budget, session.due = committed.epoch, committed.budget, True
        session.numbering.restart(None)

    def close(self, key: Key) -> None:
        self._sessions.pop(key, None)

    def wants_work(self) -> bool:
        return any(s.due and s.budget for s in self._sessions.values())

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        out = []
        for key, session in self._sessions.items():
            if session.due and session.budget:
                session.due = False
                tree = self._draw(session)
                session.numbering.extend(tree.size)
                nodes = tt.best(tree, min(session.budget, session.start.max_nodes)).tolist()
                out.append((key, session.numbering.growth(tree, nodes, session.epoch, key[1], complete=True)))
        return out

    def _draw(self, session: _Session) -> TokenTree:
        self._index(session)
        tree, session.guess = TokenTree.root(session.tokens[-1]), None
        depth = min(self._settings.depth, session.start.max_depth, session.budget)
        for length in range(self._settings.ngram_max, self._settings.ngram_min - 1, -1):
            places = session.seen.get(tuple(session.tokens[-length:]), []) if len(session.tokens) > length else []
            for place in reversed(places[-MOST_BRANCHES:]):
                tree = self._add_run(session, tree, session.tokens[place : place + depth], length)
            if tree.size > 1:
                break
        return tree

    def _add_run(self, session: _Session, tree: TokenTree, run: list[int], length: int) -> TokenTree:
        session.guess = session.guess or (length, run[0])
        trust = self._hits[length] / self._trials[length]
        scores = [math.log(max(1e-3, trust * DECAY**k)) for k in range(len(run))]
        above = [0, *(-2 - k for k in range(len(run) - 1))]
        grown, _ = tt.insert(tree, above, run, scores, capacity=self._settings.max_nodes + 1)
        return grown

    def _index(self, session: _Session) -> None:
        """Notes the n-grams that end before the last token; the last one's continuation is what is asked for."""
        for end in range(max(1, session.indexed), len(session.tokens)):
            for length in range(self._settings.ngram_min, min(self._settings.ngram_max, end) + 1):
                session.seen.setdefault(tuple(session.tokens[end - length : end]), []).append(end)
        session.indexed = len(session.tokens)
