"""Channels to other services."""

from __future__ import annotations

from typing import Final

import grpc

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
    # Two channels never share a connection: a busy stream holds up no other.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to host:port; connects lazily, messages up to 64 MiB, a dead peer is noticed within 15 s."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)
