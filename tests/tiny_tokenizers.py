"""Small tokenizers of the four ways to decode: byte-level, bytes as fallback, word pieces, words with a space mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram, WordPiece

TEXTS = [
    "Hello wörld, naïve café; zero\u200dwidth,\ttabs\n\n  and   spaces.",
    "東京は日本の首都です。한국어 텍스트 हिन्दी العربية ไทย",
    "🙂👩‍👩‍👧‍👦 ❤️ 🇫🇷🇩🇪 👍🏽 𐍈𐎀𠜎",
    "combining: e\u0301 o\u0308\u0323 a\u030a\u0301 क्षि",
    "real replacement characters \ufffd in \ufffd\ufffd it, and at the end \ufffd",
    " leading and trailing ",
    "<|end|>special<|end|> tokens<|end|>",
    "🙂" * 20 + "東" * 30,
    "a",
]
SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    """GPT-2's way: every token is some bytes, every id sequence some text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's way: characters out of the vocabulary are tokens of one byte; the text's first space is dropped."""
    vocab = {token: k for k, token in enumerate(["<unk>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for character in "▁abcdefghijklmnopqrstuvwxyz.,:é東":
        vocab[character] = len(vocab)
    merges = [("▁", "a"), ("▁", "▁"), ("o", "r"), ("l", "l"), ("ll", "o"), ("i", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([SPECIAL, "<unk>"])
    return tokenizer


def few_tokens(size: int, pairs: Sequence[str], rest: str, step: int = 1) -> Tokenizer:
    """A byte-level one of ``size`` tokens: ``pairs``, the characters of a sentence, and as many of ``rest`` as fit.

    ``step``, coprime to ``size``, shuffles the ids.
    """
    letters = dict.fromkeys([*"Aprobe,Ġwith(two)lines:Ċ1+23=.", *rest])
    tokens = [*letters][: size - len(pairs)] + list(pairs)
    assert len(tokens) == size
    vocab = {token: k * step % size for k, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, [(pair[0], pair[1]) for pair in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def characters() -> Tokenizer:
    """One that has few characters and cannot spell others."""
    tokenizer = few_tokens(40, ["th", "he", "in"], "xyzXYZHdwq!?*#@%&$~")
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's way: a space before every token that is no continuation."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=["[UNK]", SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """T5's way: a mark for spaces, the first of which is dropped."""
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=["<unk>", SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: kind for kind in (byte_level, byte_fallback, word_piece, metaspace)
}


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> str:
    """The whole text at once: what pieces must add up to."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=skip)
    return text
