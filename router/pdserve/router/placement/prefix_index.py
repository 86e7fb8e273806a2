"""`PrefixIndex`: the workers that hold each block, and the length of a prompt's prefix that each worker has.

One entry per block hash: a bit mask over workers. A lookup walks the prompt's hashes and narrows the mask, so it costs one
dictionary access per block for any number of workers, and stops when the mask is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from pdserve.common.kv_events import WorkerKey

SPECULATIVE_S = 2.0
"""Seconds for which the blocks of a routed prompt count as held, until the worker reports them."""


class PrefixIndex:
    """Built from the workers' reports, so it lags behind by reports in flight."""

    def __init__(self) -> None:
        self._bits: dict[WorkerKey, int] = {}
        self._workers: dict[int, WorkerKey] = {}
        """`_bits`, the other way round."""
        self._held: dict[WorkerKey, set[bytes]] = {}
        self._masks: dict[bytes, int] = {}
        self._speculative: dict[WorkerKey, _Speculation] = {}

    def __len__(self) -> int:
        """Number of distinct blocks."""
        return len(self._masks)

    def num_blocks(self, worker: WorkerKey) -> int:
        """Number of blocks of one worker."""
        return len(self._held.get(worker, ()))

    def stored(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """Add blocks of a worker."""
        held = self._held.setdefault(worker, set())
        bit = 1 << self._bit(worker)
        masks = self._masks
        for block_hash in hashes:
            held.add(block_hash)
            masks[block_hash] = masks.get(block_hash, 0) | bit

    def removed(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """Remove blocks of a worker; unknown ones are ignored."""
        held = self._held.get(worker)
        if held is None:
            return
        keep = ~(1 << self._bits[worker])
        for block_hash in hashes:
            if block_hash in held:
                held.discard(block_hash)
                self._narrow(block_hash, keep)

    def cleared(self, worker: WorkerKey) -> None:
        """Remove all blocks of a worker that restarted or is lost."""
        held = self._held.pop(worker, set())
        self._speculative.pop(worker, None)
        bit = self._bits.pop(worker, None)
        if bit is not None:
            del self._workers[bit]
            for block_hash in held:
                self._narrow(block_hash, ~(1 << bit))

    def routed(self, worker: WorkerKey, hashes: Sequence[bytes], now_s: float) -> None:
        """Count the blocks of a prompt that was just routed to a worker as held for `SPECULATIVE_S`."""
        if hashes:
            self._speculative.setdefault(worker, _Speculation()).add(hashes, now_s + SPECULATIVE_S)

    def number(self, worker: WorkerKey) -> int:
        """The worker's bit in masks; a worker without blocks gets one."""
        self._held.setdefault(worker, set())
        return self._bit(worker)

    def match(self, hashes: Sequence[bytes], workers: Iterable[WorkerKey], now_s: float) -> dict[WorkerKey, int]:
        """worker -> blocks of the prompt's longest prefix that it holds or will hold soon, 0 included."""
        return self.expect(hashes, self.reported(hashes, workers), now_s)

    def reported(
        self, hashes: Sequence[bytes], workers: Iterable[WorkerKey], *, last_suffices: bool = False
    ) -> dict[WorkerKey, int]:
        """worker -> blocks of the prompt's longest prefix that it has reported, 0 included.

        last_suffices: a worker has a prefix if it has its last block (`KvLayout.hits_need_last_block`).
        """
        lengths = dict.fromkeys(workers, 0)
        alive = 0
        for worker in lengths:
            if (bit := self._bits.get(worker)) is not None:
                alive |= 1 << bit
        for depth, mask in self.prefixes(hashes, alive, last_suffices=last_suffices):
            _note(lengths, self._workers, mask, depth)
        return lengths

    def prefixes(self, hashes: Sequence[bytes], alive: int, *, last_suffices: bool = False) -> list[tuple[int, int]]:
        """(blocks of the prompt's longest prefix, mask of the workers in `alive` that have so many), for all lengths but 0."""
        found: list[tuple[int, int]] = []
        masks = self._masks
        if last_suffices:
            for depth in range(len(hashes), 0, -1):
                if have := alive & masks.get(hashes[depth - 1], 0):
                    found.append((depth, have))
                    alive &= ~have
                if not alive:
                    break
            return found
        depth = 0
        for block_hash in hashes:
            left = alive & masks.get(block_hash, 0)
            if left != alive:
                if depth:
                    found.append((depth, alive & ~left))
                alive = left
                if not alive:
                    return found
            depth += 1
        if depth and alive:
            found.append((depth, alive))
        return found

    def expect(self, hashes: Sequence[bytes], reported: Mapping[WorkerKey, int], now_s: float) -> dict[WorkerKey, int]:
        """Result of `reported`, plus blocks of prompts that were routed recently."""
        return {worker: self._expected(worker, hashes, length, now_s) for worker, length in reported.items()}

    def _expected(self, worker: WorkerKey, hashes: Sequence[bytes], known: int, now_s: float) -> int:
        speculation = self._speculative.get(worker)
        if speculation is None:
            return known
        speculation.forget(now_s)
        if not speculation:
            del self._speculative[worker]
            return known
        held = self._held.get(worker, set())
        length = known
        while length < len(hashes) and (hashes[length] in held or hashes[length] in speculation):
            length += 1
        return length

    def _bit(self, worker: WorkerKey) -> int:
        bit = self._bits.get(worker)
        if bit is None:
            bit = next(number for number in range(len(self._workers) + 1) if number not in self._workers)
            self._bits[worker], self._workers[bit] = bit, worker
        return bit

    def _narrow(self, block_hash: bytes, keep: int) -> None:
        left = self._masks.get(block_hash, 0) & keep
        if left:
            self._masks[block_hash] = left
        else:
            self._masks.pop(block_hash, None)


class _Speculation:
    """Blocks that a worker is expected to have soon, each with an expiry time."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}
        self._routed: deque[tuple[float, tuple[bytes, ...]]] = deque()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._until

    def __len__(self) -> int:
        return len(self._until)

    def add(self, hashes: Sequence[bytes], until_s: float) -> None:
        self._until.update(dict.fromkeys(hashes, until_s))
        self._routed.append((until_s, tuple(hashes)))

    def forget(self, now_s: float) -> None:
        while self._routed and self._routed[0][0] < now_s:
            until_s, hashes = self._routed.popleft()
            for block_hash in hashes:
                # routed again meanwhile, with a later expiry
                if self._until.get(block_hash) == until_s:
                    del self._until[block_hash]


def _note(lengths: dict[WorkerKey, int], by_bit: dict[int, WorkerKey], mask: int, depth: int) -> None:
    """The prefix length of every worker in `mask` is `depth`."""
    while mask:
        low = mask & -mask
        lengths[by_bit[low.bit_length() - 1]] = depth
        mask ^= low
