"""Admission of several router processes: what one entered counts for the others, and ends with it."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.common.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    PeerError,
    WorkerLost,
)
from pdserve.common.settings.api_key_file import KeyLimits
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.router.admission.admission import Admission
from pdserve.router.admission.child_admission import ChildAdmission, largest
from pdserve.router.admission.place import AdmissionLimits, Capacity, Cost
from pdserve.router.admission.shared_admission import SharedAdmission
from pdserve.router.process_link import Handler, ProcessLink
from pdserve.router.responses.response_store import MemoryResponseStore, StoredResponse
from pdserve.router.responses.shared_response_store import SharedResponseStore, store_handlers
from pdserve.router.service import run_router
from pdserve.router.telemetry.metric_families import MetricFamilies, added, families_of
from pdserve.router.tenants.client import Client
from tests.support.engine.settings_with import settings_with
from tests.support.run.waiting import eventually

COST = Cost(num_tokens=4, max_tokens=8)


def alice(**limits):
    return Client(key_name="alice", tenant="alice", limits=KeyLimits(**limits))


async def linked(handlers=None):
    """(end of a process, end of its parent)."""
    here, there = socket.socketpair()
    return ProcessLink(here, {}), ProcessLink(there, handlers or {})


class Process:
    """A router process, and its parent's side of it."""

    async def start(self, admission, capacity):
        self.child = ChildAdmission(admission)
        self.link, self.parent_link = await linked(self.child.handlers)
        self.parent_link.on_lost = self.child.end
        self.admission = SharedAdmission(self.link, lambda: capacity, 30.0)
        self.admission.recheck()
        return self

    async def request(self, client, held=None, cost=COST, no_worker=None, flex_id=""):
        """One request; runs until `held` is set."""

        def expel():
            pass

        await self.admission.admit(1, expel, client=client, flex_id=flex_id)
        try:
            async with self.admission.place(
                cost, raise_when_no_worker=no_worker, client=client, flex_id=flex_id
            ) as place:
                place.placed()
                if held is not None:
                    await held.wait()
                return place
        finally:
            self.admission.leave(1, expel)


@pytest.fixture
async def group():
    """(parent's admission, two processes) with two places."""
    processes: list[Process] = []
    capacity = Capacity(num_requests=2, num_sessions=4)
    now = SimpleNamespace(s=0.0)
    admission = Admission(
        AdmissionLimits(max_queued_requests=8),
        lambda: largest([each.child.capacity for each in processes if each.child.capacity is not None]),
        clock=lambda: now.s,
    )
    processes += [await Process().start(admission, capacity), await Process().start(admission, capacity)]
    await eventually(lambda: admission.capacity.num_requests == 2)
    yield admission, *processes
    for each in processes:
        each.link.close()
    await eventually(lambda: all(each.parent_link.is_lost for each in processes))
    assert (admission.num_requests, admission.num_running, admission.num_queued, admission.num_sessions) == (0, 0, 0, 0)
    assert admission.tenants["alice"].num_sequences == 0


def running(process, client, count=1, held=None, **options):
    return [asyncio.create_task(process.request(client, held or asyncio.Event(), **options)) for _ in range(count)]


