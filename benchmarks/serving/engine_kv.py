"""Prefix pages: 32 requests with one system prompt on SmolLM2 with its draft, in one process.

Reused is a page of the system prompt that a request did not compute. At most 31 of 32 requests can reuse one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from results import Check, write

from draft_service.drafter import SessionCommitted, SessionStart
from draft_service.drafters.lm import LmDrafter
from draftwood.acceptance import Ending
from draftwood.config import DraftSettings, VerifierSettings
from draftwood.parameters import SamplingParams
from draftwood.runtime.demo_model import demo_draft, demo_target
from draftwood.runtime.model import ModelRuntime, load_model
from draftwood.runtime.text import TextCodec
from verifier_service.engine import Engine, Outcome
from verifier_service.live_tree import Nodes
from verifier_service.session import GenerateRequest
from verifier_service.width import StepTimes

CPU = torch.device("cpu")
REQUESTS = 32
TOKENS = 12
KV_PAGES = 256
NODES = 4
SYSTEM = (
    "You are the assistant of a small public library. Answer in one short sentence, politely and without guessing. "
    "The library is open from nine to six on weekdays and from ten to two on Saturdays; it is closed on Sundays and on "
    "public holidays. Books can be borrowed for four weeks, films and music for one week, and both can be extended "
    "twice unless somebody else has asked for them. A reader's card is free for everybody who lives in the town and "
    "costs twelve a year for others. Children need a parent's signature. Late returns cost ten cents a day for each "
    "item. Lost items are replaced by the reader. There are eight computers that may be used for one hour a day, a "
    "printer that takes coins, a reading room where nobody speaks, and a cellar with newspapers of the last hundred "
    "years that is opened on request. On the first Thursday of the month an author reads from a new book; on Tuesdays "
    "at four there are stories for children under seven. Dogs wait outside, prams are welcome, and there is a lift at "
    "the back of the building. If you do not know something, say that the desk will know."
)
QUESTIONS = ("When do you open", "May I bring my dog", "What does a card cost", "How long may I keep a film")


@dataclass
class Run:
    """What came out of one way of serving all requests."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    cached_prompt: list[int] = field(default_factory=list)  # tokens of each request
    seconds: float = 0.0
    rows: int = 0  # of all forwards
    accepted: int = 0


