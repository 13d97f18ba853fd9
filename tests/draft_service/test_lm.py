"""The language-model drafter against a dense forward over prefix and path: its cache, slots and trees never drift."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_service.drafter import SessionCommitted, SessionStart
from draft_service.drafters import levels
from draft_service.drafters.lm import LmDrafter
from draftwood import tree as tt
from draftwood.config import DraftSettings
from draftwood.errors import FailedPrecondition
from draftwood.noise import gumbel
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.model import ModelRuntime, random_model
from draftwood.telemetry import METRICS
from draftwood.vocabulary import Vocabulary
from draftwood.wire import SessionGrowth

VOCAB = 40
CONTEXT = 512
KEPT = (0, 3, 4, 7, 9, 10, 15, 18, 21, 22, 26, 30, 31, 33, 36, 39)
"""Tokens of a draft with a vocabulary of its own."""

KEY = (1, 1)
CLOSE = 1e-5
"""Nats. The model is float64, but transformers' norms and rotary tables are float32 whatever the model is."""
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=9)


def make_runtime(kv_pages: int = 64, **changed: Any) -> ModelRuntime:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    } | changed  # fmt: skip
    model = random_model(config, torch.device("cpu"), torch.float64, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
        model.lm_head.weight.mul_(3)
    return ModelRuntime(model, kv_pages=kv_pages, page_tokens=16)


def make_drafter(runtime: ModelRuntime, **settings: Any) -> LmDrafter:
    chosen = {"depth": 4, "beam": 3, "branch": 3, "max_nodes": 24, "page_tokens": 16, "lookahead_levels": 2} | settings
    vocabulary = Vocabulary(tuple(str(i) for i in range(VOCAB)), frozenset(), VOCAB)
    return LmDrafter(runtime, DraftSettings(kind="lm", **chosen), "tiny", vocabulary)


@pytest.fixture(params=[False, True], ids=["level_by_level", "whole_rounds"], autouse=True)
def draws_rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Frontiers are picked by the host, as without CUDA graphs, and by what the device runs with them."""
    monkeypatch.setattr(LmDrafter, "draws_rounds", request.param)
    return bool(request.param)


@pytest.fixture
def runtime() -> Iterator[ModelRuntime]:
    """Every page must be back at the end."""
    runtime = make_runtime()
    yield runtime
    assert runtime.pool.free == runtime.pool.total


class Oracle:
    """Log-probabilities by a dense forward of another copy of the model, remembered by prefix."""

    def __init__(self, runtime: ModelRuntime) -> None:
        config = copy.deepcopy(runtime.model.config)
        self._model = type(runtime.model)._from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
        self._model.load_state_dict(runtime.model.state_dict())
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        self._kept = getattr(config, "target_token_ids", range(VOCAB))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """After ``tokens``, float64 [VOCAB]; -inf where the model lacks the token."""
        key = tuple(tokens)
        if key not in self._known:
            own = [self._kept.index(t) if t in self._kept else len(self._kept) for t in tokens]
            with torch.inference_mode():
                own_logits = self._model(torch.tensor([own]), use_cache=False).logits[0, -1]
            self._known[key] = own_logits.new_full((VOCAB,), -math.inf)
            self._known[key][list(self._kept)] = own_logits[: len(self._kept)]
        return self._known[key]

    def scores(self, tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
        """What a draft's scores of the next token should be, [VOCAB]."""
        logits = self.logits(tokens).float()
        if not sampling.greedy:
            shifted = (logits - logits.max()) / sampling.temperature
            logits = shifted + gumbel(sampling.seed, len(tokens), VOCAB, "cpu")
        return torch.log_softmax(logits, dim=-1)

    def choice(self, tokens: Sequence[int], sampling: SamplingParams) -> int:
        return int(self.scores(tokens, sampling).argmax())


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(make_runtime())


@dataclass
class Verifier:
    """Follows one session as a verifier would: knows every node that has been sent and where it hangs."""

    drafter: LmDrafter
    oracle: Oracle
    tokens: list[int]
    sampling: SamplingParams
    budget: int = 10
    key: tuple[int, int] = KEY
    epoch: int = 0
    last_id: int = 0
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)  # node id -> whole text up to the node
    seen: int = 0

    def open(self, **limits: Any) -> None:
        chosen = {"max_nodes": 24, "max_depth": 8, "max_context_tokens": CONTEXT, "vocab_size": VOCAB} | limits
        self.drafter.open(
            self.key, SessionStart(0, tuple(self.tokens), sampling=self.sampling, budget=self.budget, **chosen)
        )

    def take(self, growth: SessionGrowth) -> None:
        """Checks ids, parents and every score against the dense forward."""
        assert (growth.handle, growth.epoch, growth.complete) == (self.key[1], self.epoch, True)
        assert growth.first_id == self.last_id + 1, "ids count up without gaps"
        for k, (parent, token) in enumerate(zip(growth.parent.tolist(), growth.token.tolist(), strict=True)):
            own = growth.first_id + k
            assert parent < own
            above = tuple(self.tokens) if parent == 0 else self.paths[parent]
            assert above[: len(self.tokens)] == tuple(self.tokens), "nothing is sent below a branch not taken"
            self.paths[own] = (*above, token)
            want = float(self.oracle.scores(above, self.sampling)[token])
            assert growth.score[k] == pytest.approx(want, abs=CLOSE), f"node {own} of epoch {self.epoch}"
            assert growth.score[k] <= 0
        assert len(set(self.paths.values())) == len(self.paths), "no node is sent twice"
        self.last_id += len(growth.token)
        self.seen += len(growth.token)

    def commit(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.epoch += 1
        self.drafter.commit(self.key, SessionCommitted(self.epoch, len(self.tokens), tuple(tokens), self.budget))

    def live(self) -> list[tuple[int, ...]]:
        """What has been sent of the tree below the anchor, as tokens behind it."""
        n = len(self.tokens)
        return [p[n:] for p in self.paths.values() if len(p) > n and p[:n] == tuple(self.tokens)]


def work_until_done(drafter: LmDrafter, verifiers: Sequence[Verifier], idle: bool = True) -> None:
    """Runs rounds to their end; ``idle``: and all that is grown ahead."""
    waiting = {v.key: v for v in verifiers}
    for _ in range(200):
        if not waiting and not (idle and drafter.wants_work()):
            return
        assert drafter.wants_work()
        for key, growth in drafter.work():
            waiting.pop(key).take(growth)
    raise AssertionError("rounds do not end")


def exact_scores(drafter: LmDrafter, verifier: Verifier) -> float:
    """Largest difference between the logits of the drafter's incremental state and a dense forward's, by replaying.

    All expanded nodes' keys and values are in the cache: one more row below each, seen through the cache, must give
    the logits of the dense forward.
    """
    session = drafter._sessions[verifier.key]
    if session.pending or session.tree.size == 1:
        return 0.0
    open_nodes = [n for n in range(1, session.tree.size) if session.slot[n] == levels.UNEXPANDED][:6]
    assert drafter._room_for(session, len(open_nodes))
    before = session.slot.copy(), session.expanded, session.seen
    session.place(open_nodes)
    logits = drafter._runtime.forward([levels.level_rows(session, open_nodes)])
    session.slot, session.expanded, session.seen = before
    worst = 0.0
    for row, node in zip(logits, open_nodes, strict=True):
        path = []
        while node > 0:
            path.append(int(session.tree.token[node]))
            node = int(session.tree.parent[node])
        want = verifier.oracle.logits([*verifier.tokens, *path[::-1]])
        worst = max(worst, float((torch.log_softmax(row, -1) - torch.log_softmax(want, -1)).abs().max()))
    return worst


def random_commit(rnd: random.Random, verifier: Verifier) -> list[int]:
    """On the tree, off it, partly on it; one token or several."""
    live = verifier.live()
    kind = rnd.choice(["on", "on", "off", "partly", "on_then_own"])
    if kind == "off" or not live:
        return [rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 3))]
    path = list(rnd.choice(live))
    if kind == "on":
        return path
    if kind == "partly":
        return [*path[: rnd.randint(1, len(path))], *(rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 2)))]
    return [*path, verifier.oracle.choice([*verifier.tokens, *path], verifier.sampling)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(3))
