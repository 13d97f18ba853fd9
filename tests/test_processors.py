"""Each processor against transformers' own, or the formula that vLLM documents; and that a tree's rows are plain's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
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

from draftwood.errors import InvalidArgument
from draftwood.parameters import ProcessorParams, SamplingParams, check_bad_word
from draftwood.processors import History, allow_only, process
from draftwood.sampling import process_logits, token_logprobs
from draftwood.tree import TokenTree

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
# Prompt and output. At least as long as a bad word: transformers overlooks one that starts with the whole text.
TEXTS = st.lists(TOKENS, min_size=3, max_size=8), st.lists(TOKENS, max_size=12)
# Quarters and eighths: sums are exact, and zeros and ties occur.
ROWS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
PENALTIES = st.sampled_from([-2.0, -0.7, 0.0, 0.3, 1.1, 2.0])
FACTORS = st.sampled_from([0.01, 0.5, 1.0, 1.3, 100.0])
BIASES = st.dictionaries(TOKENS, st.integers(-800, 800).map(lambda n: n / 8), max_size=4)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=4)


def plain(params: ProcessorParams, prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
    """The row as plain decoding processes it: a tree of the anchor alone."""
    text = [*prompt, *output]
    return process(logits[None], History(params, text, len(prompt)), TokenTree.root(text[-1]))[0]


def oracle(params: ProcessorParams, prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
    """transformers' processors in the order of its ``generate``; frequency and presence as vLLM documents them."""
    ids, row = torch.tensor([[*prompt, *output]]), logits[None].clone()
    if params.logit_bias:
        row = SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias})(ids, row)
    row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, row)
    row = frequency_and_presence(row[0], output, params.frequency_penalty, params.presence_penalty)[None]
    if params.bad_words:
        row = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(ids, row)
    if params.end_tokens:
        row = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, list(params.end_tokens))(ids, row)
    return row[0]


def frequency_and_presence(row: Tensor, output: Sequence[int], frequency: float, presence: float) -> Tensor:
    """logits -= frequency * counts; logits -= presence * (counts > 0)."""
    counts = torch.zeros(len(row), dtype=row.dtype)
    for token in output:
        counts[token] += 1
    return row - frequency * counts - presence * (counts > 0).to(row.dtype)


def same(ours: Tensor, theirs: Tensor, *, exact: bool = True) -> bool:
    if exact:
        return torch.equal(ours, theirs)
    excluded = theirs.isneginf()
    close = torch.isclose(ours, theirs, rtol=1e-13, atol=1e-13)
    return torch.equal(ours.isneginf(), excluded) and bool((close | excluded).all())


