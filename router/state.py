"""What all requests of one router share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from draftwood.config import RouterSettings
from router.registry import Registry


@dataclass(slots=True)
class Counters:
    """What the router has done since its start."""

    requests: int = 0  # being served
    requests_total: int = 0
    requests_failed: int = 0
    draft_reattachments: int = 0
    verifier_migrations: int = 0


class Background:
    """Tasks that nobody awaits, kept until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class RouterState:
    settings: RouterSettings
    registry: Registry
    rng: random.Random
    counters: Counters = field(default_factory=Counters)
    background: Background = field(default_factory=Background)
