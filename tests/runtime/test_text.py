"""Ids to delivered text: characters, stop strings, ends and resumption, against oracles that see the whole text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from draftwood.acceptance import Emission, emit
from draftwood.runtime.text import PieceStream, TextStream
from tests.endings import LENGTH, STOP, WORDS, Asked, plain, words
from tests.tiny_tokenizers import SPECIAL, TEXTS, TOKENIZERS, decode


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return TOKENIZERS[kind]()


@dataclass
class Delivered:
    """What a client has, and what ended it."""

    tokens: list[int]
    pieces: list[str]
    last: Emission

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def deliver(tokenizer: Tokenizer, asked: Asked, runs: Sequence[Sequence[int]], resume: Sequence[int] = ()) -> Delivered:
    """Serves accepted runs as the verifier does, up to the end of the text; ``resume`` is had already."""
    text = asked.text(tokenizer)
    last = emit(resume, 0, asked.ending, text)
    text.take()
    got = Delivered([], [], last)
    for run in runs:
        if last.finish:
            break
        last = emit(run, len(resume) + len(got.tokens), asked.ending, text)
        got.tokens += run[: last.count]
        got.pieces += text.take()
    got.last = last
    assert len(got.pieces) == len(got.tokens)
    return got


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Runs of these sizes, the last one has the rest."""
    ends = [*itertools.accumulate(sizes)]
    return [list(tokens[a:b]) for a, b in zip([0, *ends], [*ends, len(tokens)], strict=True) if tokens[a:b]]


def random_cut(tokens: Sequence[int], rng: random.Random, longest: int = 8) -> list[list[int]]:
    sizes = []
    while sum(sizes) < len(tokens):
        sizes.append(rng.randint(1, longest))
    return cut(tokens, sizes[:-1])


def check(asked: Asked, runs: Sequence[Sequence[int]]) -> Delivered:
    """Delivered and plain agree on tokens, reason, cause and text, and each piece came as early as it could."""
    tokens = [token for run in runs for token in run]
    want, got = plain(asked, tokens, [WORDS[token] for token in tokens]), deliver(words(), asked, runs)
    assert (len(got.tokens), got.last.finish, got.last.stop) == (want.count, want.finish, want.stop)
    assert got.tokens == tokens[: want.count]
    beginnings = {string[:size] for string in asked.stop for size in range(1, len(string))}
    for count in range(1, want.count + (want.finish is None)):
        so_far = plain(asked, tokens[:count], [WORDS[token] for token in tokens]).text
        held = max((len(b) for b in beginnings if so_far.endswith(b)), default=0) if not asked.include else 0
        assert "".join(got.pieces[:count]) == so_far[: len(so_far) - held]
    if want.finish:
        assert got.text == want.text
    return got


TOKEN = st.integers(0, len(WORDS) - 1)
RUNS = st.lists(st.lists(TOKEN, min_size=1, max_size=8), min_size=1, max_size=6)
ASKED = st.builds(
    Asked,
    st.frozensets(TOKEN, max_size=2),
    st.lists(st.text("ab.", min_size=1, max_size=9), max_size=4, unique=True).map(tuple),
    st.integers(1, 30),
    st.booleans(),
    st.sampled_from([0, 0, 1, 3, 8]),
)


@settings(max_examples=1500, deadline=None)
@given(ASKED, RUNS)
def test_bugs_13_to_16_any_runs_any_ending_equal_the_plain_decoder(asked: Asked, runs: list[list[int]]) -> None:
    check(asked, runs)


@settings(max_examples=500, deadline=None)
@given(ASKED, RUNS, st.data())
def test_bug_16_a_stop_string_taken_from_the_text_itself(
    asked: Asked, runs: list[list[int]], data: st.DataObject
) -> None:
    """So that most texts do end by one: over one to four tokens, wherever the runs are cut."""
    tokens = [token for run in runs for token in run]
    first = data.draw(st.integers(0, len(tokens) - 1))
    spanned = "".join(WORDS[token] for token in tokens[first : first + data.draw(st.integers(1, 4))])
    begin = data.draw(st.integers(0, len(WORDS[tokens[first]]) - 1))
    end = data.draw(st.integers(begin + 1, len(spanned)))
    check(
        Asked(
            asked.stop_token_ids, (*asked.stop, spanned[begin:end]), asked.max_tokens, asked.include, asked.min_tokens
        ),
        runs,
    )


@pytest.mark.parametrize("least", range(6))
def test_stop_strings_count_behind_min_tokens(least: int) -> None:
    """Those that are complete earlier are text like any other; one that begins earlier and ends behind it counts."""
    tokens = [WORDS.index(word) for word in ("a", ".", "b", "a", ".", "b")]
    got = check(Asked(stop=("a.",), min_tokens=least), [tokens])
    assert got.text == ("" if least < 2 else "a.b" if least < 5 else "a.ba.b")
    assert len(got.tokens) == (2 if least < 2 else 5 if least < 5 else 6)


