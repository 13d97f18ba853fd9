"""The forward of a step and the target's token at every row of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftwood.acceptance import reject, typical_targets
from draftwood.errors import DraftwoodError, Internal, InvalidArgument
from draftwood.noise import GumbelCache
from draftwood.parameters import Rule, SamplingParams
from draftwood.processors import allow_only, process
from draftwood.runtime.model import ModelRuntime
from draftwood.sampling import target_tokens, token_logprobs
from verifier_service.constraints import Matcher
from verifier_service.plan import Part
from verifier_service.session import TokenLogprobs

NOISE_AHEAD = 16
"""Rows of noise made at once on a GPU, where sixteen cost what one does."""
NOT_FINITE = -1
"""In the place of a token: the row's logits were not finite."""
NONE_ALLOWED = -2
"""In the place of a token: the request's processors exclude every token."""


def failure(token: int, matcher: Matcher | None) -> DraftwoodError:
    """What ends a session whose next token is one of the two above."""
    if token == NONE_ALLOWED and matcher and matcher.fault:
        message = f"the constraint cannot be followed any further: {matcher.fault}"
        return InvalidArgument("CONSTRAINT_LIMIT", message, field="generation.constraint")
    if token == NONE_ALLOWED:
        message = "bad_words, min_tokens and constraints together leave no token to go on with"
        return InvalidArgument("NO_TOKEN_ALLOWED", message, field="sampling")
    return Internal("NAN_LOGITS", "the target's logits were not finite")


class TargetSampler:
    """Runs the target and applies each session's rule; rows of one session never depend on another's.

    On a GPU tokens are chosen as part of the forward, but for sessions that need more than temperature and seed:
    processors, or rules that have to sort (top-k, top-p, min-p). ``typical`` are epsilon and delta of typical
    acceptance.
    """

    def __init__(self, runtime: ModelRuntime, token_count: int, noise_rows: int, typical: tuple[float, float]) -> None:
        self._typical = typical
        self._runtime = runtime
        self._token_count = token_count
        self._on_device = runtime.device.type == "cuda"
        self._noise = GumbelCache(token_count, runtime.device, noise_rows, NOISE_AHEAD if self._on_device else 1)
        self.computed_s = 0.0  # when the last step's forward was over: the logits, on a GPU the tokens, were there
        self._logits: dict[str, Tensor] = {}  # of the last step, of sessions that want logprobs

    def step(
        self,
        parts: Sequence[Part],
        allowed: Mapping[str, Tensor] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> list[list[int]]:
        """Computes the parts' rows and returns each part's tokens, NOT_FINITE or NONE_ALLOWED where there is none.

        ``allowed`` has, by session id, the tokens that a constraint allows at the part's rows (``allow_only``).
        """
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
        self.computed_s = clock()
        pieces = list(torch.split(logits, counts))
        self._logits = {
            part.session.request.session_id: piece
            for part, piece in zip(parts, pieces, strict=True)
            if part.session.request.top_logprobs is not None
        }
        processed = self._process(parts, pieces, allowed or {})
        for k, rule in enumerate(rules):
            if parts[k].session.request.sampled:
                continue
            if not self._on_device or rule.truncates or k in processed:
                groups.setdefault(replace(rule, processors=None) if rule.processors else rule, []).append(k)
        for rule, members in groups.items():
            tokens = iter(self._choose(rule, [parts[k] for k in members], [pieces[k] for k in members]))
            for k in members:
                chosen[k] = [next(tokens) for _ in range(counts[k])]
        for k, part in enumerate(parts):
            if counts[k] and part.session.request.effective_rule in (Rule.REJECTION, Rule.TYPICAL):
                chosen[k] = self._accept(part, chosen[k], pieces[k][:, : self._token_count])
        for k in processed:
            if NOT_FINITE in chosen[k]:
                chosen[k] = _told_apart(chosen[k], pieces[k])
        return chosen

    def _accept(self, part: Part, own: list[int], logits: Tensor) -> list[int]:
        """The tokens of a rule that looks at the children of a node, too."""
        session, rule = part.session, part.session.request.sampling
        if session.request.sampled:
            return reject(part.tree, session.tree.drawn(part.kept), logits, rule, len(session.tokens))
        return typical_targets(part.tree, own, logits, rule, *self._typical)

    def logprobs(self, part: Part, nodes: Sequence[int], tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Of the tokens chosen at these nodes of a part of the last step; the request must ask for them."""
        request = part.session.request
        assert request.top_logprobs is not None
        rows = self._logits[request.session_id][list(nodes)]
        logprob, top, values = token_logprobs(rows, tokens, request.top_logprobs, vocab_size=self._token_count)
        columns = zip(logprob.tolist(), top.tolist(), values.tolist(), strict=True)
        return tuple(TokenLogprobs(own, tuple(zip(ids, others, strict=True))) for own, ids, others in columns)

    def _process(self, parts: Sequence[Part], pieces: list[Tensor], allowed: Mapping[str, Tensor]) -> set[int]:
        """Replaces the logits of parts that have processors or a constraint; returns which."""
        processed = set()
        for k, part in enumerate(parts):
            history, mask = part.session.history, allowed.get(part.session.request.session_id)
            history = history if history and history.active else None
            if not len(pieces[k]) or (history is None and mask is None):
                continue
            raw = pieces[k][:, : self._token_count]
            rows = raw if mask is None else allow_only(raw, mask)
            if history:
                rows = process(rows, history, part.tree)
            # What is not finite stays so, even if the token in question is excluded.
            pieces[k] = rows.masked_fill_(~raw.amax(dim=-1, keepdim=True).isfinite(), math.nan)
            processed.add(k)
        return processed

    def _choose(self, rule: SamplingParams, parts: Sequence[Part], logits: Sequence[Tensor]) -> list[int]:
        """Tokens of the rows of all parts, one after the other, by the rule they share."""
        # A token is chosen for the position behind its row's.
        positions = [int(p) + 1 for part in parts for p in part.rows.tail_position[part.rows.logits_from :]]
        real = [piece[:, : self._token_count] for piece in logits]
        rows = real[0] if len(real) == 1 else torch.cat(real)
        tokens, _ = target_tokens(rows, rule, positions, self._noise)
        chosen: list[int] = tokens.tolist()
        return chosen


def _told_apart(tokens: Sequence[int], rows: Tensor) -> list[int]:
    """The tokens, with NONE_ALLOWED where a processed row has nothing left."""
    empty = rows.isneginf().all(dim=-1).tolist()
    return [NONE_ALLOWED if none else token for token, none in zip(tokens, empty, strict=True)]
