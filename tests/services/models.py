"""Tiny models on disk, for the real loading path: a target, and drafts that fit it well, badly and not at all."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SIZE = 320
"""Tokens of the tokenizer."""
CONTEXT = 512
SHORT_CONTEXT = 64
PADDED_ROWS = 384
SPECIAL = ["<|im_start|>", "<|im_end|>"]
EXTRA = ["<|pad|>", "<|mask|>"]
END_OF_TURN = 1
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = """A draft worker guesses the next tokens as a tree, the verifier checks the whole tree in one forward pass.
What a client receives is what the target alone would have written. The sky is blue, the sea is green, the grass is
greener; café, naïve, 東京, 🙂. One two three four five six seven eight nine ten."""


@dataclass(frozen=True)
class Models:
    """Folders."""

    target: Path
    draft: Path  # the target with noise on its weights: often right
    swapped: Path  # as the draft, but two ids of its tokenizer are swapped
    padded: Path  # as the draft, with rows beyond the last token that would be chosen if they were looked at
    padded_target: Path  # as the target, with such rows
    extra: Path  # as the draft, with two special tokens more, likewise
    extra_target: Path  # as the target, likewise
    short: Path  # as the draft, for short sequences only
    deep_target: Path  # a target of eight layers, of which each changes little: heads can be made for it


def make_models(root: Path) -> Models:
    tokenizer = _train()
    target = _random_target()
    draft = _noisy(target, 0.05)
    swapped = _with_swapped_ids(tokenizer, 290, 291)
    special = Tokenizer.from_str(tokenizer.to_str())
    special.add_special_tokens(EXTRA)
    short = copy.deepcopy(draft)
    short.config.max_position_embeddings = SHORT_CONTEXT
    return Models(
        _save(root / "tiny-target", target, tokenizer),
        _save(root / "tiny-draft", draft, tokenizer),
        _save(root / "swapped-draft", draft, swapped),
        _save(root / "padded-draft", _with_loud_rows(draft, PADDED_ROWS), tokenizer),
        _save(root / "padded-target", _with_loud_rows(target, PADDED_ROWS), tokenizer),
        _save(root / "extra-draft", _with_loud_rows(draft, SIZE + len(EXTRA)), special),
        _save(root / "extra-target", _with_loud_rows(target, SIZE + len(EXTRA)), special),
        _save(root / "short-draft", short, tokenizer),
        _save(root / "deep-target", _random_target(layers=8, spread=2), tokenizer),
    )


def _train() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    assert tokenizer.get_vocab_size() == SIZE
    return tokenizer


def _with_swapped_ids(tokenizer: Tokenizer, a: int, b: int) -> Tokenizer:
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    first, second = (next(token for token, i in vocab.items() if i == wanted) for wanted in (a, b))
    vocab[first], vocab[second] = b, a
    return Tokenizer.from_str(json.dumps(data))


def _random_target(layers: int = 2, spread: int = 8) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=layers, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=SIZE, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        eos_token_id=END_OF_TURN, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(spread)  # spread out, so that the argmax is not the same token for ever
        model.model.embed_tokens.weight.mul_(8 / spread)
        model.lm_head.weight.mul_(4)  # and surer of itself, or no guess would be worth sending
    return model


def _with_loud_rows(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """More rows of the output than the tokenizer has tokens; theirs are often the largest logits."""
    wide = copy.deepcopy(model)
    wide.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        wide.lm_head.weight[SIZE:] = 2 * wide.lm_head.weight[100 : 100 + rows - SIZE]
    return wide


def _noisy(model: PreTrainedModel, share: float) -> PreTrainedModel:
    noisy = copy.deepcopy(model)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in noisy.parameters():
            if parameter.dim() == 2:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * share)
    return noisy


def _save(folder: Path, model: PreTrainedModel, tokenizer: Tokenizer) -> Path:
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[1], additional_special_tokens=SPECIAL)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder
