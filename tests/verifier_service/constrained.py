"""Tokenizers, random schemas and other constraints for the tests of constrained output."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftwood.runtime.text import TextCodec
from verifier_service.constraints import Constraint, Grammar, Matcher
from verifier_service.session import GenerateRequest

SIZE = 320
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
END_TOKEN = 1
TEXT = """{"name": "Ada", "age": 36, "tags": ["red", "green", "blue"], "ok": true, "none": null, "nested": {"a": [1]}}
The sea is green, the sky is blue; café, naïve, 東京, 🙂. 2024-01-31 true false null (1 + 2) - 345"""


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE, as GPT-2's; its merges span quotes, colons and braces."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[START, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Words with a meta space and bytes for the rest, as Llama 2's."""
    vocab = {START: 0, END: 1, PAD: 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", *'abcdehrstxyz0123{}[]":,', "th", "the", "▁the", '{"', '":'):
        vocab.setdefault(piece, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("{", '"'), ('"', ":")]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=PAD, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def save_codec(folder: Path, tokenizer: Tokenizer) -> TextCodec:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, extra_special_tokens=[START, PAD], clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
    return TextCodec(folder)


def mask_of(matcher: Matcher, grammar: Grammar) -> set[int]:
    """The tokens that the matcher allows, computed by itself."""
    words = np.zeros(grammar.mask_words, np.int32)
    matcher.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def random_schema(rnd: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that bounds the length of its texts."""
    kinds = ["boolean", "null", "integer", "string", "pattern", "date", "enum", "const", "any"]
    kind = "object" if depth == 0 else rnd.choice(kinds + ["object", "array"] * 2 if depth < 3 else kinds)
    if kind == "object":
        names = rnd.sample(["name", "age", "tags", "ok", "a", "café"], rnd.randint(1, 4))
        properties = {name: random_schema(rnd, depth + 1) for name in names}
        required = [name for name in names if rnd.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = rnd.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rnd, depth + 1),
            "minItems": least,
            "maxItems": least + rnd.randint(0, 2),
        }
    if kind == "any":
        return {"anyOf": [random_schema(rnd, 3), random_schema(rnd, 3)]}
    simple: dict[str, dict[str, Any]] = {
        "integer": {"type": "integer", "minimum": rnd.randint(-20, 0), "maximum": rnd.randint(1, 5000)},
        "string": {"type": "string", "maxLength": rnd.randint(0, 6)},
        "pattern": {"type": "string", "pattern": rnd.choice(["^[a-c]{1,4}$", "^(red|green)?$", "^é+x{0,3}$"])},
        "date": {"type": "string", "format": "date"},
        "enum": {"enum": rnd.sample(["red", "green", "gray", 1, 12, None, {"a": [1]}], 3)},
        "const": {"const": rnd.choice(["fixed", 7, [1, "x"]])},
    }
    return simple.get(kind, {"type": kind})


def random_constraint(rnd: random.Random, k: int) -> Constraint:
    """Two of three are schemas; for the rest see the lists."""
    if k % 3 < 2:
        spaces = rnd.choice([{"whitespace_flexible": False}, {"whitespace_pattern": "[ \n]{1,2}"}])
        return Constraint("json_schema", json.dumps({"x-guidance": spaces} | random_schema(rnd)))
    choice = rnd.randrange(5)
    if choice == 0:
        return Constraint("json_object", "")
    if choice < 3:
        return Constraint("regex", rnd.choice(REGEXES))
    return Constraint("grammar", rnd.choice(GRAMMARS))


REGEXES = (
    r"[a-z]{1,8}(-[a-z]{1,8}){0,3}",
    r"(foo|bar[0-9]{2,5}|日本語?|é{1,3})+( baz)?",
    r"\d{1,3}(\.\d{1,3}){3}",
    r"(the|there|then|sea){1,4}",
)
SUM = 'start: e\ne: t (("+" | "-") t)*\nt: NUM | "(" e ")"\nNUM: /[1-9][0-9]{0,3}/'
PALINDROME = 'start: p\np: "a" p "a" | "b" p "b" | "c"'
GRAMMARS = (SUM, PALINDROME)


def assert_meets(constraint: Constraint, text: str) -> None:
    """What a text that ended by itself must be, by other means than the library's."""
    if constraint.kind in ("json_schema", "json_object"):
        value = json.loads(text)
        if constraint.kind == "json_object":
            assert isinstance(value, dict)
        else:
            schema = json.loads(constraint.text)
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=checker)
    elif constraint.kind == "regex":
        import regex

        assert regex.fullmatch(constraint.text, text), text
    elif constraint.text == SUM:
        assert set(text) <= set("0123456789+-()")
        eval(text)
    else:
        assert text == text[::-1] and text.count("c") == 1


def of_session(request: GenerateRequest) -> Constraint:
    assert request.constraint
    return request.constraint
