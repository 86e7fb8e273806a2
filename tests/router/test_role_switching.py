"""When a router has a worker take the other role: decisions over what the workers have reported."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest, Overloaded
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.placement import role_switching
from pdserve.router.placement.role_switching import RoleSwitching, occupancy_of, queue_of
from pdserve.router.workers.worker import RemoteWorker
from pdserve.v1 import worker_pb2
from tests.router.candidates import worker
from tests.router.conftest import Cluster
from tests.router.fake_worker import LAYOUT
from tests.router.test_role_switch import named, roles
from tests.support.models.kv_layouts import with_shape
from tests.support.run.waiting import eventually

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


def prefill(name: str, num_tokens: int = 0, tokens_per_s: float = 1000.0, **fields: Any) -> RemoteWorker:
    return worker(name, "prefill", num_waiting_tokens=num_tokens, prefill_tokens_per_s=tokens_per_s, **fields)


def decode(name: str, num_running: int = 0, **fields: Any) -> RemoteWorker:
    """At most 64 sequences and 1000 blocks."""
    return worker(name, "decode", num_running=num_running, **fields)


class Asked:
    """A router's decisions under a clock of the test, and what it asks for."""

    def __init__(self, workers: list[RemoteWorker], dwell_s: float = 30.0) -> None:
        self.workers, self.now_s = workers, 1000.0
        self.asked: list[tuple[WorkerRole, float]] = []
        self.error: Exception | None = None
        self.switching = RoleSwitching(self.of, dwell_s, self.ask, clock=lambda: self.now_s)

    def of(self, role: WorkerRole) -> list[RemoteWorker]:
        return [each for each in self.workers if each.role is role]

    async def ask(self, channel: object, role: WorkerRole, dwell_s: float) -> None:
        self.asked.append((role, dwell_s))
        if self.error is not None:
            raise self.error

    async def look(self, seconds: float) -> int:
        """Look for so long; returns how often it asked."""
        before = len(self.asked)
        for _ in range(int(seconds / role_switching.LOOK_EVERY_S)):
            self.now_s += role_switching.LOOK_EVERY_S
            if (change := self.switching.due()) is not None:
                await self.switching._ask(change)
        return len(self.asked) - before


def change(*workers: RemoteWorker) -> tuple[str, WorkerRole] | None:
    made = Asked(list(workers))
    found = made.switching.find(made.of(P), made.of(D))
    return None if found is None else (found.worker.identity.worker_id, found.role)


def test_decode_helps_a_long_queue_and_not_its_first_worker() -> None:
    assert change(prefill("p0", 2000), decode("d0"), decode("d1"), decode("d2", 1)) == ("d1", P)
    assert change(prefill("p0", 2000), decode("d0"), decode("d1", 8), decode("d2", 1)) == ("d2", P)
    assert change(prefill("p0", 2000), decode("d0"), decode("d1", 3, num_sessions=1), decode("d2", 9)) == ("d2", P)


def test_prefill_helps_a_full_decode() -> None:
    assert change(prefill("p0"), prefill("p1"), decode("d0", 60)) == ("p1", D)
    assert change(prefill("p0"), prefill("p1", 100), prefill("p2"), decode("d0", 60)) == ("p2", D)


@pytest.mark.parametrize(
    "workers",
    [
        [prefill("p0", 900), decode("d0"), decode("d1")],
        [prefill("p0", 2000), decode("d0")],
        [prefill("p0", 2000), decode("d0", 20), decode("d1", 20)],
        [prefill("p0", 2000, 0.0), decode("d0"), decode("d1")],
        [prefill("p0"), decode("d0", 64)],
        [prefill("p0"), prefill("p1", 600), decode("d0", 64)],
        [prefill("p0"), prefill("p1"), decode("d0", 40)],
        [decode("d0"), decode("d1")],
        [prefill("p0", 2000), prefill("p1")],
        [prefill("p0", 2000), decode("d0"), decode("d1", layout=with_shape(LAYOUT, num_layers=3))],
    ],
    ids=[
        "the queue is short", "the last decode worker", "decode would be full", "no rate is known", "the last prefill worker",
        "prefill would have a queue", "decode is not full", "no prefill worker", "no decode worker", "during an upgrade",
    ],
)  # fmt: skip
def test_nothing_changes(workers: list[RemoteWorker]) -> None:
    assert change(*workers) is None


def test_the_two_numbers() -> None:
    assert queue_of([]) == 0.0
    assert queue_of([prefill("p0", 3000), prefill("p1", 1000)]) == pytest.approx(2.0)
    assert occupancy_of([]) == 0.0
    assert queue_of([prefill("p0", 3000)], [decode("d0", num_waiting_tokens=1000)]) == pytest.approx(4.0)
    # what waits for prefill workers is no load of decode, and neither are prompts that decode has to compute
    assert occupancy_of([decode("d0", 16, num_waiting=16, num_remote_kv=30), decode("d1")]) == pytest.approx(0.125)
    assert occupancy_of([decode("d0", 64, num_waiting=32), decode("d1")]) == pytest.approx(0.75)
    assert occupancy_of([decode("d0", 10, num_remote_kv=30, blocks_in_use=600)]) == pytest.approx(10 / 64)
    assert occupancy_of([decode("d0", 10, num_remote_kv=10, blocks_in_use=600)]) == pytest.approx(0.3)
    assert occupancy_of([decode("d0", 10, num_remote_kv=30, blocks_in_use=950)]) == pytest.approx(0.95)
    assert occupancy_of([decode("d0", blocks_in_use=900), decode("d1")]) == pytest.approx(0.45)


