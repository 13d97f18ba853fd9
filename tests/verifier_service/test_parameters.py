"""Speculation against plain decoding under every sampling parameter at once, and both against transformers' processors.

The target is a table over all that a row sees, so equal histories have equal logits and any difference is our own.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from guessing import AT_ONCE, GuessingDraft, Text, serve
from table_target import Table, TableRuntime
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwood.acceptance import Ending, FinishReason
from draftwood.config import VerifierSettings
from draftwood.noise import gumbel
from draftwood.parameters import ProcessorParams, SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.model import Chosen
from verifier_service.engine import Engine
from verifier_service.sampler import NONE_ALLOWED
from verifier_service.session import GenerateRequest
from verifier_service.width import StepTimes

VOCAB = 24
TABLE = Table.random(VOCAB)
COMBINATIONS = 1000  # of each of the five seeds


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rows of 24 logits are not worth a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(runtime: TableRuntime) -> Engine:
    settings = VerifierSettings(
        width="full", max_nodes=12, max_step_tokens=2048, max_sessions=AT_ONCE, draft_wait_ms=0, page_tokens=16
    )
    times = StepTimes([1, 512], [1.0, 2.0])
    return Engine(runtime, settings, token_count=VOCAB, times=times, clock=lambda: 0.0)  # type: ignore[arg-type]


def maybe(rnd: random.Random, low: float, high: float, neutral: float) -> float:
    return rnd.uniform(low, high) if rnd.random() < 0.5 else neutral


def random_request(rnd: random.Random, name: str, seeds: list[int]) -> GenerateRequest:
    """A random combination of all parameters. The request ends at stops; its processors know them."""
    max_tokens = rnd.randint(1, 12)
    stops = tuple(rnd.sample(range(VOCAB), rnd.choice([0, 1, 2, 4])))
    processors = ProcessorParams(
        presence_penalty=maybe(rnd, -2, 2, 0.0),
        frequency_penalty=maybe(rnd, -2, 2, 0.0),
        repetition_penalty=maybe(rnd, 0.5, 2, 1.0),
        logit_bias=tuple((t, rnd.uniform(-5, 5)) for t in rnd.sample(range(VOCAB), rnd.choice([0, 0, 1, 3]))),
        bad_words=tuple(
            tuple(rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 3))) for _ in range(rnd.choice([0, 0, 1, 6]))
        ),
        min_tokens=min(rnd.choice([0, 0, 2, 5]), max_tokens),
        end_tokens=stops,
    )
    sampling = SamplingParams(
        temperature=rnd.choice([0.0, 0.0, 0.4, 0.8, 1.0, 1.5]),
        top_k=rnd.choice([0, 0, 1, 3, 12, VOCAB]),
        top_p=maybe(rnd, 0.3, 1, 1.0),
        seed=rnd.choice(seeds),
        min_p=maybe(rnd, 0.0, 0.5, 0.0),
        processors=processors if rnd.random() < 0.9 else None,
    )
    prompt = tuple(rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 9)))
    logprobs = rnd.choice([None, 0, 1, 4])
    ending = Ending(frozenset(stops), max_tokens)
    return GenerateRequest(name, b"t", prompt, (), sampling, ending, 12, logprobs)


def endless(request: GenerateRequest) -> GenerateRequest:
    """The same request without stops and drafts: its text is what the other's is the start of."""
    return replace(request, ending=Ending(frozenset(), request.ending.max_tokens), max_nodes=0, ticket_key=b"")


