"""Hosts from which images may be fetched: entries of the setting, and the addresses that a host may have."""

from __future__ import annotations

import pytest

from pdserve.common.address.media_domains import MediaDomains, may_be_reached
from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings


def test_entries_name_hosts_and_ports() -> None:
    domains = MediaDomains(
        ["images.example.com", "cdn.example.com:8443", "10.0.0.5:9000", "[fd00::5]:9000"], "allowed_media_domains"
    )
    for scheme, host, port in (
        ("https", "images.example.com", None), ("http", "images.example.com", None),
        ("https", "images.example.com", 443), ("https", "cdn.example.com", 8443), ("http", "10.0.0.5", 9000),
        ("http", "fd00::5", 9000),
    ):  # fmt: skip
        assert domains.has(scheme, host, port), (host, port)
    for scheme, host, port in (
        ("https", "example.com", None), ("https", "a.images.example.com", None), ("https", "images.example.com", 80),
        ("http", "images.example.com", 8080), ("https", "cdn.example.com", None), ("http", "10.0.0.5", None),
        ("http", "10.0.0.6", 9000), ("https", "images.example.com.", None), ("http", "", None),
    ):  # fmt: skip
        assert not domains.has(scheme, host, port), (host, port)
    assert not MediaDomains([], "allowed_media_domains")


@pytest.mark.parametrize(
    "entry",
    ["", "*", "*.example.com", "https://example.com", "example.com/a", "Example.com", "example.com:", "a b", "-a.com",
     "example.com:0", "example.com:65536", "10.0.0.5", "[::1]", "::1", "::1:80", "[example.com]:80", "user@example.com",
     "é.com", "a..b", "x" * 300],
)  # fmt: skip
def test_another_entry_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ConfigError, match="allowed_media_domains has "):
        MediaDomains(["example.com", entry], "allowed_media_domains")
    with pytest.raises(ConfigError, match="allowed_media_domains has "):
        RouterSettings(allowed_media_domains=(entry,)).verify()


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%lo", "fc00::1", "fec0::1",
     "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
     "2002:7f00:1::", "2001:0:7f00:1::", "no address"],
)  # fmt: skip
def test_a_host_leads_to_no_private_address(address: str) -> None:
    assert not may_be_reached(address, "example.com")


def test_public_addresses_and_the_entry_itself_are_reached() -> None:
    for address in ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert may_be_reached(address, "example.com"), address
    assert may_be_reached("127.0.0.1", "127.0.0.1")
    assert may_be_reached("::1", "::1")
    assert not may_be_reached("127.0.0.2", "127.0.0.1")


def test_a_flag_has_commas_between_hosts() -> None:
    settings = load_settings(RouterSettings, flags={"allowed_media_domains": "a.example, b.example:8443"}, environ={})
    assert settings.allowed_media_domains == ("a.example", "b.example:8443")
