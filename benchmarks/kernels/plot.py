"""Draws ``docs/attention.svg`` from ``benchmarks/results/attention.json``: time against nodes, and the floor.

python benchmarks/kernels/plot.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT, PER_LINE = 270, 200, 3
LEFT, TOP, RIGHT, BOTTOM = 44, 30, 12, 34
SERIES = {  # name: colour, dashes
    "SDPA, dense mask": ("#8a8a8a", ""),
    "best of FlashInfer 0.6.4": ("#d9822b", ""),
    "Draftwood": ("#1f6fb2", ""),
    "roofline": ("#1a1a1a", "3 3"),
}


def series_us(row: dict[str, Any]) -> dict[str, float]:
    us = row["us"]
    return {
        "SDPA, dense mask": min(us["sdpa_repeated"], us["sdpa_gqa"]),
        "best of FlashInfer 0.6.4": min(us[name] for name in us if name.startswith("flashinfer")),
        "Draftwood": us["ours"],
        "roofline": row["roofline_fraction"] * us["ours"],
    }


def text(x: float, y: float, words: str, anchor: str = "middle", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def line(points: list[tuple[float, float]], colour: str, dashes: str = "", width: float = 1.8) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    )


def panel(rows: list[dict[str, Any]], left: float, top: float) -> list[str]:
    """One shape: nodes from left to right, microseconds upwards, both in logarithms."""
    times = [series_us(row) for row in rows]
    low = math.floor(math.log10(min(min(t.values()) for t in times)))
    high = math.ceil(math.log10(max(max(t.values()) for t in times)))

    def x(nodes: int) -> float:
        return left + LEFT + math.log2(nodes) / 8 * (WIDTH - LEFT - RIGHT)

    def y(us: float) -> float:
        return top + HEIGHT - BOTTOM - (math.log10(us) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    title = f"{rows[0]['requests']} x {rows[0]['context'] // 1024}k tokens"
    out = [text(left + WIDTH / 2, top + 18, title, weight="bold")]
    for power in range(low, high + 1):
        out.append(line([(x(1), y(10**power)), (x(256), y(10**power))], "#dddddd", width=1))
        out.append(text(left + LEFT - 5, y(10**power) + 4, f"{10**power:g}" + (" us" if power == high else ""), "end"))
    out += [text(x(row["nodes"]), top + HEIGHT - BOTTOM + 15, str(row["nodes"])) for row in rows]
    out.append(text(left + (LEFT + WIDTH) / 2, top + HEIGHT - 5, "nodes"))
    for name, (colour, dashes) in SERIES.items():
        out.append(line([(x(row["nodes"]), y(t[name])) for row, t in zip(rows, times, strict=True)], colour, dashes))
    return out


def legend(top: float) -> list[str]:
    out = []
    for i, (name, (colour, dashes)) in enumerate(SERIES.items()):
        left = 30 + i * 195
        out.append(line([(left, top), (left + 24, top)], colour, dashes, 2.5))
        out.append(text(left + 30, top + 4, name, "start"))
    return out


def main() -> None:
    grid = json.loads((ROOT / "benchmarks" / "results" / "attention.json").read_text())["details"]["grid"]
    shapes = list(dict.fromkeys((row["requests"], row["context"]) for row in grid))
    parts = legend(16)
    for i, shape in enumerate(shapes):
        rows = [row for row in grid if (row["requests"], row["context"]) == shape]
        parts += panel(rows, i % PER_LINE * WIDTH, 30 + i // PER_LINE * HEIGHT)
    width, height = PER_LINE * WIDTH, 40 + -(-len(shapes) // PER_LINE) * HEIGHT
    view = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view}>'
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    (ROOT / "docs" / "attention.svg").write_text("\n".join([head, background, *parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
