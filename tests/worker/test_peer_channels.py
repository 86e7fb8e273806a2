"""Peers that a worker is told of while it runs: an address, and none beyond loopback in the clear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from pdserve.common.address.peer_address import grpc_target
from pdserve.common.errors import InvalidRequest
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.worker.peer_channels import MAX_IDLE_PEERS, PeerChannels
from tests.support.processes.tls_authority import Authority

SIGNER = CallSigner(DEVELOPMENT_KEY)
PEER = ("prefill-0", 7)


@pytest.fixture
async def channels() -> AsyncIterator[PeerChannels]:
    made = PeerChannels(SIGNER)
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
        channels.borrow("10.0.0.5:7", PEER)
    channels.borrow("127.0.0.1:7", PEER)
    channels.borrow("[::1]:7", PEER)
    for allowed in (PeerChannels(SIGNER, insecure=True), PeerChannels(SIGNER, authority.identity().client)):
        allowed.borrow("10.0.0.5:7", PEER)
        await allowed.close()


def is_open(channel: grpc.aio.Channel) -> bool:
    try:
        return channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
    except grpc.aio.UsageError:
        return False


async def test_a_channel_in_use_is_never_closed_and_idle_ones_are_bounded(channels: PeerChannels) -> None:
    used = [channels.borrow(f"127.0.0.1:{port}", PEER) for port in range(1000, 1000 + MAX_IDLE_PEERS + 50)]
    idle = []
    for port in range(3000, 3000 + MAX_IDLE_PEERS + 50):
        channels.meet(f"127.0.0.1:{port}")
        idle.append(channels._kept[f"127.0.0.1:{port}"].channel)
    await asyncio.gather(*channels._closing)
    assert all(is_open(borrowed.service.channel) for borrowed in used)
    assert sum(map(is_open, idle)) == MAX_IDLE_PEERS
    assert not is_open(idle[0])
    assert is_open(idle[-1])
    for borrowed in used:
        borrowed.give_back()
        borrowed.give_back()
    await asyncio.gather(*channels._closing)
    assert len(channels._kept) == MAX_IDLE_PEERS


async def test_two_uses_of_one_peer_share_a_channel_until_both_are_over(channels: PeerChannels) -> None:
    one, two = channels.borrow("127.0.0.1:7", PEER), channels.borrow("127.0.0.1:7", ("prefill-0", 8))
    assert one.service.channel is two.service.channel
    one.give_back()
    one.give_back()
    for port in range(1000, 1000 + MAX_IDLE_PEERS + 10):
        channels.meet(f"127.0.0.1:{port}")
    await asyncio.gather(*channels._closing)
    assert is_open(two.service.channel)


async def test_a_host_that_is_called_as_a_scheme_of_grpc_is_a_host() -> None:
    # gRPC would take `unix:80` for the path of a socket
    assert grpc_target("unix:80") == "dns:///unix:80"
