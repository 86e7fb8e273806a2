"""The control stream at the receiver, over gRPC: opened when the request arrives, and again after a break."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

import grpc

from pdserve.common import errors
from pdserve.common.errors import (
    InternalError,
    KeyMismatch,
    LayoutMismatch,
    PdServeError,
    PeerError,
    PermissionDenied,
    ProtocolMismatch,
    TransferFailed,
    WorkerLost,
    WrongWorker,
)
from pdserve.common.kv_layout import KvLayout
from pdserve.common.net.rpc import from_rpc_error, hides_status
from pdserve.common.net.service_channel import ATTACH, ServiceChannel, readable
from pdserve.common.rate_limited_log import RateLimitedLog
from pdserve.common.request.sampling_params import MOST_SEQUENCES
from pdserve.common.request.wire.messages import layout_to_wire
from pdserve.kv_transfer.control.attach_servicer import (
    MAX_CAUSE_CHARS,
    TICK_STALLED_S,
    AliveMessages,
    TickWatch,
    answer_parts,
)
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer
from pdserve.kv_transfer.control.source_transfer import PeerId
from pdserve.kv_transfer.control.transfer_state import ReceiverState
from pdserve.kv_transfer.heads.head_groups import GroupSource, RankPart, receiving_ranks
from pdserve.kv_transfer.pull.digest_rule import DigestRule
from pdserve.v1 import kv_source_pb2, prefill_pb2, request_pb2

log = logging.getLogger(__name__)
_warnings = RateLimitedLog(log)

REATTACH_EVERY_S = 0.2
_FINAL = (KeyMismatch, PeerError, ProtocolMismatch, WrongWorker)
"""Errors that another stream to the same source would repeat."""
_IN_ORDER = ("accepted", "published", "finished")
"""Events of which the first comes once, before the others."""
_Message = kv_source_pb2.AttachRequest | bytes
"""A message, or the serialized first message, whose bytes are signed."""
ANSWER_MARGIN_S = 1.0
"""Added to the receiver's time limit: the source waits equally long for its prefill call, and its answer takes time."""


@dataclass(frozen=True, slots=True)
class ReceiverInfo:
    """The worker's values that are the same for every attach."""

    identity: PeerId
    layout: KvLayout
    connectors: tuple[str, ...]
    """Best first."""
    engine_tick: Callable[[], int]
    attach_timeout_s: float
    """Seconds for the source to accept."""
    grace_s: float
    """Seconds after a break in which the stream is opened again."""
    digests: DigestRule


class _Requests:
    """A `ControlStream` that puts messages into a queue for gRPC."""

    def __init__(self, engine_tick: Callable[[], int]) -> None:
        self._engine_tick = engine_tick
        self._messages: asyncio.Queue[_Message | None] = asyncio.Queue()

    def say(self, message: _Message) -> None:
        self._messages.put_nowait(message)

    def want(self, first_index: int, num_blocks: int) -> None:
        self.say(kv_source_pb2.AttachRequest(want=kv_source_pb2.Want(first_index=first_index, num_blocks=num_blocks)))

    def landed(self, num_blocks: int) -> None:
        self.say(kv_source_pb2.AttachRequest(landed=kv_source_pb2.BlocksLanded(num_blocks=num_blocks)))

    def release(self) -> None:
        self.say(kv_source_pb2.AttachRequest(release=kv_source_pb2.Release()))
        self._messages.put_nowait(None)

    def close(self) -> None:
        self._messages.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[_Message]:
        heartbeat = AliveMessages[_Message | None](self._alive)
        while (message := await heartbeat.next(self._messages)) is not None:
            yield message

    def _alive(self) -> kv_source_pb2.AttachRequest:
        return kv_source_pb2.AttachRequest(alive=kv_source_pb2.Alive(engine_tick=self._engine_tick()))


async def attach(transfer: ReceiverTransfer, receiving: ReceiverInfo, channel: ServiceChannel) -> None:
    """Run a transfer's control stream until the transfer has ended. A peer's behaviour raises nothing."""
    if transfer.is_ending:
        return
    try:
        await _attach(transfer, receiving, channel)
    except Exception:
        log.exception("the control stream to source %s failed", transfer.source.worker_id)
        # otherwise the request would wait until its deadline
        transfer.fail(InternalError("internal error; the worker's log has the details"))


