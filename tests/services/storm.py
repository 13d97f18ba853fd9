"""Clients that leave in every state that a request can be in, and the books of all services after that.

All services run in this process, so that nothing of theirs is hidden: sessions, pages, streams, attachments, tasks.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from draft_service.server import DraftServer
from draftwood.client import Chunk, DraftwoodClient
from router.registry import Health
from router.server import RouterServer
from tests.services.stack import Forward, Stack, engine_of, sessions_of, slow_down, until, wrap_forwards
from verifier_service.engine import Engine
from verifier_service.server import VerifierServer

STATES = ("asked", "queued", "prefill", "decoding", "awaiting draft", "finished", "migrating")
BATCH = 16
RUNNING = 6
"""Sessions that a verifier runs at once, so that some of a batch are queued."""
TOKENS = 120
LONG_TOKENS = 300
STEP_S = 0.002
ROUND_S = 0.2
"""Of the slow draft worker; a step waits for it up to DRAFT_WAIT_S."""
DRAFT_WAIT_S = 1.0
BASELINE_S = 2.0


@dataclass
class Storm:
    """Two verifiers, two draft workers, one of them slow if it is to be waited for, a router and a client."""

    verifiers: list[VerifierServer]
    drafts: list[DraftServer]
    router: RouterServer
    client: DraftwoodClient
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    left: Counter[str] = field(default_factory=Counter)  # clients, by the state that their requests were in
    baselines_s: list[float] = field(default_factory=list)  # from when a batch had left to when nothing was left of it
    errors: list[str] = field(default_factory=list)
    tasks: int = 0  # of the whole process, when nobody asks for anything
    background: int = field(init=False)  # tasks of the router's own, before anybody has asked for anything

    def __post_init__(self) -> None:
        self.background = len(self.router._state.background._tasks)

    async def batch(self, state: str) -> None:
        """So many requests are brought into the state and left; returns when nothing is left of them."""
        clients = [asyncio.create_task(self._ask(state)) for _ in range(BATCH)]
        await REACHED[state](self)
        if state != "finished":
            for client in clients:
                client.cancel()
        ends = await asyncio.gather(*clients, return_exceptions=True)
        self.errors += [f"{state}: {end!r}" for end in ends if isinstance(end, Exception)]
        if state == "finished":
            self.left["finished"] += BATCH
        await self.baseline()

    async def baseline(self) -> None:
        began = time.monotonic()
        while remains := self.remains():
            assert time.monotonic() < began + BASELINE_S, f"{remains} after {BASELINE_S} s; {self.left}"
            await asyncio.sleep(0.01)
        self.baselines_s.append(time.monotonic() - began)

    def remains(self) -> dict[str, int]:
        """What there is of requests anywhere; empty at rest."""
        state = self.router._state
        found = {
            "requests at the router": state.counters.requests,
            "sessions of the router's workers": sum(worker.sessions for worker in state.registry.workers()),
            "calls to workers": sum(len(worker.calls) for worker in state.registry.workers()),
            "keepers of attachments": len(state.background._tasks) - self.background,
            "sessions at verifiers": self._count(self._known),
            "pages held": sum(engine.runtime.pool.held for engine in self.engines),
            "streams of requests": sum(len(verifier._streams) for verifier in self.verifiers),
            "sessions at drafts": sum(map(sessions_of, self.drafts)),
            "attachments at drafts": sum(draft._sessions for draft in self.drafts),
            "pages at drafts": sum(pages_held(draft) for draft in self.drafts),
            "tasks": len(asyncio.all_tasks()) - self.tasks if self.tasks else 0,
        }
        return {what: count for what, count in found.items() if count > 0}

    @property
    def engines(self) -> list[Engine]:
        return [engine_of(verifier) for verifier in self.verifiers]

    async def _ask(self, state: str) -> None:
        """Asks for a text; leaves by itself, before or after the last word, if the state is the end."""
        seed = self.rng.getrandbits(32)
        prompt: Any = "The sky is"
        if state == "prefill":  # long, and no other has computed its beginning
            prompt = [self.rng.randrange(5, 300) for _ in range(LONG_TOKENS)]
        options: dict[str, Any] = {"max_tokens": 20 if state == "finished" else TOKENS, "seed": seed}
        heard = 0
        async with aclosing(self.client.generate(prompt, temperature=0.9, ignore_eos=True, **options)) as events:
            async for event in events:
                heard += len(event.tokens) if isinstance(event, Chunk) else 0
                if heard == 20 and state == "finished" and seed % 2:
                    return  # all tokens are there, the last word is on its way

    # --- how a state is reached: each returns when requests are in it, and counts those that are

    async def asked(self) -> None:
        """Nobody has heard of some of the requests yet."""
        await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.003]))
        self.left["asked"] += max(BATCH - self._count(self._known), 0)

    async def queued(self) -> None:
        await until(lambda: self._count(self._waiting) >= BATCH - 2 * RUNNING)
        self.left["queued"] += self._count(self._waiting)
        self.left["decoding"] += self._count(self._decoding)

    async def prefill(self) -> None:
        await until(lambda: self._count(self._reading) >= RUNNING)
        self.left["prefill"] += self._count(self._reading)

    async def decoding(self) -> None:
        await until(lambda: self._count(self._decoding) >= RUNNING)
        await asyncio.sleep(self.rng.uniform(0, 0.1))
        self.left["decoding"] += self._count(self._decoding)

    async def awaiting_draft(self) -> None:
        await until(lambda: self._count(self._awaiting) > RUNNING // 2)
        self.left["awaiting draft"] += self._count(self._awaiting)

    async def finished(self) -> None:
        """Clients leave by themselves."""

    async def migrating(self) -> None:
        """All verifiers are lost to the router while they run; it looks for others when the clients leave."""
        await until(lambda: self._count(self._known) == BATCH and self._count(self._decoding) >= RUNNING)
        registry = self.router._state.registry
        for worker in registry.workers():
            if worker.model:
                registry.set_health(worker, Health.LOST)
                worker.break_calls()
        await asyncio.sleep(self.rng.choice([0.0, 0.002, 0.01, 0.05]))
        self.left["migrating"] += self.router._state.counters.requests

    def _count(self, which: Callable[[Engine], int]) -> int:
        return sum(which(engine) for engine in self.engines)

    @staticmethod
    def _known(engine: Engine) -> int:
        return len(engine.sessions) + len(engine.waiting)

    @staticmethod
    def _waiting(engine: Engine) -> int:
        return len(engine.waiting)

    @staticmethod
    def _reading(engine: Engine) -> int:
        return sum(not session.decoding for session in tuple(engine.sessions.values()))

    @staticmethod
    def _decoding(engine: Engine) -> int:
        return sum(session.decoding for session in tuple(engine.sessions.values()))

    @staticmethod
    def _awaiting(engine: Engine) -> int:
        """Sessions whose next step waits for a draft's round."""
        return sum(bool(session.awaited()) for session in tuple(engine.sessions.values()) if session.drafts)


