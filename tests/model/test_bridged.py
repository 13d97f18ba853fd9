"""The demo target with a draft of another tokenizer, over gRPC: the same text, and guesses that are taken."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from draftwood.client import Message
from draftwood.runtime.demo_model import demo_draft, demo_target
from tests.services.models import Models
from tests.services.stack import running

pytestmark = pytest.mark.model
KEPT = 12000
"""Tokens that the draft's tokenizer has kept of the target's 49152: the first merges."""
PROMPTS = ("Why is the sky blue?", "Repeat this line three times: 東京 🙂 naïve café")
RULES: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 3})


def other_tokenizer(folder: Path) -> Path:
    """The demo draft with other ids and only the first merges: rarer words are cut smaller."""
    data = json.loads((demo_target() / "tokenizer.json").read_text())
    vocab = {token: i for token, i in data["model"]["vocab"].items() if i < KEPT}
    first = len(data["model"]["vocab"]) - len(data["model"]["merges"])
    data["model"]["merges"] = data["model"]["merges"][: KEPT - first]
    order = list(vocab)
    random.Random(5).shuffle(order)
    new = {token: k for k, token in enumerate(order)}
    data["model"]["vocab"] = new
    for added in data["added_tokens"]:
        added["id"] = new[added["content"]]
    model = AutoModelForCausalLM.from_pretrained(demo_draft(), dtype=torch.float32)
    by_old = {i: new[token] for token, i in vocab.items()}
    rows = [(by_old[i], k) for k, i in enumerate(model.config.target_token_ids) if i in by_old]
    ids, kept = zip(*sorted(rows), strict=True)
    weight = model.get_input_embeddings().weight[[*kept, len(model.config.target_token_ids)]]
    model.resize_token_embeddings(len(weight), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(weight)
    model.config.target_token_ids, model.config.target_vocab_size = list(ids), KEPT
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(data))).save_pretrained(folder)
    return folder


async def test_text_is_the_demo_targets_and_guesses_are_taken(tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path / "draft")
    async with running(Models(*[folder] * len(Models.__dataclass_fields__))) as stack:
        demo = {"model": "demo", "dtype": "float32", "kv_pages": 32, "page_tokens": 64, "max_context_tokens": 1024}
        bridge = {"kind": "bridged", "target_tokenizer": "demo", "depth": 8, "kv_pages": 32}
        cluster = await stack.cluster([bridge], **demo, draft_wait_ms=2000.0)
        tokens = accepted = 0
        for prompt in PROMPTS:
            for rule in RULES:
                asked = [Message("user", prompt)]
                text = await cluster.speculative(asked, max_tokens=24, **rule)
                assert text.tokens == await cluster.plain(asked, max_tokens=24, **rule)
                tokens, accepted = tokens + len(text.tokens), accepted + text.accepted
        assert accepted > tokens / 4, f"{accepted} of {tokens}"
        assert cluster.engine.totals.refused == 0
        await cluster.is_idle()
