"""The file of clients, and what a client may have."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from draftwood.credentials import Role
from draftwood.errors import InvalidArgument, ResourceExhausted, Unauthenticated
from draftwood.v1 import verifier_pb2
from router.clients import ClientBook, token_hash
from router.quotas import Meter, Quotas, admitted, metered
from tests.services.authority import A_DAY, NOW, new_token, token_entry, write_clients

ALICE, BOB, ENDED = (new_token() for _ in range(3))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "clients.yaml"


def book(path: Path, **limits: int) -> ClientBook:
    return ClientBook(write_clients(path, {"name": "alice", "tokens": [token_entry(ALICE)], **limits}))


# --- the file


def test_a_token_says_whose_it_is(path: Path) -> None:
    write_clients(
        path,
        {"name": "alice", "tokens": [token_entry(ALICE)]},
        {"name": "bob", "role": "admin", "tokens": [token_entry(ENDED, NOW - A_DAY), token_entry(BOB, NOW + A_DAY)]},
    )
    clients = ClientBook(path)
    assert (clients.caller(ALICE).name, clients.caller(ALICE).roles) == ("alice", {Role.CLIENT})
    assert (clients.caller(BOB).name, clients.caller(BOB).roles) == ("bob", {Role.ADMIN})
    for token, reason in (
        (ENDED, "TOKEN_EXPIRED"),
        (new_token(), "TOKEN"),
        ("", "TOKEN"),
        (token_hash(ALICE), "TOKEN"),
    ):
        with pytest.raises(Unauthenticated) as caught:
            clients.caller(token)
        assert caught.value.reason == reason
        assert not token or token not in str(caught.value)


def test_a_token_ends_at_its_time(path: Path) -> None:
    clock = Clock()
    write_clients(path, {"name": "bob", "tokens": [token_entry(BOB, NOW)]})
    clients = ClientBook(path, clock)
    clock.now_s = NOW.timestamp() - 0.001
    assert clients.caller(BOB).name == "bob"
    clock.now_s = NOW.timestamp()
    with pytest.raises(Unauthenticated, match="has expired"):
        clients.caller(BOB)


def test_old_and_new_token_overlap_and_the_file_is_reread(path: Path) -> None:
    old, new = new_token(), new_token()
    clients = ClientBook(write_clients(path, {"name": "alice", "tokens": [token_entry(old)]}))
    write_clients(path, {"name": "alice", "tokens": [token_entry(old), token_entry(new)]})
    assert clients.caller(old) == clients.caller(new)
    write_clients(path, {"name": "alice", "tokens": [token_entry(new)]})
    assert clients.caller(new).name == "alice"
    with pytest.raises(Unauthenticated):
        clients.caller(old)
    path.write_text("clients: [")  # being written, or broken
    assert clients.caller(new).name == "alice"
    path.unlink()
    assert clients.caller(new).name == "alice"


HASH = token_hash(ALICE)
BAD_FILES: dict[str, tuple[Any, str]] = {
    "nothing": ("", "clients"),
    "no list": ("clients: 1", "clients"),
    "unknown field": ("clients: [{name: a, tokens_per_hour: 1}]", "clients.0.tokens_per_hour"),
    "no name": ("clients: [{role: client}]", "clients.0.name"),
    "unknown role": ("clients: [{name: a, role: king}]", "clients.0.role"),
    "worker's role": ("clients: [{name: a, role: draft}]", "clients.0.role"),
    "negative limit": ("clients: [{name: a, max_concurrent: -1}]", "clients.0.max_concurrent"),
    "the token itself": (f"clients: [{{name: a, tokens: [{{sha256: {ALICE}}}]}}]", "clients.0.tokens.0.sha256"),
    "token as a text": (f"clients: [{{name: a, tokens: [{ALICE}]}}]", "clients.0.tokens.0"),
    "time without a zone": (
        f"clients: [{{name: a, tokens: [{{sha256: {HASH}, expires: '2030-01-01T00:00:00'}}]}}]",
        "clients.0.tokens.0.expires",
    ),
    "a name twice": ("clients: [{name: a}, {name: a}]", "clients"),
    "a token twice": (
        f"clients: [{{name: a, tokens: [{{sha256: {HASH}}}]}}, {{name: b, tokens: [{{sha256: {HASH}}}]}}]",
        "clients",
    ),
    "no YAML": ("clients: [", "clients"),
}


@pytest.mark.parametrize(("text", "field"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_wrong_file_is_refused_and_shows_no_token(path: Path, text: str, field: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        ClientBook(path)
    assert (caught.value.reason, caught.value.field) == ("CONFIG", field), caught.value
    assert str(path) in caught.value.message and ALICE not in caught.value.message


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"cannot read {path}"):
        ClientBook(path)


# --- limits


def refused(quotas: Quotas, choices: int = 1) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as caught, quotas.admitted("alice", choices):
        pass
    return caught.value


def ask(quotas: Quotas, choices: int = 1) -> Meter | None:
    """A request that is over at once."""
    with quotas.admitted("alice", choices) as meter:
        return meter


def test_without_limits_nothing_is_counted(path: Path) -> None:
    quotas = Quotas(book(path))
    assert [ask(quotas) for _ in range(1000)] == [None] * 1000
    with quotas.admitted("somebody with a certificate", 1) as meter:
        assert meter is None
    with admitted(None, None, 5) as meter:
        assert meter is None


def test_texts_at_once(path: Path) -> None:
    quotas = Quotas(book(path, max_concurrent=3))
    with quotas.admitted("alice", 2):
        error = refused(quotas, 2)
        assert (error.reason, error.retry_after_ms) == ("CLIENT_CONCURRENCY", 500)
        assert "2 of 3" in error.message and "alice" in error.message
        with quotas.admitted("alice", 1):
            refused(quotas, 1)
    with pytest.raises(RuntimeError), quotas.admitted("alice", 3):
        raise RuntimeError("the request failed: its places are free again")
    ask(quotas, 3)


def test_texts_a_minute_come_back_evenly(path: Path) -> None:
    clock = Clock()
    quotas = Quotas(book(path, requests_per_minute=6), clock)
    for _ in range(2):
        ask(quotas, 3)
    error = refused(quotas)
    assert (error.reason, error.retry_after_ms) == ("CLIENT_REQUESTS", 10_000)
    clock.now_s += 9.9
    assert refused(quotas).retry_after_ms == 100
    clock.now_s += 0.1
    ask(quotas)
    assert refused(quotas, 2).retry_after_ms == 20_000
    clock.now_s += 10_000  # no more than a minute's worth is kept
    ask(quotas, 6)
    refused(quotas)


def test_a_hint_that_is_followed_is_enough(path: Path) -> None:
    clock = Clock()
    quotas = Quotas(book(path, requests_per_minute=7, tokens_per_minute=11), clock)
    for _ in range(200):
        try:
            with quotas.admitted("alice", 1):
                quotas.spend("alice", 3)
        except ResourceExhausted as error:
            clock.now_s += error.retry_after_ms / 1e3
            with quotas.admitted("alice", 1):
                pass


def test_refusals_cost_nothing(path: Path) -> None:
    clock = Clock()
    quotas = Quotas(book(path, requests_per_minute=1), clock)
    ask(quotas)
    for _ in range(100):
        refused(quotas)
    clock.now_s += 60
    ask(quotas)


def test_tokens_are_paid_for_as_they_come(path: Path) -> None:
    clock = Clock()
    quotas = Quotas(book(path, tokens_per_minute=600), clock)
    with quotas.admitted("alice", 1) as meter:
        assert meter is not None
        meter.count(verifier_pb2.GenerationEvent(started=verifier_pb2.Started(prompt_tokens=500)))
        ask(quotas)  # 100 are left
        meter.count(verifier_pb2.GenerationEvent(chunk=verifier_pb2.Chunk(tokens=range(120))))
        meter.count(verifier_pb2.GenerationEvent(finished=verifier_pb2.Finished()))
    error = refused(quotas)
    assert (error.reason, error.retry_after_ms) == ("CLIENT_TOKENS", 2_100)  # 20 of debt and one to go on with
    clock.now_s += 2.1
    ask(quotas)


def test_more_texts_than_a_client_may_ever_have_are_no_matter_of_time(path: Path) -> None:
    for limits in ({"max_concurrent": 2}, {"requests_per_minute": 2}):
        quotas = Quotas(book(path, **limits))
        with pytest.raises(InvalidArgument) as caught, quotas.admitted("alice", 3):
            pass
        assert (caught.value.reason, caught.value.field) == ("CHOICES", "generation.n")


def test_limits_change_with_the_file(path: Path) -> None:
    clock = Clock()
    clients = book(path)
    quotas = Quotas(clients, clock)
    for _ in range(50):
        ask(quotas)
    book(path, requests_per_minute=2)
    ask(quotas, 2)  # what came without a limit is not charged
    assert refused(quotas).reason == "CLIENT_REQUESTS"
    book(path, requests_per_minute=60)
    clock.now_s += 1
    ask(quotas)
    book(path)
    for _ in range(50):
        ask(quotas)


def test_clients_do_not_pay_for_each_other(path: Path) -> None:
    limits = {"max_concurrent": 1, "requests_per_minute": 1, "tokens_per_minute": 1}
    quotas = Quotas(ClientBook(write_clients(path, {"name": "alice", **limits}, {"name": "bob", **limits})))
    with quotas.admitted("alice", 1):
        quotas.spend("alice", 1000)
        with quotas.admitted("bob", 1):
            pass


async def test_metering_passes_all_on_and_closes_what_it_reads(path: Path) -> None:
    quotas, closed = Quotas(book(path, tokens_per_minute=10)), list[bool]()
    sent = [verifier_pb2.GenerationEvent(chunk=verifier_pb2.Chunk(tokens=[1, 2], offset=k)) for k in range(3)]

    async def events() -> Any:
        try:
            for event in sent:
                yield event
        finally:
            closed.append(True)

    async with AsyncExitStack() as stack:
        meter = stack.enter_context(quotas.admitted("alice", 1))
        assert meter
        stream = metered(events(), meter)
        assert [await anext(stream) for _ in range(2)] == sent[:2]
        await stream.aclose()
    assert closed == [True] and quotas._usage["alice"].tokens.level == 6
