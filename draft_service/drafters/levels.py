"""Growing trees level by level, many sessions in one forward: what all such drafters share.

Which nodes a level expands, and which are sent when the round ends, is the topology's choice (``draftwood.topology``).
While the verifier works, the likeliest nodes are expanded, whatever the topology. A commit re-roots the tree: what
hangs below the accepted path and the target's own token may be kept, keys and values included.

Slots: the cache holds the committed prefix, then the expanded nodes of the tree in the order of their expansion.

Tokens are the target's ids everywhere but in the model's input and output, if it has a vocabulary of its own
(``draftwood.runtime.reduced``).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draft_service.drafter import Key, Numbering, SessionCommitted, SessionStart, StepMs
from draft_service.topologies import best_first, make_topology
from draftwood import tree as tt
from draftwood.acceptance import sample_children, sibling_score
from draftwood.config import DraftSettings
from draftwood.errors import ResourceExhausted
from draftwood.features import FeatureRequest, Features
from draftwood.noise import GumbelCache
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.model import top_children
from draftwood.runtime.pages import PagePool
from draftwood.runtime.reduced import ReducedVocabulary
from draftwood.sampling import draft_children
from draftwood.telemetry import METRICS
from draftwood.topology import Fixed, Topology, View, chain
from draftwood.tree import Proposal, TokenTree
from draftwood.vocabulary import Vocabulary
from draftwood.wire import Drawing, SessionGrowth

Children = tuple[np.ndarray, np.ndarray, Sequence[Proposal | None]]
"""Tokens and scores, [parents, width] each, token -1: no child; and what the parents' children were sampled from, if
they were."""

UNEXPANDED = -1
MOST_TAIL_TOKENS = 256
"""Expanded nodes kept in the cache of one session."""

MOST_NODES = 4 * MOST_TAIL_TOKENS

LEVELS_TIMED = 9
"""Last levels whose median is the time of one."""

TURN_WEIGHT = 0.3
"""Of one round in the usual time from a tree to its commit, and in the usual number of levels."""

FEW_LEVELS = 3
"""Levels that the device draws at once in a session's first round, and of those ahead: a draw that ends early costs its
levels all the same, and a commit that comes meanwhile waits."""

WARM_UP_LINK = -1
"""Stands for the verifier of made-up sessions."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a level's forward yields, of the wanted rows."""

    logits: Tensor | None = None  # None: the children have been picked
    children: tuple[Tensor, Tensor] | None = None  # tokens, log-probabilities, [rows, width]


class DraftRuntime(Protocol):
    """What a drafter that grows trees level by level uses of its model."""

    pool: PagePool
    device: torch.device
    max_context_tokens: int
    reduced: ReducedVocabulary | None

    def forward(self, parts: Sequence[Rows]) -> Tensor:
        """Logits of the wanted rows."""


