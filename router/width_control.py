"""Carries the width policy out: reads the pools' load reports, decides, tells the verifiers, and shows what it did.

A verifier is told when its caps change, when it is new, and every ``RENEW_S``, as what a router sets is a lease there.
It tells its draft workers itself, in the stream that their commits come in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from draftwood.config import WidthPolicySettings
from draftwood.rpc.status import from_rpc_error
from draftwood.telemetry import METRICS, get_logger
from draftwood.v1 import draft_pb2, verifier_pb2, verifier_pb2_grpc
from router.registry import Registry, Role, Worker, being_cancelled
from router.width_policy import Caps, Decision, DraftLook, VerifierLook, WidthPolicy

RENEW_S = 10.0
TELL_TIMEOUT_S = 2.0

log = get_logger(__name__)


@dataclass(slots=True)
class Told:
    """What a verifier was told last."""

    caps: Caps
    at_s: float


class WidthControl:
    """One router's; ``run`` is a task."""

    def __init__(
        self,
        registry: Registry,
        setter: str,
        settings: WidthPolicySettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``setter``: under which name the verifiers keep what we set."""
        self._registry = registry
        self._setter = setter
        self._settings = settings
        self._clock = clock
        self._policy = WidthPolicy(settings)
        self._told: dict[str, Told] = {}  # by incarnation
        self.decisions: dict[str, Decision] = {}
        """The last one of each verifier, by its incarnation; always this dictionary."""

    async def run(self) -> None:
        """Looks at the load until it is cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("width_policy_failed")
            await asyncio.sleep(self._settings.look_s)

    async def look(self) -> None:
        """One look, and what follows from it."""
        ready = {worker.incarnation: worker for worker in self._registry.workers(Role.VERIFIER) if worker.ready}
        looks = [look for worker in ready.values() if (look := verifier_look(worker))]
        drafts = {look.model: self._drafts(look.model) for look in looks}
        decisions = self._policy.decide(self._clock(), looks, drafts)
        self.decisions.clear()
        self.decisions.update(decisions)
        self._told = {key: told for key, told in self._told.items() if key in ready}
        for key, decision in decisions.items():
            if decision.changes:
                self._note(ready[key], decision)
        self._show()
        if self._settings.mode == "on":
            await asyncio.gather(*(self._tell(ready[key], each.caps) for key, each in decisions.items()))

    def _drafts(self, model: str) -> list[DraftLook]:
        workers = self._registry.workers(Role.DRAFT)
        return [look for worker in workers if model not in worker.unfit and (look := draft_look(worker))]

    def _note(self, worker: Worker, decision: Decision) -> None:
        told = {"caps": str(decision.caps), "before": str(decision.before), "reason": decision.reason}
        log.info("width_policy", mode=self._settings.mode, verifier=worker.address, **told, **decision.inputs)
        METRICS.policy_changes["narrower" if decision.narrows else "wider"].inc()

    def _show(self) -> None:
        caps = [each.caps for each in self.decisions.values()]
        METRICS.policy_capped["nodes"].set(sum(each.nodes is not None for each in caps))
        METRICS.policy_capped["depth"].set(sum(each.depth is not None for each in caps))
        METRICS.policy_capped["chain"].set(sum(each.chain for each in caps))
        METRICS.policy_nodes.set(min((each.nodes for each in caps if each.nodes is not None), default=0))
        for signal, gauge in METRICS.policy_pressure.items():
            gauge.set(max((each.inputs.get(signal, 0.0) for each in self.decisions.values()), default=0.0))

    async def _tell(self, worker: Worker, caps: Caps) -> None:
        """Tells a verifier, if it does not know yet or its lease must be renewed; a failure is tried again."""
        now, told = self._clock(), self._told.get(worker.incarnation)
        known = told.caps if told else Caps()  # a verifier that was never told has no caps of ours
        if caps == known and (not told or caps == Caps() or now - told.at_s < RENEW_S):
            return
        request = verifier_pb2.VerifierServiceSetPolicyRequest(policy=caps_to_proto(caps), setter=self._setter)
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(worker.channel)  # type: ignore[no-untyped-call]
        try:
            await stub.SetPolicy(request, timeout=TELL_TIMEOUT_S)
        except grpc.RpcError as error:
            log.info("policy_not_set", verifier=worker.address, error=str(from_rpc_error(error)))
        except asyncio.CancelledError:  # it has left the pool meanwhile
            if being_cancelled():
                raise
        else:
            self._told[worker.incarnation] = Told(caps, now)


def verifier_look(worker: Worker) -> VerifierLook | None:
    """None without a report."""
    load = worker.verifier_load
    if not (load and worker.model):
        return None
    return VerifierLook(
        worker.incarnation,
        worker.model.name,
        load.running,
        load.queue_wait_ms,
        load.step_ms,
        load.steps,
        load.nodes_verified,
    )


def draft_look(worker: Worker) -> DraftLook | None:
    """None without a report, or if the worker takes no sessions."""
    load = worker.draft_load
    if not (worker.ready and load and worker.draft):
        return None
    return DraftLook(worker.draft.kind, load.sessions, 1 - load.idle_share)


def caps_to_proto(caps: Caps) -> verifier_pb2.Policy:
    growth = draft_pb2.GROWTH_RULE_CHAIN if caps.chain else draft_pb2.GROWTH_RULE_UNSPECIFIED
    return verifier_pb2.Policy(max_session_nodes=caps.nodes, max_depth=caps.depth, growth=growth)