def prefix_reuse() -> tuple[list[Check], dict[str, Any]]:
    """The check ``verifier/prefix_pages_reused`` and what is behind it; takes about two minutes on two cores."""
    path = demo_target()
    model, codec = load_model(str(path), CPU, torch.float32), TextCodec(path)
    runtime = ModelRuntime(model, kv_pages=KV_PAGES, page_tokens=64)
    draft = ModelRuntime(load_model(str(demo_draft()), CPU, torch.float32), kv_pages=KV_PAGES, page_tokens=64)
    requests = _requests(codec)
    common = _common(requests) // 64
    runs = {
        "at once": _serve(runtime, draft, codec, requests, apart=0),
        "one a step": _serve(runtime, draft, codec, requests, apart=1),
        "not shared": _serve(runtime, draft, codec, requests, apart=0, prefix_cache=False),
    }
    reused = {
        name: sum(min(common, tokens // 64) for tokens in run.cached_prompt) / (REQUESTS * common)
        for name, run in runs.items()
    }
    shared = min(value for name, value in reused.items() if name != "not shared")
    alone = runs["not shared"].texts
    details = {
        "requests": REQUESTS, "system_prompt_pages": common, "page_tokens": 64, "tokens_each": TOKENS,
        "reused": reused,
        "seconds": {name: round(run.seconds, 2) for name, run in runs.items()},
        "rows_computed": {name: run.rows for name, run in runs.items()},
        "nodes_accepted": {name: run.accepted for name, run in runs.items()},
        "texts_that_differ_from_not_shared": {
            name: sum(run.texts[k] != text for k, text in alone.items()) for name, run in runs.items()
        },
    }  # fmt: skip
    assert all(run.accepted for run in runs.values()), "no draft was ever right: speculation was not on"
    return [Check("verifier/prefix_pages_reused", round(shared, 4), ">=", 0.95)], details


def _requests(codec: TextCodec) -> list[GenerateRequest]:
    made = []
    for k in range(REQUESTS):
        question = f"{QUESTIONS[k % len(QUESTIONS)]}, and are you number {k}?"
        prompt = codec.render([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
        rule = SamplingParams() if k % 2 else SamplingParams(temperature=0.7, seed=k)
        made.append(GenerateRequest(f"s{k}", b"t", tuple(prompt), (), rule, Ending(frozenset(), TOKENS), NODES))
    return made


def _common(requests: Sequence[GenerateRequest]) -> int:
    """Tokens with which all prompts begin."""
    columns = zip(*(r.prompt for r in requests), strict=False)
    return next(k for k, column in enumerate(columns) if len(set(column)) > 1)


def _serve(
    runtime: ModelRuntime,
    draft: ModelRuntime,
    codec: TextCodec,
    requests: Sequence[GenerateRequest],
    *,
    apart: int,
    prefix_cache: bool = True,
) -> Run:
    """Serves all requests with the draft from an empty cache; ``apart``: steps between two arrivals."""
    runtime.pool.forget(range(KV_PAGES))
    settings = VerifierSettings(max_nodes=NODES, width="full", draft_wait_ms=0, prefix_cache=prefix_cache)
    engine = Engine(runtime, settings, token_count=49152, times=StepTimes([1, 8], [1.0, 1.2]))
    drafter = LmDrafter(draft, DraftSettings(lookahead_levels=0, depth=3), "demo", codec.vocabulary(49152))
    engine.open_link(0, "lm")
    run, rows, todo = Run(), runtime.forward, list(requests)

    def counting(parts: Any) -> torch.Tensor:
        run.rows += sum(len(part.token) for part in parts)
        return rows(parts)

    runtime.forward = counting  # type: ignore[method-assign]
    began, steps = time.monotonic(), 0
    while todo or engine.sessions:
        while todo and len(requests) - len(todo) <= (steps // apart if apart else len(requests)):
            _hear(engine, drafter, engine.submit(todo.pop(0)), run)
        _draft(engine, drafter)
        _hear(engine, drafter, engine.step(), run)
        steps += 1
    run.seconds, run.accepted = time.monotonic() - began, engine.totals.accepted
    runtime.forward = rows  # type: ignore[method-assign]
    assert engine.audit() == [] and runtime.pool.held == 0
    return run


def _draft(engine: Engine, drafter: LmDrafter) -> None:
    while drafter.wants_work():
        for (link, handle), g in drafter.work():
            engine.grow(link, handle, Nodes(g.epoch, g.first_id, g.parent, g.token, g.score), complete=g.complete)


def _hear(engine: Engine, drafter: LmDrafter, outcome: Outcome, run: Run) -> None:
    """Has the draft join what was admitted and follow what was committed."""
    for name in outcome.admitted:
        handle, request = int(name[1:]) + 1, engine.sessions[name].request
        start = engine.join(0, handle, name)
        told = SessionStart(start.epoch, start.tokens, request.sampling, start.budget, 49152, 255, 32, 8192)
        drafter.open((0, handle), told)
    for e in outcome.emitted:
        run.texts.setdefault(e.session_id, []).extend(e.tokens)
    for c in outcome.commits.get(0, []):
        drafter.commit((0, c.handle), SessionCommitted(c.epoch, c.length, c.tokens, c.budget))
    for handle in outcome.stops.get(0, []):
        drafter.close((0, handle))
    run.cached_prompt += [ended.stats.cached_prompt for ended in outcome.ended]


if __name__ == "__main__":
    sys.exit(not write("verifier-kv", *prefix_reuse()))
