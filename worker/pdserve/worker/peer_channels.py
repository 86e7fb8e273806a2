"""`PeerChannels`: one persistent channel per peer, opened before the first request needs it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import grpc

from pdserve.common.address.peer_address import verify_peer_address
from pdserve.common.errors import InvalidRequest
from pdserve.common.kv_events import WorkerKey
from pdserve.common.net.rpc import make_channel
from pdserve.common.net.service_channel import ServiceChannel
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.security.tls import ClientTls

MAX_RECEIVED_BYTES = 2 << 20
"""Largest message of a peer; the digests and locations of 65,536 blocks take 0.9 MB."""
MAX_IDLE_PEERS = 256
"""Most unused channels that are kept."""


class _Kept:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_uses = 0


class BorrowedChannel:
    """A channel to one epoch of one peer that stays open until `give_back`."""

    def __init__(self, peers: PeerChannels, address: str, service: ServiceChannel) -> None:
        self.service = service
        self._peers: PeerChannels | None = peers
        self._address = address

    def give_back(self) -> None:
        """Return the channel. May be called again."""
        peers, self._peers = self._peers, None
        if peers is not None:
            peers._give_back(self._address)


@dataclass(frozen=True, slots=True)
class PeerRule:
    """The rule by which a worker connects to a peer."""

    has_tls: bool
    insecure: bool
    """Connect to peers beyond loopback without TLS."""

    def verify(self, address: str) -> None:
        """Raises: InvalidRequest for anything but host:port, and for a peer beyond loopback that would be called without encryption
        although `insecure` is not set."""
        verify_peer_address("address", address)
        if not self.has_tls and not self.insecure and not is_loopback(address):
            raise InvalidRequest(
                f"the peer's address {address} is not loopback, and this worker has no TLS: "
                "tls_cert_file with tls_key_file and tls_ca_file is needed here, or --insecure",
                "address",
            )


class PeerChannels:
    """Channels by peer, used in the asyncio thread. Above `MAX_IDLE_PEERS`, the least recently used idle channel is closed."""

    def __init__(self, signer: CallSigner, tls: ClientTls | None = None, *, insecure: bool = False) -> None:
        """insecure: connect to peers beyond loopback without TLS."""
        self._signer = signer
        self._tls = tls
        self._rule = PeerRule(tls is not None, insecure)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def meet(self, address: str) -> None:
        """Start connecting to a peer. Idempotent. Raises: as `borrow`."""
        self._keep(address).channel.get_state(try_to_connect=True)
        self._close_idle()

    def borrow(self, address: str, peer: WorkerKey) -> BorrowedChannel:
        """The channel to a peer, made if necessary; the caller gives it back. peer: the epoch for which calls are signed.

        Raises: InvalidRequest as `PeerRule.verify`.
        """
        kept = self._keep(address)
        kept.num_uses += 1
        self._close_idle()
        return BorrowedChannel(self, address, ServiceChannel(kept.channel, self._signer, peer))

    async def close(self) -> None:
        """Close all channels, including those in use."""
        while self._kept:
            _, kept = self._kept.popitem()
            await kept.channel.close()

    def _keep(self, address: str) -> _Kept:
        kept = self._kept.get(address)
        if kept is None:
            self._rule.verify(address)
            kept = self._kept[address] = _Kept(make_channel(address, self._tls, max_received_bytes=MAX_RECEIVED_BYTES))
        self._kept.move_to_end(address)
        return kept

    def _give_back(self, address: str) -> None:
        if (kept := self._kept.get(address)) is not None:
            kept.num_uses -= 1
            self._close_idle()

    def _close_idle(self) -> None:
        idle = [address for address, kept in self._kept.items() if not kept.num_uses]
        # the newest may be the one that is being returned
        for address in idle[: max(0, len(idle) - MAX_IDLE_PEERS)]:
            task = asyncio.create_task(self._kept.pop(address).channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
