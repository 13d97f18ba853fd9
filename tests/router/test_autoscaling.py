from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from draftwood.config import AutoscalingSettings
from router.autoscaling import Autoscaler, Decision, Look, Signals, WorkerLoad, within_budget
from router.scaling import PoolLimits

LIMITS = PoolLimits("verifier", "verifier", 1, 8, 1.0)
SETTINGS = AutoscalingSettings(mode="on", down_window_s=60, slow_s=10, rest_s=5)


def look(pressure: float, ready: int = 2, wanted: int | None = None, limits: PoolLimits = LIMITS) -> Look:
    return Look(limits, ready if wanted is None else wanted, {"queue wait": pressure, "sessions": 0.0}, ready)


class Run:
    """One pool whose workers are ready as soon as they are wanted."""

    def __init__(self, wanted: int, limits: PoolLimits = LIMITS, budget: float | None = None) -> None:
        self.autoscaler = Autoscaler(SETTINGS, budget)
        self.limits = limits
        self.wanted = wanted
        self.now = 0.0
        self.last: Decision

    def look(self, pressure: float, seconds: int = 1, room: int | None = None) -> int:
        for _ in range(seconds):
            self.now += 1
            seen = replace(look(pressure, self.wanted, limits=self.limits), room=room)
            (self.last,) = self.autoscaler.decide(self.now, [seen])
            self.wanted = self.last.wanted
        return self.wanted


@pytest.mark.parametrize(
    ("pressure", "need"), [(0, 0), (0.34, 2), (0.69, 4), (0.7, 4), (1.0, 4), (1.01, 5), (1.5, 6), (2, 8), (99, 8)]
)
def test_need(pressure: float, need: int) -> None:
    assert look(pressure, ready=4).need == need


@pytest.mark.parametrize(("pressure", "need"), [(0, 0), (0.3, 1), (0.69, 2), (0.71, 3), (1.0, 3), (1.6, 4)])
def test_need_while_some_are_away(pressure: float, need: int) -> None:
    """Two that do the work of four as they should are no reason to do without the others."""
    assert look(pressure, ready=2, wanted=4).need == need


def test_an_overloaded_pool_of_which_most_are_away_does_not_shrink() -> None:
    """What a pool may grow by at once is no proof that so few would do."""
    autoscaler = Autoscaler(SETTINGS, None)
    decisions = [autoscaler.decide(t, [look(10.0, ready=1, wanted=8)])[0] for t in range(300)]
    assert {decision.wanted for decision in decisions} == {8}


def test_a_pool_grows_at_the_second_look() -> None:
    run = Run(2)
    assert run.look(1.0) == 2
    assert run.look(1.6) == 2, "a blip would do that"
    assert run.look(1.6) == 4
    assert run.last.reason == "needs more: queue wait" and run.last.inputs["queue wait"] == 1.6
    assert str(run.last).startswith("2 to 4: needs more: queue wait (queue wait 1.60, sessions 0.00, ready 2.00")


def test_it_grows_no_further_before_the_last_growth_has_shown() -> None:
    run = Run(1)
    run.look(2, 2)
    assert run.wanted == 2 and run.look(2, 4) == 2 and run.last.reason == "grew a moment ago"
    assert run.look(2, 2) == 4


def test_workers_that_start_do_not_count_as_if_they_worked() -> None:
    autoscaler = Autoscaler(SETTINGS, None)
    starting = look(2.0, ready=2, wanted=4)
    assert [autoscaler.decide(t, [starting])[0].wanted for t in range(30)] == [4] * 30


def test_it_shrinks_slowly_and_not_before_the_window_is_over() -> None:
    run = Run(8)
    sizes = [run.look(0.1) for _ in range(150)]
    assert sizes[:60] == [8] * 60 and sizes[61] == 6, "by a quarter"
    changes = [t for t in range(1, 150) if sizes[t] != sizes[t - 1]]
    assert all(later - earlier >= SETTINGS.slow_s for earlier, later in pairwise(changes))
    assert sizes[-1] == 1


def test_a_window_with_a_gap_begins_anew() -> None:
    run = Run(8)
    run.look(0.1, 59)
    run.now += 31
    assert run.look(0.1, 60) == 8 and run.last.reason == "could be 2, but not for 60 s yet"
    assert run.look(0.1, 2) == 6


def test_a_short_one_changes_nothing() -> None:
    run = Run(8)
    run.look(0.1, 50)
    run.now += 10
    assert run.look(0.1, 2) == 6


def test_a_window_must_hold_some_looks() -> None:
    with pytest.raises(ValueError, match="down_window_s is 3, it must hold 4 looks, 4 s, at least"):
        AutoscalingSettings(down_window_s=3)


