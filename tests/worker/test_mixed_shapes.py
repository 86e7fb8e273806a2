"""Blocks of different shapes through a prefill and a decode worker: texts of `transformers`, every shape's blocks, whole pools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdserve.common.errors import TransferFailed
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.common.transfer_order import TransferOrder
from pdserve.engine.executor.executor import SingleDeviceExecutor
from pdserve.engine.executor.tensor_parallel_executor import TensorParallelExecutor
from pdserve.engine.ranks import rank_processes
from pdserve.kv_transfer.control.source_transfer import SourceTransfer
from pdserve.models.kv_cache import STATE_WINDOW
from tests.support.engine.copied_blocks import CopiedBlocks
from tests.support.engine.drafters import drafter_of
from tests.support.engine.forked_engine import start_rank
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import (
    make_chunked_model,
    make_gemma4_model,
    make_mixed_model,
    make_state_model,
)
from tests.support.models.oracle import Oracle
from tests.support.transfers.worker_pair import BLOCK_SIZE, ask, check_at_rest, door_of, running_pair

FIELDS: dict[str, Any] = {"dtype": "float32", "num_blocks": 32, "max_num_batched_tokens": 32}


class Model(NamedTuple):
    folder: Path
    oracle: Oracle
    windows: tuple[int, ...]
    num_heads: tuple[int, ...]
    """Of each shape."""
    chunks: tuple[int, ...] = ()

    def num_sent(self, num_tokens: int) -> int:
        return len(self.order(num_tokens))

    def order(self, num_tokens: int) -> TransferOrder:
        return TransferOrder.of(self.windows, num_tokens, BLOCK_SIZE, self.chunks)


STATES = {
    "states": ("lfm2", (2, 4)), "delta": ("qwen3_next", (2, 2)), "granite": ("granitemoehybrid", (2, 8)),
    "nemotron": ("nemotron_h", (2, 8)), "kimi": ("kimi_linear", (1, 4)), "alone": ("mamba2", (8,)),
    "next to attention": ("falcon_h1", (2, 8)), "channels": ("jamba", (2, 64)),
}  # fmt: skip
"""Family, and KV heads and parts of a state, or parts alone. Kimi Linear's KV head is a latent row, which every rank has."""
SLOW = ("delta", "granite", "nemotron", "kimi", "alone", "next to attention", "channels")


