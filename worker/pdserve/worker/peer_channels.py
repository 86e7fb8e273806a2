"""`PeerChannels`: one kept channel to each peer, open before the first request needs it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc

from pdserve.common.rpc import make_channel
from pdserve.common.tls import ClientTls

MAX_PEERS = 256


class PeerChannels:
    """Lives in the asyncio thread. The least recently used peer goes when there are too many."""

    def __init__(self, tls: ClientTls | None = None) -> None:
        self._tls = tls
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def meet(self, address: str) -> None:
        """Begin to connect to a peer. Idempotent."""
        self.get(address).get_state(try_to_connect=True)

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to a peer, made if need be."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = make_channel(address, self._tls)
            if len(self._channels) > MAX_PEERS:
                _, oldest = self._channels.popitem(last=False)
                task = asyncio.create_task(oldest.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        self._channels.move_to_end(address)
        return channel

    async def close(self) -> None:
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
