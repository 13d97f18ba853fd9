"""Medusa heads (arXiv:2401.10774): each guesses one place, all of them from the newest feature of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from draft_service.drafter import SessionStart
from draft_service.drafters.places import PlacesDrafter, PlacesSession
from draftwood.config import DraftSettings
from draftwood.features import FeatureRequest, Features
from draftwood.runtime.head_runtime import MedusaRuntime, as_tensor
from draftwood.vocabulary import Vocabulary


@dataclass(eq=False)
class MedusaSession(PlacesSession):
    newest: int = -1  # position of the newest feature
    feature: Features | None = None  # [1, layers, hidden_size]


class MedusaDrafter(PlacesDrafter[MedusaSession]):
    """Drafts with ``MedusaHeads``; a head a level."""

    kind = "medusa"

    def __init__(
        self,
        runtime: MedusaRuntime,
        settings: DraftSettings,
        model: str,
        vocabulary: Vocabulary,
        features: FeatureRequest,
    ) -> None:
        """See ``PlacesDrafter``."""
        super().__init__(runtime, runtime.heads, settings, model, vocabulary, features)
        self._runtime = runtime

    def _begin(self, start: SessionStart) -> MedusaSession:
        return MedusaSession(start, list(start.tokens), start.epoch, start.budget)

    def _keep(self, session: MedusaSession, first: int, features: Features) -> None:
        if first + len(features) - 1 > session.newest:
            session.newest, session.feature = first + len(features) - 1, features[-1:]

    def _ready(self, session: MedusaSession) -> bool:
        """The feature before the anchor; a text of one token has none, and no guess."""
        return session.newest == len(session.tokens) - 2

    def _guess(self, sessions: Sequence[MedusaSession]) -> dict[MedusaSession, Tensor]:
        known = {s: s.feature for s in sessions if s.feature is not None}
        out = {s: Tensor() for s in sessions}
        if known:
            features = as_tensor(np.concatenate(list(known.values())), self._runtime.device, self._runtime.dtype)
            out.update(zip(known, self._runtime.forward(features, self._depth), strict=True))
        return out
