"""Tokenizer work of the verifier: chat templates, prompts to ids, ids to text as it becomes printable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from draftwood.acceptance import FinishReason
from draftwood.errors import InvalidArgument, NotFound
from draftwood.stop_strings import StopStrings
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

    @property
    def fast(self) -> Tokenizer:
        return self._fast

    @property
    def specials(self) -> dict[str, int]:
        """Ids of the special tokens by name."""
        return {t.content: i for i, t in self._fast.get_added_tokens_decoder().items() if t.special}

    @property
    def end(self) -> str | None:
        """Name of the token that ends a text."""
        name: str | None = self._tokenizer.eos_token
        return name

    @property
    def opening(self) -> list[int]:
        """Tokens that every text begins with."""
        first = self._tokenizer.bos_token_id
        return [first] if first is not None and first in self._tokenizer.encode("") else []

    def texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of tokens."""
        return self._fast.decode_batch([list(tokens) for tokens in sequences], skip_special_tokens=False)

    def vocabulary(self, vocab_size: int) -> Vocabulary:
        """What a draft's tokenizer is compared with; ``vocab_size`` counts the model's output rows."""
        size = min(len(self._tokenizer), vocab_size)
        tokens = tuple(self._tokenizer.convert_ids_to_tokens(list(range(size))))
        return Vocabulary(tokens, frozenset(i for i in self._tokenizer.all_special_ids if i < size), vocab_size)

    def stream(
        self,
        stops: StopStrings | None = None,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> TextStream:
        """The text of a generation; see ``TextStream``."""
        return TextStream(PieceStream(self._fast, skip_special_tokens), stops, include_stop, min_tokens)


class PieceStream:
    """Ids to text as it becomes printable, never splitting a character (a code point).

    The pieces of a text, and the rest at its end, are together what the tokenizer decodes from all ids at once. The
    one exception: where a tokenizer with byte fallback turns valid characters into U+FFFD because invalid bytes follow
    them, a character that has been given out stays.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._given: list[int] = []  # tokens of the last piece: what follows is decoded behind them
        self._pending: list[int] = []  # tokens behind it, whose text is not complete yet

    def feed(self, token: int) -> str:
        """The text that became printable with the token, "" while a character is incomplete."""
        self._pending.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception:  # bytes that spoil, in its eyes, a character that has been given out
            piece = self._restart()
        if piece:
            self._given, self._pending = self._pending, []
        return piece or ""

    def _restart(self) -> str:
        """The text of the pending tokens by a stream that knows of nothing before them."""
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return "".join(self._stream.step(self._tokenizer, token) or "" for token in self._pending)

    def rest(self) -> str:
        """The text of the tokens whose characters are not complete, as it is if none follow."""
        if not self._pending:
            return ""
        before, whole = self._decode(self._given), self._decode([*self._given, *self._pending])
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


class TextStream:
    """The text of one generation as it is delivered: a piece with each token, the pieces joined are the text.

    A piece is the text that can be delivered once its token is known. Text that may be the beginning of a stop string
    is held back until it cannot be, or until the text ends. The last token's piece has all that is left. A stop string
    is cut off, with everything behind it; with ``include_stop`` only what is behind it. A stop token has no text; with
    ``include_stop`` it has. A stop string that one of the first ``min_tokens`` tokens completes does not count.

    A piece depends on the tokens up to its own and on nothing else, so that the state can be had back by feeding tokens
    again, in any runs.
    """

    def __init__(
        self, pieces: PieceStream, stops: StopStrings | None = None, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._stream = pieces
        self._stops = stops
        self._include_stop = include_stop
        self._uncounted = min_tokens  # tokens to come whose stop strings do not count
        self._node = 0  # of the search
        self._held = ""  # may be the beginning of a stop string
        self._pieces: list[str] = []

    def feed(self, token: int, end: FinishReason | None) -> str | None:
        """See ``acceptance.GrowingText``."""
        silent = end is FinishReason.STOP and not self._include_stop
        new = "" if silent else self._stream.feed(token)
        if end is not None:
            new += self._stream.rest()
        piece, found = (new, None) if self._stops is None else self._search(self._stops, new, ended=end is not None)
        self._pieces.append(piece)
        self._uncounted -= 1
        return found

    def take(self) -> tuple[str, ...]:
        """The pieces of the tokens fed since the last call."""
        taken, self._pieces = tuple(self._pieces), []
        return taken

    def _search(self, stops: StopStrings, new: str, *, ended: bool) -> tuple[str, str | None]:
        for end, character in enumerate(new, start=1):
            self._node = stops.next(self._node, character)
            if (found := stops.found(self._node)) and self._uncounted <= 0:
                text = self._held + new[:end]
                return (text if self._include_stop else text[: -len(found)]), found
        text = self._held + new
        deliverable = len(text) if ended or self._include_stop else len(text) - stops.pending(self._node)
        self._held = text[deliverable:]
        return text[:deliverable], None


def end_tokens(path: str | Path, fallback: int | Sequence[int] | None) -> frozenset[int]:
    """The model's own end tokens: its generation config's, else the model config's ``eos_token_id``."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        ids = fallback
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
