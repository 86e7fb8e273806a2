"""A peer in a process of its own: `server` sends one message and idles; `client PORT` reads one message and idles.

`server CERT KEY CA` does so over TLS.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pdserve.common.net.rpc import bind, make_channel, make_server
from pdserve.common.security.tls import TlsFile, load_identity

METHOD = "/pdserve.test/idle"


def call(channel: grpc.aio.Channel) -> Any:
    made: Any = channel.unary_stream(METHOD)
    return made(b"")


class IdleHandler(grpc.GenericRpcHandler):
    """Sends one message, then nothing; `ended` is set when the call is over."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def stream(request: object, context: object) -> AsyncIterator[bytes]:
            try:
                yield b"hello"
                await asyncio.Event().wait()
            finally:
                self.ended.set()

        return grpc.unary_stream_rpc_method_handler(stream) if details.method == METHOD else None


async def serve(*files: str) -> None:
    server = make_server()
    server.add_generic_rpc_handlers((IdleHandler(),))
    certificate = [TlsFile("file", path) for path in files]
    tls = load_identity(*certificate, server_name=None, own_host="127.0.0.1").server if certificate else None
    port = bind(server, "127.0.0.1", 0, tls)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def listen(port: str) -> None:
    async with make_channel(f"127.0.0.1:{port}") as channel:
        async for _ in call(channel):
            print("heard", flush=True)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[2:]) if sys.argv[1] == "server" else listen(sys.argv[2]))
