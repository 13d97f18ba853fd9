"""Verifiers and draft workers that follow a script, as real gRPC servers: doubles for tests of the router.

The scripted target writes ``scripted_token(seed, position)``: like the real one, its text depends on the seed and
the absolute position only. With a draft attached it commits three tokens a step (two accepted), else one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from draftwood.config import DraftSettings, VerifierSettings
from draftwood.errors import DraftwoodError, NotFound, PermissionDenied
from draftwood.rpc.access import server_access
from draftwood.rpc.server import RpcServer
from draftwood.v1 import draft_pb2, verifier_pb2
from draftwood.wire import error_to_proto

LOAD_INTERVAL_S = 0.05
LAST_WORDS_S = 0.2
"""For streams that are ending by themselves when a server stops; load streams never do."""
UNSEEDED = 7
IDLE_SHARE = 0.3
"""A draft worker's: as busy as one should be, so that an autoscaler wants as many as there are."""


def scripted_token(seed: int, position: int) -> int:
    return (seed * 31 + position * position * 7 + 3) % 997


def scripted_text(seed: int, count: int) -> list[int]:
    return [scripted_token(seed, position) for position in range(count)]


@dataclass
class VerifierScript:
    """How a scripted verifier behaves; may be changed while it runs."""

    step_s: float = 0.0
    die_at: int | None = None  # stops its server when so many tokens are out
    hang_at: int | None = None  # falls silent at this token, without ending the stream
    repeat_from: int | None = None  # a resumed generation starts again at this offset
    verdict: DraftwoodError | None = None
    verdict_at: int = 0
    draining: bool = False
    silent: bool = False  # sends no more load reports
    max_sessions: int = 8
    policy_error: DraftwoodError | None = None  # what it answers to a policy
    hang_policy: bool = False  # never answers one


