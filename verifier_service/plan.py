"""Which sessions step when, and with which rows. Pure: clock times, counts and trees come in, parts of a step go out.

share    nodes that one session may have verified in a step.
budget   nodes that drafts are asked for next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood import tree as tt
from draftwood.config import VerifierSettings
from draftwood.runtime.batch import Rows
from draftwood.telemetry import WidthReason
from draftwood.tree import BoolArray, IndexArray, TokenTree
from verifier_service.chunks import LEAST_CHUNK, WHOLE_STRETCH, PrefillCost, fair_split, split, stretch
from verifier_service.session import Session
from verifier_service.width import SHUT_BELOW, Outlook, Policy, Situation, SpeculationGate, StepTimes, admit

PROBE_STEPS = 32
"""Steps without a node, though there were some to verify, after which one step takes them all to measure it anew."""

BASELINE_STEPS = 24
"""Steps with drafts after which one goes without, to keep the baseline current."""

CLEAR_ADVANTAGE = 1.25
"""From here on the baseline matters little, and steps without drafts are four times as rare."""

LOAD_BAND = 1.7
"""The load level stays while the number of sessions is within this factor of what it was."""

GATHER_STEPS = 1.0
"""Longest wait of ready sessions for others, in plain steps: about what one step for all saves over two."""

LATE = 1.5
"""A tree is expected within so many times the usual round."""

LEAST_WAIT_S = 0.01
"""Wait for drafts that are usually quicker than a third of it."""

LONGEST_STEP_S = 2.0
"""A longer time between two steps was a pause, not a step."""

HELD_UP = 8.0
"""So was one that took so many times what steps with drafts usually take: a compilation, a busy machine."""

LOOK_STEPS = 8
"""Steps after which the advantage of drafts that are off is predicted anew, if nobody has come or gone."""

FIRST_BUDGET = 16
LEAST_BUDGET = 3

UsualRound = Callable[[Session], float]
"""Seconds that the slowest of a session's drafts usually takes from commit to complete tree."""


@dataclass(frozen=True, slots=True)
class Part:
    """One session's rows in a step: pending committed tokens, then the nodes of ``tree`` below the anchor.

    ``kept`` are the indices of the tree's nodes in the session's live tree. A chunk of prefill that does not reach the
    anchor has a tree of the anchor alone and wants no logits. ``wanted`` are the nodes to ask of the drafts next.
    """

    session: Session
    rows: Rows
    tree: TokenTree
    kept: IndexArray
    wanted: int

    @property
    def decodes(self) -> bool:
        """The anchor and nodes; else a chunk of prefill."""
        return self.rows.logits_from == 0


