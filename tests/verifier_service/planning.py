"""What the planner's tests share: sessions without a model, and steps without a forward."""

from __future__ import annotations

import numpy as np

from draftwood.acceptance import Ending
from draftwood.config import VerifierSettings
from draftwood.parameters import SamplingParams
from verifier_service.calibration import Calibration
from verifier_service.live_tree import Nodes
from verifier_service.plan import Part, Planner
from verifier_service.session import AttachedDraft, GenerateRequest, Session
from verifier_service.width import StepTimes

LINK = 1


def make_planner(times: StepTimes, **settings: object) -> Planner:
    return Planner(VerifierSettings(**settings), times)  # type: ignore[arg-type]


def make_session(name: str, prompt: int, **more: object) -> Session:
    ending = Ending(frozenset(), 1000)
    request = GenerateRequest(name, b"t", (7,) * prompt, (), SamplingParams(), ending, 64, **more)  # type: ignore[arg-type]
    session = Session(request, 0.0, 512)
    session.pages, session.node_room = [0], 512
    return session


def prefilling(name: str, prompt: int) -> Session:
    return make_session(name, prompt)


def decoding(name: str, nodes: int = 0, *, awaits_drafts: bool = False, **more: object) -> Session:
    """A session behind its prefill whose draft has sent a chain of ``nodes`` nodes, or is still at it."""
    session = make_session(name, 4, **more)
    session.cached = 3
    session.budget = 16
    session.drafts[LINK] = AttachedDraft(1, complete_epoch=-1 if awaits_drafts else 0)
    session.tree.attach(LINK, Calibration())
    if nodes:
        parent = np.arange(nodes)
        session.tree.grow(LINK, Nodes(0, 1, parent, np.full(nodes, 3, np.int32), np.full(nodes, -0.1, np.float32)))
    return session


def step(planner: Planner, sessions: list[Session], now: float = 0.0) -> list[Part]:
    """One step that accepts nothing: prefill advances, decoding sessions stay where they are."""
    parts = planner.plan(now, sessions, lambda _: 0.0)
    for part in parts:
        if not part.decodes:
            part.session.cached = min(part.session.cached + len(part.rows.token), len(part.session.tokens) - 1)
    return parts
