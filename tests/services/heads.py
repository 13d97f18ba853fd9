"""Small heads for the tiny deep target, trained for a moment so that some of what they guess is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftwood.runtime import heads_checkpoint
from draftwood.runtime.heads import FINAL_NORM, EagleHead, MedusaHeads, TargetShape, dense_forward
from draftwood.runtime.heads_checkpoint import load_heads
from tests.runtime import head_checkpoints as checkpoints
from tests.runtime.block_forward import block_forward

BLOCK, MASK = 3, 1
TEXTS, LENGTH, STEPS = 32, 64, 120


def make_eagle(folder: Path, target: Path, layout: str) -> Path:
    """``layout``: "eagle", "eagle3", "mtp" or "block"; taps, sizes and tables are those of the target."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    shape = TargetShape.of(model.config)
    make = {"eagle3": partial(checkpoints.eagle3, tokens=300), "mtp": checkpoints.mtp}.get(layout, checkpoints.eagle)
    config, tensors = make(shape)
    tables = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors.pop(name, None)
    if layout == "block":
        config |= {"block_size": BLOCK, "mask_token_id": MASK}

    def block_loss(head: Any, text: Tensor, final: Tensor) -> Tensor:
        """Of the places behind an anchor somewhere in the text."""
        length, masks = int(torch.randint(8, len(text) - BLOCK, ())), BLOCK - 1
        tokens = torch.cat([text[1:length], torch.full((masks,), MASK)])
        fused = torch.cat([final[: length - 1], final[length - 2].expand(masks, -1)])
        read = block_forward(head, tables[0][tokens], fused, masks)[length - 2 :]
        wanted = (final[length - 1 : length - 1 + BLOCK] @ tables[1].T).argmax(dim=-1)
        return F.cross_entropy(read @ tables[1].T, wanted)

    def loss(head: Any, texts: Tensor, states: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros(())
        for k, text in enumerate(texts):
            taken = torch.cat([states[tap if tap != FINAL_NORM else -1][k, :-1] for tap in head.taps], dim=-1)
            if layout == "block":
                total = total + block_loss(head, text, states[-1][k])
                continue
            read, handed = dense_forward(head, tables[0][text[1:]], head.fused(taken))
            ids = slice(None) if head.target_ids is None else torch.from_numpy(head.target_ids)
            wanted = (states[-1][k, 1:] @ tables[1][ids].T).argmax(dim=-1)
            total = total + F.cross_entropy(read @ tables[1][ids].T, wanted)
            if layout == "eagle":
                total = total + F.smooth_l1_loss(handed, states[-1][k, 1:])
        return total

    return _train(folder, config, tensors, model, shape, loss)


def make_medusa(folder: Path, target: Path) -> Path:
    """Three heads with LM heads of their own."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    shape, lm_head = TargetShape.of(model.config), model.lm_head.weight.detach()
    config, tensors = checkpoints.medusa(shape)

    def loss(heads: Any, texts: Tensor, states: tuple[Tensor, ...]) -> Tensor:
        wanted = (states[-1] @ lm_head.T).argmax(dim=-1)
        total = torch.zeros(())
        for depth, head in enumerate(heads.heads, start=1):
            logits = head.hidden(states[-1][:, :-depth]) @ head.lm_head.T
            total = total + F.cross_entropy(logits.flatten(0, 1), wanted[:, depth:].flatten())
        return total

    return _train(folder, config, tensors, model, shape, loss, at_once=TEXTS)


def _train(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    model: Any,
    shape: TargetShape,
    loss: Callable[[Any, Tensor, tuple[Tensor, ...]], Tensor],
    at_once: int = 2,
) -> Path:
    """Trains the checkpoint's floating tensors on texts that the target samples, and saves them."""
    torch.manual_seed(3)
    start = torch.randint(2, shape.vocab_size, (TEXTS, 8))
    with torch.inference_mode():
        texts = model.generate(start, min_new_tokens=LENGTH, max_new_tokens=LENGTH, do_sample=True, temperature=0.5)
        states = model(texts, output_hidden_states=True).hidden_states
    texts, states = texts.clone(), tuple(s.clone() for s in states)
    trained = {name: nn.Parameter(t) if t.is_floating_point() else t for name, t in tensors.items()}
    checkpoints.save(folder, config, tensors)
    with patch.object(heads_checkpoint, "_read_weights", lambda _: dict(trained)):
        head: EagleHead | MedusaHeads = load_heads(str(folder), shape, torch.device("cpu"), torch.float32)
    optimizer = torch.optim.Adam([p for p in trained.values() if isinstance(p, nn.Parameter)], lr=1e-2)
    for step in range(STEPS):
        some = [(at_once * step + k) % TEXTS for k in range(at_once)]
        optimizer.zero_grad()
        loss(head, texts[some], tuple(s[some] for s in states)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return checkpoints.save(folder, config, {name: t.detach().clone() for name, t in trained.items()})
