"""Where the roles run: Ray places and restarts one actor a worker, and one controller that keeps them.

An actor hosts a role's gRPC server on its own event loop and starts it in its constructor, because that alone is run
again after a restart. It then tells every router (role, worker_id, address, incarnation), and goes on telling it every
few seconds: a router forgets the pools when it is restarted itself. Actor calls carry control only, never tokens.

All actors are named ``CLUSTER/WORKER_ID`` and detached: they live until the controller ends them, or whoever ends the
cluster. The name is all that is needed to find one.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from draftwood.config import ActorSettings, ClusterConfig, DraftSettings, RouterSettings, VerifierSettings
from draftwood.errors import DraftwoodError, Unavailable
from draftwood.rpc.serve import starting
from draftwood.telemetry import configure_logging, get_logger
from router.controller import Controller, ControllerStatus
from router.scaling import PoolLimits, PoolState
from router.state import WorkerState

CONTROLLER_ID = "controller-0"
SERVERS = {
    "router": "router.server:RouterServer",
    "verifier": "verifier_service.server:VerifierServer",
    "draft": "draft_service.server:DraftServer",
}
"""Server class of each role; imported in the actor's own process, so that the router imports no service."""
LOOPBACK = "127.0.0.1"
CONTROL_CALLS = 32
PENDING_CALLS = 256
REGISTER_EVERY_S = 2.0
POLL_S = 0.2
SOME_CPU = 0.01
"""Asked for an actor that reserves nothing: Ray brings no node for an empty request."""
STOP_SLACK_S = 1.0
"""For a server to end after its grace."""
SURER = ("DRAINING", "READY", "STARTING", "LOST")
"""What one router says of a worker's health counts before what another says that stands further back."""

Settings = RouterSettings | VerifierSettings | DraftSettings

log = get_logger(__name__)


class Server(Protocol):
    """What a role's server class offers; it is constructed with the role's settings."""

    incarnation: str

    async def start(self) -> str:
        """Binds and returns host:port."""

    async def ready(self) -> None:
        """Waits until it serves; raises what keeps it from serving."""

    async def stop(self, grace_s: float = 1.0) -> None:
        """Drains and ends."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One cluster: what runs in it, and under which names."""

    config: ClusterConfig
    servers: dict[str, str]  # "module:Class", by role
    across_nodes: bool  # workers must be reached from other machines

    @property
    def router_ids(self) -> list[str]:
        return [f"router-{k}" for k in range(self.config.router.count)]

    def name(self, worker_id: str) -> str:
        return f"{self.config.name}/{worker_id}"

    def limits(self) -> list[PoolLimits]:
        config = self.config
        roles = [("verifier", pool) for pool in config.verifiers] + [("draft", pool) for pool in config.drafts]
        return [PoolLimits(pool.name, role, pool.min, pool.max, pool.cost) for role, pool in roles]


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """One actor to create."""

    role: str
    worker_id: str
    settings: Settings
    actor: ActorSettings
    plan: Plan


class RoleActor:
    """An actor around one server."""

    async def __init__(self, spec: ActorSpec) -> None:  # type: ignore[misc]  # Ray awaits it
        configure_logging(spec.worker_id, json=True)
        _free_threads()
        self._spec = spec
        self._stopping = False
        with ExitStack() as start:
            start.enter_context(starting())
            self._server: Any = _load(spec.plan.servers[spec.role])(_settings_here(spec))
            self._address: str = await self._server.start()
            self._ready = asyncio.create_task(self._become_ready(start.pop_all()))
        self._registering = [asyncio.create_task(self._keep_registered(each)) for each in self._routers()]

    async def info(self) -> tuple[str, str, int]:
        """Address, incarnation, process id."""
        return self._address, self._server.incarnation, os.getpid()

    async def ready(self) -> None:
        """Waits until the server serves; raises what keeps it from serving."""
        await asyncio.shield(self._ready)

    async def _become_ready(self, start: ExitStack) -> None:
        with start:
            await self._server.ready()

    async def stopping(self) -> bool:
        """Whether it has been told to stop."""
        return self._stopping

    async def stop(self, grace_s: float) -> None:
        self._stopping = True
        for task in self._registering:
            task.cancel()
        await self._server.stop(grace_s)

    def _routers(self) -> list[str]:
        """Those to register with, one independently of another."""
        return self._spec.plan.router_ids

    async def _keep_registered(self, router_id: str) -> None:
        ray = import_ray()
        while True:
            try:
                router = _actor(self._spec.plan, router_id)
                words = (self._spec.role, self._spec.worker_id, self._address, self._server.incarnation)
                await router.register.remote(*words)
            except (ValueError, ray.exceptions.RayError) as error:  # no router now, or it refuses us
                log.warning("not_registered", worker_id=self._spec.worker_id, router=router_id, error=str(error))
            await asyncio.sleep(REGISTER_EVERY_S)


