"""The server and its statuses, over real sockets on 127.0.0.1."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import pickle
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import BY_STATUS, DraftwoodError, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from draftwood.rpc.channel import OPTIONS, open_channel
from draftwood.rpc.serve import starting
from draftwood.rpc.server import DecodeFailure, RpcServer
from draftwood.rpc.status import from_rpc_error, to_status
from draftwood.telemetry import Metrics, configure_logging
from draftwood.v1 import draft_pb2, router_pb2, router_pb2_grpc, tree_pb2, verifier_pb2, verifier_pb2_grpc
from draftwood.wire import error_to_proto

ROUTER = router_pb2.DESCRIPTOR.services_by_name["RouterService"]
VERIFIER = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]
GARBAGE = b"\xff" * 7
Context = grpc.aio.ServicerContext[Any, Any]
raw: Any = {"request_serializer": None, "response_deserializer": None}


class Router:
    """Raises what it is told to: the model name picks the behaviour."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.release = asyncio.Event()
        self.closed = asyncio.Event()

    async def Generate(
        self, request: router_pb2.RouterServiceGenerateRequest, context: Context
    ) -> AsyncGenerator[router_pb2.RouterServiceGenerateResponse, None]:
        started = verifier_pb2.Started(model=request.model)
        try:
            yield router_pb2.RouterServiceGenerateResponse(event=verifier_pb2.GenerationEvent(started=started))
            if request.model == "wait":
                await self.release.wait()
            while request.model == "flood":
                started = verifier_pb2.Started(model="x" * 2**16)
                yield router_pb2.RouterServiceGenerateResponse(event=verifier_pb2.GenerationEvent(started=started))
            if self.error:
                raise self.error
        finally:
            self.closed.set()

    async def GetStatus(self, request: router_pb2.GetStatusRequest, context: Context) -> router_pb2.GetStatusResponse:
        if self.error:
            raise self.error
        return router_pb2.GetStatusResponse(status=router_pb2.Status(incarnation="one"))

    async def WatchStatus(
        self, request: router_pb2.WatchStatusRequest, context: Context
    ) -> AsyncGenerator[router_pb2.WatchStatusResponse, None]:
        await self.release.wait()
        yield router_pb2.WatchStatusResponse()

    async def ListModels(self, request: router_pb2.ListModelsRequest, context: Context) -> object:
        return {"not": "a message"}

    async def ScalePool(self, request: router_pb2.ScalePoolRequest, context: Context) -> router_pb2.ScalePoolResponse:
        return router_pb2.ScalePoolResponse()


class Verifier:
    """Answers a broken message in-band, and each good one with as many stops as it has leaves."""

    async def Speculate(
        self, requests: AsyncIterator[draft_pb2.SpeculateRequest | DecodeFailure], context: Context
    ) -> AsyncGenerator[draft_pb2.SpeculateResponse, None]:
        async for request in requests:
            if isinstance(request, DecodeFailure):
                error = draft_pb2.SessionError(error=error_to_proto(request.error))
                yield draft_pb2.SpeculateResponse(errors=[error])
            else:
                stops = [draft_pb2.Stop(handle=leave.handle) for leave in request.leaves]
                yield draft_pb2.SpeculateResponse(stops=stops)

    async def Generate(
        self, request: verifier_pb2.VerifierServiceGenerateRequest, context: Context
    ) -> AsyncGenerator[verifier_pb2.VerifierServiceGenerateResponse, None]:
        yield verifier_pb2.VerifierServiceGenerateResponse()

    async def GetModelInfo(
        self, request: verifier_pb2.VerifierServiceGetModelInfoRequest, context: Context
    ) -> verifier_pb2.VerifierServiceGetModelInfoResponse:
        return verifier_pb2.VerifierServiceGetModelInfoResponse(model=verifier_pb2.ModelInfo(name="target"))

    async def SetPolicy(
        self, request: verifier_pb2.VerifierServiceSetPolicyRequest, context: Any
    ) -> verifier_pb2.VerifierServiceSetPolicyResponse:
        return verifier_pb2.VerifierServiceSetPolicyResponse()

    async def WatchLoad(
        self, request: verifier_pb2.VerifierServiceWatchLoadRequest, context: Context
    ) -> AsyncGenerator[verifier_pb2.VerifierServiceWatchLoadResponse, None]:
        yield verifier_pb2.VerifierServiceWatchLoadResponse()


