"""Transfers between two processes, as a profile measures them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pdserve.cli.profile import transfer_bench
from pdserve.cli.profile.transfer_bench import Arrival, measure_transfer, time_of_reads
from pdserve.cli.up.cluster_plan import ChildPlan, make_plan
from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.common.kv_layout import BlockShape
from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import ReadListener, ReadOrder, ReadOutcome
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.nixl.nixl_agent import why_no_nixl
from pdserve.simulator.virtual_transfer import VirtualPool
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.timeout(2 * HANG_S)

SHAPE = BlockShape(
    num_layers=2, num_kv_heads=4, total_num_kv_heads=4, head_dim=64, block_size=16, dtype="float32"
)  # fmt: skip


def plan_of(**settings: object) -> ChildPlan:
    [plan] = make_plan({"model": "demo", **settings}, None, {"decode": 1}).children
    return plan


@pytest.mark.process
@pytest.mark.parametrize("digest", ["auto", pytest.param("gmac", marks=pytest.mark.slow)])
def test_blocks_come_over_tcp(digest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_bench, "POOL_BYTES", 4 << 20)
    name, time = measure_transfer(plan_of(connector="tcp", kv_digest=digest), SHAPE)
    assert name == "tcp"
    # between a slow machine and the fastest memory
    assert 1e5 < time.bytes_per_s < 1e12
    assert 0 <= time.latency_s < 10


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(why_no_nixl() is not None, reason="NIXL is not installed")
def test_blocks_come_over_nixl_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_bench, "POOL_BYTES", 4 << 20)
    name, time = measure_transfer(plan_of(connector="nixl"), SHAPE)
    assert name == "nixl"
    assert 1e5 < time.bytes_per_s < 1e12


@pytest.mark.process
def test_a_source_that_cannot_serve_names_its_reason(tmp_path: Path) -> None:
    """Its settings are read again, and differ here from those of this process."""
    config = tmp_path / "settings.toml"
    plan = plan_of(connector="tcp")
    config.write_text("max_num_seqs = 0\n")
    broken = ChildPlan(plan.role, plan.name, ("--config", str(config)), plan.environ, plan.settings)
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        measure_transfer(broken, SHAPE)


@pytest.mark.process
def test_a_source_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(connector="tcp")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="the process from which blocks are read has ended"):
        measure_transfer(plan, SHAPE)


def test_a_read_that_fails_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, cancelled = Arrival(), Arrival()
    failed.ended(ReadOutcome.FAILED, TransferFailed("the network is gone"))
    with pytest.raises(TransferFailed, match="the network is gone"):
        failed.wait()
    cancelled.ended(ReadOutcome.CANCELLED, None)
    with pytest.raises(TransferFailed, match="a read was cancelled"):
        cancelled.wait()
    monkeypatch.setattr(transfer_bench, "ENDS_WITHIN_S", 0.0)
    with pytest.raises(TransferFailed, match="did not end within 0 s"):
        Arrival().wait()


def test_the_line_through_one_block_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    pool = VirtualPool(block_bytes=1000, num_blocks=11)

    class Connectors:
        def read(self, name: str, order: ReadOrder, listener: ReadListener) -> None:
            nonlocal now_s
            now_s += 0.003 + 0.001 * len(order.blocks)
            listener.ended(ReadOutcome.DONE, None)

    monkeypatch.setattr(transfer_bench, "time", SimpleNamespace(perf_counter=lambda: now_s))
    found = time_of_reads(cast(ConnectorSet, Connectors()), cast(PoolMemory, pool), "tcp", b"", XXH3)
    assert found.bytes_per_s == pytest.approx(1e6)
    assert found.latency_s == pytest.approx(0.003)
