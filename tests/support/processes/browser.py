"""`Browser`: one page of a headless Chromium, driven over a pipe with the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.support.run.waiting import HANG_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where no browser is installed."""
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip


class Browser:
    """A page; `messages` has its exceptions, and what it and its policy wrote to the console."""

    def __init__(self, reader: asyncio.StreamReader, write_fd: int) -> None:
        self._reader, self._write_fd = reader, write_fd
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.messages: list[str] = []

    async def read(self) -> None:
        """Until the browser ends."""
        while data := await self._reader.readuntil(b"\0"):
            message = msgspec.json.decode(data[:-1])
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.messages.append(str(message["params"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = len(self._answers) + int.from_bytes(os.urandom(3), "big")
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_fd, msgspec.json.encode(message) + b"\0")
        done = await asyncio.wait_for(answer, HANG_S)
        assert "error" not in done, (method, done)
        result: dict[str, Any] = done["result"]
        return result

    async def attach(self) -> None:
        """To the page that the browser begins with."""
        targets = (await self.call("Target.getTargets"))["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = (await self.call("Target.attachToTarget", targetId=page, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def show(self, url: str, width: int, height: int, *, dark: bool = False) -> None:
        """Load a page in a window of this size; below 600 pixels as a phone."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, its result."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Returns when the expression is true."""
        async with asyncio.timeout(HANG_S):
            while True:
                if await self.value(f"Boolean({expression})"):
                    return
                await asyncio.sleep(0.05)

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        picture = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(picture["data"])


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """A browser with an empty profile in this folder."""
    assert CHROMIUM is not None
    to_browser, write_fd = os.pipe()
    read_fd, from_browser = os.pipe()
    # Chromium reads from 3 and writes to 4
    script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    process = await asyncio.create_subprocess_exec(
        "/bin/bash", "-c", script, CHROMIUM, f"--user-data-dir={profile}", *_FLAGS,
        pass_fds=(to_browser, from_browser), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    reader = asyncio.StreamReader(limit=64 << 20)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
    )
    page = Browser(reader, write_fd)
    reading = asyncio.create_task(page.read())
    try:
        await page.attach()
        yield page
    finally:
        reading.cancel()
        await asyncio.wait((reading,))
        transport.close()
        os.close(write_fd)
        process.kill()
        await process.wait()