def test_scores_after_random_commits_are_those_of_a_dense_forward(
    runtime: ModelRuntime, oracle: Oracle, sampling: SamplingParams, seed: int
) -> None:
    rnd = random.Random(seed)
    drafter = make_drafter(runtime, max_step_tokens=rnd.choice([7, 64]))
    verifier = Verifier(drafter, oracle, [rnd.randrange(VOCAB) for _ in range(rnd.choice([1, 15, 16, 17]))], sampling)
    verifier.open()
    for _ in range(14):
        verifier.budget = rnd.choice([1, 4, 10, 20])
        work_until_done(drafter, [verifier], idle=rnd.random() < 0.5)
        assert exact_scores(drafter, verifier) < CLOSE
        verifier.commit(random_commit(rnd, verifier))
    assert verifier.seen > 60
    drafter.close(KEY)


class Sharper(Oracle):
    """What scores should be at ``greedy_temperature`` 0.5."""

    def scores(self, tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
        plain = super().scores(tokens, sampling)
        return torch.log_softmax(plain / 0.5, dim=-1) if sampling.greedy else plain


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_greedy_temperature_changes_the_scores_of_greedy_sessions_alone(
    runtime: ModelRuntime, sampling: SamplingParams
) -> None:
    drafter = make_drafter(runtime, greedy_temperature=0.5)
    verifier = Verifier(drafter, Sharper(make_runtime()), [5, 6, 7], sampling)
    verifier.open()
    work_until_done(drafter, [verifier], idle=False)
    assert exact_scores(drafter, verifier) < CLOSE
    assert verifier.seen > 3
    drafter.close(KEY)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_fully_accepted_runs_ten_rounds_in_a_row(
    runtime: ModelRuntime, oracle: Oracle, sampling: SamplingParams
) -> None:
    """Bug kind 12: the draft is the target, so its best path is always right, and the bonus token is caught up."""
    drafter = make_drafter(runtime)
    verifier = Verifier(drafter, oracle, [1, 2, 3], sampling)
    verifier.open()
    first = len(verifier.tokens)
    for _ in range(10):
        work_until_done(drafter, [verifier])
        run: list[int] = []
        while tuple(run) == () or tuple(run) in verifier.live():
            run.append(oracle.choice([*verifier.tokens, *run], sampling))
        assert len(run) >= 2, "the tree holds the right token"
        assert exact_scores(drafter, verifier) < CLOSE
        verifier.commit(run)
    assert len(verifier.tokens) - first >= 35, "mostly long runs"
    drafter.close(KEY)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("taken", range(6))
def test_bug_1_after_any_number_of_accepted_guesses_rows_stand_where_their_tokens_are(
    runtime: ModelRuntime, oracle: Oracle, sampling: SamplingParams, taken: int
) -> None:
    """k of a chain of 5 are accepted, k = 0 to 5, then a token of the target's own: each row of the draft's forwards is
    given its token's place in the text, or committed length - 1 + depth, and ``take`` checks what comes of it."""
    drafter = make_drafter(
        runtime, beam=1, branch=1, depth=4, lookahead_levels=0, nodes_per_level=0, min_level_survival=0
    )
    verifier = Verifier(drafter, oracle, [1, 2, 3], sampling)
    verifier.open()
    decoder, rows = runtime.decoder, list[tuple[int, int]]()

    def noting(input_ids: torch.Tensor, batch: Any, cache: torch.Tensor, logits_rows: torch.Tensor, _: Any) -> Any:
        count = int(batch.row_start[-1])  # what follows is padding
        rows.extend(zip(batch.position[:count].tolist(), input_ids[:count].tolist(), strict=True))
        return decoder(input_ids, batch, cache, logits_rows)

    runtime.decoder = noting  # type: ignore[assignment]
    for _ in range(6):
        rows.clear()
        work_until_done(drafter, [verifier])
        chain = max(verifier.live(), key=len)
        assert len(chain) == 5 and rows
        text = [*verifier.tokens, *chain]
        assert all(text[position] == token for position, token in rows)
        assert [position for position, _ in rows] == list(range(rows[0][0], len(text) - 1)), "each once, none left out"
        assert exact_scores(drafter, verifier) < CLOSE
        right = oracle.choice([*verifier.tokens, *chain[:taken]], sampling)
        own = right if taken == 5 else (chain[taken] + 1) % VOCAB
        verifier.commit([*chain[:taken], own])
    drafter.close(KEY)


@pytest.mark.parametrize("length", [1, 6, 7, 8, 14, 15])
def test_prompt_in_chunks(runtime: ModelRuntime, oracle: Oracle, length: int) -> None:
    """Chunks of 7: lengths at, before and behind their borders, with a commit in the middle of prefill."""
    for interrupted in (False, True):
        drafter = make_drafter(runtime, max_step_tokens=7)
        verifier = Verifier(drafter, oracle, [(5 * k) % VOCAB for k in range(length)], GREEDY)
        verifier.open()
        if interrupted:
            assert (drafter.work() == []) == (length > 0)
            verifier.commit([4, 8])
        work_until_done(drafter, [verifier])
        assert verifier.seen > 0
        assert exact_scores(drafter, verifier) < CLOSE
        drafter.close(KEY)


def test_many_sessions_at_once_do_not_mix(runtime: ModelRuntime, oracle: Oracle) -> None:
    rnd = random.Random(4)
    drafter = make_drafter(runtime, max_step_tokens=24)
    verifiers = [
        Verifier(
            drafter, oracle, [rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 40))], (GREEDY, SAMPLED)[k % 2],
            key=(k % 2, k),
        )
        for k in range(6)
    ]  # fmt: skip
    for verifier in verifiers:
        verifier.open()
    for _ in range(5):
        work_until_done(drafter, verifiers, idle=False)
        for verifier in verifiers:
            assert exact_scores(drafter, verifier) < CLOSE
            verifier.commit(random_commit(rnd, verifier))
    for verifier in verifiers:
        drafter.close(verifier.key)


