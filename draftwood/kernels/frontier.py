"""The next frontier of a draft's trees, chosen on the device: several levels are drawn without the host.

Words
-----
request    one tree. It has ``beam`` rows in every forward of a draw; those without a node are padding.
level      one forward of a draw, from 0 on. The host writes the rows of level 0; this kernel absorbs the children of a
           level and writes the rows of the next one over them, in place.
first      one of the likeliest nodes that the tree has before the draw, but the anchor; those of level 0 are not open.
candidate  a node that may be expanded: the firsts, then the children of each level's rows, ``branch`` a row, in order.
reach      log survival: the sum of the scores on the path.
tail       slots behind the request's context, of its expanded nodes. A level's nodes take the next ones.

The rule is best-first growth (``draftwood.topology.BestFirst``): the likeliest open candidates that are among the
likeliest nodes of the tree, unless all together are too unlikely to be worth a level.
"""

# Kernels take pointers and sizes by position, and Triton gives them no Python types; a kernel is one function.
# ruff: noqa: PLR0915
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch
from torch import Tensor

from draftwood.kernels.tree_attention import AttentionBatch

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has no Triton; the reference serves there
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda plain: plain))
    tl = SimpleNamespace(constexpr=lambda value: value)

LEVEL, LEVELS, BEAM, ROOM, AMONG, TAIL, ANCHOR, BEFORE = range(8)
"""Columns of ``limits``: levels done, levels to do, nodes of a level at most, depth that an expanded node may not
have, likeliest nodes that it must be among (the anchor counts), tail slots taken, the anchor's position, levels that
the round has when the first one of the draw is done, that one counted unless it is of text."""

LEAST, SHARE = range(2)
"""Columns of ``worth``: survival of a level's nodes together at least; time of a level by that of the verifier's turn,
0 if it does not matter. Else a level must bring as many tokens in its time as the round does without it: the rule of
``draftwood.topology.pays``, but that all known nodes count as sent."""

_ALIGN = 4

_NONE = tl.constexpr(2**31 - 1)
_LOW = tl.constexpr(float("-inf"))


@dataclass(frozen=True, slots=True)
class DrawShape:
    """Sizes of the buffers of a draw."""

    requests: int
    beam: int
    branch: int
    levels: int
    firsts: int
    words: int  # mask words of a row

    @property
    def grown(self) -> int:
        """Children that all levels of one request can have."""
        return self.levels * self.beam * self.branch


@dataclass(frozen=True, slots=True)
class Field:
    """A typed part of each request's line of an int32 buffer."""

    name: str
    dtype: torch.dtype
    dims: tuple[int, ...]
    begin: int

    def of(self, buffer: Tensor) -> Tensor:
        """The field of all requests, a view [requests, *dims]."""
        part = buffer[:, self.begin : self.begin + math.prod(self.dims)].view(self.dtype)
        return part.unflatten(1, self.dims) if len(self.dims) > 1 else part


