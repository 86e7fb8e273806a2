"""`ReadGrants`: the grants of one connector at a source, and the active sends of each.

open -> [publish ...] -> close -> (active sends end, or are interrupted after fence_after_s) -> fenced
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Hashable, Sequence

from pdserve.kv_transfer.event_thread import EventThread

TOKEN_BYTES = 16


class ReadRefusal(enum.Enum):
    """Reasons why a source refuses a read. The numbers are sent to the peer; 0 is reserved for 'granted'."""

    UNKNOWN_TOKEN = 1
    UNPUBLISHED = 2
    TOO_MANY = 3
    WRONG_BLOCK_BYTES = 4
    OTHER_READER = 5

    @property
    def explanation(self) -> str:
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    ReadRefusal.UNKNOWN_TOKEN: "its token is unknown or no longer granted",
    ReadRefusal.UNPUBLISHED: "it asked for a block that is not published",
    ReadRefusal.TOO_MANY: "it asked for too many blocks at once",
    ReadRefusal.WRONG_BLOCK_BYTES: "its blocks have another size",
    ReadRefusal.OTHER_READER: "another peer has read with this token before",
}


class InFlightSend:
    """Blocks that are being sent to one peer; they must not be reused before `ReadGrants.end`."""

    __slots__ = ("blocks", "grant", "interrupt")

    def __init__(self, grant: ReadGrant, blocks: list[int], interrupt: Callable[[], object]) -> None:
        self.grant = grant
        self.blocks = blocks
        self.interrupt = interrupt


class ReadGrant:
    """A `Grant` of a `ReadGrants`."""

    def __init__(self, book: ReadGrants, token: bytes, parts: int) -> None:
        self._book = book
        self.token = token
        self.parts = parts
        """The pool is divided into this number of parts per block; numbers of blocks are those of the parts."""
        self.blocks: dict[int, int] = {}
        self.sendings: set[InFlightSend] = set()
        self.waiting: list[Callable[[], None]] = []
        self.closed = False
        self.reader: Hashable | None = None
        """The first reader; no other may read with this token."""

    def publish(self, first_index: int, blocks: Sequence[int]) -> None:
        """As `Grant.publish`; no effect after the grant was closed, since its connector may close it at any time.

        Raises: IndexError for a block outside the pool, ValueError for an index that was published as another block.
        """
        self._book.publish(self, first_index, blocks)

    def close(self, on_fenced: Callable[[], None]) -> None:
        """As `Grant.close`. May be called several times; each callback is called once."""
        self._book.close_grant(self, on_fenced)


class ReadGrants:
    """Grants by token. Thread-safe. Callbacks run on the event thread."""

    def __init__(self, num_blocks: int, events: EventThread, fence_after_s: float) -> None:
        self._num_blocks = num_blocks
        self._events = events
        self._fence_after_s = fence_after_s
        self._lock = threading.Lock()
        # the duration of a dict lookup reveals nothing useful: bytes are compared only if their keyed 64-bit # hashes are equal,
        # and a token is 128 random bits
        self._grants: dict[bytes, ReadGrant] = {}
        self._closed = False

    def open(self, token: bytes, parts: int = 1) -> ReadGrant:
        """A new grant; after `close`, a grant that allows nothing. Raises: ValueError for an invalid or granted token."""
        if len(token) != TOKEN_BYTES:
            raise ValueError(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")
        grant = ReadGrant(self, bytes(token), parts)
        with self._lock:
            if token in self._grants:
                raise ValueError("the token is already granted")
            if self._closed:
                grant.closed = True
            else:
                self._grants[grant.token] = grant
        return grant

    def publish(self, grant: ReadGrant, first_index: int, blocks: Sequence[int]) -> None:
        for number in blocks:
            if not 0 <= number < self._num_blocks * grant.parts:
                limit = f"{self._num_blocks * grant.parts} blocks"
                raise IndexError(f"block {number} is outside the pool of {limit}")
        if first_index < 0:
            raise ValueError(f"the first index is {first_index}, and cannot be negative")
        with self._lock:
            if grant.closed:
                return
            for index, number in enumerate(blocks, first_index):
                if grant.blocks.get(index, number) != number:
                    raise ValueError(f"index {index} is already published as block {grant.blocks[index]}")
            grant.blocks.update(enumerate(blocks, first_index))

    def begin(
        self,
        token: bytes,
        first_index: int,
        count: int,
        interrupt: Callable[[], object],
        reader: Hashable | None = None,
    ) -> InFlightSend | ReadRefusal:
        """Permit a send of `count` blocks, until `end`, or refuse it. reader: the peer; the first one binds the token.

        interrupt: called from any thread, possibly more than once and only before `end`, if the send must stop soon. It must not
        block, and must not call this object.
        """
        with self._lock:
            grant = self._grants.get(token)
            if grant is None:
                return ReadRefusal.UNKNOWN_TOKEN
            try:
                blocks = [grant.blocks[index] for index in range(first_index, first_index + count)]
            except KeyError:
                return ReadRefusal.UNPUBLISHED
            if grant.reader not in (None, reader):
                return ReadRefusal.OTHER_READER
            grant.reader = reader
            sending = InFlightSend(grant, blocks, interrupt)
            grant.sendings.add(sending)
            return sending

    def end(self, sending: InFlightSend) -> None:
        """End a send: none of its blocks is read any more."""
        grant = sending.grant
        with self._lock:
            grant.sendings.discard(sending)
            fenced = self._take_fenced(grant)
        self._call(fenced)

    def close_grant(self, grant: ReadGrant, on_fenced: Callable[[], None]) -> None:
        with self._lock:
            self._forget(grant)
            grant.waiting.append(on_fenced)
            fenced = self._take_fenced(grant)
        self._call(fenced)
        if not fenced:
            self._events.call_later(self._fence_after_s, lambda: self._interrupt(grant))

    def close(self) -> None:
        """Close all grants and interrupt all sends at once. Idempotent."""
        with self._lock:
            self._closed = True
            grants = list(self._grants.values())
            for grant in grants:
                self._forget(grant)
        for grant in grants:
            self._interrupt(grant)

    def _forget(self, grant: ReadGrant) -> None:
        grant.closed = True
        if self._grants.get(grant.token) is grant:
            del self._grants[grant.token]

    def _take_fenced(self, grant: ReadGrant) -> list[Callable[[], None]]:
        if not grant.closed or grant.sendings:
            return []
        fenced, grant.waiting = grant.waiting, []
        return fenced

    def _call(self, fenced: list[Callable[[], None]]) -> None:
        for call in fenced:
            self._events.call_soon(call)

    def _interrupt(self, grant: ReadGrant) -> None:
        # under the lock, because after a send has ended another transfer may use its socket
        with self._lock:
            for sending in grant.sendings:
                sending.interrupt()
