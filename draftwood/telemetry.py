"""Logs and metrics of every role.

Logs are structlog events on stderr. Metrics live in a registry of their own, so that several services, or several
imports of this module, fit in one process. All label values but the names of draft models are known in advance and
exist from the first scrape on.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from typing import Any, Final, Literal, cast, get_args

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from draftwood.errors import BY_STATUS, InvalidArgument

Fate = Literal["drafted", "verified", "accepted", "stale", "refused"]
SessionState = Literal["waiting", "running", "preempted"]
PageOwner = Literal["free", "cached", "session"]
PageEvent = Literal["reused", "published", "evicted"]
StepPart = Literal["wait", "plan", "forward", "sample", "commit"]
WidthReason = Literal["no_nodes", "shut", "baseline", "cost", "all", "probe", "full", "prefill"]

MOST_DEPTH: Final = 16
"""Deeper nodes count as this deep in metrics."""

MOST_MODELS: Final = 64
"""Draft models that have metrics of their own: they name themselves."""

RPC_CODES: Final = ("OK", "CANCELLED", *BY_STATUS)
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
        parts = Counter("draftwood_step_part_seconds", "Time between and in steps", ["part"], registry=self.registry)
        self.step_parts: dict[StepPart, Counter] = {part: parts.labels(part) for part in get_args(StepPart)}
        widths = Counter("draftwood_step_width", "Steps by what set their width", ["reason"], registry=self.registry)
        self.step_width: dict[WidthReason, Counter] = {why: widths.labels(why) for why in get_args(WidthReason)}
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
        self.rpc: dict[tuple[str, str], Counter] = {}

    def canary_share(self, model: str) -> Gauge:
        """Of the draft model of that name; names beyond the first ``MOST_MODELS`` share the name "other"."""
        if model in self._canary_models or len(self._canary_models) < MOST_MODELS:
            self._canary_models.add(model)
            return self._canary.labels(model)
        return self._canary.labels("other")

    def add_methods(self, methods: Iterable[str]) -> None:
        """Makes ``rpc[method, code]`` for every code, at zero; known methods keep their counts."""
        for method in methods:
            self.rpc.update({(method, code): self._rpc.labels(method, code) for code in RPC_CODES})


METRICS: Final = Metrics()


def serve_metrics(port: int) -> None:
    """Serves this process's metrics over HTTP on loopback; port 0 serves none."""
    if port:
        start_http_server(port, addr="127.0.0.1", registry=METRICS.registry)
