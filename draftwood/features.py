"""Features: hidden states of the target that drafters work on (Medusa, EAGLE, MTP and the like).

Words
-----
layer      k > 0: what the first k decoder layers of the target put out, without a norm; FINAL: what its LM head reads,
           behind all layers and the final norm.
position   of a token in the text. The feature of position p is known once the token at p has been through the target's
           forward and is committed: of a committed text of n tokens those of [0, n - 1), as the anchor is computed by
           the next step.

Whatever the target computes in, features are bfloat16: numpy has no such type, so arrays hold their bits as uint16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import FailedPrecondition

FINAL = 0
LAYER_COUNTS = (1, 3)
"""Numbers of layers that may be asked for."""
ITEM_BYTES = 2

Features = NDArray[np.uint16]
"""[positions, layers, hidden_size], bits of bfloat16."""


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """What a drafter needs of its target."""

    layers: tuple[int, ...]  # in the order in which it gets them
    hidden_size: int
    target: str = ""  # name of the only target that it can serve; empty: any that has such features

    @property
    def position_bytes(self) -> int:
        """Bytes of one position, which is what a drafter costs on the wire per committed token."""
        return len(self.layers) * self.hidden_size * ITEM_BYTES

    def decode(self, data: bytes) -> Features:
        """The positions in some bytes of the wire; raises ValueError unless they are whole positions."""
        return np.frombuffer(data, "<u2").reshape(-1, len(self.layers), self.hidden_size).astype(np.uint16, copy=False)


def check_offer(asked: FeatureRequest, offered: Sequence[int], hidden_size: int, target: str) -> None:
    """Whether a target of that name, with features of the layers ``offered``, can give what is asked.

    Raises FailedPrecondition FEATURES_UNAVAILABLE.
    """
    if not offered:
        raise _unavailable("features are off here (the verifier's setting `features`)", "")
    if len(asked.layers) not in LAYER_COUNTS or len(set(asked.layers)) < len(asked.layers):
        counts = " or ".join(map(str, LAYER_COUNTS))
        raise _unavailable(f"layers {list(asked.layers)} are asked for; it must be {counts} different ones", ".layers")
    if lacking := [layer for layer in asked.layers if layer not in offered]:
        raise _unavailable(f"layer {lacking[0]} is asked for, those offered are {list(offered)}", ".layers")
    if asked.hidden_size != hidden_size:
        message = f"hidden states of size {asked.hidden_size} are asked for, the target's have {hidden_size}"
        raise _unavailable(message, ".hidden_size")
    if asked.target and asked.target != target:
        raise _unavailable(f"the drafter is made for target {asked.target!r}, this is {target!r}", ".target")


def _unavailable(message: str, field: str) -> FailedPrecondition:
    return FailedPrecondition("FEATURES_UNAVAILABLE", message, field=f"hello.draft.features{field}")