async def _attach(transfer: ReceiverTransfer, receiving: ReceiverInfo, channel: ServiceChannel) -> None:
    broken_since: float | None = None
    is_hidden = False
    ticks = TickWatch()
    loop = asyncio.get_running_loop()
    while True:
        before = (ticks.tick, receiving.engine_tick())
        why: PdServeError | None = None
        was_hidden, is_hidden = is_hidden, False
        try:
            await _one_stream(transfer, receiving, channel, ticks)
        except (WorkerLost, PeerError) as error:
            why = error
        except grpc.aio.AioRpcError as error:
            why = from_rpc_error(error)
            is_hidden = hides_status(error)
        except grpc.aio.UsageError as error:
            why = WorkerLost(f"its channel is closed: {error}")
        if transfer.is_ending:
            return
        if why is None:
            continue  # over another connector
        if isinstance(why, _FINAL):
            cause = TransferFailed(f"source {transfer.source.worker_id}: {why.message}")
            if isinstance(why, WrongWorker):
                transfer.source_lost(cause)
            else:
                transfer.fail(cause)
            return
        if ticks.tick != before[0] and receiving.engine_tick() != before[1]:
            broken_since = None  # both engines ran meanwhile, so this is a new break with its own grace
        is_new = broken_since is None
        broken_since = broken_since or loop.time()
        # another stream has the source's own status, unless that one too is hidden
        if loop.time() - broken_since > receiving.grace_s and (was_hidden or not is_hidden):
            transfer.source_lost(TransferFailed(f"source {transfer.source.worker_id} is lost: {why.message}"))
            return
        level = logging.WARNING if is_new else logging.DEBUG
        log.log(level, "control stream to source %s broke: %s", transfer.source.worker_id, why.message)
        await asyncio.sleep(REATTACH_EVERY_S)


async def _one_stream(
    transfer: ReceiverTransfer,
    receiving: ReceiverInfo,
    channel: ServiceChannel,
    ticks: TickWatch,
) -> None:
    """Run one stream from Open until the transfer ends, or needs a new stream for another connector.

    Raises: WorkerLost if the source closes the stream or stalls, PeerError for an invalid message, AioRpcError if the channel
    breaks.
    """
    loop = asyncio.get_running_loop()
    requests = _Requests(receiving.engine_tick)
    opening = _open(transfer, receiving)
    first = kv_source_pb2.AttachRequest(open=opening).SerializeToString()
    requests.say(first)
    transfer.opened(requests)
    # a source that has not accepted yet may wait for its prefill call
    is_new = transfer.state is ReceiverState.ATTACHING
    patience_s = receiving.attach_timeout_s + ANSWER_MARGIN_S if is_new else TICK_STALLED_S
    limit = loop.time() + patience_s
    call = channel.stream_stream(ATTACH, first)
    writing = asyncio.create_task(_write(call, requests))
    accepted = False
    try:
        while True:
            try:
                async with asyncio.timeout_at(limit):
                    message = await call.read()
            except TimeoutError:
                raise WorkerLost(f"the source has sent nothing for {patience_s:.0f} s") from None
            if message is grpc.aio.EOF:
                if transfer.is_ending or (accepted and transfer.wants_attach):
                    return
                raise WorkerLost("the source closed the control stream")
            event = readable(cast(kv_source_pb2.AttachEvent, message))
            kind = event.WhichOneof("event")
            if (kind == "accepted") == accepted and kind in _IN_ORDER:
                raise PeerError(f"{kind} came {'again' if kind == 'accepted' else 'before accepted'}")
            match kind:
                case "accepted":
                    accepted = True
                    ticks.start()
                    answer = event.accepted
                    source = transfer.source
                    try:
                        groups = accepted_groups(answer, _moved(transfer, receiving))
                    except TransferFailed as error:
                        transfer.fail(error)
                        return
                    proof = receiving.digests.answer_proof(source.transfer_id, source.epoch, answer_parts(answer))
                    if not hmac.compare_digest(answer.proof, proof):
                        transfer.fail(TransferFailed("who answers for the source does not have the deployment key"))
                        return
                    for what, chosen, offered in (
                        ("connector", answer.connector, opening.connectors),
                        ("digest algorithm", answer.digest_algorithm, opening.digest_algorithms),
                    ):
                        if chosen not in offered:
                            problem = f"the source chose the {what} {chosen[:64]!r}, which was not asked for"
                            transfer.fail(TransferFailed(problem))
                            return
                    digest = receiving.digests.make(answer.digest_algorithm, transfer.source.transfer_id, answer.token)
                    transfer.attached(requests, answer.connector, groups, digest)
                    if source.block_hashes:
                        transfer.offered(answer.num_blocks)
                case "published":
                    if (problem := _out_of_range(transfer, event.published)) and not transfer.is_ending:
                        transfer.fail(TransferFailed(problem))
                        return
                    transfer.published(event.published.first_index, event.published.digests, event.published.locations)
                    if event.published.HasField("finished"):
                        _finish(transfer, event.published.finished)
                case "finished":
                    _finish(transfer, event.finished)
                case "alive":
                    ticks.saw(event.alive.engine_tick)
                    transfer.source_recomputes = event.alive.recomputes
                case "revoked":
                    cause = event.revoked.cause[:MAX_CAUSE_CHARS]
                    transfer.fail(TransferFailed(f"the source gave the transfer up: {cause}"))
                    return
                case "failed":
                    transfer.fail(_failure(event.failed.error))
                    return
                case other:
                    source_id = transfer.source.worker_id
                    _warnings.warning(source_id, "an unexpected %s came from %s: dropped", other, source_id)
            if accepted and ticks.stalled:
                raise WorkerLost(f"the source's engine has made no progress for {TICK_STALLED_S:.0f} s")
            if accepted and not transfer.is_ending:  # one limit for all remaining messages of an ending transfer
                patience_s = TICK_STALLED_S
                limit = loop.time() + patience_s
    finally:
        transfer.detached(requests)
        call.cancel()
        writing.cancel()


