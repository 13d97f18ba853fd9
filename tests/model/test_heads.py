"""The heads that ship for SmolLM2, over the real wire: the text is the target's, and they are worth their name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from draftwood.client import Message
from draftwood.runtime.demo_model import DEMO
from tests.services.models import Models
from tests.services.stack import Cluster, Stack, running

MODELS = Path(__file__).parents[2] / "models"
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"model": str(MODELS / "smollm2-135m-eagle"), "topology": "expand_rerank", "depth": 6},
    "medusa": {"model": str(MODELS / "smollm2-135m-medusa")},
}
LEAST = {"eagle": 2.0, "medusa": 1.3}
"""Tokens a step, both prompts and both rules together."""
PROMPTS = ("Why is the sky blue?", "Write a haiku about autumn leaves.")
RULES: list[dict[str, Any]] = [{}, {"temperature": 0.7, "seed": 3}]

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path(HEADS["eagle"]["model"]).exists(), reason="the trained heads are not in this tree"),
]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    nowhere = Path()
    async with running(Models(**dict.fromkeys(Models.__dataclass_fields__, nowhere))) as stack:
        yield stack


@pytest.mark.parametrize("kind", HEADS)
async def test_heads_of_the_demo_target_write_its_text_in_fewer_steps(stack: Stack, kind: str) -> None:
    model = {"model": DEMO, "page_tokens": 64, "threads": 0}
    verifier = await stack.verifier(
        **model, features=[0, 2, 15, 27], kv_pages=64, dtype="float32", max_nodes=32, draft_wait_ms=5000
    )
    draft = await stack.draft(kind=kind, **(model | {"depth": 4} | HEADS[kind]), target=DEMO, kv_pages=64)
    router = await stack.router([verifier], [draft])
    cluster = Cluster(verifier, [draft], router, await stack.client(router))
    tokens = steps = 0
    for prompt in PROMPTS:
        for rule in RULES:
            chat, options = [Message("user", prompt)], {"max_tokens": 32} | rule
            text = await cluster.speculative(chat, **options)
            assert text.tokens == await cluster.plain(chat, **options)
            assert text.finished is not None
            tokens, steps = tokens + len(text.tokens), steps + text.finished.usage.steps
    assert tokens / steps > LEAST[kind]
    [canary] = verifier._load_report().canaries
    assert not canary.failed
    await cluster.is_idle()
