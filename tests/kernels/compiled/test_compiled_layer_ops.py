"""Machine code of the kernels of layer operations, for GPUs that are not there: no spills, fits, and loads 16 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.layers.expert_stack import ExpertStack
from pdserve.kernels.layers.gated_activations import Gate, GatedActivation, squared_relu
from pdserve.kernels.layers.packed_groups import PackedGroups, tile_width
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.lora.lora_linear import LoraStack
from pdserve.kernels.sampled_rows import PARAMETERS, PackedRows, SamplingStages
from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.triton.add_norm import add_norm
from pdserve.kernels.triton.block_digests import block_digests
from pdserve.kernels.triton.grouped_experts import grouped_experts
from pdserve.kernels.triton.grouped_linear import TritonGroupedLinear
from pdserve.kernels.triton.launch_configs import TABLE, LaunchConfigs
from pdserve.kernels.triton.lora_products import add_lora, column_tiles
from pdserve.kernels.triton.move_blocks import move_blocks
from pdserve.kernels.triton.pooled_states import PooledMatrices, PooledStates
from pdserve.kernels.triton.rotate_and_store import rotate_and_store
from pdserve.kernels.triton.sample_tokens import SamplingLaunches
from pdserve.kernels.triton.state_chunks import delta_chunks, scan_chunks
from pdserve.kernels.triton.state_columns import convolve
from pdserve.kernels.triton.state_steps import delta_rows, scan_rows
from pdserve.kernels.triton.swiglu import swiglu
from tests.support.kernels.compiled_kernels import SHARED_BYTES, TARGETS, compile_launch, recorded_launches
from tests.support.kernels.sampled_rows import metadata

BF16 = torch.bfloat16


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norm(size: int, dtype: torch.dtype = BF16) -> RmsNorm:
    return RmsNorm(made(size, dtype=dtype), 1e-5)


def rotated(heads: Sequence[int], configs: LaunchConfigs, *, has_norm: bool, dtype: torch.dtype = BF16) -> None:
    num_heads, num_kv_heads, size = heads
    spec = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=size, scale=1.0)
    qkv = made(64, num_heads + 2 * num_kv_heads, size, dtype=dtype)
    qk_norm = HeadNorm(made(num_heads + num_kv_heads, size, dtype=dtype), 1e-5) if has_norm else None
    phases, slots = made(64, 1, size // 2, dtype=torch.complex64), made(64, dtype=torch.int64)
    # above 2^31 numbers
    kv_cache = made(1 << 16, num_kv_heads, 32, 2, 16, size, dtype=dtype)
    rotate_and_store(qkv, spec, qk_norm, phases, kv_cache, slots, 3, configs)


def sampled(count: int, configs: LaunchConfigs, **fields: Any) -> None:
    vocab_size = 151_936
    stages = SamplingStages.of(metadata(count, vocab_size, **fields), vocab_size)
    rows = PackedRows(made(PARAMETERS, count, dtype=torch.int64), stages)
    SamplingLaunches(made(count, vocab_size, dtype=torch.float32), rows, configs).run()


def with_adapters(
    count: int,
    in_size: int,
    out_sizes: Sequence[int],
    configs: LaunchConfigs,
    *,
    max_rank: int,
    dtype: torch.dtype = BF16,
) -> None:
    stack = LoraStack(in_size, out_sizes, max_loras=8, max_rank=max_rank, dtype=dtype, device=torch.device("meta"))
    tokens, starts = (made(size, dtype=torch.int32) for size in (count, 9))
    y, x = made(count, sum(out_sizes), dtype=dtype), made(count, in_size, dtype=dtype)
    add_lora(y, x, stack, column_tiles(stack, configs), tokens, starts, configs)


def experts_of(
    count: int,
    sizes: Sequence[int],
    configs: LaunchConfigs,
    *,
    dtype: torch.dtype = BF16,
    has_biases: bool = False,
    gate: Gate | None = None,
) -> None:
    num_experts, hidden, inner, top_k = sizes
    activation = GatedActivation.of(gate)
    assert activation is not None
    num_rows = (1 + activation.is_gated) * inner
    gate_up, down = (made(num_experts, *size, dtype=dtype) for size in ((num_rows, hidden), (hidden, inner)))
    gate_up_bias, down_bias = (
        made(num_experts, size, dtype=dtype) if has_biases else None for size in (num_rows, hidden)
    )
    stack = ExpertStack(gate_up, down, gate_up_bias, down_bias, gate)
    chosen = made(count, top_k, dtype=torch.int64)
    weights, x = made(count, top_k, dtype=dtype), made(count, hidden, dtype=dtype)
    grouped_experts(x, weights, chosen, stack, activation, configs)


def in_groups(
    *shape: int, bits: int, group: int, is_float: bool = False, has_offsets: bool = False, rounds_inputs: bool = False
) -> PackedGroups:
    """shape: `(E,) out, in`."""
    *experts, outputs, inputs = shape
    width = tile_width(inputs, group)
    runs = -(-inputs * bits // (8 * width))
    scales = made(*experts, -(-inputs // group), outputs, dtype=torch.float32)
    values = made(*experts, runs, outputs, width, dtype=torch.int8)
    return PackedGroups(values, scales, scales if has_offsets else None, bits, inputs, group, is_float, rounds_inputs)


def multiplied(
    count: int, weight: PackedGroups, configs: LaunchConfigs, *, has_bias: bool = False, dtype: torch.dtype = BF16
) -> None:
    bias = made(weight.num_outputs, dtype=dtype) if has_bias else None
    x, y = made(count, weight.num_inputs, dtype=dtype), made(count, weight.num_outputs, dtype=dtype)
    TritonGroupedLinear(weight, bias, configs).add_to(y, x)


def widened(weight: PackedGroups, configs: LaunchConfigs) -> None:
    for _ in TritonGroupedLinear(weight, None, configs).parts(BF16):
        pass


def experts_in_groups(count: int, configs: LaunchConfigs, **form: Any) -> None:
    """Of gpt-oss. form: of `in_groups`."""
    gate_up, down = in_groups(32, 2 * 2880, 2880, **form), in_groups(32, 2880, 2880, **form)
    stack = ExpertStack(gate_up, down, made(32, 2 * 2880), made(32, 2880), None)
    x, weights, chosen = made(count, 2880), made(count, 4), made(count, 4, dtype=torch.int64)
    grouped_experts(x, weights, chosen, stack, GatedActivation(), configs)


def pooled_states(num_heads: int, head_size: int) -> PooledStates:
    """60 decode rows and 4 chunks, together 1,084 rows; the pool has above 2^31 numbers."""
    states = made(1 << 14, num_heads, 32, head_size, dtype=torch.float32)
    blocks, starts = (made(*shape, dtype=torch.int64) for shape in ((2, 64), (65,)))
    return PooledStates(states, blocks, starts, num_decodes=60, longest=500, layer=3)


def convolved(num_heads: int, num_channels: int, configs: LaunchConfigs, *, dtype: torch.dtype = BF16) -> None:
    total = num_heads * num_channels
    conv = CausalConv(made(total, 4, dtype=dtype), made(total, dtype=dtype), [ColumnPart(num_channels)], has_silu=True)
    columns, out = (made(1084, total, dtype=dtype) for _ in range(2))
    runs = made(num_heads, 5, dtype=torch.int64)
    convolve(pooled_states(num_heads, conv.num_kept), conv, runs, columns, out, configs)


def tokens_of(num_matrices: int, *sizes: int) -> list[Tensor]:
    """size 1: a number."""
    shapes = [(1084, num_matrices, size) if size > 1 else (1084, num_matrices) for size in sizes]
    return [made(*shape, dtype=torch.float32) for shape in shapes]


def delta_ruled(
    num_heads: int, per_head: int, shape: tuple[int, int], configs: LaunchConfigs, *, num_decays: int = 1
) -> None:
    num = num_heads * per_head
    pooled = pooled_states(num_heads, 64 + per_head * shape[0] * shape[1])
    tokens = tokens_of(num, shape[0], shape[0], shape[1], num_decays, 1)
    for launch in (delta_rows, delta_chunks):
        launch(PooledMatrices(pooled, 64, shape), tokens, made(1084, num, shape[1], dtype=torch.float32), configs)


def scanned(
    num_heads: int, per_head: int, shape: tuple[int, int], configs: LaunchConfigs, *, by_element: bool = False
) -> None:
    num = num_heads * per_head
    pooled = pooled_states(num_heads, 64 + per_head * shape[0] * shape[1])
    vectors = tokens_of(num, shape[0], shape[1], shape[1])
    sizes = ((*shape,), (shape[0],)) if by_element else ((1, 1), (1,))
    tokens = [*vectors, *(made(1084, num, *size, dtype=torch.float32) for size in sizes)]
    for launch in (scan_rows,) if by_element else (scan_rows, scan_chunks):
        launch(PooledMatrices(pooled, 64, shape), tokens, made(1084, num, shape[0], dtype=torch.float32), configs)


ROUNDED: dict[str, Any] = {"bits": 8, "is_float": True, "rounds_inputs": True}
CASES: dict[str, Callable[[LaunchConfigs], object]] = {
    "add and norm": lambda configs: add_norm(made(64, 4096), made(64, 4096), norm(4096), configs),
    "norm of 16,384": lambda configs: add_norm(made(64, 16384), None, norm(16384), configs),
    "norm of 896 in float32": lambda configs: add_norm(
        made(64, 896, dtype=torch.float32), None, norm(896, torch.float32), configs
    ),
    "rotary of 8b": lambda configs: rotated((32, 8, 128), configs, has_norm=False),
    "rotary with norm": lambda configs: rotated((64, 4, 128), configs, has_norm=True),
    "rotary of heads of 80": lambda configs: rotated((10, 2, 80), configs, has_norm=False, dtype=torch.float16),
    "rotary of heads of 256": lambda configs: rotated((16, 8, 256), configs, has_norm=True, dtype=torch.float32),
    "swiglu": lambda configs: swiglu(made(64, 2 * 14336), configs),
    "lora of 8b": lambda configs: with_adapters(64, 4096, (4096, 1024, 1024), configs, max_rank=16),
    "lora of rank 512": lambda configs: with_adapters(64, 14336, (4096,), configs, max_rank=512),
    "lora in float32": lambda configs: with_adapters(
        1, 896, (896, 128, 128), configs, max_rank=64, dtype=torch.float32
    ),
    "experts of 30b": lambda configs: experts_of(64, (128, 2048, 768, 8), configs),
    "experts without a gate": lambda configs: experts_of(64, (128, 2688, 1856, 6), configs, gate=squared_relu),
    "many rows of experts": lambda configs: experts_of(4096, (32, 2880, 2880, 4), configs, has_biases=True),
    "experts in float32": lambda configs: experts_of(8, (8, 64, 32, 2), configs, dtype=torch.float32),
    "w4a16 of 8b": lambda configs: multiplied(16, in_groups(6144, 4096, bits=4, group=128), configs),
    "w4a16 of 64 rows": lambda configs: multiplied(
        64, in_groups(4096, 14336, bits=4, group=32, has_offsets=True), configs, has_bias=True
    ),
    "w8a16 in float32": lambda configs: multiplied(
        4, in_groups(896, 896, bits=8, group=32), configs, dtype=torch.float32
    ),
    "w8a16 in groups of 16": lambda configs: multiplied(16, in_groups(4096, 4096, bits=8, group=16), configs),
    "widened w4a16": lambda configs: widened(in_groups(4096, 4096, bits=4, group=128), configs),
    "experts in int4": lambda configs: experts_in_groups(64, configs, bits=4, group=32),
    "many rows of experts in int8": lambda configs: experts_in_groups(4096, configs, bits=8, group=32),
    "fp8 of 8b": lambda configs: multiplied(16, in_groups(6144, 4096, bits=8, group=128, is_float=True), configs),
    "experts in fp8": lambda configs: experts_in_groups(64, configs, bits=8, group=160, is_float=True),
    "w8a8 of 8b": lambda configs: multiplied(16, in_groups(6144, 4096, group=128, **ROUNDED), configs),
    "w8a8 of 2,048 rows": lambda configs: multiplied(2048, in_groups(6144, 4096, group=128, **ROUNDED), configs),
    "w8a8 with a scale per row": lambda configs: multiplied(64, in_groups(6144, 4096, group=4096, **ROUNDED), configs),
    "experts of w8a8": lambda configs: experts_in_groups(64, configs, group=160, **ROUNDED),
    "columns of heads of 512": lambda configs: convolved(16, 512, configs),
    "columns in float32": lambda configs: convolved(3, 80, configs, dtype=torch.float32),
    "delta rule": lambda configs: delta_ruled(16, 2, (128, 128), configs),
    "delta rule of 256": lambda configs: delta_ruled(4, 4, (256, 256), configs),
    "delta rule with decays of rows": lambda configs: delta_ruled(32, 1, (128, 128), configs, num_decays=128),
    "scan": lambda configs: scanned(8, 16, (64, 128), configs),
    "scan with decays of elements": lambda configs: scanned(8, 1, (1024, 16), configs, by_element=True),
    "scan of 256": lambda configs: scanned(8, 3, (64, 256), configs),
    "move": lambda configs: move_blocks(made(64, 1 << 20), made(64, 1 << 20), [(0, 1)], configs),
    "digests": lambda configs: block_digests(made(64, 1 << 20), [0], made(200, dtype=torch.int64), configs),
    "greedy rows": lambda configs: sampled(64, configs, temperature=0.0),
    "rows with top_k and top_p": lambda configs: sampled(64, configs, top_k=50, top_p=0.9),
    "rows with min_p": lambda configs: sampled(256, configs, min_p=0.1),
    # an argument that is 1 is a constant for the compiler
    "one row with top_p": lambda configs: sampled(1, configs, top_p=0.9),
}
NARROW = {"choose", "choose_again", "chain_sums", "round_inputs", "keep_columns", "convolve_tokens"}
"""Kernels that read a few numbers per thread."""
NARROW_CASES = {"w8a16 in groups of 16"}
"""Of which a row of a tile has 16 bytes."""
_W8A8 = {"w8a8 of 8b", "w8a8 of 2,048 rows", "w8a8 with a scale per row", "experts of w8a8"}
NOT_ON = {name: {"fp8 of 8b", "experts in fp8", *_W8A8} for name in ("sm_80", "sm_86")} | {"gfx942": _W8A8}
"""Cases that a GPU is not given, since it has no such instructions, or for AMD another float8."""
FAST = {
    ("sm_90", "w4a16 of 8b"),
    ("sm_90", "add and norm"),
    ("sm_90", "lora of 8b"),
    ("sm_90", "rotary with norm"),
    ("gfx942", "swiglu"),
}
"""The part of `make test`."""
_FOR_ALL = (
    "swiglu",
    "move",
    "digests",
    "w4a16 of 8b",
    "widened w4a16",
    "columns of heads of 512",
    "delta rule",
    "scan",
)
SELECTED = {
    "sm_80": (
        *_FOR_ALL,
        "w8a16 in groups of 16",
        "experts in int4",
        "add and norm",
        "rotary of 8b",
        "lora of 8b",
        "experts of 30b",
        "rows with top_k and top_p",
    ),
    "sm_90": (
        *_FOR_ALL,
        "add and norm",
        "rotary with norm",
        "lora of 8b",
        "w4a16 of 64 rows",
        "fp8 of 8b",
        "experts in fp8",
        "w8a8 of 8b",
        "w8a8 of 2,048 rows",
        "experts of w8a8",
        "many rows of experts",
        "rows with top_k and top_p",
        "greedy rows",
        "rows with min_p",
    ),
    "sm_100": (
        *_FOR_ALL,
        "norm of 16,384",
        "columns in float32",
        "delta rule of 256",
        "delta rule with decays of rows",
        "rotary of heads of 256",
        "lora of rank 512",
        "w8a8 of 8b",
        "many rows of experts in int8",
        "experts of 30b",
        "one row with top_p",
    ),
    "sm_120": (
        *_FOR_ALL,
        "norm of 896 in float32",
        "scan of 256",
        "rotary with norm",
        "lora in float32",
        "w8a16 in float32",
        "w8a8 with a scale per row",
        "experts in float32",
        "experts without a gate",
        "one row with top_p",
    ),
    "gfx942": (
        *_FOR_ALL,
        "add and norm",
        "scan with decays of elements",
        "rotary of heads of 80",
        "lora of 8b",
        "many rows of experts",
        "rows with top_k and top_p",
    ),
}
"""The part of `make compiled`: cases with all kernels."""


def cases_of(architecture: str) -> list[str]:
    return [case for case in CASES if case not in NOT_ON.get(architecture, ())]


@pytest.mark.few(1)
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        pytest.param(
            *key,
            marks=[
                *[pytest.mark.compiled] * (key[1] in SELECTED.get(key[0], ())),
                *[pytest.mark.slow] * (key not in FAST),
            ],
        )
        for key in ((architecture, case) for architecture in TARGETS for case in cases_of(architecture))
    ],
)
def test_the_code_of_a_case(architecture: str, case: str) -> None:
    with recorded_launches() as launches:
        CASES[case](TABLE[architecture])
    assert launches
    for launch in launches:
        code = compile_launch(launch, architecture)
        assert not code.spilled, (launch.kernel, code)
        assert code.shared_bytes <= SHARED_BYTES[architecture]
        if launch.kernel.__name__ not in NARROW and case not in NARROW_CASES:
            assert code.has(r"LDG\.E.*128|LDGSTS.*128|(global|buffer)_load_dwordx4"), (launch.kernel, code)


@pytest.mark.compiled
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100", "sm_120"])
def test_many_rows_in_float8_are_multiplied_as_float8(architecture: str) -> None:
    """Not widened to float16, at half the rate."""
    with recorded_launches() as launches:
        CASES["w8a8 of 2,048 rows"](TABLE[architecture])
    [product] = [launch for launch in launches if launch.kernel.__name__ == "multiply_groups"]
    assert compile_launch(product, architecture).has(r"QGMMA|UTCQMMA|QMMA")


def test_the_selection_has_every_kernel_of_every_architecture_and_every_case() -> None:
    assert set(SELECTED) == set(TARGETS) - {"sm_86"}  # its table is that of sm_120 but for one number
    for architecture, selected in SELECTED.items():
        kernels = []
        for cases in (cases_of(architecture), selected):
            with recorded_launches() as launches:
                for case in cases:
                    CASES[case](TABLE[architecture])
            kernels.append({launch.kernel.__name__ for launch in launches})
        assert kernels[0] == kernels[1]
    assert {case for selected in SELECTED.values() for case in selected} == set(CASES)
    assert {(architecture, case) for architecture, case in FAST if case not in SELECTED[architecture]} == set()


@pytest.mark.slow
@pytest.mark.compiled
def test_a_kernel_that_spills_is_found() -> None:
    """One warp cannot hold a row of 16,384 numbers."""
    with recorded_launches() as launches:
        CASES["norm of 16,384"](replace(TABLE["sm_90"], norm_numbers_per_warp=16384))
    [launch] = launches
    assert compile_launch(launch, "sm_90").spilled
