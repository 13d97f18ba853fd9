"""Logs and metrics of every role.

Logs are structlog events on stderr. Metrics live in a registry of their own, so that several services, or several
imports of this module, fit in one process. All label values but the names of draft models are known in advance and
exist from the first scrape on.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, cast, get_args

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from draftwood.errors import BY_STATUS, InvalidArgument, Unavailable

Fate = Literal["drafted", "verified", "accepted", "stale", "refused"]
SessionState = Literal["waiting", "running", "preempted"]
PageOwner = Literal["free", "cached", "session"]
PageEvent = Literal["reused", "published", "evicted"]
FeaturePart = Literal["commit", "chunk"]
StepPart = Literal["wait", "plan", "forward", "sample", "commit"]
WidthReason = Literal["no_nodes", "shut", "baseline", "cost", "all", "probe", "full", "prefill"]
RequestOutcome = Literal["ok", "failed", "cancelled"]
TextReason = Literal["stop", "length", "cancelled"]
ServingRole = Literal["router", "verifier"]
WorkerRole = Literal["verifier", "draft"]
WorkerHealth = Literal["starting", "ready", "lost", "draining"]
WorkerCount = Literal["wanted", "present", "ready", "draining"]
ChoiceBy = Literal["only", "cost", "prefix", "none"]
PolicyCap = Literal["nodes", "depth", "chain"]
PolicySignal = Literal["queue_wait", "step_time", "drafts_busy"]
Direction = Literal["narrower", "wider"]
SizeChange = Literal["up", "down"]

MOST_DEPTH: Final = 16
"""Deeper nodes count as this deep in metrics."""

MOST_MODELS: Final = 64
"""Draft models that have metrics of their own: they name themselves."""

MOST_POOLS: Final = 64
"""Pools that have metrics of their own."""

RPC_CODES: Final = ("OK", "CANCELLED", *BY_STATUS)
METRICS_PORTS: Final = 16
"""Ports that are tried, from the named one on: workers with the same settings may share a machine."""

# vLLM's, so that what has the same meaning can have its name, too.
FIRST_TOKEN_BUCKETS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
REQUEST_BUCKETS_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_BUCKETS_S: Final = (0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)


_SECRETS: Final = re.compile(
    r"""dw_[A-Za-z0-9_-]{20,}
      | (?P<keep>(?i:bearer)[ ]+) [A-Za-z0-9._~+/=-]{16,}
      | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?-----END[ ][A-Z ]*PRIVATE[ ]KEY-----""",
    re.VERBOSE | re.DOTALL,
)


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of one module; follows later calls of ``configure_logging``."""
    return cast(FilteringBoundLogger, structlog.get_logger(module=name))


