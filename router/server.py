"""The router's server: admission, the RouterService, and the pools behind it."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager

import grpc.aio

from draftwood.config import RouterSettings
from draftwood.errors import DraftwoodError, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from draftwood.rpc.access import CALLER, Access, tls_files
from draftwood.rpc.channel import Dialer
from draftwood.rpc.server import RpcServer
from draftwood.rpc.tracing import start_tracing
from draftwood.rpc.watching import watched
from draftwood.telemetry import serve_metrics
from draftwood.v1 import router_pb2, verifier_pb2
from draftwood.wire import error_to_proto
from router.choices import check_choices, choice_events
from router.chooser import Chooser
from router.clients import ClientBook
from router.figures import publish_figures
from router.generation import RETRY_MS
from router.links import Links
from router.quotas import Quotas, admitted, metered
from router.registry import Registry, Role, Worker, reached
from router.state import Pools, RouterState, WorkerState
from router.status import pool_status, router_status, worker_state
from router.width_control import WidthControl

MAX_MESSAGE_BYTES = 4 << 20
MAX_CONTROL_CALLS = 64
"""Calls besides generations: status, watches, health."""
LAST_WORDS_S = 0.5
"""For streams that are ending by themselves when the server stops."""
LONGEST_DEADLINE_S = 366 * 86400.0
"""gRPC names a deadline of centuries where there is none."""

Context = grpc.aio.ServicerContext[object, object]


class RouterServer:
    """One router; everything in it runs on the loop that ``start`` is called on."""

    def __init__(self, settings: RouterSettings, rng: random.Random | None = None) -> None:
        self.incarnation = uuid.uuid4().hex
        self._settings = settings
        book = ClientBook(settings.clients) if settings.clients else None
        access = Access(
            tls_files(settings), insecure=settings.insecure, tokens=book, certificates=settings.client_certificates
        )
        self._links = Links(settings.reconnect_s, settings.lease_s, Dialer(tls_files(settings)))
        self._registry = Registry(on_join=lambda w: self._links.start(self._registry, w), on_leave=self._left)
        self._width = WidthControl(self._registry, self.incarnation, settings.width_policy)
        chooser = Chooser(self._registry, rng or random.Random())
        self._state = RouterState(settings, self._registry, chooser, widths=self._width.decisions)
        self._service = RouterServicer(self._state, self.incarnation, Quotas(book) if book else None)
        self._rpc = RpcServer(
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_concurrent=2 * settings.max_requests + MAX_CONTROL_CALLS,
            access=access,
        )
        self._rpc.add(router_pb2.DESCRIPTOR.services_by_name["RouterService"], self._service)

    def _left(self, worker: Worker) -> None:
        self._links.end(worker)
        self._state.chooser.forget(worker)

    async def start(self) -> str:
        """Serves; returns the bound address."""
        serve_metrics(self._settings.metrics_host, self._settings.metrics_port)
        start_tracing("router", self._settings.traces)
        publish_figures(self._state)
        address = await self._rpc.start(self._settings.listen)
        for verifier in self._settings.verifiers:
            self._registry.add_static(Role.VERIFIER, verifier)
        for draft in self._settings.drafts:
            self._registry.add_static(Role.DRAFT, draft)
        if self._settings.width_policy.mode != "off":
            self._state.background.spawn(self._width.run())
        await self._rpc.set_serving(True)
        return address

    async def ready(self) -> None:
        """Serves from the start on."""

    def register(self, role: str, worker_id: str, address: str, incarnation: str) -> None:
        """See ``Registry.register``."""
        self._registry.register(Role(role), worker_id, address, incarnation)

    def workers(self) -> list[WorkerState]:
        return [worker_state(worker) for worker in self._registry.workers()]

    def drain(self, worker_id: str) -> None:
        """See ``Registry.drain``."""
        self._registry.drain(worker_id)

    def remove(self, worker_id: str) -> None:
        """See ``Registry.remove``."""
        self._registry.remove(worker_id)

    @property
    def pools(self) -> Pools:
        """What the controller tells, and how it is reached."""
        return self._state.pools

    async def stop(self, grace_s: float = 1.0) -> None:
        """Takes no more requests, lets those that run finish within ``grace_s``, then ends."""
        await self._rpc.set_serving(False)
        await self._service.drain(grace_s)
        await self._rpc.stop(min(grace_s, LAST_WORDS_S))
        await self._state.background.stop()
        await self._links.stop()


class RouterServicer:
    """RouterService: decodes, asks the parts, encodes."""

    def __init__(self, state: RouterState, incarnation: str, quotas: Quotas | None = None) -> None:
        self._state = state
        self._settings = state.settings
        self._counters = state.counters
        self._incarnation = incarnation
        self._quotas = quotas
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def Generate(
        self, request: router_pb2.RouterServiceGenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.RouterServiceGenerateResponse]:
        self._counters.requests_total += 1
        try:
            with watched("router") as watch:
                choices = check_choices(request.generation, self._settings.max_choices)
                with self._admitted(choices), admitted(self._quotas, CALLER.get(), choices) as meter:
                    texts = choice_events(self._state, request, remaining_s(context), choices)
                    async with aclosing(metered(texts, meter) if meter else texts) as events:
                        async for event in events:
                            watch.see(event)
                            yield router_pb2.RouterServiceGenerateResponse(event=event)
        except DraftwoodError as error:
            # In-band first: a status can be lost when the stream breaks while it is on its way (grpc#36066).
            self._counters.requests_failed += 1
            event = verifier_pb2.GenerationEvent(error=error_to_proto(error))
            yield router_pb2.RouterServiceGenerateResponse(event=event)
            raise

    async def GetStatus(self, request: router_pb2.GetStatusRequest, context: Context) -> router_pb2.GetStatusResponse:
        return router_pb2.GetStatusResponse(status=self._status())

    async def WatchStatus(
        self, request: router_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[router_pb2.WatchStatusResponse]:
        while not self._draining.is_set():
            yield router_pb2.WatchStatusResponse(status=self._status())
            await reached(self._draining, self._settings.status_interval_s)

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse(models=self._state.registry.models().values())

    async def ScalePool(self, request: router_pb2.ScalePoolRequest, context: Context) -> router_pb2.ScalePoolResponse:
        scale = self._state.pools.scale
        if scale is None:
            raise FailedPrecondition("NO_CONTROLLER", "this router's workers are not kept by a controller")
        if not request.counts:
            raise InvalidArgument("POOL_LIMIT", "no pool is named", field="counts")
        return router_pb2.ScalePoolResponse(pools=map(pool_status, await scale(dict(request.counts))))

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests; returns when none runs, at the latest after ``grace_s``."""
        self._draining.set()
        await reached(self._idle, grace_s)

    def _status(self) -> router_pb2.Status:
        return router_status(self._state, self._incarnation)

    @contextmanager
    def _admitted(self, choices: int) -> Iterator[None]:
        """A place among the served requests for each text. Raises DRAINING, QUEUE_FULL."""
        if self._draining.is_set():
            raise Unavailable("DRAINING", "the router is shutting down", retry_after_ms=RETRY_MS)
        limit = self._settings.max_requests
        if choices > limit:
            message = f"n is {choices}, but this router serves {limit} texts at once"
            raise InvalidArgument("CHOICES", message, field="generation.n")
        if self._counters.requests + choices > limit:
            message = f"{self._counters.requests} of {limit} requests are being served"
            raise ResourceExhausted("QUEUE_FULL", message, retry_after_ms=RETRY_MS)
        self._counters.requests += choices
        self._idle.clear()
        try:
            yield
        finally:
            self._counters.requests -= choices
            if not self._counters.requests:
                self._idle.set()


def remaining_s(context: Context) -> float | None:
    """Seconds until the caller's deadline; None if it has none."""
    left: float | None = context.time_remaining()
    return left if left is not None and left < LONGEST_DEADLINE_S else None