@dataclass(eq=False)
class LevelSession:
    """One session's text, cache and tree. The row of the text's token ``skipped + k`` is at slot k."""

    start: SessionStart
    tokens: list[int]  # committed, those that have a row
    epoch: int
    budget: int
    skipped: int = 0  # tokens at the start that have none
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # committed tokens in the cache
    tree: TokenTree = field(init=False)
    reach: np.ndarray = field(init=False)  # log survival, [tree.size]
    depth: np.ndarray = field(init=False)  # [tree.size]
    slot: np.ndarray = field(init=False)  # place in the tail, [tree.size]
    expanded: np.ndarray = field(init=False)  # nodes by their place in the tail
    seen: np.ndarray = field(init=False)  # bool [tail, tail], what each expanded node sees of the tail
    frontier: list[int] | None = None  # nodes to expand now; None: not known
    step_ms: StepMs = field(init=False)  # as last told
    drawn: dict[int, Proposal] = field(default_factory=dict)  # by node: what its children were sampled from
    numbering: Numbering = field(default_factory=Numbering)
    levels: int = 0  # forwards of this round
    complete: bool = False
    given_up: bool = False  # there is no room to go on in this round
    sent_s: float | None = None  # clock time at which this round was complete
    turn_ms: float = 0.0  # from then to the commit, lately; 0: not known
    usual_levels: float = FEW_LEVELS  # forwards of a round that the device has drawn, lately
    outgrown: bool = False  # its text leaves no room for a node: nothing is drawn for it any more
    drawing: Drawing = field(init=False)

    def __post_init__(self) -> None:
        self.step_ms = self.start.step_ms
        self.drawing = self.start.drawing
        self.plant_anchor()

    def plant(self, tree: TokenTree, expanded: np.ndarray, seen: np.ndarray) -> None:
        """Replaces the tree, and the expanded nodes in the tail."""
        self.tree, self.reach, self.depth = tree, tt.log_survival(tree), tt.depths(tree)
        self.slot, self.expanded, self.seen = np.full(tree.size, UNEXPANDED, np.int64), expanded, seen
        self.slot[expanded] = np.arange(len(expanded))

    def plant_anchor(self) -> None:
        """Starts over: a tree of the last committed token alone."""
        anchor = self.tokens[-1] if self.tokens else self.start.tokens[-1]
        self.plant(TokenTree.root(anchor), np.zeros(0, np.int64), np.zeros((0, 0), np.bool_))

    def answered(self, now: float) -> None:
        """The verifier's commit is there, at that clock time."""
        if self.sent_s is not None:
            turn_ms = 1e3 * (now - self.sent_s)
            self.turn_ms += (TURN_WEIGHT if self.turn_ms else 1.0) * (turn_ms - self.turn_ms)
        self.sent_s = None

    def extend(
        self, parent: np.ndarray, token: np.ndarray, score: np.ndarray, levels: Sequence[int] | None = None
    ) -> None:
        """Adds children of nodes that had none: ``levels`` are how many are on each level, if some are below others."""
        first = self.tree.size
        self.tree = tt.extend(self.tree, parent, token, score)
        self.reach = np.concatenate([self.reach, score])
        self.depth = np.concatenate([self.depth, np.ones(len(parent), self.depth.dtype)])
        self.slot = np.concatenate([self.slot, np.full(len(parent), UNEXPANDED, np.int64)])
        begin = first
        for count in levels or (len(parent),):
            above = parent[begin - first : begin - first + count]
            self.reach[begin : begin + count] += self.reach[above]
            self.depth[begin : begin + count] += self.depth[above]
            begin += count
        self.numbering.extend(self.tree)

    def place(self, nodes: list[int]) -> None:
        """Gives nodes the next places in the tail: each sees what its parent sees, and itself."""
        tail, count = self.tail, len(nodes)
        above = self.slot[self.tree.parent[nodes]]
        seen = np.zeros((tail + count, tail + count), np.bool_)
        seen[:tail, :tail] = self.seen
        below = np.nonzero(above != UNEXPANDED)[0]
        seen[tail + below, :tail] = self.seen[above[below]]
        seen[np.arange(tail, tail + count), np.arange(tail, tail + count)] = True
        self.slot[nodes] = np.arange(tail, tail + count)
        self.seen, self.expanded = seen, np.concatenate([self.expanded, np.array(nodes, np.int64)])

    def place_drawn(self, nodes: np.ndarray, seen: np.ndarray) -> None:
        """As ``place``, of nodes whose rows say already what they see of the tail: bool [nodes, at least the tail]."""
        tail, count = self.tail, len(nodes)
        whole = np.zeros((tail + count, tail + count), np.bool_)
        whole[:tail, :tail] = self.seen
        whole[tail:] = seen[:, : tail + count]
        self.slot[nodes] = np.arange(tail, tail + count)
        self.seen, self.expanded = whole, np.concatenate([self.expanded, nodes])

    @property
    def sampled(self) -> bool:
        return self.start.rule is Rule.REJECTION and not self.start.sampling.greedy

    @property
    def rule(self) -> SamplingParams:
        """What children are drawn by: the noise helps where the target's choice has it."""
        noise = self.start.rule is Rule.SHARED_NOISE and not self.start.sampling.greedy
        return self.start.sampling if noise else SamplingParams()

    @property
    def length(self) -> int:
        """Tokens committed."""
        return self.skipped + len(self.tokens)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def tail(self) -> int:
        """Expanded nodes in the cache, the anchor not counted: it belongs to the prefix."""
        return len(self.expanded)


