"""Peers that a worker is told of while it runs: an address, and none beyond loopback in the clear."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tls_authority import Authority

from pdserve.common.errors import InvalidRequest
from pdserve.worker.peer_channels import PeerChannels


@pytest.fixture
async def channels() -> AsyncIterator[PeerChannels]:
    made = PeerChannels()
    yield made
    await made.close()


@pytest.mark.parametrize(
    "address", ["", "unix:/tmp/socket", "dns:///127.0.0.1:7", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "x" * 9999]
)
async def test_anything_but_an_address_is_refused(channels: PeerChannels, address: str) -> None:
    with pytest.raises(InvalidRequest, match="host:port is needed") as caught:
        channels.meet(address)
    assert caught.value.field == "address"
    assert len(caught.value.message) < 200


async def test_no_peer_beyond_loopback_is_spoken_to_in_the_clear(channels: PeerChannels, authority: Authority) -> None:
    with pytest.raises(InvalidRequest, match=r"10\.0\.0\.5:7 is not loopback, .* has no TLS"):
        channels.get("10.0.0.5:7")
    channels.get("127.0.0.1:7")
    channels.get("[::1]:7")
    for allowed in (PeerChannels(insecure=True), PeerChannels(authority.identity().client)):
        allowed.get("10.0.0.5:7")
        await allowed.close()
