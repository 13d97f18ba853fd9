"""Constrained output: which tokens a JSON schema, a regular expression or a grammar allows at each node of a tree.

constraint  what the request says, as text.
grammar     the constraint compiled for the target's tokenizer, shared by all requests that name it.
matcher     where one text stands in its grammar. A node's matcher is its parent's, forked and advanced by the node's
            token, so that its mask is a function of the committed text and the node's own path.

The work is done by llguidance (Earley parser over a lexer of derivatives, both lazy: https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from draftwood.errors import DraftwoodError, FailedPrecondition, InvalidArgument
from draftwood.runtime.text import TextCodec
from draftwood.tree import IntArray

if TYPE_CHECKING:
    from verifier_service.plan import Part
    from verifier_service.session import GenerateRequest

Kind = Literal["json_schema", "json_object", "regex", "grammar"]

MAX_CONSTRAINT_BYTES = 64 << 10
MAX_REASON_CHARACTERS = 500
KEPT_GRAMMARS = 64
LIMITS = LLParserLimits(
    max_grammar_size=500_000,  # symbols
    initial_lexer_fuel=1_000_000,  # about 20 ms of building regular expressions
    step_lexer_fuel=200_000,  # of one mask, about 14 ms
    step_max_items=50_000,  # Earley items of one mask
    max_lexer_states=50_000,  # of 1 to 2 kB
    verbose_errors=False,
)
"""Counted in units of work, so that no verdict depends on how busy the machine is."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a request says; ``text`` is empty for a JSON object."""

    kind: Kind
    text: str


class Matcher:
    """Where a text stands in its grammar. Not to be used by two threads at once."""

    __slots__ = ("__weakref__", "_end_tokens", "inner")

    def __init__(self, inner: LLMatcher, end_tokens: frozenset[int]) -> None:
        self.inner = inner
        self._end_tokens = end_tokens

    def fork(self) -> Matcher:
        return Matcher(self.inner.deep_copy(), self._end_tokens)

    def take(self, token: int) -> bool:
        """Goes on by a token; False if the grammar forbids it, or the library gives up on it (``fault``)."""
        if self.inner.is_stopped():  # nothing but the end may come; the library takes no further token
            return not self.inner.is_error() and token in self._end_tokens
        return self.inner.try_consume_tokens([token]) == 1

    def advance(self, tokens: Sequence[int]) -> None:
        """Goes on by tokens that were chosen by the masks. After a fault there is no way on: no token is allowed."""
        for token in tokens:
            assert self.take(token) or self.fault, f"token {token} was chosen against the mask"

    @property
    def fault(self) -> str:
        """Why the library gave up; empty if it did not."""
        return _first_lines(self.inner.get_error())


class Grammar:
    """A compiled constraint. Any thread may take matchers of it."""

    def __init__(self, template: LLMatcher, end_tokens: frozenset[int], mask_words: int) -> None:
        self.mask_words = mask_words  # of a mask, 32 tokens each; the same for all grammars of a model
        self._template = template
        self._end_tokens = end_tokens

    def matcher(self, tokens: Sequence[int] = ()) -> Matcher:
        """A matcher behind ``tokens``; raises InvalidArgument RESUME if the grammar does not allow them."""
        matcher = Matcher(self._template.deep_copy(), self._end_tokens)
        for k, token in enumerate(tokens):
            if not matcher.take(token):
                message = f"token {token} cannot come there by the request's constraint"
                raise InvalidArgument("RESUME", message, field=f"generation.resume_tokens[{k}]")
        return matcher