@dataclass
class VerifierLog:
    requests: list[verifier_pb2.VerifierServiceGenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    policies: list[verifier_pb2.VerifierServiceSetPolicyRequest] = field(default_factory=list)


class ScriptedVerifier:
    """Also fits the verifier's place in a cluster: same constructor, ``start``, ``stop``, ``incarnation``."""

    def __init__(self, settings: VerifierSettings | None = None, **script: Any) -> None:
        self.settings = settings or VerifierSettings(name="scripted")
        self.script = VerifierScript(**script)
        self.log = VerifierLog()
        self.incarnation = uuid.uuid4().hex
        self.address = ""
        self.joined: dict[str, int] = {}  # drafts attached, by session
        self._running = 0
        self._rpc = RpcServer(access=server_access(self.settings))
        self._rpc.add(verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"], self)

    async def start(self) -> str:
        self.address = await self._rpc.start(self.settings.listen)
        await self._rpc.set_serving(self.settings.model != "missing")
        return self.address

    async def ready(self) -> None:
        if self.settings.model == "missing":
            raise NotFound("MODEL_UNKNOWN", "there is no model 'missing'")

    async def stop(self, grace_s: float = 0.0) -> None:
        """Like the real one: no new requests, running ones have the grace."""
        self.script.draining = True
        end = time.monotonic() + grace_s
        while self._running and time.monotonic() < end:
            await asyncio.sleep(LOAD_INTERVAL_S)
        await self._rpc.stop(min(grace_s, LAST_WORDS_S))

    async def set_serving(self, serving: bool) -> None:
        await self._rpc.set_serving(serving)

    async def Generate(
        self, request: verifier_pb2.VerifierServiceGenerateRequest, context: Any
    ) -> AsyncIterator[verifier_pb2.VerifierServiceGenerateResponse]:
        self.log.requests.append(request)
        self.log.deadlines.append(context.time_remaining())
        self._running += 1
        try:
            async for event in self._events(request):
                yield verifier_pb2.VerifierServiceGenerateResponse(event=event)
        except (asyncio.CancelledError, GeneratorExit):
            self.log.cancelled.append(request.session_id)
            raise
        finally:
            self._running -= 1

    async def SetPolicy(
        self, request: verifier_pb2.VerifierServiceSetPolicyRequest, context: Any
    ) -> verifier_pb2.VerifierServiceSetPolicyResponse:
        self.log.policies.append(request)
        while self.script.hang_policy:
            await asyncio.sleep(LOAD_INTERVAL_S)
        if self.script.policy_error:
            raise self.script.policy_error
        return verifier_pb2.VerifierServiceSetPolicyResponse()

    async def _events(
        self, request: verifier_pb2.VerifierServiceGenerateRequest
    ) -> AsyncIterator[verifier_pb2.GenerationEvent]:
        generation = request.generation
        seed = generation.sampling.seed if generation.sampling.HasField("seed") else UNSEEDED
        prompt = len(generation.token_ids.ids) or len(generation.text.split()) or 1
        started = verifier_pb2.Started(
            session_id=request.session_id, model=self.settings.name, seed=seed, prompt_tokens=prompt
        )
        yield verifier_pb2.GenerationEvent(started=started)
        position, steps = len(generation.resume_tokens), 0
        if position and self.script.repeat_from is not None:
            position = self.script.repeat_from
        while position < generation.max_tokens:
            await self._before(position)
            if self.script.verdict and position >= self.script.verdict_at:
                yield verifier_pb2.GenerationEvent(error=error_to_proto(self.script.verdict))
                raise self.script.verdict
            count = min(3 if self.joined.get(request.session_id) else 1, generation.max_tokens - position)
            tokens = [scripted_token(seed, position + i) for i in range(count)]
            pieces = [f"{token} " for token in tokens]
            chunk = verifier_pb2.Chunk(offset=position, tokens=tokens, pieces=pieces, accepted=count - 1)
            if generation.sampling.logprobs:
                chunk.logprobs.extend(verifier_pb2.TokenLogprobs(logprob=-0.5) for _ in tokens)
            yield verifier_pb2.GenerationEvent(chunk=chunk)
            position, steps = position + count, steps + 1
        await self._fail(position)
        usage = verifier_pb2.Usage(prompt_tokens=prompt, completion_tokens=position, steps=steps, total_s=0.1)
        finished = verifier_pb2.Finished(reason=verifier_pb2.FINISH_REASON_LENGTH, usage=usage)
        yield verifier_pb2.GenerationEvent(finished=finished)

    async def _before(self, position: int) -> None:
        await asyncio.sleep(self.script.step_s)
        await self._fail(position)

    async def _fail(self, position: int) -> None:
        if self.script.die_at is not None and position >= self.script.die_at:
            dying = asyncio.create_task(self.stop())
            await asyncio.sleep(30)
            del dying
        if self.script.hang_at is not None and position >= self.script.hang_at:
            await asyncio.sleep(30)

    async def Speculate(self, requests: Any, context: Any) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        raise PermissionDenied("SCRIPTED", "a scripted verifier has no speculation stream")
        yield

    async def GetModelInfo(self, request: Any, context: Any) -> verifier_pb2.VerifierServiceGetModelInfoResponse:
        model = verifier_pb2.ModelInfo(name=self.settings.name, incarnation=self.incarnation, device="cpu")
        return verifier_pb2.VerifierServiceGetModelInfoResponse(model=model)

    async def WatchLoad(
        self, request: Any, context: Any
    ) -> AsyncIterator[verifier_pb2.VerifierServiceWatchLoadResponse]:
        while True:
            yield verifier_pb2.VerifierServiceWatchLoadResponse(
                incarnation=self.incarnation,
                running=self._running,
                max_sessions=self.script.max_sessions,
                draining=self.script.draining,
            )
            await asyncio.sleep(LOAD_INTERVAL_S)
            while self.script.silent:
                await asyncio.sleep(LOAD_INTERVAL_S)


class SlowVerifier(ScriptedVerifier):
    """One whose texts take their time: for clusters whose scripts cannot be changed from outside."""

    def __init__(self, settings: VerifierSettings) -> None:
        super().__init__(settings, step_s=0.05)


@dataclass
class DraftScript:
    hang: bool = False  # never answers Attach
    hang_up: bool = False  # does not answer Detach
    refusal: DraftwoodError | None = None
    max_sessions: int = 8
    draining: bool = False


class ScriptedDraft:
    """A draft worker that tells its scripted verifiers of the sessions it joins, by their address."""

    verifiers: dict[str, ScriptedVerifier]

    def __init__(
        self, settings: DraftSettings | None = None, verifiers: list[ScriptedVerifier] | None = None, **script: Any
    ) -> None:
        self.settings = settings or DraftSettings(kind="ngram")
        self.script = DraftScript(**script)
        self.incarnation = uuid.uuid4().hex
        self.address = ""
        self.verifiers = {verifier.address: verifier for verifier in verifiers or []}
        self.attached: dict[str, draft_pb2.AttachRequest] = {}
        self.history: list[draft_pb2.AttachRequest] = []
        self.leaving: list[str] = []  # told to be detached
        self.detached: list[str] = []
        self._rpc = RpcServer(access=server_access(self.settings))
        self._rpc.add(draft_pb2.DESCRIPTOR.services_by_name["DraftService"], self)

    async def start(self) -> str:
        self.address = await self._rpc.start(self.settings.listen)
        await self._rpc.set_serving(self.settings.model != "missing")
        return self.address

    async def ready(self) -> None:
        if self.settings.model == "missing":
            raise NotFound("MODEL_UNKNOWN", "there is no model 'missing'")

    async def stop(self, grace_s: float = 0.0) -> None:
        self.script.draining = True
        await self._rpc.stop(min(grace_s, LAST_WORDS_S))

    async def Attach(self, request: draft_pb2.AttachRequest, context: Any) -> draft_pb2.AttachResponse:
        if self.script.hang:
            await asyncio.sleep(30)
        if self.script.refusal:
            raise self.script.refusal
        self.attached[request.session_id] = request
        self.history.append(request)
        if verifier := self.verifiers.get(request.verifier_address):
            verifier.joined[request.session_id] = verifier.joined.get(request.session_id, 0) + 1
        return draft_pb2.AttachResponse()

    async def Detach(self, request: draft_pb2.DetachRequest, context: Any) -> draft_pb2.DetachResponse:
        self.leaving.append(request.session_id)
        while self.script.hang_up:
            await asyncio.sleep(LOAD_INTERVAL_S)
        self.attached.pop(request.session_id, None)
        self.detached.append(request.session_id)
        return draft_pb2.DetachResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetModelInfoResponse:
        draft = draft_pb2.DraftInfo(kind=self.settings.kind, incarnation=self.incarnation)
        return draft_pb2.DraftServiceGetModelInfoResponse(draft=draft)

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[draft_pb2.DraftServiceWatchLoadResponse]:
        while True:
            yield draft_pb2.DraftServiceWatchLoadResponse(
                incarnation=self.incarnation,
                sessions=len(self.attached),
                idle_share=IDLE_SHARE,
                max_sessions=self.script.max_sessions,
                draining=self.script.draining,
            )
            await asyncio.sleep(LOAD_INTERVAL_S)
