"""The control stream at the receiver, over gRPC: opened when the request arrives, opened again when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import cast

import grpc

from pdserve.common import errors
from pdserve.common.errors import PdServeError, TransferFailed, WorkerLost
from pdserve.common.kv_layout import KvLayout
from pdserve.common.rpc import from_rpc_error
from pdserve.common.wire import layout_to_wire
from pdserve.kv_transfer.attach_servicer import TICK_STALLED_S, Heartbeat, TickWatch
from pdserve.kv_transfer.digest import XXH3_64
from pdserve.kv_transfer.receiver_transfer import ReceiverTransfer
from pdserve.kv_transfer.source_transfer import PeerId
from pdserve.v1 import kv_source_pb2, kv_source_pb2_grpc, prefill_pb2

log = logging.getLogger(__name__)

REATTACH_EVERY_S = 0.2
ANSWER_MARGIN_S = 1.0
"""The source waits as long for its prefill leg as the receiver for the source: its answer should still be heard."""


@dataclass(frozen=True, slots=True)
class Receiving:
    """What every attach of this worker says."""

    identity: PeerId
    layout: KvLayout
    connectors: tuple[str, ...]
    """Best first."""
    engine_tick: Callable[[], int]
    attach_timeout_s: float
    """How long the source may take to accept."""
    grace_s: float
    """How long a broken stream is opened again and again."""


class _Requests:
    """A `ControlStream`: what is said goes into a queue that gRPC reads."""

    def __init__(self, engine_tick: Callable[[], int]) -> None:
        self._engine_tick = engine_tick
        self._messages: asyncio.Queue[kv_source_pb2.AttachRequest | None] = asyncio.Queue()

    def say(self, message: kv_source_pb2.AttachRequest) -> None:
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

    async def __aiter__(self) -> AsyncIterator[kv_source_pb2.AttachRequest]:
        heartbeat = Heartbeat[kv_source_pb2.AttachRequest | None](self._alive)
        while (message := await heartbeat.next(self._messages)) is not None:
            yield message

    def _alive(self) -> kv_source_pb2.AttachRequest:
        return kv_source_pb2.AttachRequest(alive=kv_source_pb2.Alive(engine_tick=self._engine_tick()))


async def attach(transfer: ReceiverTransfer, receiving: Receiving, channel: grpc.aio.Channel) -> None:
    """Carry a transfer's control stream until the transfer has ended. Never raises for what a peer does."""
    broken_since: float | None = None
    ticks = TickWatch()
    loop = asyncio.get_running_loop()
    stub = kv_source_pb2_grpc.KvSourceServiceStub(channel)
    while True:
        before = (ticks.tick, receiving.engine_tick())
        try:
            if await _one_stream(transfer, receiving, stub, ticks) or transfer.is_ending:
                return
            if transfer.wants_attach:
                continue
            why: PdServeError = WorkerLost("the source closed the control stream")
        except grpc.aio.AioRpcError as error:
            why = from_rpc_error(error)
        except TimeoutError:
            why = WorkerLost(f"the source has said nothing for {TICK_STALLED_S:.0f} s")
        if transfer.is_ending:
            return
        if ticks.tick != before[0] and receiving.engine_tick() != before[1]:
            broken_since = None  # both engines ran meanwhile, so this is another break, with a grace of its own
        broken_since = broken_since or loop.time()
        if loop.time() - broken_since > receiving.grace_s:
            transfer.source_lost(TransferFailed(f"source {transfer.source.worker_id} is lost: {why.message}"))
            return
        log.warning("control stream to source %s broke: %s", transfer.source.worker_id, why.message)
        await asyncio.sleep(REATTACH_EVERY_S)


async def _one_stream(
    transfer: ReceiverTransfer,
    receiving: Receiving,
    stub: kv_source_pb2_grpc.KvSourceServiceAsyncStub,
    ticks: TickWatch,
) -> bool:
    """One stream from Open to its end; True when the transfer needs no other."""
    requests = _Requests(receiving.engine_tick)
    requests.say(kv_source_pb2.AttachRequest(open=_open(transfer, receiving)))
    call = stub.Attach(aiter(requests))
    accepted = False
    try:
        while True:
            # before Accepted the source may still be waiting for its prefill leg
            answer_s = receiving.attach_timeout_s + ANSWER_MARGIN_S
            async with asyncio.timeout(TICK_STALLED_S if accepted else answer_s):
                message = await call.read()
            if message is grpc.aio.EOF:
                return transfer.is_ending
            event = cast(kv_source_pb2.AttachEvent, message)
            match event.WhichOneof("event"):
                case "accepted":
                    accepted = True
                    ticks.start()
                    answer = event.accepted
                    transfer.attached(requests, answer.connector, answer.metadata, answer.token)
                case "published":
                    transfer.published(event.published.first_index, event.published.digests, event.published.locations)
                case "finished":
                    tokens = tuple(token for outputs in event.finished.first_outputs for token in outputs.token_ids)
                    transfer.finished(event.finished.num_tokens, event.finished.request_digest, tokens)
                case "alive":
                    ticks.saw(event.alive.engine_tick)
                case "revoked":
                    transfer.fail(TransferFailed(f"the source gave the transfer up: {event.revoked.cause}"))
                    return True
                case "failed":
                    error = event.failed.error
                    transfer.fail(errors.from_code(error.code, error.message))
                    return True
                case other:
                    log.warning("an unexpected %s came from %s: dropped", other, transfer.source.worker_id)
            if accepted and ticks.stalled:
                raise TimeoutError
    finally:
        transfer.detached(requests)
        requests.close()
        call.cancel()


def _open(transfer: ReceiverTransfer, receiving: Receiving) -> kv_source_pb2.Open:
    receiver = prefill_pb2.Receiver(worker_id=receiving.identity.worker_id, epoch=receiving.identity.epoch)
    return kv_source_pb2.Open(
        transfer_id=transfer.source.transfer_id,
        source_epoch=transfer.source.epoch,
        receiver=receiver,
        request_digest=transfer.source.request_digest,
        layout=layout_to_wire(receiving.layout),
        digest_algorithms=[XXH3_64],
        connectors=[name for name in receiving.connectors if name not in transfer.given_up],
        have=transfer.num_landed,
    )
