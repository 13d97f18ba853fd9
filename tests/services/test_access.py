"""Who may call what: every method with every kind of credential, on real servers with TLS, and the exact answer.

The expectations are written down here and not read from the table that the servers use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftwood.config import ClientSettings
from draftwood.credentials import TlsFiles
from draftwood.rpc.access import ALLOWED
from draftwood.rpc.channel import Dialer
from draftwood.rpc.status import from_rpc_error
from draftwood.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from tests.services.authority import A_DAY, NOW, Authority, new_token, role_name, token_entry, write_clients
from tests.services.models import Models
from tests.services.stack import Stack, attach_request, running, verifier_request

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_S = 10.0
ROLES = ("router", "verifier", "draft", "client", "admin")
Metadata = tuple[tuple[str, str], ...]


@dataclass
class Estate:
    """One verifier, one draft worker, a router that wants certificates and one that takes tokens."""

    authority: Authority
    tokens: dict[str, str]
    addresses: dict[str, str] = field(default_factory=dict)
    incarnation: str = ""  # of the draft worker
    dialers: dict[str, Dialer] = field(default_factory=dict)  # by the name of a credential

    def open(self, server: str, credential: str) -> grpc.aio.Channel:
        role = server.split("+", maxsplit=1)[0]
        return self.dialers[credential].open(self.addresses[server], role_name(role))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def estate(models: Models, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Estate]:
    folder = tmp_path_factory.mktemp("access")
    authority, stranger = Authority(folder / "ours"), Authority(folder / "theirs")
    names = ("alice", "root", "ended", "ending", "renewed")
    ends = {"ended": NOW - A_DAY, "ending": NOW + A_DAY}
    estate = Estate(authority, {name: new_token() for name in names})
    clients = write_clients(
        folder / "clients.yaml",
        {"name": "alice", "tokens": [token_entry(estate.tokens[name]) for name in ("alice", "renewed")]},
        {"name": "root", "role": "admin", "tokens": [token_entry(estate.tokens["root"])]},
        {
            "name": "bob",
            "tokens": [token_entry(estate.tokens[name], end) for name, end in ends.items()],
        },
    )
    estate.dialers = dialers(authority, stranger)
    async with running(models) as stack:
        await start(estate, stack, clients)
        yield estate


def dialers(authority: Authority, stranger: Authority) -> dict[str, Dialer]:
    def dialer(pair: tuple[Path, Path], ca: Path = authority.ca) -> Dialer:
        return Dialer(TlsFiles(*pair, ca))

    past = {"not_before": NOW - 2 * A_DAY, "not_after": NOW - A_DAY}
    future = {"not_before": NOW + A_DAY, "not_after": NOW + 2 * A_DAY}
    made = {role: dialer(authority.issue(role_name(role), common_name=f"a {role}")) for role in ROLES}
    return made | {
        "plain text": Dialer(),
        "no certificate": Dialer(TlsFiles(ca=authority.ca)),
        "another CA's": dialer(stranger.issue(role_name("router"), role_name("draft"), role_name("admin"))),
        "expired": dialer(authority.issue(role_name("router"), **past)),
        "not valid yet": dialer(authority.issue(role_name("router"), **future)),
        "no role": dialer(authority.issue("somebody.example.org")),
        "unknown role": dialer(authority.issue("king.draftwood.internal")),
        "wildcard": dialer(authority.issue("*.draftwood.internal")),
        "role in another domain": dialer(authority.issue("router.draftwood.internal.example.org")),
        "router and draft": dialer(authority.issue(role_name("router"), role_name("draft"))),
        "distrusts the server": dialer(authority.issue(role_name("router")), stranger.ca),
    }


async def start(estate: Estate, stack: Stack, clients: Path) -> None:
    authority = estate.authority
    verifier = await stack.verifier(canary=False, **authority.server("verifier"))
    draft = await stack.draft(kind="ngram", **authority.server("draft"))
    strict = await stack.router([verifier], [draft], **authority.server("router"))
    lax = await stack.router(
        [verifier], [draft], clients=clients, client_certificates=False, **authority.server("router")
    )
    both = await stack.router([verifier], [draft], clients=clients, **authority.server("router"))
    servers = {"verifier": verifier, "draft": draft, "router": strict, "router+tokens": lax, "router+both": both}
    estate.addresses = {name: server.address for name, server in servers.items()}  # type: ignore[attr-defined]
    estate.incarnation = draft.incarnation


# --- the calls, each to its first answer


async def first(call: Any) -> str:
    """OK if a stream has given a message, which for Generate is no error."""
    try:
        async for message in call:
            if getattr(message, "event", None) and message.event.HasField("error"):
                continue  # the status follows
            return "OK"
    finally:
        call.cancel()
    raise AssertionError("the stream ended without a message")


async def unary(call: Awaitable[Any]) -> str:
    await call
    return "OK"


Call = Callable[[grpc.aio.Channel, Metadata, Estate], Awaitable[str]]


def router_stub(channel: grpc.aio.Channel) -> Any:
    return router_pb2_grpc.RouterServiceStub(channel)  # type: ignore[no-untyped-call]


def verifier_stub(channel: grpc.aio.Channel) -> Any:
    return verifier_pb2_grpc.VerifierServiceStub(channel)  # type: ignore[no-untyped-call]


def draft_stub(channel: grpc.aio.Channel) -> Any:
    return draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]


def router_generate(channel: grpc.aio.Channel, metadata: Metadata, _: Estate) -> Awaitable[str]:
    generation = verifier_pb2.Generation(text="The sky", max_tokens=1)
    request = router_pb2.RouterServiceGenerateRequest(generation=generation)
    return first(router_stub(channel).Generate(request, metadata=metadata, timeout=TIMEOUT_S))


def verifier_generate(channel: grpc.aio.Channel, metadata: Metadata, _: Estate) -> Awaitable[str]:
    request = verifier_request(new_token(), max_tokens=1)
    return first(verifier_stub(channel).Generate(request, metadata=metadata, timeout=TIMEOUT_S))


async def speculate(channel: grpc.aio.Channel, metadata: Metadata, _: Estate) -> str:
    hello = draft_pb2.Hello(protocol_version=1, draft=draft_pb2.DraftInfo(kind="hand", incarnation="h"))
    call = verifier_stub(channel).Speculate(metadata=metadata, timeout=TIMEOUT_S)
    try:
        await call.write(draft_pb2.SpeculateRequest(hello=hello))
        await call.done_writing()
    except asyncio.InvalidStateError:
        pass  # refused already: the status tells how
    return await first(call)


def attach(channel: grpc.aio.Channel, metadata: Metadata, estate: Estate) -> Awaitable[str]:
    """Of a session that the verifier does not know: the answer shows that the worker could ask it, over TLS."""
    request = attach_request(estate, "nobody", b"key", estate.addresses["verifier"])
    return unary(draft_stub(channel).Attach(request, metadata=metadata, timeout=TIMEOUT_S))


async def reflect(channel: grpc.aio.Channel, metadata: Metadata, _: Estate) -> str:
    async def asked() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    return await first(stub.ServerReflectionInfo(asked(), metadata=metadata, timeout=TIMEOUT_S))


def simple(stub: Callable[[grpc.aio.Channel], Any], name: str, request: Any) -> Call:
    def call(channel: grpc.aio.Channel, metadata: Metadata, _: Estate) -> Awaitable[str]:
        made = getattr(stub(channel), name)(request, metadata=metadata, timeout=TIMEOUT_S)
        return first(made) if name.startswith("Watch") else unary(made)

    return call


V, D, R = verifier_pb2, draft_pb2, router_pb2
CHECK = health_pb2.HealthCheckRequest()
CALLS: dict[str, Call] = {
    "router/Generate": router_generate,
    "router/ListModels": simple(router_stub, "ListModels", R.ListModelsRequest()),
    "router/GetStatus": simple(router_stub, "GetStatus", R.GetStatusRequest()),
    "router/WatchStatus": simple(router_stub, "WatchStatus", R.WatchStatusRequest()),
    "router/ScalePool": simple(router_stub, "ScalePool", R.ScalePoolRequest(counts={"draft": 1})),
    "verifier/Generate": verifier_generate,
    "verifier/Speculate": speculate,
    "verifier/GetModelInfo": simple(verifier_stub, "GetModelInfo", V.VerifierServiceGetModelInfoRequest()),
    "verifier/WatchLoad": simple(verifier_stub, "WatchLoad", V.VerifierServiceWatchLoadRequest()),
    "verifier/SetPolicy": simple(verifier_stub, "SetPolicy", V.VerifierServiceSetPolicyRequest()),
    "draft/Attach": attach,
    "draft/Detach": simple(draft_stub, "Detach", D.DetachRequest(session_id="nobody")),
    "draft/GetModelInfo": simple(draft_stub, "GetModelInfo", D.DraftServiceGetModelInfoRequest()),
    "draft/WatchLoad": simple(draft_stub, "WatchLoad", D.DraftServiceWatchLoadRequest()),
    "health": simple(health_pb2_grpc.HealthStub, "Check", CHECK),
    "reflection": reflect,
}
CLIENTS, ADMINS, ROUTERS = {"client", "admin"}, {"admin"}, {"router", "router and draft"}
DRAFTS = {"draft", "router and draft"}
MAY: dict[str, set[str]] = {
    "router/Generate": CLIENTS,
    "router/ListModels": CLIENTS,
    "router/GetStatus": ADMINS,
    "router/WatchStatus": ADMINS,
    "router/ScalePool": ADMINS,
    "verifier/Generate": ROUTERS,
    "verifier/Speculate": DRAFTS,
    "verifier/GetModelInfo": ROUTERS,
    "verifier/WatchLoad": ROUTERS,
    "verifier/SetPolicy": ROUTERS,
    "draft/Attach": ROUTERS,
    "draft/Detach": ROUTERS,
    "draft/GetModelInfo": ROUTERS,
    "draft/WatchLoad": ROUTERS,
}
NO_HANDSHAKE = {"plain text", "no certificate", "another CA's", "expired", "not valid yet", "distrusts the server"}
CREDENTIALS = [
    *ROLES, "plain text", "no certificate", "another CA's", "expired", "not valid yet", "no role", "unknown role",
    "wildcard", "role in another domain", "router and draft", "distrusts the server",
]  # fmt: skip
BEYOND = {"draft/Attach": "NOT_FOUND SESSION_UNKNOWN", "router/ScalePool": "FAILED_PRECONDITION NO_CONTROLLER"}
"""Answers to those that are let in where nothing is there to be done."""
DENIED, UNREACHED = "PERMISSION_DENIED ROLE", "UNAVAILABLE TRANSPORT"
MISSING, WRONG, ENDED = "UNAUTHENTICATED CREDENTIALS_MISSING", "UNAUTHENTICATED TOKEN", "UNAUTHENTICATED TOKEN_EXPIRED"


async def answer(estate: Estate, server: str, method: str, credential: str, metadata: Metadata = ()) -> str:
    """OK, or status and reason."""
    async with estate.open(server, credential) as channel:
        try:
            return await CALLS[method](channel, metadata, estate)
        except grpc.RpcError as error:
            meant = from_rpc_error(error)
            assert meant.status == error.code().name, "the error's status is that of the call"
            return f"{meant.status} {meant.reason}"


def cases() -> list[tuple[str, str]]:
    return [(method, credential) for method in MAY for credential in CREDENTIALS]


@pytest.mark.parametrize(("method", "credential"), cases())
async def test_certificates(estate: Estate, method: str, credential: str) -> None:
    expected = UNREACHED if credential in NO_HANDSHAKE else "OK" if credential in MAY[method] else DENIED
    if expected == "OK":
        expected = BEYOND.get(method, "OK")
    assert await answer(estate, method.split("/", maxsplit=1)[0], method, credential) == expected


@pytest.mark.parametrize("credential", CREDENTIALS)
@pytest.mark.parametrize("method", ["health", "reflection"])
async def test_health_and_reflection(estate: Estate, method: str, credential: str) -> None:
    expected = UNREACHED if credential in NO_HANDSHAKE else "OK"
    assert await answer(estate, "verifier", method, credential) == expected


TOKENS: dict[str, tuple[str, ...]] = {
    "none": (),
    "valid": ("Bearer {alice}",),
    "scheme in lower case": ("bearer {alice}",),
    "the newer of two": ("Bearer {renewed}",),
    "about to end": ("Bearer {ending}",),
    "admin's": ("Bearer {root}",),
    "ended": ("Bearer {ended}",),
    "unknown": ("Bearer dw_" + "0" * 64,),
    "cut short": ("Bearer {alice:.20}",),
    "with more behind": ("Bearer {alice}0",),
    "empty": ("Bearer ",),
    "no scheme": ("{alice}",),
    "basic": ("Basic {alice}",),
    "twice": ("Bearer {alice}", "Bearer {alice}"),
    "right and wrong": ("Bearer {alice}", "Bearer 1"),
    "hash in place of the token": ("hash",),
}
GOOD = {"valid", "scheme in lower case", "the newer of two", "about to end"}


def authorization(estate: Estate, state: str) -> Metadata:
    if state == "hash in place of the token":
        return (("authorization", f"Bearer {token_entry(estate.tokens['alice'])['sha256']}"),)
    return tuple(("authorization", value.format(**estate.tokens)) for value in TOKENS[state])


def token_answer(state: str, method: str, missing: str) -> str:
    if state == "none":
        return missing
    if state == "ended":
        return ENDED
    if state == "admin's":
        return BEYOND.get(method, "OK")
    if state not in GOOD:
        return WRONG
    return "OK" if "client" in MAY.get(method, CLIENTS) else DENIED


@pytest.mark.parametrize("state", TOKENS)
@pytest.mark.parametrize("method", [method for method in MAY if method.startswith("router/")])
async def test_tokens_over_tls_without_a_certificate(estate: Estate, method: str, state: str) -> None:
    expected = token_answer(state, method, MISSING)
    got = await answer(estate, "router+tokens", method, "no certificate", authorization(estate, state))
    assert got == expected


@pytest.mark.parametrize("credential", ["client", "draft", "no role"])
@pytest.mark.parametrize("state", TOKENS)
async def test_a_token_counts_before_a_certificate(estate: Estate, state: str, credential: str) -> None:
    """Where both are taken. A wrong token is refused although the certificate alone would do."""
    expected = token_answer(state, "router/Generate", "OK" if credential == "client" else DENIED)
    got = await answer(estate, "router+both", "router/Generate", credential, authorization(estate, state))
    assert got == expected


@pytest.mark.parametrize("method", ["health", "reflection"])
@pytest.mark.parametrize("state", ["none", "valid", "ended", "unknown"])
async def test_health_needs_no_token_and_reflection_does(estate: Estate, method: str, state: str) -> None:
    expected = "OK" if method == "health" else token_answer(state, method, MISSING)
    got = await answer(estate, "router+tokens", method, "no certificate", authorization(estate, state))
    assert got == expected


@pytest.mark.parametrize("server", ["verifier", "draft"])
async def test_a_clients_token_opens_no_other_service(estate: Estate, server: str) -> None:
    method = f"{server}/GetModelInfo"
    assert await answer(estate, server, method, "client", authorization(estate, "admin's")) == DENIED
    assert await answer(estate, server, method, "no certificate", authorization(estate, "admin's")) == UNREACHED


@pytest.mark.parametrize(("server", "role"), [("router", "verifier"), ("verifier", "draft"), ("draft", "verifier")])
async def test_a_server_of_another_role_is_not_taken_for_the_one_that_is_meant(
    estate: Estate, server: str, role: str
) -> None:
    async with estate.dialers["router"].open(estate.addresses[server], role_name(role)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_bytes_of_callers_without_the_role_reach_no_parser(estate: Estate) -> None:
    async def sent(credential: str) -> str:
        async with estate.open("verifier", credential) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary("/draftwood.v1.VerifierService/SetPolicy")(b"\xff" * 7, timeout=TIMEOUT_S)
            return from_rpc_error(caught.value).reason

    assert (await sent("draft"), await sent("router")) == ("ROLE", "DECODE")


async def test_a_refusal_is_logged_with_who_and_why(estate: Estate) -> None:
    with structlog.testing.capture_logs() as logs:
        await answer(estate, "verifier", "verifier/Speculate", "client")
        await answer(estate, "verifier", "verifier/Speculate", "wildcard")
    told = [entry["error"] for entry in logs if entry["event"] == "call_refused"]
    what = "draftwood.v1.VerifierService/Speculate is for draft"
    assert told == [f"ROLE: {what}; 'a client' is client", f"ROLE: {what}; '*.draftwood.internal' is nobody"]


async def test_every_method_says_who_may_call_it() -> None:
    services = [
        pb2.DESCRIPTOR.services_by_name[name]
        for pb2, name in ((R, "RouterService"), (V, "VerifierService"), (D, "DraftService"))
    ]
    methods = {f"{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert set(ALLOWED) == methods
    assert len(CALLS) - 2 == len(MAY) == len(methods)


async def test_the_client_library_over_both_ways(estate: Estate, tmp_path: Path) -> None:
    from draftwood.client import DraftwoodClient

    token = tmp_path / "token"
    token.write_text(estate.tokens["alice"] + "\n")
    by_token = ClientSettings(ca=estate.authority.ca, token_file=token)
    for server, settings in (("router+tokens", by_token), ("router", estate.authority.client("client"))):
        async with DraftwoodClient(estate.addresses[server], settings=settings) as client:
            assert [model.name for model in await client.models()] == ["tiny"]
