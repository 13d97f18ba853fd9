"""The wire: round trips, every fault by its reason, sizes."""

from __future__ import annotations

import dataclasses
import math
import timeit
from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import wire
from draftwood.errors import BY_STATUS, DraftwoodError, Internal, InvalidArgument, NotFound, ResourceExhausted
from draftwood.features import FeatureRequest
from draftwood.tree import Proposal
from draftwood.v1 import draft_pb2, tree_pb2
from draftwood.vocabulary import Vocabulary
from draftwood.wire import FeatureChunk, SessionCommit, SessionGrowth

VOCAB = 49152
MAX_NODES = 64
UINT32 = 2**32 - 1

uint32 = st.integers(0, UINT32)
scores = st.floats(min_value=-float(np.finfo(np.float32).max), max_value=0.0, width=32)


@st.composite
def session_growths(draw: st.DrawFn, min_nodes: int = 0) -> SessionGrowth:
    count = draw(st.integers(min_nodes, 12))
    first_id = draw(st.integers(1, UINT32 - 2**21))  # the very last ids have a test of their own
    parents = [draw(st.integers(0, first_id + i - 1)) for i in range(count)]
    return SessionGrowth(
        handle=draw(uint32),
        epoch=draw(uint32),
        first_id=first_id,
        parent=np.array(parents, np.int64),
        token=np.array(draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count)), np.int32),
        score=np.array(draw(st.lists(scores, min_size=count, max_size=count)), np.float32),
        complete=draw(st.booleans()),
    )


def decode(message: tree_pb2.Growth) -> tuple[list[SessionGrowth], list[wire.Refusal]]:
    """Decodes what came over the wire, as a server would."""
    parsed = tree_pb2.Growth.FromString(message.SerializeToString())
    return wire.decode_growth(parsed, vocab_size=VOCAB, max_nodes=MAX_NODES)


def assert_equal(got: SessionGrowth, expected: SessionGrowth) -> None:
    for field in dataclasses.fields(SessionGrowth):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), field.name
        else:
            assert a == b and type(a) is type(b), field.name


