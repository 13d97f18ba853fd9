"""The process behind ``draftwood up``: holds a cluster until SIGTERM, and says in a state file where it is.

The state file exists for as long as the router serves; whoever finds it can reach the cluster and end it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from draftwood.config import load_cluster_config
from draftwood.errors import DraftwoodError
from draftwood.telemetry import configure_logging
from router.cluster import Cluster

STOP_GRACE_S = 5.0
MODULE = "router.supervisor"


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """What the state file says."""

    pid: int
    address: str  # of the router; several with commas
    config: str
    started: float  # seconds since 1970


def state_path(name: str) -> Path:
    """Where the state file of the cluster of that name is."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "draftwood" / f"{name}.json"


def write_record(path: Path, record: ClusterRecord) -> None:
    """Whole or not at all, for the user's eyes only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_suffix(f".{record.pid}")
    draft.write_text(json.dumps(asdict(record)))
    draft.chmod(0o600)
    draft.replace(path)


def read_record(path: Path) -> ClusterRecord | None:
    """The cluster that the file tells of; None if there is no file or its supervisor is gone."""
    try:
        record = ClusterRecord(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return record if is_running(record.pid) else None


def is_running(pid: int) -> bool:
    """Whether the process lives and, where that can be seen, still is a supervisor."""
    try:
        os.kill(pid, 0)
        return MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:  # no /proc on this system
        return not Path("/proc/self").exists()
    except OSError:
        return False


def main() -> None:
    """Runs a cluster until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="cluster file")
    parser.add_argument("--state", type=Path, required=True, help="state file to write")
    chosen = parser.parse_args()
    configure_logging("supervisor", json=False)
    try:
        asyncio.run(supervise(chosen.config, chosen.state))
    except DraftwoodError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


async def supervise(config: Path, state: Path) -> None:
    """Raises DraftwoodError if the cluster does not start, or a worker cannot."""
    cluster = Cluster(load_cluster_config(config))
    try:
        address = await cluster.start()
        # Not before: Ray sets handlers of its own when it starts.
        stopping = stop_signal()
        write_record(state, ClusterRecord(os.getpid(), address, str(config), time.time()))
        await _hold(cluster, stopping)
    finally:
        state.unlink(missing_ok=True)
        await cluster.stop(STOP_GRACE_S)


def stop_signal() -> asyncio.Event:
    """Set by SIGTERM or SIGINT from now on."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def _hold(cluster: Cluster, stopping: asyncio.Event) -> None:
    """Returns on the signal; raises when a worker turns out not to start at all."""
    workers = asyncio.create_task(cluster.wait_ready(math.inf))
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait({workers, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if not workers.done():
        workers.cancel()
        with suppress(asyncio.CancelledError):
            await workers
        return
    workers.result()
    await signalled


if __name__ == "__main__":
    main()
