"""The gRPC server that every role hosts: services, standard health, reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_status import rpc_status

from draftwood.errors import DraftwoodError, InvalidArgument, Unavailable
from draftwood.rpc.access import Access, Context
from draftwood.rpc.handlers import CallGuard, DecodeFailure, build_handlers, method_name
from draftwood.rpc.status import to_status
from draftwood.rpc.tracing import flush_tracing
from draftwood.telemetry import METRICS, Metrics

__all__ = ["DecodeFailure", "RpcServer"]

MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_CONCURRENT: Final = 1024


class RpcServer:
    """Serves the added services on one port, until stopped; one use only.

    A request over ``max_message_bytes`` ends its call with RESOURCE_EXHAUSTED before a servicer sees it. Over
    ``max_concurrent`` calls, further ones are refused at once; health and reflection do not count and go on answering.
    Health is NOT_SERVING until ``set_serving``. ``access`` says who may call; without it, whoever reaches loopback.
    """

    def __init__(
        self,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_concurrent: int = MAX_CONCURRENT,
        metrics: Metrics = METRICS,
        access: Access | None = None,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._metrics = metrics
        self._access = access or Access()
        self._guard = CallGuard(max_concurrent, metrics, self._access)
        self._services: list[tuple[ServiceDescriptor, object]] = []
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    def add(self, service: ServiceDescriptor, servicer: object) -> None:
        """Adds a service before the start; ``rpc.handlers`` says what a servicer is."""
        self._services.append((service, servicer))
        self._metrics.add_methods(method_name(method) for method in service.methods)

    async def start(self, listen: str) -> str:
        """Starts on host:port and returns the same with the bound port (0 picks a free one).

        Raises InvalidArgument CONFIG if ``listen`` is no such address, Unavailable BIND if it cannot be had,
        FailedPrecondition LISTEN_OPEN if others could reach it unchecked.
        """
        host = _host(listen)
        credentials = self._access.credentials(host)
        server = grpc.aio.server(options=server_options(self._max_message_bytes))
        self._register(server)
        await self.set_serving(False)
        port = _bind(server, listen, credentials)
        await server.start()
        self._server = server
        return f"{host}:{port}"

    def _register(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers([build_handlers(*entry, self._guard) for entry in self._services])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [service.full_name for service, _ in self._services]
        reflected = _Reflection(self._access, [*names, health.SERVICE_NAME, reflection.SERVICE_NAME])
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, server)

    def set_serving(self, serving: bool) -> asyncio.Future[list[None]]:
        """Flips the health of every service and of the server as a whole (""); await it to have told the watchers."""
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if serving else response.NOT_SERVING
        names = ["", *(service.full_name for service, _ in self._services)]
        return asyncio.gather(*(self._health.set(name, status) for name in names))

    async def stop(self, grace_s: float) -> None:
        """Health goes to NOT_SERVING for good, new calls are refused, running ones are cancelled after the grace."""
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace_s)
        await asyncio.to_thread(flush_tracing)


class _Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """For callers of any role."""

    def __init__(self, access: Access, names: Sequence[str]) -> None:
        super().__init__(service_names=names)
        self._access = access

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        try:
            if not self._access.open:
                self._access.identify(context)
        except DraftwoodError as error:
            await context.abort_with_status(rpc_status.to_status(to_status(error)))
        async for response in super().ServerReflectionInfo(requests, context):
            yield response


def _host(listen: str) -> str:
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise InvalidArgument("CONFIG", f"{listen!r} is no host:port to listen on", field="listen")
    return host


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials:
            return server.add_secure_port(listen, credentials)
        return server.add_insecure_port(listen)
    except RuntimeError as error:
        raise Unavailable("BIND", f"cannot listen on {listen}: {error}") from error


def server_options(max_message_bytes: int) -> Sequence[tuple[str, int]]:
    """Of every server that our channels connect to."""
    return (
        ("grpc.so_reuseport", 0),  # two servers on one port are an error, not a lottery
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Our channels ping every 10 s; gRPC's default allows one ping in 5 minutes and then cuts the connection.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
    )
