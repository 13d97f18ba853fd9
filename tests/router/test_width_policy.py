"""The width policy's decisions, look by look, on a clock that the tests turn."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from draftwood.config import WidthPolicySettings
from router.width_policy import (
    CAUTION,
    DEPTHS,
    MOST_PATIENCE,
    NODES,
    Caps,
    Decision,
    DraftLook,
    Ladder,
    VerifierLook,
    WidthPolicy,
)

SETTINGS = WidthPolicySettings(step_ms=50.0)
STEPS = 20  # of a verifier between two looks


@pytest.mark.parametrize(("width", "cap"), [(30.0, 16), (20.0, 16), (8.0, 4)])
def test_the_first_cap_is_below_the_width_as_it_is(width: float, cap: int) -> None:
    """A router that has just started knows it from one look."""
    bench = Bench()
    caps = [bench.look(wait_ms=2000.0, width=width).caps.nodes for _ in range(3)]
    assert next(each for each in caps if each is not None) == cap


class Bench:
    """A policy, one verifier and its draft workers; a look a second."""

    def __init__(self, settings: WidthPolicySettings = SETTINGS) -> None:
        self.policy = WidthPolicy(settings)
        self.now = 0.0
        self.steps = self.nodes = 0

    def look(
        self,
        *,
        wait_ms: float = 0.0,
        step_ms: float = 20.0,
        width: float = 20.0,
        sessions: int = 4,
        busy: float = 0.2,
        draft_sessions: int = 4,
    ) -> Decision:
        """``width``: what the verifier takes by itself."""
        self.now += 1.0
        self.steps += STEPS
        self.nodes += round(STEPS * sessions * width)
        verifier = VerifierLook("v", "m", sessions, wait_ms, step_ms, self.steps, self.nodes)
        return self.policy.decide(self.now, [verifier], {"m": [DraftLook("lm", draft_sessions, busy)]})["v"]

    def looks(self, count: int, **load: float) -> list[Decision]:
        return [self.look(**load) for _ in range(count)]  # type: ignore[arg-type]


def caps(decisions: list[Decision]) -> list[int | None]:
    return [decision.caps.nodes for decision in decisions]


def test_without_pressure_there_is_no_cap() -> None:
    bench = Bench()
    assert all(decision.caps == Caps() and not decision.changes for decision in bench.looks(30))


def test_one_look_alone_changes_nothing() -> None:
    bench = Bench()
    bench.looks(10)
    for _ in range(5):
        bench.look(step_ms=500.0)
        bench.look()
    assert bench.look().caps == Caps()


def test_pressure_narrows_by_the_next_cap_that_binds_and_no_oftener_than_it_may() -> None:
    bench = Bench()
    bench.looks(10, width=12.0)
    decisions = bench.looks(20, step_ms=100.0, width=12.0)
    seen = list(dict.fromkeys(caps(decisions)))
    assert seen[:2] == [None, 8], "32 and 16 would not bind"
    changed = [k for k, decision in enumerate(decisions) if decision.changes]
    assert changed[0] == 1 and all(b - a >= SETTINGS.narrow_s for a, b in pairwise(changed))


def test_a_verifier_that_takes_less_by_itself_is_left_alone() -> None:
    bench = Bench()
    bench.looks(10, width=1.5)
    decisions = bench.looks(20, wait_ms=5000.0, width=1.5)
    assert caps(decisions) == [None] * 20 and "no narrower cap would bind" in decisions[-1].reason


@pytest.mark.parametrize("least", [1, 2, 4, 16, 32])
def test_it_never_goes_below_the_fewest_nodes(least: int) -> None:
    bench = Bench(WidthPolicySettings(min_nodes=least))
    bench.looks(10, width=50.0)
    decisions = bench.looks(60, wait_ms=5000.0, width=50.0)
    assert decisions[-1].caps.nodes == least and "narrowest" in decisions[-1].reason


def test_caps_are_lifted_after_ease_and_the_last_one_too() -> None:
    bench = Bench()
    bench.looks(10)
    narrow = bench.looks(30, step_ms=100.0)
    assert narrow[-1].caps.nodes == SETTINGS.min_nodes
    eased = bench.looks(40, step_ms=10.0, width=2.0)
    lifted = [k for k, decision in enumerate(eased) if decision.changes]
    assert lifted[0] >= SETTINGS.widen_s and all(b - a >= SETTINGS.widen_s for a, b in pairwise(lifted))
    assert [eased[k].caps.nodes for k in lifted] == [8, 32, None] and not any(eased[k].narrows for k in lifted)


def test_between_ease_and_too_much_a_cap_is_only_tried_wider_after_a_good_while() -> None:
    bench = Bench()
    bench.looks(10)
    before = bench.looks(6, step_ms=100.0)[-1].caps.nodes
    assert before is not None
    held = bench.looks(60, step_ms=0.8 * SETTINGS.step_ms)
    lifted = [k for k, decision in enumerate(held) if decision.changes]
    assert all(b - a >= CAUTION * SETTINGS.widen_s for a, b in pairwise([0, *lifted]))
    assert [NODES.index(held[k].caps.nodes or 64) for k in lifted[:1]] == [NODES.index(before) - 1]


def test_lifting_too_early_makes_it_wait_longer_the_next_time() -> None:
    ladder, now, spans = Ladder(NODES), 0.0, []
    for _ in range(6):
        while not ladder.rung:
            now += 1
            ladder.look(now, 2.0, 8, SETTINGS)
        began = now
        while ladder.rung:
            now += 1
            ladder.look(now, 0.5, 8, SETTINGS)
        spans.append(now - began)
    assert spans[0] == pytest.approx(SETTINGS.widen_s, abs=1)
    assert spans[-1] == pytest.approx(MOST_PATIENCE * SETTINGS.widen_s, abs=1)
    assert all(b >= a for a, b in pairwise(spans))
    ladder.look(now + 4, 2.0, 8, SETTINGS)
    ladder.look(now + 5, 2.0, 8, SETTINGS)
    assert ladder.rung and ladder.patience > 1
    ladder.look(now + 6, 0.5, 3, SETTINGS)
    assert ladder.patience == 1, "the load that it was learnt at is gone"


def test_draft_workers_without_time_cap_the_depth_and_not_the_nodes() -> None:
    bench = Bench()
    decisions = bench.looks(20, busy=0.99)
    assert decisions[-1].caps.nodes is None and decisions[-1].caps.depth == DEPTHS[-1]
    assert "drafts_busy: at its narrowest" in decisions[-1].reason
    eased = bench.looks(60, busy=0.3)
    assert eased[-1].caps == Caps()


def test_a_draft_worker_with_one_session_has_nobody_to_give_way_to() -> None:
    assert Bench().looks(20, busy=1.0, draft_sessions=1)[-1].caps == Caps()


def test_the_slowest_kind_counts_as_a_step_waits_for_it() -> None:
    policy = WidthPolicy(SETTINGS)
    drafts = [DraftLook("lm", 8, 1.0), DraftLook("ngram", 8, 0.0), DraftLook("ngram", 8, 0.0)]
    for now in range(1, 10):
        decision = policy.decide(float(now), [VerifierLook("v", "m", 8, 0, 10, now, now)], {"m": drafts})["v"]
    assert decision.caps.depth is not None and decision.inputs["drafts_busy"] == pytest.approx(1 / SETTINGS.draft_busy)


def test_few_nodes_are_a_chain_if_draft_workers_have_time_for_it() -> None:
    bench = Bench()
    bench.looks(10)
    decisions = bench.looks(30, step_ms=100.0)
    for decision in decisions:
        assert decision.caps.chain == (decision.caps.nodes is not None and decision.caps.nodes <= 4)
    bench.looks(10, step_ms=40.0, busy=0.8)
    assert bench.look(step_ms=40.0, busy=0.8).caps.chain, "it stays while there is some time"
    pressed = bench.looks(4, step_ms=40.0, busy=1.0)[-1].caps
    assert pressed.depth is not None and not pressed.chain


def test_busy_draft_workers_draw_no_chains() -> None:
    bench = Bench()
    bench.looks(10, busy=0.8)
    decision = bench.looks(30, step_ms=100.0, busy=0.8)[-1]
    assert decision.caps == Caps(SETTINGS.min_nodes)


def test_without_a_target_the_step_time_does_not_matter() -> None:
    decision = Bench(WidthPolicySettings()).looks(10, step_ms=1e6)[-1]
    assert decision.caps == Caps() and set(decision.inputs) == {"queue_wait", "drafts_busy", "width", "sessions"}


def test_a_decision_says_what_it_was_decided_from() -> None:
    bench = Bench()
    bench.looks(10)
    decision = bench.looks(2, step_ms=100.0)[-1]
    assert decision.changes and decision.narrows
    assert str(decision).startswith("16 nodes: step_time: too much (queue_wait 0.00, step_time 2.00, drafts_busy 0.22,")


def test_each_verifier_has_its_own_caps_and_is_forgotten_when_it_is_gone() -> None:
    policy, shared = WidthPolicy(SETTINGS), {"m": [DraftLook("lm", 4, 0.1)]}

    def look(now: int, names: str) -> dict[str, Decision]:
        looks = [VerifierLook(name, "m", 4, 0, 200 if name == "a" else 10, 20 * now, 1600 * now) for name in names]
        return policy.decide(float(now), looks, shared)

    for now in range(1, 20):
        decided = look(now, "ab")
    assert decided["a"].caps.nodes is not None and decided["b"].caps == Caps()
    assert set(look(20, "b")) == {"b"}
    assert look(21, "ab")["a"].caps == Caps(), "another process in its place starts without a cap"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_load_the_rules_hold(seed: int) -> None:
    """Caps are rungs or none, changes keep their distances, the inputs are told in full."""
    rng, bench = random.Random(seed), Bench()
    last: dict[str, float] = {}
    for _ in range(400):
        load = {"wait_ms": rng.choice([0.0, 3000.0]), "step_ms": rng.uniform(5, 120), "busy": rng.random()}
        decision = bench.look(**load, width=rng.uniform(0, 30), draft_sessions=rng.randint(0, 6))
        assert decision.caps.nodes in (None, *NODES) and decision.caps.depth in (None, *DEPTHS)
        assert not decision.caps.chain or (decision.caps.nodes or 99) <= 4
        assert decision.caps.nodes is None or decision.caps.nodes >= SETTINGS.min_nodes
        for name in ("nodes", "depth"):
            now, before = getattr(decision.caps, name), getattr(decision.before, name)
            if now != before:
                assert bench.now - last.get(name, -99.0) >= SETTINGS.narrow_s
                last[name] = bench.now
