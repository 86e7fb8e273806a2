"""A draft head's blocks through a prefill and a decode worker: decode drafts as one worker would, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from pdserve.common.errors import TransferFailed
from pdserve.common.kv_layout import KvLayout
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.common.transfer_order import TransferOrder
from pdserve.engine.ranks import rank_processes
from pdserve.engine.runner.drafts.head_drafter import HeadDrafter
from pdserve.engine.speculation.drafter import DraftRows
from pdserve.kv_transfer.control.source_transfer import SourceTransfer
from pdserve.v1 import decode_pb2, prefill_pb2
from tests.support.engine.forked_engine import start_rank
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.draft_heads import DraftHeadModel, EagleModel, HeadModel, head_setting
from tests.support.models.oracle import Oracle
from tests.support.transfers.worker_pair import BLOCK_SIZE, ask, check_at_rest, running_pair

FIELDS: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "max_num_batched_tokens": 32}
LENGTHS = (5, 16, 17, 70, 100)


def head(model: HeadModel, num_tokens: int) -> dict[str, Any]:
    return {"speculative_config": head_setting(model, num_tokens)}


@pytest.fixture(
    scope="module",
    params=["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle3", "qwen3_next"))],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadModel:
    folder = tmp_path_factory.mktemp("heads")
    if request.param == "eagle3":
        return EagleModel(folder / "model", folder / "head")
    return DraftHeadModel(folder, request.param)


@pytest.fixture(scope="module")
def oracle(model: HeadModel) -> Oracle:
    return Oracle(model.folder)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """(known tokens, drafts after them), of all steps."""
    found = []
    propose = HeadDrafter.propose

    def noted(self: HeadDrafter, wanted: DraftRows) -> Sequence[Sequence[int]]:
        drafts = propose(self, wanted)
        for row, of_row in zip(wanted.rows.tolist(), drafts, strict=True):
            found.append((wanted.token_ids[row, : wanted.num_tokens[row]].tolist(), list(of_row)))
        return drafts

    monkeypatch.setattr(HeadDrafter, "propose", noted)
    return found


def num_sent(length: int, layout: KvLayout, num_cached: int = 0) -> int:
    """Blocks of a prompt that a transfer moves. layout: of the groups that it moves."""
    order = TransferOrder.of(layout.group_windows, length, BLOCK_SIZE)
    return len(order) - order.number(num_cached)


@pytest.mark.parametrize(
    ("connector", "at_p"), [("tcp", 3), ("nixl", 1), pytest.param("tcp", 1, marks=pytest.mark.slow)]
)
async def test_decode_drafts_as_one_worker(
    model: HeadModel, oracle: Oracle, drafted: list[tuple[list[int], list[int]]], connector: str, at_p: int
) -> None:
    """From its first step on, whatever number of tokens the prefill worker would draft."""
    if connector == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    async with running_pair(
        model.folder, connector=connector, prefill=head(model, at_p), decode=head(model, 2), **FIELDS
    ) as pair:
        for length in LENGTHS:
            prompt = prompt_of(length)
            drafted.clear()
            answer = await ask(pair, prompt, sampling_params=_params())
            oracle.check(prompt, answer.token_ids)
            assert answer.num_landed == num_sent(length, pair.d.identity.layout)
            firsts = [known for known, _ in drafted]
            assert firsts[0] == [*prompt, *answer.token_ids[:2]], "the first step after the hand-over drafts"
            for known, drafts in drafted:
                assert drafts
                assert drafts == model.drafts(known, len(drafts))
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


@pytest.mark.parametrize("has_head", ["p", "d"])
async def test_a_worker_without_the_head(
    model: HeadModel, oracle: Oracle, drafted: list[tuple[list[int], list[int]]], has_head: str
) -> None:
    """Its blocks are not moved. Decode does not draft then, but drafts what it computes itself."""
    fields: dict[str, Any] = {"prefill" if has_head == "p" else "decode": head(model, 2)}
    async with running_pair(model.folder, **fields, **FIELDS) as pair:
        assert not pair.p.identity.layout.differences(pair.d.identity.layout)
        layout = pair.d.identity.layout.without_draft_head()
        drafted.clear()  # what the workers tried at their start
        for length in LENGTHS:
            for _ in range(2):  # the second time blocks are cached here, those of the head are not
                answer = await ask(pair, prompt_of(length), sampling_params=_params())
                oracle.check(prompt_of(length), answer.token_ids)
            assert answer.num_landed == num_sent(length, layout, length // BLOCK_SIZE)
        assert not any(drafts for _, drafts in drafted)
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


@pytest.mark.parametrize(
    ("num_sent_places", "message"),
    [
        # which of the two is noticed first depends on when its steps end
        (5, r"does not match its digest|the source finished after \d of {} wanted blocks"),
        (1, r"the source finished after 1 of {} wanted blocks"),
    ],
    ids=["under the numbers of others", "as far as it can"],
)
async def test_i14_a_source_that_publishes_no_blocks_of_the_head_lets_nothing_run(
    model: DraftHeadModel, monkeypatch: pytest.MonkeyPatch, num_sent_places: int, message: str
) -> None:
    """It says that these are all, and what the prompt's first token is."""
    settled = SourceTransfer.settled
    async with running_pair(model.folder, prefill=head(model, 2), decode=head(model, 2), **FIELDS) as pair:
        order = TransferOrder.of(pair.d.identity.layout.group_windows, 70, BLOCK_SIZE)

        def partly(
            transfer: SourceTransfer, first_index: int, blocks: Sequence[int], digests: Sequence[tuple[int, ...]]
        ) -> None:
            places = order.blocks(first_index, first_index + len(blocks))
            kept = [number for number, (group, place) in enumerate(places) if group == 0 and place < num_sent_places]
            transfer._wanted = (0, len(kept))
            if kept:
                settled(transfer, first_index, [blocks[place] for place in kept], [digests[place] for place in kept])

        monkeypatch.setattr(SourceTransfer, "settled", partly)
        with pytest.raises(TransferFailed, match=message.format(len(order))):
            await ask(pair, prompt_of(70))
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


