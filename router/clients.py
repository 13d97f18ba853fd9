"""The file of clients: who may use the router, by what tokens, and how much.

A YAML file, reread when it changes. Tokens are kept as SHA-256 hashes, which is enough as they are random (256 bits);
a client may have several, so that a new one can be given out before the old one ends. The limits of a client that
shows a certificate instead are those of the entry whose ``name`` is the certificate's common name.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftwood.credentials import Role, Watched
from draftwood.errors import InvalidArgument, Unauthenticated
from draftwood.rpc.access import Caller


class Token(BaseModel):
    """One token of a client."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="hash of the token, hexadecimal")
    expires: AwareDatetime | None = Field(None, description="when it ends, with the time zone; without: never")


class Client(BaseModel):
    """A client, its tokens and its limits at one router; a limit of 0 is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=64)
    role: Literal["client", "admin"] = Field("client", description="an admin may also see the pools and change them")
    tokens: list[Token] = []
    max_concurrent: int = Field(0, ge=0, description="texts written at once")
    requests_per_minute: int = Field(0, ge=0, description="texts asked for, averaged; so many may come at once")
    tokens_per_minute: int = Field(0, ge=0, description="of prompts and texts, averaged; so many may come at once")


class ClientFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clients: list[Client]

    @model_validator(mode="after")
    def _told_apart(self) -> ClientFile:
        names = [client.name for client in self.clients]
        hashes = [token.sha256 for client in self.clients for token in client.tokens]
        for what, values in (("name", names), ("hash", hashes)):
            if len(set(values)) < len(values):
                twice = next(value for value in values if values.count(value) > 1)
                raise ValueError(f"{what} {twice} occurs twice")
        return self


class ClientBook:
    """The file as it is now."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """``now``: seconds since 1970. Raises InvalidArgument CONFIG if the file cannot be used."""
        self._now = now
        self._file = Watched([path], lambda: load_clients(path))

    def caller(self, token: str) -> Caller:
        """Whose token it is. Raises Unauthenticated TOKEN, TOKEN_EXPIRED."""
        digest = token_hash(token)
        found = None
        for client in self._file.current().clients:
            for known in client.tokens:
                if hmac.compare_digest(known.sha256, digest):
                    found = client, known  # and on, so that the time tells nothing of the place
        if found is None:
            raise Unauthenticated("TOKEN", "the bearer token is not known here")
        client, known = found
        if known.expires and known.expires.timestamp() <= self._now():
            message = f"the bearer token of {client.name!r} has expired at {known.expires.isoformat()}"
            raise Unauthenticated("TOKEN_EXPIRED", message)
        return Caller(client.name, frozenset({Role(client.role)}))

    def client(self, name: str) -> Client | None:
        """The entry of that name."""
        return next((client for client in self._file.current().clients if client.name == name), None)


def load_clients(path: Path) -> ClientFile:
    """Raises InvalidArgument CONFIG that names file, field and fault."""
    try:
        data: Any = yaml.safe_load(path.read_text())
        return ClientFile.model_validate(data)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument("CONFIG", f"cannot read {path}: {error}", field="clients") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]  # what was put in a wrong place may be a token
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument("CONFIG", f"{path}: {first['msg']}", field=field or "clients") from None


def token_hash(token: str) -> str:
    """What the file of clients keeps of a token."""
    return hashlib.sha256(token.encode()).hexdigest()
