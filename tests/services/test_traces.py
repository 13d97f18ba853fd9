"""Traces and request ids of requests through real services: who is whose parent, and what is said of a request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
import structlog
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from structlog.testing import capture_logs

from draftwood.config import DraftSettings
from draftwood.errors import InvalidArgument
from draftwood.rpc.status import from_rpc_error
from draftwood.rpc.tracing import MAX_REQUEST_ID, NO_SPAN, begin_span, start_tracing, stop_tracing, trace_to
from draftwood.v1 import draft_pb2, draft_pb2_grpc, router_pb2, router_pb2_grpc, verifier_pb2
from tests.services.stack import Stack, Text, collect, slow_down, until

OPTIONS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    spans = InMemorySpanExporter()
    trace_to("test", SimpleSpanProcessor(spans))
    yield spans
    stop_tracing()


async def spans_of(exporter: InMemorySpanExporter, *names: str) -> list[ReadableSpan]:
    """The spans, in the order of the names, as soon as so many have ended; there are no others."""
    await until(lambda: len(exporter.get_finished_spans()) >= len(names), 5.0, f"{names} have ended")
    by_name = {span.name: span for span in exporter.get_finished_spans()}
    assert sorted(span.name for span in exporter.get_finished_spans()) == sorted(names)
    return [by_name[name] for name in names]


def said(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("draftwood."): value for name, value in (span.attributes or {}).items()}


async def test_a_request_is_one_trace_from_the_client_to_the_draft(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    cluster = await stack.cluster([{}])
    with TracerProvider().get_tracer("a client").start_as_current_span("caller") as caller:
        text = await cluster.speculative([5, 6, 7], request_id="order-66", **OPTIONS)
    await cluster.is_idle()
    usage = text.finished.usage
    assert usage.nodes_accepted > 0, "else nothing is shown"
    router, verifier, draft = await spans_of(exporter, "router.generate", "verifier.generate", "draft.session")
    assert {span.context.trace_id for span in (router, verifier, draft)} == {caller.get_span_context().trace_id}
    assert router.parent.span_id == caller.get_span_context().span_id
    assert verifier.parent.span_id == router.context.span_id, "the verifier's is the router's child"
    assert draft.parent.span_id == router.context.span_id, "Attach carries the router's span"
    for span in (router, verifier):
        told = said(span)
        assert (told["request"], told["model"], told["finish"]) == ("order-66", "tiny", "length")
        assert (told["tokens"], told["accepted"], told["steps"]) == (40, usage.nodes_accepted, usage.steps)
        assert told["prompt_tokens"] == 3
        assert told["width"] == pytest.approx(usage.mean_width, abs=1e-3)
        assert [event.name for event in span.events] == ["started", "first token"]
        assert span.kind is SpanKind.SERVER and span.status.status_code is not StatusCode.ERROR
    assert said(draft)["session"] == said(verifier)["session"] == text.started.session_id
    assert said(draft)["verifier"] == cluster.verifier.address and said(draft)["ended"] in ("stopped", "detached")
    assert [event.name for event in draft.events] == ["started"]
    assert verifier.start_time <= draft.start_time, "a draft joins when the session has started"


async def test_a_request_without_a_callers_trace_has_one_of_its_own(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    cluster = await stack.cluster([])
    for _ in range(2):
        await cluster.plain([5, 6, 7], **OPTIONS)
    await until(lambda: len(exporter.get_finished_spans()) == 4)
    routers = [span for span in exporter.get_finished_spans() if span.name == "router.generate"]
    verifiers = [span for span in exporter.get_finished_spans() if span.name == "verifier.generate"]
    assert [span.parent for span in routers] == [None, None]
    assert len({span.context.trace_id for span in routers}) == 2
    assert [span.parent.span_id for span in verifiers] == [span.context.span_id for span in routers]
    assert len({said(span)["request"] for span in routers}) == 2, "each has an id of its own"


async def test_texts_of_one_request_are_children_of_one_span(stack: Stack, exporter: InMemorySpanExporter) -> None:
    cluster = await stack.cluster([])
    async for _ in cluster.client.generate([5, 6, 7], n=3, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True):
        pass
    await until(lambda: len(exporter.get_finished_spans()) == 4)
    (router,) = (span for span in exporter.get_finished_spans() if span.name == "router.generate")
    verifiers = [span for span in exporter.get_finished_spans() if span.name == "verifier.generate"]
    assert [span.parent.span_id for span in verifiers] == [router.context.span_id] * 3
    assert said(router)["tokens"] == 24 == sum(said(span)["tokens"] for span in verifiers)


async def test_a_refusal_is_the_spans_status(stack: Stack, exporter: InMemorySpanExporter) -> None:
    cluster = await stack.cluster([])
    with pytest.raises(InvalidArgument, match="PROMPT_EMPTY"):
        await cluster.plain("", **OPTIONS)
    router, verifier = await spans_of(exporter, "router.generate", "verifier.generate")
    for span in (router, verifier):
        assert span.status.status_code is StatusCode.ERROR and "PROMPT_EMPTY" in span.status.description
        assert said(span)["reason"] == "PROMPT_EMPTY"


async def test_a_cancel_is_no_error(stack: Stack, exporter: InMemorySpanExporter) -> None:
    cluster = await stack.cluster([])
    events = cluster.client.generate([5, 6, 7], max_tokens=400, ignore_eos=True)
    await anext(events)
    await events.aclose()
    await cluster.is_idle()
    for span in await spans_of(exporter, "router.generate", "verifier.generate"):
        assert said(span)["cancelled"] is True and span.status.status_code is StatusCode.UNSET


async def test_a_drafts_span_ends_when_it_is_told_to_leave(stack: Stack, exporter: InMemorySpanExporter) -> None:
    cluster = await stack.cluster([{}])
    slow_down(cluster.verifier, 0.02)
    text = Text()
    running = asyncio.create_task(cluster.speculative([5, 6, 7], text, **OPTIONS))
    await until(lambda: text.accepted > 0)
    stub = draft_pb2_grpc.DraftServiceStub(await stack.channel(cluster.drafts[0]))
    await stub.Detach(draft_pb2.DetachRequest(session_id=text.started.session_id))
    (span,) = await spans_of(exporter, "draft.session")
    assert said(span)["ended"] == "detached" and not running.done()
    await running


async def test_a_drafts_span_ends_with_the_stream(stack: Stack, exporter: InMemorySpanExporter) -> None:
    cluster = await stack.cluster([{}])
    slow_down(cluster.verifier, 0.02)
    text = Text()
    running = asyncio.create_task(cluster.speculative([5, 6, 7], text, **OPTIONS))
    await until(lambda: text.accepted > 0)
    await cluster.drafts[0].stop(0.5)
    (span,) = await spans_of(exporter, "draft.session")
    assert said(span)["ended"] == "TRANSPORT" and not running.done()
    await running


async def test_without_an_endpoint_there_are_no_spans(stack: Stack) -> None:
    cluster = await stack.cluster([{}])
    assert DraftSettings().traces == ""
    start_tracing("draft", "")
    assert begin_span("x") is NO_SPAN
    assert len(await cluster.plain([5, 6, 7], **OPTIONS)) == 40


async def test_nothing_of_opentelemetry_is_imported_while_traces_are_off() -> None:
    code = (
        "import sys, draft_service.server, router.server, draftwood.client, draftwood.rpc.tracing as t\n"
        "t.start_tracing('draft', ''); t.take_context((('traceparent', '00-1-2-01'), ('x-request-id', 'a')))\n"
        "with t.span('a'): assert t.outgoing_metadata() == (('x-request-id', 'a'),)\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await asyncio.wait_for(process.wait(), 60) == 0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: dict[str, list[str]] = {}  # names by service

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            name = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.spans.setdefault(name, []).extend(s.name for scope in resource.scope_spans for s in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_an_endpoint_in_the_settings_gets_the_spans(stack: Stack) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        verifier = await stack.verifier(traces=f"http://127.0.0.1:{port}")
        await collect(await stack.client(await stack.router([verifier])), [5, 6, 7], **OPTIONS)
        await verifier.stop(0.5)  # sends what is left
        # One process has one tracer: here the verifier's settings made it, for the router as well.
        assert sorted(collector.spans["draftwood-verifier"]) == ["router.generate", "verifier.generate"]
    finally:
        stop_tracing()
        server.stop(None).wait(5)


async def test_a_requests_id_is_in_the_logs_of_all_three_services(stack: Stack) -> None:
    cluster = await stack.cluster([{}])
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        text = await cluster.speculative([5, 6, 7], request_id="order-66", **OPTIONS)
        await cluster.speculative([5, 6, 8], **OPTIONS)
        await cluster.is_idle()
        await until(lambda: sum(line["event"] == "session detached" for line in logs) == 2)
        await cluster.drafts[0].stop(0.5)
        await until(lambda: any(line["event"] == "stream to verifier ended" for line in logs))
    ours = [line for line in logs if line.get("request") == "order-66"]
    by_event = {event: [line for line in ours if line["event"] == event] for event in {line["event"] for line in ours}}
    assert {event: len(lines) for event, lines in by_event.items()} == {
        "request ended": 2, "session attached": 1, "session detached": 1,
    }  # fmt: skip
    for line in by_event["request ended"]:
        assert (line["outcome"], line["tokens"], line["accepted"]) == ("ok", 40, text.accepted)
    sessions = [line["session"] for line in ours if "session" in line]
    assert sessions == [text.started.session_id] * 3
    others = {line["request"] for line in logs if "request" in line} - {"order-66"}
    assert len(others) == 1, "a request without an id gets one, and no other request's"
    (ended,) = (line for line in logs if line["event"] == "stream to verifier ended")
    assert "request" not in ended, "the stream was opened for a request and outlives it"


@pytest.mark.parametrize("bad", ["", "x" * (MAX_REQUEST_ID + 1)])
async def test_an_id_that_is_none_is_refused(stack: Stack, bad: str) -> None:
    cluster = await stack.cluster([])
    stub = router_pb2_grpc.RouterServiceStub(await stack.channel(cluster.router))
    generation = verifier_pb2.Generation(text="a", max_tokens=1)
    request = router_pb2.RouterServiceGenerateRequest(generation=generation)
    call = stub.Generate(request, metadata=(("x-request-id", bad),))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    error = from_rpc_error(refused.value)
    assert (type(error), error.reason, error.field) == (InvalidArgument, "REQUEST_ID", "x-request-id")
    for not_sent in ("x" * (MAX_REQUEST_ID + 1), "a\tb", "é"):
        with pytest.raises(InvalidArgument, match="REQUEST_ID"):
            await cluster.plain("a", request_id=not_sent)