def test_commits_between_two_levels_move_keys_in_one_launch(
    runtime: ModelRuntime, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sessions, each with two accepted guesses; one hears of them in two commits, the second after the first."""
    drafter = make_drafter(runtime, min_level_survival=0, nodes_per_level=0)
    verifiers = [Verifier(drafter, oracle, [7, 8, 9 + k], GREEDY, 20, key=(1, k)) for k in range(3)]
    for verifier in verifiers:
        verifier.open()
    work_until_done(drafter, verifiers)
    launches: list[list[Any]] = []
    move = runtime.move
    monkeypatch.setattr(runtime, "move", lambda moves: (launches.append(list(moves)), move(moves))[1])
    for k, verifier in enumerate(verifiers):
        session = drafter._sessions[verifier.key]
        deepest = next(path for path in verifier.live() if len(path) == 2 and _is_expanded(session, path))
        for tokens in [deepest[:1], deepest[1:]] if k == 2 else [deepest]:
            verifier.commit(list(tokens))
    work_until_done(drafter, verifiers, idle=False)
    by_launch = [len(moves) for moves in launches if moves]
    assert by_launch == [3, 1], "the second commit of a session waits for the keys that the first one moves"
    for verifier in verifiers:
        assert exact_scores(drafter, verifier) < CLOSE
        drafter.close(verifier.key)


def _is_expanded(session: levels.LevelSession, path: tuple[int, ...]) -> bool:
    """Whether the model has run on the node at the end of a path."""
    node = tt.walk(session.tree, path)[-1]
    return bool(session.slot[node] != levels.UNEXPANDED)


@pytest.mark.parametrize("budget", [1, 2, 5, 9])
def test_budget_and_cap_are_respected(runtime: ModelRuntime, oracle: Oracle, budget: int) -> None:
    drafter = make_drafter(runtime)
    verifier = Verifier(drafter, oracle, [7, 8], GREEDY, budget)
    verifier.open(max_nodes=6, max_depth=3)
    work_until_done(drafter, [verifier])
    assert verifier.seen == min(budget, 6)
    assert all(len(path) - 2 <= 3 for path in verifier.paths.values())
    drafter.close(KEY)


def on_forward(monkeypatch: pytest.MonkeyPatch, runtime: ModelRuntime, note: Callable[[], None]) -> None:
    """Calls ``note`` with every forward of the model."""
    decoder = runtime.decoder
    monkeypatch.setattr(runtime, "decoder", lambda *args: (note(), decoder(*args))[1])


@pytest.mark.parametrize(("budget", "forwards"), [(2, 1), (3, 2), (6, 3)])
def test_small_budgets_cost_few_forwards(
    runtime: ModelRuntime, oracle: Oracle, budget: int, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[None] = []
    on_forward(monkeypatch, runtime, lambda: seen.append(None))
    drafter = make_drafter(runtime, min_level_survival=0, nodes_per_level=3)
    verifier = Verifier(drafter, oracle, [7, 8], GREEDY, budget)
    verifier.open()
    work_until_done(drafter, [verifier], idle=False)
    assert (verifier.seen, len(seen)) == (budget, forwards)
    drafter.close(KEY)


@pytest.mark.parametrize("told", [True, False])
def test_once_times_are_known_a_level_must_be_worth_its_own(
    runtime: ModelRuntime, oracle: Oracle, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock in which a level takes as long as the verifier's turn; one that tells no times wants all levels."""
    now = [0.0]

    def tick() -> None:
        now[0] += 0.01

    monkeypatch.setattr("draft_service.drafters.levels.time", SimpleNamespace(perf_counter=lambda: now[0]))
    on_forward(monkeypatch, runtime, tick)
    drafter = make_drafter(runtime, min_level_survival=0, nodes_per_level=0, lookahead_levels=0, depth=4)
    verifier, step_ms = Verifier(drafter, oracle, [7, 8], GREEDY), ((1, 10.0), (8, 11.0)) if told else ()
    verifier.open(step_ms=step_ms)
    deepest = []
    for epoch in range(1, 4):
        work_until_done(drafter, [verifier], idle=False)
        deepest.append(max(len(path) for path in verifier.live()))
        verifier.tokens += [9 + epoch, 9]
        verifier.epoch = epoch
        tick()
        drafter.commit(KEY, SessionCommitted(epoch, len(verifier.tokens), (9 + epoch, 9), 10, step_ms))
    assert deepest[0] > 2, "nothing is known in the first round"
    assert (max(deepest[1:]) == 1) if told else (min(deepest[1:]) > 1)
    drafter.close(KEY)


def test_what_is_sent_are_the_likeliest_nodes(runtime: ModelRuntime, oracle: Oracle) -> None:
    drafter = make_drafter(runtime, beam=8, branch=8, depth=8, min_level_survival=0, nodes_per_level=0)
    verifier = Verifier(drafter, oracle, [7, 8], GREEDY, 8)
    verifier.open()
    work_until_done(drafter, [verifier], idle=False)

    def survival(path: tuple[int, ...]) -> float:
        return sum(float(oracle.scores((7, 8, *path[:k]), GREEDY)[t]) for k, t in enumerate(path))

    sent = {path[2:] for path in verifier.paths.values()}
    children = [(*path, t) for path in [(), *sent] for t in range(VOCAB)]
    left_out = max(survival(path) for path in children if path not in sent)
    assert min(survival(path) for path in sent) >= left_out - 1e-6
    drafter.close(KEY)


def test_budget_zero_draws_nothing(runtime: ModelRuntime, oracle: Oracle) -> None:
    drafter = make_drafter(runtime)
    verifier = Verifier(drafter, oracle, [1], GREEDY, 0)
    verifier.open()
    assert not drafter.wants_work()
    verifier.budget = 4
    verifier.commit([3])
    work_until_done(drafter, [verifier])
    assert verifier.seen == 4
    drafter.close(KEY)


def test_gap_in_the_text_is_a_value_error(runtime: ModelRuntime) -> None:
    drafter = make_drafter(runtime)
    drafter.open(KEY, SessionStart(0, (1, 2), GREEDY, 4, VOCAB, 24, 8, CONTEXT))
    with pytest.raises(ValueError, match="do not make 9"):
        drafter.commit(KEY, SessionCommitted(1, 9, (3,), 4))
    drafter.close(KEY)


def test_unknown_keys_are_ignored(runtime: ModelRuntime) -> None:
    drafter = make_drafter(runtime)
    drafter.commit((9, 9), SessionCommitted(1, 9, (3,), 4))
    drafter.close((9, 9))
    assert not drafter.wants_work() and drafter.work() == []


def test_full_page_pool_ends_the_round_empty_and_room_lets_it_draw_again(oracle: Oracle) -> None:
    runtime = make_runtime(kv_pages=3)
    drafter = make_drafter(runtime)
    rich = Verifier(drafter, oracle, [k % VOCAB for k in range(30)], GREEDY, key=(1, 1))
    poor = Verifier(drafter, oracle, [k % VOCAB for k in range(20)], GREEDY, key=(1, 2))
    rich.open()
    work_until_done(drafter, [rich])
    poor.open()
    work_until_done(drafter, [poor])
    assert rich.seen > 0 and poor.seen == 0, "complete, with no node"
    drafter.close(rich.key)
    poor.commit([5])
    work_until_done(drafter, [poor])
    assert poor.seen > 0
    drafter.close(poor.key)
    assert runtime.pool.free == runtime.pool.total == 3


@pytest.mark.parametrize("length", [129, 200])
def test_a_text_that_the_pool_cannot_hold_leaves_its_pages_to_others(oracle: Oracle, length: int) -> None:
    """It would hold them without drawing anything, and others would draw less and less."""
    runtime = make_runtime(kv_pages=8)
    drafter = make_drafter(runtime, max_step_tokens=32)
    large = Verifier(drafter, oracle, [k % VOCAB for k in range(length)], GREEDY, key=(1, 1))
    small = Verifier(drafter, oracle, [k % VOCAB for k in range(60)], GREEDY, key=(1, 2))
    for verifier in (large, small):
        verifier.open(max_context_tokens=512)
    work_until_done(drafter, [large, small])
    for k in range(40):
        before = small.seen
        for verifier in (large, small):
            verifier.commit([(7 * k) % VOCAB])
        work_until_done(drafter, [large, small])
        assert small.seen > before
    assert large.seen == 0
    drafter.close(small.key)
    drafter.close(large.key)
    assert runtime.pool.free == runtime.pool.total


def test_a_text_that_has_outgrown_the_draft_leaves_its_pages_to_others(oracle: Oracle) -> None:
    runtime = make_runtime(kv_pages=16)
    runtime.max_context_tokens = 64
    drafter = make_drafter(runtime)
    outgrown = [Verifier(drafter, oracle, [k % VOCAB for k in range(60)], GREEDY, key=(1, k)) for k in range(4)]
    for verifier in outgrown:
        verifier.open(max_context_tokens=512)
    work_until_done(drafter, outgrown)
    for k in range(8):
        for verifier in outgrown:
            verifier.commit([k])
        work_until_done(drafter, outgrown)
    assert runtime.pool.free == runtime.pool.total
    other = Verifier(drafter, oracle, [k % VOCAB for k in range(20)], GREEDY, key=(1, 9))
    other.open()
    work_until_done(drafter, [other])
    assert other.seen > 0
    for verifier in (*outgrown, other):
        drafter.close(verifier.key)
    assert runtime.pool.free == runtime.pool.total


@pytest.mark.parametrize("shorter", ["caps", "model"])
@pytest.mark.parametrize("length", [10, 13, 14, 15, 60])
def test_context_limit_ends_the_drawing(runtime: ModelRuntime, oracle: Oracle, length: int, shorter: str) -> None:
    """Bug kind 31: no node beyond the limit of either side, then none at all; no row stands beyond it either, no page
    is taken for a text that is not computed, the gauge says how many sessions that are, and never an error."""
    before, limit = METRICS.outgrown_sessions._value.get(), 14
    if shorter == "model":
        runtime.max_context_tokens = limit
    drafter = make_drafter(runtime)
    decoder, positions = runtime.decoder, list[int]()

    def noting(input_ids: torch.Tensor, batch: Any, cache: torch.Tensor, logits_rows: torch.Tensor, _: Any) -> Any:
        positions.extend(batch.position.tolist())
        return decoder(input_ids, batch, cache, logits_rows)

    runtime.decoder = noting  # type: ignore[assignment]
    verifier = Verifier(drafter, oracle, [k % VOCAB for k in range(length)], GREEDY)
    verifier.open(max_context_tokens=limit if shorter == "caps" else CONTEXT)
    for _ in range(8):
        work_until_done(drafter, [verifier])
        assert all(len(path) <= limit for path in verifier.paths.values())
        outgrown = len(verifier.tokens) >= limit
        assert METRICS.outgrown_sessions._value.get() == before + outgrown
        seen, pages = verifier.seen, len(drafter._sessions[KEY].pages)
        verifier.commit([verifier.oracle.choice(verifier.tokens, GREEDY)])
    assert (seen > 0) == (length < limit) and seen == verifier.seen
    assert max(positions, default=0) < limit and pages <= 2
    drafter.close(KEY)
    assert METRICS.outgrown_sessions._value.get() == before


@pytest.mark.parametrize("kv_pages", [1, 3, 64])
def test_warming_up_leaves_no_trace(oracle: Oracle, kv_pages: int) -> None:
    """Nor does it need more pages or context than there are."""
    runtime = make_runtime(kv_pages)
    drafter = make_drafter(runtime)
    calls = []
    runtime.move, move = lambda moves: (calls.append(len(moves)), move(moves))[1], runtime.move  # type: ignore[method-assign]
    drafter.warm_up()
    assert runtime.pool.free == runtime.pool.total and not drafter.wants_work()
    assert calls or kv_pages < 64
    verifier = Verifier(drafter, oracle, [3, 5, 7], GREEDY)
    verifier.open()
    work_until_done(drafter, [verifier])
    assert verifier.seen > 0 and verifier.last_id == verifier.seen
    drafter.close(KEY)


# A vocabulary of its own

REDUCED = {"vocab_size": len(KEPT) + 4, "target_token_ids": list(KEPT), "target_vocab_size": VOCAB}


@pytest.fixture
def reduced() -> Iterator[ModelRuntime]:
    """A draft that has 16 of 40 tokens, a row for all others and three of padding. Every page must be back."""
    runtime = make_runtime(**REDUCED)
    yield runtime
    assert runtime.pool.free == runtime.pool.total


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(2))
def test_reduced_vocabulary_scores_are_those_of_a_dense_forward(
    reduced: ModelRuntime, sampling: SamplingParams, seed: int
) -> None:
    """Texts hold tokens that the draft lacks; only others are proposed, under the target's ids and with its noise."""
    rnd = random.Random(seed)
    drafter = make_drafter(reduced, max_step_tokens=rnd.choice([7, 64]))
    verifier = Verifier(drafter, Oracle(reduced_copy()), [rnd.randrange(VOCAB) for _ in range(17)], sampling)
    verifier.open()
    for _ in range(10):
        verifier.budget = rnd.choice([1, 4, 10, 20])
        work_until_done(drafter, [verifier], idle=rnd.random() < 0.5)
        verifier.commit(random_commit(rnd, verifier))
    assert verifier.seen > 40 and any(t not in KEPT for t in verifier.tokens)
    proposed = {path[-1] for path in verifier.paths.values()}
    assert proposed <= set(KEPT) and len(proposed) > 8
    drafter.close(KEY)


