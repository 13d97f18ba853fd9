"""Where the roles run: Ray places and restarts one actor a worker. The only module that imports Ray.

An actor hosts a role's gRPC server on its own event loop and starts it in its constructor, because that alone is run
again after a restart. It then tells the router (role, worker_id, address, incarnation), and goes on telling it every
few seconds: the router forgets the pools when it is restarted itself. Actor calls carry control only, never tokens.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from draftwood.config import ActorSettings, ClusterConfig, DraftSettings, RouterSettings, VerifierSettings
from draftwood.errors import Unavailable
from draftwood.telemetry import configure_logging, get_logger
from router.server import WorkerState

ROUTER_ID = "router-0"
SERVERS = {
    "router": "router.server:RouterServer",
    "verifier": "verifier_service.server:VerifierServer",
    "draft": "draft_service.server:DraftServer",
}
"""Server class of each role; imported in the actor's own process, so that the router imports no service."""
LOOPBACK = "127.0.0.1"
CONTROL_CALLS = 32
PENDING_CALLS = 256
RAY_ANSWERS_S = 5.0
REGISTER_EVERY_S = 2.0
POLL_S = 0.2
MAX_TEMP_DIR = 30
"""Longest temp dir: Ray's sockets below it must fit into 107 bytes."""

Settings = RouterSettings | VerifierSettings | DraftSettings
Stage = Literal["starting", "loading", "ready", "lost"]

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
class ActorSpec:
    """One actor to create."""

    role: str
    worker_id: str
    settings: Settings
    actor: ActorSettings
    server: str  # "module:Class"
    across_nodes: bool  # others must reach it from other machines


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one worker is."""

    role: str
    worker_id: str
    stage: Stage
    address: str = ""


ProgressCallback = Callable[[Progress], None]


class RoleActor:
    """An actor around one server."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, spec: ActorSpec, router_name: str, namespace: str
    ) -> None:
        configure_logging(spec.worker_id, json=True)
        _free_threads()
        self._spec = spec
        self._server: Any = _load(spec.server)(_settings_here(spec))
        self._address: str = await self._server.start()
        self._registering = asyncio.create_task(self._keep_registered(router_name, namespace))

    async def info(self) -> tuple[str, str, int]:
        """Address, incarnation, process id."""
        return self._address, self._server.incarnation, os.getpid()

    async def ready(self) -> None:
        """Waits until the server serves; raises what keeps it from serving."""
        await self._server.ready()

    async def register(self, role: str, worker_id: str, address: str, incarnation: str) -> None:
        """Router only."""
        self._server.register(role, worker_id, address, incarnation)

    async def workers(self) -> list[WorkerState]:
        """Router only."""
        states: list[WorkerState] = self._server.workers()
        return states

    async def stop(self, grace_s: float) -> None:
        self._registering.cancel()
        await self._server.stop(grace_s)

    async def _keep_registered(self, router_name: str, namespace: str) -> None:
        if self._spec.role == "router":
            return
        ray = import_ray()
        while True:
            try:
                router = ray.get_actor(router_name, namespace=namespace)
                words = (self._spec.role, self._spec.worker_id, self._address, self._server.incarnation)
                await router.register.remote(*words)
            except (ValueError, ray.exceptions.RayError) as error:  # no router now, or it refuses us
                log.warning("not_registered", worker_id=self._spec.worker_id, error=str(error))
            await asyncio.sleep(REGISTER_EVERY_S)


