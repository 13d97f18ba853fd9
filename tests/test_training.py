"""The trainings in models/train/ on a tiny target: what they unroll is what a drafter computes, and they learn."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "train"))

import eagle as eagle_training
import evaluate_heads
import medusa as medusa_training
import mtp as mtp_training
from corpus import TOP, Round, rounds, save_facts, save_round
from target import Target

from draftwood.runtime.heads import FINAL_NORM, EagleHead, MedusaHeads, TargetShape, dense_forward
from draftwood.runtime.heads_checkpoint import load_heads

CPU = torch.device("cpu")
VOCAB, WIDTH, LENGTH, STEPS = 64, 32, 16, 3


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target(target_path: str) -> Target:
    return Target.load(target_path, CPU, compiled=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, target_path: str) -> Path:
    """Random text with the target's real distributions."""
    folder, model = tmp_path_factory.mktemp("corpus"), LlamaForCausalLM.from_pretrained(target_path)
    tokens = torch.randint(0, VOCAB // 2, (32, LENGTH))
    with torch.no_grad():
        logprob, top = model(tokens).logits.log_softmax(dim=-1).topk(TOP)
    drawn = np.ones(tokens.shape, np.bool_)
    save_round(folder, 0, Round(tokens.numpy().astype(np.uint16), drawn, top.numpy(), logprob.half().numpy()))
    save_facts(folder, {"vocab_size": VOCAB, "rounds": 1})
    return folder


def test_features_are_those_of_transformers(target: Target, target_path: str) -> None:
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    model = LlamaForCausalLM.from_pretrained(target_path)
    with torch.no_grad():
        hidden = model.model(tokens, output_hidden_states=True).hidden_states
    taps = (0, 2, 7, FINAL_NORM)
    torch.testing.assert_close(target.features(tokens, taps), torch.cat([hidden[k] for k in taps], dim=-1))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_unrolled_eagle_is_what_a_drafter_computes(tmp_path: Path, target: Target, layers: int) -> None:
    """Row i of step t: i + 1 true rows, then t of which each takes what the one before hands down."""
    torch.manual_seed(1)
    eagle = eagle_training.make_eagle(target, layers, 40, (2, 4, 5))
    with torch.no_grad():
        for name, parameter in eagle.named_parameters():
            parameter.copy_(parameter.half())
            if "norm" in name:
                parameter.copy_((parameter * (1 + 0.1 * torch.randn_like(parameter))).half())
    eagle_training.save_eagle(eagle, tmp_path, np.arange(0, VOCAB, 2), "target")
    head = load_heads(str(tmp_path), TargetShape.of(target.config), CPU, torch.float32)
    assert isinstance(head, EagleHead)
    assert head.taps == eagle.taps
    assert head.target_ids is not None and head.target_ids.tolist() == list(range(0, VOCAB, 2))

    tokens = torch.randint(0, VOCAB, (1, LENGTH))
    features = target.features(tokens, eagle.taps)
    with torch.no_grad():
        unrolled = eagle.unrolled(target.embedding, tokens, features, STEPS, eagle_training.Pieces())
        found = [read[0] for read in unrolled]
    fused, embedded = head.fused(features[0]), target.embedding[tokens[0]]
    for row in range(LENGTH - STEPS):
        given = fused[: row + 1]
        for step in range(STEPS):
            read, handed_down = dense_forward(head, embedded[1 : row + step + 2], given)
            torch.testing.assert_close(found[step][row], read[-1], rtol=1e-4, atol=1e-4)
            given = torch.cat([given, handed_down[-1:]])


def eagle_head(folder: Path, target: Target, layers: int) -> EagleHead:
    torch.manual_seed(2)
    eagle = eagle_training.make_eagle(target, layers, 40, (2, 4, 5))
    eagle_training.save_eagle(eagle, folder, np.arange(1, VOCAB, 2), "target")
    head = load_heads(str(folder), TargetShape.of(target.config), CPU, torch.float32)
    assert isinstance(head, EagleHead)
    return head


@pytest.mark.parametrize("layers", [1, 2])
@torch.inference_mode()
def test_evaluated_trees_are_the_likeliest_nodes(tmp_path: Path, target: Target, layers: int) -> None:
    """Against every path of three children a node, by plain forwards of the whole text."""
    head, branch, depth, budget = eagle_head(tmp_path, target, layers), 3, 3, 12
    tokens = torch.randint(0, VOCAB, (LENGTH,))
    committed = 9
    fused = head.fused(target.features(tokens[None], head.taps)[0])[: committed - 1]
    lm_head, ids = target.lm_head[1::2], torch.arange(1, VOCAB, 2)

    def below(path: tuple[int, ...], score: float, given: torch.Tensor) -> dict[tuple[int, ...], float]:
        text = torch.cat([tokens[:committed], torch.tensor(path, dtype=torch.int64)])
        read, handed_down = dense_forward(head, target.embedding[text[1:]], given)
        best = (lm_head @ read[-1]).log_softmax(dim=-1).topk(branch)
        found = {}
        for token, logprob in zip(ids[best.indices].tolist(), best.values.tolist(), strict=True):
            child = (*path, token)
            found[child] = score + logprob
            if len(child) < depth:
                found |= below(child, found[child], torch.cat([given, handed_down[-1:]]))
        return found

    scores = below((), 0.0, fused)
    expected = set(sorted(scores, key=lambda path: -scores[path])[:budget])
    drafts = evaluate_heads.EagleDrafts(head, target, tokens.tolist(), (branch, branch**depth, depth))
    assert paths(drafts.tree(committed, budget)) == expected
    likeliest = max((path for path in scores if len(path) == 1), key=lambda path: scores[path])
    assert drafts.guesses(committed, 1) == list(likeliest)


def paths(nodes: dict[tuple[int, int], int]) -> set[tuple[int, ...]]:
    of: dict[int, tuple[int, ...]] = {0: ()}
    for (parent, token), node in sorted(nodes.items(), key=lambda item: item[1]):
        of[node] = (*of[parent], token)
    return {path for path in of.values() if path}


@torch.inference_mode()
def test_evaluated_guesses_follow_the_text(tmp_path: Path, target: Target) -> None:
    head = eagle_head(tmp_path, target, 1)
    tokens = torch.randint(0, VOCAB, (LENGTH,))
    drafts = evaluate_heads.EagleDrafts(head, target, tokens.tolist(), (3, 3, 3))
    given = head.fused(target.features(tokens[None], head.taps)[0])[:8]
    expected = []
    for step in range(3):
        read, handed_down = dense_forward(head, target.embedding[tokens[1 : 9 + step]], given)
        expected.append(1 + 2 * int((target.lm_head[1::2] @ read[-1]).argmax()))
        given = torch.cat([given, handed_down[-1:]])
    assert drafts.guesses(9, 3) == expected


def test_an_eagle_learns(tmp_path: Path, target_path: str, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eagle_training.main(
        ["--target", target_path, "--corpus", str(corpus), "--out", str(tmp_path), "--seconds", "8", "--rows", "8",
         "--rate", "0.01", "--vocabulary", "60", "--held-out", "8", "--inner", "32",
         "--steps", str(STEPS), "--no-compile"]
    )  # fmt: skip
    last = capsys.readouterr().out.splitlines()[-1]
    scores = [float(word) for word in last.split("by step ")[1].split()]
    assert len(scores) == STEPS
    assert scores[0] > 0.24  # the same token everywhere: 0.23
    head = load_heads(str(tmp_path), TargetShape(WIDTH, 8, VOCAB), CPU, torch.float32)
    assert isinstance(head, EagleHead)
    assert head.target_ids is not None and len(head.target_ids) == 60


def test_medusa_heads_learn(
    tmp_path: Path, target: Target, target_path: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    medusa_training.main(
        ["--target", target_path, "--corpus", str(corpus), "--out", str(tmp_path), "--seconds", "4", "--rows", "8",
         "--rate", "0.01", "--held-out", "8", "--heads", "2", "--no-compile"]
    )  # fmt: skip
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.split("by head ")[1].split()[0]) > 0.02
    heads = load_heads(str(tmp_path), TargetShape(WIDTH, 8, VOCAB), CPU, torch.float32)
    assert isinstance(heads, MedusaHeads)
    assert len(heads.heads) == 2
    assert all(head.lm_head is None for head in heads.heads)
    feature = target.features(torch.randint(0, VOCAB, (1, 4)), (FINAL_NORM,))
    assert not torch.allclose(heads.heads[0].hidden(feature), feature)


def test_an_mtp_module_is_fitted_and_guesses_what_a_drafter_computes(
    tmp_path: Path, target: Target, target_path: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mtp_training.main(
        ["--target", target_path, "--corpus", str(corpus), "--out", str(tmp_path), "--held-out", "8", "--steps", "2"]
    )
    scores = [float(word) for word in capsys.readouterr().out.split("by step ")[1].split()]
    assert len(scores) == 2 and scores[0] > 0.24  # the same token everywhere: 0.23
    head = load_heads(str(tmp_path), TargetShape(WIDTH, 8, VOCAB), CPU, torch.float32)
    assert isinstance(head, EagleHead) and head.hands_down_normed
    tokens = torch.randint(0, VOCAB, (1, 9))
    features = target.features(tokens, (FINAL_NORM,))
    read, handed = dense_forward(head, target.embedding[tokens[0, 1:]], head.fused(features[0, :-1]))
    module = mtp_training.Module(target)
    mtp_training.fit(module, target, corpus_tokens(corpus)[:-8], steps=2, damping=0.01)
    (_, first), (_, second) = module.chain(features, tokens, 2)
    torch.testing.assert_close(read[:7], first[0], atol=0.02, rtol=0.02)  # the file has float16
    again, _ = dense_forward(head, target.embedding[tokens[0, 2:]], handed[:-1])
    torch.testing.assert_close(again[:7], second[0], atol=0.04, rtol=0.04)


def corpus_tokens(folder: Path) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.array(each.tokens, np.int64) for each in rounds(folder)]))
