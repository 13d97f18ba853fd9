from __future__ import annotations

import pytest

from router.ejection import FAILURES, FIRST_S, MOST_S, PROBE_S, Ejection

POOL = ["a", "b", "c", "d"]


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.ejection = Ejection(lambda: self.now)

    def fail(self, key: str, times: int = FAILURES) -> list[bool]:
        return [self.ejection.failed(key) for _ in range(times)]

    def out(self, pool: list[str] = POOL) -> set[str]:
        return set(pool) - self.ejection.admitted(pool)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_failures_in_a_row_eject(bench: Bench) -> None:
    assert bench.fail("a", FAILURES - 1) == [False] * (FAILURES - 1) and bench.out() == set()
    bench.ejection.succeeded("a")
    assert bench.fail("a") == [False] * (FAILURES - 1) + [True]
    assert bench.out() == {"a"}


def test_one_session_tries_when_the_time_is_over(bench: Bench) -> None:
    bench.fail("a")
    bench.now = FIRST_S - 0.1
    assert bench.out() == {"a"}
    bench.now = FIRST_S
    assert bench.out() == set()
    bench.ejection.began("a")
    assert bench.out() == {"a"}, "the probe is on its way"
    bench.ejection.succeeded("a")
    assert bench.out() == set() and bench.fail("a", 1) == [False], "closed, with a clean record"


def test_a_probe_that_fails_ejects_for_twice_as_long(bench: Bench) -> None:
    bench.fail("a")
    for expected in [min(FIRST_S * 2**k, MOST_S) for k in range(10)]:
        bench.now += expected - 0.1
        assert bench.out() == {"a"}
        bench.now += 0.1
        assert bench.out() == set()
        bench.ejection.began("a")
        assert bench.fail("a", 1) == [True]


def test_a_probe_that_is_never_heard_of_does_not_eject_for_good(bench: Bench) -> None:
    bench.fail("a")
    bench.now = FIRST_S
    bench.ejection.began("a")
    bench.now += PROBE_S - 0.1
    assert bench.out() == {"a"}
    bench.now += 0.1
    assert bench.out() == set()


def test_late_failures_of_an_ejected_worker_do_not_prolong(bench: Bench) -> None:
    bench.fail("a")
    bench.now = FIRST_S / 2
    assert bench.fail("a", 5) == [False] * 5
    bench.now = FIRST_S
    assert bench.out() == set()


def test_at_most_half_of_the_pool_is_out_and_those_for_longest_come_back(bench: Bench) -> None:
    for second, key in enumerate(POOL):
        bench.now = second * 0.1
        bench.fail(key)
    assert bench.out() == {"c", "d"}
    assert bench.out(["a", "c", "d"]) == {"d"}


def test_the_last_worker_is_never_ejected(bench: Bench) -> None:
    bench.fail("a")
    assert bench.ejection.admitted(["a"]) == {"a"} and bench.ejection.admitted([]) == set()


def test_a_new_process_has_a_clean_record(bench: Bench) -> None:
    bench.fail("a")
    bench.ejection.forget("a")
    assert bench.out() == set()
