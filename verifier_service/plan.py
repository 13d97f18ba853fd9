"""Which sessions step when, and with which rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood import tree as tt
from draftwood.config import VerifierSettings
from draftwood.runtime.batch import Rows
from draftwood.tree import BoolArray, IndexArray, TokenTree
from verifier_service.session import Session
from verifier_service.width import SpeculationGate, StepTimes, admit

PROBE_STEPS = 32
"""Steps without a node, though there were some to verify, after which one step takes them all to measure it anew."""

BASELINE_STEPS = 24
"""Steps with drafts after which one goes without, to keep the baseline current."""

LOAD_BAND = 1.7
"""The load level stays while the number of sessions is within this factor of what it was."""

LONGEST_STEP_S = 2.0
"""A longer time between two steps was a pause, not a step."""

WaitLimit = Callable[[Session], float]


@dataclass(frozen=True, slots=True)
class Part:
    """One session's rows in a step: pending committed tokens, then the nodes of ``tree`` below the anchor.

    ``kept`` are the indices of the tree's nodes in the session's live tree. A chunk of prefill that does not reach the
    anchor has a tree of the anchor alone and wants no logits. ``wanted`` are the nodes to ask of the drafts next.
    """

    session: Session
    rows: Rows
    tree: TokenTree
    kept: IndexArray
    wanted: int


class Planner:
    """Decides when to step, who is in it, and how wide."""

    def __init__(self, settings: VerifierSettings, times: StepTimes) -> None:
        self._settings = settings
        self.times = times
        self._gates: dict[int, SpeculationGate] = {}  # by load level
        self._load = 1
        self._load_sessions = 1
        self._running = 0
        self._gathering_since: float | None = None
        self._narrow_steps = 0
        self._since_plain = 0

    @property
    def gate(self) -> SpeculationGate:
        """Whether drafts pay at the present load."""
        return self._gates.setdefault(self._load, SpeculationGate())

    @property
    def share(self) -> int:
        """Nodes that one session may have verified in a step."""
        most = self._settings.max_nodes
        return (
            min(most, self._settings.max_step_nodes // max(1, self._running)) if self._settings.max_step_nodes else most
        )

    @property
    def speculating(self) -> bool:
        return self.share > 0 and (self._settings.width == "full" or self.gate.open)

    def due(self, now: float, sessions: Sequence[Session], wait_limit: WaitLimit) -> float | None:
        """Clock time of the next step: now if all are ready; a ready one waits for others half a step at most."""
        if not sessions:
            self._gathering_since = None
            return None
        deadlines = [s.committed_s + wait_limit(s) for s in sessions if s.decoding and s.awaited()]
        if not deadlines:
            return now
        if len(deadlines) == len(sessions):
            return min(deadlines)
        self._gathering_since = now if self._gathering_since is None else self._gathering_since
        gather_s = 0.5 * float(self.times(np.array([len(sessions)]), self._load)[0])
        return min(*deadlines, self._gathering_since + gather_s)

    def plan(self, now: float, sessions: Sequence[Session], wait_limit: WaitLimit) -> list[Part]:
        """The parts of the step that runs now; decoding sessions first, then prefill while rows are left."""
        self._gathering_since = None
        ready = [s for s in sessions if not s.decoding or not s.awaited() or now >= s.committed_s + wait_limit(s)]
        decoding = [s for s in ready if s.decoding][: self._settings.max_step_tokens]
        self.follow_load(len(sessions))
        left = self._settings.max_step_tokens - len(decoding)
        parts = self._decode_parts(decoding, left)
        left -= sum(part.tree.size - 1 for part in parts)
        in_the_making: set[bytes] = set()
        for session in (s for s in ready if not s.decoding):
            # Whoever's next page another one completes in this step finds it published in the next.
            if left > 0 and in_the_making.isdisjoint(session.keys[session.published :][:1]):
                parts.append(_prefill_part(session, left))
                left -= len(parts[-1].rows.token)
                full = (session.cached + len(parts[-1].rows.token)) // self._settings.page_tokens
                in_the_making.update(session.keys[session.published : full])
        return parts

    def follow_load(self, sessions: int) -> None:
        """Notes the load; its level moves only when the number of sessions has changed a good deal."""
        self._running = sessions
        if not self._load_sessions / LOAD_BAND <= max(1, sessions) <= self._load_sessions * LOAD_BAND:
            self._load_sessions = max(1, sessions)
            self._load = self._load_sessions.bit_length()

    def _decode_parts(self, sessions: Sequence[Session], spare_rows: int) -> list[Part]:
        candidates = [self._candidates(s) for s in sessions]
        reach = [r[1:] for _, _, r in candidates]
        lowest = self._lowest_admitted(reach)
        parts = []
        for session, (tree, kept, log_reach) in zip(sessions, candidates, strict=True):
            keep = np.nonzero(log_reach >= lowest)[0][: spare_rows + 1]
            spare_rows -= len(keep) - 1
            wanted = 1 + len(keep) * 4 // 3 if len(keep) < tree.size else 2 + 2 * tree.size
            parts.append(_decode_part(session, tt.select(tree, keep), kept[keep], wanted))
        return parts

    def _lowest_admitted(self, log_reach: Sequence[NDArray[np.float64]]) -> float:
        """Log survival from which on nodes are verified in this step."""
        if not self.share:
            return np.inf
        if self._settings.width == "full":
            return -np.inf
        if not self.gate.open or self._baseline_is_due():
            return np.inf
        rows = len(log_reach) + np.arange(1 + sum(map(len, log_reach)))
        lowest = admit(log_reach, self.times(rows, self._load), self.gate.overhead_s)
        self._narrow_steps = self._narrow_steps + any(map(len, log_reach)) if lowest == np.inf else 0
        if self._narrow_steps <= PROBE_STEPS:
            return lowest
        self._narrow_steps = 0
        return -np.inf

    def _baseline_is_due(self) -> bool:
        """Now and then one step goes plain, so that what drafts are held against is known and current."""
        self._since_plain += 1
        if self._since_plain > BASELINE_STEPS or not self.times.knows_plain(self._load):
            self._since_plain = 0
            return True
        return False

    def _candidates(self, session: Session) -> tuple[TokenTree, IndexArray, np.ndarray]:
        """The session's best nodes that its text has room for: tree, indices in the live tree, log survivals."""
        tree = session.tree.tree()
        room = min(session.remaining - 1, self._settings.max_depth)
        shallow = np.nonzero(tt.depths(tree) <= max(0, room))[0]
        tree = tt.select(tree, shallow)
        kept = tt.best(tree, min(self.share, session.request.max_nodes, session.node_room))
        tree = tt.select(tree, kept)
        reach = tt.log_survival(tree)
        reach[0] = np.inf
        return tree, shallow[kept], reach

    def observe(
        self, rows: int, sessions: int, tokens: int, forward_s: float, since_last_s: float, *, drafted: bool
    ) -> None:
        """Learns from a step in which every session decoded: its time and, if drafts served it, whether they paid."""
        plain = rows == sessions
        self.times.observe(rows, forward_s, self._load, plain=plain)
        if drafted and since_last_s < LONGEST_STEP_S:
            plain_s = self.times.plain(sessions, self._load)
            if not plain:
                plain_s *= self.times.drift(rows, forward_s, self._load)
            self.gate.record(tokens, since_last_s, forward_s, sessions / plain_s)


def _decode_part(session: Session, tree: TokenTree, kept: IndexArray, wanted: int) -> Part:
    position = (len(session.tokens) - 1 + tt.depths(tree)).astype(np.int32)
    rows = Rows(session.pages, session.cached, tree.token, position, tt.ancestors(tree))
    return Part(session, rows, tree, kept, wanted)


def _prefill_part(session: Session, most_rows: int) -> Part:
    count = min(session.pending, most_rows)
    at = np.arange(session.cached, session.cached + count, dtype=np.int32)
    token = np.array(session.tokens[session.cached : session.cached + count], np.int32)
    visible: BoolArray = np.tri(count, dtype=np.bool_)
    reaches_anchor = count == session.pending
    rows = Rows(session.pages, session.cached, token, at, visible, logits_from=count - 1 if reaches_anchor else count)
    return Part(session, rows, TokenTree.root(session.tokens[-1]), np.zeros(1, np.int64), wanted=0)
