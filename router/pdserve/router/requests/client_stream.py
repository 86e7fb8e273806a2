"""`ClientStream`: buffers the outputs of all choices that a client has not read, and merges them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from pdserve.common import clock
from pdserve.common.errors import Cancelled, InvalidRequest, PdServeError
from pdserve.text.outputs.merged_outputs import merged
from pdserve.text.outputs.request_output import CompletionOutput

_TOKEN_BYTES = 4
_WRITTEN_TOKEN_BYTES = 12
"""The same where its id is also written as a number."""
_MERGED_AT_ONCE = 1024
"""Number of unread outputs at which they are merged to one per choice; an output of one token takes hundreds of bytes."""
_LOGPROB_BYTES = 64
"""Approximate size of one entry of a token's log-probabilities in a stream, bytes."""
_KEPT_LOGPROB_BYTES = 256
"""Approximate memory of one entry until a whole answer is written, bytes."""


class ClientStream:
    """A queue from prompt tasks (`push`) to one front end, which is called back (`subscribe`) and takes (`take_now`).

    Limited in bytes, not in messages, because outputs are merged.
    """

    def __init__(
        self,
        num_runs: int,
        max_bytes: int,
        *,
        whole: bool = False,
        returns_token_ids: bool = False,
        flush_s: float = 0.0,
    ) -> None:
        """max_bytes: limit of unread output. whole: True if the client gets the whole answer at once, so that all output is
        buffered. returns_token_ids: token ids are written, too. flush_s: least time between two readings of a stream, seconds;
        its first output and its end are not delayed."""
        self._flush_s = flush_s
        self._flushed_at = -math.inf
        self._timer: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Kept for each output: with Python 3.11 `get_running_loop` asks the system for the process's id."""
        self._on_output: Callable[[], None] | None = None
        self.is_blocked = False
        """Set by a subscriber while it waits for the client to read."""
        self._open_runs = num_runs
        self._max_bytes = max_bytes
        self._whole = whole
        self._logprob_bytes = _KEPT_LOGPROB_BYTES if whole else _LOGPROB_BYTES
        self._token_bytes = _WRITTEN_TOKEN_BYTES if returns_token_ids else _TOKEN_BYTES
        self._returns_token_ids = returns_token_ids
        self._unread: list[CompletionOutput] = []
        self._num_merged = 0
        """Length of the beginning of `_unread` that holds merged outputs."""
        self.num_bytes = 0
        """Approximate size of the unread outputs when written, bytes."""
        self.error: PdServeError | None = None
        """The error with which the whole request ends, if it failed."""
        self._taken_at = clock.monotonic()

    def push(self, output: CompletionOutput) -> None:
        """Add an output. Raises: Cancelled if the client has left too much unread; InvalidRequest if a whole answer is too
        large."""
        if self.error is not None:
            return
        self._unread.append(output)
        num_bytes = len(output.text) + self._token_bytes * len(output.token_ids)
        if output.logprobs is not None:
            num_bytes += self._logprob_bytes * sum(map(len, output.logprobs))
        self._add(num_bytes)
        if len(self._unread) - self._num_merged >= _MERGED_AT_ONCE:
            self._unread[self._num_merged :] = merged(self._unread[self._num_merged :])
            self._num_merged = len(self._unread)
        if self._timer is None:
            self.wake()

    def expect_prompt_logprobs(self, num_entries: int) -> None:
        """Announce a prompt's log-probabilities. Raises: InvalidRequest if they exceed the limit, before they are computed."""
        self._add(self._logprob_bytes * num_entries, "prompt_logprobs")

    def expect_prompt_token_ids(self, num_tokens: int) -> None:
        """Announce a prompt, whose token ids a whole answer contains if the client asked for them.

        Raises: as `expect_prompt_logprobs`.
        """
        if self._returns_token_ids and self._whole:
            self._add(_WRITTEN_TOKEN_BYTES * num_tokens, "return_token_ids")

    def _add(self, num_bytes: int, field: str | None = None) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes <= self._max_bytes:
            return
        if not self._whole:
            raise Cancelled(f"the client left more than {self._max_bytes} bytes unread")
        raise InvalidRequest(
            f"the answer has more than {self._max_bytes} bytes (max_answer_bytes); ask for fewer "
            f"{field or 'log-probabilities'}, fewer prompts or sequences, or a shorter answer, or for a stream",
            field,
        )

    def end_run(self) -> None:
        """Note that one task has pushed all outputs of its choices."""
        self._open_runs -= 1
        if not self._open_runs:
            self.wake()

    def fail(self, error: PdServeError) -> None:
        """End the whole request with an error, after the outputs so far; the first error counts."""
        if self.error is None and self._open_runs:
            self.error = error
            self.wake()

    @property
    def ended(self) -> bool:
        """True if no output will be pushed any more."""
        return self.error is not None or not self._open_runs

    def unread_for_s(self) -> float:
        """Seconds since the front end took output; 0 while it waits for more."""
        waits = self._on_output is not None and not self.is_blocked
        return 0.0 if waits else clock.monotonic() - self._taken_at

    def subscribe(self, on_output: Callable[[], None] | None) -> None:
        """Call `on_output` in a later turn of the loop when there may be something to `take_now`; None: no more calls."""
        self._on_output = on_output
        self.is_blocked = False
        if on_output is None and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def until_ready(self) -> None:
        """Wait until there is something to `take_now`, or the end; of a whole answer, until its end."""
        if self.ended:
            return
        ready = asyncio.Event()
        self.subscribe(ready.set)
        try:
            self.wake()
            await ready.wait()
        finally:
            self.subscribe(None)

    def take_now(self) -> list[CompletionOutput]:
        """New output, at most one per choice; empty if there is none, and at the end.

        Raises: the request's PdServeError, after all earlier output was taken.
        """
        self._taken_at = self._flushed_at = clock.monotonic()
        unread, self._unread, self.num_bytes, self._num_merged = self._unread, [], 0, 0
        if not unread and self.error is not None:
            raise self.error
        return unread if len(unread) < 2 else merged(unread)

    async def until_whole(self) -> int:
        """Wait until a whole answer has ended; `take_now` has it. Its approximate size, bytes. Raises: PdServeError."""
        await self.until_ready()
        self._taken_at = clock.monotonic()
        if self.error is not None:
            raise self.error
        return self.num_bytes

    def note_read(self) -> None:
        """Note that the client has read a part of what was taken."""
        self._taken_at = clock.monotonic()

    def _left_s(self) -> float:
        """Seconds until the next reading."""
        return max(0.0, self._flushed_at + self._flush_s - clock.monotonic()) if self._flush_s else 0.0

    def wake(self) -> None:
        """Call the subscriber when it may take, if there is output or the end."""
        if self._on_output is None or not (self.ended or (self._unread and not self._whole)):
            return
        if self._timer is not None:
            if not self.ended:
                return
            self._timer.cancel()
        left_s = 0.0 if self.ended else self._left_s()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(left_s, self._notify) if left_s else self._loop.call_soon(self._notify)

    def _notify(self) -> None:
        self._timer = None
        if self._on_output is not None:
            self._on_output()