def tree(sessions: int = 3, nodes: int = 8, first_id: int = 1001) -> list[SessionGrowth]:
    """Sessions 10, 11...: one child of the anchor, the rest below the round's first nodes."""
    parent = np.array([0 if i == 0 else first_id + i // 2 for i in range(nodes)], np.int64)
    parent[1:] = np.minimum(parent[1:], np.arange(first_id, first_id + nodes - 1))
    token = np.arange(nodes, dtype=np.int32) + 40_000
    return [
        SessionGrowth(10 + s, 7, first_id, parent, token, np.full(nodes, -0.5, np.float32), s == 0)
        for s in range(sessions)
    ]


@given(st.lists(session_growths(), max_size=5))
def test_growth_round_trip(growths: list[SessionGrowth]) -> None:
    decoded, refusals = decode(wire.encode_growth(growths))
    assert not refusals
    for got, expected in zip(decoded, growths, strict=True):
        assert_equal(got, expected)


@given(st.lists(session_growths(), max_size=3), st.binary(min_size=1, max_size=20))
def test_unknown_fields_are_ignored(growths: list[SessionGrowth], extra: bytes) -> None:
    message = wire.encode_growth(growths)
    unknown = b"\xfa\x3f" + bytes([len(extra)]) + extra  # field 1023, length-delimited
    parsed = tree_pb2.Growth.FromString(message.SerializeToString() + unknown)
    decoded, refusals = wire.decode_growth(parsed, vocab_size=VOCAB, max_nodes=MAX_NODES)
    assert len(decoded) == len(growths) and not refusals


# Faults of one node; each edits node i of a message and names the reason and the column of the field path.
Edit = Callable[[tree_pb2.Growth, int], None]


def set_parent(id_of: Callable[[int], int]) -> Edit:
    """Parent of node i becomes id_of(own id), whatever the parent base is."""

    def edit(message: tree_pb2.Growth, i: int) -> None:
        session = int(np.searchsorted(np.cumsum(message.count), i, side="right"))
        own = message.first_id[session] + i - sum(message.count[:session])
        message.parent[i] = min(id_of(own) - message.parent_base[session], UINT32)

    return edit


def set_column(column: str, value: float) -> Edit:
    def edit(message: tree_pb2.Growth, i: int) -> None:
        getattr(message, column)[i] = value

    return edit


NODE_FAULTS: dict[str, tuple[Edit, str, str]] = {
    "own parent": (set_parent(lambda own: own), "TREE_CYCLE", "parent"),
    "next node as parent": (set_parent(lambda own: own + 1), "TREE_FORWARD_PARENT", "parent"),
    "far parent": (set_parent(lambda own: own + 10**6), "TREE_FORWARD_PARENT", "parent"),
    "huge parent": (set_column("parent", UINT32), "TREE_FORWARD_PARENT", "parent"),
    "token = vocabulary": (set_column("token", VOCAB), "TREE_TOKEN_OUT_OF_VOCABULARY", "token"),
    "token = 2**31": (set_column("token", 2**31), "TREE_TOKEN_OUT_OF_VOCABULARY", "token"),
    "token = 2**32 - 1": (set_column("token", UINT32), "TREE_TOKEN_OUT_OF_VOCABULARY", "token"),
    "score NaN": (set_column("score", float("nan")), "TREE_BAD_SCORE", "score"),
    "score +Inf": (set_column("score", float("inf")), "TREE_BAD_SCORE", "score"),
    "score -Inf": (set_column("score", float("-inf")), "TREE_BAD_SCORE", "score"),
    "score +0.5": (set_column("score", 0.5), "TREE_BAD_SCORE", "score"),
    "score +denormal": (set_column("score", 1e-45), "TREE_BAD_SCORE", "score"),
}


@pytest.mark.parametrize("fault", NODE_FAULTS)
@given(data=st.data())
@settings(max_examples=25)
def test_node_fault_refuses_its_session_alone(fault: str, data: st.DataObject) -> None:
    edit, reason, column = NODE_FAULTS[fault]
    growths = [*data.draw(st.lists(session_growths(), max_size=2)), data.draw(session_growths(min_nodes=1))]
    others = data.draw(st.lists(session_growths(), max_size=2))
    start = sum(len(growth.parent) for growth in growths[:-1])
    node = start + data.draw(st.integers(0, len(growths[-1].parent) - 1))
    message = wire.encode_growth([*growths, *others])
    edit(message, node)
    decoded, refusals = decode(message)
    assert [(r.handle, r.error.reason, r.error.field) for r in refusals] == [
        (growths[-1].handle, reason, f"growth.{column}[{node}]")
    ]
    for got, expected in zip(decoded, [*growths[:-1], *others], strict=True):
        assert_equal(got, expected)


def test_cycle_of_two_is_a_forward_parent() -> None:
    message = wire.encode_growth(tree(sessions=1))
    set_parent(lambda own: own + 1)(message, 3)
    set_parent(lambda own: own - 1)(message, 4)
    _, refusals = decode(message)
    assert [(r.error.reason, r.error.field) for r in refusals] == [("TREE_FORWARD_PARENT", "growth.parent[3]")]


def test_parent_base_overflow_is_a_forward_parent() -> None:
    message = wire.encode_growth(tree(sessions=2))
    message.parent_base[1] = UINT32
    decoded, refusals = decode(message)
    assert [growth.handle for growth in decoded] == [10]
    assert [(r.handle, r.error.reason, r.error.field) for r in refusals] == [
        (11, "TREE_FORWARD_PARENT", "growth.parent[9]")
    ]


@pytest.mark.parametrize("score", [0.0, -0.0, -1e-45, -1.17e-38, -3.4e38])
def test_extreme_scores_are_fine(score: float) -> None:
    message = wire.encode_growth(tree(sessions=1))
    message.score[2] = score
    decoded, refusals = decode(message)
    assert not refusals
    assert decoded[0].score[2] == np.float32(score)


@pytest.mark.parametrize("first_id", [1, UINT32 - 7])
def test_extreme_ids_are_fine(first_id: int) -> None:
    growths = tree(first_id=first_id)
    decoded, refusals = decode(wire.encode_growth(growths))
    assert not refusals
    assert_equal(decoded[2], growths[2])


@pytest.mark.parametrize("first_id", [0, UINT32 - 6, UINT32])
def test_bad_ids(first_id: int) -> None:
    message = wire.encode_growth(tree())
    message.first_id[1] = first_id
    decoded, refusals = decode(message)
    assert [growth.handle for growth in decoded] == [10, 12]
    assert [(r.handle, r.error.reason, r.error.field) for r in refusals] == [(11, "TREE_BAD_ID", "growth.first_id[1]")]


def test_node_cap_holds_for_each_entry() -> None:
    growths = [*tree(sessions=1, nodes=MAX_NODES), *tree(sessions=1, nodes=MAX_NODES + 1)]
    decoded, refusals = decode(wire.encode_growth(growths))
    assert [len(growth.parent) for growth in decoded] == [MAX_NODES]
    assert [(r.error.reason, r.error.field) for r in refusals] == [("TREE_TOO_LARGE", "growth.count[1]")]
    assert str(MAX_NODES + 1) in refusals[0].error.message and str(MAX_NODES) in refusals[0].error.message
    unlimited, _ = wire.decode_growth(wire.encode_growth(growths), vocab_size=VOCAB, max_nodes=0)
    assert len(unlimited) == 2


def test_no_nodes_and_no_sessions_are_fine() -> None:
    decoded, refusals = decode(wire.encode_growth(tree(sessions=2, nodes=0)))
    assert [(growth.handle, len(growth.parent), growth.complete) for growth in decoded] == [
        (10, 0, True),
        (11, 0, False),
    ]
    assert not refusals
    assert decode(tree_pb2.Growth()) == ([], [])


COLUMNS = ("handle", "epoch", "first_id", "parent_base", "count", "complete", "parent", "token", "score")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("by", ["one short", "one long", "empty"])
def test_length_mismatch_refuses_the_message(column: str, by: str) -> None:
    message = wire.encode_growth(tree(sessions=2))
    values = getattr(message, column)
    if by == "one long":
        values.append(values[-1])
    else:
        del values[-1 if by == "one short" else 0 :]
    with pytest.raises(InvalidArgument) as caught:
        decode(message)
    assert caught.value.reason == "TREE_LENGTH_MISMATCH"
    expected = {"handle": "epoch"}.get(column, column)  # handles are what the other columns are held against
    assert caught.value.field == f"growth.{expected}"


def test_counts_beyond_the_nodes_refuse_the_message() -> None:
    message = wire.encode_growth(tree(sessions=2))
    message.count[1] = UINT32
    with pytest.raises(InvalidArgument) as caught:
        decode(message)
    assert (caught.value.reason, caught.value.field) == ("TREE_LENGTH_MISMATCH", "growth.parent")


def sampled(first_id: int = 2001) -> list[SessionGrowth]:
    """Session 10: two equal children of the anchor, and two of the first. Session 11: no nodes. Session 12: by ids."""
    q = Proposal(np.array([3, 7, 900]), np.array([0.5, 0.25, 0.25], np.float32))
    below = Proposal(np.array([0, VOCAB - 1]), np.array([0.3, 0.7], np.float32))
    parent, token = np.array([0, 0, first_id, first_id], np.int64), np.array([7, 7, VOCAB - 1, 0], np.int32)
    score = np.full(4, -0.5, np.float32)
    own = SessionGrowth(10, 7, first_id, parent, token, score, True, {0: q, first_id: below})
    none = SessionGrowth(11, 7, 1, parent[:0], token[:0], score[:0], True)
    return [own, none, dataclasses.replace(tree(sessions=3)[2], first_id=1001)]


def test_proposals_round_trip_bit_by_bit() -> None:
    growths = sampled()
    decoded, refusals = decode(wire.encode_growth(growths))
    assert not refusals and len(decoded) == 3
    for got, expected in zip(decoded, growths, strict=True):
        assert got.drawn.keys() == expected.drawn.keys()
        for parent, q in expected.drawn.items():
            assert (got.drawn[parent].token == q.token).all() and (got.drawn[parent].prob == q.prob).all()
            assert got.drawn[parent].weight.tobytes() == q.weight.tobytes()
        assert_equal(dataclasses.replace(got, drawn={}), dataclasses.replace(expected, drawn={}))
    assert decoded[0].drawn[0].prob.dtype == np.float64
    assert not wire.encode_growth(growths[1:]).drawn, "no columns where nobody samples"


@pytest.mark.parametrize("column", ["drawn", "q_parent", "q_count", "q_token", "q_prob"])
@pytest.mark.parametrize("by", ["one short", "one long"])
def test_proposal_columns_of_uneven_length_refuse_the_message(column: str, by: str) -> None:
    message = wire.encode_growth(sampled())
    values = getattr(message, column)
    if by == "one long":
        values.append(values[-1])
    else:
        del values[-1]
    with pytest.raises(InvalidArgument) as caught:
        decode(message)
    assert caught.value.reason == "TREE_LENGTH_MISMATCH" and caught.value.field.startswith("growth.")


Q_FAULTS: dict[str, tuple[str, list[float], str]] = {
    "sum_too_large": ("q_prob", [0.5, 0.25, 0.2511], "q_count[0]"),
    "sum_too_small": ("q_prob", [0.5, 0.2489, 0.25], "q_count[0]"),
    "zero_probability": ("q_prob", [0.75, 0.25, 0.0], "q_prob[2]"),
    "negative_probability": ("q_prob", [1.25, 0.25, -0.5], "q_prob[2]"),
    "nan_probability": ("q_prob", [0.75, math.nan, 0.25], "q_prob[1]"),
    "infinite_probability": ("q_prob", [math.inf, 0.25, 0.25], "q_prob[0]"),
    "sampled_token_has_none": ("q_token", [3, 8, 900], "token[0]"),
    "twice_the_same_token": ("q_token", [7, 7, 900], "q_token[1]"),
    "tokens_out_of_order": ("q_token", [7, 3, 900], "q_token[1]"),
    "token_out_of_vocabulary": ("q_token", [3, 7, VOCAB], "q_token[2]"),
    "same_parent_twice": ("q_parent", [0, 0], "q_parent[1]"),
    "parent_without_one": ("q_parent", [0, 2], "parent[2]"),
}


@pytest.mark.parametrize("fault", Q_FAULTS)
def test_bug_7_a_q_that_cannot_be_what_was_sampled_from_refuses_its_session_alone(fault: str) -> None:
    column, values, field = Q_FAULTS[fault]
    message = wire.encode_growth(sampled())
    for k, value in enumerate(values):
        getattr(message, column)[k] = value
    decoded, refusals = decode(message)
    assert [growth.handle for growth in decoded] == [11, 12]
    assert [(r.handle, r.error.reason, r.error.field) for r in refusals] == [(10, "TREE_BAD_Q", f"growth.{field}")]


@pytest.mark.parametrize("off", [-0.0009, 0.0009])
def test_a_q_whose_sum_is_off_by_rounding_is_taken_as_normalised(off: float) -> None:
    message = wire.encode_growth(sampled())
    message.q_prob[0] += off
    decoded, refusals = decode(message)
    assert not refusals and decoded[0].drawn[0].prob.sum() == pytest.approx(1, abs=1e-15)


@given(data=st.data())
@settings(max_examples=300)
def test_any_message_is_decoded_or_refused(data: st.DataObject) -> None:
    """Columns of any content: what is let through is valid, every session is answered once, nothing else is raised."""
    sessions = data.draw(st.integers(0, 3))
    nodes = data.draw(st.integers(0, 4))
    numbers = st.one_of(st.integers(0, 5), st.sampled_from([VOCAB - 1, VOCAB, 2**31 - 1, 2**31, UINT32]))
    length = {**dict.fromkeys(COLUMNS[:6], sessions), **dict.fromkeys(COLUMNS[6:], nodes)}
    values = {"complete": st.booleans(), "score": st.floats(width=32)}
    message = tree_pb2.Growth()
    for name in COLUMNS:
        column = st.lists(values.get(name, numbers), min_size=length[name], max_size=length[name])
        getattr(message, name).extend(data.draw(column))
    try:
        decoded, refusals = decode(message)
    except InvalidArgument as error:
        assert error.reason == "TREE_LENGTH_MISMATCH" and sum(message.count) != nodes
        return
    assert sorted([g.handle for g in decoded] + [r.handle for r in refusals]) == sorted(message.handle)
    for growth in decoded:
        own = growth.first_id + np.arange(len(growth.parent))
        assert (growth.parent < own).all() and (growth.parent >= 0).all()
        assert ((growth.token >= 0) & (growth.token < VOCAB)).all()
        assert (np.isfinite(growth.score) & (growth.score <= 0)).all()


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes(data: bytes) -> None:
    try:
        message = tree_pb2.Growth.FromString(data)
    except DecodeError:
        return
    try:
        wire.decode_growth(message, vocab_size=VOCAB, max_nodes=MAX_NODES)
    except InvalidArgument as error:
        assert error.reason == "TREE_LENGTH_MISMATCH"


@pytest.mark.parametrize("sessions", [1, 8, 64])
def test_round_of_64_nodes_takes_8_bytes_a_node(sessions: int) -> None:
    growths = tree(sessions=sessions, nodes=64, first_id=3_000_000_000)
    message = wire.encode_growth(growths)
    assert message.ByteSize() <= sessions * (64 * 8 + 64)


def test_decoding_64_nodes_is_fast() -> None:
    message = wire.encode_growth(tree(sessions=1, nodes=64))
    timer = timeit.Timer(lambda: wire.decode_growth(message, vocab_size=VOCAB, max_nodes=MAX_NODES))
    assert min(timer.repeat(number=1, repeat=5000)) < 100e-6  # measured: 28 us


@st.composite
def commits(draw: st.DrawFn) -> SessionCommit:
    tokens = draw(st.lists(uint32, max_size=6))
    node_ids = draw(st.lists(uint32, max_size=len(tokens)))
    length, count = draw(uint32), draw(st.integers(0, 3))
    features = draw(st.binary(min_size=4 * count, max_size=4 * count)) if count < length else b""
    told = (len(features) // 4, features)
    return SessionCommit(draw(uint32), draw(uint32), length, tuple(tokens), tuple(node_ids), draw(uint32), *told)


@given(st.lists(commits(), max_size=5))
def test_commits_round_trip(rows: list[SessionCommit]) -> None:
    message = draft_pb2.Commits.FromString(wire.encode_commits(rows).SerializeToString())
    assert wire.decode_commits(message) == rows


@pytest.mark.parametrize("column", ["handle", "epoch", "length", "accepted", "count", "budget", "token", "node_id"])
def test_commits_of_uneven_columns_are_refused(column: str) -> None:
    message = wire.encode_commits([SessionCommit(1, 2, 9, (5, 6), (3,), 64), SessionCommit(2, 2, 9, (5, 6), (3,), 64)])
    getattr(message, column).append(1)
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_commits(message)
    assert caught.value.reason == "TREE_LENGTH_MISMATCH"
    assert caught.value.field == f"commits.{'epoch' if column == 'handle' else column}"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m.feature_count.append(0), "feature_count"),
        (lambda m: m.feature_count.__setitem__(0, 1), "features"),
        (lambda m: setattr(m, "features", m.features + b"\0"), "features"),
        (lambda m: setattr(m, "features", b""), "features"),
        (lambda m: m.length.__setitem__(1, 1), "feature_count[1]"),
    ],
    ids=["columns", "fewer", "longer", "none", "before-the-text"],
)
def test_commits_whose_features_do_not_fit_are_refused(change: Callable[[draft_pb2.Commits], None], field: str) -> None:
    two = [SessionCommit(k, 2, 9, (5, 6), (3,), 64, feature_count=2, features=b"abcdefghij") for k in (1, 2)]
    message = wire.encode_commits(two)
    change(message)
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_commits(message)
    assert (caught.value.reason, caught.value.field) == ("TREE_LENGTH_MISMATCH", f"commits.{field}")


