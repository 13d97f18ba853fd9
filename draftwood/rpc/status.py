"""Between our errors and gRPC statuses with google.rpc details."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from draftwood import wire
from draftwood.errors import DraftwoodError, Internal, ResourceExhausted, Unavailable
from draftwood.v1 import tree_pb2

DOMAIN: Final = "draftwood"
# Codes that gRPC itself gives when a connection or a peer is lost. INTERNAL is one of them: grpc.aio reports it for a
# stream that the peer ended, whatever the peer's status was, when a write races the end (grpc#36066).
_LOST: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


def to_status(error: DraftwoodError) -> status_pb2.Status:
    """The error as google.rpc.Status: ErrorInfo, and BadRequest and RetryInfo where they apply."""
    plain = wire.error_to_proto(error)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=plain.reason, domain=DOMAIN)]
    if plain.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=plain.field, description=plain.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if plain.retry_after_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(plain.retry_after_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=plain.code, message=plain.message, details=[_packed(detail) for detail in details])


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def from_rpc_error(error: grpc.RpcError) -> DraftwoodError:
    """What a failed call means.

    An error that a draftwood server raised comes back as it was. Anything else is TRANSPORT: Unavailable when the
    connection or the peer is lost (nothing is known about the call), Internal when the call can never work. A message
    over a size limit is ResourceExhausted MESSAGE_TOO_LARGE.
    """
    with suppress(ValueError, DecodeError):  # details that contradict the call's status, or are none at all
        status = rpc_status.from_call(error)
        if status and any(info.domain == DOMAIN for info in _unpacked(status.details, error_details_pb2.ErrorInfo)):
            return _from_status(status)
    return _from_transport(error)


def _unpacked(details: Iterable[any_pb2.Any], kind: type[Any]) -> list[Any]:
    candidates = [(detail, kind()) for detail in details]
    return [message for detail, message in candidates if detail.Unpack(message)]


def _from_status(status: status_pb2.Status) -> DraftwoodError:
    plain = tree_pb2.Error(code=status.code, message=status.message)
    for info in _unpacked(status.details, error_details_pb2.ErrorInfo):
        plain.reason = info.reason
    for request in _unpacked(status.details, error_details_pb2.BadRequest):
        plain.field = "".join(violation.field for violation in request.field_violations[:1])
    for retry in _unpacked(status.details, error_details_pb2.RetryInfo):
        plain.retry_after_ms = retry.retry_delay.ToMilliseconds()
    return wire.error_from_proto(plain)


def _from_transport(error: grpc.RpcError) -> DraftwoodError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return ResourceExhausted("MESSAGE_TOO_LARGE", details)
    text = f"{code.name}: {details}"
    return Unavailable("TRANSPORT", text) if code in _LOST else Internal("TRANSPORT", text)
