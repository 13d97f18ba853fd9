"""A client's connections to routers, with what shows who the client is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio

from draftwood.config import ClientSettings
from draftwood.credentials import TlsFiles, Watched, is_loopback
from draftwood.errors import InvalidArgument
from draftwood.rpc.channel import Connection, Dialer

Metadata = tuple[tuple[str, str], ...]


class RouterLine:
    """Certificates and token are reread when their files change; calls that run go on."""

    def __init__(self, address: str, settings: ClientSettings) -> None:
        """Raises InvalidArgument CONFIG if what the settings name cannot be used, or a token would go unprotected."""
        self.address = address
        files = TlsFiles(settings.cert, settings.key, settings.ca)
        secured = settings.tls or bool(files.paths)
        self._given = settings.token
        self._file = _watched_token(settings.token_file) if settings.token_file else None
        if self._given and self._file:
            raise InvalidArgument("CONFIG", "there is a token and a file with one; which counts?", field="token_file")
        if self._given:
            _checked(self._given.get_secret_value(), "token")
        if (self._given or self._file) and not secured and not is_loopback(address.rpartition(":")[0]):
            message = f"the token would go to {address} in plain text; say which `ca` the router's certificate is from"
            raise InvalidArgument("CONFIG", message, field="ca")
        self._connection = Connection(Dialer(files if secured else None), address, settings.server_name)
        self.how = "" if not secured else " over TLS" if files.cert else " over TLS without a certificate"
        """For messages: how the router is spoken to."""

    def channel(self) -> grpc.aio.Channel:
        """For the next call."""
        return self._connection.channel()

    def metadata(self) -> Metadata:
        """For the next call."""
        if self._file:
            return (("authorization", f"Bearer {self._file.current()}"),)
        return (("authorization", f"Bearer {self._given.get_secret_value()}"),) if self._given else ()

    async def close(self) -> None:
        """Breaks off the calls that run."""
        await self._connection.close()


class RouterLines:
    """The routers of one cluster, of which one is used until it is left for the next. Any of them is the first."""

    def __init__(self, addresses: Sequence[str], settings: ClientSettings) -> None:
        """Raises InvalidArgument CONFIG; see ``RouterLine``."""
        if not addresses:
            raise InvalidArgument("CONFIG", "a client needs the address of a router", field="addresses")
        self._lines = [RouterLine(address, settings) for address in addresses]
        self._at = random.randrange(len(self._lines))

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def current(self) -> RouterLine:
        return self._lines[self._at]

    def leave(self, line: RouterLine) -> None:
        """The next router is the current one, unless this one has been left already."""
        if self.current is line:
            self._at = (self._at + 1) % len(self._lines)

    async def close(self) -> None:
        """Breaks off the calls that run."""
        await asyncio.gather(*(line.close() for line in self._lines))


def _watched_token(path: Path) -> Watched[str]:
    return Watched([path], lambda: _read_token(path))


def _read_token(path: Path) -> str:
    """Raises InvalidArgument CONFIG."""
    try:
        return _checked(path.read_text().strip(), "token_file")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("CONFIG", f"cannot read {path}: {error}", field="token_file") from None


def _checked(token: str, field: str) -> str:
    """The token, if it can be sent; the message does not show it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument("CONFIG", "a token is one word of visible ASCII characters", field=field)
    return token