def cut(tokens: list[int], ending: Ending) -> tuple[list[int], FinishReason]:
    """Where a text ends, said again in its simplest form."""
    for k, token in enumerate(tokens):
        if token in ending.stop_token_ids:
            return tokens[: k + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH


@pytest.mark.parametrize("seed", (0, 1, 3, 4, 5))
def test_speculation_equals_plain_decoding_for_random_parameters(seed: int) -> None:
    """Bug kinds 8, 13, 14 and 15: 1,000 combinations a seed; tokens, reasons, usage and log probabilities, with stops
    anywhere in an accepted run."""
    rnd = random.Random(seed)
    seeds = [rnd.getrandbits(64) for _ in range(2)]  # few, so that noise is made once
    requests = [random_request(rnd, f"s{k}", seeds) for k in range(COMBINATIONS)]
    plain = serve(make_engine(TableRuntime(TABLE)), [endless(r) for r in requests], None)
    truth = {r.session_id: [*r.prompt, *plain[r.session_id].tokens] for r in requests}
    requests = [resumed(rnd, r, plain[r.session_id].tokens) for r in requests]
    engine = make_engine(TableRuntime(TABLE))
    draft = GuessingDraft(rnd, truth, VOCAB)
    texts = serve(engine, requests, draft)
    stopped: Counter[tuple[int, bool]] = Counter()  # by length of the last run, and whether guesses went on behind it
    for request in requests:
        text, whole = texts[request.session_id], plain[request.session_id]
        tokens, reason = cut(whole.tokens, request.ending)
        assert text.tokens == tokens, request
        assert text.logprobs == whole.logprobs[len(request.resume) : len(tokens)], request
        assert len(text.logprobs) == (len(tokens) - len(request.resume)) * (request.top_logprobs is not None)
        assert text.ended and text.ended.reason is reason
        assert text.ended.completion_tokens == len(tokens)
        if reason is FinishReason.STOP and text.last:
            stopped[len(text.last.tokens), text.ended.stats.accepted > text.accepted] += 1
    for length in range(1, 6):
        assert stopped[length, True] >= 3, f"hardly a stop at place {length} of an accepted run: {stopped}"
    assert engine.totals.accepted > COMBINATIONS, "the drafts were hardly ever right, so the test showed nothing"
    assert draft.repeats > COMBINATIONS


def resumed(rnd: random.Random, request: GenerateRequest, text: list[int]) -> GenerateRequest:
    """Now and then the request goes on from a part of its text."""
    tokens, _ = cut(text, request.ending)
    return replace(request, resume=tuple(tokens[: rnd.randrange(len(tokens))])) if rnd.random() < 0.2 else request


# Against transformers


def with_transformers(request: GenerateRequest) -> list[int]:
    """The text by transformers' processors in the order of its ``generate``, and the argmax with our noise."""
    rule, text = request.sampling, list(request.prompt)
    params, prompt = rule.processors or ProcessorParams(), len(request.prompt)
    processors: list[Any] = [RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    if params.logit_bias:
        processors.insert(0, SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    later: list[Any] = []
    if params.bad_words:
        later.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.end_tokens:
        later.append(MinNewTokensLengthLogitsProcessor(prompt, params.min_tokens, list(params.end_tokens)))
    if rule.temperature:
        later.append(TemperatureLogitsWarper(rule.temperature))
        later += [TopKLogitsWarper(rule.top_k)] if rule.top_k else []
        later += [TopPLogitsWarper(rule.top_p)] if rule.top_p < 1 else []
        later += [MinPLogitsWarper(rule.min_p)] if rule.min_p else []
    while len(text) < prompt + request.ending.max_tokens and not set(text[prompt:]) & request.ending.stop_token_ids:
        ids = torch.tensor([text])
        row = LogitsProcessorList(processors)(ids, torch.from_numpy(TABLE.after(text))[None])
        for token, count in Counter(text[prompt:]).items():  # as vLLM documents it
            row[0, token] -= params.frequency_penalty * count + params.presence_penalty
        row = LogitsProcessorList(later)(ids, row)[0].log_softmax(-1)
        noise = gumbel(rule.seed, len(text), VOCAB, "cpu")
        text.append(int((row + noise if rule.temperature else row).argmax()))
    return text[prompt:]


def test_random_parameters_against_the_processors_of_transformers() -> None:
    rnd = random.Random(77)
    requests = [random_request(rnd, f"s{k}", [rnd.getrandbits(64)]) for k in range(400)]
    requests = [r for r in requests if all(len(w) <= len(r.prompt) for w in words_of(r))]  # see test_processors.py
    assert len(requests) > 200
    want = {r.session_id: with_transformers(r) for r in requests}
    truth = {r.session_id: [*r.prompt, *want[r.session_id]] for r in requests}
    for draft in (None, GuessingDraft(rnd, truth, VOCAB)):
        texts = serve(make_engine(TableRuntime(TABLE)), requests, draft)
        assert {name: text.tokens for name, text in texts.items()} == want


def words_of(request: GenerateRequest) -> tuple[tuple[int, ...], ...]:
    return request.sampling.processors.bad_words if request.sampling.processors else ()


class ChoosingRuntime(TableRuntime):
    """Passes for a GPU: the forward chooses tokens, by temperature and seed alone (here: greedy)."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.device = torch.device("cuda")
        self.asked = 0

    def choose(self, parts: Sequence[Rows], rules: Sequence[SamplingParams], vocab_size: int) -> Chosen:
        assert vocab_size == VOCAB and len(rules) == len(parts)
        self.asked += 1
        logits = self.forward(parts)
        return Chosen(logits.argmax(dim=-1).numpy(), torch.zeros(len(logits)), logits)


def test_tokens_that_the_forward_chose_are_replaced_where_there_is_more_to_it() -> None:
    rnd = random.Random(5)
    requests = [random_request(rnd, f"s{k}", [1]) for k in range(120)]
    requests = [replace(r, sampling=replace(r.sampling, temperature=0.0)) for r in requests]
    assert 5 <= sum(r.sampling.processors is None for r in requests) <= 40
    want = serve(make_engine(TableRuntime(TABLE)), requests, None)
    truth = {r.session_id: [*r.prompt, *want[r.session_id].tokens] for r in requests}
    runtime = ChoosingRuntime()
    for draft in (None, GuessingDraft(rnd, truth, VOCAB)):
        got = serve(make_engine(runtime), requests, draft)
        assert {k: (t.tokens, t.logprobs) for k, t in got.items()} == {
            k: (t.tokens, t.logprobs) for k, t in want.items()
        }
    assert runtime.asked


# Where no token can be chosen


def text_of(sampling: SamplingParams, runtime: TableRuntime, draft: bool, **more: Any) -> Text:
    fields = {"session_id": "s", "ticket_key": b"t", "prompt": (1, 2), "resume": (), "max_nodes": 12} | more
    asked = GenerateRequest(sampling=sampling, **{"ending": Ending(frozenset(), 8)} | fields)
    truth = greedy_text([1, 2], 12)
    guesses = GuessingDraft(random.Random(3), {"s": truth}, VOCAB, always=True) if draft else None
    return serve(make_engine(runtime), [asked], guesses)["s"]


def greedy_text(text: list[int], tokens: int) -> list[int]:
    for _ in range(tokens):
        text = [*text, int(TABLE.after(text).argmax())]
    return text


def banned_after(token: int) -> tuple[tuple[int, ...], ...]:
    """Bad words that leave nothing behind ``token``."""
    return tuple((token, other) for other in range(VOCAB))


@pytest.mark.parametrize("draft", [False, True])
def test_a_request_that_leaves_no_token_ends_with_its_own_error(draft: bool) -> None:
    text = greedy_text([1, 2], 8)[2:]
    last = next(k for k in range(2, 8) if text[k] not in text[:k])
    got = text_of(
        SamplingParams(processors=ProcessorParams(bad_words=banned_after(text[last]))), TableRuntime(TABLE), draft
    )
    assert got.tokens == text[: last + 1], "with drafts as without: all that comes before"
    assert got.error and (got.error.reason, got.error.status) == ("NO_TOKEN_ALLOWED", "INVALID_ARGUMENT")
    assert got.ended is None


@pytest.mark.parametrize("draft", [False, True])
def test_what_no_token_may_follow_does_not_matter_behind_the_end(draft: bool) -> None:
    """A stop in an accepted run, and the row below it has nothing left, or is not finite."""
    text = greedy_text([1, 2], 8)[2:]
    last = next(k for k in range(2, 8) if text[k] not in text[:k])
    ending = Ending(frozenset({text[last]}), 8)
    runtime = TableRuntime(TABLE)
    banned = SamplingParams(processors=ProcessorParams(bad_words=banned_after(text[last])))
    got = text_of(banned, runtime, draft, ending=ending)
    assert got.error is None and got.ended and got.ended.reason is FinishReason.STOP
    assert got.tokens == text[: last + 1]

    def poison(position: int, token: int, row: np.ndarray) -> None:
        if token == text[last]:
            row[:] = math.nan

    runtime.poison = poison
    got = text_of(SamplingParams(), runtime, draft, ending=ending)
    assert got.error is None and got.tokens == text[: last + 1]
    assert got.last and (got.last.accepted == len(got.last.tokens)) == draft, "the stop's own row has been computed"


@pytest.mark.parametrize("processors", [None, ProcessorParams(bad_words=((5,),))])
def test_bug_35_not_finite_logits_are_told_even_where_the_token_is_excluded(processors: ProcessorParams | None) -> None:
    runtime = TableRuntime(TABLE)

    def poison(position: int, token: int, row: np.ndarray) -> None:
        row[5] = math.nan if position == 3 else row[5]

    runtime.poison = poison
    got = text_of(SamplingParams(processors=processors), runtime, draft=False)
    assert len(got.tokens) == 2 and got.error and got.error.reason == "NAN_LOGITS"


def test_a_constraint_comes_before_everything_else() -> None:
    """The sampler takes a mask of each row; what it excludes is not brought back by a bias."""
    runtime = TableRuntime(TABLE)
    engine = make_engine(runtime)
    bias = ProcessorParams(logit_bias=((3, 100.0),))
    for name, processors in (("masked", bias), ("only masked", None), ("free", bias)):
        sampling = SamplingParams(processors=processors)
        engine.submit(GenerateRequest(name, b"", (1, 2), (), sampling, Ending(frozenset(), 4), 0))
    parts = engine.planner.plan(0.0, list(engine.sessions.values()), lambda _: 0.0)
    mask = torch.tensor([[1 << 7 | 1 << 9]], dtype=torch.int32)
    (masked,), (plain,), (free,) = engine.sampler.step(parts, {"masked": mask, "only masked": mask})
    want = max((7, 9), key=lambda token: TABLE.after([1, 2])[token])
    assert (masked, plain, free) == (want, want, 3)
    (nothing,), _, _ = engine.sampler.step(parts, {"masked": torch.zeros(1, 1, dtype=torch.int32)})
    assert nothing == NONE_ALLOWED
