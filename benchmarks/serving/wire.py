"""Bytes on the wire: real rounds of the demo draft, recorded where the verifier receives them.

A real verifier, a real draft worker (language model) and a router in one process, talking gRPC over loopback; 1, 4 and
8 sessions at once. Counted are the serialised messages that carry growth.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Check, write

from draft_service.server import DraftServer
from draftwood.client import DraftwoodClient, Message
from draftwood.config import DraftSettings, RouterSettings, VerifierSettings
from draftwood.demo import PROMPTS
from draftwood.v1 import draft_pb2
from router.server import RouterServer
from verifier_service.server import VerifierServer

TOKENS = 24
SESSION_BYTES = 64
"""Allowance for a session's share of a message, besides its nodes."""


class RecordingVerifier(VerifierServer):
    """Notes (bytes, sessions, nodes) of every message with growth."""

    def __init__(self, settings: VerifierSettings) -> None:
        super().__init__(settings)
        self.rounds: list[tuple[int, int, int]] = []

    async def Speculate(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncGenerator[draft_pb2.SpeculateResponse, None]:
        async for response in super().Speculate(self._recorded(requests), context):
            yield response

    async def _recorded(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, draft_pb2.SpeculateRequest) and request.HasField("growth"):
                self.rounds.append((request.ByteSize(), len(request.growth.handle), len(request.growth.token)))
            yield request


async def main() -> bool:
    verifier = RecordingVerifier(VerifierSettings(width="full", max_nodes=32, kv_pages=128, draft_wait_ms=2000))
    draft = DraftServer(DraftSettings(kv_pages=128, lookahead_levels=0))
    addresses = [await server.start() for server in (verifier, draft)]
    await asyncio.gather(verifier.ready(), draft.ready())
    router = RouterServer(RouterSettings(verifiers=addresses[:1], drafts=addresses[1:]))
    async with DraftwoodClient(await router.start()) as client:
        while not all(state.health == "ready" for pool in await _pools(client) for state in pool):
            await asyncio.sleep(0.1)
        for sessions in (1, 4, 8):
            await asyncio.gather(*(_answer(client, prompt) for prompt in PROMPTS[:sessions]))
    for server in (router, draft, verifier):
        await server.stop()
    return _report(verifier.rounds)


async def _pools(client: DraftwoodClient) -> tuple[Any, Any]:
    state = await client.status()
    return state.verifiers, state.drafts


async def _answer(client: DraftwoodClient, prompt: str) -> None:
    async for _ in client.generate([Message("user", prompt)], max_tokens=TOKENS):
        pass


def _report(rounds: list[tuple[int, int, int]]) -> bool:
    filled = [r for r in rounds if r[2]]
    worst = max((size - SESSION_BYTES * sessions) / nodes for size, sessions, nodes in filled)
    mean = sum(size for size, _, _ in filled) / sum(nodes for _, _, nodes in filled)
    details = {
        "messages": len(filled),
        "nodes": sum(nodes for _, _, nodes in filled),
        "most_sessions_in_a_message": max(sessions for _, sessions, _ in filled),
        "mean_bytes_per_node_all_in": round(mean, 3),
        "largest_message_bytes": max(size for size, _, _ in filled),
        "note": "bytes_per_node is the largest over all messages of (bytes - 64 a session) / nodes; "
        "mean_bytes_per_node_all_in counts the sessions' own columns too",
    }
    return write("wire", [Check("wire/bytes_per_node", round(worst, 3), "<=", 8.0)], details)


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
