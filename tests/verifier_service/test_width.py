"""Whether drafts pay: the gate's trial, held against plain decoding on the machine as it is at that moment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from planning import decoding, make_planner, step

from verifier_service.width import DWELL_STEPS, TRIAL_SHARE, Outlook, Situation, SpeculationGate, StepTimes

LOAD = 4
PLAIN_S, TREE_S, OVERHEAD_S = 0.05, 0.06, 0.01


def serve(gate: SpeculationGate, times: StepTimes, steps: int, tokens: float, slowness: float) -> list[bool]:
    """Steps of 8 sessions with 8 nodes, on a machine that is ``slowness`` times slower than when it was measured."""
    seen = []
    for _ in range(steps):
        forward_s = TREE_S * slowness
        times.observe(16, forward_s, LOAD)
        plain_s = times.plain(8, LOAD) * times.drift(16, forward_s, LOAD)
        step_s = (forward_s + OVERHEAD_S) / plain_s
        gate.record(tokens / 8, step_s, 1.2, LOAD)
        gate.step(1.2, LOAD)
        seen.append(gate.open)
    return seen


def measured() -> StepTimes:
    times = StepTimes([8, 16], [PLAIN_S, TREE_S])
    times.observe(8, PLAIN_S, LOAD, plain=True)
    return times


def test_drafts_that_pay_stay_on_through_a_slow_spell_of_the_machine() -> None:
    gate, times = SpeculationGate(), measured()
    assert all(serve(gate, times, 60, tokens=12, slowness=1.0))  # 12 / 70 ms against 8 / 50 ms
    assert 1.05 < gate.advantage < 1.1
    assert all(serve(gate, times, 12, tokens=12, slowness=2.0))  # against a stale 50 ms: 0.86
    assert gate.advantage > 1


def test_drafts_that_do_not_pay_are_switched_off_within_20_steps() -> None:
    gate, times = SpeculationGate(), measured()
    seen = serve(gate, times, 20, tokens=9, slowness=1.0)
    assert all(seen[: DWELL_STEPS - 1]) and not seen[-1]


def test_the_first_steps_of_a_trial_do_not_count() -> None:
    gate, times = SpeculationGate(), measured()
    serve(gate, times, 3, tokens=1, slowness=1.0)
    assert all(serve(gate, times, 2 * DWELL_STEPS, tokens=12, slowness=1.0))
    assert gate.advantage > 1.05


def test_drafts_that_fail_are_tried_again_and_each_time_later() -> None:
    gate, times = SpeculationGate(), measured()
    seen = serve(gate, times, 4000, tokens=9, slowness=1.0)
    changes = [k for k, (a, b) in enumerate(itertools.pairwise(seen)) if a != b]
    closed = [b - a for a, b in zip(changes[::2], changes[1::2], strict=False)]
    assert 160 <= closed[0] < 240 and closed[1] == 2 * closed[0] and closed[2] == 4 * closed[0]
    assert all(DWELL_STEPS <= b - a <= 24 for a, b in zip(changes[1::2], changes[2::2], strict=False))
    assert sum(seen) / len(seen) < 0.04


@pytest.mark.parametrize("worth", [0.9, 0.5, 0.1, 0.02])
def test_what_trials_cost_is_a_small_share_of_the_time_however_bad_drafts_are(worth: float) -> None:
    """A draft worker that takes ten times as long as a step: every step with drafts costs nine without."""
    gate, lost, steps = SpeculationGate(), 0.0, 0
    for trial in range(6):
        while gate.open:
            gate.record(1.0, 1 / worth, 1.2, LOAD)
            gate.step(1.2, LOAD)
            lost += 1 / worth - 1
        before = steps
        while not gate.open:
            gate.step(1.2, LOAD)
            steps += 1
        assert lost <= (TRIAL_SHARE + 0.001) * steps, f"trial {trial}, {steps - before} steps"


def test_drafts_that_become_good_are_found_at_the_next_trial() -> None:
    gate, times = SpeculationGate(), measured()
    serve(gate, times, 30, tokens=9, slowness=1.0)
    assert not gate.open
    assert all(serve(gate, times, 400, tokens=14, slowness=1.0)[-100:])


def test_a_machine_that_stays_slower_becomes_the_usual_one() -> None:
    times = measured()
    gate = SpeculationGate()
    serve(gate, times, 20, tokens=12, slowness=1.0)
    assert abs(times.drift(16, TREE_S, LOAD) - 1) < 0.01
    serve(gate, times, 400, tokens=12, slowness=1.5)
    assert abs(times.drift(16, 1.5 * TREE_S, LOAD) - 1) < 0.01


@pytest.mark.parametrize("period", [1, 2, 3, 5, 8, 15])
def test_a_prediction_that_swings_about_the_threshold_changes_nothing_within_the_dwell(period: int) -> None:
    """Bug kind 37 (vllm#49548): 3 to 5 sessions about the threshold, and the regime flapping with every one of them."""
    gate = SpeculationGate()
    seen = []
    for k in range(1000):
        predicted = 1.3 if k // period % 2 else 0.75
        gate.record(1.0, 1 / predicted, predicted, LOAD)
        gate.step(predicted, LOAD)
        seen.append(gate.open)
    changes = [k for k, (a, b) in enumerate(itertools.pairwise(seen)) if a != b]
    assert all(b - a >= DWELL_STEPS for a, b in itertools.pairwise(changes))


def test_a_load_at_which_drafts_pay_switches_them_on_without_a_trial() -> None:
    """What steps at high load have taught about trees tells what drafts are worth at low load."""
    times = StepTimes([1, 2, 4, 8, 16, 32], [0.020, 0.021, 0.022, 0.038, 0.070, 0.134])
    outlook, gate = Outlook(8), SpeculationGate()
    for _ in range(40):
        outlook.observe([np.log([0.6, 0.4, 0.25])] * 8)
        outlook.observe_overhead(0.003)
        predicted = outlook.advantage(Situation(8, LOAD, 8), times)
        gate.record(1.0, 1 / predicted, predicted, LOAD)
        gate.step(predicted, LOAD)
    assert not gate.open and predicted < 0.95
    steps = 0
    while not gate.open:
        gate.step(outlook.advantage(Situation(1, 1, 8), times), 1)
        steps += 1
    assert steps <= 20
    while gate.open:
        predicted = outlook.advantage(Situation(8, LOAD, 8), times)
        gate.record(1.0, 1 / predicted, predicted, LOAD)
        gate.step(predicted, LOAD)
        steps += 1
    assert steps <= 40


def test_times_of_a_load_level_never_seen_are_those_of_the_nearest() -> None:
    times = StepTimes([1, 16], [1.0, 1.0])
    times.observe(8, 1.5, 4, plain=True)
    times.observe(2, 1.2, 2, plain=True)
    assert times.plain(16, 5) == pytest.approx(1.5)
    assert times.plain(1, 1) == pytest.approx(1.2)
    assert not times.knows_plain(5) and not times.knows_plain(4)
    for _ in range(2):
        times.observe(8, 1.5, 4, plain=True)
    assert times.knows_plain(4)


def test_the_usual_time_of_plain_decoding_is_no_single_steps() -> None:
    times = StepTimes([1, 16], [1.0, 1.0])
    for seconds in (3.0, 1.1, 1.2, 9.0, 1.1):
        times.observe(8, seconds, LOAD, plain=True)
    assert times.plain(8, LOAD) == pytest.approx(1.2)


def test_one_step_that_is_held_up_does_not_change_what_drafts_are_taken_to_cost() -> None:
    outlook = Outlook(8)
    for seconds in (0.4, *[0.006] * 5, 0.3, 0.006):
        outlook.observe_overhead(seconds)
    assert outlook.overhead_s == pytest.approx(0.006)


def test_what_plain_steps_cost_besides_the_forward_is_not_held_against_drafts() -> None:
    """A GPU's forward of 4 ms, 1 ms of planning and answers in every step, 2 ms of waiting for drafts more."""
    outlook, times = Outlook(8), StepTimes([1, 128], [0.004, 0.004])
    outlook.observe([np.log([0.6])])
    outlook.observe_overhead(0.003)
    situation = Situation(sessions=1, load=1, share=8)
    assert outlook.advantage(situation, times) == pytest.approx(1.6 * 4 / 7)
    outlook.observe_plain_overhead(0.001, load=1)
    assert outlook.advantage(situation, times) == pytest.approx(1.6 * 5 / 7)
    outlook.observe_plain_overhead(0.02, load=4)  # with many sessions answers take longer, drafts or not
    assert outlook.advantage(Situation(sessions=8, load=4, share=8), times) == pytest.approx(1.6)


@pytest.mark.parametrize("drafts", [True, False])
def test_the_overhead_of_plain_steps_is_learnt_where_none_waits_for_drafts(drafts: bool) -> None:
    planner = make_planner(StepTimes([1, 128], [0.004, 0.004]))
    session = decoding("a")
    if not drafts:
        session.drafts.clear()
    for k in range(4):
        parts = step(planner, [session], now=0.006 * k)
        planner.finished(parts, 1, 1, forward_s=0.004, began=0.006 * k + 0.001, now=0.006 * (k + 1))
    assert planner.outlook.plain_overhead_s(1) == pytest.approx(0.0 if drafts else 0.002)


def test_the_advantage_is_predicted_no_wider_than_the_share_of_a_session() -> None:
    outlook, times = Outlook(8), StepTimes([1, 128], [0.01, 0.01])
    outlook.observe([np.log([0.5, 0.4, 0.3, 0.2])])
    expected = {0: 1.0, 1: 1.5, 2: 1.9, 4: 2.4, 8: 2.4}
    for share, advantage in expected.items():
        assert outlook.advantage(Situation(4, 3, share), times) == pytest.approx(advantage)


def test_while_most_read_a_token_is_worth_what_it_costs_once_all_decode() -> None:
    """One decodes and seven read: two tokens a step for one are a seventh of what eight would write in the time."""
    outlook, times = Outlook(1), StepTimes([1, 8, 16], [0.040, 0.048, 0.056])
    outlook.observe([np.log([0.5])])
    outlook.observe_overhead(0.008)
    alone = 1.5 * 0.040 / (times.at_start(np.array([2]))[0] + 0.008)
    assert outlook.advantage(Situation(1, LOAD, 1), times) == pytest.approx(alone)
    token_s = 0.048 / 8
    beside = (1.5 * token_s + 0.02) / (times.at_start(np.array([2]))[0] + 0.02 + 0.008) * (0.06 / (token_s + 0.02))
    seen = outlook.advantage(Situation(1, LOAD, 1, reading=7, chunk_s=0.02), times)
    assert seen == pytest.approx(beside) and seen < 1 < alone
    assert outlook.advantage(Situation(7, LOAD, 1, reading=1, chunk_s=0.02), times) > 1


def test_the_first_steps_at_a_load_do_not_outweigh_what_is_known() -> None:
    """One step that took twice as long, at a level not seen before, must not switch off drafts that pay."""
    gate = SpeculationGate()
    for _ in range(40):
        gate.record(1.3, 1.0, 1.3, LOAD)
        gate.step(1.3, LOAD)
    gate.record(1.3, 2.6, 1.3, LOAD - 1)
    for _ in range(3):
        gate.step(1.3, LOAD - 1)
    assert gate.open and gate.advantage > 1
    for _ in range(20):
        gate.record(1.3, 2.6, 1.3, LOAD - 1)
        gate.step(1.3, LOAD - 1)
    assert not gate.open, "if it goes on, it counts"


def test_what_falls_short_at_one_load_says_little_of_another() -> None:
    """Trees are worth less than predicted to one session, which asks for many nodes, and not to eight."""
    gate = SpeculationGate()
    for _ in range(40):
        gate.record(1.0, 1.0, 1.6, 1)
        gate.step(1.6, 1)
        gate.record(1.0, 1 / 1.2, 1.2, LOAD)
        gate.step(1.2, LOAD)
    for load, advantage in ((1, 1.0), (LOAD, 1.2), (LOAD + 1, 1.2), (2, 1.6 / 1.6**0.5)):
        for _ in range(60):
            gate.step(1.6 if load < LOAD else 1.2, load)
        assert gate.advantage == pytest.approx(advantage, rel=0.02), load


def test_steps_of_few_sessions_between_those_of_all_are_weighed_by_their_time() -> None:
    """Seven of eight write two tokens each, then the eighth alone: 15 tokens in two steps, not a mean of ratios."""
    gate = SpeculationGate()
    for k in range(400):
        gate.record(*((14 / 8, 1.0) if k % 2 else (1 / 8, 0.5)), 1.2, LOAD)
        gate.step(1.2, LOAD)
    assert gate.open
    assert gate.advantage == pytest.approx(15 / 8 / 1.5, rel=0.03)


def test_trials_that_fail_at_one_load_do_not_keep_drafts_off_at_another() -> None:
    """Four clients at which drafts lose, then eight at which they pay, and the other way round."""
    near, far = LOAD - 1, LOAD

    def at_the_lossy_load(gate: SpeculationGate, steps: int) -> None:
        for _ in range(steps):
            gate.record(1.0, 1.25, 1.0, near)
            gate.step(1.0, near)

    gate = SpeculationGate()
    at_the_lossy_load(gate, 4000)  # the next trial there is due after more than a thousand steps
    while gate.open:
        at_the_lossy_load(gate, 1)
    waited = 0
    while not gate.open:
        gate.step(1.0, far)
        waited += 1
    assert waited <= 640, "half of what has been learnt of the load next to it"
    for _ in range(400):
        gate.record(1.15, 1.0, 1.1, far)
        gate.step(1.1, far)
    assert gate.open
    at_the_lossy_load(gate, 30)
    assert not gate.open, "switched off there"
    waited = 0
    while not gate.open:
        gate.step(1.06, far)
        waited += 1
    assert waited <= 40, "what was lost at the other load does not make a good prediction suspect"
