"""How wide and deep trees may be at each verifier. Pure: loads and times come in, caps with their reasons go out.

signal     a measure over its target: 1 is as it should be, 2 is twice as much.
pressure   the largest signal: of a verifier, or of the draft workers that serve its model.
rung       place on a ladder of caps, 0: no cap; each rung is narrower than the one before.

A verifier's own gate decides step by step which nodes pay, from what they cost and bring there (docs/architecture.md).
It is the fast loop and knows its own steps better than anybody. This is the slow loop, for what a verifier cannot see:
draft workers that serve several verifiers, how long requests wait, a step time that somebody wants kept. So that the
two do not work against each other,

- a cap only narrows, and never below ``min_nodes``: whether drafts are used at all is the gate's decision;
- a cap is set only where it binds: a verifier that takes fewer nodes by itself is left alone, and what its gate learns
  at a load is learnt at the width that it will have there;
- caps change after two looks that agree, at most every ``narrow_s``, and are lifted after ``widen_s`` of ease; twice as
  late each time that lifting was too early. Between ``EASE`` and 1 a cap is only tried wider after ``CAUTION`` times
  that long: much of a step's time may have nothing to do with its width.

Pressure on a verifier caps the nodes of a session. Pressure on draft workers caps the depth, which is the number of
forwards that a round takes them. Where few nodes are left and draft workers have time, trees are to be chains: a chain
is what accepts most for so few rows, and only costs the draft's own forwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from draftwood.config import WidthPolicySettings

NODES = (32, 16, 8, 4, 2, 1)
DEPTHS = (6, 4, 2, 1)
"""Caps by rung - 1."""

EASE = 0.6
FAR_EASE = 0.3
"""Pressure below which caps are lifted, and below which by two rungs at a time."""
CAUTION = 3.0
"""How much longer than with ease it takes to lift a cap under a pressure that is no more than it should be."""
CONFIRMING = 2
"""Looks in a row that must agree before a cap gets narrower."""
MOST_PATIENCE = 8.0
SMOOTH = 0.3
"""Weight of one look in the width that a verifier is seen to have."""
CHAIN_NODES = 4
"""Trees of at most so many nodes are to be chains."""
CONTENDED = 2
"""Sessions of a draft worker from which on it counts: with one there is nobody else to give way to."""
WAIT, STEP, DRAFTS = "queue_wait", "step_time", "drafts_busy"


@dataclass(frozen=True, slots=True)
class Caps:
    """What one verifier is told; None: no cap."""

    nodes: int | None = None  # of one session in one step
    depth: int | None = None
    chain: bool = False

    def __str__(self) -> str:
        told = [f"{self.nodes} nodes" if self.nodes is not None else "", f"depth {self.depth}" if self.depth else ""]
        return ", ".join(filter(None, [*told, "chains" if self.chain else ""])) or "no cap"


@dataclass(frozen=True, slots=True)
class VerifierLook:
    """What a ready verifier's last load report says."""

    key: str  # another one if the process is
    model: str
    sessions: int  # running
    queue_wait_ms: float
    step_ms: float
    steps: int  # since its start, as the following
    nodes: int  # verified


@dataclass(frozen=True, slots=True)
class DraftLook:
    """What a ready draft worker's last load report says."""

    kind: str
    sessions: int
    busy: float  # share of the time in which it drafts


@dataclass(frozen=True, slots=True)
class Decision:
    """What one verifier is to be told, and why; ``inputs`` is all that it was decided from."""

    caps: Caps
    before: Caps
    reason: str
    inputs: Mapping[str, float]

    @property
    def changes(self) -> bool:
        return self.caps != self.before

    @property
    def narrows(self) -> bool:
        """Fewer or shallower nodes than before."""
        return _rank(self.caps) > _rank(self.before)

    def __str__(self) -> str:
        told = ", ".join(f"{name} {value:.2f}" for name, value in self.inputs.items())
        return f"{self.caps}: {self.reason} ({told})"


def _rank(caps: Caps) -> tuple[int, int]:
    """The higher, the narrower; nodes and depth together, as one of them may be lifted while the other is set."""
    nodes = 0 if caps.nodes is None else 1 + NODES.index(caps.nodes)
    depth = 0 if caps.depth is None else 1 + DEPTHS.index(caps.depth)
    return nodes + depth, nodes


