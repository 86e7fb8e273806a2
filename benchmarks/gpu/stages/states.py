"""Chunks of a prompt through one layer's states: kernels of a CUDA graph, next to torch operations as they are launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from gpu.bench import Bench, Skipped
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.make_states import make_states
from pdserve.kernels.state.selective_scan import SELECTIVE_SCAN
from pdserve.kernels.state.state_backend import StatePlan
from pdserve.kernels.state.state_spec import StateSpec

Operation = Callable[[StatePlan], Tensor]


def run(bench: Bench) -> None:
    if bench.triton != "triton":
        raise Skipped("there are no kernels")
    for num_tokens in (20,) if bench.dry else (64, 512, 2048):
        for name, num_heads, size, num_bytes, operation in operations(bench, num_tokens):
            of_operation(bench, f"{name}, {num_tokens} tokens", num_tokens, num_heads, size, num_bytes, operation)


def of_operation(
    bench: Bench, name: str, num_tokens: int, num_heads: int, size: int, num_bytes: int, operation: Operation
) -> None:
    """num_heads, size: of a state. num_bytes: of tokens and results."""
    if bench.is_late(name):
        return
    with bench.case(name):
        pool = torch.randn(3, num_heads, 1, 1, 1, size, device=bench.device)
        spec = StateSpec(num_heads=num_heads, head_size=size)
        batch = chunk(num_tokens, bench.device)
        plans = [make_states(kind, pool, num_tokens).plan(batch, spec) for kind in ("triton", "torch")]
        ms = bench.graph_milliseconds(lambda: operation(plans[0]), for_ms=30.0, flush=True)
        torch_ms = bench.milliseconds(lambda: operation(plans[1]), for_ms=30.0, flush=True)
        moved = num_bytes + 2 * pool[0].nbytes
        fields = {"mb": round(moved / 1e6, 2), "time_us": ms * 1e3, "torch_us": torch_ms * 1e3}
        bench.rows.add(name, **fields, rate_tb_s=moved / ms / 1e9, ratio=moved / ms * 1e3 / bench.copy_bytes_per_s)


def chunk(num_tokens: int, device: torch.device) -> AttentionBatch:
    """One sequence of a block before the chunk, and the chunk's."""
    none, one = np.zeros(num_tokens, np.int64), np.array([num_tokens], np.int64)
    return AttentionBatch.from_arrays(
        positions=none, slot_mapping=none, query_lens=one, seq_lens=2 * one, block_tables=np.array([[1, 2]], np.int64),
        device=device,
    )  # fmt: skip


def operations(bench: Bench, num: int) -> Iterator[tuple[str, int, int, int, Operation]]:
    """Name, heads of a state, numbers of one, bytes of tokens and results, and the operation, with shapes of these models."""
    device = bench.device
    heads, size = (2, 16) if bench.dry else (32, 128)

    def random(*shape: int) -> Tensor:
        return torch.randn(num, *shape, device=device)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(random(*shape), dim=-1)

    for name, num_decays in (("delta rule of Qwen3-Next", 1), ("delta rule of Kimi Linear", size)):
        tokens = (
            unit(heads, size),
            unit(heads, size),
            random(heads, size),
            -random(heads, num_decays).abs(),
            random(heads).sigmoid(),
        )
        num_bytes = sum(each.nbytes for each in (*tokens, tokens[2]))

        def rule(plan: StatePlan, tokens: tuple[Tensor, ...] = tokens) -> Tensor:
            return plan.recur(0, DELTA_RULE, tokens, 0, (size, size))

        yield name, heads, size * size, num_bytes, rule
    rates = -torch.rand(4 * heads, 1, 1, device=device).expand(num, -1, -1, -1)
    steps = random(4 * heads, 1).abs()
    scanned = random(4 * heads, size // 2), random(4 * heads, size), random(4 * heads, size), rates, steps
    yield (
        "scan of Granite 4", heads, 4 * (size // 2) * size, sum(each.nbytes for each in (*scanned[:3], steps, scanned[0])),
        lambda plan: plan.recur(0, SELECTIVE_SCAN, scanned, 0, (size // 2, size)),
    )  # fmt: skip
    channels = 4 * size
    weight = torch.randn(heads // 2 * channels, 4, device=device).bfloat16()
    conv = CausalConv(weight, None, [ColumnPart(channels)], has_silu=True)
    columns = random(len(weight)).bfloat16()
    yield (
        "convolution of Qwen3-Next",
        heads // 2,
        conv.num_kept,
        2 * columns.nbytes,
        lambda plan: plan.convolve(0, conv, columns),
    )
