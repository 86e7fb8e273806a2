"""`KvSendTracker`: passes final blocks of wanted sequences to the transfer, each once.

A prefill that ends before `Want` *rests*: its blocks are given up, first cached, then reused. `Want` mostly follows soon, so the
block table is remembered without references: if no block has been handed out since, everything is published without
computing anything again; otherwise `Missed` is sent.
"""

from __future__ import annotations

from pdserve.engine.kv_cache.block_pool import PinTracker
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager, RestingTable
from pdserve.engine.request import Request
from pdserve.engine.scheduler.kv_messages import KvOutbox, Missed, Settled


class KvSendTracker:
    """The source side of transfers, inside the scheduler. No block is published before `Want`."""

    def __init__(self, kv: KVCacheManager, holds: PinTracker, connector: KvOutbox) -> None:
        self._kv = kv
        self._holds = holds
        self._connector = connector
        self._resting: dict[str, tuple[Request, RestingTable]] = {}
        self.device_event: object | None = None
        """On a GPU: event of the last step; every final block was written before it."""

    def rest(self, request: Request) -> None:
        """The sequence ended before `Want`: give up its blocks, but remember its table. `forget` follows when its transfer ends."""
        self._resting[request.request_id] = (request, self._kv.rest(request))

    def forget(self, request_id: str) -> None:
        """The sequence's transfer has ended. Harmless when it is not resting."""
        self._resting.pop(request_id, None)

    def want_ended(self, request_id: str, first_index: int) -> bool:
        """`Want` for a sequence that has ended: publish it if its blocks are unchanged, else send `Missed`.

        False when it is not resting: it was served before, or its transfer is over.
        """
        if (resting := self._resting.pop(request_id, None)) is None:
            return False
        request, table = resting
        if self._kv.revive(request, table):
            self.want(request, first_index)
            self._kv.free(request)
        else:
            self._connector.send(Missed(request_id))
        return True

    def want(self, request: Request, first_index: int) -> None:
        """The receiver has room for the blocks from `first_index` on; what is final already goes out now."""
        request.wanted_from = first_index
        self.publish(request)

    def publish(self, request: Request) -> None:
        """Settle what has become final: full blocks as they fill, the partial last one with the prompt's end."""
        if request.wanted_from is None:
            return
        computed = min(request.num_computed_tokens, request.num_given_tokens)
        final = computed // self._kv.block_size
        if computed == request.num_given_tokens:
            final = -(-computed // self._kv.block_size)
        first = max(request.num_settled_blocks, request.wanted_from)
        if final > first:
            request.num_settled_blocks = final
            hold = self._holds.out(self._kv.hold(request, first, final))
            self._connector.send(Settled(request.request_id, first, hold, self.device_event))
