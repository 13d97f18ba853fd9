"""Real verifiers, draft workers and routers on 127.0.0.1, in this process, and proof that they leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.server import DraftServer
from draftwood.client import Chunk, DraftwoodClient, Finished, Started
from draftwood.config import DraftSettings, RouterSettings, VerifierSettings
from draftwood.errors import DraftwoodError
from draftwood.rpc.channel import open_channel
from draftwood.rpc.status import from_rpc_error
from draftwood.tickets import issue_ticket
from draftwood.v1 import draft_pb2, verifier_pb2, verifier_pb2_grpc
from draftwood.wire import error_from_proto
from router.server import RouterServer
from tests.services.models import Models
from verifier_service.engine import Engine
from verifier_service.server import VerifierServer

SERVING = health_pb2.HealthCheckResponse.SERVING
OUR_THREADS = {"verifier-engine", "drafter"}
FAST = {"load_interval_s": 0.05}
# float64 makes it all but impossible that a near-tie flips with the shape of a batch; every node is verified.
EXACT: dict[str, Any] = {"dtype": "float64", "width": "full", "max_nodes": 16, "page_tokens": 16, "threads": 1, **FAST}
T = TypeVar("T")


async def until(condition: Callable[[], bool], timeout_s: float = 10.0, what: str = "") -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not so within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.01)


@dataclass
class Text:
    """What a client got, and when."""

    started: Started | None = None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    accepted: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def collect(client: DraftwoodClient, prompt: Any, text: Text | None = None, **options: Any) -> Text:
    """The whole answer; ``text`` can be watched while it grows."""
    text = text or Text()
    async for event in client.generate(prompt, **options):
        if isinstance(event, Started):
            text.started = event
        elif isinstance(event, Finished):
            text.finished = event
        else:
            assert event.offset == len(text.tokens) and len(event.pieces) == len(event.tokens)
            text.chunks.append(event)
            text.tokens += event.tokens
            text.pieces += event.pieces
            text.accepted += event.accepted
            text.times.append(time.monotonic())
    return text


class Stack:
    """Starts servers; the exit stack ends them in reverse order."""

    def __init__(self, models: Models, exits: AsyncExitStack) -> None:
        self.models = models
        self.exits = exits
        self.addresses: list[str] = []

    async def verifier(self, kind: type[VerifierServer] = VerifierServer, **settings: Any) -> VerifierServer:
        chosen = {"model": str(self.models.target), "name": "tiny", "kv_pages": 512, **EXACT} | settings
        return await self.start(kind(VerifierSettings(**chosen)))

    async def draft(self, **settings: Any) -> DraftServer:
        chosen = {"model": str(self.models.draft), "threads": 1, "depth": 4, "page_tokens": 16, **FAST} | settings
        return await self.start(DraftServer(DraftSettings(**chosen)))

    async def router(self, verifiers: Sequence[Any], drafts: Sequence[Any] = (), **settings: Any) -> RouterServer:
        """A router over servers of ours, or addresses; ready when it has seen all of them serving."""
        router = RouterServer(
            RouterSettings(
                verifiers=[v if isinstance(v, str) else v.address for v in verifiers],
                drafts=[d if isinstance(d, str) else d.address for d in drafts],
                **({"reconnect_s": 0.1, "status_interval_s": 0.05} | settings),
            )
        )
        await self.start(router)
        await until(lambda: all(w.health == "READY" for w in router.workers()), what="all workers ready")
        return router

    async def client(self, server: Any) -> DraftwoodClient:
        return await self.exits.enter_async_context(DraftwoodClient(server.address, resume_timeout_s=3.0))

    async def cluster(self, drafts: Sequence[dict[str, Any]] = ({},), **settings: Any) -> Cluster:
        """One verifier, draft workers by their settings, a router and a client."""
        verifier = await self.verifier(**settings)
        workers = [await self.draft(**each) for each in drafts]
        router = await self.router([verifier], workers)
        return Cluster(verifier, workers, router, await self.client(router))

    async def channel(self, server: Any) -> grpc.aio.Channel:
        return await self.exits.enter_async_context(open_channel(server.address))

    async def start(self, server: T) -> T:
        self.exits.push_async_callback(server.stop, 0.5)  # type: ignore[attr-defined]
        server.address = await server.start()  # type: ignore[attr-defined]
        self.addresses.append(server.address)  # type: ignore[attr-defined]
        await server.ready()  # type: ignore[attr-defined]
        return server


@dataclass(frozen=True)
class Cluster:
    verifier: VerifierServer
    drafts: list[DraftServer]
    router: RouterServer
    client: DraftwoodClient

    @property
    def engine(self) -> Engine:
        return engine_of(self.verifier)

    @property
    def attached(self) -> int:
        return sum(sessions_of(draft) for draft in self.drafts)

    async def plain(self, prompt: Any, **options: Any) -> list[int]:
        """What the target alone writes."""
        return (await collect(self.client, prompt, speculate=False, **options)).tokens

    async def speculative(self, prompt: Any, text: Text | None = None, **options: Any) -> Text:
        return await collect(self.client, prompt, text, **options)

    async def is_idle(self, timeout_s: float = 2.0) -> None:
        """Pages, sessions and queues are as they were before the first request."""
        engine = self.engine
        await until(
            lambda: not engine.sessions and not engine.waiting and engine.runtime.pool.held == 0 and not self.attached,
            timeout_s,
            f"idle: {len(engine.sessions)} sessions, {len(engine.waiting)} waiting, {self.attached} attached",
        )


def engine_of(verifier: VerifierServer) -> Engine:
    return verifier.loaded.engine


def slow_down(verifier: VerifierServer, step_s: float) -> None:
    """Makes every forward of the target take ``step_s`` longer, as a large one would."""
    runtime = engine_of(verifier).runtime
    forward = runtime.forward

    def slowly(*arguments: Any) -> Any:
        time.sleep(step_s)
        return forward(*arguments)

    runtime.forward = slowly  # type: ignore[method-assign]


Forward = Callable[..., Any]


def wrap_forwards(draft: DraftServer, wrapper: Callable[[Forward], Forward]) -> None:
    """Has a draft's model compute by what ``wrapper`` makes of its forwards: with children picked, and without."""
    runtime = draft.loaded.core.drafter._runtime  # type: ignore[attr-defined]
    for name in ("forward", "children"):
        setattr(runtime, name, wrapper(getattr(runtime, name)))


