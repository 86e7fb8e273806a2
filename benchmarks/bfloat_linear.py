"""Products of a few rows with all bfloat16 matrices of a model: oneDNN, and C++ over the same memory, in turns.

The matrices have the shape of m05 (24 layers of Qwen2.5-0.5B, 32,000 tokens), 0.77 GB on huge pages. `stream` is torch.sum over as
many bytes. Wall time in ms, the lowest of all rounds, then medians: the machine must be idle.

Usage: python benchmarks/bfloat_linear.py [--threads 1] [--rounds 7] [--rows 1 2 4 8 12 16 24 32 48 64 96]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from conditions import print_conditions
from torch import Tensor

from pdserve.kernels.cpu.huge_pages import request_huge_pages
from pdserve.kernels.cpu.linear import PackedLinear

SHAPES = [(1152, 896), (896, 896), (9728, 896), (896, 4864)] * 24 + [(32_000, 896)]
"""Outputs and inputs: queries, keys and values; output; gate and up; down; the output matrix."""

Layer = Callable[[Tensor], Tensor]


def make_layers() -> dict[str, list[Layer]]:
    """Name -> all matrices in order."""
    found: dict[str, list[Layer]] = {"oneDNN": [], "C++": []}
    for shape in SHAPES:
        packed = PackedLinear(torch.randn(shape).bfloat16(), None)
        if packed.native is None:
            raise SystemExit("C++ does not read oneDNN's layout on this CPU, or is not built")
        found["C++"].append(packed.native)
        packed.native = None
        found["oneDNN"].append(packed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96])
    options = parser.parse_args()
    request_huge_pages()
    torch.set_num_threads(options.threads)
    print_conditions()
    print(f"{options.rounds} rounds, {options.threads} threads\n")
    layers = make_layers()
    flat = torch.zeros(sum(outputs * inputs for outputs, inputs in SHAPES) // 4, dtype=torch.int64)
    with torch.inference_mode():
        for num_rows in options.rows:
            inputs = {size: torch.randn(num_rows, size).bfloat16() for size in {size for _, size in SHAPES}}
            taken: dict[str, list[float]] = {name: [] for name in (*layers, "stream")}
            for _ in range(options.rounds + 1):
                for name, of_side in layers.items():
                    began = time.perf_counter()
                    for layer, (_, size) in zip(of_side, SHAPES, strict=True):
                        layer(inputs[size])
                    taken[name].append(1e3 * (time.perf_counter() - began))
                began = time.perf_counter()
                flat.sum()
                taken["stream"].append(1e3 * (time.perf_counter() - began))
            lowest = {name: min(values[1:]) for name, values in taken.items()}
            shown = (f"{name} {lowest[name]:.1f} / {median(values[1:]):.1f}" for name, values in taken.items())
            print(f"{num_rows} rows: " + ", ".join(shown))
            print(f"    C++ takes {lowest['C++'] / lowest['oneDNN']:.2f} of oneDNN's time", flush=True)


if __name__ == "__main__":
    main()
