"""From a verified tree to emitted tokens: the rules of acceptance, the walk, and the one place where a text ends.

Every rule reduces to a target token per node and a walk: take the target's token at the anchor, descend while a child
carries it, and end with the target's own token (the tree verification of SpecInfer, arXiv:2305.09781).

greedy, shared noise   ``draftwood.sampling`` names the token from the node's logits alone. What comes out is what plain
                       decoding would have written, whatever the tree holds.
rejection              ``rejection_targets``. What comes out is distributed as what plain decoding would have written,
                       if the draft has sampled each child from the proposal that it names, and if no node was left
                       out because of what was sampled. Equal siblings stay apart: the second one of a rejected token
                       is rejected as well, and still takes its share of what is left.
typical                ``typical_targets``: plausible guesses are taken. Lossy.

An accepted run has several tokens, and the text may end at any of them. ``emit`` decides that, for every caller.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.noise import uniform_rows
from draftwood.parameters import SamplingParams
from draftwood.sampling import process_logits
from draftwood.tree import Proposal, TokenTree, depths

ACCEPTANCE_STREAM = 1
"""Stream of the uniform numbers that rejection decides by: number 0 draws from what is left, 1 + j is sibling j's."""

_RANK_CHANCES = (0.5, 0.09, 0.045, 0.045, 0.0175)


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


# Rejection


