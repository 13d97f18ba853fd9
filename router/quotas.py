"""What a client may have of the router: texts at once, texts a minute, tokens a minute.

Rates are token buckets that hold one minute's worth and fill evenly. Texts are paid for as they are admitted. Tokens
are paid for as they come, since nobody knows a text's length before: a client may run into debt by what it has in
flight, and is admitted again when the debt is paid. Limits are those of the file of clients at that moment; each
router counts for itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Final

from draftwood.errors import InvalidArgument, ResourceExhausted
from draftwood.rpc.access import Caller
from draftwood.v1 import verifier_pb2
from router.clients import Client, ClientBook

MINUTE_S: Final = 60.0
ROUNDING_MS: Final = 1e-3
SHORT_MS: Final = 500
"""Hint where it cannot be known when there will be room."""


@dataclass(slots=True)
class Bucket:
    """Starts full; ``level`` may be below 0."""

    level: float = math.inf
    at_s: float = 0.0

    def fill(self, per_minute: int, now_s: float) -> None:
        """Up to now, at the rate that holds now; 0: there is no limit."""
        if not per_minute:
            self.level = math.inf
            return
        self.level = min(self.level + (now_s - self.at_s) * per_minute / MINUTE_S, per_minute)
        self.at_s = now_s

    def wait_ms(self, wanted: float, per_minute: int) -> int:
        """How long until the level is ``wanted``; 0 if it is, or there is no limit."""
        if not per_minute:
            return 0
        return max(0, math.ceil((wanted - self.level) * MINUTE_S * 1e3 / per_minute - ROUNDING_MS))


@dataclass(slots=True)
class Usage:
    """What one client has had."""

    running: int = 0
    texts: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)


class Meter:
    """Counts the tokens of one request."""

    def __init__(self, quotas: Quotas, name: str) -> None:
        self._quotas = quotas
        self._name = name

    def count(self, event: verifier_pb2.GenerationEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "chunk":
            self._quotas.spend(self._name, len(event.chunk.tokens))
        elif kind == "started":
            self._quotas.spend(self._name, event.started.prompt_tokens)


class Quotas:
    """The usage of every client that has limits."""

    def __init__(self, book: ClientBook, clock: Callable[[], float] = time.monotonic) -> None:
        self._book = book
        self._clock = clock
        self._usage: dict[str, Usage] = {}

    @contextmanager
    def admitted(self, name: str, choices: int) -> Iterator[Meter | None]:
        """Holds a client's place for ``choices`` texts; None: their tokens need not be counted.

        Raises ResourceExhausted CLIENT_CONCURRENCY, CLIENT_REQUESTS, CLIENT_TOKENS; InvalidArgument CHOICES if the
        client may never have so many.
        """
        client = self._book.client(name)
        if client is None:
            yield None
            return
        usage = self._usage.setdefault(name, Usage())
        self._check(client, usage, choices)
        usage.running += choices
        usage.texts.level -= choices
        try:
            yield Meter(self, name) if client.tokens_per_minute else None
        finally:
            usage.running -= choices

    def spend(self, name: str, tokens: int) -> None:
        self._usage[name].tokens.level -= tokens

    def _check(self, client: Client, usage: Usage, choices: int) -> None:
        now_s = self._clock()
        most, texts, tokens = client.max_concurrent, client.requests_per_minute, client.tokens_per_minute
        for limit in (most, texts):
            if limit and choices > limit:
                message = f"n is {choices}, but client {client.name!r} may have {limit}"
                raise InvalidArgument("CHOICES", message, field="generation.n")
        if most and usage.running + choices > most:
            message = f"{usage.running} of {most} texts of client {client.name!r} are being written"
            raise ResourceExhausted("CLIENT_CONCURRENCY", message, retry_after_ms=SHORT_MS)
        usage.texts.fill(texts, now_s)
        usage.tokens.fill(tokens, now_s)
        for_texts_ms, for_tokens_ms = usage.texts.wait_ms(choices, texts), usage.tokens.wait_ms(1, tokens)
        if for_texts_ms > for_tokens_ms:
            message = f"client {client.name!r} may ask for {texts} texts a minute"
            raise ResourceExhausted("CLIENT_REQUESTS", message, retry_after_ms=for_texts_ms)
        if for_tokens_ms:
            message = f"client {client.name!r} may have {tokens} tokens a minute"
            raise ResourceExhausted("CLIENT_TOKENS", message, retry_after_ms=for_tokens_ms)


@contextmanager
def admitted(quotas: Quotas | None, caller: Caller | None, choices: int) -> Iterator[Meter | None]:
    """As ``Quotas.admitted``; where callers are not told apart, or have no limits, everything is."""
    if quotas is None or caller is None:
        yield None
        return
    with quotas.admitted(caller.name, choices) as meter:
        yield meter


async def metered(
    events: AsyncGenerator[verifier_pb2.GenerationEvent], meter: Meter
) -> AsyncGenerator[verifier_pb2.GenerationEvent]:
    """The events, counted as they pass."""
    async with aclosing(events):
        async for event in events:
            meter.count(event)
            yield event
