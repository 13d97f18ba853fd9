"""All ways of drafting on the same texts: ``draftwood bench drafters`` with the shapes that are compared besides.

Runs in parts, so that none takes long (``--method``, ``--add``), which gather in ``drafters-cells.json``; ``--report``
then writes ``benchmarks/results/drafters.json`` with the checks, and the table and plots of docs/drafters.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib
from results import Check, write
from rich.console import Console

from draftwood.comparison import TEMPERATURES, Options, compare, comparison_table, load_tasks, total
from draftwood.comparison import save as write_cells
from draftwood.methods import choose, drafting_methods

matplotlib.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[2]
KARY = ([5, 4], [4, 2, 1], [3, 2, 1, 1], [4, 1, 1, 1, 1, 1], [3, 1, 1, 1, 1, 1, 1, 1])
KNOWN = drafting_methods()
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"model": "models/smollm2-135m-eagle", "depth": 8},
    "medusa": {"model": "models/smollm2-135m-medusa"},
    "mtp": {"model": "models/smollm2-135m-mtp"},
    "block": {"model": "drafters-block"},
}
METHODS = (
    KNOWN
    | {kind: KNOWN[kind] | own for kind, own in HEADS.items()}
    | {"eagle, eagle1": {"kind": "eagle", "model": HEADS["eagle"]["model"], "topology": "eagle1"}}
    | {f"kary {k}": {"kind": "lm", "topology": "kary", "branching": k} for k in KARY}
)
BLOCK = ROOT / HEADS["block"]["model"]
"""There is no head for the demo target that was trained to fill blocks: this is the EAGLE layer, told to."""
FEATURES = (0, 2, 15, 27)
"""Layers that the heads in ``models/`` read."""
PARTS = Path("drafters-cells.json")
PAGE = ROOT / "docs" / "drafters.md"
BEGIN, END = "<!-- drafters: begin -->", "<!-- drafters: end -->"
SHOWN = (
    "best_first",
    "expand_rerank",
    "sequoia",
    "eagle1",
    "suffix",
    "merged",
    "eagle",
    "medusa",
    "mtp",
    "block",
)
"""Methods in the plots, and those of settings that are not ours."""


def lengths(found: dict[str, Any], **which: Any) -> dict[str, float]:
    """Acceptance length by method."""
    return {
        name: total(method["cells"], **which)["acceptance_length"]
        for name, method in found["methods"].items()
        if "cells" in method
    }


def checks(found: dict[str, Any]) -> list[Check]:
    length = lengths(found)
    kary = {name: value for name, value in length.items() if name.startswith("kary")}
    singles = {name: length[name] for name in ("best_first", "suffix")}
    sums = [total(m["cells"]) for m in found["methods"].values() if "cells" in m]
    same = sum(s["identical"] for s in sums) / sum(s["texts"] for s in sums)
    return [
        Check("drafters/identical", round(same, 4), ">=", 0.99),
        Check("drafters/dynamic_over_static", round(length["expand_rerank"] / length["eagle1"], 3), ">=", 1.0),
        Check("drafters/sequoia_over_kary", round(length["sequoia"] / max(kary.values()), 3), ">=", 1.0),
        Check("drafters/merged_over_best_single", round(length["merged"] / max(singles.values()), 3), ">=", 1.0),
    ]


def table(found: dict[str, Any]) -> str:
    """As Markdown: acceptance length by temperature and by task, and what it costs."""
    temperatures, tasks = found["temperatures"], list(found["prompts"])
    columns = [*(f"T = {t:g}" for t in temperatures), *tasks, "a forward", "ms a round", "bytes a round", "speed"]
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, method in found["methods"].items():
        if "cells" not in method:
            continue
        cells = method["cells"]
        each = [total(cells, temperature=t)["acceptance_length"] for t in temperatures]
        each += [total(cells, task)["acceptance_length"] for task in tasks]
        whole = total(cells)
        figures = [f"{v:.2f}" for v in (*each, whole["tokens_per_forward"])]
        costs = [f"{whole['draft_ms']:.1f}", f"{whole['bytes_per_round']:.0f}", f"{whole['speed']:.2f}"]
        lines.append("| " + " | ".join([name, *figures, *costs]) + " |")
    return "\n".join(lines)


def shown(found: dict[str, Any]) -> list[str]:
    names = [name for name, method in found["methods"].items() if "cells" in method]
    return [n for n in names if n in SHOWN or (n not in METHODS and not n.startswith("kary"))]


def save(figure: Any, name: str) -> None:
    """As an SVG that is the same for the same figures."""
    file = ROOT / "docs" / name
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    file.write_text(re.sub(r"[ \t]+$", "", file.read_text(), flags=re.M))


def plot(found: dict[str, Any]) -> None:
    plt.rcParams |= {"svg.hashsalt": "draftwood", "svg.fonttype": "none", "font.size": 9}
    names = shown(found)
    figure, (by_depth, by_rank) = plt.subplots(1, 2, figsize=(9, 3.2))
    for name in names:
        sums = total(found["methods"][name]["cells"], temperature=0.0)
        by_depth.plot(range(1, len(sums["by_depth"]) + 1), sums["by_depth"], marker=".", label=name)
        ranks = sums["by_rank"]
        by_rank.plot(range(1, len(ranks) + 1), [r / max(1, sum(ranks)) for r in ranks], marker=".", label=name)
    by_depth.set(xlabel="depth", ylabel="share of nodes reached that go on", ylim=(0, 1))
    by_rank.set(xlabel="rank among siblings", ylabel="share of accepted nodes", xlim=(0.5, 8.5))
    by_rank.legend(fontsize=7, ncols=2)
    save(figure, "drafters-acceptance.svg")
    figure, axis = plt.subplots(figsize=(9, 3.2))
    width = 0.8 / len(names)
    for k, name in enumerate(names):
        values = [total(found["methods"][name]["cells"], task)["acceptance_length"] for task in found["prompts"]]
        axis.bar([x + k * width for x in range(len(values))], values, width, label=name)
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(found["prompts"]))], list(found["prompts"]))
    axis.set_ylabel("tokens a round")
    axis.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save(figure, "drafters-tasks.svg")


def report(found: dict[str, Any]) -> bool:
    texts = sum(found["prompts"].values()) * len(found["temperatures"])
    temperatures = ", ".join(f"{t:g}" for t in found["temperatures"])
    details = {
        "request_mix": f"{texts} texts of up to {found['tokens']} tokens, {len(found['prompts'])} kinds of "
        f"task, one at a time, temperatures {temperatures}; trees of up to {found['nodes']} nodes, all verified",
        "baseline": "the same texts by the target alone in the same run",
    } | found
    plot(found)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    measured = f"{details['request_mix'].capitalize()}.\n\n{table(found)}"
    PAGE.write_text(f"{before}{BEGIN}\n{measured}\n{END}{rest.split(END)[1]}")
    return write("drafters", checks(found), details)


def write_block(eagle: Path) -> None:
    config = json.loads((eagle / "config.json").read_text()) | {"block_size": 4, "mask_token_id": 0}
    BLOCK.mkdir(exist_ok=True)
    (BLOCK / "config.json").write_text(json.dumps(config))
    (BLOCK / "model.safetensors").write_bytes((eagle / "model.safetensors").read_bytes())


def main(arguments: Sequence[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="*", default=[], help="all if left out")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=25)
    parser.add_argument("--temperature", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--add", action="store_true", help="to the methods of earlier parts")
    parser.add_argument("--report", action="store_true", help="of the parts, when they are all there")
    chosen = parser.parse_args(arguments)
    if not chosen.report:
        write_block(ROOT / HEADS["eagle"]["model"])
        options = Options(
            choose(chosen.method, METHODS), load_tasks(prompts=chosen.prompts), tuple(chosen.temperature),
            chosen.tokens, chosen.nodes, verifier=(("features", list(FEATURES)),), draft=(("threads", 1),),
        )  # fmt: skip
        earlier = json.loads(PARTS.read_text()) if chosen.add else None
        asyncio.run(compare(options, Console(), lambda found: write_cells(PARTS, found, earlier)))
        Console().print(comparison_table(json.loads(PARTS.read_text())))
        return True
    return report(json.loads(PARTS.read_text()))


if __name__ == "__main__":
    sys.exit(not main())
