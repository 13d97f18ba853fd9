"""A head that drafts on the target's features: EAGLE (arXiv:2401.15077, 2406.16858), EAGLE-3 (arXiv:2503.01840) and MTP
modules. ``draftwood.runtime.heads`` says what a row takes and gives.

Levels and trees are those of ``LevelDrafter``. A row is a token's and takes the feature of the position before it,
so token 0 has none, and the text can be read as far as its features are known. Below the anchor a row takes what its
parent's row handed down in place of a feature. As the true features come with the commit, what was drawn from guessed
ones is not kept: each round is drawn anew, and a node that the verifier has already goes by the id that it has there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from draft_service.drafter import Key, RedrawnNumbering, SessionStart
from draft_service.drafters.levels import Forwarded, LevelDrafter, LevelSession, catch_up_rows, level_rows, wanted_nodes
from draftwood.config import DraftSettings
from draftwood.features import FeatureRequest, Features
from draftwood.runtime.batch import Rows
from draftwood.runtime.head_runtime import FeatureRows, HeadRuntime
from draftwood.vocabulary import Vocabulary


class KnownFeatures:
    """A session's features, until they are taken; they may come in any order."""

    def __init__(self) -> None:
        self._whole: deque[Features] = deque()  # not taken, without a gap
        self._ahead: dict[int, Features] = {}  # by first position, behind a gap
        self.end = 0  # position behind those known without a gap

    def add(self, first: int, features: Features) -> None:
        """Raises ValueError for positions that are known already."""
        if first < self.end:
            raise ValueError(f"features of position {first} come again; those before {self.end} are known")
        self._ahead[first] = features
        while (found := self._ahead.pop(self.end, None)) is not None:
            self._whole.append(found)
            self.end += len(found)

    def take(self, count: int) -> Features:
        """The next ``count`` positions."""
        pieces: list[Features] = []
        while count and self._whole:
            piece = self._whole.popleft()
            pieces.append(piece[:count])
            if len(piece) > count:
                self._whole.appendleft(piece[count:])
            count -= len(pieces[-1])
        return np.concatenate(pieces)


@dataclass(eq=False)
class EagleSession(LevelSession):
    known: KnownFeatures = field(default_factory=KnownFeatures)
    handed: dict[int, Tensor] = field(default_factory=dict)  # by expanded node: what its row hands down, [hidden]
    numbering: RedrawnNumbering = field(default_factory=RedrawnNumbering)

    @property
    def readable(self) -> int:
        """Pending rows whose features are known."""
        return min(self.pending, self.known.end - self.cached)


class EagleDrafter(LevelDrafter):
    """Drafts with an ``EagleHead``, of which an MTP module is one."""

    def __init__(
        self,
        runtime: HeadRuntime,
        settings: DraftSettings,
        model: str,
        vocabulary: Vocabulary,
        features: FeatureRequest,
    ) -> None:
        """``features`` are those that the head works on."""
        super().__init__(runtime, settings, model, vocabulary)
        self.kind = settings.kind
        self._head = runtime
        self.features = features

    # --- sessions ---

    def _begin(self, start: SessionStart) -> EagleSession:
        return EagleSession(start, list(start.tokens[1:]), start.epoch, start.budget, skipped=1)

    def feed(self, key: Key, first: int, features: Features) -> None:
        session = self._sessions.get(key)
        if session is not None and not session.outgrown:
            cast(EagleSession, session).known.add(first, features)

    def _note_room(self, session: LevelSession) -> None:
        super()._note_room(session)
        if session.outgrown:  # no row will take them
            cast(EagleSession, session).known = KnownFeatures()

    def _prime(self, session: LevelSession) -> None:
        assert self.features is not None and isinstance(session, EagleSession)
        count = len(session.tokens) - session.known.end
        shape = (count, len(self.features.layers), self.features.hidden_size)
        session.known.add(session.known.end, np.zeros(shape, np.uint16))

    def _follow(self, session: LevelSession, tokens: tuple[int, ...]) -> None:
        assert isinstance(session, EagleSession)
        self._observe(session, tokens)
        session.tokens.extend(tokens)
        session.plant_anchor()
        session.numbering.follow(tokens)
        session.handed = {}

    # --- growth ---

    def _busy(self, session: LevelSession) -> bool:
        assert isinstance(session, EagleSession)
        able = session.outgrown or session.readable or not session.pending
        return bool(session.budget and not session.complete and able)

    def _catch_up(self, session: LevelSession, most: int) -> Rows:
        assert isinstance(session, EagleSession)
        count = min(most, session.readable)
        rows = catch_up_rows(session, count)
        return _with_states(rows, self._head.fuse(session.known.take(count)))

    def _level(self, session: LevelSession, nodes: list[int]) -> Rows:
        assert isinstance(session, EagleSession)
        states = torch.stack([session.handed[p] for p in session.tree.parent[nodes].tolist()])
        return _with_states(level_rows(session, nodes), states)

    def _forward(self, jobs: list[LevelSession], parts: list[Rows]) -> Forwarded:
        logits = self._head.forward(parts)
        wanted = [(s, node) for s, part in zip(jobs, parts, strict=True) for node in wanted_nodes(s, part)]
        for (session, node), handed in zip(wanted, self._head.handed, strict=True):
            cast(EagleSession, session).handed[node] = handed
        return Forwarded(logits)


def _with_states(rows: Rows, states: Tensor) -> FeatureRows:
    return FeatureRows(
        rows.pages, rows.context, rows.token, rows.tail_position, rows.visible, rows.logits_from, states=states
    )
