"""``max_step_nodes``: the running sessions share a step's nodes, and drafts are asked for no more than the share."""

import random

import pytest
from scripted import VOCAB, ScriptedDraft, make_engine, plain_decode, request, tiny_model

from draftwood.parameters import SamplingParams

TOKENS = 24


@pytest.mark.parametrize(("sessions", "share"), [(1, 9), (3, 3), (9, 1), (10, 0)])
def test_sessions_share_the_nodes_of_a_step(sessions: int, share: int) -> None:
    model = tiny_model("llama")
    prompts = [[k % VOCAB, 3, 5] for k in range(sessions)]
    want = plain_decode(model, prompts, TOKENS, [SamplingParams()] * sessions)
    engine = make_engine(model, max_step_nodes=9)
    draft = ScriptedDraft(random.Random(sessions), {f"s{k}": [*prompts[k], *want[k]] for k in range(sessions)})
    engine.open_link(0, "scripted")
    for k, prompt in enumerate(prompts):
        engine.submit(request(f"s{k}", prompt, TOKENS, SamplingParams()))
    for k in range(sessions):
        draft.join(engine, f"s{k}", k + 1)
    got: dict[str, list[int]] = {f"s{k}": [] for k in range(sessions)}
    widest = 0
    while len(engine.sessions) == sessions:
        before = {name: s.stats.verified for name, s in engine.sessions.items()}
        outcome = engine.step()
        widest = max(widest, *(s.stats.verified - before[name] for name, s in engine.sessions.items()), 0)
        assert all(commit.budget <= share for commit in outcome.commits.get(0, []))
        for emitted in outcome.emitted:
            got[emitted.session_id] += emitted.tokens
        draft.hear(engine, outcome)
    assert widest == share
    assert all(tokens == answer[: len(tokens)] for tokens, answer in zip(got.values(), want, strict=True))
