"""`Generation`: one client's request in the router: one task per prompt, one stream, and the scope that ends them all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from pdserve.common.errors import Cancelled, PdServeError
from pdserve.router.admission.admission import Admission
from pdserve.router.requests.client_stream import ClientStream
from pdserve.router.requests.preparation import ClientRequest
from pdserve.router.requests.request_scope import RequestScope
from pdserve.router.requests.tasks.prompt_task import PromptTask
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.tenants.client import ANYBODY, Client

log = logging.getLogger(__name__)

UNREAD_S = 60.0
"""Seconds for which a client may leave sent output unread."""


class Generation(RequestScope[PromptTask]):
    """Use as an async context: when it is left, for whatever reason, everything that was started inside has ended."""

    def __init__(
        self,
        request_id: str,
        stream: ClientStream,
        runs: list[PromptTask],
        admission: Admission,
        record: RequestTrace,
        client: Client = ANYBODY,
        embeds: AbstractContextManager[None] | None = None,
    ) -> None:
        """embeds: holds the bytes of prompt embeddings, while it runs."""
        self._embeds = embeds
        self._held = ExitStack()
        super().__init__(request_id, runs, admission, record, client, runs[0].request.flex_id)
        self.stream = stream
        self.stalled = False
        """The client did not read, so the task inside the context was cancelled."""
        self.on_stalled: Callable[[PdServeError], None] | None = None
        """Called just before that cancellation, for a front end whose cancelled task cannot report the error."""
        self._tasks: list[asyncio.Task[None]] = []
        self._owner: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def _enter(self) -> None:
        try:
            if self._embeds is not None:
                self._held.enter_context(self._embeds)
        except PdServeError as error:
            self._record.abort(error)
            self._record.end()
            raise
        try:
            super()._enter()
        except BaseException:
            self._held.close()
            raise

    def _leave(self) -> None:
        super()._leave()
        self._held.close()

    async def __aenter__(self) -> Generation:
        """Raises: Overloaded, Draining."""
        self._enter()
        self._owner = asyncio.current_task()
        self._tasks = [asyncio.create_task(run.run()) for run in self._runs]
        for task in self._tasks:
            task.add_done_callback(self._run_ended)
        self._timer = asyncio.get_running_loop().call_later(UNREAD_S, self._check_reader)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self.on_stalled = None
            self._leave()

    def _run_ended(self, _: asyncio.Task[None]) -> None:
        """End the other prompts when one has failed, whether the client reads or not."""
        if (error := self.stream.error) is not None:
            self._record.abort(error)
            for task in self._tasks:
                task.cancel()

    def cancel(self, error: PdServeError | None = None) -> None:
        """End all runs; both calls of each are cancelled in the event loop's next turn. The stream ends with `error`."""
        error = error or Cancelled("the client left")
        self._record.abort(error)
        for task in self._tasks:
            task.cancel()
        self.stream.fail(error)

    @property
    def request(self) -> ClientRequest:
        """The first prompt's request, as it runs."""
        return self._runs[0].request

    @property
    def num_choices(self) -> int:
        """Sequences that the client gets."""
        return sum(run.num_choices for run in self._runs)

    def _check_reader(self) -> None:
        unread_s = self.stream.unread_for_s()
        if unread_s < UNREAD_S:
            self._timer = asyncio.get_running_loop().call_later(UNREAD_S - unread_s, self._check_reader)
            return
        log.warning("request %s: cancelled, its client has read nothing for %.0f s", self.request_id, unread_s)
        self.stalled = True
        error = Cancelled(f"the client read nothing for {unread_s:.0f} s")
        self.cancel(error)
        if self.on_stalled is not None:
            self.on_stalled(error)
        if self._owner is not None:
            self._owner.cancel()
