"""KV pages of the verifier, with drafts on: shared prefixes, preemption, fencing, audit.

The target is a tiny float64 model, or a table whose cache shows in the text.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from lm_draft import LmDraft, lm_drafter, note_forwards
from scripted import VOCAB as MODEL_VOCAB
from scripted import ScriptedDraft, make_engine, plain_decode, request, run, tiny_model
from table_runtime import CANARY, TableRuntime, oracle, table_engine

from draftwood.acceptance import Ending, FinishReason
from draftwood.errors import ResourceExhausted
from draftwood.parameters import SamplingParams
from draftwood.runtime.model import ModelRuntime
from draftwood.runtime.worker import Worker
from draftwood.telemetry import METRICS
from verifier_service.engine import Engine, Outcome
from verifier_service.live_tree import Nodes
from verifier_service.session import Session
from verifier_service.width import Policy, StepTimes

GREEDY = SamplingParams()
PAGE = 16
T = list[int]


def count(metric: Any) -> float:
    return float(metric._value.get())


class RightDraft:
    """A draft that is always right: a chain of the next ``depth`` tokens after every commit."""

    def __init__(self, truth: dict[str, T], depth: int) -> None:
        self.truth, self.depth = truth, depth
        self.names: dict[int, str] = {}
        self.next_id: dict[int, int] = {}

    def join(self, engine: Engine, name: str, handle: int) -> None:
        start = engine.join(0, handle, name)
        self.names[handle], self.next_id[handle] = name, 1
        self.draw(engine, handle, start.epoch, len(start.tokens))

    def hear(self, engine: Engine, outcome: Outcome) -> None:
        for commit in outcome.commits.get(0, []):
            self.draw(engine, commit.handle, commit.epoch, commit.length)

    def draw(self, engine: Engine, handle: int, epoch: int, length: int) -> None:
        tokens = self.truth[self.names[handle]][length:][: self.depth]
        first = self.next_id[handle]
        self.next_id[handle] += len(tokens)
        parents = [0, *range(first, first + len(tokens))][: len(tokens)]
        score = np.full(len(tokens), -0.05, np.float32)
        nodes = Nodes(epoch, first, np.array(parents, np.int64), np.array(tokens, np.int32), score)
        engine.grow(0, handle, nodes, complete=True)


def serve(engine: Engine, draft: RightDraft | ScriptedDraft, waves: list[list[Any]], most_steps: int) -> dict[str, T]:
    """Submits a wave of requests before each step, runs to the end, and returns the texts; drafts join on admission."""
    got: dict[str, T] = {}
    ended, total, joined = 0, sum(map(len, waves)), 0
    engine.open_link(0, "scripted")
    for at in range(most_steps):
        outcomes = [engine.submit(r) for r in (waves[at] if at < len(waves) else [])]
        if engine.due() is not None:
            outcomes.append(engine.step())
        for outcome in outcomes:
            assert not outcome.failed, outcome.failed
            for e in outcome.emitted:
                assert e.offset == len(got.setdefault(e.session_id, []))
                got[e.session_id] += e.tokens
            ended += len(outcome.ended)
            draft.hear(engine, outcome)
            for name in outcome.admitted:
                if name in engine.sessions:
                    joined += 1
                    draft.join(engine, name, joined)
        if ended == total:
            assert engine.due() is None and engine.runtime.pool.held == 0 and engine.audit() == []
            return got
    raise AssertionError(f"{ended} of {total} ended within {most_steps} steps: a deadlock, or thrashing")


# --- shared prefixes


@cache
def system_prompts() -> tuple[Any, list[T], list[SamplingParams], list[T]]:
    """A model, 32 prompts that share 5 pages and a bit, their rules and texts."""
    model = tiny_model("llama")
    system = [k * k % MODEL_VOCAB for k in range(5 * PAGE + 3)]
    prompts = [[*system, k, k + 1, 2 * k % MODEL_VOCAB] for k in range(32)]
    rules = [GREEDY if k % 2 else SamplingParams(temperature=0.8, seed=k) for k in range(32)]
    return model, prompts, rules, plain_decode(model, prompts, 20, rules)


@pytest.mark.parametrize("arrival", ["at once", "one by one"])
@pytest.mark.parametrize("rows", [64, 512])
def test_a_shared_system_prompt_is_computed_once(arrival: str, rows: int) -> None:
    """32 requests, 5 pages in common, drafts on: at least 95 % of these pages are not computed but shared."""
    model, prompts, rules, want = system_prompts()
    engine = make_engine(model, max_step_tokens=rows)
    requests = [request(f"s{k}", p, 20, r) for k, (p, r) in enumerate(zip(prompts, rules, strict=True))]
    draft = ScriptedDraft(random.Random(1), {f"s{k}": prompts[k] + want[k] for k in range(32)})
    cached: dict[str, int] = {}
    real = engine._end

    def end(session: Session, reason: FinishReason, out: Outcome, *named: Any) -> None:
        cached[session.request.session_id] = session.stats.cached_prompt
        real(session, reason, out, *named)

    engine._end = end  # type: ignore[method-assign]
    got = serve(engine, draft, [requests] if arrival == "at once" else [[r] for r in requests], 1000)
    assert got == {f"s{k}": w for k, w in enumerate(want)}
    assert set(cached.values()) <= {0, 5 * PAGE}
    assert sum(cached.values()) / (32 * 5 * PAGE) >= 0.95
    assert engine.totals.accepted > 100


def test_texts_that_differ_before_a_page_do_not_share_it() -> None:
    """Page for page the same tokens, but behind another first page; one's last page is the whole of another's text."""
    engine = table_engine(32)
    tail = [3] * (2 * PAGE)
    prompts = [[1] * PAGE + tail, [2] * PAGE + tail, tail, [1] * PAGE, [1] * PAGE + tail]
    got = run(engine, [request(f"s{k}", p, 8, GREEDY) for k, p in enumerate(prompts)], [], at_once=1)
    assert got == {f"s{k}": oracle(p, 8) for k, p in enumerate(prompts)}
    assert engine.runtime.computed == sum(map(len, prompts)) - 2 * PAGE + 5 * 7  # type: ignore[attr-defined]


def test_an_answer_is_found_again_by_the_next_turn() -> None:
    """Also what drafts had guessed and was moved into place; never the last token, nor a page that is not full."""
    engine = table_engine(64)
    prompt = [5] * 20
    answer = oracle(prompt, 50)
    draft = RightDraft({"a": prompt + answer}, 12)
    assert serve(engine, draft, [[request("a", prompt, 50, GREEDY)]], 100) == {"a": answer}
    assert engine.totals.accepted > 30
    turn = [*prompt, *answer, 1, 2, 3]
    engine.submit(request("b", turn, 5, GREEDY))
    # The last step's accepted tokens were not moved any more, as the text had ended.
    assert 3 * PAGE <= engine.sessions["b"].cached <= 4 * PAGE
    assert engine.sessions["b"].stats.cached_prompt == engine.sessions["b"].cached


def test_a_resumed_request_shares_what_it_had_generated_and_counts_its_prompt_alone() -> None:
    engine = table_engine(64)
    answer = oracle([6] * 20, 60)
    run(engine, [request("a", [6] * 20, 50, GREEDY)], [], 1)
    engine.submit(request("b", [6] * 20, 60, GREEDY, resume=tuple(answer[:40])))
    session = engine.sessions["b"]
    assert (session.cached, session.stats.cached_prompt) == (3 * PAGE, 20)
    while engine.sessions:
        engine.step()
    assert session.tokens[20:] == answer


def test_without_the_setting_nothing_is_shared() -> None:
    engine = table_engine(64, prefix_cache=False)
    for name in ("a", "b"):
        assert run(engine, [request(name, [4] * 40, 9, GREEDY)], [], 1) == {name: oracle([4] * 40, 9)}
    assert engine.runtime.computed == 2 * (40 + 8)  # type: ignore[attr-defined]
    assert engine.runtime.pool.free == engine.runtime.pool.total


def test_a_page_is_hashed_once_when_it_is_full() -> None:
    """Host time a step does not grow with the text."""
    engine = table_engine(64)
    pool, hashed = engine.runtime.pool, 0
    key = pool.key

    def counting(before: bytes, tokens: T) -> bytes:
        nonlocal hashed
        hashed += 1
        assert len(tokens) == PAGE
        return key(before, tokens)

    pool.key = counting  # type: ignore[method-assign, assignment]
    engine.submit(request("a", [1] * 40, 100, GREEDY))
    while engine.sessions:
        before, session = hashed, engine.sessions["a"]
        engine.step()
        if session.running:
            assert hashed - before <= 1 and hashed == max(2, session.cached // PAGE)


def test_what_a_sick_session_has_computed_is_not_shared() -> None:
    """Logits that are not finite say that its pages may hold such values: nobody may find them."""
    engine = table_engine(64)
    runtime: TableRuntime = engine.runtime  # type: ignore[assignment]
    engine.submit(request("sick", [7] * 50, 20, GREEDY))
    engine.step()
    assert engine.runtime.pool.find(engine.sessions["sick"].keys)
    runtime.sick = True
    assert engine.step().failed[0][1].reason == "NAN_LOGITS"
    assert runtime.pool.free == runtime.pool.total
    runtime.slots[:] = CANARY
    assert run(engine, [request("next", [7] * 50, 20, GREEDY)], [], 1) == {"next": oracle([7] * 50, 20)}


def test_the_least_recently_used_texts_go_first_and_from_their_ends() -> None:
    engine = table_engine(9)
    pool = engine.runtime.pool
    texts = {name: [k] * (3 * PAGE) for k, name in enumerate("abc")}
    for name in ("a", "b", "c", "a"):
        run(engine, [request(f"{name}{random.random()}", texts[name], 1, GREEDY)], [], 1)
    # Of three full pages two can be shared; the third time round a's last one was evicted and computed anew.
    assert (pool.free, pool.cached, pool.evictions) == (0, 9, 1)
    keys = {name: _keys(pool, text) for name, text in texts.items()}
    pool.give(pool.take_pages(2))
    assert [len(pool.find(keys[name])) for name in "abc"] == [3, 1, 3]
    pool.give(pool.take_pages(2))
    assert [len(pool.find(keys[name])) for name in "abc"] == [3, 1, 3], "free pages are taken before cached ones"
    pool.give(pool.take_pages(4))
    assert [len(pool.find(keys[name])) for name in "abc"] == [3, 0, 2]


def _keys(pool: Any, text: T) -> list[bytes]:
    keys = [bytes(16)]
    for k in range(0, len(text), PAGE):
        keys.append(pool.key(keys[-1], text[k : k + PAGE]))
    return keys[1:]


# --- under pressure


def test_forty_sessions_on_32_pages() -> None:
    """Random arrival, lengths and drafts; every text is that of the target alone, and nobody waits for ever."""
    model, rnd = tiny_model("llama"), random.Random(4)
    prompts, want, rules = [list[int]() for _ in range(40)], [list[int]() for _ in range(40)], [GREEDY] * 40
    for length in (3, 17, 32, 50):
        members = [k for k in range(40) if k % 4 == (3, 17, 32, 50).index(length)]
        for k in members:
            common = 20 if length > 20 and k % 3 == 0 else 0
            prompts[k] = [7] * common + [rnd.randrange(MODEL_VOCAB) for _ in range(length - common)]
            rules[k] = GREEDY if rnd.random() < 0.5 else SamplingParams(temperature=0.9, seed=k)
        tokens = plain_decode(model, [prompts[k] for k in members], 120, [rules[k] for k in members])
        for k, text in zip(members, tokens, strict=True):
            want[k] = text[: rnd.randint(50, 120)]
    engine = small_engine(model, 32)
    draft = ScriptedDraft(random.Random(2), {f"s{k}": prompts[k] + want[k] for k in range(40)})
    waves: list[list[Any]] = [[] for _ in range(60)]
    for k in range(40):
        waves[rnd.randrange(60)].append(request(f"s{k}", prompts[k], len(want[k]), rules[k]))
    got = serve(engine, draft, waves, 3000)
    assert got == {f"s{k}": w for k, w in enumerate(want)}
    print(f"{engine.totals.preemptions} preemptions, {engine.totals.steps} steps, {engine.totals.accepted} accepted")
    assert engine.totals.preemptions > 5 and engine.totals.accepted > 300 and engine.runtime.pool.evictions > 50
    assert engine.totals.preemptions < 80, "it thrashes"


def small_engine(model: Any, pages: int, **settings: object) -> Engine:
    made = make_engine(model, max_step_tokens=64, **settings)
    runtime = ModelRuntime(model, kv_pages=pages, page_tokens=PAGE)
    return Engine(runtime, made.settings, token_count=MODEL_VOCAB, times=StepTimes([1, 64], [1, 2]), clock=lambda: 0.0)


def test_a_text_that_fills_the_cache_is_served_and_a_longer_one_refused() -> None:
    engine = table_engine(4)
    prompt, answer = [2] * 20, oracle([2] * 20, 44)
    got = serve(engine, RightDraft({"a": prompt + answer}, 12), [[request("a", prompt, 44, GREEDY)]], 60)
    assert got == {"a": answer} and engine.totals.accepted > 20
    assert run(engine, [request("whole", [3] * 62, 2, GREEDY)], [], 1) == {"whole": oracle([3] * 62, 2)}
    with pytest.raises(ResourceExhausted) as caught:
        engine.submit(request("b", prompt, 45, GREEDY))
    assert (caught.value.reason, caught.value.retry_after_ms) == ("KV_FULL", 0)
    assert caught.value.message == "the request needs 5 KV pages, the cache has 4 in all"
    assert not engine.waiting and engine.due() is None


def test_the_youngest_gives_way_and_goes_on_where_it_was() -> None:
    """Its drafts stay joined, draw on meanwhile, and what they drew is used; a new draft may join it, too."""
    engine = table_engine(6)
    prompts = {"old": [1] * 30, "young": [2] * 30}
    truth = {name: p + oracle(p, 60) for name, p in prompts.items()}
    draft = RightDraft(truth, 4)
    engine.open_link(0, "scripted")
    engine.open_link(1, "late")
    for handle, name in enumerate(prompts, 1):
        engine.submit(request(name, prompts[name], 60, GREEDY))
        draft.join(engine, name, handle)
    young, before = engine.sessions["young"], count(METRICS.preemptions)
    while young.running:
        outcome = engine.step()
        assert not outcome.stops
        draft.hear(engine, outcome)
    assert engine.sessions["old"].running and (young.pages, young.cached) == ([], 0)
    assert (count(METRICS.preemptions) - before, young.stats.preemptions) == (1, 1)
    told, epoch = len(young.tokens), young.tree.epoch
    assert young.tree.size == 5, "the draft had drawn for the epoch at which the session was preempted"
    start = engine.join(1, 7, "young")
    assert (start.epoch, list(start.tokens)) == (epoch, truth["young"][:told])
    while not young.running:
        draft.hear(engine, engine.step())
    assert len(young.tokens) == told and "old" not in engine.sessions
    assert young.cached == 0 or young.cached % PAGE == 0
    steps = engine.totals.steps
    while engine.sessions:
        outcome = engine.step()
        assert all(c.epoch > epoch for c in outcome.commits.get(0, []))
        draft.hear(engine, outcome)
    assert young.tokens == truth["young"] and engine.totals.steps - steps < 14
    assert engine.due() is None and engine.audit() == []


def test_what_a_resumed_session_finds_again_is_not_called_cached_prompt() -> None:
    engine = table_engine(16)
    engine.submit(request("other", [3] * 20, 50, GREEDY))
    engine.submit(request("s", [1] * 40, 30, GREEDY))
    engine.step()
    session = engine.sessions["s"]
    engine._kv.release(session)
    engine._set_aside(session)
    engine.cancel("other")
    assert (session.cached, session.stats.cached_prompt) == (2 * PAGE, 0)


def test_nodes_make_nobody_give_way() -> None:
    """A tree gets what pages are to spare; a session whose next page is wanted for a tree alone is not preempted."""
    engine = table_engine(5)
    truth = {name: [k] * 30 + oracle([k] * 30, 18) for k, name in enumerate(("a", "b"))}
    draft = RightDraft(truth, 12)
    waves = [[request(name, text[:30], 18, GREEDY)] for name, text in truth.items()]
    assert serve(engine, draft, waves, 100) == {name: text[30:] for name, text in truth.items()}
    assert engine.totals.preemptions == 0 and engine.totals.accepted > 10


def test_pages_held_for_nodes_are_given_back_before_anybody_gives_way() -> None:
    engine = table_engine(8)
    engine.open_link(0, "wrong")
    engine.submit(request("old", [1] * 15, 20, GREEDY))
    engine.submit(request("young", [2] * 6, 20, GREEDY))
    engine.step()
    wrong = {"young": [2] * 6 + [(token + 1) % 13 for token in oracle([2] * 6, 20)]}
    RightDraft(wrong, 12).join(engine, "young", 1)
    engine.step()
    old, young = engine.sessions["old"], engine.sessions["young"]
    assert (len(old.tokens), len(old.pages), len(young.tokens), len(young.pages)) == (17, 1, 8, 2)
    pool = engine.runtime.pool
    others = pool.take_pages(pool.available)
    engine.step()
    assert (len(old.pages), len(young.pages), engine.totals.preemptions) == (2, 1, 0)
    pool.give(others)
    assert engine.audit() == []


def test_admission_leaves_running_sessions_room_to_grow() -> None:
    engine = table_engine(8)
    for k in range(6):
        engine.submit(request(f"s{k}", [k] * 10, 20, GREEDY))
    # 4 hold one page each; a fifth would leave 3 for 5 to grow.
    assert (len(engine.sessions), len(engine.waiting)) == (4, 2)
    while engine.sessions:
        engine.step()
    assert engine.totals.preemptions == 0


def test_preempted_sessions_come_before_waiting_ones_and_can_be_cancelled() -> None:
    engine = table_engine(7)
    for k in range(2):
        engine.submit(request(f"s{k}", [k] * 30, 60, GREEDY))
    while not engine.preempted:
        engine.step()
    engine.submit(request("new", [9] * 3, 5, GREEDY))
    assert "new" not in engine.sessions
    outcome = engine.cancel("s1")
    assert [e.reason for e in outcome.ended] == [FinishReason.CANCELLED] and outcome.admitted == ["new"]
    assert not engine.preempted and engine.audit() == []


def test_of_several_preempted_sessions_the_oldest_is_resumed_first() -> None:
    engine = table_engine(9)
    for k in range(3):
        engine.submit(request(f"s{k}", [k] * 30, 60, GREEDY))
    while len(engine.preempted) < 2:
        engine.step()
    assert [s.request.session_id for s in engine.preempted] == ["s1", "s2"]
    engine.cancel("s0")
    assert [s.request.session_id for s in engine.running] == ["s1"]


def test_the_only_session_that_was_ready_gives_way_to_one_that_waits_for_its_draft() -> None:
    """Then there is nothing to compute, and the step is none."""
    engine = table_engine(16, draft_wait_ms=100)
    engine.open_link(0, "silent")
    engine.submit(request("old", [1] * 32, 20, GREEDY))
    engine.join(0, 1, "old")
    engine.sessions["old"].drafts[0].catching_up = 0  # it has had its time to read
    engine.submit(request("young", [2] * 20, 20, GREEDY))
    engine.step()
    pool = engine.runtime.pool
    others = pool.take_pages(pool.available)
    assert engine.step() == Outcome() and engine.due() is not None
    assert [s.request.session_id for s in engine.preempted] == ["young"]
    pool.give(others)
    engine.cancel("old")
    young = engine.sessions["young"]
    while engine.sessions:
        engine.step()
    assert young.tokens[20:] == oracle([2] * 20, 20) and engine.audit() == []


# --- bug kinds


@pytest.mark.parametrize("share", [True, False])
def test_bug_3_nan_in_all_pages_of_others_and_in_reused_ones_changes_nothing(share: bool) -> None:
    """Before every step, every slot that no session and no cached text has filled is set to NaN."""
    model, rnd = tiny_model("mistral"), random.Random(9)
    prompts = [[5] * 20 + [rnd.randrange(MODEL_VOCAB) for _ in range(17)] for _ in range(12)]
    want = plain_decode(model, prompts, 40, [GREEDY] * 12)
    engine = small_engine(model, 12, prefix_cache=share)
    pool, cache = engine.runtime.pool, engine.runtime.cache
    real = engine.runtime.forward

    def poisoned(parts: Any) -> torch.Tensor:
        live = torch.zeros(pool.total + 1, PAGE, dtype=torch.bool)
        live[list(pool._cached)] = True
        for session in engine.running:
            for slot in range(session.cached):
                live[session.pages[slot // PAGE], slot % PAGE] = True
        cache.permute(2, 4, 0, 1, 3, 5)[~live] = torch.nan
        return real(parts)

    engine.runtime.forward = poisoned  # type: ignore[method-assign]
    draft = ScriptedDraft(random.Random(2), {f"s{k}": prompts[k] + want[k] for k in range(12)})
    requests = [request(f"s{k}", p, 40, GREEDY) for k, p in enumerate(prompts)]
    assert serve(engine, draft, [requests[:6], requests[6:]], 1000) == {f"s{k}": w for k, w in enumerate(want)}
    assert engine.totals.preemptions > 0


@pytest.mark.parametrize("rule", [GREEDY, SamplingParams(temperature=0.9, seed=2**63 + 1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("neighbours", [1, 7, 31])
def test_bug_3_neighbours_that_come_and_go_and_whose_caches_go_bad_change_no_token(
    neighbours: int, rule: SamplingParams
) -> None:
    """One text beside up to 31 others that join, leave, and are poisoned with NaN at random steps; half of them share
    its first page. Whoever is poisoned ends with NAN_LOGITS, and nobody else notices."""
    model, rnd = tiny_model("mistral"), random.Random(neighbours)
    common = [rnd.randrange(MODEL_VOCAB) for _ in range(PAGE)]
    prompts = [
        (common if k % 2 else []) + [rnd.randrange(MODEL_VOCAB) for _ in range(37 - PAGE * (k % 2))] for k in range(9)
    ]
    rules = [GREEDY if k % 3 else SamplingParams(temperature=0.7, seed=k) for k in range(8)] + [rule]
    prompts[8] = common + prompts[8][PAGE:]
    texts = plain_decode(model, prompts, 150, rules)
    alone = make_engine(model)
    assert run(alone, [request("s", prompts[8], 150, rule)], [], 1) == {"s": texts[8]}
    engine = small_engine(model, 220, max_nodes=6)
    draft = ScriptedDraft(random.Random(2), {"s": prompts[8] + texts[8]})
    engine.open_link(0, "scripted")
    engine.submit(request("s", prompts[8], 150, rule))
    draft.join(engine, "s", 1)
    got: dict[str, T] = {"s": []}
    poisoned, failed, most, joined = set[str](), set[str](), 0, 1
    while "s" in engine.sessions:
        others = [name for name in engine.sessions if name != "s"]
        while len(others) < neighbours and rnd.random() < 0.8:
            k, joined = rnd.randrange(8), joined + 1
            name = f"n{joined}"
            got[name], draft.truth[name] = [], prompts[k] + texts[k]
            engine.submit(request(name, prompts[k], rnd.randint(1, 60), rules[k]))
            if name in engine.sessions:
                draft.join(engine, name, joined)
            others.append(name)
        if others and rnd.random() < 0.3:
            engine.cancel(rnd.choice(others))
        running = [s for s in engine.running if s.request.session_id != "s" and s.decoding]
        if running and rnd.random() < 0.4:
            sick = rnd.choice(running)
            pages = [page for page in sick.pages if engine.runtime.pool.is_private(page)]
            engine.runtime.cache[:, :, pages] = torch.nan
            poisoned.add(sick.request.session_id)
        most = max(most, len(engine.sessions) - 1)
        outcome = engine.step()
        for e in outcome.emitted:
            got[e.session_id] += e.tokens
        for name, error in outcome.failed:
            assert error.reason == "NAN_LOGITS" and name in poisoned
            failed.add(name)
        draft.hear(engine, outcome)
    assert got["s"] == texts[8]
    for name, tokens in got.items():
        text = draft.truth[name]
        assert text[len(text) - 150 :][: len(tokens)] == tokens, name
    assert most == neighbours and len(failed) >= min(5, neighbours) and engine.totals.accepted > 50
    for name in list(engine.sessions):
        engine.cancel(name)
    assert engine.audit() == [] and engine.runtime.pool.held == 0


CHUNK = 40


@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
def test_bug_12_first_steps_at_every_edge_of_page_and_chunk(length: int) -> None:
    """An always right draft for ten steps, first without and then with cached pages: all its guesses are accepted."""
    model = tiny_model("qwen3")
    prompt = [(3 * k + k * k) % MODEL_VOCAB for k in range(length)]
    want = plain_decode(model, [prompt], 41, [GREEDY])[0]
    engine = make_engine(model, max_step_tokens=CHUNK)
    for name, cached in (("cold", 0), ("warm", (length - 1) // PAGE * PAGE)):
        engine.submit(request(name, prompt, 41, GREEDY))
        assert engine.sessions[name].cached == cached
        engine.open_link(0, "right")
        draft = RightDraft({name: prompt + want}, 3)
        draft.join(engine, name, 1)
        session, got = engine.sessions[name], list[int]()
        while engine.sessions:
            before, decoding = session.cached, session.decoding
            outcome = engine.step()
            for e in outcome.emitted:
                assert len(e.tokens) == (min(4, 41 - len(got)) if decoding else 1)
                got += e.tokens
            if session.running:
                took = CHUNK if not outcome.emitted else len(outcome.emitted[0].tokens)
                assert session.cached - before == took or not decoding
                assert session.tokens == [*prompt, *got] and session.decoding == bool(got or session.pending == 1)
            draft.hear(engine, outcome)
        assert got == want
        engine.close_link(0)
    assert engine.audit() == []


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("rule", [GREEDY, SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_bug_12_a_draft_that_is_the_target_is_taken_whole_every_time(length: int, rule: SamplingParams) -> None:
    """The real drafter with the target's weights, drawing chains: its cache lacks the last guess and the bonus token
    after every step, and all that it draws is accepted for more than ten steps."""
    model = tiny_model("qwen3")
    prompt = [(3 * k + k * k) % MODEL_VOCAB for k in range(length)]
    want = plain_decode(model, [prompt], 61, [rule])[0]
    engine = make_engine(model, max_step_tokens=CHUNK)
    runtime = ModelRuntime(tiny_model("qwen3"), kv_pages=32, page_tokens=PAGE)
    settings: dict[str, Any] = {"depth": 3, "beam": 1, "branch": 1, "min_level_survival": 0, "nodes_per_level": 0}
    drafter = lm_drafter(runtime, max_step_tokens=CHUNK, lookahead_levels=0, **settings)
    draft, caught_up = LmDraft(drafter), list[int]()

    def note(_: Any) -> None:
        session = drafter._sessions[0, 1]
        caught_up.extend([session.pending] if session.pending else [])

    note_forwards(runtime, note)
    engine.open_link(0, "itself")
    engine.submit(request("s", prompt, 61, rule))
    draft.join(engine, "s", 1)
    session, got, runs = engine.sessions["s"], list[int](), list[int]()
    while engine.sessions:
        draft.work(engine)
        decoding = session.decoding
        outcome = engine.step()
        draft.hear(engine, outcome)
        for e in outcome.emitted:
            got += e.tokens
            runs += [len(e.tokens)] if decoding else []
        assert session.stats.accepted == session.stats.verified == len(got) - session.stats.steps
    assert got == want
    assert len(runs) > 11 and min(runs[:-1]) >= 5, "every step takes the whole chain and the bonus token"
    assert caught_up[-10:] == [2] * 10, "the last guess and the bonus token"


@pytest.mark.parametrize("before", [2, 12, 13, 14, 15])
@pytest.mark.parametrize("place", range(5))
def test_bug_13_an_end_token_inside_an_accepted_run_ends_text_usage_and_cache(place: int, before: int) -> None:
    """Each token of a run of five as the end token, the run lying anywhere about a page's edge: the text ends with it,
    the draft is told once and hears of no commit of the step, and the cache has nothing of the guesses behind it."""
    prompt = next(p for k in range(13) if len(set(oracle(p := [k] * before, 6))) == 6)
    answer = oracle(prompt, 12)
    engine = table_engine(64)
    draft = RightDraft({"a": prompt + answer}, 4)
    engine.open_link(0, "right")
    engine.submit(request("a", prompt, 12, GREEDY, ending=Ending(frozenset({answer[1 + place]}), 12)))
    draft.join(engine, "a", 1)
    outcome = engine.step()
    assert [e.tokens for e in outcome.emitted] == [(answer[0],)]
    draft.hear(engine, outcome)
    pages = list(engine.sessions["a"].pages)
    outcome = engine.step()
    assert [(e.tokens, e.accepted) for e in outcome.emitted] == [(tuple(answer[1 : 2 + place]), min(place + 1, 4))]
    (ended,) = outcome.ended
    assert (ended.reason, ended.completion_tokens, ended.stop) == (FinishReason.STOP, 2 + place, answer[1 + place])
    assert outcome.stops == {0: [1]} and not outcome.commits
    pool, text = engine.runtime.pool, [*prompt, *answer[: 2 + place]]
    assert pool.held == 0 and pool.cached <= len(text) // PAGE and len(pages) <= 2
    assert engine.due() is None and engine.audit() == []
    turn = [*text, *[(token + 1) % 13 for token in answer[2 + place :]]]
    assert run(engine, [request("b", turn, 20, GREEDY)], [], 1) == {"b": oracle(turn, 20)}


def test_bug_21_pages_of_a_cancelled_session_wait_for_no_draft() -> None:
    """1,000 sessions on 32 pages, each cancelled at a random place while its draft is silent for good."""
    engine, rnd = table_engine(32), random.Random(3)
    engine.open_link(0, "silent")
    for k in range(1000):
        prompt = [k % 5] * rnd.randint(1, 60)
        engine.submit(request(f"s{k}", prompt, 60, GREEDY))
        engine.join(0, k + 1, f"s{k}")
        for _ in range(rnd.randint(0, 4)):
            engine.step()
        outcome = engine.cancel(f"s{k}")
        assert outcome.stops == {0: [k + 1]}
        pool = engine.runtime.pool
        assert pool.held == 0 and pool.free + pool.cached == 32 and not engine._links[0].sessions
        assert engine.due() is None
    assert engine.audit() == []


class Running:
    """The engine in its worker's thread, as in the server, with forwards that can be held up in their middle."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runtime: TableRuntime = engine.runtime  # type: ignore[assignment]
        self.texts: dict[str, T] = {}
        self.over: dict[str, threading.Event] = {}
        self.in_forward, self.go_on = threading.Event(), threading.Event()
        self.worker: Worker[Outcome] = Worker("verifier-engine", self.publish)

    def publish(self, outcome: Outcome) -> None:
        for e in outcome.emitted:
            assert e.offset == len(self.texts[e.session_id])
            self.texts[e.session_id] += e.tokens
        for ended in outcome.ended:
            self.over[ended.session_id].set()

    def submit(self, name: str, prompt: T, tokens: int) -> None:
        self.texts[name], self.over[name] = [], threading.Event()
        self.worker.call(lambda: self.publish(self.engine.submit(request(name, prompt, tokens, GREEDY))))

    def hold(self) -> None:
        """Waits until a forward is running, and stops it there."""
        self.in_forward.clear()
        self.go_on.clear()
        self.runtime.during = self._during
        assert self.in_forward.wait(10)

    def _during(self) -> None:
        self.runtime.during = lambda: None
        self.in_forward.set()
        assert self.go_on.wait(10)

    def __enter__(self) -> Running:
        self.worker.start(lambda: self.engine, lambda engine: engine).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.worker.stop()


