"""Shared prefixes and preemption through real servers: what clients, load reports and metrics say of them."""

from __future__ import annotations

import asyncio
from typing import Any

from draftwood.telemetry import METRICS
from draftwood.v1 import verifier_pb2
from tests.services.stack import Stack, slow_down, until, verifier_stub

GREEDY: dict[str, Any] = {"ignore_eos": True}


async def test_usage_names_the_prompt_tokens_that_were_cached(stack: Stack) -> None:
    cluster = await stack.cluster()
    prompt = list(range(2, 72))
    texts = [await cluster.speculative(prompt + last, max_tokens=20, **GREEDY) for last in ([5], [5], [6] * 30)]
    assert [text.finished.usage.cached_prompt_tokens for text in texts] == [0, 64, 64]
    assert texts[0].tokens == texts[1].tokens == await cluster.plain([*prompt, 5], max_tokens=20, **GREEDY)
    await cluster.is_idle()
    pool = cluster.engine.runtime.pool
    report = await anext(aiter(await _watch(stack, cluster.verifier)))
    assert (report.free_pages, report.cached_pages, report.total_pages) == (512, pool.cached, 512)
    assert pool.cached >= 5
    owners = {owner: gauge._value.get() for owner, gauge in METRICS.kv_pages.items()}
    assert owners == {"free": 512 - pool.cached, "cached": pool.cached, "session": 0}


async def _watch(stack: Stack, verifier: Any) -> Any:
    return verifier_stub(await stack.channel(verifier)).WatchLoad(verifier_pb2.VerifierServiceWatchLoadRequest())


async def test_preempted_sessions_write_the_same_text_with_drafts(stack: Stack) -> None:
    """12 pages, 6 clients whose texts need 7 each; drafts stay attached while their session is set aside."""
    cluster = await stack.cluster([{}, {"kind": "ngram"}], kv_pages=12, max_step_tokens=64)
    prompts = [list(range(2 + k, 12 + k)) for k in range(6)]
    options = {"max_tokens": 90, **GREEDY}
    want = [await cluster.plain(prompt, **options) for prompt in prompts]
    slow_down(cluster.verifier, 0.002)
    work = asyncio.gather(*(cluster.speculative(prompt, **options) for prompt in prompts))
    await until(lambda: bool(cluster.engine.preempted), what="a session is preempted")
    session = cluster.engine.preempted[-1]
    drafts = dict(session.drafts)
    await until(lambda: session.running, what="it is resumed")
    assert drafts.keys() <= session.drafts.keys()
    texts = await work
    assert [text.tokens for text in texts] == want
    assert cluster.engine.totals.preemptions >= 1 and sum(text.accepted for text in texts) > 50
    report = await anext(aiter(await _watch(stack, cluster.verifier)))
    assert (report.preempted, report.preemptions) == (0, cluster.engine.totals.preemptions)
    await cluster.is_idle()
