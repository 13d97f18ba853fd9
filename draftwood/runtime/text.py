"""Tokenizer work of the verifier: chat templates, prompts to ids, ids to text as it becomes printable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from draftwood.errors import InvalidArgument, NotFound
from draftwood.vocabulary import Vocabulary


class TextCodec:
    """The target's tokenizer."""

    def __init__(self, path: str | Path) -> None:
        """Loads it; raises NotFound MODEL_UNKNOWN naming the path if there is no fast tokenizer."""
        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise NotFound("MODEL_UNKNOWN", f"no tokenizer can be loaded from {str(path)!r}: {error}") from error
        if not self._tokenizer.is_fast:
            raise NotFound("MODEL_UNKNOWN", f"{str(path)!r} has no tokenizer.json; only fast tokenizers are supported")
        self._fast: Tokenizer = self._tokenizer._tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands; special tokens written in it are recognised."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def spellings(self, word: str) -> list[list[int]]:
        """Ids of a word at the start of a text and behind a space, as far as these differ; [[]] if it is blank.

        As vLLM reads bad words, but for the second spelling, which vLLM leaves out unless it has as many tokens.
        """
        bare = word.lstrip(" ")
        if not bare:
            return [[]]
        first, inner = (self._tokenizer.encode(text, add_special_tokens=False) for text in (bare, f" {bare}"))
        return [first] if first == inner else [first, inner]

    def token_text(self, token: int) -> str:
        """A token's text by itself, special tokens by name; U+FFFD stands for bytes that are no whole character."""
        text: str = self._fast.decode([token], skip_special_tokens=False)
        return text

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation by the model's chat template, ready for the assistant's answer."""
        if not self._tokenizer.chat_template:
            raise InvalidArgument(
                "CHAT_TEMPLATE", "this model has no chat template; send text or token ids", field="chat"
            )
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            raise InvalidArgument(
                "CHAT_TEMPLATE", f"the chat template refused the messages: {error}", field="chat"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        serialized: str = self._fast.to_str()
        return serialized

    def texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of tokens."""
        return self._fast.decode_batch([list(tokens) for tokens in sequences], skip_special_tokens=False)

    def vocabulary(self, vocab_size: int) -> Vocabulary:
        """What a draft's tokenizer is compared with; ``vocab_size`` counts the model's output rows."""
        size = min(len(self._tokenizer), vocab_size)
        tokens = tuple(self._tokenizer.convert_ids_to_tokens(list(range(size))))
        return Vocabulary(tokens, frozenset(i for i in self._tokenizer.all_special_ids if i < size), vocab_size)

    def stream(self) -> PieceStream:
        return PieceStream(self._fast)


class PieceStream:
    """Text of a growing token sequence, never splitting a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, tokens: Sequence[int]) -> list[str]:
        """The text that became printable with each token, "" while a character is incomplete."""
        return [self._stream.step(self._tokenizer, token) or "" for token in tokens]


def end_tokens(path: str | Path, fallback: int | Sequence[int] | None) -> frozenset[int]:
    """The model's own end tokens: its generation config's, else the model config's ``eos_token_id``."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        ids = fallback
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
