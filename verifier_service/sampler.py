"""The target's token at every row of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.noise import GumbelCache
from draftwood.sampling import SamplingParams, target_tokens
from verifier_service.plan import Part


class TargetSampler:
    """Applies each session's rule to its rows; rows of one session never depend on another's."""

    def __init__(self, noise: GumbelCache, token_count: int) -> None:
        self._noise = noise
        self._token_count = token_count

    def choose(self, logits: Tensor, parts: Sequence[Part]) -> list[list[int]]:
        """Each part's tokens, -1 where logits were not finite; logits [wanted rows, vocab] of all parts, in order."""
        counts = [len(part.rows.token) - part.rows.logits_from for part in parts]
        groups: dict[SamplingParams, list[int]] = {}
        for k, part in enumerate(parts):
            groups.setdefault(part.session.request.sampling, []).append(k)
        pieces = torch.split(logits, counts)
        chosen: list[list[int]] = [[] for _ in parts]
        for params, members in groups.items():
            # A token is chosen for the position behind its row's.
            positions = [int(p) + 1 for k in members for p in parts[k].rows.tail_position[parts[k].rows.logits_from :]]
            rows = pieces[members[0]] if len(members) == 1 else torch.cat([pieces[k] for k in members])
            tokens, _ = target_tokens(rows, params, positions, self._noise, vocab_size=self._token_count)
            flat = iter(tokens.tolist())
            for k in members:
                chosen[k] = [next(flat) for _ in range(counts[k])]
        return chosen
