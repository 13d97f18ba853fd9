"""Caps from outside: what routers and an operator have set, of which the narrowest holds. Pure, injected clock.

A router's policy is a *lease*: it holds for ``LEASE_S`` and is renewed until then, so that a router that has died caps
nothing for long. Several routers may watch one verifier; each replaces what it has said itself and nothing else. An
operator's policy holds until it is set anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from draftwood.errors import InvalidArgument, ResourceExhausted
from draftwood.v1 import draft_pb2, verifier_pb2
from draftwood.wire import Drawing
from verifier_service.width import Policy

LEASE_S = 30.0
MOST_SETTERS = 16
MOST_SETTER_CHARACTERS = 64
OPERATOR = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """All that a policy says."""

    nodes: Policy = field(default_factory=Policy)
    drawing: Drawing = field(default_factory=Drawing)


@dataclass
class PolicyBook:
    """What each setter has asked for."""

    clock: Callable[[], float]
    _terms: dict[str, tuple[Terms, float]] = field(default_factory=dict)  # by setter, with the end of the lease

    def set(self, setter: str, terms: Terms) -> None:
        """Raises InvalidArgument POLICY, ResourceExhausted POLICY_SETTERS."""
        if len(setter) > MOST_SETTER_CHARACTERS:
            message = f"setter has {len(setter)} characters, at most {MOST_SETTER_CHARACTERS}"
            raise InvalidArgument("POLICY", message, field="setter")
        now = self.clock()
        self._terms = {name: entry for name, entry in self._terms.items() if entry[1] > now}
        if setter not in self._terms and len(self._terms) >= MOST_SETTERS:
            message = f"{MOST_SETTERS} setters have a policy here already"
            raise ResourceExhausted("POLICY_SETTERS", message, retry_after_ms=int(LEASE_S * 1e3))
        self._terms[setter] = terms, math.inf if setter == OPERATOR else now + LEASE_S

    def in_force(self) -> Terms:
        """The narrowest of all that hold now; a depth of 0 is plain decoding, as 0 nodes are."""
        now = self.clock()
        held = [terms for terms, until in self._terms.values() if until > now]
        depth = _least(terms.drawing.max_depth for terms in held)
        nodes = Policy(
            0 if depth == 0 else _least(terms.nodes.max_session_nodes for terms in held),
            _least(terms.nodes.max_step_nodes for terms in held),
        )
        return Terms(nodes, Drawing(depth, chain=any(terms.drawing.chain for terms in held)))


def terms_from_proto(message: verifier_pb2.Policy) -> Terms:
    """Raises InvalidArgument POLICY for a rule of growth that we do not know: it would not be followed."""
    if message.growth not in draft_pb2.GrowthRule.values():
        text = f"growth rule {message.growth} is not known here; known: {', '.join(draft_pb2.GrowthRule.keys())}"
        raise InvalidArgument("POLICY", text, field="policy.growth")
    return Terms(
        Policy(
            message.max_session_nodes if message.HasField("max_session_nodes") else None,
            message.max_step_nodes if message.HasField("max_step_nodes") else None,
        ),
        Drawing(
            message.max_depth if message.HasField("max_depth") else None,
            message.growth == draft_pb2.GROWTH_RULE_CHAIN,
        ),
    )


def terms_to_proto(terms: Terms) -> verifier_pb2.Policy:
    return verifier_pb2.Policy(
        max_session_nodes=terms.nodes.max_session_nodes,
        max_step_nodes=terms.nodes.max_step_nodes,
        max_depth=terms.drawing.max_depth,
        growth=draft_pb2.GROWTH_RULE_CHAIN if terms.drawing.chain else draft_pb2.GROWTH_RULE_UNSPECIFIED,
    )


def _least(caps: Iterable[int | None]) -> int | None:
    return min((cap for cap in caps if cap is not None), default=None)