async def ended(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_sequences_of_a_tenant_count_in_all_processes(group):
    admission, first, second = group
    tasks = running(first, alice(max_sequences=2), 2)
    await eventually(lambda: admission.num_running == 2)
    with pytest.raises(Overloaded, match="2 sequences of tenant alice are in the router and 1 more came") as refused:
        await second.request(alice(max_sequences=2))
    assert refused.value.retry_after_s == 1.0
    assert second.admission.num_requests == 0
    await ended(tasks)
    await eventually(lambda: admission.num_requests == 0)
    await second.request(alice(max_sequences=2))


async def test_a_place_goes_from_one_process_to_the_other_in_order_of_arrival(group):
    admission, first, second = group
    first_held, order = asyncio.Event(), []
    tasks = running(first, alice(), 2, first_held)
    await eventually(lambda: admission.num_running == 2)
    for number, process in enumerate((second, first, second)):

        async def run(number=number, process=process):
            await process.request(alice())
            order.append(number)

        tasks.append(asyncio.create_task(run()))
        expected = number + 1
        await eventually(lambda: admission.num_queued == expected)  # noqa: B023 - called before the next turn of the loop
    first_held.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_what_a_process_holds_ends_with_it(group):
    admission, first, second = group
    tasks = running(first, alice(max_sequences=3), 3)
    await eventually(lambda: admission.num_queued == 1)
    close = await first.admission.begin_session(alice())
    assert admission.num_sessions == 1
    waiting = asyncio.create_task(second.request(alice(max_sequences=4)))
    await eventually(lambda: admission.num_queued == 2)
    first.link.close()
    await waiting
    assert admission.num_sessions == 0
    close()
    await ended(tasks)
    with pytest.raises(Draining):
        await first.admission.admit(1, print)
    assert first.admission.num_requests == 0


async def test_a_request_that_leaves_the_queue_takes_no_place(group):
    admission, first, second = group
    tasks = running(first, alice(), 2)
    await eventually(lambda: admission.num_running == 2)
    waiting = running(second, alice(), 3)
    await eventually(lambda: admission.num_queued == 3)
    await ended(waiting)
    await eventually(lambda: admission.num_queued == 0)
    assert second.admission.num_requests == 0
    await ended(tasks)


async def test_a_request_without_a_worker_ends_with_its_error(group):
    admission, first, second = group
    tasks = running(first, alice(), 2)
    await eventually(lambda: admission.num_running == 2)

    async def no_worker():
        raise WorkerLost("no worker")

    with pytest.raises(WorkerLost):
        await second.request(alice(), no_worker=no_worker)
    await eventually(lambda: admission.num_queued == 0)
    await ended(tasks)


@pytest.mark.parametrize("watches", [True, False])
async def test_a_request_of_one_process_ends_the_flex_requests_of_another(group, watches):
    admission, first, second = group
    held, no_worker = asyncio.Event(), asyncio.Event().wait if watches else None
    tasks = running(first, alice(), 2, held)
    await eventually(lambda: admission.num_running == 2)
    flex = []
    for number in range(8):
        flex += running(first, alice(), 1, held, flex_id=f"flex{number}", no_worker=no_worker)
        await eventually(lambda: admission.num_queued == number + 1)  # noqa: B023 - called before the next turn of the loop
    with pytest.raises(Overloaded, match="at most 8 may wait"):
        await second.request(alice(), flex_id="one more")
    plain = running(second, alice(), 2, held)
    for task in flex[:-3:-1]:
        with pytest.raises(Overloaded, match="made room for one that is not flex") as ended:
            await task
        assert ended.value.retry_after_s >= 1.0
    await eventually(lambda: admission.num_queued == 8)
    await eventually(lambda: first.admission.num_requests == 8)
    held.set()
    await asyncio.gather(*tasks, *flex[:-2], *plain)


async def test_flex_requests_end_with_their_process(group):
    admission, first, second = group
    tasks = [*running(first, alice(), 2), *running(first, alice(), 1, flex_id="flex")]
    await eventually(lambda: admission.num_queued == 1)
    first.link.close()
    await eventually(lambda: admission.num_requests == 0)
    await second.request(alice(), flex_id="flex")
    await ended(tasks)


async def test_tokens_of_one_process_are_spent_for_all(group):
    admission, first, second = group
    client = alice(tokens_per_minute=100)
    held = asyncio.Event()
    [task] = running(first, client, 1, held)
    await eventually(lambda: admission.num_running == 1)
    assert admission.tenants["alice"].bucket.level == 100 - 12
    held.set()
    (await task).produced(0)
    await eventually(lambda: admission.num_running == 0)
    assert admission.tenants["alice"].bucket.level == 96
    place = SimpleNamespace(left=[60, 4, 40])
    async with first.admission.place(Cost(num_tokens=1, max_tokens=200), client=client) as granted:
        for num_tokens in place.left:
            granted.produced(num_tokens)
    await eventually(lambda: admission.num_running == 0)
    assert admission.tenants["alice"].bucket.level == 96 - 1 - sum(place.left)
    with pytest.raises(Overloaded, match="tokens_per_minute of this API key is 100"):
        await second.request(client)


async def test_sessions_count_in_all_processes(group):
    admission, first, second = group
    close = await first.admission.begin_session(alice(max_sessions=1))
    with pytest.raises(Overloaded, match="1 sessions of tenant alice are open"):
        await second.admission.begin_session(alice(max_sessions=1))
    close()
    close()
    await eventually(lambda: admission.num_sessions == 0)
    (await second.admission.begin_session(alice(max_sessions=1)))()


async def test_a_closed_process_refuses_and_the_other_goes_on(group):
    _, first, second = group
    first.admission.close()
    with pytest.raises(Draining):
        await first.request(alice())
    with pytest.raises(Draining):
        await first.admission.begin_session(alice())
    await second.request(alice())


@pytest.mark.parametrize("seed", range(5))
async def test_random_lives_leave_nothing(group, seed):
    draw, (admission, *processes) = random.Random(seed), group
    tasks = []
    for _ in range(60):
        held = asyncio.Event()
        tasks += running(draw.choice(processes), alice(), 1, held, cost=Cost(num_places=draw.choice((1, 1, 2))))
        for _ in range(draw.randrange(3)):
            await asyncio.sleep(0)
        if draw.random() < 0.5:
            draw.choice(tasks).cancel()
        if draw.random() < 0.5:
            held.set()
    await ended(tasks)
    await eventually(lambda: admission.num_requests == 0)
    await processes[0].request(alice())


async def test_errors_arrive_as_they_were_raised():
    def refuse(kind):
        raise {
            "field": InvalidRequest("a text", "max_tokens"),
            "full": Overloaded("full", 7.5),
            "fit": PeerError("for clients").for_clients(),
        }[kind]

    async def never(_):
        await asyncio.Event().wait()

    here, there = await linked({"refuse": Handler(str, refuse), "never": Handler(int, never)})
    with pytest.raises(InvalidRequest, match="a text") as invalid:
        await here.call("refuse", "field", int)
    assert invalid.value.field == "max_tokens"
    with pytest.raises(Overloaded) as full:
        await here.call("refuse", "full", int)
    assert full.value.retry_after_s == 7.5
    with pytest.raises(PeerError) as fit:
        await here.call("refuse", "fit", int)
    assert fit.value.is_for_clients
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        await here.call("never", 1, int, 0.01)
    waiting = asyncio.create_task(here.call("never", 1, int))
    await asyncio.sleep(0)
    there.close()
    with pytest.raises(Draining):
        await waiting


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x06\x94\x00\x01\xa1x\x01",
        b"\x00\x00\x00\x02\x91\x00",
    ],
)
async def test_what_cannot_be_read_ends_the_link_alone(frame, caplog):
    lost = []
    here, there = socket.socketpair()
    link = ProcessLink(here, {})
    link.on_lost = lambda: lost.append(True)
    with there:
        there.send(frame)
        await eventually(lambda: lost)
    assert "cannot be read" in caplog.text


