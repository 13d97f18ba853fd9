"""The target writes dialogues with itself, user's turns included, and notes what it would have written at each place.

``python models/train/write.py --target demo --out corpus --seconds 450``

All rows go in lock-step, one token a step, without padding: a row whose turn ends is fed the chat template's tokens of
the next turn. A user's turn begins with one of the phrases of ``openings.txt``, three times in four, and is drawn at
temperature 0.9; an answer is drawn at a temperature of its own from ``HEATS``. One row in sixteen is plain text without
a template, begun as ``texts.txt`` says. The forward is that of ``draftwood.runtime``, on a GPU as one CUDA graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import TOP, Round, narrowest, save_facts, save_round
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftwood.kernels.sampling import choose_tokens
from draftwood.kernels.tree_attention import AttentionBatch
from draftwood.runtime.decoder import Decoder, make_decoder
from draftwood.runtime.demo_model import DEMO, demo_target
from draftwood.runtime.model import load_model, resolve_device, top_children

HERE = Path(__file__).parent
PAGE = 64
"""Tokens of a page of the KV cache."""

USER_HEAT = 0.9
HEATS = (0.02, 0.02, 0.3, 0.7, 1.0)
"""Temperatures of answers and plain texts, each as likely as the others."""

USER_TOKENS, ANSWER_TOKENS = 64, 320
"""Most tokens drawn in a turn; then its end is fed."""

PLAIN_ROWS = 16
"""One row in so many is plain text."""

ANSWER, USER, PLAIN = 0, 1, 2
"""Kinds of turns."""


@dataclass(frozen=True)
class Template:
    """The chat template's text around the turns of a dialogue."""

    start: str  # before the first user's turn
    answer: str  # between a user's turn and the answer
    user: str  # between an answer and the next user's turn

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Template:
        marks = ("@first@", "@answer@", "@second@")
        turns = [
            {"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), marks, strict=True)
        ]
        rest, pieces = str(tokenizer.apply_chat_template(turns, tokenize=False)), []
        for mark in marks:
            piece, rest = rest.split(mark)
            pieces.append(piece)
        return cls(*pieces)


@dataclass(frozen=True)
class Script:
    """What is fed to the rows, as a table of segments: the template's tokens with the opening behind them.

    Segment 0 leads from a user's turn to the answer. ``later`` and ``first`` are ranges of segments that begin a user's
    turn, behind an answer and at the start; ``plain`` begin a plain text. Ranges are half-open.
    """

    tokens: Tensor  # int64 [segments, longest]
    length: Tensor  # int64 [segments]
    kind: Tensor  # int64 [segments]
    later: tuple[int, int]
    first: tuple[int, int]
    plain: tuple[int, int]
    end_token: int  # of a turn

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Script:
        """For a tokenizer whose template ends every turn with one and the same token."""
        template = Template.of(tokenizer)

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids

        # The turn's own end is drawn, so what is fed begins behind it.
        end_token, *answer = encode(template.answer)
        end_again, *_ = encode(template.user)
        if end_token != end_again:
            raise ValueError("the template ends the user's turns and the answers with different tokens")
        openings = lines("openings.txt")
        openings += [""] * (len(openings) // 3)
        later = [encode(template.user + opening)[1:] for opening in openings]
        first = [encode(template.start + opening) for opening in openings]
        plain = [tokenizer.encode(text) for text in lines("texts.txt")]
        segments, ends = [answer, *later, *first, *plain], np.cumsum([1, len(later), len(first), len(plain)]).tolist()
        kinds = [ANSWER] + [USER] * (len(later) + len(first)) + [PLAIN] * len(plain)
        table = torch.zeros(len(segments), max(map(len, segments)), dtype=torch.int64)
        for row, segment in zip(table, segments, strict=True):
            row[: len(segment)] = torch.tensor(segment)
        return cls(
            table.to(device),
            torch.tensor([len(s) for s in segments], device=device),
            torch.tensor(kinds, device=device),
            (ends[0], ends[1]), (ends[1], ends[2]), (ends[2], ends[3]),
            end_token,
        )  # fmt: skip


def lines(name: str) -> list[str]:
    """Lines of a file beside this one, comments left out."""
    found = (HERE / name).read_text().splitlines()
    return [line.replace("\\n", "\n") for line in found if line and not (line.startswith("# ") and line.endswith("."))]


class Writers:
    """Rows that write in lock-step. All state lives on the device, so that a step can be a CUDA graph."""

    def __init__(
        self, decoder: Decoder, cache: Tensor, script: Script, rows: int, length: int, vocab_size: int
    ) -> None:
        """cache [layers, 2, rows * pages, kv_heads, PAGE, head_dim], ``length`` a whole number of pages."""
        device = cache.device
        self._decoder, self._cache, self._script = decoder, cache, script
        self._rows, self._length, self.vocab_size = rows, length, vocab_size
        pages = length // PAGE
        row = torch.arange(rows, device=device)
        self._first_page = row * pages
        # One column more than is used, as the attention kernel loads one ahead.
        table = (self._first_page[:, None] + torch.arange(pages + 1, device=device)).clamp_(max=rows * pages - 1)
        self._table, self._row_start = table.int(), torch.arange(rows + 1, device=device, dtype=torch.int32)
        self._row = row
        self._plain = row % PLAIN_ROWS == PLAIN_ROWS - 1
        self._heats = torch.tensor(HEATS, device=device)
        self._limits = torch.tensor([ANSWER_TOKENS, USER_TOKENS, ANSWER_TOKENS], device=device)
        self._seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)  # position of the token fed next
        self._token = torch.zeros(rows, dtype=torch.int64, device=device)
        self._was_drawn = torch.zeros(rows, dtype=torch.bool, device=device)
        self._segment = torch.zeros(rows, dtype=torch.int64, device=device)
        self._fed = torch.zeros(rows, dtype=torch.int64, device=device)  # tokens of the segment
        self._drawn = torch.zeros(rows, dtype=torch.int64, device=device)  # tokens behind it
        self._heat = torch.zeros(rows, device=device)
        self.tokens = torch.zeros(length, rows, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(length, rows, dtype=torch.bool, device=device)
        self.top = torch.zeros(length, rows, TOP, dtype=torch.int32, device=device)
        self.logprob = torch.zeros(length, rows, TOP, dtype=torch.float16, device=device)

    def restart(self) -> None:
        """Puts all rows at their first token."""
        script = self._script
        self._at.zero_()
        self._drawn.zero_()
        self._was_drawn.zero_()
        self._seed.random_()
        self._segment.copy_(torch.where(self._plain, self._any(script.plain), self._any(script.first)))
        self._heat.copy_(self._new_heat(self._segment))
        self._fed.fill_(1)
        self._token.copy_(script.tokens[self._segment, 0])

    def step(self) -> None:
        """Feeds one token to every row, notes the distribution behind it and settles the next one."""
        at = self._at
        self.tokens.index_copy_(0, at, self._token.int()[None])
        self.drawn.index_copy_(0, at, self._was_drawn[None])
        logits = self._decoder(self._token, self._batch(), self._cache, self._row)[:, : self.vocab_size]
        top, logprob = top_children(logits, TOP)
        self.top.index_copy_(0, at, top.int()[None])
        self.logprob.index_copy_(0, at, logprob.half()[None])
        chosen, _ = choose_tokens(logits, self._heat, self._seed, at.expand(self._rows) + 1, self.vocab_size)
        self._advance(chosen)
        at += 1

    def _batch(self) -> AttentionBatch:
        """One row a request, all at the same position: each sees the whole of its own row so far."""
        at, rows = self._at, self._rows
        inside = at % PAGE + 1  # tokens of the last page that are seen
        bits = (inside - 32 * torch.arange(PAGE // 32, device=at.device)).clamp(0, 32)
        words = ((torch.ones_like(bits) << bits) - 1).int()
        position = at.int().expand(rows).contiguous()
        return AttentionBatch(
            row_start=self._row_start,
            context=position,
            keys=position + 1,
            words=words.expand(rows, -1).contiguous(),
            block_table=self._table,
            position=position,
            tail_position=((at // PAGE * PAGE).int() + torch.arange(PAGE, dtype=torch.int32, device=at.device))
            .expand(rows, -1)
            .contiguous(),
            page_id=self._first_page + at // PAGE,
            page_offset=(at % PAGE).expand(rows).contiguous(),
        )

    def _advance(self, chosen: Tensor) -> None:
        """The next token of each row: of its segment, else the one drawn; an end brings a new segment."""
        script = self._script
        kind, feeding = script.kind[self._segment], self._fed < script.length[self._segment]
        ended = ~feeding & (self._drawn > 0) & (self._token == script.end_token)
        over = self._drawn >= self._limits[kind]
        plain = torch.where(kind == PLAIN, self._any(script.plain), self._any(script.later))
        segment = torch.where(ended, torch.where(kind == USER, 0, plain), self._segment)
        fed = torch.where(ended, 0, self._fed)
        own = script.tokens[segment, fed.clamp(max=script.tokens.shape[1] - 1)]
        drawn = torch.where(over, script.end_token, chosen.clamp(min=0))
        self._token.copy_(torch.where(feeding | ended, own, drawn))
        self._was_drawn.copy_(~(feeding | ended | over))
        self._heat.copy_(torch.where(ended, self._new_heat(segment), self._heat))
        self._drawn.copy_(torch.where(feeding | ended, 0, self._drawn + 1))
        self._fed.copy_(fed + (feeding | ended))
        self._segment.copy_(segment)

    def _any(self, segments: tuple[int, int]) -> Tensor:
        return torch.randint(*segments, (self._rows,), device=self._at.device)

    def _new_heat(self, segment: Tensor) -> Tensor:
        drawn = self._heats[torch.randint(len(HEATS), (self._rows,), device=self._at.device)]
        return torch.where(self._script.kind[segment] == USER, USER_HEAT, drawn)

    def round(self, step: Callable[[], None]) -> Round:
        """One dialogue a row, from its start to ``length``."""
        self.restart()
        for _ in range(self._length):
            step()
        narrow = narrowest(self.vocab_size)
        tokens, drawn, top, logprob = (
            x.transpose(0, 1).contiguous().cpu().numpy() for x in (self.tokens, self.drawn, self.top, self.logprob)
        )
        return Round(tokens.astype(narrow), drawn, top.astype(narrow), logprob)


def captured(writers: Writers) -> Callable[[], None]:
    """The step as a CUDA graph."""
    writers.restart()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            writers.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writers.step()
    return graph.replay


def make_writers(
    path: str, tokenizer: PreTrainedTokenizerBase, rows: int, length: int, device: torch.device, dtype: torch.dtype
) -> Writers:
    """Loads the target and puts ``rows`` writers before it."""
    model = load_model(path, device, dtype)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_hidden_layers, 2, rows * length // PAGE, config.num_key_value_heads, PAGE, head_dim)
    cache = torch.zeros(shape, dtype=dtype, device=device)
    vocab_size = min(len(tokenizer), config.vocab_size)
    return Writers(make_decoder(model, length), cache, Script.of(tokenizer, device), rows, length, vocab_size)


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEMO, help='path or hub id of a model with a chat template, or "demo"')
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus")
    parser.add_argument("--seconds", type=float, default=450, help="no round begins that would end later")
    parser.add_argument("--rows", type=int, default=1024, help="dialogues written at a time")
    parser.add_argument("--length", type=int, default=768, help="tokens of a dialogue, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=1 << 30, help="most rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float16", help="of the target; bfloat16 is too coarse for near-ties")
    chosen = parser.parse_args(arguments)
    begin = time.monotonic()
    device = resolve_device("auto")
    torch.manual_seed(chosen.seed)
    path = str(demo_target()) if chosen.target == DEMO else chosen.target
    tokenizer = AutoTokenizer.from_pretrained(path)
    writers = make_writers(path, tokenizer, chosen.rows, chosen.length, device, getattr(torch, chosen.dtype))
    step = captured(writers) if device.type == "cuda" else writers.step
    facts = {"target": chosen.target, "vocab_size": writers.vocab_size, "seed": chosen.seed, "length": chosen.length}
    count, slowest_s = 0, 0.0
    while count < chosen.rounds and time.monotonic() - begin + slowest_s < chosen.seconds:
        then = time.monotonic()
        written = writers.round(step)
        save_round(chosen.out, count, written)
        count += 1
        slowest_s = max(slowest_s, time.monotonic() - then)
        total = count * written.tokens.size
        facts |= {"rounds": count, "tokens": total, "seconds": round(time.monotonic() - begin, 1)}
        save_facts(chosen.out, facts)
        rate = written.tokens.size / (time.monotonic() - then)
        print(f"round {count}: {total / 1e6:.1f} M tokens, {rate:.0f} a second", flush=True)
        if count == 1:
            for row in (0, 1, PLAIN_ROWS - 1):
                print("---", tokenizer.decode(written.tokens[row].tolist())[:1500], sep="\n", flush=True)


if __name__ == "__main__":
    main()
