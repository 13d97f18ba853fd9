"""Gumbel noise that draft and target share: a function of seed, position and token id, and of nothing else.

The Gumbel-max trick: argmax over tokens of log p(token) + g(token), with independent standard Gumbel g, is a sample of
p (Maddison, Tarlow and Minka, "A* Sampling", 2014, arXiv:1411.0030). With g fixed by the request's seed and the
absolute position of the token being chosen, the text is a function of prompt, parameters, seed and target alone, and a
draft that adds the same g to its own log q guesses the target's choice far more often than its plain favourites.

The integers come from the counter-based generator Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011) and are bit-equal on every device. The float64 logarithms behind them may differ by an ulp between
devices; rounded to float32, that almost never shows.

Layout: key = (seed low, seed high); counter = (token // 4, 0, position low, position high); the token's 32-bit word is
output token % 4. Word 1 of the counter is the stream: 0 is the noise, others give uniform numbers (``uniform_rows``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words4, key: tuple[Tensor, Tensor]) -> Words4:
    """Philox4x32-10 of int64 tensors that hold 32-bit words and broadcast against each other; returns four such.

    Products wrap at 64 bits, which leaves all their bits right as an unsigned pattern. Words 1 and 3 carry garbage
    above bit 31 until the end: it only ever meets the low half, or a mask.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ (c1 ^ k0)) & _MASK, product1
        c2, c3 = ((product0 >> 32) ^ (c3 ^ k1)) & _MASK, product0
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0, c1 & _MASK, c2, c3 & _MASK


def _halves(seeds: Sequence[int], positions: Sequence[int], device: torch.device | str) -> tuple[Tensor, ...]:
    """Low and high word of each seed, then of each position: four int64 tensors [pairs, 1]."""
    words = np.array([seeds, positions], "<u8").T.copy().view("<u4").astype(np.int64)
    return torch.from_numpy(words).to(device).view(-1, 4, 1).unbind(1)


def gumbel_rows(seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str) -> Tensor:
    """Noise of several (seed, position) pairs, float32 [pairs, vocab], finite; seeds and positions are uint64."""
    halves = _halves(seeds, positions, device)
    blocks = torch.arange(-(-vocab // 4), dtype=torch.int64, device=device).unsqueeze(0)
    hashed = philox4x32((blocks, torch.zeros_like(halves[0]), halves[2], halves[3]), (halves[0], halves[1]))
    uniform = torch.stack(hashed, dim=-1).flatten(1)[:, :vocab].to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def gumbel(seed: int, position: int, vocab: int, device: torch.device | str) -> Tensor:
    """Standard Gumbel noise for the token at ``position``, float32 [vocab]; a larger vocabulary has the same prefix."""
    return gumbel_rows([seed], [position], vocab, device)[0]


def uniform_rows(seeds: Sequence[int], positions: Sequence[int], count: int, stream: int) -> Tensor:
    """Uniform numbers in [0, 1) of several (seed, position) pairs, float64 [pairs, count], of 53 bits each, on the CPU.

    ``stream`` > 0 sets them apart from the noise and from other streams: counter = (number // 2, stream, position low,
    position high), output words 0 and 1 make the even numbers, 2 and 3 the odd ones.
    """
    halves = _halves(seeds, positions, "cpu")
    blocks = torch.arange(-(-count // 2), dtype=torch.int64).unsqueeze(0)
    hashed = philox4x32((blocks, torch.full_like(halves[0], stream), halves[2], halves[3]), (halves[0], halves[1]))
    pairs = torch.stack([hashed[0] << 21 | hashed[1] >> 11, hashed[2] << 21 | hashed[3] >> 11], dim=-1)
    return pairs.flatten(1)[:, :count].to(torch.float64).mul_(2.0**-53)


class GumbelCache:
    """The last ``capacity`` rows of noise: the nodes of a tree share few positions. For one thread at a time.

    Rows are float32 [vocab] on ``device``, 4 * vocab bytes each, and belong to the cache: do not write to them. A
    missing row brings those of the next ``ahead`` - 1 positions with it, which is nearly free on a GPU (one launch
    sequence makes 64 rows in the time of one) and a waste on a CPU. With ``tokens``, int64 ids below ``vocab``, a row
    holds the noise of these alone, in their order.
    """

    def __init__(
        self,
        vocab: int,
        device: torch.device | str,
        capacity: int = 64,
        ahead: int = 1,
        tokens: Tensor | None = None,
    ) -> None:
        self.vocab = vocab
        self.device = torch.device(device)
        self.capacity = capacity
        self.ahead = ahead
        self._tokens = None if tokens is None else tokens.to(self.device)
        self._rows: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, seed: int, position: int) -> Tensor:
        """Noise at one position, float32 [vocab or tokens]."""
        return self._ensure([(seed, position)])[seed, position]

    def rows(self, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Noise of several pairs, float32 [pairs, vocab or tokens]; a view without copies if all pairs are the same."""
        pairs = list(zip(seeds, positions, strict=True))
        found = self._ensure(pairs)
        if len(found) == 1:
            return found[pairs[0]].expand(len(pairs), -1)
        columns = self.vocab if self._tokens is None else len(self._tokens)
        return torch.stack([found[pair] for pair in pairs]) if pairs else torch.empty(0, columns, device=self.device)

    def _ensure(self, pairs: list[tuple[int, int]]) -> dict[tuple[int, int], Tensor]:
        """The rows of all pairs; what is missing is made in one batch and kept as far as ``capacity`` allows."""
        wanted = dict.fromkeys(pairs)
        missing = [pair for pair in wanted if pair not in self._rows]
        if missing:
            self._make([(seed, at + i) for seed, at in missing for i in range(self.ahead) if at + i < 2**64])
        found = {}
        for pair in wanted:
            found[pair] = self._rows[pair]
            self._rows.move_to_end(pair)
        while len(self._rows) > self.capacity:
            self._rows.popitem(last=False)
        return found

    def _make(self, pairs: list[tuple[int, int]]) -> None:
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._rows]
        seeds, positions = zip(*new, strict=True)
        # Cloned, as a slice would keep the whole batch alive after the others are evicted.
        noise = gumbel_rows(seeds, positions, self.vocab, self.device)
        made = (row.clone() for row in (noise if self._tokens is None else noise[:, self._tokens]))
        self._rows.update(zip(new, made, strict=True))