def test_bug_22_pages_are_reused_only_after_the_step_that_may_touch_them() -> None:
    """Cancel and the next request arrive in the middle of a forward; what becomes free is filled with canaries."""
    with Running(table_engine(3)) as running:
        pool = running.runtime.pool
        running.submit("gone", [1] * 20, 28)
        running.hold()
        running.submit("next", [2] * 20, 28)
        running.worker.call(lambda: running.publish(running.engine.cancel("gone")))
        gone, before = running.engine.sessions["gone"], list(pool._holders)
        assert not running.over["gone"].wait(0.1), "the cancel ran in the middle of a forward"
        assert pool._holders == before and "next" not in running.engine.sessions
        held = set(gone.pages)
        running.go_on.set()
        assert running.over["gone"].wait(10) and running.over["next"].wait(10)
        assert running.texts["next"] == oracle([2] * 20, 28)
        assert running.texts["gone"] == oracle([1] * 20, 28)[: len(running.texts["gone"])]
        assert len(held) >= 2 and pool.total == 3, "so the next one had to take a page that the first one held"
        assert running.worker.call(running.engine.audit).result(10) == []


def test_bug_23_a_preempted_session_gets_its_own_steps_verdict_and_no_other() -> None:
    """Preempted from the event loop in the middle of a step: the verdict is applied first, then the pages go."""
    engine = table_engine(16)
    with Running(engine) as running:
        running.submit("other", [3] * 20, 400 - 350)
        running.submit("s", [1] * 20, 28)
        running.hold()
        while "s" not in engine.sessions:
            running.go_on.set()
            running.hold()
        session = engine.sessions["s"]
        length = len(session.tokens)

        def preempt() -> tuple[int, int]:
            engine._kv.release(session)
            engine._set_aside(session)
            return len(session.tokens), session.cached

        done = running.worker.call(preempt)
        assert not done.done() and len(session.tokens) == length
        running.go_on.set()
        told, cached = done.result(10)
        assert told > length and cached == 0
        assert running.over["other"].wait(10) and running.over["s"].wait(10)
        assert running.texts["s"] == oracle([1] * 20, 28) and running.texts["other"] == oracle([3] * 20, 50)


