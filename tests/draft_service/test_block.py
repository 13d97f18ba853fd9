"""The block drafter against its head computed densely."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.drafter import SessionCommitted, SessionStart
from draft_service.drafters.block import BlockDrafter
from draftwood.config import DraftSettings
from draftwood.errors import FailedPrecondition
from draftwood.runtime.head_runtime import Block
from draftwood.vocabulary import Vocabulary
from tests.draft_service.test_eagle import features_of, make_head, make_runtime, make_tables, request_of
from tests.draft_service.test_lm import CONTEXT, GREEDY, KEY, VOCAB
from tests.runtime.block_forward import block_forward

BLOCK = Block(size=4, mask_token=39)
WIDTH = 3


def make_drafter(kv_pages: int = 64, layout: str = "eagle", **settings: Any) -> BlockDrafter:
    head = make_head(layout)
    vocabulary = Vocabulary(tuple(str(i) for i in range(VOCAB)), frozenset(), VOCAB)
    chosen = DraftSettings(**({"kind": "block", "branch": WIDTH, "page_tokens": 16} | settings))
    return BlockDrafter(make_runtime(head, kv_pages), BLOCK, chosen, "tiny", vocabulary, request_of(head))


@torch.inference_mode()
def dense(text: list[int], layout: str) -> torch.Tensor:
    """Scores of the places behind a text, [BLOCK.size, VOCAB], by one dense forward with the mask written out."""
    head, runtime, tables = make_head(layout), make_runtime(make_head(layout)), make_tables()
    states = runtime.fuse(features_of(text, 0, len(text) - 1, len(head.taps)))
    masks = BLOCK.size - 1
    tokens = torch.tensor([*text[1:], *[BLOCK.mask_token] * masks])
    states = torch.cat([states, states[-1:].expand(masks, -1)])
    embedding = tables.embedding if head.embedding is None else head.embedding
    read = block_forward(head, embedding[tokens], states, masks)
    lm_head = tables.lm_head if head.lm_head is None else head.lm_head
    logits = torch.full((BLOCK.size, VOCAB), -torch.inf)
    ids = list(range(VOCAB)) if head.target_ids is None else head.target_ids.tolist()
    logits[:, ids] = (read[len(text) - 2 :] @ lm_head.T).float()
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_one_forward_fills_the_block_and_commits_leave_no_trace_of_masks(layout: str) -> None:
    drafter, text = make_drafter(layout=layout, max_step_tokens=8), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    layers = len(request_of(make_head(layout)).layers)
    drafter.open(KEY, SessionStart(0, tuple(text), GREEDY, 12, VOCAB, 24, 8, CONTEXT))
    drafter.feed(KEY, 0, features_of(text, 0, len(text) - 1, layers))
    first_id = 1
    for epoch, run in enumerate([[7], [8, 7, 2], [1], [9, 9]]):
        grown = []
        while drafter.wants_work():
            grown += drafter.work()
        [(_, growth)] = grown
        want, paths = dense(text, layout), {0: 0}
        assert growth.first_id == first_id and growth.complete and len(growth.token) > 3
        for own, (parent, token, score) in enumerate(
            zip(growth.parent.tolist(), growth.token.tolist(), growth.score.tolist(), strict=True), first_id
        ):
            depth = paths.get(parent, 0)
            paths[own] = depth + 1
            assert token in want[depth].topk(WIDTH).indices
            assert score == pytest.approx(float(want[depth, token]), abs=1e-4)
        assert max(paths.values()) > 1
        first_id += len(growth.token)
        old, text = len(text), [*text, *run]
        drafter.feed(KEY, old - 1, features_of(text, old - 1, len(text) - 1, layers))
        drafter.commit(KEY, SessionCommitted(epoch + 1, len(text), tuple(run), 12))
    drafter.close(KEY)
    assert drafter._runtime.pool.free == drafter._runtime.pool.total


@pytest.mark.parametrize(
    ("config", "message"),
    [({"mask_token_id": 3}, "block_size is None"), ({"block_size": 1, "mask_token_id": 3}, "block_size is 1"),
     ({"block_size": 4}, "mask_token_id is None"), ({"block_size": 4, "mask_token_id": 40}, "target has 40 tokens")],
)  # fmt: skip
def test_blocks_that_cannot_be_filled_are_refused(tmp_path: Path, config: dict[str, int], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FailedPrecondition, match=message) as caught:
        Block.load(str(tmp_path), VOCAB)
    assert caught.value.reason == "MODEL_UNSUPPORTED"
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 4, "mask_token_id": 39}))
    assert Block.load(str(tmp_path), VOCAB) == BLOCK
