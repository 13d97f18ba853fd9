"""What the verifier's metrics say of its steps, held against each other and against the requests' own usage."""

from __future__ import annotations

from typing import Any

from draftwood.telemetry import METRICS
from tests.services.stack import Stack


def values() -> dict[str, float]:
    """All counters of this process by name and labels."""
    return {
        sample.name + "".join(f" {v}" for v in sample.labels.values()): sample.value
        for metric in METRICS.registry.collect()
        for sample in metric.samples
    }


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
    assert sum(grown("draftwood_step_width_total").values()) == cluster.engine.totals.steps - steps
    spent = grown("draftwood_step_part_seconds_total")
    assert all(spent[part] > 0 for part in ("plan", "forward", "commit", "wait"))
    in_steps = grown("draftwood_step_seconds_sum")[""]
    assert 0.9 * in_steps < spent["plan"] + spent["forward"] + spent["commit"] < 1.5 * in_steps
