"""Attention in C++, in torch operations, and a floor of each, in turns: decode rows and prompt chunks.

Each round runs every implementation once over all layers of the shape of m05 (Qwen2.5-0.5B's: 14 query heads, 2 KV heads of 64, 24
layers), with pages in random order. Floors, with the same threads:

    stream    of decode rows: torch.sum over as many bytes that lie one behind the other
    pages     of decode rows: read the same pages in the same order, each asked for one ahead: a C++ loop, compiled for this run
    products  of chunks: torch.bmm with as many multiplications, in the same dtype, without softmax

One thread: CPU time of the process, so that other load counts only by what it does to caches and to the core that it shares.
Several: wall time. us per layer: the lowest of all rounds, then medians; ratios are of the lowest.

Usage: python benchmarks/native_attention.py [--threads 1] [--rounds 15] [--all-levels] [--part chunks]
           > benchmarks/results/native_attention.txt
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from conditions import print_conditions

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from pdserve.kernels.native.build_library import find_compiler
from pdserve.kernels.native.native_attention import NativeAttentionBackend
from pdserve.kernels.native.native_library import load_library
from pdserve.models.kv_cache import make_host_memory

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS, BLOCK_SIZE = 14, 2, 64, 24, 16
SHAPES = ((8, 128), (8, 1024), (32, 1024), (8, 4096))
CHUNKS = ((1, 0, 1024), (1, 512, 512), (1, 3584, 512), (8, 0, 128), (8, 1024, 4))
"""Sequences, tokens in the cache before the chunk, tokens of the chunk."""
POOL_BYTES = 1 << 30
READ_PAGES = r"""
#include <cstdint>
#pragma GCC optimize("O3")
extern "C" int64_t read_pages(const char* pool, const int64_t* places, int64_t count, int64_t bytes) {
  int64_t sum = 0;
  #pragma omp parallel for reduction(+ : sum) schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    const char* ahead = pool + places[i + 1 < count ? i + 1 : i];
    for (int64_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(ahead + at, 0, 3);
      const int64_t* words = reinterpret_cast<const int64_t*>(pool + places[i] + at);
      for (int64_t word = 0; word < 8; ++word) sum += words[word];
    }
  }
  return sum;
}
"""


def read_pages() -> Callable[..., int]:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "read_pages.cpp"), Path(folder, "read_pages.so")
        source.write_text(READ_PAGES)
        command = [
            *find_compiler(),
            "-O3",
            "-march=native",
            "-fopenmp",
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            str(library),
        ]
        subprocess.run(command, check=True)
        function: Callable[..., int] = ctypes.CDLL(str(library)).read_pages
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]  # type: ignore[attr-defined]
    return function


class Pool:
    """A cache with pages in random order."""

    def __init__(self, dtype: torch.dtype, batch_size: int, num_columns: int) -> None:
        self.page_bytes = 2 * BLOCK_SIZE * HEAD_DIM * dtype.itemsize
        block_bytes = NUM_KV_HEADS * NUM_LAYERS * self.page_bytes
        num_blocks = min(batch_size * num_columns, POOL_BYTES // block_bytes)
        self.memory = make_host_memory(num_blocks * block_bytes)
        self.cache = self.memory.view(dtype).view(num_blocks, NUM_KV_HEADS, NUM_LAYERS, 2, BLOCK_SIZE, HEAD_DIM)
        self.cache.fill_(0.01)
        random = np.random.default_rng(0)
        rounds = -(-batch_size * num_columns // num_blocks)
        tables = np.concatenate([random.permutation(num_blocks) for _ in range(rounds)])[: batch_size * num_columns]
        self.tables = tables.reshape(batch_size, num_columns)


def attention_runs(pool: Pool, context: int, num_tokens: int, num_levels: int) -> dict[str, Callable[[], object]]:
    """Name -> attention of the last tokens of each sequence over all layers. num_levels: instruction sets, the fastest first."""
    size, dtype = len(pool.tables), pool.cache.dtype
    positions = np.tile(np.arange(context, context + num_tokens), size)
    columns = np.repeat(np.arange(size), num_tokens), positions // BLOCK_SIZE
    batch = AttentionBatch.from_arrays(
        positions=positions, slot_mapping=pool.tables[columns] * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_lens=np.full(size, num_tokens), seq_lens=np.full(size, context + num_tokens), block_tables=pool.tables,
        device=torch.device("cpu"),
    )  # fmt: skip
    spec = AttentionSpec(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
    q = torch.randn(size * num_tokens, NUM_HEADS, HEAD_DIM).to(dtype)
    k = torch.randn(size * num_tokens, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    library = load_library()
    backends = {level: NativeAttentionBackend(pool.cache, library, level) for level in library.levels[:num_levels]}
    plans: dict[str, AttentionPlan] = {name: backend.plan(batch, spec) for name, backend in backends.items()}
    plans["torch"] = TorchAttentionBackend(pool.cache).plan(batch, spec)

    def attend(name: str) -> None:
        for layer in range(NUM_LAYERS):
            plans[name].attend(layer, q, k, k)

    return {name: partial(attend, name) for name in plans}


def decode_case(
    dtype: torch.dtype, batch_size: int, context: int, read: Callable[..., int], num_levels: int
) -> dict[str, Callable[[], object]]:
    """Name -> a step of attention over all layers, or of reading."""
    pool = Pool(dtype, batch_size, context // BLOCK_SIZE)
    pages = (pool.tables[:, :, None] * NUM_KV_HEADS + np.arange(NUM_KV_HEADS)).reshape(-1) * NUM_LAYERS
    places = [np.ascontiguousarray((pages + layer) * pool.page_bytes) for layer in range(NUM_LAYERS)]
    numbers = batch_size * context * NUM_KV_HEADS * 2 * HEAD_DIM * dtype.itemsize // 4
    flat = pool.memory.view(torch.float32)
    room = max(1, len(flat) - numbers)

    def stream() -> None:
        for layer in range(NUM_LAYERS):
            start = layer * numbers % room
            flat[start : start + numbers].sum()

    def in_place() -> None:
        for at in places:
            read(pool.memory.data_ptr(), at.ctypes.data, len(at), pool.page_bytes)

    return attention_runs(pool, context - 1, 1, num_levels) | {"pages": in_place, "stream": stream}


def chunk_case(
    dtype: torch.dtype, batch_size: int, context: int, num_tokens: int, num_levels: int
) -> dict[str, Callable[[], object]]:
    """Name -> attention of chunks over all layers, or products of as many numbers."""
    pool = Pool(dtype, batch_size, (context + num_tokens) // BLOCK_SIZE + 1)
    heads, mean_keys = batch_size * NUM_KV_HEADS, context + (num_tokens + 1) // 2
    queries = torch.randn(heads, NUM_HEADS // NUM_KV_HEADS * num_tokens, HEAD_DIM).to(dtype)
    keys = torch.randn(heads, HEAD_DIM, mean_keys).to(dtype)
    values = torch.randn(heads, mean_keys, HEAD_DIM).to(dtype)

    def products() -> None:
        for _ in range(NUM_LAYERS):
            torch.bmm(torch.bmm(queries, keys), values)

    return attention_runs(pool, context, num_tokens, num_levels) | {"products": products}


def measure(
    title: str, runs: dict[str, Callable[[], object]], num_rounds: int, clock: Callable[[], float], floors: list[str]
) -> None:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(num_rounds + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if number:  # the first round warms up
                times[name].append((clock() - start) / NUM_LAYERS * 1e6)
    low = {name: min(found) for name, found in times.items()}
    best = low[next(iter(runs))]
    print(title)
    print("   ", ", ".join(f"{name} {low[name]:.0f} / {statistics.median(times[name]):.0f}" for name in runs))
    above = ", ".join(f"{best / low[name]:.2f} times {name}" for name in floors)
    print(f"    torch is {low['torch'] / best:.2f} times the fastest; that is {above}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--all-levels", action="store_true", help="every instruction set of this CPU")
    parser.add_argument("--part", choices=["decode", "chunks"], help="default: both")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    num_levels = 4 if options.all_levels else 1
    print_conditions()
    print(f"{options.rounds} rounds, {options.threads} threads, us per layer: lowest / median\n", flush=True)
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            if options.part != "chunks":
                read = read_pages()
                for batch_size, context in SHAPES:
                    runs = decode_case(dtype, batch_size, context, read, num_levels)
                    measure(f"{name} {batch_size} x {context}", runs, options.rounds, clock, ["pages", "stream"])
            if options.part != "decode":
                for batch_size, context, num_tokens in CHUNKS:
                    runs = chunk_case(dtype, batch_size, context, num_tokens, num_levels)
                    title = f"{name} {batch_size} x {num_tokens} tokens behind {context}"
                    measure(title, runs, options.rounds, clock, ["products"])


if __name__ == "__main__":
    main()
