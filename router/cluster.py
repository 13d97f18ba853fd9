"""A cluster as the process sees it that starts and stops it. All the work is the controller's.

The controller's actor is created on a Ray started here or on a running one; it creates the router and the workers.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from draftwood.config import ClusterConfig
from draftwood.errors import Unavailable
from draftwood.telemetry import get_logger
from router.controller import ControllerStatus, Progress
from router.pools import (
    CONTROLLER_ID,
    POLL_S,
    SERVERS,
    ControllerActor,
    Plan,
    cause,
    existing,
    import_ray,
    kill,
    named,
)

MAX_TEMP_DIR = 30
"""Longest temp dir: Ray's sockets below it must fit into 107 bytes."""
RAY_ANSWERS_S = 5.0
END_SLACK_S = 5.0
"""For the controller to end the actors, besides their grace."""

ProgressCallback = Callable[[Progress], None]

log = get_logger(__name__)


class Cluster:
    """The actors of one configuration, on a Ray started here or on a running one."""

    def __init__(self, config: ClusterConfig, servers: dict[str, str] | None = None) -> None:
        self._owns_ray = not config.ray.address
        if self._owns_ray:
            config = _with_fixed_ports(config)
        self._plan = Plan(config, servers or SERVERS, across_nodes=not self._owns_ray)
        self._temp_dir = ""  # of a Ray started here
        self._controller: Any = None
        self.address = ""
        """The routers' addresses, once started; several with commas, as the command line takes them."""

    async def start(self, progress: ProgressCallback = lambda _: None) -> str:
        """Creates the controller and waits for the routers; returns their ``address``. Raises ACTOR_FAILED."""
        self._connect()
        try:
            for router_id in self._plan.router_ids:
                progress(Progress("router", router_id, "starting"))
            self._controller = named(ControllerActor, self._plan, CONTROLLER_ID, num_cpus=0).remote(self._plan)
            while len((status := await self._checked_status()).routers) < len(self._plan.router_ids):
                await asyncio.sleep(POLL_S)
            self.address = ",".join(status.routers.values())
            for router_id, address in status.routers.items():
                progress(Progress("router", router_id, "ready", address))
        except BaseException:
            await self.stop(0.0)
            raise
        return self.address

    async def wait_ready(self, timeout_s: float, progress: ProgressCallback = lambda _: None) -> None:
        """Returns when every worker is ready. Raises Unavailable NOT_READY, ACTOR_FAILED."""
        deadline = time.monotonic() + timeout_s
        tell = _changes(progress)
        while True:
            status = await self._checked_status()
            for step in status.workers:
                tell(step)
            waiting = sorted(step.worker_id for step in status.workers if step.stage != "ready")
            if not waiting and len(status.workers) >= status.wanted:
                return
            if time.monotonic() >= deadline:
                raise Unavailable("NOT_READY", f"not ready after {timeout_s:g} s: {', '.join(waiting)}")
            await asyncio.sleep(POLL_S)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Ends this cluster's actors, the routers first so that requests may finish, and Ray if it was started here."""
        ray = import_ray()
        if self._controller:
            try:
                async with asyncio.timeout(2 * grace_s + END_SLACK_S):
                    await self._controller.end.remote(grace_s)
            except (TimeoutError, ray.exceptions.RayError) as error:
                log.info("cluster_not_stopped_gently", error=cause(error))
            # The controller first, or it would replace the others.
            for worker_id in (CONTROLLER_ID, *await existing(self._plan)):
                kill(self._plan, worker_id)
        self._controller = None
        ray.shutdown()
        if self._temp_dir:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    async def _checked_status(self) -> ControllerStatus:
        """Raises Unavailable ACTOR_FAILED for what cannot start."""
        ray = import_ray()
        while True:
            try:
                status: ControllerStatus = await self._controller.status.remote()
                break
            except ray.exceptions.ActorUnavailableError:  # it is being restarted
                await asyncio.sleep(POLL_S)
            except ray.exceptions.RayError as error:
                raise Unavailable("ACTOR_FAILED", f"the controller does not start: {cause(error)}") from error
        if status.error:
            raise Unavailable("ACTOR_FAILED", status.error)
        return status

    def _connect(self) -> None:
        """Raises Unavailable RAY_UNREACHABLE."""
        settings = self._plan.config.ray
        check_ray_address(settings.address)
        ray = import_ray(local=self._owns_ray)
        where = self._local_ray() if self._owns_ray else {"address": settings.address}
        try:
            ray.init(namespace=settings.namespace, log_to_driver=False, logging_level="error", **where)
        except (ConnectionError, RuntimeError) as error:
            raise Unavailable("RAY_UNREACHABLE", f"no Ray at {settings.address or 'this machine'}: {error}") from error

    def _local_ray(self) -> dict[str, Any]:
        settings = self._plan.config.ray
        options: dict[str, Any] = {
            "address": "local",
            "num_cpus": settings.num_cpus,
            "include_dashboard": False,
            "object_store_memory": settings.object_store_mib << 20,
        }
        if len(tempfile.gettempdir()) > MAX_TEMP_DIR:
            return options
        self._temp_dir = tempfile.mkdtemp(prefix="dw-")
        return options | {"_temp_dir": self._temp_dir}


def _with_fixed_ports(config: ClusterConfig) -> ClusterConfig:
    """With free ports in place of the routers' port 0, so that a restarted router is found where it was."""
    host, _, port = config.router.settings.listen.rpartition(":")
    if port != "0":
        return config
    free = f"{host}:{_free_ports(host, config.router.count)}"
    settings = config.router.settings.model_copy(update={"listen": free})
    return config.model_copy(update={"router": config.router.model_copy(update={"settings": settings})})


def _free_ports(host: str, count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with ExitStack() as probes, suppress(OSError, OverflowError):
            first = 0
            for k in range(count):
                probe = probes.enter_context(socket.socket())
                probe.bind((host, first + k))
                first = first or probe.getsockname()[1]
            return first


def _changes(progress: ProgressCallback) -> ProgressCallback:
    """Passes on what differs from the last word about the same worker."""
    last: dict[str, Progress] = {}

    def tell(step: Progress) -> None:
        if last.get(step.worker_id) != step:
            last[step.worker_id] = step
            progress(step)

    return tell


def check_ray_address(address: str) -> None:
    """Ray itself would go on trying for minutes. Raises Unavailable RAY_UNREACHABLE if nobody listens at host:port."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # "auto", or a Ray started here
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), RAY_ANSWERS_S).close()
    except OSError as error:
        raise Unavailable("RAY_UNREACHABLE", f"no Ray at {address}: {error}") from error
