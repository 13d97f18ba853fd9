"""Clients that leave: whenever they do, nothing of their requests is left two seconds later."""

from __future__ import annotations

from tests.services.stack import Stack, collect
from tests.services.storm import BASELINE_S, BATCH, STATES, storm

BATCHES = 2


async def test_bug_20_whoever_leaves_in_whatever_state_leaves_nothing_behind(stack: Stack) -> None:
    """Unheard of, queued, reading, decoding, waiting for a draft, at the last word, on the way to another verifier."""
    for slow_draft in (False, True):
        made = await storm(stack, slow_draft=slow_draft)
        states = ("awaiting draft",) if slow_draft else tuple(state for state in STATES if state != "awaiting draft")
        for state in states:
            for _ in range(BATCHES):
                await made.batch(state)
            assert made.left[state] >= BATCHES * BATCH / 4, f"too few were in state {state!r}: {made.left}"
        assert made.errors == [] and made.router._state.counters.requests_failed == 0
        assert max(made.baselines_s) < BASELINE_S
        text = await collect(made.client, "The sky is", max_tokens=20, seed=3, temperature=0.9, ignore_eos=True)
        plain = await collect(
            made.client, "The sky is", max_tokens=20, seed=3, temperature=0.9, ignore_eos=True, speculate=False
        )
        assert text.tokens == plain.tokens


async def test_bug_20_a_cancel_of_what_is_not_known_changes_nothing(stack: Stack) -> None:
    """Nor does a second one; a session of that name can be had afterwards."""
    cluster = await stack.cluster()
    engine, worker = cluster.engine, cluster.verifier._worker
    for _ in range(2):
        worker.post(lambda: cluster.verifier._publish(engine.cancel("nobody")))
    text = await cluster.speculative("The sky is", max_tokens=20, ignore_eos=True)
    worker.post(lambda: cluster.verifier._publish(engine.cancel(text.started.session_id)))
    assert len((await cluster.speculative("The sky is", max_tokens=20, ignore_eos=True)).tokens) == 20
    await cluster.is_idle()
