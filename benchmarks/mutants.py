"""Mutation testing of acceptance, trees and sessions: what share of small faults the tests notice.

python benchmarks/mutants.py [--only live_tree] [--most 400] [--again] [--jobs 2]

A mutant is one changed comparison, arithmetic or boolean operator, constant or return value of one module. The fast
tests of that module run on it in a fork that loads the mutant instead; a failure, or no end in time, kills it. Some
survivors are no faults (the program means the same), so the bound is 0.9. They are listed in the results.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton; the tests do the same
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from results import FOLDER, Check, write  # noqa: E402

FAST = ["-k", "not distribution and not every_tree and not plain_sampling and not bug_5_sampling"]
RULES = ["tests/test_rules.py", *FAST]
TREES = ["tests/test_tree.py", "tests/verifier_service/test_live_tree.py", "tests/verifier_service/test_session.py"]
TESTS: dict[str, list[list[str]]] = {
    "draftwood.acceptance": [["tests/test_acceptance.py", *FAST], RULES],
    "draftwood.tree": [TREES, RULES],
    "verifier_service.session": [TREES[2:]],
    "verifier_service.live_tree": [TREES[1:]],
}
BOUND = 0.9
LEAST_CPU_S = 10
"""A mutant may take four times what its module takes unchanged, and at least this; then it counts as killed."""
MOST_BYTES = 16 << 30  # of address space

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult,
}  # fmt: skip


SKIPPED = ("annotation", "returns", "decorator_list", "msg", "bases")
"""Fields without behaviour; nor is ``strict`` of zip changed, which checks our own invariants."""


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    change: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return f"{self.module}:{self.line}  {self.change}"


def mutants(module: str) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its source."""
    whole = ast.parse(source_of(module).read_text())
    sites = list(_sites(whole))
    for number, (node, _) in enumerate(sites):
        for k in range(len(list(_changes(node)))):
            changed = copy.deepcopy(whole)
            twin, parent = list(_sites(changed))[number]
            new = list(_changes(twin))[k]
            before = ast.unparse(twin)
            _replace(parent, twin, new)
            yield Mutant(module, getattr(node, "lineno", 0), f"{before}  ->  {ast.unparse(new)}", changed)


def source_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def _sites(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes that can be changed, with their parents."""
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    for name, value in ast.iter_fields(node):
        if name in SKIPPED:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                if any(True for _ in _changes(child)):
                    yield child, node
                yield from _sites(child)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [op], right) if type(op) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in OPERATORS:
            yield ast.AugAssign(target, OPERATORS[type(op)](), value)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield ast.Constant(value * 2 + 1)
        case ast.Return(value) if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))


def _replace(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    ast.copy_location(new, old)
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list):
            value[:] = [new if child is old else child for child in value]
    ast.fix_missing_locations(new)


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the mutant where its module is imported."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._mutant.module else None

    def exec_module(self, module: ModuleType) -> None:
        path = str(source_of(self._mutant.module))
        module.__file__ = path
        exec(compile(self._mutant.tree, path, "exec"), module.__dict__)


def run(module: str, mutant: Mutant | None) -> bool:
    """Whether all tests of the module pass. Called in a process of its own."""
    import pytest
    import torch
    from hypothesis import Phase, settings

    torch.set_num_threads(1)
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], derandomize=True, database=None)
    settings.load_profile("mutants")  # a failure is enough, its smallest example is not wanted
    if mutant:
        sys.meta_path.insert(0, Loader(mutant))
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    return all(pytest.main([*options, *tests]) == 0 for tests in TESTS[module])


def fork(work: Callable[[], bool], most_cpu_s: int = 600) -> int:
    """Starts ``work`` in a child that says nothing; its exit status is 0 if it returns True."""
    pid = os.fork()
    if pid:
        return pid
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (most_cpu_s, most_cpu_s))
        os._exit(0 if work() else 1)
    except BaseException:
        os._exit(1)


def survivors(chosen: Sequence[Mutant], jobs: int, most_cpu_s: dict[str, int]) -> list[Mutant]:
    """Those on which the tests pass; ``jobs`` at a time."""
    todo, running, alive = list(chosen)[::-1], dict[int, Mutant](), []
    while todo or running:
        while todo and len(running) < jobs:
            mutant = todo.pop()
            pid = fork(lambda mutant=mutant: run(mutant.module, mutant), most_cpu_s[mutant.module])
            running[pid] = mutant
        pid, status = os.wait()
        mutant = running.pop(pid)
        if os.waitstatus_to_exitcode(status) == 0:
            alive.append(mutant)
            print(f"survives: {mutant.name}", flush=True)
    return alive


def sample(everything: list[Mutant], most: int) -> list[Mutant]:
    """All, or as many of them, the same each time."""
    chosen = sorted(random.Random(0).sample(range(len(everything)), min(most, len(everything))))
    return [everything[k] for k in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="modules whose name contains this; writes no results")
    parser.add_argument("--most", type=int, default=400, help="mutants that are tried, a fixed sample of all")
    parser.add_argument(
        "--again", action="store_true", help="try the last run's survivors only, after tests were added for them"
    )
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    modules = [module for module in TESTS if arguments.only in module]
    for name in ("torch", "hypothesis", "pytest"):
        __import__(name)  # once, for all forks
    gc.freeze()  # so that they share it
    most_cpu_s = {}
    unchanged = {fork(lambda module=module: run(module, None)): module for module in modules}
    for pid, module in unchanged.items():
        _, status, used = os.wait4(pid, 0)
        assert status == 0, f"the tests of {module} fail on the module as it is"
        cpu_s = used.ru_utime + used.ru_stime
        most_cpu_s[module] = max(LEAST_CPU_S, round(4 * cpu_s))
        print(f"{module}: {cpu_s:.1f} s of CPU unchanged", flush=True)
    everything = [mutant for module in modules for mutant in mutants(module)]
    before = json.loads((FOLDER / "mutants.json").read_text())["details"] if arguments.again else None
    chosen = [m for m in everything if not before or m.name in before["survivors"]]
    chosen = sample(chosen, arguments.most)
    tried = before["tried"] if before else Counter(mutant.module for mutant in chosen)
    print(f"{len(chosen)} of {len(everything)} mutants", flush=True)
    alive = survivors(chosen, arguments.jobs, most_cpu_s)
    share = 1 - len(alive) / sum(tried.values())
    details = {
        "mutants": Counter(mutant.module for mutant in everything),
        "tried": tried,
        "survived": Counter(mutant.module for mutant in alive),
        "survivors": [mutant.name for mutant in alive],
    }
    if arguments.only:
        print(f"killed {share:.3f}")
    else:
        sys.exit(not write("mutants", [Check("verifier/mutants_killed", share, ">=", BOUND)], details))


if __name__ == "__main__":
    main()
