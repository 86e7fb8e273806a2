"""`AttachServicer`: the control stream at the source, over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

from pdserve.common import clock
from pdserve.common.address.peer_address import peer_host, verify_worker_id
from pdserve.common.block_hash import BLOCK_HASH_BYTES
from pdserve.common.errors import InvalidRequest, LayoutMismatch, PdServeError, TransferFailed
from pdserve.common.kv_layout import KvLayout
from pdserve.common.method_handler import Context
from pdserve.common.rate_limited_log import RateLimitedLog
from pdserve.common.request.wire.messages import layout_from_wire
from pdserve.common.security.role_guard import CallerRoles
from pdserve.common.security.tls_roles import WORKERS, ServiceRole
from pdserve.kv_transfer.connector import BlockConnector
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.source_transfer import PeerId, PublishedRange, SourceResult, SourceTransfer
from pdserve.kv_transfer.control.source_transfers import AttachedTooLate, NothingCached, SourceTransfers
from pdserve.kv_transfer.control.transfer_state import SourceState
from pdserve.kv_transfer.heads.head_groups import HeadGroup, head_groups
from pdserve.kv_transfer.pull.digest_rule import DigestRule
from pdserve.v1 import kv_source_pb2, kv_source_pb2_grpc, request_pb2

log = logging.getLogger(__name__)

ALIVE_EVERY_S = 0.5
"""Six per `TICK_STALLED_S`: a peer that is suspended for 2 s just before its next `Alive` is not late."""
TICK_STALLED_S = 3.0
OPEN_TIMEOUT_S = 5.0
MAX_DIGESTS_A_MESSAGE = 65_536
MAX_NAMES = 16
"""Limit of digest algorithms and of connectors in an `Open`."""
MAX_CAUSE_CHARS = 2000
"""Limit of characters of the text of a peer's failure."""


Message = TypeVar("Message")


class AliveMessages(Generic[Message]):
    """Inserts an `Alive` between other messages whenever one is due, so that frequent messages do not delay it."""

    def __init__(self, make_alive: Callable[[], Message]) -> None:
        self._make_alive = make_alive
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + ALIVE_EVERY_S

    async def next(self, messages: asyncio.Queue[Message]) -> Message:
        """The next message, or an `Alive` if that is due first."""
        if self._loop.time() < self._due:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._due):
                    return await messages.get()
        self._due = self._loop.time() + ALIVE_EVERY_S
        return self._make_alive()


class TickWatch:
    """Detects a peer whose engine makes no progress although its process responds."""

    def __init__(self) -> None:
        self.tick = -1
        """The last tick received; -1 before the first."""
        self._since = clock.monotonic()

    def saw(self, tick: int) -> None:
        if tick != self.tick:
            self.tick, self._since = tick, clock.monotonic()

    def start(self) -> None:
        """Start the clock; ticks cannot be expected earlier."""
        self._since = clock.monotonic()

    @property
    def stalled(self) -> bool:
        return clock.monotonic() - self._since > TICK_STALLED_S


