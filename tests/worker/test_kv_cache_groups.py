"""KV cache groups through a prefill and a decode worker: texts of `transformers`, blocks that a later token sees, whole pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import TransferFailed
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.common.transfer_order import TransferOrder
from pdserve.engine.ranks import rank_processes
from tests.support.engine.forked_engine import start_rank
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import make_windowed_model
from tests.support.models.oracle import Oracle
from tests.support.transfers.worker_pair import BLOCK_SIZE, KEY, Pair, ask, check_at_rest, door_of, running_pair

FIELDS: dict[str, Any] = {"dtype": "float32", "num_blocks": 8, "max_num_batched_tokens": 32}
"""Memory for 128 tokens of all layers."""
WINDOWS = (0, 13, 13, 13)
LONGEST = 320
"""Tokens for which the group without a window has room: the pool has 32 blocks, and each of three groups with a window needs 4."""


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 layers, one of them without a window."""
    return make_windowed_model(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def oracle(gemma3: Path) -> Oracle:
    return Oracle(gemma3)


MakePair = Callable[..., AbstractAsyncContextManager[Pair]]


@pytest.fixture
def make_pair(gemma3: Path) -> MakePair:
    """`running_pair` with the model; ends with the pool check of both workers."""

    @asynccontextmanager
    async def make(**fields: Any) -> AsyncIterator[Pair]:
        async with running_pair(gemma3, KEY, **FIELDS | fields) as pair:
            yield pair
            for worker in (pair.p, pair.d):
                await check_at_rest(worker)

    return make


def num_sent(num_tokens: int, num_cached_blocks: int = 0) -> int:
    """Blocks of a prompt that a receiver wants."""
    order = TransferOrder.of(WINDOWS, num_tokens, BLOCK_SIZE)
    return len(order) - order.number(num_cached_blocks)


async def test_i1_texts_and_longest_sequences_through_both_workers(make_pair: MakePair, oracle: Oracle) -> None:
    async with make_pair() as pair:
        for worker in (pair.p, pair.d):
            assert worker.identity.layout.group_windows == WINDOWS
            assert worker.identity.max_model_len == LONGEST
        for length in (5, 16, 70, LONGEST - 4):
            prompt = prompt_of(length)
            answer = await ask(pair, prompt)
            oracle.check(prompt, answer.token_ids)
            assert answer.num_landed == num_sent(length)
        assert door_of(pair.p).core.scheduler.kv.num_freed_behind_window > 10
        again = await ask(pair, prompt)  # decode has its full blocks
        oracle.check(prompt, again.token_ids)
        assert again.num_landed == num_sent(length, length // BLOCK_SIZE)


@pytest.mark.slow
async def test_sources_that_share_a_prefix_end_in_the_smallest_pool(make_pair: MakePair, oracle: Oracle) -> None:
    """None of them is preempted once its blocks are wanted, and each needs blocks that others hold."""
    async with make_pair(decode={"num_blocks": 64}) as pair:
        stem = prompt_of(64)
        prompts = [stem + prompt_of(40 + 3 * seed, seed) for seed in range(6)]
        await ask(pair, stem)
        answers = await asyncio.gather(*(ask(pair, prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.check(prompt, answer.token_ids)


@pytest.mark.parametrize("without", ["prefill", pytest.param("decode", marks=pytest.mark.slow)])
async def test_workers_with_and_without_groups_refuse_each_other_by_name(make_pair: MakePair, without: str) -> None:
    async with make_pair(**{without: {"disable_hybrid_kv_cache_manager": True}}) as pair:
        p, d = pair.p.identity.layout, pair.d.identity.layout
        assert [line.partition(":")[0] for line in p.differences(d)] == ["group_shapes", "group_windows", "num_layers"]
        with pytest.raises(TransferFailed) as caught:
            await ask(pair, prompt_of(40))
        assert "KV layouts differ (source != receiver): group_shapes: " in caught.value.message
        assert f"group_windows: {p.group_windows} != {d.group_windows}" in caught.value.message


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(1, 2), (2, 1), (2, 2)],
)
@pytest.mark.slow
async def test_i1_ranks_move_their_parts_of_every_group(
    make_pair: MakePair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, prefill: int, decode: int
) -> None:
    monkeypatch.setattr(rank_processes, "start_program", start_rank)
    sizes = {"prefill": {"tensor_parallel_size": prefill}, "decode": {"tensor_parallel_size": decode}}
    async with make_pair(**sizes) as pair:
        for length in (16, 200):
            answer = await ask(pair, prompt_of(length))
            oracle.check(prompt_of(length), answer.token_ids)
            assert answer.num_landed == num_sent(length)


async def test_i1_blocks_of_every_group_come_back_from_host_memory(make_pair: MakePair, oracle: Oracle) -> None:
    async with make_pair(kv_host_mib=1) as pair:
        prompts = [prompt_of(250, seed) for seed in range(3)]
        for prompt in [*prompts, *prompts]:
            answer = await ask(pair, prompt)
            oracle.check(prompt, answer.token_ids)
        # what follows the last full block
        assert answer.num_landed == num_sent(250, 250 // BLOCK_SIZE)
        for worker in (pair.p, pair.d):
            tier = door_of(worker).core.scheduler.pool.tier
            assert tier is not None
            assert tier.num_loaded > 0


@pytest.mark.slow
async def test_i1_a_draft_model_has_one_group_of_its_own(make_pair: MakePair, oracle: Oracle, gemma3: Path) -> None:
    drafts = SpeculativeConfig(model=str(gemma3), num_speculative_tokens=3, disable_by_batch_size=None)
    async with make_pair(decode={"speculative_config": drafts}) as pair:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        answer = await ask(pair, prompt_of(60), sampling_params=params)
        oracle.check(prompt_of(60), answer.token_ids)
        assert len(answer.token_ids) == 24
        stats = door_of(pair.d).core.scheduler.drafts.stats
        assert stats is not None
        assert stats.num_accepted_tokens > 0


async def test_i1_a_resumed_text_goes_on_through_both_workers(make_pair: MakePair, oracle: Oracle) -> None:
    prompt = prompt_of(90)
    said = oracle.greedy(prompt, 1)
    given = [*prompt, *said]
    async with make_pair() as pair:
        hasher = BlockHasher(KEY, BLOCK_SIZE)
        root = hasher.root(pair.p.identity.layout.model_fingerprint)
        digest = hasher.request_digest(root, hasher.extend(root, given), given)
        answer = await ask(pair, prompt, output_token_ids=said, request_digest=digest)
        oracle.check(given, answer.token_ids)
        assert len(answer.token_ids) == 3
        assert answer.num_landed == num_sent(len(given))


@pytest.mark.slow
async def test_i1_an_engine_in_a_process_of_its_own_has_groups(gemma3: Path, oracle: Oracle) -> None:
    async with running_pair(gemma3, KEY, engine_process=True, **FIELDS) as pair:
        for length in (70, LONGEST - 4):
            answer = await ask(pair, prompt_of(length))
            oracle.check(prompt_of(length), answer.token_ids)
            assert answer.num_landed == num_sent(length)