class Dice(Protocol):
    """Where the decisions at one node come from, for ``n`` independent runs at once."""

    def accepts(self, sibling: int, probability: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether each run accepts its ``sibling``-th child, which has ``probability`` [n] of it: bool [n]."""

    def draw(self, weight: NDArray[Any]) -> NDArray[np.int64]:
        """A token of each run, distributed by ``weight`` [vocab], which need not sum to 1: int64 [n]."""


@dataclass(frozen=True, slots=True)
class UniformDice:
    """Decides by uniform numbers, float64 [n, siblings + 1] in [0, 1): the first draws, 1 + j is sibling j's."""

    uniform: NDArray[np.float64]

    def accepts(self, sibling: int, probability: NDArray[Any]) -> NDArray[np.bool_]:
        return np.asarray(self.uniform[:, 1 + sibling] < probability)

    def draw(self, weight: NDArray[Any]) -> NDArray[np.int64]:
        ends = np.cumsum(weight)
        token = np.searchsorted(ends, self.uniform[:, 0] * ends[-1], side="right")
        return np.asarray(np.minimum(token, np.flatnonzero(weight)[-1]))  # the product may round up to the sum


def multi_step(p: NDArray[Any], child: NDArray[np.integer], drawn: Sequence[Proposal], dice: Dice) -> NDArray[np.int64]:
    """The target's token at one node, int64 [n] for n runs, by SpecInfer's multi-step rejection (arXiv:2305.09781).

    ``p`` [vocab] is the target's distribution, ``child`` [n, k] the children of each run, the j-th sampled from
    ``drawn[j]``. In this order a child x is accepted with probability min(1, p(x) / q(x)); after a rejection p becomes
    max(p - q, 0), normalised. When none is left, the token is drawn from p.
    """
    chosen = np.full(len(child), -1, np.int64)
    left = p
    for sibling, q in enumerate(drawn):
        token = child[:, sibling]
        accepted = dice.accepts(sibling, np.minimum(left[token] / q.of(token), 1))
        chosen = np.where((chosen < 0) & accepted, token, chosen)
        if (chosen >= 0).all():
            return chosen
        left = _residual(left, q)
    return np.where(chosen < 0, dice.draw(left), chosen)


def _residual(p: NDArray[Any], q: Proposal) -> NDArray[Any]:
    rest = p.copy()
    rest[q.token] = np.maximum(p[q.token] - q.prob, 0)
    total = rest.sum()
    return np.asarray(rest / total) if total > 0 else p  # p equals q up to rounding: nothing is ever rejected


def rejection_targets(
    tree: TokenTree,
    drawn: Sequence[Proposal | None],
    p_at: Callable[[int], NDArray[Any] | None],
    dice_at: Callable[[int], Dice],
) -> list[int]:
    """The target's token at each node that the walk visits, -1 at the others; int [n].

    ``drawn[i]`` is what node i was sampled from, ``p_at(node)`` the target's distribution there, ``dice_at(depth)``
    decides there. A node without a distribution (None: its logits are not finite) gets -1 and ends the walk.
    """
    targets = [-1] * tree.size
    at, depth = 0, 0
    while (p := p_at(at)) is not None:
        children = np.flatnonzero(tree.parent == at)
        proposals = [q for c in children.tolist() if (q := drawn[c]) is not None]
        assert len(proposals) == len(children), f"a child of node {at} was sampled from nothing"
        targets[at] = int(multi_step(p, tree.token[children][None], proposals, dice_at(depth))[0])
        taken = children[tree.token[children] == targets[at]]
        if not len(taken):
            break
        at, depth = int(taken[0]), depth + 1
    return targets


def reject(
    tree: TokenTree, drawn: Sequence[Proposal | None], logits: Tensor, params: SamplingParams, position: int
) -> list[int]:
    """``rejection_targets`` for logits [nodes, vocab]; ``position`` is that of the token chosen at the anchor."""
    parents, siblings = np.unique(tree.parent[1:], return_counts=True)
    visited = len(parents) + 1  # a path has no more nodes with children than the tree
    places = range(position, position + visited)
    most = int(siblings.max(initial=0))
    numbers = uniform_rows([params.seed] * visited, places, most + 1, ACCEPTANCE_STREAM).numpy()

    def p_at(node: int) -> NDArray[np.float64] | None:
        p = process_logits(logits[node][None], params)[0].double().softmax(dim=-1)
        return p.cpu().numpy() if bool(p.isfinite().all()) else None

    return rejection_targets(tree, drawn, p_at, lambda depth: UniformDice(numbers[depth][None]))


def sibling_score(rank: int) -> float:
    """Log P(the target takes the child of this rank, given that its parent is reached) before anything is known.

    All that may be said of a sampled child: to look at its token and cut the tree by it would bias the text. The
    chances are those of the demo models at temperature 1.
    """
    return float(np.log(_RANK_CHANCES[min(rank, len(_RANK_CHANCES) - 1)]))


def sample_children(
    logits: Tensor, params: SamplingParams, branch: int, random: np.random.Generator, *, vocab_size: int | None = None
) -> tuple[NDArray[np.int64], list[Proposal | None]]:
    """A draft's children of each row of logits [rows, vocab]: tokens [rows, branch], and what they were sampled from.

    They are independent samples, repeats included, of the row's distribution as ``params`` process it: truncated first,
    so that the whole of it can be sent. Rows that are not finite have no proposal, and tokens -1.
    """
    tokens = np.full((len(logits), branch), -1, np.int64)
    proposals: list[Proposal | None] = []
    for row, weights in enumerate(process_logits(logits[:, :vocab_size].float(), params).softmax(dim=-1).cpu().numpy()):
        support = np.flatnonzero(weights)
        proposals.append(Proposal(support, weights[support]) if np.isfinite(weights).all() else None)
        if q := proposals[-1]:
            tokens[row] = q.token[UniformDice(random.random(branch)[:, None]).draw(q.prob)]
    return tokens, proposals


# Typical acceptance


def typical_targets(
    tree: TokenTree, own: Sequence[int], logits: Tensor, params: SamplingParams, epsilon: float, delta: float
) -> list[int]:
    """A token per node by Medusa's typical acceptance (arXiv:2401.10774); ``own`` is the target's own, -1 if none.

    A child x is plausible if p(x) > min(epsilon, delta exp(-H(p))), H being the entropy in nats, or if it carries the
    target's own token. The deepest node reached over plausible ones is taken, the likeliest of equally deep ones, and
    its path's tokens replace the target's own. logits [nodes, vocab].
    """
    log_p = process_logits(logits, params).double().log_softmax(dim=-1)
    bound = (torch.special.entr(log_p.exp()).sum(dim=-1).neg().exp() * delta).clamp(max=epsilon).cpu().numpy()
    child = torch.from_numpy(tree.token[1:].astype(np.int64)).to(log_p.device)
    parent = torch.from_numpy(tree.parent[1:].astype(np.int64)).to(log_p.device)
    depth = depths(tree)
    reached = {0: 0.0}  # log-probability
    for node, edge in enumerate(log_p[parent, child].tolist(), start=1):
        above = int(tree.parent[node])
        plausible = np.exp(edge) > bound[above] or own[above] == tree.token[node]
        if above in reached and plausible:
            reached[node] = reached[above] + edge
    targets, node = list(own), max(reached, key=lambda n: (depth[n], reached[n]))
    while node:
        node, token = int(tree.parent[node]), int(tree.token[node])
        targets[node] = token
    return targets


# The end of a text


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
