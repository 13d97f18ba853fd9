"""From a verified tree to emitted tokens: the walk that accepts a path, and the one place where a text ends.

Every exact rule reduces to a target token per node and a walk: take the target's token at the anchor, descend while a
child carries it, and end with the target's own token (the tree verification of SpecInfer, arXiv:2305.09781, for rules
that name one token per node). What comes out is what plain decoding would have written, whatever the tree holds.

An accepted run has several tokens, and the text may end at any of them. ``emit`` decides that, for every caller.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Walk:
    """What a step accepted of one tree."""

    path: tuple[int, ...]  # accepted nodes in order, anchor excluded
    tokens: tuple[int, ...]  # tokens of the path, then the target's own

    @property
    def last(self) -> int:
        """The node whose target token ended the walk: the deepest accepted one, or the anchor."""
        return self.path[-1] if self.path else 0


def walk(tree: TokenTree, target: Sequence[int] | NDArray[np.integer]) -> Walk:
    """Walks ``tree`` along the target's choices; ``target[i]`` is the target's token at node i, the anchor included.

    One pass over the nodes will do, as parents come before their children. Of equal siblings, which a trie does not
    have, the lowest index is taken. A node without a valid target token (-1) accepts no child, and its -1 is the last
    token of the walk.
    """
    choice = np.asarray(target).tolist()
    assert len(choice) == tree.size, f"{len(choice)} target tokens for {tree.size} nodes"
    at, path = 0, []
    for node, (parent, token) in enumerate(zip(tree.parent.tolist(), tree.token.tolist(), strict=True)):
        if parent == at and token == choice[at]:
            path.append(node)
            at = node
    return Walk(tuple(path), (*(choice[node] for node in [0, *path]),))


class FinishReason(enum.Enum):
    """Why a generation has ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends a generation: any of these tokens, or the cap on generated tokens."""

    stop_token_ids: frozenset[int]
    max_tokens: int


class GrowingText(Protocol):
    """The text of a generation, searched for stop strings; see ``draftwood.runtime.text.TextStream``."""

    def feed(self, token: int, end: FinishReason | None) -> str | None:
        """Takes the next token; ``end`` is what ends the text with it, whatever its characters are: STOP, a stop token;
        LENGTH, the cap. Returns the stop string that the text has come to contain.
        """


@dataclass(frozen=True, slots=True)
class Emission:
    """How many tokens of a run are emitted, and why the text ends with them (None: it goes on)."""

    count: int
    finish: FinishReason | None
    stop: int | str | None = None  # of STOP: the stop token or the stop string


def emit(tokens: Sequence[int], generated: int, ending: Ending, text: GrowingText | None = None) -> Emission:
    """Turns an accepted run into emitted tokens, ``generated`` tokens having been emitted before it.

    Token by token, the earliest position wins: a stop token at or before the cap ends the text with STOP and is itself
    emitted; so does a token that completes a stop string in ``text``; otherwise the cap ends it with LENGTH. A token
    that does both is counted as the stop string's, which says where the text is cut. Never more than ``max_tokens`` in
    total. ``text`` has been fed all tokens before and is fed the emitted ones.
    """
    if generated >= ending.max_tokens:
        return Emission(0, FinishReason.LENGTH)
    for count, token in enumerate(tokens, start=1):
        end = None
        if token in ending.stop_token_ids:
            end = FinishReason.STOP
        elif generated + count >= ending.max_tokens:
            end = FinishReason.LENGTH
        if text is not None and (string := text.feed(token, end)) is not None:
            return Emission(count, FinishReason.STOP, string)
        if end is not None:
            return Emission(count, end, token if end is FinishReason.STOP else None)
    return Emission(len(tokens), None)
