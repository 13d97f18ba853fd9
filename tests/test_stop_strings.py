"""The automaton against string methods."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftwood.stop_strings import StopStrings

STRINGS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=6)


@settings(max_examples=500, deadline=None)
@given(STRINGS, st.text("abcd", max_size=40))
@example(["abcd", "bc"], "abcd")
@example(["b", "ab", "cab"], "cab")
@example(["aab"], "aaab")
@example(["abab", "babc"], "ababc")
def test_after_every_character_it_knows_what_the_text_ends_with(strings: list[str], text: str) -> None:
    stops, node = StopStrings(strings), 0
    beginnings = {string[:length] for string in strings for length in range(len(string))}
    for end, character in enumerate(text, start=1):
        node = stops.next(node, character)
        so_far = text[:end]
        ending = [string for string in strings if so_far.endswith(string)]
        assert stops.found(node) == (max(ending, key=len) if ending else None)
        assert stops.pending(node) == max(len(b) for b in beginnings if so_far.endswith(b))


def test_characters_are_compared_as_they_are() -> None:
    stops = StopStrings(["é"])
    assert stops.found(stops.next(0, "é")) == "é"
    assert stops.found(stops.next(0, "É")) is None
    assert stops.found(stops.next(stops.next(0, "e"), "\u0301")) is None, "no normalisation"
