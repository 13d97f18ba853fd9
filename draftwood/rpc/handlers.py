"""What every call of every service goes through: admission, decoding, error statuses, counting.

Handlers are made from a service's descriptor. A servicer has one method for each RPC, by the RPC's name, taking the
request, or an async iterator of requests, and the context: a coroutine function if the response is unary, an async
generator function if it is a stream. It raises DraftwoodError and leaves the status to us.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_status import rpc_status

from draftwood.errors import (
    DraftwoodError,
    Internal,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from draftwood.rpc.access import Access
from draftwood.rpc.status import to_status
from draftwood.rpc.tracing import take_context
from draftwood.telemetry import Metrics, get_logger

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

log = get_logger(__name__)

RETRY_AFTER_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class DecodeFailure:
    """Stands in a stream of requests for a message that could not be decoded; the stream stays usable."""

    error: InvalidArgument


class CallGuard:
    """Admits the calls of one server and turns what they raise into statuses."""

    def __init__(self, max_concurrent: int, metrics: Metrics, access: Access) -> None:
        self._max_concurrent = max_concurrent
        self._metrics = metrics
        self._access = access
        self._running = 0

    async def run(self, method: str, context: Context, body: Callable[[], Awaitable[T]]) -> T:
        """Awaits ``body``; aborts the call if it raises. Over the cap: ResourceExhausted CALLS_FULL at once."""
        self._running += 1
        try:
            self._admit()
            self._access.admit(method, context)
            result = await body()
        except Exception as error:
            await self._fail(method, context, error)
        except asyncio.CancelledError as error:
            if _is_stray():
                await self._fail(method, context, error)
            self._count(method, "CANCELLED")
            raise
        finally:
            self._running -= 1
        self._count(method, "OK")
        return result

    def _admit(self) -> None:
        if self._running > self._max_concurrent:
            text = f"{self._max_concurrent} calls are running, which is the limit"
            raise ResourceExhausted("CALLS_FULL", text, retry_after_ms=RETRY_AFTER_MS)

    async def _fail(self, method: str, context: Context, error: BaseException) -> NoReturn:
        if isinstance(error, grpc.aio.InternalError):  # a write after the caller has gone; as a cancel, gRPC is silent
            self._count(method, "CANCELLED")
            raise asyncio.CancelledError from error
        if not isinstance(error, DraftwoodError):
            log.error("rpc_failed", method=method, exc_info=error)
            error = Internal("INTERNAL", "the server failed; its log has the details")
        if isinstance(error, Unauthenticated | PermissionDenied):
            log.info("call_refused", method=method, peer=context.peer(), error=str(error))
        self._count(method, error.status)
        await context.abort_with_status(rpc_status.to_status(to_status(error)))

    def _count(self, method: str, code: str) -> None:
        self._metrics.rpc[method, code].inc()


def _is_stray() -> bool:
    """A CancelledError that no end of the call caused; passed on, the caller would wait for ever (grpc#29248)."""
    task = asyncio.current_task()
    return task is None or not task.cancelling()


def method_name(method: MethodDescriptor) -> str:
    return f"{method.containing_service.full_name}/{method.name}"


def build_handlers(service: ServiceDescriptor, servicer: object, guard: CallGuard) -> grpc.GenericRpcHandler:
    """Handlers of all methods of ``service``; AttributeError if the servicer lacks one.

    A request is decoded when its call has been admitted, so that nobody else's bytes reach the parser.
    """
    handlers = {
        method.name: _method_handler(method, getattr(servicer, method.name), guard) for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _method_handler(
    method: MethodDescriptor, serve: Callable[..., Any], guard: CallGuard
) -> grpc.RpcMethodHandler[Any, Any]:
    name = method_name(method)
    encode, decode = GetMessageClass(method.output_type).SerializeToString, _decoder(method)
    respond = _streaming(serve, encode) if method.server_streaming else _unary(serve, encode)

    async def handle(request: bytes, context: Context) -> Any:
        async def answer() -> bytes | None:
            take_context(context.invocation_metadata())
            return await respond(_raised(decode(request)), context)

        return await guard.run(name, context, answer)

    async def handle_stream(requests: Any, context: Context) -> Any:  # gRPC decodes each as it is asked for
        return await guard.run(name, context, lambda: respond(requests, context))

    factory = _FACTORIES[method.client_streaming, method.server_streaming]
    if method.client_streaming:
        return factory(handle_stream, request_deserializer=decode)
    return factory(handle)


_FACTORIES: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

Respond = Callable[[Any, Context], Awaitable[bytes | None]]


def _unary(serve: Callable[..., Awaitable[Message]], encode: Callable[[Message], bytes]) -> Respond:
    async def respond(request: Any, context: Context) -> bytes:
        return encode(await serve(request, context))

    return respond


def _streaming(serve: Callable[..., AsyncGenerator[Message, None]], encode: Callable[[Message], bytes]) -> Respond:
    async def respond(request: Any, context: Context) -> None:
        await context.send_initial_metadata(())
        async with aclosing(serve(request, context)) as responses:
            async for response in responses:
                await context.write(encode(response))

    return respond


def _decoder(method: MethodDescriptor) -> Callable[[bytes], Message | DecodeFailure]:
    parse = GetMessageClass(method.input_type).FromString
    name = method.input_type.full_name

    def decode(data: bytes) -> Message | DecodeFailure:
        try:
            return parse(data)
        except DecodeError:
            return DecodeFailure(InvalidArgument("DECODE", f"{len(data)} bytes are no {name}"))

    return decode


def _raised(request: T | DecodeFailure) -> T:
    if isinstance(request, DecodeFailure):
        raise request.error
    return request
