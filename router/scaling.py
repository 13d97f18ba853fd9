"""What a pool is to the controller, and which sizes are allowed. Pure values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftwood.errors import InvalidArgument, NotFound


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Within which a pool is scaled."""

    name: str
    role: str  # "draft" or "verifier"
    min: int
    max: int | None  # None: no limit but the budget
    cost: float  # of one worker

    def clamp(self, count: int) -> int:
        return max(self.min, count if self.max is None else min(count, self.max))


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool as it is to be and as it is."""

    limits: PoolLimits
    wanted: int
    present: int  # those that start included, those that leave not
    ready: int
    draining: int
    error: str = ""  # why a worker could not start; empty once one has
    decision: str = ""  # of the autoscaler, the last one


def check_counts(
    limits: Sequence[PoolLimits], wanted: Mapping[str, int], asked: Mapping[str, int], budget: float | None
) -> dict[str, int]:
    """The workers wanted of every pool once ``asked`` is granted. Raises POOL_UNKNOWN, POOL_LIMIT."""
    by_name = {pool.name: pool for pool in limits}
    if unknown := sorted(asked.keys() - by_name.keys()):
        known = ", ".join(by_name)
        raise NotFound("POOL_UNKNOWN", f"there is no pool {unknown[0]!r}; pools: {known}", field="counts")
    for name, count in asked.items():
        pool = by_name[name]
        if count != pool.clamp(count):
            most = "unlimited" if pool.max is None else pool.max
            message = f"{count} workers are asked of pool {name!r}, its min is {pool.min} and its max {most}"
            raise InvalidArgument("POOL_LIMIT", message, field="counts")
    granted = {**wanted, **asked}
    cost = sum(pool.cost * granted[pool.name] for pool in limits)
    before = sum(pool.cost * wanted[pool.name] for pool in limits)
    if budget is not None and cost > max(budget, before):
        message = f"the pools would cost {cost:g}, the budget is {budget:g}"
        raise InvalidArgument("POOL_LIMIT", message, field="counts")
    return granted
