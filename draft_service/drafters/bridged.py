"""A draft model of another vocabulary, bridged through text.

The committed text is spelled in the draft's tokens, the model draws its tree in these, and what the tree's paths spell
is turned into the target's tokens. A target's token stands for all paths that pass through it: its survival is the
probability of the texts that have it. What the target's vocabulary cannot spell is not proposed, and the verifier
checks what is, so nothing of this can reach the text.

A character of which the target has committed only some bytes is not told before it is whole; until then paths that
begin with these bytes are proposed, without them. Under shared noise the draft draws its likeliest tokens, as the noise
is one over the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from draft_service.drafter import Drafter, Key, SessionCommitted, SessionStart, StepMs
from draftwood import tree as tt
from draftwood.features import FeatureRequest, Features
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.spelling import WINDOW, Speller, split_character
from draftwood.tree import TokenTree
from draftwood.vocabulary import Vocabulary
from draftwood.wire import Drawing, SessionGrowth

ANY_LENGTH = 2**31 - 1
LEAST_MASS = 1e-9

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Guess:
    """A node of the draft's tree."""

    tokens: Path  # the draft's, from its anchor
    text: str  # that they spell
    reach: float  # log survival


@dataclass(eq=False)
class _Session:
    start: SessionStart
    length: int  # of the target's tokens
    epoch: int
    budget: int
    step_ms: StepMs = ()
    wish: Drawing = field(default_factory=Drawing)
    shown: str = ""  # end of the text that the draft knows
    begun: str = ""  # bytes of a character that is not whole: the draft does not know them
    known: int = 0  # tokens that the draft has been told
    guesses: dict[int, _Guess] = field(default_factory=dict)  # by the draft's node id
    sent: dict[Path, int] = field(default_factory=dict)  # the target's tokens from the anchor -> our node id
    next_id: int = 1
    lost: bool = False  # the text ends with what the draft cannot read: what it draws is not for this place
    drawing: bool = False  # the draft's round is open
    due: bool = True  # a round is owed