async def test_stored_responses_are_those_of_the_parent():
    settings = settings_with(RouterSettings, max_stored_response_bytes=4096)
    store = MemoryResponseStore(settings)
    links = [await linked(store_handlers(store)) for _ in range(2)]
    first, second = (SharedResponseStore(here, settings) for here, _ in links)
    stored = StoredResponse(b"{}", b"[1]", 1)
    await first.put("alice", "resp_1", stored)
    assert await second.get("alice", "resp_1") == stored
    assert await second.get("bob", "resp_1") is None
    await first.put("alice", "resp_2", StoredResponse(b"x" * 5000, b"[]", 0))
    assert await first.get("alice", "resp_2") is None
    assert await second.delete("alice", "resp_1")
    assert not await first.delete("alice", "resp_1")
    links[0][1].close()
    await eventually(lambda: links[0][0].is_lost)
    with pytest.raises(PeerError, match="cannot be reached"):
        await first.get("alice", "resp_1")
    await first.put("alice", "resp_1", stored)
    assert store.num_bytes == 0
    links[1][0].close()


def metrics_of(number):
    registry = CollectorRegistry()
    Counter("pdserve_things", "Things.", ["kind"], registry=registry).labels("a").inc(number)
    Gauge("pdserve_workers", "Workers.", ["role"], registry=registry).labels("decode").set(number)
    Gauge("pdserve_open", "Open.", registry=registry).set(number)
    Histogram("pdserve_wait_seconds", "Wait.", buckets=(1.0, 2.0), registry=registry).observe(number)
    return MetricFamilies(families_of(registry))


def test_counters_and_histograms_are_added_and_gauges_by_their_meaning():
    both = added([metrics_of(1), metrics_of(5)])
    values = {(name, *labels.values()): value for family in both.families for name, labels, value in family.samples}
    assert values[("pdserve_things_total", "a")] == 6
    assert values[("pdserve_workers", "decode")] == 5
    assert values[("pdserve_open",)] == 6
    assert values[("pdserve_wait_seconds_count",)] == 2
    assert values[("pdserve_wait_seconds_sum",)] == 6
    assert [values[("pdserve_wait_seconds_bucket", bound)] for bound in ("1.0", "2.0", "+Inf")] == [1, 1, 2]
    lasting = {family.name for family in both.lasting().families}
    assert lasting == {"pdserve_things", "pdserve_wait_seconds"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"router_processes": 0}, "router_processes is 0, 1 to 64 are possible"),
        ({"router_processes": 65}, "router_processes is 65"),
        (
            {"router_processes": 2, "max_stored_response_bytes": 1 << 26},
            "max_stored_response_bytes is 67108864 and router_processes 2: without redis",
        ),
    ],
)
def test_settings_that_cannot_be_shared_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(RouterSettings, flags=given, environ={})


async def test_a_directory_of_one_process_is_refused(model_folder):
    directory = SimpleNamespace(run=None)
    with pytest.raises(ConfigError, match="router_processes is 2: the addresses of workers on a Ray cluster"):
        await run_router(RouterSettings(router_processes=2), model_folder=model_folder, addresses=directory)


async def test_a_port_in_use_stops_the_parent_before_its_processes(model_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = RouterSettings(port=0, grpc_port=port, router_processes=2)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await run_router(settings, model_folder=model_folder)


def test_the_largest_capacity_counts():
    known = [Capacity(num_requests=number, num_blocks=number) for number in (0, 4, 2)]
    assert [largest(list(order)) for order in itertools.permutations(known)] == [known[1]] * 6
    assert largest([]).num_requests == 0
