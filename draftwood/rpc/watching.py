"""A generation as it is seen from outside, at the router and at the verifier: its span, its metrics, its log line."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from draftwood.errors import DraftwoodError
from draftwood.rpc.tracing import Span, Value, bind_request, current_request, span
from draftwood.telemetry import METRICS, RequestOutcome, ServingRole, get_logger
from draftwood.v1 import verifier_pb2

log = get_logger(__name__)

REASONS: Final = {
    verifier_pb2.FINISH_REASON_STOP: "stop",
    verifier_pb2.FINISH_REASON_LENGTH: "length",
    verifier_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


class GenerationWatch:
    """What has been seen of one request; its texts are added up."""

    def __init__(self, role: ServingRole, request_span: Span) -> None:
        self._role = role
        self._span = request_span
        self._began_s = time.monotonic()
        self._tokens = 0
        self._accepted = 0
        self._usages: list[verifier_pb2.Usage] = []
        self._reasons: list[str] = []
        self._model = ""

    def see(self, event: verifier_pb2.GenerationEvent) -> None:
        """Takes note of an event that goes to the caller."""
        if event.HasField("started"):
            self._model = event.started.model
            self._span.event("started", model=self._model, session=event.started.session_id)
        elif event.HasField("chunk"):
            self._chunk(event.chunk)
        elif event.HasField("finished"):
            self._usages.append(event.finished.usage)
            self._reasons.append(REASONS.get(event.finished.reason, "unknown"))

    def _chunk(self, chunk: verifier_pb2.Chunk) -> None:
        if not self._tokens:
            METRICS.first_token_seconds[self._role].observe(time.monotonic() - self._began_s)
            self._span.event("first token")
        self._tokens += len(chunk.tokens)
        self._accepted += chunk.accepted

    def end(self, outcome: RequestOutcome, **told: Value) -> None:
        """The request is over."""
        took_s = time.monotonic() - self._began_s
        METRICS.request_seconds[self._role].observe(took_s)
        METRICS.requests[self._role, outcome].inc()
        seen = self._seen()
        self._span.set(**seen)
        log.info("request ended", outcome=outcome, seconds=round(took_s, 4), **seen, **told)

    def _seen(self) -> dict[str, Value]:
        steps = sum(usage.steps for usage in self._usages)
        verified = sum(usage.nodes_verified for usage in self._usages)
        return {
            "model": self._model,
            "prompt_tokens": sum(usage.prompt_tokens for usage in self._usages),
            "tokens": self._tokens,
            "accepted": self._accepted,
            "steps": steps,
            "width": round(verified / steps, 3) if steps else 0.0,  # nodes verified in a step, on average
            "finish": ",".join(self._reasons),
        }


@contextmanager
def watched(role: ServingRole, **attributes: Value) -> Iterator[GenerationWatch]:
    """Watches the request that the running task serves; one that comes without an id gets one."""
    if not current_request():
        bind_request(uuid.uuid4().hex)
    with span(f"{role}.generate", **attributes) as request_span:
        watch = GenerationWatch(role, request_span)
        try:
            yield watch
        except DraftwoodError as error:
            watch.end("failed", reason=error.reason, **attributes)
            raise
        except Exception as error:
            watch.end("failed", reason=type(error).__name__, **attributes)
            raise
        except BaseException:  # the caller has gone
            watch.end("cancelled", **attributes)
            raise
        watch.end("ok", **attributes)
