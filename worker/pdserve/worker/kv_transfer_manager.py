"""`KvTransferManager`: moves the engine's KV blocks over any data-plane connector.

The engine uses request ids and holds; the transfer side uses transfers, block numbers and streams. This class translates
between them, in the asyncio thread. It keeps holds from the moment the engine sends them until they are returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from pdserve.common.errors import InternalError, InvalidRequest, PdServeError, TransferFailed
from pdserve.common.request.block_source import BlockSource
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest
from pdserve.common.security.block_digest import BlockDigest
from pdserve.engine.client.engine_side import EngineSide
from pdserve.engine.kv_cache.block_pool import PinnedBlocks
from pdserve.engine.output_stream import engine_error
from pdserve.engine.scheduler.kv_messages import (
    Found,
    HoldReturned,
    IntoEngine,
    Landed,
    Lookup,
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
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.attach_client import ReceiverInfo, attach
from pdserve.kv_transfer.control.attach_servicer import TICK_STALLED_S
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer, SourceRef
from pdserve.kv_transfer.control.source_transfer import SourceResult, SourceTransfer
from pdserve.kv_transfer.control.transfer_view import TransferLog, TransfersPage, receiver_view, source_view
from pdserve.kv_transfer.heads.group_digest import group_digests
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.pull.digest import block_digests
from pdserve.worker.peer_channels import PeerChannels

QUARANTINE_FULL_AFTER_S = 2.0
"""An eviction may put a large prompt into quarantine for as long as its reads take to end; longer than this is a fault."""
QUARANTINE_MAX_SHARE = 0.1
"""Above this part of the pool in quarantine nothing new is received: reads that do not end would eat the pool up."""
DIGEST_HERE_BYTES = 4 << 20
"""Bytes that are digested in the asyncio thread, at most: this takes 0.5 ms, as long as handing them to another thread."""


class _Source:
    """One transfer this worker is the source of."""

    def __init__(self, transfer: SourceTransfer, request: EngineCoreRequest | None = None) -> None:
        """request: the one that computes the blocks; None for blocks that are computed."""
        self.request = request
        self.transfer = transfer
        self.holds: list[PinnedBlocks] = []
        self.wanted_from: int | None = None
        self.first_tokens: dict[int, int] = {}
        """Sequence -> token."""
        self.rerun_id: str | None = None
        """The engine's id of the prefill that is computed again, because the receiver was ready only after the first had ended."""

    @property
    def request_id(self) -> str:
        """Of the engine, by which it knows the blocks."""
        return self.transfer.expected.request_id

    @property
    def num_pinned(self) -> int:
        """Blocks held for the receiver."""
        return sum(len(hold.block_ids) for hold in self.holds)


