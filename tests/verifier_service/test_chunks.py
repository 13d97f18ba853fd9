"""Chunks of prefill: as long as decoding sessions do not notice, shared evenly, and never nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from planning import decoding, make_planner, prefilling, step

from verifier_service.chunks import (
    LEAST_CHUNK,
    LEAST_ROWS,
    MOST_STRETCH,
    STRETCH,
    PrefillCost,
    fair_split,
    split,
    stretch,
)
from verifier_service.width import StepTimes

CPU = StepTimes([1, 8, 16, 32], [0.034, 0.037, 0.046, 0.074])
GPU = StepTimes([1, 16, 64, 256], [0.00510, 0.00546, 0.00611, 0.00947])


@pytest.mark.parametrize("times", [CPU, GPU])
@pytest.mark.parametrize("decoders", [1, 8, 16])
def test_the_chunk_is_the_largest_that_decoding_sessions_hardly_notice(times: StepTimes, decoders: int) -> None:
    planner = make_planner(times, max_step_tokens=256)
    sessions = [*(decoding(f"d{k}") for k in range(decoders)), prefilling("p", 4000)]
    rows = {
        part.session.request.session_id: len(part.rows.token) for part in planner.plan(0.0, sessions, lambda _: 0.0)
    }
    alone_s, now_s, more_s = times(np.array([decoders, decoders + rows["p"], decoders + rows["p"] + 1]), 0)
    assert all(rows[f"d{k}"] == 1 for k in range(decoders))
    assert now_s <= STRETCH * alone_s or rows["p"] == LEAST_CHUNK
    assert more_s > STRETCH * alone_s or rows["p"] + decoders == 256
    assert now_s < 1.5 * alone_s


@pytest.mark.parametrize("times", [CPU, GPU])
@pytest.mark.parametrize(("decoders", "readers"), [(1, 7), (4, 4), (6, 2)])
def test_where_few_decode_and_many_read_a_step_may_take_longer(times: StepTimes, decoders: int, readers: int) -> None:
    planner = make_planner(times, max_step_tokens=512)
    sessions = [decoding(f"d{k}") for k in range(decoders)] + [prefilling(f"p{k}", 400) for k in range(readers)]
    parts = planner.plan(0.0, sessions, lambda _: 0.0)
    rows = sum(len(part.rows.token) for part in parts)
    alone_s, now_s, more_s = times(np.array([decoders, rows, rows + 1]), 0)
    limit = stretch(readers, decoders)
    assert now_s <= limit * alone_s
    assert more_s > limit * alone_s or rows == 512


def test_the_stretch_grows_with_the_readers_and_one_is_never_worth_more() -> None:
    assert all(stretch(1, decoders) == STRETCH for decoders in (1, 2, 8))
    assert stretch(2, 8) == stretch(5, 8) == STRETCH
    assert STRETCH < stretch(4, 4) < stretch(5, 3) < stretch(7, 1) == MOST_STRETCH


def test_the_cost_of_a_row_rises_quickly_and_falls_slowly() -> None:
    cost, curve = PrefillCost(), GPU(8 + np.arange(248), 0)
    first = cost.chunk(curve)
    cost.observe(curve[0], curve[first], curve[0] + 3 * (curve[first] - curve[0]))
    dear = cost.chunk(curve)
    cost.observe(curve[0], curve[dear], curve[0] + (curve[dear] - curve[0]))
    after = cost.chunk(curve)
    assert first - dear > 4 * (after - dear) >= 4


def test_nobody_decodes_so_the_chunk_fills_the_step() -> None:
    planner = make_planner(CPU, max_step_tokens=256)
    (part,) = planner.plan(0.0, [prefilling("p", 4000)], lambda _: 0.0)
    assert len(part.rows.token) == 256


def test_rows_that_cost_more_than_T_says_make_smaller_chunks() -> None:
    """Behind a long prefix a row of prefill costs several times what it does over an empty cache."""
    cost = PrefillCost()
    curve = GPU(8 + np.arange(248), 0)
    first = cost.chunk(curve)
    for _ in range(30):
        chunk = cost.chunk(curve)
        cost.observe(curve[0], curve[chunk], curve[0] + 3 * (curve[chunk] - curve[0]))
    assert LEAST_CHUNK < cost.chunk(curve) < 0.5 * first
    assert curve[0] + 3 * (curve[cost.chunk(curve)] - curve[0]) <= 1.36 * curve[0]


def test_the_least_chunk_halves_where_a_row_costs_far_more_than_T_says() -> None:
    cost, curve = PrefillCost(), CPU(16 + np.arange(200), 0)
    assert cost.chunk(curve) == max(LEAST_CHUNK, int(np.sum(curve <= STRETCH * curve[0])) - 1)
    for _ in range(30):
        chunk = cost.chunk(curve)
        cost.observe(curve[0], curve[chunk], curve[0] + 8 * (curve[chunk] - curve[0]))
    assert cost.chunk(curve) == LEAST_ROWS


def test_full_width_leaves_prefill_its_rows() -> None:
    planner = make_planner(CPU, max_step_tokens=32, width="full", max_nodes=12)
    sessions = [*(decoding(f"d{k}", nodes=12) for k in range(8)), prefilling("p", 200)]
    steps = 0
    while not sessions[-1].decoding:
        parts = step(planner, sessions)
        assert sum(len(part.rows.token) for part in parts) <= 32
        assert len(parts) == 9
        steps += 1
    assert steps == 200 // LEAST_CHUNK


def test_a_short_prompt_is_not_kept_behind_a_long_one() -> None:
    planner = make_planner(CPU, max_step_tokens=256)
    long, short = prefilling("long", 4000), prefilling("short", 24)
    sessions = [*(decoding(f"d{k}") for k in range(8)), long, short]
    steps = 0
    while not short.decoding:
        step(planner, sessions)
        steps += 1
    assert steps <= 2 * 24 // LEAST_CHUNK + 1
    assert long.cached > 0


def test_prefill_has_no_step_of_its_own_while_others_await_their_drafts() -> None:
    """A step for prefill alone would make every decoding session wait for it."""
    planner = make_planner(CPU)
    waiting = decoding("d", awaits_drafts=True)
    assert planner.due(0.0, [waiting, prefilling("p", 100)], lambda _: 0.02) == pytest.approx(0.06)
    assert planner.due(0.0, [decoding("d"), prefilling("p", 100)], lambda _: 0.02) == 0.0
    assert planner.due(0.0, [prefilling("p", 100)], lambda _: 0.02) == 0.0


def test_prompts_that_end_go_whole_and_the_longest_wait_ends() -> None:
    assert split([24], 10, 29) == [24], "whole"
    assert split([41], 10, 29) == [10], "too long"
    assert split([29, 5, 7], 10, 29) == [29, 0, 0], "who has waited longest, though others are shorter"
    assert split([4000, 12, 30, 9], 10, 29) == [8, 12, 0, 9], "a long one gets on whatever comes"
    assert split([10, 12, 60, 6], 10, 29) == [10, 12, 0, 6], "of the others, the shortest"
    assert split([4000, 41], 20, 29) == [10, 10], "none ends: evenly"
    assert split([4000], 4, 9) == [4], "rows that are dear behind a long prefix stay few where none ends"
    assert split([4000, 3], 20, 29) == [17, 3], "and no step is shorter for it"
    rnd = random.Random(3)
    for _ in range(500):
        pending = [rnd.randrange(1, 60) for _ in range(rnd.randrange(1, 9))]
        chunk = rnd.randrange(1, 40)
        whole = rnd.randrange(chunk, 80)
        counts = split(pending, chunk, whole, rnd.randrange(9))
        assert min(chunk, sum(pending)) <= sum(counts) <= whole
        assert all(0 <= count <= all_of_it for count, all_of_it in zip(counts, pending, strict=True))
        assert counts[0] > 0


def test_fair_split_is_max_min_fair() -> None:
    rnd = random.Random(2)
    for _ in range(500):
        wanted = [rnd.randrange(12) for _ in range(rnd.randrange(9))]
        total, first = rnd.randrange(60), rnd.randrange(20)
        got = fair_split(wanted, total, first)
        assert sum(got) == min(total, sum(wanted))
        assert all(g <= w for g, w in zip(got, wanted, strict=True))
        least = min((g for g, w in zip(got, wanted, strict=True) if g < w), default=total)
        assert all(g <= least + 1 for g in got)


def test_the_remainder_goes_round() -> None:
    got = np.sum([fair_split([5, 5, 5], 4, turn) for turn in range(30)], axis=0)
    assert got.tolist() == [40, 40, 40]


def test_drafts_of_the_few_wait_while_most_read_and_go_on_when_all_decode() -> None:
    planner = make_planner(CPU)
    planner.outlook.observe([np.log([0.6, 0.4, 0.25])])
    for _ in range(3):
        planner.outlook.observe_overhead(0.030)
        planner.times.observe(1, 0.034, 1, plain=True)
    first, readers = decoding("d", nodes=3), [prefilling(f"p{k}", 60) for k in range(7)]
    step(planner, [first])
    assert planner.budget(first, 8) > 0, "alone it is worth it"
    step(planner, [first, *readers])  # the chunk's time is known from here on
    (part, *chunks) = step(planner, [first, *readers])
    assert planner.reason == "prefill" and part.tree.size == 1 and chunks
    assert planner.budget(first, 8) == 0
    for reader in readers:
        reader.cached = 59
    step(planner, [first, *readers])
    assert planner.reason != "prefill" and planner.budget(first, 8) > 0
    assert planner.gate.open, "it was no verdict on the drafts"


def test_full_width_knows_no_prefill_first() -> None:
    planner = make_planner(CPU, width="full")
    first, readers = decoding("d", nodes=3), [prefilling(f"p{k}", 60) for k in range(7)]
    for _ in range(3):
        part = step(planner, [first, *readers])[0]
        assert part.tree.size == 4 and planner.budget(first, 8) > 0
