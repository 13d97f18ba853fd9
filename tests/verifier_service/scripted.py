"""What the verifier's tests share: tiny target models, the plain decoder as oracle, drafts that misbehave by script."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwood.acceptance import Ending
from draftwood.config import VerifierSettings
from draftwood.noise import GumbelCache
from draftwood.parameters import SamplingParams
from draftwood.runtime.model import ModelRuntime, random_model
from draftwood.sampling import target_tokens
from verifier_service.engine import Engine, Outcome, StartInfo
from verifier_service.live_tree import Nodes
from verifier_service.session import GenerateRequest
from verifier_service.width import StepTimes

VOCAB = 48
SHAPES = {
    "llama": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32},
    "qwen3": {
        "model_type": "qwen3", "num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 40, "head_dim": 8,
    },
    "wide": {
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 384,
        "head_dim": 64,
    },
    "window": {
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 256,
        "sliding_window": 65,
    },
    "mistral": {
        "model_type": "mistral", "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32,
        "sliding_window": 9,
    },
}  # fmt: skip


def tiny_model(shape: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A two-layer model with random weights, spread out so that its argmax is not the same token for ever."""
    config = {
        "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    } | SHAPES[shape]  # fmt: skip
    model = random_model(config, torch.device("cpu"), dtype, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


def plain_decode(
    model: PreTrainedModel, prompts: list[list[int]], tokens: int, sampling: list[SamplingParams]
) -> list[list[int]]:
    """The oracle: Hugging Face's own attention, one full forward a token, no cache, no tree. Prompts of one length."""
    oracle = oracle_of(model)
    noise = GumbelCache(VOCAB, "cpu", 4096)
    text = torch.tensor(prompts)
    with torch.inference_mode():
        past = None
        for _ in range(tokens):
            out = oracle(text if past is None else text[:, -1:], past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits, position = out.logits[:, -1], text.shape[1]
            chosen = [
                target_tokens(row[None], s, [position], noise)[0] for row, s in zip(logits, sampling, strict=True)
            ]
            text = torch.cat([text, torch.stack(chosen)], dim=1)
    return [row[len(prompt) :] for row, prompt in zip(text.tolist(), prompts, strict=True)]


def oracle_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with Hugging Face's own attention."""
    config = copy.deepcopy(model.config)
    oracle = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="eager").eval()
    oracle.load_state_dict(model.state_dict())
    return oracle


def make_engine(model: PreTrainedModel, **settings: object) -> Engine:
    """An engine over 2,048 pages of 16 tokens that verifies every node it has; its clock stands still."""
    chosen = {
        "width": "full",
        "max_nodes": 12,
        "max_step_tokens": 512,
        "page_tokens": 16,
        "max_waiting": 4096,
        "draft_wait_ms": 0,
    } | settings
    checked = VerifierSettings(**chosen)
    runtime = ModelRuntime(model, kv_pages=2048, page_tokens=checked.page_tokens)
    times = StepTimes([1, 512], [1.0, 2.0])
    return Engine(runtime, checked, token_count=VOCAB, times=times, clock=lambda: 0.0)


def request(name: str, prompt: list[int], tokens: int, sampling: SamplingParams, **more: object) -> GenerateRequest:
    fields = {
        "session_id": name, "ticket_key": b"t", "prompt": tuple(prompt), "resume": (), "sampling": sampling,
        "ending": Ending(frozenset(), tokens), "max_nodes": 12,
    } | more  # fmt: skip
    return GenerateRequest(**fields)  # type: ignore[arg-type]


@dataclass
class ScriptedDraft:
    """A draft worker that knows the answer, and lies, stutters, repeats itself and comes late by a seeded script.

    ``truth`` is each session's text; guesses follow it with some chance so that deep paths are accepted.
    """

    random: random.Random
    truth: dict[str, list[int]]
    link: int = 0
    next_id: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    delayed: list[Callable[[Engine], None]] = field(default_factory=list)

    def join(self, engine: Engine, name: str, handle: int) -> None:
        start = engine.join(self.link, handle, name)
        self.names[handle], self.next_id[handle] = name, 1
        self.draw(engine, handle, start.epoch, len(start.tokens))

    def hear(self, engine: Engine, outcome: Outcome) -> None:
        """Answers each commit with a tree, after what had been held back."""
        late, self.delayed = self.delayed, []
        for send in late:
            send(engine)
        for commit in outcome.commits.get(self.link, []):
            self.draw(engine, commit.handle, commit.epoch, commit.length)

    def draw(self, engine: Engine, handle: int, epoch: int, length: int) -> None:
        """Draws a random tree below the anchor and sends it whole, in pieces, twice, late or never."""
        rnd, first = self.random, self.next_id[handle]
        text = self.truth[self.names[handle]]
        parents, tokens, true_depth = [], [], [0]
        for _ in range(rnd.randint(0, 14)):
            above = rnd.randrange(len(true_depth)) if rnd.random() < 0.4 else true_depth.index(max(true_depth))
            depth, position = true_depth[above], length + true_depth[above]
            right = depth >= 0 and position < len(text) and rnd.random() < 0.7
            parents.append(0 if above == 0 else first + above - 1)
            tokens.append(text[position] if right else rnd.randrange(VOCAB))
            true_depth.append(depth + 1 if depth >= 0 and position < len(text) and tokens[-1] == text[position] else -1)
        self.next_id[handle] = first + len(tokens)
        for begin, end in self._pieces(len(tokens)):
            self._send(engine, handle, epoch, first + begin, parents[begin:end], tokens[begin:end])

    def _pieces(self, count: int) -> list[tuple[int, int]]:
        cuts = sorted({0, count, *(self.random.randint(0, count) for _ in range(self.random.randint(0, 3)))})
        return list(itertools.pairwise(cuts))

    def _send(self, engine: Engine, handle: int, epoch: int, first: int, parents: list[int], tokens: list[int]) -> None:
        score = np.array([-self.random.random() * 3 for _ in tokens], np.float32)
        nodes = Nodes(epoch, first, np.array(parents, np.int64), np.array(tokens, np.int32), score)

        def send(engine: Engine) -> None:
            engine.grow(self.link, handle, nodes, complete=False)

        fate = self.random.random()
        if fate < 0.1:
            return  # dropped
        if fate < 0.3:
            self.delayed.append(send)  # past the next commit
        else:
            send(engine)
        if self.random.random() < 0.1:
            self.delayed.append(send)  # doubled


def run(
    engine: Engine, requests: list[GenerateRequest], drafts: list[ScriptedDraft], at_once: int
) -> dict[str, list[int]]:
    """Serves all requests, ``at_once`` at a time, and returns each one's tokens; fails if the chunks have gaps."""
    got: dict[str, list[int]] = {r.session_id: list(r.resume) for r in requests}
    todo, running, ended = list(requests), set[str](), 0
    for draft in drafts:
        engine.open_link(draft.link, f"scripted-{draft.link}")
    while ended < len(requests):
        while todo and len(running) < at_once:
            engine.submit(todo[0])
            running.add(todo[0].session_id)
            for draft in drafts:
                draft.join(engine, todo[0].session_id, len(requests) - len(todo) + 1)
            todo.pop(0)
        outcome = engine.step()
        assert not outcome.failed, outcome.failed
        for e in outcome.emitted:
            assert e.offset == len(got[e.session_id])
            got[e.session_id] += e.tokens
        for e in outcome.ended:
            running.discard(e.session_id)
            ended += 1
        for draft in drafts:
            draft.hear(engine, outcome)
    assert engine.runtime.pool.held == 0 and not engine.sessions and not engine.audit()
    return got


__all__ = ["VOCAB", "ScriptedDraft", "StartInfo", "make_engine", "plain_decode", "request", "run", "tiny_model"]
