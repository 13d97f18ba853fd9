"""Ways of drafting by name, as settings of a draft worker: what ``draftwood bench drafters`` compares.

They are read off the settings: kind lm is one method for each topology, every other kind is one method. A kind or
topology that is added to ``DraftSettings`` is a method by that; what it cannot do without is named in ``NEEDED``.
"""

from __future__ import annotations

from typing import Any, get_args

from draftwood.config import DraftSettings
from draftwood.errors import InvalidArgument

NEEDED: dict[str, dict[str, Any]] = {
    "expand_rerank": {"branch": 8, "beam": 8},
    "sequoia": {"branch": 16},
    "kary": {"branching": [5, 1, 1, 1, 1]},
    "choices": {
        "choices": [
            [0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [3, 0],
            [0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [2, 0, 0],
            [0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0],
            [0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0],
        ]
    },
    "eagle": {"topology": "expand_rerank", "branch": 8, "beam": 8},
    "mtp": {"topology": "chain", "depth": 3},
    "merged": {"parts": [{"kind": "lm"}, {"kind": "suffix"}]},
    "bridged": {"target_tokenizer": "demo"},
}  # fmt: skip
"""Settings of methods that have no use without them, or that are better with others than the defaults."""


def drafting_methods() -> dict[str, dict[str, Any]]:
    """Settings by name, in the order in which they are declared."""
    kinds = get_args(DraftSettings.model_fields["kind"].annotation)
    topologies = get_args(DraftSettings.model_fields["topology"].annotation)
    named: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        if kind == "lm":
            named |= {topology: {"kind": kind, "topology": topology} for topology in topologies}
        else:
            named[kind] = {"kind": kind}
    return {name: chosen | NEEDED.get(name, {}) for name, chosen in named.items()}


def choose(names: list[str], known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of the names, all without any; raises InvalidArgument CONFIG for a name that is not known."""
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgument("CONFIG", f"no method {unknown[0]!r}; there are {', '.join(known)}", field="method")
    return {name: known[name] for name in names or known}
