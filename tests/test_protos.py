"""The protocol: generated code is current, the style holds, and no field changes its meaning unnoticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).parent / "buf"
GENERATED = ROOT / "draftwood" / "v1"


def buf(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def generated_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*_pb2*.py*"))}


def test_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "protos.py", "--out", tmp_path], check=True)
    fresh = generated_files(tmp_path / "draftwood" / "v1")
    assert len(fresh) == 3 * len(list((ROOT / "protos").rglob("*.proto")))
    assert fresh == generated_files(GENERATED), "run `make protos`"


def test_style() -> None:
    result = buf("lint")
    assert result.returncode == 0, result.stdout


def test_nothing_breaks_the_baseline() -> None:
    result = buf("breaking", "--against", "protos/baseline.binpb")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tree.proto", "repeated float score = 9;", "repeated float score = 30;"),
        ("tree.proto", "repeated uint32 token = 8;", "repeated uint64 token = 8;"),
        ("draft.proto", "  rpc Detach(DetachRequest) returns (DetachResponse);\n", ""),
    ],
    ids=["number", "type", "method"],
)
def test_breaking_change_is_noticed(tmp_path: Path, file: str, old: str, new: str) -> None:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    proto = tmp_path / "protos" / "draftwood" / "v1" / file
    text = proto.read_text()
    assert text.count(old) == 1
    assert buf("breaking", "--against", "protos/baseline.binpb", cwd=tmp_path).returncode == 0
    proto.write_text(text.replace(old, new))
    result = buf("breaking", "--against", "protos/baseline.binpb", cwd=tmp_path)
    assert result.returncode != 0 and file in result.stdout
