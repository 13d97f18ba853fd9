"""Between protobuf messages and the values that the services work on.

A *growth* is a set of new nodes of one session's tree. On the wire, the growths of all sessions share packed columns,
about eight bytes a node. Every check that needs no tree is made here, on whole columns at once: what ``decode_growth``
returns has parents below their children, tokens inside the vocabulary and finite scores <= 0. Whether the parents exist
is for the tree to say.

A parent must have a smaller id than its child. This excludes every cycle: one node long it is a node that names itself
(TREE_CYCLE), any longer one contains a parent that comes later than its child (TREE_FORWARD_PARENT).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from google.rpc import code_pb2

from draftwood.errors import BY_STATUS, DraftwoodError, Internal, InvalidArgument
from draftwood.features import FeatureRequest
from draftwood.tree import Proposal
from draftwood.v1 import draft_pb2, tree_pb2
from draftwood.vocabulary import Fingerprint

PROTOCOL_VERSION: Final = 1  # of the Speculate stream
UINT32_MAX: Final = 2**32 - 1
Q_TOLERANCE: Final = 1e-3  # of the sum of a proposal's probabilities
MAX_TEXT_BYTES: Final = 1024  # an error's texts end up in HTTP/2 metadata, of which gRPC takes 8 KiB


@dataclass(frozen=True, slots=True, eq=False)
class SessionGrowth:
    """New nodes of one session, ids counting up from ``first_id``."""

    handle: int
    epoch: int
    first_id: int
    parent: npt.NDArray[np.int64]  # [n] node ids; 0: the anchor of `epoch`
    token: npt.NDArray[np.int32]  # [n]
    score: npt.NDArray[np.float32]  # [n] log-probability, <= 0
    complete: bool
    drawn: Mapping[int, Proposal] = field(default_factory=dict)  # by parent id; empty unless children are sampled


@dataclass(frozen=True, slots=True)
class SessionCommit:
    """The verifier's answer to a session's tree.

    ``node_ids`` are the accepted nodes, which carry the first of ``tokens``; 0 if this draft did not draw the node.
    ``features`` are those of the ``feature_count`` positions before the anchor, packed (``draftwood.features``).
    """

    handle: int
    epoch: int
    length: int
    tokens: tuple[int, ...]
    node_ids: tuple[int, ...]
    budget: int
    feature_count: int = 0
    features: bytes = b""


@dataclass(frozen=True, slots=True)
class FeatureChunk:
    """Features of the positions [first, first + count) of a session, packed."""

    handle: int
    first: int
    count: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """One session's growth, refused as a whole; the session stays usable."""

    handle: int
    error: InvalidArgument


def encode_growth(growths: Sequence[SessionGrowth]) -> tree_pb2.Growth:
    """Packs the growths; parents are counted from the lowest one, so that they stay small."""
    bases = [_parent_base(growth.parent) for growth in growths]
    message = tree_pb2.Growth(
        handle=[growth.handle for growth in growths],
        epoch=[growth.epoch for growth in growths],
        first_id=[growth.first_id for growth in growths],
        parent_base=bases,
        count=[len(growth.parent) for growth in growths],
        complete=[growth.complete for growth in growths],
        parent=[
            parent - base if parent else 0
            for growth, base in zip(growths, bases, strict=True)
            for parent in growth.parent.tolist()
        ],
        token=[token for growth in growths for token in growth.token.tolist()],
        score=[score for growth in growths for score in growth.score.tolist()],
    )
    if any(growth.drawn for growth in growths):
        _add_proposals(message, growths)
    return message


def _add_proposals(message: tree_pb2.Growth, growths: Sequence[SessionGrowth]) -> None:
    for growth, base in zip(growths, message.parent_base, strict=True):
        message.drawn.append(len(growth.drawn))
        for parent, q in growth.drawn.items():
            message.q_parent.append(parent - base if parent else 0)
            message.q_count.append(len(q.token))
            message.q_token.extend(q.token.tolist())
            message.q_prob.extend(q.weight.tolist())


def _parent_base(parent: npt.NDArray[np.int64]) -> int:
    drawn = parent[parent > 0]
    return int(drawn.min()) - 1 if drawn.size else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """A Growth whose columns have matching lengths; session s has the nodes [bounds[s], bounds[s + 1])."""

    message: tree_pb2.Growth
    bounds: list[int]
    own: npt.NDArray[np.int64]  # [n] ids of the nodes
    parent: npt.NDArray[np.int64]  # [n] ids of the parents; 0: anchor
    token: npt.NDArray[np.int64]  # [n]
    score: npt.NDArray[np.float32]  # [n]


