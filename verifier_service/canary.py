"""A text whose continuation the verifier knows, on which a draft's guesses are tried when its stream begins.

Wrong weights, positions off by one, another mapping of tokens: the text of a session stays right with all of them, so
nothing but the share of guesses that are taken can show them. The canary shows it before the first hundred steps of
sessions have: a draft joins it like any session, and each round that it completes is walked along what is known. No
forward of the target is run for it.

The text repeats itself, so that a lookup in the text so far finds something, and is plain enough for a small model.
"""

from __future__ import annotations

import hmac
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftwood import tree as tt
from draftwood.acceptance import walk
from draftwood.errors import InvalidArgument, PermissionDenied
from draftwood.features import FeatureRequest, Features
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.model import ModelRuntime
from draftwood.tree import TokenTree
from draftwood.wire import SessionCommit
from verifier_service.calibration import Calibration
from verifier_service.engine import StartInfo
from verifier_service.features import cut, pick
from verifier_service.live_tree import LiveTree, Nodes, check_growth
from verifier_service.plan import FIRST_BUDGET

TEXT = "The sun rises in the east and sets in the west. Water flows from the hills to the sea.\n" * 2

MOST_TOKENS = 32
"""Tokens of the continuation: so many steps if no guess is ever right."""

FEWEST_TOKENS = 16
"""A continuation that the context or the cache has room for no more than this of tells nothing."""

LEAST_SHARE = 0.2
"""Share of steps with a right best guess below which a draft is broken. With the demo's target, its drafts have 4 of
5 and 6 of 6; random weights, tokens off by one and guesses one place late have 0.
"""

_DRAFT = 0
"""The one draft of a trial's tree."""


@dataclass(frozen=True, slots=True)
class Canary:
    """The text, and how the target goes on with it."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    features: Features | None = None  # of all tokens but the last, of all layers that the runtime keeps


@dataclass(frozen=True, slots=True)
class CanaryFeatures:
    """What a draft that asked for features is told of the canary's."""

    request: FeatureRequest
    states: Features

    @classmethod
    def of(cls, canary: Canary, runtime: ModelRuntime, request: FeatureRequest) -> CanaryFeatures:
        assert canary.features is not None
        return cls(request, pick(canary.features, runtime, request))


def learn_canary(runtime: ModelRuntime, prompt: Sequence[int], token_count: int, context_limit: int) -> Canary | None:
    """The target's own greedy continuation, computed beside an otherwise idle engine.

    One forward if the target goes on repeating the second half of the prompt, else one more for each token that is
    left. None if it has no room, or the target's logits are not finite.
    """
    room = min(context_limit, runtime.pool.available * runtime.pool.page_tokens) - len(prompt)
    if room < FEWEST_TOKENS:
        return None
    count = min(MOST_TOKENS, room)
    text, cached = list(prompt), 0
    period = max(1, len(prompt) // 2)
    guess = (list(prompt[-period:]) * count)[: count - 1]
    pages = runtime.pool.take(len(prompt) + count)
    try:
        while len(text) < len(prompt) + count:
            token = np.array([*text[cached:], *guess], np.int32)
            at, wanted = np.arange(cached, cached + len(token), dtype=np.int32), len(text) - cached - 1
            rows = Rows(pages, cached, token, at, np.tri(len(at), dtype=np.bool_), wanted)
            chosen = runtime.choose([rows], [SamplingParams()], token_count).tokens.tolist()
            right = next((k for k, guessed in enumerate(guess) if guessed != chosen[k]), len(guess))
            cached, guess = len(text) + right, []
            text += chosen[: right + 1]
            if text[-1] < 0:
                return None
        [features] = runtime.read_features([(pages, 0, cached)]) if runtime.features else [None]
    finally:
        runtime.pool.give(pages)
    return Canary(tuple(prompt), tuple(text[len(prompt) :]), features)


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """What became of a draft's guesses: in ``taken`` of the ``steps`` its best guess of the next token was right."""

    taken: int
    steps: int

    @property
    def share(self) -> float:
        return self.taken / self.steps

    @property
    def failed(self) -> bool:
        return self.share < LEAST_SHARE


class Trial:
    """The canary's session with one draft. It has a handle from the draft's Join until its result is there."""

    def __init__(self, canary: Canary, max_nodes: int, live_nodes: int, features: CanaryFeatures | None = None) -> None:
        """``max_nodes`` of a growth, 0: no limit; ``live_nodes`` kept between steps."""
        self.session_id = f"canary-{uuid.uuid4().hex}"
        self.ticket = secrets.token_bytes(16)
        self.handle: int | None = None
        self.result: CanaryResult | None = None
        self._features = features
        self._left = list(canary.continuation)
        self._text = list(canary.prompt)
        self._tree = LiveTree(self._text, live_nodes)
        self._tree.attach(_DRAFT, Calibration())
        self._budget = min(FIRST_BUDGET, max_nodes or FIRST_BUDGET)
        self._taken = self._steps = 0

    def join(self, handle: int, ticket: bytes) -> StartInfo:
        """The draft's first word. Raises PermissionDenied TICKET, InvalidArgument HANDLE if it has joined before."""
        if not hmac.compare_digest(ticket, self.ticket):
            raise PermissionDenied("TICKET", "wrong ticket for the canary", field="join.ticket")
        if self.handle is not None:
            raise InvalidArgument("HANDLE", f"the canary has been joined as {self.handle}", field="join.handle")
        self.handle = handle
        tokens, left = tuple(self._text), len(self._left)
        known = self._features
        features = cut(handle, 0, known.states[: len(tokens) - 1], known.request) if known else []
        return StartInfo(handle, 0, tokens, 0, 0.0, self._budget, left, Rule.GREEDY, features)

    def grow(self, nodes: Nodes, *, complete: bool) -> SessionCommit | None:
        """Takes nodes, and steps once the round is complete: the commit that the draft is to hear.

        None if there is none, or the text has ended: then the result is there. Raises InvalidArgument as
        ``check_growth``.
        """
        check_growth(nodes, self._tree.epoch, Rule.GREEDY)
        self._tree.grow(_DRAFT, nodes)
        return self._step() if complete and nodes.epoch == self._tree.epoch else None

    def _step(self) -> SessionCommit | None:
        assert self.handle is not None
        tree, known = self._tree.tree(), [*self._left, -1]
        taken = walk(tree, [known[min(depth, len(self._left))] for depth in tt.depths(tree).tolist()])
        self._steps += 1
        self._taken += bool(taken.path) and taken.path[0] == _best_guess(tree)
        tokens = taken.tokens if taken.tokens[-1] >= 0 else taken.tokens[:-1]
        del self._left[: len(tokens)]
        if not self._left:
            self.result = CanaryResult(self._taken, self._steps)
            return None
        ids = self._tree.node_ids(_DRAFT, taken.path)
        self._tree.commit(tokens)
        commit = SessionCommit(self.handle, self._tree.epoch, len(self._text), tokens, ids, self._budget)
        if not self._features:
            return commit
        end = len(self._text) - 1
        states = self._features.states[end - len(tokens) : end]
        return replace(commit, feature_count=len(states), features=states.tobytes())


def _best_guess(tree: TokenTree) -> int:
    """The anchor's child that the draft holds likeliest; the tree must have one."""
    children = np.flatnonzero(tree.parent == 0)
    return int(children[np.argmax(tree.score[children])])
