"""Distils a small Llama-layout draft from text that its target wrote, by cross-entropy to the target's distribution.

``python models/train/distil.py --corpus corpus --out draft --seconds 600``

The draft keeps the ``--vocabulary`` tokens that the text uses most (FR-Spec, arXiv:2502.14856); one row of its
embedding stands for all others on the way in, and none of them can be proposed. Of the target's distribution the
likeliest tokens are known (``corpus.py``); the others, and those that the draft lacks, count as one: the loss is the
cross-entropy over the known ones and that rest, so that the draft's scores are no more certain than the target.
``learn.py`` has the loop.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import load_facts
from learn import Corpus, add_arguments, distance, kept_tokens, load_corpus, train
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


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


def loss_of(draft: LlamaForCausalLM, tokens: Tensor, top: Tensor, logprob: Tensor) -> Tensor:
    return distance(own_logits(draft, tokens), top, logprob)


def top_1(draft: LlamaForCausalLM, corpus: Corpus) -> float:
    """How often the draft's likeliest token is the target's; a token that the draft lacks is a miss."""
    hits = [
        (own_logits(draft, part.tokens).argmax(dim=-1) == part.top[..., 0]).float().mean()
        for part in (corpus.rows(k, k + 16) for k in range(0, len(corpus.tokens), 16))
    ]
    return float(torch.stack(hits).mean())


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
    add_arguments(parser, rows=48, rate=2.5e-3)
    parser.add_argument(
        "--vocabulary", type=int, default=10239, help="tokens kept; a row more should be a multiple of 64"
    )
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--inner", type=int, default=896, help="width inside the MLP")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--kv-heads", type=int, default=1)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(chosen.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = kept_tokens(chosen.corpus, chosen.vocabulary)
    corpus = load_corpus(chosen.corpus, kept, device, own_tokens=True)
    draft = make_draft(chosen, len(kept) + 1).to(device)
    size = sum(p.numel() for p in draft.parameters())
    print(f"{corpus.tokens.numel() / 1e6:.1f} M tokens, a draft of {size / 1e6:.2f} M parameters", flush=True)
    vocab_size = load_facts(chosen.corpus)["vocab_size"]
    compiled = torch.compile(loss_of, dynamic=False) if chosen.compile else loss_of
    train(
        draft,
        lambda batch: compiled(draft, batch.tokens, batch.top, batch.logprob),
        corpus,
        chosen,
        lambda held_out: f"top 1 {top_1(draft, held_out):.4f}",
        lambda: save_draft(draft, chosen.out, kept, vocab_size),
    )


if __name__ == "__main__":
    main()
