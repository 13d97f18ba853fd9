"""Pearson's test, for samples against the distribution that they should have."""

from __future__ import annotations

import math

import numpy as np


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """P(a value as large or larger) by Wilson and Hilferty; cells expected less than 10 times are one."""
    assert counts[expected == 0].sum() == 0, "a token that the target cannot have"
    large = expected >= 10
    seen = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    if not freedom:
        return 1.0
    value = ((seen - wanted) ** 2 / wanted).sum() / freedom
    z = (value ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))
