"""One tiny checkpoint, and engines over it whose pools are whole and idle after every test (I2)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.client.inproc_client import InprocClient
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_thread import EngineThread
from pdserve.llm import LLM, AsyncLLM
from tests.support.engine.llm_requests import core_of
from tests.support.models.oracle import Oracle
from tests.support.run.waiting import HANG_S

TINY: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 128,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
}
"""Chunks, many blocks a prompt, and no preemption unless a test takes a smaller pool."""


@pytest.fixture(scope="session")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture
def make_llm(folder: Path) -> Iterator[Callable[..., LLM]]:
    """`make_llm(num_blocks=..., ...)`: a new one."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(folder, **(TINY | options)))
        return made[-1]

    yield make
    for llm in made:
        if llm._engine is not None:
            core_of(llm).scheduler.check(idle=True)
        llm.shutdown()


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


class CheckedAsyncLLM(AsyncLLM):
    """Can be stepped by hand, and has a pool check that runs where the pool may be touched."""

    @property
    def _engine_thread(self) -> EngineThread:
        assert isinstance(self._client, InprocClient)
        assert self._client.side.thread is not None
        return self._client.side.thread

    def step_by_hand(self) -> None:
        """From now on the engine computes only as many steps as `allow` says."""
        self._permits = threading.Semaphore(0)
        executor = core_of(self).executor
        execute = executor.execute_model

        def when_allowed(*step: Any) -> Any:
            if not self._permits.acquire(timeout=HANG_S):
                raise TimeoutError("no step was allowed")
            return execute(*step)

        executor.execute_model = when_allowed  # type: ignore[assignment, method-assign]

    def watch_posts(self) -> asyncio.Event:
        """Set whenever something has been posted to the engine's thread."""
        thread, loop, posted = self._engine_thread, asyncio.get_running_loop(), asyncio.Event()
        post = thread.post

        def post_and_set(command: Any) -> None:
            post(command)
            loop.call_soon_threadsafe(posted.set)

        thread.post = post_and_set  # type: ignore[method-assign]
        return posted

    def allow(self, num_steps: int = 10_000) -> None:
        self._permits.release(num_steps)

    async def idle(self) -> None:
        """Wait until the engine's thread has done what was posted, then check that its pool is whole and idle."""
        checked: Future[None] = Future()

        def check(core: EngineCore) -> None:
            try:
                core.scheduler.check(idle=True)
                checked.set_result(None)
            except Exception as error:
                checked.set_exception(error)

        self._engine_thread.post(check)
        await asyncio.wait_for(asyncio.wrap_future(checked), HANG_S)


@pytest.fixture
def running(folder: Path) -> Callable[..., AbstractAsyncContextManager[CheckedAsyncLLM]]:
    """`async with running(num_blocks=..., ...)`: shut down at the end; by then its pool is whole and idle."""

    @asynccontextmanager
    async def run(**options: Any) -> AsyncIterator[CheckedAsyncLLM]:
        async with CheckedAsyncLLM(folder, **(TINY | options)) as llm:
            yield llm
        core_of(llm).scheduler.check(idle=True)

    return run