def reduced_copy() -> ModelRuntime:
    return make_runtime(**REDUCED)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_reduced_vocabulary_follows_its_own_choices(reduced: ModelRuntime, sampling: SamplingParams) -> None:
    """The target is the same model, with nothing for the tokens that the draft lacks: long runs are accepted."""
    oracle = Oracle(reduced_copy())
    drafter = make_drafter(reduced)
    verifier = Verifier(drafter, oracle, [1, 2, 3], sampling)
    verifier.open()
    for _ in range(6):
        work_until_done(drafter, [verifier])
        run: list[int] = []
        while tuple(run) == () or tuple(run) in verifier.live():
            run.append(oracle.choice([*verifier.tokens, *run], sampling))
        assert len(run) >= 2, "the tree holds the right token"
        verifier.commit(run)
    drafter.close(KEY)


def test_reduced_vocabulary_proposes_nothing_beyond_the_targets_tokens(reduced: ModelRuntime) -> None:
    drafter = make_drafter(reduced, branch=9)
    oracle = Oracle(reduced_copy())
    oracle.scores = lambda tokens, sampling: torch.log_softmax(oracle.logits(tokens)[:22].float(), -1)  # type: ignore[method-assign]
    verifier = Verifier(drafter, oracle, [7, 8], GREEDY, 20)
    verifier.open(vocab_size=22, max_depth=1)
    work_until_done(drafter, [verifier])
    proposed = {path[-1] for path in verifier.paths.values()}
    assert proposed == {t for t in KEPT if t < 22}
    drafter.close(KEY)


