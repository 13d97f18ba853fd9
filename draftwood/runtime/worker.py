"""One thread that drives a core: it runs commands, and steps whenever the core says that a step is due.

The core is touched by this thread alone. Forwards release the interpreter lock, so the event loop beside it goes on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from draftwood.telemetry import get_logger

log = get_logger(__name__)

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

    def __init__(self, name: str, core: Core[Out], publish: Callable[[Out], None]) -> None:
        self._core = core
        self._publish = publish
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.idle_s = 0.0  # time spent waiting, for the load report

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that is running; commands behind this one are not run."""
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

    def _run(self) -> None:
        while self._run_commands():
            due = self._core.due()
            if due is not None and due <= time.monotonic():
                self._publish(self._step())

    def _step(self) -> Out:
        try:
            return self._core.step()
        except Exception as error:
            log.exception("step failed")
            return self._core.crash(error)

    def _run_commands(self) -> bool:
        """Waits for a command or for the next step, runs what is there for a while; False: stop."""
        due = self._core.due()
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
