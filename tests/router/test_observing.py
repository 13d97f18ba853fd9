"""What the router's logs and traces say of a request whose verifier is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import structlog
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from draftwood.client import DraftwoodClient
from draftwood.rpc.tracing import stop_tracing, trace_to
from tests.router.harness import ScriptedCluster


@pytest.fixture
async def cluster() -> AsyncIterator[ScriptedCluster]:
    async with AsyncExitStack() as stack:
        yield ScriptedCluster(stack)


async def test_a_move_to_another_verifier_is_told_with_the_requests_id(cluster: ScriptedCluster) -> None:
    exporter = InMemorySpanExporter()
    trace_to("router", SimpleSpanProcessor(exporter))
    try:
        doomed, other = await cluster.verifier(die_at=3, step_s=0.05), await cluster.verifier(die_at=3, step_s=0.05)
        await cluster.serve([doomed, other])
        with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
            async with DraftwoodClient(cluster.address) as client:
                events = client.generate("one two", max_tokens=12, seed=5, request_id="order-66")
                await anext(events)
                first, second = (doomed, other) if doomed.log.requests else (other, doomed)
                second.script.die_at = None
                async for _ in events:
                    pass
    finally:
        stop_tracing()
    (moved,) = (line for line in logs if line["event"] == "generation moved")
    assert (moved["lost"], moved["to"], moved["request"]) == (first.address, second.address, "order-66")
    (ended,) = (line for line in logs if line["event"] == "request ended")
    assert (ended["request"], ended["outcome"], ended["tokens"]) == ("order-66", "ok", 12), "one request to the client"
    (span,) = exporter.get_finished_spans()
    assert span.name == "router.generate" and span.attributes["draftwood.tokens"] == 12
