"""What a call is part of, across the services: the request's id, and its trace if traces are on.

Both travel in gRPC metadata from client to router, and from there to verifier and draft workers: ``x-request-id``, and
``traceparent`` (W3C Trace Context). A server takes them up for the task that serves the call (``take_context``) and
passes them on with the calls that it makes itself (``outgoing_metadata``). Logs of that task name the id ``request``.

Spans are OpenTelemetry's. Unless ``start_tracing`` is given an endpoint, nothing of it is imported and a span is a
constant that does nothing. Sampling, headers and certificates come from the variables that OpenTelemetry's SDK names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from draftwood.errors import DraftwoodError, InvalidArgument

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Tracer

REQUEST_ID: Final = "x-request-id"
MAX_REQUEST_ID: Final = 128
FLUSH_TIMEOUT_MS: Final = 2000

Value = str | bool | int | float
Metadata = tuple[tuple[str, str], ...]


class Span(Protocol):
    """A part of a request's trace; attributes have the prefix ``draftwood.``."""

    def set(self, **attributes: Value) -> None:
        """Says more about it."""

    def event(self, name: str, **attributes: Value) -> None:
        """Something that happened now."""

    def end(self, **attributes: Value) -> None:
        """It is over; only for spans of ``begin_span``."""


class _NoSpan:
    """What a span is while traces are off."""

    def set(self, **attributes: Value) -> None: ...

    def event(self, name: str, **attributes: Value) -> None: ...

    def end(self, **attributes: Value) -> None: ...


NO_SPAN: Final = _NoSpan()


class _LiveSpan:
    def __init__(self, span: Any) -> None:
        self._span = span

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Value) -> None:
        self._span.add_event(name, _named(attributes))

    def end(self, **attributes: Value) -> None:
        self.set(**attributes)
        self._span.end()


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    return {f"draftwood.{name}": value for name, value in attributes.items()}


class _Tracing:
    """This process's tracer, once there is one."""

    provider: TracerProvider | None = None
    tracer: Tracer | None = None


# --- on and off ---


def start_tracing(role: str, endpoint: str) -> None:
    """Sends this process's spans to the OTLP endpoint (gRPC), in batches; empty: no traces. Twice changes nothing.

    Raises InvalidArgument CONFIG if OpenTelemetry is not installed.
    """
    if not endpoint or _Tracing.tracer:
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        message = f"traces to {endpoint} need the packages of draftwood[traces] ({error})"
        raise InvalidArgument("CONFIG", message, field="traces") from error
    trace_to(role, BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


def trace_to(role: str, processor: SpanProcessor) -> None:
    """Hands this process's spans to ``processor``, as those of the service ``draftwood-<role>``."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider

    _Tracing.provider = TracerProvider(resource=Resource.create({SERVICE_NAME: f"draftwood-{role}"}))
    _Tracing.provider.add_span_processor(processor)
    _Tracing.tracer = _Tracing.provider.get_tracer("draftwood")


def flush_tracing() -> None:
    """Waits until what has ended is sent, for two seconds at most."""
    if _Tracing.provider:
        _Tracing.provider.force_flush(FLUSH_TIMEOUT_MS)


def stop_tracing() -> None:
    """Sends what has ended; from now on there are no spans."""
    if _Tracing.provider:
        _Tracing.provider.shutdown()
    _Tracing.provider = _Tracing.tracer = None


# --- between the services ---


def take_context(metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Takes up what the caller says that its call is part of, for the rest of this task.

    Raises InvalidArgument REQUEST_ID, as ``check_request_id``.
    """
    carried = dict(metadata or ())
    request_id = carried.get(REQUEST_ID)
    if request_id is not None:
        bind_request(check_request_id(str(request_id)))
    if _Tracing.tracer and "traceparent" in carried:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context.attach(TraceContextTextMapPropagator().extract({key: str(value) for key, value in carried.items()}))


def check_request_id(request_id: str) -> str:
    """The id. Raises InvalidArgument REQUEST_ID for one that is no printable ASCII, empty, or too long."""
    if not (0 < len(request_id) <= MAX_REQUEST_ID and request_id.isascii() and request_id.isprintable()):
        message = f"a request id has 1 to {MAX_REQUEST_ID} printable ASCII characters, not {request_id!r:.200}"
        raise InvalidArgument("REQUEST_ID", message, field=REQUEST_ID)
    return request_id


def bind_request(request_id: str) -> None:
    """Makes the running task a part of that request."""
    structlog.contextvars.bind_contextvars(request=request_id)


def current_request() -> str:
    """The id of the request that the running task is a part of; empty if there is none."""
    return str(structlog.contextvars.get_contextvars().get("request", ""))


def outgoing_metadata(request_id: str = "") -> Metadata:
    """What to send with a call so that the called service knows what it is part of.

    ``request_id``: in place of the running task's. The trace is the one that OpenTelemetry has as the current one.
    """
    carried: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carried)
    if request_id := request_id or current_request():
        carried[REQUEST_ID] = request_id
    return tuple(carried.items())


# --- spans ---


@contextmanager
def span(name: str, **attributes: Value) -> Iterator[Span]:
    """A span over the block, the current one within it. An error that ends the block is the span's status."""
    if not _Tracing.tracer:
        yield NO_SPAN
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode

    with _Tracing.tracer.start_as_current_span(
        name, kind=SpanKind.SERVER, attributes=_named(_with_request(attributes)), set_status_on_exception=False
    ) as live:
        try:
            yield _LiveSpan(live)
        except Exception as error:
            live.set_status(Status(StatusCode.ERROR, str(error)))
            if isinstance(error, DraftwoodError):
                live.set_attributes(_named({"reason": error.reason}))
            raise
        except BaseException:  # a cancel, or a generator that is closed before its end
            live.set_attributes(_named({"cancelled": True}))
            raise


def begin_span(name: str, **attributes: Value) -> Span:
    """A span that lasts until its ``end``, within the running task's trace."""
    if not _Tracing.tracer:
        return NO_SPAN
    return _LiveSpan(_Tracing.tracer.start_span(name, attributes=_named(_with_request(attributes))))


def _with_request(attributes: dict[str, Value]) -> dict[str, Value]:
    request = current_request()
    return {"request": request, **attributes} if request else attributes
