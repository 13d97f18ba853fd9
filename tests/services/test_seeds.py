"""Seeds: with one a text can be had again, without one no two are alike, whatever else runs."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from draftwood.v1 import verifier_pb2
from tests.services.stack import Stack, verifier_stub


async def test_bug_9_a_thousand_requests_without_a_seed_are_independent(stack: Stack) -> None:
    """Each gets a seed of its own, whose halves are all different too, and writes a text of its own."""
    cluster = await stack.cluster([], max_sessions=64, max_step_tokens=256)
    gate = asyncio.Semaphore(64)

    async def one() -> tuple[int, tuple[int, ...]]:
        async with gate:
            text = await cluster.speculative([5, 6, 7], max_tokens=6, temperature=8.0, ignore_eos=True)
            assert text.started
            return text.started.seed, tuple(text.tokens)

    results = await asyncio.gather(*(one() for _ in range(1000)))
    seeds, texts = [seed for seed, _ in results], {tokens for _, tokens in results}
    assert len(set(seeds)) == len(texts) == 1000
    for bits in (range(32), range(32, 64)):
        ones = [sum(seed >> bit & 1 for seed in seeds) for bit in bits]
        assert all(400 < count < 600 for count in ones), "every bit is drawn"


async def test_bug_9_a_seed_gives_its_text_among_requests_with_and_without_one(stack: Stack) -> None:
    """Eight with a seed and eight without at the same time, with drafts and without, while the width changes: the same
    seed gives the same text as alone, in whichever place of the batch; those without differ from them and each other.
    """
    cluster = await stack.cluster(width="adaptive", dtype="float64")
    options: dict[str, Any] = {"max_tokens": 48, "temperature": 1.2, "ignore_eos": True}
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, 7, 7, 8]
    want = {seed: await cluster.plain("The sky is", seed=seed, **options) for seed in set(seeds)}
    stub = verifier_stub(await stack.channel(cluster.verifier))

    async def change_width() -> None:
        for nodes in itertools.cycle((0, 3, 1, 16, 2)):
            policy = verifier_pb2.Policy(max_session_nodes=nodes)
            await stub.SetPolicy(verifier_pb2.VerifierServiceSetPolicyRequest(policy=policy))
            await asyncio.sleep(0.02)

    changing = asyncio.create_task(change_width())
    free: set[tuple[int, ...]] = set()
    for turn in range(3):
        asked = [*seeds, *[None] * 8]
        random.Random(turn).shuffle(asked)
        texts = await asyncio.gather(
            *(
                cluster.speculative(
                    "The sky is", speculate=bool((k + turn) % 3), **options | ({} if seed is None else {"seed": seed})
                )
                for k, seed in enumerate(asked)
            )
        )
        for seed, text in zip(asked, texts, strict=True):
            if seed is not None:
                assert text.tokens == want[seed]
        free |= {tuple(text.tokens) for seed, text in zip(asked, texts, strict=True) if seed is None}
    changing.cancel()
    assert len(free) == 24 and not free & {tuple(tokens) for tokens in want.values()}
    assert len({tuple(tokens) for tokens in want.values()}) == 7
    await cluster.is_idle()
