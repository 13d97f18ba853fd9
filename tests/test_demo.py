"""``draftwood demo`` as a newcomer runs it: real models, Ray, four processes, nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LAST_LINE = re.compile(r"demo: identical=(yes|no) speedup=(\d+\.\d\d)x accepted=(\d+\.\d\d)")


def ray_processes() -> set[str]:
    """Command lines of Ray daemons that run now."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return {line for line in listed.splitlines() if "raylet" in line or "gcs_server" in line}


@pytest.mark.model
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_demo_is_identical_and_leaves_nothing_behind() -> None:
    before = ray_processes()
    command = [str(Path(sys.executable).parent / "draftwood"), "demo", "--max-tokens", "32"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    last = LAST_LINE.fullmatch(ran.stdout.rstrip("\n").splitlines()[-1])
    assert last, ran.stdout[-500:]
    assert last[1] == "yes"
    assert float(last[3]) >= 1.0 and float(last[2]) > 0.3  # speed is for `make bench`
    assert ran.stdout.count("yes") >= 9  # eight rows of the table and the last line
    assert ray_processes() <= before
