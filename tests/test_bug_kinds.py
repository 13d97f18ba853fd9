"""The table in docs/testing.md has every test that names a kind of bug, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 18, 20, 21, 22, 23, 26, 28, 31, 33, 34, 35, 37, 39, 41, 42, 43}
IN_NAME = re.compile(r"test_bugs?_(\d+)(?:_(and|to)_(\d+))?_")
IN_DOCSTRING = re.compile(r"Bug kinds? (\d+(?:(?:, | and | to )\d+)*)")


@cache
def table() -> dict[int, list[str]]:
    """Node ids by kind."""
    lines = (ROOT / "docs" / "testing.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d", line)]
    assert len({row[0] for row in rows}) == len(rows), "a kind has two rows"
    return {int(kind): re.findall("`([^`]+)`", tests) for kind, _, _, _, tests in rows}


def kinds_named(test: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    """The kinds that a test names, in its own name or at the start of its docstring."""
    found = set()
    if match := IN_NAME.match(test.name):
        first, joint, last = match.groups()
        found |= {int(first)} if not joint else set(spread(int(first), joint, int(last)))
    if match := IN_DOCSTRING.match(ast.get_docstring(test) or ""):
        numbers = [int(n) for n in re.findall(r"\d+", match[1])]
        found |= set(spread(numbers[0], "to", numbers[1])) if " to " in match[1] else set(numbers)
    return found


def spread(first: int, joint: str, last: int) -> list[int]:
    return [first, last] if joint == "and" else [kind for kind in range(first, last + 1) if kind in KINDS]


def named_tests() -> dict[int, set[str]]:
    """Node ids of all tests that name a kind."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for kind in kinds_named(node):
                    found[kind].add(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def test_every_kind_has_its_row() -> None:
    assert set(table()) == KINDS
    assert all(table().values())


def test_the_tests_of_each_row_are_there_and_name_their_kind() -> None:
    there = named_tests()
    assert [f"{kind}: {each}" for kind, ids in table().items() for each in ids if each not in there[kind]] == []


def test_every_test_that_names_a_kind_is_in_its_row_once() -> None:
    rows = table()
    counts = {f"{kind}: {each}": rows.get(kind, []).count(each) for kind, ids in named_tests().items() for each in ids}
    assert {each: count for each, count in counts.items() if count != 1} == {}
