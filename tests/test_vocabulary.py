"""Bug kind 34: vocabularies that differ by padding (harmless) and by real tokens (fatal)."""

from __future__ import annotations

import hashlib

import pytest

from draftwood.errors import FailedPrecondition
from draftwood.vocabulary import Fingerprint, Vocabulary, check

TOKENS = ("<s>", "</s>", "the", " cat", "\u20ac", "\n", "")
SPECIAL = frozenset({0, 1})
TARGET = Vocabulary(TOKENS, SPECIAL, vocab_size=7)


def fits(a: Vocabulary, b: Vocabulary) -> bool:
    """Both sides check, as at a handshake; either may refuse."""
    try:
        check(a, b.fingerprint())
        check(b, a.fingerprint())
    except FailedPrecondition as error:
        assert error.reason == "TOKENIZER_MISMATCH"
        return False
    return True


SWAPPED = (*TOKENS[:2], TOKENS[3], TOKENS[2], *TOKENS[4:])
FITTING = {
    "equal": Vocabulary(TOKENS, SPECIAL, 7),
    "padded": Vocabulary(TOKENS, SPECIAL, 64),
    "extra special tokens": Vocabulary((*TOKENS, "<pad>", "<mask>"), SPECIAL | {7, 8}, 9),
    "extra special tokens, padded": Vocabulary((*TOKENS, "<pad>"), SPECIAL | {7}, 64),
    "extra ordinary tokens": Vocabulary((*TOKENS, "dog"), SPECIAL, 8),
    "fewer tokens": Vocabulary(TOKENS[:5], SPECIAL, 5),
}
DIFFERENT = {
    "same size, two ids swapped": Vocabulary(SWAPPED, SPECIAL, 7),
    "two ids swapped, padded": Vocabulary(SWAPPED, SPECIAL, 64),
    "two ids swapped, extra tokens": Vocabulary((*SWAPPED, "<pad>"), SPECIAL | {7}, 8),
    "two ids swapped, fewer tokens": Vocabulary(SWAPPED[:5], SPECIAL, 7),
    "last shared token differs": Vocabulary((*TOKENS[:6], "x"), SPECIAL, 7),
    "token boundaries moved": Vocabulary((*TOKENS[:2], "the ", "cat", *TOKENS[4:]), SPECIAL, 7),
    "special inside the shared range": Vocabulary(TOKENS, SPECIAL | {3}, 7),
    "special missing inside the shared range": Vocabulary((*TOKENS, "<pad>"), frozenset({0, 7}), 8),
    "no tokens": Vocabulary((), frozenset(), 7),
}


@pytest.mark.parametrize("draft", FITTING)
def test_bug_34_fitting_pairs(draft: str) -> None:
    assert fits(TARGET, FITTING[draft]) and fits(FITTING[draft], TARGET)


@pytest.mark.parametrize("draft", DIFFERENT)
def test_bug_34_different_pairs(draft: str) -> None:
    assert not fits(TARGET, DIFFERENT[draft]) and not fits(DIFFERENT[draft], TARGET)


def test_mismatch_names_both_sizes() -> None:
    theirs = Vocabulary((*SWAPPED[:6], "x"), SPECIAL, 64).fingerprint()
    with pytest.raises(
        FailedPrecondition, match=r"first 7 tokens differ: 7 tokens in 7 rows here, 7 in 64 at the peer"
    ):
        check(TARGET, theirs)


def test_only_the_larger_side_can_compare_tokens() -> None:
    larger = Vocabulary((*SWAPPED, "<pad>"), SPECIAL, 8)
    check(TARGET, larger.fingerprint())
    with pytest.raises(FailedPrecondition, match="first 7 tokens"):
        check(larger, TARGET.fingerprint())


def test_digest_is_of_lengths_and_bytes() -> None:
    expected = hashlib.sha256(b"\x03\x00\x00\x00the" + b"\x03\x00\x00\x00\xe2\x82\xac").digest()
    vocabulary = Vocabulary(("the", "\u20ac", "more"), frozenset({2}), 8)
    assert vocabulary.sha256(2) == expected
    assert vocabulary.fingerprint() == Fingerprint(3, vocabulary.sha256(3), 8, (2,))
