"""Who may call what: TLS for a server's port, and the check that every call passes before its request is decoded.

A caller shows a certificate, whose DNS names give its roles, or a bearer token (at a router with a file of clients).
What is not in ``ALLOWED`` is allowed to nobody. Health is open to whoever can connect; reflection takes any role.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from draftwood.config import ServerSettings
from draftwood.credentials import Role, TlsFiles, TlsMaterial, Watched, check_listen, roles_of, watch_tls
from draftwood.errors import InvalidArgument, PermissionDenied, Unauthenticated

Context = grpc.aio.ServicerContext[Any, Any]

_ROUTER: Final = frozenset({Role.ROUTER})
_CLIENTS: Final = frozenset({Role.CLIENT, Role.ADMIN})
_ADMINS: Final = frozenset({Role.ADMIN})

ALLOWED: Final[Mapping[str, frozenset[Role]]] = {
    "draftwood.v1.RouterService/Generate": _CLIENTS,
    "draftwood.v1.RouterService/ListModels": _CLIENTS,
    "draftwood.v1.RouterService/GetStatus": _ADMINS,
    "draftwood.v1.RouterService/WatchStatus": _ADMINS,
    "draftwood.v1.RouterService/ScalePool": _ADMINS,
    "draftwood.v1.VerifierService/Generate": _ROUTER,
    "draftwood.v1.VerifierService/GetModelInfo": _ROUTER,
    "draftwood.v1.VerifierService/WatchLoad": _ROUTER,
    "draftwood.v1.VerifierService/SetPolicy": _ROUTER,
    "draftwood.v1.VerifierService/Speculate": frozenset({Role.DRAFT}),
    "draftwood.v1.DraftService/Attach": _ROUTER,
    "draftwood.v1.DraftService/Detach": _ROUTER,
    "draftwood.v1.DraftService/GetModelInfo": _ROUTER,
    "draftwood.v1.DraftService/WatchLoad": _ROUTER,
}
"""Roles that may call each method, where callers are told apart."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls."""

    name: str  # of a client in the file of clients, or the certificate's common name, or else its first DNS name
    roles: frozenset[Role]


CALLER: Final[ContextVar[Caller | None]] = ContextVar("caller", default=None)
"""Who called, in the task of a call; None where callers are not told apart."""


class Tokens(Protocol):
    """Knows bearer tokens."""

    def caller(self, token: str) -> Caller:
        """Raises Unauthenticated."""


class Access:
    """How one server proves itself and whom it lets in."""

    def __init__(
        self,
        tls: TlsFiles | None = None,
        *,
        insecure: bool = False,
        tokens: Tokens | None = None,
        certificates: bool = True,
    ) -> None:
        """``insecure``: as the setting; ``certificates``: with TLS, whoever connects must show one.

        Raises InvalidArgument CONFIG if the TLS files are incomplete or cannot be used.
        """
        self._tokens = tokens
        self._certificates = certificates
        self._insecure = insecure
        self._tls = _watched(tls) if tls else None
        if self._tls and not (certificates or tokens):
            message = "without client certificates callers need tokens, so `clients` must be set"
            raise InvalidArgument("CONFIG", message, field="client_certificates")

    def credentials(self, host: str) -> grpc.ServerCredentials | None:
        """For a port on that host; None: without TLS.

        Raises FailedPrecondition LISTEN_OPEN, InvalidArgument CONFIG, as ``check_listen``.
        """
        check_listen(host, secured=self._tls is not None, insecure=self._insecure)
        return _server_credentials(self._tls, self._certificates) if self._tls else None

    @property
    def open(self) -> bool:
        """Callers are not told apart."""
        return self._tls is None and self._tokens is None

    def admit(self, method: str, context: Context) -> None:
        """Sets ``CALLER``. Raises Unauthenticated, or PermissionDenied ROLE if the method is not for the caller."""
        if self.open:
            return
        caller = self.identify(context)
        allowed = ALLOWED.get(method, frozenset())
        if not caller.roles & allowed:
            message = f"{method} is for {_said(allowed)}; {caller.name!r} is {_said(caller.roles)}"
            raise PermissionDenied("ROLE", message)
        CALLER.set(caller)

    def identify(self, context: Context) -> Caller:
        """Who calls. A token counts before a certificate, and a wrong one is not passed over.

        Raises Unauthenticated CREDENTIALS_MISSING, TOKEN, and as ``Tokens.caller``.
        """
        if self._tokens:
            token = _bearer(context)
            if token is not None:
                return self._tokens.caller(token)
        identity = context.auth_context()
        names = [name.decode() for name in identity.get("peer_dns", ())]
        if "x509_pem_cert" in identity:
            common = b"".join(identity.get("x509_common_name", ())).decode(errors="replace")
            return Caller(common or "".join(names[:1]), roles_of(names))
        wanted = "a bearer token" if self._tokens else "a certificate"
        raise Unauthenticated("CREDENTIALS_MISSING", f"{wanted} is needed, and the call came without")


def server_access(settings: ServerSettings) -> Access:
    """Of a server that only other services call. Raises InvalidArgument CONFIG."""
    return Access(tls_files(settings), insecure=settings.insecure)


def tls_files(settings: ServerSettings) -> TlsFiles | None:
    """None without TLS."""
    files = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
    return files if files.paths else None


def _watched(files: TlsFiles) -> Watched[TlsMaterial]:
    """Raises InvalidArgument CONFIG."""
    for field, path in (("tls_cert", files.cert), ("tls_key", files.key), ("tls_ca", files.ca)):
        if path is None:
            raise InvalidArgument("CONFIG", "TLS needs tls_cert, tls_key and tls_ca, all three", field=field)
    return watch_tls(files)


def _server_credentials(tls: Watched[TlsMaterial], certificates: bool) -> grpc.ServerCredentials:
    """Asks for the files' content at each handshake, so that new certificates need no restart."""
    given = tls.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        material = tls.current()
        if material is given:
            return None
        given = material
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(_configuration(given), fetch, certificates)  # type: ignore[arg-type]


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.cert and material.key
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)


def _bearer(context: Context) -> str | None:
    """The call's bearer token; None if it has no authorization. Raises Unauthenticated TOKEN if it has another."""
    values = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    if not values:
        return None
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("TOKEN", "authorization must be given once, as: Bearer TOKEN")
    return token.strip()


def _said(roles: frozenset[Role]) -> str:
    return " or ".join(sorted(roles)) or "nobody"
