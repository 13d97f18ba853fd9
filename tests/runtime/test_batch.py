"""Packing a forward: every field against a slow oracle, in a buffer of its own and in a larger, dirty one."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from forwards import VOCAB, random_part, random_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.kernels.tree_attention import AttentionBatch, tree_attention_reference
from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import (
    Forward,
    Padding,
    Ragged,
    Rows,
    Shape,
    assemble,
    forward_tensors,
    host_arrays,
)
from draftwood.runtime.graphs import REQUESTS, ROWS, WORDS, Computed, Picks, bucket_of
from draftwood.runtime.model import ModelRuntime, random_model

CPU = torch.device("cpu")
SCRATCH = 10_000
COLUMNS = 40

cases = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from([16, 32, 64]), st.integers(1, 20), st.integers(0, 300)
)


def make(case: tuple[int, int, int, int, int]) -> tuple[list[Rows], int]:
    seed, requests, page, most_rows, most_context = case
    return random_parts(np.random.default_rng(seed), requests, page, most_rows, most_context), page


def check(forward: Forward, parts: list[Rows], page: int) -> None:
    """The real rows, requests and wanted rows of ``forward`` against one row at a time."""
    batch, first, wanted = forward.attention, 0, []
    for r, part in enumerate(parts):
        n, tail = part.visible.shape
        base, keys = part.context // page * page, part.context + tail
        assert batch.row_start[r] == first and batch.row_start[r + 1] == first + n
        assert batch.context[r] == part.context and batch.keys[r] == keys
        used = -(-keys // page)
        assert batch.block_table[r, :used].tolist() == list(part.pages[:used])
        slots = [*range(base, part.context), *part.tail_position.tolist()]
        assert batch.tail_position[r, : len(slots)].tolist() == slots
        for k in range(n):
            row, slot = first + k, keys - n + k
            assert forward.input_ids[row] == part.token[k]
            assert batch.position[row] == part.tail_position[tail - n + k]
            assert (int(batch.page_id[row]), int(batch.page_offset[row])) == (part.pages[slot // page], slot % page)
            bits = [(int(batch.words[row, j // 32]) >> j % 32) & 1 for j in range(32 * batch.words.shape[1])]
            sees = [1] * (part.context - base) + part.visible[k].astype(int).tolist()
            assert bits == sees + [0] * (len(bits) - len(sees))
            if k >= part.logits_from:
                wanted.append(row)
        first += n
    assert forward.logits_rows[: len(wanted)].tolist() == wanted
    after = batch.position[forward.logits_rows[: len(wanted)]] + 1
    assert forward.choice.position[: len(wanted)].tolist() == after.tolist()


def check_padding(forward: Forward, rows: int, requests: int, wanted: int) -> None:
    batch = forward.attention
    assert (batch.page_id[rows:] == SCRATCH).all() and (batch.page_offset[rows:] == 0).all()
    assert not batch.words[rows:].any() and not batch.position[rows:].any() and not forward.input_ids[rows:].any()
    assert (batch.row_start[requests:] == rows).all()
    assert not batch.context[requests:].any() and not batch.keys[requests:].any()
    last = forward.logits_rows[wanted - 1] if wanted else 0
    assert (forward.logits_rows[wanted:] == last).all()


@given(cases, st.sampled_from([1, 4]))
@settings(max_examples=60, deadline=None)
def test_every_field_says_what_the_parts_say(case: tuple[int, int, int, int, int], multiple: int) -> None:
    parts, page = make(case)
    forward = assemble(Ragged(parts, page), CPU, Padding(multiple, SCRATCH))
    rows, wanted = sum(len(p.token) for p in parts), sum(len(p.token) - p.logits_from for p in parts)
    check(forward, parts, page)
    check_padding(forward, rows, len(parts), wanted)
    assert len(forward.input_ids) == rows + (-rows % multiple if rows > 1 else 0)
    assert len(forward.logits_rows) == wanted + (-wanted % multiple if wanted > 1 else 0)


@given(cases, st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_dirty_buffer_of_a_bucket_holds_the_same_forward(case: tuple[int, int, int, int, int], dirt: int) -> None:
    """Both buffers, the host's and the one it is copied to, hold what other forwards have left there."""
    parts, page = make(case)
    ragged = Ragged(parts, page)
    bucket = bucket_of(ragged.shape(), COLUMNS)
    assert bucket is not None
    rng = np.random.default_rng(dirt)
    host, there = (rng.integers(-(2**31), 2**31, bucket.ints, dtype=np.int64).astype(np.int32) for _ in range(2))
    ragged.write(host_arrays(host, bucket), SCRATCH)
    used = ragged.used_ints(bucket)
    there[:used] = host[:used]
    forward = forward_tensors(torch.from_numpy(there), bucket)
    check(forward, parts, page)
    check_padding(forward, ragged.rows, len(parts), len(ragged.wanted))
    assert not forward.attention.block_table[: len(parts)].amin() < 0, "pages that are loaded ahead exist"


