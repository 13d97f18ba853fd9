"""What a request may ask for: its sampling parameters, their limits, and the rule that its guesses are accepted by.

Values without torch, as draft workers that need no model use them, too. What they mean is told where they are carried
out: ``draftwood.processors``, ``draftwood.sampling``, ``draftwood.acceptance``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.errors import InvalidArgument

MAX_TEMPERATURE = 10.0
MAX_PENALTY = 2.0  # of presence and frequency, as OpenAI
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64


class Rule(enum.Enum):
    """How a request's guesses are accepted; at temperature 0 every rule is greedy."""

    GREEDY = "greedy"
    SHARED_NOISE = "shared_noise"
    REJECTION = "rejection"
    TYPICAL = "typical"

    @property
    def lossy(self) -> bool:
        """True if drafts may change the text, or its distribution."""
        return self is Rule.TYPICAL


def check_parameter(name: str, value: float, valid: bool, limit: str) -> None:
    """Raises InvalidArgument SAMPLING, naming value and limit, unless ``valid``."""
    if not valid:
        raise InvalidArgument("SAMPLING", f"{name} is {value}, must be {limit}", field=f"sampling.{name}")


@dataclass(frozen=True, slots=True)
class ProcessorParams:
    """Processors of one request; the defaults change nothing."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # distinct tokens
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_tokens: tuple[int, ...] = ()  # excluded until the output has min_tokens

    @property
    def counts(self) -> bool:
        """Whether it matters which tokens occur in the history."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidArgument SAMPLING or TOKEN_OUT_OF_VOCABULARY for the first fault; NaN is out of every range.

        ``check_bad_word`` holds for each bad word; what ``min_tokens`` may be depends on the request's ``max_tokens``.
        """
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check_parameter(name, value, abs(value) <= MAX_PENALTY, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")
        repetition, most = self.repetition_penalty, MAX_REPETITION_PENALTY
        check_parameter(
            "repetition_penalty", repetition, 1 / most <= repetition <= most, f"in [{1 / most:g}, {most:g}]"
        )
        check_count("logit_bias", len(self.logit_bias), MAX_BIASES, "tokens")
        for token, bias in self.logit_bias:
            where = f"logit_bias[{token}]"
            _check_token(token, vocab_size, where)
            check_parameter(where, bias, abs(bias) <= MAX_BIAS, f"in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")


def check_count(name: str, count: int, most: int, what: str) -> None:
    """Raises InvalidArgument SAMPLING for a list that is longer than ``most``."""
    if count > most:
        raise InvalidArgument(
            "SAMPLING", f"{name} has {count} {what}, at most {most} are taken", field=f"sampling.{name}"
        )


def _check_token(token: int, vocab_size: int, where: str) -> None:
    if not 0 <= token < vocab_size:
        message = f"token {token} is out of the vocabulary of {vocab_size}"
        raise InvalidArgument("TOKEN_OUT_OF_VOCABULARY", message, field=f"sampling.{where}")


def check_bad_word(word: Sequence[int], vocab_size: int, where: str) -> None:
    """Raises InvalidArgument for a sequence that is empty, too long or out of the vocabulary; ``where`` names it."""
    limit = f"between 1 and {MAX_BAD_WORD_TOKENS}"
    if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
        raise InvalidArgument(
            "SAMPLING", f"{where} has {len(word)} tokens, must have {limit}", field=f"sampling.{where}"
        )
    for k, token in enumerate(word):
        _check_token(token, vocab_size, f"{where}.token_ids[{k}]")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 keep every token.

    ``processors`` change the logits beforehand (``draftwood.processors``); None: the logits as they come. The functions
    here take processed logits and do not look at them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # uint64
    min_p: float = 0.0
    processors: ProcessorParams | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out, for which the row's largest have to be found."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidArgument SAMPLING for the first value out of its range; NaN is out of every range.

        As ``ProcessorParams.validate`` for the processors.
        """
        t = self.temperature
        check_parameter("temperature", t, 0 <= t <= MAX_TEMPERATURE, f"in [0, {MAX_TEMPERATURE:g}]")
        check_parameter("top_k", self.top_k, 0 <= self.top_k <= vocab_size, f"in [0, {vocab_size}], the vocabulary")
        check_parameter("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        check_parameter("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        check_parameter("seed", self.seed, 0 <= self.seed < 2**64, "in [0, 2**64)")
        if self.processors:
            self.processors.validate(vocab_size)
