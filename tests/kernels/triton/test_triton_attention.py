"""The Triton back end: the contract, and what is its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionBackend
from pdserve.kernels.triton.attention.step_buffers import StepBuffers
from pdserve.kernels.triton.attention.triton_attention import TritonAttentionBackend
from tests.kernels.attention_contract import AttentionContract
from tests.support.kernels.attention_cases import (
    TOLERANCES,
    Case,
    check_step,
    dense_attention,
    make_case,
    make_spec,
    run_step,
)
from tests.support.kernels.compiled_kernels import Launch, recorded_launches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TestTritonAttention(AttentionContract):
    device = DEVICE

    def make_backend(self, kv_cache: Tensor) -> TritonAttentionBackend:
        return TritonAttentionBackend(kv_cache)


def check(heads: tuple[int, int, int], options: dict[str, Any] | None = None, **fields: Any) -> None:
    case = make_case(heads=heads, **fields).to(DEVICE)
    check_step(TritonAttentionBackend(case.kv_cache), case, make_spec(heads, **(options or {})))


@pytest.mark.diagonal
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("window", [None, 70])
def test_pages_of_a_tile_and_more(block_size: int, window: int | None) -> None:
    check(
        (4, 2, 16),
        {"window": window},
        decodes=[300, 65],
        prefills=[(130, 40)],
        block_size=block_size,
        dtype=torch.float32,
    )


@pytest.mark.parametrize(
    "heads",
    [(20, 1, 16), pytest.param((71, 1, 8), marks=pytest.mark.slow), (2, 1, 256), (3, 3, 1)],
    ids=str,
)
def test_more_heads_than_the_smallest_tile_and_very_wide_and_narrow_ones(heads: tuple[int, int, int]) -> None:
    check(heads, decodes=[33, 17], prefills=[(9, 21)], block_size=16, dtype=torch.bfloat16)


def row_of(case: Case, row: int) -> Case:
    """A batch of one decode row of a case, over the same cache."""
    batch = case.batch
    seq_lens = batch.seq_lens_cpu[row : row + 1]
    alone = replace(
        batch,
        positions=batch.positions[row : row + 1],
        slot_mapping=batch.slot_mapping[row : row + 1],
        query_start_loc=torch.tensor([0, 1]).to(DEVICE),
        query_start_loc_cpu=torch.tensor([0, 1]),
        seq_lens=seq_lens.to(DEVICE),
        seq_lens_cpu=seq_lens,
        block_tables=batch.block_tables[row : row + 1],
        num_decodes=1,
        max_query_len=1,
        max_seq_len=int(seq_lens),
    )
    tensors = {name: getattr(case, name)[row : row + 1] for name in ("q", "k", "v")}
    return replace(case, batch=alone, **tensors)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_decode_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    heads = (4, 2, 16)
    case = make_case(decodes=[600, 3, 40, 257], prefills=[(5, 20)], heads=heads, block_size=16, dtype=dtype).to(DEVICE)
    backend = TritonAttentionBackend(case.kv_cache)
    together = run_step(backend, case, make_spec(heads))
    for row in range(4):
        assert torch.equal(run_step(backend, row_of(case, row), make_spec(heads))[0], together[row])


def launches_of(backend: TritonAttentionBackend, case: Case, **options: Any) -> list[Launch]:
    plan = backend.plan(case.batch, make_spec((4, 2, 16), **options))
    with recorded_launches() as launches:
        plan.store(case.layer, case.k, case.v)
        plan.attend(case.layer, case.q, case.k, case.v)
    return launches


def as_captured(launch: Launch) -> tuple[object, ...]:
    """Everything that a captured graph would keep, but the addresses of the model's own tensors."""
    arguments = {
        name: (value.data_ptr(), value.stride()) if isinstance(value, Tensor) else value
        for name, value in launch.arguments.items()
        if name not in {"q", "k", "v", "out"}
    }
    return launch.kernel.__name__, launch.grid, sorted(arguments.items()), sorted(launch.options.items())


@pytest.mark.parametrize("window", [None, 40])
def test_the_launches_of_a_decode_step_depend_on_the_number_of_rows_alone(window: int | None) -> None:
    """After a step with the longest sequences; then steps with other lengths, blocks and padded rows replay it."""
    heads = (4, 2, 16)
    largest = make_case(decodes=[700] * 4, heads=heads, block_size=16, dtype=torch.float32).to(DEVICE)
    backend = TritonAttentionBackend(largest.kv_cache)
    expected = [as_captured(launch) for launch in launches_of(backend, largest, window=window)]
    assert [name for name, *_ in expected] == ["store_heads", "attend_pieces", "join_pieces"]
    for decodes in ([1, 2, 3, 4], [699, 0, 0, 0], [0, 0, 0, 0]):
        case = make_case(decodes=decodes, heads=heads, block_size=16, dtype=torch.float32).to(DEVICE)
        found = launches_of(backend, case, window=window)
        assert [as_captured(launch) for launch in found] == expected
        assert "q" in found[1].arguments


def test_buffers_move_only_to_grow() -> None:
    buffers = StepBuffers(torch.device(DEVICE))
    first = buffers.room("part", 5, torch.float32)
    assert len(first) == 8
    assert buffers.room("part", 8, torch.float32) is first
    assert len(buffers.room("part", 9, torch.float32)) == 16
    assert buffers.room("lse", 1, torch.float32) is not first
    put = buffers.put("pieces", torch.arange(3, dtype=torch.int32))
    again = buffers.put("pieces", torch.tensor([7, 8], dtype=torch.int32, device=DEVICE))
    assert again is put
    assert put[:3].tolist() == [7, 8, 2]
    assert [buffers.row_width(width) for width in (3, 2, 5, 1)] == [4, 4, 8, 8]


def test_an_empty_list_has_a_buffer() -> None:
    assert len(StepBuffers(torch.device(DEVICE)).put("pieces", torch.zeros(0, dtype=torch.int32))) == 1


def check_pool_of_many_numbers(make_backend: Callable[[Tensor], AttentionBackend], part: str) -> None:
    """A sequence at the end of a pool of more than 2^31 numbers. Only the pages that it writes take memory."""
    heads = (2, 1, 64)
    fields: dict[str, Any] = (
        {"decodes": [20], "prefills": []} if part == "decode" else {"decodes": [], "prefills": [(9, 11)]}
    )
    case = make_case(heads=heads, block_size=16, dtype=torch.float16, num_layers=2, **fields).to(DEVICE)
    block = case.kv_cache[0].numel()
    shift = (1 << 31) // block + 5
    pool = torch.empty((shift + len(case.kv_cache), *case.kv_cache.shape[1:]), dtype=torch.float16, device=DEVICE)
    pool[shift:] = case.kv_cache
    batch = replace(
        case.batch, block_tables=case.batch.block_tables + shift, slot_mapping=case.batch.slot_mapping + shift * 16
    )
    spec = make_spec(heads)
    found = run_step(make_backend(pool), replace(case, kv_cache=pool, batch=batch), spec)
    expected = dense_attention(case.to("cpu"), spec)
    torch.testing.assert_close(found.cpu().double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_a_pool_of_more_than_two_to_the_31_numbers(part: str) -> None:
    check_pool_of_many_numbers(TritonAttentionBackend, part)
