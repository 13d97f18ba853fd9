"""What a request does to the logits of a row before the rule of ``draftwood.sampling`` looks at them.

A processor is a function of one row of logits, its *history* and the request's parameters, and of nothing else: the
history of a row is the committed text and the row's own ancestors in the tree. Siblings and rejected nodes are in no
history but their descendants', so that a tree's rows are processed as plain decoding would have processed them.

The order is that of transformers' ``generate`` and of vLLM, where they agree:

1. ``allowed``, a mask that the caller brings (grammar constraints): other tokens are excluded.
2. ``logit_bias`` is added (OpenAI).
3. ``repetition_penalty`` r, for each token of the prompt or the output (CTRL, arXiv:1909.05858, as transformers): a
   negative logit is multiplied by r, any other divided by it.
4. ``frequency_penalty`` f and ``presence_penalty`` p, for each token of the output (OpenAI, as vLLM): the logit of one
   that occurs n > 0 times loses n * f + p.
5. ``bad_words``: the last token of a sequence is excluded where the history, prompt included, ends with the rest of it
   (transformers, which overlooks a sequence that starts with the whole text; vLLM looks at the output only).
6. ``min_tokens``: tokens that end the text are excluded until the output has so many.

Temperature, top-k, top-p and min-p follow in ``draftwood.sampling``. The *output* are the generated tokens, resumed
ones included. Steps 3 and 4 work on a list of the distinct tokens of the text, which grows with it; a node adds its own
path to that and nothing else.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.parameters import ProcessorParams
from draftwood.tree import IndexArray, TokenTree


class History:
    """A session's committed text as its processors need it; shares the list of tokens with the session, which appends.

    What has been appended is taken in at the next use, token by token.
    """

    def __init__(self, params: ProcessorParams, text: list[int], prompt_tokens: int) -> None:
        self.params = params
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._column: dict[int, int] = {}  # of a counted token
        self._token = array("q")  # counted tokens, in order of their first occurrence
        self._occurrences = array("q")  # of each in the output; 0: in the prompt alone
        self._seen = prompt_tokens  # tokens of the text that have been taken in
        if params.repetition_penalty != 1:
            for token in dict.fromkeys(text[:prompt_tokens]):
                self._count(token, 0)
        self.biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], np.float64)
        self.never = np.array([word[0] for word in params.bad_words if len(word) == 1], np.int64)
        """Bad words of one token."""
        self._last: dict[tuple[int, ...], list[int]] = {}  # last tokens of the longer ones, by what they follow
        for *rest, last in params.bad_words:
            if rest:
                self._last.setdefault(tuple(rest), []).append(last)
        self._rests = sorted({len(rest) for rest in self._last})

    @property
    def output_tokens(self) -> int:
        return len(self._text) - self._prompt_tokens

    @property
    def active(self) -> bool:
        """Whether logits can still be changed; ``min_tokens`` alone is over once they are there."""
        params = self.params
        return bool(params.counts or params.logit_bias or params.bad_words or self.output_tokens < params.min_tokens)

    def counted(self) -> tuple[IndexArray, IndexArray]:
        """Tokens that penalties may touch, and how often each occurs in the output: int64 [n] both."""
        if self.params.counts:
            for token in self._text[self._seen :]:
                self._count(token, 1)
            self._seen = len(self._text)
        return np.array(self._token, np.int64), np.array(self._occurrences, np.int64)

    def _count(self, token: int, times: int) -> None:
        column = self._column.setdefault(token, len(self._token))
        if column == len(self._token):
            self._token.append(token)
            self._occurrences.append(times)
        else:
            self._occurrences[column] += times

    def occurrences(self, token: int) -> int:
        """In the output, as of the last call of ``counted``."""
        column = self._column.get(token)
        return 0 if column is None else self._occurrences[column]

    def excluded(self, path: Sequence[int]) -> list[int]:
        """Tokens that longer bad words and ``min_tokens`` exclude behind the text and ``path``."""
        tokens: list[int] = []
        if self._rests:
            tail = (*self._text[-self._rests[-1] :], *path)
            for length in self._rests:
                tokens += self._last.get(tail[-length:], ())
        if self.output_tokens + len(path) < self.params.min_tokens:
            tokens += self.params.end_tokens
        return tokens


def process(logits: Tensor, history: History, tree: TokenTree) -> Tensor:
    """Steps 2 to 6 on logits [rows, vocab], row i being node i of ``tree``: a new tensor, float32 or wider.

    Excluded tokens are -inf. ``vocab`` holds every token of the history.
    """
    rows = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    params = history.params
    if params.logit_bias:
        rows[:, _index(history.biased, rows)] += _values(history.bias, rows)
    paths = _paths(tree)
    if params.counts:
        _penalize(rows, history, paths)
    if history.never.size:
        rows[:, _index(history.never, rows)] = -math.inf
    _exclude(rows, [history.excluded(path) for path in paths])
    return rows


def _paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from below the anchor to each node, the node's own last."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parent[1:].tolist(), tree.token[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


def _penalize(rows: Tensor, history: History, paths: Sequence[tuple[int, ...]]) -> None:
    """Steps 3 and 4, in place: first what the text counts, in all rows alike, then each row's own path on top of it."""
    counted, occurrences = history.counted()
    own = [(row, *item) for row, path in enumerate(paths) for item in Counter(path).items()]
    at, token, times = (list(column) for column in zip(*own, strict=True)) if own else ([], [], [])
    where = (_index(at, rows), _index(token, rows))
    before = rows[where]
    columns = _index(counted, rows)
    rows[:, columns] = _penalized(rows[:, columns], occurrences, history.params)
    total = np.array([history.occurrences(t) + n for t, n in zip(token, times, strict=True)], np.int64)
    rows[where] = _penalized(before, total, history.params)


def _penalized(logits: Tensor, occurrences: IndexArray, params: ProcessorParams) -> Tensor:
    """Logits [..., n] of tokens that occur so often, int64 [n], in the output."""
    if params.repetition_penalty != 1:
        # As a tensor, because CUDA divides by a Python number with its reciprocal and rounds elsewhere than a CPU.
        factor = torch.full((), params.repetition_penalty, dtype=logits.dtype, device=logits.device)
        logits = torch.where(logits < 0, logits * factor, logits / factor)
    loss: NDArray[np.float64] = params.frequency_penalty * occurrences + params.presence_penalty * (occurrences > 0)
    return logits - _values(loss, logits)


def _exclude(rows: Tensor, tokens: Sequence[Sequence[int]]) -> None:
    """Sets the tokens of each row to -inf, in place."""
    if any(tokens):
        at = [row for row, excluded in enumerate(tokens) for _ in excluded]
        rows[_index(at, rows), _index([t for excluded in tokens for t in excluded], rows)] = -math.inf


def _index(index: Sequence[int] | IndexArray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(index, np.int64)).to(like.device)


def _values(values: NDArray[np.float64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device, like.dtype)


def allow_only(logits: Tensor, allowed: Tensor) -> Tensor:
    """Step 1: logits [rows, vocab] with every token at -inf that is not allowed; a new tensor.

    allowed int32 [rows, words], bit j of word w being token 32 w + j; it covers the vocabulary.
    """
    bits = torch.arange(32, dtype=torch.int32, device=allowed.device)
    mask = ((allowed.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~mask, -math.inf)
