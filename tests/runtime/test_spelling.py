"""Ids to spellings and back: nothing is lost at any border, and what cannot be spelled is left out."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from draftwood.errors import FailedPrecondition
from draftwood.runtime.spelling import Speller, pair_specials, spelled, split_character
from tests import tiny_tokenizers as tiny

MAKERS = {"byte_level": tiny.byte_level, "byte_fallback": tiny.byte_fallback}
WORDS = st.sampled_from(
    ["Hello", " world", "  ", "\n", "\n\n", "\t", "\r\n", "\x00", "\x1b[0m", "\u200d", "é", "e\u0301", "東京", "한",
     "🙂", "👩‍👩‍👧‍👦", "🇫🇷", "𠜎", "\ufffd", "<|end|>", "1.5", "▁", "<0x41>", "a", "llo", ",", "'s", "क्षि"]
)  # fmt: skip
TEXTS = st.lists(WORDS | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=8).map("".join)


@cache
def speller(kind: str) -> Speller:
    tokenizer = MAKERS[kind]()
    return Speller(tokenizer, {tokenizer.token_to_id(tiny.SPECIAL): chr(256)}, kind)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, cut=st.floats(0, 1))
def test_any_text_can_be_spelled_from_any_byte_on(kind: str, text: str, cut: float) -> None:
    """Behind any bytes, those of a character's first half too, the tokens spell the rest and nothing else."""
    side, whole = speller(kind), spelled(text)
    at = round(cut * len(whole))
    behind, rest = whole[:at], whole[at:]
    assert side.spell(side.tokens(rest, behind), behind) == rest


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS, end=st.floats(0, 1))
def test_a_text_that_ends_within_a_character_is_spelled_up_to_it(kind: str, text: str, end: float) -> None:
    side, whole = speller(kind), spelled(text)
    part = whole[: round(end * len(whole))]
    complete, begun = split_character(part)
    assert complete + begun == part and len(begun) < 4
    assert complete.encode("latin-1").decode().encode() + begun.encode("latin-1") == part.encode("latin-1")
    assert side.spell(side.tokens(part, ""), "") == complete


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 1 << 30), max_size=12))
def test_what_any_ids_spell_is_what_their_tokenizer_decodes(kind: str, tokens: list[int]) -> None:
    """But for the special token, which has a symbol, and the byte fallback's U+FFFD for a whole run of bad bytes."""
    side, tokenizer = speller(kind), MAKERS[kind]()
    ids = [token % tokenizer.get_vocab_size() for token in tokens]
    ids = [token for token in ids if tokenizer.id_to_token(token) not in (tiny.SPECIAL, "<unk>")]
    try:
        text = side.spell(ids, "").encode("latin-1").decode()
    except UnicodeDecodeError:
        assert "\ufffd" in tokenizer.decode(ids)
    else:
        assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_usual_tokens_of_a_text_are_those_of_its_tokenizer(kind: str) -> None:
    """Where the border is one between tokens, the text is cut as the tokenizer alone would."""
    side, tokenizer = speller(kind), MAKERS[kind]()
    for text in tiny.TEXTS:
        if tiny.SPECIAL in text:
            continue
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert side.tokens(spelled(text), "") == ids
        for k in range(1, len(ids)):
            behind = side.spell(ids[:k], "")
            if not behind:
                continue  # nothing but the mark of a text's beginning, which spells nothing
            assert side.spell([*ids[:k], *side.tokens(spelled(text)[len(behind) :], behind)], "") == spelled(text)


def test_special_tokens_have_symbols_and_their_names_are_text() -> None:
    side, end = speller("byte_level"), tiny.byte_level().token_to_id(tiny.SPECIAL)
    text = spelled("a ") + chr(256) + spelled(tiny.SPECIAL)
    ids = side.tokens(text, "")
    assert ids.count(end) == 1
    assert side.spell(ids, "") == text
    assert side.tokens(chr(257) + spelled("a"), "") == [], "the other side's alone"


def test_pairs_of_special_tokens() -> None:
    ours, theirs = pair_specials({"<s>": 1, "</s>": 2, "<x>": 3}, {"<s>": 7, "<end>": 8, "<y>": 9}, ("</s>", "<end>"))
    assert ours == {1: chr(256), 2: chr(257)} and theirs == {7: chr(256), 8: chr(257)}
    assert pair_specials({"</s>": 2}, {"<end>": 8}, (None, "<end>")) == ({}, {})


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (tiny.word_piece, "tokens that WordPiece decodes are no runs of bytes"),
        (tiny.metaspace, "spell another text"),
        (Tokenizer, "are no runs of bytes"),
    ],
)
def test_tokenizers_that_lose_text_are_refused(make: object, why: str) -> None:
    tokenizer = make() if make is not Tokenizer else _without_decoder()
    with pytest.raises(FailedPrecondition, match=why) as caught:
        Speller(tokenizer, {}, "the draft's tokenizer")
    assert caught.value.reason == "TOKENIZER_UNSUPPORTED" and "the draft's tokenizer" in caught.value.message


def _without_decoder() -> Tokenizer:
    tokenizer = tiny.byte_level()
    tokenizer.decoder = None
    return tokenizer
