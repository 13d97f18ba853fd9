"""What a verifier tells of its load: the signals that its pool is scaled by."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.services.stack import Stack, collect

TEXT: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}


async def test_the_longest_wait_of_a_request_is_told(stack: Stack) -> None:
    cluster = await stack.cluster(drafts=(), max_sessions=1)
    texts = [asyncio.create_task(collect(cluster.client, "The sky is", **TEXT)) for _ in range(3)]
    waits = []
    while not all(text.done() for text in texts):
        waits.append(cluster.verifier._load_report().queue_wait_ms)
        await asyncio.sleep(0.005)
    assert max(waits) > 10 and cluster.verifier._load_report().queue_wait_ms == 0
    assert cluster.verifier._load_report().narrow_steps == 0, "nobody has drafts"


async def test_steps_at_the_smallest_width_are_told_where_there_are_drafts_for_several(stack: Stack) -> None:
    for count in (1, 2):
        cluster = await stack.cluster(drafts=({"kind": "ngram"},), width="adaptive")
        texts = [asyncio.create_task(collect(cluster.client, "one two one two", **TEXT)) for _ in range(count)]
        while not all(text.done() for text in texts):
            cluster.engine.planner.gate.open = False
            await asyncio.sleep(0.001)
        narrow = cluster.verifier._load_report().narrow_steps
        assert narrow > 10 if count == 2 else narrow == 0, (count, narrow)
