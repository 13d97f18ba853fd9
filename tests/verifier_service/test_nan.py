"""Logits that are not finite (bug kind 35), in every place of a step and under every rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scripted import VOCAB, make_engine, plain_decode, request, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from draftwood.parameters import ProcessorParams, Rule, SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.tree import Proposal
from verifier_service.engine import Outcome
from verifier_service.live_tree import Nodes

TOKENS = 24
NAMES = ("a", "b", "c")
PROMPTS = {"a": [1, 2, 3, 4], "b": [9, 8, 7, 6], "c": [5, 5, 5, 1]}
WARM = SamplingParams(temperature=0.8, seed=5)
RULES: dict[str, tuple[SamplingParams, Rule]] = {
    "greedy": (SamplingParams(), Rule.SHARED_NOISE),
    "shared noise": (WARM, Rule.SHARED_NOISE),
    "truncated": (SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=5), Rule.SHARED_NOISE),
    "typical": (WARM, Rule.TYPICAL),
    "rejection": (WARM, Rule.REJECTION),
    "processors": (SamplingParams(processors=ProcessorParams(frequency_penalty=1e-9, bad_words=((47,),))), Rule.GREEDY),
}
BAD: dict[str, Callable[[Tensor], None]] = {
    "one number": lambda row: row[11].fill_(math.nan),
    "whole row": lambda row: row.fill_(math.nan),
    "infinite": lambda row: row[11].fill_(math.inf),
    "nothing possible": lambda row: row.fill_(-math.inf),
}


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama")


@cache
def texts(sampling: SamplingParams) -> dict[str, list[int]]:
    """What the target alone writes; the processors of these rules change nothing of it."""
    plain = replace(sampling, processors=None)
    found = plain_decode(model(), list(PROMPTS.values()), TOKENS + 4, [plain] * len(NAMES))
    return dict(zip(NAMES, found, strict=True))


class Rig:
    """Three sessions with a draft that is right three tokens deep and wrong beside it; logits can be spoilt."""

    def __init__(self, rule: str) -> None:
        self.sampling, self.rule = RULES[rule]
        self.engine = make_engine(model(), typical_epsilon=1.0, typical_delta=1e9)
        self.texts = texts(self.sampling)
        self.got: dict[str, list[int]] = {name: [] for name in NAMES}
        self.next_id = dict.fromkeys(range(1, 4), 1)
        self.spoil: Callable[[str, Tensor], None] | None = None
        self.forward = self.engine.runtime.forward
        self.engine.runtime.forward = self._forward  # type: ignore[method-assign]
        self.engine.open_link(0, "right", frozenset({Rule.REJECTION}))
        for handle, name in enumerate(NAMES, 1):
            self.engine.submit(request(name, PROMPTS[name], TOKENS, self.sampling, rule=self.rule))
            self.engine.join(0, handle, name)

    def _forward(self, parts: Sequence[Rows]) -> Tensor:
        logits = self.forward(parts).clone()
        names = {id(s.pages): name for name, s in self.engine.sessions.items()}
        first = 0
        for part in parts:
            count = len(part.token) - part.logits_from
            if self.spoil:
                self.spoil(names[id(part.pages)], logits[first : first + count])
            first += count
        return logits

    def step(self) -> Outcome:
        outcome = self.engine.step()
        for emitted in outcome.emitted:
            self.got[emitted.session_id] += emitted.tokens
        for commit in outcome.commits.get(0, []):
            self.draw(commit.handle, commit.epoch)
        return outcome

    def draw(self, handle: int, epoch: int) -> None:
        """Nodes 1, 3 and 5 are the path, 2 and 4 hang beside them: wrong, and never reached."""
        name, first = NAMES[handle - 1], self.next_id[handle]
        right = self.texts[name][len(self.got[name]) :][:3]
        if len(right) < 3:
            return
        self.next_id[handle] += 5
        wrong = [(token + 1) % VOCAB for token in right]
        token = [right[0], wrong[0], right[1], wrong[1], right[2]]
        parent = [0, 0, first, first, first + 2]
        drawn = {}
        if self.rule is Rule.REJECTION:
            drawn = {
                0: self.proposal(right[0], wrong[0]), first: self.proposal(right[1], wrong[1]),
                first + 2: self.proposal(right[2], wrong[2]),
            }  # fmt: skip
        columns = np.array(parent, np.int64), np.array(token, np.int32), np.full(5, -0.1, np.float32)
        self.engine.grow(0, handle, Nodes(epoch, first, *columns, drawn), complete=True)

    def proposal(self, *tokens: int) -> Proposal:
        return Proposal(np.array(sorted(tokens)), np.array([0.5, 0.5], np.float32))

    def finish(self) -> None:
        while self.engine.sessions:
            assert not self.step().failed
        assert self.engine.audit() == []


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("where", ["anchor", "all rows", "all sessions"])
def test_bug_35_not_finite_logits_end_their_session_and_emit_nothing_of_the_step(
    where: str, rule: str, how: str
) -> None:
    """One row, all of one session's rows, or all rows there are: INTERNAL, NAN_LOGITS; others have their own tokens."""
    clean, rig = Rig(rule), Rig(rule)
    for each in (clean, rig):
        each.step()
        each.step()
    before = {name: list(tokens) for name, tokens in rig.got.items()}

    def spoil(name: str, rows: Tensor) -> None:
        if name == "b" or where == "all sessions":
            for row in rows[:1] if where == "anchor" else rows:
                BAD[how](row)

    rig.spoil = spoil
    outcome = rig.step()
    rig.spoil = None
    hit = NAMES if where == "all sessions" else ("b",)
    assert [(name, error.status, error.reason) for name, error in outcome.failed] == [
        (name, "INTERNAL", "NAN_LOGITS") for name in hit
    ]
    assert {e.session_id for e in outcome.emitted} == set(NAMES) - set(hit)
    assert all(rig.got[name] == before[name] for name in hit) and not outcome.ended
    rig.finish()
    clean.finish()
    for name in set(NAMES) - set(hit):
        assert rig.got[name] == clean.got[name] and len(rig.got[name]) == TOKENS


@pytest.mark.parametrize("how", ["one number", "nothing possible"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "rejection"])
@pytest.mark.parametrize("node", range(1, 6))
def test_bug_35_one_nodes_row_counts_if_the_walk_reaches_it(node: int, rule: str, how: str) -> None:
    """On the path nothing of the step is emitted, the good tokens before it neither; beside it nobody notices."""
    clean, rig = Rig(rule), Rig(rule)
    for each in (clean, rig):
        each.step()

    def spoil(name: str, rows: Tensor) -> None:
        if name == "b":
            BAD[how](rows[node])

    rig.spoil = spoil
    before = len(rig.got["b"])
    said = rig.step()
    rig.spoil = None
    on_path = node in (1, 3, 5)
    assert [error.reason for _, error in said.failed] == ["NAN_LOGITS"] * on_path
    assert len(rig.got["b"]) - before == (0 if on_path else 4)
    rig.finish()
    clean.finish()
    for name in NAMES:
        whole = clean.got[name]
        assert rig.got[name] == (whole[:before] if name == "b" and on_path else whole)