FILLER = WORDS.index("b")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("span", [1, 2, 3, 4])
@pytest.mark.parametrize("length", range(1, 9))
def test_bug_16_stop_string_at_every_place_of_a_run_and_over_two_steps(length: int, span: int, include: bool) -> None:
    """Every run length, every place of the string's first token in it: inside, at the end, and into the next run."""
    parts = {1: ["a.a"], 2: ["a", ".a"], 3: ["a", ".", "a"], 4: ["a", ".", "a", "."]}[span]
    string = "".join(parts)
    for place in range(length):
        tokens = [FILLER] * place + [WORDS.index(part) for part in parts] + [FILLER] * 8
        got = check(Asked(stop=(string,), include=include), cut(tokens, [length]))
        assert (got.last.finish, got.last.stop) == (STOP, string)
        assert got.text == "b" * place + (string if include else "")
        assert len(got.tokens) == place + span


@pytest.mark.parametrize("include", [False, True])
def test_bug_16_stop_string_in_the_middle_of_a_token(include: bool) -> None:
    """The token is delivered, its text only up to the string (or with it); nothing of what follows the string."""
    got = check(Asked(stop=("a",), include=include), [[FILLER, WORDS.index("bab"), FILLER]])
    assert got.tokens == [FILLER, WORDS.index("bab")]
    assert got.pieces == ["b", "ba" if include else "b"]


@pytest.mark.parametrize("end", ["cap", "stop token", "none"])
def test_bug_16_what_was_held_back_is_flushed_when_it_cannot_match_any_more(end: str) -> None:
    a, dot, b = WORDS.index("a"), WORDS.index("."), WORDS.index("b")
    if end == "cap":
        got = check(Asked(stop=("a.aa",), max_tokens=3), [[b, a, dot]])
        assert got.pieces == ["b", "", "a."]
    elif end == "stop token":
        got = check(Asked(frozenset({WORDS.index("..")}), ("a.aa",)), [[b, a, dot, WORDS.index("..")]])
        assert got.pieces == ["b", "", "", "a."]
    else:
        got = check(Asked(stop=("a.aa",)), [[b, a, dot], [b]])
        assert got.pieces == ["b", "", "", "a.b"]


@pytest.mark.parametrize("length", range(1, 9))
def test_bug_13_end_token_at_every_place_of_a_run(length: int) -> None:
    run = list(range(length))
    for place in range(length):
        got = check(Asked(frozenset({run[place]})), [run, run])
        assert got.tokens == run[: place + 1]
        assert got.text == "".join(WORDS[:place]), "the stop token has no text"
        with_it = check(Asked(frozenset({run[place]}), include=True), [run, run])
        assert with_it.text == "".join(WORDS[: place + 1])


@pytest.mark.parametrize("kind", ["stop token", "stop string"])
@pytest.mark.parametrize("length", range(1, 9))
def test_bug_14_stop_and_cap_at_every_place_of_a_run(length: int, kind: str) -> None:
    """The earlier one wins; at the same token it is the stop."""
    marked = WORDS.index("...")
    for place, cap in itertools.product(range(length), range(1, length + 1)):
        run = [FILLER] * place + [marked] + [FILLER] * (length - place - 1)
        asked = Asked(frozenset({marked}), (), cap) if kind == "stop token" else Asked(stop=("..",), max_tokens=cap)
        got = check(asked, [run])
        assert got.last.finish is (STOP if place + 1 <= cap else LENGTH)
        assert len(got.tokens) == min(place + 1, cap)


@settings(max_examples=300, deadline=None)
@given(RUNS, st.integers(1, 48), st.booleans())
def test_bug_15_exactly_max_tokens_with_a_piece_each(runs: list[list[int]], cap: int, searching: bool) -> None:
    total = sum(map(len, runs))
    got = check(Asked(stop=("no such text",) if searching else (), max_tokens=cap), runs)
    assert len(got.tokens) == len(got.pieces) == min(cap, total)
    assert got.last.finish is (LENGTH if cap <= total else None)


