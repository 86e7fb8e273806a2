"""`SourcePublishing`: hands final blocks of wanted sequences to the transfer, each once."""

from __future__ import annotations

from pdserve.engine.hold_ledger import HoldLedger
from pdserve.engine.kv_cache_manager import KVCacheManager
from pdserve.engine.remote_kv import KVConnector, Settled
from pdserve.engine.request import Request


class SourcePublishing:
    """The source side of the seam, inside the scheduler. Nothing leaves before `Want`."""

    def __init__(self, kv: KVCacheManager, holds: HoldLedger, connector: KVConnector) -> None:
        self._kv = kv
        self._holds = holds
        self._connector = connector

    def want(self, request: Request, first_index: int) -> None:
        """The receiver has room for the blocks from `first_index` on; what is final already goes out now."""
        request.wanted_from = first_index
        self.publish(request)

    def publish(self, request: Request) -> None:
        """Settle what has become final: full blocks as they fill, the partial last one with the prompt's end."""
        if request.wanted_from is None:
            return
        computed = min(request.num_computed_tokens, request.num_prompt_tokens)
        final = computed // self._kv.block_size
        if computed == request.num_prompt_tokens:
            final = -(-computed // self._kv.block_size)
        first = max(request.num_settled_blocks, request.wanted_from)
        if final > first:
            request.num_settled_blocks = final
            hold = self._holds.out(self._kv.hold(request, first, final))
            self._connector.send(Settled(request.request_id, first, hold))
