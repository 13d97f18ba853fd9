"""What drafters without weights share: sessions with one tree a round, drawn by looking the text up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from draft_service.drafter import Key, Numbering, RoundSession, SessionCommitted, SessionStart
from draftwood import tree as tt
from draftwood.config import DraftSettings
from draftwood.features import FeatureRequest, Features
from draftwood.parameters import Rule
from draftwood.tree import TokenTree
from draftwood.vocabulary import Vocabulary
from draftwood.wire import SessionGrowth

PRIOR_TRIALS = 4.0


class Trust:
    """How often a guess was right, by the number of tokens that matched; learnt from all sessions' commits."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self._trials = dict.fromkeys(lengths, PRIOR_TRIALS)
        self._hits = {n: PRIOR_TRIALS * (1 - 0.6**n) for n in self._trials}  # what is believed before anything is seen

    def learn(self, length: int, hit: bool) -> None:
        self._trials[length] += 1
        self._hits[length] += hit

    def of(self, length: int) -> float:
        return self._hits[length] / self._trials[length]


@dataclass(eq=False)
class LookupSession(RoundSession):
    """One session's text, and what is wanted for it."""

    numbering: Numbering = field(default_factory=Numbering)


S = TypeVar("S", bound=LookupSession)


class LookupDrafter(ABC, Generic[S]):
    """A drafter without weights; a subclass says how a session's tree is drawn and what is learnt from a commit."""

    model = ""
    vocabulary: Vocabulary | None = None
    rules: tuple[Rule, ...] = ()
    features: FeatureRequest | None = None

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._sessions: dict[Key, S] = {}

    @abstractmethod
    def _begin(self, start: SessionStart) -> S:
        """The state of a new session."""

    @abstractmethod
    def _draw(self, session: S) -> TokenTree:
        """A tree below the last token, not deeper than ``session.room`` and the settings' depth."""

    @abstractmethod
    def _learn(self, session: S, tokens: Sequence[int]) -> None:
        """Compares the last tree with the tokens that the text went on with; they are added to the text after this."""

    def _end(self, session: S) -> None:
        """Takes leave of a session."""

    def open(self, key: Key, start: SessionStart) -> None:
        self._sessions[key] = self._begin(start)

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        committed.check_follows(len(session.tokens))
        self._learn(session, committed.tokens)
        session.follow(committed)
        session.numbering.restart(None)

    def feed(self, key: Key, first: int, features: Features) -> None:
        """See ``Drafter``."""
        raise AssertionError("no features have been asked for")

    def close(self, key: Key) -> None:
        session = self._sessions.pop(key, None)
        if session:
            self._end(session)

    def wants_work(self) -> bool:
        return any(s.due and s.budget for s in self._sessions.values())

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        out = []
        for key, session in self._sessions.items():
            if session.due and session.budget:
                session.due = False
                tree = self._draw(session) if session.room > 0 else TokenTree.root(session.tokens[-1])
                session.numbering.extend(tree)
                nodes = tt.best(tree, min(session.budget, session.start.max_nodes)).tolist()
                out.append((key, session.numbering.growth(tree, nodes, session.epoch, key[1], complete=True)))
        return out
