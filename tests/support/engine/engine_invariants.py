"""Invariants of an engine over the hash model, checked after every step."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.kv_cache.block_pool import with_group_id
from pdserve.engine.request import Request, RequestStatus, Wait
from pdserve.models.kv_cache import DraftHeadSpec, StateSpec
from tests.support.engine.engine_harness import Harness
from tests.support.engine.hash_model import VOCAB_SIZE, head_block, state_block, stored_block


class CacheContents:
    """The content that every block of every prompt and answer must have, by its hash."""

    def __init__(self, engine: Harness) -> None:
        self._hasher = engine.hasher
        self._root = engine.root
        self._expected: dict[bytes, list[int]] = {}
        self._specs = engine.config.kv_cache_specs
        self._window = engine.model.window
        self._open_entries: dict[bytes, set[int]] = {}
        """Hash of a draft head's block -> places of entries before which any token may come."""

    def learn(self, token_ids: Sequence[int], num_shared: int = 0) -> None:
        """A prompt with its whole answer. num_shared: the prompt's tokens, if several sequences begin with them: a draft head's
        last entry of these belongs to the first token of one."""
        size = self._hasher.block_size
        for place, block_hash in enumerate(self._hasher.extend(self._root, list(token_ids))):
            first = place * size
            for group, spec in enumerate(self._specs):
                if isinstance(spec, StateSpec):
                    content = state_block(token_ids[: first + size], size, group)
                elif isinstance(spec, DraftHeadSpec):
                    content = head_block(token_ids[: first + size], size, self._window)
                    open_entries = self._open_entries.setdefault(with_group_id(block_hash, group), {size - 1})
                    open_entries.update({num_shared - 1 - first} & set(range(size)))
                else:
                    content = stored_block(token_ids[first : first + size], first, group)
                self._expected[with_group_id(block_hash, group)] = content

    def check(self, engine: Harness) -> None:
        """Every block that the prefix cache or the tier has holds what its hash says (I3, I13)."""
        pools = [pool.tolist() for pool in engine.pools]
        for block in engine.scheduler.pool.blocks:
            if block.block_hash is not None:
                assert self._holds(block.block_hash, pools[block.shape][block.row]), f"{block} holds something else"
        tier = engine.scheduler.pool.tier
        if tier is None:
            return
        slots = [cache.tolist() for cache in engine.host_caches]
        for name, (shape, row) in tier._slots.items():
            if (shape, row) not in tier._stores:
                assert self._holds(name, slots[shape][row]), f"slot {row} of shape {shape} holds something else"

    def _holds(self, block_hash: bytes, content: list[int]) -> bool:
        expected = self._expected[block_hash]
        any_token = self._open_entries.get(block_hash, ())
        return all(
            -VOCAB_SIZE < entry - wanted < VOCAB_SIZE if place in any_token else entry == wanted
            for place, (entry, wanted) in enumerate(zip(content, expected, strict=True))
        )


