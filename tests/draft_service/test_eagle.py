"""The drafter on the target's features against a dense forward of its head: rows, features and trees never drift."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafter import SessionCommitted, SessionStart
from draft_service.drafters.eagle import EagleDrafter, KnownFeatures
from draftwood.config import DraftSettings
from draftwood.errors import FailedPrecondition
from draftwood.features import FINAL, FeatureRequest, Features
from draftwood.noise import gumbel
from draftwood.parameters import SamplingParams
from draftwood.runtime.head_runtime import HeadRuntime, TargetTables, as_tensor, feature_request
from draftwood.runtime.heads import EagleHead, TargetShape, dense_forward
from draftwood.runtime.heads_checkpoint import load_heads
from draftwood.runtime.model import random_model
from draftwood.vocabulary import Vocabulary
from tests.draft_service.test_lm import CONTEXT, GREEDY, KEY, SAMPLED, VOCAB
from tests.runtime import head_checkpoints as checkpoints

CPU = torch.device("cpu")
HIDDEN = 32
TARGET = TargetShape(hidden_size=HIDDEN, layers=8, vocab_size=VOCAB)
LAYOUTS: dict[str, Any] = {
    "eagle": lambda: checkpoints.eagle(TARGET),
    "eagle_deep": lambda: checkpoints.eagle(TARGET, layers=2),
    "eagle3": lambda: checkpoints.eagle3(TARGET, tokens=25),
    "eagle3_narrow": lambda: checkpoints.eagle3(TARGET, tokens=25, size=16),
    "mtp": lambda: checkpoints.mtp(TARGET),
    "speculators": lambda: checkpoints.speculators_eagle3(TARGET, 25, norm_before_residual=True, fc_norm=True),
}


@cache
def make_head(layout: str) -> EagleHead:
    config, tensors = LAYOUTS[layout]()
    for name in tensors:
        if name.endswith("lm_head.weight"):
            tensors[name] = 3 * tensors[name]
    with TemporaryDirectory() as folder:
        head = load_heads(str(checkpoints.save(Path(folder), config, tensors)), TARGET, CPU, torch.float64)
    assert isinstance(head, EagleHead)
    return head


def make_tables() -> TargetTables:
    generator = torch.Generator().manual_seed(4)
    embedding, lm_head = (torch.randn((VOCAB, HIDDEN), generator=generator, dtype=torch.float64) for _ in range(2))
    return TargetTables(embedding, lm_head)


def make_runtime(head: EagleHead, kv_pages: int = 64) -> HeadRuntime:
    return HeadRuntime(head, make_tables(), kv_pages=kv_pages, page_tokens=16)


def make_drafter(runtime: HeadRuntime, request: FeatureRequest, **settings: Any) -> EagleDrafter:
    chosen = {"kind": "eagle", "depth": 4, "beam": 3, "max_nodes": 24, "page_tokens": 16} | settings
    vocabulary = Vocabulary(tuple(str(i) for i in range(VOCAB)), frozenset(), VOCAB)
    return EagleDrafter(runtime, DraftSettings(**chosen), "tiny", vocabulary, request)


def request_of(head: EagleHead) -> FeatureRequest:
    return feature_request(head.taps, HIDDEN, "")


@cache
def _feature(prefix: tuple[int, ...], layers: int) -> Features:
    """Of the last token of ``prefix``: anything, as long as it depends on all that comes before."""
    generator = torch.Generator().manual_seed(hash(prefix) % 2**31)
    return torch.randn((layers, HIDDEN), generator=generator).bfloat16().view(torch.int16).numpy().view(np.uint16)


def features_of(text: Sequence[int], first: int, end: int, layers: int) -> Features:
    """What a target would say of the positions [first, end) of a text."""
    return np.stack([_feature(tuple(text[: p + 1]), layers) for p in range(first, end)])


class HeadOracle:
    """What the head, run densely, says behind a committed text and a path below it."""

    def __init__(self, head: EagleHead, runtime: HeadRuntime) -> None:
        self._head, self._tables = head, make_tables()
        self._embedding = self._tables.embedding if head.embedding is None else head.embedding
        lm_head = self._tables.lm_head if head.lm_head is None else head.lm_head
        self._lm_head = lm_head
        self._ids = list(range(VOCAB)) if head.target_ids is None else head.target_ids.tolist()
        self._fuse = runtime.fuse

    @torch.inference_mode()
    def scores(self, text: Sequence[int], path: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
        """The scores of the next token, [VOCAB]: the tokens of the path take what the row before hands down."""
        states = self._fuse(features_of(text, 0, len(text) - 1, len(self._head.taps)))
        tokens = list(text[1:])
        for token in [*path, None]:
            read, handed = dense_forward(self._head, self._embedding[torch.tensor(tokens)], states)
            if token is not None:
                tokens.append(token)
                states = torch.cat([states, handed[-1:]])
        own = (read[-1] @ self._lm_head.T).float()
        logits = torch.full((VOCAB,), -torch.inf)
        logits[self._ids] = own
        if not sampling.greedy:
            shifted = (logits - logits.max()) / sampling.temperature
            logits = shifted + gumbel(sampling.seed, len(text) + len(path), VOCAB, "cpu")
        return torch.log_softmax(logits, dim=-1)


def open_session(drafter: EagleDrafter, text: Sequence[int], sampling: SamplingParams, budget: int = 12) -> None:
    drafter.open(KEY, SessionStart(0, tuple(text), sampling, budget, VOCAB, 24, 8, CONTEXT))


def work(drafter: EagleDrafter) -> list[Any]:
    out = []
    while drafter.wants_work():
        out += drafter.work()
    return out


@pytest.fixture(params=list(LAYOUTS))
def head(request: pytest.FixtureRequest) -> EagleHead:
    return make_head(request.param)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "noise"])
def test_every_score_is_the_heads_own_through_commits(head: EagleHead, sampling: SamplingParams) -> None:
    """Right after the prompt, after runs within the tree and beside it: as if the head had read the text at once."""
    runtime = make_runtime(head)
    request = request_of(head)
    drafter, oracle = make_drafter(runtime, request, max_step_tokens=7), HeadOracle(head, runtime)
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    open_session(drafter, text, sampling)
    drafter.feed(KEY, 0, features_of(text, 0, len(text) - 1, len(request.layers)))
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for epoch in range(6):
        [(_, growth)] = work(drafter)
        assert growth.complete and growth.epoch == epoch
        for own, (parent, token, score) in enumerate(
            zip(growth.parent.tolist(), growth.token.tolist(), growth.score.tolist(), strict=True), growth.first_id
        ):
            want = oracle.scores(text, paths[parent], sampling)
            assert score == pytest.approx(float(want[token]), abs=1e-4)
            assert token in want.topk(4).indices, "a child is one of the four likeliest"
            paths[own] = (*paths[parent], token)
        longest = max((p for i, p in paths.items() if i), key=len, default=())
        run = [*longest[: epoch % 4], (longest[epoch % 4] if epoch == 4 else 7)] if len(longest) > epoch % 4 else [7]
        old, text = len(text), [*text, *run]
        paths = {i: p[len(run) :] for i, p in paths.items() if list(p[: len(run)]) == run and len(p) > len(run)}
        paths[0] = ()
        drafter.feed(KEY, old - 1, features_of(text, old - 1, len(text) - 1, len(request.layers)))
        drafter.commit(KEY, SessionCommitted(epoch + 1, len(text), tuple(run), 12))
    drafter.close(KEY)
    assert runtime.pool.free == runtime.pool.total


def test_an_mtp_module_projects_the_feature_before_the_embedding() -> None:
    """As MiMo's own code does, on the tensors as they are in the file."""
    head, (_, raw) = make_head("mtp"), checkpoints.mtp(TARGET)
    e, f = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensors = {name.removeprefix("model.mtp_layers.0."): t.double() for name, t in raw.items()}
    e_normed, f_normed = (
        torch.nn.functional.rms_norm(x, (HIDDEN,), tensors[f"{name}_layernorm.weight"], 1e-5)
        for x, name in ((e, "token"), (f, "hidden"))
    )
    want = torch.cat([f_normed, e_normed], dim=-1) @ tensors["input_proj.weight"].T
    torch.testing.assert_close(head.entry(e, f)[1], want)
    assert head.hands_down_normed and head.norm is not None


