"""gRPC's streams as they are: what one costs, and how one ends while both sides write."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections import Counter
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from draftwood.errors import DraftwoodError
from draftwood.rpc.channel import open_channel
from draftwood.rpc.status import from_rpc_error
from draftwood.telemetry import METRICS
from draftwood.v1 import draft_pb2, draft_pb2_grpc
from draftwood.wire import error_from_proto
from tests.services.stack import (
    Stack,
    attach_request,
    engine_of,
    sessions_of,
    until,
    verifier_request,
    verifier_stub,
)
from tests.services.wire import HandDraft, ScriptedVerifier

RACES = 300
CANCELS = 1200
MOST_BYTES = 2500
"""Of memory that a cancelled stream keeps, both ends of it: grpcio 1.85 leaks about a hundred (grpc#43360)."""


def ended(method: str) -> Counter[str]:
    """How calls of the verifier's method have ended so far, by status."""
    name = f"draftwood.v1.VerifierService/{method}"
    return Counter({code: int(count._value.get()) for (each, code), count in METRICS.rpc.items() if each == name})


async def test_bug_26_sessions_share_a_stream_and_end_by_message(stack: Stack) -> None:
    """A draft worker has one stream to a verifier however many sessions come and go, and no call that is done is
    cancelled: only those are whose client has left."""
    cluster = await stack.cluster([{}, {"kind": "ngram"}])
    before = {method: ended(method) for method in ("Generate", "Speculate")}
    for _ in range(5):
        await asyncio.gather(*(cluster.speculative("The sky is", max_tokens=12, ignore_eos=True) for _ in range(8)))
    await cluster.is_idle()
    await until(lambda: sum((ended("Generate") - before["Generate"]).values()) == 40)
    assert ended("Generate") - before["Generate"] == Counter(OK=40)
    assert cluster.verifier._link_count == 2 and ended("Speculate") == before["Speculate"]
    asked = (cluster.speculative("The sky is", max_tokens=400, ignore_eos=True) for _ in range(4))
    leaving = [asyncio.create_task(each) for each in asked]
    await until(lambda: len(cluster.engine.sessions) == 4)
    for client in leaving:
        client.cancel()
    await cluster.is_idle()
    await until(lambda: (ended("Generate") - before["Generate"])["CANCELLED"] == 4)
    assert cluster.verifier._link_count == 2 and ended("Speculate") == before["Speculate"]


async def test_bug_26_a_cancelled_stream_keeps_next_to_no_memory(stack: Stack) -> None:
    """What gRPC leaks is known; more than that would be ours."""
    verifier = await stack.verifier(max_sessions=1, max_waiting=64)
    stub = verifier_stub(await stack.channel(verifier))
    engine, numbers = engine_of(verifier), itertools.count()

    async def cancelled(count: int) -> None:
        for _ in range(count // 20):
            calls = [stub.Generate(verifier_request(f"s{next(numbers)}", max_tokens=400)) for _ in range(20)]
            await until(lambda: len(engine.sessions) + len(engine.waiting) == 20)
            for call in calls:
                call.cancel()
            await until(lambda: not engine.sessions and not engine.waiting and not verifier._streams)

    await cancelled(400)
    before = resident_bytes()
    await cancelled(CANCELS)
    grown = (resident_bytes() - before) / CANCELS
    assert grown < MOST_BYTES


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * 4096


async def test_bug_39_a_refusal_is_heard_although_a_write_races_the_end(stack: Stack) -> None:
    """A draft that goes on writing while the verifier refuses it: the word in-band comes each time, the status that
    gRPC makes of it is either the same or says nothing, and never a verdict of another kind."""
    verifier = await stack.verifier()
    endings = Counter[str]()
    async with open_channel(verifier.address) as channel:
        for k in range(RACES):
            hand = HandDraft(channel)
            writing = asyncio.create_task(flood(hand, k % 3))
            said, status = await refusal(hand.call)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            assert (said.status, said.reason) == ("FAILED_PRECONDITION", "PROTOCOL_VERSION")
            meant = from_rpc_error(status)
            assert meant.reason == said.reason or (meant.status, meant.reason) == ("UNAVAILABLE", "TRANSPORT")
            endings[status.code().name] += 1
    assert len(endings) > 1, f"no status was replaced, so nothing was shown: {endings}"
    assert not verifier._links


async def flood(hand: HandDraft, first: int) -> None:
    """Writes a Hello of another protocol version and goes on writing, as fast as it can, whatever comes."""
    hello = draft_pb2.Hello(protocol_version=99, draft=draft_pb2.DraftInfo(kind="hand", incarnation="h"))
    with suppress(Exception):
        await hand.call.write(draft_pb2.SpeculateRequest(hello=hello))
        await asyncio.sleep(0.0002 * first)
        while True:
            await hand.call.write(draft_pb2.SpeculateRequest(leaves=[draft_pb2.Leave(handle=1)]))


async def refusal(call: Any) -> tuple[DraftwoodError, grpc.aio.AioRpcError]:
    """What the verifier said in-band, and how the call ended."""
    said = None
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            for each in message.errors:
                said = error_from_proto(each.error)
    except grpc.aio.AioRpcError as error:
        assert said is not None, f"nothing was said before {error.code()}"
        return said, error
    raise AssertionError("the call was not refused")


async def test_bug_39_a_draft_whose_stream_broke_joins_again(stack: Stack) -> None:
    """A stream that ends without a word says nothing of the verifier: the next session opens another."""
    tries = itertools.count()

    async def breaks_twice(requests: Any) -> Any:
        attempt = next(tries)
        async for request in requests:
            if request.HasField("hello"):
                yield draft_pb2.SpeculateResponse(welcome=welcome(request.hello))
            for join in request.joins:
                if attempt < 2:
                    raise RuntimeError("the stream breaks")
                yield draft_pb2.SpeculateResponse(starts=[draft_pb2.Start(handle=join.handle, tokens=[5, 6], budget=4)])

    verifier, draft = await stack.start(ScriptedVerifier(breaks_twice)), await stack.draft(kind="ngram")
    worker: Any = draft_pb2_grpc.DraftServiceStub(await stack.channel(draft))
    for k in range(2):
        with suppress(grpc.RpcError):
            await worker.Attach(attach_request(draft, f"s{k}", b"t", verifier.address))
            raise AssertionError("the stream did not break")
    await worker.Attach(attach_request(draft, "s2", b"t", verifier.address))
    await until(lambda: sessions_of(draft) == 1)


def welcome(hello: draft_pb2.Hello) -> draft_pb2.Welcome:
    caps = draft_pb2.Caps(max_nodes=8, max_depth=8, max_sessions=8, max_context_tokens=64)
    tokenizer = draft_pb2.TokenizerInfo(size=320)
    return draft_pb2.Welcome(protocol_version=hello.protocol_version, caps=caps, tokenizer=tokenizer)