class Cluster:
    """The actors of one configuration, on a Ray started here or on a running one."""

    def __init__(self, config: ClusterConfig, servers: dict[str, str] | None = None) -> None:
        self._config = config
        self._servers = servers or SERVERS
        self._owns_ray = False
        self._temp_dir = ""  # of a Ray started here
        self._actors: dict[str, Any] = {}  # by worker_id
        self._specs: dict[str, ActorSpec] = {}
        self.address = ""
        """The router's address, once started."""

    async def start(self, progress: ProgressCallback = lambda _: None) -> str:
        """Creates the router, then the workers; returns the router's address. Raises Unavailable ACTOR_FAILED."""
        self._connect()
        self._specs = {spec.worker_id: spec for spec in self._plan()}
        try:
            for spec in self._specs.values():
                progress(Progress(spec.role, spec.worker_id, "starting"))
                self._actors[spec.worker_id] = self._create(spec)
                if spec.role == "router":
                    self.address = (await self._info(spec))[0]
                    progress(Progress(spec.role, spec.worker_id, "ready", self.address))
        except BaseException:
            await self.stop(0.0)
            raise
        return self.address

    async def wait_ready(self, timeout_s: float, progress: ProgressCallback = lambda _: None) -> None:
        """Returns when every worker is ready. Raises Unavailable NOT_READY, ACTOR_FAILED."""
        deadline = time.monotonic() + timeout_s
        starting = [spec for spec in self._specs.values() if spec.role != "router"]
        tell = _changes(progress)
        births = [asyncio.create_task(self._born(spec)) for spec in starting]
        try:
            while waiting := await self._report(starting, tell):
                self._raise_failed(births)
                if time.monotonic() >= deadline:
                    raise Unavailable("NOT_READY", f"not ready after {timeout_s:g} s: {', '.join(sorted(waiting))}")
                await asyncio.sleep(POLL_S)
        finally:
            for birth in births:
                birth.cancel()
            await asyncio.gather(*births, return_exceptions=True)

    async def workers(self) -> dict[str, WorkerState]:
        """The workers that have registered with the router, by worker_id."""
        return {state.worker_id: state for state in await self._actors[ROUTER_ID].workers.remote()}

    async def info(self, worker_id: str) -> tuple[str, str, int]:
        """Address, incarnation and process id of one actor."""
        return await self._info(self._specs[worker_id])

    async def stop(self, grace_s: float = 1.0) -> None:
        """Ends this cluster's actors, the router first so that requests may finish, and Ray if it was started here."""
        router = self._actors.pop(ROUTER_ID, None)
        if router:
            await self._end(router, grace_s)
        await asyncio.gather(*(self._end(actor, grace_s) for actor in self._actors.values()))
        self._actors.clear()
        import_ray().shutdown()
        if self._temp_dir:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _connect(self) -> None:
        """Raises Unavailable RAY_UNREACHABLE."""
        settings = self._config.ray
        self._owns_ray = not settings.address
        check_ray_address(settings.address)
        ray = import_ray(local=self._owns_ray)
        where = self._local_ray() if self._owns_ray else {"address": settings.address}
        try:
            ray.init(namespace=settings.namespace, log_to_driver=False, logging_level="error", **where)
        except (ConnectionError, RuntimeError) as error:
            raise Unavailable("RAY_UNREACHABLE", f"no Ray at {settings.address or 'this machine'}: {error}") from error

    def _local_ray(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "address": "local",
            "num_cpus": self._config.ray.num_cpus,
            "include_dashboard": False,
            "object_store_memory": self._config.ray.object_store_mib << 20,
        }
        if len(tempfile.gettempdir()) > MAX_TEMP_DIR:
            return options
        self._temp_dir = tempfile.mkdtemp(prefix="dw-")
        return options | {"_temp_dir": self._temp_dir}

    def _plan(self) -> Iterator[ActorSpec]:
        config = self._config
        settings = config.router.settings
        if self._owns_ray:
            settings = settings.model_copy(update={"listen": _fixed_port(settings.listen)})
        yield self._spec("router", 0, settings, config.router.actor)
        numbers = {"verifier": iter(range(10**6)), "draft": iter(range(10**6))}
        for role, pools in (("verifier", config.verifiers), ("draft", config.drafts)):
            for pool in pools:
                for _ in range(pool.count):
                    yield self._spec(role, next(numbers[role]), pool.settings, pool.actor)

    def _spec(self, role: str, number: int, settings: Settings, actor: ActorSettings) -> ActorSpec:
        return ActorSpec(role, f"{role}-{number}", settings, actor, self._servers[role], not self._owns_ray)

    def _create(self, spec: ActorSpec) -> Any:
        ray = import_ray()
        place = spec.actor
        options: dict[str, Any] = {
            "name": self._name(spec.worker_id),
            "namespace": self._config.ray.namespace,
            "max_restarts": -1,
            "max_concurrency": CONTROL_CALLS,
            "max_pending_calls": PENDING_CALLS,
            "num_cpus": place.num_cpus,
            "num_gpus": place.num_gpus,
            "resources": place.resources,
        }
        if place.label_selector:
            options["label_selector"] = place.label_selector
        if not self._owns_ray:
            options |= {"lifetime": "detached", "get_if_exists": True}
        actor = ray.remote(RoleActor).options(**options)
        return actor.remote(spec, self._name(ROUTER_ID), self._config.ray.namespace)

    def _name(self, worker_id: str) -> str:
        return f"{self._config.name}-{worker_id}"

    async def _info(self, spec: ActorSpec) -> tuple[str, str, int]:
        """Waits for the actor's constructor. Raises Unavailable ACTOR_FAILED."""
        told: tuple[str, str, int] = await self._control(spec, "info")
        return told

    async def _born(self, spec: ActorSpec) -> None:
        """Waits until the actor serves, over restarts. Raises Unavailable ACTOR_FAILED."""
        await self._control(spec, "ready")

    async def _control(self, spec: ActorSpec, method: str) -> Any:
        ray = import_ray()
        while True:
            try:
                return await getattr(self._actors[spec.worker_id], method).remote()
            except ray.exceptions.ActorUnavailableError:  # it is being restarted
                await asyncio.sleep(POLL_S)
            except ray.exceptions.RayError as error:
                raise Unavailable("ACTOR_FAILED", f"{spec.worker_id} does not start: {_cause(error)}") from error

    async def _report(self, specs: list[ActorSpec], progress: ProgressCallback) -> set[str]:
        """Tells how far the workers are; returns who is not ready."""
        known = await self.workers()
        steps = [_progress(spec, known.get(spec.worker_id)) for spec in specs]
        for step in steps:
            progress(step)
        return {step.worker_id for step in steps if step.stage != "ready"}

    def _raise_failed(self, births: list[asyncio.Task[None]]) -> None:
        for birth in births:
            if birth.done() and (error := birth.exception()):
                raise error

    async def _end(self, actor: Any, grace_s: float) -> None:
        ray = import_ray()
        try:
            async with asyncio.timeout(grace_s + 1.0):
                await actor.stop.remote(grace_s)
        except (TimeoutError, ray.exceptions.RayError) as error:
            log.info("actor_not_stopped_gently", error=_cause(error))
        ray.kill(actor, no_restart=True)


