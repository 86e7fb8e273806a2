"""`SlowReaders`: many clients in a process of their own that send the same request at once and read nothing of the answers but
their beginnings."""

from __future__ import annotations

import asyncio
import json
import sys
from types import TracebackType
from typing import Any

from tests.support.run.waiting import HANG_S

_SCRIPT = """
import asyncio, socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
request = sys.stdin.buffer.read(int(sys.argv[4]))

async def ask(sockets):
    loop, mine = asyncio.get_running_loop(), socket.socket()
    sockets.append(mine)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    mine.setblocking(False)
    try:
        await loop.sock_connect(mine, (host, port))
        sending = asyncio.ensure_future(loop.sock_sendall(mine, request))
        start = await loop.sock_recv(mine, 64)
        sending.cancel()
        print(start.split()[1].decode() if start else "closed", flush=True)
    except OSError:
        print("closed", flush=True)

async def main():
    sockets = []
    await asyncio.gather(*(ask(sockets) for _ in range(count)))
    await loop_end(sockets)

async def loop_end(sockets):
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)

asyncio.run(main())
"""


class SlowReaders:
    """They leave at the end of the context. The process that serves them has no part in their memory."""

    def __init__(self, address: str, count: int, path: str, body: dict[str, Any], key: str) -> None:
        """key: the API key itself."""
        self._host, _, self._port = address.rpartition(":")
        self._count = count
        content = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        self._request = head.encode() + content

    async def __aenter__(self) -> SlowReaders:
        command = (sys.executable, "-c", _SCRIPT, self._host, self._port, str(self._count), str(len(self._request)))
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._request)
        await self._process.stdin.drain()
        return self

    async def statuses(self) -> list[str]:
        """The status of each answer, once all have begun; `closed` for one that never did."""
        assert self._process.stdout is not None
        async with asyncio.timeout(2 * HANG_S):
            return [(await self._process.stdout.readline()).decode().strip() for _ in range(self._count)]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        await self._process.communicate()
