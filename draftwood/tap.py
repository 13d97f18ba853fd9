"""A relay in front of a verifier that reads along what drafts and verifier say to each other.

Draft workers and routers use its address as the verifier's. Every call is passed on byte by byte; of ``Speculate`` each
message is decoded, too, and what a comparison of drafters needs is counted: bytes, the time from a commit to the tree
that answers it, and which of the guesses the text went on with. For few sessions, without TLS.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from draftwood.errors import DraftwoodError
from draftwood.rpc.channel import open_channel
from draftwood.rpc.server import MAX_MESSAGE_BYTES, server_options
from draftwood.v1 import draft_pb2
from draftwood.wire import SessionCommit, SessionGrowth, decode_commits, decode_growth

SPECULATE = "/draftwood.v1.VerifierService/Speculate"
ANY_TOKEN = 2**31
OWN_METADATA = ("grpc-", "user-agent", "content-type", "te")
"""Beginnings of the keys that gRPC sets by itself."""

Path = tuple[int, ...]


@dataclass
class Tally:
    """What has been counted. By depth and rank: the anchor's children and likeliest siblings come first."""

    rounds: int = 0  # trees that were complete before the commit that answers them
    tokens: int = 0  # of these commits
    nodes: int = 0
    bytes_up: int = 0  # from the drafts
    bytes_down: int = 0
    round_s: list[float] = field(default_factory=list)
    asked: Counter[int] = field(default_factory=Counter)  # nodes reached that had children, by the children's depth
    taken: Counter[int] = field(default_factory=Counter)  # of these, those of which a child was taken
    ranks: Counter[int] = field(default_factory=Counter)  # children taken, by rank


@dataclass
class _Session:
    """One text as a draft sees it; paths are its tokens from the first that was committed after the start on."""

    text: Path = ()
    lengths: dict[int, int] = field(default_factory=dict)  # of the text, by epoch
    paths: dict[int, Path] = field(default_factory=dict)  # by node id
    children: dict[Path, dict[int, float]] = field(default_factory=dict)  # score by token
    epoch: int = 0
    asked_s: float | None = None  # when the open round began
    complete: bool = False

    def begin(self, epoch: int, budget: int, now: float) -> None:
        self.epoch, self.complete = epoch, False
        self.lengths[epoch] = len(self.text)
        self.asked_s = now if budget else None

    def grow(self, growth: SessionGrowth, tally: Tally, now: float) -> None:
        anchor = self.text[: self.lengths.get(growth.epoch, 0)]
        columns = zip(growth.parent.tolist(), growth.token.tolist(), growth.score.tolist(), strict=True)
        for own, (parent, token, score) in enumerate(columns, growth.first_id):
            above = self.paths.get(parent, anchor) if parent else anchor
            self.paths[own] = (*above, token)
            self.children.setdefault(above, {})[token] = score
        tally.nodes += len(growth.token)
        if growth.complete and growth.epoch == self.epoch:
            self.complete = True
            if self.asked_s is not None:
                tally.round_s.append(now - self.asked_s)

    def commit(self, commit: SessionCommit, tally: Tally, now: float) -> None:
        if self.complete:
            tally.rounds += 1
            tally.tokens += len(commit.tokens)
            self._count(commit, tally)
        self.text += commit.tokens
        kept = len(self.text)
        self.children = {p: c for p, c in self.children.items() if len(p) >= kept and p[:kept] == self.text}
        self.begin(commit.epoch, commit.budget, now)

    def _count(self, commit: SessionCommit, tally: Tally) -> None:
        at = self.text
        for depth, token in enumerate(commit.tokens):
            siblings = self.children.get(at)
            if not siblings or (depth == len(commit.node_ids) and token in siblings):
                return  # nobody had guessed here, or the guess was not verified
            tally.asked[depth] += 1
            if depth == len(commit.node_ids):
                return
            tally.taken[depth] += 1
            tally.ranks[sorted(siblings, key=lambda t: -siblings[t]).index(token)] += 1
            at = (*at, token)


class _Stream:
    """What has been read of one Speculate stream; the verifier's own trial of the draft is left out."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._sessions: dict[int, _Session] = {}
        self._canary = ""
        self._silent: set[int] = set()

    def up(self, data: bytes) -> None:
        message = draft_pb2.SpeculateRequest.FromString(data)
        self._silent |= {join.handle for join in message.joins if join.session_id == self._canary}
        growths = decode_growth(message.growth, vocab_size=ANY_TOKEN, max_nodes=0)[0]
        for growth in growths:
            if session := self._sessions.get(growth.handle):
                session.grow(growth, self.tally, time.monotonic())
        if any(growth.handle in self._sessions for growth in growths):
            self.tally.bytes_up += len(data)

    def down(self, data: bytes) -> None:
        message = draft_pb2.SpeculateResponse.FromString(data)
        if message.HasField("welcome"):
            self._canary = message.welcome.canary.session_id
        for start in message.starts:
            if start.handle not in self._silent:
                session = self._sessions[start.handle] = _Session()
                session.begin(start.epoch, start.budget, time.monotonic())
        commits = [c for c in decode_commits(message.commits) if c.handle in self._sessions]
        for commit in commits:
            self._sessions[commit.handle].commit(commit, self.tally, time.monotonic())
        if commits:
            self.tally.bytes_down += len(data)
        for stop in message.stops:
            self._sessions.pop(stop.handle, None)


class Tap(grpc.GenericRpcHandler):
    """The relay; ``tally`` is what has been counted since ``reset``."""

    def __init__(self, verifier: str) -> None:
        self._channel = open_channel(verifier)
        self._server = grpc.aio.server(options=server_options(MAX_MESSAGE_BYTES))
        self._server.add_generic_rpc_handlers((self,))
        self._streams: list[_Stream] = []
        self.tally = Tally()

    async def start(self) -> str:
        """Serves on loopback; returns host:port."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def reset(self) -> None:
        """Counts from 0 on; what sessions have drawn so far stays known."""
        self.tally = Tally()
        for stream in self._streams:
            stream.tally = self.tally

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """All methods are relayed as streams of bytes: on the wire a unary call is a stream of one message."""

        async def relay(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            stream = _Stream(self.tally) if details.method == SPECULATE else None
            metadata = [(k, v) for k, v in context.invocation_metadata() or () if not k.startswith(OWN_METADATA)]
            begin: Any = self._channel.stream_stream(details.method)
            call = begin(_read(requests, stream), metadata=metadata, timeout=context.time_remaining())
            if stream:
                self._streams.append(stream)
            try:
                async for response in call:
                    if stream:
                        stream.down(response)
                    yield response
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", error.trailing_metadata())
            finally:
                call.cancel()
                if stream:
                    self._streams.remove(stream)

        return grpc.stream_stream_rpc_method_handler(relay)


async def _read(requests: AsyncIterator[bytes], stream: _Stream | None) -> AsyncIterator[bytes]:
    async for request in requests:
        if stream:
            try:
                stream.up(request)
            except DraftwoodError:
                stream.tally.bytes_up += len(request)  # the verifier says what is wrong with it
        yield request