def test_a_request_and_a_chunk_of_features_round_trip() -> None:
    request, chunk = FeatureRequest((2, 0, 7), 576, "target"), FeatureChunk(3, 40, 2, b"abcd")
    asked = draft_pb2.FeatureRequest.FromString(wire.feature_request_to_proto(request).SerializeToString())
    sent = draft_pb2.FeatureChunk.FromString(wire.encode_chunk(chunk).SerializeToString())
    assert (wire.feature_request_from_proto(asked), wire.decode_chunk(sent)) == (request, chunk)


def test_commit_cannot_accept_more_nodes_than_tokens() -> None:
    message = wire.encode_commits([SessionCommit(1, 2, 9, (5,), (3, 4), 64)])
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_commits(message)
    assert (caught.value.reason, caught.value.field) == ("TREE_LENGTH_MISMATCH", "commits.accepted[0]")


@pytest.mark.parametrize("kind", BY_STATUS.values())
def test_error_round_trip(kind: type[DraftwoodError]) -> None:
    error = kind("SOME_REASON", "seven is over six", field="a.b[7]", retry_after_ms=250)
    message = tree_pb2.Error.FromString(wire.error_to_proto(error).SerializeToString())
    back = wire.error_from_proto(message)
    assert type(back) is kind
    assert (back.reason, back.message, back.field, back.retry_after_ms) == (
        "SOME_REASON",
        "seven is over six",
        "a.b[7]",
        250,
    )


