"""Operations between matrix products and attention: bytes that they must move per second, against a copy's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu.attention_inputs import Shape, random_cache
from gpu.bench import Bench
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.lora.lora_linear import LoraMatrices, LoraStack
from pdserve.kernels.lora.make_lora_ops import make_lora_ops
from pdserve.kernels.make_layer_ops import make_layer_ops
from pdserve.kernels.rms_norm import RmsNorm
from pdserve.kernels.rotary import rotary_phases
from pdserve.kernels.sampled_rows import PackedRows, SamplingStages, packed


@dataclass(frozen=True, slots=True)
class Pages:
    """An `AttentionPlan` as far as `rotate_and_store` reads it."""

    kv_cache: Tensor
    slot_mapping: Tensor

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        at, bs = self.slot_mapping, self.kv_cache.shape[4]
        self.kv_cache[at // bs, :, layer, :, at % bs] = torch.stack((k, v), 2)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        raise RuntimeError("rotate_and_store writes pages and attends to none")


@dataclass(frozen=True, slots=True)
class Rows:
    """Sampling parameters of N equal rows."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    indexes: NDArray[np.int64]
    positions: NDArray[np.int64]

    @classmethod
    def of(cls, count: int, vocab_size: int, temperature: float, top_p: float) -> Rows:
        def full(value: float) -> NDArray[np.float32]:
            return np.full(count, value, np.float32)

        seeds = np.arange(count)
        return cls(
            full(temperature), full(top_p), np.full(count, vocab_size), full(0.0), seeds, np.zeros_like(seeds), seeds
        )


def run(bench: Bench) -> None:
    ops = make_layer_ops(bench.triton, bench.device)
    for num_tokens in (3,) if bench.dry else (1, 64, 2048, 8192):
        of_tokens(bench, ops, num_tokens)
    for num_tokens in (3,) if bench.dry else (1, 64, 256):
        for num_adapters in (1, 2) if bench.dry else (1, 8):
            of_adapters(bench, num_tokens, num_adapters)
    for count in (2,) if bench.dry else (1, 16, 128, 512):
        of_blocks(bench, ops, count)
    for count in (2,) if bench.dry else (1, 64, 256):
        for kind, temperature, top_p in (("greedy", 0.0, 1.0), ("random", 1.0, 1.0), ("top_p 0.9", 1.0, 0.9)):
            of_logits(bench, ops, count, kind, temperature, top_p)


def report(bench: Bench, name: str, call: Callable[[], object], num_bytes: int, *, capture: bool = True) -> None:
    """capture: time a CUDA graph of the call; an operation that uploads or waits is timed as it is."""
    if bench.is_late(name):
        return
    with bench.case(name):
        measure = bench.graph_milliseconds if capture else bench.milliseconds
        ms = measure(call, for_ms=30.0, flush=True)
        rate = num_bytes / ms * 1e3
        fields = {"mb": round(num_bytes / 1e6, 2), "time_us": ms * 1e3, "rate_tb_s": rate / 1e12}
        bench.rows.add(name, **fields, ratio=rate / bench.copy_bytes_per_s)


def of_tokens(bench: Bench, ops: LayerOps, num_tokens: int) -> None:
    shape = Shape.of_llama_8b(bench.dry)
    hidden, inner, dtype, device = (
        (64, 96, shape.dtype, bench.device) if bench.dry else (4096, 14336, shape.dtype, bench.device)
    )
    x, residual = (torch.randn(num_tokens, hidden, dtype=dtype, device=device) for _ in range(2))
    norm = RmsNorm(torch.ones(hidden, dtype=dtype, device=device), 1e-5)
    report(bench, f"add_norm, {num_tokens} tokens", lambda: ops.add_norm(residual, x, None, norm), 4 * x.nbytes)
    gate_up = torch.randn(num_tokens, 2 * inner, dtype=dtype, device=device)
    report(bench, f"swiglu, {num_tokens} tokens", lambda: ops.swiglu(gate_up), gate_up.nbytes * 3 // 2)
    heads, dim = shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
    qkv = torch.randn(num_tokens, heads, dim, dtype=dtype, device=device)
    slots = torch.arange(num_tokens, device=device)
    pages = Pages(random_cache(shape, -(-num_tokens // 16), 1, 16, device), slots)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    phases = rotary_phases(slots, frequencies, torch.ones((), device=device))
    moved = (
        2 * qkv.nbytes * (shape.num_heads + shape.num_kv_heads) // heads + 2 * qkv.nbytes * shape.num_kv_heads // heads
    )
    report(
        bench,
        f"rotate_and_store, {num_tokens} tokens",
        lambda: ops.rotate_and_store(qkv, shape.spec, None, phases, pages, 0),
        moved,
    )


def of_adapters(bench: Bench, num_tokens: int, num_adapters: int) -> None:
    """Products of adapters of rank 16 beside queries, keys and values; the bytes are those of the matrices and of x and y."""
    in_size, sizes = (64, (32, 16, 16)) if bench.dry else (4096, (4096, 1024, 1024))
    dtype, device = Shape.of_llama_8b(bench.dry).dtype, bench.device
    ops = make_lora_ops(bench.triton, dtype, device, max_loras=num_adapters, max_tokens=num_tokens)
    stack = LoraStack(in_size, sizes, max_loras=num_adapters, max_rank=16, dtype=dtype, device=device)
    for slot in range(num_adapters):
        matrices = {
            index: LoraMatrices(torch.randn(16, in_size) / 64, torch.randn(16, size) / 4)
            for index, size in enumerate(sizes)
        }
        stack.put(slot, matrices)
    x = torch.randn(num_tokens, in_size, dtype=dtype, device=device)
    y = torch.randn(num_tokens, sum(sizes), dtype=dtype, device=device)
    layer = ops.layer(stack)
    ops.set_rows(np.arange(num_tokens) % num_adapters, np.ones(num_tokens, np.int64))
    num_bytes = stack.nbytes * min(num_tokens, num_adapters) // num_adapters + x.nbytes + 2 * y.nbytes
    report(bench, f"lora, {num_tokens} tokens, {num_adapters} adapters", lambda: layer.add(y, x), num_bytes)


def of_blocks(bench: Bench, ops: LayerOps, count: int) -> None:
    """Blocks of 16 tokens of all 32 layers: 2 MiB."""
    shape, num_layers = Shape.of_llama_8b(bench.dry), 1 if bench.dry else 32
    pool, ring = (random_cache(shape, count + 1, num_layers, 16, bench.device) for _ in range(2))
    pairs = [(block + 1, block) for block in range(count)]
    num_bytes = count * pool[0].nbytes
    report(bench, f"move_blocks, {count}", lambda: ops.move_blocks(pool, ring, pairs), 2 * num_bytes, capture=False)
    blocks = list(range(count))
    report(bench, f"digests, {count} blocks", lambda: ops.digests(pool, blocks), num_bytes, capture=False)


def of_logits(bench: Bench, ops: LayerOps, count: int, kind: str, temperature: float, top_p: float) -> None:
    if ops.sample is None:
        bench.rows.skip("sample", "these kernels do not sample")
        return
    sample = ops.sample
    logits = torch.randn(count, 300 if bench.dry else 128256, device=bench.device)
    asked = Rows.of(count, logits.shape[1], temperature, top_p)
    parameters = torch.from_numpy(packed(asked)).to(bench.device)
    rows = PackedRows(parameters, SamplingStages.of(asked, logits.shape[1]))
    report(bench, f"sample, {count} rows, {kind}", lambda: sample(logits, rows), logits.nbytes, capture=False)
