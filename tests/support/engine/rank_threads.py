"""Engines over a checkpoint that several ranks share: rank 0 in the test's thread, the others in threads of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pdserve.engine.config import EngineConfig
from pdserve.engine.executor.rank_loop import RankLoop
from pdserve.engine.ranks.rank_messages import StoreOptions, ToRank, decode_to_rank, encode
from pdserve.engine.runner.loading.make_model_runner import make_model_runner
from pdserve.engine.runner.model_runner import ModelRunner
from pdserve.engine.runner.pool.host_blocks import HostBlocks
from pdserve.engine.runner.pool.open_store import open_store
from pdserve.engine.runner.pool.tier_memory import TensorMemory, make_host_caches
from pdserve.models.decoder import Decoder
from pdserve.models.kv_cache import make_kv_cache
from pdserve.models.loading import load_decoder
from pdserve.models.weights.rank_shard import RankShard
from tests.support.engine.thread_ranks import ThreadRank, thread_ranks
from tests.support.run.waiting import HANG_S

T = TypeVar("T")


def load_rank(folder: Path, config: EngineConfig, rank: ThreadRank) -> tuple[Decoder, Tensor]:
    """A rank's decoder and its pool, in float32."""
    shard = RankShard(rank.rank, rank.size, rank)
    decoder = load_decoder(folder, dtype="float32", shard=shard)
    layout = decoder.config.kv_layout(config.block_size, "fingerprint", shard)
    return decoder, make_kv_cache(layout.shapes[0], config.num_blocks)


def host_blocks(kv_cache: Tensor, host_caches: Sequence[Tensor], store: StoreOptions | None, rank: int) -> HostBlocks:
    """A rank's part of the tiers."""
    return HostBlocks(TensorMemory([kv_cache], host_caches), None if store is None else open_store(store, rank))


class RankThreads:
    """Implements `OtherRanks`."""

    def __init__(self, folder: Path, config: EngineConfig, size: int) -> None:
        self.group, *others = thread_ranks(size)
        self._loops: dict[int, RankLoop] = {}
        self._kv_caches: dict[int, Tensor] = {}
        """Caches of the other ranks."""
        self._messages: list[queue.SimpleQueue[bytes | None]] = []
        self._threads = []
        self._error: BaseException | None = None
        self._is_loaded = threading.Semaphore(0)
        for rank in others:
            messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            self._messages.append(messages)
            self._threads.append(threading.Thread(target=self._run, args=(folder, config, rank, messages), daemon=True))
            self._threads[-1].start()
        # a tied checkpoint whose head differs is compared by all ranks together
        self.decoder, self.kv_cache = load_rank(folder, config, self.group)
        for _ in others:
            assert self._is_loaded.acquire(timeout=HANG_S)
        if self._error is not None:
            raise self._error

    def _run(
        self, folder: Path, config: EngineConfig, rank: ThreadRank, messages: queue.SimpleQueue[bytes | None]
    ) -> None:
        try:
            decoder, kv_cache = load_rank(folder, config, rank)
            vocab_size = decoder.config.vocab_size
            num_slots = config.num_host_blocks
            host_caches = make_host_caches([kv_cache], num_slots) if num_slots else ()
            loop = RankLoop(
                lambda: make_model_runner(config, decoder, [kv_cache], vocab_size, group=rank),
                rank,
                (lambda store: host_blocks(kv_cache, host_caches, store, rank.rank)) if num_slots else None,
            )
            self._kv_caches[rank.rank] = kv_cache
            self._loops[rank.rank] = loop
            self._is_loaded.release()
            while (message := messages.get()) is not None:
                loop.serve(decode_to_rank(message))
            loop._read()
            loop.close()
        except BaseException as error:
            self._error = error
            rank.abort()
            self._is_loaded.release()

    def send(self, message: ToRank) -> None:
        payload = encode(message)
        for messages in self._messages:
            messages.put(payload)

    def require_all(self) -> None:
        if self._error is not None:
            raise self._error

    def attempt(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException as error:
            if self._error is not None:
                raise self._error from error
            self.group.abort()
            raise

    def close(self) -> None:
        """End the threads, after what was sent. Raises: the error of a rank."""
        for messages in self._messages:
            messages.put(None)
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "a rank waits for another"
        self.require_all()

    def check(self, runner: ModelRunner) -> None:
        """After `close`: every rank has the sequences, tokens and blocks that rank 0 has."""
        own = runner.batch
        for loop in self._loops.values():
            batch = loop.runner.batch
            assert batch.rows == own.rows
            for row in own.rows.values():
                length = own.num_tokens[row]
                assert batch.num_tokens[row] == length
                assert batch.num_computed[row] == own.num_computed[row]
                assert (batch.token_ids[row, :length] == own.token_ids[row, :length]).all()
                for table, expected in zip(batch.block_tables, own.block_tables, strict=True):
                    count = expected._num_blocks[row]
                    assert table._num_blocks[row] == count
                    assert (table._block_ids[row, :count] == expected._block_ids[row, :count]).all()

    @property
    def gathered(self) -> Tensor:
        """The pools of all ranks, heads side by side."""
        return torch.cat([self.kv_cache, *(self._kv_caches[rank] for rank in sorted(self._kv_caches))], 1)