class _Patience:
    """How long a source is waited for. What this worker's engine takes to make room does not count: other requests use it."""

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        self._left_s = seconds
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0

    def wait(self) -> None:
        """The source has to do something."""
        if self._timer is None:
            self._since = self._loop.time()
            self._timer = self._loop.call_later(max(0.0, self._left_s), self._give_up)

    def pause(self) -> None:
        """The source has done it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_s -= self._loop.time() - self._since


class _Receiver:
    """One transfer this worker receives."""

    def __init__(self, transfer: ReceiverTransfer, landed: asyncio.Future[ReceiverTransfer]) -> None:
        self.transfer = transfer
        self.landed = landed
        self.hold: PinnedBlocks | None = None
        self.stream: asyncio.Task[None] | None = None
        self.patience: _Patience | None = None
        """Only of a fetch."""


class KvTransferManager:
    """All of it runs in the asyncio thread."""

    def __init__(
        self,
        engine: EngineSide,
        connectors: ConnectorSet,
        pools: Sequence[PoolMemory],
        peers: PeerChannels,
        receiving: ReceiverInfo,
    ) -> None:
        """pools: the engine's, by shape of blocks, which `connectors` serve. peers: channels to sources. receiving: what sources
        need to know of this worker.
        """
        self.engine = engine
        self._connectors = connectors
        self._pools = pools
        self._peers = peers
        self._receiving = receiving
        self._loop = asyncio.get_running_loop()
        # one thread: what it is given is done in the order in which it was given
        self._block_work = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blocks")
        self._sources: dict[str, _Source] = {}
        self._reruns: dict[str, _Source] = {}
        """Sources by `rerun_id`."""
        self._receivers: dict[str, _Receiver] = {}
        self._lookups: dict[str, asyncio.Future[int]] = {}
        """By request id, until the engine has answered."""
        self._streams: set[asyncio.Task[None]] = set()
        self._log = TransferLog()
        self._quarantine_since: float | None = None
        """Loop time at which more than its share was seen in quarantine; None while it is less."""

    def close(self) -> None:
        for receiver in list(self._receivers.values()):
            receiver.transfer.stop()
        self._block_work.shutdown(wait=True, cancel_futures=True)

    def transfer(self, request_id: str) -> ReceiverTransfer | None:
        """The transfer that delivers this request's blocks; None if there is none or it has ended."""
        receiver = self._receivers.get(request_id)
        return None if receiver is None else receiver.transfer

    @property
    def num_open(self) -> int:
        """Active transfers, as source or receiver."""
        return len(self._sources) + len(self._receivers)

    @property
    def num_pinned(self) -> int:
        """Blocks that sources hold for their receivers."""
        return sum(source.num_pinned for source in self._sources.values())

    @property
    def num_fallbacks(self) -> int:
        """Transfers that went on over another connector, since start."""
        return self._connectors.num_fallbacks

    @property
    def num_ended(self) -> Mapping[tuple[str, str], int]:
        """Transfers since start by (role, outcome)."""
        return self._log.num_ended

    def transfers(self) -> TransfersPage:
        """Transfers under way, and those that ended recently."""
        sources = [source_view(source.transfer, source.num_pinned) for source in self._sources.values()]
        return self._log.page(sources + [receiver_view(receiver.transfer) for receiver in self._receivers.values()])

    @property
    def is_quarantine_full(self) -> bool:
        """True if more than `QUARANTINE_MAX_SHARE` of the pool has waited for `QUARANTINE_FULL_AFTER_S` for abandoned reads
        that may still write to it."""
        stats = self.engine.stats
        if stats.num_blocks_quarantined <= QUARANTINE_MAX_SHARE * stats.num_blocks_total:
            self._quarantine_since = None
            return False
        now = self._loop.time()
        self._quarantine_since = self._quarantine_since or now
        return now - self._quarantine_since >= QUARANTINE_FULL_AFTER_S

    # ---- the engine

    def _apply(self, event: IntoEngine) -> None:
        self.engine.post(lambda core: core.apply(event))

    def on_message(self, message: OutOfEngine) -> None:
        """A message of the engine about KV blocks."""
        match message:
            case Settled():
                self._settled(message)
            case ReceiveInto():
                self._room(message)
            case Missed():
                if (source := self._sources.get(message.request_id)) is not None:
                    self._missed(source)
            case Found():
                if (answer := self._lookups.pop(message.request_id, None)) is not None and not answer.done():
                    answer.set_result(message.num_blocks)
            case StopReceiving():
                self.stop_receiving(message.request_id)

    def verify_new(self, request_id: str) -> None:
        """Check before anything is begun for a request, since everything is found by its name at its end.

        Raises: InvalidRequest when blocks of a request of this name are still in transfer, or about to be.
        """
        if request_id in self._sources:
            raise InvalidRequest(f"request {request_id} is being transferred already", "request_id")
        if request_id in self._receivers:
            raise InvalidRequest(f"request {request_id} is being received already", "request_id")

    # ---- source

    def source(self, request: EngineCoreRequest, transfer: SourceTransfer) -> None:
        """The blocks of `request`, which is about to be submitted, belong to `transfer`.

        Raises: InvalidRequest when the request is the source of another transfer already.
        """
        try:
            self.verify_new(request.request_id)
        except InvalidRequest:
            transfer.cancel()
            raise
        self._sources[request.request_id] = _Source(transfer, request)

    async def look_up(self, request_id: str, block_hashes: tuple[bytes, ...]) -> int:
        """As `SourceEvents.look_up`."""
        answer: asyncio.Future[int] = self._loop.create_future()
        self._lookups[request_id] = answer
        self._apply(Lookup(request_id, block_hashes))
        try:
            return await answer
        except asyncio.CancelledError:
            self._lookups.pop(request_id, None)
            self._apply(Revoke(request_id))
            raise

    def began(self, transfer: SourceTransfer) -> None:
        """As `SourceEvents.began`."""
        num_tokens = transfer.expected.num_cached_blocks * self._receiving.layout.block_size
        self.send(transfer, SourceResult(num_tokens, ()))

    def send(self, transfer: SourceTransfer, result: SourceResult) -> None:
        """Send blocks that are computed, and rest in the engine under the transfer's `request_id`."""
        source = _Source(transfer)
        self._sources[source.request_id] = source
        transfer.computed(result)

    def forget(self, request_id: str) -> None:
        """No transfer begins of blocks that rest in the engine under this name."""
        self._apply(Revoke(request_id))

    def wanted(self, transfer: SourceTransfer, first_index: int) -> None:
        source = self._sources.get(transfer.expected.request_id)
        if source is not None and source.transfer is transfer:
            source.wanted_from = first_index
            self._apply(Want(source.request_id, first_index))

    def ended(self, transfer: SourceTransfer) -> None:
        """Fenced: what the transfer pinned goes back, and what still computes for it stops."""
        source = self._sources.get(transfer.expected.request_id)
        if source is not None and source.transfer is transfer:
            del self._sources[transfer.expected.request_id]
            self._log.add(source_view(transfer, 0))
            self._return(source.request_id, source.holds)
            self._apply(Revoke(source.request_id))
            if source.rerun_id is not None:
                del self._reruns[source.rerun_id]
                self._apply(Revoke(source.rerun_id))

    def on_output(self, output: EngineCoreOutput) -> None:
        """An output of any request, after its reader got it."""
        rerun = self._reruns.get(output.request_id)
        source = rerun or self._sources.get(output.request_id)
        if source is None:
            return
        if output.error_code:
            source.transfer.fail(engine_error(output))
        elif output.new_token_ids and rerun is None and source.request is not None:
            source.first_tokens[output.index] = output.new_token_ids[0]
            if len(source.first_tokens) == source.request.n:
                tokens = tuple(token_id for _, token_id in sorted(source.first_tokens.items()))
                source.transfer.computed(SourceResult(source.request.num_sent_tokens, tokens))

    def _missed(self, source: _Source) -> None:
        """The engine no longer has blocks that are wanted."""
        if source.request is None:
            source.transfer.fail(TransferFailed("the blocks were reused before they were wanted"))
        else:
            self._prefill_again(source, source.request)

    def _prefill_again(self, source: _Source, first: EngineCoreRequest) -> None:
        """`Want` arrived after the prefill had ended and its blocks were reused: prefill again, mostly from cache.

        Prompt log-probabilities and grammar are left out: the first run has served them. Its token is sampled again, since the last
        entry of a draft head's cache belongs to it.
        """
        if source.wanted_from is not None and not source.transfer.has_ended and source.rerun_id is None:
            source.transfer.recomputes = True
            source.rerun_id = f"{first.request_id}+"
            self._reruns[source.rerun_id] = source
            params = msgspec.structs.replace(first.sampling_params, prompt_logprobs=None, structured_outputs=None)
            if first.n == 1:
                params = msgspec.structs.replace(params, allowed_token_ids=tuple(source.first_tokens.values()) or None)
            request = msgspec.structs.replace(
                first,
                request_id=source.rerun_id,
                wanted_from=source.wanted_from,
                sampling_params=params,
                block_source=None,
            )
            self.engine.submit_quietly(request)

    def _settled(self, message: Settled) -> None:
        source = self._reruns.get(message.request_id) or self._sources.get(message.request_id)
        if source is None or source.transfer.has_ended:
            self._return(message.request_id, [message.hold])
            return
        source.holds.append(message.hold)
        if (digest := source.transfer.digest) is None:
            # nothing is published before Want, which arrives over a stream
            source.transfer.fail(InternalError("blocks are settled before a stream has agreed on their digest"))
            return
        num_bytes = len(message.hold) * self._pools[0].block_bytes
        if self._pools[0].device_id is None and num_bytes <= DIGEST_HERE_BYTES and not source.transfer.groups:
            source.transfer.settled(
                message.first_index, message.hold.rows, self._digest(message, digest, source.transfer)
            )
            return

        def publish(done: asyncio.Future[list[tuple[int, ...]]]) -> None:
            if done.cancelled():
                return
            # read also when the transfer has ended; asyncio logs an exception that nothing has read
            error = done.exception()
            if source.transfer.has_ended:
                return
            if error is not None:
                source.transfer.fail(_not_digested(error))
            else:
                source.transfer.settled(message.first_index, message.hold.rows, done.result())

        work = self._loop.run_in_executor(self._block_work, self._digest, message, digest, source.transfer)
        work.add_done_callback(publish)

    def _digest(self, message: Settled, digest: BlockDigest, transfer: SourceTransfer) -> list[tuple[int, ...]]:
        """Digests of final blocks, once the step that wrote them is done; in the block thread where that takes long, or where other
        ranks take part."""
        if message.device_event is not None:
            message.device_event.synchronize()
        rows, shapes, first_index = message.hold.rows, message.hold.shapes, message.first_index
        if transfer.groups:
            transfer.permit(first_index, rows, shapes)
            return group_digests(self._connectors.of_part, transfer.groups, rows, shapes, first_index, digest)
        return [(value,) for value in block_digests(self._pools[0], rows, digest, first_index)]

    # ---- receiver

    def receive(self, request_id: str, source: SourceRef) -> asyncio.Future[ReceiverTransfer]:
        """Open the control stream for a request that is about to be submitted; resolves when all blocks have landed.

        Raises: InvalidRequest when the request is being received already, and as `PeerChannels.borrow`; TransferFailed when too
        much of the pool is in quarantine.
        """
        self.verify_new(request_id)
        return self._open(request_id, source).landed

    def fetch(self, request: EngineCoreRequest, source: BlockSource) -> None:
        """Read blocks of a request that is about to be submitted from its source. What fails costs a computation."""
        request_id, num_given = request.request_id, len(request.prompt_token_ids) + len(request.output_token_ids)
        num_blocks = (num_given - 1) // self._receiving.layout.block_size
        try:
            if not num_blocks:
                raise TransferFailed("there is nothing to read")
            hashes = request.block_hashes[:num_blocks]
            ref = SourceRef.of_cache(source.worker_id, source.epoch, source.address, hashes)
            receiver = self._open(request_id, ref)
        except (InvalidRequest, TransferFailed) as error:
            failed = ReceiveFailed(request_id, TransferFailed(error.message))
            self._loop.call_soon(self._apply, failed)  # after the request, which is submitted now
            return
        late = TransferFailed(f"the blocks did not come within {source.limit_s:.3f} s")
        patience = receiver.patience = _Patience(source.limit_s, lambda: receiver.transfer.fail(late))
        patience.wait()
        receiver.landed.add_done_callback(lambda _: patience.pause())

    def _open(self, request_id: str, source: SourceRef) -> _Receiver:
        if self.is_quarantine_full:
            num_blocks = self.engine.stats.num_blocks_quarantined
            raise TransferFailed(f"{num_blocks} blocks of this worker wait for reads that do not end")
        channel = self._peers.borrow(source.address, (source.worker_id, source.epoch))
        landed: asyncio.Future[ReceiverTransfer] = self._loop.create_future()
        transfer = ReceiverTransfer(request_id, source, self._connectors, self)
        receiver = self._receivers[request_id] = _Receiver(transfer, landed)
        receiver.stream = asyncio.create_task(
            attach(transfer, self._receiving, channel.service), name=f"attach {request_id}"
        )
        self._streams.add(receiver.stream)
        receiver.stream.add_done_callback(self._streams.discard)
        receiver.stream.add_done_callback(lambda _: channel.give_back())
        return receiver

    def stop_receiving(self, request_id: str) -> None:
        """The request never reached the engine, or is leaving it."""
        if (receiver := self._receivers.get(request_id)) is not None:
            receiver.transfer.stop()
            self._forget_if_done(receiver)

    def _room(self, message: ReceiveInto) -> None:
        receiver = self._receivers.get(message.request_id)
        if receiver is None or receiver.hold is not None:
            self._return(message.request_id, [message.hold])
            return
        receiver.hold = message.hold
        if receiver.patience is not None:
            receiver.patience.wait()
        receiver.transfer.room(message.first_index, message.hold.rows, message.hold.shapes, message.device_event)

    def offered(self, transfer: ReceiverTransfer, num_blocks: int) -> None:
        receiver = self._receivers.get(transfer.request_id)
        if receiver is not None and receiver.patience is not None:
            receiver.patience.pause()
        self._apply(Offered(transfer.request_id, num_blocks))

    def landed(self, transfer: ReceiverTransfer, num_blocks: int) -> None:
        self._apply(Landed(transfer.request_id, num_blocks))

    def source_finished(self, transfer: ReceiverTransfer, num_tokens: int, token_ids: tuple[int, ...]) -> None:
        self._apply(SourceFinished(transfer.request_id, num_tokens, token_ids))

    def failed(self, transfer: ReceiverTransfer, cause: PdServeError) -> None:
        if not isinstance(cause, TransferFailed):
            # else the request's router would blame this worker, or a source's text would reach the client
            cause = TransferFailed(f"source {transfer.source.worker_id}: {cause.message}")
        self._apply(ReceiveFailed(transfer.request_id, cause))

    def fenced(self, transfer: ReceiverTransfer) -> None:
        receiver = self._receivers.get(transfer.request_id)
        if receiver is None:
            return
        # first, since the engine may answer as soon as it has its blocks back, and the news must come before the answer
        if not transfer.is_cut_short and not receiver.landed.done():
            receiver.landed.set_result(transfer)
        if (hold := receiver.hold) is not None:
            receiver.hold = None
            self._return(transfer.request_id, [hold])
        self._forget_if_done(receiver)

    def _forget_if_done(self, receiver: _Receiver) -> None:
        """An ended transfer without blocks out needs no place here; its stream ends with it."""
        if receiver.transfer.is_cut_short and receiver.stream is not None:
            if receiver.transfer.source.block_hashes:
                self._loop.call_later(TICK_STALLED_S, receiver.stream.cancel)  # its source is told, and may not answer
            else:
                receiver.stream.cancel()
        if receiver.transfer.has_ended and receiver.hold is None:
            if self._receivers.pop(receiver.transfer.request_id, None) is not None:
                self._log.add(receiver_view(receiver.transfer))
            if not receiver.landed.done():
                receiver.landed.cancel()

    def _return(self, request_id: str, holds: list[PinnedBlocks]) -> None:
        for hold in holds:
            self._apply(HoldReturned(request_id, hold))


def _not_digested(error: BaseException) -> TransferFailed:
    return TransferFailed(f"blocks could not be read for their digests: {error}")
