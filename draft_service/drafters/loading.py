"""Loads a language model, or a head on the target's features, to draft with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from draft_service.drafters.block import BlockDrafter
from draft_service.drafters.bridged import BridgedDrafter
from draft_service.drafters.eagle import EagleDrafter
from draft_service.drafters.lm import LmDrafter
from draft_service.drafters.medusa import MedusaDrafter
from draftwood.config import DraftSettings
from draftwood.errors import FailedPrecondition
from draftwood.runtime.demo_model import DEMO, DRAFT_NAME, demo_draft, demo_target
from draftwood.runtime.head_runtime import Block, HeadRuntime, MedusaRuntime, TargetTables, feature_request
from draftwood.runtime.heads import MedusaHeads, TargetShape
from draftwood.runtime.heads_checkpoint import load_heads
from draftwood.runtime.model import ModelRuntime, load_model, resolve_device, resolve_dtype
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
    model = load_model(str(path), device, resolve_dtype(settings.dtype, device, guesses=True))
    runtime = ModelRuntime(model, kv_pages=settings.kv_pages, page_tokens=settings.page_tokens)
    size = runtime.reduced.target_size if runtime.reduced else runtime.vocab_size
    vocabulary = TextCodec(tokenizer).vocabulary(size)
    drafter = LmDrafter(runtime, settings, DRAFT_NAME if demo else Path(settings.model).name, vocabulary)
    drafter.capture()
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


def load_head_drafter(settings: DraftSettings) -> EagleDrafter | MedusaDrafter | BlockDrafter:
    """The drafter, warm; raises NotFound MODEL_UNKNOWN if there are no such heads or no such target, FailedPrecondition
    MODEL_UNSUPPORTED for heads that cannot be used, do not fit their target or are of another kind.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    path = str(demo_target() if settings.target == DEMO else settings.target)
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    shape = TargetShape.of(AutoConfig.from_pretrained(path))
    heads = load_heads(settings.model, shape, device, dtype)
    if isinstance(heads, MedusaHeads) != (settings.kind == "medusa"):
        found = "Medusa heads" if isinstance(heads, MedusaHeads) else "a layer of EAGLE"
        raise FailedPrecondition("MODEL_UNSUPPORTED", f"{settings.model!r} has {found}, the kind is {settings.kind}")
    request = feature_request(heads.taps, shape.hidden_size, settings.target_name)
    tables = TargetTables.load(path, device, dtype)
    vocabulary = TextCodec(settings.tokenizer or path).vocabulary(shape.vocab_size)
    name = Path(settings.model).name
    if isinstance(heads, MedusaHeads):
        return MedusaDrafter(MedusaRuntime(heads, tables), settings, name, vocabulary, request)
    runtime = HeadRuntime(heads, tables, kv_pages=settings.kv_pages, page_tokens=settings.page_tokens)
    if settings.kind == "block":
        return BlockDrafter(runtime, Block.load(settings.model, shape.vocab_size), settings, name, vocabulary, request)
    drafter = EagleDrafter(runtime, settings, name, vocabulary, request)
    drafter.warm_up()
    return drafter