def test_the_text_is_read_as_far_as_its_features_are_known() -> None:
    head = make_head("eagle")
    drafter = make_drafter(make_runtime(head), request_of(head))
    text = [3, 1, 4, 1, 5, 9]
    open_session(drafter, text, GREEDY)
    assert not drafter.wants_work()
    drafter.feed(KEY, 3, features_of(text, 3, 5, 1))
    assert not drafter.wants_work(), "behind a gap"
    drafter.feed(KEY, 0, features_of(text, 0, 2, 1))
    assert drafter.wants_work() and drafter.work() == [] and not drafter.wants_work()
    drafter.feed(KEY, 2, features_of(text, 2, 3, 1))
    [(_, growth)] = work(drafter)
    assert growth.complete and len(growth.token) > 3
    with pytest.raises(ValueError, match="position 4 come again"):
        drafter.feed(KEY, 4, features_of(text, 4, 5, 1))
    drafter.feed((9, 9), 0, features_of(text, 0, 1, 1))


def test_a_text_of_one_token_has_no_feature_to_begin_with() -> None:
    head = make_head("eagle3")
    drafter = make_drafter(make_runtime(head), request_of(head))
    open_session(drafter, [3], GREEDY)
    [(_, growth)] = work(drafter)
    assert growth.complete and not len(growth.token)
    drafter.feed(KEY, 0, features_of([3], 0, 1, 3))
    drafter.commit(KEY, SessionCommitted(1, 2, (8,), 12))
    [(_, growth)] = work(drafter)
    assert len(growth.token) > 3


