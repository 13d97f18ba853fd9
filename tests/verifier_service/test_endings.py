"""The end of a text in the engine: random endings under drafts that misbehave, against the plain decoder."""

from __future__ import annotations

import random
from collections import Counter

from scripted import VOCAB, ScriptedDraft, make_engine, plain_decode, request, run, tiny_model

from draftwood.acceptance import FinishReason
from draftwood.parameters import SamplingParams
from tests.endings import LENGTH, STOP, WORDS, Asked, plain, words
from verifier_service.engine import Engine, Outcome

TOKENS = 32
RULES = [SamplingParams(), SamplingParams(temperature=0.9, seed=5)]


def recorded(engine: Engine) -> list[Outcome]:
    """Every outcome of the steps to come."""
    outcomes: list[Outcome] = []
    step = engine.step

    def stepping() -> Outcome:
        outcomes.append(step())
        return outcomes[-1]

    engine.step = stepping  # type: ignore[method-assign]
    return outcomes


def random_ending(tokens: list[int], rnd: random.Random) -> Asked:
    """Mostly one that the text meets: a token of it, a string of one to four tokens of it, a cap; or several."""
    text, at = [WORDS[token] for token in tokens], rnd.randrange(len(tokens))
    spanned = "".join(text[at : at + rnd.randint(1, 4)])
    begin = rnd.randrange(len(text[at]))
    strings = [spanned[begin : rnd.randint(begin + 1, len(spanned))], "".join(rnd.choices("ab.", k=rnd.randint(3, 9)))]
    return Asked(
        frozenset({tokens[rnd.randrange(len(tokens))]} if rnd.random() < 0.3 else ()),
        tuple(strings[: rnd.randint(0, 2)]) if rnd.random() < 0.5 else tuple(strings),
        rnd.randint(1, TOKENS),
        rnd.random() < 0.5,
    )


def test_bugs_13_to_16_random_endings_under_trees_equal_the_plain_decoder() -> None:
    """200 requests of up to 32 tokens: tokens, text, reason, cause, usage; KV and drafts see the same end."""
    model, rnd = tiny_model("llama"), random.Random(4)
    prompts = [[rnd.randrange(VOCAB) for _ in range(15)] for _ in range(50)]
    rules = [RULES[k % 2] for k in range(len(prompts))]
    texts = plain_decode(model, prompts, TOKENS, rules)
    asked = {f"s{k}": random_ending(texts[k // 4], rnd) for k in range(4 * len(prompts))}
    requests = [
        request(
            f"s{k}", prompts[k // 4], TOKENS, rules[k // 4], ending=a.ending, text=a.text(words()) if a.stop else None
        )
        for k, a in enumerate(asked.values())
    ]
    truth = {f"s{k}": [*prompts[k // 4], *texts[k // 4]] for k in range(len(requests))}
    engine = make_engine(model)
    outcomes = recorded(engine)
    got = run(engine, requests, [ScriptedDraft(random.Random(8), truth)], at_once=24)

    pieces: dict[str, list[str]] = {name: [] for name in asked}
    last = {}
    for outcome in outcomes:
        for emitted in outcome.emitted:
            pieces[emitted.session_id] += emitted.pieces or ()
            last[emitted.session_id] = emitted
    ended = {e.session_id: e for outcome in outcomes for e in outcome.ended}
    seen: Counter[tuple[FinishReason, str]] = Counter()
    inside = 0
    for k, (name, a) in enumerate(asked.items()):
        tokens = texts[k // 4]
        want = plain(a, tokens, [WORDS[token] for token in tokens])
        assert (got[name], ended[name].completion_tokens) == (tokens[: want.count], want.count), a
        assert (ended[name].reason, ended[name].stop, last[name].finish) == (want.finish, want.stop, want.finish), a
        if a.stop:
            assert ("".join(pieces[name]), len(pieces[name])) == (want.text, want.count), a
        seen[ended[name].reason, type(want.stop).__name__] += 1
        inside += last[name].accepted == len(last[name].tokens)  # the run went on behind the end
    assert min(seen[key] for key in ((STOP, "int"), (STOP, "str"), (LENGTH, "NoneType"))) > 15, seen
    assert inside > 40, "hardly any run was cut: nothing was shown"
    # The draft is told of every end, once, and of no commit after it.
    handles = [handle for outcome in outcomes for handle in outcome.stops.get(0, [])]
    assert sorted(handles) == list(range(1, len(requests) + 1))
    stopped = set[int]()
    for outcome in outcomes:
        assert not stopped & {commit.handle for commit in outcome.commits.get(0, [])}
        stopped |= set(outcome.stops.get(0, []))


def test_without_stop_strings_the_engine_makes_no_text() -> None:
    """Detokenising belongs to the event loop, but where the end depends on it."""
    model = tiny_model("llama")
    engine = make_engine(model)
    outcomes = recorded(engine)
    run(engine, [request("s", [1, 2, 3], 8, RULES[0])], [], at_once=1)
    assert [emitted.pieces for outcome in outcomes for emitted in outcome.emitted] == [None] * 8
