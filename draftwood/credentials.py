"""Certificates on disk, the roles they name, and files that are reread when they change.

A certificate names a role by a DNS name among its subject alternative names: ``verifier.draftwood.internal`` is a
verifier. Servers read the role of whoever calls from it, and services that call another one check that the name is in
the certificate that answers, whatever its address is. One certificate may name several roles.
"""

from __future__ import annotations

import enum
import ipaddress
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, TypeVar

from draftwood.errors import DraftwoodError, FailedPrecondition, InvalidArgument
from draftwood.telemetry import get_logger

ROLE_DOMAIN: Final = "draftwood.internal"
T = TypeVar("T")

log = get_logger(__name__)


class Role(enum.StrEnum):
    """Who calls. An admin may do all that a client may, see the pools and change them."""

    ROUTER = "router"
    VERIFIER = "verifier"
    DRAFT = "draft"
    CLIENT = "client"
    ADMIN = "admin"


def role_host(role: Role) -> str:
    """The DNS name that stands for the role in a certificate."""
    return f"{role}.{ROLE_DOMAIN}"


def roles_of(dns_names: Iterable[str]) -> frozenset[Role]:
    """The roles that a certificate's DNS names stand for; other names, and wildcards, stand for none."""
    names = {name.lower() for name in dns_names}
    return frozenset(role for role in Role if role_host(role) in names)


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and loopback addresses; a name that only resolves to one does not count."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where a process's certificate (chain, PEM), private key and the CAs that it trusts are."""

    cert: Path | None = None  # None, as the key: the process shows no certificate
    key: Path | None = None
    ca: Path | None = None  # None: gRPC's own list of public CAs

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.cert, self.key, self.ca) if path]


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files hold, PEM."""

    cert: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None


def load_tls(files: TlsFiles) -> TlsMaterial:
    """Reads and checks the files; raises InvalidArgument CONFIG that names the file at fault."""
    if bool(files.cert) != bool(files.key):
        raise InvalidArgument("CONFIG", "a certificate and its key are given together, or neither")
    cert, key, ca = (_read(path) if path else None for path in (files.cert, files.key, files.ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files.cert and files.key:
        try:
            context.load_cert_chain(files.cert, files.key, password=b"")  # an encrypted key is an error, not a prompt
        except (ssl.SSLError, OSError, ValueError) as error:
            message = f"{files.cert} and {files.key} are no certificate and key that belong together, in PEM: {error}"
            raise InvalidArgument("CONFIG", message) from None
    if files.ca:
        try:
            context.load_verify_locations(files.ca)
        except (ssl.SSLError, OSError) as error:
            raise InvalidArgument("CONFIG", f"{files.ca} holds no CA certificates in PEM: {error}") from None
    return TlsMaterial(cert, key, ca)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument("CONFIG", f"cannot read {path}: {error.strerror}") from None


class Watched(Generic[T]):
    """What some files hold, read again when one has changed; usable from any thread.

    Files that cannot be used, as when they are being written, leave what was read before in force, which is logged
    once for each change.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Raises what ``load`` raises."""
        self._paths = paths
        self._load = load
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._value = load()

    def current(self) -> T:
        """The same object for as long as nothing has changed."""
        with self._lock:
            stamps = self._stamps()
            if stamps != self._seen:
                self._seen = stamps
                self._reload()
            return self._value

    def _reload(self) -> None:
        paths = [str(path) for path in self._paths]
        try:
            self._value = self._load()
        except DraftwoodError as error:
            log.error("files_not_usable", paths=paths, error=str(error), note="what was read before stays in force")
        else:
            log.info("files_reread", paths=paths)

    def _stamps(self) -> list[tuple[int, ...]]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...]:
    """Differs after every change of the file that matters: written in place, replaced, linked anew."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def watch_tls(files: TlsFiles) -> Watched[TlsMaterial]:
    """Raises InvalidArgument CONFIG if the files cannot be used."""
    return Watched(files.paths, lambda: load_tls(files))


def check_listen(host: str, *, secured: bool, insecure: bool) -> None:
    """Whether a server may listen there.

    Raises FailedPrecondition LISTEN_OPEN if others than this machine could reach a server without TLS and nobody has
    said ``insecure``, InvalidArgument CONFIG if that is said of one with TLS.
    """
    if secured and insecure:
        raise InvalidArgument("CONFIG", "a server with TLS is not insecure; leave out one of both", field="insecure")
    if secured or is_loopback(host):
        return
    if not insecure:
        message = (
            f"refusing to listen on {host} without TLS: anybody who reaches it could use it and read what is sent; "
            "set tls_cert, tls_key and tls_ca, or listen on 127.0.0.1, or say insecure: true"
        )
        raise FailedPrecondition("LISTEN_OPEN", message, field="listen")
    log.warning("listens_without_tls", host=host, note="anybody who reaches this address can use it")
