"""`OpenCalls`: calls of a public gRPC server that need no key, which are health and reflection."""

from __future__ import annotations

import collections
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from pdserve.common.errors import BodyTooLarge, InvalidRequest, Overloaded
from pdserve.common.method_handler import Context, behaviour_of, closed_at_end, remade
from pdserve.common.net.body_budget import BodyBudget
from pdserve.common.net.rpc import translate_coroutine

MAX_OPEN_BYTES = 4096
"""Bytes of one message."""
MAX_OPEN_CALLS = 256
MAX_OPEN_CALLS_PER_ADDRESS = 32
_READ_S = 5.0


class OpenCalls:
    """Bounds what strangers may have open: their calls may last for as long as they like, and hold buffers."""

    def __init__(self, max_message_bytes: int, max_bytes: int) -> None:
        """max_message_bytes: what the channel lets through. max_bytes: of messages being read, apart from clients'."""
        self._max_message_bytes = max_message_bytes
        self._budget = BodyBudget(max_bytes)
        self._by_address: collections.Counter[str] = collections.Counter()

    def bounded(self, handler: Any) -> Any:
        """The same handler, which ends calls beyond the bounds with `Overloaded`."""
        answer = self._answer(behaviour_of(handler), handler.request_deserializer, handler.request_streaming)

        async def call(requests: AsyncIterator[bytes], context: Context) -> Any:
            with self._counted(context.peer()):
                return await answer(requests, context)

        return remade(handler, translate_coroutine(call, closed_at_end), reads_stream=True)

    def _answer(
        self, behaviour: Callable[[Any, Any], Any], parse: Callable[[bytes], Any], request_streaming: bool
    ) -> Callable[[AsyncIterator[bytes], Context], Any]:
        async def answer(requests: AsyncIterator[bytes], context: Context) -> Any:
            asked = _each(requests, parse) if request_streaming else await self._first(requests, parse)
            if not inspect.isasyncgenfunction(behaviour):
                return await behaviour(asked, context)
            async for response in behaviour(asked, context):
                await context.write(response)
            return None

        return answer

    async def _first(self, requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> Any:
        async with self._budget.room(self._max_message_bytes) as room:
            raw = await room.read(anext(requests, None), _READ_S)
        if raw is None:
            raise InvalidRequest("the call ended without a message")
        return _parsed(raw, parse)

    @contextlib.contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        """peer: as gRPC writes it, `ipv4:192.0.2.1:1234`. Raises: Overloaded."""
        address = peer.rpartition(":")[0]
        if self._by_address.total() >= MAX_OPEN_CALLS or self._by_address[address] >= MAX_OPEN_CALLS_PER_ADDRESS:
            raise Overloaded(
                f"at most {MAX_OPEN_CALLS} calls of health and reflection may be open, "
                f"{MAX_OPEN_CALLS_PER_ADDRESS} from one address"
            )
        self._by_address[address] += 1
        try:
            yield
        finally:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]


async def _each(requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    async for raw in requests:
        yield _parsed(raw, parse)


def _parsed(raw: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Raises: BodyTooLarge, InvalidRequest."""
    if len(raw) > MAX_OPEN_BYTES:
        raise BodyTooLarge(f"the message has {len(raw)} bytes, at most {MAX_OPEN_BYTES} are allowed here")
    try:
        return parse(raw)
    except Exception as error:
        raise InvalidRequest(f"the message cannot be parsed: {error}") from None
