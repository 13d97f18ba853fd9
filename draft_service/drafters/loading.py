"""Loads a language model to draft with."""

from __future__ import annotations

from pathlib import Path

import torch

from draft_service.drafters.bridged import BridgedDrafter
from draft_service.drafters.lm import LmDrafter
from draftwood.config import DraftSettings
from draftwood.runtime.demo_model import DEMO, DRAFT_NAME, demo_draft, demo_target
from draftwood.runtime.model import ModelRuntime, load_model, resolve_device, resolve_dtype
from draftwood.runtime.reduced import ReducedVocabulary
from draftwood.runtime.spelling import Speller, pair_specials
from draftwood.runtime.text import TextCodec


def load_lm_drafter(settings: DraftSettings) -> LmDrafter:
    """The drafter, warm; raises NotFound MODEL_UNKNOWN if there is no such model."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    demo = settings.model == DEMO
    path: str | Path = demo_draft() if demo else settings.model
    tokenizer = _draft_tokenizer(settings)
    device = resolve_device(settings.device)
    model = load_model(str(path), device, resolve_dtype(settings.dtype, device))
    runtime = ModelRuntime(model, kv_pages=settings.kv_pages, page_tokens=settings.page_tokens)
    runtime.capture()
    reduced = ReducedVocabulary.of(model.config)
    vocabulary = TextCodec(tokenizer).vocabulary(reduced.target_size if reduced else runtime.vocab_size)
    drafter = LmDrafter(runtime, settings, DRAFT_NAME if demo else Path(settings.model).name, vocabulary)
    drafter.warm_up()
    return drafter


def load_bridged_drafter(settings: DraftSettings) -> BridgedDrafter:
    """The drafter, warm; raises as ``load_lm_drafter``, and FailedPrecondition TOKENIZER_UNSUPPORTED."""
    ours = _draft_tokenizer(settings)
    theirs: str | Path = demo_target() if settings.target_tokenizer == DEMO else settings.target_tokenizer
    draft, target = TextCodec(ours), TextCodec(theirs)
    specials = pair_specials(draft.specials, target.specials, (draft.end, target.end))
    spellers = Speller(draft.fast, specials[0], str(ours)), Speller(target.fast, specials[1], str(theirs))
    vocabulary = target.vocabulary(len(spellers[1]))
    return BridgedDrafter(load_lm_drafter(settings), *spellers, vocabulary, draft.opening)


def _draft_tokenizer(settings: DraftSettings) -> str | Path:
    """Where it is."""
    return settings.tokenizer or (demo_target() if settings.model == DEMO else settings.model)