@pytest.fixture(
    scope="module",
    params=[
        "mixed",
        "chunks",
        pytest.param("gemma4", marks=pytest.mark.slow),
        *(pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in STATES),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Layers with a window have twice the KV heads of others, or a state in place of keys and values; or all have states; or most
    have chunks, and all blocks one shape."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mixed":
        return Model(make_mixed_model(folder), Oracle(folder), (0, 19), (1, 2))
    if request.param == "chunks":
        return Model(make_chunked_model(folder), Oracle(folder), (0,) * 4, (2,), (0, 13, 13, 13))
    if request.param == "gemma4":
        return Model(make_gemma4_model(folder), Oracle(folder), (0, 13), (1, 2))
    family, num_heads = STATES[request.param]
    return Model(make_state_model(folder, family), Oracle(folder), (0, STATE_WINDOW)[-len(num_heads) :], num_heads)


@pytest.mark.parametrize("connector", ["tcp", "nixl"])
async def test_i1_texts_over_each_connector(model: Model, connector: str) -> None:
    if connector == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    async with running_pair(model.folder, connector=connector, **FIELDS) as pair:
        assert pair.d.identity.layout.group_windows == model.windows
        assert pair.d.identity.layout.group_chunks == model.chunks
        assert tuple(shape.num_kv_heads for shape in pair.d.identity.layout.shapes) == model.num_heads
        for length in (5, 16, 17, 70, 200):
            answer = await ask(pair, prompt_of(length))
            model.oracle.check(prompt_of(length), answer.token_ids)
            assert answer.num_landed == model.num_sent(length)
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


async def test_i1_i14_a_source_has_blocks_of_every_shape_from_host_memory(model: Model) -> None:
    """Its pool keeps one or two of the prompts; decode keeps none, and receives each again."""
    lengths = (200, 203, 206, 209)
    of_p, of_d = {"num_blocks": 16, "kv_host_mib": 4}, {"num_blocks": 16}
    async with running_pair(model.folder, **FIELDS | {"prefill": of_p, "decode": of_d}) as pair:
        copied = CopiedBlocks(door_of(pair.p).core)
        before = 0
        for length in lengths * 3:
            num_loaded = sum(copied.loaded)
            answer = await ask(pair, prompt_of(length, length))
            model.oracle.check(prompt_of(length, length), answer.token_ids)
            if sum(copied.loaded) > num_loaded:
                before += answer.num_landed
        assert min(copied.loaded) > 0, f"loaded by shape: {copied.loaded}"
        assert before > 0, "no loaded block was sent"
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


async def test_i1_texts_without_a_prefix_cache(model: Model) -> None:
    """A state at the end of a block is nobody else's, so the first token after it moves it along."""
    async with running_pair(model.folder, enable_prefix_caching=False, **FIELDS) as pair:
        for length in (15, 16, 17, 32, 33):
            answer = await ask(pair, prompt_of(length))
            model.oracle.check(prompt_of(length), answer.token_ids)
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


@pytest.mark.few(1)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
async def test_i1_ranks_move_their_parts_of_every_shape(
    model: Model, monkeypatch: pytest.MonkeyPatch, prefill: int, decode: int
) -> None:
    """Of MiMo one KV head, which all ranks have, in one shape; two, which they share, in the other."""
    monkeypatch.setattr(rank_processes, "start_program", start_rank)
    async with running_pair(
        model.folder, prefill={"tensor_parallel_size": prefill}, decode={"tensor_parallel_size": decode}, **FIELDS
    ) as pair:
        for length in (5, 16, 70):
            answer = await ask(pair, prompt_of(length))
            model.oracle.check(prompt_of(length), answer.token_ids)
            assert answer.num_landed == model.num_sent(length)
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, disable_by_batch_size=None)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_i1_drafts_behind_a_transfer(model: Model, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Prompts that end within a block, with one, and behind one; right and wrong drafts. The setting has no effect on prefill."""
    monkeypatch.setattr(rank_processes, "start_program", start_rank)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    ranks = {"tensor_parallel_size": num_ranks}
    lengths = (5, 15, 16, 17, 70)
    texts = [[*prompt_of(length), *model.oracle.greedy(prompt_of(length), 24)] for length in lengths]
    async with running_pair(model.folder, speculative_config=DRAFTS, decode=ranks, **FIELDS) as pair:
        executor = door_of(pair.d).core.executor
        assert isinstance(executor, SingleDeviceExecutor | TensorParallelExecutor)
        assert executor.runner.drafting is not None
        executor.runner.drafting._drafter = drafter_of(texts, 0.7)
        for length in lengths:
            answer = await ask(pair, prompt_of(length), sampling_params=params)
            model.oracle.check(prompt_of(length), answer.token_ids)
        stats = door_of(pair.d).core.scheduler.drafts.stats
        assert stats is not None
        assert 30 < stats.num_accepted_tokens < stats.num_draft_tokens
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


async def test_i14_a_source_that_publishes_blocks_of_one_shape_only_lets_nothing_run(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that these are all, and what the prompt's first token is."""
    settled = SourceTransfer.settled

    def partly(
        transfer: SourceTransfer, first_index: int, blocks: Sequence[int], digests: Sequence[tuple[int, ...]]
    ) -> None:
        order = model.order(70).blocks(first_index, first_index + len(blocks))
        # of one group none
        kept = [place for place, (group, _) in enumerate(order) if group == 0 < len(model.windows) - 1]
        transfer._wanted = (0, len(kept))
        settled(transfer, first_index, [blocks[place] for place in kept], [digests[place] for place in kept])

    monkeypatch.setattr(SourceTransfer, "settled", partly)
    async with running_pair(model.folder, **FIELDS) as pair:
        with pytest.raises(TransferFailed, match=r"the source finished after \d of [1678] wanted blocks"):
            await ask(pair, prompt_of(70))
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)
