from __future__ import annotations

import pytest

from draftwood.config import ClusterConfig, DraftPool, DraftSettings, ScalingSettings, VerifierPool
from draftwood.errors import DraftwoodError
from router.scaling import PoolLimits, check_counts

LIMITS = [PoolLimits("draft", "draft", 1, 4, 1.0), PoolLimits("verifier", "verifier", 0, None, 4.0)]
NOW = {"draft": 2, "verifier": 1}


def test_what_is_asked_is_granted_and_the_rest_stays() -> None:
    assert check_counts(LIMITS, NOW, {"draft": 4}, None) == {"draft": 4, "verifier": 1}
    assert check_counts(LIMITS, NOW, {"verifier": 9, "draft": 1}, None) == {"draft": 1, "verifier": 9}


@pytest.mark.parametrize(
    ("asked", "budget", "reason", "told"),
    [
        ({"draft": 5}, None, "POOL_LIMIT", "5 workers are asked of pool 'draft', its min is 1 and its max 4"),
        ({"draft": 0}, None, "POOL_LIMIT", "its min is 1"),
        ({"lm": 1}, None, "POOL_UNKNOWN", "no pool 'lm'; pools: draft, verifier"),
        ({"verifier": 2}, 8.0, "POOL_LIMIT", "the pools would cost 10, the budget is 8"),
    ],
)
def test_what_is_over_a_limit_is_refused(asked: dict[str, int], budget: float | None, reason: str, told: str) -> None:
    with pytest.raises(DraftwoodError, match=told) as caught:
        check_counts(LIMITS, NOW, asked, budget)
    assert (caught.value.reason, caught.value.field) == (reason, "counts")


def test_pools_that_are_over_the_budget_may_shrink() -> None:
    assert check_counts(LIMITS, {"draft": 4, "verifier": 2}, {"draft": 1}, 6.0) == {"draft": 1, "verifier": 2}


def test_a_pool_has_the_name_of_its_role_or_a_number() -> None:
    one = ClusterConfig()
    assert [pool.name for pool in one.pools] == ["verifier", "draft"]
    ngram = DraftPool(name="copies", settings=DraftSettings(kind="ngram"))
    several = ClusterConfig(verifiers=[VerifierPool(), VerifierPool()], drafts=[DraftPool(), ngram])
    assert [pool.name for pool in several.pools] == ["verifier-0", "verifier-1", "draft-0", "copies"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"drafts": [{"name": "a"}], "verifiers": [{"name": "a"}]}, "two pools have the name 'a'"),
        ({"drafts": [{"name": "router"}]}, "no pool may have the name 'router'"),
        ({"drafts": [{"name": "A"}]}, "pattern"),
        ({"drafts": [{"count": 3, "max": 2}]}, "count is 3, but min is 0 and max is 2"),
        ({"drafts": [{"count": 1, "min": 2}]}, "count is 1, but min is 2"),
        ({"scaling": {"budget": 1.5}}, "the pools cost 2 at the start, but scaling.budget is 1.5"),
    ],
)
def test_pools_that_make_no_sense_are_refused(config: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ClusterConfig.model_validate(config)


def test_a_budget_that_suffices_is_fine() -> None:
    pools = [DraftPool(count=2, cost=0.5)]
    assert ClusterConfig(drafts=pools, scaling=ScalingSettings(budget=2)).scaling.budget == 2
