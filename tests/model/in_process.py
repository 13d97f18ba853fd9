"""The real engine and the real drafters in one process, without servers: what the exactness tests on SmolLM2 run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draft_service.drafter import Drafter, SessionCommitted, SessionStart
from draft_service.drafters.lm import LmDrafter
from draft_service.drafters.ngram import NgramDrafter
from draftwood.config import DraftSettings, VerifierSettings
from draftwood.runtime.demo_model import demo_draft, demo_target
from draftwood.runtime.model import ModelRuntime, load_model
from draftwood.runtime.text import TextCodec
from verifier_service.engine import Engine
from verifier_service.live_tree import Nodes
from verifier_service.session import GenerateRequest
from verifier_service.width import StepTimes

CPU = torch.device("cpu")

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that checks whether a number is prime, with a docstring.",
    "List the planets of the solar system in order, one per line.",
    "Translate into French: The weather is nice today and we are going to the beach.",
    "Write a haiku about autumn leaves.",
    "What is 17 times 23? Show your steps.",
    "Summarise the plot of Hamlet in three sentences.",
    "Give me a JSON object with the fields name, age and city for three people.",
    "Explain recursion to a beginner using the factorial function.",
    "What are the pros and cons of working from home?",
    "Write an SQL query that counts the orders of each customer in 2023.",
    "Continue the story: The old lighthouse keeper heard a knock on the door at midnight.",
    "How do I boil an egg?",
    "Repeat the following line five times: All work and no play makes Jack a dull boy.",
    "Write a polite email asking my landlord to fix the heating.",
    "What is the difference between TCP and UDP?",
    "Name ten animals that start with the letter B.",
    "Write a bash command that finds all files larger than 10 MB.",
    "Tell me a joke about a cat and a computer.",
    "Describe the water cycle for a school child.",
)
RAW_PROMPTS = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def fibonacci(n):\n    ",
    "<!DOCTYPE html>\n<html>\n<head>\n<title>",
    "1, 2, 4, 8, 16, 32,",
)


def prompts(codec: TextCodec) -> list[list[int]]:
    """24 prompts of varied kinds, in tokens: 20 chats and 4 raw texts."""
    chats = [codec.render([{"role": "user", "content": text}]) for text in PROMPTS]
    return chats + [codec.encode(text) for text in RAW_PROMPTS]


def load_target() -> tuple[ModelRuntime, TextCodec]:
    path = demo_target()
    model = load_model(str(path), CPU, torch.float32)
    return ModelRuntime(model, kv_pages=256, page_tokens=64), TextCodec(path)


def make_engine(runtime: ModelRuntime, **settings: object) -> Engine:
    chosen = VerifierSettings(**({"max_nodes": 10, "width": "full", "draft_wait_ms": 0} | settings))  # type: ignore[arg-type]
    return Engine(runtime, chosen, token_count=49152, times=StepTimes([1, 8], [1.0, 1.2]))


def make_drafters(codec: TextCodec) -> list[Drafter]:
    settings = DraftSettings(kv_pages=256, lookahead_levels=0, depth=5)
    runtime = ModelRuntime(load_model(str(demo_draft()), CPU, torch.float32), kv_pages=256, page_tokens=64)
    return [LmDrafter(runtime, settings, "demo", codec.vocabulary(49152)), NgramDrafter(settings)]


@dataclass
class Served:
    """What came out, by session id."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    steps: int = 0


def serve(engine: Engine, requests: Sequence[GenerateRequest], drafters: Sequence[Drafter] = ()) -> Served:
    """Runs all requests together to their end; each drafter answers every commit before the next step."""
    out = Served({r.session_id: [] for r in requests})
    for link, drafter in enumerate(drafters):
        engine.open_link(link, drafter.kind)
    for handle, r in enumerate(requests, 1):
        engine.submit(r)
        for link, drafter in enumerate(drafters):
            start = engine.join(link, handle, r.session_id)
            told = SessionStart(start.epoch, start.tokens, r.sampling, start.budget, 49152, 255, 32, 8192)
            drafter.open((link, handle), told)
    ended = 0
    while ended < len(requests):
        for drafter in drafters:
            while drafter.wants_work():
                for (link, handle), g in drafter.work():
                    nodes = Nodes(g.epoch, g.first_id, g.parent, g.token, g.score)
                    engine.grow(link, handle, nodes, complete=g.complete)
        outcome = engine.step()
        assert not outcome.failed, outcome.failed
        out.steps += len(outcome.emitted)
        for e in outcome.emitted:
            assert e.offset == len(out.tokens[e.session_id])
            out.tokens[e.session_id] += e.tokens
        ended += len(outcome.ended)
        for link, commits in outcome.commits.items():
            for c in commits:
                drafters[link].commit((link, c.handle), SessionCommitted(c.epoch, c.length, c.tokens, c.budget))
        for link, handles in outcome.stops.items():
            for handle in handles:
                drafters[link].close((link, handle))
    for link in range(len(drafters)):
        engine.close_link(link)
    assert engine.runtime.pool.held == 0 and not engine.audit()
    return out
