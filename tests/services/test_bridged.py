"""Drafts of another tokenizer over the real wire: the same text, guesses that are taken, and clear refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from draft_service.server import DraftServer
from draftwood.config import DraftSettings
from draftwood.errors import FailedPrecondition, NotFound
from tests import tiny_tokenizers as tiny
from tests.services.models import SIZE, Models
from tests.services.stack import Cluster, Stack, until

PROMPTS: list[Any] = ["The sky is blue", "東京 🙂 caf\u00e9\n", [5, 7, 11, 5, 7, 11, 5, 7], [0, 260, 130, 1, 0]]
RULES: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 7}]


def shuffled(models: Models, folder: Path) -> Path:
    """The draft with other ids and without the tokenizer's last merges: its text is the same, its tokens are not."""
    data = json.loads(Tokenizer.from_file(str(models.draft / "tokenizer.json")).to_str())
    merges = data["model"]["merges"][:-10]
    kept = [t for t, i in data["model"]["vocab"].items() if i < SIZE - 10]
    old = {token: data["model"]["vocab"][token] for token in kept}
    special = {added["content"] for added in data["added_tokens"]}
    order = [t for t in kept if t not in special]
    random.Random(3).shuffle(order)
    new = {token: k for k, token in enumerate([*order, *sorted(special)])}
    data["model"] |= {"vocab": new, "merges": merges}
    for added in data["added_tokens"]:
        added["id"] = new[added["content"]]
    model = AutoModelForCausalLM.from_pretrained(models.draft, dtype=torch.float32)
    rows = torch.tensor([old[token] for token in new])
    embedding, head = model.get_input_embeddings().weight[rows], model.lm_head.weight[rows]
    model.resize_token_embeddings(len(new), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(data))).save_pretrained(folder)
    return folder


def with_tokenizer(models: Models, tokenizer: Tokenizer, folder: Path) -> Path:
    """The draft with rows for another tokenizer: its guesses mean nothing."""
    model = AutoModelForCausalLM.from_pretrained(models.draft, dtype=torch.float32)
    model.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def settings(models: Models, folder: Path) -> dict[str, Any]:
    return {"kind": "bridged", "model": str(folder), "target_tokenizer": str(models.target)}


async def texts(cluster: Cluster) -> int:
    """All prompts under all rules, which must be what the target alone writes; returns the accepted guesses."""
    accepted = 0
    for prompt in PROMPTS:
        for rule in RULES:
            options = {"max_tokens": 24, "ignore_eos": True} | rule
            text = await cluster.speculative(prompt, **options)
            assert text.tokens == await cluster.plain(prompt, **options), f"{prompt!r} {rule}"
            accepted += text.accepted
    return accepted


async def test_a_draft_of_other_tokens_is_accepted_and_changes_no_text(stack: Stack, tmp_path: Path) -> None:
    """It guesses as the same model without a bridge does, but for the rarer tokens that it has not."""
    folder = shuffled(stack.models, tmp_path / "shuffled")
    bridged = await stack.cluster([settings(stack.models, folder)])
    accepted = await texts(bridged)
    assert accepted > 15, "guesses are taken"
    assert bridged.drafts[0].loaded.info.kind == "bridged" and bridged.engine.totals.refused == 0
    await bridged.is_idle()


@pytest.mark.parametrize("make", [tiny.byte_fallback, tiny.characters])
async def test_any_tokenizer_changes_no_text(stack: Stack, tmp_path: Path, make: Any) -> None:
    folder = with_tokenizer(stack.models, make(), tmp_path / "draft")
    cluster = await stack.cluster([settings(stack.models, folder)], canary=False)
    await texts(cluster)
    assert cluster.drafts[0].loaded.core.nodes_drafted and cluster.engine.totals.refused == 0
    await cluster.is_idle()


async def test_bridged_and_own_tokens_merge(stack: Stack, tmp_path: Path) -> None:
    part = settings(stack.models, shuffled(stack.models, tmp_path / "shuffled"))
    cluster = await stack.cluster([{"kind": "merged", "parts": [part, {"kind": "lm"}, {"kind": "ngram"}]}])
    assert await texts(cluster) > 40
    assert cluster.engine.totals.refused == 0
    await cluster.is_idle()


async def test_tokenizers_that_cannot_be_bridged_are_refused_at_the_start(stack: Stack, tmp_path: Path) -> None:
    folder = with_tokenizer(stack.models, tiny.word_piece(), tmp_path / "pieces")
    with pytest.raises(FailedPrecondition, match="pieces cannot be bridged: tokens that WordPiece decodes") as refused:
        await stack.draft(**settings(stack.models, folder))
    assert refused.value.reason == "TOKENIZER_UNSUPPORTED"
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NotFound, match="pieces") as missing:
        await stack.draft(**settings(stack.models, folder))
    assert missing.value.reason == "MODEL_UNKNOWN"


async def test_a_bridge_to_another_target_never_joins(stack: Stack) -> None:
    """The verifier compares the tokens that the bridge turns guesses into with its own."""
    models = stack.models
    verifier = await stack.verifier()
    wrong = {"kind": "bridged", "model": str(models.draft), "target_tokenizer": str(models.swapped)}
    draft: DraftServer = await stack.draft(**wrong)
    router = await stack.router([verifier], [draft])
    cluster = Cluster(verifier, [draft], router, await stack.client(router))
    text = await cluster.speculative("The sky", max_tokens=8, ignore_eos=True)
    assert len(text.tokens) == 8 and not text.accepted
    await until(lambda: not cluster.attached)


def test_settings() -> None:
    with pytest.raises(ValueError, match="kind bridged needs target_tokenizer"):
        DraftSettings(kind="bridged")
    with pytest.raises(ValueError, match="target_tokenizer is of kind bridged, not of lm"):
        DraftSettings(kind="lm", target_tokenizer="demo")