def check_ray_address(address: str) -> None:
    """Ray itself would go on trying for minutes. Raises Unavailable RAY_UNREACHABLE if nobody listens at host:port."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # "auto", or a Ray started here
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), RAY_ANSWERS_S).close()
    except OSError as error:
        raise Unavailable("RAY_UNREACHABLE", f"no Ray at {address}: {error}") from error


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
    if host != LOOPBACK or not spec.across_nodes:
        return spec.settings
    ip = import_ray().util.get_node_ip_address()
    return spec.settings.model_copy(update={"listen": f"{ip}:{port}"})


def _fixed_port(listen: str) -> str:
    """The address with a free port in place of 0, so that a restarted router is found where it was."""
    host, _, port = listen.rpartition(":")
    if port != "0":
        return listen
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def _changes(progress: ProgressCallback) -> ProgressCallback:
    """Passes on what differs from the last word about the same worker."""
    last: dict[str, Progress] = {}

    def tell(step: Progress) -> None:
        if last.get(step.worker_id) != step:
            last[step.worker_id] = step
            progress(step)

    return tell


def _progress(spec: ActorSpec, state: WorkerState | None) -> Progress:
    begun = Progress(spec.role, spec.worker_id, "starting")
    if state is None:
        return begun
    stages: dict[str, Stage] = {"STARTING": "loading", "READY": "ready", "LOST": "lost", "DRAINING": "lost"}
    return replace(begun, stage=stages[state.health], address=state.address)


def _cause(error: BaseException) -> str:
    """The last line of an error, which in Ray's is the original exception."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
