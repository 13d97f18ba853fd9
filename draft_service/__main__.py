"""``python -m draft_service``: one draft worker without Ray."""

from __future__ import annotations

from draft_service.server import DraftServer
from draftwood.config import DraftSettings
from draftwood.rpc.serve import run_server

if __name__ == "__main__":
    run_server("draft", DraftSettings, DraftServer)
