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
from pdserve.kernels.triton.attention.attention_configs import attention_configs
from pdserve.kernels.triton.attention.attention_launch import head_tile
from pdserve.kernels.triton.attention.step_buffers import StepBuffers
from pdserve.kernels.triton.attention.triton_attention import TritonAttentionBackend
from tests.kernels.attention_contract import AttentionContract, LatentAttentionContract
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


class TestTritonLatentAttention(LatentAttentionContract):
    device = DEVICE

    def make_backend(self, kv_cache: Tensor) -> TritonAttentionBackend:
        return TritonAttentionBackend(kv_cache)


def check(heads: tuple[int, int, int], options: dict[str, Any] | None = None, **fields: Any) -> None:
    value_dim = (options or {}).get("value_dim")
    case = make_case(heads=heads, value_dim=value_dim, **fields).to(DEVICE)
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
    [(20, 1, 16), pytest.param((71, 1, 8), marks=pytest.mark.slow), (2, 1, 256), (8, 1, 320), (4, 1, 512), (3, 3, 1)],
    ids=str,
)
def test_more_heads_than_the_smallest_tile_and_very_wide_and_narrow_ones(heads: tuple[int, int, int]) -> None:
    check(heads, decodes=[33, 17], prefills=[(9, 21)], block_size=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 13, "softcap": 2.0},
        {"sinks": True},
        pytest.param({"causal": False}, marks=pytest.mark.slow),
        pytest.param({"distance_bias": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_latent_rows_of_layers_with_other_scores(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """40 heads: three tiles of a decode row, the last one not full, and tiles of several tokens of a chunk."""
    fields: dict[str, Any] = {"decodes": [300, 5], "prefills": [(37, 33), (0, 7)], "block_size": 16}
    check((40, 1, 32), options | {"value_dim": 24}, dtype=dtype, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [16, 128])
def test_long_rows_of_deepseek(num_heads: int) -> None:
    """Pieces of 256 tokens, or 512 with many heads."""
    options = {"value_dim": 512, "scale": 0.04}
    check((num_heads, 1, 576), options, decodes=[600, 1100], prefills=[(200, 5)], block_size=64, dtype=torch.bfloat16)


def test_heads_of_a_tile_over_latent_rows() -> None:
    """Whole tokens fill a tile of a chunk; results of a piece have no more bytes than its rows."""

    def tile_of(architecture: str, num_heads: int, **fields: Any) -> tuple[int, ...]:
        configs = attention_configs(architecture, 576, latent=True)
        kv_cache = torch.empty(1, 1, 1, 1, 16, 576, dtype=fields.get("dtype", torch.bfloat16))
        tile = head_tile(make_spec((num_heads, 1, 576), value_dim=512), kv_cache, configs)
        assert (tile.value_dim, tile.rest_dim) == (512, 64)
        assert tile.prefill_tokens * tile.prefill_heads <= tile.prefill_rows
        return tile.decode_rows, tile.prefill_heads, tile.prefill_tokens, tile.piece_tokens

    assert tile_of("sm_90", 128) == (64, 64, 1, 512)
    assert tile_of("sm_90", 16) == (16, 16, 4, 256)
    assert tile_of("sm_90", 40) == (64, 8, 8, 256)
    assert tile_of("sm_90", 71) == (64, 1, 64, 256)
    assert tile_of("sm_80", 128) == (16, 16, 1, 512)
    assert tile_of("sm_90", 128, dtype=torch.float32) == (16, 16, 1, 256)
    whole = head_tile(make_spec((71, 1, 64)), torch.empty(1, 1, 1, 2, 16, 64), attention_configs("sm_90", 64))
    assert (whole.decode_rows, whole.prefill_heads, whole.rest_dim, whole.piece_tokens) == (128, 71, 0, 256)


def test_fused_attention_over_latent_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="the cache has latent rows"):
        TritonAttentionBackend(torch.zeros(2, 1, 1, 1, 16, 24, device=DEVICE), "sdpa")


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


@pytest.mark.parametrize(("heads", "value_dim"), [((4, 2, 16), None), ((20, 1, 32), 24)], ids=["heads", "latent rows"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_decode_row_has_the_same_bits_alone_and_in_any_batch(
    dtype: torch.dtype, heads: tuple[int, int, int], value_dim: int | None
) -> None:
    fields: dict[str, Any] = {"heads": heads, "block_size": 16, "dtype": dtype, "value_dim": value_dim}
    case = make_case(decodes=[600, 3, 40, 257], prefills=[(5, 20)], **fields).to(DEVICE)
    backend, spec = TritonAttentionBackend(case.kv_cache), make_spec(heads, value_dim=value_dim)
    together = run_step(backend, case, spec)
    for row in range(4):
        assert torch.equal(run_step(backend, row_of(case, row), spec)[0], together[row])


def launches_of(
    backend: TritonAttentionBackend, case: Case, heads: tuple[int, int, int], **options: Any
) -> list[Launch]:
    plan = backend.plan(case.batch, make_spec(heads, **options))
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


@pytest.mark.parametrize(
    ("heads", "options"),
    [((4, 2, 16), {}), ((4, 2, 16), {"window": 40}), ((20, 1, 32), {"value_dim": 24})],
    ids=["no window", "window", "latent rows"],
)
def test_the_launches_of_a_decode_step_depend_on_the_number_of_rows_alone(
    heads: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """After a step with the longest sequences; then steps with other lengths, blocks and padded rows replay it."""

    def case_of(decodes: list[int]) -> Case:
        value_dim = options.get("value_dim")
        fields: dict[str, Any] = {"block_size": 16, "dtype": torch.float32, "value_dim": value_dim}
        return make_case(decodes=decodes, heads=heads, **fields).to(DEVICE)

    largest = case_of([700] * 4)
    backend = TritonAttentionBackend(largest.kv_cache)
    expected = [as_captured(launch) for launch in launches_of(backend, largest, heads, **options)]
    assert [name for name, *_ in expected] == ["store_heads", "attend_pieces", "join_pieces"]
    for decodes in ([1, 2, 3, 4], [699, 0, 0, 0], [0, 0, 0, 0]):
        found = launches_of(backend, case_of(decodes), heads, **options)
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


def check_stored_rows(make_backend: Callable[[Tensor], AttentionBackend]) -> None:
    """No byte but those of the step's rows, also none of what comes after a row, where other caches have its value."""
    case = make_case(
        decodes=[20, 5], prefills=[(9, 11)], heads=(4, 1, 32), value_dim=24, block_size=16, dtype=torch.float32
    ).to(DEVICE)
    expected, slots = case.kv_cache.clone(), case.batch.slot_mapping
    expected[slots // 16, :, case.layer, 0, slots % 16] = case.k
    make_backend(case.kv_cache).plan(case.batch, make_spec((4, 1, 32), value_dim=24)).store(case.layer, case.k, case.v)
    assert torch.equal(case.kv_cache.view(torch.int32), expected.view(torch.int32))


def test_latent_rows_are_stored_and_nothing_else() -> None:
    check_stored_rows(TritonAttentionBackend)


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_a_pool_of_more_than_two_to_the_31_numbers(part: str) -> None:
    check_pool_of_many_numbers(TritonAttentionBackend, part)
