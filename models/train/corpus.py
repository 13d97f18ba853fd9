"""Written text on disk: what ``write.py`` leaves and the other scripts read.

A folder with ``corpus.json`` (target, vocabulary size, length, rounds, tokens, seconds) and, for each round,

tokens-K.npy    integers [rows, length].
drawn-K.npy     bool [rows, length]: which tokens the target drew; the others were fed to it.
top-K.npy       integers [rows, length, TOP]: the target's likeliest tokens *behind* each token, best first.
logprob-K.npy   float16 [rows, length, TOP], their log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOP = 16
"""Tokens of the target's distribution that are kept at each place."""


@dataclass(frozen=True, slots=True)
class Round:
    """Dialogues that were written together."""

    tokens: np.ndarray  # [rows, length]
    drawn: np.ndarray  # bool [rows, length]
    top: np.ndarray  # [rows, length, TOP]
    logprob: np.ndarray  # float16 [rows, length, TOP]


def narrowest(vocab_size: int) -> np.dtype[Any]:
    """The integers that ids are kept as."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def save_round(folder: Path, number: int, written: Round) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in written.__slots__:
        np.save(folder / f"{name}-{number}.npy", getattr(written, name))


def save_facts(folder: Path, facts: dict[str, Any]) -> None:
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")


def load_facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "corpus.json").read_text())
    return facts


def rounds(folder: Path) -> Iterator[Round]:
    """All rounds, in order, memory-mapped."""
    for number in range(load_facts(folder)["rounds"]):
        yield Round(*(np.load(folder / f"{name}-{number}.npy", mmap_mode="r") for name in Round.__slots__))
