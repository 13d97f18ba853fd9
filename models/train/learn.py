"""What all trainings share: the corpus in the learner's own ids, the distance to the target, the loop.

AdamW over float32 weights. Learning rate and end follow the clock: a linear rise over the first hundredth of
``--seconds``, then a cosine to zero. The last ``--held-out`` dialogues of the corpus are not learnt.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import load_facts, rounds
from torch import Tensor, nn

CHECKPOINT_S = 60.0
SYNC_STEPS = 20
"""The clock is read, and the device waited for, once in so many steps."""

LEAST_REST = 1e-4
"""Probability of the tokens that are not among the target's likeliest is taken to be at least this."""


@dataclass(frozen=True)
class Corpus:
    """Text and distributions, on the device. The draft's last id stands for all tokens it lacks."""

    tokens: Tensor  # int64 [rows, length]
    top: Tensor  # int32 [rows, length, TOP], the draft's ids
    logprob: Tensor  # float16 [rows, length, TOP]

    def rows(self, begin: int, end: int) -> Corpus:
        return Corpus(self.tokens[begin:end], self.top[begin:end], self.logprob[begin:end])


def kept_tokens(folder: Path, count: int) -> np.ndarray:
    """The ``count`` tokens that the text has most often, ascending: int64 [count]."""
    counts = np.zeros(load_facts(folder)["vocab_size"], np.int64)
    for written in rounds(folder):
        counts += np.bincount(written.tokens.ravel(), minlength=len(counts))
    order = np.argsort(-counts, kind="stable")
    total = counts.sum()
    covered = {n: round(float(counts[order[:n]].sum() / total), 4) for n in (4096, 8192, 10240, 12288, 16384)}
    print(f"share of the text covered by so many tokens: {covered}", flush=True)
    return np.sort(order[:count])


def load_corpus(folder: Path, kept: np.ndarray, device: torch.device, *, own_tokens: bool) -> Corpus:
    """The whole corpus; with ``own_tokens`` the text is in the draft's ids, else in the target's."""
    own = torch.full((load_facts(folder)["vocab_size"],), len(kept), dtype=torch.int32, device=device)
    own[torch.from_numpy(kept).to(device)] = torch.arange(len(kept), dtype=torch.int32, device=device)
    parts = []
    for written in rounds(folder):
        tokens, top = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (written.tokens, written.top))
        text = own[tokens] if own_tokens else tokens
        parts.append((text.long(), own[top], torch.from_numpy(np.array(written.logprob)).to(device)))
    return Corpus(*(torch.cat(column) for column in zip(*parts, strict=True)))


def distance(logits: Tensor, top: Tensor, logprob: Tensor) -> Tensor:
    """Cross-entropy to the target's distribution over its likeliest tokens and the rest, mean over the places.

    logits [..., kept]; top int32, logprob float16 [..., TOP]; an id of ``kept`` is a token that the draft lacks.
    """
    known = top < logits.shape[-1]
    index = top.clamp(max=logits.shape[-1] - 1).long()
    own = logits.float().log_softmax(dim=-1).gather(-1, index)
    share = logprob.float().exp() * known
    rest = (1 - share.sum(dim=-1)).clamp(min=0)
    own_rest = (1 - (own.exp() * known).sum(dim=-1)).clamp(min=LEAST_REST)
    return -((share * own).sum(dim=-1) + rest * own_rest.log()).mean()


def batches(corpus: Corpus, rows: int) -> Iterator[Corpus]:
    """Endless, each pass in an order of its own."""
    while True:
        order = torch.randperm(len(corpus.tokens), device=corpus.tokens.device)
        for picked in order.split(rows):
            if len(picked) == rows:
                yield Corpus(corpus.tokens[picked], corpus.top[picked], corpus.logprob[picked])


def learning_rate(peak: float, elapsed: float) -> float:
    """``elapsed`` is the share of the time that is over."""
    return peak * min(1.0, 100 * elapsed + 0.01) * 0.5 * (1 + math.cos(math.pi * min(1.0, elapsed)))


def add_arguments(parser: argparse.ArgumentParser, *, rows: int, rate: float) -> None:
    """Those of every training."""
    parser.add_argument("--corpus", type=Path, required=True, help="folder that write.py made")
    parser.add_argument("--out", type=Path, required=True, help="folder of what is learnt")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rows", type=int, default=rows, help="dialogues of a batch")
    parser.add_argument("--rate", type=float, default=rate, help="highest learning rate")
    parser.add_argument("--decay", type=float, default=0.02, help="weight decay")
    parser.add_argument("--held-out", type=int, default=256, help="dialogues that are not learnt, the last ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", dest="compile", action="store_false")


def train(
    learner: nn.Module,
    loss_of: Callable[[Corpus], Tensor],
    corpus: Corpus,
    arguments: argparse.Namespace,
    score: Callable[[Corpus], str],
    save: Callable[[], None],
) -> None:
    """Trains for ``seconds``; once a minute and at the end saves, and prints the score on what is held out."""
    begin = time.monotonic()
    held_out, learnt = corpus.rows(-arguments.held_out, len(corpus.tokens)), corpus.rows(0, -arguments.held_out)
    parameters = [p for p in learner.parameters() if p.requires_grad]
    decayed, plain = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": arguments.decay}, {"params": plain, "weight_decay": 0.0}]
    cuda = corpus.tokens.is_cuda
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=cuda)
    feed, step, saved, start = batches(learnt, arguments.rows), 0, begin, begin
    losses: list[Tensor] = []
    while True:
        batch = next(feed)
        with torch.autocast(corpus.tokens.device.type, torch.bfloat16, enabled=cuda):
            loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        step += 1
        if step % SYNC_STEPS and step > 1:
            continue
        mean, losses = float(torch.stack(losses).mean()), []
        now = time.monotonic()
        if step == 1:  # what compiling took is no part of the schedule
            start = now
        elapsed = (now - start) / max(1e-9, arguments.seconds - (start - begin))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(arguments.rate, elapsed)
        if now - saved > CHECKPOINT_S or elapsed >= 1:
            saved = now
            save()
            with torch.no_grad(), torch.autocast(corpus.tokens.device.type, torch.bfloat16, enabled=cuda):
                found = score(held_out)
            seen = step * batch.tokens.numel()
            print(
                f"{elapsed:.3f} of the time: step {step}, {seen / 1e6:.0f} M tokens "
                f"({seen / learnt.tokens.numel():.2f} passes, {seen / (now - start + 1e-9) / 1e6:.2f} M a second), "
                f"loss {mean:.4f}, {found}",
                flush=True,
            )
        if elapsed >= 1:
            return
