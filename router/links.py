"""What the router knows of a worker, kept current by one background task a worker.

A link waits for the worker's health, reads what the worker is, then follows its load for as long as the stream
holds. The stream is the detector: when it breaks, or is silent for longer than a lease, the worker is lost at once
and tried again every ``reconnect_s``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood import credentials
from draftwood.credentials import role_host
from draftwood.errors import DraftwoodError, Unavailable
from draftwood.rpc.channel import Connection, Dialer
from draftwood.rpc.status import from_rpc_error
from draftwood.telemetry import get_logger
from draftwood.v1 import draft_pb2, draft_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from router.registry import Health, Registry, Role, Worker

INFO_TIMEOUT_S = 5.0

log = get_logger(__name__)
Message = TypeVar("Message")


class Links:
    """Owns the link tasks and the channels to the workers."""

    def __init__(self, reconnect_s: float, lease_s: float, dialer: Dialer) -> None:
        self._reconnect_s = reconnect_s
        self._dialer = dialer
        self._lease_s = lease_s
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._connections: dict[Worker, Connection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def start(self, registry: Registry, worker: Worker) -> None:
        connection = Connection(self._dialer, worker.address, role_host(credentials.Role(worker.role)))
        self._connections[worker] = connection
        worker.channel = connection.channel()
        link = Link(registry, worker, connection, self._reconnect_s, self._lease_s)
        self._tasks[worker] = asyncio.create_task(link.run(), name=f"link {worker.address}")

    def end(self, worker: Worker) -> None:
        task = asyncio.create_task(self._close(worker, self._tasks.pop(worker)))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def stop(self) -> None:
        for worker in tuple(self._tasks):
            self.end(worker)
        await asyncio.gather(*self._closing)

    async def _close(self, worker: Worker, link: asyncio.Task[None]) -> None:
        link.cancel()
        await asyncio.gather(link, return_exceptions=True)
        await self._connections.pop(worker).close()


class Link:
    """One worker, followed."""

    def __init__(
        self, registry: Registry, worker: Worker, connection: Connection, reconnect_s: float, lease_s: float
    ) -> None:
        self._registry = registry
        self._worker = worker
        self._connection = connection
        self._channel = connection.channel()
        self._reconnect_s = reconnect_s
        self._lease_s = lease_s
        self._noted = ""  # the last failure that was logged while the worker was not ready

    async def run(self) -> None:
        while True:
            try:
                await self._follow()
            except (grpc.RpcError, DraftwoodError) as error:
                self._note(error)
            self._registry.lost(self._worker)
            await asyncio.sleep(self._reconnect_s)

    async def _follow(self) -> None:
        self._worker.channel = self._channel = self._connection.channel()
        await self._await_serving()
        if self._worker.role is Role.VERIFIER:
            await self._follow_verifier()
        else:
            await self._follow_draft()

    async def _await_serving(self) -> None:
        watch = health_pb2_grpc.HealthStub(self._channel).Watch(health_pb2.HealthCheckRequest())
        try:
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        finally:
            watch.cancel()

    async def _follow_verifier(self) -> None:
        stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)  # type: ignore[no-untyped-call]
        request = verifier_pb2.VerifierServiceGetModelInfoRequest()
        info = (await self._timed(stub.GetModelInfo(request, timeout=INFO_TIMEOUT_S))).model
        self._registry.identify(self._worker, info.incarnation)
        self._worker.model = info
        async for load in self._leased(stub.WatchLoad(verifier_pb2.VerifierServiceWatchLoadRequest())):
            self._worker.verifier_load = load
            self._alive(load.incarnation, load.draining)

    async def _follow_draft(self) -> None:
        stub = draft_pb2_grpc.DraftServiceStub(self._channel)  # type: ignore[no-untyped-call]
        request = draft_pb2.DraftServiceGetModelInfoRequest()
        info = (await self._timed(stub.GetModelInfo(request, timeout=INFO_TIMEOUT_S))).draft
        self._registry.identify(self._worker, info.incarnation)
        self._worker.draft = info
        async for load in self._leased(stub.WatchLoad(draft_pb2.DraftServiceWatchLoadRequest())):
            self._worker.draft_load = load
            self._alive(load.incarnation, load.draining)

    def _alive(self, incarnation: str, draining: bool) -> None:
        if incarnation != self._worker.incarnation:
            raise Unavailable("INCARNATION", f"{self._worker.address} answers as another process than before")
        self._worker.sessions_told = self._worker.sessions
        self._registry.set_health(self._worker, Health.DRAINING if draining else Health.READY)

    async def _timed(self, call: Awaitable[Any]) -> Any:
        began = time.monotonic()
        answer = await call
        self._worker.took((time.monotonic() - began) * 1e3)
        return answer

    async def _leased(self, stream: grpc.aio.UnaryStreamCall[object, Message]) -> AsyncIterator[Message]:
        """The stream's messages; raises Unavailable LEASE when none comes for the lease."""
        try:
            while True:
                async with asyncio.timeout(self._lease_s):
                    message = await stream.read()
                if message is grpc.aio.EOF:
                    return
                yield cast(Message, message)
        except TimeoutError:
            raise Unavailable("LEASE", f"{self._worker.address} was silent for {self._lease_s} s") from None
        finally:
            stream.cancel()

    def _note(self, error: Exception) -> None:
        said = str(from_rpc_error(error) if isinstance(error, grpc.RpcError) else error)
        who = {"pool": self._worker.role.value, "address": self._worker.address}
        if self._worker.ready:
            log.warning("worker_lost", **who, error=said)
        elif said != self._noted:
            log.info("worker_not_reached", **who, error=said)
        self._noted = said
