"""Operations between matrix products and attention: bytes that they must move per second, against a copy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gpu.attention_inputs import Shape, random_cache
from gpu.bench import Bench
from pdserve.kernels.cpu.linear import multiplies_float8
from pdserve.kernels.layer_ops import LayerOps, SampleTokens
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.kernels.layers.rotary import rotary_phases
from pdserve.kernels.lora.lora_linear import LoraMatrices, LoraStack
from pdserve.kernels.lora.make_lora_ops import make_lora_ops
from pdserve.kernels.make_layer_ops import make_layer_ops
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
class Given:
    """The parameters that all rows of a case have."""

    temperature: float = 1.0
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    min_p: float = 0.0


SAMPLED = {
    "greedy": Given(temperature=0.0),
    "random": Given(),
    "top_k 50": Given(top_k=50),
    "top_p 0.9": Given(top_p=0.9),
    "min_p 0.05": Given(min_p=0.05),
    "top_k 50, top_p 0.9": Given(top_k=50, top_p=0.9),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tiles of 2048": {"sample_tile": 2048},
    "pivots in tiles of 1024": {"sample_pivot_tile": 1024},
}
"""Values of the architecture's table that are tried in place of its own, each with 256 rows: random, and with top_p."""


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
    def of(cls, count: int, vocab_size: int, given: Given) -> Rows:
        def full(value: float) -> NDArray[np.float32]:
            return np.full(count, value, np.float32)

        seeds = np.arange(count)
        top_k = np.full(count, given.top_k or vocab_size)
        return cls(
            full(given.temperature), full(given.top_p), top_k, full(given.min_p), seeds, np.zeros_like(seeds), seeds
        )


def run(bench: Bench) -> None:
    ops = make_layer_ops(bench.triton, bench.device)
    for count in (2,) if bench.dry else (1, 64, 256):
        for spread in (1.0, 4.0):
            of_logits(bench, ops, count, spread)
    of_variants(bench, 2 if bench.dry else 256)
    for num_tokens in (3,) if bench.dry else (1, 64, 2048, 8192):
        of_tokens(bench, ops, num_tokens)
    for num_tokens in (3,) if bench.dry else (1, 64, 256):
        for num_adapters in (1, 2) if bench.dry else (1, 8):
            of_adapters(bench, num_tokens, num_adapters)
    for num_tokens in (3,) if bench.dry else (1, 16, 64, 2048):
        of_groups(bench, num_tokens)
    for count in (2,) if bench.dry else (1, 16, 128, 512):
        of_blocks(bench, ops, count)


def report(
    bench: Bench,
    name: str,
    call: Callable[[], object],
    num_bytes: int,
    *,
    capture: bool = True,
    for_ms: float = 30.0,
    **more: float,
) -> None:
    """capture: time a CUDA graph of the call; an operation that uploads or waits is timed as it is. more: fields of the row."""
    if bench.is_late(name):
        return
    with bench.case(name):
        measure = bench.graph_milliseconds if capture else bench.milliseconds
        ms = measure(call, for_ms=for_ms, flush=True)
        rate = num_bytes / ms * 1e3
        fields = {"mb": round(num_bytes / 1e6, 2), "time_us": ms * 1e3, "rate_tb_s": rate / 1e12}
        bench.rows.add(name, **fields, **more, ratio=rate / bench.copy_bytes_per_s)


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


