"""A block drafter: one forward fills all places of a block, as block diffusion drafters do (DFlash, arXiv:2602.06036).

The model is an ``EagleHead`` that was trained on blocks. Rows of the text are as EAGLE's. Behind the anchor's come mask
rows, one for each further place: the mask token's embedding beside the newest feature. They see the whole text and each
other, in both directions. The anchor's row guesses the first place, mask row k the place k behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draft_service.drafter import Key, SessionStart
from draft_service.drafters.eagle import KnownFeatures
from draft_service.drafters.places import PlacesDrafter, PlacesSession
from draftwood.config import DraftSettings
from draftwood.errors import ResourceExhausted
from draftwood.features import FeatureRequest, Features
from draftwood.runtime.head_runtime import Block, FeatureRows, HeadRuntime
from draftwood.vocabulary import Vocabulary


@dataclass(eq=False)
class BlockSession(PlacesSession):
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # rows of the text in the cache; that of token i + 1 is at i
    known: KnownFeatures = field(default_factory=KnownFeatures)

    @property
    def pending(self) -> int:
        """Rows of the text that are not in the cache."""
        return len(self.tokens) - 1 - self.cached


class BlockDrafter(PlacesDrafter[BlockSession]):
    """Drafts with an ``EagleHead`` that fills blocks."""

    kind = "block"

    def __init__(
        self,
        runtime: HeadRuntime,
        block: Block,
        settings: DraftSettings,
        model: str,
        vocabulary: Vocabulary,
        features: FeatureRequest,
    ) -> None:
        """See ``PlacesDrafter``."""
        super().__init__(runtime, block.size, settings, model, vocabulary, features)
        self._runtime, self._block = runtime, block

    def _begin(self, start: SessionStart) -> BlockSession:
        return BlockSession(start, list(start.tokens), start.epoch, start.budget)

    def close(self, key: Key) -> None:
        session = self._sessions.get(key)
        if session:
            self._runtime.pool.give(session.pages)
        super().close(key)

    def _keep(self, session: BlockSession, first: int, features: Features) -> None:
        session.known.add(first, features)

    def _ready(self, session: BlockSession) -> bool:
        return not session.pending or session.known.end > session.cached

    def _guess(self, sessions: Sequence[BlockSession]) -> dict[BlockSession, Tensor]:
        out: dict[BlockSession, Tensor] = {}
        parts, jobs, left = [], [], self._settings.max_step_tokens
        for session in sessions:
            if not session.pending or not self._has_room(session):  # a text of one token, or one that is too long
                out[session] = Tensor()
            elif left > 0:
                parts.append(self._rows(session, left))
                jobs.append(session)
                left -= len(parts[-1].token)
        if parts:
            logits = torch.split(self._runtime.forward(parts), [len(p.token) - p.logits_from for p in parts])
            out.update((s, rows) for s, rows in zip(jobs, logits, strict=True) if not s.pending)
        return out

    def _has_room(self, session: BlockSession) -> bool:
        """True if context and cache have room for the text and a block."""
        need = len(session.tokens) + self._depth
        if need > self._runtime.max_context_tokens:
            return False
        try:
            if (more := need - len(session.pages) * self._runtime.pool.page_tokens) > 0:
                session.pages += self._runtime.pool.take(more)
        except ResourceExhausted:
            return False
        return True

    def _rows(self, session: BlockSession, most: int) -> FeatureRows:
        """The next rows of the text, and the mask rows if these are the last."""
        first, count = session.cached, min(most, session.pending, session.known.end - session.cached)
        states = self._runtime.fuse(session.known.take(count))
        token = session.tokens[first + 1 : first + 1 + count]
        session.cached += count
        masks = 0 if session.pending else self._depth - 1
        visible = np.tri(count + masks, dtype=np.bool_)
        visible[count:] = True
        return FeatureRows(
            session.pages,
            first,
            np.array(token + [self._block.mask_token] * masks, np.int32),
            np.arange(first, first + count + masks, dtype=np.int32),
            visible,
            count if session.pending else count - 1,
            states=torch.cat([states, states[-1:].expand(masks, -1)]),
        )