REACHED: dict[str, Callable[[Storm], Awaitable[None]]] = {
    state: getattr(Storm, state.replace(" ", "_")) for state in STATES
}


async def storm(stack: Stack, *, slow_draft: bool) -> Storm:
    settings: dict[str, Any] = {
        "max_sessions": RUNNING,
        "max_step_tokens": 32,
        "draft_wait_ms": DRAFT_WAIT_S * 1e3,
        "canary": False,
    }
    verifiers = [await stack.verifier(**settings) for _ in range(2)]
    for verifier in verifiers:
        slow_down(verifier, STEP_S)
    drafts = [await stack.draft(), await stack.draft(kind="ngram")]
    if slow_draft:
        slow_rounds(drafts[0])
    router = await stack.router(verifiers, drafts)
    made = Storm(verifiers, drafts, router, await stack.client(router))
    while sum(len(verifier._links) for verifier in verifiers) < len(verifiers) * len(drafts):
        await made.batch("decoding")  # each draft worker opens a stream to each verifier, once
    await asyncio.sleep(0.3)
    made.left.clear()
    made.baselines_s.clear()
    made.tasks = len(asyncio.all_tasks())
    return made


def slow_rounds(draft: DraftServer) -> None:
    """The drafter's forward takes ROUND_S longer."""

    def slowly(forward: Forward) -> Forward:
        def run(*arguments: Any) -> Any:
            time.sleep(ROUND_S)
            return forward(*arguments)

        return run

    wrap_forwards(draft, slowly)


def pages_held(draft: DraftServer) -> int:
    runtime = getattr(draft.loaded.core.drafter, "_runtime", None)
    return runtime.pool.held if runtime else 0