def test_known_features_are_handed_out_in_order() -> None:
    known = KnownFeatures()
    states = np.arange(12, dtype=np.uint16).reshape(6, 1, 2)
    for first, end in ((4, 6), (0, 1), (1, 4)):
        known.add(first, states[first:end])
    assert known.end == 6
    assert np.array_equal(np.concatenate([known.take(n) for n in (2, 3, 1)]), states)


def test_taking_features_copies_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes copied are those taken, however many are left."""
    copied, join = list[int](), np.concatenate

    def counting(pieces: Sequence[np.ndarray]) -> np.ndarray:
        copied.append(sum(len(piece) for piece in pieces))
        return join(pieces)

    known, states = KnownFeatures(), np.arange(2000, dtype=np.uint16).reshape(1000, 1, 2)
    for first in range(0, 1000, 100):
        known.add(first, states[first : first + 100])
    monkeypatch.setattr(np, "concatenate", counting)
    taken = [known.take(30) for _ in range(33)]
    monkeypatch.undo()
    assert np.array_equal(np.concatenate([*taken, known.take(10)]), states)
    assert copied == [30] * 33


def test_features_of_a_text_that_has_outgrown_the_head_are_not_kept() -> None:
    """Its rounds end empty, and at once: nobody waits for them."""
    head = make_head("eagle")
    runtime = make_runtime(head)
    runtime.max_context_tokens = 12
    drafter, text = make_drafter(runtime, request_of(head)), [k % VOCAB for k in range(10)]
    layers = len(request_of(head).layers)
    open_session(drafter, text, GREEDY)
    drafter.feed(KEY, 0, features_of(text, 0, 9, layers))
    [(_, growth)] = work(drafter)
    for epoch in range(1, 8):
        text.append(5)
        drafter.feed(KEY, len(text) - 2, features_of(text, len(text) - 2, len(text) - 1, layers))
        drafter.commit(KEY, SessionCommitted(epoch, len(text), (5,), 12))
        [(_, growth)] = work(drafter)
        assert growth.complete
    (session,) = drafter._sessions.values()
    assert session.outgrown and not session.pages and not len(growth.token)
    assert session.known.end == 0 and not session.known._whole and not session.known._ahead  # type: ignore[attr-defined]
    drafter.close(KEY)
    assert runtime.pool.free == runtime.pool.total


def test_reduced_vocabularies_propose_the_targets_ids() -> None:
    head = make_head("eagle3")
    assert head.target_ids is not None and len(head.target_ids) == 25
    drafter = make_drafter(make_runtime(head), request_of(head))
    open_session(drafter, [3, 1, 4], GREEDY)
    drafter.feed(KEY, 0, features_of([3, 1, 4], 0, 2, 3))
    [(_, growth)] = work(drafter)
    assert len(growth.token) > 3 and set(growth.token.tolist()) <= set(head.target_ids.tolist())


def test_taps_become_the_layers_asked_for() -> None:
    assert feature_request((2, 4, -1), HIDDEN, "t") == FeatureRequest((2, 4, FINAL), HIDDEN, "t")
    with pytest.raises(FailedPrecondition, match="embedding is no feature"):
        feature_request((0, 2, 4), HIDDEN, "")


def test_features_are_read_as_bfloat16() -> None:
    numbers = torch.tensor([[[1.5, -2.0], [0.25, 3e38]]]).bfloat16()
    bits = numbers.view(torch.int16).numpy().view(np.uint16)
    assert torch.equal(as_tensor(bits, CPU, torch.float32), numbers.float().flatten(1))


def test_tables_are_the_targets_embedding_and_lm_head(tmp_path: Path) -> None:
    for tied in (True, False):
        config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "vocab_size": 30, "tie_word_embeddings": tied}  # fmt: skip
        model = random_model(config, CPU, torch.float32)
        model.save_pretrained(tmp_path / str(tied))
        tables = TargetTables.load(str(tmp_path / str(tied)), CPU, torch.float64)
        assert torch.equal(tables.embedding.float(), model.get_input_embeddings().weight)
        assert torch.equal(tables.lm_head.float(), model.get_output_embeddings().weight)
