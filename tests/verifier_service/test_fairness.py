"""Nobody starves: not for rows, not for nodes, not in the queue; who is in a hurry goes first and gets more."""

from __future__ import annotations

from collections import Counter

import pytest
from planning import decoding, make_planner, make_session, step

from verifier_service.queue import PATIENCE_S, AdmissionQueue
from verifier_service.session import GenerateRequest
from verifier_service.width import LEAST_PLAIN_STEPS, Policy, StepTimes

FLAT = StepTimes([1, 512], [1.0, 1.001])


@pytest.mark.parametrize("sessions", [5, 8, 23])
def test_more_sessions_than_rows_step_in_turn(sessions: int) -> None:
    planner = make_planner(FLAT, max_step_tokens=4)
    running = [decoding(f"s{k}") for k in range(sessions)]
    seen = Counter(part.session.request.session_id for _ in range(4 * sessions) for part in step(planner, running))
    assert len(seen) == sessions and max(seen.values()) - min(seen.values()) <= 1


@pytest.mark.parametrize("width", ["full", "adaptive"])
def test_scarce_rows_give_every_session_its_share_of_nodes(width: str) -> None:
    planner = make_planner(FLAT, max_step_tokens=16, width=width)
    for _ in range(LEAST_PLAIN_STEPS):
        planner.times.observe(6, 1.0, (6).bit_length(), plain=True)
    running = [decoding(f"s{k}", nodes=8) for k in range(6)]
    nodes: Counter[str] = Counter()
    steps = 24
    for _ in range(steps):
        parts = step(planner, running)
        assert sum(len(part.rows.token) for part in parts) <= 16
        for part in parts:
            nodes[part.session.request.session_id] += part.tree.size - 1
    assert sum(nodes.values()) >= 0.95 * 10 * steps
    assert max(nodes.values()) - min(nodes.values()) <= 2 + 10  # one baseline step may fall unevenly


def test_urgent_sessions_get_twice_the_nodes_where_they_are_shared() -> None:
    planner = make_planner(FLAT, width="full", max_step_nodes=16)
    running = [decoding("urgent", nodes=20, deadline_ms=500), *(decoding(f"s{k}", nodes=20) for k in range(6))]
    sizes = {part.session.request.session_id: part.tree.size - 1 for part in step(planner, running)}
    assert sizes.pop("urgent") == 4
    assert set(sizes.values()) == {2}


@pytest.mark.parametrize(
    ("policy", "nodes"),
    [
        (Policy(), 10),
        (Policy(max_session_nodes=3), 3),
        (Policy(max_session_nodes=0), 0),
        (Policy(max_step_nodes=8), 2),
        (Policy(max_step_nodes=0), 0),
        (Policy(max_session_nodes=1, max_step_nodes=8), 1),
        (Policy(max_session_nodes=200, max_step_nodes=4000), 10),
    ],
)
def test_policy_caps_nodes_and_budgets(policy: Policy, nodes: int) -> None:
    planner = make_planner(FLAT, width="full", max_nodes=10)
    running = [decoding(f"s{k}", nodes=20) for k in range(4)]
    planner.policy = policy
    parts = step(planner, running)
    assert [part.tree.size - 1 for part in parts] == [nodes] * 4
    assert all(planner.next_budget(part) <= nodes for part in parts)


def test_policy_never_widens_the_verifiers_own_caps() -> None:
    planner = make_planner(FLAT, width="full", max_nodes=10, max_step_nodes=8)
    planner.policy = Policy(max_session_nodes=255, max_step_nodes=1000)
    assert [part.tree.size - 1 for part in step(planner, [decoding(f"s{k}", nodes=20) for k in range(4)])] == [2] * 4


def waiting(name: str, deadline_ms: int = 0) -> GenerateRequest:
    return make_session(name, 1, deadline_ms=deadline_ms).request


def test_the_queue_is_ordered_by_deadline_then_arrival() -> None:
    queue = AdmissionQueue()
    queue.push(waiting("a"), now=0.0)
    queue.push(waiting("b"), now=1.0)
    queue.push(waiting("urgent", 500), now=2.0)
    queue.push(waiting("less", 5000), now=2.0)
    queue.push(waiting("gone", 100), now=2.0)
    queue.drop("gone")
    assert [queue.pop().session_id for _ in range(len(queue))] == ["urgent", "less", "a", "b"]


def test_the_longest_wait_is_that_of_the_first_who_came() -> None:
    queue = AdmissionQueue()
    assert queue.longest_wait_s(9.0) == 0.0
    queue.push(waiting("a"), now=1.0)
    queue.push(waiting("urgent", 500), now=2.0)
    assert queue.longest_wait_s(5.0) == 4.0
    queue.drop("a")
    assert queue.longest_wait_s(5.0) == 3.0


def test_a_stream_of_urgent_requests_delays_another_by_the_patience_at_most() -> None:
    queue = AdmissionQueue()
    queue.push(waiting("patient"), now=0.0)
    for second in range(1000):
        queue.push(waiting(f"u{second}", 1000), now=float(second))
        if queue.pop().session_id == "patient":
            break
    assert second == PATIENCE_S - 1  # due at the same time as that one, and there before it


def test_steps_without_drafts_do_not_bring_the_next_trial_nearer() -> None:
    """Clients who want no drafts, in turns with others whose drafts do not pay: no trial for each change."""
    planner = make_planner(StepTimes([1, 8, 64], [1.0, 1.1, 2.0]))
    planner.gate.open = False
    plain = [decoding(f"p{k}") for k in range(4)]
    for session in plain:
        session.drafts.clear()
    before = planner.gate._steps
    for k in range(500):
        planner.finished(planner.plan(float(k), plain, lambda _: 0.0), 4, 4, 0.5, k, k + 0.5)
    assert planner.gate._steps == before and not planner.gate.open
    planner.finished(planner.plan(501.0, [decoding("d")], lambda _: 0.0), 1, 1, 0.5, 501.0, 501.5)
    assert planner.gate._steps == before + 1
