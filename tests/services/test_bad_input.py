"""Whatever is sent, the answer is the status and reason of docs/errors.md, and nobody else notices.

Every case runs beside another session with drafts, whose text must stay exactly its reference, and is followed by a
check that all services are up and answer.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio

from draftwood.errors import DraftwoodError
from draftwood.rpc.status import from_rpc_error
from draftwood.tickets import issue_ticket
from draftwood.v1 import draft_pb2, router_pb2, router_pb2_grpc, verifier_pb2
from draftwood.wire import tokenizer_to_proto
from tests.services.models import CONTEXT, SIZE, Models
from tests.services.stack import (
    SERVING,
    Cluster,
    Stack,
    Text,
    collect,
    engine_of,
    health,
    refused,
    running,
    slow_down,
    tokens_of,
    until,
    verifier_request,
    verifier_stub,
)
from tests.services.wire import HandDraft, growth

pytestmark = pytest.mark.asyncio(loop_scope="module")

TICKET = b"ticket"
GARBAGE = b"\xff" * 9
NEIGHBOUR: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "seed": 42, "ignore_eos": True}
NAN, INF = math.nan, math.inf


class Rig:
    """One cluster for all cases, and the texts that must come out of it."""

    def __init__(self, stack: Stack, cluster: Cluster) -> None:
        self.stack = stack
        self.cluster = cluster
        self.router_stub: Any
        self.verifier_stub: Any
        self.verifier_channel: grpc.aio.Channel
        self.reference: list[int] = []

    async def open(self) -> None:
        self.router_stub = router_pb2_grpc.RouterServiceStub(await self.stack.channel(self.cluster.router))
        self.verifier_channel = await self.stack.channel(self.cluster.verifier)
        self.verifier_stub = verifier_stub(self.verifier_channel)
        self.reference = await self.cluster.plain("The sea is", **NEIGHBOUR)

    @asynccontextmanager
    async def unimpressed(self) -> AsyncIterator[None]:
        """A neighbour writes while the body runs, and all is as before afterwards."""
        text = Text()
        task = asyncio.create_task(self.cluster.speculative("The sea is", text, **NEIGHBOUR))
        try:
            await until(lambda: bool(text.tokens) or task.done())
            yield
            assert (await task).tokens == self.reference
        finally:
            task.cancel()
        for server in (self.cluster.verifier, self.cluster.router, *self.cluster.drafts):
            assert await health(server) == SERVING
        after = await self.cluster.speculative("The sea is", **NEIGHBOUR | {"max_tokens": 5})
        assert after.tokens == self.reference[:5]
        await self.cluster.is_idle()

    def generate(self, model: str = "", **generation: Any) -> Any:
        message = verifier_pb2.Generation(**generation)
        return self.router_stub.Generate(router_pb2.RouterServiceGenerateRequest(model=model, generation=message))

    async def draft(self) -> HandDraft:
        return HandDraft(self.verifier_channel)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(models: Models) -> AsyncIterator[Rig]:
    async with running(models) as stack:
        rig = Rig(stack, await stack.cluster(draft_wait_ms=20))
        slow_down(rig.cluster.verifier, 0.002)
        await rig.open()
        yield rig


def check(error: DraftwoodError | None, status: str, reason: str, field: str | None = None) -> None:
    assert error is not None, "nothing was said in-band"
    assert (error.status, error.reason) == (status, reason), error
    if field is not None:
        assert error.field == field


# --- Generate, through the router


SAMPLING, BAD_WORD, CONSTRAINT = verifier_pb2.Sampling, verifier_pb2.BadWord, verifier_pb2.Constraint


def ids_of(*ids: int) -> verifier_pb2.BadWord:
    return verifier_pb2.BadWord(token_ids=verifier_pb2.TokenIds(ids=ids))


BAD_REQUESTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unknown_model": ({"text": "x", "model": "gpt-9"}, "NOT_FOUND", "MODEL_UNKNOWN", "model"),
    "no_prompt": ({}, "INVALID_ARGUMENT", "PROMPT_EMPTY", "generation.prompt"),
    "empty_text": ({"text": ""}, "INVALID_ARGUMENT", "PROMPT_EMPTY", "generation.prompt"),
    "chat_without_messages": (
        {"chat": verifier_pb2.Chat()}, "INVALID_ARGUMENT", "PROMPT_EMPTY", "generation.prompt",
    ),
    "no_token_ids": ({"token_ids": verifier_pb2.TokenIds()}, "INVALID_ARGUMENT", "PROMPT_EMPTY", "generation.prompt"),
    "unknown_role": (
        {"chat": verifier_pb2.Chat(messages=[verifier_pb2.ChatMessage(role="root", content="x")])},
        "INVALID_ARGUMENT", "CHAT_ROLE", "generation.chat.messages[0].role",
    ),
    "prompt_token_out_of_vocabulary": (
        {"token_ids": verifier_pb2.TokenIds(ids=[1, 2, SIZE])},
        "INVALID_ARGUMENT", "TOKEN_OUT_OF_VOCABULARY", "generation.prompt[2]",
    ),
    "huge_prompt_token": (
        {"token_ids": verifier_pb2.TokenIds(ids=[2**32 - 1])},
        "INVALID_ARGUMENT", "TOKEN_OUT_OF_VOCABULARY", "generation.prompt[0]",
    ),
    "resume_token_out_of_vocabulary": (
        {"text": "x", "resume_tokens": [3, SIZE + 9]},
        "INVALID_ARGUMENT", "TOKEN_OUT_OF_VOCABULARY", "generation.resume_tokens[1]",
    ),
    "stop_token_out_of_vocabulary": (
        {"text": "x", "stop_token_ids": [SIZE]},
        "INVALID_ARGUMENT", "TOKEN_OUT_OF_VOCABULARY", "generation.stop_token_ids[0]",
    ),
    "prompt_beyond_the_context": (
        {"token_ids": verifier_pb2.TokenIds(ids=[5] * (CONTEXT + 1))},
        "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "generation.prompt",
    ),
    "prompt_that_fills_the_context": (
        {"token_ids": verifier_pb2.TokenIds(ids=[5] * CONTEXT)},
        "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "generation.prompt",
    ),
    "max_tokens_beyond_the_room": (
        {"token_ids": verifier_pb2.TokenIds(ids=[5] * 10), "max_tokens": CONTEXT - 9},
        "INVALID_ARGUMENT", "MAX_TOKENS", "generation.max_tokens",
    ),
    "huge_max_tokens": (
        {"text": "x", "max_tokens": 2**32 - 1}, "INVALID_ARGUMENT", "MAX_TOKENS", "generation.max_tokens",
    ),
    "resume_beyond_max_tokens": (
        {"text": "x", "max_tokens": 2, "resume_tokens": [4, 5, 6]},
        "INVALID_ARGUMENT", "RESUME", "generation.resume_tokens",
    ),
    "resume_beyond_the_end_of_a_text": (
        {"text": "x", "max_tokens": 9, "resume_tokens": [4, 7, 9], "stop_token_ids": [7]},
        "INVALID_ARGUMENT", "RESUME", "generation.resume_tokens",
    ),
    "resume_beyond_a_stop_string": (
        {"text": "x", "resume_tokens": [40, 41, 42], "stop": ["GH"]},  # the tokens are G, H, I
        "INVALID_ARGUMENT", "RESUME", "generation.resume_tokens",
    ),
    "empty_stop_string": (
        {"text": "x", "stop": ["end", ""]}, "INVALID_ARGUMENT", "STOP_STRINGS", "generation.stop[1]",
    ),
    "long_stop_string": (
        {"text": "x", "stop": ["é" * 257]}, "INVALID_ARGUMENT", "STOP_STRINGS", "generation.stop[0]",
    ),
    "many_stop_strings": (
        {"text": "x", "stop": [f"{k}" for k in range(17)]}, "INVALID_ARGUMENT", "STOP_STRINGS", "generation.stop",
    ),
    "no_texts": ({"text": "x", "n": 0}, "INVALID_ARGUMENT", "CHOICES", "generation.n"),
    "many_texts": (
        {"text": "x", "n": 17, "sampling": SAMPLING(temperature=1)}, "INVALID_ARGUMENT", "CHOICES", "generation.n",
    ),
    "huge_number_of_texts": (
        {"text": "x", "n": 2**32 - 1, "sampling": SAMPLING(temperature=1)},
        "INVALID_ARGUMENT", "CHOICES", "generation.n",
    ),
    "several_greedy_texts": ({"text": "x", "n": 2}, "INVALID_ARGUMENT", "CHOICES", "generation.n"),
    "several_texts_resumed": (
        {"text": "x", "n": 2, "sampling": SAMPLING(temperature=1), "resume_tokens": [4]},
        "INVALID_ARGUMENT", "CHOICES", "generation.n",
    ),
    "one_of_several_texts_is_refused": (
        {"text": "x", "n": 2, "sampling": SAMPLING(temperature=1), "stop": [""]},
        "INVALID_ARGUMENT", "STOP_STRINGS", "generation.stop[0]",
    ),
    "unknown_rule": (
        {"text": "x", "speculation": verifier_pb2.Speculation(rule=9)},
        "INVALID_ARGUMENT", "RULE", "generation.speculation.rule",
    ),
    "greedy_rule_at_a_temperature": (
        {"text": "x", "sampling": SAMPLING(temperature=0.5), "speculation": verifier_pb2.Speculation(rule=1)},
        "INVALID_ARGUMENT", "RULE", "generation.speculation.rule",
    ),
} | {
    f"{name}_{value}".replace("-", "minus_"): (
        {"text": "x", "sampling": SAMPLING(**{name: value})}, "INVALID_ARGUMENT", "SAMPLING", f"sampling.{name}",
    )
    for name, value in [
        ("temperature", -0.1), ("temperature", NAN), ("temperature", INF), ("temperature", -INF), ("temperature", 10.5),
        ("temperature", 1e30), ("top_k", SIZE + 1), ("top_k", 2**32 - 1),
        ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.5), ("top_p", NAN), ("top_p", INF),
        ("min_p", -0.1), ("min_p", 1.5), ("min_p", NAN), ("min_p", INF),
        ("presence_penalty", -2.5), ("presence_penalty", 2.5), ("presence_penalty", NAN), ("presence_penalty", INF),
        ("frequency_penalty", -2.5), ("frequency_penalty", 2.5), ("frequency_penalty", NAN),
        ("frequency_penalty", -INF),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", 0.001),
        ("repetition_penalty", 101.0), ("repetition_penalty", NAN), ("repetition_penalty", INF),
        ("min_tokens", CONTEXT + 1), ("min_tokens", 2**32 - 1),
        ("top_logprobs", 1),
    ]
} | {
    f"logit_bias_{value}": (
        {"text": "x", "sampling": SAMPLING(logit_bias={7: 1.0, 9: value})},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.logit_bias[9]",
    )
    for value in (-100.5, 101.0, NAN, INF, -INF)
} | {
    "logit_bias_out_of_vocabulary": (
        {"text": "x", "sampling": SAMPLING(logit_bias={7: 1.0, SIZE: 1.0})},
        "INVALID_ARGUMENT", "TOKEN_OUT_OF_VOCABULARY", f"sampling.logit_bias[{SIZE}]",
    ),
    "too_many_logit_biases": (
        {"text": "x", "sampling": SAMPLING(logit_bias=dict.fromkeys(range(1025), 0.0))},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.logit_bias",
    ),
    "bad_word_out_of_vocabulary": (
        {"text": "x", "sampling": SAMPLING(bad_words=[BAD_WORD(text="fine"), ids_of(1, SIZE)])},
        "INVALID_ARGUMENT", "TOKEN_OUT_OF_VOCABULARY", "sampling.bad_words[1].token_ids[1]",
    ),
    "bad_word_that_says_nothing": (
        {"text": "x", "sampling": SAMPLING(bad_words=[BAD_WORD()])},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.bad_words[0]",
    ),
    "bad_word_of_spaces": (
        {"text": "x", "sampling": SAMPLING(bad_words=[BAD_WORD(text="  ")])},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.bad_words[0]",
    ),
    "bad_word_of_no_ids": (
        {"text": "x", "sampling": SAMPLING(bad_words=[ids_of(5), ids_of()])},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.bad_words[1]",
    ),
    "bad_word_of_too_many_ids": (
        {"text": "x", "sampling": SAMPLING(bad_words=[ids_of(*[5] * 65)])},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.bad_words[0]",
    ),
    "bad_word_of_too_long_a_text": (
        {"text": "x", "sampling": SAMPLING(bad_words=[BAD_WORD(text="sky " * 65)])},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.bad_words[0]",
    ),
    "too_many_bad_words": (
        {"text": "x", "sampling": SAMPLING(bad_words=[ids_of(5)] * 1025)},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.bad_words",
    ),
    "constraint_that_says_nothing": (
        {"text": "x", "constraint": CONSTRAINT()}, "INVALID_ARGUMENT", "CONSTRAINT", "generation.constraint",
    ),
    "json_object_that_is_false": (
        {"text": "x", "constraint": CONSTRAINT(json_object=False)},
        "INVALID_ARGUMENT", "CONSTRAINT", "generation.constraint",
    ),
    "constraint_that_may_not_end": (
        {"text": "x", "ignore_eos": True, "constraint": CONSTRAINT(regex="a")},
        "INVALID_ARGUMENT", "CONSTRAINT", "generation.ignore_eos",
    ),
    "schema_that_is_no_json": (
        {"text": "x", "constraint": CONSTRAINT(json_schema='{"type": ')},
        "INVALID_ARGUMENT", "CONSTRAINT", "generation.constraint.json_schema",
    ),
    "schema_that_is_not_supported": (
        {"text": "x", "constraint": CONSTRAINT(json_schema='{"not": {}}')},
        "INVALID_ARGUMENT", "CONSTRAINT", "generation.constraint.json_schema",
    ),
    "regex_that_is_none": (
        {"text": "x", "constraint": CONSTRAINT(regex="(")},
        "INVALID_ARGUMENT", "CONSTRAINT", "generation.constraint.regex",
    ),
    "regex_that_is_too_long": (
        {"text": "x", "constraint": CONSTRAINT(regex="é" * 32769)},
        "INVALID_ARGUMENT", "CONSTRAINT", "generation.constraint.regex",
    ),
    "grammar_without_a_start": (
        {"text": "x", "constraint": CONSTRAINT(grammar='a: "b"')},
        "INVALID_ARGUMENT", "CONSTRAINT", "generation.constraint.grammar",
    ),
    "resume_against_the_constraint": (
        {"text": "x", "max_tokens": 9, "constraint": CONSTRAINT(json_object=True), "resume_tokens": [70]},
        "INVALID_ARGUMENT", "RESUME", "generation.resume_tokens[0]",
    ),
    "min_tokens_beyond_max_tokens": (
        {"text": "x", "max_tokens": 4, "sampling": SAMPLING(min_tokens=5)},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.min_tokens",
    ),
    "too_many_top_logprobs": (
        {"text": "x", "sampling": SAMPLING(logprobs=True, top_logprobs=21)},
        "INVALID_ARGUMENT", "SAMPLING", "sampling.top_logprobs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_request(rig: Rig, case: str) -> None:
    request, status, reason, field = BAD_REQUESTS[case]
    async with rig.unimpressed():
        refusal = await refused(rig.generate(**request))
    assert refusal.events == ["error"], "the in-band error is all that comes"
    check(refusal.said, status, reason, field)
    check(refusal.status, status, reason, field)


@pytest.mark.parametrize("field", ["generation", "sampling", "generation.speculation", "generation.constraint"])
async def test_bug_8_a_parameter_of_a_newer_client_is_refused_and_not_ignored(rig: Rig, field: str) -> None:
    """It passes the router as it is, and the verifier names it."""
    generation = verifier_pb2.Generation(text="x", constraint=CONSTRAINT(json_object=True))
    part = {
        "generation": generation, "sampling": generation.sampling, "generation.speculation": generation.speculation,
        "generation.constraint": generation.constraint,
    }[field]  # fmt: skip
    part.MergeFromString(bytes([0xF8, 0x3F, 1]))  # number 1023 is 1
    async with rig.unimpressed():
        refusal = await refused(
            rig.router_stub.Generate(router_pb2.RouterServiceGenerateRequest(generation=generation))
        )
    assert refusal.events == ["error"]
    check(refusal.said, "INVALID_ARGUMENT", "UNKNOWN_FIELD", field)
    check(refusal.status, "INVALID_ARGUMENT", "UNKNOWN_FIELD", field)
    assert refusal.said and "1023" in refusal.said.message


async def test_request_that_leaves_no_token(rig: Rig) -> None:
    """Known only when the text gets there: what came before it is delivered, then the error."""
    words = [ids_of(token) for token in range(SIZE)]
    async with rig.unimpressed():
        refusal = await refused(rig.generate(text="x", sampling=SAMPLING(bad_words=words)))
    assert refusal.events == ["started", "error"]
    check(refusal.said, "INVALID_ARGUMENT", "NO_TOKEN_ALLOWED", "sampling")
    check(refusal.status, "INVALID_ARGUMENT", "NO_TOKEN_ALLOWED", "sampling")


async def test_request_straight_to_the_verifier_without_a_session_id(rig: Rig) -> None:
    async with rig.unimpressed():
        refusal = await refused(rig.verifier_stub.Generate(verifier_request("")))
    check(refusal.said, "INVALID_ARGUMENT", "SESSION_ID", "session_id")


async def test_several_texts_straight_from_a_verifier(rig: Rig) -> None:
    several = verifier_request("s", n=2, sampling=SAMPLING(temperature=1))
    async with rig.unimpressed():
        refusal = await refused(rig.verifier_stub.Generate(several))
    check(refusal.said, "INVALID_ARGUMENT", "CHOICES", "generation.n")


async def test_session_id_in_use(rig: Rig) -> None:
    name = uuid.uuid4().hex
    async with rig.unimpressed():
        first = rig.verifier_stub.Generate(verifier_request(name, max_tokens=80, ignore_eos=True))
        await until(lambda: name in rig.cluster.engine.sessions)
        refusal = await refused(rig.verifier_stub.Generate(verifier_request(name, max_tokens=4)))
        assert len(await tokens_of(first)) == 80, "the first session must go on"
    check(refusal.said, "INVALID_ARGUMENT", "SESSION_EXISTS", "session_id")
    check(refusal.status, "INVALID_ARGUMENT", "SESSION_EXISTS")


# --- bytes


async def test_undecodable_unary_request(rig: Rig) -> None:
    raw: dict[str, Any] = {"request_serializer": None, "response_deserializer": None}
    async with rig.unimpressed():
        for method in ("GetModelInfo",):
            with pytest.raises(grpc.RpcError) as caught:
                await rig.verifier_channel.unary_unary(f"/draftwood.v1.VerifierService/{method}", **raw)(GARBAGE)
            check(from_rpc_error(caught.value), "INVALID_ARGUMENT", "DECODE")
        channel = await rig.stack.channel(rig.cluster.drafts[0])
        for method in ("Attach", "Detach"):
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary(f"/draftwood.v1.DraftService/{method}", **raw)(GARBAGE)
            check(from_rpc_error(caught.value), "INVALID_ARGUMENT", "DECODE")


@pytest.mark.parametrize("service", ["Router", "Verifier"])
async def test_undecodable_generate(rig: Rig, service: str) -> None:
    server = rig.cluster.router if service == "Router" else rig.cluster.verifier
    channel = await rig.stack.channel(server)
    method = channel.unary_stream(
        f"/draftwood.v1.{service}Service/Generate", request_serializer=None, response_deserializer=None
    )
    async with rig.unimpressed():
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in method(GARBAGE):
                pass
    check(from_rpc_error(caught.value), "INVALID_ARGUMENT", "DECODE")


async def test_undecodable_message_leaves_the_speculate_stream_usable(rig: Rig) -> None:
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.hello()
        await draft.say(GARBAGE)
        check(await draft.error(), "INVALID_ARGUMENT", "DECODE")
        await works(rig, draft)


async def test_undecodable_first_message_of_a_speculate_stream(rig: Rig) -> None:
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.say(GARBAGE)
        await ends(draft, "INVALID_ARGUMENT", "DECODE")


async def test_oversize_request(rig: Rig) -> None:
    """gRPC itself refuses it, so there is only the status."""
    async with rig.unimpressed():
        for stub_call in (
            rig.generate(text="x" * (5 << 20)),
            rig.verifier_stub.Generate(verifier_request("big", prompt="x" * (17 << 20))),
        ):
            refusal = await refused(stub_call)
            check(refusal.status, "RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE")


async def test_oversize_speculate_message_ends_that_stream_only(rig: Rig) -> None:
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.hello()
        await draft.say(b"\0" * (17 << 20))
        with pytest.raises(DraftwoodError) as caught:
            while True:
                await draft.hear()
        # INTERNAL and CANCELLED are what gRPC makes of it when a write races the end (grpc#36066).
        assert caught.value.reason in ("MESSAGE_TOO_LARGE", "TRANSPORT")
        await until(lambda: len(rig.cluster.verifier._links) == 1, what="the stream is gone")


# --- Speculate: the handshake


async def ends(draft: HandDraft, status: str, reason: str) -> None:
    """The refusal comes in-band, then the stream ends with the same as status."""
    check(await draft.error(), status, reason)
    with pytest.raises(DraftwoodError) as caught:
        await draft.hear()
    check(caught.value, status, reason)


HANDSHAKES: dict[str, tuple[draft_pb2.SpeculateRequest, str, str]] = {
    "empty_message": (draft_pb2.SpeculateRequest(), "FAILED_PRECONDITION", "HELLO_MISSING"),
    "join_before_hello": (
        draft_pb2.SpeculateRequest(joins=[draft_pb2.Join(session_id="x", handle=1)]),
        "FAILED_PRECONDITION", "HELLO_MISSING",
    ),
    "growth_before_hello": (draft_pb2.SpeculateRequest(growth=growth()), "FAILED_PRECONDITION", "HELLO_MISSING"),
    "version_of_the_future": (
        draft_pb2.SpeculateRequest(hello=draft_pb2.Hello(protocol_version=2)),
        "FAILED_PRECONDITION", "PROTOCOL_VERSION",
    ),
    "no_version": (
        draft_pb2.SpeculateRequest(hello=draft_pb2.Hello()), "FAILED_PRECONDITION", "PROTOCOL_VERSION",
    ),
    "tokenizer_of_no_tokens": (
        draft_pb2.SpeculateRequest(
            hello=draft_pb2.Hello(protocol_version=1, draft=draft_pb2.DraftInfo(tokenizer=draft_pb2.TokenizerInfo()))
        ),
        "FAILED_PRECONDITION", "TOKENIZER_MISMATCH",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HANDSHAKES)
async def test_handshake(rig: Rig, case: str) -> None:
    message, status, reason = HANDSHAKES[case]
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.say(message)
        await ends(draft, status, reason)
    await until(lambda: len(engine_of(rig.cluster.verifier)._links) == 1, what="no refused link is kept")


async def test_stream_that_ends_without_a_word(rig: Rig) -> None:
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.call.done_writing()
        await ends(draft, "FAILED_PRECONDITION", "HELLO_MISSING")


@pytest.mark.parametrize("change", ["token", "special"])
async def test_verifier_refuses_a_draft_with_another_tokenizer(rig: Rig, change: str) -> None:
    """Bug kind 34."""
    info = tokenizer_to_proto(rig.cluster.verifier.loaded.vocabulary.fingerprint())
    if change == "token":
        info.sha256 = bytes(32)
    else:
        info.special_ids.append(9)
    async with rig.unimpressed():
        draft = await rig.draft()
        hello = draft_pb2.Hello(protocol_version=1, draft=draft_pb2.DraftInfo(kind="lm", tokenizer=info))
        await draft.say(draft_pb2.SpeculateRequest(hello=hello))
        await ends(draft, "FAILED_PRECONDITION", "TOKENIZER_MISMATCH")


async def test_padding_of_the_draft_is_no_mismatch(rig: Rig) -> None:
    """Bug kind 34."""
    info = tokenizer_to_proto(rig.cluster.verifier.loaded.vocabulary.fingerprint())
    info.vocab_size += 64
    async with rig.unimpressed():
        draft = await rig.draft()
        assert (await draft.hello(kind="lm", tokenizer=info)).protocol_version == 1
        draft.close()


# --- Speculate: joining


@asynccontextmanager
async def session(rig: Rig, tokens: int = 30) -> AsyncIterator[tuple[str, asyncio.Task[list[int]]]]:
    """A session of our own at the verifier, whose text must come out right as well."""
    name = uuid.uuid4().hex
    sampling = SAMPLING(temperature=0.9, seed=42)
    request = verifier_request(name, TICKET, "The sea is", max_tokens=tokens, sampling=sampling, ignore_eos=True)
    task = asyncio.create_task(tokens_of(rig.verifier_stub.Generate(request)))
    try:
        await until(lambda: name in rig.cluster.engine.sessions)
        yield name, task
        assert await task == rig.reference[:tokens]
    finally:
        task.cancel()


async def works(rig: Rig, draft: HandDraft, handle: int = 77) -> None:
    """The stream is usable: a session can be joined on it, and a right guess is accepted."""
    async with session(rig) as (name, _):
        start = await draft.join(name, TICKET, handle)
        offset = len(start.tokens) - start_length(rig)
        right = rig.reference[offset : offset + 3]
        await draft.grow(handle=handle, epoch=start.epoch, parent=[0, 1, 2][: len(right)], token=right)
        commits = [await draft.commit()]
        while not commits[-1].node_id and len(commits) < 20:
            commits.append(await draft.commit())
    assert any(commit.node_id for commit in commits), "no guess was accepted"
    draft.close()


def start_length(rig: Rig) -> int:
    return len(rig.cluster.verifier.loaded.codec.encode("The sea is"))


async def test_join_of_an_unknown_session(rig: Rig) -> None:
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.hello()
        await draft.ask_to_join("nobody", TICKET, 3)
        check(await draft.error(), "NOT_FOUND", "SESSION_UNKNOWN", "join.session_id")
        assert draft.heard[-1].errors[0].handle == 3
        await works(rig, draft)


@pytest.mark.parametrize("ticket", [b"", b"Ticket", TICKET, bytes(20), bytes(2**16)])
async def test_join_with_a_wrong_ticket(rig: Rig, ticket: bytes) -> None:
    async with rig.unimpressed(), session(rig) as (name, _):
        draft = await rig.draft()
        await draft.hello()
        await draft.show_ticket(name, ticket, 1)
        check(await draft.error(), "PERMISSION_DENIED", "TICKET", "join.ticket")
        draft.close()


async def test_join_of_a_session_that_wants_no_draft(rig: Rig) -> None:
    async with rig.unimpressed():
        call = rig.verifier_stub.Generate(verifier_request("closed", b"", max_tokens=60, ignore_eos=True))
        await until(lambda: "closed" in rig.cluster.engine.sessions)
        draft = await rig.draft()
        await draft.hello()
        for ticket in (b"", issue_ticket(b"", "closed", draft.incarnation, 0.0)):
            await draft.show_ticket("closed", ticket, 1)
            check(await draft.error(), "PERMISSION_DENIED", "TICKET")
        draft.close()
        assert len(await tokens_of(call)) == 60


async def test_handle_in_use(rig: Rig) -> None:
    async with rig.unimpressed(), session(rig) as (first, _), session(rig) as (second, _):
        draft = await rig.draft()
        await draft.hello()
        await draft.join(first, TICKET, 1)
        await draft.ask_to_join(second, TICKET, 1)
        check(await draft.error(), "INVALID_ARGUMENT", "HANDLE", "join.handle")
        await draft.ask_to_join(first, TICKET, 2)
        check(await draft.error(), "INVALID_ARGUMENT", "HANDLE", "join.handle")
        assert (await draft.join(second, TICKET, 2)).handle == 2
        draft.close()


# --- Speculate: trees


TREES: dict[str, tuple[dict[str, Any], str]] = {
    "forward_parent": ({"parent": [0, 3, 0]}, "TREE_FORWARD_PARENT"),
    "parent_of_the_far_future": ({"parent": [2**32 - 1]}, "TREE_FORWARD_PARENT"),
    "self_parent": ({"parent": [0, 2]}, "TREE_CYCLE"),
    "cycle_of_two": ({"parent": [2, 1]}, "TREE_FORWARD_PARENT"),
    "nan_score": ({"score": [NAN]}, "TREE_BAD_SCORE"),
    "infinite_score": ({"score": [-INF]}, "TREE_BAD_SCORE"),
    "positive_score": ({"score": [0.5]}, "TREE_BAD_SCORE"),
    "token_out_of_vocabulary": ({"token": [SIZE]}, "TREE_TOKEN_OUT_OF_VOCABULARY"),
    "huge_token": ({"token": [2**32 - 1]}, "TREE_TOKEN_OUT_OF_VOCABULARY"),
    "too_many_nodes": ({"parent": [0] * 513}, "TREE_TOO_LARGE"),
    "id_zero": ({"first_id": 0}, "TREE_BAD_ID"),
    "ids_beyond_32_bits": ({"first_id": 2**32 - 1, "parent": [0, 0]}, "TREE_BAD_ID"),
    "fewer_tokens_than_nodes": ({"parent": [0, 1], "token": [5]}, "TREE_LENGTH_MISMATCH"),
    "fewer_scores_than_nodes": ({"parent": [0, 1], "score": [-1.0]}, "TREE_LENGTH_MISMATCH"),
    "count_beyond_the_nodes": ({"count": [2**32 - 1]}, "TREE_LENGTH_MISMATCH"),
    "no_epoch": ({"epoch": []}, "TREE_LENGTH_MISMATCH"),
    "two_handles": ({"handle": [1, 1]}, "TREE_LENGTH_MISMATCH"),
    "q_that_sums_to_two": ({"drawn": 1, "q_parent": 0, "q_count": 1, "q_token": 5, "q_prob": 2.0}, "TREE_BAD_Q"),
    "q_without_the_token": ({"drawn": 1, "q_parent": 0, "q_count": 1, "q_token": 6, "q_prob": 1.0}, "TREE_BAD_Q"),
    "q_under_the_greedy_rule": ({"drawn": 1, "q_parent": 0, "q_count": 1, "q_token": 5, "q_prob": 1.0}, "TREE_BAD_Q"),
    "q_for_no_session": (
        {"drawn": [1, 1], "q_parent": 0, "q_count": 1, "q_token": 5, "q_prob": 1.0}, "TREE_LENGTH_MISMATCH",
    ),
    "epoch_to_come": ({"epoch": [10**6]}, "TREE_EPOCH"),
}  # fmt: skip


@pytest.mark.parametrize("case", TREES)
async def test_tree(rig: Rig, case: str) -> None:
    columns, reason = TREES[case]
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.hello()
        async with session(rig) as (name, _):
            await draft.join(name, TICKET, 1)
            await draft.grow(**columns)
            error = await draft.error()
        check(error, "INVALID_ARGUMENT", reason)
        said = next(m for m in draft.heard if m.errors).errors[0]
        assert said.HasField("handle") == (reason != "TREE_LENGTH_MISMATCH")
        assert error.field.startswith("growth.")
        await works(rig, draft)


async def test_one_bad_tree_in_a_message_spoils_no_other(rig: Rig) -> None:
    async with rig.unimpressed(), session(rig) as (first, _), session(rig) as (second, _):
        draft = await rig.draft()
        await draft.hello()
        await draft.join(first, TICKET, 1)
        await draft.join(second, TICKET, 2)
        before = rig.cluster.engine.totals.refused
        both = growth(
            handle=[1, 2], epoch=[0, 0], first_id=[1, 1], parent_base=[0, 0], count=[1, 1], complete=[True, True],
            parent=[0, 0], token=[5, 5], score=[NAN, -1.0],
        )  # fmt: skip
        await draft.say(draft_pb2.SpeculateRequest(growth=both))
        check(await draft.error(), "INVALID_ARGUMENT", "TREE_BAD_SCORE")
        assert [e.handle for m in draft.heard for e in m.errors] == [1]
        assert rig.cluster.engine.totals.refused == before + 1
        draft.close()


async def test_growth_for_an_unknown_handle_is_stale_and_no_error(rig: Rig) -> None:
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.hello()
        stale = rig.cluster.engine.totals.stale
        await draft.grow(handle=12345, parent=[0, 1, 2])
        await until(lambda: rig.cluster.engine.totals.stale >= stale + 3, what="three nodes are counted as stale")
        await works(rig, draft)
        assert not any(message.errors for message in draft.heard if message.starts or message.HasField("commits"))


async def test_leave_of_an_unknown_handle_is_no_error(rig: Rig) -> None:
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.hello()
        await draft.say(draft_pb2.SpeculateRequest(leaves=[draft_pb2.Leave(handle=9)]))
        await works(rig, draft)


async def test_second_hello_changes_nothing(rig: Rig) -> None:
    async with rig.unimpressed():
        draft = await rig.draft()
        await draft.hello()
        await draft.say(draft_pb2.SpeculateRequest(hello=draft_pb2.Hello(protocol_version=9)))
        await works(rig, draft)


# --- the draft worker


async def test_attach_to_a_session_that_is_not_there(rig: Rig) -> None:
    """The verifier's refusal comes back as the status of Attach."""
    channel = await rig.stack.channel(rig.cluster.drafts[0])
    attach = channel.unary_unary(
        "/draftwood.v1.DraftService/Attach",
        request_serializer=draft_pb2.AttachRequest.SerializeToString,
        response_deserializer=draft_pb2.AttachResponse.FromString,
    )
    request = draft_pb2.AttachRequest(session_id="x", ticket=b"t", verifier_address=rig.cluster.verifier.address)
    async with rig.unimpressed():
        with pytest.raises(grpc.RpcError) as caught:
            await attach(request)
        check(from_rpc_error(caught.value), "NOT_FOUND", "SESSION_UNKNOWN")
        request.verifier_address = "127.0.0.1:1"
        with pytest.raises(grpc.RpcError) as caught:
            await attach(request)
        check(from_rpc_error(caught.value), "UNAVAILABLE", "TRANSPORT")


async def test_model_required_when_several_are_served(rig: Rig) -> None:
    other = await rig.stack.verifier(name="other")
    router = await rig.stack.router([rig.cluster.verifier, other])
    stub: Any = router_pb2_grpc.RouterServiceStub(await rig.stack.channel(router))
    generation = verifier_pb2.Generation(text="x")
    async with rig.unimpressed():
        refusal = await refused(stub.Generate(router_pb2.RouterServiceGenerateRequest(generation=generation)))
        check(refusal.said, "INVALID_ARGUMENT", "MODEL_REQUIRED", "model")
        check(refusal.status, "INVALID_ARGUMENT", "MODEL_REQUIRED")
        client = await rig.stack.client(router)
        assert (await collect(client, "The sea is", model="other", **NEIGHBOUR)).tokens == rig.reference


async def test_rig_slow_enough_for_the_neighbour_to_be_there(rig: Rig) -> None:
    """The cases above would show nothing if the neighbour had ended before the bad input came."""
    text = Text()
    task = asyncio.create_task(rig.cluster.speculative("The sea is", text, **NEIGHBOUR))
    await until(lambda: bool(text.tokens))
    await refused(rig.generate(text=""))
    assert not task.done()
    await task
