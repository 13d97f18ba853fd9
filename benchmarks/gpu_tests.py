"""The tests marked ``gpu``, with their results in ``benchmarks/results/gpu-tests.json``.

``python benchmarks/gpu_tests.py [pytest's arguments]``
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from results import ROOT, Check, write


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, check=False)
        suite = ET.parse(report).getroot()[0]
    outcome = {kind: int(suite.get(kind, 0)) for kind in ("tests", "failures", "errors", "skipped")}
    bad = outcome["failures"] + outcome["errors"]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in suite.iter("testcase")]
    checks = [
        Check("gpu/tests_passed", float(outcome["tests"] - bad - outcome["skipped"]), ">=", 1.0),
        Check("gpu/tests_failed", float(bad), "==", 0.0),
        Check("gpu/tests_skipped", float(outcome["skipped"]), "==", 0.0),
    ]
    details = {"seconds": float(suite.get("time", 0)), "tests": sorted(names)}
    return 0 if write("gpu-tests", checks, details) else 1


if __name__ == "__main__":
    sys.exit(main())
