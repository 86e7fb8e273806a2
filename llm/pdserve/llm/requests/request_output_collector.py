"""`RequestOutputCollector`: the answers of one request of `AsyncLLM.add_request`, by vLLM's name."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager

from pdserve.common.request.sampling_params import RequestOutputKind
from pdserve.llm.pooling_output import PoolingOutput, PoolingRequestOutput
from pdserve.text.outputs.request_output import RequestOutput

Answer = RequestOutput | PoolingRequestOutput[PoolingOutput]


class RequestOutputCollector:
    """Answers until the `finished` one. The request runs whether they are read or not; `AsyncLLM.abort` ends it."""

    def __init__(self, request_id: str, output_kind: RequestOutputKind) -> None:
        """output_kind: with DELTA every unread answer is kept, else the newest, which contains the others."""
        self.request_id = request_id
        self._unread: deque[Answer] = deque(maxlen=None if output_kind is RequestOutputKind.DELTA else 1)
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, answers: AsyncIterator[Answer], scope: AbstractContextManager[object]) -> None:
        """Collect answers in a task. scope: of the submitted request; left when there are no more answers."""
        self._task = asyncio.get_running_loop().create_task(self._collect(answers, scope))

    async def _collect(self, answers: AsyncIterator[Answer], scope: AbstractContextManager[object]) -> None:
        try:
            with scope:
                async for answer in answers:
                    self._unread.append(answer)
                    self._changed.set()
        except Exception as error:
            self._error = error
        finally:
            self._changed.set()

    async def get(self) -> Answer:
        """The next answer, or the newest if several are unread.

        Raises: WorkerLost when the engine failed, Cancelled by `shutdown`; RuntimeError after the last answer.
        """
        while (answer := self.get_nowait()) is None:
            if self._task is None or self._task.done():
                raise RuntimeError(f"request {self.request_id} has no more answers")
            self._changed.clear()
            await self._changed.wait()
        return answer

    def get_nowait(self) -> Answer | None:
        """The same without waiting; None for none."""
        if self._unread:
            return self._unread.popleft()
        if self._error is not None:
            raise self._error
        return None
