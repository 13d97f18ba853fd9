"""The end of a text as the plain decoder has it: the oracle of every test of endings. No code of the served kind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from draftwood.acceptance import Ending, FinishReason
from draftwood.runtime.text import PieceStream, TextStream
from draftwood.stop_strings import StopStrings

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
FAR = 10**6
WORDS = ["".join(letters) for size in (1, 2, 3, 4) for letters in itertools.product("ab.", repeat=size)][:48]


@cache
def words() -> Tokenizer:
    """Token k is ``WORDS[k]``; a text is its words one after the other."""
    tokenizer = Tokenizer(WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@dataclass(frozen=True)
class Asked:
    """What ends a text."""

    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    max_tokens: int = FAR
    include: bool = False
    min_tokens: int = 0  # before a stop string counts

    @property
    def ending(self) -> Ending:
        return Ending(self.stop_token_ids, self.max_tokens)

    def text(self, tokenizer: Tokenizer) -> TextStream:
        stops = StopStrings(self.stop) if self.stop else None
        return TextStream(PieceStream(tokenizer), stops, self.include, self.min_tokens)


@dataclass
class Whole:
    """What the plain decoder delivers."""

    count: int
    finish: FinishReason | None
    stop: int | str | None
    text: str


def plain(asked: Asked, tokens: Sequence[int], texts: Sequence[str]) -> Whole:
    """One token at a time, the whole text searched anew for every stop string; ``texts`` are the tokens' own."""
    text, passed = "", 0
    for count, (token, own) in enumerate(zip(tokens, texts, strict=False), start=1):
        stopped = token in asked.stop_token_ids
        if asked.include or not stopped:
            text += own
        if count <= asked.min_tokens:
            passed = len(text)
        ends = range(passed + 1, len(text) + 1)
        complete = [(end, -len(string), string) for end in ends for string in asked.stop if text[:end].endswith(string)]
        if complete:
            end, _, string = min(complete)
            return Whole(count, STOP, string, text[: end if asked.include else end - len(string)])
        if stopped:
            return Whole(count, STOP, token, text)
        if count == asked.max_tokens:
            return Whole(count, LENGTH, None, text)
    return Whole(len(tokens), None, None, text)
