"""What is compared: methods, tasks, and how figures come together."""

from __future__ import annotations

import io
from collections import Counter
from typing import get_args

import pytest
from rich.console import Console

from draftwood.client import Usage
from draftwood.comparison import Text, comparison_table, figures, load_tasks, merged, total
from draftwood.config import DraftSettings
from draftwood.errors import InvalidArgument
from draftwood.methods import choose, drafting_methods
from draftwood.tap import Tally


def test_every_kind_and_topology_is_a_method_that_the_settings_take() -> None:
    methods = drafting_methods()
    for name in ("kind", "topology"):
        declared = set(get_args(DraftSettings.model_fields[name].annotation)) - {"lm"}
        assert declared <= set(methods), "a kind that is added is compared"
    for name, chosen in methods.items():
        settings = DraftSettings(max_nodes=25, **chosen)
        assert name in (settings.kind, settings.topology)


def test_choosing_methods() -> None:
    known = {"a": {"kind": "lm"}, "b": {"kind": "ngram"}}
    assert choose([], known) == known and choose(["b"], known) == {"b": {"kind": "ngram"}}
    with pytest.raises(InvalidArgument, match="no method 'c'; there are a, b"):
        choose(["c"], known)


def test_tasks() -> None:
    tasks = load_tasks()
    assert set(tasks) == {"chat", "code", "summarising", "translation", "maths", "copying"}
    assert all(len(prompts) >= 4 and all(isinstance(p, str) and p for p in prompts) for prompts in tasks.values())
    assert load_tasks(["code"], 1) == {"code": tasks["code"][:1]}
    with pytest.raises(InvalidArgument, match="no task 'poetry'"):
        load_tasks(["poetry"])


def text(tokens: int, steps: int, decode_s: float) -> Text:
    usage = Usage(5, tokens, steps, 0, 0, 0, first_token_s=1.0, total_s=1.0 + decode_s)
    return Text(tuple(range(tokens)), usage)


def cell(task: str, temperature: float, **changed: object) -> dict[str, object]:
    key = (task, "prompt", temperature)
    counts = Counter({0: 4, 1: 2}), Counter({0: 3, 1: 1}), Counter({0: 4})
    tally = Tally(4, 10, 20, 300, 100, [0.02, 0.03, 0.01], *counts)
    found = figures({key: text(11, 5, 0.5)}, {key: text(11, 11, 1.0)}, tally)
    return {"task": task, "temperature": temperature} | found | changed


def test_figures_of_a_cell() -> None:
    found = cell("chat", 0.0)
    assert found["acceptance_length"] == 2.5 and found["tokens_per_forward"] == 2.2
    assert found["speed"] == 2.0 and found["draft_ms"] == 20.0 and found["bytes_per_round"] == 100.0
    assert (found["asked_by_depth"], found["accepted_by_depth"], found["accepted_by_rank"]) == ([4, 2], [3, 1], [4])
    assert (found["identical"], found["texts"]) == (1, 1)


def test_cells_together_and_the_table() -> None:
    cells = [cell("chat", 0.0), cell("code", 0.0, rounds=6, round_tokens=30, identical=0), cell("code", 1.0)]
    assert total(cells, temperature=0.0)["acceptance_length"] == 4.0
    assert total(cells)["by_depth"] == [0.75, 0.5] and total(cells)["by_rank"] == [12]
    assert (total(cells, "code")["identical"], total(cells, "code")["texts"]) == (1, 2)
    found = {
        "nodes": 8, "tokens": 11, "temperatures": [0.0, 1.0],
        "methods": {"expand_rerank": {"cells": cells}, "b": {"skipped": "it has no [weights]"}},
    }  # fmt: skip
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(comparison_table(found))
    shown = console.export_text()
    assert "4.00" in shown and "86" in shown and "b: it has no [weights]" in shown and "…" not in shown


def test_runs_are_added_where_their_texts_are_the_same() -> None:
    found = {"tokens": 4, "nodes": 8, "temperatures": [0.0], "prompts": {"chat": 1}, "methods": {"a": {}}}
    assert set(merged(found, found | {"methods": {"b": {}}})["methods"]) == {"a", "b"}
    with pytest.raises(InvalidArgument, match="the file's run has nodes 9, this one 8"):
        merged(found, found | {"nodes": 9})


def test_settings_reach_a_process_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is a number, a list or a choice among numbers comes as text."""
    given = {"PAGE_TOKENS": "16", "MAX_NODES": "25", "TOPOLOGY": "kary", "BRANCHING": "[4, 2]", "Q_TOP_P": "0.5"}
    for name, value in given.items():
        monkeypatch.setenv(f"DRAFTWOOD_DRAFT_{name}", value)
    settings = DraftSettings()
    assert (settings.page_tokens, settings.max_nodes, settings.branching, settings.q_top_p) == (16, 25, [4, 2], 0.5)
    monkeypatch.setenv("DRAFTWOOD_DRAFT_PAGE_TOKENS", "17")
    with pytest.raises(ValueError, match="16, 32 or 64"):
        DraftSettings()
