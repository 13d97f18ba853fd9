"""Constrained output with trees against plain constrained decoding, and masks of forked matchers against fresh ones.

The target is a table over all that a row sees, so equal histories have equal logits and any difference is our own.
"""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from constrained import (
    END,
    END_TOKEN,
    PAD,
    PALINDROME,
    SIZE,
    START,
    SUM,
    assert_meets,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    mask_of,
    of_session,
    random_constraint,
    save_codec,
)
from guessing import AT_ONCE, GuessingDraft, Text, serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from scripted import ScriptedDraft, run
from table_target import Table, TableRuntime
from tokenizers import decoders

from draftwood.acceptance import Ending, FinishReason
from draftwood.config import VerifierSettings
from draftwood.errors import DraftwoodError, InvalidArgument
from draftwood.parameters import ProcessorParams, SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.model import Chosen
from draftwood.runtime.text import TextCodec
from draftwood.tree import TokenTree
from verifier_service import constraints
from verifier_service.constraints import Constraint, Grammar, GrammarCompiler, MaskFiller, matchers_of
from verifier_service.engine import Engine
from verifier_service.plan import Part
from verifier_service.session import GenerateRequest
from verifier_service.width import StepTimes

ENDS = frozenset([END_TOKEN])
TABLE = Table.random(SIZE)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES = (
    Constraint("json_schema", json.dumps(PERSON)),
    Constraint("json_object", ""),
    Constraint("regex", r"(foo|bar[0-9]{2,5}|日本語?|é{1,3})+( baz)?"),
    Constraint("regex", "a*"),
    Constraint("grammar", SUM),
    Constraint("grammar", PALINDROME),
    Constraint("grammar", 'start: a b\na[max_tokens=3]: /[a-z ]*/\nb: "END"'),
    Constraint("grammar", f'start: "a"+ {START} /[^z]*/'),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return save_codec(tmp_path_factory.mktemp("codec"), byte_level_tokenizer())


@pytest.fixture(scope="module")
def compiler(codec: TextCodec) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(codec, ENDS)
    yield compiler
    compiler.close()


def make_engine(runtime: TableRuntime, vocab: int = SIZE) -> Engine:
    chosen = VerifierSettings(
        width="full", max_nodes=12, max_step_tokens=2048, max_sessions=AT_ONCE, draft_wait_ms=0, page_tokens=16
    )
    times = StepTimes([1, 512], [1.0, 2.0])
    return Engine(runtime, chosen, token_count=vocab, times=times, clock=lambda: 0.0)  # type: ignore[arg-type]


def request_of(name: str, constraint: Constraint | None, **more: Any) -> GenerateRequest:
    fields = {
        "session_id": name, "ticket_key": b"t", "prompt": (3, 4), "resume": (), "sampling": SamplingParams(),
        "ending": Ending(ENDS, 120), "max_nodes": 12, "constraint": constraint,
    } | more  # fmt: skip
    return GenerateRequest(**fields)


def random_request(rnd: random.Random, k: int, seeds: list[int], vocab: int = SIZE) -> GenerateRequest:
    processors = ProcessorParams(
        frequency_penalty=rnd.choice([0.0, 0.3]),
        repetition_penalty=rnd.choice([1.0, 1.3]),
        logit_bias=((rnd.randrange(vocab), 3.0), (END_TOKEN, rnd.choice([-1.0, 2.0]))),
    )
    sampling = SamplingParams(
        temperature=rnd.choice([0.0, 0.0, 0.7, 1.2]),
        top_k=rnd.choice([0, 0, 5]),
        top_p=rnd.choice([1.0, 0.9]),
        seed=rnd.choice(seeds),
        min_p=rnd.choice([0.0, 0.05]),
        processors=processors if rnd.random() < 0.5 else None,
    )
    constraint = (
        random_constraint(rnd, k) if rnd.random() < 0.9 or k % 3 < 2 else None
    )  # some without, in the same steps
    prompt = tuple(rnd.randrange(vocab) for _ in range(rnd.randint(1, 6)))
    logprobs = rnd.choice([None, 2])
    return request_of(f"s{k}", constraint, prompt=prompt, sampling=sampling, top_logprobs=logprobs)


def compiled(compiler: GrammarCompiler, request: GenerateRequest) -> GenerateRequest:
    return compiler.attached(request) if request.constraint else request


def alone(request: GenerateRequest) -> GenerateRequest:
    """The same without drafts."""
    return replace(request, max_nodes=0, ticket_key=b"")


def text_of(codec: TextCodec, text: Text) -> str:
    return codec.texts([text.tokens[:-1]])[0]


def compare(
    rnd: random.Random, codec: TextCodec, requests: list[GenerateRequest], table: Table, vocab: int
) -> tuple[Counter[str], Engine]:
    """Plain against drafted; ended texts meet their constraint. Returns how many of each kind have ended."""
    plain = serve(make_engine(TableRuntime(table, kv_pages=1024), vocab), [alone(r) for r in requests], None)
    truth = {r.session_id: [*r.prompt, *plain[r.session_id].tokens] for r in requests}
    engine = make_engine(TableRuntime(table, kv_pages=1024), vocab)
    texts = serve(engine, requests, GuessingDraft(rnd, truth, vocab))
    ended: Counter[str] = Counter()
    for request in requests:
        text, whole = texts[request.session_id], plain[request.session_id]
        assert text.tokens == whole.tokens, request
        assert text.logprobs == whole.logprobs
        assert text.ended and whole.ended and text.ended.reason is whole.ended.reason
        if request.constraint and text.ended.reason is FinishReason.STOP:
            assert_meets(of_session(request), text_of(codec, text))
            ended[request.constraint.kind] += 1
    return ended, engine


def test_trees_equal_plain_constrained_decoding(codec: TextCodec, compiler: GrammarCompiler) -> None:
    """150 constraints, 100 of them schemas: tokens, log probabilities, reasons; and each text meets its constraint."""
    rnd = random.Random(1)
    seeds = [rnd.getrandbits(64) for _ in range(2)]
    requests = [compiled(compiler, random_request(rnd, k, seeds)) for k in range(150)]
    assert sum(r.constraint is not None and r.constraint.kind == "json_schema" for r in requests) == 100
    ended, engine = compare(rnd, codec, requests, TABLE, SIZE)
    assert ended["json_schema"] >= 80 and ended["regex"] >= 10 and ended["grammar"] >= 5, ended
    assert engine.totals.accepted > 1000, "the drafts were hardly ever right, so the test showed nothing"


def test_drafts_that_are_late_cut_doubled_and_lost_change_nothing(codec: TextCodec, compiler: GrammarCompiler) -> None:
    rnd = random.Random(4)
    requests = [compiled(compiler, random_request(rnd, k, [7])) for k in range(60)]
    plain = serve(make_engine(TableRuntime(TABLE, kv_pages=1024)), [alone(r) for r in requests], None)
    truth = {r.session_id: [*r.prompt, *plain[r.session_id].tokens] for r in requests}
    drafts = [ScriptedDraft(random.Random(seed), truth, link=seed) for seed in (1, 2)]
    engine = make_engine(TableRuntime(TABLE, kv_pages=1024))
    assert run(engine, requests, drafts, at_once=40) == {name: text.tokens for name, text in plain.items()}
    assert engine.totals.accepted > 300 and engine.totals.stale > 100


@pytest.mark.model
def test_trees_equal_plain_constrained_decoding_with_the_tokenizer_of_smollm2() -> None:
    from draftwood.runtime.demo_model import demo_target

    codec, vocab = TextCodec(demo_target()), 49152
    compiler = GrammarCompiler(codec, frozenset([2]))
    rnd = random.Random(2)
    ending = Ending(frozenset([2]), 60)
    requests = [replace(random_request(rnd, k, [7], vocab), ending=ending) for k in range(24)]
    requests = [compiled(compiler, request) for request in requests]
    compiler.close()
    ended, engine = compare(rnd, codec, requests, Table.random(vocab, entries=97), vocab)
    assert ended["json_schema"] >= 8 and ended.total() > ended["json_schema"], ended
    assert engine.totals.accepted > 100


class ChoosingRuntime(TableRuntime):
    """Passes for a GPU: the forward chooses tokens, by temperature and seed alone (here: greedy)."""

    def choose(self, parts: list[Rows], rules: list[SamplingParams], vocab_size: int) -> Chosen:
        logits = self.forward(parts)
        return Chosen(logits.argmax(dim=-1).numpy(), torch.zeros(len(logits)), logits)


def test_tokens_that_the_forward_chose_are_replaced(compiler: GrammarCompiler) -> None:
    requests = [compiled(compiler, request_of(f"s{k}", case)) for k, case in enumerate(CASES)]
    want = serve(make_engine(TableRuntime(TABLE)), requests, None)
    engine = make_engine(ChoosingRuntime(TABLE))
    engine.sampler._on_device = True
    got = serve(engine, requests, None)
    assert {name: text.tokens for name, text in got.items()} == {name: text.tokens for name, text in want.items()}


# Masks


@st.composite
def walks(draw: st.DrawFn) -> tuple[int, list[int], list[tuple[int, int]]]:
    """A case, choices that lead to its committed text, and (parent, choice) of each node."""
    nodes = draw(st.integers(0, 12))
    choice = st.integers(0, 2**16)
    tree = [(draw(st.integers(0, k)), draw(choice)) for k in range(nodes)]
    return draw(st.integers(0, len(CASES) - 1)), draw(st.lists(choice, max_size=10)), tree


def picked(choice: int, allowed: set[int]) -> int:
    """Mostly a token that the grammar allows, sometimes any."""
    return sorted(allowed)[choice % len(allowed)] if allowed and choice % 8 else choice % SIZE


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(walk=walks())
def test_masks_of_a_tree_are_those_of_a_fresh_matcher_fed_the_whole_path(
    compiler: GrammarCompiler, walk: tuple[int, list[int], list[tuple[int, int]]]
) -> None:
    case, choices, nodes = walk
    request = compiled(compiler, request_of("s", CASES[case]))
    grammar = request.grammar
    assert grammar
    committed: list[int] = []
    for choice in choices:
        token = picked(choice, mask_of(grammar.matcher(committed), grammar))
        if grammar.matcher(committed).take(token) and token != END_TOKEN:
            committed.append(token)
    engine = make_engine(TableRuntime(TABLE))
    engine.submit(replace(request, resume=tuple(committed[:3])))
    session = engine.sessions["s"]
    assert session.matcher
    session.matcher.advance(committed[3:])
    paths: list[list[int]] = [[]]
    for parent, choice in nodes:
        allowed = fresh_mask(grammar, committed, paths[parent]) or set()
        paths.append([*paths[parent], picked(choice, allowed)])
    tree = TokenTree(
        np.array([-1, *(parent for parent, _ in nodes)], np.int32),
        np.array([0, *(path[-1] for path in paths[1:])], np.int32),
        np.zeros(len(paths), np.float32),
    )
    rows = Rows([0], 0, tree.token, np.zeros(len(paths), np.int32), np.eye(len(paths), dtype=np.bool_))
    part = Part(session, rows, tree, np.arange(len(paths)), 0)
    masks = MaskFiller(torch.device("cpu")).fill([part])["s"]
    for path, row, matcher in zip(paths, masks.numpy(), matchers_of(part), strict=True):
        got = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        want = fresh_mask(grammar, committed, path)
        assert got == (want or set()) and (matcher is None) == (want is None), (committed, path)
    again = MaskFiller(torch.device("cpu")).fill([part])["s"]
    assert torch.equal(masks, again), "the session's own matcher has moved"


def fresh_mask(grammar: Grammar, committed: list[int], path: list[int]) -> set[int] | None:
    """None: the grammar forbids the path."""
    try:
        return mask_of(grammar.matcher([*committed, *path]), grammar)
    except InvalidArgument:
        return None


@pytest.mark.parametrize("pattern", ["(foo|bar[0-9]{2,5}|日本語?|é{1,3})+( baz)?", "[a-z ]{0,6}x?", r"[^b]{3}\d*"])
def test_masks_of_a_regex_against_partial_matching(codec: TextCodec, compiler: GrammarCompiler, pattern: str) -> None:
    """Another library's word on each token that comes to whole characters. Only forced text may have a mask that is
    smaller: its own tokenization."""
    rnd = random.Random(3)
    grammar = compiled(compiler, request_of("s", Constraint("regex", pattern))).grammar
    assert grammar
    seen = 0
    for _ in range(60):
        text: list[int] = []
        for _ in range(8):
            allowed = mask_of(grammar.matcher(text), grammar)
            whole = codec.texts([text])[0]
            if "�" not in whole:
                assert (END_TOKEN in allowed) == bool(regex.fullmatch(pattern, whole))
                for token in range(3, SIZE):
                    longer = codec.texts([[*text, token]])[0]
                    if "�" not in longer:
                        fits = bool(regex.fullmatch(pattern, longer, partial=True))
                        assert fits or token not in allowed
                        assert token in allowed or not fits or len(allowed) == 1
                        seen += token in allowed
            token = rnd.choice(sorted(allowed))
            if token == END_TOKEN:
                break
            text.append(token)
    assert seen > 200


def test_a_token_may_span_several_symbols(codec: TextCodec, compiler: GrammarCompiler) -> None:
    symbols = 'start: (H | "y") (E | "z") X\nH: "h"\nE: "e"\nX: "x"'
    grammar = compiled(compiler, request_of("s", Constraint("grammar", symbols))).grammar
    assert grammar
    h, y, he, x = (codec.encode(text) for text in ("h", "y", "he", "x"))
    assert len(he) == 1, "the tokenizer is to have a token of two symbols"
    assert mask_of(grammar.matcher(), grammar) == {*h, *y, *he}
    assert mask_of(grammar.matcher(he), grammar) == {*x}, "one way on is left, and forced"
    whole = grammar.matcher([*he, *x])
    assert mask_of(whole, grammar) == ENDS, "the end is all that is left, and forced"
    assert not whole.take(x[0]) and whole.take(END_TOKEN)


def test_special_tokens_come_only_where_a_grammar_names_them(codec: TextCodec, compiler: GrammarCompiler) -> None:
    anything = compiled(compiler, request_of("s", Constraint("regex", "(?s:.*)"))).grammar
    named = compiled(compiler, request_of("s", Constraint("grammar", f'start: {START} "a"'))).grammar
    assert anything and named
    special = {codec.encode(START)[0], codec.encode(PAD)[0]}
    assert not mask_of(anything.matcher(), anything) & special
    assert codec.encode(END) == [END_TOKEN] and END_TOKEN in mask_of(anything.matcher(), anything)
    spelled = [codec.encode(letter)[0] for letter in "<|"]
    assert anything.matcher().take(spelled[0]), "its letters are text like any other"
    assert mask_of(named.matcher(), named) == {codec.encode(START)[0]}
    assert not named.matcher().take(spelled[0])


def test_any_of_the_model_s_end_tokens_ends_a_text(codec: TextCodec) -> None:
    pad, a, b = (codec.encode(text)[0] for text in (PAD, "a", "b"))
    compiler = GrammarCompiler(codec, frozenset([END_TOKEN, pad]))
    grammar = compiled(compiler, request_of("s", Constraint("regex", "ab?"))).grammar
    assert grammar
    assert mask_of(grammar.matcher(), grammar) == {a} | {t for t in codec.encode("ab") if t not in (a, b)}
    assert mask_of(grammar.matcher([a]), grammar) == {b, END_TOKEN, pad}
    assert mask_of(grammar.matcher([a, b]), grammar) == {END_TOKEN, pad}
    for text in ([a], [a, b]):
        for end in (END_TOKEN, pad):
            assert mask_of(grammar.matcher([*text, end]), grammar) == {END_TOKEN, pad}, "a draft's node may be there"
    compiler.close()


def test_byte_fallback(tmp_path: Path) -> None:
    codec = save_codec(tmp_path, byte_fallback_tokenizer())
    compiler = GrammarCompiler(codec, ENDS)
    byte = {value: 3 + value for value in range(256)}
    grammar = compiled(compiler, request_of("s", Constraint("regex", "(é|t| the)+"))).grammar
    assert grammar
    letters = {codec.encode(text)[0] for text in ("t", " ", " the")} | {byte[ord("t")], byte[ord(" ")]}
    assert mask_of(grammar.matcher(), grammar) == {byte[0xC3]} | letters
    assert mask_of(grammar.matcher([byte[0xC3]]), grammar) == {byte[0xA9]}, "no character is broken off"
    assert mask_of(grammar.matcher([byte[0xC3], byte[0xA9]]), grammar) == {END_TOKEN, byte[0xC3]} | letters
    compiler.close()


def test_a_decoder_of_several_steps_is_read_as_it_works(tmp_path: Path) -> None:
    """As converted tokenizers have it, SmolLM2's among them; the library alone takes its tokens for plain text."""
    tokenizer = byte_level_tokenizer()
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    tokenizer.decoder = decoders.Sequence(steps)
    codec = save_codec(tmp_path, tokenizer)
    compiler = GrammarCompiler(codec, ENDS)
    grammar = compiled(compiler, request_of("s", Constraint("regex", "é é"))).grammar
    assert grammar and grammar.matcher(codec.encode("é é"))
    compiler.close()


def test_a_tokenizer_that_the_library_reads_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("he", "a")])
    codec = save_codec(tmp_path, tokenizer)
    with pytest.raises(DraftwoodError, match="to llguidance") as refusal:
        compiled(GrammarCompiler(codec, ENDS), request_of("s", CASES[1]))
    assert (refusal.value.status, refusal.value.reason) == ("FAILED_PRECONDITION", "CONSTRAINT_UNSUPPORTED")
    with pytest.raises(DraftwoodError, match="no end token"):
        compiled(GrammarCompiler(codec, frozenset()), request_of("s", CASES[1]))