def test_error_codes_are_those_of_google_rpc() -> None:
    assert wire.error_to_proto(InvalidArgument("R", "m")).code == 3
    assert wire.error_to_proto(NotFound("R", "m")).code == 5
    assert wire.error_to_proto(ResourceExhausted("R", "m")).code == 8


@pytest.mark.parametrize("code", [0, 2, 99, -1])
def test_unused_code_becomes_internal(code: int) -> None:
    error = wire.error_from_proto(tree_pb2.Error(code=code, message="m"))
    assert type(error) is Internal and error.reason == "INTERNAL"


def test_long_and_unprintable_texts_still_travel() -> None:
    message = wire.error_to_proto(InvalidArgument("R", "\udcff" + "\u20ac" * 5000, field="f" * 5000))
    assert message.message.startswith("?\u20ac") and 900 < len(message.message.encode()) <= 1024
    assert len(message.field) == 256


def test_smaller_caps() -> None:
    """Bug kind 33."""
    a = draft_pb2.Caps(max_nodes=64, max_depth=0, max_sessions=8, max_message_bytes=0, max_context_tokens=5)
    b = draft_pb2.Caps(max_nodes=32, max_depth=9, max_sessions=0, max_message_bytes=0, max_context_tokens=5)
    expected = draft_pb2.Caps(max_nodes=32, max_depth=9, max_sessions=8, max_message_bytes=0, max_context_tokens=5)
    assert wire.smaller_caps(a, b) == wire.smaller_caps(b, a) == expected


def test_tokenizer_round_trip() -> None:
    fingerprint = Vocabulary(("a", "b", "<s>"), frozenset({2}), 64).fingerprint()
    message = draft_pb2.TokenizerInfo.FromString(wire.tokenizer_to_proto(fingerprint).SerializeToString())
    assert wire.tokenizer_from_proto(message) == fingerprint


def test_step_times() -> None:
    assert wire.decode_step_times(draft_pb2.StepTimes(rows=[1, 8], ms=[2.0, 3.5])) == ((1, 2.0), (8, 3.5))


@pytest.mark.parametrize(
    ("rows", "ms"),
    [([1], [2.0]), ([1, 2], [2.0]), ([2, 1], [1.0, 2.0]), ([1, 2], [0.0, 1.0]), ([1, 2], [1.0, math.inf])],
)
def test_step_times_that_are_no_curve_are_refused(rows: list[int], ms: list[float]) -> None:
    with pytest.raises(InvalidArgument, match="two or more, ascending, above 0") as caught:
        wire.decode_step_times(draft_pb2.StepTimes(rows=rows, ms=ms))
    assert caught.value.reason == "STEP_TIMES"
