"""`StepOutbox`: what the calls of one router's stream have to send, until it leaves in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.common import clock
from pdserve.common.errors import PdServeError, PeerError
from pdserve.common.request.wire.step_wire import MAX_EVENTS, StepEvent, StepTokens, merged

MAX_UNSENT_BYTES = 64 << 20
"""Bytes that a router may leave unread before its stream ends; its calls are then made elsewhere. Large events that wait for `room`
are counted apart, and end the stream only if the router reads nothing."""
ROOM_BYTES = 1 << 20
"""Unsent bytes above which `room` waits, and size at which a message ends."""
LARGE_BYTES = 16 << 10
"""Size of an event from which on it waits for `room`."""
UNREAD_S = 3.0
"""Seconds for which a router may read nothing while more than `MAX_UNSENT_BYTES` of large events wait for it."""
_MERGED_AT_ONCE = 4096
"""Unsent entries at which they are merged."""
_ENTRY_BYTES = 192
_TOKEN_BYTES = 36
"""Memory of an entry and of one of its tokens in this process; a message takes a tenth."""


class StepOutbox:
    """Used in the asyncio thread; `take` by one reader at a time."""

    def __init__(self, on_full: Callable[[], None], max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        """on_full: called once, when more than `max_unsent_bytes` are unsent, or wait at their calls while the router has read
        nothing for `UNREAD_S`; the stream then ends with an error."""
        self._on_full = on_full
        self._max_unsent_bytes = max_unsent_bytes
        self._entries: list[StepTokens | StepEvent] = []
        self._num_bytes = 0
        self.num_waiting = 0
        """Calls at which large events wait."""
        self._num_held = 0
        """Bytes of these events."""
        self._unread_since: float | None = None
        """When the router has last taken something, `clock.monotonic()` seconds; None if nothing is unsent."""
        self._merge_at = _MERGED_AT_ONCE
        self._error: PdServeError | None = None
        self._has_ended = False
        self._reader: asyncio.Future[None] | None = None
        self._room: asyncio.Event = asyncio.Event()
        self._room.set()

    def tokens(self, key: int, index: int, first_position: int, token_ids: list[int]) -> None:
        """Add new tokens of a sequence. The list is not changed later."""
        self.add(StepTokens(key, index, first_position, token_ids))

    def event(self, event: StepEvent) -> None:
        """Add an event of a call."""
        self.add(event)

    def begin_waiting(self) -> None:
        """Large events wait at one more call, whatever their number."""
        self.num_waiting += 1

    def end_waiting(self) -> None:
        """Nothing waits at that call any more."""
        self.num_waiting -= 1
        self._wake()

    def hold(self, entry: StepTokens | StepEvent) -> int:
        """Count an output that waits at its call; returns its bytes, for `release`. Fails if the router has not read for long."""
        num_bytes = _size(entry)
        self._num_held += num_bytes
        since, now = self._unread_since, clock.monotonic()
        if self._num_held > self._max_unsent_bytes and since is not None and now - since > UNREAD_S:
            self._fail_unread()
        return num_bytes

    def release(self, num_bytes: int) -> None:
        """An output that was held is added, or dropped."""
        self._num_held -= num_bytes

    def add(self, entry: StepTokens | StepEvent) -> None:
        """Add an output of a call."""
        if self._error is not None:
            return
        self._entries.append(entry)
        if self._unread_since is None:
            self._unread_since = clock.monotonic()
        self._num_bytes += _size(entry)
        if len(self._entries) >= self._merge_at:
            self._merge()
        if self._num_bytes > ROOM_BYTES:
            self._room.clear()
        if self._num_bytes > self._max_unsent_bytes:
            self._fail_unread()
        else:
            self._wake()

    def _fail_unread(self) -> None:
        if self._error is None:
            self.fail(PeerError(f"the router left more than {self._max_unsent_bytes} bytes of its stream unread"))
            self._on_full()

    def _merge(self) -> None:
        self._entries = merged(self._entries)
        self._merge_at = max(_MERGED_AT_ONCE, 2 * len(self._entries))
        self._num_bytes = sum(map(_size, self._entries))
        if self._num_bytes <= ROOM_BYTES:
            self._room.set()

    async def room(self) -> None:
        """Wait until at most `ROOM_BYTES` are unsent. Those that wait continue in their order, each with room of its own."""
        while not self._room.is_set():
            await self._room.wait()

    def fail(self, error: PdServeError) -> None:
        """`take` raises this at once, and nothing is kept any more; the first error counts."""
        self._error = self._error or error
        self._entries, self._num_bytes = [], 0
        self._room.set()
        self._wake()

    def end(self) -> None:
        """`take` returns None after everything that was added, or waits at its call."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[StepTokens | StepEvent] | None:
        """Remove what is unsent, at most about `ROOM_BYTES` and `MAX_EVENTS` events; waits for the first of it. None at the end.

        Raises: see `fail`.
        """
        while not self._entries and self._error is None and not (self._has_ended and not self.num_waiting):
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._error is not None:
            raise self._error
        if not self._entries:
            return None
        entries, num_bytes = self._first()
        self._num_bytes -= num_bytes
        self._unread_since = clock.monotonic() if self._entries else None
        if self._num_bytes <= ROOM_BYTES:
            self._room.set()
        if not self._entries:
            self._merge_at = _MERGED_AT_ONCE
        return entries

    def _first(self) -> tuple[list[StepTokens | StepEvent], int]:
        """Remove the entries of one message: these, and their size in bytes."""
        if self._num_bytes <= ROOM_BYTES and len(self._entries) <= MAX_EVENTS:
            entries, self._entries = self._entries, []
            return entries, self._num_bytes
        count = num_bytes = num_events = 0
        for entry in self._entries:
            count += 1
            num_bytes += _size(entry)
            num_events += isinstance(entry, StepEvent)
            if num_bytes > ROOM_BYTES or num_events >= MAX_EVENTS:
                break
        entries, self._entries = self._entries[:count], self._entries[count:]
        return entries, num_bytes


def _size(entry: StepTokens | StepEvent) -> int:
    if isinstance(entry, StepTokens):
        return _ENTRY_BYTES + _TOKEN_BYTES * len(entry.token_ids)
    return _ENTRY_BYTES + len(entry.message)
