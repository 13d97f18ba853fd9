"""Several routers side by side: their ports, and what is known and told when some of them do not answer."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from draftwood.config import ClusterConfig, RouterSection, RouterSettings, load_cluster_config
from draftwood.errors import InvalidArgument, Unavailable
from router.autoscaling import WorkerLoad
from router.cluster import _free_ports, _with_fixed_ports
from router.pools import STOP_SLACK_S, Plan, RayFleet, seen_by_all
from router.state import WorkerState


def test_each_router_has_a_port_of_its_own() -> None:
    section = RouterSection(count=3, settings=RouterSettings(listen="10.0.0.1:50050", drafts_per_session=1))
    assert [each.listen for each in section.each()] == ["10.0.0.1:50050", "10.0.0.1:50051", "10.0.0.1:50052"]
    assert all(each.drafts_per_session == 1 for each in section.each())
    assert [each.listen for each in RouterSection(count=2).each()] == ["127.0.0.1:0"] * 2


def test_a_last_port_that_is_none_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("router: {count: 3, settings: {listen: '127.0.0.1:65534'}}")
    with pytest.raises(InvalidArgument, match="count is 3 from port 65534 on, but the last port is 65535"):
        load_cluster_config(config)
    config.write_text("router: {count: 0}")
    with pytest.raises(InvalidArgument, match="greater than 0"):
        load_cluster_config(config)


def test_free_ports_come_in_a_row_and_stay_over_restarts() -> None:
    config = _with_fixed_ports(ClusterConfig(router=RouterSection(count=3)))
    first, *others = (int(each.listen.rpartition(":")[2]) for each in config.router.each())
    assert first and others == [first + 1, first + 2]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        for _ in range(20):
            free = _free_ports("127.0.0.1", 3)
            assert taken.getsockname()[1] not in range(free, free + 3)


def state(health: str, sessions: int = 0, load: WorkerLoad | None = None, worker_id: str = "draft-0") -> WorkerState:
    return WorkerState("draft", worker_id, "h:1", health, sessions, load)


@pytest.mark.parametrize(
    ("views", "believed"),
    [
        (("LOST", "READY"), "READY"),
        (("STARTING", "LOST"), "STARTING"),
        (("READY", "DRAINING"), "DRAINING"),
        (("LOST", "LOST"), "LOST"),
        (("STARTING", "READY"), "READY"),
    ],
)
def test_whoever_sees_a_worker_best_is_believed(views: tuple[str, str], believed: str) -> None:
    for order in (views, views[::-1]):
        (seen,) = seen_by_all([[state(order[0], 2)], [state(order[1], 3)]])
        assert (seen.health, seen.sessions) == (believed, 3)


def test_a_worker_that_one_router_alone_knows_is_known() -> None:
    load = WorkerLoad("draft-1", 1, 2)
    seen = seen_by_all([[state("READY")], [state("LOST"), state("READY", 1, load, "draft-1")], []])
    assert [(each.worker_id, each.health, each.load) for each in seen] == [
        ("draft-0", "READY", None),
        ("draft-1", "READY", load),
    ]


class Asked(RayFleet):
    """Routers that answer after so many seconds, or raise."""

    def __init__(self, *answers: float | Exception) -> None:
        super().__init__(Plan(ClusterConfig(router=RouterSection(count=len(answers))), {}, across_nodes=False))
        self.answers = answers
        self.told: list[str] = []

    async def _ask(self, worker_id: str, method: str, *arguments: Any) -> Any:
        answer = self.answers[int(worker_id.rpartition("-")[2])]
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(answer)
        self.told.append(worker_id)
        return [state("READY", worker_id=worker_id)]


LOST = Unavailable("ACTOR_FAILED", "router does not answer")


async def test_a_router_that_is_dead_or_hangs_holds_nobody_up() -> None:
    fleet = Asked(LOST, 60.0, 0.05, 0.1)
    began = time.monotonic()
    assert [each.worker_id for each in await fleet.workers()] == ["router-2", "router-3"]
    await fleet.drain("draft-0")
    assert time.monotonic() - began < 2 * STOP_SLACK_S + 1.0
    assert sorted(fleet.told) == ["router-2", "router-2", "router-3", "router-3"]
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_only_all_routers_lost_are_an_error() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await Asked(LOST, LOST).workers()
    with pytest.raises(TimeoutError):  # one that starts is waited for
        async with asyncio.timeout(0.3):
            await Asked(LOST, 60.0).workers()
