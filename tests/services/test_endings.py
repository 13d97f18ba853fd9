"""Endings, delivery and several texts a request, over the real wire with drafts."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from draftwood.choices import choice_seed
from draftwood.client import Chunk, DraftwoodClient, Event, Finished, Started
from draftwood.v1 import verifier_pb2
from tests.endings import Asked, plain
from tests.services.models import END_OF_TURN
from tests.services.stack import (
    Cluster,
    Stack,
    Text,
    collect,
    engine_of,
    slow_down,
    until,
    verifier_request,
    verifier_stub,
)

SAMPLED: dict[str, Any] = {"max_tokens": 48, "temperature": 0.9, "seed": 11, "ignore_eos": True}
PROMPT = "The sky is"


class Rig:
    """One cluster, and the text that it writes when nothing ends it."""

    def __init__(self, stack: Stack, cluster: Cluster, whole: Text) -> None:
        self.stack, self.cluster, self.whole = stack, cluster, whole

    def strings(self, count: int, seed: int) -> list[str]:
        """Stop strings over one to four tokens, from all over the text; they begin and end inside of tokens, too."""
        rnd, found = random.Random(seed), []
        while len(found) < count:
            at = rnd.randrange(len(self.whole.pieces))
            spanned = "".join(self.whole.pieces[at : at + rnd.randint(1, 4)])
            string = spanned[rnd.randint(0, 1) : len(spanned) - rnd.randint(0, 1)]
            if string:
                found.append(string)
        return found


@pytest.fixture
async def rig(stack: Stack) -> Rig:
    cluster = await stack.cluster()
    return Rig(stack, cluster, await cluster.speculative(PROMPT, **SAMPLED))


async def test_bug_16_stop_strings_anywhere_in_a_text_with_drafts(rig: Rig) -> None:
    """Text, ids, log probabilities and usage are cut at the same token."""
    cut_runs = stopped = 0
    for k, string in enumerate(rig.strings(24, 1)):
        asked = Asked(stop=(string, "never 🦊"), max_tokens=48, include=bool(k % 2))
        want = plain(asked, rig.whole.tokens, rig.whole.pieces)
        text = await rig.cluster.speculative(
            PROMPT, stop=asked.stop, include_stop_str_in_output=asked.include, logprobs=True, **SAMPLED
        )
        assert (text.tokens, "".join(text.pieces)) == (rig.whole.tokens[: want.count], want.text)
        assert all(len(chunk.logprobs) == len(chunk.tokens) for chunk in text.chunks)
        finished = text.finished
        assert finished and (finished.reason, finished.stop) == ("stop", string)
        assert finished.usage.completion_tokens == want.count == len(text.pieces)
        stopped += 1
        cut_runs += text.chunks[-1].accepted == len(text.chunks[-1].tokens)
    assert stopped == 24 and cut_runs >= 3, "hardly any run was cut: nothing was shown"
    await rig.cluster.is_idle()


async def test_what_is_held_back_comes_when_it_cannot_match(rig: Rig) -> None:
    """A stop string that the text only begins with: nothing is lost, and at the cap all is there."""
    end = "".join(rig.whole.pieces)[-3:]
    text = await rig.cluster.speculative(PROMPT, stop=[end + "🦊", "sky🦊"], **SAMPLED)
    assert (text.tokens, "".join(text.pieces)) == (rig.whole.tokens, "".join(rig.whole.pieces))
    assert text.finished and (text.finished.reason, text.finished.stop) == ("length", None)


async def test_resumed_at_every_token_at_a_verifier_the_text_goes_on(rig: Rig) -> None:
    """By value, with a stop string that is half written at many of the cuts."""
    string = next(s for s in rig.strings(100, 2) if len(s) > 4 and 12 < plain_count(rig, s) < 40)
    for include in (False, True):
        want = await rig.cluster.speculative(PROMPT, stop=[string], include_stop_str_in_output=include, **SAMPLED)
        assert want.finished and want.finished.stop == string
        stub = verifier_stub(await rig.stack.channel(rig.cluster.verifier))
        for have in range(len(want.tokens) + 1):
            request = verifier_request(
                f"{include}{have}", b"t", max_tokens=48, ignore_eos=True, stop=[string],
                include_stop_str_in_output=include, resume_tokens=want.tokens[:have],
                sampling=verifier_pb2.Sampling(temperature=0.9, seed=11),
            )  # fmt: skip
            events = [answer.event async for answer in stub.Generate(request)]
            chunks = [event.chunk for event in events if event.HasField("chunk")]
            assert [t for c in chunks for t in c.tokens] == want.tokens[have:]
            assert [p for c in chunks for p in c.pieces] == want.pieces[have:]
            assert events[-1].finished.stop_string == string
            assert events[-1].finished.usage.completion_tokens == len(want.tokens)


def plain_count(rig: Rig, string: str) -> int:
    return plain(Asked(stop=(string,)), rig.whole.tokens, rig.whole.pieces).count


async def test_a_verifier_is_lost_while_text_is_held_back(stack: Stack) -> None:
    first, second = await stack.verifier(), await stack.verifier()
    router = await stack.router([first, second], [await stack.draft()])
    client = await stack.client(router)
    whole = await collect(client, PROMPT, **SAMPLED)
    joined = "".join(whole.pieces)
    stop = [joined[8:20] + "🦊", joined[20:32] + "🦊", joined[-9:-4]]
    want = plain(Asked(stop=tuple(stop), max_tokens=48), whole.tokens, whole.pieces)
    for verifier in (first, second):
        slow_down(verifier, 0.03)
    text = Text()
    task = asyncio.create_task(collect(client, PROMPT, text, stop=stop, **SAMPLED))
    await until(lambda: len("".join(text.pieces)) < len("".join(whole.pieces[: len(text.tokens)])))
    await (first if engine_of(first).sessions else second).stop(0.0)
    await task
    assert (text.tokens, "".join(text.pieces)) == (whole.tokens[: want.count], want.text)
    assert (await client.status()).verifier_migrations == 1


async def test_the_finish_names_the_stop_token_whose_text_is_not_delivered(rig: Rig) -> None:
    token = next(t for k, t in enumerate(rig.whole.tokens) if k > 5 and rig.whole.pieces[k] and t != END_OF_TURN)
    at = rig.whole.tokens.index(token)
    for include in (False, True):
        text = await rig.cluster.speculative(
            PROMPT, stop_token_ids=[token], include_stop_str_in_output=include, **SAMPLED
        )
        assert text.finished and (text.finished.reason, text.finished.stop) == ("stop", token)
        assert text.tokens == rig.whole.tokens[: at + 1]
        assert "".join(text.pieces) == "".join(rig.whole.pieces[: at + include])


async def test_special_tokens_are_in_the_text_if_asked_for(rig: Rig) -> None:
    decode = rig.cluster.verifier.loaded.codec._fast.decode
    shown = 0
    for seed in (7, 8, 9):
        options = SAMPLED | {"seed": seed, "max_tokens": 60}
        text = await rig.cluster.speculative(PROMPT, skip_special_tokens=False, **options)
        assert "".join(text.pieces) == decode(text.tokens, skip_special_tokens=False)
        shown += END_OF_TURN in text.tokens
        hidden = await rig.cluster.speculative(PROMPT, **options)
        assert "".join(hidden.pieces) == decode(text.tokens, skip_special_tokens=True)
    assert shown, "no text had a special token: nothing was shown"


# --- several texts


async def texts_of(client: DraftwoodClient, prompt: Any, **options: Any) -> dict[int, Text]:
    """The texts of one request by index; ``events`` come in any order between the texts, in order within one."""
    texts: defaultdict[int, Text] = defaultdict(Text)
    async for event in client.generate(prompt, **options):
        take(texts[event.index], event)
    return texts


def take(text: Text, event: Event) -> None:
    assert not text.finished
    if isinstance(event, Started):
        assert not text.started
        text.started = event
    elif isinstance(event, Finished):
        text.finished = event
    else:
        assert isinstance(event, Chunk) and text.started and event.offset == len(text.tokens)
        text.tokens += event.tokens
        text.pieces += event.pieces


async def test_each_of_n_texts_is_what_its_seed_alone_writes(rig: Rig) -> None:
    options = SAMPLED | {"stop": rig.strings(1, 3), "max_tokens": 30}
    texts = await texts_of(rig.cluster.client, PROMPT, n=4, **options)
    assert sorted(texts) == [0, 1, 2, 3]
    for k, text in texts.items():
        assert text.started and text.finished and text.started.seed == choice_seed(11, k)
        alone = await rig.cluster.speculative(PROMPT, **options | {"seed": choice_seed(11, k), "speculate": False})
        assert (text.tokens, text.pieces) == (alone.tokens, alone.pieces)
        assert alone.finished and (text.finished.reason, text.finished.stop) == (
            alone.finished.reason,
            alone.finished.stop,
        )
        assert text.finished.usage.completion_tokens == len(text.tokens)
    assert len({tuple(text.tokens) for text in texts.values()}) == 4
    await rig.cluster.is_idle()


async def test_without_a_seed_n_texts_differ_and_name_theirs(rig: Rig) -> None:
    options = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    texts = await texts_of(rig.cluster.client, PROMPT, n=3, **options)
    base = texts[0].started.seed  # type: ignore[union-attr]
    assert [texts[k].started.seed for k in range(3)] == [choice_seed(base, k) for k in range(3)]  # type: ignore[union-attr]
    assert len({tuple(text.tokens) for text in texts.values()}) == 3


async def test_one_of_n_texts_loses_its_verifier_and_goes_on_elsewhere(stack: Stack) -> None:
    """Two verifiers share four texts; one is stopped in mid-stream."""
    verifiers = [await stack.verifier(), await stack.verifier()]
    router = await stack.router(verifiers, [await stack.draft()])
    client = await stack.client(router)
    options = SAMPLED | {"stop": ["never 🦊"]}
    want = {k: await collect(client, PROMPT, **options | {"seed": choice_seed(11, k)}) for k in range(4)}
    for verifier in verifiers:
        slow_down(verifier, 0.03)
    texts: defaultdict[int, Text] = defaultdict(Text)

    async def read() -> None:
        async for event in client.generate(PROMPT, n=4, **options):
            take(texts[event.index], event)

    task = asyncio.create_task(read())
    await until(lambda: len(texts) == 4 and all(len(text.tokens) > 3 for text in texts.values()))
    loser = min(verifiers, key=lambda v: len(engine_of(v).sessions) or 9)
    moving = len(engine_of(loser).sessions)
    assert 1 <= moving <= 4
    await loser.stop(0.0)
    await task
    assert (await client.status()).verifier_migrations == moving
    for k, text in texts.items():
        assert (text.tokens, text.pieces) == (want[k].tokens, want[k].pieces)
        assert text.finished and text.finished.usage.completion_tokens == 48


async def test_leaving_a_request_for_n_texts_ends_all_of_them(rig: Rig) -> None:
    slow = {"max_tokens": 200, "temperature": 1.0, "ignore_eos": True}
    events = rig.cluster.client.generate(PROMPT, n=3, **slow)
    seen = set()
    async for event in events:
        seen.add(event.index)
        if len(seen) == 3:
            break
    await events.aclose()
    await rig.cluster.is_idle()
