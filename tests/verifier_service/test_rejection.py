"""The rules beside shared noise in the engine: sampled trees, late and lost ones, never bend the distribution."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch
from lm_draft import LmDraft
from scripted import VOCAB, ScriptedDraft, make_engine, oracle_of, plain_decode, request, tiny_model

from draft_service.drafter import SessionStart
from draft_service.drafters.lm import LmDrafter
from draftwood.config import DraftSettings
from draftwood.errors import DraftwoodError
from draftwood.parameters import Rule, SamplingParams
from draftwood.runtime.model import ModelRuntime
from draftwood.sampling import process_logits
from draftwood.tree import Proposal
from draftwood.vocabulary import Vocabulary
from tests.chi_square import p_value
from verifier_service.engine import Engine, Outcome
from verifier_service.live_tree import Nodes

Text = tuple[int, ...]
PROMPT = [7, 3, 11]
PARAMS = SamplingParams(0.8, top_k=3)
REJECTION = frozenset({Rule.REJECTION})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads for products this small only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def model() -> torch.nn.Module:
    return tiny_model("llama")


@cache
def p(text: Text) -> np.ndarray:
    """The target's distribution behind a text, by Hugging Face's own attention."""
    with torch.inference_mode():
        logits = _oracle()(torch.tensor([text])).logits[:, -1]
    return process_logits(logits, PARAMS)[0].double().softmax(0).numpy()


@cache
def _oracle() -> torch.nn.Module:
    return oracle_of(model())  # type: ignore[arg-type]


@cache
def q(text: Text) -> Proposal:
    """The draft's: near p, but for a share of tokens that the target may not even have; sparse."""
    rng = np.random.default_rng(list(text))
    mixed = 0.6 * p(text) ** 0.7
    mixed[rng.integers(VOCAB, size=2)] += 0.3
    mixed *= mixed >= 0.1
    support = np.flatnonzero(mixed)
    return Proposal(support, (mixed[support] / mixed.sum()).astype(np.float32))


def honest(text: Text, count: int, rng: np.random.Generator) -> list[int]:
    return [int(t) for t in rng.choice(q(text).token, size=count, p=q(text).prob)]


def favourites(text: Text, count: int, rng: np.random.Generator) -> list[int]:
    """Not sampled at all, whatever is said."""
    return [int(q(text).token[q(text).prob.argmax()])] * count


@dataclass
class SamplingDraft:
    """Grows groups of sampled siblings at random places, and sends them whole, in pieces, twice, late or never."""

    sample: Callable[[Text, int, np.random.Generator], list[int]] = honest
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(4))
    link: int = 0
    text: dict[int, Text] = field(default_factory=dict)  # committed, by handle
    nodes: dict[int, list[tuple[int, Text]]] = field(default_factory=dict)  # id and text, by handle
    next_id: dict[int, int] = field(default_factory=dict)
    late: list[Callable[[Engine], None]] = field(default_factory=list)

    def join(self, engine: Engine, name: str, handle: int) -> None:
        start = engine.join(self.link, handle, name)
        self.text[handle], self.nodes[handle], self.next_id[handle] = start.tokens, [], 1
        self.draw(engine, handle, start.epoch)

    def hear(self, engine: Engine, outcome: Outcome) -> None:
        late, self.late = self.late, []
        for send in late:
            send(engine)
        for commit in outcome.commits.get(self.link, []):
            self.text[commit.handle] += commit.tokens
            self.draw(engine, commit.handle, commit.epoch)

    def work(self, engine: Engine) -> None:
        """It has answered at once."""

    def draw(self, engine: Engine, handle: int, epoch: int) -> None:
        anchor = self.text[handle]
        places = [(0, anchor), *(n for n in self.nodes[handle] if n[1][: len(anchor)] == anchor)]
        for _ in range(self.random.integers(4)):
            parent, text = places[self.random.integers(len(places))]
            first, tokens = self.next_id[handle], self.sample(text, int(self.random.integers(1, 4)), self.random)
            fresh = [(first + k, (*text, token)) for k, token in enumerate(tokens)]
            places += fresh
            self.nodes[handle] += fresh
            self.next_id[handle] += len(fresh)
            cut = int(self.random.integers(len(fresh) + 1))
            for begin, end in ((0, cut), (cut, len(fresh))):
                self.send(engine, handle, epoch, first + begin, parent, tokens[begin:end], q(text))

    def send(
        self, engine: Engine, handle: int, epoch: int, first: int, parent: int, tokens: list[int], drawn: Proposal
    ) -> None:
        count = len(tokens)
        score = -self.random.random(count).astype(np.float32)  # of no use under this rule
        columns = np.full(count, parent, np.int64), np.array(tokens, np.int32), score
        nodes = Nodes(epoch, first, *columns, {parent: drawn})

        def send(engine: Engine) -> None:
            engine.grow(self.link, handle, nodes, complete=False)

        fate = self.random.random()
        if fate < 0.1:
            return
        if fate < 0.3:
            self.late.append(send)
        else:
            send(engine)
        if self.random.random() < 0.1:
            self.late.append(send)


