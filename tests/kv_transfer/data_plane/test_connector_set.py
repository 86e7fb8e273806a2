"""Which connectors a worker has, which of them a transfer uses, and what stays closed until all are fenced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.kv_transfer.connector import BlockConnector
from pdserve.kv_transfer.connector_set import AVOID_S, ConnectorSet
from pdserve.kv_transfer.make_connectors import make_connectors
from pdserve.kv_transfer.memory.pool_memory import HostPool

from .recorded_read import make_pool


class FakeGrant:
    def __init__(self) -> None:
        self.published: list[tuple[int, list[int]]] = []
        self.waiting: list[Callable[[], None]] = []

    def publish(self, first_index: int, blocks: Sequence[int]) -> None:
        self.published.append((first_index, list(blocks)))

    def close(self, on_fenced: Callable[[], None]) -> None:
        self.waiting.append(on_fenced)


class FakeConnector:
    """Enough of a `BlockConnector` for the set."""

    metadata = b""

    def __init__(self, name: str, why_not: str | None = None) -> None:
        self.name = name
        self.grants: list[FakeGrant] = []
        self.met: list[tuple[str, int]] = []
        self.is_serving = False
        self._why_not = why_not

    def serve(self, pool: HostPool) -> None:
        if self._why_not is not None:
            raise ConfigError(self._why_not)
        self.is_serving = True

    def grant(self, token: bytes, parts: int = 1) -> FakeGrant:
        self.grants.append(FakeGrant())
        return self.grants[-1]

    def meet(self, worker_id: str, epoch: int) -> None:
        self.met.append((worker_id, epoch))

    def close(self) -> None:
        self.is_serving = False


def fakes(*names: str) -> list[BlockConnector]:
    return [FakeConnector(name) for name in names]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [(["nixl", "tcp"], "nixl"), (["tcp", "nixl"], "tcp"), (["rdma", "tcp"], "tcp"), (["rdma"], None), ([], None)],
)
def test_the_receivers_first_wish_that_both_have_is_chosen(wanted: list[str], chosen: str | None) -> None:
    connector = ConnectorSet(fakes("nixl", "tcp")).choose(wanted)
    assert (connector and connector.name) == chosen


def test_a_grant_holds_on_every_connector_and_is_fenced_when_all_are() -> None:
    one, two = FakeConnector("one"), FakeConnector("two")
    grant = ConnectorSet([one, two]).grant(b"t" * 16)  # type: ignore[list-item]
    grant.publish(3, [7, 8])
    assert one.grants[0].published == two.grants[0].published == [(3, [7, 8])]
    fenced: list[None] = []
    grant.close(lambda: fenced.append(None))
    two.grants[0].waiting[0]()
    assert fenced == []
    one.grants[0].waiting[0]()
    assert fenced == [None]


def test_what_failed_with_a_peer_is_avoided_for_a_while_but_never_everything() -> None:
    now = [100.0]
    connectors = ConnectorSet(fakes("nixl", "tcp"), now=lambda: now[0])
    connectors.failed("p:1", "nixl")
    assert connectors.avoided("p:1") == {"nixl"}
    assert connectors.avoided("p:2") == set()
    connectors.failed("p:1", "tcp")
    assert connectors.avoided("p:1") == set()
    now[0] += AVOID_S
    assert connectors.avoided("p:1") == set()
    assert connectors.num_fallbacks == 2


def test_an_optional_connector_that_cannot_serve_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    broken = FakeConnector("nixl", why_not="no memory may be locked")
    connectors = ConnectorSet([broken, *fakes("tcp")], optional=("nixl",))  # type: ignore[list-item]
    connectors.serve(make_pool())
    assert connectors.names == ("tcp",)
    assert "no memory may be locked" in caplog.text
    with pytest.raises(ConfigError, match="no memory"):
        ConnectorSet([broken, *fakes("tcp")]).serve(make_pool())  # type: ignore[list-item]


def test_every_connector_that_can_is_introduced() -> None:
    one = FakeConnector("one")
    ConnectorSet([one]).meet("prefill-1", 7)  # type: ignore[list-item]
    assert one.met == [("prefill-1", 7)]


@pytest.mark.parametrize(
    ("wanted", "reason", "names"),
    [
        ("auto", None, ("nixl", "tcp")),
        ("nixl", None, ("nixl", "tcp")),
        ("tcp", None, ("tcp",)),
        ("auto", "UCX found no transport", ("tcp",)),
    ],
)
def test_tcp_is_always_there_and_the_log_says_why_nixl_is_not(
    wanted: str, reason: str | None, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = WorkerSettings(connector=wanted)  # type: ignore[arg-type]
    assert make_connectors(settings, lambda: reason).names == names
    assert f"connectors: {', '.join(names)}" in caplog.text
    if reason is not None:
        assert reason in caplog.text


def test_nixl_that_is_demanded_and_cannot_start_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"connector is 'nixl'.*UCX found no transport"):
        make_connectors(WorkerSettings(connector="nixl"), lambda: "UCX found no transport")


def test_a_set_of_nothing_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        ConnectorSet([])