def row_of(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Each alone


@settings(max_examples=200, deadline=None)
@given(*TEXTS, ROWS, FACTORS)
def test_repetition_penalty_is_that_of_transformers(
    prompt: list[int], output: list[int], values: list[float], factor: float
) -> None:
    params, logits = ProcessorParams(repetition_penalty=factor), row_of(values)
    theirs = RepetitionPenaltyLogitsProcessor(factor)(torch.tensor([[*prompt, *output]]), logits[None].clone())
    assert same(plain(params, prompt, output, logits), theirs[0])


@settings(max_examples=200, deadline=None)
@given(*TEXTS, ROWS, PENALTIES, PENALTIES)
def test_frequency_and_presence_penalties_are_the_documented_formula_over_the_output(
    prompt: list[int], output: list[int], values: list[float], frequency: float, presence: float
) -> None:
    params, logits = ProcessorParams(presence, frequency), row_of(values)
    theirs = frequency_and_presence(logits, output, frequency, presence)
    assert same(plain(params, prompt, output, logits), theirs, exact=False)


@settings(max_examples=100, deadline=None)
@given(*TEXTS, ROWS, BIASES.filter(bool))
def test_logit_bias_is_that_of_transformers(
    prompt: list[int], output: list[int], values: list[float], bias: dict[int, float]
) -> None:
    params, logits = ProcessorParams(logit_bias=tuple(bias.items())), row_of(values)
    processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    theirs = processor(torch.tensor([[*prompt, *output]]), logits[None].clone())
    assert same(plain(params, prompt, output, logits), theirs[0])


@settings(max_examples=300, deadline=None)
@given(*TEXTS, ROWS, WORDS.filter(bool), st.booleans())
def test_bad_words_are_those_of_transformers(
    prompt: list[int], output: list[int], values: list[float], words: list[list[int]], provoked: bool
) -> None:
    text = [*prompt, *output]
    if provoked:  # the text ends with the start of a word
        words = [[*text[-2:], words[0][-1]], *words]
    params, logits = ProcessorParams(bad_words=tuple(map(tuple, words))), row_of(values)
    theirs = NoBadWordsLogitsProcessor(words)(torch.tensor([text]), logits[None].clone())[0]
    assert same(plain(params, prompt, output, logits), theirs)
    assert theirs.isneginf().any() or not provoked


def test_a_bad_word_may_start_with_the_whole_text() -> None:
    params = ProcessorParams(bad_words=((3, 4, 5), (4, 6), (8, 3, 4, 7), (9,)))
    assert plain(params, [3], [4], torch.zeros(VOCAB)).isneginf().nonzero().flatten().tolist() == [5, 6, 9]


@settings(max_examples=200, deadline=None)
@given(*TEXTS, ROWS, st.integers(0, 14), st.lists(TOKENS, min_size=1, max_size=3, unique=True))
def test_min_tokens_is_that_of_transformers(
    prompt: list[int], output: list[int], values: list[float], least: int, ends: list[int]
) -> None:
    params, logits = ProcessorParams(min_tokens=least, end_tokens=tuple(ends)), row_of(values)
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), least, ends)
    theirs = processor(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]
    assert same(plain(params, prompt, output, logits), theirs)
    assert History(params, [*prompt, *output], len(prompt)).active == (len(output) < least)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, VOCAB),
    st.sampled_from([0.3, 0.8, 1.0]),
    st.sampled_from([0.0, 0.013, 0.1, 0.5, 1.0]),
)
def test_temperature_top_k_top_p_and_min_p_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(3, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    theirs = warpers(torch.zeros(3, 1, dtype=torch.int64), logits.clone())
    ours = process_logits(logits, SamplingParams(temperature, top_k, top_p, min_p=min_p))
    for row, other in zip(ours, theirs, strict=True):
        assert same(row, other - other.amax(), exact=False)


@pytest.mark.parametrize(("min_p", "kept"), [(1.0, 2), (0.5, 3), (0.25, 4), (0.0, 5)])
def test_min_p_keeps_what_lies_on_the_bound(min_p: float, kept: int) -> None:
    logits = torch.tensor([[0.0, 0.0, math.log(0.5), math.log(0.25), -9.0]], dtype=torch.float64)
    processed = process_logits(logits, SamplingParams(1.0, min_p=min_p))
    assert processed.isfinite().sum() == kept
    assert SamplingParams(1.0, min_p=min_p).truncates == (min_p > 0) and not SamplingParams(min_p=min_p).truncates


# All together


PARAMS = st.builds(
    lambda presence, frequency, factor, bias, words, least, ends: ProcessorParams(
        presence, frequency, factor, tuple(bias.items()), tuple(map(tuple, words)), least, tuple(ends)
    ),
    PENALTIES,
    PENALTIES,
    FACTORS,
    BIASES,
    WORDS,
    st.integers(0, 14),
    st.lists(TOKENS, max_size=2, unique=True),
)


@settings(max_examples=400, deadline=None)
@given(PARAMS, *TEXTS, ROWS)
def test_all_processors_in_the_order_of_transformers(
    params: ProcessorParams, prompt: list[int], output: list[int], values: list[float]
) -> None:
    logits = row_of(values)
    ours, theirs = plain(params, prompt, output, logits), oracle(params, prompt, output, logits)
    assert same(ours, theirs, exact=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@settings(max_examples=200, deadline=None)
@given(params=PARAMS, prompt=TEXTS[0], output=TEXTS[1], data=st.data())
def test_a_row_of_a_tree_is_bit_for_bit_the_row_of_plain_decoding(
    dtype: torch.dtype, params: ProcessorParams, prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    """Any tree, tokens repeated across its branches; the history grows commit by commit, and is used in between."""
    text, history = list(prompt), History(params, shared := list(prompt), len(prompt))
    for cut in sorted(data.draw(st.sets(st.integers(0, len(output)), max_size=3)) | {len(output)}):
        shared += output[len(shared) - len(prompt) : cut]
        process(torch.zeros(1, VOCAB), history, TokenTree.root(shared[-1]))
    text += output
    parents = [-1, *(data.draw(st.integers(0, k)) for k in range(data.draw(st.integers(0, 8))))]
    tokens = [text[-1], *(data.draw(TOKENS) for _ in parents[1:])]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = (torch.randn(len(parents), VOCAB, dtype=torch.float64, generator=generator) * 3).to(dtype)
    processed = process(logits, history, TokenTree.of(parents, tokens))
    assert processed.dtype == torch.promote_types(dtype, torch.float32)
    for node in range(len(parents)):
        path, at = [], node
        while at:
            path.append(tokens[at])
            at = parents[at]
        assert torch.equal(processed[node], plain(params, prompt, [*output, *path[::-1]], logits[node]))


def test_bug_8_a_token_on_two_branches_counts_once_on_each_and_never_for_a_sibling() -> None:
    """7 on both branches, twice on one; 9 below a sibling only. Prompt [7], output [5]."""
    params = ProcessorParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=2.0)
    history = History(params, [7, 5], 1)
    #         0: 5   1: 7   2: 9   3: 7 (below 1)   4: 7 (below 2)
    tree = TokenTree.of([-1, 0, 0, 1, 2], [5, 7, 9, 7, 7])
    rows = process(torch.full((5, VOCAB), 4.0), history, tree)
    assert rows[:, 7].tolist() == [2.0, 0.5, 2.0, 0.0, 0.5]  # 4 / 2, then 1 + 0.5 n off for n in the output
    assert rows[:, 9].tolist() == [4.0, 4.0, 0.5, 4.0, 0.5]
    assert rows[:, 5].tolist() == [0.5] * 5
    assert rows[:, 0].tolist() == [4.0] * 5
    again = process(torch.full((5, VOCAB), 4.0), history, tree)
    assert torch.equal(rows, again), "what was only guessed is not counted"


def test_the_defaults_change_nothing_and_the_logits_given_are_left_alone() -> None:
    logits = torch.randn(1, VOCAB)
    history = History(ProcessorParams(), [1, 2], 1)
    assert not history.active
    assert torch.equal(process(logits, history, TokenTree.root(2)), logits)
    before = logits.clone()
    harsh = History(ProcessorParams(2.0, 2.0, 9.0, ((3, 5.0),), ((4,), (2, 6))), [1, 2], 1)
    assert not torch.equal(process(logits, harsh, TokenTree.root(2)), logits)
    assert torch.equal(logits, before)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 100), st.integers(0, 2**32))
