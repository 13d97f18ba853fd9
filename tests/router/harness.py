"""A router with scripted workers over real gRPC, all in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc

from draftwood.config import DraftSettings, RouterSettings, VerifierSettings
from draftwood.rpc.channel import open_channel
from draftwood.rpc.status import from_rpc_error
from draftwood.v1 import router_pb2, router_pb2_grpc, verifier_pb2
from draftwood.wire import error_from_proto
from router.server import RouterServer
from tests.router.scripted import ScriptedDraft, ScriptedVerifier

RECONNECT_S = 0.1


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


class Answer:
    """What a client got of one call."""

    def __init__(self) -> None:
        self.started: list[verifier_pb2.Started] = []
        self.chunks: list[verifier_pb2.Chunk] = []
        self.finished: verifier_pb2.Finished | None = None
        self.error: Any = None
        self.status: Any = None

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    def take(self, event: verifier_pb2.GenerationEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "started":
            self.started.append(event.started)
        elif kind == "chunk":
            assert event.chunk.offset == len(self.tokens), "offsets must be contiguous"
            self.chunks.append(event.chunk)
        elif kind == "finished":
            self.finished = event.finished
        else:
            self.error = error_from_proto(event.error)


class ScriptedCluster:
    """A router with scripted workers, all in this process."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.router: RouterServer
        self.address = ""
        self.stub: Any

    async def verifier(self, name: str = "m", **script: Any) -> ScriptedVerifier:
        verifier = ScriptedVerifier(VerifierSettings(name=name), **script)
        return await self._start(verifier)

    async def draft(self, kind: str = "ngram", listen: str = "127.0.0.1:0", **script: Any) -> ScriptedDraft:
        settings = DraftSettings(kind=kind, listen=listen)  # type: ignore[arg-type]
        return await self._start(ScriptedDraft(settings, **script))

    async def _start(self, worker: Any) -> Any:
        await worker.start()
        self._stack.push_async_callback(worker.stop)
        return worker

    async def serve(
        self, verifiers: list[ScriptedVerifier], drafts: list[ScriptedDraft] | None = None, **settings: Any
    ) -> None:
        for draft in drafts or []:
            draft.verifiers = {verifier.address: verifier for verifier in verifiers}
        self.router = RouterServer(
            RouterSettings(
                verifiers=[verifier.address for verifier in verifiers],
                drafts=[draft.address for draft in drafts or []],
                reconnect_s=RECONNECT_S,
                status_interval_s=0.05,
                **settings,
            )
        )
        self.address = await self.router.start()
        self._stack.push_async_callback(self.router.stop, 0.0)
        channel = open_channel(self.address)
        self._stack.push_async_callback(channel.close)
        self.stub = router_pb2_grpc.RouterServiceStub(channel)
        await until(lambda: all(worker.health != "STARTING" for worker in self.router.workers()))

    def call(self, max_tokens: int = 12, model: str = "", timeout: float | None = None, **fields: Any) -> Any:
        fields.setdefault("sampling", verifier_pb2.Sampling(seed=5))
        generation = verifier_pb2.Generation(text="one two", max_tokens=max_tokens, **fields)
        request = router_pb2.RouterServiceGenerateRequest(model=model, generation=generation)
        return self.stub.Generate(request, timeout=timeout)

    async def generate(self, max_tokens: int = 12, **options: Any) -> Answer:
        answer = Answer()
        try:
            async for response in self.call(max_tokens, **options):
                answer.take(response.event)
        except grpc.RpcError as error:
            answer.status = from_rpc_error(error)
        return answer

    async def status(self) -> router_pb2.Status:
        return (await self.stub.GetStatus(router_pb2.GetStatusRequest())).status
