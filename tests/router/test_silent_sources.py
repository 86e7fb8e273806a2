"""A source that has computed the prompt and publishes nothing: the request is tried elsewhere. One that is slow is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.common.errors import TransferFailed
from pdserve.router.attempts import attempt
from pdserve.v1 import decode_pb2
from tests.router.conftest import Cluster
from tests.router.fake_worker import (
    ADMITTED,
    LANDED,
    PREFILL_ADMITTED,
    RELEASED,
    Call,
    FakeWorker,
    Script,
    computed,
    decode_outputs,
    first,
    forever,
    outputs,
    play,
    said,
)
from tests.support.run.waiting import HANG_S

AWAITS, GOES_ON = (
    decode_pb2.DecodeEvent(receiving=decode_pb2.Receiving(awaits_source=awaits)) for awaits in (True, False)
)
REST = [decode_outputs(position, said(5)[position], "length" if position == 4 else None) for position in range(1, 5)]


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "PUBLISHED_WITHIN_S", 0.3)


async def two_of_each(cluster: Cluster, prefill: Script, decode: Script, **settings: Any) -> None:
    """The first attempt has these scripts."""
    await cluster.start(prefill=2, decode=2, request_timeout_s=HANG_S, **settings)
    used: set[str] = set()

    def once(script: Script, role: str) -> Script:
        async def chosen(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
            mine = role not in used
            used.add(role)
            async for event in (script if mine else usual[role])(worker, call):
                yield event

        return chosen

    usual = {worker.role: worker.script for worker in cluster.workers}
    for worker in cluster.workers:
        worker.script = once(prefill if worker.role == "prefill" else decode, worker.role)


def num_calls(cluster: Cluster, role: str) -> int:
    return sum(len(worker.calls) for worker in cluster.workers if worker.role == role)


@pytest.mark.few(1)
@pytest.mark.parametrize("asked_first", [True, False], ids=["asked, computed", "computed, asked"])
async def test_a_source_that_computed_and_publishes_nothing_is_given_up(cluster, asked_first):
    computed, asked = asyncio.Event(), asyncio.Event()
    wait_p = [lambda w, c: asked.wait(), 0.02] if asked_first else []
    wait_d = [] if asked_first else [lambda w, c: computed.wait(), 0.02]
    prefill = play(PREFILL_ADMITTED, *wait_p, first(), lambda w, c: computed.set(), forever)
    decode = play(ADMITTED, *wait_d, AWAITS, lambda w, c: asked.set(), forever)
    await two_of_each(cluster, prefill, decode)
    assert await cluster.text() == said(5)
    assert num_calls(cluster, "decode") == 2
    await cluster.idle()


@pytest.mark.slow
async def test_a_source_that_publishes_again_and_again_is_waited_for(cluster, monkeypatch):
    """For longer than the limit in all."""
    monkeypatch.setattr(attempt, "PUBLISHED_WITHIN_S", 2.0)
    reports = [part for _ in range(12) for part in (AWAITS, 0.2)]
    await two_of_each(cluster, play(first(), forever), play(ADMITTED, *reports, LANDED, *REST))
    assert await cluster.text() == said(5)
    assert num_calls(cluster, "decode") == num_calls(cluster, "prefill") == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "reports",
    [
        pytest.param([], id="nothing was asked for"),
        pytest.param([AWAITS, GOES_ON], id="all is published"),
        pytest.param([AWAITS, LANDED, AWAITS], id="all has landed"),
    ],
)
async def test_nothing_is_limited_while_the_source_owes_nothing(cluster, reports):
    await two_of_each(cluster, play(first(), forever), play(ADMITTED, *reports, 1.0, LANDED, *REST))
    assert await cluster.text() == said(5)
    assert num_calls(cluster, "decode") == num_calls(cluster, "prefill") == 1


async def test_a_source_that_still_computes_is_waited_for(cluster):
    await two_of_each(cluster, play(1.0, first(), 0.05, RELEASED), play(ADMITTED, AWAITS, 1.1, LANDED, *REST))
    assert await cluster.text() == said(5)
    assert num_calls(cluster, "decode") == num_calls(cluster, "prefill") == 1


async def test_reports_of_the_receiver_do_not_prolong_the_wait_for_its_own_word(cluster, monkeypatch):
    monkeypatch.setattr(attempt, "LANDED_WITHIN_S", 0.3)
    reports = [part for _ in range(100) for part in (AWAITS, 0.1)]
    await two_of_each(cluster, play(first(), RELEASED, forever), play(ADMITTED, 0.1, *reports, LANDED, *REST))
    assert await cluster.text() == said(5)
    assert num_calls(cluster, "decode") == 2


async def test_the_cause_of_a_failed_transfer_is_not_put_off_by_a_late_result(cluster):
    """The source's own error is waited for; its result, which comes instead, begins no longer wait."""
    failed = asyncio.Event()

    async def lost(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
        yield ADMITTED
        yield AWAITS
        failed.set()
        raise TransferFailed("its source failed")

    attempts = play(PREFILL_ADMITTED, lambda w, c: failed.wait(), 0.05, first(), forever)
    await two_of_each(cluster, attempts, lost)
    answer = await cluster.complete(structured_outputs={"regex": "a*"})
    assert answer.status_code == 200, answer.text
    assert num_calls(cluster, "decode") == 2


async def test_only_silent_sources_end_the_request_with_the_transfers_error(cluster):
    async def computes(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
        position = len(call.request.output_token_ids)
        yield computed(call.request, outputs(position, said(1, position)))
        await forever(worker, call)

    await cluster.start(request_timeout_s=HANG_S, on_kv_failure="remote", max_attempts=2)
    cluster.of("prefill").script = computes
    cluster.of("decode").script = play(ADMITTED, AWAITS, forever)
    answer = await cluster.complete()
    assert answer.json()["error"]["code"] == "transfer_failed", answer.text
    assert len(cluster.of("decode").calls) == 2
