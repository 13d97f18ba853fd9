"""What is read along a stream: which guesses were taken, by depth and by rank, and what a round takes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftwood.tap import Tally, _Session, _Stream
from draftwood.v1 import draft_pb2
from draftwood.wire import SessionCommit, SessionGrowth, encode_commits, encode_growth


def growth(epoch: int, first: int, parent: list[int], token: list[int], chance: list[float]) -> SessionGrowth:
    scores = np.array([math.log(c) for c in chance], np.float32)
    return SessionGrowth(1, epoch, first, np.array(parent, np.int64), np.array(token, np.int32), scores, True)


def commit(epoch: int, tokens: list[int], accepted: int, budget: int = 8) -> SessionCommit:
    return SessionCommit(1, epoch, 10, tuple(tokens), tuple(range(1, accepted + 1)), budget)


def test_guesses_by_depth_and_rank() -> None:
    session, tally = _Session(), Tally()
    session.begin(0, 8, 1.0)
    # Anchor: 5 (likeliest), 6; below 6: 7, 8, of which 8 is the likelier.
    session.grow(growth(0, 1, [0, 0, 2, 2], [5, 6, 7, 8], [0.6, 0.3, 0.2, 0.7]), tally, 1.25)
    session.commit(commit(1, [6, 7, 9], 2), tally, 2.0)
    assert (tally.rounds, tally.tokens, tally.nodes, tally.round_s) == (1, 3, 4, [0.25])
    assert dict(tally.asked) == {0: 1, 1: 1} and dict(tally.taken) == {0: 1, 1: 1}
    assert dict(tally.ranks) == {1: 2}, "6 and 7 were each the second"
    # A round of the text 6 7 9: nothing is right.
    session.grow(growth(1, 5, [0], [3], [0.5]), tally, 2.5)
    session.commit(commit(2, [4], 0), tally, 3.0)
    assert dict(tally.asked) == {0: 2, 1: 1} and dict(tally.taken) == {0: 1, 1: 1}
    # No round in time: a step without a tree says nothing about the draft.
    session.commit(commit(3, [1], 0), tally, 3.1)
    assert tally.rounds == 2 and tally.tokens == 4


def test_nodes_live_on_below_the_new_anchor_and_late_ones_belong_to_their_epoch() -> None:
    session, tally = _Session(), Tally()
    session.begin(0, 8, 0.0)
    session.grow(growth(0, 1, [0, 1, 2], [5, 6, 7], [0.9, 0.9, 0.9]), tally, 0.1)
    session.commit(commit(1, [5, 6], 1), tally, 0.2)
    session.grow(growth(0, 4, [3], [8], [0.9]), tally, 0.25)
    assert not session.complete, "it was drawn for the epoch before"
    session.grow(growth(1, 5, [4], [9], [0.9]), tally, 0.3)
    session.commit(commit(2, [7, 8, 9, 1], 3), tally, 0.4)
    assert dict(tally.taken) == {0: 2, 1: 1, 2: 1}


def test_a_right_guess_that_was_not_verified_counts_neither_way() -> None:
    session, tally = _Session(), Tally()
    session.begin(0, 8, 0.0)
    session.grow(growth(0, 1, [0, 1], [5, 6], [0.9, 0.9]), tally, 0.1)
    session.commit(commit(1, [5, 6], 1), tally, 0.2)
    assert dict(tally.asked) == {0: 1} == dict(tally.taken)


@pytest.mark.parametrize("canary", [True, False])
def test_bytes_of_sessions_count_and_the_canary_does_not(canary: bool) -> None:
    tally = Tally()
    stream = _Stream(tally)
    welcome = draft_pb2.Welcome(protocol_version=1)
    welcome.canary.session_id = "the canary"
    stream.down(draft_pb2.SpeculateResponse(welcome=welcome).SerializeToString())
    name = "the canary" if canary else "a text"
    stream.up(draft_pb2.SpeculateRequest(joins=[draft_pb2.Join(session_id=name, handle=1)]).SerializeToString())
    start = draft_pb2.Start(handle=1, tokens=[1], budget=4)
    stream.down(draft_pb2.SpeculateResponse(starts=[start]).SerializeToString())
    up = draft_pb2.SpeculateRequest(growth=encode_growth([growth(0, 1, [0], [5], [0.9])])).SerializeToString()
    down = draft_pb2.SpeculateResponse(commits=encode_commits([commit(1, [5, 6], 1)])).SerializeToString()
    stream.up(up)
    stream.down(down)
    assert (tally.bytes_up, tally.bytes_down, tally.rounds) == ((0, 0, 0) if canary else (len(up), len(down), 1))
