"""The alarm on drafts whose guesses are no longer taken."""

from __future__ import annotations

import random
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scripted import VOCAB, ScriptedDraft, make_engine, plain_decode, request, run, tiny_model
from structlog.testing import capture_logs

from draftwood.parameters import SamplingParams
from draftwood.telemetry import METRICS
from verifier_service.engine import Engine
from verifier_service.live_tree import Nodes
from verifier_service.watch import FEWEST_STEPS, AcceptanceWatch


def feed(watch: AcceptanceWatch, chance: float, steps: int, seed: int = 0) -> int:
    """Steps with that chance of acceptance; the number of alarms."""
    rnd = random.Random(seed)
    return sum(watch.observe(rnd.random() < chance) for _ in range(steps))


@pytest.mark.parametrize("chance", [0.2, 0.4, 0.6, 0.9])
def test_steady_acceptance_raises_no_alarm(chance: float) -> None:
    assert sum(feed(AcceptanceWatch(), chance, 3000, seed) for seed in range(10)) == 0


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_a_collapse_is_noticed_once_and_so_is_the_next_one_after_a_recovery(chance: float) -> None:
    watch = AcceptanceWatch()
    assert feed(watch, chance, 2000) == 0
    assert feed(watch, 0.0, 150) == 1 and watch.collapsed
    assert feed(watch, 0.0, 5000) == 0, "one alarm a collapse"
    assert feed(watch, chance, 400) == 0 and not watch.collapsed
    assert feed(watch, 0.0, 150) == 1


def test_guesses_that_are_never_taken_are_a_collapse_from_the_start() -> None:
    watch = AcceptanceWatch()
    assert feed(watch, 0.0, FEWEST_STEPS - 1) == 0
    assert feed(watch, 0.0, 1) == 1


class WrongDraft(ScriptedDraft):
    """Sends a chain whose first token is never the target's."""

    def draw(self, engine: Engine, handle: int, epoch: int, length: int) -> None:
        first, text = self.next_id[handle], self.truth[self.names[handle]]
        if length < len(text):
            token = np.array([(text[length] + 1) % VOCAB, 3], np.int32)
            nodes = Nodes(epoch, first, np.array([0, first]), token, np.full(2, -0.1, np.float32))
            self.next_id[handle] = first + 2
            engine.grow(self.link, handle, nodes, complete=True)


def test_the_engine_raises_the_alarm_for_a_draft_whose_guesses_are_never_taken() -> None:
    """And for no other: the draft beside it guesses right more often than not."""
    model, rnd = tiny_model("llama"), random.Random(4)
    prompts = [[rnd.randrange(VOCAB) for _ in range(6)] for _ in range(6)]
    want = plain_decode(model, prompts, 150, [SamplingParams()] * 6)
    truth = {f"s{k}": prompt + text for k, (prompt, text) in enumerate(zip(prompts, want, strict=True))}
    drafts = [ScriptedDraft(random.Random(1), truth, link=0), WrongDraft(random.Random(2), truth, link=1)]
    engine, alarms = make_engine(model), METRICS.acceptance_alarms._value.get()
    got = run(engine, [request(f"s{k}", p, 150, SamplingParams()) for k, p in enumerate(prompts)], drafts, at_once=3)
    assert list(got.values()) == want
    assert {model: watch.collapsed for (model, _), watch in engine._watches.items()} == {
        "scripted-0": False,
        "scripted-1": True,
    }
    assert METRICS.acceptance_alarms._value.get() == alarms + 1


@dataclass
class TurningDraft(WrongDraft):
    """Sends the target's next token, but for one session, in which it is wrong from a length on."""

    turns: str = ""
    at_length: int = 0

    def draw(self, engine: Engine, handle: int, epoch: int, length: int) -> None:
        name = self.names[handle]
        if name == self.turns and length >= self.at_length:
            return super().draw(engine, handle, epoch, length)
        first, text = self.next_id[handle], self.truth[name]
        if length < len(text):
            token, score = np.array(text[length : length + 1], np.int32), np.full(1, -0.1, np.float32)
            nodes = Nodes(epoch, first, np.zeros(1, np.int64), token, score)
            self.next_id[handle] = first + 1
            engine.grow(self.link, handle, nodes, complete=True)
        return None


def collapses(turns: str) -> tuple[list[MutableMapping[str, Any]], float, float]:
    """Four sessions of 400 tokens at once: what is logged, and how many alarms of models and of sessions there are."""
    model, rnd = tiny_model("llama"), random.Random(9)
    prompts = [[rnd.randrange(VOCAB) for _ in range(6)] for _ in range(4)]
    want = plain_decode(model, prompts, 400, [SamplingParams()] * 4)
    truth = {f"s{k}": prompt + text for k, (prompt, text) in enumerate(zip(prompts, want, strict=True))}
    draft = TurningDraft(random.Random(1), truth, turns=turns, at_length=290)
    before = METRICS.acceptance_alarms._value.get(), METRICS.session_alarms._value.get()
    with capture_logs() as logs:
        requests = [request(name, p, 400, SamplingParams()) for name, p in zip(truth, prompts, strict=True)]
        got = run(make_engine(model), requests, [draft], at_once=4)
    assert list(got.values()) == want
    told = [entry for entry in logs if "collapsed" in entry["event"]]
    return told, METRICS.acceptance_alarms._value.get() - before[0], METRICS.session_alarms._value.get() - before[1]


def test_a_session_in_which_a_good_draft_fails_has_an_alarm_of_its_own() -> None:
    """Once, with its name; the draft's model, which serves three others well, has none."""
    told, of_models, of_sessions = collapses("s2")
    assert (of_models, of_sessions) == (0, 1)
    (entry,) = told
    assert (entry["session"], entry["model"], entry["rule"]) == ("s2", "scripted-0", "greedy")
    assert entry["now"] < 0.3 * entry["usual"]


def test_sessions_whose_draft_goes_on_well_have_no_alarm() -> None:
    assert collapses("") == ([], 0, 0)


def test_where_the_model_collapses_its_alarm_is_the_only_one() -> None:
    """``WrongDraft`` is wrong in all sessions, and each has steps enough for an alarm of its own."""
    model, prompt = tiny_model("llama"), [3, 1, 4, 1, 5]
    (want,) = plain_decode(model, [prompt], 200, [SamplingParams()])
    draft = WrongDraft(random.Random(2), {"s": prompt + want})
    before = METRICS.acceptance_alarms._value.get(), METRICS.session_alarms._value.get()
    run(make_engine(model), [request("s", prompt, 200, SamplingParams())], [draft], at_once=1)
    assert METRICS.acceptance_alarms._value.get() == before[0] + 1
    assert METRICS.session_alarms._value.get() == before[1]
