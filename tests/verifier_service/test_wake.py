"""Width 0 and back: a draft that has slept catches up before it draws, and guesses as well as one that has not."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from scripted import VOCAB, make_engine, plain_decode, request, tiny_model

from draft_service.drafter import SessionCommitted, SessionStart
from draft_service.drafters.lm import LmDrafter
from draftwood.config import DraftSettings
from draftwood.parameters import SamplingParams
from draftwood.runtime.model import ModelRuntime
from draftwood.vocabulary import Vocabulary
from verifier_service.engine import Engine, Outcome
from verifier_service.live_tree import Nodes
from verifier_service.width import Policy

TOKENS = 60
LINK, HANDLE = 0, 1


@dataclass
class Pair:
    """A verifier and a draft worker with the same weights: greedy guesses are right unless the draft's state is not."""

    engine: Engine
    drafter: LmDrafter
    heard: list[int]  # the text as the draft has been told it
    got: list[int] = field(default_factory=list)
    told: int = 0  # commits that reached the draft

    def step(self) -> tuple[int, int]:
        """Nodes verified and accepted in one step, for which the draft has drawn all it was asked for."""
        while self.drafter.wants_work():
            for (link, handle), g in self.drafter.work():
                nodes = Nodes(g.epoch, g.first_id, g.parent, g.token, g.score)
                self.engine.grow(link, handle, nodes, complete=g.complete)
        outcome = self.engine.step()
        self._tell(outcome)
        self.got += [token for e in outcome.emitted for token in e.tokens]
        return outcome.verified, sum(e.accepted for e in outcome.emitted)

    def _tell(self, outcome: Outcome) -> None:
        for commit in outcome.commits.get(LINK, []):
            self.told += 1
            self.heard += commit.tokens
            assert len(self.heard) == commit.length
            told = SessionCommitted(commit.epoch, commit.length, commit.tokens, commit.budget)
            self.drafter.commit((LINK, commit.handle), told)


def make_pair(prompt: list[int]) -> Pair:
    engine = make_engine(tiny_model("llama"))
    settings = DraftSettings(
        kind="lm", depth=4, beam=3, branch=3, max_nodes=12, page_tokens=16, lookahead_levels=0, min_level_survival=0
    )
    vocabulary = Vocabulary(tuple(str(i) for i in range(VOCAB)), frozenset(), VOCAB)
    drafter = LmDrafter(ModelRuntime(tiny_model("llama"), kv_pages=64, page_tokens=16), settings, "tiny", vocabulary)
    engine.open_link(LINK, "tiny")
    engine.submit(request("s", prompt, TOKENS, SamplingParams()))
    start = engine.join(LINK, HANDLE, "s")
    told = SessionStart(start.epoch, start.tokens, SamplingParams(), start.budget, VOCAB, 255, 32, 512)
    drafter.open((LINK, HANDLE), told)
    return Pair(engine, drafter, list(start.tokens))


@pytest.mark.parametrize("asleep_steps", [1, 2, 15, 16, 17, 33])
def test_a_draft_that_has_slept_guesses_right_at_once(asleep_steps: int) -> None:
    prompt = [1, 2, 3, 4, 5]
    (want,) = plain_decode(tiny_model("llama"), [prompt], TOKENS, [SamplingParams()])
    pair = make_pair(prompt)
    pair.step()
    assert all(accepted >= 2 for _, accepted in (pair.step() for _ in range(2)))
    pair.engine.set_policy(Policy(max_session_nodes=0))
    told = pair.told
    for _ in range(asleep_steps):
        assert pair.step() == (0, 0)
    assert pair.told == told + 1, "it hears once that it is to sleep, and then no more"
    pair.engine.set_policy(Policy())
    pair.step()  # the commit that wakes it
    assert pair.heard == [*prompt, *pair.got], "it has been told all that was written meanwhile"
    while len(pair.got) < TOKENS - 5:
        verified, accepted = pair.step()
        assert verified > 0 and accepted >= 2
    assert pair.got == want[: len(pair.got)]
