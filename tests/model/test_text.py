"""Delivered text with SmolLM2's own tokenizer."""

from __future__ import annotations

import random

import pytest

from draftwood.runtime.demo_model import demo_target
from draftwood.runtime.text import TextCodec
from draftwood.stop_strings import StopStrings
from tests.endings import LENGTH
from tests.tiny_tokenizers import TEXTS, decode

pytestmark = pytest.mark.model


@pytest.mark.parametrize("skip", [True, False])
def test_bug_18_pieces_are_the_full_decode(skip: bool) -> None:
    """Of texts, and of 500 random id sequences; held-back text is flushed at the end."""
    codec, rng = TextCodec(demo_target()), random.Random(18)
    sequences = [codec.encode(text) for text in TEXTS]
    sequences += [[rng.randrange(49152) for _ in range(rng.randint(1, 40))] for _ in range(500)]
    for ids in sequences:
        whole = decode(codec._fast, ids, skip=skip)
        text = codec.stream(StopStrings([whole[-4:] + "🦊", "never 🦊"]), skip_special_tokens=skip)
        for token in ids[:-1]:
            assert text.feed(token, None) is None
        text.feed(ids[-1], LENGTH)
        assert "".join(text.take()) == whole