@pytest.mark.parametrize("between", ["preempted", "resumed", "nothing, but twice"])
def test_bug_23_an_old_verdict_is_refused(between: str) -> None:
    """When resumed it has as much cached as when the step was planned, so that only the pages tell the two apart."""
    engine = table_engine(16)
    engine.submit(request("other", [3] * 20, 50, GREEDY))
    engine.submit(request("s", [3] * 17, 28, GREEDY))
    engine.step()
    session, seen = engine.sessions["s"], list[Any]()
    step = engine.sampler.step

    def recording(parts: Any, *allowed: Any) -> list[list[int]]:
        targets = step(parts, *allowed)
        seen.extend(zip(parts, targets, strict=True))
        return targets

    engine.sampler.step = recording  # type: ignore[method-assign]
    engine.step()
    part, targets = next((p, t) for p, t in seen if p.session is session)
    if between != "nothing, but twice":
        engine._kv.release(session)
        engine._set_aside(session)
    if between == "resumed":
        engine.cancel("other")
        assert session.running and session.cached == part.rows.context == PAGE
    text, out = list(session.tokens), Outcome()
    with pytest.raises(AssertionError, match="verdict on another run's step"):
        engine._accept(part, targets, out)
    assert session.tokens == text and not out.emitted


def test_bug_23_no_placeholder_reaches_the_model_when_a_session_is_resumed() -> None:
    """Every token of every forward is one of the vocabulary, and committed ones are those of the text."""
    model = tiny_model("llama")
    prompts = {f"s{k}": [k] * 30 for k in range(2)}
    want = plain_decode(model, list(prompts.values()), 60, [GREEDY] * 2)
    truth = {name: p + w for (name, p), w in zip(prompts.items(), want, strict=True)}
    engine = small_engine(model, 6)
    real = engine.runtime.forward

    def checking(parts: Any) -> torch.Tensor:
        for part in parts:
            assert ((part.token >= 0) & (part.token < MODEL_VOCAB)).all()
            first = int(part.tail_position[0])
            assert first == part.context and any(text[first] == part.token[0] for text in truth.values())
        return real(parts)

    engine.runtime.forward = checking  # type: ignore[method-assign]
    waves = [[request(name, p, 60, GREEDY)] for name, p in prompts.items()]
    got = serve(engine, ScriptedDraft(random.Random(1), truth), waves, 400)
    assert got == {name: text[30:] for name, text in truth.items()} and engine.totals.preemptions > 0


