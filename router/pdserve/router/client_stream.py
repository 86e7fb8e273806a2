"""What one client has not read yet: outputs of all its choices, merged while they wait."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from pdserve.common.errors import Cancelled, PdServeError
from pdserve.text.request_output import CompletionOutput

T = TypeVar("T")
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 64
"""About what one entry of a token's log-probabilities takes in an answer."""


class ClientStream:
    """Runs push, one front end takes. Bounded in bytes, not in messages: what waits is merged."""

    def __init__(self, num_runs: int, max_unread_bytes: int | None) -> None:
        """max_unread_bytes: None for a client that wants everything at once."""
        self._open_runs = num_runs
        self._max_unread_bytes = max_unread_bytes
        self._unread: list[CompletionOutput] = []
        self._unread_bytes = 0
        self.error: PdServeError | None = None
        """What the whole request ends with, where it failed."""
        self._reader: asyncio.Future[None] | None = None
        self._taken_at = time.monotonic()

    def push(self, output: CompletionOutput) -> None:
        """Raises: Cancelled when the client has left too much unread."""
        if self.error is not None:
            return
        self._unread.append(output)
        self._unread_bytes += len(output.text) + _TOKEN_BYTES * len(output.token_ids)
        if output.logprobs is not None:
            self._unread_bytes += _LOGPROB_BYTES * sum(map(len, output.logprobs))
        if self._max_unread_bytes is not None and self._unread_bytes > self._max_unread_bytes:
            raise Cancelled(f"the client left more than {self._max_unread_bytes} bytes unread")
        self._wake()

    def end_run(self) -> None:
        """One run has pushed all that its choices get."""
        self._open_runs -= 1
        if not self._open_runs:
            self._wake()

    def fail(self, error: PdServeError) -> None:
        """The whole request ends with an error, after what was pushed; the first one counts."""
        if self.error is None and self._open_runs:
            self.error = error
            self._wake()

    @property
    def ended(self) -> bool:
        """No more will be pushed."""
        return self.error is not None or not self._open_runs

    def unread_for_s(self) -> float:
        """How long the front end has been busy with what it took; 0 while it waits for more."""
        return 0.0 if self._reader is not None else time.monotonic() - self._taken_at

    async def take(self) -> list[CompletionOutput]:
        """What is new, at most one output a choice; empty at the end.

        Raises: PdServeError, once everything before it was taken.
        """
        while not self._unread and not self.ended:
            await self._wait()
        self._taken_at = time.monotonic()
        unread, self._unread, self._unread_bytes = self._unread, [], 0
        if not unread and self.error is not None:
            raise self.error
        return unread if len(unread) < 2 else merged(unread)

    async def take_all(self) -> list[CompletionOutput]:
        """Everything at once, one output a choice, when the request has ended. Raises: PdServeError."""
        while not self.ended:
            await self._wait()
        self._taken_at = time.monotonic()
        if self.error is not None:
            raise self.error
        return merged(self._unread)

    async def _wait(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merged(outputs: list[CompletionOutput]) -> list[CompletionOutput]:
    """One output a choice, in the order of the choices."""
    parts: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        parts.setdefault(output.index, []).append(output)
    return [
        CompletionOutput(
            index=index,
            text="".join(part.text for part in of_choice),
            token_ids=[token_id for part in of_choice for token_id in part.token_ids],
            prompt_logprobs=of_choice[0].prompt_logprobs,
            prompt_token_ids=of_choice[0].prompt_token_ids,
            finish_reason=of_choice[-1].finish_reason,
            stop_reason=of_choice[-1].stop_reason,
            cumulative_logprob=of_choice[-1].cumulative_logprob,
            logprobs=_joined([part.logprobs for part in of_choice]),
            text_offsets=_joined([part.text_offsets for part in of_choice]),
        )
        for index, of_choice in sorted(parts.items())
    ]


def _joined(parts: list[list[T] | None]) -> list[T] | None:
    """The lists of a choice's outputs, one after the other; None for a choice without."""
    if parts[-1] is None:
        return None
    return [entry for part in parts if part is not None for entry in part]