def _layout(fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[dict[str, Field], int]:
    """The fields side by side, and the length of a line."""
    out, begin = {}, 0
    for name, (dtype, dims) in fields.items():
        out[name] = Field(name, dtype, dims, begin)
        begin += -(-math.prod(dims) // _ALIGN) * _ALIGN
    return out, begin


def given_fields(shape: DrawShape) -> tuple[dict[str, Field], int]:
    """What the host writes: of each request, and the length of its line in int32."""
    integer, real = torch.int32, torch.float32
    return _layout(
        {
            "limits": (integer, (8,)),
            "worth": (real, (2,)),
            "row_reach": (real, (shape.beam,)),  # of the rows at hand; -inf: their children do not count
            "row_depth": (integer, (shape.beam,)),
            "token": (integer, (shape.firsts,)),
            "depth": (integer, (shape.firsts,)),
            "reach": (real, (shape.firsts,)),  # -inf: no node
            "open": (integer, (shape.firsts,)),  # 1: may be expanded
            "seen": (integer, (shape.firsts, shape.words)),  # the mask words of its parent's row
        }
    )


def drawn_fields(shape: DrawShape) -> tuple[dict[str, Field], int]:
    """What the host reads."""
    integer, real = torch.int32, torch.float32
    return _layout(
        {
            "token": (integer, (shape.grown,)),  # of each child, -1: none
            "score": (real, (shape.grown,)),
            "chosen": (integer, (shape.levels, shape.beam)),  # candidates, by level; -1: none. Of level 0: not written
            "seen": (integer, (shape.levels * shape.beam, shape.words)),  # mask words of the rows
            "done": (integer, (1,)),  # levels absorbed
        }
    )


def scratch_fields(shape: DrawShape) -> tuple[dict[str, Field], int]:
    """What the kernel keeps of each child from launch to launch."""
    return _layout(
        {
            "reach": (torch.float32, (shape.grown,)),
            "depth": (torch.int32, (shape.grown,)),
            "open": (torch.int32, (shape.grown,)),
        }
    )


@dataclass(frozen=True)
class DrawBuffers:
    """The buffers of a draw on the device of the cache, int32 [requests, line]."""

    shape: DrawShape
    given: Tensor
    drawn: Tensor
    scratch: Tensor

    @classmethod
    def over(cls, shape: DrawShape, given: Tensor) -> DrawBuffers:
        """With ``given``, int32 [requests, line], as it is."""
        lines = [fields(shape)[1] for fields in (drawn_fields, scratch_fields)]
        return cls(shape, given, *(given.new_zeros(shape.requests, line) for line in lines))

    @cached_property
    def of_given(self) -> dict[str, Tensor]:
        return {name: field.of(self.given) for name, field in given_fields(self.shape)[0].items()}

    @cached_property
    def of_drawn(self) -> dict[str, Tensor]:
        return {name: field.of(self.drawn) for name, field in drawn_fields(self.shape)[0].items()}

    @cached_property
    def of_scratch(self) -> dict[str, Tensor]:
        return {name: field.of(self.scratch) for name, field in scratch_fields(self.shape)[0].items()}


def next_frontier_reference(
    buffers: DrawBuffers, tokens: Tensor, scores: Tensor, input_ids: Tensor, batch: AttentionBatch, page: int
) -> None:
    """Absorbs the children of the level at hand and writes the next one's rows, for every request that has one.

    tokens int64, scores float32 [rows, branch] of ``batch``'s rows, request r's from ``beam * r`` on; -1: no child.
    input_ids int64 [rows]. Of ``batch`` the rows' fields, ``keys`` and ``tail_position`` are written. A request whose
    levels are all done keeps its rows, and a forward of them changes nothing.
    """
    for request, limits in enumerate(buffers.of_given["limits"]):
        if limits[LEVEL] < limits[LEVELS]:
            _absorb(buffers, request, tokens, scores, batch)
            _write_next(buffers, request, input_ids, batch, page)


def _absorb(buffers: DrawBuffers, request: int, tokens: Tensor, scores: Tensor, batch: AttentionBatch) -> None:
    shape = buffers.shape
    given, drawn, scratch = ({n: f[request] for n, f in fields.items()} for fields in _fields(buffers))
    level = int(given["limits"][LEVEL])
    fresh = slice(level * shape.beam * shape.branch, (level + 1) * shape.beam * shape.branch)
    rows = slice(request * shape.beam, (request + 1) * shape.beam)
    above = given["row_reach"].repeat_interleave(shape.branch)
    there = (tokens[rows].flatten() >= 0) & (above > -torch.inf)
    drawn["token"][fresh] = tokens[rows].flatten().int().where(there, torch.tensor(-1, dtype=torch.int32))
    drawn["score"][fresh] = scores[rows].flatten()
    scratch["reach"][fresh] = (above + scores[rows].flatten()).where(there, torch.tensor(-torch.inf))
    scratch["depth"][fresh] = given["row_depth"].repeat_interleave(shape.branch) + 1
    scratch["open"][fresh] = there.int()
    drawn["seen"].view(shape.levels, shape.beam, shape.words)[level] = batch.words[rows]
    drawn["done"][0] = level + 1


def _write_next(buffers: DrawBuffers, request: int, input_ids: Tensor, batch: AttentionBatch, page: int) -> None:
    shape = buffers.shape
    given, drawn, scratch = ({n: f[request] for n, f in fields.items()} for fields in _fields(buffers))
    level, levels, beam, room, among, tail, anchor, before = given["limits"].tolist()
    grown = (level + 1) * shape.beam * shape.branch
    reach = torch.cat([given["reach"], scratch["reach"][:grown]])
    token = torch.cat([given["token"], drawn["token"][:grown]])
    depth = torch.cat([given["depth"], scratch["depth"][:grown]])
    is_open = torch.cat([given["open"], scratch["open"][:grown]]).bool()
    order = reach.masked_fill(~is_open | (depth >= room), -torch.inf).sort(descending=True, stable=True)
    picked = [
        int(c)
        for c, value in zip(order.indices[:beam], order.values[:beam], strict=True)
        if value > -torch.inf and int((reach > value).sum()) + 1 < among
    ]
    survival, written, (least, share) = reach[picked].exp().sum(), 1 + reach.exp().sum(), given["worth"]
    worth = survival >= least and survival * (1 + (before + level) * share) >= written * share
    if level + 1 >= levels or not picked or not worth:
        given["limits"][LEVELS] = given["limits"][LEVEL] = level + 1
        return
    context, first = int(batch.context[request]), request * shape.beam
    shift = context % page
    given["row_reach"].fill_(-torch.inf)
    given["row_depth"].zero_()
    for j in range(shape.beam):
        row, slot = first + j, context + tail + j
        seen = _prefix_words(shift, shape.words)
        batch.page_id[row] = int(batch.block_table[request, slot // page])
        batch.page_offset[row] = slot % page
        chosen = picked[j] if j < len(picked) else -1
        drawn["chosen"][level + 1, j] = chosen
        input_ids[row] = int(token[chosen]) if chosen >= 0 else 0
        batch.position[row] = anchor + int(depth[chosen]) if chosen >= 0 else 0
        if chosen >= 0:
            grew = chosen - shape.firsts
            seen = given["seen"][chosen] if grew < 0 else drawn["seen"][grew // shape.branch]
            at = shift + tail + j
            seen = seen.clone()
            seen[at // 32] |= _bit(at % 32)
            batch.tail_position[request, at] = batch.position[row]
            given["row_reach"][j], given["row_depth"][j] = reach[chosen], depth[chosen]
            (given["open"] if grew < 0 else scratch["open"])[chosen if grew < 0 else grew] = 0
        batch.words[row] = seen
    batch.keys[request] = context + tail + shape.beam
    given["limits"][LEVEL], given["limits"][TAIL] = level + 1, tail + len(picked)


def _fields(buffers: DrawBuffers) -> tuple[dict[str, Tensor], ...]:
    return buffers.of_given, buffers.of_drawn, buffers.of_scratch


def _bit(place: int) -> int:
    return -(1 << 31) if place == 31 else 1 << place


def _prefix_words(shift: int, words: int) -> Tensor:
    """Mask words of a row that sees the slots before the context's end alone."""
    bits = [min(32, max(0, shift - 32 * w)) for w in range(words)]
    return torch.tensor([-1 if n == 32 else (1 << n) - 1 for n in bits], dtype=torch.int64).int()


@triton.jit
def _next_frontier_kernel(
    limits, worth, row_reach, row_depth, first_token, first_depth, first_reach, first_open, first_seen, given_line,
    out_token, out_score, out_chosen, out_seen, out_done, drawn_line,
    grown_reach, grown_depth, grown_open, scratch_line,
    child_token, child_score,
    input_ids, page_id, page_offset, position, words, keys, context, tail_position, block_table, columns,
    PAGE: tl.constexpr, BEAM: tl.constexpr, BRANCH: tl.constexpr, FIRSTS: tl.constexpr, WORDS: tl.constexpr,
    CANDIDATES: tl.constexpr, LANES: tl.constexpr, WORD_LANES: tl.constexpr,
):  # fmt: skip
    """One program: a request. CANDIDATES, LANES and WORD_LANES are powers of 2 that hold all candidates, the rows and
    the words."""
    request = tl.program_id(0)
    given, drawn, kept = request * given_line, request * drawn_line, request * scratch_line
    level = tl.load(limits + given)
    levels = tl.load(limits + given + 1)
    if level >= levels:
        return
    most = tl.load(limits + given + 2)
    room = tl.load(limits + given + 3)
    among = tl.load(limits + given + 4)
    tail = tl.load(limits + given + 5)
    anchor = tl.load(limits + given + 6)
    rounds = tl.load(limits + given + 7)
    least = tl.load(worth + given)
    share = tl.load(worth + given + 1)
    start = tl.load(context + request)
    shift = start % PAGE

    # The children of the level at hand become candidates.
    candidate = tl.arange(0, CANDIDATES)
    grown = candidate - FIRSTS
    before = level * BEAM * BRANCH
    fresh = (grown >= before) & (grown < before + BEAM * BRANCH)
    child = grown - before
    token = tl.load(child_token + request * BEAM * BRANCH + child, mask=fresh, other=-1).to(tl.int32)
    score = tl.load(child_score + request * BEAM * BRANCH + child, mask=fresh, other=0.0)
    above = tl.load(row_reach + given + child // BRANCH, mask=fresh, other=_LOW)
    below = tl.load(row_depth + given + child // BRANCH, mask=fresh, other=0) + 1
    there = fresh & (token >= 0) & (above > _LOW)
    tl.store(out_token + drawn + grown, tl.where(there, token, -1), mask=fresh)
    tl.store(out_score + drawn + grown, score, mask=fresh)
    tl.store(grown_reach + kept + grown, tl.where(there, above + score, _LOW), mask=fresh)
    tl.store(grown_depth + kept + grown, below, mask=fresh)
    tl.store(grown_open + kept + grown, there.to(tl.int32), mask=fresh)
    tl.store(out_done + drawn, level + 1)
    lane = tl.arange(0, LANES)
    is_row = lane < BEAM
    row = request * BEAM + lane
    word = tl.arange(0, WORD_LANES)
    is_seen = is_row[:, None] & (word[None, :] < WORDS)
    row_words = words + row[:, None] * WORDS + word[None, :]
    own_seen = out_seen + drawn + (level * BEAM + lane)[:, None] * WORDS + word[None, :]
    tl.store(own_seen, tl.load(row_words, mask=is_seen, other=0), mask=is_seen)
    tl.debug_barrier()

    # The likeliest of all candidates.
    is_first = candidate < FIRSTS
    is_grown = (grown >= 0) & (grown < before + BEAM * BRANCH)
    reach = tl.load(first_reach + given + candidate, mask=is_first, other=_LOW)
    reach = tl.where(is_grown, tl.load(grown_reach + kept + grown, mask=is_grown, other=_LOW), reach)
    depth = tl.load(first_depth + given + candidate, mask=is_first, other=0)
    depth = tl.where(is_grown, tl.load(grown_depth + kept + grown, mask=is_grown, other=0), depth)
    is_open = tl.load(first_open + given + candidate, mask=is_first, other=0)
    is_open = tl.where(is_grown, tl.load(grown_open + kept + grown, mask=is_grown, other=0), is_open)
    left = tl.where((is_open != 0) & (depth < room), reach, _LOW)
    picked = tl.full([LANES], -1, tl.int32)
    taken = candidate < 0
    count = 0
    survival = 0.0
    for j in tl.static_range(BEAM):
        best = tl.max(left)
        index = tl.min(tl.where(left == best, candidate, _NONE))
        rank = tl.sum((reach > best).to(tl.int32))
        good = (best > _LOW) & (most > j) & (rank + 1 < among)
        left = tl.where(candidate == index, _LOW, left)
        index = tl.where(good, index, -1)
        picked = tl.where(lane == j, index, picked)
        taken = taken | (candidate == index)
        count += good.to(tl.int32)
        survival += tl.where(good, tl.exp(best), 0.0)
    written = 1.0 + tl.sum(tl.exp(reach))
    pays = (survival >= least) & (survival * (1.0 + (rounds + level) * share) >= written * share)
    if (level + 1 >= levels) | (count == 0) | (pays == 0):
        tl.store(limits + given, level + 1)
        tl.store(limits + given + 1, level + 1)
        return
    tl.store(first_open + given + candidate, 0, mask=is_first & taken)
    tl.store(grown_open + kept + grown, 0, mask=is_grown & taken)

    # Their rows, over those of the level at hand.
    is_node = is_row & (picked >= 0)
    old = is_node & (picked < FIRSTS)
    new = is_node & (picked >= FIRSTS)
    node_token = tl.load(first_token + given + picked, mask=old, other=0)
    node_token = tl.where(new, tl.load(out_token + drawn + picked - FIRSTS, mask=new, other=0), node_token)
    node_depth = tl.load(first_depth + given + picked, mask=old, other=0)
    node_depth = tl.where(new, tl.load(grown_depth + kept + picked - FIRSTS, mask=new, other=0), node_depth)
    node_reach = tl.load(first_reach + given + picked, mask=old, other=_LOW)
    node_reach = tl.where(new, tl.load(grown_reach + kept + picked - FIRSTS, mask=new, other=_LOW), node_reach)
    bits = tl.minimum(tl.maximum(shift - 32 * word, 0), 32)
    prefix = tl.where(bits >= 32, -1, (1 << (bits % 32)) - 1)
    from_old = first_seen + given + picked[:, None] * WORDS + word[None, :]
    from_new = out_seen + drawn + ((picked - FIRSTS) // BRANCH)[:, None] * WORDS + word[None, :]
    seen = tl.where(old[:, None], tl.load(from_old, mask=old[:, None] & is_seen, other=0), prefix[None, :])
    seen = tl.where(new[:, None], tl.load(from_new, mask=new[:, None] & is_seen, other=0), seen)
    at = shift + tail + lane
    own = is_node[:, None] & (word[None, :] == (at // 32)[:, None])
    seen = seen | tl.where(own, (1 << (at % 32))[:, None], 0)
    slot = start + tail + lane
    where = anchor + node_depth
    tl.store(row_words, seen, mask=is_seen)
    tl.store(input_ids + row, node_token.to(tl.int64), mask=is_row)
    tl.store(position + row, tl.where(is_node, where, 0), mask=is_row)
    tl.store(tail_position + request * WORDS * 32 + at, where, mask=is_node)
    page = tl.load(block_table + request * columns + slot // PAGE, mask=is_row, other=0)
    tl.store(page_id + row, page.to(tl.int64), mask=is_row)
    tl.store(page_offset + row, (slot % PAGE).to(tl.int64), mask=is_row)
    tl.store(keys + request, start + tail + BEAM)
    tl.store(row_reach + given + lane, node_reach, mask=is_row)
    tl.store(row_depth + given + lane, node_depth, mask=is_row)
    tl.store(out_chosen + drawn + (level + 1) * BEAM + lane, picked, mask=is_row)
    tl.store(limits + given, level + 1)
    tl.store(limits + given + 5, tail + count)


def next_frontier_triton(
    buffers: DrawBuffers, tokens: Tensor, scores: Tensor, input_ids: Tensor, batch: AttentionBatch, page: int
) -> None:
    """As the reference, in one launch and without synchronisation."""
    shape, of, out, kept = buffers.shape, buffers.of_given, buffers.of_drawn, buffers.of_scratch
    assert tokens.is_contiguous() and scores.is_contiguous() and batch.words.shape[1] == shape.words
    with torch.cuda.device_of(buffers.given):
        _next_frontier_kernel[shape.requests,](
            of["limits"], of["worth"], of["row_reach"], of["row_depth"], of["token"], of["depth"], of["reach"],
            of["open"], of["seen"], buffers.given.stride(0),
            out["token"], out["score"], out["chosen"], out["seen"], out["done"], buffers.drawn.stride(0),
            kept["reach"], kept["depth"], kept["open"], buffers.scratch.stride(0),
            tokens, scores,
            input_ids, batch.page_id, batch.page_offset, batch.position, batch.words, batch.keys, batch.context,
            batch.tail_position, batch.block_table, batch.block_table.stride(0),
            PAGE=page, BEAM=shape.beam, BRANCH=shape.branch, FIRSTS=shape.firsts, WORDS=shape.words,
            CANDIDATES=triton.next_power_of_2(shape.firsts + shape.grown),
            LANES=triton.next_power_of_2(shape.beam), WORD_LANES=triton.next_power_of_2(shape.words), num_warps=4,
        )  # fmt: skip


def next_frontier(
    buffers: DrawBuffers, tokens: Tensor, scores: Tensor, input_ids: Tensor, batch: AttentionBatch, page: int
) -> None:
    """See ``next_frontier_reference``."""
    advance = next_frontier_triton if tokens.is_cuda else next_frontier_reference
    advance(buffers, tokens, scores, input_ids, batch, page)
