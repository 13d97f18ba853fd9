"""Metrics under vLLM's names, where ours mean the same, so that dashboards made for vLLM show a verifier.

They are read from ours when they are scraped, with vLLM's labels ``model_name`` and ``engine``. Where vLLM counts draft
tokens, a verified node of a tree counts; a ``position`` is a depth, the anchor's children being 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwood.telemetry import Metrics, TextReason

ENGINE: Final = "0"
LABELS: Final = ("model_name", "engine")
FINISHED: Final[dict[TextReason, str]] = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""Our reasons of an end, and vLLM's."""


class VllmNames(Collector):
    """The metrics of one process, as vLLM names them."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.model = model
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        metrics = self._metrics
        yield self._histogram("vllm:time_to_first_token_seconds", metrics.first_token_seconds["verifier"])
        yield self._histogram("vllm:e2e_request_latency_seconds", metrics.request_seconds["verifier"])

    def _gauges(self) -> Iterator[Metric]:
        sessions = {state: value(gauge) for state, gauge in self._metrics.sessions.items()}
        pages = {owner: value(gauge) for owner, gauge in self._metrics.kv_pages.items()}
        values = {
            "vllm:num_requests_running": sessions["running"],
            "vllm:num_requests_waiting": sessions["waiting"] + sessions["preempted"],
            "vllm:kv_cache_usage_perc": pages["session"] / max(sum(pages.values()), 1.0),
        }
        for name, now in values.items():
            family = GaugeMetricFamily(name, f"As in vLLM: {name}", labels=LABELS)
            family.add_metric([self.model, ENGINE], now)
            yield family

    def _counters(self) -> Iterator[Metric]:
        metrics = self._metrics
        plain = {
            "vllm:prompt_tokens": metrics.prompt_tokens,
            "vllm:generation_tokens": metrics.tokens,
            "vllm:num_preemptions": metrics.preemptions,
            "vllm:prefix_cache_queries": metrics.prompt_tokens,
            "vllm:prefix_cache_hits": metrics.cached_prompt_tokens,
            "vllm:spec_decode_num_drafts": metrics.drafts,
            "vllm:spec_decode_num_draft_tokens": metrics.nodes["verified"],
            "vllm:spec_decode_num_accepted_tokens": metrics.nodes["accepted"],
        }
        for name, counter in plain.items():
            yield self._counter(name, "", {"": counter})
        ended = {FINISHED[reason]: counter for reason, counter in metrics.texts.items()}
        yield self._counter("vllm:request_success", "finished_reason", ended)
        accepted = {str(above): counter for above, counter in enumerate(metrics.accepted_depth)}
        yield self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", "position", accepted)

    def _counter(self, name: str, label: str, counters: dict[str, Counter]) -> CounterMetricFamily:
        """One sample a counter, by its value of ``label``; without a label if that is empty."""
        family = CounterMetricFamily(name, f"As in vLLM: {name}", labels=(*LABELS, *filter(None, [label])))
        for of_label, counter in counters.items():
            family.add_metric([self.model, ENGINE, *filter(None, [of_label])], value(counter))
        return family

    def _histogram(self, name: str, histogram: Histogram) -> HistogramMetricFamily:
        samples = [sample for family in histogram.collect() for sample in family.samples]
        buckets = [(sample.labels["le"], sample.value) for sample in samples if sample.name.endswith("_bucket")]
        total = next(sample.value for sample in samples if sample.name.endswith("_sum"))
        family = HistogramMetricFamily(name, f"As in vLLM: {name}", labels=LABELS)
        family.add_metric([self.model, ENGINE], buckets, total)
        return family


def value(metric: Counter | Gauge) -> float:
    """What a counter or gauge, or one of its children, shows now."""
    ((sample, *_),) = (family.samples for family in metric.collect())
    return float(sample.value)


def add_vllm_names(metrics: Metrics, model: str) -> VllmNames:
    """From now on these metrics have vLLM's names as well as ours; returns what to unregister to end that."""
    names = VllmNames(metrics, model)
    metrics.registry.register(names)
    return names
