"""Reads of blocks between two engines, cached ones and those of sequences that move, whose messages the test exchanges with chosen
delays, failures and repetitions.

A read copies one block of the source's pool into the reader's. Abandoned reads write garbage until their hold is returned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.common.errors import TransferFailed
from pdserve.common.request.block_source import BlockSource
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.engine.kv_cache.block_pool import PinnedBlocks
from pdserve.engine.scheduler.kv_messages import (
    Found,
    HoldReturned,
    IntoEngine,
    Landed,
    Lookup,
    Migrating,
    Missed,
    Offered,
    OutOfEngine,
    ReceiveFailed,
    ReceiveInto,
    Revoke,
    Settled,
    SourceFinished,
    StopReceiving,
    Want,
)
from tests.support.engine.engine_harness import Harness
from tests.support.engine.pool_blocks import RUBBISH, block_at, copy_block, num_without_gap, places_of

SOURCE = BlockSource("other", 1, "127.0.0.1:1", 5.0)
"""Of requests whose blocks a test moves itself."""


@dataclass
class Fetch:
    """One request's read."""

    reader: str
    source: str
    request_id: str
    num_offered: int = 0
    room: ReceiveInto | None = None
    published: dict[int, tuple[tuple[int, int], Any]] = field(default_factory=dict)
    """Number -> the source's block and its content when it was published."""
    hold: PinnedBlocks | None = None
    landed: set[int] = field(default_factory=set)
    is_stopped: bool = False
    is_over: bool = False
    moved: Migrating | None = None
    """The sequence that the reader continues; None: the blocks are cached ones."""

    @property
    def at_source(self) -> str:
        """The source's name of the transfer."""
        return f"blocks {self.reader} {self.request_id}" if self.moved is None else self.moved.request_id

    def finished(self, block_size: int) -> SourceFinished:
        """What the source says after the last block."""
        if self.moved is None:
            return SourceFinished(self.request_id, self.num_offered * block_size, ())
        migration = self.moved.migration
        return SourceFinished(self.request_id, migration.num_sent_tokens, (migration.token_id,))

    @property
    def num_landed(self) -> int:
        return num_without_gap(self.landed, self.room.first_index) if self.room is not None else 0


