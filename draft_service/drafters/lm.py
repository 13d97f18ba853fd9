"""A small language model that grows trees over its own paged KV cache.

What hangs below the accepted path and the target's own token outlives a commit, keys and values included. On a GPU the
device picks what the levels of a round expand (``draftwood.runtime.draws``), and the host reads what came of it once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from draft_service.drafter import Key, SessionStart
from draft_service.drafters.levels import (
    FEW_LEVELS,
    MOST_NODES,
    MOST_TAIL_TOKENS,
    UNEXPANDED,
    Forwarded,
    LevelDrafter,
    LevelSession,
)
from draftwood import tree as tt
from draftwood.config import DraftSettings
from draftwood.parameters import Rule
from draftwood.runtime.batch import Rows
from draftwood.runtime.draws import MOST_FIRSTS, Draw, Drawn
from draftwood.runtime.model import ModelRuntime
from draftwood.topology import BestFirst, Topology
from draftwood.vocabulary import Vocabulary


class LmDrafter(LevelDrafter):
    """Drafts with a causal LM over its own paged KV cache."""

    kind = "lm"
    rules: tuple[Rule, ...] = (Rule.REJECTION,)
    rereads = True

    def __init__(
        self,
        runtime: ModelRuntime,
        settings: DraftSettings,
        model: str,
        vocabulary: Vocabulary,
        topology: Topology | None = None,
        random: np.random.Generator | None = None,
    ) -> None:
        """See ``LevelDrafter``."""
        super().__init__(runtime, settings, model, vocabulary, topology, random)
        self._model_runtime = runtime
        self._moves: dict[LevelSession, tuple[list[int], list[int], list[int]]] = {}  # pages, old and new slots
        self._most_levels = 1 + max(settings.depth, settings.lookahead_levels)

    @property
    def draws_rounds(self) -> bool:
        """Whether the device picks the frontiers of a whole round.

        Without CUDA graphs a level costs more than the host's part of it, and a host that sees each level can end a
        round that does not pay any more.
        """
        return self._model_runtime.graphs is not None

    def capture(self) -> None:
        """Captures the forwards, with children picked and without, before they are wanted."""
        size, width = self._own_size(self._token_count), self._topology.width
        self._model_runtime.capture(size, width)
        self._model_runtime.capture()
        if self.draws_rounds and isinstance(self._topology, BestFirst):
            beam = self._settings.beam
            self._model_runtime.capture_draws(size, branch=width, beam=beam, most_levels=self._most_levels)

    def _begin(self, start: SessionStart) -> LevelSession:
        return LevelSession(start, list(start.tokens), start.epoch, start.budget)

    def _follow(self, session: LevelSession, tokens: tuple[int, ...]) -> None:
        """Walks the tree along the committed tokens, moves what is kept to its new slots and re-roots."""
        walked = self._observe(session, tokens)
        on_tree = len(walked) == len(tokens)
        anchor = walked[-1] if on_tree else None
        expanded_path = [n for n in walked if session.slot[n] != UNEXPANDED] if session.pending == 0 else []
        below = _kept_below(session, anchor) if anchor is not None else np.zeros(0, np.int64)
        first = session.cached
        old = [first + place for place in session.slot[[*expanded_path, *below]].tolist()]
        if session in self._moves:
            self._flush_moves()
        if old:
            self._moves[session] = (session.pages, old, list(range(first, first + len(old))))
        session.cached += len(expanded_path)
        session.tokens.extend(tokens)
        if anchor is None or session.pending:  # the anchor is new to the cache: nothing hangs below it
            index = None
            session.plant_anchor()
            session.drawn = {}
        else:
            places = session.slot[below]
            below_anchor, index = tt.reroot(session.tree, anchor)
            session.plant(below_anchor, index[below], session.seen[np.ix_(places, places)])
            session.drawn = {int(index[n]): q for n, q in session.drawn.items() if index[n] >= 0}
        session.numbering.restart(index)

    def _give_pages(self, session: LevelSession) -> None:
        self._moves.pop(session, None)
        super()._give_pages(session)

    def close(self, key: Key) -> None:
        """See ``Drafter``."""
        if session := self._sessions.get(key):
            self._moves.pop(session, None)
        super().close(key)

    def _flush_moves(self) -> None:
        """Moves what commits have left to be moved: one launch for all sessions that go on together."""
        self._model_runtime.move(list(self._moves.values()))
        self._moves.clear()

    def _forward(self, jobs: list[LevelSession], parts: list[Rows]) -> Forwarded:
        own = [self._in_own_tokens(part) for part in parts]
        sizes = {self._own_size(session.start.vocab_size) for session in jobs}
        if len(sizes) == 1 and all(map(self._takes_likeliest, jobs)):
            return Forwarded(children=self._model_runtime.children(own, sizes.pop(), self._topology.width))
        return Forwarded(self._runtime.forward(own))

    def _takes_likeliest(self, session: LevelSession) -> bool:
        """Whether its nodes' children are the likeliest tokens as the model gives them: a graph can pick these."""
        return session.rule.greedy and not session.sampled and self._settings.greedy_temperature == 1

    def _in_own_tokens(self, part: Rows) -> Rows:
        return replace(part, token=self._own_tokens(part.token))

    def _own_tokens(self, tokens: np.ndarray) -> np.ndarray:
        return self._reduced.to_draft(tokens) if self._reduced else tokens

    # --- several levels at once ---

    def _expand(self, sessions: list[LevelSession]) -> int:
        """As for any drafter; sessions whose frontiers the device can pick get all the levels that are left to them."""
        self._flush_moves()
        planned = self._plan_draws(sessions)
        rest = [session for session in sessions if session not in planned]
        levels = super()._expand(rest) if rest else 0
        drawn = self._draw(planned) if planned else 0
        return levels if rest else drawn

    def _plan_draws(self, sessions: list[LevelSession]) -> dict[LevelSession, int]:
        """Forwards of each session that is drawn at once."""
        if not self.draws_rounds:
            return {}
        out: dict[LevelSession, int] = {}
        most = self._settings.max_step_tokens // self._settings.beam
        for session in sessions:
            levels = self._levels_at_once(session) if len(out) < most else 0
            first = next(iter(out), session)
            same = self._own_size(session.start.vocab_size) == self._own_size(first.start.vocab_size)
            if levels > 1 and same and self._room_for(session, levels * self._settings.beam):
                out[session] = levels
        return out

    def _levels_at_once(self, session: LevelSession) -> int:
        """Forwards that the session's round, or the drawing ahead of it, has left and the device can do; 0: none."""
        beam, ahead = self._settings.beam, session.complete
        shape = self._ahead if ahead else self._shape(session)
        fits = session.cached > 0 and session.pending <= beam  # text that the cache lacks is the first level
        if not fits or not isinstance(shape, BestFirst) or not self._takes_likeliest(session):
            return 0
        budget = min(session.budget, session.start.max_nodes)
        most = self._settings.depth + self._settings.lookahead_levels if ahead else shape.levels(budget)
        usual = FEW_LEVELS if ahead else 1 + round(session.usual_levels)
        levels = min(most - session.levels + bool(session.pending), usual, self._most_levels)
        room = (MOST_NODES - session.tree.size) // (beam * self._topology.width)
        return min(levels, room, (MOST_TAIL_TOKENS - session.tail) // beam)

    def _draw(self, planned: dict[LevelSession, int]) -> int:
        """Draws the levels; returns how many there were. A few tokens of text are one, too."""
        jobs: list[tuple[LevelSession, Draw, np.ndarray]] = []
        for session, levels in planned.items():
            part = self._rows(session, self._settings.beam)
            if part is not None:
                draw, known = self._describe(session, part, levels)
                jobs.append((session, draw, known))
        if not jobs:
            return 0
        size = self._own_size(jobs[0][0].start.vocab_size)
        found = self._model_runtime.draw(
            [draw for _, draw, _ in jobs], size, branch=self._topology.width, beam=self._settings.beam,
            most_levels=self._most_levels,
        )  # fmt: skip
        for (session, draw, known), drawn in zip(jobs, found, strict=True):
            self._take_over(session, draw, known, drawn)
        return max(drawn.levels for drawn in found)

    def _describe(self, session: LevelSession, part: Rows, levels: int) -> tuple[Draw, np.ndarray]:
        """What the device must know, and which nodes it is told of."""
        view, rows = self._view(session), len(part.token)
        shape, among = (self._ahead, 2 * view.budget) if session.complete else (self._topology, view.budget)
        assert isinstance(shape, BestFirst)
        if session.pending:
            known = np.zeros(0, np.int64)
            reach, depth = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.int32)
            reach[-1] = 0.0
            seen = np.zeros((0, part.visible.shape[1]), np.bool_)
        else:
            nodes = session.expanded[session.tail - rows :]
            reach, depth = session.reach[nodes].astype(np.float32), session.depth[nodes].astype(np.int32)
            known = 1 + np.argsort(-session.reach[1:], kind="stable")[:MOST_FIRSTS]
            above = session.slot[session.tree.parent[known]]
            seen = session.seen[above] & (above != UNEXPANDED)[:, None]
        draw = Draw(
            rows=self._in_own_tokens(part),
            row_reach=reach,
            row_depth=depth,
            token=self._own_tokens(session.tree.token[known]),
            depth=session.depth[known].astype(np.int32),
            reach=session.reach[known].astype(np.float32),
            unexpanded=session.slot[known] == UNEXPANDED,
            seen=seen,
            anchor=len(session.tokens) - 1,
            levels=levels,
            beam=shape.most(view.budget),
            room=view.room,
            among=among,
            least=shape.min_survival,
            before=session.levels,
            level_share=0.0 if session.complete or not view.turn_ms else view.level_ms / view.turn_ms,
        )
        return draw, known

    def _take_over(self, session: LevelSession, draw: Draw, known: np.ndarray, drawn: Drawn) -> None:
        """Adds what has been drawn to the tree, and the nodes expanded on the device to the tail."""
        rows, width = len(draw.rows.token), self._topology.width
        node_of = np.full(MOST_FIRSTS + drawn.token.size, -1, np.int64)  # by candidate
        node_of[: len(known)] = known
        tokens = self._in_target_tokens(drawn.token.astype(np.int64))
        prefix = rows if session.pending else 0  # rows of the first level that belong to the text
        above = np.array([-1] * (rows - 1) + [0]) if session.pending else session.expanded[session.tail - rows :]
        parents, kept, placed, size = [], [], [], session.tree.size
        for level, token in enumerate(tokens):
            if level:
                chosen = drawn.chosen[level]
                above = node_of[chosen[chosen >= 0]]
                placed.append(above)
            there = (token[: len(above)] >= 0) & (above >= 0)[:, None]
            at = level * drawn.token[0].size + np.nonzero(there.ravel())[0]
            node_of[MOST_FIRSTS + at] = np.arange(size, size + len(at))
            size += len(at)
            parents.append(np.repeat(above, width)[there.ravel()])
            kept.append(at)
        flat = np.concatenate(kept)
        counts = [len(at) for at in kept]
        session.extend(np.concatenate(parents), tokens.ravel()[flat], drawn.score.ravel()[flat], counts)
        session.cached += prefix
        if placed:
            is_node = drawn.chosen >= 0
            session.place_drawn(np.concatenate(placed), drawn.seen[is_node][:, prefix:])
        session.levels += drawn.levels - 1
        session.frontier = None


def _kept_below(session: LevelSession, anchor: int) -> np.ndarray:
    """Expanded nodes strictly below ``anchor``, in slot order."""
    place = session.slot[anchor]
    if place == UNEXPANDED:
        return np.zeros(0, np.int64)
    nodes: np.ndarray = session.expanded[session.seen[:, place]]
    below: np.ndarray = nodes[nodes != anchor]
    return below
