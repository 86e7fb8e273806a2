"""Starts programs in a process whose gRPC threads are at work: python -m tests.support.processes.starting_processes NUMBER

A server and channels of `grpc.aio` in one uvloop, as in a router. Prints the status of each program that did not end with 0, and
`done` at the end.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio
import uvloop

from pdserve.common.processes.service_process import start_process

NUM_CHANNELS = 4
ECHO = "/probe.Echo/Echo"


async def _echo(request: bytes, context: object) -> bytes:
    return request


async def _ask(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        ask: Any = channel.unary_unary(ECHO)
        while True:
            await ask(bytes(4096))


async def _run(number: int) -> None:
    server = grpc.aio.server()
    method: Any = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("probe.Echo", {"Echo": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    asking = [asyncio.create_task(_ask(port)) for _ in range(NUM_CHANNELS)]
    try:
        for _ in range(number):
            status = await (await start_process(["/bin/true"])).wait()
            if status:
                print(status, flush=True)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await server.stop(None)
    print("done", flush=True)


if __name__ == "__main__":
    uvloop.run(_run(int(sys.argv[1])))
