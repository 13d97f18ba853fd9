"""Medusa heads (arXiv:2401.10774): each guesses one place, all of them from the newest feature of the target.

So a round is one product a head, and the tree is made of what each head holds likely at its depth, whatever the path:
in the shape that the settings name (Medusa's Cartesian products are `kary`, its sparse choice lists `choices`), or,
under all other topologies, the likeliest paths by the heads' own probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from draft_service.drafter import Key, RedrawnNumbering, SessionCommitted, SessionStart
from draftwood import tree as tt
from draftwood.config import DraftSettings
from draftwood.features import FeatureRequest, Features
from draftwood.noise import GumbelCache
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.head_runtime import MedusaRuntime, as_tensor
from draftwood.sampling import draft_children
from draftwood.topology import likeliest
from draftwood.tree import TokenTree
from draftwood.vocabulary import Vocabulary
from draftwood.wire import SessionGrowth


@dataclass(eq=False)
class _Session:
    start: SessionStart
    length: int  # tokens committed
    anchor: int  # the last of them
    epoch: int
    budget: int
    newest: int = -1  # position of the newest feature
    feature: Features | None = None  # [1, layers, hidden_size]
    numbering: RedrawnNumbering = field(default_factory=RedrawnNumbering)
    due: bool = True

    @property
    def room(self) -> int:
        """Depth that a tree may have."""
        return min(self.start.max_depth, self.budget, self.start.max_context_tokens - self.length)

    @property
    def ready(self) -> bool:
        """Whether a round is wanted, and the feature before the anchor known; a text of one token has none."""
        return bool(self.due and self.budget and self.newest == self.length - 2)


class MedusaDrafter:
    """Drafts with ``MedusaHeads``; a level a head."""

    kind = "medusa"
    rules: tuple[Rule, ...] = ()

    def __init__(
        self,
        runtime: MedusaRuntime,
        settings: DraftSettings,
        model: str,
        vocabulary: Vocabulary,
        features: FeatureRequest,
    ) -> None:
        """``features`` are those that the heads work on."""
        self.model = model
        self.vocabulary: Vocabulary | None = vocabulary
        self.features: FeatureRequest | None = features
        self._runtime = runtime
        self._shape = settings.shape()
        self._depth = min(runtime.heads, settings.depth)
        self._width = settings.branch if self._shape is None else int(self._shape.token.max()) + 1
        self._token_count = len(vocabulary.tokens)
        self._noise = GumbelCache(self._token_count, runtime.device, 128)
        self._sessions: dict[Key, _Session] = {}

    def open(self, key: Key, start: SessionStart) -> None:
        self._sessions[key] = _Session(start, len(start.tokens), start.tokens[-1], start.epoch, start.budget)

    def feed(self, key: Key, first: int, features: Features) -> None:
        session = self._sessions.get(key)
        if session and first + len(features) - 1 > session.newest:
            session.newest, session.feature = first + len(features) - 1, features[-1:]

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        committed.check_follows(session.length)
        session.numbering.follow(committed.tokens)
        session.length, session.anchor = committed.length, committed.tokens[-1]
        session.epoch, session.budget, session.due = committed.epoch, committed.budget, True

    def close(self, key: Key) -> None:
        self._sessions.pop(key, None)

    def wants_work(self) -> bool:
        return any(session.ready for session in self._sessions.values())

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        """The rounds of all sessions that are ready."""
        ready = {key: session for key, session in self._sessions.items() if session.ready}
        drawn = self._draw([s for s in ready.values() if s.feature is not None and s.room > 0])
        out = []
        for key, session in ready.items():
            session.due = False
            tree = drawn.get(session, TokenTree.root(session.anchor))
            session.numbering.extend(tree)
            nodes = range(tree.size)
            out.append((key, session.numbering.growth(tree, nodes, session.epoch, key[1], complete=True)))
        return out

    def _draw(self, sessions: list[_Session]) -> dict[_Session, TokenTree]:
        if not sessions:
            return {}
        features = np.concatenate([s.feature for s in sessions if s.feature is not None])
        logits = self._runtime.forward(as_tensor(features, self._runtime.device, self._runtime.dtype), self._depth)
        groups: dict[tuple[SamplingParams, int], list[int]] = {}
        for k, session in enumerate(sessions):
            noise = session.start.rule is Rule.SHARED_NOISE and not session.start.sampling.greedy
            rule = session.start.sampling if noise else SamplingParams()
            groups.setdefault((rule, min(self._token_count, session.start.vocab_size)), []).append(k)
        out = {}
        for (rule, size), members in groups.items():
            guesses = self._children(logits[members], rule, [sessions[k].length for k in members], size)
            for k, token, score in zip(members, *guesses, strict=True):
                out[sessions[k]] = self._tree(sessions[k], token, score)
        return out

    def _children(
        self, logits: Tensor, rule: SamplingParams, lengths: list[int], size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, -1 where there is none, and scores at each depth, [sessions, depth, width] each, of logits
        [sessions, depth, vocab_size]."""
        positions = [length + depth for length in lengths for depth in range(self._depth)]
        found = draft_children(logits.flatten(0, 1), rule, positions, self._noise, self._width, vocab_size=size)
        shape = (len(lengths), self._depth, -1)
        tokens, scores = (column.cpu().numpy().reshape(shape) for column in found)
        return tokens, scores

    def _tree(self, session: _Session, token: np.ndarray, score: np.ndarray) -> TokenTree:
        """The tree of tokens and scores by depth and rank, [depth, width] each."""
        budget, depth = min(session.budget, session.start.max_nodes), min(session.room, self._depth)
        chance = np.where(token >= 0, score, -np.inf).astype(np.float64)
        shape = likeliest(chance[:depth], budget) if self._shape is None else self._shape
        within = (tt.depths(shape) <= depth) & (np.arange(shape.size) <= budget)
        shape = tt.select(shape, np.nonzero(within)[0])
        at, rank = tt.depths(shape)[1:] - 1, shape.token[1:]
        tokens = np.concatenate([[session.anchor], token[at, rank]]).astype(np.int32)
        tree = TokenTree(shape.parent, tokens, np.concatenate([[0.0], chance[at, rank]]).astype(np.float32))
        return tt.select(tree, np.nonzero(np.isfinite(tt.log_survival(tree)))[0])