def decode_growth(
    message: tree_pb2.Growth, *, vocab_size: int, max_nodes: int
) -> tuple[list[SessionGrowth], list[Refusal]]:
    """Unpacks and checks a message; ``max_nodes`` holds for each entry, 0: no limit.

    Raises InvalidArgument TREE_LENGTH_MISMATCH if the columns do not fit together. Any other fault refuses the growth
    of the session that it is in and leaves the others: TREE_TOO_LARGE, TREE_BAD_ID, and for the first faulty node
    TREE_CYCLE, TREE_FORWARD_PARENT, TREE_TOKEN_OUT_OF_VOCABULARY or TREE_BAD_SCORE, and TREE_BAD_Q if what its nodes
    were sampled from is not given, is no distribution, or does not have them.
    """
    columns = _read_columns(message)
    proposals = _Proposals(message) if message.drawn else None
    faulty = _faulty_nodes(columns, vocab_size)
    growths: list[SessionGrowth] = []
    refusals: list[Refusal] = []
    for session, handle in enumerate(message.handle):
        error = _entry_fault(columns, session, max_nodes) or _node_fault(columns, session, faulty, vocab_size)
        if error:
            refusals.append(Refusal(handle, error))
            continue
        growth = _session_growth(columns, session)
        try:
            drawn = proposals.of(session, growth, columns, vocab_size) if proposals else {}
        except InvalidArgument as fault:
            refusals.append(Refusal(handle, fault))
        else:
            growths.append(replace(growth, drawn=drawn) if drawn else growth)
    return growths, refusals


def _read_columns(message: tree_pb2.Growth) -> _Columns:
    count = np.fromiter(message.count, np.int64, len(message.count))
    _check_lengths(message, int(count.sum()))
    nodes = len(message.parent)
    bounds = np.zeros(len(count) + 1, np.int64)
    np.cumsum(count, out=bounds[1:])
    first_id = np.fromiter(message.first_id, np.int64, len(count))
    base = np.fromiter(message.parent_base, np.int64, len(count))
    relative = np.fromiter(message.parent, np.int64, nodes)
    return _Columns(
        message=message,
        bounds=bounds.tolist(),
        own=np.arange(nodes) + np.repeat(first_id - bounds[:-1], count),
        parent=np.where(relative > 0, relative + np.repeat(base, count), 0),
        token=np.fromiter(message.token, np.int64, nodes),
        score=np.fromiter(message.score, np.float32, nodes),
    )


def _check_lengths(message: tree_pb2.Growth, nodes: int) -> None:
    sessions = len(message.handle)
    for name in ("epoch", "first_id", "parent_base", "count", "complete"):
        _check_length(f"growth.{name}", len(getattr(message, name)), sessions, "sessions")
    for name in ("parent", "token", "score"):
        _check_length(f"growth.{name}", len(getattr(message, name)), nodes, "nodes")
    if message.drawn:
        _check_length("growth.drawn", len(message.drawn), sessions, "sessions")
    proposals, listed = sum(message.drawn), sum(message.q_count)
    for name in ("q_parent", "q_count"):
        _check_length(f"growth.{name}", len(getattr(message, name)), proposals, "distributions")
    for name in ("q_token", "q_prob"):
        _check_length(f"growth.{name}", len(getattr(message, name)), listed, "tokens of distributions")


def _check_length(field: str, length: int, expected: int, what: str) -> None:
    if length != expected:
        raise InvalidArgument("TREE_LENGTH_MISMATCH", f"{length} entries for {expected} {what}", field=field)


def _faulty_nodes(columns: _Columns, vocab_size: int) -> npt.NDArray[np.int64]:
    """Indices of the faulty nodes, ascending."""
    score = columns.score
    fine = (columns.parent < columns.own) & (columns.token < vocab_size) & (score <= 0) & np.isfinite(score)
    return np.flatnonzero(~fine)