@given(cases)
@settings(max_examples=20, deadline=None)
def test_attention_over_a_bucket_is_attention_over_the_parts(case: tuple[int, int, int, int, int]) -> None:
    parts, page = make(case)
    ragged = Ragged(parts, page)
    bucket = bucket_of(ragged.shape(), COLUMNS)
    assert bucket is not None
    buffer = np.zeros(bucket.ints, np.int32)
    ragged.write(host_arrays(buffer, bucket), SCRATCH)
    padded = forward_tensors(torch.from_numpy(buffer), bucket).attention
    plain = assemble(ragged, CPU, Padding(1, SCRATCH)).attention
    generator = torch.Generator().manual_seed(case[0])
    pages = 1 + max(max(part.pages) for part in parts)
    cache = torch.randn(2, pages, 1, page, 8, generator=generator, dtype=torch.float64)
    query = torch.randn(bucket.rows, 2, 8, generator=generator, dtype=torch.float64)

    def attend(batch: AttentionBatch, rows: int) -> torch.Tensor:
        return tree_attention_reference(query[:rows], cache[0], cache[1], batch, scale=0.3, window=50)

    out = attend(padded, bucket.rows)
    torch.testing.assert_close(out[: ragged.rows], attend(plain, ragged.rows))
    assert not out[ragged.rows :].any()


@pytest.fixture(scope="module")
def model_runtime() -> ModelRuntime:
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    }  # fmt: skip
    return ModelRuntime(random_model(config, CPU, torch.float64), kv_pages=65 * 4, page_tokens=16)


def by_bucket(runtime: ModelRuntime, parts: list[Rows], rules: list[SamplingParams], dirt: int) -> Computed:
    """A forward as a graph computes it: one buffer for all buckets, full of what others have left there, every field a
    view of it in the padded shape."""
    ragged = Ragged(parts, runtime.pool.page_tokens)
    bucket = bucket_of(ragged.shape(), COLUMNS)
    assert bucket is not None
    rng = np.random.default_rng(dirt)
    host, there = (rng.integers(-(2**31), 2**31, bucket.ints, dtype=np.int64).astype(np.int32) for _ in range(2))
    ragged.write(host_arrays(host, bucket), runtime.padding.page_id, rules)
    used = ragged.used_ints(bucket)
    there[:used] = host[:used]
    with torch.inference_mode():
        computed = runtime._compute(forward_tensors(torch.from_numpy(there), bucket), Picks(VOCAB - 3))
    assert len(computed.logits) == bucket.wanted
    return computed


