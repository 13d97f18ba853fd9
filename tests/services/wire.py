"""Either side of a Speculate stream by hand: says anything, bytes included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from draftwood.errors import DraftwoodError, Unavailable
from draftwood.rpc.server import RpcServer
from draftwood.rpc.status import from_rpc_error
from draftwood.tickets import issue_ticket
from draftwood.v1 import draft_pb2, tree_pb2, verifier_pb2
from draftwood.wire import error_from_proto
from tests.services.stack import within

SPECULATE = "/draftwood.v1.VerifierService/Speculate"
TIMEOUT_S = 5.0


class HandDraft:
    """A draft worker: one stream to a verifier. ``heard`` keeps every message."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        method = channel.stream_stream(
            SPECULATE,
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=draft_pb2.SpeculateResponse.FromString,
        )
        self.call: Any = method()
        self.heard: list[draft_pb2.SpeculateResponse] = []
        self.incarnation = "h"

    async def say(self, message: draft_pb2.SpeculateRequest | bytes) -> None:
        await within(TIMEOUT_S, self.call.write(message))

    async def hear(self) -> draft_pb2.SpeculateResponse:
        """The next message; raises the call's DraftwoodError at its end."""
        try:
            message = await within(TIMEOUT_S, self.call.read())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        assert message is not grpc.aio.EOF, "the verifier ended the stream without an error"
        self.heard.append(message)
        return message

    async def hello(self, **draft: Any) -> draft_pb2.Welcome:
        info = draft_pb2.DraftInfo(**({"kind": "hand", "incarnation": self.incarnation} | draft))
        self.incarnation = info.incarnation
        await self.say(draft_pb2.SpeculateRequest(hello=draft_pb2.Hello(protocol_version=1, draft=info)))
        return (await self.hear()).welcome

    async def ask_to_join(self, session_id: str, key: bytes, handle: int) -> None:
        """``key``: the ``ticket`` of the session's request, which its tickets are made with."""
        await self.show_ticket(session_id, issue_ticket(key, session_id, self.incarnation, 0.0), handle)

    async def show_ticket(self, session_id: str, ticket: bytes, handle: int) -> None:
        join = draft_pb2.Join(session_id=session_id, ticket=ticket, handle=handle)
        await self.say(draft_pb2.SpeculateRequest(joins=[join]))

    async def join(self, session_id: str, key: bytes, handle: int) -> draft_pb2.Start:
        """Joins; a session that is not there yet is asked for again."""
        for _ in range(200):
            await self.ask_to_join(session_id, key, handle)
            while not (message := await self.hear()).starts and not message.errors:
                pass
            if message.starts:
                return message.starts[0]
            await asyncio.sleep(0.01)
        raise AssertionError(f"cannot join {session_id}: {message}")

    async def start(self) -> draft_pb2.Start:
        """The next answer to a join that must succeed."""
        while not (message := await self.hear()).starts:
            assert not message.errors, message
        return message.starts[0]

    async def error(self) -> DraftwoodError:
        """The next in-band error."""
        while not (message := await self.hear()).errors:
            pass
        return error_from_proto(message.errors[0].error)

    async def commit(self) -> draft_pb2.Commits:
        """The next commits."""
        while not (message := await self.hear()).HasField("commits"):
            pass
        return message.commits

    async def grow(self, **columns: Any) -> None:
        await self.say(draft_pb2.SpeculateRequest(growth=growth(**columns)))

    def close(self) -> None:
        self.call.cancel()


def growth(**columns: Any) -> tree_pb2.Growth:
    """One session's growth, by default one good node; a session column may be given as its one value."""
    nodes = len(columns.get("parent", [0]))
    fields = {
        "handle": 1, "epoch": 0, "first_id": 1, "parent_base": 0, "count": nodes, "complete": True,
        "parent": [0], "token": [5] * nodes, "score": [-0.5] * nodes,
    } | columns  # fmt: skip
    return tree_pb2.Growth(**{k: v if isinstance(v, list) else [v] for k, v in fields.items()})


Script = Callable[[AsyncIterator[Any]], AsyncGenerator[draft_pb2.SpeculateResponse, None]]


class ScriptedVerifier:
    """The verifier's side of the Speculate stream by hand, as a real server; ``heard`` keeps every message."""

    def __init__(self, script: Script, listen: str = "127.0.0.1:0") -> None:
        self.heard: list[draft_pb2.SpeculateRequest] = []
        self._listen = listen
        self.address = ""
        self._script = script
        self._rpc = RpcServer()
        self._rpc.add(verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"], self)

    async def start(self) -> str:
        return await self._rpc.start(self._listen)

    async def ready(self) -> None:
        await self._rpc.set_serving(True)

    async def stop(self, grace_s: float) -> None:
        await self._rpc.stop(grace_s)

    async def Speculate(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        async with aclosing(self._script(self._recorded(requests))) as responses:
            async for response in responses:
                yield response

    async def _recorded(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            self.heard.append(request)
            yield request

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise Unavailable("LOADING", "a scripted verifier generates nothing")
        yield

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise Unavailable("LOADING", "a scripted verifier has no load")
        yield

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        raise Unavailable("LOADING", "a scripted verifier has no model")

    async def SetPolicy(self, request: Any, context: Any) -> Any:
        raise Unavailable("LOADING", "a scripted verifier has no engine")