def configure_logging(role: str, json: bool, level: str = "INFO") -> None:
    """Sends this process's events of ``level`` and above to stderr, one JSON object a line or for people.

    Warnings of libraries that use stdlib logging come out in the same form. Raises InvalidArgument CONFIG for an
    unknown level.
    """
    chain, renderers = _event_processors(role), _renderers(json)
    structlog.configure(
        processors=[*chain, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(_level_number(level)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    _forward_stdlib(chain, renderers)


def _level_number(level: str) -> int:
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise InvalidArgument("CONFIG", f"log level {level!r} is not one of {', '.join(levels)}", field="level")
    return levels[level.upper()]


def _event_processors(role: str) -> list[Processor]:
    def add_role(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["role"] = role
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        add_role,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _renderers(json: bool) -> list[Processor]:
    if json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(), _without_secrets]
    # Not the default formatter: with rich installed that one shows the local variables of every frame.
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain), _without_secrets]


def redact(text: str) -> str:
    """The text without bearer tokens and private keys."""
    return _SECRETS.sub(lambda found: f"{found['keep'] or ''}[secret]", text)


def _without_secrets(_logger: WrappedLogger, _method: str, line: Any) -> str:
    """The last processor, over the finished line, so that tracebacks and other libraries' words go through it too."""
    return redact(str(line))


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours among the root logger's handlers."""


def _forward_stdlib(chain: list[Processor], renderers: list[Processor]) -> None:
    handler = _StderrHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=chain,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers = [other for other in root.handlers if not isinstance(other, _StderrHandler)] + [handler]


class ReadCounter(Collector):
    """A counter that somebody else keeps; it is read when the metrics are."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._read: Callable[[], float] = float
        registry.register(self)

    def set_function(self, read: Callable[[], float]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, value=self._read())


class Metrics:
    """The metrics of one process, as ready-made children; an unknown label value is a KeyError."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rpc = Counter("draftwood_rpc", "Calls ended", ["method", "code"], registry=self.registry)
        nodes = Counter("draftwood_nodes", "Draft nodes by what became of them", ["fate"], registry=self.registry)
        self.nodes: dict[Fate, Counter] = {fate: nodes.labels(fate) for fate in get_args(Fate)}
        self.tokens = Counter("draftwood_tokens", "Tokens committed", registry=self.registry)
        self.steps = Counter("draftwood_steps", "Verify steps", registry=self.registry)
        self.step_seconds = Histogram(
            "draftwood_step_seconds", "Duration of a verify step", buckets=STEP_BUCKETS_S, registry=self.registry
        )
        self.step_parts: dict[StepPart, Counter] = self._counters(
            "draftwood_step_part_seconds", "Time between and in steps", "part", get_args(StepPart)
        )
        self.step_width: dict[WidthReason, Counter] = self._counters(
            "draftwood_step_width", "Steps by what set their width", "reason", get_args(WidthReason)
        )
        by_depth = Counter(
            "draftwood_nodes_by_depth", "Draft nodes below the anchor", ["fate", "depth"], registry=self.registry
        )
        depths = range(1, MOST_DEPTH + 1)
        self.verified_depth = [by_depth.labels("verified", depth) for depth in depths]  # by depth - 1
        self.accepted_depth = [by_depth.labels("accepted", depth) for depth in depths]
        self.late_rounds = Counter(
            "draftwood_late_rounds", "Steps that did not wait for a draft long enough", registry=self.registry
        )
        self.acceptance_alarms = Counter(
            "draftwood_acceptance_alarms", "Times that a draft's guesses stopped being taken", registry=self.registry
        )
        self.session_alarms = Counter(
            "draftwood_session_acceptance_alarms",
            "Times that a draft's guesses stopped being taken in one session alone",
            registry=self.registry,
        )
        self.canary_failures = Counter(
            "draftwood_canary_failures", "Draft workers that failed the canary as they joined", registry=self.registry
        )
        self._canary = Gauge(
            "draftwood_canary_share", "Share of right best guesses on the canary", ["model"], registry=self.registry
        )
        self._canary_models: set[str] = set()
        sessions = Gauge("draftwood_sessions", "Sessions by state", ["state"], registry=self.registry)
        self.sessions: dict[SessionState, Gauge] = {state: sessions.labels(state) for state in get_args(SessionState)}
        self.outgrown_sessions = Gauge(
            "draftwood_outgrown_sessions", "Sessions whose text is too long for this draft", registry=self.registry
        )
        pages = Gauge("draftwood_kv_pages", "KV pages by owner", ["owner"], registry=self.registry)
        self.kv_pages: dict[PageOwner, Gauge] = {owner: pages.labels(owner) for owner in get_args(PageOwner)}
        events = Counter("draftwood_kv_page_events", "What became of KV pages", ["event"], registry=self.registry)
        self.kv_page_events: dict[PageEvent, Counter] = {event: events.labels(event) for event in get_args(PageEvent)}
        self.kv_audit_failures = Counter(
            "draftwood_kv_audit_failures", "Audits that found the KV page books wrong", registry=self.registry
        )
        self.preemptions = Counter(
            "draftwood_preemptions", "Sessions that had to give up their KV pages", registry=self.registry
        )
        self.prompt_tokens = Counter("draftwood_prompt_tokens", "Tokens of the prompts served", registry=self.registry)
        self.cached_prompt_tokens = Counter(
            "draftwood_cached_prompt_tokens", "Of these, tokens whose KV pages were cached", registry=self.registry
        )
        self.drafts = Counter(
            "draftwood_drafts", "Trees verified, one for each session of a step that has nodes", registry=self.registry
        )
        self.features: dict[FeaturePart, Counter] = self._counters(
            "draftwood_features", "Positions whose features were sent to drafts", "part", get_args(FeaturePart)
        )
        self.feature_bytes: dict[FeaturePart, Counter] = self._counters(
            "draftwood_feature_bytes", "Bytes of the features that were sent to drafts", "part", get_args(FeaturePart)
        )
        texts = Counter("draftwood_texts", "Texts that a verifier has ended", ["reason"], registry=self.registry)
        self.texts: dict[TextReason, Counter] = {reason: texts.labels(reason) for reason in get_args(TextReason)}
        # Both by the role that measures: what a client waits for is the router's.
        first_token = Histogram(
            "draftwood_first_token_seconds", "From a request's arrival to its first token", ["role"],
            buckets=FIRST_TOKEN_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        seconds = Histogram(
            "draftwood_request_seconds", "From a request's arrival to its last word", ["role"],
            buckets=REQUEST_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self.first_token_seconds: dict[ServingRole, Histogram] = {
            role: first_token.labels(role) for role in get_args(ServingRole)
        }
        self.request_seconds: dict[ServingRole, Histogram] = {
            role: seconds.labels(role) for role in get_args(ServingRole)
        }
        requests = Counter(
            "draftwood_requests", "Requests that have ended, by the role that counts", ["role", "outcome"],
            registry=self.registry,
        )  # fmt: skip
        self.requests: dict[tuple[ServingRole, RequestOutcome], Counter] = {
            (role, how): requests.labels(role, how)
            for role in get_args(ServingRole)
            for how in get_args(RequestOutcome)
        }
        self.requests_running = Gauge(
            "draftwood_requests_running", "Texts that the router is serving", registry=self.registry
        )
        self.draft_reattachments = ReadCounter(
            "draftwood_draft_reattachments", "Drafts attached in place of lost ones", registry=self.registry
        )
        self.verifier_migrations = ReadCounter(
            "draftwood_verifier_migrations", "Generations moved to another verifier", registry=self.registry
        )
        self._add_pools()
        self._add_policy()
        self.draft_sessions = Gauge(
            "draftwood_draft_sessions", "Sessions that this draft worker is attached to", registry=self.registry
        )
        self.draft_nodes = ReadCounter(
            "draftwood_draft_nodes", "Nodes that this draft worker has drawn", registry=self.registry
        )
        self.draft_idle_seconds = ReadCounter(
            "draftwood_draft_idle_seconds", "Time in which this draft worker had nothing to do", registry=self.registry
        )
        self.rpc: dict[tuple[str, str], Counter] = {}

    def _counters(self, name: str, documentation: str, label: str, values: Iterable[Any]) -> dict[Any, Counter]:
        """One child for each value of a counter's one label."""
        counter = Counter(name, documentation, [label], registry=self.registry)
        return {value: counter.labels(value) for value in values}

    def _add_pools(self) -> None:
        """Of the router's pools and its choices."""
        workers = Gauge("draftwood_workers", "Workers by role and health", ["role", "health"], registry=self.registry)
        self.workers: dict[tuple[WorkerRole, WorkerHealth], Gauge] = {
            (role, health): workers.labels(role, health)
            for role in get_args(WorkerRole)
            for health in get_args(WorkerHealth)
        }
        self._pools = Gauge("draftwood_pool_workers", "Workers of a pool", ["name", "count"], registry=self.registry)
        self._pool_names: set[str] = set()
        sizes = Counter(
            "draftwood_pool_changes", "Times that the size wanted of a pool has changed", ["role", "change"],
            registry=self.registry,
        )  # fmt: skip
        self.pool_changes: dict[tuple[WorkerRole, SizeChange], Counter] = {
            (role, change): sizes.labels(role, change)
            for role in get_args(WorkerRole)
            for change in get_args(SizeChange)
        }
        ejections = Counter("draftwood_ejections", "Workers ejected", ["role"], registry=self.registry)
        self.ejections: dict[WorkerRole, Counter] = {role: ejections.labels(role) for role in get_args(WorkerRole)}
        ejected = Gauge("draftwood_ejected_workers", "Workers that are ejected now", ["role"], registry=self.registry)
        self.ejected: dict[WorkerRole, Gauge] = {role: ejected.labels(role) for role in get_args(WorkerRole)}
        choices = Counter(
            "draftwood_choices", "Workers chosen for a session, by what decided", ["role", "by"], registry=self.registry
        )
        self.choices: dict[tuple[WorkerRole, ChoiceBy], Counter] = {
            (role, by): choices.labels(role, by) for role in get_args(WorkerRole) for by in get_args(ChoiceBy)
        }

    def _add_policy(self) -> None:
        """Of the router's width policy."""
        changes = Counter(
            "draftwood_policy_changes", "Changes of the width policy's caps", ["direction"], registry=self.registry
        )
        self.policy_changes: dict[Direction, Counter] = {way: changes.labels(way) for way in get_args(Direction)}
        capped = Gauge(
            "draftwood_policy_capped_verifiers", "Verifiers under a cap of the policy", ["cap"], registry=self.registry
        )
        self.policy_capped: dict[PolicyCap, Gauge] = {cap: capped.labels(cap) for cap in get_args(PolicyCap)}
        self.policy_nodes = Gauge(
            "draftwood_policy_nodes", "Smallest cap on a session's nodes; 0: none", registry=self.registry
        )
        pressure = Gauge(
            "draftwood_policy_pressure", "Largest signal of the policy over its target", ["signal"],
            registry=self.registry,
        )  # fmt: skip
        self.policy_pressure: dict[PolicySignal, Gauge] = {
            signal: pressure.labels(signal) for signal in get_args(PolicySignal)
        }

    def canary_share(self, model: str) -> Gauge:
        """Of the draft model of that name; names beyond the first ``MOST_MODELS`` share the name "other"."""
        if model in self._canary_models or len(self._canary_models) < MOST_MODELS:
            self._canary_models.add(model)
            return self._canary.labels(model)
        return self._canary.labels("other")

    def pool_workers(self, name: str) -> dict[WorkerCount, Gauge]:
        """Of the pool of that name; names beyond the first ``MOST_POOLS`` share the name "other"."""
        if name not in self._pool_names and len(self._pool_names) >= MOST_POOLS:
            name = "other"
        self._pool_names.add(name)
        return {count: self._pools.labels(name, count) for count in get_args(WorkerCount)}

    def add_methods(self, methods: Iterable[str]) -> None:
        """Makes ``rpc[method, code]`` for every code, at zero; known methods keep their counts."""
        for method in methods:
            self.rpc.update({(method, code): self._rpc.labels(method, code) for code in RPC_CODES})


METRICS: Final = Metrics()


def serve_metrics(host: str, port: int) -> int:
    """Serves this process's metrics over HTTP, on the first of ``METRICS_PORTS`` ports that is free; returns it.

    Port 0 serves none. Raises Unavailable BIND.
    """
    if not port:
        return 0
    for tried in range(port, min(port + METRICS_PORTS, 2**16)):
        try:
            start_http_server(tried, addr=host, registry=METRICS.registry)
        except OSError as error:
            reason = error
        else:
            get_logger(__name__).info("metrics", host=host, port=tried)
            return tried
    message = f"metrics cannot be served on {host}, on any of {METRICS_PORTS} ports from {port} on: {reason}"
    raise Unavailable("BIND", message) from reason
