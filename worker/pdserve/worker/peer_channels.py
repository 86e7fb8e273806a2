"""`PeerChannels`: one kept channel to each peer, open before the first request needs it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc

from pdserve.common.deployment_key import is_loopback
from pdserve.common.errors import InvalidRequest
from pdserve.common.registry import is_address
from pdserve.common.rpc import make_channel
from pdserve.common.tls import ClientTls

MAX_PEERS = 256
_SHOWN_CHARS = 100


class PeerChannels:
    """Lives in the asyncio thread. The least recently used peer goes when there are too many."""

    def __init__(self, tls: ClientTls | None = None, *, insecure: bool = False) -> None:
        """insecure: without TLS, peers beyond loopback are connected to all the same."""
        self._tls = tls
        self._insecure = insecure
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def meet(self, address: str) -> None:
        """Begin to connect to a peer. Idempotent. Raises: as `get`."""
        self.get(address).get_state(try_to_connect=True)

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to a peer, made if need be.

        Raises: InvalidRequest for anything but host:port, and for a peer beyond loopback that would be spoken to in the
        clear without `insecure`.
        """
        channel = self._channels.get(address)
        if channel is None:
            self._verify(address)
            channel = self._channels[address] = make_channel(address, self._tls)
            if len(self._channels) > MAX_PEERS:
                _, oldest = self._channels.popitem(last=False)
                task = asyncio.create_task(oldest.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        self._channels.move_to_end(address)
        return channel

    def _verify(self, address: str) -> None:
        if not is_address(address):
            raise InvalidRequest(f"the peer's address is {address[:_SHOWN_CHARS]!r}, host:port is needed", "address")
        if self._tls is None and not self._insecure and not is_loopback(address):
            raise InvalidRequest(
                f"the peer's address {address} is not loopback, and this worker has no TLS: "
                "tls_cert_file with tls_key_file and tls_ca_file is needed here, or --insecure",
                "address",
            )

    async def close(self) -> None:
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
