"""A router over fake workers, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from pdserve.common.net.public_server import make_public_channel
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.service import run_router
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.router.fake_worker import FakeWorker, save_tokenizer
from tests.support.engine.settings_with import settings_with
from tests.support.processes.reserved_port import reserved_port
from tests.support.run.waiting import HANG_S


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("models") / "fake-model")


@pytest.fixture(scope="session")
def fingerprint(model_folder: Path) -> str:
    from pdserve.common.security.fingerprint import tokenizer_fingerprint

    return tokenizer_fingerprint(model_folder)


@pytest.fixture(autouse=True)
def _no_pause_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn sleeps 0.1 s each time it is stopped, which is most of the time that these tests would take."""
    hasty = types.SimpleNamespace(**{name: getattr(asyncio, name) for name in dir(asyncio)})
    hasty.sleep = lambda delay: asyncio.sleep(min(delay, 0.001))
    monkeypatch.setattr("uvicorn.server.asyncio", hasty)


@pytest.fixture(scope="session")
def read_tokenizers() -> dict[tuple[object, ...], Tokenizer]:
    return {}


@pytest.fixture(autouse=True)
def _one_tokenizer_per_folder(
    monkeypatch: pytest.MonkeyPatch, read_tokenizers: dict[tuple[object, ...], Tokenizer]
) -> None:
    """Reading and checking a tokenizer takes 40 ms, most of a router's start; it is immutable, so all tests may share it."""
    read = Tokenizer.from_folder

    def read_once(folder: Path, *, parse_special: bool = True) -> Tokenizer:
        files = sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in folder.glob("*"))
        key = (folder, parse_special, *files)
        if key not in read_tokenizers:
            read_tokenizers[key] = read(folder, parse_special=parse_special)
        return read_tokenizers[key]

    monkeypatch.setattr(Tokenizer, "from_folder", read_once)


class Cluster:
    """A router, the fake workers it knows, and clients of both front ends."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder, self.fingerprint = folder, fingerprint
        self.workers: list[FakeWorker] = []
        self._ports = contextlib.ExitStack()
        """Workers come back at theirs."""
        self.http: httpx.AsyncClient
        self.grpc: InferenceServiceStub
        self.channel: grpc.aio.Channel
        self.lines: list[str] = []
        self.shutdown = Shutdown(announce=self.lines.append)
        self.stop = self.shutdown.stop
        self.running: asyncio.Task[None] | None = None
        self.addresses = ("", "")

    def worker(self, role: str, **options: Any) -> FakeWorker:
        """A worker that is not started yet."""
        count = sum(worker.role == role for worker in self.workers)
        options.setdefault("worker_id", f"{role}{count}")
        options.setdefault("fingerprint", self.fingerprint)
        worker = FakeWorker(role, **options)
        worker.port = self._ports.enter_context(reserved_port())
        self.workers.append(worker)
        return worker

    async def start(self, prefill: int = 1, decode: int = 1, *, wait: bool = True, **settings: Any) -> Cluster:
        """Workers as many as these, beside those made before, and the router over all of them."""
        for role, count in (("prefill", prefill), ("decode", decode)):
            for _ in range(count):
                await self.worker(role).start()
        for role in ("prefill", "decode"):
            settings.setdefault(role, tuple(w.address for w in self.workers if w.role == role))
        ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        self.running = asyncio.create_task(
            run_router(
                settings_with(RouterSettings, port=0, grpc_port=0, **settings),
                model_folder=self.folder,
                ready=lambda *addresses: ready.set_result(addresses),
                shutdown=self.shutdown,
            )
        )
        await asyncio.wait((ready, self.running), return_when=asyncio.FIRST_COMPLETED)
        if self.running.done():
            self.running.result()
        self.addresses = await ready
        # without TLS: `verify` would load 150 certificates, which takes 17 ms
        self.http = httpx.AsyncClient(
            base_url=f"http://{self.addresses[0]}", timeout=HANG_S, trust_env=False, verify=False
        )
        self.channel = make_public_channel(self.addresses[1])
        self.grpc = InferenceServiceStub(self.channel)
        if wait:
            await self.live(
                prefill=sum(w.role == "prefill" for w in self.workers),
                decode=sum(w.role == "decode" for w in self.workers),
            )
        return self

    async def complete(self, prompt: str = "hello", max_tokens: int = 5, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens, **fields})

    async def text(self, max_tokens: int = 5, **fields: Any) -> str:
        """The text of a completion, which must succeed."""
        response = await self.complete(max_tokens=max_tokens, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    async def streamed(self, after_first: Callable[[], None], path: str = "/v1/completions", **fields: Any) -> str:
        """The events of a stream, as they came; `after_first` is called once the client has the first of them."""
        received = ""
        async with self.http.stream("POST", path, json={**fields, "stream": True}) as response:
            assert response.status_code == 200
            async for part in response.aiter_text():
                received += part
                after_first()
        return received

    async def live(self, **counts: int) -> None:
        """Returns when so many workers of each role are live."""
        async with asyncio.timeout(HANG_S):
            while True:
                workers = (await self.http.get("/health")).json()["workers"]
                if all(workers[role]["live"] == count for role, count in counts.items()):
                    return
                await asyncio.sleep(0.02)

    async def queued(self, count: int) -> None:
        """Returns when so many requests wait for a place."""
        async with asyncio.timeout(HANG_S):
            while True:
                if (await self.http.get("/debug/routing")).json()["queued"] == count:
                    return
                await asyncio.sleep(0.001)

    async def idle(self) -> None:
        """Returns when no request is in the router and no call at a worker."""
        async with asyncio.timeout(HANG_S):
            while True:
                if not (await self.http.get("/health")).json()["requests"]:
                    break
                await asyncio.sleep(0.01)
            for worker in self.workers:
                for call in worker.calls:
                    await call.ended.wait()

    def of(self, role: str) -> FakeWorker:
        return next(worker for worker in self.workers if worker.role == role)

    async def close(self) -> None:
        if self.running is not None:
            self.stop.set()
            await self.http.aclose()
            await self.channel.close()
            await asyncio.wait((self.running,))
            if not self.running.cancelled():
                self.running.result()
        await asyncio.gather(*(worker.kill() for worker in self.workers))
        self._ports.close()


@pytest.fixture
async def cluster(model_folder: Path, fingerprint: str) -> AsyncIterator[Cluster]:
    """Not started; closed, and searched for what it left behind, at the end."""
    before = asyncio.all_tasks()
    made = Cluster(model_folder, fingerprint)
    try:
        yield made
    finally:
        with contextlib.suppress(Exception):
            await made.idle() if made.running is not None and not made.running.done() else None
        await made.close()
    for _ in range(500):
        left = {task for task in asyncio.all_tasks() - before if "pdserve" in repr(task.get_coro())}
        if not left:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"tasks were left behind: {left}")
