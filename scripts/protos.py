"""Generates ``draftwood/v1`` from ``protos/``, and the baseline that changes of the protocol are held against.

python scripts/protos.py              regenerate the code in place
python scripts/protos.py --out DIR    generate it below DIR instead
python scripts/protos.py --baseline   accept the protocol as it is now as the one not to break
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
BASELINE = PROTOS / "baseline.binpb"
BUF = Path(sys.executable).parent / "buf"


def generate(out: Path) -> None:
    """Writes messages, type stubs and services below ``out``; raises CalledProcessError if protoc refuses."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{plugin}_out={out}" for plugin in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *sources], check=True)


def write_baseline() -> None:
    subprocess.run([BUF, "build", "-o", BASELINE], cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT)
    parser.add_argument("--baseline", action="store_true")
    arguments = parser.parse_args()
    if arguments.baseline:
        write_baseline()
    else:
        generate(arguments.out)


if __name__ == "__main__":
    main()
