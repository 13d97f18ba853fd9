"""The canary: what its text is, what a trial of good, bad and clumsy drafts comes to."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scripted import VOCAB, make_engine, plain_decode, tiny_model
from table_runtime import TableRuntime, next_token

from draftwood.errors import DraftwoodError
from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.model import Chosen
from draftwood.tree import Proposal
from verifier_service.canary import FEWEST_TOKENS, MOST_TOKENS, Canary, Trial, learn_canary
from verifier_service.live_tree import Nodes

CANARY = Canary((7, 8, 9), tuple(random.Random(3).randrange(VOCAB) for _ in range(MOST_TOKENS)))
TEXT = [*CANARY.prompt, *CANARY.continuation]
NOTHING: tuple[int, ...] = ()


def chain(epoch: int, first: int, tokens: tuple[int, ...] | list[int]) -> Nodes:
    parent = np.array([0, *range(first, first + len(tokens) - 1)][: len(tokens)], np.int64)
    return Nodes(epoch, first, parent, np.array(tokens, np.int32), np.full(len(tokens), -0.1, np.float32))


def tried(canary: Canary, guess: object) -> Trial:
    """A trial of a draft that sends ``guess(length)`` in each round; what it is told is held against the text."""
    text = [*canary.prompt, *canary.continuation]
    trial = Trial(canary, max_nodes=0, live_nodes=64)
    start = trial.join(5, trial.ticket)
    assert (start.tokens, start.remaining, start.handle) == (canary.prompt, len(canary.continuation), 5)
    length, epoch, first = len(start.tokens), start.epoch, 1
    while trial.result is None:
        tokens = guess(length)  # type: ignore[operator]
        commit = trial.grow(chain(epoch, first, tokens), complete=True)
        first += len(tokens)
        if commit:
            assert list(commit.tokens) == text[length : length + len(commit.tokens)] and commit.epoch == epoch + 1
            assert commit.length == length + len(commit.tokens) and commit.budget == start.budget > 0
            length, epoch = commit.length, commit.epoch
    return trial


@pytest.mark.parametrize(
    "guess, taken, steps",
    [
        (lambda at: TEXT[at : at + 3], 8, 8),
        (lambda at: TEXT[at : at + 1], 16, 16),
        (lambda at: [(TEXT[at] + 1) % VOCAB, 3], 0, MOST_TOKENS),
        (lambda at: TEXT[at - 1 : at + 2] if TEXT[at - 1] != TEXT[at] else [], 0, MOST_TOKENS),
        (lambda _: NOTHING, 0, MOST_TOKENS),
        (lambda at: TEXT[at : at + 40] + [0] * 40, 1, 1),
    ],
    ids=["three-right", "one-right", "tokens-off-by-one", "positions-off-by-one", "silent", "too-deep"],
)
def test_a_trial_counts_the_steps_whose_best_guess_was_taken(guess: object, taken: int, steps: int) -> None:
    result = tried(CANARY, guess).result
    assert result and (result.taken, result.steps, result.failed) == (taken, steps, taken == 0)


def test_only_the_likeliest_guess_counts() -> None:
    for score, taken in ((-0.1, 1), (-0.3, 0)):
        trial = Trial(CANARY, max_nodes=0, live_nodes=64)
        trial.join(5, trial.ticket)
        right, wrong = TEXT[3], (TEXT[3] + 1) % VOCAB
        nodes = Nodes(
            0, 1, np.zeros(2, np.int64), np.array([wrong, right], np.int32), np.array([-0.2, score], np.float32)
        )
        commit = trial.grow(nodes, complete=True)
        assert commit and commit.node_ids == (2,), "taken either way"
        assert trial._taken == taken


def test_half_a_good_draft_passes_and_a_stray_hit_does_not() -> None:
    rnd = random.Random(1)
    often = tried(CANARY, lambda at: [TEXT[at] if rnd.random() < 0.3 else 0])
    hits = {len(CANARY.prompt) + at for at in (4, 12, 20, 28)}
    rarely = tried(CANARY, lambda at: [TEXT[at] if at in hits else (TEXT[at] + 1) % VOCAB])
    assert often.result and not often.result.failed
    assert rarely.result and rarely.result.taken == 4 and rarely.result.failed


def test_growth_that_is_late_early_or_of_another_rule() -> None:
    trial = Trial(CANARY, max_nodes=4, live_nodes=64)
    assert trial.join(5, trial.ticket).budget == 4
    with pytest.raises(DraftwoodError, match="TREE_EPOCH"):
        trial.grow(chain(1, 1, [1]), complete=True)
    drawn = Nodes(0, 1, np.zeros(1, np.int64), np.array([1], np.int32), np.zeros(1, np.float32),
                  {0: Proposal(np.array([1]), np.ones(1, np.float32))})  # fmt: skip
    with pytest.raises(DraftwoodError, match="TREE_BAD_Q"):
        trial.grow(drawn, complete=True)
    assert trial.grow(chain(0, 1, TEXT[3:5]), complete=False) is None, "the round goes on"
    commit = trial.grow(chain(0, 3, []), complete=True)
    assert commit and commit.tokens == tuple(TEXT[3:6]) and commit.node_ids == (1, 2)
    assert trial.grow(chain(0, 3, [4]), complete=True) is None, "an old round is no step"
    with pytest.raises(DraftwoodError, match="HANDLE"):
        trial.join(6, trial.ticket)
    with pytest.raises(DraftwoodError, match="TICKET"):
        trial.join(6, b"wrong")


def test_the_verifier_learns_what_the_target_writes_and_leaves_nothing_behind() -> None:
    model, prompt = tiny_model("llama"), [5, 3, 8, 1]
    engine = make_engine(model)
    canary = learn_canary(engine.runtime, prompt, VOCAB, engine.context_limit)
    assert canary and canary.prompt == tuple(prompt)
    assert list(canary.continuation) == plain_decode(model, [prompt], MOST_TOKENS, [SamplingParams()])[0]
    assert engine.runtime.pool.held == 0 and engine.totals.steps == 0 and not engine.audit()


class RepeatingTarget(TableRuntime):
    """Repeats the second half of an even prompt for ``right`` tokens, and goes its own way from then on."""

    def __init__(self, prompt: list[int], right: int) -> None:
        super().__init__(pages=8)
        self.prompt, self.right, self.forwards = prompt, right, 0

    def next_token(self, text: list[int]) -> int:
        again = text[-len(self.prompt) // 2]
        written = len(text) - len(self.prompt)
        return again if written < self.right else (again + 1) % 13 if written == self.right else next_token(text)

    def choose(self, parts: list[Rows], _rules: object, _vocab_size: int) -> Chosen:
        self.forwards += 1
        nothing = self.forward(parts)
        texts = [self._read(part, row) for part in parts for row in range(part.logits_from, len(part.token))]
        return Chosen(np.array([self.next_token(text) for text in texts]), nothing, nothing)


@pytest.mark.parametrize("right", [0, 1, 5, MOST_TOKENS - 2, MOST_TOKENS - 1, MOST_TOKENS])
def test_the_repetition_is_learnt_in_one_forward_and_what_comes_behind_it_token_by_token(right: int) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7] * 2
    target = RepeatingTarget(prompt, right)
    text = list(prompt)
    for _ in range(MOST_TOKENS):
        text.append(target.next_token(text))
    canary = learn_canary(target, prompt, 13, 1000)  # type: ignore[arg-type]
    assert canary and list(canary.continuation) == text[len(prompt) :]
    assert target.forwards == max(1, MOST_TOKENS - right)
    assert target.computed == len(prompt) + MOST_TOKENS - 1 + target.forwards - 1, "no row twice"
    assert target.pool.held == 0


def test_a_target_without_finite_logits_has_no_canary() -> None:
    target = RepeatingTarget([1, 2, 1, 2], 5)
    target.next_token = lambda text: -1 if len(text) > 6 else RepeatingTarget.next_token(target, text)  # type: ignore[method-assign]
    assert learn_canary(target, [1, 2, 1, 2], 13, 1000) is None  # type: ignore[arg-type]
    assert target.pool.held == 0


def test_a_short_context_shortens_the_canary_or_has_none() -> None:
    runtime = make_engine(tiny_model("llama")).runtime
    for room in (FEWEST_TOKENS - 1, FEWEST_TOKENS, MOST_TOKENS + 1):
        canary = learn_canary(runtime, [5, 3], VOCAB, 2 + room)
        assert (canary is None) == (room < FEWEST_TOKENS)
        assert canary is None or len(canary.continuation) == min(room, MOST_TOKENS)
