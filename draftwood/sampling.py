"""The rule that picks tokens, on both sides: what the target takes at a node, and what a draft proposes there.

Two rules, both a function of one row of logits (so that no row ever depends on its neighbours):

greedy         temperature 0: the argmax, lowest id on ties.
shared noise   temperature > 0: the argmax of log p + g(seed, position), where p is the processed distribution and g the
               noise of ``draftwood.noise``; a sample of p by the Gumbel-max trick. A draft takes the top k of
               log q + the same g.

*Position* is the absolute index, in the sequence, of the token being chosen. ``vocab_size`` is the number of real
tokens: columns from there on are padding and never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.noise import GumbelCache
from draftwood.parameters import SamplingParams

# Most values the top-p rule sorts before it sorts the whole row: enough for nearly all rows.
_TOP_P_HEAD = 1024
# Columns of one block in the search for the draft's children.
_BLOCK = 64


def process_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, top-p, min-p: logits [rows, vocab] of p, float32 or wider, excluded tokens -inf.

    Rows come out shifted so that their largest is 0 (greedy: as they come, as none of these moves the argmax). Of equal
    logits the lower id counts as the larger one. The top-p set is the shortest head of the descending order that
    reaches ``top_p`` of what top-k left, at least one token. Min-p keeps the tokens with at least ``min_p`` times the
    probability of the likeliest, at the temperature (arXiv:2407.01082; transformers' order).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if params.greedy:
        return wide
    # Shifted before the division: a tiny temperature sends the others to -inf and keeps the largest at 0.
    # By a tensor, as CUDA divides by a Python number with its reciprocal, and rounds elsewhere than a CPU.
    divisor = torch.full(
        (), max(params.temperature, torch.finfo(wide.dtype).tiny), dtype=wide.dtype, device=wide.device
    )
    shifted = (wide - wide.amax(dim=-1, keepdim=True)).div_(divisor)
    kept = _truncated(shifted, params)
    return kept.masked_fill(kept < math.log(params.min_p), -math.inf) if params.min_p > 0 else kept


def _truncated(shifted: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, then top-p."""
    if params.top_p < 1:
        return _keep(shifted, *_top_p_cut(shifted, params))
    if params.top_k:
        head = shifted.topk(params.top_k, dim=-1).values
        return _keep(shifted, head[:, -1:], torch.full_like(head[:, -1:], params.top_k, dtype=torch.int64))
    return shifted


def _top_p_cut(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Smallest value kept [rows, 1] and number of tokens kept, int64 [rows, 1]; the largest logit of a row is 0."""
    vocab = logits.shape[-1]
    width = params.top_k or min(_TOP_P_HEAD, vocab)
    head = logits.topk(width, dim=-1).values
    if params.top_k:
        return _cut(head, head.double().exp().sum(dim=-1, keepdim=True), params.top_p)
    total = logits.double().exp().sum(dim=-1, keepdim=True)
    value, count = _cut(head, total, params.top_p)
    short = (count == width).flatten()
    if width < vocab and bool(short.any()):
        whole = logits[short].sort(dim=-1, descending=True).values
        value[short], count[short] = _cut(whole, total[short], params.top_p)
    return value, count


def _cut(head: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Where the descending values ``head`` [rows, width] reach ``top_p`` of ``total`` [rows, 1]: value and count."""
    mass = head.double().exp()
    before = mass.cumsum(dim=-1) - mass
    count = (before < top_p * total).sum(dim=-1, keepdim=True).clamp_(min=1)
    return head.gather(1, count - 1), count


def _keep(logits: Tensor, value: Tensor, count: Tensor) -> Tensor:
    """Keeps ``count`` [rows, 1] tokens: those above ``value`` [rows, 1] and the lowest ids of those equal to it."""
    above, equal = logits > value, logits == value
    room = count - above.sum(dim=-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))
    return logits.masked_fill(~kept, -math.inf)


