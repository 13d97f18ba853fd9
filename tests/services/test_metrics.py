"""What the verifier's metrics say of its steps, held against each other and against the requests' own usage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftwood.telemetry import METRICS
from tests.services.stack import Stack, collect


def values() -> dict[str, float]:
    """All counters of this process by name and labels."""
    return {
        sample.name + "".join(f" {v}" for v in sample.labels.values()): sample.value
        for metric in METRICS.registry.collect()
        for sample in metric.samples
    }


def at(counts: tuple[int, ...], depth: int) -> int:
    return counts[depth] if depth < len(counts) else 0


async def test_a_steps_metrics_add_up(stack: Stack) -> None:
    cluster = await stack.cluster([{}, {"kind": "ngram"}])
    before, steps = values(), cluster.engine.totals.steps
    options: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True}
    usages = [(await cluster.speculative([5 + k, 6, 7], **options)).finished.usage for k in range(4)]
    await cluster.is_idle()
    after = values()

    def grown(prefix: str) -> dict[str, float]:
        return {
            k.removeprefix(prefix).strip(): v - before.get(k, 0.0) for k, v in after.items() if k.startswith(prefix)
        }

    verified, accepted = (grown(f"draftwood_nodes_by_depth_total {fate}") for fate in ("verified", "accepted"))
    assert sum(verified.values()) == sum(u.nodes_verified for u in usages) > 0
    assert sum(accepted.values()) == sum(u.nodes_accepted for u in usages) > 0
    assert all(accepted[depth] <= verified[depth] for depth in verified)
    assert accepted["1"] >= accepted["2"] >= accepted["3"]
    for depth in range(16):
        assert sum(at(u.verified_by_depth, depth) for u in usages) == verified[str(depth + 1)]
        assert sum(at(u.accepted_by_depth, depth) for u in usages) == accepted[str(depth + 1)]
    assert sum(u.late_rounds for u in usages) == grown("draftwood_late_rounds_total")[""]
    assert sum(grown("draftwood_step_width_total").values()) == cluster.engine.totals.steps - steps
    spent = grown("draftwood_step_part_seconds_total")
    assert all(spent[part] > 0 for part in ("plan", "forward", "sample", "commit", "wait"))
    in_steps = grown("draftwood_step_seconds_sum")[""]
    assert 0.9 * in_steps < sum(spent.values()) - spent["wait"] < 1.5 * in_steps
    assert spent["sample"] < spent["forward"], "choosing by temperature and seed is little beside the model"


async def test_a_requests_usage_says_what_drafts_did_for_it(stack: Stack) -> None:
    cluster = await stack.cluster([{}, {"kind": "ngram"}])
    options: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True}
    warm = (await cluster.speculative([5, 6, 7], **options)).finished.usage
    usage = (await cluster.speculative([8, 6, 7], **options)).finished.usage
    plain = (await collect(cluster.client, [8, 6, 7], speculate=False, **options)).finished.usage
    for each in (warm, usage):
        assert each.nodes_drafted >= each.nodes_verified == sum(each.verified_by_depth) > 0
        assert each.nodes_accepted == sum(each.accepted_by_depth) > 0
        assert each.nodes_stale <= each.nodes_drafted
        assert each.mean_width == pytest.approx(each.nodes_verified / each.steps)
        assert 0 < each.draft_wait_s < each.total_s
        assert each.width_reason in ("full", "no_nodes")  # as the stack is set; the last step may have none
    assert plain == replace(
        plain, nodes_drafted=0, late_rounds=0, draft_wait_s=0.0, mean_width=0.0, width_reason="no_nodes",
        verified_by_depth=(), accepted_by_depth=(),
    )  # fmt: skip
