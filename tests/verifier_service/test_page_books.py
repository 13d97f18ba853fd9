"""Random lives of sessions over a small page pool: the books add up after every event and no text is wrong.

``TableRuntime`` makes any page that holds something else than it should show in the text.
"""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripted import request
from table_runtime import VOCAB, TableRuntime, oracle, table_engine

from draftwood.errors import ResourceExhausted
from draftwood.parameters import SamplingParams
from draftwood.runtime.pages import FIRST_KEY, RUN_PAGES, PagePool
from verifier_service.engine import Engine, Outcome
from verifier_service.live_tree import Nodes

PAGE = 16
seeds = st.integers(0, 2**32 - 1)


class Pool(RuleBasedStateMachine):
    """``PagePool`` alone: holders with pages of their own and shared ones."""

    @initialize(total=st.integers(1, 9) | st.integers(20, 40), prefer_runs=st.booleans())
    def start(self, total: int, prefer_runs: bool) -> None:
        self.pool = PagePool(total, PAGE, prefer_runs=prefer_runs)
        self.prefer_runs = prefer_runs
        self.texts: list[tuple[list[int], list[bytes]]] = []  # pages of each holder, keys of those published

    @rule(count=st.integers(0, 4) | st.integers(RUN_PAGES - 1, RUN_PAGES + 4), known=st.integers(0, 2))
    def take(self, count: int, known: int) -> None:
        """A holder whose text begins like one of three."""
        keys = [self.pool.key(FIRST_KEY, [known] * PAGE)]
        keys.append(self.pool.key(keys[0], [known] * PAGE))
        shared = self.pool.find(keys)
        self.pool.hold(shared)
        if count > self.pool.available:
            before = self.pool.free, self.pool.cached
            try:
                self.pool.take_pages(count)
            except ResourceExhausted as error:
                assert error.reason == "KV_FULL" and (self.pool.free, self.pool.cached) == before
            else:
                raise AssertionError("more pages were taken than there are")
            self.pool.give(shared)
            return
        free = set(range(self.pool.total)) - {page for page, n in enumerate(self.pool._holders) if n}
        free -= self.pool._cached.keys()
        taken = self.pool.take_pages(count)
        if self.prefer_runs and count >= RUN_PAGES:
            runs = [first for first in free if all(first + k in free for k in range(count))]
            assert not runs or taken == list(range(min(runs), min(runs) + count))
        self.texts.append((shared + taken, keys[: len(shared)]))

    @precondition(lambda self: self.texts)
    @rule(seed=seeds)
    def publish_next(self, seed: int) -> None:
        pages, keys = self.texts[seed % len(self.texts)]
        if len(keys) < len(pages):
            keys.append(self.pool.key(keys[-1] if keys else FIRST_KEY, [seed % 3] * PAGE))
            known = self.pool.find(keys[-1:])
            assert self.pool.publish(pages[len(keys) - 1], keys[-1]) == (not known)

    @precondition(lambda self: self.texts)
    @rule(seed=seeds)
    def give(self, seed: int) -> None:
        self.pool.give(self.texts.pop(seed % len(self.texts))[0])

    @precondition(lambda self: self.texts)
    @rule(seed=seeds)
    def forget(self, seed: int) -> None:
        pages, keys = self.texts[seed % len(self.texts)]
        self.pool.forget(pages)
        assert not set(self.pool.find(keys[:1])) & set(pages)
        keys.clear()
        del self.texts[seed % len(self.texts)]
        self.pool.give(pages)

    @invariant()
    def the_books_add_up(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.audit([pages for pages, _ in self.texts]) == []
            assert self.pool.free + self.pool.cached + self.pool.held == self.pool.total
            assert self.pool.held == len({page for pages, _ in self.texts for page in pages})


class Lives(RuleBasedStateMachine):
    """The engine: requests that begin alike, drafts, cancels, preemption, failing steps."""

    engine: Engine | None = None

    @initialize(pages=st.integers(6, 14), rows=st.sampled_from([16, 40, 256]), seed=seeds)
    def start(self, pages: int, rows: int, seed: int) -> None:
        self.engine = table_engine(pages, max_step_tokens=rows, max_sessions=6)
        self.engine.open_link(0, "scripted")
        self.runtime: TableRuntime = self.engine.runtime  # type: ignore[assignment]
        self.random = random.Random(seed)
        self.want: dict[str, list[int]] = {}
        self.prompt: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.next_id: dict[str, int] = {}

    def hear(self, outcome: Outcome) -> None:
        for e in outcome.emitted:
            assert e.offset == len(self.got[e.session_id]), "a chunk is missing or doubled"
            self.got[e.session_id] += e.tokens
            assert self.got[e.session_id] == self.want[e.session_id][: len(self.got[e.session_id])]
        for ended in outcome.ended:
            if ended.reason.value != "cancelled":
                assert self.got[ended.session_id] == self.want[ended.session_id]
            self.ended.add(ended.session_id)
        self.ended.update(name for name, _ in outcome.failed)

    @rule(pages=st.lists(st.integers(0, 1), max_size=4), own=st.integers(0, 20), tokens=st.integers(1, 30))
    def submit(self, pages: list[int], own: int, tokens: int) -> None:
        """Prompts of two kinds of pages, in any order."""
        assert self.engine
        name = f"s{len(self.want)}"
        prompt = [kind for kind in pages for _ in range(PAGE)] + [self.random.randrange(VOCAB) for _ in range(own)]
        prompt = prompt or [0]
        self.prompt[name], self.want[name], self.got[name] = prompt, oracle(prompt, tokens), []
        self.next_id[name] = 1
        try:
            self.hear(self.engine.submit(request(name, prompt, tokens, SamplingParams())))
        except ResourceExhausted as error:
            assert (error.reason, error.retry_after_ms) == ("KV_FULL", 0)
            assert len(prompt) + tokens > PAGE * self.engine.runtime.pool.total
            self.ended.add(name)

    @precondition(lambda self: self.engine and self.engine.sessions)
    @rule(seed=seeds)
    def join(self, seed: int) -> None:
        assert self.engine
        name = list(self.engine.sessions)[seed % len(self.engine.sessions)]
        if not self.engine.sessions[name].drafts:
            self.engine.join(0, int(name[1:]) + 1, name)

    @precondition(lambda self: self.engine and self.engine.sessions)
    @rule(seed=seeds)
    def grow(self, seed: int) -> None:
        """A chain of right guesses with wrong siblings, for a session whether it runs or not."""
        assert self.engine
        rnd = random.Random(seed)
        name = rnd.choice(list(self.engine.sessions))
        session = self.engine.sessions[name]
        if not session.drafts:
            return
        first, parent = self.next_id[name], 0
        ahead = [*self.want[name], 0, 0, 0][session.generated :][: rnd.randint(1, 14)]
        parents, tokens = [], []
        for right in ahead:
            if rnd.random() < 0.4:
                parents.append(parent)
                tokens.append((right + 1) % VOCAB)
            parents.append(parent)
            tokens.append(right)
            parent = first + len(tokens) - 1
        self.next_id[name] += len(tokens)
        score = np.full(len(tokens), -0.1, np.float32)
        nodes = Nodes(session.tree.epoch, first, np.array(parents, np.int64), np.array(tokens, np.int32), score)
        self.engine.grow(0, int(name[1:]) + 1, nodes, complete=False)

    @precondition(lambda self: self.engine and self.engine.sessions)
    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        assert self.engine
        for _ in range(steps):
            if self.engine.due() is not None:
                self.hear(self.engine.step())

    @precondition(lambda self: self.engine and self.engine.sessions)
    @rule(seed=seeds)
    def cancel(self, seed: int) -> None:
        assert self.engine
        self.hear(self.engine.cancel(list(self.engine.sessions)[seed % len(self.engine.sessions)]))

    @precondition(lambda self: self.engine and len(self.engine.running) > 1)
    @rule(seed=seeds)
    def preempt(self, seed: int) -> None:
        assert self.engine
        session = self.engine.running[seed % len(self.engine.running)]
        self.engine._kv.release(session)
        self.engine._set_aside(session)

    @precondition(lambda self: self.engine and self.engine.running)
    @rule(raises=st.booleans())
    def fail(self, raises: bool) -> None:
        """A step that raises, or whose logits are not finite."""
        assert self.engine
        if raises:
            self.hear(self.engine.crash(RuntimeError("broken")))
        else:
            self.runtime.sick = True
            self.hear(self.engine.step())

    @invariant()
    def the_books_add_up(self) -> None:
        if self.engine:
            pool = self.engine.runtime.pool
            assert self.engine.audit() == []
            assert pool.free + pool.cached + pool.held == pool.total
            assert set(self.engine.preempted) == {s for s in self.engine.sessions.values() if not s.running}
            assert self.engine.running or not (self.engine.preempted or self.engine.waiting), "nobody runs: a deadlock"

    def teardown(self) -> None:
        if self.engine is None:
            return
        for _ in range(5000):
            if self.engine.due() is None:
                break
            self.hear(self.engine.step())
        assert self.ended == set(self.want), "a session never ended"
        assert self.engine.runtime.pool.held == 0 and self.engine.audit() == []


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
