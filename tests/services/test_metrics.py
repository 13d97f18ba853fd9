"""What the verifier's metrics say of its steps, held against each other and against the requests' own usage."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftwood.errors import InvalidArgument, Unavailable
from draftwood.telemetry import METRICS, METRICS_PORTS, Metrics, serve_metrics
from draftwood.vllm_names import VllmNames, add_vllm_names
from tests.services.stack import Stack, collect, until


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


async def test_the_routers_metrics_say_what_it_served(stack: Stack) -> None:
    cluster = await stack.cluster([{}])
    before = values()
    await cluster.speculative([5, 6, 7], max_tokens=8)
    with pytest.raises(InvalidArgument):
        await cluster.plain("", max_tokens=8)
    events = cluster.client.generate([5, 6, 7], max_tokens=400, ignore_eos=True)
    await anext(events)
    assert values()["draftwood_requests_running"] == 1
    await events.aclose()
    await cluster.is_idle()
    now = values()
    for role in ("router", "verifier"):
        for outcome in ("ok", "failed", "cancelled"):
            name = f"draftwood_requests_total {role} {outcome}"
            assert now[name] - before[name] == 1, name
        assert now[f"draftwood_request_seconds_count {role}"] - before[f"draftwood_request_seconds_count {role}"] == 3
    assert now["draftwood_requests_running"] == 0
    assert now["draftwood_workers verifier ready"] == now["draftwood_workers draft ready"] == 1
    assert now["draftwood_workers draft lost"] == 0
    assert now["draftwood_texts_total length"] - before["draftwood_texts_total length"] == 1
    (draft,) = cluster.drafts
    assert now["draftwood_draft_nodes_total"] == draft.loaded.core.nodes_drafted > 0
    assert now["draftwood_draft_sessions"] == 0 < now["draftwood_draft_idle_seconds_total"]
    await draft.stop(0.5)
    await until(lambda: values()["draftwood_workers draft lost"] == 1)


@contextmanager
def vllm_names(model: str) -> Iterator[VllmNames]:
    names = add_vllm_names(METRICS, model)
    yield names
    METRICS.registry.unregister(names)


async def test_vllms_names_show_the_same(stack: Stack) -> None:
    """Each name that vLLM gives a metric of this meaning, over some requests, against the requests' usage."""
    cluster = await stack.cluster([{}])
    with vllm_names("tiny"):
        before = values()
        usages = [
            (await cluster.speculative([5 + k, 6, 7], max_tokens=40, ignore_eos=True)).finished.usage for k in range(3)
        ]
        await cluster.is_idle()
        now = values()

    def grown(name: str) -> float:
        return now[name] - before[name]

    per_request = {
        "prompt_tokens": [u.prompt_tokens for u in usages],
        "generation_tokens": [u.completion_tokens for u in usages],
        "prefix_cache_queries": [u.prompt_tokens for u in usages],
        "prefix_cache_hits": [u.cached_prompt_tokens for u in usages],
        "spec_decode_num_draft_tokens": [u.nodes_verified for u in usages],
        "spec_decode_num_accepted_tokens": [u.nodes_accepted for u in usages],
    }
    for name, counts in per_request.items():
        assert grown(f"vllm:{name}_total tiny 0") == sum(counts), name
    drafts = grown("vllm:spec_decode_num_drafts_total tiny 0")
    assert 0 < drafts <= sum(u.steps for u in usages)
    by_position = [grown(f"vllm:spec_decode_num_accepted_tokens_per_pos_total tiny 0 {k}") for k in range(16)]
    assert sum(by_position) == sum(u.nodes_accepted for u in usages)
    assert drafts >= by_position[0] >= by_position[1]
    assert grown("vllm:request_success_total tiny 0 length") == 3
    assert grown("vllm:time_to_first_token_seconds_count tiny 0") == 3
    assert grown("vllm:e2e_request_latency_seconds_count tiny 0") == 3
    assert grown("vllm:e2e_request_latency_seconds_sum tiny 0") >= sum(u.total_s for u in usages)
    assert now["vllm:num_requests_running tiny 0"] == now["vllm:num_requests_waiting tiny 0"] == 0
    assert now["vllm:kv_cache_usage_perc tiny 0"] == 0, "cached pages can be had: they are not in use"
    assert grown("vllm:num_preemptions_total tiny 0") == 0
    vllm = METRICS.registry  # without the option, none of the names is there
    assert not [family.name for family in vllm.collect() if family.name.startswith("vllm:")]


def test_vllms_gauges_are_ours() -> None:
    metrics = Metrics()
    add_vllm_names(metrics, "m")
    for state, count in (("running", 4), ("waiting", 2), ("preempted", 3)):
        metrics.sessions[state].set(count)
    for owner, count in (("free", 10), ("cached", 20), ("session", 10)):
        metrics.kv_pages[owner].set(count)
    labels = {"model_name": "m", "engine": "0"}
    shown = {name: metrics.registry.get_sample_value(f"vllm:{name}", labels) for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    )}  # fmt: skip
    assert shown == {"num_requests_running": 4, "num_requests_waiting": 5, "kv_cache_usage_perc": 0.25}


async def test_the_option_adds_vllms_names(stack: Stack) -> None:
    await stack.verifier(vllm_metrics=True)
    try:
        assert values()["vllm:num_requests_running tiny 0"] == 0
    finally:
        names = [c for c in METRICS.registry._collector_to_names if isinstance(c, VllmNames)]
        METRICS.registry.unregister(names[0])


def test_a_process_serves_its_metrics_on_the_first_free_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        if first > 2**16 - 1 - METRICS_PORTS:
            pytest.skip("no room above this port")
        port = serve_metrics("127.0.0.1", first)
    assert first < port < first + METRICS_PORTS
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    scraped = {family.name for family in text_string_to_metric_families(text)}
    assert {"draftwood_steps", "draftwood_requests", "draftwood_draft_nodes"} <= scraped
    assert serve_metrics("127.0.0.1", 0) == 0


def test_an_address_that_cannot_be_had_is_named() -> None:
    with pytest.raises(Unavailable, match=r"BIND: metrics cannot be served on 192\.0\.2\.1"):
        serve_metrics("192.0.2.1", 40000)
