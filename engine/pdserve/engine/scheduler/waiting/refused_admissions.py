"""`RefusedAdmissions`: which sequences that did not fit cannot fit yet, known without another look into the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request
from pdserve.engine.sequence_blocks import BlockCounts


@dataclass(frozen=True, slots=True)
class _Refused:
    num_tokens: int
    """Tokens of the sequence when it was refused; a session's next turn has more."""
    num_known: int
    """Its blocks that the prefix cache had, also after one that it did not have."""
    num_remembered: int
    num_forgotten: int
    """The pool's counters."""


@dataclass(eq=False)
class RefusedAdmissions:
    """One queue's. A step without free blocks tries every sequence that may enter: each costs one comparison here.

    Since a refusal, no more of a sequence's blocks can have entered the prefix cache than blocks have entered it in all.
    """

    _config: EngineConfig
    _kv: KVCacheManager
    _refused: dict[str, _Refused] = field(default_factory=dict, init=False)

    def add(self, request: Request) -> None:
        """Note that the pool had too few blocks for a sequence that has none.

        No effect where blocks may come from a tier, or are missing outside a window: fewer than its tokens take may do then.
        """
        pool = self._kv.pool
        if pool.tier is None and self._kv.keeps_every_block:
            num_known = sum(pool.find(block_hash) is not None for block_hash in request.block_hashes)
            state = _Refused(request.num_tokens, num_known, pool.num_remembered, pool.num_forgotten)
            self._refused[request.request_id] = state

    def forget(self, request: Request) -> None:
        """The sequence waits no more."""
        self._refused.pop(request.request_id, None)

    def still_lacks_room(self, request: Request, keep_free: BlockCounts | None, budget: int | None = None) -> bool:
        """True if the sequence cannot fit now; False if it has to be tried.

        keep_free: blocks that must remain; None: none.
        budget: tokens left in the step, of a sequence that needs room for one chunk; None: it
        needs room for all its tokens.
        """
        refused, pool = self._refused.get(request.request_id), self._kv.pool
        if refused is None or refused.num_tokens != request.num_tokens or self._kv.num_idle:
            return False
        if refused.num_known and pool.num_forgotten != refused.num_forgotten:
            # it may have become too long for this worker
            return False
        num_known = refused.num_known + pool.num_remembered - refused.num_remembered
        num_tokens = max(0, refused.num_tokens - num_known * self._config.block_size)
        if budget is not None:
            num_tokens = self._config.chunk(num_tokens, budget)
        return not pool.has((self._config.blocks_for(num_tokens),), keep_free or (0,))