def test_a_switch_is_not_the_cause_of_the_next() -> None:
    """Whatever the load: after the change that it calls for, the same load does not call for the way back."""
    for num_tokens in range(0, 5000, 250):
        for num_running in range(0, 193, 8):
            workers = [prefill("p0", num_tokens), prefill("p1"), decode("d0", min(64, num_running)),
                       decode("d1", min(64, max(0, num_running - 64))), decode("d2", max(0, num_running - 128))]  # fmt: skip
            made = Asked(workers)
            found = made.switching.find(made.of(P), made.of(D))
            if found is None:
                continue
            left = [each for each in workers if each is not found.worker]
            num_p = sum(each.role is P for each in left) + (found.role is P)
            num_d = sum(each.role is D for each in left) + (found.role is D)
            after = [prefill(f"p{place}", num_tokens // num_p) for place in range(num_p)]
            after += [decode(f"d{place}", num_running // num_d) for place in range(num_d)]
            again = Asked(after)
            back = again.switching.find(again.of(P), again.of(D))
            assert back is None or back.role is found.role


async def test_a_change_must_last_and_the_next_waits() -> None:
    made = Asked([prefill("p0", 2000), decode("d0"), decode("d1"), decode("d2")])
    assert await made.look(role_switching.SUSTAINED_S) == 0
    assert await made.look(0.5) == 1
    assert made.asked == [(P, 30.0)]
    assert await made.look(29.0) == 0, "though nothing has changed"
    assert await made.look(4.0) == 1
    assert made.switching.num_changes == {("prefill", "done"): 2}


async def test_a_change_that_does_not_last() -> None:
    busy, idle = prefill("p0", 2000), prefill("p0")
    made = Asked([busy, decode("d0"), decode("d1")])
    for _ in range(10):
        made.workers[0] = busy
        assert await made.look(1.0) == 0
        made.workers[0] = idle
        assert await made.look(0.5) == 0


async def test_a_change_by_others_counts() -> None:
    made = Asked([prefill("p0", 2000), decode("d0"), decode("d1"), decode("d2")])
    made.workers[1].role_changed_at = made.now_s
    assert await made.look(29.0) == 0
    assert await made.look(4.0) == 1


async def test_a_worker_that_cannot_is_not_asked_again() -> None:
    made = Asked([prefill("p0", 2000), decode("d0"), decode("d1"), decode("d2", 1)])
    made.error = InvalidRequest("role is prefill, which this worker cannot take: dtype differs", "role")
    assert await made.look(10.0) == 2
    assert await made.look(60.0) == 0
    assert made.switching.num_changes == {("prefill", "refused"): 2}
    assert len(made.switching._unable) == 2
    made.workers = made.workers[:2]
    await made.look(1.0)
    assert not made.switching._unable


async def test_a_worker_that_was_changed_by_another_router() -> None:
    made = Asked([prefill("p0", 2000), decode("d0"), decode("d1")])
    made.error = Overloaded("the worker's role was changed 1.0 s ago")
    assert await made.look(3.0) == 1
    assert await made.look(29.0) == 0
    made.error = None
    assert await made.look(5.0) == 1
    assert made.switching.num_changes == {("prefill", "failed"): 1, ("prefill", "done"): 1}


async def test_two_routers_with_one_view_leave_a_worker_of_each_role() -> None:
    """Both decide before either has seen the other's change."""
    for number in (2, 3, 4):
        workers = [prefill("p0", 9000), *(decode(f"d{place}") for place in range(number))]
        chosen = []
        for _ in range(2):
            made = Asked(workers)
            found = made.switching.find(made.of(P), made.of(D))
            assert found is not None
            chosen.append(found.worker.identity.worker_id)
        assert "d0" not in chosen


async def test_a_router_asks_by_itself(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_switching, "SUSTAINED_S", 0.1)
    monkeypatch.setattr(role_switching, "LOOK_EVERY_S", 0.02)
    await cluster.start(prefill=1, decode=3, role_switch="auto", role_dwell_s=5.0)
    for each in cluster.workers:
        each.report(max_waiting=0)
    named(cluster, "prefill0").report(num_waiting_tokens=5000, prefill_tokens_per_s=100.0)
    await eventually(lambda: any(each.roles_asked for each in cluster.workers))
    asked = [
        (each.worker_id, request.role, request.dwell_s) for each in cluster.workers for request in each.roles_asked
    ]
    assert len(asked) == 1
    [(name, role, dwell_s)] = asked
    assert (name in ("decode1", "decode2"), role, dwell_s) == (True, worker_pb2.ROLE_PREFILL, 5.0)
    assert (await roles(cluster))[name] == "prefill"
    metrics = (await cluster.http.get("/metrics")).text
    assert 'pdserve_role_changes_total{outcome="done",role="prefill"} 1.0' in metrics
