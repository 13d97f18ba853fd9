"""One thread that drives a core: it runs commands, and steps whenever the core says that a step is due.

The core is made and touched by this thread alone. That is not only for safety: OpenMP keeps a team of threads for each
thread that starts a parallel region, and with two teams on two cores neither spins, which makes small matrix products a
quarter slower. Forwards release the interpreter lock, so the event loop beside it goes on.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from draftwood.telemetry import get_logger

log = get_logger(__name__)

SWITCH_INTERVAL_S = 5e-4
"""How long this thread may hold the interpreter while a message waits; Python's default is 5 ms."""

MOST_COMMAND_S = 0.02
"""Commands run for so long at most before a step that is due gets its turn."""

Out_co = TypeVar("Out_co", covariant=True)
Out = TypeVar("Out")
T = TypeVar("T")


class Core(Protocol[Out_co]):
    """What a worker drives."""

    def due(self) -> float | None:
        """Time (``time.monotonic``) of the next step; None: only a command can make one due."""

    def step(self) -> Out_co:
        """One unit of work."""

    def crash(self, error: Exception) -> Out_co:
        """Cleans up after ``step`` has raised, so that the next one works."""


class Worker(Generic[Out]):
    """Runs a core in a thread and hands each step's outcome to ``publish``, on that thread."""

    def __init__(self, name: str, publish: Callable[[Out], None]) -> None:
        self._name = name
        self._publish = publish
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.idle_s = 0.0  # time spent waiting, for the load report

    def start(self, load: Callable[[], T], core: Callable[[T], Core[Out]]) -> Future[T]:
        """Starts the thread, which runs ``load`` and then drives the core that is part of what it returns.

        The future gets what ``load`` returns or raises; after an exception the thread is over.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loaded: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(load, core, loaded), name=self._name, daemon=True)
        self._thread.start()
        return loaded

    def stop(self) -> None:
        """Ends the thread after the load or step that is running; commands behind this one are not run."""
        if self._thread:
            self._inbox.put(None)
            self._thread.join()

    def post(self, command: Callable[[], None]) -> None:
        """Runs ``command`` on the thread, in order; it must not raise."""
        self._inbox.put(command)

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Runs ``command`` on the thread, in order, and returns its result or exception."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def _run(self, load: Callable[[], T], core_of: Callable[[T], Core[Out]], loaded: Future[T]) -> None:
        try:
            result = load()
            core = core_of(result)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(result)
        while self._run_commands(core):
            due = core.due()
            if due is not None and due <= time.monotonic():
                self._publish(_step(core))

    def _run_commands(self, core: Core[Out]) -> bool:
        """Waits for a command or for the next step, runs what is there for a while; False: stop."""
        due = core.due()
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        began = time.monotonic()
        try:
            command = self._inbox.get(timeout=wait_s) if wait_s != 0 else self._inbox.get_nowait()
            heard = time.monotonic()
            self.idle_s += heard - began
            while command is not None:
                command()
                if time.monotonic() - heard > MOST_COMMAND_S:
                    return True
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False


def _step(core: Core[Out]) -> Out:
    try:
        return core.step()
    except Exception as error:
        log.exception("step failed")
        return core.crash(error)
