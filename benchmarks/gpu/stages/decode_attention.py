"""Attention of decode steps: bytes of keys and values per second, against a copy's bytes read and written per second.

Over latent rows all query heads read one row: with 16 heads, those of one rank of 8, its bytes take longer than its products, and
the rate has a goal. With 128 heads, those of DeepSeek V3 on one rank, products take longer: the row says how many per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.attention_inputs import Shape, paged_step
from gpu.bench import Bench
from pdserve.kernels.attention.make_attention import make_attention

LARGE_BYTES = 64 << 20
"""A layer that reads less is bound by latency: its rate has no goal."""
GOAL_HEADS = 16
"""Of latent rows: with more heads products may take longer than bytes."""
WORKING_SET = 256 << 20
"""Layers are added until they read that much together, more than any L2 cache."""


@dataclass(frozen=True, slots=True)
class Case:
    batch: int
    context: int
    block_size: int
    skewed: bool = False
    num_heads: int | None = None
    """None: Llama 3.1 8B's shape; else so many of DeepSeek V3's 128 heads, over its latent rows."""

    @property
    def name(self) -> str:
        if self.num_heads is not None:
            return f"latent, {self.num_heads} heads, B {self.batch}, {self.context} tokens"
        return f"B {self.batch}, {self.context} tokens, {'skewed' if self.skewed else 'even'}, bs {self.block_size}"

    def shape(self, dry: bool) -> Shape:
        return Shape.of_llama_8b(dry) if self.num_heads is None else Shape.of_deepseek_v3(dry, self.num_heads)

    @property
    def seq_lens(self) -> NDArray[np.int64]:
        """Skewed: one sequence has half of all tokens, the others are equally short."""
        if not self.skewed:
            return np.full(self.batch, self.context, np.int64)
        half = self.batch * self.context // 2
        return np.array([half, *[max(1, half // (self.batch - 1))] * (self.batch - 1)], np.int64)


def cases(dry: bool) -> list[Case]:
    """In order of worth: blocks of 16 tokens first."""
    if dry:
        return [Case(2, 40, 16), Case(3, 24, 16, skewed=True), Case(2, 40, 16, num_heads=20)]
    even = [
        (1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024),
        (1, 8192), (8, 8192), (32, 8192), (64, 8192), (128, 8192), (256, 8192),
        (1, 32768), (8, 32768), (32, 32768), (1, 131072), (8, 131072),
    ]  # fmt: skip
    skewed = [(8, 8192), (32, 8192), (128, 8192), (256, 1024)]
    latent = [(1, 8192), (8, 8192), (64, 8192), (256, 1024), (1, 131072), (8, 131072)]
    return [
        *(Case(batch, context, 16) for batch, context in even),
        *(Case(batch, context, 16, num_heads=heads) for heads in (16, 128) for batch, context in latent),
        *(Case(batch, context, 16, skewed=True) for batch, context in skewed),
        *(Case(batch, context, 64) for batch, context in ((1, 8192), (8, 8192), (64, 8192), (8, 131072))),
    ]


def run(bench: Bench) -> None:
    for case in cases(bench.dry):
        if bench.is_late(case.name):
            return
        with bench.case(case.name):
            measure(bench, case)


def measure(bench: Bench, case: Case) -> None:
    shape = case.shape(bench.dry)
    seq_lens = case.seq_lens
    layer_bytes = shape.kv_bytes(int(seq_lens.sum()))
    num_layers = 1 if bench.dry else min(16, max(1, math.ceil(WORKING_SET / layer_bytes)))
    step = paged_step(shape, seq_lens, np.ones(len(seq_lens), np.int64), case.block_size, num_layers, bench.device)
    plan = make_attention(bench.triton, step.kv_cache).plan(step.batch, shape.spec)
    out = [plan.attend(layer, step.q, step.k, step.v) for layer in range(num_layers)]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in out)

    def layers() -> None:
        for layer in range(num_layers):
            plan.attend(layer, step.q, step.k, step.v)

    layer_ms = bench.graph_milliseconds(layers) / num_layers
    rate = layer_bytes / layer_ms * 1e3
    fields = {
        "layer_mb": round(layer_bytes / 1e6, 1),
        "layer_us": layer_ms * 1e3,
        "rate_tb_s": rate / 1e12,
        "ok": finite,
    }
    ratio = rate / bench.copy_bytes_per_s
    if case.num_heads is not None:
        flops = 2 * shape.num_heads * (shape.head_dim + shape.spec.output_dim) * int(seq_lens.sum())
        fields["layer_tflops"] = flops / layer_ms / 1e9
    if case.num_heads == GOAL_HEADS and layer_bytes >= LARGE_BYTES:
        bench.rows.judge(case.name, "latent_attention", ratio, **fields)
    elif case.num_heads is None and layer_bytes >= LARGE_BYTES:
        bench.rows.judge(case.name, "decode_attention", ratio, **fields)
    else:
        bench.rows.add(case.name, **fields, ratio=ratio, goal=None, met=None)
