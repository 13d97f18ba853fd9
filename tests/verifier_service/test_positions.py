"""Where the rows of a step stand: for every number of accepted tokens, and with siblings in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scripted import VOCAB, make_engine, plain_decode, request, tiny_model
from table_target import Table, TableRuntime
from torch import Tensor

from draftwood.config import VerifierSettings
from draftwood.kernels.tree_attention import AttentionBatch
from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import Rows
from verifier_service.engine import Engine
from verifier_service.live_tree import Nodes
from verifier_service.width import StepTimes

LENGTH = 5  # tokens that the draft guesses
TOKENS = 40
PROMPT = [7, 3, 11, 2]
RULES = [SamplingParams(), SamplingParams(temperature=0.9, seed=2**63 + 5)]


@dataclass
class PartlyRight:
    """Below each anchor a chain of ``LENGTH`` tokens, of which the first ``right`` are the target's own.

    ``siblings`` of each node of the chain stand before it in node order; they are wrong.
    """

    text: list[int]
    right: int
    siblings: int = 0
    vocab: int = VOCAB
    next_id: int = 1

    def draw(self, engine: Engine, epoch: int, length: int) -> None:
        parents, tokens, above = list[int](), list[int](), 0
        for depth in range(LENGTH):
            at = length + depth
            own = self.text[at] if at < len(self.text) else 0
            guess = own if depth < self.right else (own + 1) % self.vocab
            parents += [above] * (1 + self.siblings)
            tokens += [(own + 2 + k) % self.vocab for k in range(self.siblings)] + [guess]
            above = self.next_id + len(parents) - 1
        score = np.full(len(tokens), -0.1, np.float32)
        nodes = Nodes(epoch, self.next_id, np.array(parents, np.int64), np.array(tokens, np.int32), score)
        self.next_id += len(tokens)
        engine.grow(0, 1, nodes, complete=True)


@dataclass
class Seen:
    """One forward: the rows asked for, what reached the decoder, and the logits."""

    rows: Rows
    logits: Tensor
    token: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)


@dataclass
class Served:
    tokens: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)  # tokens emitted by each step
    seen: list[Seen] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of the committed text before each forward


def record(engine: Engine, served: Served) -> None:
    """Notes every forward of the one session, down to the ids and positions that the model is given."""
    runtime: Any = engine.runtime
    forward, decoder = runtime.forward, getattr(runtime, "decoder", None)
    given: list[tuple[list[int], list[int]]] = []

    def decoding(input_ids: Tensor, batch: AttentionBatch, cache: Tensor, logits_rows: Tensor, _: Any) -> Tensor:
        given.append((input_ids.tolist(), batch.position.tolist()))
        logits: Tensor = decoder(input_ids, batch, cache, logits_rows)
        return logits

    def forwarding(parts: list[Rows]) -> Tensor:
        (rows,) = parts
        served.lengths.append(len(engine.sessions["s"].tokens))
        logits = forward(parts)
        seen = Seen(rows, logits.clone())
        if decoder:
            seen.token, seen.position = (column[: len(rows.token)] for column in given.pop())
        served.seen.append(seen)
        return logits  # type: ignore[no-any-return]

    runtime.forward = forwarding
    if decoder:
        runtime.decoder = decoding


def serve(engine: Engine, draft: PartlyRight, rule: SamplingParams) -> Served:
    served = Served()
    record(engine, served)
    engine.open_link(0, "partly right")
    engine.submit(request("s", PROMPT, TOKENS, rule, max_nodes=40))
    engine.join(0, 1, "s")
    while engine.sessions:
        outcome = engine.step()
        assert not outcome.failed
        for emitted in outcome.emitted:
            assert emitted.offset == len(served.tokens)
            served.tokens += emitted.tokens
            served.runs.append(len(emitted.tokens))
        for commit in outcome.commits.get(0, []):
            draft.draw(engine, commit.epoch, commit.length)
    assert engine.audit() == []
    return served


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled"])
@pytest.mark.parametrize("siblings", [0, 1])
@pytest.mark.parametrize("right", range(LENGTH + 1))
def test_bug_1_after_any_number_of_accepted_tokens_positions_are_those_of_the_text(
    right: int, siblings: int, rule: SamplingParams
) -> None:
    """k of 5 guesses right, k = 0 to 5: the text is plain decoding's, each step emits k + 1 tokens of it, and each row
    that the model is given stands at committed length - 1 + depth, which is its token's place in the text."""
    model = tiny_model("llama")
    text = PROMPT + plain_decode(model, [PROMPT], TOKENS, [rule])[0]
    served = serve(make_engine(model), PartlyRight(text, right, siblings), rule)
    assert served.tokens == text[len(PROMPT) :]
    assert served.runs[:-1] == [1] + [right + 1] * (len(served.runs) - 2), "the first is that of the prompt"
    assert sum(served.runs) == TOKENS
    prompt, *steps = zip(served.seen, served.lengths, strict=True)
    assert prompt[0].position == list(range(len(PROMPT))) and prompt[0].token == PROMPT
    for seen, length in steps:
        nodes = len(seen.token) - 1
        depth = [0, *(1 + k // (1 + siblings) for k in range(nodes))]
        assert seen.position == [length - 1 + d for d in depth]
        chain = [0, *range(1 + siblings, nodes + 1, 1 + siblings)][: right + 1]
        assert all(seen.token[n] == text[seen.position[n]] for n in chain if seen.position[n] < len(text))
        assert nodes == min(LENGTH, len(text) - 1 - length) * (1 + siblings)


def chains_logits(served: Served, siblings: int) -> list[Tensor]:
    """Of each step with nodes: logits of the anchor and of the chain's nodes."""
    return [seen.logits[:: 1 + siblings] for seen in served.seen[1:] if len(seen.rows.token) > 1]


@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("shape", ["llama", "qwen3", "mistral"])
def test_bug_6_siblings_before_a_chain_change_none_of_its_logits(shape: str, siblings: int) -> None:
    """The whole forward, a window of 9 tokens included. A sum over one more masked key may be grouped otherwise, in
    float64 too, so bits are compared behind the rounding to float32."""
    model = tiny_model(shape)
    text = PROMPT + plain_decode(model, [PROMPT], TOKENS, [SamplingParams()])[0]
    alone, beside = (
        serve(make_engine(model, max_nodes=40), PartlyRight(text, 4, n), SamplingParams()) for n in (0, siblings)
    )
    pairs = list(zip(chains_logits(alone, 0), chains_logits(beside, siblings), strict=True))
    assert len(pairs) >= 7 and all(len(a) > 1 for a, _ in pairs)
    for a, b in pairs:
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("siblings", [1, 3])
def test_bug_6_siblings_before_a_chain_change_no_bit_where_sums_are_exact(siblings: int) -> None:
    """A table as the target: its logits are a hash of position and token of all that a row sees, so that no bit may
    differ."""
    table = Table.random(VOCAB)
    text = list(PROMPT)
    for _ in range(TOKENS):
        text.append(int(table.after(text).argmax()))
    settings = VerifierSettings(width="full", max_nodes=40, page_tokens=16, draft_wait_ms=0)

    def logits(n: int) -> list[Tensor]:
        runtime: Any = TableRuntime(table)
        engine = Engine(runtime, settings, token_count=VOCAB, times=StepTimes([1, 512], [1.0, 2.0]), clock=lambda: 0.0)
        served = serve(engine, PartlyRight(text, 4, n), SamplingParams())
        assert served.tokens == text[len(PROMPT) :]
        return chains_logits(served, n)

    pairs = list(zip(logits(0), logits(siblings), strict=True))
    assert len(pairs) >= 7
    assert all(torch.equal(a, b) for a, b in pairs)