def _entry_fault(columns: _Columns, session: int, max_nodes: int) -> InvalidArgument | None:
    count = columns.message.count[session]
    first_id = columns.message.first_id[session]
    if max_nodes and count > max_nodes:
        text = f"{count} nodes in one growth; the limit is {max_nodes}"
        return InvalidArgument("TREE_TOO_LARGE", text, field=f"growth.count[{session}]")
    if first_id == 0 or first_id + count - 1 > UINT32_MAX:
        text = f"{count} nodes from id {first_id}; ids run from 1 to {UINT32_MAX}"
        return InvalidArgument("TREE_BAD_ID", text, field=f"growth.first_id[{session}]")
    return None


def _node_fault(
    columns: _Columns, session: int, faulty: npt.NDArray[np.int64], vocab_size: int
) -> InvalidArgument | None:
    if not faulty.size:
        return None
    at = int(np.searchsorted(faulty, columns.bounds[session]))
    if at == faulty.size or faulty[at] >= columns.bounds[session + 1]:
        return None
    return _describe_fault(columns, int(faulty[at]), vocab_size)


def _describe_fault(columns: _Columns, node: int, vocab_size: int) -> InvalidArgument:
    own, parent, token = int(columns.own[node]), int(columns.parent[node]), int(columns.token[node])
    if parent == own:
        return InvalidArgument("TREE_CYCLE", f"node {own} is its own parent", field=f"growth.parent[{node}]")
    if parent > own:
        text = f"parent {parent} of node {own} comes later than the node"
        return InvalidArgument("TREE_FORWARD_PARENT", text, field=f"growth.parent[{node}]")
    if token >= vocab_size:
        text = f"token {token}; the vocabulary has {vocab_size}"
        return InvalidArgument("TREE_TOKEN_OUT_OF_VOCABULARY", text, field=f"growth.token[{node}]")
    text = f"score {columns.score[node]} is not a finite number <= 0"
    return InvalidArgument("TREE_BAD_SCORE", text, field=f"growth.score[{node}]")


def _session_growth(columns: _Columns, session: int) -> SessionGrowth:
    message = columns.message
    nodes = slice(columns.bounds[session], columns.bounds[session + 1])
    return SessionGrowth(
        handle=message.handle[session],
        epoch=message.epoch[session],
        first_id=message.first_id[session],
        parent=columns.parent[nodes],
        token=columns.token[nodes].astype(np.int32),
        score=columns.score[nodes],
        complete=message.complete[session],
    )


class _Proposals:
    """The distributions of a Growth whose columns have matching lengths."""

    def __init__(self, message: tree_pb2.Growth) -> None:
        self._message = message
        self._sessions = np.cumsum([0, *message.drawn]).tolist()
        self._bounds = np.cumsum([0, *message.q_count]).tolist()
        self._token = np.fromiter(message.q_token, np.int64, len(message.q_token))
        self._prob = np.fromiter(message.q_prob, np.float32, len(message.q_prob))

    def of(self, session: int, growth: SessionGrowth, columns: _Columns, vocab_size: int) -> dict[int, Proposal]:
        """The session's distributions by parent id; raises InvalidArgument TREE_BAD_Q if they do not fit its nodes."""
        drawn: dict[int, Proposal] = {}
        for k in range(self._sessions[session], self._sessions[session + 1]):
            relative = self._message.q_parent[k]
            parent = relative + self._message.parent_base[session] if relative else 0
            if parent in drawn:
                raise InvalidArgument("TREE_BAD_Q", f"two distributions for {parent}", field=f"growth.q_parent[{k}]")
            drawn[parent] = self._checked(k, vocab_size)
        first = columns.bounds[session]
        for node, (parent, token) in enumerate(zip(growth.parent.tolist(), growth.token.tolist(), strict=True), first):
            if drawn and parent not in drawn:
                text = f"what the children of {parent} were sampled from is not given"
                raise InvalidArgument("TREE_BAD_Q", text, field=f"growth.parent[{node}]")
            if drawn and token not in drawn[parent].token:
                text = f"token {token} was not sampled from the distribution given for {parent}, where it has 0"
                raise InvalidArgument("TREE_BAD_Q", text, field=f"growth.token[{node}]")
        return drawn

    def _checked(self, k: int, vocab_size: int) -> Proposal:
        start, end = self._bounds[k], self._bounds[k + 1]
        token, prob = self._token[start:end], self._prob[start:end]
        at = np.flatnonzero(token >= vocab_size)
        if at.size:
            text = f"token {token[at[0]]}; the vocabulary has {vocab_size}"
            raise InvalidArgument("TREE_BAD_Q", text, field=f"growth.q_token[{start + at[0]}]")
        at = np.flatnonzero(np.diff(token) <= 0)
        if at.size:
            text = f"token {token[at[0] + 1]} follows {token[at[0]]}; tokens of a distribution ascend"
            raise InvalidArgument("TREE_BAD_Q", text, field=f"growth.q_token[{start + at[0] + 1}]")
        at = np.flatnonzero(~((prob > 0) & np.isfinite(prob)))
        if at.size:
            text = f"probability {prob[at[0]]} is not a finite number > 0"
            raise InvalidArgument("TREE_BAD_Q", text, field=f"growth.q_prob[{start + at[0]}]")
        total = float(prob.sum(dtype=np.float64))
        if abs(total - 1) > Q_TOLERANCE:
            text = f"the probabilities sum to {total:.6g}, not to 1 within {Q_TOLERANCE:g}"
            raise InvalidArgument("TREE_BAD_Q", text, field=f"growth.q_count[{k}]")
        return Proposal(token, prob)


