"""What drafters share that guess several places at once, none of them knowing what is guessed for the others.

A round is one forward, and the tree is made of what is likely at each depth, whatever the path: in the shape that the
settings name (Medusa's Cartesian products are `kary`, its sparse choice lists `choices`), or, under all other
topologies, the likeliest paths by the drafter's own probabilities, which is the best tree of that many nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from draft_service.drafter import Key, RedrawnNumbering, RoundSession, SessionCommitted, SessionStart
from draftwood import tree as tt
from draftwood.config import DraftSettings
from draftwood.features import FeatureRequest, Features
from draftwood.noise import GumbelCache
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.reduced import ReducedVocabulary
from draftwood.sampling import draft_children
from draftwood.topology import likeliest
from draftwood.tree import TokenTree
from draftwood.vocabulary import Vocabulary
from draftwood.wire import SessionGrowth


class PlacesRuntime(Protocol):
    """What the tree needs to know of the model."""

    device: torch.device
    reduced: ReducedVocabulary | None


@dataclass(eq=False)
class PlacesSession(RoundSession):
    """One session's text, and whether a round is due."""

    numbering: RedrawnNumbering = field(default_factory=RedrawnNumbering)

    @property
    def rule(self) -> SamplingParams:
        """What tokens are drawn by: the noise helps where the target's choice has it."""
        noise = self.start.rule is Rule.SHARED_NOISE and not self.start.sampling.greedy
        return self.start.sampling if noise else SamplingParams()


S = TypeVar("S", bound=PlacesSession)


class PlacesDrafter(ABC, Generic[S]):
    """A subclass says what a session keeps of the features, and guesses."""

    kind: str
    rules: tuple[Rule, ...] = ()

    def __init__(
        self,
        runtime: PlacesRuntime,
        places: int,
        settings: DraftSettings,
        model: str,
        vocabulary: Vocabulary,
        features: FeatureRequest,
    ) -> None:
        """``places`` can be guessed at once; ``features`` are those that the model works on."""
        self.model = model
        self.vocabulary: Vocabulary | None = vocabulary
        self.features: FeatureRequest | None = features
        self._settings = settings
        self._shape = settings.shape()
        self._depth = min(places, settings.depth)
        self._width = settings.branch if self._shape is None else int(self._shape.token.max()) + 1
        self._token_count = len(vocabulary.tokens)
        self._reduced = runtime.reduced
        size = self._own_size(self._token_count)
        kept = torch.from_numpy(self._reduced.target_ids[:size]) if self._reduced else None
        self._noise = GumbelCache(self._token_count, runtime.device, 128, tokens=kept)
        self._sessions: dict[Key, S] = {}

    @abstractmethod
    def _begin(self, start: SessionStart) -> S:
        """The state of a new session."""

    @abstractmethod
    def _keep(self, session: S, first: int, features: Features) -> None:
        """Keeps of the positions from ``first`` on what the session needs."""

    @abstractmethod
    def _ready(self, session: S) -> bool:
        """Whether the features are known that the next forward for a due session needs."""

    @abstractmethod
    def _guess(self, sessions: Sequence[S]) -> dict[S, Tensor]:
        """One forward; of the sessions whose round it completes the logits, [places, tokens], no places: no guess."""

    def open(self, key: Key, start: SessionStart) -> None:
        self._sessions[key] = self._begin(start)

    def feed(self, key: Key, first: int, features: Features) -> None:
        session = self._sessions.get(key)
        if session is not None:
            self._keep(session, first, features)

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        committed.check_follows(len(session.tokens))
        session.numbering.follow(committed.tokens)
        session.follow(committed)

    def close(self, key: Key) -> None:
        self._sessions.pop(key, None)

    def wants_work(self) -> bool:
        return any(map(self._wanted, self._sessions.values()))

    def _wanted(self, session: S) -> bool:
        return bool(session.due and session.budget and (session.room <= 0 or self._ready(session)))

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        """One forward for all sessions that are ready, and the rounds that it completes."""
        wanted = {key: session for key, session in self._sessions.items() if self._wanted(session)}
        full = [s for s in wanted.values() if s.room <= 0]
        guessing = [s for s in wanted.values() if s.room > 0]
        trees = dict.fromkeys(full, None) | (self._trees(self._guess(guessing)) if guessing else {})
        out = []
        for key, session in wanted.items():
            if session in trees:
                session.due = False
                tree = trees[session] or TokenTree.root(session.tokens[-1])
                session.numbering.extend(tree)
                nodes = range(tree.size)
                growth = session.numbering.growth(tree, nodes, session.epoch, key[1], complete=True)
                out.append((key, growth))
        return out

    def _trees(self, logits: dict[S, Tensor]) -> dict[S, TokenTree | None]:
        groups: dict[tuple[SamplingParams, int], list[S]] = {}
        trees: dict[S, TokenTree | None] = {session: None for session, rows in logits.items() if not len(rows)}
        for session in (s for s in logits if s not in trees):
            groups.setdefault((session.rule, self._own_size(session.start.vocab_size)), []).append(session)
        for (rule, size), members in groups.items():
            rows = torch.cat([logits[s][: self._depth] for s in members])
            positions = [len(s.tokens) + depth for s in members for depth in range(len(logits[s][: self._depth]))]
            found = draft_children(rows, rule, positions, self._noise, self._width, vocab_size=size)
            token, score = (column.cpu().numpy() for column in found)
            token = self._reduced.to_target(token) if self._reduced else token
            ends = np.cumsum([len(logits[s][: self._depth]) for s in members])[:-1]
            for session, tokens, scores in zip(members, np.split(token, ends), np.split(score, ends), strict=True):
                trees[session] = self._tree(session, tokens, scores)
        return trees

    def _own_size(self, target_size: int) -> int:
        """Columns of the model's output that are tokens below both the target's size and our tokenizer's."""
        size = min(self._token_count, target_size)
        return self._reduced.count_below(size) if self._reduced else size

    def _tree(self, session: S, token: np.ndarray, score: np.ndarray) -> TokenTree:
        """The tree of tokens, -1 where there is none, and scores by depth and rank, [places, width] each."""
        budget, depth = min(session.budget, session.start.max_nodes), min(session.room, len(token))
        chance = np.where(token >= 0, score, -np.inf).astype(np.float64)
        shape = likeliest(chance[:depth], budget) if self._shape is None else self._shape
        if session.drawing.chain:
            shape = likeliest(chance[:depth, :1], budget)
        within = (tt.depths(shape) <= depth) & (np.arange(shape.size) <= budget)
        shape = tt.select(shape, np.nonzero(within)[0])
        at, rank = tt.depths(shape)[1:] - 1, shape.token[1:]
        tokens = np.concatenate([[session.tokens[-1]], token[at, rank]]).astype(np.int32)
        tree = TokenTree(shape.parent, tokens, np.concatenate([[0.0], chance[at, rank]]).astype(np.float32))
        return tt.select(tree, np.nonzero(np.isfinite(tt.log_survival(tree)))[0])
