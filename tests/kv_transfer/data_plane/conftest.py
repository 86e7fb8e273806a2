"""Fixtures of the data plane's tests: none may leave a thread or a socket behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.support.run.waiting import wait_until

pytest.register_assert_rewrite(
    *(
        f"tests.kv_transfer.data_plane.{name}"
        for name in ("contract_reads", "contract_faults", "contract_ends", "contract_tokens", "recorded_read")
    )
)

_CONNECTOR_THREADS = ("tcp-", "local-", "nixl-", "fault-link", "hostile")


def connector_threads() -> list[str]:
    """Names of the live threads that connectors, or the tests' own servers, started."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(_CONNECTOR_THREADS)]


def open_tcp_sockets() -> int:
    """TCP sockets that this process holds."""
    return sum(connection.status != psutil.CONN_NONE for connection in psutil.Process().net_connections("tcp"))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test: no thread and no socket more than before."""
    assert connector_threads() == []
    before = open_tcp_sockets()
    yield
    # A callback may close its own connector; that thread ends a moment later.
    wait_until(
        lambda: not connector_threads() and open_tcp_sockets() <= before,
        lambda: f"{connector_threads()} and {open_tcp_sockets() - before} sockets end",
    )
