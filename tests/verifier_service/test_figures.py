"""What the engine keeps of each session: nodes by depth, rounds that were late, waits, and why a step was so wide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scripted import VOCAB, make_engine, plain_decode, request, tiny_model

from draftwood.parameters import SamplingParams
from verifier_service.engine import Engine
from verifier_service.live_tree import Nodes
from verifier_service.session import CATCH_UP_STEPS, Stats
from verifier_service.width import Policy

PROMPT = [5, 3, 8, 1, 9, 2]
MODEL = tiny_model("llama")
TEXT = PROMPT + plain_decode(MODEL, [PROMPT], 40, [SamplingParams()])[0]


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """An engine with one session, a clock, and drafts that do what a test says."""

    def __init__(self, *links: int, max_tokens: int = 30, **settings: object) -> None:
        self.clock = Clock()
        self.engine: Engine = make_engine(MODEL, **{"draft_wait_ms": 1000} | settings)
        self.engine.clock = self.clock
        nodes = self.engine.settings.max_nodes
        self.engine.submit(request("s", PROMPT, max_tokens, SamplingParams(), max_nodes=nodes))
        for link in links:
            self.engine.open_link(link, f"draft-{link}")
            self.engine.join(link, 1, "s")
        self.session = self.engine.sessions["s"]
        self.next_id = 1

    @property
    def stats(self) -> Stats:
        return self.session.stats

    def grow(self, link: int, *tokens: int) -> None:
        """A chain below the anchor, and the end of the round."""
        first, self.next_id = self.next_id, self.next_id + len(tokens)
        parent = np.array([0, *range(first, first + len(tokens) - 1)][: len(tokens)], np.int64)
        score = np.full(len(tokens), -0.1, np.float32)
        nodes = Nodes(self.session.tree.epoch, first, parent, np.array(tokens, np.int32), score)
        self.engine.grow(link, 1, nodes, complete=True)

    def right(self, count: int) -> list[int]:
        length = len(self.session.tokens)
        return TEXT[length : length + count]

    def after(self, seconds: float) -> None:
        self.clock.now_s += seconds


def test_nodes_are_counted_by_depth_as_sent_verified_and_accepted() -> None:
    rig = Rig(0)
    rig.engine.step()
    right = rig.right(4)
    rig.grow(0, *right[:3], (right[3] + 1) % VOCAB)
    rig.engine.step()
    wrong = (rig.right(1)[0] + 1) % VOCAB
    rig.grow(0, wrong, wrong)
    rig.engine.step()
    stats = rig.stats
    assert (stats.drafted, stats.verified, stats.accepted) == (6, 6, 3)
    assert stats.verified_by_depth == [2, 2, 1, 1] + [0] * 12
    assert stats.accepted_by_depth == [1, 1, 1] + [0] * 13


def test_deep_nodes_are_counted_in_the_last_place() -> None:
    rig = Rig(0, max_nodes=24)
    rig.engine.step()
    rig.grow(0, *rig.right(20))
    rig.engine.step()
    assert rig.stats.accepted == 20
    assert rig.stats.verified_by_depth == rig.stats.accepted_by_depth == [1] * 15 + [5]


def test_a_wait_lasts_from_the_commit_to_the_last_awaited_tree() -> None:
    rig = Rig(0, 1)
    rig.after(5.0)
    rig.grow(0)
    rig.grow(1)
    rig.engine.step()
    assert rig.stats.wait_s == 0, "nobody waits for drafts while the prompt is computed"
    rig.after(0.25)
    rig.grow(0, *rig.right(2))
    assert rig.stats.wait_s == 0, "the other one is still drawing"
    rig.after(0.5)
    rig.grow(1)
    rig.grow(1)
    rig.after(4.0)
    rig.engine.step()
    assert rig.stats.wait_s == 0.75, "what comes after the last tree is not the drafts'"
    assert rig.stats.late == 0


def test_nobody_waits_for_a_draft_that_still_reads_the_prompt() -> None:
    rig = Rig(0)
    for _ in range(CATCH_UP_STEPS):
        rig.after(5.0)
        rig.engine.step()
        assert (rig.stats.wait_s, rig.stats.late) == (0, 0)
    rig.after(1.5)
    rig.engine.step()
    assert (rig.stats.wait_s, rig.stats.late) == (1.5, 1), "it has had its time"


def test_nor_for_one_that_was_woken_and_reads_what_it_has_missed() -> None:
    rig = Rig(0)
    rig.grow(0)
    rig.engine.step()
    rig.engine.set_policy(Policy(max_session_nodes=0))
    rig.grow(0)
    rig.engine.step()
    assert rig.session.drafts[0].asleep
    rig.engine.set_policy(Policy())
    for _ in range(3):
        rig.after(1.5)
        rig.engine.step()
    assert (rig.stats.wait_s, rig.stats.late) == (0, 0)
    usual = rig.engine._links[0].round_s
    rig.grow(0)
    assert rig.engine._links[0].round_s == usual, "that was no usual round"
    rig.engine.step()
    rig.after(1.5)
    rig.engine.step()
    assert (rig.stats.wait_s, rig.stats.late) == (1.5, 1), "awake again"


def test_a_wait_ends_with_the_step_that_waits_no_longer_and_the_round_is_late() -> None:
    rig = Rig(0, 1)
    rig.grow(0)
    rig.grow(1)
    rig.engine.step()
    rig.grow(0, *rig.right(1))
    rig.after(1.5)
    rig.engine.step()
    assert (rig.stats.wait_s, rig.stats.late) == (1.5, 1)
    for _ in range(2):
        rig.grow(0)
        rig.after(1.5)
        rig.engine.step()
    assert (rig.stats.wait_s, rig.stats.late) == (4.5, 3)
    assert rig.session.drafts[1].lagging
    rig.grow(0)
    rig.after(1.0)
    rig.grow(1)
    assert rig.stats.wait_s == 4.5, "a draft that lags is not waited for"


def test_without_drafts_nothing_is_waited_for() -> None:
    rig = Rig()
    for _ in range(4):
        rig.after(1.0)
        rig.engine.step()
    assert (rig.stats.wait_s, rig.stats.late, rig.stats.width_reason) == (0, 0, "no_nodes")


@pytest.mark.parametrize(
    "settings, guess, gate, want",
    [
        ({}, True, True, "full"),
        ({}, False, True, "no_nodes"),
        ({"width": "adaptive"}, True, False, "shut"),
        ({"width": "adaptive"}, False, False, "shut"),
        ({"width": "adaptive"}, True, True, "baseline"),
        ({"width": "adaptive"}, False, True, "no_nodes"),
    ],
)
def test_the_reason_of_the_last_width(settings: dict[str, object], guess: bool, gate: bool, want: str) -> None:
    rig = Rig(0, **settings)
    rig.engine.planner.gate.open = gate
    rig.engine.step()
    rig.grow(0, *(rig.right(2) if guess else []))
    rig.after(0.01)
    rig.engine.step()
    assert rig.stats.width_reason == want
