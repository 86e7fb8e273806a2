"""A child process for checks that may abort or hang; it returns its result as one JSON line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

import msgspec

_LAST_WORDS = 300
"""Characters that are shown of the output of a child that failed."""
_LAST_BYTES = 4 * _LAST_WORDS
_MAX_LINE = 1 << 20

Answer = TypeVar("Answer")


class ChildBroke(Exception):
    """The child ended without a result, or gave none in time; the text says how."""


class Child:
    """A running child process, made by `child`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        # read continuously: a library that logs much would fill the pipe and block
        self._last_words = asyncio.create_task(self._read_last_words())

    async def answer(self, kind: type[Answer]) -> Answer:
        """The next line that the child prints. Raises: ChildBroke."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ChildBroke(await self._how_it_ended())
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            raise ChildBroke(f"it printed something else than an answer: {error}") from error

    def tell(self, value: object) -> None:
        """Write one JSON line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(value) + b"\n")

    async def end(self) -> None:
        """Kill the child if it runs, and read its pipes to their ends."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        while await self._process.stdout.read(_MAX_LINE):
            pass
        await self._last_words
        await self._process.wait()

    async def _read_last_words(self) -> bytes:
        assert self._process.stderr is not None
        words = b""
        while more := await self._process.stderr.read(_MAX_LINE):
            words = (words + more)[-_LAST_BYTES:]
        return words

    async def _how_it_ended(self) -> str:
        words = (await self._last_words).decode(errors="replace")
        code = await self._process.wait()
        how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
        last = " ".join(words.split())[-_LAST_WORDS:]
        return f"{how}: {last}" if last else how


@contextlib.asynccontextmanager
async def child(module: str, *arguments: str, environ: Mapping[str, str] | None = None) -> AsyncIterator[Child]:
    """Run `python -m module arguments`; kill it when the block ends. environ: added to this process's environment."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(environ or {})},
        limit=_MAX_LINE,
    )  # fmt: skip
    started = Child(process)
    try:
        yield started
    finally:
        await started.end()
