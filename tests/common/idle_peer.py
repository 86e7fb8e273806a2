"""A peer in a process of its own: `server` sends one message and idles; `client PORT` reads one message and idles."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc

from pdserve.common.rpc import bind, make_channel, make_server

METHOD = "/pdserve.test/idle"


class IdleHandler(grpc.GenericRpcHandler):
    """Sends one message, then nothing; `ended` is set when the call is over."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        async def stream(request: object, context: object) -> AsyncIterator[bytes]:
            try:
                yield b"hello"
                await asyncio.Event().wait()
            finally:
                self.ended.set()

        return grpc.unary_stream_rpc_method_handler(stream) if details.method == METHOD else None


async def serve() -> None:
    server = make_server()
    server.add_generic_rpc_handlers((IdleHandler(),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def listen(port: str) -> None:
    async with make_channel(f"127.0.0.1:{port}") as channel:
        async for _ in channel.unary_stream(METHOD)(b""):
            print("heard", flush=True)


if __name__ == "__main__":
    asyncio.run(serve() if sys.argv[1] == "server" else listen(sys.argv[2]))
