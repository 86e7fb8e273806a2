"""CPU time of the operations that change states of decode rows, in C++ and in torch operations, in turns.

python benchmarks/states.py [--sequences 1 8] [--rounds 30]

Shapes of one layer of `benchmarks/families.py`: convolutions in bfloat16, states of ten layers in float32, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.native.native_library import load_library
from pdserve.kernels.native.native_states import NativeStateBackend
from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.selective_scan import SELECTIVE_SCAN
from pdserve.kernels.state.state_backend import StateBackend, StatePlan
from pdserve.kernels.state.state_spec import StateSpec

NUM_LAYERS, BLOCK_SIZE = 10, 16
Operation = Callable[[StatePlan, int], Tensor]
"""A plan and a layer."""


def batch_of(num_sequences: int) -> AttentionBatch:
    """One token each, after two, in blocks that are not adjacent."""
    ones = torch.ones(num_sequences, dtype=torch.int64).numpy()
    blocks = (2 * torch.arange(num_sequences) + 1).unsqueeze(1).numpy()
    return AttentionBatch.from_arrays(
        positions=2 * ones, slot_mapping=blocks[:, 0] * BLOCK_SIZE, query_lens=ones, seq_lens=3 * ones, block_tables=blocks,
        device=torch.device("cpu"),
    )  # fmt: skip


def operations(num: int) -> Iterator[tuple[str, int, int, Operation]]:
    """Name, heads of states, numbers of a head, and the operation, for `num` sequences."""
    group = ColumnPart(128, torch.zeros(8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    parts = {
        "Granite 4": (8, [ColumnPart(192), group, group], 1792, 4, 3 * 64 * 128),
        "Qwen3.5": (4, [ColumnPart(512)], 2048, 4, 2 * 128 * 128),
        "Mamba": (64, [ColumnPart(24)], 1536, 4, 24 * 16),
        "LFM2": (12, [ColumnPart(64)], 768, 3, 0),
    }
    kept = {}
    for name, (heads, of_head, channels, taps, matrices) in parts.items():
        conv = CausalConv(torch.rand(channels, taps).bfloat16(), None, of_head, has_silu=bool(matrices))
        columns, kept[name] = torch.rand(num, channels).bfloat16(), conv.num_kept

        def convolve(plan: StatePlan, layer: int, conv: CausalConv = conv, columns: Tensor = columns) -> Tensor:
            return plan.convolve(layer, conv, columns)

        yield f"convolution of {name}", heads, conv.num_kept + matrices, convolve
    # all channels of Mamba have the same b and c
    for name, heads, matrices, shape, of_matrices, rates in (
        ("Granite 4", 8, 24, (64, 128), 24, -torch.rand(24, 1, 1)),
        ("Mamba", 64, 64, (24, 16), 1, -torch.rand(64, 24, 16)),
    ):
        b, c = (torch.rand(num, of_matrices, shape[1]).expand(-1, matrices, -1) for _ in range(2))
        steps = torch.rand(num, *rates.shape[:2])
        scanned = torch.rand(num, matrices, shape[0]), b, c, rates.expand(num, -1, -1, -1), steps

        def scan(
            plan: StatePlan,
            layer: int,
            tokens: Sequence[Tensor] = scanned,
            first: int = kept[name],
            shape: tuple[int, int] = shape,
        ) -> Tensor:
            return plan.recur(layer, SELECTIVE_SCAN, tokens, first, shape)

        yield f"scan of {name}", heads, kept[name] + matrices // heads * shape[0] * shape[1], scan
    vectors = [torch.rand(num, 8, 128) / 12 for _ in range(3)]
    ruled = *vectors, -torch.rand(num, 8, 1), torch.rand(num, 8)
    place = kept["Qwen3.5"]
    yield (
        "delta rule of Qwen3.5", 4, place + 2 * 128 * 128,
        lambda plan, layer: plan.recur(layer, DELTA_RULE, ruled, place, (128, 128)),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    from conditions import conditions

    torch.set_num_threads(1)
    for name, value in conditions().items():
        print(f"{name}: {value}")
    print("us of CPU time per call: lowest and median")
    for num in options.sequences:
        batch = batch_of(num)
        for name, heads, size, operation in operations(num):
            pool = torch.rand(2 * num, heads, NUM_LAYERS, 1, 1, size)
            spec = StateSpec(num_heads=heads, head_size=size)
            backends = {
                "C++": NativeStateBackend(pool, BLOCK_SIZE, load_library()),
                "torch": StateBackend(pool, BLOCK_SIZE),
            }
            plans = {side: backend.plan(batch, spec) for side, backend in backends.items()}
            times: dict[str, list[float]] = {side: [] for side in plans}
            for call in range(options.rounds + 3):
                for side, plan in plans.items():
                    began = time.process_time_ns()
                    operation(plan, call % NUM_LAYERS)
                    times[side].append((time.process_time_ns() - began) / 1000)
            found = "  ".join(f"{side} {min(t):6.0f} {statistics.median(t):6.0f}" for side, t in times.items())
            print(f"{num} sequences  {name:24} {found}", flush=True)


if __name__ == "__main__":
    main()
