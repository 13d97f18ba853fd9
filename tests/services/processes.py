"""The services as processes of their own, to be killed, stopped and continued; and sessions that must not notice.

Processes are forked from one that has imported everything already, so that a killed service is back within a second
or two and not after the time that torch takes to load. Each runs its module as ``python -m`` would.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from draftwood.client import Chunk, ClusterState, DraftwoodClient, Finished
from draftwood.errors import DraftwoodError, Unavailable

MODULES = {"verifier": "verifier_service", "draft": "draft_service", "router": "router"}
PRELOADED = ["tests.services.preloaded"]
START_TIMEOUT_S = 60.0
AGAIN_S = 0.1


def run_service(role: str, environment: Mapping[str, str], log: str) -> None:
    """What a forked process does: the role's program, with its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    sys.argv = [MODULES[role]]
    runpy.run_module(MODULES[role], run_name="__main__", alter_sys=True)


@dataclass
class Service:
    """One service on its port, over all the processes that it runs in, one after the other."""

    role: str
    address: str
    environment: dict[str, str]
    log: Path
    process: BaseProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


class Processes:
    """Starts services and ends them. Settings are given by environment variables, as to any process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # the services would set it, but torch is loaded by then
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self.services: list[Service] = []

    def start(self, role: str, **settings: Any) -> Service:
        """Returns at once; see ``settled_at``."""
        address = f"127.0.0.1:{free_port()}"
        values = {"listen": address, **settings}
        environment = {f"DRAFTWOOD_{role.upper()}_{name.upper()}": _text(value) for name, value in values.items()}
        log = self._folder / f"{role}-{len(self.services)}.log"
        service = Service(role, address, environment, log, self._run(role, environment, log))
        self.services.append(service)
        return service

    def restart(self, service: Service) -> None:
        """Another process in place of one that has ended."""
        assert not service.process.is_alive()
        service.process = self._run(service.role, service.environment, service.log)

    def kill(self, service: Service) -> None:
        """SIGKILL; returns when the process is gone."""
        service.process.kill()
        service.process.join()

    async def ended(self, service: Service, timeout_s: float = 40.0) -> int | None:
        """Waits for a process that was told to end; its exit code."""
        await asyncio.to_thread(service.process.join, timeout_s)
        return service.process.exitcode

    def end(self) -> None:
        for service in self.services:
            with suppress(ProcessLookupError):
                os.kill(service.pid, signal.SIGCONT)
            service.process.kill()
            service.process.join()

    def _run(self, role: str, environment: dict[str, str], log: Path) -> BaseProcess:
        process = self._context.Process(target=run_service, args=(role, environment, str(log)), daemon=True)
        process.start()
        return process


@contextmanager
def stopped(service: Service) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end: the process hangs, its connections stay open."""
    os.kill(service.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service.pid, signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(f'"{each}"' for each in value) + "]"
    return str(value)


async def status_at(router: str) -> ClusterState | None:
    """None if it does not answer."""
    async with DraftwoodClient(router) as client:
        with suppress(DraftwoodError):
            return await client.status()
    return None


async def settled_at(*routers: str) -> None:
    """Until the router at each address says that all its workers are ready."""
    async with asyncio.timeout(START_TIMEOUT_S):
        for router in routers:
            while not ((state := await status_at(router)) and all_ready(state)):
                await asyncio.sleep(0.05)


def all_ready(state: ClusterState) -> bool:
    workers = [*state.verifiers, *state.drafts]
    return bool(workers) and all(worker.health == "ready" for worker in workers)


class Refused(Exception):
    """Nobody can begin the text now; ``again_s`` is when to ask again."""

    def __init__(self, again_s: float) -> None:
        super().__init__(f"again in {again_s} s")
        self.again_s = again_s


@dataclass
class Sessions:
    """Clients without end: each asks for its text again and again and compares it with the target's own."""

    client: DraftwoodClient
    count: int = 16
    tokens: int = 120
    texts: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: int = 0  # new texts that nobody could begin
    arrivals: list[list[tuple[float, float]]] = field(default_factory=list)  # by session: awaited since, there at
    _expected: list[list[int]] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """The target's texts first, without drafts; then the sessions run until ``stop``."""
        self.arrivals = [[] for _ in range(self.count)]
        self._expected = await asyncio.gather(*(self.text(k, speculate=False) for k in range(self.count)))
        self._tasks = [asyncio.create_task(self._repeat(k)) for k in range(self.count)]

    async def stop(self) -> None:
        """Each session finishes the text that it has begun."""
        self.count = 0
        await asyncio.gather(*self._tasks)

    async def some_texts(self, each: int = 1) -> None:
        goal = self.texts + each * len(self._tasks)
        async with asyncio.timeout(START_TIMEOUT_S):
            while self.texts < goal:
                await asyncio.sleep(0.02)

    def gaps(self, since: float, until: float) -> list[float]:
        """By session, the longest wait for a chunk, a text's first too, that lies in part between the moments."""
        found = []
        for chunks in self.arrivals:
            spans = [at - before for before, at in chunks if at >= since and before <= until]
            if spans:
                found.append(max(spans))
        return found

    async def _repeat(self, k: int) -> None:
        while self.count:
            try:
                if (answer := await self.text(k, speculate=True)) != self._expected[k]:
                    self.wrong.append(f"session {k}: {answer} and not {self._expected[k]}")
            except Refused as refusal:
                self.refused += 1
                await asyncio.sleep(refusal.again_s)
                continue
            except Exception as error:
                self.wrong.append(f"session {k}: {error!r}")
            self.texts += 1

    async def text(self, k: int, *, speculate: bool) -> list[int]:
        """Every other one greedy; a prompt and a seed of its own. Raises Refused if it did not begin for now."""
        options: dict[str, Any] = {"max_tokens": self.tokens, "seed": k, "temperature": 0.8 * (k % 2)}
        tokens: list[int] = []
        before, begun = time.monotonic(), False
        try:
            async for event in self.client.generate(f"count {k} {k}", speculate=speculate, ignore_eos=True, **options):
                begun = True
                if isinstance(event, Chunk):
                    now = time.monotonic()
                    self.arrivals[k].append((before, now))
                    before = now
                    tokens += event.tokens
                elif isinstance(event, Finished):
                    assert event.usage.completion_tokens == len(tokens), "usage is what was delivered"
        except Unavailable as error:
            if begun:
                raise
            raise Refused(error.retry_after_ms / 1e3 or AGAIN_S) from error
        return tokens
