"""Runs one server in the foreground: what ``python -m verifier_service`` and ``python -m draft_service`` share."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import uvloop
from pydantic_settings import BaseSettings, CliApp

from draftwood.errors import DraftwoodError
from draftwood.telemetry import configure_logging

DRAIN_GRACE_S = 30.0

S = TypeVar("S", bound=BaseSettings)


class Server(Protocol):
    """What a role's server offers."""

    async def start(self) -> str:
        """Binds and returns host:port."""

    async def ready(self) -> None:
        """Waits until it serves; raises what keeps it from serving."""

    async def stop(self, grace_s: float = ...) -> None:
        """Drains and ends."""


def run_server(role: str, settings: type[S], server: Callable[[S], Server]) -> None:
    """Reads settings from the command line and the environment, serves until SIGTERM or SIGINT."""
    configure_logging(role, json=not sys.stderr.isatty())
    chosen = CliApp.run(settings, cli_settings_source=None)
    try:
        uvloop.run(serve(role, lambda: server(chosen)))
    except DraftwoodError as error:
        sys.exit(f"error: {error}")


@contextmanager
def starting() -> Iterator[None]:
    """For as long as a server starts: no look for garbage meanwhile, and later none among what it has made.

    Libraries and models make hundreds of thousands of objects that stay. To look through them while they come takes a
    tenth of the start's processor time, and later more than a step's whenever Python's oldest generation has its turn.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


async def serve(role: str, make: Callable[[], Server]) -> None:
    """Makes and starts the server, says where and when it is ready, and drains it on a signal."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    with starting():
        server = make()
        print(f"{role} listens on {await server.start()}", flush=True)
        ready = asyncio.create_task(server.ready())
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait([ready, waiting], return_when=asyncio.FIRST_COMPLETED)
    if not stopping.is_set():
        ready.result()
        print(f"{role} is ready", flush=True)
        await waiting
    await server.stop(DRAIN_GRACE_S)