class BridgedDrafter:
    """Drafts with a drafter of another vocabulary."""

    kind = "bridged"
    features: FeatureRequest | None = None
    rules: tuple[Rule, ...] = ()  # what the target's tokens were sampled from cannot be said

    def __init__(
        self, inner: Drafter, draft: Speller, target: Speller, vocabulary: Vocabulary, opening: Sequence[int] = ()
    ) -> None:
        """``vocabulary`` is the target's; ``opening`` are the tokens that the draft's texts begin with."""
        self.model = inner.model
        self.vocabulary: Vocabulary | None = vocabulary
        self._inner = inner
        self._draft = draft
        self._target = target
        self._opening = tuple(opening)
        self._sessions: dict[Key, _Session] = {}

    # --- sessions ---

    def open(self, key: Key, start: SessionStart) -> None:
        session = self._sessions[key] = _Session(
            start, len(start.tokens), start.epoch, start.budget, start.step_ms, start.drawing
        )
        self._tell(key, session, start.tokens)

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        committed.check_follows(session.length)
        session.length, session.epoch, session.budget = committed.length, committed.epoch, committed.budget
        session.step_ms, session.wish = committed.step_ms, committed.drawing
        session.due = True
        taken, count = committed.tokens, len(committed.tokens)
        session.sent = {p[count:]: i for p, i in session.sent.items() if len(p) > count and p[:count] == taken}
        self._tell(key, session, taken)

    def feed(self, key: Key, first: int, features: Features) -> None:
        """Never called."""
        raise AssertionError("no features have been asked for")

    def close(self, key: Key) -> None:
        if self._sessions.pop(key, None):
            self._inner.close(key)

    def _tell(self, key: Key, session: _Session, tokens: Sequence[int]) -> None:
        """Hands the text of new tokens on, as far as its characters are whole."""
        text, begun = split_character(session.begun + self._target.spell(tokens, session.shown + session.begun))
        session.begun = begun
        own = self._own_tokens(session, text)
        if self._draft.spell(own, session.shown) == text:
            self._follow(session, own, text)
        else:
            session.guesses = {}
        session.shown = (session.shown + text)[-2 * WINDOW :]
        session.lost = not own if text else session.lost
        session.drawing &= not session.lost
        if not own:
            return
        if not session.known:
            first = (*self._opening, *own)
            session.known = len(first)
            opened = replace(
                session.start, epoch=session.epoch, tokens=first, budget=session.budget, sampling=SamplingParams(),
                rule=Rule.SHARED_NOISE, vocab_size=len(self._draft), max_context_tokens=ANY_LENGTH,
            )  # fmt: skip
            self._inner.open(key, opened)
        else:
            session.known += len(own)
            told = SessionCommitted(session.epoch, session.known, own, session.budget, session.step_ms, session.wish)
            self._inner.commit(key, told)
        session.drawing = session.budget > 0

    def _own_tokens(self, session: _Session, text: str) -> Path:
        """The draft's tokens of new text: those of its own tree if it has drawn the text, as this keeps the tree."""
        drawn = [guess for guess in session.guesses.values() if guess.text == text]
        if drawn:
            return max(drawn, key=lambda guess: guess.reach).tokens
        tokens = self._draft.tokens(text, session.shown)
        rest = text[len(self._draft.spell(tokens, session.shown)) :]
        return (*tokens, *self._draft.any_tokens(rest))

    def _follow(self, session: _Session, tokens: Path, text: str) -> None:
        """Re-roots what is known of the draft's tree."""
        if not tokens:
            return
        count = len(tokens)
        anchor = next((g for g in session.guesses.values() if g.tokens == tokens), None)
        below = {i: g for i, g in session.guesses.items() if anchor and g.tokens[:count] == tokens and g is not anchor}
        session.guesses = {
            i: _Guess(g.tokens[count:], g.text[len(text) :], g.reach - anchor.reach) for i, g in below.items() if anchor
        }

    # --- growth ---

    def wants_work(self) -> bool:
        return any(self._is_drawn(s) for s in self._sessions.values()) or self._inner.wants_work()

    def _is_drawn(self, session: _Session) -> bool:
        return session.due and session.budget > 0 and not session.drawing

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        """The rounds that are drawn, or one forward of the draft."""
        for key, growth in [] if any(map(self._is_drawn, self._sessions.values())) else self._inner.work():
            session = self._sessions[key]
            self._note(session, growth)
            session.drawing &= not growth.complete
        return [(key, self._grow(s, key[1])) for key, s in self._sessions.items() if self._is_drawn(s)]

    def _note(self, session: _Session, growth: SessionGrowth) -> None:
        """Keeps the draft's nodes that can be spelled."""
        columns = zip(growth.parent.tolist(), growth.token.tolist(), growth.score.tolist(), strict=True)
        root = _Guess((), "", 0.0)
        for own, (parent, token, score) in enumerate(columns, start=growth.first_id):
            above = session.guesses.get(parent) if parent else root
            piece = self._draft.piece(token, (session.shown + above.text)[-1:]) if above else None
            if above and piece and not session.lost:
                session.guesses[own] = _Guess((*above.tokens, token), above.text + piece, above.reach + score)

    def _grow(self, session: _Session, handle: int) -> SessionGrowth:
        session.due = False
        paths, tree = self._tree(session)
        chosen = tt.best(tree, min(session.budget, session.start.max_nodes)).tolist()[1:]
        fresh = [node for node in chosen if paths[node] not in session.sent]
        first = session.next_id
        for node in fresh:
            session.sent[paths[node]] = session.next_id
            session.next_id += 1
        parent = np.array([session.sent.get(paths[node][:-1], 0) for node in fresh], np.int64)
        return SessionGrowth(handle, session.epoch, first, parent, tree.token[fresh], tree.score[fresh], complete=True)

    def _tree(self, session: _Session) -> tuple[list[Path], TokenTree]:
        """The target's tokens of all that the draft has drawn, as a trie, and the path to each of its nodes."""
        mass: dict[Path, float] = {(): 0.0}
        for text, probability in self._ends(session):
            path = self._target_tokens(session, text)
            for depth in range(len(path) + 1):
                mass[path[:depth]] = mass.get(path[:depth], 0.0) + probability
        if not session.begun:
            mass[()] = 1.0
        paths = sorted(mass, key=lambda path: (len(path), -mass[path]))
        place = {path: k for k, path in enumerate(paths)}
        edges = [math.log(min(1.0, mass[path] / mass[path[:-1]])) for path in paths[1:]]
        parents = [-1, *(place[path[:-1]] for path in paths[1:])]
        return paths, TokenTree.of(parents, [0, *(path[-1] for path in paths[1:])], [0.0, *edges])

    def _ends(self, session: _Session) -> list[tuple[str, float]]:
        """Texts that the draft has drawn behind the committed one, and the probability that nothing drawn goes on."""
        left = {guess.tokens: math.exp(guess.reach) for guess in session.guesses.values()}
        for guess in session.guesses.values():
            if guess.tokens[:-1] in left:
                left[guess.tokens[:-1]] -= math.exp(guess.reach)
        begun = len(session.begun)
        return [
            (guess.text[begun:], left[guess.tokens])
            for guess in session.guesses.values()
            if left[guess.tokens] > LEAST_MASS and guess.text.startswith(session.begun) and len(guess.text) > begun
        ]

    def _target_tokens(self, session: _Session, text: str) -> Path:
        room = min(session.wish.room(session.start.max_depth), session.start.max_context_tokens - session.length)
        tokens = self._target.tokens(text, session.shown + session.begun)[: max(0, room)]
        known = next((k for k, token in enumerate(tokens) if token >= session.start.vocab_size), len(tokens))
        return tuple(tokens[:known])
