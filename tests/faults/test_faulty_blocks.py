"""A data plane that drops, repeats, swaps or truncates blocks of one shape: no text is wrong, and every request ends (I3, I14)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.memory.pool_memory import HostPool
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import make_mixed_model
from tests.support.models.oracle import Oracle
from tests.support.transfers.worker_pair import Pair, ask, check_at_rest, running_pair, transfers_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

AT_ONCE = 8
FAULTS = ("dropped", "repeated", "swapped", "truncated")
_TRUNCATED_SHARE = 0.02
"""Of the faults: a reader waits three seconds for each."""
PROMPTS = [prompt_of(20 + 7 * number, number) for number in range(10)]


class FaultyPools:
    """Changes what the source's pools lend, now and then."""

    def __init__(self, pair: Pair, rate: float) -> None:
        """rate: part of the calls for blocks of a shape that are changed."""
        pools = transfers_of(pair.p)._pools
        self._shapes = {pool.address: shape for shape, pool in enumerate(pools)}
        self._random = random.Random(1)
        self._rate = rate
        self.made: Counter[tuple[str, int]] = Counter()
        """(fault, shape) -> how often."""

    def changed(self, pool: HostPool, blocks: Sequence[int], views: list[memoryview]) -> list[memoryview]:
        shape = self._shapes.get(pool.address)
        if shape is None or self._random.random() >= self._rate:
            return views
        size, content = pool.block_bytes, bytearray(b"".join(views))
        fault = self._random.choice(("dropped", "repeated", "swapped") if len(blocks) > 1 else ("dropped", "repeated"))
        if self._random.random() < _TRUNCATED_SHARE:
            fault = "truncated"
        place = self._random.randrange(len(blocks) - (fault == "swapped"))
        here, after = slice(place * size, (place + 1) * size), slice((place + 1) * size, (place + 2) * size)
        match fault:
            case "dropped":
                content[here] = bytes(size)
            case "repeated":
                content[here] = pool.block(self._random.choice([*{*range(pool.num_blocks)} - {blocks[place]}]))
            case "swapped":
                content[here], content[after] = content[after], content[here]
            case "truncated":
                del content[-size // 2 :]
        self.made[fault, shape] += 1
        return [memoryview(content)]


@contextmanager
def faulty(faults: FaultyPools, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lend = HostPool.lend

    @contextmanager
    def changed(pool: HostPool, blocks: Sequence[int], borrower: Hashable = None) -> Iterator[list[memoryview]]:
        with lend(pool, blocks, borrower) as views:
            yield faults.changed(pool, blocks, views)

    with monkeypatch.context() as patch:
        patch.setattr(HostPool, "lend", changed)
        yield


@pytest.mark.parametrize(
    "num_requests", [1000, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])]
)
async def test_i14_faults_in_blocks_of_one_shape_change_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_requests: int
) -> None:
    folder = make_mixed_model(tmp_path / "model")
    oracle, outcomes, refusals = Oracle(folder), Counter[str](), Counter[str]()
    async with running_pair(
        folder, dtype="float32", num_blocks=128, max_num_seqs=AT_ONCE, enable_prefix_caching=False
    ) as pair:
        expected = [(await ask(pair, prompt)).token_ids for prompt in PROMPTS]
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            oracle.check(prompt, tokens)
        faults, numbers = FaultyPools(pair, 0.3), iter(range(num_requests))

        async def client() -> None:
            for number in numbers:
                try:
                    answer = await ask(pair, PROMPTS[number % len(PROMPTS)])
                except TransferFailed as error:
                    outcomes["refused"] += 1
                    refusals[error.message] += 1
                else:
                    outcomes["answered"] += 1
                    assert answer.token_ids == expected[number % len(PROMPTS)]

        with faulty(faults, monkeypatch):
            await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        assert outcomes.total() == num_requests
        assert min(outcomes["answered"], outcomes["refused"]) > num_requests // 100, outcomes
        assert all("does not match its digest" in text or "no byte moved" in text for text in refusals), refusals
        # blocks of a window are read one by one
        assert {(fault, shape) for fault in FAULTS for shape in (0, 1)} - {*faults.made} <= {("swapped", 1)}
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)
