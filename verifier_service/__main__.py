"""``python -m verifier_service``: one verifier without Ray."""

from __future__ import annotations

from draftwood.config import VerifierSettings
from draftwood.rpc.serve import run_server
from verifier_service.server import VerifierServer

if __name__ == "__main__":
    run_server("verifier", VerifierSettings, VerifierServer)
