"""Mixtures of experts on a CPU, in turns: products from Python (`LoopedExperts`) and C++ at each instruction set, in bf16.

Each round runs every implementation once over `--layers` layers with new tokens, whose experts are drawn at random. `stream` is
torch.sum over as many bytes as the chosen experts have. Times are those of one layer, in ms: lowest of all rounds, then medians.
One thread: CPU time of the process, so that other load counts only by what it does to caches and to the core that it shares.
Several: wall time.

Usage: python benchmarks/experts.py [--sizes H I E k] [--layers 8] [--threads 1] [--rounds 15] [--rows 1 8 32 256]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from conditions import print_conditions
from torch import Tensor

from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.experts import LoopedExperts, route_top_k
from pdserve.kernels.layers.gated_activations import GatedActivation
from pdserve.kernels.native.native_experts import NativeExperts
from pdserve.kernels.native.native_library import load_library
from pdserve.kernels.torch_layer_ops import TorchLayerOps

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_layers(hidden: int, inner: int, num_experts: int, num_layers: int) -> dict[str, list[Layer]]:
    """Name -> layers."""
    library, ops = load_library(), TorchLayerOps()

    def looped(layer: list[ExpertWeights]) -> Layer:
        experts = LoopedExperts(layer)
        return lambda x, weights, chosen: experts(x, weights, chosen, ops)

    found: dict[str, list[Layer]] = {"looped": [], **{level: [] for level in library.levels}}
    for _ in range(num_layers):
        layer = [
            ExpertWeights(
                torch.randn(2 * inner, hidden).mul(hidden**-0.5).bfloat16(),
                torch.randn(hidden, inner).mul(inner**-0.5).bfloat16(),
            )
            for _ in range(num_experts)
        ]
        found["looped"].append(looped(layer))
        for level in library.levels:
            found[level].append(NativeExperts(layer, GatedActivation(), library, level))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs=4, default=[512, 256, 32, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    print_conditions()
    hidden, inner, num_experts, top_k = options.sizes
    layers = make_layers(hidden, inner, num_experts, options.layers)
    flat = torch.zeros(options.layers * num_experts, 3 * hidden * inner // 2)
    print(f"hidden size {hidden}, inner {inner}, {top_k} of {num_experts} experts, {options.layers} layers")
    print(f"{options.rounds} rounds, {options.threads} threads, ms of a layer: lowest / median\n", flush=True)
    with torch.inference_mode():
        for num_rows in options.rows:
            times: dict[str, list[float]] = {name: [] for name in (*layers, "stream")}
            num_chosen = []
            for number in range(options.rounds + 1):
                inputs = []
                for _ in range(options.layers):
                    routing = route_top_k(torch.randn(num_rows, num_experts).bfloat16(), top_k, normalise=True)
                    inputs.append((torch.randn(num_rows, hidden).bfloat16(), *routing))
                distinct = sum(len(torch.unique(routed[2])) for routed in inputs)
                num_chosen.append(distinct / options.layers)
                names = list(times)
                for name in names if number % 2 else reversed(names):
                    began = clock()
                    if name == "stream":
                        flat[:distinct].sum()
                    else:
                        for layer, given in zip(layers[name], inputs, strict=True):
                            layer(*given)
                    if number:
                        times[name].append((clock() - began) * 1e3 / options.layers)
            print(f"{num_rows} rows, {median(num_chosen):.1f} experts chosen per layer")
            for name, taken in times.items():
                ratio = median(each / looped for each, looped in zip(taken, times["looped"], strict=True))
                print(f"  {name:<12} {min(taken):8.3f} / {median(taken):8.3f}   {ratio:5.2f} of looped", flush=True)


if __name__ == "__main__":
    main()