def test_a_constraint_excludes_all_but_its_tokens(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = rng.random((3, vocab)) < 0.5
    bits = np.zeros((3, -(-vocab // 32) * 32), np.bool_)
    bits[:, :vocab] = wanted
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    logits = torch.randn(3, vocab)
    rows = allow_only(logits, words)
    assert torch.equal(rows.isfinite(), torch.from_numpy(wanted))
    assert torch.equal(rows[rows.isfinite()], logits[rows.isfinite()])


# Log probabilities


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_log_probabilities_are_those_of_the_raw_row_alone_or_in_a_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(37, 1003, dtype=torch.float64, generator=generator) * 3).to(dtype)
    tokens = torch.randint(1000, (37,), generator=generator).tolist()
    own, top, values = token_logprobs(logits, tokens, 5, vocab_size=1000)
    for k, token in enumerate(tokens):
        alone = token_logprobs(logits[k : k + 1], [token], 5, vocab_size=1000)
        assert all(torch.equal(a[0], b[k]) for a, b in zip(alone, (own, top, values), strict=True))
        want = logits[k, :1000].double().log_softmax(-1)
        assert own[k].item() == pytest.approx(want[token].item(), abs=1e-5)
        assert values[k].tolist() == pytest.approx(want.sort(descending=True).values[:5].tolist(), abs=1e-5)
        assert want[top[k]].tolist() == pytest.approx(values[k].tolist(), abs=1e-5)


def test_likeliest_tokens_of_equal_probability_come_by_id() -> None:
    own, top, values = token_logprobs(torch.tensor([[0.0, 2.0, 0.0, 2.0, -math.inf]]), [4], 5)
    assert top.tolist() == [[1, 3, 0, 2, 4]]
    assert own.tolist() == [-math.inf] and values[0, 4].item() == -math.inf
    assert token_logprobs(torch.zeros(2, 4), [1, 2], 0)[1].shape == (2, 0)


# Validation


@pytest.mark.parametrize(
    ("params", "reason", "field"),
    [
        *((ProcessorParams(presence_penalty=v), "SAMPLING", "presence_penalty") for v in (-2.1, 2.1, math.nan)),
        *((ProcessorParams(frequency_penalty=v), "SAMPLING", "frequency_penalty") for v in (-2.1, 2.1, math.inf)),
        *(
            (ProcessorParams(repetition_penalty=v), "SAMPLING", "repetition_penalty")
            for v in (-1.0, 0.0, 0.009, 101.0, math.nan, math.inf)
        ),
        *(
            (ProcessorParams(logit_bias=((3, v),)), "SAMPLING", "logit_bias[3]")
            for v in (-100.5, 100.5, math.nan, -math.inf)
        ),
        (ProcessorParams(logit_bias=((VOCAB, 1.0),)), "TOKEN_OUT_OF_VOCABULARY", f"logit_bias[{VOCAB}]"),
        (ProcessorParams(logit_bias=((-1, 1.0),)), "TOKEN_OUT_OF_VOCABULARY", "logit_bias[-1]"),
        (ProcessorParams(logit_bias=tuple((k, 0.0) for k in range(1025))), "SAMPLING", "logit_bias"),
    ],
)
def test_values_out_of_range_are_refused_by_name(params: ProcessorParams, reason: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(processors=params).validate(VOCAB)
    assert (caught.value.reason, caught.value.field) == (reason, f"sampling.{field}")


def test_values_at_the_bounds_are_accepted() -> None:
    for sign in (-1, 1):
        ProcessorParams(2.0 * sign, 2.0 * sign, 0.01, ((0, 100.0 * sign), (VOCAB - 1, 0.0))).validate(VOCAB)
    ProcessorParams(repetition_penalty=100.0).validate(VOCAB)
    check_bad_word([VOCAB - 1] * 64, VOCAB, "bad_words[0]")


@pytest.mark.parametrize("word", [[], [1] * 65])
def test_bad_words_of_no_or_too_many_tokens_are_refused(word: list[int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_bad_word(word, VOCAB, "bad_words[2]")
    assert (caught.value.reason, caught.value.field) == ("SAMPLING", "sampling.bad_words[2]")
    assert str(len(word)) in caught.value.message and "64" in caught.value.message
