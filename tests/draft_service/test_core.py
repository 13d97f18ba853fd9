"""The books around a drafter: sessions, rounds, what happens when a forward fails or a text does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from draft_service.core import DraftCore
from draft_service.drafter import Key, SessionCommitted, SessionStart
from draftwood.parameters import SamplingParams
from draftwood.vocabulary import Vocabulary
from draftwood.wire import SessionGrowth

A, B, C = (1, 1), (1, 2), (2, 1)


class ScriptedDrafter:
    """Draws one node a round for every session it knows."""

    kind = "scripted"
    model = ""

    def __init__(self, tokens: int = 10) -> None:
        self.vocabulary: Vocabulary | None = Vocabulary(("x",) * tokens, frozenset(), tokens + 2)
        self.length: dict[Key, int] = {}
        self.due: set[Key] = set()

    def open(self, key: Key, start: SessionStart) -> None:
        self.length[key] = len(start.tokens)
        self.due.add(key)

    def commit(self, key: Key, committed: SessionCommitted) -> None:
        if self.length[key] + len(committed.tokens) != committed.length:
            raise ValueError("a gap")
        self.length[key] = committed.length
        self.due.add(key)

    def close(self, key: Key) -> None:
        self.length.pop(key, None)
        self.due.discard(key)

    def wants_work(self) -> bool:
        return bool(self.due)

    def work(self) -> list[tuple[Key, SessionGrowth]]:
        due, self.due = sorted(self.due), set()
        parent, token, score = np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(1, np.float32)
        return [(key, SessionGrowth(key[1], 0, 1, parent, token, score, True)) for key in due]


def start(*tokens: int) -> SessionStart:
    return SessionStart(0, tokens, SamplingParams(), 4, 10, 16, 8, 100)


def core_with(*keys: Key) -> tuple[DraftCore, ScriptedDrafter]:
    drafter = ScriptedDrafter()
    core = DraftCore(drafter)
    for key in keys:
        assert core.open(key, start(1, 2))
    return core, drafter


def test_growth_goes_to_the_link_of_its_session() -> None:
    core, _ = core_with(A, B, C)
    assert core.due() == 0.0
    out = core.step()
    assert {link: [g.handle for g in growths] for link, growths in out.growths.items()} == {1: [1, 2], 2: [1]}
    assert core.due() is None
    assert core.nodes_drafted == 3 and core.round_s > 0


def test_gap_gives_the_session_up_and_no_other() -> None:
    core, drafter = core_with(A, B)
    assert not core.commit(A, SessionCommitted(1, 9, (3,), 4))
    assert core.sessions == 1 and set(drafter.length) == {B}
    assert core.commit(B, SessionCommitted(1, 3, (3,), 4))


@pytest.mark.parametrize("act", ["open", "commit", "feed"])
def test_an_error_of_any_kind_gives_its_session_up_and_no_other(monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """These are commands on the drafter's thread, which would end by it for all verifiers."""
    core, drafter = core_with(A, B)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(drafter, act, fail, raising=False)
    acts = {
        "open": lambda: core.open(C, start(1, 2)),
        "commit": lambda: core.commit(A, SessionCommitted(1, 3, (3,), 4)),
        "feed": lambda: core.feed(A, 0, np.zeros((1, 1, 2), np.uint16)),
    }
    assert not acts[act]()
    monkeypatch.undo()
    assert core.sessions == len(drafter.length) == (2 if act == "open" else 1)
    assert core.commit(B, SessionCommitted(1, 3, (3,), 4))


def test_token_without_a_row_in_the_draft_never_reaches_the_drafter() -> None:
    core, drafter = core_with(A)
    assert core.commit(A, SessionCommitted(1, 3, (11,), 4)), "padding has rows"
    assert not core.commit(A, SessionCommitted(2, 4, (12,), 4))
    assert not core.open(B, start(1, 12))
    assert core.sessions == 0 and not drafter.length


def test_drafter_without_vocabulary_takes_any_token() -> None:
    core, drafter = core_with()
    drafter.vocabulary = None
    assert core.open(A, start(10**9))


def test_commit_after_close_is_ignored() -> None:
    core, _ = core_with(A)
    core.close(A)
    core.close(A)
    assert core.commit(A, SessionCommitted(1, 3, (3,), 4))
    assert core.sessions == 0


def test_crash_leaves_every_session_once() -> None:
    core, drafter = core_with(A, B, C)
    out = core.crash(RuntimeError("broken"))
    assert out.leaves == {1: [1, 2], 2: [1]} and not out.growths
    assert core.sessions == 0 and not drafter.length
    assert core.due() is None


def test_closed_link_takes_its_sessions_only() -> None:
    core, drafter = core_with(A, B, C)
    core.close_link(1)
    assert core.sessions == 1 and set(drafter.length) == {C}
