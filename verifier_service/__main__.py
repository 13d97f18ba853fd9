"""``python -m verifier_service``: one verifier without Ray."""

from __future__ import annotations

from draftwood.config import VerifierSettings
from draftwood.rpc.serve import Server, run_server


def verifier(settings: VerifierSettings) -> Server:
    from verifier_service.server import VerifierServer  # a part of the start, like what it imports

    return VerifierServer(settings)


if __name__ == "__main__":
    run_server("verifier", VerifierSettings, verifier)
