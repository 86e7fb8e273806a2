"""`SourceTransfer`: one transfer at the worker that computed the blocks. Runs in the asyncio thread.

The life of a transfer here:

1. OPEN: the prefill call has announced it, and the receiver must attach within `attach_timeout_s`; or its receiver has asked for
   blocks of the prefix cache, which are final, and its result is known.
2. The first stream fixes the digest algorithm and the head groups. A later stream replaces the earlier one, and continues after the
   blocks that have landed.
3. `want`: the receiver has reserved blocks; the engine begins to settle the prompt's blocks from there on.
4. `settled`: the grant admits reads of these blocks, and the stream publishes their digests.
5. COMPLETE: all wanted blocks are published and the prefill has its result, which the stream sends.
6. `release`: the receiver has all blocks (RELEASED).

A transfer expires if no receiver attaches in time, if its stream stays broken for longer than `grace_s`, or when its lease ends. It
also ends with the prefill call (CANCELLED), a drain (REVOKED) or an error of the engine (FAILED). After any end the grant is fenced
before the blocks are returned.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pdserve.common import clock
from pdserve.common.errors import PdServeError, TransferFailed
from pdserve.common.kv_layout import KvLayout
from pdserve.common.security.block_digest import BlockDigest
from pdserve.kv_transfer.connector import Grant
from pdserve.kv_transfer.connector_set import ConnectorSet, Grants
from pdserve.kv_transfer.control.transfer_state import SOURCE_MOVES, SourceState, has_ended, move
from pdserve.kv_transfer.heads.group_digest import places_by_shape
from pdserve.kv_transfer.heads.head_groups import HeadGroup
from pdserve.kv_transfer.memory.pool_memory import number_runs
from pdserve.kv_transfer.pull.read_grants import TOKEN_BYTES

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerId:
    """One epoch of one worker."""

    worker_id: str
    epoch: int

    @property
    def key(self) -> tuple[str, int]:
        """(worker_id, epoch), the router's `WorkerKey`."""
        return self.worker_id, self.epoch

    def __str__(self) -> str:
        return f"{self.worker_id}:{self.epoch:016x}"


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Seconds for which blocks are kept for a peer."""

    attach_timeout_s: float
    grace_s: float
    max_s: float


class TransferTarget(msgspec.Struct, frozen=True):
    """The only worker that may read the blocks of a sequence, and the transfer by which it gets them."""

    transfer_id: bytes
    receiver: PeerId
    lease_s: float


class ExpectedTransfer(msgspec.Struct, frozen=True, tag=True):
    """A transfer before its first stream: its reader and its request."""

    transfer_id: bytes
    request_id: str
    """The engine's id of the sequence that computes the blocks, or of what it has looked up."""
    receiver: PeerId
    request_digest: bytes
    lease_s: float
    num_blocks: int
    """Number of the prompt's blocks that a receiver may want, the length of its `TransferOrder`; a `Want` beyond it fails the
    transfer."""
    draft_head: str = ""
    """`KvLayout.draft_head` of the groups that are moved, by which their blocks are numbered."""
    num_cached_blocks: int = 0
    """Of blocks from the prefix cache: places from the first that it has; 0: the blocks are a prefill call's."""

    @classmethod
    def of_tokens(
        cls,
        target: TransferTarget,
        request_id: str,
        request_digest: bytes,
        layout: KvLayout,
        num_tokens: int,
        *,
        without_draft_head: bool,
    ) -> ExpectedTransfer:
        """Of all blocks of a sequence's first tokens. layout: of the worker that has them."""
        moved = layout.moved(without_draft_head=without_draft_head)
        return cls(
            target.transfer_id,
            request_id,
            target.receiver,
            request_digest,
            target.lease_s,
            len(moved.transfer_order(num_tokens)),
            moved.draft_head,
        )


@dataclass(frozen=True, slots=True)
class PublishedRange:
    """Final blocks, in order."""

    first_index: int
    digests: tuple[tuple[int, ...], ...]
    """Per block one; with head groups, one for each group of its shape."""
    blocks: tuple[int, ...]
    """Numbers in the pools of their shapes."""


@dataclass(frozen=True, slots=True)
class SourceResult:
    """The result of the prefill."""

    num_tokens: int
    token_ids: tuple[int, ...]
    """The first output token of each of the request's sequences, in the order of their indexes."""


