"""One session: what has been committed, what is in the cache, which drafts serve it.

Three lengths, one owner: ``committed`` tokens of the text, ``cached`` of them in the KV cache, and pages held for all
of them and ``node_room`` more. ``cached < committed`` always: the anchor's key and value are written by the next step.

A preempted session holds no pages and has nothing cached; its text, its drafts and their trees stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood.acceptance import Ending, FinishReason
from draftwood.parameters import Rule, SamplingParams
from draftwood.processors import History
from draftwood.runtime.text import TextStream
from draftwood.telemetry import MOST_DEPTH, WidthReason
from verifier_service.constraints import Constraint, Grammar, Matcher
from verifier_service.live_tree import LiveTree
from verifier_service.watch import AcceptanceWatch

MISSES_UNTIL_LAGGING = 3
CATCH_UP_STEPS = 8
URGENT_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request, in tokens."""

    session_id: str
    ticket_key: bytes = field(repr=False)  # that drafts' tickets are made with; empty: no draft may join
    prompt: tuple[int, ...]
    resume: tuple[int, ...]  # tokens generated before, by an earlier run of the same request
    sampling: SamplingParams
    ending: Ending  # max_tokens counts the resumed ones
    max_nodes: int
    top_logprobs: int | None = None  # alternatives to report with each token's log probability; None: report neither
    text: TextStream | None = None  # searched for stop strings; knows of ``resume``, the engine feeds it what follows
    deadline_ms: int = 0  # from its arrival; 0: none
    rule: Rule = Rule.SHARED_NOISE  # at a temperature above 0; 0 is greedy

    constraint: Constraint | None = None
    grammar: Grammar | None = None  # the constraint, compiled

    @property
    def weight(self) -> int:
        """Parts of a step's nodes, where they are shared."""
        return URGENT_WEIGHT if self.deadline_ms else 1

    @property
    def effective_rule(self) -> Rule:
        return Rule.GREEDY if self.sampling.greedy else self.rule

    @property
    def sampled(self) -> bool:
        """True if drafts sample their nodes and say from what."""
        return self.effective_rule is Rule.REJECTION


@dataclass(slots=True)
class AttachedDraft:
    """A draft worker that has joined the session."""

    handle: int
    complete_epoch: int = -1  # epoch whose round it has completed
    known: int = 0  # committed tokens it has been told
    asleep: bool = False  # it has been told that no nodes are wanted
    catching_up: int = 0  # steps that do not wait for it: it has joined or was woken, and has to read
    featured: int = 0  # positions from the start whose features it has been told, if it asked for any
    misses: int = 0  # steps in a row that did not wait for it long enough
    watch: AcceptanceWatch = field(default_factory=AcceptanceWatch)  # of its guesses in this session

    @property
    def lagging(self) -> bool:
        return self.misses >= MISSES_UNTIL_LAGGING


def no_depths() -> list[int]:
    """Counts of nodes by depth - 1, deeper ones in the last place: [MOST_DEPTH], all 0."""
    return [0] * MOST_DEPTH


@dataclass(slots=True)
class Stats:
    steps: int = 0
    verified: int = 0
    accepted: int = 0
    stale: int = 0
    first_token_s: float = 0.0
    cached_prompt: int = 0  # tokens of the prompt that others had computed
    preemptions: int = 0
    drafted: int = 0  # nodes that drafts have sent
    late: int = 0  # rounds that a step did not wait for long enough
    wait_s: float = 0.0  # from commits until the awaited trees were there, or until the step that waited no longer
    width_reason: WidthReason = "no_nodes"  # of the last step
    verified_by_depth: list[int] = field(default_factory=no_depths)
    accepted_by_depth: list[int] = field(default_factory=no_depths)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token, and of the likeliest tokens at its place, best first, all before any processing."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Emitted:
    """Tokens of one step for one session; the first ``accepted`` had been guessed by a draft."""

    session_id: str
    offset: int
    tokens: tuple[int, ...]
    accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if the request asks for them
    finish: FinishReason | None = None  # why the text ends with them
    pieces: tuple[str, ...] | None = None  # the text of each token; None: nobody has made it yet


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one session."""

    session_id: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    total_s: float
    stats: Stats
    stop: int | str | None = None  # the stop token or stop string that ended it


@dataclass(eq=False)
class Session:
    """Mutable state of one running request; only the engine touches it."""

    request: GenerateRequest
    admitted_s: float
    live_nodes: int
    tokens: list[int] = field(init=False)
    tree: LiveTree = field(init=False)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    keys: list[bytes] = field(default_factory=list)  # of the text's full pages
    published: int = 0  # pages from the start that are published, or known by another page
    node_room: int = 0  # nodes that the pages have room for in the next step
    drafts: dict[int, AttachedDraft] = field(default_factory=dict)  # by link
    committed_s: float = field(init=False)  # when the last commit went out
    served: int = 0  # the higher, the later it was in a step
    budget: int = 0  # nodes asked of the drafts for this round
    stats: Stats = field(default_factory=Stats)
    history: History | None = field(init=False)  # None: nothing processes the logits
    matcher: Matcher | None = field(init=False)  # behind the committed text; None: no constraint

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.resume]
        processors, grammar = self.request.sampling.processors, self.request.grammar
        self.history = History(processors, self.tokens, len(self.request.prompt)) if processors else None
        assert not self.request.constraint or grammar
        self.matcher = grammar.matcher(self.request.resume) if grammar else None
        self.tree = LiveTree(self.tokens, self.live_nodes, sampled=self.request.sampled)
        self.committed_s = self.admitted_s

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        return self.request.ending.max_tokens - self.generated

    @property
    def pending(self) -> int:
        """Committed tokens that are not in the cache yet; 1 when decoding, more while prefilling."""
        return len(self.tokens) - self.cached

    @property
    def decoding(self) -> bool:
        return self.pending == 1

    @property
    def running(self) -> bool:
        """False while it is preempted."""
        return bool(self.pages)

    @property
    def has_drafted(self) -> bool:
        """True while a draft that has completed a round keeps up, so that a step shows what drafts are worth."""
        return any(draft.complete_epoch >= 0 and not draft.catching_up for draft in self.drafts.values())

    def awaited(self) -> list[AttachedDraft]:
        """Drafts whose round for this epoch is still open and worth waiting for."""
        if self.budget == 0:
            return []
        late = [d for d in self.drafts.values() if d.complete_epoch < self.tree.epoch]
        return [d for d in late if not d.lagging and not d.catching_up]