@pytest.mark.parametrize("share", [0, 1, 3, 12])
def test_bug_37_pages_for_nodes_follow_the_width(share: int) -> None:
    """Room is held for as many nodes as the policy lets a step verify, not for as many as it might: none at width 0."""
    engine = table_engine(16, max_nodes=12)
    engine.set_policy(Policy(max_session_nodes=share))
    prompt = [2] * 20
    answer = oracle(prompt, 60)
    draft = RightDraft({"a": prompt + answer}, 12)
    engine.open_link(0, "right")
    engine.submit(request("a", prompt, 60, GREEDY))
    draft.join(engine, "a", 1)
    session, forward, widest = engine.sessions["a"], engine.runtime.forward, 0

    def checking(parts: Any) -> torch.Tensor:
        nonlocal widest
        (part,) = parts
        widest = max(widest, len(part.token) - 1 if part.logits_from == 0 else 0)
        assert len(session.pages) <= engine.runtime.pool.pages_for(len(session.tokens) + share)
        return forward(parts)

    engine.runtime.forward = checking  # type: ignore[method-assign]
    while engine.sessions:
        outcome = engine.step()
        for commit in outcome.commits.get(0, []):  # it draws whatever it is asked for
            draft.draw(engine, commit.handle, commit.epoch, commit.length)
    assert session.tokens == prompt + answer and widest == share


