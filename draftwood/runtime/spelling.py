"""What the ids of a tokenizer spell, and which ids spell a text: the bridge between two vocabularies.

Words
-----
spelling   a text as a ``str`` of symbols: a character below 256 is a byte of its UTF-8, one from 256 on a special token
           that both tokenizers have. Any token is some symbols, the halves of a character too, so that two tokenizers
           can be compared at any border.
behind     the spelling that a text follows: the same text has other tokens at the beginning, behind a space, or where
           its first character has begun in the token before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer

from draftwood.errors import FailedPrecondition

FIRST_SPECIAL = 256
WINDOW = 48
"""Symbols before a text that are tokenized with it: a word and its surroundings."""

CONTINUATIONS = "".join(map(chr, range(0x80, 0xC0)))
"""Bytes that go on with a character."""

PROBE = "A probe, with (two) lines:\n1 + 2 = 3."
BYTE_LEVEL, MARKED = "byte_level", "marked"
SPACE_MARK = "\u2581"


class Speller:
    """One tokenizer as a map between ids and spellings."""

    def __init__(self, tokenizer: Tokenizer, specials: Mapping[int, str], name: str) -> None:
        """``specials``: symbols of the special tokens that the other side has, too, by id.

        Raises FailedPrecondition TOKENIZER_UNSUPPORTED, naming the tokenizer, if its tokens are no runs of bytes or if
        a text cannot be had back from its tokens.
        """
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True  # a special token's name, written in a text, is text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._pieces = _pieces(self._tokenizer, specials, name)
        self._special_ids = {symbol: token for token, symbol in specials.items()}
        byte_ids = {piece: token for token, piece in enumerate(self._pieces) if piece is not None and len(piece) == 1}
        self._byte_ids = {piece: token for piece, token in byte_ids.items() if ord(piece) < FIRST_SPECIAL}
        self._marks_start = False
        first = self._pieces[self._encode("a")[0]] if self._encode("a") else None
        self._marks_start = bool(first) and first != "a" and str(first).startswith(" ")
        if self.spell(self.tokens(spelled(PROBE), ""), "") != spelled(PROBE):
            raise _unsupported(name, f"its tokens of {PROBE!r} spell another text")

    def __len__(self) -> int:
        return len(self._pieces)

    def piece(self, token: int, behind: str) -> str | None:
        """What a token spells; None: nothing that the other side could spell."""
        piece = self._pieces[token] if token < len(self._pieces) else None
        # Such tokenizers put a space before a text, and drop it when they decode.
        return piece[1:] if piece and self._marks_start and _begins(behind) and piece[0] == " " else piece

    def spell(self, tokens: Sequence[int], behind: str) -> str:
        """What a text of tokens spells; those that spell nothing are left out."""
        text, before = "", behind
        for token in tokens:
            piece = self.piece(token, before)
            if piece is not None:
                text, before = text + piece, piece or " "  # an empty one was the space that is dropped
        return text

    def tokens(self, text: str, behind: str) -> list[int]:
        """Tokens that spell ``text``, or as much of its beginning as whole characters and our vocabulary allow."""
        found: list[int] = []
        for run in _runs(text):
            if _is_special(run):
                fitting = [self._special_ids[run]] if run in self._special_ids else []
            else:
                fitting = self._spell_run(run, behind)
            found += fitting
            if self.spell(fitting, behind) != run:
                break
            behind += run
        return found

    def any_tokens(self, text: str) -> list[int]:
        """Tokens of a text, those for what is unknown included, whatever they spell."""
        runs = (run for run in _runs(text) if not _is_special(run))
        return [token for run in runs for token in self._encode(run.encode("latin-1").decode(errors="replace"))]

    def _spell_run(self, run: str, behind: str) -> list[int]:
        """``tokens`` of text without special tokens.

        Where the tokenizer has others than ``behind`` for the text, it is asked for the text alone, and where it
        changes a character or had this one's beginning in another token, the character is put together from bytes.
        """
        found: list[int] = []
        while run:
            window, head = _window(behind), _first_character(run)
            contexts = (window,) if run[0] in CONTINUATIONS else (window, "\n", "")
            fits = (self._fit(before, run, starts=_begins(behind)) for before in dict.fromkeys(contexts))
            single = [self._byte_ids[byte] for byte in head if byte in self._byte_ids]
            options = (*fits, single if len(single) == len(head) else [])
            spellings = ((tokens, self.spell(tokens, behind)) for tokens in options)
            tokens, text = next((s for s in spellings if s[1] and run.startswith(s[1])), ([], ""))
            if not text:
                break
            found, behind, run = [*found, *tokens], behind + text, run[len(text) :]
        return found

    def _fit(self, before: str, run: str, *, starts: bool) -> list[int]:
        """Tokens of ``run`` as the tokenizer has them behind ``before``; none if one of its tokens crosses the border.

        ``starts``: the run is at the beginning, where the space that some tokenizers put there is right.
        """
        tokens = self._encode(_whole_characters(before + run))
        spaces = ("", " ") if self._marks_start else ("",)
        for space in spaces:
            if space and not before and not starts:
                continue
            wanted, border = space + before + run, len(space + before) if before else 0
            at, found = 0, []
            for token in tokens:
                piece = self._pieces[token]
                if not piece or not wanted.startswith(piece, at):
                    break
                if at >= border:
                    found.append(token)
                elif at + len(piece) > border:
                    break
                at += len(piece)
            if found:
                return found
        return []

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens


def spelled(text: str) -> str:
    """The spelling of a text without special tokens."""
    return text.encode().decode("latin-1")


def split_character(text: str) -> tuple[str, str]:
    """A spelling without the character that its end has begun, and that beginning."""
    for length in range(1, min(3, len(text)) + 1):
        lead = ord(text[-length])
        if not 0x80 <= lead < 0xC0:  # no continuation of a character: its first byte says how long it is
            needs = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 1
            return (text[:-length], text[-length:]) if length < needs else (text, "")
    return text, ""


def pair_specials(
    draft: Mapping[str, int], target: Mapping[str, int], ends: tuple[str | None, str | None]
) -> tuple[dict[int, str], dict[int, str]]:
    """Symbols of the special tokens of both sides by id: those of one name, and the ``ends`` of a text."""
    names = [(name, name) for name in draft if name in target]
    end, other = ends
    if end in draft and other in target and end not in target and other not in draft:
        names.append((str(end), str(other)))
    symbols = [chr(FIRST_SPECIAL + k) for k in range(len(names))]
    ours = {draft[name]: symbol for (name, _), symbol in zip(names, symbols, strict=True)}
    return ours, {target[name]: symbol for (_, name), symbol in zip(names, symbols, strict=True)}


def _pieces(tokenizer: Tokenizer, specials: Mapping[int, str], name: str) -> list[str | None]:
    """What each token spells, None for special tokens that the other side has not and for ids that name nothing."""
    data: dict[str, Any] = json.loads(tokenizer.to_str())
    kind = _decoding(data.get("decoder") or {})
    if kind is None:
        raise _unsupported(name, f"tokens that {(data.get('decoder') or {}).get('type')} decodes are no runs of bytes")
    added = tokenizer.get_added_tokens_decoder()
    model = data["model"]
    unknown = {model.get("unk_id"), tokenizer.token_to_id(model.get("unk_token") or "")} - {None}
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    pieces: list[str | None] = []
    for token in range(size):
        text = tokenizer.id_to_token(token)
        if token in specials:
            pieces.append(specials[token])
        elif text is None or token in unknown or (token in added and added[token].special):
            pieces.append(None)
        elif token in added:
            pieces.append(spelled(text))
        else:
            pieces.append(_byte_level(text) if kind == BYTE_LEVEL else _marked(text))
    return pieces


def _decoding(decoder: Mapping[str, Any]) -> str | None:
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    types = {part.get("type") for part in parts}
    if "ByteLevel" in types:
        return BYTE_LEVEL
    marks = any(p.get("type") == "Replace" and p.get("pattern") == {"String": SPACE_MARK} for p in parts)
    return MARKED if marks or "Metaspace" in types else None


def _byte_level(token: str) -> str:
    return "".join(_BYTES[c] if c in _BYTES else spelled(c) for c in token)


def _marked(token: str) -> str:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return chr(int(token[3:5], 16))
    return spelled(token.replace(SPACE_MARK, " "))


def _alphabet() -> dict[str, str]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): chr(b) for b in plain} | {chr(256 + k): chr(b) for k, b in enumerate(others)}


_BYTES = _alphabet()


def _is_special(symbols: str) -> bool:
    return ord(symbols[0]) >= FIRST_SPECIAL


def _begins(behind: str) -> bool:
    """Whether what follows is the beginning of a text."""
    return not behind or _is_special(behind[-1])


def _runs(text: str) -> Iterator[str]:
    """Special tokens one by one, and the text between them."""
    for special, group in groupby(text, key=_is_special):
        symbols = "".join(group)
        yield from symbols if special else (symbols,)


def _window(behind: str) -> str:
    """The end of ``behind`` that is tokenized with what follows, from a character's beginning on, without specials."""
    *_, last = ["", *_runs(behind[-WINDOW:])]
    if not last or _is_special(last):
        return ""
    return last.lstrip(CONTINUATIONS) if len(behind) > len(last) else last


def _first_character(run: str) -> str:
    """The bytes of a spelling up to the next character; none if that is not whole."""
    length = 1
    while length < len(run) and run[length] in CONTINUATIONS:
        length += 1
    return split_character(run[:length])[0]


def _whole_characters(text: str) -> str:
    """A spelling's text up to its first byte that is no character."""
    data = text.encode("latin-1")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def _unsupported(name: str, why: str) -> FailedPrecondition:
    return FailedPrecondition("TOKENIZER_UNSUPPORTED", f"{name} cannot be bridged: {why}")
