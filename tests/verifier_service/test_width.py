"""Whether drafts pay: the gate's trial, held against plain decoding on the machine as it is at that moment."""

from verifier_service.width import SpeculationGate, StepTimes

LOAD = 4
PLAIN_S, TREE_S, OVERHEAD_S = 0.05, 0.06, 0.01


def serve(gate: SpeculationGate, times: StepTimes, steps: int, tokens: int, slowness: float) -> None:
    """Steps of 8 sessions with 8 nodes, on a machine that is ``slowness`` times slower than when it was measured."""
    for _ in range(steps):
        forward_s = TREE_S * slowness
        times.observe(16, forward_s, LOAD)
        plain_s = times.plain(8, LOAD) * times.drift(16, forward_s, LOAD)
        gate.record(tokens, forward_s + OVERHEAD_S, forward_s, 8 / plain_s)


def measured() -> StepTimes:
    times = StepTimes([8, 16], [PLAIN_S, TREE_S])
    times.observe(8, PLAIN_S, LOAD, plain=True)
    return times


def test_drafts_that_pay_stay_on_through_a_slow_spell_of_the_machine() -> None:
    gate, times = SpeculationGate(), measured()
    serve(gate, times, 40, tokens=12, slowness=1.0)  # 12 / 70 ms against 8 / 50 ms
    assert gate.open and 1.05 < gate.advantage < 1.1
    serve(gate, times, 12, tokens=12, slowness=2.0)  # against a stale 50 ms: 0.86
    assert gate.open and gate.advantage > 1


def test_drafts_that_do_not_pay_are_switched_off_after_one_trial() -> None:
    gate, times = SpeculationGate(), measured()
    serve(gate, times, gate.settling_steps + gate.trial_steps - 1, tokens=10, slowness=1.0)
    assert gate.open
    serve(gate, times, 1, tokens=10, slowness=1.0)
    assert not gate.open


def test_the_first_steps_of_a_trial_do_not_count() -> None:
    gate, times = SpeculationGate(), measured()
    serve(gate, times, gate.settling_steps, tokens=1, slowness=1.0)
    serve(gate, times, gate.trial_steps, tokens=12, slowness=1.0)
    assert gate.open and gate.advantage > 1.05


def test_a_machine_that_stays_slower_becomes_the_usual_one() -> None:
    times = measured()
    gate = SpeculationGate()
    serve(gate, times, 20, tokens=12, slowness=1.0)
    assert abs(times.drift(16, TREE_S, LOAD) - 1) < 0.01
    serve(gate, times, 400, tokens=12, slowness=1.5)
    assert abs(times.drift(16, 1.5 * TREE_S, LOAD) - 1) < 0.01
