"""The draft worker's gRPC server: the router says where to join, the rest happens on the streams to verifiers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from draft_service.core import DraftCore, Outcome
from draft_service.drafter import Drafter
from draft_service.drafters.merged import MergedDrafter
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafters.suffix import SuffixDrafter
from draft_service.link import RULES, VerifierLink
from draftwood.config import HEAD_KINDS, DraftSettings
from draftwood.errors import ResourceExhausted, Unavailable
from draftwood.rpc.access import server_access, tls_files
from draftwood.rpc.channel import Dialer
from draftwood.rpc.server import RpcServer
from draftwood.rpc.tracing import start_tracing
from draftwood.runtime.worker import Worker
from draftwood.telemetry import METRICS, get_logger, serve_metrics
from draftwood.v1 import draft_pb2
from draftwood.wire import feature_request_to_proto, tokenizer_to_proto

log = get_logger(__name__)

LAST_WORDS_S = 0.5
"""For calls that are ending by themselves when the server stops; load streams never do."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that exists once the drafter is there."""

    core: DraftCore
    info: draft_pb2.DraftInfo


class DraftServer:
    """One draft worker process."""

    def __init__(self, settings: DraftSettings) -> None:
        self.settings = settings
        self.incarnation = uuid.uuid4().hex
        self.failure: BaseException | None = None
        self.draining = False
        self._rpc = RpcServer(access=server_access(settings))
        self._dialer = Dialer(tls_files(settings))
        self._rpc.add(draft_pb2.DESCRIPTOR.services_by_name["DraftService"], self)
        self._worker: Worker[Outcome] = Worker("drafter", self._publish)
        self._loaded: Loaded | None = None
        self._links: dict[str, VerifierLink] = {}
        self._link_count = 0
        self._loading: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> str:
        """Binds the port and returns host:port; the drafter loads behind it, health turns SERVING when it is warm."""
        self._loop = asyncio.get_running_loop()
        serve_metrics(self.settings.metrics_host, self.settings.metrics_port)
        start_tracing("draft", self.settings.traces)
        METRICS.draft_sessions.set_function(lambda: self._sessions)
        METRICS.draft_idle_seconds.set_function(self._idle_s)
        address = await self._rpc.start(self.settings.listen)
        self._loading = asyncio.create_task(self._load())
        return address

    async def ready(self) -> None:
        """Waits until the drafter works; raises what made it fail."""
        assert self._loading is not None
        await asyncio.shield(self._loading)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Leaves all sessions: the verifiers go on without."""
        self.draining = True
        for link in self._links.values():
            link.close()
        tasks = [link.task for link in self._links.values()]
        if tasks:
            _, hanging = await asyncio.wait(tasks, timeout=grace_s)
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
        if self._loading is not None:
            self._loading.cancel()
        await self._rpc.stop(min(grace_s, LAST_WORDS_S))
        await asyncio.to_thread(self._worker.stop)

    async def _load(self) -> None:
        try:
            core = await asyncio.wrap_future(self._worker.start(self._make_core, lambda made: made))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = error
            log.exception("the drafter cannot be loaded", kind=self.settings.kind, model=self.settings.model)
            raise
        self._loaded = Loaded(core, self._describe(core.drafter))
        METRICS.draft_nodes.set_function(lambda: core.nodes_drafted)
        await self._rpc.set_serving(True)
        log.info("serving", kind=core.drafter.kind, model=core.drafter.model)

    def _make_core(self) -> DraftCore:
        """Loads the drafter; runs on its thread."""
        return DraftCore(make_drafter(self.settings))

    def _describe(self, drafter: Drafter) -> draft_pb2.DraftInfo:
        settings = self.settings
        caps = draft_pb2.Caps(max_nodes=settings.max_nodes, max_sessions=settings.max_sessions)
        info = draft_pb2.DraftInfo(kind=drafter.kind, model=drafter.model, incarnation=self.incarnation, caps=caps)
        info.rules.extend(number for number, rule in RULES.items() if rule in drafter.rules)
        if drafter.features is not None:
            info.features.CopyFrom(feature_request_to_proto(drafter.features))
        if drafter.vocabulary is not None:
            info.tokenizer.CopyFrom(tokenizer_to_proto(drafter.vocabulary.fingerprint()))
        return info

    @property
    def loaded(self) -> Loaded:
        """The drafter; raises Unavailable LOADING or DRAINING when it takes no sessions."""
        if self.draining:
            raise Unavailable("DRAINING", "this draft worker is shutting down", retry_after_ms=1000)
        if self._loaded is None:
            raise Unavailable("LOADING", f"drafter {self.settings.kind!r} is still loading", retry_after_ms=1000)
        return self._loaded

    # --- from the drafter's thread ---

    def _publish(self, outcome: Outcome) -> None:
        if outcome.growths or outcome.leaves:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._dispatch, outcome)

    def _dispatch(self, outcome: Outcome) -> None:
        for link in self._links.values():
            growths, leaves = outcome.growths.get(link.link_id, []), outcome.leaves.get(link.link_id, [])
            if growths or leaves:
                link.tell(growths, leaves)

    @property
    def _sessions(self) -> int:
        """Sessions that we are attached to, or about to be."""
        return sum(link.sessions for link in self._links.values())

    # --- DraftService ---

    async def Attach(self, request: draft_pb2.AttachRequest, context: Any) -> draft_pb2.AttachResponse:
        loaded = self.loaded
        if self._sessions >= self.settings.max_sessions:
            message = f"{self._sessions} sessions are attached, the limit is {self.settings.max_sessions}"
            raise ResourceExhausted("SESSIONS_FULL", message, retry_after_ms=1000)
        await self._link(request.verifier_address, loaded).attach(request.session_id, request.ticket)
        log.info("session attached", session=request.session_id, verifier=request.verifier_address)
        return draft_pb2.AttachResponse()

    def _link(self, address: str, loaded: Loaded) -> VerifierLink:
        link = self._links.get(address)
        if link is None or link.task.done():  # whoever drained may have been restarted
            self._link_count += 1
            link = VerifierLink(self._link_count, address, loaded.info, loaded.core, self._worker, self._dialer)
            self._links[address] = link
        elif link.draining:
            raise Unavailable("DRAINING", f"verifier {address} takes no more sessions", retry_after_ms=1000)
        return link

    async def Detach(self, request: draft_pb2.DetachRequest, context: Any) -> draft_pb2.DetachResponse:
        for link in self._links.values():
            link.detach(request.session_id)
        log.info("session detached", session=request.session_id)
        return draft_pb2.DetachResponse()

    async def GetModelInfo(
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Any
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(draft=self.loaded.info)

    async def WatchLoad(
        self, request: draft_pb2.DraftServiceWatchLoadRequest, context: Any
    ) -> AsyncGenerator[draft_pb2.DraftServiceWatchLoadResponse, None]:
        idle_before, then = self._idle_s(), time.monotonic()
        while True:
            now = time.monotonic()
            share = (self._idle_s() - idle_before) / (now - then) if now > then else 0.0
            idle_before, then = self._idle_s(), now
            yield self._load_report(min(1.0, share))
            await asyncio.sleep(self.settings.load_interval_s)

    def _idle_s(self) -> float:
        return self._worker.idle_s

    def _load_report(self, idle_share: float) -> draft_pb2.DraftServiceWatchLoadResponse:
        report = draft_pb2.DraftServiceWatchLoadResponse(
            incarnation=self.incarnation,
            max_sessions=self.settings.max_sessions,
            idle_share=idle_share,
            draining=self.draining,
        )
        if self._loaded is not None:
            core = self._loaded.core  # plain numbers: read without the thread
            report.sessions, report.nodes_drafted, report.round_ms = (
                self._sessions,
                core.nodes_drafted,
                core.round_s * 1e3,
            )
        return report


def make_drafter(settings: DraftSettings) -> Drafter:
    """Loads what the settings name; raises NotFound MODEL_UNKNOWN if there is no such model."""
    if settings.kind == "merged":
        return MergedDrafter([make_drafter(part) for part in settings.part_settings()])
    if settings.kind == "ngram":
        return NgramDrafter(settings)
    if settings.kind == "suffix":
        return SuffixDrafter(settings)
    # Not at the top: draft workers without a model run where torch is not installed.
    from draft_service.drafters.loading import load_bridged_drafter, load_head_drafter, load_lm_drafter

    if settings.kind in HEAD_KINDS:
        return load_head_drafter(settings)
    if settings.kind == "bridged":
        return load_bridged_drafter(settings)
    return load_lm_drafter(settings)