def sessions_of(draft: DraftServer) -> int:
    return draft.loaded.core.sessions


@asynccontextmanager
async def running(models: Models) -> AsyncIterator[Stack]:
    """A stack; when it has ended, no task, engine thread or listening port of it is left."""
    before = asyncio.all_tasks()
    async with AsyncExitStack() as exits:
        stack = Stack(models, exits)
        yield stack
    gc.collect()
    await until(lambda: not _tasks_since(before), 3.0, f"no task is left, but {_tasks_since(before)}")
    threads = [t.name for t in threading.enumerate() if t.name in OUR_THREADS]
    assert not threads, f"threads are left: {threads}"
    assert not [a for a in stack.addresses if _listens(a)], "ports are left open"


def _tasks_since(before: set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    return [t for t in asyncio.all_tasks() - before if t is not asyncio.current_task() and not t.done()]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, int(port))) == 0


async def health(server: Any) -> int:
    async with open_channel(server.address) as channel:
        return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


@dataclass
class Refusal:
    """How a call was refused: by a message in-band, and by its status."""

    said: DraftwoodError | None
    status: DraftwoodError
    events: list[str]


async def refused(call: Any) -> Refusal:
    """Reads a Generate call, verifier's or router's, to its end, which must be an error."""
    said, events = None, []
    try:
        async for answer in call:
            events.append(answer.event.WhichOneof("event"))
            if answer.event.HasField("error"):
                said = error_from_proto(answer.event.error)
    except grpc.RpcError as error:
        return Refusal(said, from_rpc_error(error), events)
    raise AssertionError(f"the call was not refused: {events}")


def attach_request(worker: Any, session_id: str, key: bytes, verifier_address: str) -> draft_pb2.AttachRequest:
    """What a router asks of a draft worker; ``key``: the ``ticket`` of the session's request."""
    ticket = issue_ticket(key, session_id, worker.incarnation, 0.0)
    return draft_pb2.AttachRequest(session_id=session_id, ticket=ticket, verifier_address=verifier_address)


def verifier_request(
    session_id: str, ticket: bytes = b"", prompt: Any = "The sky is", **fields: Any
) -> verifier_pb2.VerifierServiceGenerateRequest:
    generation = verifier_pb2.Generation(**fields)
    if isinstance(prompt, str):
        generation.text = prompt
    else:
        generation.token_ids.ids.extend(prompt)
    return verifier_pb2.VerifierServiceGenerateRequest(generation=generation, session_id=session_id, ticket=ticket)


def verifier_stub(channel: grpc.aio.Channel) -> Any:
    return verifier_pb2_grpc.VerifierServiceStub(channel)


async def tokens_of(call: Any) -> list[int]:
    """The tokens of a verifier's Generate call that must succeed."""
    tokens: list[int] = []
    async for answer in call:
        assert not answer.event.HasField("error"), answer.event.error
        tokens += answer.event.chunk.tokens
    return tokens


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    async with asyncio.timeout(timeout_s):
        return await work