# What does not compile

HARD = [{"anyOf": [{"pattern": f"a{k}.*"}, {"pattern": f".*b{k}"}], "type": "string"} for k in range(14)]


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Constraint("json_schema", "{"), "not JSON: .* line 1 column 2"),
        (Constraint("json_schema", '{"a": [}'), "not JSON"),
        (Constraint("json_schema", '{} }, { "lark_grammar": "start: /.*/" '), "not JSON"),
        (Constraint("json_schema", "[" * 30_000), "not JSON"),
        (Constraint("json_schema", "[]"), "schema must be an object or boolean"),
        (Constraint("json_schema", '{"type": "text"}'), "Invalid type: text"),
        (Constraint("json_schema", '{"not": {}}'), 'Unimplemented keys: \\["not"\\]'),
        (Constraint("json_schema", '{"$ref": "https://example.com/x.json"}'), "does not fetch"),
        (Constraint("json_schema", '{"$ref": "#/$defs/x"}'), "does not exist"),
        (Constraint("json_schema", '{"type": "string", "pattern": "(?=a)b"}'), "look-around"),
        (Constraint("json_schema", "false"), "Unsatisfiable"),
        (Constraint("regex", "("), "unclosed group"),
        (Constraint("json_schema", json.dumps({"allOf": HARD})), "Unable to determine"),
        (Constraint("grammar", ""), "Empty grammar"),
        (Constraint("grammar", "start: word"), 'unknown name: "word"'),
        (Constraint("grammar", "start: <|nothing|>"), "unknown special token"),
        (Constraint("grammar", 'word: "a"'), "no start rule"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(
    compiler: GrammarCompiler, constraint: Constraint, why: str
) -> None:
    with pytest.raises(InvalidArgument, match=why) as refusal:
        compiler.attached(request_of("s", constraint))
    assert refusal.value.reason == "CONSTRAINT" and refusal.value.field == f"generation.constraint.{constraint.kind}"
    assert "<state>" not in refusal.value.message and len(refusal.value.message) < 600


async def test_grammars_are_compiled_once_and_the_oldest_is_forgotten(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "KEPT_GRAMMARS", 2)
    compiler = GrammarCompiler(codec, ENDS)
    a, b, c = (request_of(letter, Constraint("regex", letter)) for letter in "abc")
    first = (await compiler.attach(a)).grammar
    assert first and (await compiler.attach(replace(a, session_id="other"))).grammar is first
    await compiler.attach(b)
    await compiler.attach(c)
    assert (await compiler.attach(a)).grammar is not first
    plain = request_of("s", None)
    assert await compiler.attach(plain) is plain
    compiler.close()


# Sessions


def test_a_resumed_text_goes_on_as_it_would_have(compiler: GrammarCompiler) -> None:
    for case in CASES[:6]:
        request = compiled(compiler, request_of("s", case, sampling=SamplingParams(temperature=1.0, seed=5)))
        whole = serve(make_engine(TableRuntime(TABLE)), [request], None)["s"].tokens
        truth = {"s": [*request.prompt, *whole]}
        for cut in range(1, min(len(whole), 30)):
            rest = compiled(compiler, replace(request, resume=tuple(whole[:cut])))
            draft = GuessingDraft(random.Random(cut), truth, SIZE)
            assert serve(make_engine(TableRuntime(TABLE)), [rest], draft)["s"].tokens == whole


def test_tokens_to_resume_from_must_fit(codec: TextCodec, compiler: GrammarCompiler) -> None:
    good = codec.encode('{"')
    request = request_of("s", CASES[0], resume=(*good, codec.encode("}")[0]))
    with pytest.raises(InvalidArgument, match="RESUME") as refusal:
        compiler.attached(request)
    assert refusal.value.field == f"generation.resume_tokens[{len(good)}]"


@pytest.mark.parametrize("drafted", [False, True])
def test_a_text_may_not_end_early(compiler: GrammarCompiler, drafted: bool) -> None:
    """min_tokens beyond the only text there is: it is delivered, then nothing is left to choose."""
    word = Constraint("regex", "the")
    held = ProcessorParams(min_tokens=9, end_tokens=(END_TOKEN,))
    request = compiled(compiler, request_of("s", word, sampling=SamplingParams(processors=held)))
    whole = serve(make_engine(TableRuntime(TABLE)), [compiled(compiler, request_of("s", word))], None)["s"]
    truth = {"s": [*request.prompt, *whole.tokens]}
    draft = GuessingDraft(random.Random(1), truth, SIZE, always=True) if drafted else None
    text = serve(make_engine(TableRuntime(TABLE)), [request], draft)["s"]
    assert whole.tokens[-1] == END_TOKEN and text.tokens == whole.tokens[:-1]
    assert text.error and text.error.reason == "NO_TOKEN_ALLOWED"


@pytest.mark.parametrize("limit", ["step_max_items", "max_items_in_row"])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_limit_of_the_library_ends_the_session_and_not_the_text(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, drafted: bool, limit: str
) -> None:
    """The library would allow the end tokens then; a text that is not whole must not end as if it were.

    One limit is met by a mask, the other when a token is taken that the mask allowed.
    """
    monkeypatch.setattr(constraints, "LIMITS", LLParserLimits(verbose_errors=False, **{limit: 40}))
    compiler = GrammarCompiler(codec, ENDS)
    ambiguous = Constraint("grammar", 'start: e\ne: e e | "a" | "b"')
    endless = SamplingParams(temperature=1.0, seed=3, processors=ProcessorParams(logit_bias=((END_TOKEN, -100.0),)))
    request = compiled(compiler, request_of("s", ambiguous, sampling=endless))
    plain = text = serve(make_engine(TableRuntime(TABLE)), [request], None)["s"]
    if drafted:
        draft = GuessingDraft(random.Random(1), {"s": [*request.prompt, *plain.tokens]}, SIZE, always=True)
        text = serve(make_engine(TableRuntime(TABLE)), [request], draft)["s"]
        assert text.accepted
    assert text.error and text.error.reason == "CONSTRAINT_LIMIT" and text.ended is None
    assert text.tokens == plain.tokens and END_TOKEN not in text.tokens and " items" in text.error.message
    compiler.close()


def test_the_end_of_a_session_frees_its_matchers(compiler: GrammarCompiler) -> None:
    engine = make_engine(TableRuntime(TABLE))
    request = compiled(compiler, request_of("s", CASES[1], sampling=SamplingParams(temperature=1.0, seed=1)))
    engine.open_link(1, "guessing")
    engine.submit(request)
    draft = GuessingDraft(random.Random(1), {"s": list(range(60))}, SIZE)
    draft.join(engine, "s", 1)
    for _ in range(3):
        draft.hear(engine, engine.step())
    matcher = weakref.ref(engine.sessions["s"].matcher)
    gc.collect()
    assert sum(type(thing) is constraints.Matcher for thing in gc.get_objects()) <= 1, "forks are left"
    engine.cancel("s")
    gc.collect()
    assert matcher() is None


def test_sessions_without_a_constraint_pay_nothing() -> None:
    engine = make_engine(TableRuntime(TABLE))
    serve(engine, [request_of("s", None)], None)
    assert engine.masks._executor is None
