"""The fleet: workers that come, go, hang, or do not belong."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec
import pytest

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import DeadlineExceeded, WorkerLost
from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY, DeploymentKey
from pdserve.common.tasks.background_task import RESTARTS
from pdserve.router.workers import worker_watcher as watched_address
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.worker_watcher import CompatibilityCheck
from tests.router.fake_worker import ADMITTED, LAYOUT, decode_well, forever, play, said
from tests.support.models.kv_layouts import with_head, with_shape, with_windows
from tests.support.run.waiting import HANG_S, eventually

EXPECTED = CompatibilityCheck(key=DEVELOPMENT_KEY, tokenizer_fingerprint="")


async def test_workers_may_come_later_and_come_back(cluster):
    workers = [cluster.worker("prefill"), cluster.worker("decode")]
    await cluster.start(prefill=0, decode=0, wait=False)
    assert (await cluster.http.get("/health")).status_code == 503
    assert (await cluster.http.get("/ready")).status_code == 503
    assert (await cluster.http.get("/live")).status_code == 200, "no worker is no reason to restart a router"
    for worker in reversed(workers):
        await worker.start()
    await cluster.live(prefill=1, decode=1)
    assert (await cluster.http.get("/health")).status_code == 200
    assert (await cluster.http.get("/ready")).status_code == 200
    await workers[1].kill()
    await cluster.live(prefill=1, decode=0)
    await workers[1].start()
    await cluster.live(prefill=1, decode=1)
    assert await cluster.text() == said(5)
    assert workers[0].calls[0].sent.prefill.receiver.epoch == workers[1].epoch


async def test_a_watch_that_fails_by_a_bug_is_started_again(cluster, monkeypatch, caplog):
    calls, watch_once = [], watched_address.WorkerWatcher._watch_once

    async def fail_once(self, channel):
        calls.append(self.address)
        if len(calls) == 1:
            raise KeyError("a field of a newer worker")
        await watch_once(self, channel)

    monkeypatch.setattr(watched_address.WorkerWatcher, "_watch_once", fail_once)
    before = RESTARTS["watch"]
    await cluster.start(prefill=0, decode=1)
    assert await cluster.text() == said(5)
    assert RESTARTS["watch"] == before + 1
    assert "the background task watch failed" in caplog.text


def _has_met(worker, worker_ids):
    return {met.worker_id for met in worker.met} == worker_ids


async def test_prefill_and_decode_are_introduced_to_each_other(cluster):
    await cluster.start(prefill=2, decode=1)
    [decode] = [worker for worker in cluster.workers if worker.role == "decode"]
    for worker in cluster.workers:
        peers = {peer.worker_id: peer for peer in cluster.workers if peer.role != worker.role}
        await eventually(partial(_has_met, worker, set(peers)))
        for met in worker.met:
            assert (met.epoch, met.address) == (peers[met.worker_id].epoch, peers[met.worker_id].address)
    before = len(cluster.workers[0].met)
    await decode.kill()
    await cluster.live(decode=0)
    await decode.start()
    await eventually(lambda: len(cluster.workers[0].met) > before)
    assert cluster.workers[0].met[-1].epoch == decode.epoch


@pytest.mark.slow
async def test_a_worker_whose_tick_stands_still_is_dead_until_it_moves(cluster, monkeypatch):
    monkeypatch.setattr(watched_address, "TICK_STILL_S", 1.2)
    monkeypatch.setattr("pdserve.router.workers.fleet.TICK_STILL_S", 1.2)
    await cluster.start(prefill=0, decode=1)
    wedged = cluster.of("decode")
    wedged.scripts = [play(forever)]
    asking = asyncio.create_task(cluster.text())
    await eventually(lambda: wedged.calls)
    wedged.ticking = False
    await cluster.live(decode=0)
    async with asyncio.timeout(HANG_S):
        await wedged.calls[0].cancelled.wait()
    wedged.ticking = True
    await cluster.live(decode=1)
    assert await cluster.text() == said(5)
    # it stood still, and is not dead: what it had goes on there when nobody else is left
    async with asyncio.timeout(HANG_S):
        assert await asking == said(5)
    assert len(wedged.calls) == 3


async def test_a_worker_that_broke_a_call_is_not_asked_again_while_its_watch_has_not_noticed(cluster, monkeypatch):
    monkeypatch.setattr("pdserve.router.requests.tasks.placed_task.WAIT_FOR_WORKER_S", 0.3)
    await cluster.start(prefill=0, decode=1)
    broken = cluster.of("decode")
    broken.scripts = [play(ADMITTED, WorkerLost("the engine has failed"))]
    reply = await cluster.complete()
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "worker_lost"
    assert len(broken.calls) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"key": DeploymentKey(b"another key of this length")}, "deployment key differs"),
        ({"protocol_version": 99}, f"protocol version 99, this service {PROTOCOL_VERSION}"),
        ({"said_role": "prefill"}, "its role is prefill, but the address was given as decode"),
        ({"fingerprint": "f" * 32}, "ffffffff there"),
        ({"layout": msgspec.structs.replace(LAYOUT, block_size=0)}, "block_size is 0, 1 to 16384 is needed"),
        ({"max_model_len": 0}, "max_model_len is 0, 1 to 16777216 is needed"),
        (
            {"layout": msgspec.structs.replace(LAYOUT, draft_head="mtp")},
            "the number of group_shapes with a draft_head is 1, 2 to 64 is needed",
        ),
        ({"layout": with_head(LAYOUT, "a\nhead")}, "draft_head is 'a\\nhead', 1 to 64 letters or digits are needed"),
        ({"layout": with_head(LAYOUT, "m" * 65)}, "1 to 64 letters or digits are needed"),
    ],
)
async def test_a_worker_that_does_not_belong_is_refused_once_and_the_rest_serves_on(cluster, caplog, options, told):
    caplog.set_level(logging.WARNING)
    stranger = await cluster.worker("decode", worker_id="stranger", **options).start()
    stranger.report(num_running=0)
    await cluster.start(wait=False)
    await cluster.live(decode=1, prefill=1)
    await eventually(lambda: any("refused" in record.message for record in caplog.records))
    for _ in range(3):
        assert await cluster.text() == said(5)
    assert not stranger.calls
    assert not stranger.met
    counts = (await cluster.http.get("/health")).json()["workers"]["decode"]
    assert counts == {"addresses": 2, "live": 1, "draining": 0, "refused": 1}
    # also when it comes again
    await stranger.kill()
    before = stranger.num_watches
    await stranger.start()
    await eventually(lambda: stranger.num_watches > before)
    await asyncio.sleep(0.1)
    warnings = [record.message for record in caplog.records if "refused" in record.message]
    assert len(warnings) == 1
    assert told in warnings[0]
    assert stranger.address in warnings[0]


async def test_unequal_blocks_are_not_paired_and_the_difference_is_told(cluster, caplog):
    caplog.set_level(logging.WARNING)
    other = msgspec.structs.replace(LAYOUT, block_size=32, model_fingerprint="n" * 32)
    await cluster.worker("prefill", worker_id="odd", layout=other).start()
    await cluster.start(prefill=0, decode=1)
    assert await cluster.text() == said(5)
    assert not cluster.of("prefill").calls
    assert not cluster.of("decode").calls[0].sent.decode.HasField("source")
    [warning] = [record.message for record in caplog.records if "not paired" in record.message]
    assert "block_size: 16 != 32" in warning or "block_size: 32 != 16" in warning
    assert "model_fingerprint" in warning
    assert not cluster.of("prefill").met


async def test_blocks_of_another_format_are_not_paired_and_the_format_is_named(cluster, caplog):
    caplog.set_level(logging.WARNING)
    await cluster.worker("prefill", worker_id="older", layout=msgspec.structs.replace(LAYOUT, format=0)).start()
    await cluster.start(prefill=0, decode=1)
    assert await cluster.text() == said(5)
    assert not cluster.of("prefill").calls
    [warning] = [record.message for record in caplog.records if "not paired" in record.message]
    assert warning.endswith((": format: 0 != 1", ": format: 1 != 0"))


async def test_a_worker_with_kv_cache_groups_is_not_paired_with_an_older_one(cluster, caplog):
    caplog.set_level(logging.WARNING)
    grouped = with_windows(with_shape(LAYOUT, num_layers=1), 0, 512)
    await cluster.worker("prefill", worker_id="new", layout=grouped).start()
    await cluster.start(prefill=0, decode=1)
    assert await cluster.text() == said(5)
    assert not cluster.of("prefill").calls
    assert not cluster.of("decode").calls[0].sent.decode.HasField("source")
    [warning] = [record.message for record in caplog.records if "not paired" in record.message]
    assert "group_windows: (0, 512) != (0,)" in warning or "group_windows: (0,) != (0, 512)" in warning


@pytest.mark.parametrize(
    ("prefill", "decode", "without"),
    [("", "", False), ("mtp", "mtp", False), ("mtp", "", True), ("", "mtp", True), ("mtp", "other", True)],
)
async def test_both_workers_hear_whether_the_blocks_of_a_draft_head_are_moved(cluster, prefill, decode, without):
    for role, name in (("prefill", prefill), ("decode", decode)):
        await cluster.worker(role, layout=with_head(LAYOUT, name, num_layers=1) if name else LAYOUT).start()
    await cluster.start(prefill=0, decode=0)
    await cluster.live(prefill=1, decode=1)
    assert await cluster.text(prompt="x" * 40) == said(5)
    [of_prefill] = cluster.of("prefill").calls
    [of_decode] = cluster.of("decode").calls
    assert of_prefill.sent.prefill.receiver.without_draft_head is without
    assert of_decode.sent.decode.source.without_draft_head is without


async def test_during_an_upgrade_each_generation_is_hashed_its_own_way(cluster):
    new = msgspec.structs.replace(LAYOUT, model_fingerprint="n" * 32, block_size=8)
    for role in ("prefill", "decode"):
        await cluster.worker(role, layout=new, worker_id=f"new-{role}").start()
    await cluster.start(prefill=1, decode=1)
    for letter in "wxyz":
        assert await cluster.text(prompt=letter * 32) == said(5)
    for worker in cluster.workers:
        assert len(worker.calls) == 2
        for call in worker.calls:
            hasher = BlockHasher(DEVELOPMENT_KEY, worker.layout.block_size)
            request = call.request
            hashes = hasher.extend(request.hash_root, request.prompt_token_ids)
            assert request.hash_root == hasher.root(worker.layout.model_fingerprint)
            assert request.request_digest == hasher.request_digest(request.hash_root, hashes, request.prompt_token_ids)
            if worker.role == "decode":
                assert call.sent.decode.source.worker_id.startswith("new") == worker.worker_id.startswith("new")


async def test_draining_workers_get_nothing_new(cluster):
    await cluster.start(prefill=0, decode=2)
    leaving, staying = cluster.workers
    leaving.report(draining=True)
    await cluster.live(decode=1)
    for _ in range(3):
        await cluster.text()
    assert not leaving.calls
    assert len(staying.calls) == 3


async def test_a_drain_is_logged_as_a_drain_and_a_death_as_a_loss(cluster, caplog):
    caplog.set_level(logging.INFO)
    await cluster.start(prefill=0, decode=2)
    leaving, dying = cluster.workers
    leaving.report(draining=True)
    await cluster.live(decode=1)
    for worker in (leaving, dying):
        await worker.kill()
    await cluster.live(decode=0)
    await eventually(lambda: any(" is lost" in message for message in caplog.messages))
    told = {record.levelname: record.message for record in caplog.records if "its watch stream" in record.message}
    assert set(told) == {"INFO", "WARNING"}
    assert leaving.worker_id in told["INFO"]
    assert " has drained and left: " in told["INFO"]
    assert dying.worker_id in told["WARNING"]
    assert " is lost: " in told["WARNING"]


@pytest.mark.slow
async def test_a_worker_that_stalls_in_its_drain_is_lost(cluster, monkeypatch, caplog):
    monkeypatch.setattr("pdserve.router.workers.fleet.TICK_STILL_S", 1.2)
    await cluster.start(prefill=0, decode=1)
    [leaving] = cluster.workers
    leaving.report(draining=True)
    leaving.ticking = False
    await eventually(lambda: any("engine_tick has not moved" in message for message in caplog.messages))
    assert not any("has drained" in message for message in caplog.messages)


@pytest.mark.slow
async def test_a_slow_handshake_is_logged_as_one(cluster, caplog):
    await cluster.start(prefill=0, decode=1)
    [worker] = cluster.workers

    async def late(requests, context):
        raise DeadlineExceeded("the proof of the deployment key did not arrive within 5 s")
        yield

    await worker.kill()
    worker.Watch = late
    await worker.start()
    await eventually(lambda: any("timed out" in message for message in caplog.messages))
    [line] = [message for message in caplog.messages if "the handshake with" in message]
    assert line.endswith("timed out: the proof of the deployment key did not arrive within 5 s")
    assert not any("refused" in message for message in caplog.messages)
    await worker.kill()
    del worker.Watch
    await worker.start()
    await cluster.live(decode=1)


async def test_requests_spread_over_equal_workers_before_any_report(cluster):
    await cluster.start(prefill=2, decode=2)
    for worker in cluster.workers:
        worker.step_s = 0.01
    await asyncio.gather(*(cluster.text() for _ in range(8)))
    assert [len(worker.calls) for worker in cluster.workers] == [4, 4, 4, 4]


async def test_a_loaded_worker_is_passed_over(cluster):
    await cluster.start(prefill=0, decode=2)
    loaded, idle = cluster.workers
    # the router has the numbers when it has what came with them
    loaded.report(num_waiting_tokens=5000, num_running=3, draining=True)
    await cluster.live(decode=1)
    loaded.report(draining=False)
    await cluster.live(decode=2)
    for _ in range(3):
        await cluster.text()
    assert not loaded.calls
    assert len(idle.calls) == 3


async def test_a_worker_that_stops_tells_its_requests(cluster):
    await cluster.start(prefill=0, decode=2)
    for worker in cluster.workers:
        worker.scripts = [play(forever)]
    asking = asyncio.create_task(cluster.text())
    busy = await eventually(lambda: next((worker for worker in cluster.workers if worker.calls), None))
    for worker in cluster.workers:
        worker.scripts = []
        worker.script = decode_well
    await busy.kill()
    assert await asking == said(5)


def nothing() -> bool | None:
    """No worker is found."""
    return None


async def test_a_request_waits_as_long_as_a_worker_is_being_started() -> None:
    answers = [True, True, True, False]
    asked: list[int] = []

    async def is_starting() -> bool:
        asked.append(len(asked))
        return answers[asked[-1]]

    fleet = Fleet((), (), EXPECTED, is_starting=is_starting, starting_timeout_s=HANG_S)
    assert await fleet.wait_for_worker(nothing, 0.01) is None
    assert len(asked) == 4
    assert await fleet.wait_for_worker(nothing, 0.0) is None
    assert len(asked) == 4, "no worker can come, so nobody is asked"


async def test_a_worker_that_has_started_ends_the_wait() -> None:
    asked: list[int] = []
    found: list[str] = []

    async def is_starting() -> bool:
        asked.append(0)
        if len(asked) == 2:
            found.append("worker")
            fleet.look_again()
        return True

    fleet = Fleet((), (), EXPECTED, is_starting=is_starting, starting_timeout_s=HANG_S)
    assert await fleet.wait_for_worker(lambda: found[0] if found else None, 0.01) == "worker"
    assert await fleet.wait_for_worker(lambda: found[0] if found else None, 0.01) == "worker"
    assert len(asked) == 2


@pytest.mark.parametrize("starting_timeout_s", [0.0, 0.05])
async def test_the_wait_for_a_worker_that_never_starts_is_bounded(starting_timeout_s: float) -> None:
    async def is_starting() -> bool:
        return True

    fleet = Fleet((), (), EXPECTED, is_starting=is_starting, starting_timeout_s=starting_timeout_s)
    async with asyncio.timeout(HANG_S):
        assert await fleet.wait_for_worker(nothing, 0.01) is None
        await fleet.wait_until_absent(lambda: False, 0.01)


async def test_without_a_worker_that_starts_the_wait_is_as_long_as_it_was() -> None:
    fleet = Fleet((), (), EXPECTED, starting_timeout_s=10 * HANG_S)
    async with asyncio.timeout(HANG_S):
        assert await fleet.wait_for_worker(nothing, 0.01) is None
