"""Products of a few rows with the matrices of a model's layers: bfloat16, int8 in oneDNN, and int8 in C++ at each instruction set.

Each round runs every implementation once over all matrices of `--layers` layers of the shape of m05 (Qwen2.5-0.5B's: hidden size
896, inner size 4864), in turns. `stream` is torch.sum over as many bytes as the int8 matrices have. Times are of 24 layers, in ms:
the lowest of all rounds, then medians. One thread: CPU time of the process, so that other load counts only by what it does to
caches and to the core that it shares. Several: wall time. int8 in C++ must have the bits of oneDNN's.

Usage: python benchmarks/int8_linear.py [--threads 1] [--rounds 15] [--layers 8] [--rows 1 4 8 16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from unittest import mock

import torch
from conditions import conditions, print_conditions
from torch import Tensor

from pdserve.kernels.cpu.int8_linear import Int8Linear, Int8Matrix
from pdserve.kernels.cpu.linear import make_linear
from pdserve.kernels.native.native_int8 import BlockedValues, NativeInt8Rows
from pdserve.kernels.native.native_library import load_library

SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
"""Outputs and inputs: queries, keys and values; output; gate and up; down."""
NUM_LAYERS = 24

Layer = Callable[[Tensor], Tensor]


def make_layers(num_layers: int) -> dict[str, list[Layer]]:
    """Name -> all matrices in order."""
    library = load_library()
    # oneDNN then computes all rows
    mock.patch("pdserve.kernels.cpu.int8_linear.built_library", return_value=None).start()
    found: dict[str, list[Layer]] = {"bfloat16": [], "oneDNN": [], **{level: [] for level in library.int8_levels}}
    for _ in range(num_layers):
        for shape in SHAPES:
            weight = torch.randn(shape).bfloat16()
            matrix = Int8Matrix.quantized(weight)
            values = BlockedValues.of_tensor(matrix.values)
            found["bfloat16"].append(make_linear(weight))
            found["oneDNN"].append(Int8Linear(matrix, None))
            for level in library.int8_levels:
                found[level].append(NativeInt8Rows(values, matrix.values, matrix.scales, None, library, level))
    return found


def run(layers: list[Layer], inputs: list[Tensor]) -> list[Tensor]:
    return [layer(inputs[number % len(inputs)]) for number, layer in enumerate(layers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    print_conditions()
    layers = make_layers(options.layers)
    flat = torch.zeros(options.layers * sum(outputs * inputs for outputs, inputs in SHAPES) // 4)
    scale = 1e3 / options.layers * NUM_LAYERS
    print(f"{options.rounds} rounds, {options.threads} threads, ms: lowest / median\n", flush=True)
    with torch.inference_mode():
        for num_rows in options.rows:
            inputs = [torch.randn(num_rows, shape[1]).bfloat16() for shape in SHAPES]
            expected = run(layers["oneDNN"], inputs)
            for name in set(layers) - {"bfloat16", "oneDNN"}:
                pairs = zip(run(layers[name], inputs), expected, strict=True)
                assert all(torch.equal(found, each) for found, each in pairs), name
            times: dict[str, list[float]] = {name: [] for name in (*layers, "stream")}
            for number in range(options.rounds + 1):
                for name, found in times.items():
                    start = clock()
                    if name == "stream":
                        flat.sum()
                    else:
                        run(layers[name], inputs)
                    if number:  # the first round warms up
                        found.append((clock() - start) * scale)
            parts = (f"{name} {min(found):.1f} / {median(found):.1f}" for name, found in times.items())
            print(f"{num_rows:>3} rows: " + ", ".join(parts), flush=True)
    print(f"\nload after   {conditions()['load before']}")


if __name__ == "__main__":
    main()
