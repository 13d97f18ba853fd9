"""Every query of the dashboards and alert rules asks for metrics and labels that the processes have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.core import Metric

from draftwood.rpc.handlers import method_name
from draftwood.telemetry import Metrics
from draftwood.v1 import draft_pb2, router_pb2, verifier_pb2

ROOT = Path(__file__).resolve().parent.parent
DASHBOARDS = sorted((ROOT / "deploy" / "dashboards").glob("*.json"))
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
OF_SCRAPES = {"instance", "job", "pool"}
"""Labels that Prometheus adds; `pool` is set in deploy/prometheus/prometheus.yaml."""
INTERVALS = re.compile(r"\$__rate_interval|\$__interval|\$__range")


@dataclass(frozen=True)
class Query:
    where: str
    expr: str


def all_metrics() -> list[Metric]:
    """What the processes of all roles together show, with every label value that is known in advance."""
    metrics = Metrics()
    for module in (draft_pb2, router_pb2, verifier_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            metrics.add_methods(method_name(method) for method in service.methods)
    metrics.canary_share("any")
    metrics.pool_workers("any")
    return list(metrics.registry.collect())


FAMILIES = all_metrics()


def samples() -> dict[str, set[str]]:
    """Labels of the samples that are scraped, by name."""
    return {sample.name: set(sample.labels) for family in FAMILIES for sample in family.samples}


def values_of(name: str, label: str) -> set[str]:
    return {sample.labels[label] for family in FAMILIES for sample in family.samples if sample.name == name}


def faults(query: Query, known: dict[str, set[str]]) -> Iterator[str]:
    """What a query asks for that is not there, and what would be wrong in the answer."""
    ast = promql_parser.parse(INTERVALS.sub("5m", query.expr))
    yield from faults_of(ast, known, query)


def faults_of(node: Any, known: dict[str, set[str]], query: Query) -> Iterator[str]:
    if isinstance(node, promql_parser.VectorSelector):
        yield from selector_faults(node, known, query)
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
        labels = set(node.modifier.labels)
        inside = labels_within(node.expr, known)
        yield from (f"{query.where}: {label} is no label of {query.expr}" for label in labels - inside - OF_SCRAPES)
    if isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase", "irate"):
        yield from (
            f"{query.where}: {node.func.name} of {name}, which is no counter"
            for name in names_within(node)
            if not name.endswith(("_total", "_bucket", "_count", "_sum"))
        )
    for child in children(node):
        yield from faults_of(child, known, query)


def selector_faults(node: Any, known: dict[str, set[str]], query: Query) -> Iterator[str]:
    if node.name not in known:
        yield f"{query.where}: there is no {node.name}"
        return
    for matcher in node.matchers.matchers:
        if matcher.name in OF_SCRAPES:
            continue
        if matcher.name not in known[node.name]:
            yield f"{query.where}: {node.name} has no label {matcher.name}"
        elif matcher.name != "model":
            values = values_of(node.name, matcher.name)
            wrong = set(matcher.value.split("|")) - values
            yield from (f"{query.where}: {node.name} never has {matcher.name}={value}" for value in wrong)


def children(node: Any) -> list[Any]:
    parts = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
    return [part for part in [*parts, *getattr(node, "args", [])] if part is not None]


def selectors(node: Any) -> Iterator[Any]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for child in children(node):
        yield from selectors(child)


def names_within(node: Any) -> set[str]:
    return {selector.name for selector in selectors(node)}


def labels_within(node: Any, known: dict[str, set[str]]) -> set[str]:
    return set().union(*(known.get(name, set()) for name in names_within(node)))


def dashboard_queries() -> list[Query]:
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            found += [Query(f"{path.name}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    return found


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def alert_queries() -> list[Query]:
    return [Query(f"alerts.yaml: {rule['alert']}", rule["expr"]) for rule in alert_rules()]


def test_every_query_asks_for_what_is_there() -> None:
    queries, known = dashboard_queries() + alert_queries(), samples()
    assert len(queries) > 40, "the queries are found"
    assert [fault for query in queries for fault in faults(query, known)] == []


@pytest.mark.parametrize(
    "expr, told",
    [
        ("draftwood_stepz_total", "there is no draftwood_stepz_total"),
        ("draftwood_steps", "there is no draftwood_steps"),
        ("sum(rate(draftwood_nodes_total{fat='stale'}[5m]))", "no label fat"),
        ("draftwood_nodes_total{fate='eaten'}", "never has fate=eaten"),
        ("draftwood_rpc_total{code!~'OK|FINE'}", "never has code=FINE"),
        ("1 + sum by (owner) (draftwood_sessions)", "owner is no label"),
        ("rate(draftwood_sessions[5m])", "no counter"),
        ("histogram_quantile(0.5, sum by (le) (rate(draftwood_step_second_bucket[5m])))", "there is no"),
        ("draftwood_steps_total / on (x) max_over_time(draftwood_gone[5m:1m])", "there is no draftwood_gone"),
    ],
)
def test_a_wrong_query_is_found(expr: str, told: str) -> None:
    assert any(told in fault for fault in faults(Query("here", expr), samples()))


def test_a_query_that_cannot_be_parsed_is_found() -> None:
    with pytest.raises(ValueError):
        list(faults(Query("here", "sum(rate(draftwood_steps_total[5m])"), samples()))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_can_be_imported(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem and board["title"].startswith("Draftwood: ")
    variables = {variable["name"] for variable in board["templating"]["list"]}
    known = samples()
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            assert name in known and label in known[name] | OF_SCRAPES
    text = json.dumps(board["panels"])
    used = set(re.findall(r"\$\{?(\w+)\}?", text)) - {"__rate_interval"}
    assert used <= variables, "every variable of the panels is declared"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places), "panels do not cover each other"
    for panel in board["panels"]:
        labels = set(re.findall(r"{{(\w+)}}", json.dumps(panel["targets"])))
        grouped = set(re.findall(r"by \(([\w, ]+)\)", json.dumps(panel["targets"])))
        assert labels <= {label for group in grouped for label in group.split(", ")} | OF_SCRAPES, panel["title"]


def test_the_alert_rules_are_rules() -> None:
    document = yaml.safe_load(ALERTS.read_text())
    assert set(document) == {"groups"} and all(set(group) == {"name", "rules"} for group in document["groups"])
    names = [rule["alert"] for rule in alert_rules()]
    assert len(set(names)) == len(names)
    for rule in alert_rules():
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        if "for" in rule:
            assert promql_parser.parse_duration(rule["for"]).total_seconds() > 0


def test_all_metrics_are_in_the_documentation() -> None:
    """docs/observability.md lists each metric with its labels, and no other."""
    rows = re.findall(r"^\| `(draftwood_\w+)` \| ([^|]*) \|", (ROOT / "docs" / "observability.md").read_text(), re.M)
    listed = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    there = {}
    for family in FAMILIES:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        there[name] = set().union(*(sample.labels for sample in family.samples)) - {"le"}
    assert listed == there
