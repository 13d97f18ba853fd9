"""Several texts for one prompt (n > 1): each is a generation of its own, named by its index, in one stream.

Choice k of a request with seed s is what a request with n = 1 and seed ``choice_seed(s, k)`` writes. So a choice that
is cut off can be resumed as a request of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, odd: the seeds of a request's choices differ and lie far apart."""

T = TypeVar("T")


def choice_seed(seed: int, index: int) -> int:
    """The seed of a choice: ``seed + index * SEED_STEP`` modulo 2^64."""
    return (seed + index * SEED_STEP) % 2**64


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """The items of all streams as they come, with the stream's index; ends with the last stream.

    What one stream raises ends all. No stream runs ahead of the reader by more than a few items.
    """
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