class Planner:
    """Decides when to step, who is in it, and how wide."""

    gather_steps = GATHER_STEPS

    def __init__(self, settings: VerifierSettings, times: StepTimes) -> None:
        self._settings = settings
        self.times = times
        self.policy = Policy()
        self.max_depth = settings.max_depth
        """Of the nodes that are verified, the policy's cap included."""
        self.reason: WidthReason = "no_nodes"
        """What decided the width of the last step."""
        self._prefill_cost = PrefillCost()
        self.gate = SpeculationGate()
        self.outlook = Outlook(settings.max_nodes)
        self._load = 1
        self._load_sessions = 1
        self._decoding = 1  # sessions, whether in the step or waiting for drafts
        self._weights = 0
        self._turn = 0  # steps planned
        self._served = 0  # parts planned
        self._gathering_since: float | None = None
        self._narrow_steps = 0
        self._since_plain = 0
        self.last_step_s: float | None = None
        """When the last step ended; None: no session went on, or the time since is not the next step's."""
        self._expected = 0.0  # tokens of the step that runs
        self._foreseen = (Situation(0, 0, 0), 1.0)  # the last situation, and the advantage predicted of it
        self._prefilling = 0  # sessions
        self._least_chunk = 0  # rows that are theirs in any case
        self._chunk_s = 0.0  # time of the last chunk, by T as it was at the start
        self._prefill_first = False  # no drafts in this step, for the sake of the prefill

    # --- load and shares ---

    def share_among(self, sessions: Iterable[Session]) -> None:
        """Notes who is running, to share a step's nodes among them."""
        self._weights = sum(s.request.weight for s in sessions)

    def share(self, session: Session) -> int:
        """Nodes that one session may have verified in a step."""
        most = self.policy.session_nodes(min(self._settings.max_nodes, session.request.max_nodes))
        whole = self.policy.step_nodes(self._settings.max_step_nodes)
        return most if whole is None else min(most, whole * session.request.weight // max(1, self._weights))

    def _follow_load(self, sessions: Sequence[Session]) -> None:
        """The load level moves when the number of sessions has changed a good deal."""
        self.share_among(sessions)
        self._decoding = max(1, sum(s.decoding for s in sessions))
        count = max(1, len(sessions))
        if not self._load_sessions / LOAD_BAND <= count <= self._load_sessions * LOAD_BAND:
            self._load_sessions, self._load = count, count.bit_length()

    # --- when ---

    def wait_limit(self, usual_round_s: float) -> float:
        """Longest wait for a session's drafts after its last commit, seconds."""
        return min(self._settings.draft_wait_ms / 1e3, max(LEAST_WAIT_S, 3 * usual_round_s))

    def due(self, now: float, sessions: Sequence[Session], usual_round: UsualRound) -> float | None:
        """Clock time of the next step: now if all are ready.

        Ready ones wait for those whose trees should be there within ``GATHER_STEPS``, and for the same time times the
        share of sessions that are late. Prefill goes along with decoding sessions and has no step of its own while
        there are some.
        """
        if not sessions:
            self._gathering_since = None
            return None
        decoding = [s for s in sessions if s.decoding]
        rounds = [(s.committed_s, usual_round(s)) for s in decoding if s.awaited()]
        if not rounds:
            return now
        first_deadline = min(committed_s + self.wait_limit(round_s) for committed_s, round_s in rounds)
        if len(rounds) == len(decoding):
            return first_deadline
        self._gathering_since = now if self._gathering_since is None else self._gathering_since
        step_s = self.gather_steps * float(self.times(np.array([len(decoding)]), self._load)[0])
        expected = [committed_s + LATE * round_s for committed_s, round_s in rounds]
        soon = [at for at in expected if now < at <= self._gathering_since + step_s]
        late = sum(at <= now for at in expected)
        until = max([*soon, self._gathering_since + step_s * late / len(decoding)])
        return min(first_deadline, max(now, until))

    # --- who ---

    def plan(self, now: float, sessions: Sequence[Session], usual_round: UsualRound) -> list[Part]:
        """The parts of the step that runs now: decoding sessions first, then prefill as far as it delays them little.

        Where rows are scarce, who has waited longest goes first.
        """
        self._gathering_since = None
        self._turn += 1
        self._follow_load(sessions)
        ready = [s for s in sessions if self._is_ready(s, now, usual_round)]
        ready.sort(key=lambda s: s.served)
        computing = _one_a_page([s for s in sessions if not s.decoding])
        prefilling = [s for s in ready if s in computing]
        most = self._settings.max_step_tokens
        kept_for_prefill = min(LEAST_CHUNK, most // 2, sum(s.pending for s in prefilling))
        decoding = [s for s in ready if s.decoding][: most - kept_for_prefill]
        self._prefilling, self._least_chunk = len(prefilling), kept_for_prefill
        self._prefill_first = bool(prefilling and decoding and self.gate.open) and self._drafts_delay(decoding)
        parts = self._decode_parts(decoding, most - kept_for_prefill - len(decoding))
        if prefilling:
            rows = sum(len(part.rows.token) for part in parts)
            others = max(rows, sum(s.decoding for s in sessions))
            parts += self._prefill_parts(prefilling, others, most - rows)
        for part in parts:
            self._served += 1
            part.session.served = self._served
        return parts

    def _is_ready(self, session: Session, now: float, usual_round: UsualRound) -> bool:
        if not session.decoding or not session.awaited():
            return True
        return now >= session.committed_s + self.wait_limit(usual_round(session))

    def _drafts_delay(self, decoding: Sequence[Session]) -> bool:
        """Whether drafts would cost the sessions that read their prompts more than they bring those that decode."""
        if self._settings.width != "adaptive":
            return False
        return self.outlook.advantage(self._situation(decoding), self.times) < SHUT_BELOW

    def _decode_parts(self, sessions: Sequence[Session], spare_rows: int) -> list[Part]:
        candidates = [self._candidates(s) for s in sessions]
        reach = [r[1:] for _, _, r in candidates]
        if self._settings.width == "adaptive":
            self.outlook.observe(reach)
        lowest = self._lowest_admitted(reach)
        self._expected = len(sessions) + sum(float(np.exp(r[r >= lowest]).sum()) for r in reach)
        keeps = [np.nonzero(log_reach >= lowest)[0] for _, _, log_reach in candidates]
        nodes = [len(keep) - 1 for keep in keeps]
        if sum(nodes) > spare_rows:
            nodes = fair_split(nodes, spare_rows, self._turn)
            keeps = [tt.best(tree, n) for (tree, _, _), n in zip(candidates, nodes, strict=True)]
        parts = []
        for session, keep, (tree, kept, _) in zip(sessions, keeps, candidates, strict=True):
            wanted = 1 + len(keep) * 4 // 3 if len(keep) < tree.size else 2 + 2 * tree.size
            chosen = tree if len(keep) == tree.size else tt.select(tree, keep)
            parts.append(_decode_part(session, chosen, kept[keep], wanted))
        return parts

    def _prefill_parts(self, sessions: Sequence[Session], decode_rows: int, most_rows: int) -> list[Part]:
        """A chunk that delays the decoding sessions little (``chunks.py``)."""
        pending = [s.pending for s in sessions]
        chunk = whole = most_rows
        if decode_rows:
            curve = self.times(decode_rows + np.arange(most_rows + 1), self._load)
            chunk = self._prefill_cost.chunk(curve, stretch(len(sessions), self._decoding))
            whole = self._prefill_cost.chunk(curve, WHOLE_STRETCH)
        counts = split(pending, chunk, whole, self._turn)
        if decode_rows:
            self._chunk_s = float(curve[sum(counts)] - curve[0]) / self.times.slowness(self._load)
        return [_prefill_part(s, count) for s, count in zip(sessions, counts, strict=True) if count]

    # --- how wide ---

    def _candidates(self, session: Session) -> tuple[TokenTree, IndexArray, NDArray[np.float64]]:
        """The session's best nodes that its text has room for: tree, indices in the live tree, log survivals."""
        tree = session.tree.tree()
        reach = tt.log_survival(tree)
        kept = np.arange(tree.size)
        room = max(0, min(session.remaining - 1, self.max_depth))
        if tree.size - 1 > room:
            kept = np.nonzero(tt.depths(tree) <= room)[0]
        if len(kept) - 1 > (share := min(self.share(session), session.node_room)):
            kept = kept[tt.best(tt.select(tree, kept), share, reach[kept])]
        reach = reach[kept]
        reach[0] = np.inf
        return tree if len(kept) == tree.size else tt.select(tree, kept), kept, reach

    def _lowest_admitted(self, log_reach: Sequence[NDArray[np.float64]]) -> float:
        """Log survival from which on nodes are verified in this step."""
        nodes = sum(map(len, log_reach))
        if self._settings.width == "full":
            self.reason = "full"
            return -np.inf
        if not nodes or not self.gate.open:
            self.reason = "no_nodes" if self.gate.open else "shut"
            return np.inf
        if self._prefill_first:
            self.reason = "prefill"
            return np.inf
        if self._baseline_is_due():
            self.reason = "baseline"
            return np.inf
        rows = len(log_reach) + self._least_chunk + np.arange(1 + nodes)
        step_s = self.times(rows, self._load)
        chunk = 0.0  # tokens that would have come in the time of the chunk
        if self._least_chunk:
            without_s = float(self.times(rows[:1] - self._least_chunk, self._load)[0])
            chunk = max(0.0, float(step_s[0]) - without_s) / self._token_s()
        lowest = admit(log_reach, step_s, self.outlook.overhead_s, chunk)
        self._narrow_steps = self._narrow_steps + 1 if lowest == np.inf else 0
        if self._narrow_steps <= PROBE_STEPS:
            self.reason = "all" if all(len(r) == 0 or r.min() >= lowest for r in log_reach) else "cost"
            return lowest
        self._narrow_steps, self.reason = 0, "probe"
        return -np.inf

    def _baseline_is_due(self) -> bool:
        """Now and then one step goes plain, so that what drafts are held against is known and current.

        Not along with prefill: such a step would teach nothing of it.
        """
        self._since_plain += 1
        if self._prefilling:
            return False
        often = self.gate.advantage < CLEAR_ADVANTAGE
        if self._since_plain > BASELINE_STEPS * (1 if often else 4) or not self.times.knows_plain(self._load):
            self._since_plain = 0
            return True
        return False

    def budget(self, session: Session, wanted: float) -> int:
        """Nodes to ask the session's drafts for, given what it could use; 0: none for now."""
        wanted_at_all = self._settings.width == "full" or (self.gate.open and not self._prefill_first)
        if session.remaining <= 1 or not wanted_at_all:
            return 0
        return min(self.share(session), max(LEAST_BUDGET, round(wanted)))

    def next_budget(self, part: Part) -> int:
        """The session's budget behind a step, smoothed."""
        old = part.session.budget
        return self.budget(part.session, 0.7 * old + 0.3 * part.wanted if old else FIRST_BUDGET)

    # --- what came of it ---

    def finished(
        self, parts: Sequence[Part], tokens: int, sessions_left: int, forward_s: float, began: float, now: float
    ) -> None:
        """Learns from a step that began and ended then, wrote ``tokens`` and leaves ``sessions_left`` running."""
        since_last_s = now - self.last_step_s if self.last_step_s is not None else now - began
        self.last_step_s = now if sessions_left else None
        decoding = [part for part in parts if part.decodes]
        if not decoding:
            return
        rows, decode_rows = (sum(len(part.rows.token) for part in some) for some in (parts, decoding))
        prefill_s = 0.0
        if decode_rows < rows:
            without_s, with_s = self.times(np.array([decode_rows, rows]), self._load).tolist()
            self._prefill_cost.observe(without_s, with_s, forward_s)
            prefill_s = forward_s * (1 - without_s / with_s)
        else:
            plain = rows == len(parts)
            self.times.observe(rows, forward_s, self._load, plain=plain)
            undisturbed = not self.gate.open or not any(part.session.drafts for part in parts)
            if plain and undisturbed and since_last_s < HELD_UP * forward_s:
                self.outlook.observe_plain_overhead(since_last_s - forward_s, self._load)
        if self._settings.width == "adaptive":
            prefilled = sum(not part.decodes and part.rows.logits_from < len(part.rows.token) for part in parts)
            self._judge(decoding, tokens - prefilled, since_last_s, forward_s, prefill_s)

    def _judge(self, parts: Sequence[Part], tokens: int, seconds: float, forward_s: float, prefill_s: float) -> None:
        """Whether drafts pay: what the step was expected to write, which varies less than what it wrote."""
        drafted = [part.session.has_drafted for part in parts if part.session.drafts]
        if not drafted:  # steps of sessions that have no drafts do not bring the next trial nearer
            return
        if self._prefill_first:
            return
        situation = self._situation([part.session for part in parts])
        if self.gate.open or situation != self._foreseen[0] or self._turn % LOOK_STEPS == 0:
            self._foreseen = situation, self.outlook.advantage(situation, self.times)
        predicted = self._foreseen[1]
        if all(drafted) and self.gate.open and 0 < seconds < LONGEST_STEP_S:
            self._record(parts, situation, predicted, tokens, seconds, forward_s, prefill_s)
        self.gate.step(predicted, situation.load)

    def _situation(self, stepping: Sequence[Session]) -> Situation:
        share = round(sum(map(self.share, stepping)) / len(stepping))
        return Situation(
            self._decoding, self._load, share, self._prefilling, self._chunk_s if self._prefilling else 0.0
        )

    def _token_s(self) -> float:
        """Seconds that a token costs in plain decoding once all that read now decode, too."""
        everyone = self._decoding + self._prefilling
        return (self.times.plain(everyone, self._load) + self.outlook.plain_overhead_s(self._load)) / everyone

    def _record(
        self,
        parts: Sequence[Part],
        at: Situation,
        predicted: float,
        tokens: int,
        seconds: float,
        forward_s: float,
        prefill_s: float,
    ) -> None:
        """What a step with drafts was worth, for the gate."""
        rows = sum(part.tree.size for part in parts)
        plain_s, drift = self.times.plain(at.sessions, at.load), 1.0
        if rows > len(parts):
            drift = self.times.drift(rows, forward_s - prefill_s, at.load)
            self.outlook.observe_tokens(tokens, self._expected)
        self.outlook.observe_overhead(seconds - forward_s)
        if seconds > HELD_UP * (forward_s + self.outlook.overhead_s) or self.reason == "baseline":
            return
        # A step that is mostly prefill tells little: few sessions of the load decode yet, and drafts read the prompts.
        token_s = self._token_s() * drift
        work_s = self._expected * self.outlook.truth * token_s + prefill_s
        plain_work_s = at.sessions * token_s + prefill_s
        took = seconds / (plain_s * drift + self.outlook.plain_overhead_s(at.load) + prefill_s)
        decoding = at.sessions / (at.sessions + at.reading)
        self.gate.record(work_s / plain_work_s, took, predicted, at.load, weight=decoding)

    def paused(self) -> None:
        """The time until the next step is not that step's."""
        self.last_step_s = None


def _one_a_page(sessions: Sequence[Session]) -> set[Session]:
    """Of sessions that prefill, those whose next page no other one will have sooner: who waits shares it then.

    Of equally advanced ones the first goes on.
    """
    nearest: dict[bytes, Session] = {}
    for session in sessions:
        for key in session.keys[session.published :][:1]:
            if key not in nearest or session.cached > nearest[key].cached:
                nearest[key] = session
    return {s for s in sessions if all(nearest[key] is s for key in s.keys[s.published :][:1])}


def _decode_part(session: Session, tree: TokenTree, kept: IndexArray, wanted: int) -> Part:
    position = (len(session.tokens) - 1 + tt.depths(tree)).astype(np.int32)
    rows = Rows(session.pages, session.cached, tree.token, position, tt.ancestors(tree))
    return Part(session, rows, tree, kept, wanted)


def _prefill_part(session: Session, count: int) -> Part:
    at = np.arange(session.cached, session.cached + count, dtype=np.int32)
    token = np.array(session.tokens[session.cached : session.cached + count], np.int32)
    visible: BoolArray = np.tri(count, dtype=np.bool_)
    reaches_anchor = count == session.pending
    rows = Rows(session.pages, session.cached, token, at, visible, logits_from=count - 1 if reaches_anchor else count)
    return Part(session, rows, TokenTree.root(session.tokens[-1]), np.zeros(1, np.int64), wanted=0)
