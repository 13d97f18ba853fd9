"""Distils a small Llama-layout draft from text that its target wrote, by cross-entropy to the target's distribution.

``python models/train/distil.py --corpus corpus --out draft --seconds 600``

The draft keeps the ``--vocabulary`` tokens that the text uses most (FR-Spec, arXiv:2502.14856); one row of its
embedding stands for all others on the way in, and none of them can be proposed. Of the target's distribution the
likeliest tokens are known (``corpus.py``); the others, and those that the draft lacks, count as one: the loss is the
cross-entropy over the known ones and that rest, so that the draft's scores are no more certain than the target.

AdamW in bfloat16 over float32 weights. Learning rate and end follow the clock: a linear rise over the first hundredth
of ``--seconds``, then a cosine to zero. The last ``--held-out`` dialogues of the corpus are not learnt.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import load_facts, rounds
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

CHECKPOINT_S = 60.0
SYNC_STEPS = 20
"""The clock is read, and the device waited for, once in so many steps."""

LEAST_REST = 1e-4
"""Probability of the tokens that are not among the target's likeliest is taken to be at least this."""


@dataclass(frozen=True)
class Corpus:
    """Text and distributions in the draft's own ids, on the device. The last id stands for all tokens it lacks."""

    tokens: Tensor  # int64 [rows, length]
    top: Tensor  # int32 [rows, length, TOP]
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


def load_corpus(folder: Path, kept: np.ndarray, device: torch.device) -> Corpus:
    """The whole corpus in the draft's ids."""
    own = torch.full((load_facts(folder)["vocab_size"],), len(kept), dtype=torch.int32, device=device)
    own[torch.from_numpy(kept).to(device)] = torch.arange(len(kept), dtype=torch.int32, device=device)
    parts = []
    for written in rounds(folder):
        tokens, top = (own[torch.from_numpy(x.astype(np.int32)).to(device)] for x in (written.tokens, written.top))
        parts.append((tokens.long(), top, torch.from_numpy(np.array(written.logprob)).to(device)))
    return Corpus(*(torch.cat(column) for column in zip(*parts, strict=True)))


def make_draft(arguments: argparse.Namespace, rows: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=rows, hidden_size=arguments.width, intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads, head_dim=arguments.width // arguments.heads,
        max_position_embeddings=8192, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def attend(attention: nn.Module, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention by the weights of a layer of transformers; x [rows, length, width]."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (p(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for p in projections)
    query, key = apply_rotary_pos_emb(query, key, *rotation)
    key, value = (t.to(x.dtype).repeat_interleave(attention.num_key_value_groups, dim=1) for t in (key, value))
    seen = F.scaled_dot_product_attention(query.to(x.dtype), key, value, is_causal=True)
    return attention.o_proj(seen.transpose(1, 2).flatten(2))


def own_logits(draft: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Logits [rows, length, kept] of the draft's real tokens; the row for all others is left out."""
    body = draft.model
    x = body.embed_tokens(tokens).to(torch.bfloat16 if tokens.is_cuda else torch.float32)
    rotation = body.rotary_emb(x, torch.arange(tokens.shape[1], device=tokens.device)[None])
    for layer in body.layers:
        x = x + attend(layer.self_attn, layer.input_layernorm(x), rotation)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return F.linear(body.norm(x), draft.lm_head.weight)[..., :-1]


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


def top_1(draft: LlamaForCausalLM, corpus: Corpus) -> float:
    """How often the draft's likeliest token is the target's; a token that the draft lacks is a miss."""
    hits = [
        (own_logits(draft, part.tokens).argmax(dim=-1) == part.top[..., 0]).float().mean()
        for part in (corpus.rows(k, k + 16) for k in range(0, len(corpus.tokens), 16))
    ]
    return float(torch.stack(hits).mean())


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


def train(draft: LlamaForCausalLM, corpus: Corpus, arguments: argparse.Namespace, save: Callable[[], None]) -> None:
    """Trains for ``seconds``, saving once a minute and at the end."""
    begin = time.monotonic()
    held_out, learnt = corpus.rows(-arguments.held_out, len(corpus.tokens)), corpus.rows(0, -arguments.held_out)
    decayed = [p for p in draft.parameters() if p.dim() > 1]
    plain = [p for p in draft.parameters() if p.dim() == 1]
    cuda = corpus.tokens.is_cuda
    groups = [{"params": decayed, "weight_decay": arguments.decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=cuda)

    def loss_of(tokens: Tensor, top: Tensor, logprob: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = own_logits(draft, tokens)
        return distance(logits, top, logprob)

    compiled = torch.compile(loss_of, dynamic=False) if arguments.compile else loss_of
    feed, step, saved = batches(learnt, arguments.rows), 0, begin
    losses: list[Tensor] = []
    start = begin
    while True:
        batch = next(feed)
        loss = compiled(batch.tokens, batch.top, batch.logprob)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
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
            with torch.no_grad(), torch.autocast(tokens_device(corpus), torch.bfloat16, enabled=cuda):
                right = top_1(draft, held_out)
            seen = step * batch.tokens.numel()
            print(
                f"{elapsed:.3f} of the time: step {step}, {seen / 1e6:.0f} M tokens "
                f"({seen / learnt.tokens.numel():.2f} passes, {seen / (now - start + 1e-9) / 1e6:.2f} M a second), "
                f"loss {mean:.4f}, top 1 {right:.4f}",
                flush=True,
            )
        if elapsed >= 1:
            return


def tokens_device(corpus: Corpus) -> str:
    return corpus.tokens.device.type


def save_draft(draft: LlamaForCausalLM, folder: Path, kept: np.ndarray, target_vocab_size: int) -> None:
    """As float16, with the kept tokens in ``config.json`` (``draftwood.runtime.reduced``)."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().half() for name, value in draft.state_dict().items()}
    plain = LlamaForCausalLM(draft.config).half()
    plain.load_state_dict(state)
    plain.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    lines = json.dumps(config, indent=2, sort_keys=True)[:-2]
    ids = json.dumps(kept.tolist(), separators=(",", ":"))
    (folder / "config.json").write_text(
        f'{lines},\n  "target_vocab_size": {target_vocab_size},\n  "target_token_ids": {ids}\n}}\n'
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that write.py made")
    parser.add_argument("--out", type=Path, required=True, help="folder of the draft")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument(
        "--vocabulary", type=int, default=10239, help="tokens kept; a row more should be a multiple of 64"
    )
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--inner", type=int, default=896, help="width inside the MLP")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=48, help="dialogues of a batch")
    parser.add_argument("--rate", type=float, default=2.5e-3, help="highest learning rate")
    parser.add_argument("--decay", type=float, default=0.02, help="weight decay")
    parser.add_argument("--held-out", type=int, default=256, help="dialogues that are not learnt, the last ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    chosen = parser.parse_args(arguments)
    torch.manual_seed(chosen.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = kept_tokens(chosen.corpus, chosen.vocabulary)
    corpus = load_corpus(chosen.corpus, kept, device)
    draft = make_draft(chosen, len(kept) + 1).to(device)
    size = sum(p.numel() for p in draft.parameters())
    print(f"{corpus.tokens.numel() / 1e6:.1f} M tokens, a draft of {size / 1e6:.2f} M parameters", flush=True)
    vocab_size = load_facts(chosen.corpus)["vocab_size"]
    train(draft, corpus, chosen, lambda: save_draft(draft, chosen.out, kept, vocab_size))


if __name__ == "__main__":
    main()
