"""The verifier's core: sessions in, text out. No I/O, no clock of its own, one thread.

A step is one target forward over the anchors, chosen nodes and prefill chunks of all sessions that are ready. Drafts
change which nodes are in it, never what comes out of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwood.acceptance import FinishReason, Walk, emit, walk
from draftwood.config import VerifierSettings
from draftwood.errors import (
    DraftwoodError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from draftwood.features import FeatureRequest
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.model import ModelRuntime
from draftwood.telemetry import METRICS, MOST_DEPTH, StepPart, WidthReason, get_logger
from draftwood.tickets import check_ticket
from draftwood.wire import FeatureChunk, SessionCommit
from verifier_service.calibration import Calibration
from verifier_service.constraints import MaskFiller
from verifier_service.features import DueFeatures, tell
from verifier_service.kv import SessionPages
from verifier_service.live_tree import Nodes, check_growth
from verifier_service.plan import FIRST_BUDGET, Part, Planner
from verifier_service.queue import AdmissionQueue
from verifier_service.sampler import NONE_ALLOWED, TargetSampler, failure
from verifier_service.session import CATCH_UP_STEPS, AttachedDraft, Emitted, Ended, GenerateRequest, Session, no_depths
from verifier_service.watch import AcceptanceWatch
from verifier_service.width import GRID, Policy, StepTimes

log = get_logger(__name__)

AUDIT_STEPS = 4096
"""Steps after which the page books are audited though the engine has not been idle; it takes milliseconds."""


@dataclass(slots=True)
class Link:
    """One draft worker's stream."""

    model: str  # names the calibration it shares
    round_s: float  # its usual time from commit to complete tree
    rules: frozenset[Rule]  # those that need more than ids and that it can draw for
    features: FeatureRequest | None = None
    sessions: dict[int, Session] = field(default_factory=dict)  # by handle


@dataclass(frozen=True, slots=True)
class StartInfo:
    """What a draft is told when it joins."""

    handle: int
    epoch: int
    tokens: tuple[int, ...]
    seed: int
    temperature: float
    budget: int
    remaining: int
    rule: Rule
    features: Sequence[FeatureChunk] = ()  # of what is computed already


@dataclass(slots=True)
class Outcome:
    """What one step, or one command, has to say to the outside."""

    admitted: list[str] = field(default_factory=list)  # session ids
    emitted: list[Emitted] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    failed: list[tuple[str, DraftwoodError]] = field(default_factory=list)  # by session id
    commits: dict[int, list[SessionCommit]] = field(default_factory=dict)  # by link
    stops: dict[int, list[int]] = field(default_factory=dict)  # handles by link
    features: dict[int, list[FeatureChunk]] = field(default_factory=dict)  # by link, besides those of commits
    step_s: float = 0.0  # 0: not of a step
    spent_s: dict[StepPart, float] = field(default_factory=dict)  # by part of the step, and the wait before it
    width_reason: WidthReason = "no_nodes"
    depths: list[int] = field(default_factory=no_depths)  # verified nodes, see ``no_depths``
    verified: int = 0  # nodes


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    steps: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    stale: int = 0
    refused: int = 0  # growths and joins
    preemptions: int = 0
    step_s: float = 0.0  # mean of the last steps
    width: float = 0.0  # nodes a session in the last step
    narrow: int = 0  # steps of several sessions with drafts in which no node was worth its time


