"""``python -m router``: one router in the foreground."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Annotated, Any

import typer
import uvloop

from draftwood.config import RouterSettings
from draftwood.telemetry import configure_logging
from router.server import RouterServer

DRAIN_GRACE_S = 30.0


def main(
    listen: Annotated[str | None, typer.Option(help="host:port to listen on")] = None,
    verifier: Annotated[list[str] | None, typer.Option(help="address of a verifier; may be repeated")] = None,
    draft: Annotated[list[str] | None, typer.Option(help="address of a draft worker; may be repeated")] = None,
) -> None:
    """Serves as router until SIGTERM or SIGINT; every other setting comes from DRAFTWOOD_ROUTER_* variables."""
    configure_logging("router", json=not sys.stderr.isatty())
    given: dict[str, Any] = {"listen": listen, "verifiers": verifier, "drafts": draft}
    uvloop.run(serve(RouterSettings(**{name: value for name, value in given.items() if value})))


async def serve(settings: RouterSettings) -> None:
    server = RouterServer(settings)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    print(f"router listens on {await server.start()}", flush=True)
    await stopping.wait()
    await server.stop(DRAIN_GRACE_S)


if __name__ == "__main__":
    typer.run(main)
