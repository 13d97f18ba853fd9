"""The forward of a step and the target's token at every row of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.acceptance import Rule, reject, typical_targets
from draftwood.noise import GumbelCache
from draftwood.runtime.model import ModelRuntime
from draftwood.sampling import SamplingParams, target_tokens
from verifier_service.plan import Part

NOISE_AHEAD = 16
"""Rows of noise made at once on a GPU, where sixteen cost what one does."""


class TargetSampler:
    """Runs the target and applies each session's rule; rows of one session never depend on another's.

    On a GPU tokens are chosen as part of the forward, but for rules that have to sort (top-k, top-p). ``typical`` are
    epsilon and delta of typical acceptance.
    """

    def __init__(self, runtime: ModelRuntime, token_count: int, noise_rows: int, typical: tuple[float, float]) -> None:
        self._typical = typical
        self._runtime = runtime
        self._token_count = token_count
        self._on_device = runtime.device.type == "cuda"
        self._noise = GumbelCache(token_count, runtime.device, noise_rows, NOISE_AHEAD if self._on_device else 1)

    def step(self, parts: Sequence[Part]) -> list[list[int]]:
        """Computes the parts' rows and returns each part's tokens, -1 where logits were not finite."""
        counts = [len(part.rows.token) - part.rows.logits_from for part in parts]
        rows, rules = [part.rows for part in parts], [part.session.request.sampling for part in parts]
        groups: dict[SamplingParams, list[int]] = {}
        chosen: list[list[int]] = [[] for _ in parts]
        if self._on_device:
            made = self._runtime.choose(rows, rules, self._token_count)
            logits, flat = made.logits, iter(made.tokens.tolist())
            chosen = [[next(flat) for _ in range(count)] for count in counts]
        else:
            logits = self._runtime.forward(rows)
        for k, rule in enumerate(rules):
            if (not self._on_device or rule.truncates) and not parts[k].session.request.sampled:
                groups.setdefault(rule, []).append(k)
        pieces = torch.split(logits, counts)
        for rule, members in groups.items():
            tokens = iter(self._choose(rule, [parts[k] for k in members], [pieces[k] for k in members]))
            for k in members:
                chosen[k] = [next(tokens) for _ in range(counts[k])]
        for k, part in enumerate(parts):
            if counts[k] and part.session.request.effective_rule in (Rule.REJECTION, Rule.TYPICAL):
                chosen[k] = self._accept(part, chosen[k], pieces[k][:, : self._token_count])
        return chosen

    def _accept(self, part: Part, own: list[int], logits: Tensor) -> list[int]:
        """The tokens of a rule that looks at the children of a node, too."""
        session, rule = part.session, part.session.request.sampling
        if session.request.sampled:
            return reject(part.tree, session.tree.drawn(part.kept), logits, rule, len(session.tokens))
        return typical_targets(part.tree, own, logits, rule, *self._typical)

    def _choose(self, rule: SamplingParams, parts: Sequence[Part], logits: Sequence[Tensor]) -> list[int]:
        """Tokens of the rows of all parts, one after the other, by the rule they share."""
        # A token is chosen for the position behind its row's.
        positions = [int(p) + 1 for part in parts for p in part.rows.tail_position[part.rows.logits_from :]]
        rows = logits[0] if len(logits) == 1 else torch.cat(list(logits))
        tokens, _ = target_tokens(rows, rule, positions, self._noise, vocab_size=self._token_count)
        chosen: list[int] = tokens.tolist()
        return chosen