class SourceStream(Protocol):
    """The transfer's interface to the control stream."""

    def published(self, blocks: PublishedRange) -> None: ...

    def finished(self, result: SourceResult, request_digest: bytes) -> None: ...

    def replaced(self) -> None:
        """End this stream, because another stream of the receiver replaces it. The last call."""

    def ended(self, state: SourceState, cause: PdServeError | None) -> None:
        """The transfer has ended. The last call."""


class SourceEvents(Protocol):
    """Events for the owner of the blocks."""

    async def look_up(self, request_id: str, block_hashes: tuple[bytes, ...]) -> int:
        """How many of these first blocks of a sequence the prefix cache has. request_id: of the transfer that will move them."""

    def began(self, transfer: SourceTransfer) -> None:
        """A transfer of what `look_up` has found begins."""

    def wanted(self, transfer: SourceTransfer, first_index: int) -> None:
        """The receiver has reserved blocks from `first_index` on; called once."""

    def ended(self, transfer: SourceTransfer) -> None:
        """The transfer has ended and is fenced, so its blocks may be reused; called once."""


class SourceTransfer:
    """One transfer at the source. Owned by `SourceTransfers`."""

    def __init__(
        self, expected: ExpectedTransfer, connectors: ConnectorSet, limits: LeaseLimits, events: SourceEvents
    ) -> None:
        self.expected = expected
        self.state = SourceState.OPEN
        self.cause: PdServeError | None = None
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.over: asyncio.Future[SourceState] = asyncio.get_running_loop().create_future()
        self.num_landed = 0
        self.recomputes = False
        """True while the prompt is computed again for the receiver, which asked for its blocks after they were reused."""
        self.connector_name = ""
        """The connector of the last `Accepted`."""
        self.digest: BlockDigest | None = None
        """Algorithm of the blocks' digests, fixed by the first stream."""
        self.began_at = clock.monotonic()
        self._limits = limits
        self._events = events
        self.groups: tuple[HeadGroup, ...] = ()
        """Head groups, fixed by the first stream; empty: whole blocks of rank 0."""
        self.group_tokens: tuple[bytes, ...] = ()
        """One per group."""
        self.is_divided = False
        """True after `divide`."""
        self._connectors = connectors
        self._grant: Grant = connectors.grant(self.token)
        self._group_grants: list[Grant] = []
        self._stream: SourceStream | None = None
        self._wanted: tuple[int, int] | None = None
        self._published: list[PublishedRange] = []
        self._result: SourceResult | None = None
        self._loop = asyncio.get_running_loop()
        self._lease_end = self._loop.call_later(
            min(expected.lease_s, limits.max_s), self._expire, "the lease has run out"
        )
        self._patience = self._loop.call_later(limits.attach_timeout_s, self._expire, "no receiver attached")

    @property
    def has_ended(self) -> bool:
        return has_ended(SOURCE_MOVES, self.state)

    @property
    def is_wanted(self) -> bool:
        return self._wanted is not None

    @property
    def num_wanted(self) -> int:
        """Number of wanted blocks; 0 before `Want`."""
        return 0 if self._wanted is None else self._wanted[1]

    # ---- the control stream

    def divide(self, groups: tuple[HeadGroup, ...]) -> None:
        """Fix the head groups by the first stream. Raises: TransferFailed if a later stream has other groups."""
        if self.is_divided:
            if groups != self.groups:
                raise TransferFailed(
                    f"the transfer moves {len(self.groups) or 1} head groups, this stream asks for {len(groups) or 1}"
                )
            return
        self.is_divided, self.groups = True, groups
        self.group_tokens = tuple(secrets.token_bytes(TOKEN_BYTES) for _ in groups)
        self._group_grants = [
            self._connectors.of_part(group.source).grant(token, group.source.parts)
            for group, token in zip(groups, self.group_tokens, strict=True)
        ]

    def attach(self, stream: SourceStream, have: int) -> None:
        """Attach the receiver's stream; it replaces an older one and continues after `have` landed blocks."""
        if self._stream is not None:
            self._stream.replaced()
        self._stream = stream
        self._patience.cancel()
        if self._wanted is None:
            return
        start = self._wanted[0] + have
        for blocks in self._published:
            if blocks.first_index + len(blocks.blocks) > start:
                stream.published(blocks)
        self._notify_finished()

    def detach(self, stream: SourceStream, why: str) -> None:
        """Handle a broken stream: the receiver has `grace_s` to attach again."""
        if self._stream is stream and not self.has_ended:
            self._stream = None
            self._patience.cancel()
            self._patience = self._loop.call_later(
                self._limits.grace_s, self._expire, f"the control stream broke: {why}"
            )

    def want(self, first_index: int, num_blocks: int) -> None:
        """Handle `Want`. Only the first one counts; later ones are dropped.

        A `Want` beyond the prompt ends the transfer, since those blocks will never exist.
        """
        if self._wanted is None and not self.has_ended:
            if first_index + num_blocks > self.expected.num_blocks:
                limit = f"together at most {self.expected.num_blocks}, the prompt's blocks, are possible"
                self.fail(
                    TransferFailed(f"Want.first_index is {first_index}, Want.num_blocks is {num_blocks}: {limit}")
                )
                return
            self._wanted = (first_index, num_blocks)
            self._events.wanted(self, first_index)
            self._complete_if_done()

    def landed(self, num_blocks: int) -> None:
        self.num_landed = max(self.num_landed, min(num_blocks, self.num_wanted))

    def release(self) -> None:
        """Handle `Release`: the receiver has all blocks if the transfer is COMPLETE, else it has given up."""
        if self.state is SourceState.COMPLETE:
            self.landed(self.num_wanted)
            self._end(SourceState.RELEASED, None)
        else:
            self._end(SourceState.CANCELLED, None)

    # ---- the engine

    def permit(self, first_index: int, blocks: Sequence[int], shapes: Sequence[int]) -> None:
        """Let the receiver read final blocks of all head groups. Safe from any thread.

        blocks: numbers in the pools of their shapes.
        Call it before requesting the ranks' digests: a rank handles messages in order, so after its digests it admits the reads.
        """
        places = places_by_shape(shapes)
        for group, grant in zip(self.groups, self._group_grants, strict=True):
            for start, count in number_runs(places.get(group.source.shape, [])):
                grant.publish(first_index + start, group.source.numbers(blocks[start : start + count]))

    def settled(self, first_index: int, blocks: Sequence[int], digests: Sequence[tuple[int, ...]]) -> None:
        """Publish final blocks to the receiver, with head groups after `permit`. Arguments: as in `PublishedRange`."""
        published = PublishedRange(first_index, tuple(digests), tuple(blocks))
        if not self.groups:
            self._grant.publish(first_index, blocks)
        self._published.append(published)
        self.recomputes = False
        if self._stream is not None:
            self._stream.published(published)
        self._complete_if_done()

    def computed(self, result: SourceResult) -> None:
        """Send the result of the prefill; a second result, of a repeated prefill, is dropped."""
        if self._result is None and not self.has_ended:
            self._result = result
            self._complete_if_done()

    def _complete_if_done(self) -> None:
        if self.state is not SourceState.OPEN or self._result is None or self._wanted is None:
            return
        num_published = sum(len(blocks.blocks) for blocks in self._published)
        if num_published >= self._wanted[1]:
            self.state = move(SOURCE_MOVES, self.state, SourceState.COMPLETE)
            self._notify_finished()

    def _notify_finished(self) -> None:
        if self.state is SourceState.COMPLETE and self._result is not None and self._stream is not None:
            self._stream.finished(self._result, self.expected.request_digest)

    # ---- the end

    def cancel(self) -> None:
        """End the transfer, because the prefill call ended: the router has given up the attempt."""
        self._end(SourceState.CANCELLED, None)

    def revoke(self, cause: PdServeError) -> None:
        """End the transfer, because the source drains."""
        self._end(SourceState.REVOKED, cause)

    def fail(self, cause: PdServeError) -> None:
        """End the transfer, because the engine could not compute the prompt."""
        self._end(SourceState.FAILED, cause)

    def _expire(self, why: str) -> None:
        if not self.has_ended:
            log.warning("transfer of %s to %s expired: %s", self.expected.request_id, self.expected.receiver, why)
            self._end(SourceState.EXPIRED, TransferFailed(f"the lease ended: {why}"))

    def _end(self, state: SourceState, cause: PdServeError | None) -> None:
        if self.has_ended:
            return
        self.state = move(SOURCE_MOVES, self.state, state)
        self.cause = cause
        self._lease_end.cancel()
        self._patience.cancel()
        if self._stream is not None:
            self._stream.ended(state, cause)
            self._stream = None
        Grants([self._grant, *self._group_grants]).close(lambda: _call_soon(self._loop, self._fenced))
        if not self.over.done():
            self.over.set_result(state)

    def _fenced(self) -> None:
        self._events.ended(self)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call in the asyncio thread, from any thread; no effect if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        log.debug("the event loop has closed before a transfer was fenced")