class _EventQueue:
    """A `SourceStream` that puts events into a queue of messages; None ends the stream."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[kv_source_pb2.AttachEvent | None] = asyncio.Queue()
        self._last_published: kv_source_pb2.AttachEvent | None = None
        """The last message of blocks; while it is queued, the transfer's end may be added to it."""

    def published(self, blocks: PublishedRange) -> None:
        at_once = max(1, MAX_DIGESTS_A_MESSAGE // max(map(len, blocks.digests), default=1))
        for start in range(0, len(blocks.blocks), at_once):
            end = start + at_once
            message = kv_source_pb2.Published(
                first_index=blocks.first_index + start,
                digests=chain.from_iterable(blocks.digests[start:end]),
                locations=blocks.blocks[start:end],
            )
            self._last_published = kv_source_pb2.AttachEvent(published=message)
            self.messages.put_nowait(self._last_published)

    def finished(self, result: SourceResult, request_digest: bytes) -> None:
        outputs = [request_pb2.Outputs(index=index, token_ids=[token]) for index, token in enumerate(result.token_ids)]
        message = kv_source_pb2.Finished(
            num_tokens=result.num_tokens, request_digest=request_digest, first_outputs=outputs
        )
        if self._last_published is not None and not self.messages.empty():
            # the message is still queued; a separate one would arrive after the receiver has read the blocks
            self._last_published.published.finished.CopyFrom(message)
        else:
            self.messages.put_nowait(kv_source_pb2.AttachEvent(finished=message))

    def replaced(self) -> None:
        self.messages.put_nowait(None)

    def ended(self, state: SourceState, cause: PdServeError | None) -> None:
        if state is SourceState.REVOKED:
            revoked = kv_source_pb2.Revoked(cause=cause.message if cause else "")
            self.messages.put_nowait(kv_source_pb2.AttachEvent(revoked=revoked))
        elif state is not SourceState.RELEASED:
            self.messages.put_nowait(_failed_event(cause or TransferFailed("the source's request was cancelled")))
        self.messages.put_nowait(None)


def _failed_event(error: PdServeError) -> kv_source_pb2.AttachEvent:
    message = error.message[:MAX_CAUSE_CHARS]
    wire = request_pb2.Error(code=error.code, message=message, retryable=error.retryable)
    return kv_source_pb2.AttachEvent(failed=kv_source_pb2.Failed(error=wire))


async def _opening_of(requests: AsyncIterator[kv_source_pb2.AttachRequest]) -> kv_source_pb2.Open:
    """The first message. Raises: TransferFailed when none arrives in time, or another one."""
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            first = await anext(requests)
    except StopAsyncIteration:
        # decode closes the stream if its cache has enough of the prompt
        raise AttachedTooLate("no Open arrived: the receiver closed the stream") from None
    except TimeoutError:
        raise TransferFailed("no Open arrived") from None
    if first.WhichOneof("message") != "open":
        raise TransferFailed("the first message is not Open")
    return first.open


def _log_refusal(error: PdServeError) -> None:
    level = logging.DEBUG if isinstance(error, AttachedTooLate | NothingCached) else logging.WARNING
    log.log(level, "an attach was refused: %s", error.message[:MAX_CAUSE_CHARS])


def _verify_open(request: kv_source_pb2.Open) -> None:
    """Check the counts and the receiver's identity. Raises: InvalidRequest."""
    for name in ("digest_algorithms", "connectors"):
        if (num := len(getattr(request, name))) > MAX_NAMES:
            raise InvalidRequest(f"open.{name} has {num} names, at most {MAX_NAMES} are read", name)
    verify_worker_id("open.receiver.worker_id", request.receiver.worker_id)


def answer_parts(accepted: kv_source_pb2.Accepted) -> list[bytes]:
    """The fields that an answer's proof covers."""
    parts = [accepted.connector.encode(), accepted.digest_algorithm.encode(), accepted.metadata, accepted.token]
    parts.append(accepted.num_blocks.to_bytes(4, "big"))
    for group in accepted.head_groups:
        numbers = (group.shape, group.first_head, group.num_heads, group.tp_rank, group.parts, group.part)
        parts += [b"".join(number.to_bytes(4, "big") for number in numbers), group.metadata, group.token]
    return parts


@dataclass(eq=False)
class AttachServicer(kv_source_pb2_grpc.KvSourceServiceServicer):
    """Serves `KvSourceService` over the transfers of this worker."""

    _transfers: SourceTransfers
    _connectors: ConnectorSet
    _layout: KvLayout
    _epoch: int
    _engine_tick: Callable[[], int]
    _digests: DigestRule
    _callers: CallerRoles
    _warnings: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(log), init=False)

    async def Attach(
        self, requests: AsyncIterator[kv_source_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[kv_source_pb2.AttachEvent]:
        stream = _EventQueue()
        incoming = aiter(requests)
        try:
            transfer, connector = await self._open(incoming, stream, context)
        except PdServeError as error:
            _log_refusal(error)
            yield _failed_event(error)
            return
        reader = asyncio.create_task(self._read(incoming, transfer, stream), name="attach reader")
        heartbeat = AliveMessages[kv_source_pb2.AttachEvent | None](lambda: self._alive(transfer))
        try:
            yield self._accepted(transfer, connector)
            while True:
                message = await heartbeat.next(stream.messages)
                if message is None:
                    return
                yield message
        finally:
            reader.cancel()
            transfer.detach(stream, "it was closed")

    async def _open(
        self,
        requests: AsyncIterator[kv_source_pb2.AttachRequest],
        stream: _EventQueue,
        context: Context,
    ) -> tuple[SourceTransfer, BlockConnector]:
        """Check the first message, find its transfer, and choose the connector. Raises: PdServeError."""
        request = await _opening_of(requests)
        roles = WORKERS if request.block_hashes else (ServiceRole.DECODE,)
        self._callers.verify(context, roles, request.receiver.worker_id)
        if request.source_epoch != self._epoch:
            raise TransferFailed("the transfer belongs to another epoch of this worker")
        _verify_open(request)
        receiver_layout = layout_from_wire(request.layout)
        groups = self._groups(receiver_layout)
        algorithm = self._digests.choose(request.digest_algorithms, peer_host(context.peer()))
        connector = self._connectors.choose(request.connectors)
        if connector is None:
            here, there = ", ".join(self._connectors.names), ", ".join(request.connectors)
            raise TransferFailed(f"no common connector: {here} here, {there or 'none'} there")
        receiver = PeerId(request.receiver.worker_id, request.receiver.epoch)
        if request.block_hashes:
            await self._look_up(request, receiver, receiver_layout)
        transfer = await self._transfers.attach(
            request.transfer_id,
            receiver,
            request.request_digest,
            stream,
            request.have,
            groups,
            receiver_layout.draft_head,
        )
        self._agree_on_digest(transfer, algorithm, request, stream)
        return transfer, connector

    async def _look_up(self, request: kv_source_pb2.Open, receiver: PeerId, receiver_layout: KvLayout) -> None:
        """Begin the transfer of the blocks that the prefix cache has. Raises: PdServeError."""
        layout, hashes = self._layout, request.block_hashes
        if len(hashes) % BLOCK_HASH_BYTES:
            raise InvalidRequest(
                f"open.block_hashes has {len(hashes)} bytes, no multiple of {BLOCK_HASH_BYTES}", "block_hashes"
            )
        if not layout.has_draft_head_of(receiver_layout):
            here, there = layout.draft_head or "none", receiver_layout.draft_head[:64] or "none"
            raise TransferFailed(f"cached blocks have those of a draft head with them: {here} here, {there} there")
        await self._transfers.look_up(
            request.transfer_id,
            receiver,
            request.request_digest,
            tuple(hashes[start : start + BLOCK_HASH_BYTES] for start in range(0, len(hashes), BLOCK_HASH_BYTES)),
            lambda num_places: len(layout.transfer_order(num_places * layout.block_size)),
            layout.draft_head,
        )

    def _groups(self, receiver: KvLayout) -> tuple[HeadGroup, ...]:
        """The transfer's head groups; empty for whole blocks of one shape and one rank on both sides. Raises: LayoutMismatch.

        receiver: layout of the groups that it expects.
        """
        if differences := self._layout.differences(receiver):
            raise LayoutMismatch(f"KV layouts differ (source != receiver): {'; '.join(differences)}")
        if self._layout.tp_size == receiver.tp_size == len(self._layout.shapes) == 1:
            return ()
        others = not self._layout.has_draft_head_of(receiver)
        return head_groups(self._layout.moved(without_draft_head=others), receiver.moved(without_draft_head=others))

    def _agree_on_digest(
        self, transfer: SourceTransfer, algorithm: str, request: kv_source_pb2.Open, stream: _EventQueue
    ) -> None:
        """Keep the first stream's algorithm, since published blocks have its digests. Raises: TransferFailed."""
        if transfer.digest is None:
            transfer.digest = self._digests.make(algorithm, request.transfer_id, transfer.token)
        elif transfer.digest.name not in request.digest_algorithms:
            transfer.detach(stream, "it wants another digest algorithm")
            raise TransferFailed(f"the transfer's digests are {transfer.digest.name}, which this stream did not offer")

    def _alive(self, transfer: SourceTransfer) -> kv_source_pb2.AttachEvent:
        alive = kv_source_pb2.Alive(engine_tick=self._engine_tick(), recomputes=transfer.recomputes)
        return kv_source_pb2.AttachEvent(alive=alive)

    def _accepted(self, transfer: SourceTransfer, connector: BlockConnector) -> kv_source_pb2.AttachEvent:
        transfer.connector_name = connector.name
        accepted = kv_source_pb2.Accepted(
            connector=connector.name,
            digest_algorithm=transfer.digest.name if transfer.digest is not None else "",
            metadata=connector.metadata,
            token=transfer.token,
            num_blocks=transfer.expected.num_cached_blocks,
        )
        for group, token in zip(transfer.groups, transfer.group_tokens, strict=True):
            rank, parts, part, shape = group.source
            metadata = self._connectors.of_part(group.source).metadata(connector.name)
            accepted.head_groups.add(
                shape=shape,
                first_head=group.first_head,
                num_heads=group.num_heads,
                tp_rank=rank,
                parts=parts,
                part=part,
                metadata=metadata,
                token=token,
            )
        transfer_id = transfer.expected.transfer_id
        accepted.proof = self._digests.answer_proof(transfer_id, self._epoch, answer_parts(accepted))
        return kv_source_pb2.AttachEvent(accepted=accepted)

    async def _read(
        self, requests: AsyncIterator[kv_source_pb2.AttachRequest], transfer: SourceTransfer, stream: _EventQueue
    ) -> None:
        """Process the receiver's messages until it releases, disconnects or stalls; then end the stream."""
        ticks = TickWatch()
        why = "the receiver closed it"
        try:
            while True:
                async with asyncio.timeout(TICK_STALLED_S):
                    message = await anext(requests)
                match message.WhichOneof("message"):
                    case "want":
                        transfer.want(message.want.first_index, message.want.num_blocks)
                    case "landed":
                        transfer.landed(message.landed.num_blocks)
                    case "alive":
                        ticks.saw(message.alive.engine_tick)
                    case "release":
                        transfer.release()
                        return
                    case other:
                        receiver = transfer.expected.receiver
                        self._warnings.warning(str(receiver), "an unexpected %s came from %s: dropped", other, receiver)
                if ticks.stalled:
                    why = f"the receiver's engine has made no progress for {TICK_STALLED_S:.0f} s"
                    break
        except StopAsyncIteration:
            pass
        except TimeoutError:
            why = f"nothing arrived for {TICK_STALLED_S:.0f} s"
        except Exception as error:  # gRPC raises various errors when the peer disconnects; they end only this stream
            why = f"it broke: {type(error).__name__}"
        transfer.detach(stream, why)
        stream.messages.put_nowait(None)
