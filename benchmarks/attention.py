"""Attention over the paged cache and whole steps, of this tree and of another one, in turns.

Each tree has a process of its own with one thread, and is timed by that thread's CPU time, so that other load on the
machine counts only by what it does to the caches. A round is one run of a case in each tree, one after the other.

    decode    store and attend of one new token in each of B sequences, per layer
    prefill   store and attend of a chunk of 512 tokens behind a context, per layer
    step      8 sequences of the bundled model with 700 prompt tokens, 32 new tokens each: prefill and 31 decode steps, all

Usage: python benchmarks/attention.py --against ../other-tree [--rounds 7] [--only decode] > attention.txt
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from conditions import print_conditions

HEADS = {"2x64": (14, 2, 64, 24), "8x128": (16, 8, 128, 28)}
"""Hkv x D -> Hq, Hkv, D and L: Qwen2.5-0.5B and Qwen3-0.6B."""
POOL_BYTES = 512 << 20
BLOCK_SIZE = 16
ROUND_S = 0.06
Case = dict[str, Any]


def cases() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        for heads in HEADS:
            for context in (128, 1024, 4096):
                for batch in (1, 8, 32):
                    yield {"kind": "decode", "heads": heads, "dtype": dtype, "context": context, "batch": batch}
                if context != 128:
                    yield {"kind": "prefill", "heads": heads, "dtype": dtype, "context": context, "batch": 1}
    yield {"kind": "step"}


# ---- one tree


def attention_run(case: Case) -> tuple[Callable[[], None], int]:
    """A step of attention in every layer; and the number of layers."""
    import numpy as np
    import torch

    from pdserve.common.kv_layout import KvLayout
    from pdserve.kernels.attention.attention_batch import AttentionBatch
    from pdserve.kernels.attention.attention_spec import AttentionSpec
    from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
    from pdserve.models.kv_cache import make_kv_cache

    num_heads, num_kv_heads, head_dim, num_layers = HEADS[case["heads"]]
    fields = {
        "num_layers": num_layers, "num_kv_heads": num_kv_heads, "total_num_kv_heads": num_kv_heads, "head_dim": head_dim,
        "block_size": BLOCK_SIZE, "dtype": case["dtype"], "model_fingerprint": "f" * 32,
    }  # fmt: skip
    layout = KvLayout(**{name: fields[name] for name in KvLayout.__struct_fields__ if name in fields})
    new, batch_size = (512 if case["kind"] == "prefill" else 1), case["batch"]
    seq_lens = np.full(batch_size, case["context"] + new, np.int64)
    table_width = -(-int(seq_lens[0]) // BLOCK_SIZE)
    # sequences share blocks where the pool would be larger
    num_blocks = min(batch_size * table_width, POOL_BYTES // layout.shapes[0].block_bytes)
    random = np.random.default_rng(0)
    order = np.concatenate([random.permutation(num_blocks) for _ in range(batch_size * table_width // num_blocks + 1)])
    tables = order[: batch_size * table_width].reshape(batch_size, table_width)
    positions = np.concatenate([np.arange(length - new, length) for length in seq_lens])
    slots = np.repeat(tables, new, 0)[np.arange(len(positions)), positions // BLOCK_SIZE] * BLOCK_SIZE
    kv_cache = make_kv_cache(layout.shapes[0], num_blocks)
    kv_cache.fill_(0.01)
    attention = TorchAttentionBackend(kv_cache)
    spec = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5)
    qkv = torch.randn(len(positions), num_heads + 2 * num_kv_heads, head_dim, dtype=kv_cache.dtype)
    q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], 1)

    def run() -> None:
        batch = AttentionBatch.from_arrays(
            positions=positions, slot_mapping=slots + positions % BLOCK_SIZE, query_lens=np.full(batch_size, new),
            seq_lens=seq_lens, block_tables=tables, device=torch.device("cpu"),
        )  # fmt: skip
        plan = attention.plan(batch, spec)
        for layer in range(num_layers):
            plan.store(layer, k, v)
            plan.attend(layer, q, k, v)

    return run, num_layers


def step_run() -> tuple[Callable[[], None], int]:
    from pdserve.llm import LLM, SamplingParams

    llm = LLM("demo", num_blocks=1024, num_threads=1)
    numbers = itertools.count()
    params = SamplingParams(temperature=0, max_tokens=32, min_tokens=32, ignore_eos=True)

    def run() -> None:
        # another first token each time: nothing is found in the prefix cache
        first = 3 + next(numbers)
        llm.generate([[first, *((n * 7 + i) % 900 + 3 for i in range(699))] for n in range(8)], params)

    return run, 1


def serve(orders: IO[str]) -> None:
    """Each line is a case to prepare, or empty: run what was prepared, and print its seconds."""
    import torch

    torch.set_num_threads(1)
    run: Callable[[], object] = lambda: None  # noqa: E731
    share, repeats = 1, 1
    with torch.inference_mode():
        for line in orders:
            if case := json.loads(line):
                run = lambda: None  # the case before frees its memory  # noqa: E731
                run, share = step_run() if case["kind"] == "step" else attention_run(case)
                run()
                start = time.process_time()
                run()
                repeats = max(1, round(ROUND_S / max(time.process_time() - start, 1e-4)))
                print(0.0, flush=True)
                continue
            start = time.process_time()
            for _ in range(repeats):
                run()
            print((time.process_time() - start) / repeats / share, flush=True)


# ---- both trees


class Tree:
    """A process with one tree's code."""

    def __init__(self, root: Path) -> None:
        folders = [path.parent for path in sorted(root.glob("*/pdserve"))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, case: Case) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(case: Case, rounds: int, trees: list[Tree]) -> None:
    """Prints the medians of both, their ratio, and the quartiles of the ratios of the rounds."""
    for tree in trees:
        tree.ask(case)
    found = [[tree.ask({}) for tree in (trees if number % 2 else trees[::-1])] for number in range(rounds)]
    pairs = [pair if number % 2 else pair[::-1] for number, pair in enumerate(found)]
    here, there = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
    ratios = sorted(one / other for one, other in pairs)
    low, _, high = statistics.quantiles(ratios, n=4) if rounds > 2 else (ratios[0], 0, ratios[-1])
    name = " ".join(f"{value:>8}" for value in case.values())
    print(
        f"{name:45} {there:12.1f} {here:12.1f} {statistics.median(ratios):8.3f}   {low:.3f} to {high:.3f}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the other tree")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose fields contain these words")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(sys.stdin)
        return
    print_conditions()
    print(f"{options.rounds} rounds, one thread; us per layer (step: us in all) of CPU time, medians\n")
    print(f"{'case':45} {'before':>12} {'now':>12} {'ratio':>8}   quartiles of the rounds", flush=True)
    trees = [Tree(root) for root in (Path(__file__).resolve().parents[1], options.against.resolve())]
    for case in cases():
        if all(word in map(str, case.values()) for word in options.only.split()):
            compare(case, options.rounds, trees)
    for tree in trees:
        tree.close()


if __name__ == "__main__":
    main()
