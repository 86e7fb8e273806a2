"""Addresses that a worker gives to its peers."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pdserve.common.address.host_address import loopback_of, own_address, routed_address
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
    monkeypatch.setattr("pdserve.common.address.host_address.routed_address", lambda host: None)
    with pytest.raises(ConfigError, match=r"127\.0\.1\.1.*advertise_host"):
        own_address()


@pytest.mark.parametrize("addresses", [("127.0.1.1",), ("::1", "fe80::1"), ()])
def test_a_name_on_loopback_leaves_the_default_route(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    named(monkeypatch, *addresses)
    routes = {"192.0.2.1": "10.9.8.7", "2001:db8::1": "fd00::9"}
    monkeypatch.setattr("pdserve.common.address.host_address.routed_address", routes.get)
    assert own_address() == "10.9.8.7"
    routes["192.0.2.1"] = "127.0.0.1"
    assert own_address() == "fd00::9"


def test_the_address_of_a_route() -> None:
    assert routed_address("127.0.0.1") == "127.0.0.1"
    assert routed_address("no address") is None


def test_clients_on_this_machine_reach_a_wildcard_over_loopback() -> None:
    assert [loopback_of(address) for address in ("0.0.0.0:1", "[::]:1", "10.1.2.3:1", "[fd00::7]:1")] == [
        "127.0.0.1:1",
        "[::1]:1",
        "10.1.2.3:1",
        "[fd00::7]:1",
    ]


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
