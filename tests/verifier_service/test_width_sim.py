"""The planner in the simulated service of ``benchmarks/serving/width_sim.py``; all 200 loads are run there."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "serving"))

from width_sim import CPU, GPU, THRESHOLD, Result, Scenario, Simulation, settling_steps, switches

from verifier_service.width import DWELL_STEPS


def pair(scenario: Scenario, repeats: int = 3) -> tuple[list[Result], list[Result]]:
    """Adaptive and plain, each with several seeds."""
    seeds = [replace(scenario, seed=k) for k in range(repeats)]
    return [Simulation(s, "adaptive").run() for s in seeds], [Simulation(s, 0).run() for s in seeds]


def rate(runs: list[Result]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


@pytest.mark.parametrize("quality", [0.1, 0.7])
@pytest.mark.parametrize("longest_prompt", [40, 120])
def test_three_to_five_sessions_about_the_threshold_with_bursts_of_prefill(quality: float, longest_prompt: int) -> None:
    """Bug kind 37 (vllm#49548): no thrashing where drafts pay for three sessions and not for five."""
    clients = tuple(itertools.islice(itertools.cycle((3, 5, 4, 5, 3, 4, 5, 3)), 60))
    scenario = Scenario("threshold", THRESHOLD, quality, clients, 0, longest_prompt=longest_prompt)
    adaptive, plain = pair(scenario)
    assert rate(adaptive) >= 0.97 * rate(plain)
    for run in adaptive:
        assert all(b - a >= DWELL_STEPS for a, b in itertools.pairwise(switches(run)))


@pytest.mark.parametrize("machine", [CPU, GPU, THRESHOLD], ids=lambda m: m.name)
@pytest.mark.parametrize("clients", [(2, 16), (16, 2)])
def test_it_settles_within_20_steps_of_a_sudden_change_of_load(machine, clients: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    assert settling_steps(machine, 0.6, clients, seed=1) <= 20


def test_good_drafts_at_low_load_pay_and_useless_ones_at_full_load_cost_next_to_nothing() -> None:
    adaptive, plain = pair(Scenario("low", GPU, 0.7, (2,) * 30, 0), repeats=1)
    assert rate(adaptive) > 1.8 * rate(plain)
    adaptive, plain = pair(Scenario("full", CPU, 0.1, (16,) * 60, 0), repeats=2)
    assert rate(adaptive) >= 0.97 * rate(plain)
    assert sum(s.nodes for run in adaptive for s in run.steps) < 0.2 * sum(
        s.sessions for run in adaptive for s in run.steps
    )


@pytest.mark.parametrize(("round_s", "most_waiting"), [(0.0022, 0.25), (0.006, 0.2), (0.012, 0.1)])
def test_ready_sessions_wait_for_others_only_if_that_is_short(round_s: float, most_waiting: float) -> None:
    """With drafts slower than a step cohorts form by themselves, and nobody waits for trees that will not be there."""
    machine = replace(GPU, round_s=round_s)
    run = Simulation(Scenario("cohorts", machine, 0.7, (8,) * 40, 3), 4).run()
    assert run.longest_gather_s <= 1.25 * machine.step_s(8)
    assert run.gather_s <= most_waiting * run.seconds
    cohorts = sum(0 < s.sessions < 8 for s in run.steps) / len(run.steps)
    assert cohorts > 0.5 if round_s > machine.step_s(8) else cohorts < 0.5
