from __future__ import annotations

from draftwood.v1 import verifier_pb2
from router.affinity import HOLDERS, MOST_PIECES, PIECE_BYTES, Beginnings, beginnings


def text(content: str) -> list[bytes]:
    return beginnings(verifier_pb2.Generation(text=content))


def chat(*contents: str) -> list[bytes]:
    messages = [verifier_pb2.ChatMessage(role="user", content=content) for content in contents]
    return beginnings(verifier_pb2.Generation(chat=verifier_pb2.Chat(messages=messages)))


def test_prompts_that_begin_alike_share_the_hashes_of_what_they_share() -> None:
    common = "x" * (2 * PIECE_BYTES)
    one, two = text(common + "one" * 300), text(common + "two" * 300)
    assert one[:2] == two[:2] and one[2] != two[2] and len(one) == 3
    assert text("y" + common)[1] != one[1], "a beginning is all that comes before"


def test_pieces_that_are_not_full_do_not_count() -> None:
    assert text("x" * (PIECE_BYTES - 1)) == [] and len(text("x" * (PIECE_BYTES + 1))) == 1


def test_a_conversation_that_goes_on_begins_alike() -> None:
    first = chat("a" * 600, "b" * 600)
    assert chat("a" * 600, "b" * 600, "c" * 900)[:2] == first[:2]


def test_token_ids_count_as_content() -> None:
    ids = [verifier_pb2.Generation(token_ids=verifier_pb2.TokenIds(ids=[5, last] * 600)) for last in (6, 7)]
    assert beginnings(ids[0])[0] != beginnings(ids[1])[0] and len(beginnings(ids[0])) == 2


def test_long_prompts_cost_no_more_and_empty_ones_nothing() -> None:
    assert len(text("x" * PIECE_BYTES * 100)) == MOST_PIECES and text("") == [] == beginnings(verifier_pb2.Generation())


def test_sampling_does_not_matter() -> None:
    sampled = verifier_pb2.Generation(text="x" * 600, sampling=verifier_pb2.Sampling(seed=5))
    assert beginnings(sampled) == text("x" * 600)


def test_the_share_that_is_known() -> None:
    known = Beginnings()
    prompt = text("x" * (9 * PIECE_BYTES))
    known.served(prompt[:4], "v0")
    known.served(prompt[:1], "v1")
    assert known.known(prompt) == {"v0": 0.5, "v1": 0.125}
    known.served(prompt, "v1")
    assert known.known(prompt) == {"v0": 0.5, "v1": 1.0}
    assert known.known(text("y" * PIECE_BYTES)) == {} == known.known([])


def test_the_last_holders_are_remembered_and_old_beginnings_forgotten() -> None:
    known = Beginnings(most=2)
    for k in range(HOLDERS + 2):
        known.served([b"a"], f"v{k}")
    assert set(known.known([b"a"])) == {f"v{k}" for k in range(2, HOLDERS + 2)}
    known.served([b"b"], "v0")
    known.served([b"c"], "v0")
    assert known.known([b"a"]) == {} and known.known([b"c"]) == {"v0": 0.125}
