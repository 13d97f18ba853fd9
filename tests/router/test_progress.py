from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import Internal
from draftwood.v1 import draft_pb2, verifier_pb2
from router.progress import Progress, seeded

TEXT = [17, 4, 99, 3, 8, 21, 56, 70, 2, 35]


def chunk(offset: int, tokens: list[int], accepted: int = 0) -> verifier_pb2.GenerationEvent:
    pieces = [str(token) for token in tokens]
    return verifier_pb2.GenerationEvent(
        chunk=verifier_pb2.Chunk(offset=offset, tokens=tokens, pieces=pieces, accepted=accepted)
    )


def test_a_seed_is_drawn_once_and_kept() -> None:
    progress = Progress(verifier_pb2.Generation(text="a"))
    assert progress.request().sampling.HasField("seed")
    assert progress.request().sampling.seed == progress.request().sampling.seed
    assert seeded(verifier_pb2.Generation()).sampling.seed != seeded(verifier_pb2.Generation()).sampling.seed


def test_a_given_seed_stays_even_if_it_is_zero() -> None:
    generation = verifier_pb2.Generation(sampling=verifier_pb2.Sampling(seed=0))
    assert seeded(generation).sampling.seed == 0


def test_started_passes_once() -> None:
    progress = Progress(verifier_pb2.Generation())
    event = verifier_pb2.GenerationEvent(started=verifier_pb2.Started(seed=1))
    assert progress.admit(event) == event
    assert progress.admit(event) is None


def test_the_rule_in_force_is_kept_for_the_next_verifier() -> None:
    """Its default may be another, and a text must not change its promise in the middle."""
    progress = Progress(verifier_pb2.Generation())
    progress.admit(verifier_pb2.GenerationEvent(started=verifier_pb2.Started(rule=draft_pb2.RULE_REJECTION)))
    assert progress.request().speculation.rule == draft_pb2.RULE_REJECTION


def test_known_tokens_are_cut_off_with_their_pieces_and_marks() -> None:
    progress = Progress(verifier_pb2.Generation(resume_tokens=[17, 4]))
    admitted = progress.admit(chunk(0, [17, 4, 99, 3], accepted=3))
    assert admitted == chunk(2, [99, 3], accepted=1)
    assert progress.admit(chunk(1, [4, 99, 3], accepted=2)) is None


def test_log_probabilities_are_cut_with_their_tokens() -> None:
    progress = Progress(verifier_pb2.Generation(resume_tokens=[17]))
    event = chunk(0, [17, 4, 99])
    event.chunk.logprobs.extend(verifier_pb2.TokenLogprobs(logprob=-k) for k in range(3))
    admitted = progress.admit(event)
    assert admitted and [entry.logprob for entry in admitted.chunk.logprobs] == [-1, -2]


def test_a_gap_is_an_error() -> None:
    progress = Progress(verifier_pb2.Generation())
    with pytest.raises(Internal) as error:
        progress.admit(chunk(1, [4]))
    assert error.value.reason == "CHUNK_GAP"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4))))
def test_whatever_is_repeated_the_client_gets_each_token_once(spans: list[tuple[int, int]]) -> None:
    progress = Progress(verifier_pb2.Generation())
    got: list[int] = []
    for offset, count in spans:
        if offset > len(got):
            continue
        event = progress.admit(chunk(offset, TEXT[offset : offset + count]))
        if event:
            assert event.chunk.offset == len(got)
            got.extend(event.chunk.tokens)
    assert got == TEXT[: len(got)] and progress.tokens == len(got)
    assert list(progress.request().resume_tokens) == got


def test_usage_covers_the_verifiers_that_were_lost() -> None:
    progress = Progress(verifier_pb2.Generation())
    progress.request()
    for offset in range(3):
        progress.admit(chunk(offset, [TEXT[offset]]))
    progress.request()
    progress.admit(chunk(3, [TEXT[3]]))
    usage = verifier_pb2.Usage(steps=1, completion_tokens=4)
    admitted = progress.admit(verifier_pb2.GenerationEvent(finished=verifier_pb2.Finished(usage=usage)))
    assert admitted and admitted.finished.usage.steps == 4
    assert 0 < admitted.finished.usage.first_token_s <= admitted.finished.usage.total_s
