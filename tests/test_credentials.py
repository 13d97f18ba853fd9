"""Roles in certificates, files that change, and where a server may listen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood.config import RouterSettings, VerifierSettings, load_client_settings, load_cluster_config
from draftwood.credentials import Role, TlsFiles, Watched, is_loopback, load_tls, role_host, roles_of, watch_tls
from draftwood.errors import DraftwoodError, FailedPrecondition, InvalidArgument
from draftwood.rpc.access import Access
from draftwood.rpc.channel import Dialer
from draftwood.rpc.server import RpcServer
from draftwood.telemetry import Metrics, redact
from router.clients import ClientBook
from router.server import RouterServer
from tests.services.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def fault(call: Callable[[], object], field: str = "") -> str:
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert (caught.value.reason, caught.value.field) == ("CONFIG", field), caught.value
    return caught.value.message


# --- roles


def test_roles_are_dns_names_of_our_own_domain() -> None:
    assert roles_of([role_host(Role.DRAFT), "10.0.0.1", "Router.Draftwood.Internal"]) == {Role.DRAFT, Role.ROUTER}
    for name in ("router", "*.draftwood.internal", "xrouter.draftwood.internal", "router.draftwood.internal.evil.org"):
        assert roles_of([name]) == frozenset(), name
    assert {role_host(role) for role in Role} == {
        f"{role}.draftwood.internal" for role in ("router", "verifier", "draft", "client", "admin")
    }


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.0.1", True), ("[::1]", True), ("localhost", True), ("LOCALHOST", True),
        ("0.0.0.0", False), ("[::]", False), ("10.0.0.1", False), ("192.168.1.2", False), ("example.org", False),
        ("localhost.example.org", False), ("[::ffff:10.0.0.1]", False), ("127.0.0.1.example.org", False), ("*", False),
    ],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


# --- files


def test_a_good_set_is_read(authority: Authority) -> None:
    cert, key = authority.issue("router.draftwood.internal")
    material = load_tls(TlsFiles(cert, key, authority.ca))
    assert (material.cert, material.key, material.ca) == tuple(p.read_bytes() for p in (cert, key, authority.ca))
    assert "PRIVATE" not in repr(material)


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("router.draftwood.internal")
    other = authority.issue("router.draftwood.internal")[1]
    empty, locked = tmp_path / "empty", tmp_path / "locked.key"
    empty.write_text("")
    private = load_pem_private_key(key.read_bytes(), None)
    locked.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"pass")))
    for bad in (tmp_path / "none", tmp_path):
        assert f"cannot read {bad}" in fault(lambda bad=bad: load_tls(TlsFiles(bad, key, authority.ca)))
    for files in (TlsFiles(cert, other), TlsFiles(cert, locked), TlsFiles(cert, cert), TlsFiles(empty, key)):
        message = fault(lambda files=files: load_tls(files))
        assert str(files.cert) in message and str(files.key) in message and "PRIVATE" not in message
    assert str(empty) in fault(lambda: load_tls(TlsFiles(cert, key, empty)))
    assert "together" in fault(lambda: load_tls(TlsFiles(cert, None, authority.ca)))


def test_a_changed_file_is_read_again_and_a_bad_one_is_not_taken(authority: Authority) -> None:
    paths = authority.issue("router.draftwood.internal")
    watched = watch_tls(TlsFiles(*paths, authority.ca))
    first = watched.current()
    assert watched.current() is first
    os.utime(paths[0])  # touched only: read again, with the same content
    assert watched.current() == first
    old_key = paths[1].read_bytes()
    authority.issue_to(paths, "router.draftwood.internal")
    new_key = paths[1].read_bytes()
    paths[1].write_bytes(old_key)  # the certificate is new, its key is not there yet
    assert watched.current().cert == first.cert
    paths[1].write_bytes(new_key)
    assert watched.current().cert == paths[0].read_bytes() != first.cert
    paths[0].unlink()
    assert watched.current().key == new_key


def test_a_link_that_is_turned_over_is_noticed(tmp_path: Path) -> None:
    """As secrets are mounted: the name is a link that is replaced, and both contents have one size and time."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    link = tmp_path / "link"
    link.symlink_to("a")
    watched = Watched([link], link.read_text)
    assert watched.current() == "a"
    (tmp_path / "new").symlink_to("b")
    (tmp_path / "new").rename(link)
    assert watched.current() == "b"


def test_a_failing_file_is_tried_once_for_each_change(tmp_path: Path) -> None:
    path, loads = tmp_path / "f", list[str]()
    path.write_text("good")

    def load() -> str:
        loads.append(path.read_text())
        if loads[-1] == "bad":
            raise InvalidArgument("CONFIG", "bad")
        return loads[-1]

    watched = Watched([path], load)
    path.write_text("bad")
    assert [watched.current() for _ in range(5)] == ["good"] * 5
    assert loads == ["good", "bad"]


# --- where a server listens


async def start(listen: str, **options: Any) -> str:
    server = RpcServer(metrics=Metrics(), access=Access(**options))
    try:
        return await server.start(listen)
    finally:
        await server.stop(0)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "example.org"])