async def _write(call: grpc.aio.StreamStreamCall[Any, Any], requests: _Requests) -> None:
    """Write the messages until `requests` has ended or the call has.

    grpc.aio would read an iterator in a task of its own, which it forgets when a call ends before it is connected: that task
    waits until the garbage collector destroys it.
    """
    # the reader gets the status
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for message in requests:
            await call.write(message)
        await call.done_writing()


def _moved(transfer: ReceiverTransfer, receiving: ReceiverInfo) -> KvLayout:
    """Layout of the groups that the transfer moves."""
    return receiving.layout.moved(without_draft_head=transfer.source.without_draft_head)


def accepted_groups(answer: kv_source_pb2.Accepted, layout: KvLayout) -> tuple[GroupSource, ...]:
    """The places of a source's head groups, and their targets here. layout: of this worker. Raises: TransferFailed."""
    named, num_heads = answer.head_groups, sum(shape.total_num_kv_heads for shape in layout.shapes)
    if len(named) > num_heads:
        raise TransferFailed(f"the source names {len(named)} groups of {num_heads} KV heads")
    if not named:
        whole = receiving_ranks(layout, [(0, 0, layout.shapes[0].total_num_kv_heads)])
        return (GroupSource(answer.metadata, answer.token, receivers=whole[0]),)
    receivers = receiving_ranks(layout, [(group.shape, group.first_head, group.num_heads) for group in named])
    for group in named:
        if not group.part < group.parts <= num_heads:
            raise TransferFailed(f"the source sends a head group as part {group.part} of {group.parts} parts")
    return tuple(
        GroupSource(group.metadata, group.token, RankPart(group.tp_rank, group.parts, group.part, group.shape), ranks)
        for group, ranks in zip(named, receivers, strict=True)
    )


def _out_of_range(transfer: ReceiverTransfer, published: kv_source_pb2.Published) -> str:
    """Why no honest source publishes these; "" if one may. One that is slow may publish what is not wanted any more."""
    end = transfer.wanted_end
    if end is None:
        return "the source published blocks before they were wanted"
    if published.first_index > end:
        return f"the source published blocks from first_index {published.first_index} on, where those below {end} were wanted"
    return ""


def _finish(transfer: ReceiverTransfer, finished: kv_source_pb2.Finished) -> None:
    num_tokens = [len(outputs.token_ids) for outputs in finished.first_outputs[: MOST_SEQUENCES + 1]]
    if len(num_tokens) > MOST_SEQUENCES or any(num != 1 for num in num_tokens):
        counts = f"{len(finished.first_outputs)} sequences, of which the first have {num_tokens[:4]} tokens"
        limit = f"one token of each is needed, for at most {MOST_SEQUENCES}"
        transfer.fail(TransferFailed(f"the source finished with {counts}: {limit}"))
        return
    tokens = tuple(outputs.token_ids[0] for outputs in finished.first_outputs)
    transfer.finished(finished.num_tokens, finished.request_digest, tokens)


def _failure(error: request_pb2.Error) -> PdServeError:
    """The source's error, which concerns only the transfer, neither the request nor this worker's engine."""
    cause = errors.from_code(error.code, error.message[:MAX_CAUSE_CHARS])
    if isinstance(cause, TransferFailed | LayoutMismatch | PermissionDenied):
        return cause
    return TransferFailed(f"the source failed with {cause.code}: {cause.message}")


def _open(transfer: ReceiverTransfer, receiving: ReceiverInfo) -> kv_source_pb2.Open:
    receiver = prefill_pb2.Receiver(worker_id=receiving.identity.worker_id, epoch=receiving.identity.epoch)
    return kv_source_pb2.Open(
        transfer_id=transfer.source.transfer_id,
        source_epoch=transfer.source.epoch,
        receiver=receiver,
        request_digest=transfer.source.request_digest,
        layout=layout_to_wire(_moved(transfer, receiving)),
        digest_algorithms=receiving.digests.allowed(transfer.source.address),
        connectors=[name for name in receiving.connectors if name not in transfer.given_up],
        have=transfer.num_landed,
        block_hashes=b"".join(transfer.source.block_hashes),
    )
