"""A cluster with TLS from end to end: texts, rotation under load, tickets, limits, and no secret in any log."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import text_encoding
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood.client import DraftwoodClient
from draftwood.config import ClientSettings
from draftwood.credentials import TlsFiles
from draftwood.errors import (
    DraftwoodError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from draftwood.rpc.channel import Dialer
from draftwood.telemetry import configure_logging, redact
from draftwood.tickets import LIFETIME_S, issue_ticket
from draftwood.v1 import draft_pb2, draft_pb2_grpc
from router import attachments
from router.server import RouterServer
from tests.services.authority import Authority, new_token, role_name, token_entry, write_clients
from tests.services.stack import (
    Cluster,
    Stack,
    collect,
    engine_of,
    sessions_of,
    slow_down,
    tokens_of,
    until,
    verifier_request,
    verifier_stub,
)
from tests.services.wire import HandDraft

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "ignore_eos": True}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def files_of(settings: dict[str, Any]) -> tuple[Path, Path]:
    return settings["tls_cert"], settings["tls_key"]


class Secured:
    """A verifier, a draft worker and a router, each with a certificate of its own, and a client with one."""

    def __init__(self, stack: Stack, authority: Authority) -> None:
        self.stack = stack
        self.authority = authority
        self.tls = {role: authority.server(role) for role in ("verifier", "draft", "router")}
        self.dialers = {
            role: Dialer(TlsFiles(*files_of(settings), authority.ca)) for role, settings in self.tls.items()
        }

    async def start(self, kind: str = "lm", **router: Any) -> Cluster:
        verifier = await self.stack.verifier(**self.tls["verifier"])
        draft = await self.stack.draft(kind=kind, **self.tls["draft"])
        server = await self.stack.router([verifier], [draft], **(self.tls["router"] | router))
        return Cluster(verifier, [draft], server, await self.client(server, self.authority.client("client")))

    async def client(self, server: Any, settings: ClientSettings) -> DraftwoodClient:
        made = DraftwoodClient(server.address, settings=settings, resume_timeout_s=3.0)
        return await self.stack.exits.enter_async_context(made)

    async def channel(self, server: Any, role: str, as_role: str) -> grpc.aio.Channel:
        opened = self.dialers[as_role].open(server.address, role_name(role))
        return await self.stack.exits.enter_async_context(opened)


async def test_the_text_is_the_same_over_tls_and_drafts_take_part(stack: Stack, authority: Authority) -> None:
    plain = await stack.cluster()
    want = await plain.plain("The sky is", max_tokens=60, **SAMPLED)
    cluster = await Secured(stack, authority).start()
    slow_down(cluster.verifier, 0.002)
    text = await cluster.speculative("The sky is", max_tokens=60, **SAMPLED)
    assert text.tokens == want and text.accepted > 0
    await cluster.is_idle()


# --- tickets


async def test_a_ticket_of_another_worker_or_of_yesterday_lets_nobody_in(stack: Stack) -> None:
    verifier = await stack.verifier(canary=False)
    slow_down(verifier, 0.01)
    channel = await stack.channel(verifier)
    call = verifier_stub(channel).Generate(verifier_request("s", b"key", max_tokens=60, ignore_eos=True))
    await until(lambda: "s" in engine_of(verifier).sessions)
    draft = HandDraft(channel)
    await draft.hello(incarnation="mine")
    for ticket, reason in (
        (issue_ticket(b"key", "s", "another's", 0.0), "TICKET"),
        (issue_ticket(b"key", "another", "mine", 0.0), "TICKET"),
        (issue_ticket(b"another key", "s", "mine", 0.0), "TICKET"),
        (b"key", "TICKET"),
        (issue_ticket(b"key", "s", "mine", -LIFETIME_S), "TICKET_EXPIRED"),
    ):
        await draft.show_ticket("s", ticket, 1)
        error = await draft.error()
        assert (error.status, error.reason, error.field) == ("PERMISSION_DENIED", reason, "join.ticket")
    await draft.show_ticket("s", issue_ticket(b"key", "s", "mine", 0.0), 1)
    assert (await draft.start()).handle == 1
    draft.close()
    assert len(await tokens_of(call)) == 60


async def test_a_draft_attached_late_in_a_session_still_gets_in(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is older than a ticket lives: the ticket is new all the same."""
    monkeypatch.setattr("draftwood.tickets.LIFETIME_S", 0.5)
    verifier = await stack.verifier(canary=False)
    slow_down(verifier, 0.02)
    first = await stack.draft(kind="ngram")
    router = await stack.router([verifier], [first], drafts_per_session=1)
    client = await stack.client(router)
    text = asyncio.create_task(collect(client, "The sky is", max_tokens=120, **SAMPLED))
    await until(lambda: bool(engine_of(verifier).sessions))
    await asyncio.sleep(1.0)
    second = await stack.draft(kind="ngram")
    router.register("draft", "d", second.address, second.incarnation)  # type: ignore[attr-defined]
    await until(lambda: any(w.address == second.address and w.health == "READY" for w in router.workers()))  # type: ignore[attr-defined]
    await first.stop(0.1)
    await until(lambda: sessions_of(second) == 1, what="the second draft has the session's text")
    assert len((await text).tokens) == 120