class Fetches:
    """All reads between two engines."""

    def __init__(
        self,
        engines: Mapping[str, Harness],
        post: Callable[[str, IntoEngine], None],
        draw: random.Random,
        *,
        is_steady: bool,
    ) -> None:
        """engines: two, by name. post: sends an event to one of them. is_steady: no delays and no failures."""
        self._engines = engines
        self._post = post
        self._draw = draw
        self._is_steady = is_steady
        self._fetches: dict[tuple[str, str], Fetch] = {}
        """By reader and request."""
        self._by_source: dict[tuple[str, str], Fetch] = {}
        self.num_landed = 0
        """Blocks."""

    def __len__(self) -> int:
        """Reads that are not over."""
        return sum(not fetch.is_over for fetch in self._fetches.values())

    def begin(self, reader: str, request: EngineCoreRequest) -> None:
        """The request, which has a `block_source`, is about to be added."""
        [source] = [name for name in self._engines if name != reader]
        fetch = Fetch(reader, source, request.request_id)
        num_given = len(request.prompt_token_ids) + len(request.output_token_ids)
        hashes = request.block_hashes[: (num_given - 1) // self._engines[reader].config.block_size]
        self._fetches[reader, request.request_id] = self._by_source[source, fetch.at_source] = fetch
        self._post(source, Lookup(fetch.at_source, tuple(hashes)))

    def begin_move(self, reader: str, source: str, request_id: str, moved: Migrating) -> None:
        """The request, which continues a sequence that rests at the source, is about to be added."""
        fetch = Fetch(reader, source, request_id, moved=moved)
        self._fetches[reader, request_id] = self._by_source[source, fetch.at_source] = fetch

    def end_move(self, reader: str, request_id: str) -> None:
        """The request has ended: its source gives its blocks up."""
        fetch = self._fetches[reader, request_id]
        if not fetch.is_over and fetch.room is None:
            fetch.is_stopped = fetch.is_over = True
            self._leave_source(fetch)

    def takes(self, engine: str, message: OutOfEngine) -> bool:
        """Handle a message of an engine; False if it is not about a read."""
        if isinstance(message, Found | Settled | Missed):
            fetch = self._by_source.get((engine, message.request_id))
            if fetch is not None:
                self._from_source(fetch, message)
            return fetch is not None
        fetch = self._fetches.get((engine, message.request_id))
        if fetch is None:
            return False
        if fetch.is_over:
            assert isinstance(message, StopReceiving), "room for a read that is over"
        elif isinstance(message, StopReceiving):
            fetch.is_stopped = True
            self._leave_source(fetch)
            if fetch.room is None:
                fetch.is_over = True
        else:
            assert isinstance(message, ReceiveInto)
            fetch.room = message
            self._post(fetch.source, Want(fetch.at_source, message.first_index))
        return True

    def _from_source(self, fetch: Fetch, message: Found | Settled | Missed) -> None:
        match message:
            case Found() if fetch.num_offered:
                pass  # a repetition
            case Found():
                fetch.num_offered = message.num_blocks
                if message.num_blocks and not self._fails():
                    self._post(fetch.reader, Offered(fetch.request_id, message.num_blocks))
                else:
                    self._fail(fetch)
            case Missed():
                self._fail(fetch)
            case Settled() if fetch.is_stopped:
                self._post(fetch.source, HoldReturned(fetch.at_source, message.hold))
            case Settled():
                fetch.hold = message.hold
                source = self._engines[fetch.source]
                for number, place in enumerate(places_of(message.hold), message.first_index):
                    fetch.published[number] = place, block_at(source, place).tolist()

    def _fails(self) -> bool:
        return not self._is_steady and self._draw.random() < 0.1

    def _fail(self, fetch: Fetch) -> None:
        self._post(fetch.reader, ReceiveFailed(fetch.request_id, TransferFailed("the source is gone")))

    def move(self) -> None:
        """Some of what is published arrives, or nothing does any more."""
        for fetch in self._fetches.values():
            if fetch.room is None:
                continue
            if fetch.is_stopped:
                self._drain(fetch)
            elif (fetch.hold is not None or not len(fetch.room.hold)) and (
                self._is_steady or self._draw.random() < 0.8
            ):
                self._fail(fetch) if self._fails() else self._read(fetch)

    def _read(self, fetch: Fetch) -> None:
        room, before = fetch.room, fetch.num_landed
        assert room is not None
        source, reader = self._engines[fetch.source], self._engines[fetch.reader]
        for number, place in enumerate(places_of(room.hold), room.first_index):
            if number not in fetch.landed and (self._is_steady or self._draw.random() < 0.5):
                origin, content = fetch.published[number]
                assert block_at(source, origin).tolist() == content, "a pinned block was written to"
                copy_block(source, origin, reader, place)
                fetch.landed.add(number)
        if fetch.num_landed > before:
            self._post(fetch.reader, Landed(fetch.request_id, fetch.num_landed))
        if fetch.num_landed == len(room.hold):
            self.num_landed += len(room.hold)
            self._post(fetch.reader, fetch.finished(reader.config.block_size))
            self._return_room(fetch)

    def _drain(self, fetch: Fetch) -> None:
        room = fetch.room
        assert room is not None
        for number, place in enumerate(places_of(room.hold), room.first_index):
            if number not in fetch.landed:
                block_at(self._engines[fetch.reader], place).fill_(RUBBISH)
        if self._is_steady or self._draw.random() < 0.2:
            self._return_room(fetch)

    def _return_room(self, fetch: Fetch) -> None:
        assert fetch.room is not None
        self._post(fetch.reader, HoldReturned(fetch.request_id, fetch.room.hold))
        fetch.room = None
        self._leave_source(fetch)
        fetch.is_stopped = fetch.is_over = True

    def _leave_source(self, fetch: Fetch) -> None:
        if fetch.hold is not None:
            self._post(fetch.source, HoldReturned(fetch.at_source, fetch.hold))
            fetch.hold = None
        self._post(fetch.source, Revoke(fetch.at_source))