class Engine:
    """Owns every session of one verifier."""

    def __init__(
        self,
        runtime: ModelRuntime,
        settings: VerifierSettings,
        *,
        token_count: int,
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``token_count`` real tokens; output rows beyond them are padding. Measures T(rows) if it is not given."""
        assert runtime.pool.page_tokens == settings.page_tokens
        self.runtime = runtime
        self.settings = settings
        self.token_count = token_count
        self.clock = clock
        self.sessions: dict[str, Session] = {}
        self.waiting = AdmissionQueue()
        self.preempted: deque[Session] = deque()  # in ``sessions`` too; resumed before anyone is admitted
        self.totals = Totals()
        self._kv = SessionPages(runtime.pool, share=settings.prefix_cache)
        self._unaudited = 0  # steps and releases since the last audit
        self.sampler = TargetSampler(
            runtime, token_count, 4 * settings.max_nodes, (settings.typical_epsilon, settings.typical_delta)
        )
        self.masks = MaskFiller(runtime.device)
        self.planner = Planner(
            settings, times or measure_step_times(runtime, settings.max_step_tokens, token_count, clock)
        )
        self._links: dict[int, Link] = {}
        self._calibrations: dict[tuple[str, Rule], Calibration] = {}
        self._watches: dict[tuple[str, Rule], AcceptanceWatch] = {}

    # --- requests ---

    @property
    def context_limit(self) -> int:
        """Longest sequence served, tokens."""
        return min(self.settings.max_context_tokens, self.runtime.max_context_tokens)

    def submit(self, request: GenerateRequest) -> Outcome:
        """Takes a checked request; raises ResourceExhausted when it can never fit or the queue is full."""
        self._kv.check_fits(request)
        assert request.session_id not in self.sessions
        out = Outcome()
        self.waiting.push(request, self.clock())
        self._admit(out)
        if len(self.waiting) > self.settings.max_waiting:
            self.waiting.drop(request.session_id)
            limit = self.settings.max_waiting
            raise ResourceExhausted("QUEUE_FULL", f"{limit} requests are waiting already", retry_after_ms=1000)
        return out

    @property
    def running(self) -> list[Session]:
        """Sessions that are not preempted, the one admitted first comes first."""
        return [s for s in self.sessions.values() if s.running]

    def _admit(self, out: Outcome) -> None:
        """Resumes preempted sessions, then admits waiting requests, each in order, while pages last."""
        while self.preempted:
            if not self._kv.place(self.preempted[0], len(self.sessions) - len(self.preempted)):
                return
            self.preempted.popleft()
        while self.waiting and len(self.sessions) < self.settings.max_sessions:
            session = Session(self.waiting.first, self.clock(), self.settings.max_live_nodes)
            if not self._kv.place(session, len(self.sessions)):
                return
            request = self.waiting.pop()
            self.sessions[request.session_id] = session
            out.admitted.append(request.session_id)

    def cancel(self, session_id: str) -> Outcome:
        """Ends a session, wherever it is; unknown ones are none of our business any more."""
        out = Outcome()
        self.waiting.drop(session_id)
        session = self.sessions.get(session_id)
        if session:
            self._end(session, FinishReason.CANCELLED, out)
        return out

    def _end(self, session: Session, reason: FinishReason, out: Outcome, stop: int | str | None = None) -> None:
        self._release(session, out)
        total_s = self.clock() - session.admitted_s
        prompt, generated = len(session.request.prompt), session.generated
        ended = Ended(session.request.session_id, reason, prompt, generated, total_s, session.stats, stop=stop)
        out.ended.append(ended)

    def _fail(self, session: Session, error: DraftwoodError, out: Outcome) -> None:
        self._release(session, out, sound=False)
        out.failed.append((session.request.session_id, error))

    def _release(self, session: Session, out: Outcome, *, sound: bool = True) -> None:
        del self.sessions[session.request.session_id]
        if not session.running:
            self.preempted.remove(session)
        self._kv.release(session, sound=sound)
        self._unaudited += 1
        for link, draft in session.drafts.items():
            self._links[link].sessions.pop(draft.handle, None)
            out.stops.setdefault(link, []).append(draft.handle)
        self._admit(out)

    def crash(self, error: Exception) -> Outcome:
        """A step has raised: every running session fails, the engine goes on. What they have cached is forgotten."""
        out = Outcome()
        for session in self.running:
            self._fail(session, Internal("INTERNAL", f"a verify step failed ({type(error).__name__})"), out)
        self.planner.paused()
        return out

    def set_policy(self, policy: Policy, max_depth: int | None = None) -> None:
        """Caps on nodes and their depth, from the next step on; drafts hear of them with the next commit."""
        own = self.settings.max_depth
        self.planner.policy, self.planner.max_depth = policy, own if max_depth is None else min(own, max_depth)

    # --- drafts ---

    def open_link(
        self, link: int, model: str, rules: frozenset[Rule] = frozenset(), features: FeatureRequest | None = None
    ) -> None:
        """``features`` must be among what the runtime keeps."""
        self._links[link] = Link(model, self.settings.draft_wait_ms / 1e3, rules, features)

    def close_link(self, link: int) -> None:
        """A draft worker's stream has ended: its sessions go on without it."""
        for session in self._links.pop(link).sessions.values():
            session.drafts.pop(link, None)
            session.tree.detach(link)

    def check_ticket(self, session_id: str, ticket: bytes, worker: str) -> None:
        """Whether the draft worker of that incarnation may join; raises NotFound SESSION_UNKNOWN and as
        ``tickets.check_ticket``.
        """
        session = self._session(session_id)
        check_ticket(ticket, session.request.ticket_key, session_id, worker, self.clock() - session.admitted_s)

    def _session(self, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is None:
            raise NotFound("SESSION_UNKNOWN", f"no session {session_id!r} is running here", field="join.session_id")
        return session

    def join(self, link: int, handle: int, session_id: str) -> StartInfo:
        """Lets a draft worker serve a session; raises NotFound SESSION_UNKNOWN, InvalidArgument HANDLE, or
        FailedPrecondition RULE_UNSUPPORTED if the draft cannot draw what the session's rule needs.
        """
        session = self._session(session_id)
        if handle in self._links[link].sessions or link in session.drafts:
            raise InvalidArgument("HANDLE", f"handle {handle} or session {session_id!r} is in use", field="join.handle")
        request = session.request
        if request.sampled and request.rule not in self._links[link].rules:
            message = f"the draft does not sample, as rule {request.rule.name} of session {session_id!r} needs"
            raise FailedPrecondition("RULE_UNSUPPORTED", message, field="hello.draft.rules")
        key = (self._links[link].model, request.effective_rule)
        session.tree.attach(link, self._calibrations.setdefault(key, Calibration()))
        draft = session.drafts[link] = AttachedDraft(handle, known=len(session.tokens), catching_up=CATCH_UP_STEPS)
        self._links[link].sessions[handle] = session
        self.planner.share_among(self.running)
        session.budget = self.planner.budget(session, max(session.budget, FIRST_BUDGET))
        draft.asleep = session.budget == 0
        sampling, known = request.sampling, Outcome()
        self._tell_features([session], known, [link])
        return StartInfo(
            handle, session.tree.epoch, tuple(session.tokens), 0 if request.sampled else sampling.seed,
            sampling.temperature, session.budget, session.remaining, request.effective_rule,
            known.features.get(link, []),
        )  # fmt: skip

    def handles(self, link: int) -> Collection[int]:
        """Handles of the sessions that a draft worker serves."""
        return self._links[link].sessions

    def leave(self, link: int, handle: int) -> None:
        """The draft worker gives the session up; unknown handles are ignored."""
        session = self._links[link].sessions.pop(handle, None)
        if session:
            session.drafts.pop(link, None)
            session.tree.detach(link)

    def grow(self, link: int, handle: int, nodes: Nodes, *, complete: bool) -> None:
        """Takes a draft's nodes. Unknown handles and forgotten epochs are stale, epochs to come are refused."""
        session = self._links[link].sessions.get(handle)
        if session is None:
            self.totals.stale += len(nodes.token)
            METRICS.nodes["stale"].inc(len(nodes.token))
            return
        check_growth(nodes, session.tree.epoch, session.request.effective_rule)
        stale = session.tree.grow(link, nodes)
        session.stats.drafted += len(nodes.token)
        session.stats.stale += stale
        self.totals.stale += stale
        METRICS.nodes["stale"].inc(stale)
        draft = session.drafts[link]
        if complete and nodes.epoch > draft.complete_epoch:
            awaited, caught_up = session.awaited(), draft.catching_up
            draft.complete_epoch, draft.catching_up = nodes.epoch, 0
            if nodes.epoch == session.tree.epoch and not caught_up:
                draft.misses = 0
                since_commit_s = self.clock() - session.committed_s
                self._links[link].round_s += 0.2 * (since_commit_s - self._links[link].round_s)
                if session.decoding and awaited and not session.awaited():
                    session.stats.wait_s += since_commit_s

    # --- steps ---

    def due(self) -> float | None:
        """Clock time at which the next step should run; None: nothing to do, time for an audit."""
        if not self.sessions and self._unaudited:
            self.audit()
        return self.planner.due(self.clock(), self.running, self._usual_round)

    def _usual_round(self, session: Session) -> float:
        return max(self._links[link].round_s for link in session.drafts)

    def step(self) -> Outcome:
        """One forward and all that follows from it."""
        began, ended_before = self.clock(), self.planner.last_step_s
        for session in self._kv.make_room(self.running, self.planner.share):
            self._set_aside(session)
        parts = self.planner.plan(began, self.running, self._usual_round)
        if not parts:  # whoever was ready gave way, and those that stay wait for their drafts
            return Outcome()
        for part in parts:
            if part.decodes and part.session.drafts and part.session.awaited():
                part.session.stats.wait_s += began - part.session.committed_s
        planned = self.clock()
        targets = self.sampler.step(parts, self.masks.fill(parts), self.clock)
        computed, forwarded = self.sampler.computed_s, self.clock()
        out = Outcome()
        moves = [self._accept(part, chosen, out) for part, chosen in zip(parts, targets, strict=True)]
        self.runtime.move([move for move in moves if move])
        self._tell_features([part.session for part in parts], out)
        for part in parts:
            if part.session.running:
                self._kv.publish(part.session)
        self._account(parts, out, began, forwarded - began)
        out.spent_s = {"plan": planned - began, "forward": computed - planned, "sample": forwarded - computed}
        out.spent_s["commit"] = self.clock() - forwarded
        if ended_before is not None:
            out.spent_s["wait"] = began - ended_before
        return out

    def _set_aside(self, session: Session) -> None:
        """Has a session that gave up its pages wait for others to end; then it computes anew what is not cached."""
        self.preempted.appendleft(session)
        session.stats.preemptions += 1
        self.totals.preemptions += 1
        METRICS.preemptions.inc()

    def _accept(
        self, part: Part, targets: Sequence[int], out: Outcome
    ) -> tuple[list[int], list[int], list[int]] | None:
        """Walks one session's tree, commits, and returns the KV moves that make the accepted path contiguous."""
        session, first = part.session, part.session.cached
        assert session.pages is part.rows.pages and first == part.rows.context, "a verdict on another run's step"
        session.cached += len(part.rows.token) - (part.tree.size - 1)
        if not targets:  # a chunk of prefill that does not reach the anchor
            return None
        taken = walk(part.tree, targets)
        if taken.tokens[-1] == NONE_ALLOWED and taken.path:  # first the run; the next step fails at its anchor
            taken = Walk(taken.path[:-1], taken.tokens[:-1])
        valid = taken.tokens if taken.tokens[-1] >= 0 else taken.tokens[:-1]
        text = session.request.text
        emission = emit(valid, session.generated, session.request.ending, text)
        if len(valid) < len(taken.tokens) and not emission.finish:  # if the text has ended, nobody asks for the last
            self._fail(session, failure(taken.tokens[-1], session.matcher), out)
            return None
        self._note(session, part, len(taken.path), out)
        tokens, accepted = valid[: emission.count], min(len(taken.path), emission.count)
        pieces = text.take() if text is not None else None
        wanted = session.request.top_logprobs is not None
        logprobs = self.sampler.logprobs(part, [0, *taken.path][: len(tokens)], tokens) if wanted else ()
        name, finish = session.request.session_id, emission.finish
        out.emitted.append(Emitted(name, session.generated, tokens, accepted, logprobs, finish=finish, pieces=pieces))
        for draft in session.drafts.values():
            if draft.complete_epoch < session.tree.epoch and session.budget > 0 and not draft.catching_up:
                draft.misses += 1
                session.stats.late += 1
                METRICS.late_rounds.inc()
        if emission.finish:
            session.tokens.extend(tokens)
            self._end(session, emission.finish, out, emission.stop)
            return None
        old = [session.cached + node - 1 for node in taken.path]
        new = list(range(session.cached, session.cached + len(taken.path)))
        session.cached += len(taken.path)
        assert first < session.cached
        self._commit(session, part, taken.path, tokens, out)
        return (session.pages, old, new) if old != new else None

    def _note(self, session: Session, part: Part, accepted: int, out: Outcome) -> None:
        stats = session.stats
        stats.steps += 1
        stats.verified += part.tree.size - 1
        stats.accepted += accepted
        if session.generated == len(session.request.resume):
            stats.first_token_s = self.clock() - session.admitted_s
        why = self.planner.reason
        stats.width_reason = why if session.drafts and (session.tree.size > 1 or why == "shut") else "no_nodes"
        if part.tree.size > 1:
            METRICS.drafts.inc()
            anchor, *positions = part.rows.tail_position.tolist()
            for position in positions:
                above = min(position - anchor, MOST_DEPTH) - 1
                stats.verified_by_depth[above] += 1
                out.depths[above] += 1
            for above in range(accepted):
                stats.accepted_by_depth[min(above, MOST_DEPTH - 1)] += 1

    def _commit(self, session: Session, part: Part, path: Sequence[int], tokens: tuple[int, ...], out: Outcome) -> None:
        ids: dict[int, tuple[int, ...]] = dict.fromkeys(session.drafts, ())
        if part.tree.size > 1:
            live_path = [int(part.kept[node]) for node in path]
            session.tree.learn(part.kept, live_path)
            guesses = part.kept[1:][part.tree.parent[1:] == 0].tolist()
            for link in session.drafts:
                known = session.tree.node_ids(link, [*live_path, *guesses])
                ids[link] = known[: len(path)]
                if any(known[len(path) :]):
                    self._watch(link, session, taken=any(ids[link][:1]))
        session.tree.commit(tokens)
        if session.matcher:
            session.matcher.advance(tokens)
        session.budget = self.planner.next_budget(part)
        session.committed_s = self.clock()
        for link, draft in session.drafts.items():
            if session.budget or not draft.asleep:
                out.commits.setdefault(link, []).append(self._notice(session, draft, tokens, ids[link]))

    def _watch(self, link: int, session: Session, *, taken: bool) -> None:
        """Notes whether one of a draft's guesses below the anchor was taken: of its model's, and of the session's."""
        model, rule = self._links[link].model, session.request.effective_rule
        watch = self._watches.setdefault((model, rule), AcceptanceWatch())
        if watch.observe(taken):
            METRICS.acceptance_alarms.inc()
            log.warning("acceptance has collapsed", model=model, rule=rule.value, now=watch.now, usual=watch.usual)
        own = session.drafts[link].watch
        if own.observe(taken) and not watch.collapsed:  # else the model's alarm says it
            METRICS.session_alarms.inc()
            name, told = session.request.session_id, {"now": own.now, "usual": own.usual}
            log.warning("acceptance of a session has collapsed", session=name, model=model, rule=rule.value, **told)

    def _notice(
        self, session: Session, draft: AttachedDraft, tokens: tuple[int, ...], ids: tuple[int, ...]
    ) -> SessionCommit:
        """What a draft is told: all since it last heard of the session. One that is to sleep hears it once."""
        length = len(session.tokens)
        told = tuple(session.tokens[draft.known :])
        ids = ids if len(told) == len(tokens) else ()
        draft.catching_up = CATCH_UP_STEPS if draft.asleep else max(0, draft.catching_up - 1)
        draft.known, draft.asleep = length, session.budget == 0
        return SessionCommit(draft.handle, session.tree.epoch, length, told, ids, session.budget)

    def _tell_features(self, sessions: Sequence[Session], out: Outcome, links: Collection[int] | None = None) -> None:
        """Gives the drafts that asked for features (of ``links``; None: all) those that they lack: with their commits,
        else as chunks. One that sleeps hears nothing: it gets them with the commit that wakes it."""
        due = [
            DueFeatures(link, draft, request, session.pages, session.cached)
            for session in sessions
            for link, draft in session.drafts.items()
            if (links is None or link in links) and (request := self._links[link].features)
            if draft.featured < session.cached and draft.known == len(session.tokens)
        ]
        if due:
            tell(due, self.runtime, out.commits, out.features)

    def _account(self, parts: Sequence[Part], out: Outcome, began: float, forward_s: float) -> None:
        now = self.clock()
        nodes = sum(part.tree.size - 1 for part in parts)
        tokens = sum(len(e.tokens) for e in out.emitted)
        totals = self.totals
        totals.steps += 1
        totals.tokens += tokens
        totals.verified += nodes
        totals.accepted += sum(e.accepted for e in out.emitted)
        out.step_s, out.verified, out.width_reason = now - began, nodes, self.planner.reason
        totals.step_s = now - began if not totals.step_s else 0.9 * totals.step_s + 0.1 * (now - began)
        totals.width = nodes / max(1, len(out.emitted))
        drafted = sum(bool(part.session.drafts) for part in parts)
        totals.narrow += not nodes and drafted > 1 and self.planner.reason in ("shut", "cost")
        self._unaudited += 1
        if self._unaudited >= AUDIT_STEPS:
            self.audit()
        self.planner.finished(parts, tokens, len(self.sessions), forward_s, began, now)

    def audit(self) -> list[str]:
        """Holds the page books against the sessions; what is wrong is returned, logged and counted."""
        self._unaudited = 0
        problems = self._kv.audit(self.sessions.values())
        if problems:
            METRICS.kv_audit_failures.inc()
            log.error("kv audit failed", count=len(problems), problems=problems[:8])
        return problems


def measure_step_times(
    runtime: ModelRuntime, most_rows: int, token_count: int, clock: Callable[[], float], rounds: int = 3
) -> StepTimes:
    """T(rows) of this model on this machine, from short greedy steps over an empty cache.

    The best of several rounds over all sizes, so that a disturbance does not hit one size alone.
    """
    limit = min(most_rows, 64 if runtime.device.type == "cpu" else 256)
    grid = [rows for rows in GRID if rows <= limit]
    pages = runtime.pool.take(grid[-1])
    parts = []
    for rows in grid:
        at = np.arange(rows, dtype=np.int32)
        parts.append(Rows(pages, 0, at % 2, at, np.tri(rows, dtype=np.bool_)))
    seconds = [[_timed(runtime, part, token_count, clock) for part in parts] for _ in range(rounds)]
    runtime.pool.give(pages)
    return StepTimes(grid, np.min(seconds, axis=0))


def _timed(runtime: ModelRuntime, part: Rows, token_count: int, clock: Callable[[], float]) -> float:
    began = clock()
    runtime.choose([part], [SamplingParams()], token_count)
    return clock() - began
