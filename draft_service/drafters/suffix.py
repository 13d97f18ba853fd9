"""Suffix lookup: guesses that the text goes on as any text did that was written here. No weights.

A session's own text is looked up as it grows, and the texts of sessions that have ended, prompts included, in one index
that forgets the oldest (``suffix_tokens``). The continuations of the longest matches are a tree whose edges carry their
shares among them (SuffixDecoding, arXiv:2411.04975). How often one of them is right is learnt from the commits, by the
number of tokens that match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafter import SessionStart
from draft_service.drafters.lookup import LookupDrafter, LookupSession, Trust
from draft_service.suffix_index import SEPARATOR, SuffixIndex
from draftwood import tree as tt
from draftwood.config import DraftSettings
from draftwood.tree import TokenTree

MOST_MATCHES = 32
LEAST_PROBABILITY = 1e-3


@dataclass
class _Session(LookupSession):
    index: SuffixIndex = field(kw_only=True)  # its own text
    matched: int = 0  # tokens that matched when the tree was drawn
    tree: TokenTree | None = None


class SuffixDrafter(LookupDrafter[_Session]):
    """A drafter without weights that learns from all that is written."""

    kind = "suffix"

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__(settings)
        self._ended = SuffixIndex(settings.suffix_tokens, settings.suffix_min) if settings.suffix_tokens else None
        self._trust = Trust(range(settings.suffix_min, settings.suffix_max + 1))

    def _begin(self, start: SessionStart) -> _Session:
        index = SuffixIndex(start.max_context_tokens, self._settings.suffix_min)
        index.add(start.tokens)
        return _Session(start, list(start.tokens), start.epoch, start.budget, index=index)

    def _end(self, session: _Session) -> None:
        if self._ended:
            self._ended.add([*session.tokens, SEPARATOR])

    def _learn(self, session: _Session, tokens: Sequence[int]) -> None:
        session.index.add(tokens)
        if session.tree is None:
            return
        walked = [0, *tt.walk(session.tree, tokens)]
        for depth, (node, _) in enumerate(zip(walked, tokens, strict=False)):
            if (session.tree.parent == node).any():
                self._trust.learn(self._reached(session, depth), hit=depth + 1 < len(walked))
        session.tree = None

    def _reached(self, session: _Session, depth: int) -> int:
        """Tokens that match at a node, those on its path included."""
        return min(session.matched + depth, self._settings.suffix_max)

    def _draw(self, session: _Session) -> TokenTree:
        context = session.tokens[-self._settings.suffix_max :]
        found = [
            (length, index, at)
            for index in (session.index, self._ended)
            if index is not None
            for at, length in index.matches(context, MOST_MATCHES)
        ]
        session.matched = max((length for length, *_ in found), default=0)
        depth = min(self._settings.depth, session.room)
        runs = [index.read(at, depth).tolist() for length, index, at in found if length == session.matched]
        session.tree = self._grow(session, runs)
        return session.tree

    def _grow(self, session: _Session, runs: list[list[int]]) -> TokenTree:
        """The trie of the runs; a child's probability is its share of the runs that reach its parent, times trust."""
        parent, token, score = [-1], [session.tokens[-1]], [0.0]
        level = [(0, runs)]
        for depth in range(max(map(len, runs), default=0)):
            trust, below = self._trust.of(self._reached(session, depth)), []
            for node, through in level:
                for child, onward in _by_first(through).items():
                    below.append((len(parent), onward))
                    parent.append(node)
                    token.append(child)
                    score.append(math.log(max(LEAST_PROBABILITY, trust * len(onward) / len(through))))
            level = below
        return TokenTree.of(parent, token, score)


def _by_first(runs: list[list[int]]) -> dict[int, list[list[int]]]:
    """Runs by their first token, which is cut off; those that end here or at the end of a text are left out."""
    groups: dict[int, list[list[int]]] = {}
    for run in runs:
        if run and run[0] != SEPARATOR:
            groups.setdefault(run[0], []).append(run[1:])
    return groups