async def test_a_server_refuses_to_listen_openly(host: str) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        await start(f"{host}:0")
    assert (caught.value.reason, caught.value.field) == ("LISTEN_OPEN", "listen")
    for word in (host, "tls_cert", "tls_key", "tls_ca", "127.0.0.1", "insecure"):
        assert word in caught.value.message


async def test_told_twice_it_listens(authority: Authority) -> None:
    assert (await start("0.0.0.0:0", insecure=True)).startswith("0.0.0.0:")


async def test_with_tls_it_listens_anywhere(authority: Authority) -> None:
    files = TlsFiles(*authority.issue("router.draftwood.internal"), authority.ca)
    assert (await start("0.0.0.0:0", tls=files)).startswith("0.0.0.0:")
    with pytest.raises(InvalidArgument, match="not insecure"):
        await start("0.0.0.0:0", tls=files, insecure=True)


async def test_the_word_insecure_alone_opens_nothing() -> None:
    assert (await start("127.0.0.1:0", insecure=True)).startswith("127.0.0.1:")


@pytest.mark.parametrize("left_out", ["tls_cert", "tls_key", "tls_ca"])
def test_tls_takes_all_three_files(authority: Authority, left_out: str) -> None:
    settings = authority.server("router")
    del settings[left_out]
    fault(lambda: RouterServer(RouterSettings(**settings)), left_out)


def test_nobody_is_let_in_without_certificate_and_token(authority: Authority) -> None:
    settings = RouterSettings(client_certificates=False, **authority.server("router"))
    assert "clients" in fault(lambda: RouterServer(settings), "client_certificates")


# --- settings


def test_paths_hold_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = tmp_path / "cluster.yaml"
    config.write_text("router: {settings: {tls_cert: tls/router.crt, tls_ca: ~/ca.pem}}")
    settings = load_cluster_config(config).router.settings
    assert (settings.tls_cert, settings.tls_ca) == (tmp_path / "tls" / "router.crt", Path("/home/somebody/ca.pem"))


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_VERIFIER_TLS_CERT", "/v.crt")
    monkeypatch.setenv("DRAFTWOOD_VERIFIER_INSECURE", "true")
    monkeypatch.setenv("DRAFTWOOD_VERIFIER_PAGE_TOKENS", "16")
    settings = VerifierSettings()
    assert (settings.tls_cert, settings.insecure, settings.page_tokens) == (Path("/v.crt"), True, 16)
    monkeypatch.setenv("DRAFTWOOD_CA", "/ca.pem")
    monkeypatch.setenv("DRAFTWOOD_TOKEN", "dw_secret")
    client = load_client_settings(cert=None, key=Path("/k"))
    assert (client.ca, client.cert, client.key) == (Path("/ca.pem"), None, Path("/k"))
    assert "dw_secret" not in repr(client) + str(client.model_dump())


def test_a_bad_variable_is_named_but_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_TLS", "dw_secret")
    with pytest.raises(DraftwoodError) as caught:
        load_client_settings()
    assert caught.value.field == "tls" and "dw_secret" not in str(caught.value)


# --- the documentation


def blocks(language: str) -> list[str]:
    """Code blocks of docs/security.md."""
    text = (Path(__file__).parents[1] / "docs" / "security.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shell(script: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not shutil.which("openssl"), reason="runs the openssl commands of the documentation")
async def test_the_commands_of_the_documentation_make_what_servers_take(tmp_path: Path) -> None:
    (ca,) = (block for block in blocks("bash") if "issue()" in block)
    shell(ca, tmp_path)
    tls, servers = tmp_path / "tls", dict[str, RpcServer]()
    for role in ("router", "verifier", "draft"):
        access = Access(TlsFiles(tls / f"{role}.crt", tls / f"{role}.key", tls / "ca.pem"))
        servers[role] = RpcServer(metrics=Metrics(), access=access)
        address = await servers[role].start("127.0.0.1:0")
        dialer = Dialer(TlsFiles(tls / "operator.crt", tls / "operator.key", tls / "ca.pem"))
        for name, good in ((role_host(Role(role)), True), ("example.org", False)):
            async with dialer.open(address, name) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
                if good:
                    assert (await check).status == health_pb2.HealthCheckResponse.NOT_SERVING
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await check
        await servers[role].stop(0)
    assert (tls / "ca.key").stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not shutil.which("openssl"), reason="runs the openssl commands of the documentation")
def test_tokens_and_the_file_of_the_documentation(tmp_path: Path) -> None:
    (make,) = (block for block in blocks("bash") if "sha256sum" in block)
    digest = shell(make, tmp_path).split()[0]
    token = (tmp_path / "alice.token").read_text()
    (file,) = (block for block in blocks("yaml") if block.startswith("# clients.yaml"))
    path = tmp_path / "clients.yaml"
    path.write_text(re.sub("[0-9a-f]{64}", digest, file, count=1))
    assert ClientBook(path).caller(token).name == "alice"
    assert redact(token) == "[secret]"


def test_the_cluster_file_of_the_documentation(tmp_path: Path) -> None:
    (file,) = (block for block in blocks("yaml") if block.startswith("router:"))
    path = tmp_path / "cluster.yaml"
    path.write_text(file)
    config = load_cluster_config(path)
    for settings in (config.router.settings, config.verifiers[0].settings, config.drafts[0].settings):
        assert all((settings.tls_cert, settings.tls_key, settings.tls_ca))
