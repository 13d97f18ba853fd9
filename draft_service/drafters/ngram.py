"""N-gram lookup: guesses that the text goes on as it did after the same words before. No weights.

The continuation of the longest earlier match is proposed, with those of other matches as branches (the idea of LLMA,
arXiv:2304.04487, on a tree). How far a match of a given length can be trusted is learnt from the commits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafter import SessionStart
from draft_service.drafters.lookup import LookupDrafter, LookupSession, Trust
from draftwood import tree as tt
from draftwood.config import DraftSettings
from draftwood.tree import TokenTree

MOST_BRANCHES = 3
DECAY = 0.9
"""Trust in each further token of a continuation, relative to the one before."""


@dataclass
class _Session(LookupSession):
    seen: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> positions behind it, oldest first
    indexed: int = 0
    guess: tuple[int, int] | None = None  # (match length, token) of the last first guess


class NgramDrafter(LookupDrafter[_Session]):
    """A drafter without weights."""

    kind = "ngram"

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__(settings)
        self._trust = Trust(range(settings.ngram_min, settings.ngram_max + 1))

    def _begin(self, start: SessionStart) -> _Session:
        return _Session(start, list(start.tokens), start.epoch, start.budget)

    def _learn(self, session: _Session, tokens: Sequence[int]) -> None:
        if session.guess and tokens:
            length, token = session.guess
            self._trust.learn(length, token == tokens[0])

    def _draw(self, session: _Session) -> TokenTree:
        self._index(session)
        tree, session.guess = TokenTree.root(session.tokens[-1]), None
        depth = min(self._settings.depth, session.room)
        for length in range(self._settings.ngram_max, self._settings.ngram_min - 1, -1):
            places = session.seen.get(tuple(session.tokens[-length:]), []) if len(session.tokens) > length else []
            for place in reversed(places[-MOST_BRANCHES:]):
                tree = self._add_run(session, tree, session.tokens[place : place + depth], length)
            if tree.size > 1:
                break
        return tree

    def _add_run(self, session: _Session, tree: TokenTree, run: list[int], length: int) -> TokenTree:
        session.guess = session.guess or (length, run[0])
        trust = self._trust.of(length)
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