# Characters


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_bug_18_joined_pieces_are_the_full_decode_for_300_chunkings(kind: str, text: str) -> None:
    """With and without a stop string that never comes, with the end by cap and by stop token."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole, end = decode(tokenizer, ids), tokenizer.token_to_id(SPECIAL)
    rng = random.Random(text)
    seen = set()
    for chunking in range(300):
        stop = ("🙂é never",) if chunking % 2 else ()
        capped = Asked(stop=stop, max_tokens=len(ids))
        got = deliver(tokenizer, capped, random_cut(ids, rng))
        assert got.text == whole and got.last == Emission(got.last.count, LENGTH)
        seen.add((chunking % 2, tuple(got.pieces)))
        if end not in ids:
            stopped = deliver(tokenizer, Asked(frozenset({end}), stop), random_cut([*ids, end], rng))
            assert stopped.text == whole and stopped.last.stop == end
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in got.pieces)
    assert len(seen) <= 2, "how the runs are cut has changed a piece"


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_bug_18_any_ids_are_text(kind: str, skip: bool) -> None:
    """2,000 random id sequences: half characters, invalid bytes, special tokens anywhere."""
    tokenizer = tokenizer_of(kind)
    rng = random.Random(kind)
    spoiled = 0
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randint(1, 30))]
        stream = PieceStream(tokenizer, skip)
        got = "".join([*map(stream.feed, ids), stream.rest()])
        whole = decode(tokenizer, ids, skip=skip)
        if kind == "byte_fallback" and got != whole:
            spoiled += 1
            assert "\ufffd" in whole
            left = iter(got)
            assert all(c in left for c in whole.replace("\ufffd", "")), "a character is lost"
        else:
            assert got == whole
    assert (spoiled > 0) == (kind == "byte_fallback")


def test_bytes_that_spoil_a_character_given_out_before_do_not_end_the_stream() -> None:
    """The tokenizers library raises "Invalid prefix encountered" here."""
    tokenizer = tokenizer_of("byte_fallback")
    ids = [tokenizer.token_to_id(token) for token in ("a", "<0xC3>", "<0xBC>", "<0xFF>", "b", "c")]
    stream = PieceStream(tokenizer)
    assert [stream.feed(token) for token in ids] == ["a", "", "ü", "", "\ufffdb", "c"]


def test_special_tokens_are_text_if_they_are_asked_for() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode(f"a{SPECIAL}b").ids
    shown, hidden = TextStream(PieceStream(tokenizer, False)), TextStream(PieceStream(tokenizer, True))
    for token in ids:
        shown.feed(token, None)
        hidden.feed(token, None)
    assert (shown.take(), hidden.take()) == (("a", SPECIAL, "b"), ("a", "", "b"))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bug_16_stop_string_of_characters_that_are_several_tokens(kind: str) -> None:
    """An emoji is four bytes, each a token: the string is complete with its last byte, in any runs."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("ab東🦊c", add_special_tokens=False).ids
    rng = random.Random(0)
    for stop, text in (("🦊", "ab東"), ("東🦊", "ab"), ("b東", "a"), ("🦊c", "ab東")):
        for include in (False, True):
            results = set()
            for _ in range(50):
                got = deliver(tokenizer, Asked(stop=(stop,), include=include), random_cut(ids, rng))
                assert got.text == text + (stop if include else "") and got.last.stop == stop
                results.add(tuple(got.tokens))
            (tokens,) = results
            assert stop in decode(tokenizer, tokens) and stop not in decode(tokenizer, tokens[:-1])


def test_stop_string_that_only_the_end_of_the_text_makes_visible() -> None:
    """The character before an incomplete one is not printable yet; at the cap it is, and the string in it counts."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b\ufffd": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    got = deliver(tokenizer, Asked(stop=("b",), max_tokens=2), [[0, 1]])
    assert (got.text, got.last) == ("a", Emission(2, STOP, "b"))


# Resumption


@settings(max_examples=300, deadline=None)
@given(ASKED, RUNS, st.randoms(use_true_random=False))
def test_resumed_at_every_token_the_pieces_go_on_as_they_would_have(
    asked: Asked, runs: list[list[int]], rng: random.Random
) -> None:
    """State by value: held-back text is neither lost nor doubled, wherever a verifier was lost."""
    tokens = [token for run in runs for token in run]
    whole = deliver(words(), asked, runs)
    for have in range(len(whole.tokens)):
        rest = deliver(words(), asked, random_cut(tokens[have:], rng), resume=tokens[:have])
        assert rest.tokens == whole.tokens[have:] and rest.pieces == whole.pieces[have:]
        assert (rest.last.finish, rest.last.stop) == (whole.last.finish, whole.last.stop)
    if whole.last.finish:
        again = emit(whole.tokens, 0, asked.ending, asked.text(words()))
        assert again == Emission(len(whole.tokens), whole.last.finish, whole.last.stop)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_resumed_at_every_token_no_character_is_lost(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    asked = Asked(stop=(text[-3:] + "!", text[1:4] + "!"), max_tokens=len(ids))
    whole = deliver(tokenizer, asked, [ids])
    assert whole.text == decode(tokenizer, ids)
    for have in range(len(ids)):
        rest = deliver(tokenizer, asked, [[token] for token in ids[have:]], resume=ids[:have])
        assert rest.pieces == whole.pieces[have:]