@pytest.mark.parametrize(("at_p", "at_d"), [(True, False), (False, True)])
async def test_i14_workers_that_hear_different_things_of_the_head_let_nothing_run(
    model: HeadModel, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, at_p: bool, at_d: bool
) -> None:
    """Blocks would have other numbers at both ends."""
    answers = {"prefill": at_p, "decode": at_d}

    def odd_message(kind: type[Any], role: str) -> Any:
        return lambda **fields: kind(**fields | {"without_draft_head": answers[role]})

    async with running_pair(model.folder, prefill=head(model, 2), decode=head(model, 2), **FIELDS) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(prefill_pb2, "Receiver", odd_message(prefill_pb2.Receiver, "prefill"))
            patch.setattr(decode_pb2, "Source", odd_message(decode_pb2.Source, "decode"))
            with pytest.raises(TransferFailed, match="moves the blocks of another draft head"):
                await ask(pair, prompt_of(70))
        answer = await ask(pair, prompt_of(70), sampling_params=_params())
        oracle.check(prompt_of(70), answer.token_ids)
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


def _params() -> Any:
    from pdserve.common.request.sampling_params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


async def test_another_head_is_another_group(tmp_path: Path, drafted: list[tuple[list[int], list[int]]]) -> None:
    """Both workers have an EAGLE-3 head, with different numbers: the blocks of neither are moved."""
    model = EagleModel(tmp_path / "model", tmp_path / "head")
    shutil.copytree(model.head, tmp_path / "other")
    save_file({**model.weights, "norm.weight": model.weights["norm.weight"] + 1}, tmp_path / "other/model.safetensors")
    setting = SpeculativeConfig(method="eagle3", model=str(tmp_path / "other"), num_speculative_tokens=2)
    async with running_pair(
        model.folder, prefill={"speculative_config": setting}, decode=head(model, 2), **FIELDS
    ) as pair:
        drafted.clear()
        answer = await ask(pair, prompt_of(40), sampling_params=_params())
        Oracle(model.folder).check(prompt_of(40), answer.token_ids)
        assert answer.num_landed == num_sent(40, pair.d.identity.layout.without_draft_head())
        assert not any(drafts for _, drafts in drafted)
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


@pytest.mark.parametrize(
    "ranks",
    [pytest.param((1, 2), marks=pytest.mark.slow), pytest.param((2, 1), marks=pytest.mark.slow), (2, 2)],
    ids=["1:2", "2:1", "2:2"],
)
async def test_ranks(
    model: HeadModel,
    oracle: Oracle,
    drafted: list[tuple[list[int], list[int]]],
    ranks: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_processes, "start_program", start_rank)
    at_p, at_d = ({**head(model, 2), "tensor_parallel_size": size} for size in ranks)
    async with running_pair(model.folder, prefill=at_p, decode=at_d, **FIELDS) as pair:
        drafted.clear()
        for length in LENGTHS:
            answer = await ask(pair, prompt_of(length), sampling_params=_params())
            oracle.check(prompt_of(length), answer.token_ids)
            assert answer.num_landed == num_sent(length, pair.d.identity.layout)
        assert len(drafted) > 20
        for known, drafts in drafted:
            assert drafts
            assert drafts == model.drafts(known, len(drafts))
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)
