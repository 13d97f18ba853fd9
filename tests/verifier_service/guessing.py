"""A draft that guesses by a seeded script, and a loop that serves requests to their end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from draftwood.errors import DraftwoodError
from verifier_service.engine import Engine, Outcome
from verifier_service.live_tree import Nodes
from verifier_service.session import Emitted, Ended, GenerateRequest, TokenLogprobs

AT_ONCE = 64


@dataclass
class Text:
    """What a session wrote, resumed tokens first."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    accepted: int = 0
    last: Emitted | None = None
    ended: Ended | None = None
    error: DraftwoodError | None = None


@dataclass
class GuessingDraft:
    """Knows what the target writes when nothing stops it, and guesses that and other things by a seeded script.

    Wrong guesses are mostly tokens of the text itself, so that the same token hangs on several branches.
    """

    random: random.Random
    truth: dict[str, list[int]]
    vocab: int
    names: dict[int, str] = field(default_factory=dict)
    next_id: dict[int, int] = field(default_factory=dict)
    always: bool = False  # right in every guess
    repeats: int = 0  # tokens that occurred on two branches of a tree

    def join(self, engine: Engine, name: str, handle: int) -> None:
        start = engine.join(1, handle, name)
        self.names[handle], self.next_id[handle] = name, 1
        self.draw(engine, handle, start.epoch, len(start.tokens))

    def hear(self, engine: Engine, outcome: Outcome) -> None:
        for commit in outcome.commits.get(1, []):
            self.draw(engine, commit.handle, commit.epoch, commit.length)

    def draw(self, engine: Engine, handle: int, epoch: int, length: int) -> None:
        rnd, first, text = self.random, self.next_id[handle], self.truth[self.names[handle]]
        place, parents, tokens = [0], [], []  # place: depth on the true path; -1 off it
        skill = 1.0 if self.always else rnd.choice([0.0, 0.6, 0.9, 1.0])
        for _ in range(rnd.randint(0, 11)):
            above = place.index(max(place)) if rnd.random() < 0.7 else rnd.randrange(len(place))
            at = length + place[above] if place[above] >= 0 else len(text)
            right = at < len(text) and rnd.random() < skill
            wrong = rnd.choice(text) if rnd.random() < 0.8 else rnd.randrange(self.vocab)
            parents.append(first + above - 1 if above else 0)
            tokens.append(text[at] if right else wrong)
            place.append(place[above] + 1 if at < len(text) and tokens[-1] == text[at] else -1)
        self.repeats += sum(count - 1 for count in Counter(tokens).values())
        self.next_id[handle] = first + len(tokens)
        score = np.array([-rnd.random() for _ in tokens], np.float32)
        engine.grow(
            1, handle, Nodes(epoch, first, np.array(parents, np.int64), np.array(tokens, np.int32), score),
            complete=True,
        )  # fmt: skip


def serve(engine: Engine, requests: list[GenerateRequest], draft: GuessingDraft | None) -> dict[str, Text]:
    """Serves all requests, so many at a time; checks that nothing has gaps and nothing is left behind."""
    texts = {r.session_id: Text(list(r.resume)) for r in requests}
    todo, running, handle = list(requests[::-1]), 0, 0
    if draft:
        engine.open_link(1, "guessing")
    while todo or running:
        while todo and running < AT_ONCE:
            request = todo.pop()
            engine.submit(request)
            running, handle = running + 1, handle + 1
            if draft:
                draft.join(engine, request.session_id, handle)
        outcome = engine.step()
        for emitted in outcome.emitted:
            text = texts[emitted.session_id]
            assert emitted.offset == len(text.tokens)
            text.tokens += emitted.tokens
            text.logprobs += emitted.logprobs
            text.accepted += emitted.accepted
            text.last = emitted
        for ended in outcome.ended:
            texts[ended.session_id].ended = ended
        for name, error in outcome.failed:
            texts[name].error = error
        running -= len(outcome.ended) + len(outcome.failed)
        if draft:
            draft.hear(engine, outcome)
    assert engine.runtime.pool.held == 0 and not engine.sessions
    return texts