class StepInvariants:
    """Looks at an engine before and after each of its steps."""

    def __init__(self, engine: Harness) -> None:
        self._engine = engine
        self._config = engine.config
        self._running: dict[str, Request] = {}
        self._computed: dict[str, int] = {}

    def before(self) -> None:
        self._running = dict(self._engine.scheduler.running)
        self._computed = {
            request_id: request.num_computed_tokens for request_id, request in self._engine.scheduler.requests.items()
        }

    def after(self) -> None:
        scheduler, config = self._engine.scheduler, self._config
        scheduler.check()
        assert len(scheduler.running) <= config.max_num_seqs
        batch = self._engine.runner.batch
        assert len(batch.rows) + len(batch._free_rows) == config.max_num_seqs, "a row of the batch was lost"
        for request in scheduler.requests.values():
            self._check_place(request)
            assert scheduler.kv.num_slots(request) >= request.num_computed_tokens, "computed, and nowhere to be found"
            assert request.num_computed_tokens <= request.num_tokens
        waiting = [request for queue in scheduler.waiting._queues for request in queue.first(999)]
        assert scheduler.waiting._num_tokens.keys() == {request.request_id for request in waiting}
        assert scheduler.waiting.num_waiting_tokens == sum(scheduler.waiting._num_tokens.values())
        for request in scheduler.starvation.overdue.first(999):
            assert scheduler.requests.get(request.request_id) is request
            assert request.status in (
                RequestStatus.WAITING,
                RequestStatus.WAITING_FOR_REMOTE_KVS,
                RequestStatus.WAITING_FOR_FSM,
            )
        idle = [id for id, one in scheduler.requests.items() if one.status is RequestStatus.WAITING_FOR_STREAMING_REQ]
        assert scheduler.waiting.idle_sessions == {*idle}
        self._check_grammars()
        self._check_refusals()
        self._check_budget()
        self._check_victims()

    def _check_place(self, request: Request) -> None:
        scheduler = self._engine.scheduler
        waits = [queue for queue in scheduler.waiting._queues if request in queue]
        places = {
            RequestStatus.WAITING: len(waits) == 1,
            RequestStatus.PREEMPTED: len(waits) == 1 and scheduler.kv.num_blocks(request) == 0,
            RequestStatus.WAITING_FOR_STREAMING_REQ: not waits and request.core.resumable,
            RequestStatus.RUNNING: not waits and request.request_id in scheduler.running,
            RequestStatus.WAITING_FOR_REMOTE_KVS: not waits
            and self._is_received(request) == (Wait.REMOTE_KV in request.waits_for)
            and (
                scheduler.loads.is_waited_for(request)
                or bool({Wait.REMOTE_KV, Wait.OFFER, Wait.LOOKUP} & request.waits_for)
            ),
            # its KV may be here already
            RequestStatus.WAITING_FOR_FSM: not waits
            and (request in scheduler.grammars._waiting or request in scheduler.grammars._compiling)
            and self._is_received(request) == (Wait.REMOTE_KV in request.waits_for),
        }
        assert places.get(request.status, False), f"{request.request_id} is {request.status.name}, but not there"
        assert (request.request_id in scheduler.running) == (request.status is RequestStatus.RUNNING)

    def _is_received(self, request: Request) -> bool:
        receives = self._engine.scheduler.receives
        return (request in receives._unreserved) != (request.request_id in receives._receiving)

    def _check_grammars(self) -> None:
        scheduler = self._engine.scheduler
        waiting = {
            request for request in scheduler.requests.values() if request.status is RequestStatus.WAITING_FOR_FSM
        }
        landed = scheduler.grammars._first_tokens
        assert scheduler.grammars._waiting.keys() | scheduler.grammars._compiling.keys() == waiting
        assert landed.keys() == {
            request
            for request in waiting
            if request.core.remote_prefill and scheduler.kv.num_blocks(request) and not self._is_received(request)
        }
        assert scheduler.grammars.num_landed == sum(request.core.n for request in landed)

    def _check_refusals(self) -> None:
        """A sequence that counts as refused would be refused if it were tried."""
        scheduler, config = self._engine.scheduler, self._config
        budget = None if config.reserve_whole_prompt else config.max_num_batched_tokens
        waiting = [(scheduler.waiting._refused, queue, budget) for queue in scheduler.waiting._queues]
        for refused, queue, of_step in [*waiting, (scheduler.receives._refused, scheduler.receives._unreserved, None)]:
            for request in queue.first(999):
                if not refused.still_lacks_room(request, None, of_step):
                    continue
                computed = scheduler.kv.get_computed_blocks(request, request.num_tokens)
                num_cached = len(computed) * config.block_size
                num_tokens = request.num_tokens - num_cached
                room = num_cached + (num_tokens if of_step is None else config.chunk(num_tokens, of_step))
                assert not scheduler.pool.has(scheduler.kv.num_blocks_missing(request, room, computed))

    def _check_budget(self) -> None:
        """Check the tokens of those that ran before; a new one may have found tokens in the cache."""
        config, drafts = self._config, self._engine.scheduler.drafts
        computed = [
            request.num_computed_tokens - self._computed[name]
            for name, request in self._engine.scheduler.running.items()
            if name in self._running
        ]
        assert sum(computed) <= config.max_num_batched_tokens
        most = config.long_prefill_token_threshold or config.max_num_batched_tokens
        if config.speculative_config is not None:
            most = max(most, 1 + config.speculative_config.num_speculative_tokens)
        assert max(computed, default=0) <= most
        for request in self._engine.scheduler.running.values():
            table = self._engine.scheduler.kv.num_blocks(request)
            most = self._engine.scheduler.kv.num_groups * config.blocks_for(request.num_tokens)
            if drafts.limit(request) and request.num_uncomputed_tokens == 1:
                assert table <= most, "blocks of drafts did not come back"

    def _check_victims(self) -> None:
        """No sequence that kept its blocks, and could have been preempted, has a lower priority than a preempted one."""
        scheduler = self._engine.scheduler
        stayed = [request for name, request in self._running.items() if name in scheduler.running]
        for request in self._running.values():
            if request.status is not RequestStatus.PREEMPTED or request.core.transfer_source:
                continue
            for other in stayed:
                assert other.is_pinned_source or other.priority <= request.priority
