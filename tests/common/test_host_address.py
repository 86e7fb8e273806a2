"""What a worker tells its peers to connect to."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pdserve.common.address.host_address import own_address
from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """This machine's name stands for these."""
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    found: list[Any] = [(families[":" in host], socket.SOCK_STREAM, 6, "", (host, 0)) for host in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        (("127.0.1.1", "10.1.2.3"), "10.1.2.3"),
        (("fd00::7", "10.1.2.3"), "10.1.2.3"),
        (("::1", "fe80::1", "fd00::7"), "fd00::7"),
    ],
)
def test_the_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], chosen: str
) -> None:
    named(monkeypatch, *addresses)
    assert own_address() == chosen


def test_a_machine_without_an_address_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.1.1")
    with pytest.raises(ConfigError, match="advertise_host"):
        own_address()


def test_peers_are_told_what_they_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "10.1.2.3")
    assert DecodeSettings(host="0.0.0.0", insecure=True).peers_host == "10.1.2.3"
    assert DecodeSettings(host="0.0.0.0", insecure=True, advertise_host="d1").peers_host == "d1"
    assert DecodeSettings().peers_host == "127.0.0.1"


def test_workers_of_two_machines_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PrefillSettings().name(7) == "prefill-7"
    assert PrefillSettings(worker_id="p").name(7) == "p"
    named(monkeypatch, "10.1.2.3")
    assert DecodeSettings(host="0.0.0.0", insecure=True).name(7) == "decode-10.1.2.3-7"
    named(monkeypatch, "fd00::7")
    assert DecodeSettings(host="::", insecure=True).name(7) == "decode-fd00--7-7"