@pytest.mark.parametrize("requests", [*range(1, 66)])
def test_bug_28_every_batch_size_in_its_bucket_is_the_eager_forward(model_runtime: ModelRuntime, requests: int) -> None:
    """Mixed trees and plain rows: logits, tokens and the whole cache are those of the forward without padding, and the
    page that padding writes to is all that it changes."""
    runtime, rng = model_runtime, np.random.default_rng(requests)
    parts = random_parts(rng, requests, 16, 4 if requests % 2 else 1, 20)
    rules = [SamplingParams(temperature=0.8 * (k % 2), seed=k) for k in range(requests)]
    generator = torch.Generator().manual_seed(requests)
    runtime.cache.copy_(torch.randn(runtime.cache.shape, generator=generator, dtype=torch.float64))
    start = runtime.cache.clone()
    eager = runtime.choose(parts, rules, VOCAB - 3)
    logits, cache = eager.logits.clone(), runtime.cache[:, :, : runtime.pool.total].clone()
    runtime.cache.copy_(start)
    padded = by_bucket(runtime, parts, rules, requests)
    assert padded.tokens is not None
    torch.testing.assert_close(padded.logits[: len(logits)], logits, rtol=1e-12, atol=1e-12)
    assert padded.tokens[: len(logits)].tolist() == eager.tokens.tolist()
    torch.testing.assert_close(runtime.cache[:, :, : runtime.pool.total], cache, rtol=1e-12, atol=1e-12)
    untouched = (cache == start[:, :, : runtime.pool.total]).all(dim=-1)
    after = (runtime.cache[:, :, : runtime.pool.total] == start[:, :, : runtime.pool.total]).all(dim=-1)
    assert torch.equal(after, untouched), "no slot but those of the real rows is written"


def test_rules_go_with_their_parts_rows() -> None:
    rng = np.random.default_rng(0)
    parts = [random_part(rng, [k], 3, 0, 4) for k in range(3)]
    parts = [Rows(p.pages, p.context, p.token, p.tail_position, p.visible, k + 1) for k, p in enumerate(parts)]
    rules = [SamplingParams(temperature=t, seed=s) for t, s in ((0.0, 7), (0.5, 2**64 - 1), (1.5, 2**63))]
    choice = assemble(Ragged(parts, 16), CPU, Padding(4, SCRATCH), rules).choice
    assert choice.temperature.tolist() == [0, 0, 0, 0.5, 0.5, 1.5, 1.5, 1.5]
    assert choice.seed[[0, 3, 5]].tolist() == [7, -1, -(2**63)]


def test_too_few_pages_are_an_error_of_ours() -> None:
    part = random_part(np.random.default_rng(0), [3], 10, 0, 7)
    with pytest.raises(AssertionError, match="17 tokens do not fit"):
        assemble(Ragged([part], 16), CPU, Padding(1, SCRATCH))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 14), st.integers(2, 60))
def test_a_bucket_is_the_smallest_that_holds_the_forward(rows: int, requests: int, words: int, columns: int) -> None:
    bucket = bucket_of(Shape(rows, requests, words, columns, rows), COLUMNS)
    if rows > ROWS[-1] or requests > REQUESTS[-1] or words > WORDS[-1] or columns > COLUMNS:
        assert bucket is None
        return
    assert bucket is not None and bucket.columns == COLUMNS and bucket.wanted == bucket.rows
    for sizes, need, got in (
        (ROWS, rows, bucket.rows), (REQUESTS, requests, bucket.requests), (WORDS, words, bucket.words),
    ):  # fmt: skip
        assert got == min(size for size in sizes if size >= need)


def test_fields_are_aligned_and_apart() -> None:
    shape = Shape(7, 3, 5, 11, 6)
    buffer = np.zeros(shape.ints, np.int32)
    arrays = host_arrays(buffer, shape)
    start = buffer.__array_interface__["data"][0]
    ends = start
    for field in fields(arrays):
        array = getattr(arrays, field.name)
        at = array.__array_interface__["data"][0]
        assert array.base is not None
        array[...] = 1
        ends = max(ends, at + array.nbytes)
        assert (at - start) % 16 == 0
    assert ends <= start + buffer.nbytes
    assert int((buffer != 0).sum()) >= sum(getattr(arrays, f.name).size for f in fields(arrays))
