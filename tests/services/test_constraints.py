"""Constrained output over the real wire: with drafts, through fail-over, refused and cancelled."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest

from draftwood.client import Message
from draftwood.v1 import verifier_pb2
from tests.services.models import END_OF_TURN
from tests.services.stack import Cluster, Stack, Text, collect, engine_of, slow_down, tokens_of, until, verifier_request
from tests.services.stack import verifier_stub as stub_of

PROMPT = "The sea is green, the grass is"
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
RULES: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}]


async def slow_cluster(stack: Stack, **settings: Any) -> Cluster:
    """A target slow enough for a draft to be there in time, on a busy machine too."""
    cluster = await stack.cluster(draft_wait_ms=1000, **settings)
    slow_down(cluster.verifier, 0.01)
    return cluster


def written(cluster: Cluster, tokens: list[int]) -> str:
    assert tokens[-1] == END_OF_TURN and END_OF_TURN not in tokens[:-1]
    return cluster.verifier.loaded.codec.texts([tokens[:-1]])[0]


@pytest.mark.parametrize("rule", RULES)
async def test_a_schema_with_drafts_is_the_schema_without(stack: Stack, rule: dict[str, Any]) -> None:
    cluster = await slow_cluster(stack)
    options = {"max_tokens": 120, "json_schema": SCHEMA, "logprobs": True, "top_logprobs": 2} | rule
    drafted = await cluster.speculative(PROMPT, **options)
    plain = await cluster.speculative(PROMPT, speculate=False, **options)
    assert drafted.tokens == plain.tokens and drafted.finished and drafted.finished.reason == "stop"
    text = "".join(drafted.pieces)
    assert text == written(cluster, drafted.tokens)
    jsonschema.validate(json.loads(text), SCHEMA)
    free = await cluster.plain(PROMPT, max_tokens=120, **rule)
    assert free != drafted.tokens
    raw = [entry.logprob for chunk in drafted.chunks for entry in chunk.logprobs]
    assert len(raw) == len(drafted.tokens) and min(raw) < -3, "they are of the target's own distribution"
    await cluster.is_idle()


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"regex": r"(yes|no|maybe)( [a-z]{2,6}){1,3}!"}, r"(yes|no|maybe)( [a-z]{2,6}){1,3}!"),
        ({"grammar": 'start: n (("+" | "*") n){2,4}\nn: /[0-9]{1,3}/'}, r"\d{1,3}([+*]\d{1,3}){2,4}"),
        ({"json_object": True, "logit_bias": {93: 9.0, 95: 30.0}}, r"(?s)\{.*\}"),
    ],
)
async def test_other_constraints(stack: Stack, options: dict[str, Any], fits: str) -> None:
    cluster = await slow_cluster(stack)
    options = {"max_tokens": 200, "temperature": 0.8, "seed": 1} | options
    drafted = await cluster.speculative(PROMPT, **options)
    assert drafted.tokens == await cluster.plain(PROMPT, **options)
    if "json_object" not in options or drafted.tokens[-1] == END_OF_TURN:
        text = written(cluster, drafted.tokens)
        assert re.fullmatch(fits, text), text
        assert "json_object" not in options or isinstance(json.loads(text), dict)


async def test_a_text_goes_on_at_another_verifier(stack: Stack) -> None:
    first, second = await stack.verifier(draft_wait_ms=50), await stack.verifier(draft_wait_ms=50)
    router = await stack.router([first, second], [await stack.draft()])
    client = await stack.client(router)
    options: dict[str, Any] = {"max_tokens": 120, "json_schema": SCHEMA, "temperature": 0.9, "seed": 3}
    want = await collect(client, PROMPT, speculate=False, **options)
    for verifier in (first, second):
        slow_down(verifier, 0.05)
    text = Text()

    async def lose_it() -> None:
        await until(lambda: len(text.tokens) >= 4)
        owner = first if engine_of(first).sessions else second
        await owner.stop(0)

    got, _ = await asyncio.gather(collect(client, PROMPT, text, **options), lose_it())
    assert got.tokens == want.tokens and want.finished and want.finished.reason == "stop"
    assert (await client.status()).verifier_migrations == 1


async def test_tokens_to_resume_from_must_fit(stack: Stack) -> None:
    cluster = await stack.cluster()
    stub = stub_of(await stack.channel(cluster.verifier))
    constraint = verifier_pb2.Constraint(json_schema=json.dumps(SCHEMA))
    fields: dict[str, Any] = {"constraint": constraint, "max_tokens": 120}
    whole = await tokens_of(stub.Generate(verifier_request("a", **fields)))
    rest = await tokens_of(stub.Generate(verifier_request("b", resume_tokens=whole[:7], **fields)))
    assert rest == whole[7:]
    assert await tokens_of(stub.Generate(verifier_request("c", resume_tokens=whole, **fields))) == []


@pytest.mark.model
@pytest.mark.timeout(900)
async def test_smollm2_writes_json(stack: Stack) -> None:
    """The real target and its draft: the same tokens without and with trees, and valid to the schema."""
    cluster = await stack.cluster(
        [{"model": "demo"}], model="demo", name="smollm2", dtype="float32", threads=0, draft_wait_ms=500, max_nodes=8
    )
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 1, "maximum": 120},
            "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        },
        "required": ["name", "age", "hobbies"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": "[ \n]{1,4}"},
    }
    for k, ask in enumerate(("Describe a sailor as JSON.", "Invent a person.", "Who was Ada Lovelace?")):
        prompt = [Message("user", ask)]
        options: dict[str, Any] = {"json_schema": schema, "max_tokens": 120, "temperature": 0.7 * (k % 2), "seed": 1}
        drafted = await cluster.speculative(prompt, **options)
        plain = await cluster.speculative(prompt, speculate=False, **options)
        assert drafted.tokens == plain.tokens and drafted.accepted > 0
        assert drafted.finished and drafted.finished.reason == "stop"
        jsonschema.validate(json.loads("".join(drafted.pieces)), schema)
