"""Tile shapes of attention around those of the architecture's table, `kernels/triton/attention/attention_configs.py`.

Each shape differs from the table's in the fields that its row names. A table is right where no row is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from gpu.attention_inputs import PagedStep, Shape, paged_step
from gpu.bench import Bench, Skipped

Changes = dict[str, Any]
BLOCK_SIZE = 16


def decode_changes(num_multiprocessors: int) -> list[Changes]:
    programs = [{"decode_programs": factor * num_multiprocessors} for factor in (1, 3, 4)]
    tiles: list[Changes] = [
        {"decode_keys": 32}, {"decode_keys": 128}, {"decode_keys": 128, "decode_warps": 8}, {"decode_warps": 8},
        {"decode_stages": 2}, {"decode_stages": 4}, {"decode_keys": 32, "decode_stages": 4},
    ]  # fmt: skip
    return [*programs, *tiles]


PREFILL_CHANGES: list[Changes] = [
    {"prefill_stages": 2}, {"prefill_stages": 4}, {"prefill_keys": 128}, {"prefill_keys": 128, "prefill_stages": 2},
    {"prefill_rows": 64}, {"prefill_rows": 64, "prefill_warps": 4}, {"prefill_warps": 4},
    {"prefill_rows": 64, "prefill_keys": 128}, {"prefill_keys": 32},
]  # fmt: skip


def run(bench: Bench) -> None:
    if find_spec("triton") is None:
        raise Skipped("triton is not installed")
    import torch

    shape = Shape.of_llama_8b(bench.dry)
    if bench.dry:
        sweep(bench, "decode", shape, [20, 40], [1, 1], [{"decode_keys": 32}])
        sweep(bench, "prefill", shape, [24], [20], [{"prefill_keys": 32}])
        return
    changes = decode_changes(torch.cuda.get_device_properties(0).multi_processor_count)
    sweep(bench, "decode", shape, [8192] * 8, [1] * 8, changes)
    sweep(bench, "prefill", shape, [2048], [2048], PREFILL_CHANGES)
    sweep(bench, "decode", shape, [4096] * 64, [1] * 64, changes)
    sweep(bench, "prefill", shape, [32768], [2048], PREFILL_CHANGES)
    sweep(bench, "decode", shape, [131072], [1], changes)


def sweep(
    bench: Bench,
    kind: str,
    shape: Shape,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    changes: Sequence[Changes],
) -> None:
    """One row per shape, and one that names the fastest."""
    case = f"{kind}, {len(seq_lens)} x {seq_lens[-1]} tokens"
    num_layers = 1 if bench.dry or kind == "prefill" else max(1, 4 * 65536 // sum(seq_lens))
    with bench.case(case):
        lens = np.array(seq_lens, np.int64), np.array(query_lens, np.int64)
        step = paged_step(shape, *lens, BLOCK_SIZE, num_layers, bench.device)
        times: dict[str, float] = {}
        for change in ({}, *changes):
            name = ", ".join(f"{field} {value}" for field, value in change.items()) or "the table's"
            if bench.is_late(f"{case}: {name}"):
                return
            with bench.case(f"{case}: {name}"):
                times[name] = milliseconds(bench, kind, shape, step, num_layers, change)
                ratio = times[name] / times["the table's"]
                bench.rows.add(f"{case}: {name}", layer_us=times[name] * 1e3, table_ratio=ratio)
        fastest = None if bench.dry else min(times, key=lambda name: times[name])
        bench.rows.add(f"{case}: fastest", shape=fastest, shapes=len(times))


def milliseconds(bench: Bench, kind: str, shape: Shape, step: PagedStep, num_layers: int, change: Changes) -> float:
    """Per layer."""
    from pdserve.kernels.triton.attention.triton_attention import TritonAttentionBackend

    backend = TritonAttentionBackend(step.kv_cache, "triton")
    backend._configs = replace(backend._configs, **change)
    plan = backend.plan(step.batch, shape.spec)

    def layers() -> None:
        for layer in range(num_layers):
            plan.attend(layer, step.q, step.k, step.v)

    measure = bench.graph_milliseconds if kind == "decode" else bench.milliseconds
    return measure(layers, for_ms=40.0) / num_layers