def texts(
    engine: Engine, draft: SamplingDraft | LmDraft, seeds: range, tokens: int, at_once: int = 64
) -> dict[int, Text]:
    engine.open_link(draft.link, "sampling", REJECTION)
    got: dict[str, Text] = {}
    todo = list(seeds)
    while todo or engine.sessions:
        while todo and len(engine.sessions) < at_once:
            seed = todo.pop(0)
            params = replace(PARAMS, seed=seed)
            engine.submit(request(f"{seed}", PROMPT, tokens, params, rule=Rule.REJECTION))
            got[f"{seed}"] = ()
            draft.join(engine, f"{seed}", seed + 1)
        draft.work(engine)
        outcome = engine.step()
        assert not outcome.failed
        for emitted in outcome.emitted:
            assert emitted.offset == len(got[emitted.session_id])
            got[emitted.session_id] += emitted.tokens
        draft.hear(engine, outcome)
    engine.close_link(draft.link)
    assert engine.runtime.pool.free == engine.runtime.pool.total
    return {int(seed): text for seed, text in got.items()}


def agreement(found: dict[int, Text]) -> float:
    """P-value of the first three tokens against what the target alone would write."""
    counts, expected = [], []
    first_three = Counter(text[:3] for text in found.values())
    for text in itertools.product(range(VOCAB), repeat=3):
        chance = float(len(found))
        for n in range(3):
            chance *= p((*PROMPT, *text[:n]))[text[n]] if chance else 0.0
        counts.append(first_three[text])
        expected.append(chance)
    assert sum(counts) == len(found)
    return p_value(np.array(counts), np.array(expected))


def test_three_tokens_of_2400_seeds_have_the_targets_distribution() -> None:
    """Sampled trees in pieces, late, doubled and lost, reused over commits and cut to ten nodes."""
    engine = make_engine(model(), max_nodes=5)
    found = texts(engine, SamplingDraft(), range(2400), 5)
    assert all(len(text) == 5 for text in found.values())
    assert engine.totals.accepted > 0.3 * 2400 and engine.totals.stale > 1000
    assert agreement(found) > 0.001


def test_a_draft_that_does_not_sample_what_it_says_is_seen() -> None:
    """The control: the test above can fail. This rule trusts the draft's word, as docs/exactness.md says."""
    assert agreement(texts(make_engine(model()), SamplingDraft(favourites), range(600), 3)) < 1e-6


@cache
def blurred() -> torch.nn.Module:
    """The target with noise on its weights, for a draft that is often right."""
    draft, generator = tiny_model("llama"), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            scale = 0.1 * float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * scale)
    return draft


def lm_drafter(seed: int, **settings: object) -> LmDrafter:
    chosen = DraftSettings(**({"branch": 3, "depth": 3, "page_tokens": 16, "lookahead_levels": 2} | settings))  # type: ignore[arg-type]
    runtime = ModelRuntime(blurred(), kv_pages=1024, page_tokens=16)  # type: ignore[arg-type]
    vocabulary = Vocabulary(tuple(str(i) for i in range(VOCAB)), frozenset(), VOCAB)
    return LmDrafter(runtime, chosen, "tiny", vocabulary, random=np.random.default_rng(seed))


def test_three_tokens_of_1600_seeds_with_the_real_drafter_have_the_targets_distribution() -> None:
    engine, draft = make_engine(model(), max_nodes=8), LmDraft(lm_drafter(3))
    found = texts(engine, draft, range(1600), 5)
    assert engine.totals.accepted > 1600 and engine.totals.refused == 0
    assert agreement(found) > 0.001