async def test_attach_passes_a_refused_ticket_on(stack: Stack, authority: Authority) -> None:
    secured = Secured(stack, authority)
    cluster = await secured.start("ngram")
    slow_down(cluster.verifier, 0.01)
    calls = verifier_stub(await secured.channel(cluster.verifier, "verifier", "router"))
    call = calls.Generate(verifier_request("s", b"key", max_tokens=40, ignore_eos=True))
    await until(lambda: "s" in cluster.engine.sessions)
    stub: Any = draft_pb2_grpc.DraftServiceStub(await secured.channel(cluster.drafts[0], "draft", "router"))
    stale = issue_ticket(b"key", "s", cluster.drafts[0].incarnation, -LIFETIME_S)
    request = draft_pb2.AttachRequest(session_id="s", ticket=stale, verifier_address=cluster.verifier.address)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Attach(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert len(await tokens_of(call)) == 40


# --- rotation


async def checked(dialer: Dialer, server: Any, role: str) -> None:
    """A handshake and an answer. Raises the call's error."""
    async with dialer.open(server.address, role_name(role)) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


async def test_certificates_are_renewed_under_a_live_stream(stack: Stack, authority: Authority, tmp_path: Path) -> None:
    """From one CA to another with an overlap; the text that is being written goes on, and no process restarts."""
    ours = tmp_path / "trusted.pem"
    ours.write_bytes(authority.ca.read_bytes())
    secured = Secured(stack, authority)
    for settings in secured.tls.values():
        settings["tls_ca"] = ours
    cluster = await secured.start()
    slow_down(cluster.verifier, 0.02)
    want = await cluster.plain("The sky is", max_tokens=100, **SAMPLED)
    text = asyncio.create_task(cluster.speculative("The sky is", max_tokens=100, **SAMPLED))
    await until(lambda: cluster.attached == 1)

    successor = Authority(tmp_path / "next")
    new = Dialer(TlsFiles(*successor.issue(role_name("admin")), successor.ca))
    old = Dialer(TlsFiles(*authority.issue(role_name("admin")), authority.ca))
    servers = {"verifier": cluster.verifier, "draft": cluster.drafts[0], "router": cluster.router}
    for role, server in servers.items():
        await checked(old, server, role)
        with pytest.raises(grpc.aio.AioRpcError):
            await checked(new, server, role)

    ours.write_bytes(authority.ca.read_bytes() + successor.ca.read_bytes())  # 1: both are trusted
    for role, settings in secured.tls.items():  # 2: certificates of the new one
        successor.issue_to(files_of(settings), role_name(role), "127.0.0.1")
    for role, server in servers.items():
        await checked(new, server, role)
        with pytest.raises(grpc.aio.AioRpcError):
            await checked(old, server, role)  # trusts the old CA alone
    ours.write_bytes(successor.ca.read_bytes())  # 3: the old one is trusted no more
    stale = Dialer(TlsFiles(*authority.issue(role_name("admin")), successor.ca))
    for role, server in servers.items():
        with pytest.raises(grpc.aio.AioRpcError):
            await checked(stale, server, role)

    assert not text.done(), "the text was being written all the while"
    assert (await text).tokens == want

    late = await stack.draft(kind="ngram", **secured.tls["draft"])  # everybody speaks with everybody anew
    cluster.router.register("draft", "late", late.address, late.incarnation)
    await until(lambda: any(w.address == late.address and w.health == "READY" for w in cluster.router.workers()))
    client = await secured.client(cluster.router, successor.client("client"))
    assert (await collect(client, "The sky is", max_tokens=100, **SAMPLED)).tokens == want


async def test_a_router_comes_back_to_a_worker_with_its_new_certificate(
    stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    """The verifier restarts and trusts only the new CA: the router's link must dial with what is on disk now."""
    ours = tmp_path / "trusted.pem"
    ours.write_bytes(authority.ca.read_bytes())
    secured = Secured(stack, authority)
    for settings in secured.tls.values():
        settings["tls_ca"] = ours
    verifier = await stack.verifier(canary=False, **secured.tls["verifier"])
    router = await stack.router([verifier], **secured.tls["router"])
    successor = Authority(tmp_path / "next")
    ours.write_bytes(successor.ca.read_bytes())
    for role in ("verifier", "router"):
        successor.issue_to(files_of(secured.tls[role]), role_name(role), "127.0.0.1")
    await verifier.stop(0.1)
    await until(lambda: router.workers()[0].health == "LOST")
    again = await stack.verifier(canary=False, **(secured.tls["verifier"] | {"listen": verifier.address}))  # type: ignore[attr-defined]
    await until(lambda: router.workers()[0].health == "READY")
    client = await secured.client(router, successor.client("client"))
    assert len((await collect(client, "The sky is", max_tokens=5, **SAMPLED)).tokens) == 5
    assert again.address == verifier.address  # type: ignore[attr-defined]


async def test_a_client_goes_on_with_its_new_certificate_and_token(
    stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    """One client object: a text that runs is not broken off, the next call shows what is on disk."""
    old, new = new_token(), new_token()
    clients, token = tmp_path / "clients.yaml", tmp_path / "token"
    write_clients(clients, {"name": "a", "tokens": [token_entry(old)], "max_concurrent": 1})
    token.write_text(old)
    secured = Secured(stack, authority)
    cluster = await secured.start("ngram", clients=clients)
    slow_down(cluster.verifier, 0.01)
    settings = authority.client("client").model_copy(update={"token_file": token})
    client = await secured.client(cluster.router, settings)
    text = asyncio.create_task(collect(client, "The sky is", max_tokens=60, **SAMPLED))
    await until(lambda: bool(cluster.engine.sessions))

    write_clients(clients, {"name": "a", "tokens": [token_entry(old), token_entry(new)], "max_concurrent": 1})
    token.write_text(new)
    write_clients(clients, {"name": "a", "tokens": [token_entry(new)], "max_concurrent": 1})
    assert settings.cert and settings.key
    authority.issue_to((settings.cert, settings.key), role_name("client"))
    assert await client.models()
    assert not text.done() and len(client._lines.current._connection._retired) == 1
    with pytest.raises(ResourceExhausted, match="CLIENT_CONCURRENCY"):
        await collect(client, "The sky is", max_tokens=1)
    assert len((await text).tokens) == 60
    await until(
        lambda: not client._lines.current._connection._retired, what="the old channel is closed when its calls end"
    )
    token.write_text(old)
    with pytest.raises(Unauthenticated, match="TOKEN"):
        await client.models()


# --- limits over the wire


async def test_a_clients_limits_hold_over_the_wire(stack: Stack, tmp_path: Path) -> None:
    token, other = new_token(), new_token()
    path = write_clients(
        tmp_path / "clients.yaml",
        {"name": "a", "tokens": [token_entry(token)], "requests_per_minute": 3, "tokens_per_minute": 20},
        {"name": "b", "tokens": [token_entry(other)]},
    )
    verifier = await stack.verifier(canary=False)
    router = await stack.router([verifier], clients=path)
    address = router.address  # type: ignore[attr-defined]

    async def ask(**options: Any) -> int:
        async with DraftwoodClient(address, settings=ClientSettings(token=token)) as client:
            return len(
                (await collect(client, [3, 4, 5, 6], **({"max_tokens": 10, "ignore_eos": True} | options))).tokens
            )

    assert await ask() == 10  # 14 of 20 tokens
    assert await ask() == 10  # 28
    with pytest.raises(ResourceExhausted) as caught:
        await ask()
    assert caught.value.reason == "CLIENT_TOKENS" and 20_000 < caught.value.retry_after_ms <= 27_000
    with pytest.raises(InvalidArgument, match="client 'a' may have 3"):
        await ask(n=4, temperature=1.0)
    async with DraftwoodClient(address, settings=ClientSettings(token=other)) as client:
        for _ in range(5):
            assert len((await collect(client, [3, 4, 5, 6], max_tokens=10, ignore_eos=True)).tokens) == 10
    usage = router._service._quotas._usage
    assert (usage["a"].running, usage["b"].running) == (0, 0)


async def test_limits_of_a_client_with_a_certificate_are_those_of_its_common_name(
    stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    path = write_clients(tmp_path / "clients.yaml", {"name": "batch jobs", "requests_per_minute": 1})
    secured = Secured(stack, authority)
    cluster = await secured.start("ngram", clients=path)
    named = await secured.client(cluster.router, authority.client("client", common_name="batch jobs"))
    await collect(named, "The sky is", max_tokens=1)
    with pytest.raises(ResourceExhausted, match="CLIENT_REQUESTS"):
        await collect(named, "The sky is", max_tokens=1)
    for _ in range(3):
        await collect(cluster.client, "The sky is", max_tokens=1)


# --- the client's own care


async def test_a_token_is_not_sent_over_the_network_in_plain_text(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(new_token())
    for settings in (ClientSettings(token="secret-token"), ClientSettings(token_file=token)):
        for address in ("router.example.org:50050", "10.0.0.1:50050"):
            with pytest.raises(InvalidArgument, match="plain text") as caught:
                DraftwoodClient(address, settings=settings)
            assert caught.value.field == "ca" and "secret" not in str(caught.value)
        await DraftwoodClient("127.0.0.1:1", settings=settings).close()
        await DraftwoodClient("10.0.0.1:1", settings=settings.model_copy(update={"tls": True})).close()


@pytest.mark.parametrize("content", ["", " \n", "two words", "new\nline", "ünicode", "tab\there"])
def test_a_token_that_cannot_be_sent_is_not_shown(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(InvalidArgument) as caught:
        DraftwoodClient("127.0.0.1:1", settings=ClientSettings(token_file=path))
    assert caught.value.field == "token_file"
    assert not content.strip() or content not in str(caught.value)


def test_two_tokens_are_one_too_many(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a")
    with pytest.raises(InvalidArgument, match="which counts"):
        DraftwoodClient("127.0.0.1:1", settings=ClientSettings(token_file=tmp_path / "token", token="b"))


async def test_a_client_checks_whom_it_speaks_to(stack: Stack, authority: Authority, tmp_path: Path) -> None:
    secured = Secured(stack, authority)
    cluster = await secured.start("ngram")
    stranger = Authority(tmp_path / "stranger")
    good = authority.client("client")
    for wrong in ({"ca": stranger.ca}, {"server_name": "router.example.org"}, {"cert": None, "key": None}):
        client = await secured.client(cluster.router, good.model_copy(update=wrong))
        with pytest.raises(Unavailable, match="ROUTER_UNREACHABLE"):
            await client.models()
    named = await secured.client(cluster.router, good.model_copy(update={"server_name": role_name("router")}))
    assert await named.models()
    plain = await stack.client(cluster.router)
    with pytest.raises(Unavailable):
        await plain.models()


async def test_a_router_uses_no_worker_whose_certificate_names_another_role(stack: Stack, authority: Authority) -> None:
    """A stolen certificate of a draft worker makes no verifier."""
    secured = Secured(stack, authority)
    impostor = await stack.verifier(canary=False, **authority.server("draft"))
    good = await stack.verifier(canary=False, **secured.tls["verifier"])
    router = await stack.router([good], **secured.tls["router"])
    router.register("verifier", "impostor", impostor.address, impostor.incarnation)  # type: ignore[attr-defined]
    await asyncio.sleep(0.5)
    health = {worker.address: worker.health for worker in router.workers()}
    assert health == {good.address: "READY", impostor.address: "STARTING"}  # type: ignore[attr-defined]


async def test_a_client_without_rights_is_told_so(stack: Stack, authority: Authority) -> None:
    cluster = await Secured(stack, authority).start("ngram")
    with pytest.raises(PermissionDenied, match="GetStatus is for admin") as caught:
        await cluster.client.status()
    assert caught.value.reason == "ROLE"


# --- no secret in any log


@pytest.fixture(params=["json", "for people"])
def everything_logged(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """All that is logged at debug level, by us and by libraries."""
    output = io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    config = structlog.get_config()
    with redirect_stderr(output):
        configure_logging("test", json=request.param == "json", level="DEBUG")
        root.setLevel(logging.DEBUG)
        for handler in root.handlers:
            handler.setLevel(logging.DEBUG)
        yield output
    root.handlers, root.level = before, level
    structlog.configure(**config)


async def test_no_secret_is_logged_or_shown(
    stack: Stack,
    authority: Authority,
    tmp_path: Path,
    everything_logged: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run at debug level with refusals, failures and a crash: no token, key or ticket in logs, status or messages."""
    token, wrong = new_token(), new_token()
    tickets = set[bytes]()

    def recorded(key: bytes, session_id: str, worker: str, age_s: float) -> bytes:
        tickets.update((key, issue_ticket(key, session_id, worker, age_s)))
        return issue_ticket(key, session_id, worker, age_s)

    monkeypatch.setattr(attachments, "issue_ticket", recorded)
    clients = write_clients(tmp_path / "c.yaml", {"name": "a", "role": "admin", "tokens": [token_entry(token)]})
    secured = Secured(stack, authority)
    cluster = await secured.start("ngram", clients=clients)
    base = authority.client("client")
    client = await secured.client(cluster.router, base.model_copy(update={"token_file": _written(tmp_path, token)}))
    said = [
        repr(await client.status()),
        repr(client),
        repr(vars(client)),
        repr(vars(client._lines.current)),
        repr(base),
    ]
    await collect(client, "The sky is", max_tokens=20, **SAMPLED)
    bad = await secured.client(cluster.router, ClientSettings(**base.model_dump(exclude={"token"}), token=wrong))
    for work in (bad.models(), bad.status()):
        with pytest.raises(DraftwoodError) as caught:
            await work
        said += [str(caught.value), repr(caught.value)]
    cluster.router._service._status = _fails  # type: ignore[method-assign]
    with pytest.raises(DraftwoodError):
        await client.status()
    files_of(secured.tls["router"])[1].write_text("broken")
    with suppress(Unavailable):
        await (await secured.client(cluster.router, base)).models()
    said += [repr(server.__dict__) for server in (cluster.router, cluster.verifier, cluster.drafts[0])]
    said += [repr(vars(cluster.router._rpc._access)), repr(cluster.engine.sessions)]
    logging.getLogger("some.library").debug("sends authorization: Bearer %s", token)

    log = everything_logged.getvalue()
    assert "rpc_failed" in log and "files_not_usable" in log and "draft joined" in log
    assert "Bearer [secret]" in log, "what a library logs goes through the same filter"
    assert len(tickets) >= 2
    keys = [files_of(settings)[1].read_text() for settings in secured.tls.values()]
    secrets = [token, wrong, token[3:], *(line for key in keys for line in key.splitlines()[1:-1])]
    secrets += [
        shown
        for ticket in tickets
        for shown in (ticket.hex(), repr(ticket)[2:-1], text_encoding.CEscape(ticket, False))
    ]
    for secret in secrets:
        assert secret not in log, f"a secret is in the log: {secret}"
        assert not any(secret in words for words in said)


def _written(folder: Path, token: str) -> Path:
    path = folder / "token"
    path.write_text(token)
    return path


def _fails() -> Any:
    token_in_a_frame = "dw_" + "f" * 64
    raise RuntimeError(f"something with {token_in_a_frame}")


def test_what_is_taken_out_of_logs() -> None:
    token = new_token()
    assert redact(f"a {token} b") == "a [secret] b"
    assert redact(f'{{"authorization": "Bearer {token}"}}') == '{"authorization": "Bearer [secret]"}'
    assert redact("bearer abcdefghijklmnop0123") == "bearer [secret]"
    assert redact("x-----BEGIN EC PRIVATE KEY-----\nabc\n-----END EC PRIVATE KEY-----y") == "x[secret]y"
    for harmless in ("the bearer token is not known here", "dw_tmp", "-----BEGIN CERTIFICATE-----", "tokens=5"):
        assert redact(harmless) == harmless


def test_tracebacks_for_people_show_no_local_variables(everything_logged: io.StringIO) -> None:
    def failing() -> None:
        local_secret = "-".join(["hidden", "in", "a", "frame"])
        raise RuntimeError(len(local_secret))

    try:
        failing()
    except RuntimeError:
        structlog.get_logger().error("failed", exc_info=True)
    assert "RuntimeError" in everything_logged.getvalue()
    assert "hidden-in-a-frame" not in everything_logged.getvalue()


# --- command line


async def draftwood(*arguments: str, **environment: str) -> tuple[int | None, str]:
    """The console script in a process of its own: exit code and all that it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from draftwood.cli import main; main()", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"COLUMNS": "300", "NO_COLOR": "1"} | environment,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode()


async def test_the_command_line_takes_certificates_and_tokens(
    stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    token, path = new_token(), tmp_path / "token"
    path.write_text(token)
    clients = write_clients(tmp_path / "c.yaml", {"name": "a", "role": "admin", "tokens": [token_entry(token)]})
    secured = Secured(stack, authority)
    by_certificate = (await secured.start("ngram")).router
    verifier = await stack.verifier(canary=False, **secured.tls["verifier"])
    by_token = await stack.router([verifier], clients=clients, client_certificates=False, **secured.tls["router"])
    cert, key = map(str, authority.issue(role_name("client")))
    ca = str(authority.ca)
    ask = ("generate", "hi", "--max-tokens", "2", "--ignore-eos", "--address")
    with_certificate = ("--ca", ca, "--cert", cert, "--key", key)
    runs = await asyncio.gather(
        draftwood(*ask, by_certificate.address, *with_certificate),  # type: ignore[attr-defined]
        draftwood("status", "--address", by_certificate.address, *with_certificate),  # type: ignore[attr-defined]
        draftwood(*ask, by_token.address, "--ca", ca, "--token-file", str(path)),  # type: ignore[attr-defined]
        draftwood("status", "--address", by_token.address, DRAFTWOOD_CA=ca, DRAFTWOOD_TOKEN=token),  # type: ignore[attr-defined]
        draftwood(*ask, by_token.address, DRAFTWOOD_CA=ca),  # type: ignore[attr-defined]
        draftwood(*ask, by_token.address),  # type: ignore[attr-defined]
    )
    codes, said = [code for code, _ in runs], [words for _, words in runs]
    assert codes == [0, 1, 0, 0, 1, 1], said
    assert "2 tokens (length)" in said[0] and "2 tokens (length)" in said[2]
    assert "error: ROLE: " in said[1] and "tiny" in said[3]
    assert "error: CREDENTIALS_MISSING: " in said[4] and "error: ROUTER_UNREACHABLE: " in said[5]
    assert not any(token in words or "Traceback" in words for words in said)


# --- processes


async def run_module(*arguments: str, **environment: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=os.environ | environment,
    )  # fmt: skip
    assert process.stdout
    output = b""
    async with asyncio.timeout(60):
        while b"listens on" not in output and (line := await process.stdout.readline()):
            output += line
        if b"listens on" in output:
            process.send_signal(signal.SIGTERM)
        output += await process.stdout.read()
    return await process.wait(), output.decode()


async def test_a_router_process_refuses_to_be_open_unless_told_twice() -> None:
    code, said = await run_module("router", "--listen", "0.0.0.0:0")
    assert code == 1 and "LISTEN_OPEN" in said and "insecure" in said and "Traceback" not in said
    code, said = await run_module("router", "--listen", "0.0.0.0:0", DRAFTWOOD_ROUTER_INSECURE="true")
    assert code == 0 and "listens_without_tls" in said and "router listens on 0.0.0.0:" in said


async def test_servers_refuse_before_they_load_a_model(stack: Stack) -> None:
    begun = time.monotonic()
    for starting in (stack.verifier, stack.draft):
        with pytest.raises(FailedPrecondition, match="LISTEN_OPEN"):
            await starting(listen="0.0.0.0:0")
    assert time.monotonic() - begun < 2
    with pytest.raises(InvalidArgument, match="CONFIG"):
        RouterServer((await stack.router([]))._settings.model_copy(update={"tls_cert": Path("/nowhere")}))
