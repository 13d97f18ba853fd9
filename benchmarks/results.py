"""The results format: one JSON file a benchmark in ``benchmarks/results/``, figures as checks.

``{hardware, versions, commit, command, date, checks: [{name, value, op, bound, ok}], details}``
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import operator
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
OPERATORS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, "==": operator.eq}
PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "ray")


@dataclass(frozen=True, slots=True)
class Check:
    """One figure and the bound it is held to; ``op`` reads ``value op bound``."""

    name: str
    value: float
    op: str
    bound: float

    @property
    def ok(self) -> bool:
        return OPERATORS[self.op](self.value, self.bound)


def write(name: str, checks: list[Check], details: dict[str, Any]) -> bool:
    """Writes ``benchmarks/results/NAME.json``, prints the checks, and says whether all hold."""
    document = {
        "hardware": hardware(),
        "versions": versions(),
        "commit": os.environ.get("DRAFTWOOD_COMMIT") or commit(),
        "command": " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "checks": [asdict(check) | {"ok": check.ok} for check in checks],
        "details": details,
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name} = {check.value:.3f} ({check.op} {check.bound:g})")
    return all(check.ok for check in checks)


def hardware() -> dict[str, Any]:
    """CPU, cores and GPU, if any."""
    found = {"cpu": _cpu_name(), "cores": os.cpu_count(), "gpu": None}
    import torch

    if torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Hash of HEAD, with a plus if files differ from it; where git is not at hand, pass DRAFTWOOD_COMMIT instead."""
    return _output("git", "rev-parse", "HEAD") + ("+" if _output("git", "status", "--porcelain") else "")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