def test_bug_37_a_draft_catches_up_before_it_draws_again() -> None:
    """The real drafter with the target's weights. While no nodes are wanted it hears and computes nothing; woken, it
    computes all that was written meanwhile, and what it then draws is right from the first node on."""
    model, prompt = tiny_model("qwen3"), [3, 1, 4, 1, 5]
    want = plain_decode(model, [prompt], 120, [GREEDY])[0]
    engine, runtime = make_engine(model), ModelRuntime(tiny_model("qwen3"), kv_pages=32, page_tokens=PAGE)
    settings: dict[str, Any] = {"depth": 3, "beam": 1, "branch": 1, "min_level_survival": 0, "nodes_per_level": 0}
    draft = LmDraft(lm_drafter(runtime, **settings))
    engine.open_link(0, "itself")
    engine.submit(request("s", prompt, 120, GREEDY))
    draft.join(engine, "s", 1)
    session, got = engine.sessions["s"], list[int]()
    computed: list[int] = []
    note_forwards(runtime, lambda parts: computed.append(sum(len(part.token) for part in parts)))

    def serve_until(tokens: int) -> None:
        while engine.sessions and len(got) < tokens:
            draft.work(engine)
            outcome = engine.step()
            assert not outcome.failed
            got.extend(token for e in outcome.emitted for token in e.tokens)
            draft.hear(engine, outcome)

    for asleep_at, awake_at in ((20, 45), (60, 90)):
        serve_until(asleep_at)
        assert session.stats.accepted == session.stats.verified > 0
        engine.set_policy(Policy(max_session_nodes=0))
        serve_until(len(got) + 2)  # the draft hears of it with the next commit
        before, verified = len(computed), session.stats.verified
        known = session.drafts[0].known
        serve_until(awake_at)
        assert len(computed) == before and session.stats.verified == verified
        assert session.drafts[0].asleep and session.drafts[0].known == known < len(session.tokens) - 10
        engine.set_policy(Policy())
        serve_until(len(got) + 1)
        missed = draft.drafter._sessions[0, 1].pending  # less than it was told of: the tree it had may reach into that
        assert 15 < missed <= session.drafts[0].known - known + 1
        assert len(computed) == before and session.drafts[0].known == len(session.tokens)
        draft.work(engine)
        assert computed[before] == missed, "first of all what it has missed, then one node a level"
        assert set(computed[before + 1 :]) == {1}
    serve_until(120)
    assert got == want and session.stats.accepted == session.stats.verified > 30