def test_reduced_vocabulary_under_the_rejection_rule_samples_the_targets_tokens(reduced: ModelRuntime) -> None:
    drafter = make_drafter(reduced, q_top_k=5)
    start = SessionStart(0, (1, 7, 8), SAMPLED, 12, VOCAB, 24, 8, CONTEXT, Rule.REJECTION)
    drafter.open(KEY, start)
    grown = []
    while not grown:
        grown = drafter.work()
    growth = grown[0][1]
    assert len(growth.token) and set(growth.token.tolist()) <= set(KEPT)
    q = growth.drawn[0]
    wanted = Oracle(reduced_copy()).logits([1, 7, 8]) / SAMPLED.temperature
    best = sorted(wanted.topk(5).indices.tolist())
    assert set(q.token.tolist()) <= set(best) and set(growth.token[growth.parent == 0].tolist()) <= set(
        q.token.tolist()
    )
    share = torch.softmax(wanted[q.token.tolist()], -1)
    assert q.prob.tolist() == pytest.approx(share.tolist(), abs=1e-5)
    drafter.close(KEY)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_token_ids": [3, 3, 5]}, "not ascending"),
        ({"target_token_ids": []}, "not ascending"),
        ({"target_token_ids": [0, VOCAB]}, "go from 0 to 40"),
        ({"target_token_ids": [-1, 5]}, "go from -1 to 5"),
        ({"target_token_ids": list(range(20))}, "20 rows"),
        ({"target_vocab_size": None}, "no target_vocab_size"),
    ],
)
def test_reduced_vocabulary_that_cannot_be_meant_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(FailedPrecondition, match=message) as caught:
        make_runtime(**REDUCED | changed)
    assert caught.value.reason == "MODEL_UNSUPPORTED"
