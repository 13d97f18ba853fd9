"""What the client has got of one generation, and how the same generation is asked for again.

Everything is replayed by value: prompt, parameters and seed stay as they are, ``resume_tokens`` grows. Offsets count
the generated tokens, resumed ones included, so that a token is delivered once whichever verifier it comes from.
"""

from __future__ import annotations

import secrets
import time

from draftwood.errors import Internal
from draftwood.v1 import verifier_pb2


def seeded(generation: verifier_pb2.Generation) -> verifier_pb2.Generation:
    """A copy that names its seed: without one, a replay could not be identical."""
    copy = verifier_pb2.Generation()
    copy.CopyFrom(generation)
    if not copy.sampling.HasField("seed"):
        copy.sampling.seed = secrets.randbits(64)
    return copy


class Progress:
    """One client's generation between its verifiers."""

    def __init__(self, generation: verifier_pb2.Generation) -> None:
        self._generation = seeded(generation)
        self._started_at = time.monotonic()
        self._first_token_s = 0.0
        self._started = False
        self._chunks_before = 0  # delivered by the verifiers that were lost
        self._chunks = 0

    @property
    def tokens(self) -> int:
        """Tokens that the client has, those included that it had before it asked."""
        return len(self._generation.resume_tokens)

    @property
    def moved(self) -> bool:
        return self._chunks_before > 0

    def request(self) -> verifier_pb2.Generation:
        """The rest of the generation, as the next verifier is asked for it."""
        self._chunks_before = self._chunks
        return self._generation

    def admit(self, event: verifier_pb2.GenerationEvent) -> verifier_pb2.GenerationEvent | None:
        """The event as the client is to see it; None if it has it already. Raises Internal CHUNK_GAP."""
        kind = event.WhichOneof("event")
        if kind == "started":
            return self._admit_started(event)
        if kind == "chunk":
            return self._admit_chunk(event)
        if kind == "finished" and self.moved:
            return self._whole_usage(event)
        return event

    def _admit_started(self, event: verifier_pb2.GenerationEvent) -> verifier_pb2.GenerationEvent | None:
        first, self._started = not self._started, True
        self._generation.speculation.rule = event.started.rule  # the next verifier's default may be another
        return event if first else None

    def _admit_chunk(self, event: verifier_pb2.GenerationEvent) -> verifier_pb2.GenerationEvent | None:
        known = self.tokens - event.chunk.offset
        if known < 0:
            raise Internal("CHUNK_GAP", f"chunk at offset {event.chunk.offset}, but {self.tokens} tokens came before")
        if known >= len(event.chunk.tokens):
            return None
        rest = _without_first(event.chunk, known)
        self._generation.resume_tokens.extend(rest.tokens)
        self._chunks += 1
        self._first_token_s = self._first_token_s or time.monotonic() - self._started_at
        return verifier_pb2.GenerationEvent(chunk=rest)

    def _whole_usage(self, event: verifier_pb2.GenerationEvent) -> verifier_pb2.GenerationEvent:
        """Steps and times over all verifiers; node counts are those of the last one."""
        whole = verifier_pb2.GenerationEvent()
        whole.CopyFrom(event)
        whole.finished.usage.steps += self._chunks_before
        whole.finished.usage.first_token_s = self._first_token_s
        whole.finished.usage.total_s = time.monotonic() - self._started_at
        return whole


def _without_first(chunk: verifier_pb2.Chunk, known: int) -> verifier_pb2.Chunk:
    if not known:
        return chunk
    return verifier_pb2.Chunk(
        offset=chunk.offset + known,
        tokens=chunk.tokens[known:],
        pieces=chunk.pieces[known:],
        accepted=max(chunk.accepted - known, 0),
        logprobs=chunk.logprobs[known:],
    )