def decode_step_times(message: draft_pb2.StepTimes) -> tuple[tuple[int, float], ...]:
    """Rows and milliseconds; raises InvalidArgument STEP_TIMES unless they are a curve."""
    points = tuple(zip(message.rows, message.ms, strict=False))
    ascending = all(a < b for a, b in pairwise(message.rows))
    sound = all(np.isfinite(ms) and ms > 0 for ms in message.ms)
    if len(message.rows) != len(message.ms) or len(points) < 2 or not ascending or not sound:
        text = f"rows {list(message.rows)} and {len(message.ms)} durations: two or more, ascending, above 0"
        raise InvalidArgument("STEP_TIMES", text, field="step_times")
    return points


def encode_commits(commits: Sequence[SessionCommit]) -> draft_pb2.Commits:
    featured = any(commit.feature_count for commit in commits)
    return draft_pb2.Commits(
        handle=[commit.handle for commit in commits],
        epoch=[commit.epoch for commit in commits],
        length=[commit.length for commit in commits],
        accepted=[len(commit.node_ids) for commit in commits],
        count=[len(commit.tokens) for commit in commits],
        budget=[commit.budget for commit in commits],
        token=[token for commit in commits for token in commit.tokens],
        node_id=[node_id for commit in commits for node_id in commit.node_ids],
        feature_count=[commit.feature_count for commit in commits] if featured else [],
        features=b"".join(commit.features for commit in commits),
    )


def decode_commits(message: draft_pb2.Commits) -> list[SessionCommit]:
    """Unpacks a message; raises InvalidArgument TREE_LENGTH_MISMATCH if the columns do not fit together."""
    sessions = len(message.handle)
    for name in ("epoch", "length", "accepted", "count", "budget"):
        _check_length(f"commits.{name}", len(getattr(message, name)), sessions, "sessions")
    _check_length("commits.token", len(message.token), sum(message.count), "tokens")
    _check_length("commits.node_id", len(message.node_id), sum(message.accepted), "accepted nodes")
    _check_accepted(message)
    rows = zip(message.handle, message.epoch, message.length, message.budget, strict=True)
    tokens, node_ids = _slices(message.token, message.count), _slices(message.node_id, message.accepted)
    features = _feature_slices(message)
    return [
        SessionCommit(handle, epoch, length, next(tokens), next(node_ids), budget, *next(features))
        for handle, epoch, length, budget in rows
    ]


def _feature_slices(message: draft_pb2.Commits) -> Iterator[tuple[int, bytes]]:
    """Number of positions and features of each session."""
    counts = list(message.feature_count) or [0] * len(message.handle)
    _check_length("commits.feature_count", len(counts), len(message.handle), "sessions")
    positions, size = sum(counts), len(message.features)
    if size % max(1, positions) or bool(size) != bool(positions):
        text = f"{size} bytes are not the features of {positions} positions"
        raise InvalidArgument("TREE_LENGTH_MISMATCH", text, field="commits.features")
    for session, (count, length) in enumerate(zip(counts, message.length, strict=True)):
        if count and count >= length:
            text = f"features of {count} positions before the anchor, which is at {length - 1}"
            raise InvalidArgument("TREE_LENGTH_MISMATCH", text, field=f"commits.feature_count[{session}]")
    bounds = np.cumsum([0, *counts]).tolist()
    each = size // max(1, positions)
    return (
        (count, message.features[each * start : each * end])
        for count, (start, end) in zip(counts, pairwise(bounds), strict=True)
    )


