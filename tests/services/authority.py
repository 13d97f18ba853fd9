"""Certificates on disk for services and clients, of a CA made for the test, and tokens."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import secrets
from pathlib import Path
from typing import Any

import trustme

from draftwood.config import ClientSettings

NOW = datetime.datetime.now(datetime.UTC)
A_DAY = datetime.timedelta(days=1)


class Authority:
    """A CA with its own folder; everything it issues is written there under a new name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(self.ca)
        self._numbers = itertools.count()

    def issue(self, *names: str, **options: Any) -> tuple[Path, Path]:
        """Paths of a certificate for these names and of its key."""
        stem = self.folder / str(next(self._numbers))
        paths = stem.with_suffix(".crt"), stem.with_suffix(".key")
        self.issue_to(paths, *names, **options)
        return paths

    def issue_to(self, paths: tuple[Path, Path], *names: str, **options: Any) -> None:
        """Writes over what is there, as a renewal does."""
        made = self._authority.issue_cert(*names, **options)
        paths[0].write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        paths[1].write_bytes(made.private_key_pem.bytes())

    def server(self, *roles: str, **options: Any) -> dict[str, Any]:
        """Settings of a server of these roles on 127.0.0.1."""
        cert, key = self.issue(*map(role_name, roles), "127.0.0.1", **options)
        return {"tls_cert": cert, "tls_key": key, "tls_ca": self.ca}

    def client(self, *roles: str, **options: Any) -> ClientSettings:
        """Of a client with a certificate of these roles."""
        cert, key = self.issue(*map(role_name, roles), **options)
        return ClientSettings(ca=self.ca, cert=cert, key=key)


def role_name(role: str) -> str:
    return f"{role}.draftwood.internal"


def new_token() -> str:
    return f"dw_{secrets.token_hex(32)}"


def token_entry(token: str, expires: datetime.datetime | None = None) -> dict[str, Any]:
    """What the file of clients has of a token."""
    entry = {"sha256": hashlib.sha256(token.encode()).hexdigest()}
    return entry if expires is None else entry | {"expires": expires.isoformat()}


def write_clients(path: Path, *clients: dict[str, Any]) -> Path:
    """JSON is YAML."""
    path.write_text(json.dumps({"clients": clients}))
    return path
