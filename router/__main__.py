"""``python -m router``: one router in the foreground."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
import uvloop

from draftwood.config import RouterSettings
from draftwood.errors import DraftwoodError
from draftwood.rpc.serve import serve
from draftwood.telemetry import configure_logging
from router.server import RouterServer


def main(
    listen: Annotated[str | None, typer.Option(help="host:port to listen on")] = None,
    verifier: Annotated[list[str] | None, typer.Option(help="address of a verifier; may be repeated")] = None,
    draft: Annotated[list[str] | None, typer.Option(help="address of a draft worker; may be repeated")] = None,
) -> None:
    """Serves as router until SIGTERM or SIGINT; every other setting comes from DRAFTWOOD_ROUTER_* variables."""
    configure_logging("router", json=not sys.stderr.isatty())
    given: dict[str, Any] = {"listen": listen, "verifiers": verifier, "drafts": draft}
    settings = RouterSettings(**{name: value for name, value in given.items() if value})
    try:
        uvloop.run(serve("router", lambda: RouterServer(settings)))
    except DraftwoodError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    typer.run(main)
