"""Who may import whom: the table of layers in docs/architecture.md, read from the sources.

Every module belongs to the layer with the longest matching prefix, and may import the standard library, its own layer
and what its layer's row names. An import of ours counts as the module it reaches (``from draftwood import tree`` is
``draftwood.tree``).
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("draftwood", "draft_service", "verifier_service", "router")
RAY_MODULES = {"router.cluster", "router.pools"}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper"}


@dataclass(frozen=True)
class Layer:
    """``lazy`` layers may be imported inside functions only."""

    modules: tuple[str, ...]
    ours: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()


VALUE_PACKAGES = ("numpy", "pydantic", "pydantic_settings", "yaml", "structlog", "prometheus_client")
GRPC_PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", "uvloop")
MODEL_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "filelock")
CLI_PACKAGES = ("typer", "rich")  # also of every `__main__`
BELOW_SERVICES = ("values", "maths", "v1", "kernels", "transport", "device")

LAYERS = {
    "values": Layer(
        (
            "draftwood",
            "draftwood.tree",
            "draftwood.topology",
            "draftwood.errors",
            "draftwood.config",
            "draftwood.features",
            "draftwood.telemetry",
            "draftwood.vocabulary",
            "draftwood.stop_strings",
            "draftwood.choices",
            "draftwood.credentials",
            "draftwood.tickets",
            "draftwood.parameters",
            "draftwood.vllm_names",
            "draftwood.methods",
        ),
        packages=VALUE_PACKAGES,
    ),
    "maths": Layer(
        ("draftwood.noise", "draftwood.processors", "draftwood.sampling", "draftwood.acceptance"),
        ("values",),
        (*VALUE_PACKAGES, "torch"),
    ),
    "v1": Layer(("draftwood.v1",), packages=("google", "grpc")),
    "kernels": Layer(("draftwood.kernels",), packages=("torch", "triton")),
    "transport": Layer(
        ("draftwood.wire", "draftwood.rpc"), ("values", "v1"), (*VALUE_PACKAGES, *GRPC_PACKAGES, "opentelemetry")
    ),
    "device": Layer(("draftwood.runtime",), ("values", "maths", "kernels"), VALUE_PACKAGES + MODEL_PACKAGES),
    "draft service": Layer(("draft_service",), BELOW_SERVICES, VALUE_PACKAGES + GRPC_PACKAGES + MODEL_PACKAGES),
    "verifier service": Layer(
        ("verifier_service",),
        BELOW_SERVICES,
        (*VALUE_PACKAGES, *GRPC_PACKAGES, *MODEL_PACKAGES, "llguidance"),
    ),
    "router": Layer(("router",), ("values", "v1", "transport"), (*VALUE_PACKAGES, *GRPC_PACKAGES, "ray")),
    "clients": Layer(
        (
            "draftwood.client",
            "draftwood.cli",
            "draftwood.console",
            "draftwood.demo",
            "draftwood.comparison",
            "draftwood.tap",
        ),
        ("values", "v1", "transport"),
        VALUE_PACKAGES + GRPC_PACKAGES + CLI_PACKAGES,
        lazy=("router",),
    ),
}
# Prefixes that hold a whole package; `draftwood` itself is only its own __init__.
PREFIXES = {module: name for name, layer in LAYERS.items() for module in layer.modules}


@dataclass(frozen=True)
class Import:
    names: tuple[str, ...]  # what may be meant, most specific first: `from a.b import c` is a.b.c, or a.b
    line: int
    in_function: bool


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in PREFIXES and (prefix != "draftwood" or module == prefix):
            return PREFIXES[prefix]
    return None


def imports(module: str, source: str, *, package: bool = False) -> Iterator[Import]:
    """All imports of a source, also those in functions and under ``if TYPE_CHECKING``."""

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import((alias.name,), node.lineno, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, package)
            yield from (Import((f"{base}.{alias.name}", base), node.lineno, in_function) for alias in node.names)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(ast.parse(source), False)


def absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if not node.level:
        return node.module or ""
    home = module.split(".")[: -(node.level - package) or None]
    return ".".join([*home, *([node.module] if node.module else [])])


def violations(module: str, source: str, *, package: bool = False) -> list[str]:
    """What the module imports against the table, one line each."""
    name = layer_of(module)
    if name is None:
        return [f"{module} is in no layer"]
    found = []
    for item in imports(module, source, package=package):
        fault = fault_of(module, name, LAYERS[name], item)
        if fault:
            found.append(f"{module}:{item.line}: {fault}")
    return found


def fault_of(module: str, name: str, layer: Layer, item: Import) -> str:
    top = item.names[0].split(".")[0]
    if top in TOPS:
        return fault_of_ours(name, layer, item)
    if top == "ray" and module not in RAY_MODULES:
        return f"ray belongs to {', '.join(sorted(RAY_MODULES))} alone"
    packages = layer.packages + (CLI_PACKAGES if module.endswith(".__main__") else ())
    return "" if top in sys.stdlib_module_names or top in packages else f"the layer '{name}' may not import {top}"


def fault_of_ours(name: str, layer: Layer, item: Import) -> str:
    reached = next((found for found in map(layer_of, item.names) if found), None)
    if reached is None:
        return f"{item.names[0]} is in no layer"
    if reached == name or reached in layer.ours or (reached in layer.lazy and item.in_function):
        return ""
    where = " outside a function" if reached in layer.lazy else ""
    return f"the layer '{name}' may not import the layer '{reached}' ({item.names[0]}){where}"


def sources() -> list[Path]:
    return sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# The project


def test_the_table_is_kept() -> None:
    found = []
    for path in sources():
        found += violations(module_name(path), path.read_text(), package=path.name == "__init__.py")
    assert not found, "\n".join(found)


def test_the_sources_are_seen() -> None:
    names = {module_name(path) for path in sources()}
    assert {"draftwood.tree", "draftwood.sampling", "draftwood.v1.tree_pb2"} <= names


def test_no_module_has_a_name_that_says_nothing() -> None:
    parts = {part for path in sources() for part in module_name(path).split(".")}
    assert not parts & FORBIDDEN_NAMES


def test_packages_on_disk_are_those_of_the_metadata() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {".".join(path.parent.relative_to(ROOT).parts) for path in sources()}
    assert sorted(listed) == sorted(on_disk)
    for package in on_disk:
        assert (ROOT / package.replace(".", "/") / "__init__.py").exists(), package


# The checker


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("draftwood.tree", "import torch"),
        ("draftwood.tree", "import grpc.aio"),
        ("draftwood.errors", "from draftwood.noise import gumbel"),
        ("draftwood.errors", "from draftwood import noise"),
        ("draftwood.errors", "from . import noise"),
        ("draftwood.errors", "from .noise import gumbel"),
        ("draftwood", "from .noise import gumbel"),
        ("draftwood.sampling", "from draftwood.runtime.engine import Engine"),
        ("draftwood.sampling", "import grpc"),
        ("draftwood.v1.tree_pb2", "from draftwood import errors"),
        ("draftwood.kernels.commit", "from draftwood.tree import TokenTree"),
        ("draftwood.kernels.commit", "import numpy"),
        ("draftwood.wire", "import torch"),
        ("draftwood.wire", "if True:\n    from torch import Tensor"),
        ("draftwood.rpc.server", "def f():\n    import torch"),
        ("draftwood.rpc.server", "from ..runtime import engine"),
        ("draftwood.runtime.engine", "from draftwood.v1 import tree_pb2"),
        ("draftwood.runtime.engine", "from draftwood.wire import pack"),
        ("draftwood.runtime.engine", "import grpc"),
        ("draft_service.server", "from verifier_service.server import Server"),
        ("verifier_service.server", "import draft_service"),
        ("verifier_service.server", "def f():\n    from router import pools"),
        ("router.server", "import torch"),
        ("router.server", "from draftwood.kernels import tree_attention"),
        ("router.server", "from draftwood.sampling import SamplingParams"),
        ("router.server", "import verifier_service.server"),
        ("router.server", "import ray"),
        ("router.server", "from ray.util import state"),
        ("verifier_service.server", "import ray"),
        ("draft_service.server", "import llguidance"),
        ("draftwood.runtime.text", "import llguidance"),
        ("router.server", "import typer"),
        ("router.__main__", "import torch"),
        ("draftwood.cli", "from router.server import serve"),
        ("draftwood.cli", "class A:\n    from router import server"),
        ("draftwood.client", "def f():\n    import torch"),
        ("draftwood.tree", "import requests"),
        ("draftwood.tree", "from draftwood.nowhere import x"),
        ("draftwood.nowhere", ""),
    ],
)
def test_a_violating_source_is_found(module: str, source: str) -> None:
    assert len(violations(module, source, package=module in TOPS)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("draftwood.tree", "from __future__ import annotations\nimport math, numpy as np\nfrom . import errors"),
        ("draftwood.topology", "from draftwood import tree, errors"),
        ("draftwood.acceptance", "import torch\nfrom draftwood.tree import TokenTree"),
        ("draftwood.v1.draft_pb2", "from google.protobuf import descriptor\nfrom draftwood.v1 import tree_pb2"),
        (
            "draftwood.kernels.commit",
            "import torch, triton\nfrom draftwood.kernels.tree_attention import AttentionBatch",
        ),
        ("draftwood.rpc.server", "import grpc\nfrom draftwood.v1 import tree_pb2\nfrom ..wire import pack"),
        (
            "draftwood.runtime.engine",
            "import transformers\nfrom draftwood.kernels import commit\nfrom ..noise import x",
        ),
        ("draft_service.drafters.lm", "from draftwood.runtime import engine\nfrom .. import sessions"),
        ("router.pools", "import ray\nfrom ray.actor import ActorHandle\nfrom draftwood.config import RouterSettings"),
        ("router.__main__", "import typer\nfrom router.server import RouterServer"),
        ("draftwood.cli", "import typer\ndef up():\n    from router.pools import start"),
    ],
)
def test_a_source_within_the_table_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_all_faults_of_a_source_are_told_with_their_lines() -> None:
    found = violations("draftwood.tree", "import torch\nimport math\nimport grpc, ray\n")
    assert [line.split(":")[1] for line in found] == ["1", "3", "3"]