class Rig:
    """A running server with both services, and a channel to it."""

    def __init__(self, **options: Any) -> None:
        self.metrics = Metrics()
        self.server = RpcServer(metrics=self.metrics, **options)
        self.router = Router()
        self.server.add(ROUTER, self.router)
        self.server.add(VERIFIER, Verifier())

    async def start(self) -> None:
        self.address = await self.server.start("127.0.0.1:0")
        await self.server.set_serving(True)
        self.channel = open_channel(self.address)
        self.stub: Any = router_pb2_grpc.RouterServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.verifier: Any = verifier_pb2_grpc.VerifierServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(0)

    async def assert_up(self) -> None:
        self.router.error = None
        assert (await self.stub.GetStatus(router_pb2.GetStatusRequest())).status.incarnation == "one"

    def calls(self, method: str, code: str) -> float | None:
        labels = {"method": f"draftwood.v1.{method}", "code": code}
        return self.metrics.registry.get_sample_value("draftwood_rpc_total", labels)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Rig]:
    rig = Rig(**options)
    await rig.start()
    try:
        yield rig
    finally:
        await rig.stop()


def generate(model: str = "") -> router_pb2.RouterServiceGenerateRequest:
    return router_pb2.RouterServiceGenerateRequest(model=model)


async def fails(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    return caught.value


# --- undecodable bytes


async def test_undecodable_unary_request() -> None:
    async with running() as rig:
        call = rig.channel.unary_unary("/draftwood.v1.RouterService/GetStatus", **raw)
        error = await fails(call(GARBAGE))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(error).reason == "DECODE"
        assert rig.calls("RouterService/GetStatus", "INVALID_ARGUMENT") == 1
        await rig.assert_up()


async def test_undecodable_request_of_a_server_stream() -> None:
    async with running() as rig:
        call = rig.channel.unary_stream("/draftwood.v1.RouterService/Generate", **raw)
        error = await fails(call(GARBAGE))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(error).reason == "DECODE"
        assert not rig.router.closed.is_set()
        await rig.assert_up()


async def test_undecodable_message_leaves_a_bidi_stream_usable() -> None:
    async with running() as rig:
        call: Any = rig.channel.stream_stream("/draftwood.v1.VerifierService/Speculate", **raw)()
        good = draft_pb2.SpeculateRequest(leaves=[draft_pb2.Leave(handle=5)]).SerializeToString()
        answers = []
        for data in (good, GARBAGE, b"\x0a\x05\x01", good):
            await call.write(data)
            answers.append(draft_pb2.SpeculateResponse.FromString(await call.read()))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert [stop.handle for answer in answers for stop in answer.stops] == [5, 5]
        assert [error.error.reason for answer in answers for error in answer.errors] == ["DECODE", "DECODE"]
        await rig.assert_up()


# --- errors raised by servicers

REASONS = {kind: f"REASON_{kind.status}" for kind in BY_STATUS.values()}


@pytest.mark.parametrize("kind", BY_STATUS.values())
@pytest.mark.parametrize("method", ["GetStatus", "Generate"])
async def test_error_arrives_as_it_was_raised(kind: type[DraftwoodError], method: str) -> None:
    async with running() as rig:
        rig.router.error = kind(REASONS[kind], " 7 > 6,\n\u20ac% ", field="growth.parent[17]", retry_after_ms=1500)
        request = generate() if method == "Generate" else router_pb2.GetStatusRequest()
        error = await fails(getattr(rig.stub, method)(request))
        assert error.code().name == kind.status
        back = from_rpc_error(error)
        assert type(back) is kind
        assert (back.reason, back.message, back.field, back.retry_after_ms) == (
            REASONS[kind],
            " 7 > 6,\n\u20ac% ",
            "growth.parent[17]",
            1500,
        )
        assert rig.calls(f"RouterService/{method}", kind.status) == 1
        assert rig.calls(f"RouterService/{method}", "OK") == 0
        await rig.assert_up()


async def test_error_details_are_google_rpc() -> None:
    async with running() as rig:
        rig.router.error = InvalidArgument("PROMPT_EMPTY", "no tokens", field="generation.prompt", retry_after_ms=2500)
        status = rpc_status.from_call(await fails(rig.stub.GetStatus(router_pb2.GetStatusRequest())))
    info, request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail, packed in zip((info, request, retry), status.details, strict=True):
        assert packed.Unpack(detail)
    assert (info.reason, info.domain) == ("PROMPT_EMPTY", "draftwood")
    assert [(v.field, v.description) for v in request.field_violations] == [("generation.prompt", "no tokens")]
    assert retry.retry_delay.ToMilliseconds() == 2500


async def test_longest_error_fits_into_metadata() -> None:
    async with running() as rig:
        rig.router.error = InvalidArgument("LONG", "\u20ac" * 10_000, field="\u20ac" * 10_000, retry_after_ms=1)
        back = from_rpc_error(await fails(rig.stub.GetStatus(router_pb2.GetStatusRequest())))
    assert type(back) is InvalidArgument and back.reason == "LONG" and len(back.message) == 341


@pytest.mark.parametrize("method", ["GetStatus", "Generate"])
async def test_unexpected_exception_is_internal_and_leaks_nothing(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("test", json=True)
    async with running() as rig:
        rig.router.error = ValueError("secret of the server")
        request = generate() if method == "Generate" else router_pb2.GetStatusRequest()
        error = await fails(getattr(rig.stub, method)(request))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert from_rpc_error(error).reason == "INTERNAL"
        everything = repr((error, error.details(), error.trailing_metadata(), error.debug_error_string()))
        assert "secret" not in everything and "ValueError" not in everything
        assert rig.calls(f"RouterService/{method}", "INTERNAL") == 1
        await rig.assert_up()
    structlog.reset_defaults()
    logged = json.loads(capsys.readouterr().err.splitlines()[0])
    assert logged["event"] == "rpc_failed" and "secret of the server" in logged["exception"]


async def test_answer_of_the_wrong_type_is_internal() -> None:
    async with running() as rig:
        error = await fails(rig.stub.ListModels(router_pb2.ListModelsRequest()))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert from_rpc_error(error).reason == "INTERNAL"
        await rig.assert_up()


async def test_stray_cancelled_error_does_not_hang_the_caller() -> None:
    async with running() as rig:
        rig.router.error = asyncio.CancelledError()  # type: ignore[assignment]
        error = await fails(rig.stub.GetStatus(router_pb2.GetStatusRequest(), timeout=5))
        assert error.code() is grpc.StatusCode.INTERNAL
        await rig.assert_up()


# --- ends of streams


@pytest.mark.parametrize("model", ["wait", "flood"])
async def test_cancelled_stream_closes_the_servicer_at_once(
    model: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """`flood` is cancelled while the server is held up in a write, `wait` between two."""
    configure_logging("test", json=True)
    async with running() as rig:
        call = rig.stub.Generate(generate(model))
        await call.read()
        await asyncio.sleep(0.3)
        call.cancel()
        await asyncio.wait_for(rig.router.closed.wait(), 5)
        await asyncio.sleep(0.1)
        assert rig.calls("RouterService/Generate", "CANCELLED") == 1
        await rig.assert_up()
    structlog.reset_defaults()
    assert "rpc_failed" not in capsys.readouterr().err
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_initial_metadata_is_sent_at_once() -> None:
    async with running() as rig:
        call = rig.stub.WatchStatus(router_pb2.WatchStatusRequest())
        await asyncio.wait_for(call.initial_metadata(), 5)
        rig.router.release.set()
        await call.read()


async def test_lost_server_is_transport() -> None:
    async with running() as rig:
        call = rig.stub.Generate(generate("wait"))
        await call.read()
        await rig.server.stop(0)
        lost = from_rpc_error(await fails(call))
        refused = from_rpc_error(await fails(rig.stub.GetStatus(router_pb2.GetStatusRequest())))
    assert (type(lost), lost.reason) == (Unavailable, "TRANSPORT")
    assert (type(refused), refused.reason) == (Unavailable, "TRANSPORT")
    assert "UNAVAILABLE" in refused.message


async def test_unknown_method_is_transport_and_never_works() -> None:
    async with running() as rig:
        call = rig.channel.unary_unary("/draftwood.v1.RouterService/Nonsense", **raw)
        error = from_rpc_error(await fails(call(b"")))
    assert (error.status, error.reason) == ("INTERNAL", "TRANSPORT")
    assert "UNIMPLEMENTED" in error.message


# --- limits


async def test_oversize_message() -> None:
    async with running(max_message_bytes=1000) as rig:
        error = await fails(rig.stub.Generate(generate("x" * 2000)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        back = from_rpc_error(error)
        assert (type(back), back.reason) == (ResourceExhausted, "MESSAGE_TOO_LARGE")
        assert not rig.router.closed.is_set()
        await rig.assert_up()


async def test_oversize_message_on_a_bidi_stream() -> None:
    async with running(max_message_bytes=1000) as rig:

        async def requests() -> AsyncIterator[draft_pb2.SpeculateRequest]:
            yield draft_pb2.SpeculateRequest(joins=[draft_pb2.Join(session_id="x" * 2000)])
            await asyncio.sleep(5)

        error = await fails(rig.verifier.Speculate(requests()))
        assert from_rpc_error(error).reason == "MESSAGE_TOO_LARGE"
        await rig.assert_up()


async def test_calls_over_the_cap_are_refused_at_once_and_health_still_answers() -> None:
    async with running(max_concurrent=2) as rig:
        held = [rig.stub.Generate(generate("wait")) for _ in range(2)]
        for call in held:
            await call.read()
        error = from_rpc_error(await fails(rig.stub.GetStatus(router_pb2.GetStatusRequest())))
        assert (type(error), error.reason) == (ResourceExhausted, "CALLS_FULL")
        assert error.retry_after_ms > 0
        assert (
            await rig.health.Check(health_pb2.HealthCheckRequest())
        ).status == health_pb2.HealthCheckResponse.SERVING
        rig.router.release.set()
        for call in held:
            assert await call.read() is grpc.aio.EOF
        await rig.assert_up()


# --- health and reflection

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_flips_for_every_service() -> None:
    async with running() as rig:
        names = ["", ROUTER.full_name, VERIFIER.full_name]

        async def check() -> set[int]:
            answers = [await rig.health.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
            return {answer.status for answer in answers}

        watches = [rig.health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]
        assert {(await watch.read()).status for watch in watches} == {SERVING}
        assert await check() == {SERVING}
        rig.server.set_serving(False)
        assert {(await watch.read()).status for watch in watches} == {NOT_SERVING}
        assert await check() == {NOT_SERVING}
        rig.server.set_serving(True)
        assert {(await watch.read()).status for watch in watches} == {SERVING}


async def test_health_is_not_serving_before_it_is_told_and_while_it_stops() -> None:
    rig = Rig()
    address = await rig.server.start("127.0.0.1:0")
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=ROUTER.full_name))
        assert (await watch.read()).status == NOT_SERVING
        await rig.server.set_serving(True)
        assert (await watch.read()).status == SERVING
        stop = asyncio.create_task(rig.server.stop(5))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        await asyncio.wait_for(stop, 4)


async def test_client_built_from_reflection_can_call() -> None:
    def call(address: str) -> tuple[list[str], str]:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = sorted(database.get_services())
            pool = descriptor_pool.DescriptorPool(database)
            method = pool.FindServiceByName("draftwood.v1.VerifierService").FindMethodByName("GetModelInfo")
            request, response = (message_factory.GetMessageClass(t) for t in (method.input_type, method.output_type))
            path = f"/{method.containing_service.full_name}/{method.name}"
            invoke = channel.unary_unary(path, request.SerializeToString, response.FromString)
            answer: Any = invoke(request(), timeout=10)
            return services, answer.model.name

    async with running() as rig:
        services, name = await asyncio.to_thread(call, rig.address)
    assert name == "target"
    assert services == [
        "draftwood.v1.RouterService",
        "draftwood.v1.VerifierService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    ]


# --- all four kinds of call


def echo_service() -> ServiceDescriptor:
    file = descriptor_pb2.FileDescriptorProto(name="tests/echo.proto", package="tests", syntax="proto3")
    word = file.message_type.add(name="Word")
    word.field.add(name="text", number=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING, label=1)
    service = file.service.add(name="Echo")
    for name, client, server in (("UU", False, False), ("US", False, True), ("SU", True, False), ("SS", True, True)):
        service.method.add(
            name=name,
            input_type=".tests.Word",
            output_type=".tests.Word",
            client_streaming=client,
            server_streaming=server,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindServiceByName("tests.Echo")


class Echo:
    async def UU(self, request: Any, context: Context) -> Any:
        return request

    async def US(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        for letter in request.text:
            yield type(request)(text=letter)

    async def SU(self, requests: AsyncIterator[Any], context: Context) -> Any:
        words = [request async for request in requests]
        return type(words[0])(text="".join(word.text for word in words))

    async def SS(self, requests: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any, None]:
        async for request in requests:
            yield request


async def test_all_four_kinds_of_call() -> None:
    service = echo_service()
    word: Any = message_factory.GetMessageClass(service.methods[0].input_type)
    codec: Any = {"request_serializer": word.SerializeToString, "response_deserializer": word.FromString}
    server = RpcServer(metrics=Metrics())
    server.add(service, Echo())
    words = [word(text="a"), word(text="b")]
    async with open_channel(await server.start("127.0.0.1:0")) as channel:
        assert (await channel.unary_unary("/tests.Echo/UU", **codec)(words[0])).text == "a"
        us = channel.unary_stream("/tests.Echo/US", **codec)(word(text="ab"))
        assert [answer.text async for answer in us] == ["a", "b"]
        assert (await channel.stream_unary("/tests.Echo/SU", **codec)(iter(words))).text == "ab"
        ss = channel.stream_stream("/tests.Echo/SS", **codec)(iter(words))
        assert [answer.text async for answer in ss] == ["a", "b"]
    await server.stop(0)


async def test_servicer_without_a_method_is_refused_at_the_start() -> None:
    server = RpcServer(metrics=Metrics())
    server.add(VERIFIER, Router())
    with pytest.raises(AttributeError, match="Speculate"):
        await server.start("127.0.0.1:0")


# --- listening


async def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=address) as caught:
            await RpcServer(metrics=Metrics()).start(address)
    assert caught.value.reason == "BIND"


async def test_two_servers_cannot_share_a_port() -> None:
    async with running() as rig:
        with pytest.raises(Unavailable, match=rig.address):
            await RpcServer(metrics=Metrics()).start(rig.address)


@pytest.mark.parametrize("listen", ["", "localhost", ":50051", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536"])
async def test_malformed_address_is_named(listen: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await RpcServer(metrics=Metrics()).start(listen)
    assert caught.value.reason == "CONFIG" and repr(listen) in caught.value.message


async def test_stop_without_start_and_twice() -> None:
    await RpcServer(metrics=Metrics()).stop(0)
    async with running() as rig:
        await rig.server.stop(0)


async def test_server_allows_frequent_pings() -> None:
    """With gRPC's defaults the server cuts such a client off after three pings (too_many_pings)."""
    options = {**dict(OPTIONS), "grpc.keepalive_time_ms": 1000}
    async with running() as rig, grpc.aio.insecure_channel(rig.address, options=list(options.items())) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(generate("wait"))
        await call.read()
        await asyncio.sleep(5)
        rig.router.release.set()
        assert await call.read() is grpc.aio.EOF


# --- statuses


class FakeRpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str | None, rich: bytes | None) -> None:
        self._values = (code, details, rich)

    def code(self) -> grpc.StatusCode:
        return self._values[0]

    def details(self) -> str | None:
        return self._values[1]

    def trailing_metadata(self) -> Any:
        return None if self._values[2] is None else [("grpc-status-details-bin", self._values[2])]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.sampled_from(list(BY_STATUS.values())), texts.filter(bool), texts, texts, st.integers(0, 2**32 - 1))
def test_status_round_trip(kind: type[DraftwoodError], reason: str, message: str, field: str, retry: int) -> None:
    status = to_status(kind(reason, message, field=field, retry_after_ms=retry))
    code = next(code for code in grpc.StatusCode if code.name == kind.status)
    back = from_rpc_error(FakeRpcError(code, message, status.SerializeToString()))
    assert type(back) is kind
    assert (back.reason, back.message, back.field, back.retry_after_ms) == (reason, message, field, retry)
    again = pickle.loads(pickle.dumps(back))
    assert (type(again), again.reason, again.field) == (kind, reason, field)


@given(st.binary(max_size=60))
def test_any_details_are_survived(rich: bytes) -> None:
    error = from_rpc_error(FakeRpcError(grpc.StatusCode.NOT_FOUND, "gone", rich))
    assert (error.status, error.reason) == ("INTERNAL", "TRANSPORT")


def test_details_of_another_domain_are_not_ours() -> None:
    status = to_status(NotFound("MODEL_UNKNOWN", "gone"))
    foreign = status_pb2.Status(code=status.code, message=status.message)
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="MODEL_UNKNOWN", domain="elsewhere"))
    error = from_rpc_error(FakeRpcError(grpc.StatusCode.NOT_FOUND, "gone", foreign.SerializeToString()))
    assert error.reason == "TRANSPORT"


LOST = {"UNAVAILABLE", "INTERNAL", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
@pytest.mark.parametrize("details", ["Internal error from Core", "", None])
def test_status_without_details_is_transport(code: grpc.StatusCode, details: str | None) -> None:
    error = from_rpc_error(FakeRpcError(code, details, None))
    assert error.reason == "TRANSPORT" and code.name in error.message
    assert error.status == ("UNAVAILABLE" if code.name in LOST else "INTERNAL")


# --- telemetry


def test_metrics_exist_from_the_start_and_twice_in_one_process() -> None:
    first, second = Metrics(), Metrics()
    for server in (RpcServer(metrics=first), RpcServer(metrics=first)):
        server.add(ROUTER, Router())
    value = first.registry.get_sample_value
    assert value("draftwood_rpc_total", {"method": "draftwood.v1.RouterService/Generate", "code": "OK"}) == 0
    assert value("draftwood_nodes_total", {"fate": "stale"}) == 0
    assert value("draftwood_sessions", {"state": "running"}) == 0
    assert value("draftwood_kv_pages", {"owner": "free"}) == 0
    first.nodes["accepted"].inc(3)
    assert value("draftwood_nodes_total", {"fate": "accepted"}) == 3
    assert second.registry.get_sample_value("draftwood_nodes_total", {"fate": "accepted"}) == 0
    with pytest.raises(KeyError):
        first.nodes["invented"]  # type: ignore[index]


def test_logs_are_json_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("verifier", json=True, level="info")
    structlog.get_logger().debug("unseen")
    structlog.get_logger().info("started", address="127.0.0.1:1")
    logging.getLogger("some.library").warning("odd %s", "thing")
    structlog.reset_defaults()
    out, err = capsys.readouterr()
    own, foreign = [json.loads(line) for line in err.splitlines()]
    assert not out
    assert (own["event"], own["role"], own["level"], own["address"]) == ("started", "verifier", "info", "127.0.0.1:1")
    assert (foreign["event"], foreign["role"], foreign["level"]) == ("odd thing", "verifier", "warning")


def test_unknown_log_level_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="LOUD"):
        configure_logging("verifier", json=False, level="LOUD")


def test_error_proto_and_status_agree() -> None:
    error = Unavailable("DRAINING", "stopping", retry_after_ms=10)
    message: tree_pb2.Error = error_to_proto(error)
    status = to_status(error)
    assert (status.code, status.message) == (message.code, message.message)


def test_no_garbage_is_looked_for_while_a_server_starts_and_then_never_in_what_it_has_made() -> None:
    try:
        with starting():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > 10_000
        with pytest.raises(NotFound), starting():
            raise NotFound("MODEL_UNKNOWN", "no such model")
        assert gc.isenabled(), "a server that does not start looks for garbage, too"
    finally:
        gc.unfreeze()
