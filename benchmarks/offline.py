"""Tokens per second of `LLM` in turns: with the engine in its process, with `engine_process`, with ranks, and of another checkout.

python benchmarks/offline.py --rounds 7 [--model FOLDER] [--baseline FOLDER] [--variants "two threads" "two ranks"]
                             [--shapes "1 request"]

Each variant is a process that has loaded the bundled model or `--model`; a round asks each of
them once, in turns. CPU time is that of the variant's process and of all processes that it has started.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from conditions import conditions

SHAPES = {"1 request": (1, 128), "64 requests": (64, 64)}
"""Name -> requests of a batch, output tokens of each. Prompts have 32 tokens, none is cached."""
PROMPT_TOKENS = 32
BEFORE = "before"
VARIANTS: dict[str, dict[str, Any]] = {
    BEFORE: {},
    "in its process": {},
    "engine_process": {"engine_process": True},
    "two threads": {"num_threads": 2},
    "two ranks": {"tensor_parallel_size": 2},
}
"""Name -> options of `LLM`. A baseline may not know an option."""


def processor_s() -> float:
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [own, *own.children(recursive=True)])


def serve(model: str, variant: str) -> None:
    """Answer each line of stdin, the name of a shape, with seconds and CPU seconds of one batch."""
    from pdserve.llm import LLM, SamplingParams

    llm = LLM(model, **VARIANTS[variant])
    number = 0
    for line in sys.stdin:
        num_requests, num_tokens = SHAPES[line.strip()]
        prompts = []
        for _ in range(num_requests):
            number += 1
            prompts.append([10 + (number * 31 + place * (number % 7 + 1)) % 500 for place in range(PROMPT_TOKENS)])
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        began, processor_began = time.perf_counter(), processor_s()
        llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps([time.perf_counter() - began, processor_s() - processor_began]), flush=True)
    llm.shutdown()


def start(variant: str, model: str, baseline: Path | None) -> subprocess.Popen[str]:
    environ = dict(os.environ)
    if variant == BEFORE and baseline is not None:
        portions = [str(path.parent) for path in baseline.glob("*/pdserve")]
        environ["PYTHONPATH"] = os.pathsep.join(portions)
    command = [sys.executable, __file__, "--serve", variant, "--model", model]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)


def ask(process: subprocess.Popen[str], shape: str) -> list[float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(shape + "\n")
    process.stdin.flush()
    answer: list[float] = json.loads(process.stdout.readline())
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--baseline", type=Path, help="another checkout, measured as `before`")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS)[1:], default=["in its process", "engine_process"]
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.serve)
        return
    for name, value in conditions().items():
        print(f"{name}: {value}")
    variants = [*([BEFORE] if options.baseline else []), *options.variants]
    processes = {variant: start(variant, options.model, options.baseline) for variant in variants}
    print(
        f"{options.rounds} rounds in turns after one to warm up; medians, in brackets the lowest and highest of tokens/s"
    )
    for shape in options.shapes:
        num_requests, num_tokens = SHAPES[shape]
        taken: dict[str, list[list[float]]] = {variant: [] for variant in variants}
        for round_number in range(options.rounds + 1):
            for variant in variants if round_number % 2 else reversed(variants):
                result = ask(processes[variant], shape)
                if round_number:
                    taken[variant].append(result)
        for variant in variants:
            rates = sorted(num_requests * num_tokens / wall_s for wall_s, _ in taken[variant])
            processor_us = statistics.median(cpu_s for _, cpu_s in taken[variant]) / (num_requests * num_tokens) * 1e6
            print(
                f"{shape:12} {variant:15} {statistics.median(rates):7.0f} tokens/s [{rates[0]:.0f}, {rates[-1]:.0f}]  "
                f"{processor_us:6.0f} us of CPU time per token"
            )
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


if __name__ == "__main__":
    main()
