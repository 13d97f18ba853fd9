"""Real processes killed, stopped and told to end under live sessions, whose texts are those of the target alone.

``benchmarks/serving/survival.py`` plays the same for longer. All tests share a cluster: one that had not recovered
from one of them would fail in the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.services.models import Models
from tests.services.processes import Processes
from tests.services.survival import Fleet, Seen, all_killed, connected, drained, hung, killed, percentile, started

LEASE_S = 3.0
SHORT = {"count": 8, "tokens": 60}


@pytest.fixture(scope="module")
def processes(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with started(models, tmp_path_factory.mktemp("survival"), lease_s=LEASE_S) as processes:
        yield processes


@pytest.fixture
async def cluster(processes: Processes) -> AsyncIterator[Fleet]:
    async with connected(processes) as cluster:
        yield cluster


def unharmed(seen: Seen, *, refusals: bool = False) -> bool:
    """No text failed or differs; ``refusals``: some could not begin for a while, as nobody was there."""
    assert seen.wrong == [] and (refusals or not seen.refused)
    assert seen.texts >= 16
    return True


async def test_killed_draft_workers_are_not_noticed(cluster: Fleet) -> None:
    seen = await killed(cluster, cluster.drafts, kills=4, count=16, tokens=60)
    assert unharmed(seen) and seen.migrations == 0 and seen.reattachments > 0
    assert len(seen.gaps_s) >= 4 * 12 and percentile(seen.gaps_s, 0.99) < 1.0


async def test_texts_of_a_killed_verifier_go_on_at_another(cluster: Fleet) -> None:
    """Each of its sessions moves once, with what has been delivered; with none left all wait until one is back."""
    seen = await killed(cluster, cluster.verifiers, kills=3, **SHORT)
    assert unharmed(seen) and 0 < seen.migrations <= 3 * 8
    alone = await all_killed(cluster, cluster.verifiers, **SHORT)
    assert unharmed(alone, refusals=True) and alone.migrations >= 8


async def test_texts_of_a_killed_router_go_on_at_another(cluster: Fleet) -> None:
    """Neither router knows of the other; with both gone, clients wait until one is back."""
    assert unharmed(await killed(cluster, cluster.routers, kills=3, **SHORT))
    assert unharmed(await all_killed(cluster, cluster.routers, **SHORT), refusals=True)


async def test_bug_41_a_verifier_that_goes_on_after_its_texts_have_moved_changes_nothing(cluster: Fleet) -> None:
    """SIGSTOP, migration, SIGCONT: what it then sends is read by nobody, and it gives back all that it held."""
    seen = await hung(cluster, cluster.verifiers, times=1, for_s=LEASE_S + 0.5, **SHORT)
    assert unharmed(seen) and seen.migrations > 0
    assert max(seen.gaps_s) > LEASE_S / 2, "else nothing hung"


async def test_a_draft_worker_that_hangs_is_waited_for_briefly(cluster: Fleet) -> None:
    seen = await hung(cluster, cluster.drafts, times=1, for_s=1.5, **SHORT)
    assert unharmed(seen) and seen.migrations == 0 and percentile(seen.gaps_s, 0.99) < 1.0


async def test_who_is_told_to_end_fails_no_request(cluster: Fleet) -> None:
    """SIGTERM under load: verifiers and routers finish what they have begun, draft workers leave."""
    victims = [cluster.verifiers[0], cluster.routers[0], cluster.drafts[0], cluster.routers[1]]
    seen = await drained(cluster, victims, times=len(victims), **SHORT)
    assert unharmed(seen) and seen.exits == [0] * len(victims)
