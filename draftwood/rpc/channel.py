"""Channels to other services."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

from draftwood.credentials import TlsFiles, watch_tls

RETIRED_S: Final = 3600.0
"""Longest that calls go on over a channel whose credentials have been replaced."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own retries replay the messages of a stream; we retry by session.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    # A restarted service is found again within two seconds, not two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # So long an attempt to connect may take: a host that is gone does not answer at all. gRPC's default is 20 s.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Two channels never share a connection: a busy stream holds up no other.
    ("grpc.use_local_subchannel_pool", 1),
)


class Dialer:
    """Opens channels for one process, with its credentials as they are on disk at that moment."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        """Without ``tls`` in plain text. Raises InvalidArgument CONFIG if the files cannot be used."""
        self._tls = watch_tls(tls) if tls else None

    @property
    def secured(self) -> bool:
        return self._tls is not None

    def open(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        """A channel to host:port; connects lazily, messages up to 64 MiB, a dead peer is noticed within 15 s.

        With TLS the certificate that answers must be for ``server_name``, or for the host if that is empty.
        """
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=OPTIONS)
        material = self._tls.current()
        credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
        named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
        return grpc.aio.secure_channel(address, credentials, options=(*OPTIONS, *named))

    def version(self) -> object:
        """The same object for as long as the credentials are the same."""
        return self._tls and self._tls.current()


class Connection:
    """A channel to one address, replaced when the dialer's credentials have changed; calls on the old one go on."""

    def __init__(self, dialer: Dialer, address: str, server_name: str = "") -> None:
        self._dialer = dialer
        self._address = address
        self._server_name = server_name
        self._version = dialer.version()
        self._channel = dialer.open(address, server_name)
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}  # by what closes them when their calls end

    def channel(self) -> grpc.aio.Channel:
        """For the next call."""
        version = self._dialer.version()
        if version is not self._version:
            task = asyncio.create_task(self._channel.close(RETIRED_S))
            self._retired[task] = self._channel
            task.add_done_callback(self._retired.pop)
            self._version, self._channel = version, self._dialer.open(self._address, self._server_name)
        return self._channel

    async def close(self) -> None:
        """Breaks off the calls that run."""
        retired = dict(self._retired)
        for task in retired:
            task.cancel()
        await asyncio.gather(*retired, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in (self._channel, *retired.values())))


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel in plain text; see ``Dialer.open``."""
    return Dialer().open(address)