def test_what_the_drafter_sends_is_cut_by_structure_and_was_sampled_from_what_it_says() -> None:
    """Bug kind 7: parents and scores are the same whatever is sampled; q is the processed law behind each parent."""
    sent = []
    for seed in range(4):
        drafter = lm_drafter(seed, q_top_k=5, q_top_p=0.9)
        start = SessionStart(0, tuple(PROMPT), SamplingParams(0.8), 7, VOCAB, 255, 32, 512, Rule.REJECTION)
        drafter.open((0, 1), start)
        (growth,) = [g for _ in range(9) if drafter.wants_work() for _, g in drafter.work()]
        sent.append(growth)
        node_text = {0: tuple(PROMPT)}
        for n, (parent, token) in enumerate(zip(growth.parent.tolist(), growth.token.tolist(), strict=True), 1):
            node_text[n] = (*node_text[parent], token)
        assert set(growth.drawn) == set(growth.parent.tolist()) and len(growth.drawn) > 1
        for parent, drawn in growth.drawn.items():
            with torch.inference_mode():
                logits = oracle_of(blurred())(torch.tensor([node_text[parent]])).logits[:, -1]  # type: ignore[arg-type]
            law = process_logits(logits.float(), SamplingParams(0.8, 5, 0.9))[0].softmax(0).numpy()
            assert drawn.token.tolist() == np.flatnonzero(law).tolist() and len(drawn.token) <= 5
            np.testing.assert_allclose(drawn.prob, law[drawn.token], rtol=1e-4)
    assert len({str(g.token) for g in sent}) > 1
    assert len({str((g.parent.tolist(), g.score.tolist())) for g in sent}) == 1
    assert len(sent[0].token) == 7


def test_the_drafter_keeps_equal_siblings() -> None:
    drafter = lm_drafter(1, q_top_k=1)
    start = SessionStart(0, tuple(PROMPT), SamplingParams(0.8), 6, VOCAB, 255, 32, 512, Rule.REJECTION)
    drafter.open((0, 1), start)
    (growth,) = [g for _ in range(9) if drafter.wants_work() for _, g in drafter.work()]
    below = growth.token[growth.parent == 0]
    assert len(below) == 3 and len(set(below.tolist())) == 1


def test_the_same_seed_and_trees_give_the_same_text_alone_and_among_others() -> None:
    """Bug kind 9."""

    def fixed(text: Text, count: int, rng: np.random.Generator) -> list[int]:
        return honest(text, count, np.random.default_rng([1, *text]))

    def one(seeds: range, at_once: int) -> dict[int, Text]:
        class Steady(SamplingDraft):
            def draw(self, engine: Engine, handle: int, epoch: int) -> None:
                text, first = self.text[handle], self.next_id[handle]
                self.next_id[handle] += 3
                columns = np.zeros(3, np.int64), np.array(self.sample(text, 3, self.random), np.int32)
                nodes = Nodes(epoch, first, *columns, np.zeros(3, np.float32), {0: q(text)})
                engine.grow(self.link, handle, nodes, complete=True)

        return texts(make_engine(model()), Steady(fixed), seeds, 6, at_once)

    together = one(range(40, 60), 20)
    assert one(range(40, 60), 3) == together
    assert one(range(47, 48), 1)[47] == together[47]
    assert len(set(together.values())) > 10


def test_without_a_draft_the_text_is_sampled_all_the_same() -> None:
    engine = make_engine(model())
    found = {}
    for seed in range(1000):
        engine.submit(request(f"{seed}", PROMPT, 3, replace(PARAMS, seed=seed), rule=Rule.REJECTION, ticket_key=b""))
        found[seed] = ()
    while engine.sessions:
        for emitted in engine.step().emitted:
            found[int(emitted.session_id)] += emitted.tokens
    assert agreement(found) > 0.001


def test_at_temperature_zero_every_rule_is_greedy() -> None:
    (want,) = plain_decode(model(), [PROMPT], 12, [SamplingParams()])  # type: ignore[arg-type]
    for rule in Rule:
        engine = make_engine(model())
        draft = ScriptedDraft(random.Random(1), {"s": [*PROMPT, *want]})
        engine.open_link(0, "scripted")  # a draft that only knows ids
        engine.submit(request("s", PROMPT, 12, SamplingParams(), rule=rule))
        draft.join(engine, "s", 1)
        got: list[int] = []
        while engine.sessions:
            outcome = engine.step()
            got += [token for emitted in outcome.emitted for token in emitted.tokens]
            draft.hear(engine, outcome)
        assert got == want and engine.totals.accepted > 0


def nodes_of(parent: list[int], token: list[int], drawn: dict[int, Proposal] | None = None) -> Nodes:
    score = np.zeros(len(token), np.float32)
    return Nodes(0, 1, np.array(parent, np.int64), np.array(token, np.int32), score, drawn or {})