# --- audit


def _twice_free(engine: Engine) -> None:
    engine.runtime.pool._free.append(engine.runtime.pool._free[0])


def _lost(engine: Engine) -> None:
    engine.runtime.pool._free.pop()


def _too_many_holders(engine: Engine) -> None:
    engine.runtime.pool._holders[engine.runtime.pool._free.pop()] = 1


def _cached_but_unknown(engine: Engine) -> None:
    pool = engine.runtime.pool
    pool._page_of.pop(pool._key_of.pop(next(iter(pool._cached))))


def _held_by_the_dead(engine: Engine) -> None:
    engine.runtime.pool.take_pages(1)


@pytest.mark.parametrize("damage", [_twice_free, _lost, _too_many_holders, _cached_but_unknown, _held_by_the_dead])
def test_the_audit_at_idle_finds_damaged_books(damage: Callable[[Engine], None]) -> None:
    engine = table_engine(16)
    run(engine, [request("a", [1] * 40, 10, GREEDY)], [], 1)
    before = count(METRICS.kv_audit_failures)
    engine.submit(request("b", [2] * 40, 2, GREEDY))
    while engine.sessions:
        engine.step()
    damage(engine)
    assert engine.due() is None
    assert count(METRICS.kv_audit_failures) == before + 1
    assert engine.due() is None
    assert count(METRICS.kv_audit_failures) == before + 1, "once an idle spell"


def test_the_audit_runs_now_and_then_though_the_engine_is_never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_service.engine.AUDIT_STEPS", 5)
    engine = table_engine(16)
    engine.submit(request("a", [1] * 4, 40, GREEDY))
    engine.step()
    _lost(engine)
    before = count(METRICS.kv_audit_failures)
    for _ in range(10):
        engine.step()
    assert count(METRICS.kv_audit_failures) == before + 2


def test_a_shared_page_that_a_session_would_write_is_found() -> None:
    engine = table_engine(16)
    engine.submit(request("a", [1] * 40, 10, GREEDY))
    engine.step()
    session = engine.sessions["a"]
    assert engine.audit() == []
    session.cached = PAGE
    assert engine.audit() == [f"session a writes page {session.pages[1]}, which is not its own"]