@dataclass(slots=True)
class Ladder:
    """One cap that follows one pressure."""

    caps: Sequence[int]
    rung: int = 0
    reason: str = ""
    patience: float = 1.0  # times ``widen_s``
    _load: int = 0  # sessions when it was narrowed last
    _pressed: int = 0  # looks in a row
    _eased_s: float = math.inf  # since when there is ease
    _calm_s: float = math.inf  # since when there is not too much
    _changed_s: float = -math.inf
    _widened_s: float = -math.inf

    @property
    def cap(self) -> int | None:
        return self.caps[self.rung - 1] if self.rung else None

    def look(
        self, now: float, pressure: float, load: int, settings: WidthPolicySettings, used: float = math.inf
    ) -> None:
        """Follows the pressure; ``used`` is what the cap is for, as it is seen now: only a cap below binds.

        ``load`` is the number of sessions: with less than half of what made it narrow, patience is no longer due.
        """
        self._pressed = self._pressed + 1 if pressure > 1 else 0
        self._calm_s = min(self._calm_s, now) if pressure <= 1 else math.inf
        self._eased_s = min(self._eased_s, now) if pressure < EASE else math.inf
        if 2 * load < self._load:
            self.patience, self._load = 1.0, load
        if pressure > 1:
            binding = next((k + 1 for k, cap in enumerate(self.caps) if k >= self.rung and cap < used), None)
            self._narrow(now, binding, load, settings)
        elif self.rung:
            self._widen(now, pressure, settings)
        else:
            self.reason = "as it should be"

    def _widen(self, now: float, pressure: float, settings: WidthPolicySettings) -> None:
        wait_s = settings.widen_s * self.patience
        calm_s, eased_s = (now - max(since, self._changed_s) for since in (self._calm_s, self._eased_s))
        if eased_s < wait_s and calm_s < CAUTION * wait_s:
            left_s = min(wait_s - max(eased_s, 0.0), CAUTION * wait_s - calm_s)
            self.reason = f"held for {left_s:.0f} s more"
            return
        self.rung = max(0, self.rung - (2 if pressure < FAR_EASE else 1))
        self._changed_s = self._widened_s = now
        self.reason = "eased"

    def _narrow(self, now: float, binding: int | None, load: int, settings: WidthPolicySettings) -> None:
        if binding is None:
            self.reason = "at its narrowest" if self.rung == len(self.caps) else "no narrower cap would bind"
        elif self._pressed < CONFIRMING or now - self._changed_s < settings.narrow_s:
            self.reason = "looked at a little longer"
        else:
            soon = now - self._widened_s < 2 * settings.widen_s * self.patience
            self.patience = min(2 * self.patience, MOST_PATIENCE) if soon else 1.0
            self.rung, self._changed_s, self._load, self.reason = binding, now, load, "too much"


@dataclass(slots=True)
class Memory:
    """What is remembered of one verifier."""

    nodes: Ladder
    caps: Caps = field(default_factory=Caps)
    counted: tuple[int, int] | None = None  # steps and nodes at the last look that had steps
    width: float | None = None  # nodes a session and step, smoothed; None: not seen yet


class WidthPolicy:
    """Decides for all verifiers; called every ``look_s``."""

    def __init__(self, settings: WidthPolicySettings) -> None:
        self._settings = settings
        self._memories: dict[str, Memory] = {}
        self._depths: dict[str, Ladder] = {}  # by model: all its verifiers share the draft workers

    def decide(
        self, now: float, verifiers: Sequence[VerifierLook], drafts: Mapping[str, Sequence[DraftLook]]
    ) -> dict[str, Decision]:
        """One decision for each verifier, by its key; ``drafts`` are the workers that fit a model, by its name.

        A verifier that is not among them is forgotten. Caps decided on are taken to be in force.
        """
        memories, depths = self._memories, self._depths
        self._memories = {look.key: memories.get(look.key) or self._met() for look in verifiers}
        self._depths = {look.model: depths.get(look.model) or Ladder(DEPTHS) for look in verifiers}
        busy = {model: _busy(drafts.get(model, ())) / self._settings.draft_busy for model in self._depths}
        for model, ladder in self._depths.items():
            sessions = sum(look.sessions for look in verifiers if look.model == model)
            ladder.look(now, busy[model], sessions, self._settings)
        return {look.key: self._decide(now, look, busy[look.model]) for look in verifiers}

    def _met(self) -> Memory:
        return Memory(Ladder([cap for cap in NODES if cap >= self._settings.min_nodes]))

    def _decide(self, now: float, look: VerifierLook, busy: float) -> Decision:
        memory, depth, settings = self._memories[look.key], self._depths[look.model], self._settings
        _see_width(memory, look)
        signals = {WAIT: look.queue_wait_ms / settings.queue_wait_ms}
        if settings.step_ms:
            signals[STEP] = look.step_ms / settings.step_ms
        memory.nodes.look(now, max(signals.values()), look.sessions, settings, memory.width or 0.0)
        caps = Caps(memory.nodes.cap, depth.cap)
        caps = replace(caps, chain=_chains(memory.caps, caps, busy))
        before, memory.caps = memory.caps, caps
        why = f"{max(signals, key=lambda name: signals[name])}: {memory.nodes.reason}"
        if depth.rung or busy > 1:
            why += f"; {DRAFTS}: {depth.reason}"
        inputs = {**signals, DRAFTS: busy, "width": memory.width or 0.0, "sessions": float(look.sessions)}
        return Decision(caps, before, why, inputs)


def _see_width(memory: Memory, look: VerifierLook) -> None:
    """Nodes that a session has had verified in a step lately."""
    steps, nodes = memory.counted or (look.steps, look.nodes)
    if look.steps > steps and look.sessions:
        width = (look.nodes - nodes) / (look.steps - steps) / look.sessions
        memory.width = width if memory.width is None else memory.width + SMOOTH * (width - memory.width)
    memory.counted = look.steps, look.nodes


def _busy(drafts: Iterable[DraftLook]) -> float:
    """Of the kind that has least time, as a step waits for the slowest of a session's drafts."""
    shares: dict[str, list[float]] = {}
    for draft in drafts:
        shares.setdefault(draft.kind, []).append(draft.busy if draft.sessions >= CONTENDED else 0.0)
    return max((sum(each) / len(each) for each in shares.values()), default=0.0)


def _chains(before: Caps, caps: Caps, busy: float) -> bool:
    """Chains from the moment on that draft workers have time for them, until there is room for more nodes, or none
    for depth."""
    few = caps.nodes is not None and caps.nodes <= CHAIN_NODES
    return few and caps.depth is None and (before.chain or busy < EASE)