def target_tokens(
    logits: Tensor,
    params: SamplingParams,
    positions: Sequence[int],
    noise: GumbelCache,
    *,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The target's token of each row of logits [rows, vocab]: int64 [rows], and ``bad``, bool [rows].

    A token is in [0, vocab_size). A row is bad if it holds a NaN or has no finite maximum; its token is -1, which can
    pass for no other.
    """
    scores = _perturbed(logits[:, :vocab_size], params, positions, noise)
    bad = ~scores.amax(dim=-1).isfinite()
    return scores.argmax(dim=-1).masked_fill_(bad, -1), bad


def margins(
    logits: Tensor,
    params: SamplingParams,
    positions: Sequence[int],
    noise: GumbelCache,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """Gap [rows] between the rule's best and second-best candidate, in nats (at the temperature); 0 is a tie."""
    best = _perturbed(logits[:, :vocab_size], params, positions, noise).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], alternatives: int, *, vocab_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities under softmax(logits), that is before any processing, of logits [rows, vocab] as they come.

    Of each row's token: [rows]; and the row's ``alternatives`` likeliest tokens, best first, lowest id on ties: int64
    and their log probabilities, both [rows, alternatives]. Float32 or wider; -inf is possible. A row's values depend on
    no other row.
    """
    wide = logits[:, :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
    logprob = F.log_softmax(wide, dim=-1)
    chosen = logprob.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1)
    top = _top(_whole_blocks(logprob.float(), alternatives), alternatives)
    return chosen, top, logprob.gather(1, top)


def _perturbed(logits: Tensor, params: SamplingParams, positions: Sequence[int], noise: GumbelCache) -> Tensor:
    """What the rule takes the argmax of, [rows, vocab_size]."""
    if params.greedy:
        return logits
    return process_logits(logits, params) + _noise(params, positions, noise, logits.shape[1])


def _noise(params: SamplingParams, positions: Sequence[int], noise: GumbelCache, vocab_size: int) -> Tensor:
    return noise.rows([params.seed] * len(positions), positions)[:, :vocab_size]


def draft_children(
    logits: Tensor,
    params: SamplingParams,
    positions: Sequence[int],
    noise: GumbelCache,
    branch: int,
    *,
    vocab_size: int | None = None,
    first: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """A draft's children of each row of logits [rows, vocab]: tokens int64, scores float32, both [rows, branch].

    Best first, lowest id on ties. The score is the draft's estimate of log P(the target picks the token): log q under
    the greedy rule, else the log-softmax of log q + g, q at the request's temperature. A score is finite and <= 0.
    Where there is no child (rows with NaN or without a finite maximum, fewer possible tokens than ``branch``) the token
    is -1 and the score float32's lowest value. ``first`` picks them from what the rule takes the argmax of; it is
    ``first_children`` if left out, and may be a kernel.
    """
    plain = SamplingParams(params.temperature, seed=params.seed)
    own = logits[:, :vocab_size]
    rows = own if params.greedy else _perturbed(own.float(), plain, positions, noise)
    return (first or first_children)(rows, branch)


def first_children(logits: Tensor, branch: int) -> tuple[Tensor, Tensor]:
    """The ``branch`` likeliest tokens of each row, and their log-probabilities, as ``draft_children`` returns them."""
    rows = _whole_blocks(logits.float(), branch)
    tokens = _top(rows, branch)
    scores = F.log_softmax(rows, dim=-1).gather(1, tokens).clamp_(max=0.0)
    missing = ~scores.isfinite()
    return tokens.masked_fill_(missing, -1), scores.masked_fill_(missing, torch.finfo(torch.float32).min)


def _whole_blocks(rows: Tensor, least: int) -> Tensor:
    """Rows padded with -inf to a whole number of blocks and at least ``least`` columns."""
    columns = max(rows.shape[1], least)
    extra = columns + -columns % _BLOCK - rows.shape[1]
    return F.pad(rows, (0, extra), value=-math.inf) if extra else rows.contiguous()


def _top(rows: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row [rows, vocab], best first, lowest id on ties: int64 [rows, k].

    They lie in the k blocks of largest maximum (lowest block on ties), so only these are searched: a third of the time
    of topk over a vocabulary of 49152.
    """
    blocks = rows.view(rows.shape[0], rows.shape[1] // _BLOCK, _BLOCK)
    chosen = _first_top(blocks.amax(dim=-1), k).sort(dim=-1).values
    candidates = blocks.gather(1, chosen.unsqueeze(2).expand(-1, -1, _BLOCK)).flatten(1)
    best = _first_top(candidates, k)
    return chosen.gather(1, best // _BLOCK) * _BLOCK + best % _BLOCK


def _first_top(values: Tensor, k: int) -> Tensor:
    """Columns of the k largest of each row of float32 values [rows, n], lowest column on ties: int64 [rows, min(k, n)].

    topk promises nothing on ties, so it ranks unique keys: the value's bits in integer order, then the column. Adding
    0 makes -0 equal to 0.
    """
    bits = (values + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys = ordered - torch.arange(values.shape[1], device=values.device)
    return keys.topk(min(k, values.shape[1]), dim=-1).indices