class GrammarCompiler:
    """Compiles constraints for one model, one at a time on a thread of its own; the last few are kept."""

    def __init__(self, codec: TextCodec, end_tokens: frozenset[int]) -> None:
        self._codec = codec
        self._end_tokens = end_tokens
        self._thread = ThreadPoolExecutor(1, "constraints")
        self._tokenizer: LLTokenizer | None = None
        self._compiled = functools.lru_cache(KEPT_GRAMMARS)(self._compile)

    async def attach(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its grammar, if it has a constraint.

        Raises InvalidArgument CONSTRAINT if that does not compile, RESUME if the tokens to resume from do not fit,
        FailedPrecondition CONSTRAINT_UNSUPPORTED if the model's tokenizer cannot be used.
        """
        if request.constraint is None:
            return request
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.attached, request)

    def attached(self, request: GenerateRequest) -> GenerateRequest:
        """As ``attach``, on the calling thread, which must be the only one."""
        assert request.constraint is not None
        grammar = self._compiled(request.constraint)
        grammar.matcher(request.resume)
        return replace(request, grammar=grammar)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: Constraint) -> Grammar:
        if self._tokenizer is None:
            self._tokenizer = _make_tokenizer(self._codec, self._end_tokens)
        template = LLMatcher(self._tokenizer, _grammar_text(constraint), log_level=0, limits=LIMITS)
        if template.is_error():
            raise _refusal(constraint, _first_lines(template.get_error()))
        return Grammar(template, self._end_tokens, -(-self._tokenizer.vocab_size // 32))


def _grammar_text(constraint: Constraint) -> str:
    """The constraint in the library's own format."""
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(constraint.text)
    schema = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise _refusal(constraint, f"not JSON: {error}") from error
    return LLMatcher.grammar_from_json_schema(schema)


def _refusal(constraint: Constraint, why: str) -> DraftwoodError:
    return InvalidArgument(
        "CONSTRAINT", f"it does not compile: {why}", field=f"generation.constraint.{constraint.kind}"
    )


def _first_lines(error: str) -> str:
    """What the library says, without its marker of a short message."""
    said = error.removesuffix("<non-verbose/>").strip()
    return said if len(said) <= MAX_REASON_CHARACTERS else f"{said[:MAX_REASON_CHARACTERS]}..."


def _make_tokenizer(codec: TextCodec, end_tokens: frozenset[int]) -> LLTokenizer:
    """The library's view of the tokenizer; raises FailedPrecondition CONSTRAINT_UNSUPPORTED unless it is the codec's.

    The library reads the bytes of tokens off the decoder and takes byte-level tokens for plain text when a
    ByteFallback comes before the ByteLevel, so a decoder with a ByteLevel is given to it as that alone. Then each
    token's bytes are held against what the codec decodes it to behind a letter.
    """
    if not end_tokens:
        raise _unsupported("it has no end token")
    serialized = json.loads(codec.to_json())
    if "ByteLevel" in _decoders(serialized["decoder"] or {}):
        serialized["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    try:
        made = LLTokenizer(json.dumps(serialized), eos_token=sorted(end_tokens))
    except ValueError as error:
        raise _unsupported(str(error)) from error
    letter = codec.encode("a")[-1:]
    tokens = [t for t in range(made.vocab_size) if not made.is_special_token(t) and made.decode_bytes([t])]
    texts = codec.texts([[*letter, token] for token in tokens])
    for token, text in zip(tokens, texts, strict=True):
        if text != f"a{made.decode_bytes([token]).decode(errors='replace')}":
            raise _unsupported(f"token {token} is {text[1:]!r} here and {made.decode_bytes([token])!r} to llguidance")
    return made


def _decoders(decoder: dict[str, object]) -> list[object]:
    """The types of a serialized decoder and all within it."""
    within = decoder.get("decoders")
    nested = [kind for inner in within for kind in _decoders(inner)] if isinstance(within, list) else []
    return [decoder.get("type"), *nested]


def _unsupported(why: str) -> DraftwoodError:
    return FailedPrecondition("CONSTRAINT_UNSUPPORTED", f"this model's tokenizer takes no constraints: {why}")


class MaskFiller:
    """Computes the masks of all constrained rows of a step at once, on the library's threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._executor: LLExecutor | None = None  # made when it is first needed

    def fill(self, parts: Sequence[Part]) -> dict[str, Tensor]:
        """Masks for ``TargetSampler.step``: int32 [rows, words] by session id, of the parts that have a constraint.

        A node that the grammar forbids, and one at which the library gave up, allows nothing. The former is never
        reached, as its parent does not choose it; behind the latter the next step goes on from the session's matcher.
        """
        constrained = [part for part in parts if part.session.matcher and part.rows.logits_from < len(part.rows.token)]
        if not constrained:
            return {}
        matchers = [matcher for part in constrained for matcher in matchers_of(part)]
        grammar = constrained[0].session.request.grammar
        assert grammar
        masks = torch.from_numpy(self._masks(matchers, grammar.mask_words)).to(self._device)
        pieces = torch.split(masks, [part.tree.size for part in constrained])
        return {part.session.request.session_id: piece for part, piece in zip(constrained, pieces, strict=True)}

    def _masks(self, matchers: Sequence[Matcher | None], words: int) -> IntArray:
        """int32 [matchers, words]; no bit is set where there is no matcher."""
        self._executor = self._executor or LLExecutor()
        masks = np.zeros((len(matchers), words), np.int32)
        there = [(matcher.inner, row) for row, matcher in enumerate(matchers) if matcher]
        self._executor.unsafe_compute_mask_ptr(there, masks.ctypes.data, masks.strides[0], len(masks))
        for inner, row in there:
            if inner.is_error():  # the library then allows the end tokens
                masks[row] = 0
        return masks


def matchers_of(part: Part) -> list[Matcher | None]:
    """The matcher at each node of the part's tree, the session's own at the anchor; None: forbidden by the grammar."""
    matchers: list[Matcher | None] = [part.session.matcher]
    for parent, token in zip(part.tree.parent[1:].tolist(), part.tree.token[1:].tolist(), strict=True):
        above = matchers[parent]
        fork = above.fork() if above else None
        matchers.append(fork if fork and fork.take(token) else None)
    return matchers