class LevelDrafter(ABC):
    """Grows trees level by level; a subclass says what a forward takes and what becomes of the tree at a commit."""

    kind: str
    rules: tuple[Rule, ...] = ()
    features: FeatureRequest | None = None
    rereads: bool = False
    """Whether a text can be read again from its beginning."""

    def __init__(
        self,
        runtime: DraftRuntime,
        settings: DraftSettings,
        model: str,
        vocabulary: Vocabulary,
        topology: Topology | None = None,
        random: np.random.Generator | None = None,
    ) -> None:
        """``topology`` is the one that the settings name if left out.

        ``random`` samples children under the rejection rule; a generator with a random seed if left out.
        """
        self._random = random or np.random.default_rng()
        self.model = model
        self.vocabulary: Vocabulary | None = vocabulary
        self._runtime = runtime
        self._settings = settings
        self._topology = topology or make_topology(settings)
        self._chain = Fixed(chain(settings.depth), self._topology.width)
        self._ahead = best_first(settings)
        self._token_count = len(vocabulary.tokens)
        self._reduced = runtime.reduced
        size = self._own_size(self._token_count)
        kept = torch.from_numpy(self._reduced.target_ids[:size]) if self._reduced else None
        self._noise = GumbelCache(self._token_count, runtime.device, 128, tokens=kept)
        self._sessions: dict[Key, LevelSession] = {}
        self._levels_s: deque[float] = deque(maxlen=LEVELS_TIMED)

    @abstractmethod
    def _begin(self, start: SessionStart) -> LevelSession:
        """The state of a new session."""

    @abstractmethod
    def _follow(self, session: LevelSession, tokens: tuple[int, ...]) -> None:
        """Adds committed tokens to the text, and keeps of tree and cache what holds for the new anchor."""

    @abstractmethod
    def _forward(self, jobs: list[LevelSession], parts: list[Rows]) -> Forwarded:
        """Of the wanted rows of each session's part."""

    def feed(self, key: Key, first: int, features: Features) -> None:
        """See ``Drafter``."""
        raise AssertionError("no features have been asked for")

    def warm_up(self, sessions: Sequence[int] = (1, 8)) -> None:
        """Draws two rounds for so many made-up sessions: what is compiled or loaded at its first use is by then."""
        size, depth = self._runtime.pool.page_tokens, self._settings.depth
        tokens = tuple(range(min(size // 2, self._token_count)))
        start = SessionStart(
            0, tokens, SamplingParams(), self._settings.beam, self._token_count, MOST_NODES, depth + 1, 4 * size
        )
        for count in sessions:
            keys = [(WARM_UP_LINK, k) for k in range(count)]
            for key in keys:
                self.open(key, start)
                self._prime(self._sessions[key])
            for epoch in (1, 2):
                while any(not self._sessions[key].complete for key in keys):
                    self.work()
                for key in keys:
                    session = self._sessions[key]
                    taken = (*session.tree.token[1:2].tolist(), 0)
                    length = session.length + len(taken)
                    self.commit(key, SessionCommitted(epoch, length, taken, self._settings.beam))
                    self._prime(session)
            for key in keys:
                self.close(key)

    def _prime(self, session: LevelSession) -> None:
        """Gives a made-up session what a verifier would beside its tokens."""
        return

    # --- sessions ---

    def open(self, key: Key, start: SessionStart) -> None:
        session = self._sessions[key] = self._begin(start)
        self._note_room(session)

    def close(self, key: Key) -> None:
        session = self._sessions.pop(key, None)
        if session:
            self._runtime.pool.give(session.pages)
            METRICS.outgrown_sessions.dec(session.outgrown)

    def _note_room(self, session: LevelSession) -> None:
        """Counts a session whose text has reached the limit of our context or of the verifier's."""
        if not session.outgrown and self._context_room(session) <= 0:
            session.outgrown = True
            METRICS.outgrown_sessions.inc()
            self._give_pages(session)

    def _give_pages(self, session: LevelSession) -> None:
        """Gives all pages back, for others; the session's text is to be read again from its beginning."""
        self._runtime.pool.give(session.pages)
        session.pages, session.cached, session.frontier, session.drawn = [], 0, None, {}
        session.plant_anchor()
        session.numbering.restart(None)

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        committed.check_follows(session.length)
        session.answered(time.perf_counter())
        self._follow(session, committed.tokens)
        session.epoch, session.budget = committed.epoch, committed.budget
        session.step_ms, session.drawing = committed.step_ms, committed.drawing
        session.levels, session.complete, session.given_up, session.frontier = 0, False, False, None
        self._note_room(session)

    def _observe(self, session: LevelSession, tokens: tuple[int, ...]) -> list[int]:
        """Walks the tree along committed tokens; the topology learns from it."""
        walked = tt.walk(session.tree, tokens)
        if not session.sampled:
            self._topology.observe(_ranks_taken(session, walked, on_tree=len(walked) == len(tokens)))
        return walked

    # --- growth ---

    def wants_work(self) -> bool:
        return any(self._busy(s) for s in self._sessions.values())

    def _busy(self, session: LevelSession) -> bool:
        if not session.budget:
            return False
        if not session.complete:
            return True
        most = self._settings.depth + self._settings.lookahead_levels
        return session.levels < most and not session.given_up and bool(self._frontier(session))

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        """A level for all sessions whose round is open, or all levels at once where the device can pick what they
        expand; while none is, the same ahead for those that wait."""
        busy = {key: s for key, s in self._sessions.items() if self._busy(s)}
        opened = {key: s for key, s in busy.items() if not s.complete}
        began = time.perf_counter()
        levels = self._expand(list((opened or busy).values()))
        now, out = time.perf_counter(), []
        if opened and levels:
            self._levels_s.append((now - began) / levels)
        for key, session in opened.items():
            if self._is_done(session):
                session.sent_s = now
                session.usual_levels += TURN_WEIGHT * (session.levels - session.usual_levels)
                session.complete, session.levels = True, max(session.levels, self._settings.depth)
                session.frontier = None
                out.append((key, self._pack(session, key[1])))
        return out

    def _is_done(self, session: LevelSession) -> bool:
        return session.given_up or not (session.pending or self._frontier(session))

    def _pack(self, session: LevelSession, handle: int) -> SessionGrowth:
        nodes = self._shape(session).chosen(self._view(session)).tolist()
        fresh = [node for node in nodes if session.numbering.ids[node] < 0]
        growth = session.numbering.growth(session.tree, nodes, session.epoch, handle, complete=True)
        if not session.sampled:
            return growth
        parents = dict.fromkeys(session.tree.parent[fresh].tolist())
        return replace(growth, drawn={int(session.numbering.ids[p]): session.drawn[p] for p in parents})

    def _frontier(self, session: LevelSession) -> list[int]:
        """Nodes to expand now, best first: the topology's, and once the round is complete the likeliest."""
        if session.frontier is None:
            session.frontier = [] if session.pending else self._next(session)
        return session.frontier

    def _next(self, session: LevelSession) -> list[int]:
        view = self._view(session)
        ahead = session.complete
        nodes = self._ahead.likeliest(view, 2 * view.budget) if ahead else self._shape(session).frontier(view)
        chosen: list[int] = nodes[: MOST_TAIL_TOKENS - session.tail].tolist()
        return chosen

    def _shape(self, session: LevelSession) -> Topology:
        return self._chain if session.drawing.chain else self._topology

    def _view(self, session: LevelSession) -> View:
        unexpanded = session.slot == UNEXPANDED
        unexpanded[0] = False
        budget = min(session.budget, session.start.max_nodes)
        room = min(session.drawing.room(session.start.max_depth), self._context_room(session))
        level_ms = 1e3 * median(self._levels_s) if self._levels_s else 0.0
        turn_ms = session.turn_ms if session.step_ms else 0.0  # a verifier that tells no times wants all nodes
        return View(
            session.tree, session.reach, session.depth, unexpanded, budget, room, session.levels, session.step_ms,
            level_ms, turn_ms,
        )  # fmt: skip

    def _context_room(self, session: LevelSession) -> int:
        limit = min(self._runtime.max_context_tokens, session.start.max_context_tokens)
        return limit - session.length

    def _expand(self, sessions: list[LevelSession]) -> int:
        """One forward; returns how many levels that was."""
        parts, jobs, left = [], [], self._settings.max_step_tokens
        for session in sessions:
            rows = self._rows(session, left)
            if rows is not None:
                parts.append(rows)
                jobs.append(session)
                left -= len(rows.token)
        if not parts:
            return 0
        found = self._forward(jobs, parts)
        parents = [wanted_nodes(session, part) for session, part in zip(jobs, parts, strict=True)]
        if found.children:
            children = self._split(found.children, [len(p) for p in parents])
        else:
            assert found.logits is not None
            children = self._children(found.logits, jobs, parents)
        is_level = not any(session.pending for session in jobs)
        for session, part, above, below in zip(jobs, parts, parents, children, strict=True):
            if session.pending:
                session.cached += len(part.token)
            self._grow(session, above, below)
        return int(is_level)

    def _children(self, logits: Tensor, jobs: list[LevelSession], parents: list[list[int]]) -> list[Children]:
        """Tokens and scores [parents][width] proposed below each session's parents; one call a rule, not a session."""
        pieces = torch.split(logits, [len(p) for p in parents])
        groups: dict[tuple[SamplingParams, int], list[int]] = {}
        for k, session in enumerate(jobs):
            size = self._own_size(session.start.vocab_size)
            if not session.sampled:
                groups.setdefault((session.rule, size), []).append(k)
        none = np.zeros((0, self._topology.width), np.int64)
        out = [
            self._sample(session, piece) if session.sampled else (none, none, [])
            for session, piece in zip(jobs, pieces, strict=True)
        ]
        for (rule, size), members in groups.items():
            rows = logits if len(members) == len(jobs) else torch.cat([pieces[k] for k in members])
            positions = [int(d) + jobs[k].length for k in members for d in jobs[k].depth[parents[k]]]
            if rule.greedy and self._settings.greedy_temperature != 1:
                rows = rows.float() / self._settings.greedy_temperature
            if positions:
                found = draft_children(
                    rows, rule, positions, self._noise, self._topology.width,
                    vocab_size=size, first=top_children,
                )  # fmt: skip
                for k, own in zip(members, self._split(found, [len(parents[k]) for k in members]), strict=True):
                    out[k] = own
        return out

    def _split(self, found: tuple[Tensor, Tensor], counts: list[int]) -> list[Children]:
        """Tokens and scores of all parents, by session; waits for the device."""
        tokens, scores = (column.cpu().numpy() for column in found)
        tokens, ends = self._in_target_tokens(tokens), np.cumsum(counts)[:-1]
        return [(token, score, []) for token, score in zip(np.split(tokens, ends), np.split(scores, ends), strict=True)]

    def _sample(self, session: LevelSession, logits: Tensor) -> Children:
        """Children for the rejection rule; their scores are those of their ranks, so that a cut is one by structure."""
        settings, size = self._settings, self._own_size(session.start.vocab_size)
        q = SamplingParams(session.start.sampling.temperature, min(settings.q_top_k, size), settings.q_top_p)
        tokens, proposals = sample_children(logits, q, self._topology.width, self._random, vocab_size=size)
        by_rank = [sibling_score(rank) for rank in range(self._topology.width)]
        if self._reduced:
            tokens = self._reduced.to_target(tokens)
            proposals = [p and replace(p, token=self._reduced.target_ids[p.token]) for p in proposals]
        return tokens, np.tile(by_rank, (len(proposals), 1)), proposals

    def _own_size(self, target_size: int) -> int:
        """Columns of the model's output that are tokens below both the target's size and our tokenizer's."""
        size = min(self._token_count, target_size)
        return self._reduced.count_below(size) if self._reduced else size

    def _in_target_tokens(self, tokens: np.ndarray) -> np.ndarray:
        return self._reduced.to_target(tokens) if self._reduced else tokens

    def _rows(self, session: LevelSession, most: int) -> Rows | None:
        """The session's rows of the next forward: committed tokens it lacks, else its frontier. None: nothing now."""
        if most <= 0:
            return None
        # Of a text that does not fit, nothing is read: others would lack the pages.
        if not self._room_for(session, session.pending or min(most, len(self._frontier(session)))):
            session.given_up = True
            if session.pending and self.rereads:
                self._give_pages(session)
            return None
        if session.pending:
            return self._catch_up(session, most)
        nodes = sorted(self._frontier(session)[:most])
        if not nodes:
            return None
        session.levels += 1
        session.place(nodes)
        return self._level(session, nodes)

    def _catch_up(self, session: LevelSession, most: int) -> Rows:
        return catch_up_rows(session, min(session.pending, most))

    def _level(self, session: LevelSession, nodes: list[int]) -> Rows:
        return level_rows(session, nodes)

    def _room_for(self, session: LevelSession, rows: int) -> bool:
        """True if the context has room for more and pages for ``rows`` more tokens are held, or can be had."""
        if session.outgrown:
            return False
        need = session.cached + session.tail + rows - len(session.pages) * self._runtime.pool.page_tokens
        try:
            if need > 0:
                session.pages += self._runtime.pool.take(need)
        except ResourceExhausted:
            return False
        return True

    def _grow(self, session: LevelSession, parents: list[int], children: Children) -> None:
        """Adds the proposed children.

        Unlikely ones are kept too: once their parent has become the anchor they are likely enough.
        """
        tokens, scores, drawn = children
        session.drawn.update((p, q) for p, q in zip(parents, drawn, strict=False) if q is not None)
        kept = np.nonzero(tokens.ravel() >= 0)[0][: max(0, MOST_NODES - session.tree.size)]
        parent = np.array(parents, np.int64)[kept // self._topology.width]
        session.extend(parent, tokens.ravel()[kept], scores.ravel()[kept])
        session.frontier = None


def wanted_nodes(session: LevelSession, part: Rows) -> list[int]:
    """Nodes whose logits the forward of ``part`` yields, in row order."""
    if session.pending:
        return [0] if part.logits_from < len(part.token) else []
    newest: list[int] = session.expanded[session.tail - len(part.token) :].tolist()
    return newest


def _ranks_taken(session: LevelSession, walked: list[int], *, on_tree: bool) -> list[int]:
    """Ranks of the walked nodes; then -1 if the text left the tree at a node that had children."""
    ranks = tt.ranks(session.tree)[walked].tolist()
    last = walked[-1] if walked else 0
    return ranks if on_tree or not (session.tree.parent == last).any() else [*ranks, -1]


def catch_up_rows(session: LevelSession, count: int) -> Rows:
    """The next committed tokens that the cache lacks, as a chain; the last one's logits are the anchor's."""
    at = np.arange(session.cached, session.cached + count, dtype=np.int32)
    token = np.array(session.tokens[session.cached : session.cached + count], np.int32)
    last = count == session.pending
    return Rows(session.pages, session.cached, token, at, np.tri(count, dtype=np.bool_), count - 1 if last else count)


def level_rows(session: LevelSession, nodes: list[int]) -> Rows:
    """The frontier as query rows over prefix and tail; each sees its expanded ancestors and itself."""
    position = (len(session.tokens) - 1 + session.depth[session.expanded]).astype(np.int32)
    return Rows(session.pages, session.cached, session.tree.token[nodes], position, session.seen[-len(nodes) :])
