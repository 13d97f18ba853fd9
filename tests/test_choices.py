from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from draftwood.choices import choice_seed, merged
from draftwood.errors import Internal


def test_seeds_of_a_request_are_distinct_and_the_first_is_its_own() -> None:
    for seed in (0, 1, 2**64 - 1):
        seeds = [choice_seed(seed, k) for k in range(1000)]
        assert seeds[0] == seed and len(set(seeds)) == 1000 and all(0 <= s < 2**64 for s in seeds)
    assert choice_seed(5, 1) == 5 + 0x9E3779B97F4A7C15
    assert not {choice_seed(1, k) for k in range(100)} & {choice_seed(2, k) for k in range(100)}


class Stream:
    """Yields 0, 1, 2, ...; remembers how far it got and that it was closed."""

    def __init__(self, length: int, pause_s: float = 0.0, error: Exception | None = None) -> None:
        self.length, self.pause_s, self.error = length, pause_s, error
        self.yielded = 0
        self.closed = False

    async def items(self) -> AsyncGenerator[int]:
        try:
            for item in range(self.length):
                await asyncio.sleep(self.pause_s)
                self.yielded += 1
                yield item
            if self.error:
                raise self.error
        finally:
            self.closed = True


async def test_items_of_all_streams_come_in_their_order() -> None:
    streams = [Stream(5), Stream(0), Stream(9, 0.001), Stream(2)]
    got: list[list[int]] = [[] for _ in streams]
    async for index, item in merged([stream.items() for stream in streams]):
        got[index].append(item)
    assert got == [list(range(stream.length)) for stream in streams]
    assert all(stream.closed for stream in streams)


async def test_the_first_error_ends_all() -> None:
    endless, failing = Stream(10**6, 0.001), Stream(2, error=Internal("CHUNK_GAP", "x"))
    with pytest.raises(Internal):
        async for _ in merged([endless.items(), failing.items()]):
            pass
    assert endless.closed and endless.yielded < 1000


async def test_a_reader_that_leaves_ends_all_and_one_that_is_slow_is_waited_for() -> None:
    streams = [Stream(10**6), Stream(10**6)]
    reader = merged([stream.items() for stream in streams])
    await anext(reader)
    await asyncio.sleep(0.02)
    assert sum(stream.yielded for stream in streams) <= 6
    await reader.aclose()
    assert all(stream.closed for stream in streams)