class RouterActor(RoleActor):
    """A router's actor; besides, it is the controller's way to the router and the router's to the controller."""

    async def __init__(self, spec: ActorSpec) -> None:  # type: ignore[misc]  # Ray awaits it
        await super().__init__(spec)
        self._server.pools.scale = self._scale

    async def register(self, role: str, worker_id: str, address: str, incarnation: str) -> None:
        self._server.register(role, worker_id, address, incarnation)

    async def workers(self) -> list[WorkerState]:
        states: list[WorkerState] = self._server.workers()
        return states

    async def drain(self, worker_id: str) -> None:
        self._server.drain(worker_id)

    async def remove(self, worker_id: str) -> None:
        self._server.remove(worker_id)

    async def publish(self, pools: tuple[PoolState, ...]) -> None:
        self._server.pools.publish(pools)

    async def published(self) -> tuple[PoolState, ...]:
        states: tuple[PoolState, ...] = self._server.pools.states
        return states

    def _routers(self) -> list[str]:
        return []  # routers know nothing of each other

    async def _scale(self, asked: Mapping[str, int]) -> Sequence[PoolState]:
        ray = import_ray()
        try:
            states: Sequence[PoolState] = await _actor(self._spec.plan, CONTROLLER_ID).scale.remote(dict(asked))
        except (ValueError, ray.exceptions.RayError) as error:
            if told := verdict(error):
                raise told from error
            message = f"the controller cannot be reached: {cause(error)}"
            raise Unavailable("NO_CONTROLLER", message, retry_after_ms=1000) from error
        return states


