"""The NIXL connector keeps the contract, over real agents; and what is its own."""

from __future__ import annotations

import sys
import threading

import pytest

pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)

from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_agent import UcxAgent
from pdserve.kv_transfer.nixl.nixl_settings import NixlSettings
from tests.support.run.waiting import HANG_S

from .connector_contract import ConnectorContract
from .contract_link import Link
from .nixl_link import NixlLink
from .recorded_read import Transfer, make_pool, same_bytes, start_read


class TestNixlConnector(ConnectorContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return NixlLink(source_pool, receiver_pool, read_stall_s)


def test_an_agent_is_made_when_a_peer_is_met_and_not_at_the_first_read() -> None:
    source_pool = make_pool(seed=7)
    link = NixlLink(source_pool, make_pool(), HANG_S)
    for _ in range(2):
        link.receiver.meet("prefill-1", 1)
        for thread in threading.enumerate():
            if thread.name == "nixl-spares":
                thread.join(HANG_S)
    assert link.gate.num_made == 3, "the source's, the receiver's own, and one for the peer"
    transfer = Transfer(link.source, source_pool, range(8))
    read = start_read(link.receiver, link.source.metadata, transfer.token, transfer.blocks(range(8), range(8)))
    assert read.wait_ended() is ReadOutcome.DONE
    assert link.gate.num_made == 3
    link.close()


@pytest.mark.slow
def test_a_read_that_hangs_takes_no_other_with_it() -> None:
    source_pool, pool = make_pool(seed=7), make_pool()
    link = NixlLink(source_pool, pool, read_stall_s=2.0)
    transfer = Transfer(link.source, source_pool, range(12))
    hung_blocks, other_blocks, later_blocks = (
        transfer.blocks(range(first, first + 4), range(first, first + 4)) for first in (0, 4, 8)
    )
    link.serve_only(0)
    hung = start_read(link.receiver, link.source.metadata, transfer.token, hung_blocks)
    link.gate.wait_held()
    link.gate.let_others_pass()
    other = start_read(link.receiver, link.source.metadata, transfer.token, other_blocks)
    assert other.wait_ended() is ReadOutcome.DONE
    assert hung.outcome is None, "the other read waited for it"
    assert "nothing for 2 s" in hung.wait_failed()
    assert link.receiver.agent_counters["condemned"] == 1
    link.resume()
    later = start_read(link.receiver, link.source.metadata, transfer.token, later_blocks)
    assert later.wait_ended() is ReadOutcome.DONE
    assert same_bytes(transfer, pool, [*other_blocks, *later_blocks])
    assert not any(any(pool.block(block.local_block)) for block in hung_blocks), "what hung was written after its end"
    link.close()


def test_serve_comes_first_and_once() -> None:
    connector = NixlConnector()
    with pytest.raises(RuntimeError):
        _ = connector.metadata
    connector.serve(make_pool())
    with pytest.raises(RuntimeError):
        connector.serve(make_pool())
    connector.close()


def test_nixl_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_transport")
    with pytest.raises(ConfigError, match="NIXL cannot start UCX"):
        NixlConnector().serve(make_pool())


def test_nixl_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransferFailed, match="nixl cannot be imported"):
        UcxAgent("a")


def test_settings_that_cannot_be_are_refused() -> None:
    for changes in (
        {"request_bytes": 0},
        {"longest_request_bytes": 1},
        {"read_window_bytes": 1},
        {"agents_per_peer": 0},
        {"read_stall_s": 0.0},
        {"cancel_drain_s": -1.0},
    ):
        with pytest.raises(ConfigError):
            NixlSettings(**changes)