def encode_chunk(chunk: FeatureChunk) -> draft_pb2.FeatureChunk:
    return draft_pb2.FeatureChunk(handle=chunk.handle, first=chunk.first, count=chunk.count, data=chunk.data)


def decode_chunk(message: draft_pb2.FeatureChunk) -> FeatureChunk:
    return FeatureChunk(message.handle, message.first, message.count, message.data)


def feature_request_to_proto(request: FeatureRequest) -> draft_pb2.FeatureRequest:
    return draft_pb2.FeatureRequest(layers=request.layers, hidden_size=request.hidden_size, target=request.target)


def feature_request_from_proto(message: draft_pb2.FeatureRequest) -> FeatureRequest:
    return FeatureRequest(tuple(message.layers), message.hidden_size, message.target)


def _check_accepted(message: draft_pb2.Commits) -> None:
    for session, (accepted, count) in enumerate(zip(message.accepted, message.count, strict=True)):
        if accepted > count:
            text = f"{accepted} accepted nodes carry {count} tokens"
            raise InvalidArgument("TREE_LENGTH_MISMATCH", text, field=f"commits.accepted[{session}]")


def _slices(column: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    bounds = np.cumsum([0, *counts]).tolist()
    return (tuple(column[start:end]) for start, end in pairwise(bounds))


def error_to_proto(error: DraftwoodError) -> tree_pb2.Error:
    """The in-band form; texts are cut to what fits into metadata as well."""
    return tree_pb2.Error(
        code=code_pb2.Code.Value(error.status),
        reason=error.reason,
        message=_clipped(error.message, MAX_TEXT_BYTES),
        field=_clipped(error.field, MAX_TEXT_BYTES // 4),
        retry_after_ms=error.retry_after_ms,
    )


def _clipped(text: str, max_bytes: int) -> str:
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def error_from_proto(message: tree_pb2.Error) -> DraftwoodError:
    """The error as the peer raised it; a code that we do not use becomes Internal."""
    known = message.code in code_pb2.Code.values()
    kind = BY_STATUS.get(code_pb2.Code.Name(message.code), Internal) if known else Internal
    reason = message.reason or "INTERNAL"
    return kind(reason, message.message, field=message.field, retry_after_ms=message.retry_after_ms)


@dataclass(frozen=True, slots=True)
class Drawing:
    """How drafts are to draw, on top of their own settings."""

    max_depth: int | None = None  # of the deepest nodes, the anchor's children are 1 deep; None: no cap
    chain: bool = False  # one node a level

    def room(self, own: int) -> int:
        """Depth that nodes may have, ``own`` being what they may have without."""
        return own if self.max_depth is None else min(own, self.max_depth)


def drawing_to_proto(drawing: Drawing) -> draft_pb2.Drawing:
    growth = draft_pb2.GROWTH_RULE_CHAIN if drawing.chain else draft_pb2.GROWTH_RULE_UNSPECIFIED
    return draft_pb2.Drawing(max_depth=drawing.max_depth, growth=growth)


def drawing_from_proto(message: draft_pb2.Drawing) -> Drawing:
    """A rule of growth that we do not know is left to our own settings: it is a wish, and changes no text."""
    depth = message.max_depth if message.HasField("max_depth") else None
    return Drawing(depth, message.growth == draft_pb2.GROWTH_RULE_CHAIN)


def smaller_caps(a: draft_pb2.Caps, b: draft_pb2.Caps) -> draft_pb2.Caps:
    """The limits that hold between two sides: the smaller of each; 0 is no limit."""
    names = [field.name for field in draft_pb2.Caps.DESCRIPTOR.fields]
    return draft_pb2.Caps(**{name: _smaller(getattr(a, name), getattr(b, name)) for name in names})


def _smaller(a: int, b: int) -> int:
    return min(a, b) if a and b else max(a, b)


def tokenizer_to_proto(fingerprint: Fingerprint) -> draft_pb2.TokenizerInfo:
    return draft_pb2.TokenizerInfo(
        size=fingerprint.size,
        sha256=fingerprint.sha256,
        vocab_size=fingerprint.vocab_size,
        special_ids=fingerprint.special_ids,
    )


def tokenizer_from_proto(message: draft_pb2.TokenizerInfo) -> Fingerprint:
    return Fingerprint(message.size, message.sha256, message.vocab_size, tuple(message.special_ids))