def reason(act: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(DraftwoodError) as refused:
        act()
    return refused.value.reason, refused.value.field


def test_a_draft_that_cannot_sample_is_refused_and_the_session_goes_on() -> None:
    engine = make_engine(model())
    engine.open_link(0, "ids only")
    engine.submit(request("s", PROMPT, 3, PARAMS, rule=Rule.REJECTION))
    assert reason(lambda: engine.join(0, 1, "s")) == ("RULE_UNSUPPORTED", "hello.draft.rules")
    assert not engine.sessions["s"].drafts
    while engine.sessions:
        assert not engine.step().failed


def test_the_draft_is_told_the_rule_and_not_the_seed_that_decides() -> None:
    engine = make_engine(model())
    engine.open_link(0, "sampling", REJECTION)
    for handle, rule in enumerate((Rule.REJECTION, Rule.SHARED_NOISE, Rule.TYPICAL), 1):
        engine.submit(request(f"{handle}", PROMPT, 9, replace(PARAMS, seed=77), rule=rule))
        start = engine.join(0, handle, f"{handle}")
        assert (start.rule, start.seed) == (rule, 0 if rule is Rule.REJECTION else 77)
        assert start.temperature == PARAMS.temperature


def test_growth_must_say_what_it_was_sampled_from_where_the_rule_needs_it_and_only_there() -> None:
    engine = make_engine(model())
    engine.open_link(0, "sampling", REJECTION)
    for handle, rule in enumerate((Rule.REJECTION, Rule.SHARED_NOISE), 1):
        engine.submit(request(f"{handle}", PROMPT, 9, PARAMS, rule=rule))
        engine.join(0, handle, f"{handle}")
    drawn = {0: q(tuple(PROMPT))}
    token = int(drawn[0].token[0])
    without, given = nodes_of([0], [token]), nodes_of([0], [token], drawn)
    assert reason(lambda: engine.grow(0, 1, without, complete=True)) == ("TREE_BAD_Q", "growth.drawn")
    assert reason(lambda: engine.grow(0, 2, given, complete=True)) == ("TREE_BAD_Q", "growth.drawn")
    engine.grow(0, 1, nodes_of([], []), complete=False)
    engine.grow(0, 1, given, complete=True)
    engine.grow(0, 2, without, complete=True)
    assert [engine.sessions[name].tree.size for name in "12"] == [2, 2]
    assert not engine.step().failed


def test_nan_logits_end_a_session_under_rejection_alone() -> None:
    """Bug kind 35."""
    engine = make_engine(model())
    for name, rule in (("a", Rule.REJECTION), ("b", Rule.REJECTION), ("c", Rule.TYPICAL)):
        engine.submit(request(name, PROMPT, 3, PARAMS, rule=rule))
    forward = engine.runtime.forward

    def broken(parts: object) -> torch.Tensor:
        logits = forward(parts).clone()  # type: ignore[arg-type]
        logits[[0, 2]] = math.nan
        return logits

    engine.runtime.forward = broken  # type: ignore[method-assign]
    outcome = engine.step()
    assert [(name, error.reason) for name, error in outcome.failed] == [("a", "NAN_LOGITS"), ("c", "NAN_LOGITS")]
    assert [emitted.session_id for emitted in outcome.emitted] == ["b"]


def typical(seed: int, guess: Callable[[Text], int] | None, **settings: float) -> Text:
    """Two tokens; behind the first, a draft guesses the second."""
    engine = make_engine(model(), **settings)
    engine.open_link(0, "any")
    engine.submit(request("s", PROMPT, 3, replace(PARAMS, seed=seed), rule=Rule.TYPICAL))
    engine.join(0, 1, "s")
    (first,) = engine.step().emitted[0].tokens
    if guess:
        nodes = nodes_of([0], [guess((*PROMPT, first))])
        engine.grow(0, 1, replace(nodes, epoch=1), complete=True)
    return first, engine.step().emitted[0].tokens[0]


def test_typical_takes_a_plausible_guess_whatever_the_target_chose_and_no_other() -> None:
    """Lossy: without a draft the text is that of the shared noise, with one it may be another."""
    by_rank = [lambda text, rank=rank: int(np.argsort(-p(text), kind="stable")[rank]) for rank in range(4)]
    plain = [typical(seed, None) for seed in range(12)]
    want = plain_decode(model(), [PROMPT] * 12, 2, [replace(PARAMS, seed=s) for s in range(12)])  # type: ignore[arg-type]
    assert plain == [tuple(text) for text in want]
    loose, strict = {"typical_epsilon": 0.01, "typical_delta": 9.0}, {"typical_epsilon": 1.0, "typical_delta": 9.0}
    guessed = [typical(seed, by_rank[1], **loose) for seed in range(12)]
    assert [second for _, second in guessed] == [by_rank[1]((*PROMPT, first)) for first, _ in guessed]
    assert guessed != plain
    assert [typical(seed, by_rank[1], **strict) for seed in range(12)] == plain
    assert [typical(seed, by_rank[3], **loose) for seed in range(12)] == plain, "top-k leaves it no probability"