def of_groups(bench: Bench, num_tokens: int) -> None:
    """Products with weights of 4 and 8 bits, next to the time of the same product in bfloat16."""
    if bench.triton != "triton":
        bench.rows.skip("products in groups", "these kernels have none")
        return
    from pdserve.kernels.triton.grouped_linear import TritonGroupedLinear

    dtype, device = Shape.of_llama_8b(bench.dry).dtype, bench.device
    for outputs, inputs in ((64, 128),) if bench.dry else ((6144, 4096), (4096, 14336)):
        x = torch.randn(num_tokens, inputs, dtype=dtype, device=device)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
        wide_ms = bench.graph_milliseconds(partial(F.linear, x, weight), for_ms=30.0, flush=True)
        matrices = {
            f"{kind} in groups of {group}": GroupedMatrix.quantized(weight, bits, group)
            for kind, bits, group in (("w4a16", 4, 32), ("w4a16", 4, 128), ("w8a16", 8, 128))
        }
        eights = matrices["w8a16 in groups of 128"]
        floats = (weight * 16).to(torch.float8_e4m3fn).view(torch.int8)
        matrices["fp8 in groups of 128"] = replace(eights, values=floats, is_float=True)
        if multiplies_float8(torch.device(device)):
            matrices["w8a8 in groups of 128"] = GroupedMatrix.in_float8(weight, 128)
        for kind, matrix in matrices.items():
            report(
                bench, f"{kind}, {num_tokens} tokens, {outputs} x {inputs}", partial(TritonGroupedLinear(matrix, None), x),
                matrix.nbytes + x.nbytes, bfloat16_us=wide_ms * 1e3,
            )  # fmt: skip


def of_blocks(bench: Bench, ops: LayerOps, count: int) -> None:
    """Blocks of 16 tokens of all 32 layers: 2 MiB."""
    shape, num_layers = Shape.of_llama_8b(bench.dry), 1 if bench.dry else 32
    pool, ring = (random_cache(shape, count + 1, num_layers, 16, bench.device) for _ in range(2))
    pairs = [(block + 1, block) for block in range(count)]
    num_bytes = count * pool[0].nbytes
    report(bench, f"move_blocks, {count}", lambda: ops.move_blocks(pool, ring, pairs), 2 * num_bytes, capture=False)
    blocks = list(range(count))
    report(bench, f"digests, {count} blocks", lambda: ops.digests(pool, blocks), num_bytes, capture=False)


def of_logits(bench: Bench, ops: LayerOps, count: int, spread: float) -> None:
    """Rows of logits of a normal distribution. spread: its standard deviation: with 1, top_p 0.9 keeps half of all tokens."""
    if ops.sample is None:
        bench.rows.skip("sample", "these kernels do not sample")
        return
    for kind, given in SAMPLED.items():
        of_sampling(bench, ops.sample, f"sample, {count} rows of spread {spread:g}, {kind}", given, count, spread)


@contextmanager
def launched_kernels() -> Iterator[list[str]]:
    """Names of the Triton kernels that are launched while it is open."""
    names: list[str] = []
    if find_spec("triton") is None:
        yield names
        return
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.__name__)
        return run(self, *args, **kwargs)

    with patch.object(JITFunction, "run", named):
        yield names


def of_variants(bench: Bench, count: int) -> None:
    """Other tiles than those of the table."""
    if bench.triton != "triton":
        bench.rows.skip("sample, other tiles", "these kernels have no tiles")
        return
    from pdserve.kernels.triton.launch_configs import launch_configs
    from pdserve.kernels.triton.layer_ops import TritonLayerOps

    for name, values in VARIANTS.items():
        if bench.dry:
            values = {field: value // 8 for field, value in values.items() if field.endswith("tile")}
        ops = TritonLayerOps(bench.device, replace(launch_configs(bench.device), **values))
        for kind in ("random", "top_p 0.9"):
            of_sampling(bench, ops.sample, f"sample, {count} rows, {kind}, {name}", SAMPLED[kind], count, 1.0)


def of_sampling(bench: Bench, sample: SampleTokens, name: str, given: Given, count: int, spread: float) -> None:
    """Times of a graph, and of launches by the host (`eager_us`); the bytes are those of the logits, read once."""
    if bench.is_late(name):
        return
    with bench.case(name):
        logits = torch.randn(count, 300 if bench.dry else 128256, device=bench.device) * spread
        asked = Rows.of(count, logits.shape[1], given)
        parameters = torch.from_numpy(packed(asked)).to(bench.device)
        rows = PackedRows(parameters, SamplingStages.of(asked, logits.shape[1]))
        with launched_kernels() as kernels:
            sample(logits, rows)
        eager_ms = bench.milliseconds(lambda: sample(logits, rows), for_ms=15.0, flush=True)
        report(
            bench, name, lambda: sample(logits, rows), logits.nbytes, for_ms=15.0,
            kernels=len(kernels), eager_us=eager_ms * 1e3,
        )  # fmt: skip
