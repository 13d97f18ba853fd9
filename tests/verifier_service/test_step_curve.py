"""What drafts are told of the time of a step: when it has moved, and by how much."""

from __future__ import annotations

import pytest

from verifier_service.step_curve import CHECK_S, StepCurve
from verifier_service.width import StepTimes


def make() -> tuple[StepTimes, StepCurve]:
    times = StepTimes([1, 64, 256], [0.010, 0.016, 0.064])
    return times, StepCurve(times, most_nodes=16)


def test_rows_are_each_sessions_and_the_step_is_of_all() -> None:
    _, curve = make()
    news = curve.news(1, 0.0)
    assert news is not None and [rows for rows, _ in news] == [1, 2, 4, 8, 16, 17]
    assert news[0][1] == pytest.approx(10.0) and news[-1][1] == pytest.approx(10 + 6 * 16 / 63)
    four = curve.news(4, CHECK_S)
    assert four is not None and dict(four)[16] == pytest.approx(16.0), "four sessions of 16 rows are 64"


def test_told_again_when_it_has_moved_by_a_tenth_and_not_more_often_than_it_is_looked_at() -> None:
    times, curve = make()
    assert curve.news(1, 0.0) is not None
    assert curve.news(1, 5.0) is None, "nothing has moved"
    for _ in range(50):
        times.observe(1, 0.0105, 1)
    assert curve.news(1, 10.0) is None, "by a twentieth"
    for _ in range(50):
        times.observe(1, 0.02, 1)
    assert curve.news(1, 10.0 + CHECK_S / 2) is None, "not yet"
    news = curve.news(1, 12.0)
    assert news is not None and news[0][1] == pytest.approx(20.0, rel=0.02)
