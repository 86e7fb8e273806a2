"""`RenewedChannel`: a gRPC channel whose credentials can be renewed.

gRPC's channels keep the credentials that they were made with, also when they connect again. So there is an inner channel for
each generation of certificates: a new call goes over the newest, and an older one is closed when its last call has ended.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from pdserve.common.security.tls import ClientTls


class _Inner:
    """One generation's channel and the calls over it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        # weak, since gRPC cancels a call without references
        self.calls: weakref.WeakSet[Any] = weakref.WeakSet()


class RenewedChannel(grpc.aio.Channel):
    """Used in the asyncio thread, like `grpc.aio.Channel`."""

    def __init__(self, tls: ClientTls, connect: Callable[[ClientTls], grpc.aio.Channel]) -> None:
        """connect: makes a channel with one generation's certificates."""
        self._tls = tls
        self._connect = connect
        self._generation = tls.current
        self._inner = _Inner(connect(self._generation))
        self._retired: set[_Inner] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """As `grpc.aio.Channel.close`, for all generations; calls that then still run are cancelled."""
        self._closed = True
        inners, self._retired = [self._inner, *self._retired], set()
        await asyncio.gather(*(inner.channel.close(grace) for inner in inners), *self._closing)
        for inner in inners:
            # gRPC itself cancels only calls that are awaited
            for call in list(inner.calls):
                call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """State of the newest generation's channel."""
        return self._newest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits on the newest generation's channel."""
        await self._newest().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits for the newest generation's channel."""
        await self._newest().channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """As `grpc.aio.Channel.unary_unary`."""
        return self._calling("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """As `grpc.aio.Channel.unary_stream`."""
        return self._calling("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """As `grpc.aio.Channel.stream_unary`."""
        return self._calling("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """As `grpc.aio.Channel.stream_stream`."""
        return self._calling("stream_stream", arguments, options)

    def _calling(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        """Each call takes the channel that is newest then, however long its stub is kept."""

        def call(*call_arguments: Any, **call_options: Any) -> Any:
            inner = self._newest()
            begun = getattr(inner.channel, kind)(*arguments, **options)(*call_arguments, **call_options)
            inner.calls.add(begun)
            begun.add_done_callback(lambda ended: self._ended(inner, ended))
            return begun

        return call

    def _newest(self) -> _Inner:
        generation = self._tls.current
        if generation is not self._generation and not self._closed:
            self._retired.add(self._inner)
            self._inner, self._generation = _Inner(self._connect(generation)), generation
            for old in list(self._retired):
                self._close_if_unused(old)
        return self._inner

    def _ended(self, inner: _Inner, call: Any) -> None:
        inner.calls.discard(call)
        self._close_if_unused(inner)

    def _close_if_unused(self, inner: _Inner) -> None:
        if inner in self._retired and not inner.calls:
            self._retired.discard(inner)
            task = asyncio.create_task(inner.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