def test_one_busy_moment_keeps_the_size_for_a_window() -> None:
    run = Run(4)
    run.look(0.1, 50)
    run.look(0.9, 9)
    assert run.look(0.1, 59) == 4
    assert run.look(0.1, 6) == 3


def test_a_blip_does_not() -> None:
    run = Run(4)
    run.look(0.1, 50)
    run.look(0.9)
    assert run.look(0.1, 12) == 3


def test_between_slack_and_one_nothing_changes() -> None:
    run = Run(4)
    assert run.look(0.75, 500) == 4 and run.last.reason == "as it should be"


def test_a_pool_that_flaps_waits_longer_each_time() -> None:
    run = Run(4)
    waits = []
    for _ in range(3):
        waited = 0
        while run.wanted == 4:
            run.look(0.1)
            waited += 1
        waits.append(waited)
        while run.wanted < 4:
            run.look(1.3)
    assert waits[1] >= 1.9 * waits[0] and waits[2] >= 1.9 * waits[1]


def test_limits_and_room_hold() -> None:
    run = Run(7)
    assert run.look(2.0, 20) == 8 and run.last.reason == "needs more, but its limits or the nodes allow none"
    assert Run(2).look(2.0, 20, room=3) == 3
    idle = Run(3, replace(LIMITS, min=2))
    assert idle.look(0.0, 200) == 2
    assert Run(2, replace(LIMITS, min=0)).look(0.0, 200) == 1, "one stays"


def test_a_pool_that_is_switched_off_stays_so() -> None:
    run = Run(0, replace(LIMITS, min=0))
    assert run.look(2.0, 20) == 0 and run.last.reason == "switched off"


def test_a_pool_where_nobody_is_ready_stays_as_it_is() -> None:
    autoscaler = Autoscaler(SETTINGS, None)
    nobody = Look(LIMITS, 3, {}, 0)
    assert {autoscaler.decide(t, [nobody])[0].wanted for t in range(300)} == {3}


def test_the_budget_goes_to_the_neediest() -> None:
    draft = PoolLimits("draft", "draft", 1, None, 1.0)
    costly = replace(LIMITS, cost=3.0)
    looks = [look(1.5, 2, limits=costly), look(2.0, 2, limits=draft)]
    assert within_budget(looks, {"verifier": 3, "draft": 4}, None) == {"verifier": 3, "draft": 4}
    assert within_budget(looks, {"verifier": 3, "draft": 4}, 10) == {"verifier": 2, "draft": 4}
    assert within_budget(looks, {"verifier": 3, "draft": 4}, 12) == {"verifier": 3, "draft": 3}
    assert within_budget(looks, {"verifier": 1, "draft": 4}, 8) == {"verifier": 1, "draft": 4}
    assert within_budget(looks, {"verifier": 3, "draft": 4}, 1) == {"verifier": 2, "draft": 2}, "nobody shrinks for it"
    run = Run(2, budget=3)
    assert run.look(2.0, 2) == 3 and "the budget of 3 allows 3" in run.last.reason


def test_signals_of_verifiers() -> None:
    signals = Signals("verifier", replace_settings(step_ms=40.0))
    loads = [
        WorkerLoad("a", 8, 16, queue_wait_ms=0, step_ms=20, steps=100, narrow_steps=50, pages_held=0.1),
        WorkerLoad("b", 4, 16, queue_wait_ms=1000, step_ms=40, steps=100, narrow_steps=0, pages_held=0.7),
    ]
    first = signals.read(loads)
    assert first["minimum width"] == 0, "counters say nothing before the second look"
    assert first["queue wait"] == 2 and first["step time"] == 0.75
    assert math.isclose(first["pages held"], 0.4 / 0.85) and math.isclose(first["sessions"], 0.375 / 0.85)
    later = [replace(loads[0], steps=120, narrow_steps=60), replace(loads[1], steps=130, narrow_steps=5)]
    assert signals.read(later)["minimum width"] == 15 / 50 / 0.5
    restarted = [replace(loads[0], steps=3, narrow_steps=1)]
    assert signals.read(restarted)["minimum width"] == 0
    assert "step time" not in Signals("verifier", SETTINGS).read(loads) and signals.read([]) == {}


def test_signals_of_draft_workers() -> None:
    loads = [WorkerLoad("a", 4, 8, idle_share=0.1), WorkerLoad("b", 0, 8, idle_share=0.7)]
    assert Signals("draft", SETTINGS).read(loads) == {
        "busy": pytest.approx(0.8),
        "sessions": pytest.approx(0.25 / 0.85),
    }
    assert Signals("draft", SETTINGS).read([WorkerLoad("a", 4, 0, idle_share=0.25)]) == {"busy": 1.0, "sessions": 0.0}


def replace_settings(**fields: float) -> AutoscalingSettings:
    return SETTINGS.model_copy(update=fields)
