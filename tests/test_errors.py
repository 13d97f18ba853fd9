"""The table in docs/errors.md is what the source raises, no more and no less."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwood.errors import BY_STATUS, DraftwoodError

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("draftwood", "draft_service", "verifier_service", "router")
KINDS = {kind.__name__: kind.status for kind in BY_STATUS.values()}
RETRIES = {"yes", "no", "resume"}


def table() -> list[list[str]]:
    """Cells of all rows: reason, status, situation, retry, where."""
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if row[0] != "reason" and not row[0].startswith("---")]


def source_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in (ROOT / package).rglob("*.py") if "v1" not in path.parts)


def raised() -> Iterator[tuple[str, ast.Call]]:
    """Every construction of one of our errors, and where it is."""
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and called(node) in KINDS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def reason(node: ast.Call) -> str:
    match node.args:
        case [ast.Constant(value=str(text)), *_]:
            return text
    return ""


def test_reasons_are_literals() -> None:
    assert [where for where, node in raised() if not reason(node)] == []


def test_every_reason_is_in_the_table() -> None:
    known = {(row[0], row[1]) for row in table()}
    unknown = {(reason(node), KINDS[called(node)]): where for where, node in raised()}
    assert {key: where for key, where in unknown.items() if key not in known} == {}


def test_every_row_is_raised_somewhere() -> None:
    known = {(reason(node), KINDS[called(node)]) for _, node in raised()}
    assert {(row[0], row[1]) for row in table()} - known == set()


def test_hinted_errors_may_be_retried() -> None:
    retry = {(row[0], row[1]): row[3] for row in table()}
    hinted = {
        (reason(node), KINDS[called(node)])
        for _, node in raised()
        if any(keyword.arg == "retry_after_ms" for keyword in node.keywords)
    }
    assert {key for key in hinted if retry.get(key) == "no"} == set()


def test_table_is_well_formed() -> None:
    rows = table()
    assert all(len(row) == 5 and all(row) for row in rows)
    assert len({(row[0], row[1]) for row in rows}) == len(rows)
    assert {row[1] for row in rows} <= set(BY_STATUS)
    assert {row[3] for row in rows} <= RETRIES


@pytest.mark.parametrize("kind", BY_STATUS.values())
def test_errors_survive_pickling(kind: type[DraftwoodError]) -> None:
    """They cross process borders as Ray actors raise them."""
    error = pickle.loads(pickle.dumps(kind("REASON", "7 > 6", field="a[1]", retry_after_ms=5)))
    assert type(error) is kind
    assert (error.reason, error.message, error.field, error.retry_after_ms) == ("REASON", "7 > 6", "a[1]", 5)
    assert str(error) == "REASON (a[1]): 7 > 6"