class ControllerActor:
    """An actor around the controller."""

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]  # Ray awaits it
        configure_logging(CONTROLLER_ID, json=True)
        config = plan.config
        counts = {pool.name: pool.count for pool in config.pools}
        self._fleet = RayFleet(plan)
        self._controller = Controller(
            plan.limits(), counts, self._fleet, config.scaling, asks_for_nodes=config.ray.autoscaler
        )
        self._running = asyncio.create_task(self._controller.run())

    async def info(self) -> int:
        """Process id."""
        return os.getpid()

    async def status(self) -> ControllerStatus:
        return self._controller.status()

    async def scale(self, asked: dict[str, int]) -> tuple[PoolState, ...]:
        if not self._controller.adopted:
            message = "the controller has just started and has not taken over yet"
            raise Unavailable("NO_CONTROLLER", message, retry_after_ms=1000)
        return self._controller.scale(asked)

    async def end(self, grace_s: float) -> None:
        """Ends all actors but this one, the routers first so that requests may finish."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._controller.stop()
        await self._fleet.end(grace_s)


class RayFleet:
    """See ``router.controller.Fleet``."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pools = {pool.name: pool for pool in plan.config.pools}
        self._roles = {limits.name: limits.role for limits in plan.limits()}

    async def actors(self) -> dict[str, bool]:
        found = {}
        for worker_id in await self.existing():
            try:
                async with asyncio.timeout(STOP_SLACK_S):  # one that starts or waits for a node does not answer
                    found[worker_id] = await self._ask(worker_id, "stopping")
            except (TimeoutError, Unavailable):
                found[worker_id] = False
        return found

    async def existing(self) -> set[str]:
        return await existing(self._plan) - {*self._plan.router_ids, CONTROLLER_ID}

    async def ensure_routers(self) -> dict[str, str]:
        section = self._plan.config.router
        for router_id, settings in zip(self._plan.router_ids, section.each(), strict=True):
            try:
                _actor(self._plan, router_id)
            except ValueError:
                create(RouterActor, ActorSpec("router", router_id, settings, section.actor, self._plan))
        return {router_id: info[0] for router_id, info in (await self._ask_routers("info")).items()}

    def create(self, pool: str, worker_id: str) -> None:
        chosen = self._pools[pool]
        create(RoleActor, ActorSpec(self._roles[pool], worker_id, chosen.settings, chosen.actor, self._plan))

    async def born(self, worker_id: str) -> None:
        ray = import_ray()
        while True:
            try:
                await _actor(self._plan, worker_id).ready.remote()
                return
            except ray.exceptions.ActorUnavailableError:  # it is being restarted
                await asyncio.sleep(POLL_S)
            except (ValueError, ray.exceptions.RayError) as error:
                raise Unavailable("ACTOR_FAILED", f"{worker_id} does not start: {cause(error)}") from error

    async def stop(self, worker_id: str, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s + STOP_SLACK_S):
                await self._ask(worker_id, "stop", grace_s)
        except TimeoutError:
            log.info("actor_not_stopped_gently", worker_id=worker_id)

    async def kill(self, worker_id: str) -> None:
        kill(self._plan, worker_id)

    async def workers(self) -> list[WorkerState]:
        return seen_by_all((await self._ask_routers("workers")).values())

    async def drain(self, worker_id: str) -> None:
        await self._ask_routers("drain", worker_id)

    async def remove(self, worker_id: str) -> None:
        await self._ask_routers("remove", worker_id)

    async def publish(self, pools: Sequence[PoolState]) -> None:
        await self._ask_routers("publish", tuple(pools))

    async def request_nodes(self, counts: Mapping[str, int]) -> None:
        places = [self._plan.config.router.actor] * self._plan.config.router.count
        places += [self._pools[name].actor for name, count in counts.items() for _ in range(count)]
        await asyncio.to_thread(_request, [bundle(place) for place in places], [p.label_selector for p in places])

    async def published(self) -> dict[str, int]:
        told = await self._ask_routers("published")
        return next(({s.limits.name: s.wanted for s in states} for states in told.values() if states), {})

    async def end(self, grace_s: float) -> None:
        """Ends the routers, then all workers; asks for no nodes any more."""
        if self._plan.config.ray.autoscaler:
            await asyncio.to_thread(_request, [], [])
        await asyncio.gather(*(self._end(router_id, grace_s) for router_id in self._plan.router_ids))
        await asyncio.gather(*(self._end(worker_id, grace_s) for worker_id in await self.existing()))

    async def _end(self, worker_id: str, grace_s: float) -> None:
        try:
            await self.stop(worker_id, grace_s)
        except DraftwoodError as error:
            log.info("actor_not_stopped_gently", worker_id=worker_id, error=str(error))
        kill(self._plan, worker_id)

    async def _ask_routers(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Answers by router, in order. Who has not answered ``STOP_SLACK_S`` after the first is left out.

        Raises Unavailable ACTOR_FAILED if none answers.
        """
        asked = {each: asyncio.create_task(self._ask(each, method, *arguments)) for each in self._plan.router_ids}
        waiting = set(asked.values())
        try:
            while waiting and not _answered(asked):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                await asyncio.wait(waiting, timeout=STOP_SLACK_S)
        finally:
            for task in asked.values():
                task.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)
        if answers := _answered(asked):
            return answers
        return {each: task.result() for each, task in asked.items()}  # raises

    async def _ask(self, worker_id: str, method: str, *arguments: Any) -> Any:
        """Raises what the actor raised of ours, else Unavailable ACTOR_FAILED."""
        ray = import_ray()
        try:
            return await getattr(_actor(self._plan, worker_id), method).remote(*arguments)
        except (ValueError, ray.exceptions.RayError) as error:
            if told := verdict(error):
                raise told from error
            raise Unavailable("ACTOR_FAILED", f"{worker_id} does not answer: {cause(error)}") from error


def _answered(asked: Mapping[str, asyncio.Task[Any]]) -> dict[str, Any]:
    done = {each: task for each, task in asked.items() if task.done() and not task.cancelled()}
    return {each: task.result() for each, task in done.items() if not task.exception()}


def seen_by_all(views: Iterable[Sequence[WorkerState]]) -> list[WorkerState]:
    """What several routers know, each worker once and with the most sessions that one tells of."""
    seen: dict[str, WorkerState] = {}
    for state in itertools.chain.from_iterable(views):
        known = seen.get(state.worker_id, state)
        best = min(known, state, key=lambda each: SURER.index(each.health))
        seen[state.worker_id] = replace(best, sessions=max(known.sessions, state.sessions))
    return list(seen.values())


def bundle(place: ActorSettings) -> dict[str, float]:
    """What a node must have for the actor, as Ray's autoscaler wants to be told; something in any case."""
    needs = {"CPU": place.num_cpus, "GPU": place.num_gpus, **place.resources}
    return {name: amount for name, amount in needs.items() if amount} or {"CPU": SOME_CPU}


def _request(bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> None:
    import_ray()
    importlib.import_module("ray.autoscaler.sdk").request_resources(bundles=bundles, bundle_label_selectors=selectors)


def create(kind: type, spec: ActorSpec) -> None:
    """Creates the actor if there is none of that name; returns at once."""
    place = spec.actor
    options: dict[str, Any] = {
        "num_cpus": place.num_cpus,
        "num_gpus": place.num_gpus,
        "resources": place.resources,
    }
    if place.label_selector:
        options["label_selector"] = place.label_selector
    named(kind, spec.plan, spec.worker_id, **options).remote(spec)


def named(kind: type, plan: Plan, worker_id: str, **options: Any) -> Any:
    """The actor class with what all our actors have in common."""
    return (
        import_ray()
        .remote(kind)
        .options(
            name=plan.name(worker_id),
            namespace=plan.config.ray.namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=CONTROL_CALLS,
            max_pending_calls=PENDING_CALLS,
            **options,
        )
    )


async def existing(plan: Plan) -> set[str]:
    """Worker ids of the cluster's actors, router and controller included."""
    names = await asyncio.to_thread(import_ray().util.list_named_actors, all_namespaces=True)
    ours, prefix = plan.config.ray.namespace, plan.name("")
    found = {actor["name"] for actor in names if actor["namespace"] == ours}
    return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}


def kill(plan: Plan, worker_id: str) -> None:
    """Ends the actor for good, if it is there."""
    try:
        actor = _actor(plan, worker_id)
    except ValueError:
        return
    import_ray().kill(actor, no_restart=True)


def _actor(plan: Plan, worker_id: str) -> Any:
    """Raises ValueError if there is none."""
    return import_ray().get_actor(plan.name(worker_id), namespace=plan.config.ray.namespace)


def verdict(error: BaseException) -> DraftwoodError | None:
    """What an actor's method raised, if it is an error of ours."""
    raised = getattr(error, "cause", None)
    return raised if isinstance(raised, DraftwoodError) else None


def import_ray(*, local: bool = False) -> Any:
    """Ray, which reads some of its environment when it is imported.

    Ray's ports run whatever code they are sent. A Ray started here gets a token of its own that only this process and
    its children know, unless the user has chosen otherwise.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if local and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return importlib.import_module("ray")


def _free_threads() -> None:
    """Takes back Ray's limit of one CPU thread for actors that reserve no CPU: the role's own ``threads`` rules.

    It is read when the role's server imports its libraries, which is later.
    """
    if os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]


def _load(path: str) -> Callable[[Settings], Server]:
    module, _, name = path.partition(":")
    server: Callable[[Settings], Server] = getattr(importlib.import_module(module), name)
    return server


def _settings_here(spec: ActorSpec) -> Settings:
    """The settings with the node's own IP in place of a loopback address that other nodes cannot reach."""
    host, _, port = spec.settings.listen.rpartition(":")
    if host != LOOPBACK or not spec.plan.across_nodes:
        return spec.settings
    ip = import_ray().util.get_node_ip_address()
    return spec.settings.model_copy(update={"listen": f"{ip}:{port}"})


def cause(error: BaseException) -> str:
    """The last line of an error, which in Ray's is the original exception."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
