"""A worker's report of its transfers, under way and ended, while they happen between two real engines."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pdserve.common.errors import TransferFailed
from pdserve.common.worker_identity import WorkerRole
from pdserve.kv_transfer.control.transfer_view import TransfersPage, TransferView
from pdserve.worker.telemetry.worker_metrics import WorkerMetrics
from pdserve.worker.worker_roles import WorkerRoles
from tests.support.engine.hash_model import greedy_answer
from tests.support.run.waiting import HANG_S, eventually

from .conftest import LAYOUT

PROMPT = [(7 * i) % 60 for i in range(100)]
NUM_BLOCKS = 25


def only(views: list[TransferView]) -> TransferView:
    [view] = views
    return view


ROLES = WorkerRoles(WorkerRole.PREFILL, {}, "it has one", lambda: None)


def pinned_metric(node: Any) -> float:
    """As Prometheus reads it now."""
    registry = CollectorRegistry()
    names = {"worker_id": node.peer.worker_id, "role_name": "prefill", "connectors": node.connectors.names}
    identity = SimpleNamespace(layout=LAYOUT, **names)
    engine = SimpleNamespace(
        stats=node.engine.stats,
        step_totals=node.engine.step_totals,
        transfer_counts=node.adapter,
        draining=False,
        known_adapters={},
        tick=node.engine.tick,
        tick_age_s=0.0,
    )
    WorkerMetrics(registry, identity, engine, ROLES)  # type: ignore[arg-type]
    found = re.search(r"^pdserve_kv_blocks_pinned (\S+)$", generate_latest(registry).decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


class HeldReads:
    """Stands before a receiver's connector: reads begin when the test says so."""

    def __init__(self, connector: Any) -> None:
        self._read = connector.read
        self._waiting: list[tuple[Any, ...]] = []
        self._real: list[Any] = []
        connector.read = self.read

    def read(self, *arguments: Any) -> HeldReads:
        self._waiting.append(arguments)
        return self

    def cancel(self) -> None:
        for read in self._real:
            read.cancel()

    def go_on(self) -> None:
        self._real = [self._read(*arguments) for arguments in self._waiting]


async def test_both_sides_show_a_transfer_while_it_is_under_way_and_after(make_pair: Any) -> None:
    pair = await make_pair("tcp")
    p, d = pair.p.adapter, pair.d.adapter
    assert p.transfers() == TransfersPage(num_blocks_pinned=0, num_blocks_quarantined=0, under_way=[], ended=[])
    held = HeldReads(pair.d.connector)
    asked = pair.ask(PROMPT)
    await eventually(lambda: p.num_pinned == NUM_BLOCKS)
    source, receiver = only(p.transfers().under_way), only(d.transfers().under_way)
    assert (source.role, source.peer, source.connector) == ("source", "decode-1", "tcp")
    assert source.request_id == receiver.request_id == asked.prefill.request_id
    assert (source.num_blocks_wanted, source.num_blocks_landed, source.num_blocks_pinned) == (NUM_BLOCKS, 0, NUM_BLOCKS)
    assert (receiver.role, receiver.peer, receiver.connector) == ("receiver", "prefill-1", "tcp")
    assert (receiver.state, receiver.num_blocks_wanted, receiver.num_blocks_landed) == ("RECEIVING", NUM_BLOCKS, 0)
    assert receiver.num_blocks_quarantined == 0
    assert p.transfers().num_blocks_pinned == pinned_metric(pair.p) == NUM_BLOCKS
    assert 0 <= source.age_s < 60
    held.go_on()
    pair.d.connector.read = held._read
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(PROMPT, 4)
    await pair.idle()
    source, receiver = only(p.transfers().ended), only(d.transfers().ended)
    assert (source.state, source.num_blocks_landed, source.num_blocks_pinned) == ("RELEASED", NUM_BLOCKS, 0)
    assert (receiver.state, receiver.num_blocks_landed, receiver.cause) == ("LANDED", NUM_BLOCKS, None)
    assert receiver.ended_s_ago is not None
    assert pinned_metric(pair.p) == 0
    assert p.transfers().under_way == d.transfers().under_way == []


async def test_blocks_of_a_request_that_left_are_in_quarantine_until_its_read_has_ended(make_pair: Any) -> None:
    pair = await make_pair("tcp")
    held = HeldReads(pair.d.connector)
    asked = pair.ask(PROMPT)
    await eventually(lambda: only(pair.d.adapter.transfers().under_way).state == "RECEIVING" and bool(held._waiting))
    pair.d.engine.release(asked.decode)
    await eventually(lambda: only(pair.d.adapter.transfers().under_way).state == "DRAINING")
    pair.leave(asked)  # now, since from a source that gave it up before decode did the transfer would have failed
    page = pair.d.adapter.transfers()
    assert page.num_blocks_quarantined == only(page.under_way).num_blocks_quarantined == NUM_BLOCKS
    await eventually(lambda: pair.d.engine.stats.num_blocks_quarantined == NUM_BLOCKS)
    held.go_on()
    held.cancel()
    pair.d.connector.read = held._read
    await pair.idle()
    page = pair.d.adapter.transfers()
    assert (only(page.ended).state, only(page.ended).num_blocks_quarantined) == ("CANCELLED", 0)
    assert page.num_blocks_quarantined == 0


async def test_a_fallback_is_named_with_the_connector_that_failed(make_pair: Any) -> None:
    pair = await make_pair("both", local_stall_s=0.3)
    pair.p.connector.serve_only(3)
    asked = pair.ask(PROMPT)
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(PROMPT, 4)
    pair.p.connector.resume()
    await pair.idle()
    receiver, source = only(pair.d.adapter.transfers().ended), only(pair.p.adapter.transfers().ended)
    assert (receiver.state, receiver.connector, receiver.fallbacks) == ("LANDED", "tcp", ["local"])
    assert (source.state, source.connector) == ("RELEASED", "tcp")


async def test_a_failure_is_told_with_its_cause_and_without_address_or_token(make_pair: Any) -> None:
    pair = await make_pair("tcp")
    await asyncio.to_thread(pair.p.connector.close)
    asked = pair.ask(PROMPT)
    with pytest.raises(TransferFailed, match=r"127\.0\.0\.1"):
        await asyncio.wait_for(asked.answer(), HANG_S)
    pair.leave(asked)
    await pair.idle()
    page = pair.d.adapter.transfers()
    failed = only(page.ended)
    assert failed.state == "FAILED"
    assert failed.cause is not None
    assert failed.cause.startswith("transfer_failed: no connection to <address>")
    written = msgspec.json.encode([page, pair.p.adapter.transfers()]).decode()
    assert "127.0.0.1" not in written
    assert asked.transfer.token.hex() not in written
    assert str(PROMPT[:3])[1:-1].replace(" ", "") not in written, "token ids"
