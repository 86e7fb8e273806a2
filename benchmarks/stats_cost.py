"""Cost of the statistics of a step: what a step's timers and sums take alone, beside a decode step of the engine.

Both are CPU time of one thread, with torch on one thread. The timers are called as `ModelRunner` and `EngineCore` call them,
without a step between.

Usage: python benchmarks/stats_cost.py [--model demo|DIR] [--sequences 1 8 32] [--steps 200] [--rounds 5] [--greedy]

greedy: without sampling, whose steps are the shortest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from conditions import conditions

from pdserve.common.request.engine_types import EngineCoreRequest, ModelRunnerStats
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.client.loaded_engine import LoadedEngine
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.runner.device.device_runtime import ProcessorRuntime
from pdserve.engine.runner.device.step_times import LayerTimes, StepTimes
from pdserve.engine.runner.loading.loaded_model import model_folder
from pdserve.engine.stats.step_profile import StepProfile

PROMPT_TOKENS = 64
_ALONE = 20_000
"""Steps of timers in one measurement."""


def processor_s(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def decode_step_s(core: EngineCore, num_sequences: int, num_steps: int, temperature: float) -> float:
    """CPU seconds of a decode step of this number of sequences."""
    for number in range(num_sequences):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=num_steps + 8, ignore_eos=True)
        prompt = [5 + (7 * place + number) % 200 for place in range(PROMPT_TOKENS)]
        core.add_request(
            EngineCoreRequest(request_id=f"{num_sequences}.{number}", prompt_token_ids=prompt, sampling_params=params)
        )
    while core.scheduler.running.num_uncomputed_tokens != num_sequences or len(core.scheduler.waiting):
        core.step()

    def run() -> None:
        for _ in range(num_steps):
            core.step()

    spent_s = processor_s(run)
    while core.has_work:
        core.step()
    return spent_s / num_steps


def timers_s(num_layers: int) -> float:
    """CPU seconds of a step's timers and sums. num_layers: layers that are timed."""
    runtime, profile = ProcessorRuntime(), StepProfile()
    layers = LayerTimes(runtime, None)

    def run() -> None:
        for _ in range(_ALONE):
            began = time.monotonic()
            scheduling_s = time.monotonic() - began
            # ModelRunner: the points of started and ended existed before there were statistics
            times = StepTimes(runtime.event(), 8, 8)
            times.prepared = runtime.event()
            for _ in range(num_layers):
                layers()
            times.forwarded = times.sampling = runtime.event()
            if num_layers:
                times.add_layers(layers.take())
            times.sampling = runtime.event()
            times.ended = runtime.event()
            stats: ModelRunnerStats = times.stats()
            update_began = time.monotonic()
            profile.add(scheduling_s, time.monotonic() - update_began, stats)

    return processor_s(run) / _ALONE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--greedy", action="store_true", help="without sampling")
    options = parser.parse_args()
    for name, value in conditions().items():
        print(f"{name}: {value}")
    print(f"sampling: {'greedy' if options.greedy else 'seeded'}")
    torch.set_num_threads(1)
    core = LoadedEngine.load(
        model_folder(options.model), WorkerSettings(max_num_seqs=max(options.sequences))
    ).make_core()
    core.warm_up()
    num_layers = core.executor.runner._model.config.num_layers  # type: ignore[attr-defined]
    alone: dict[int, list[float]] = {0: [], num_layers: []}
    steps: dict[int, list[float]] = {number: [] for number in options.sequences}
    for _ in range(options.rounds):
        for timed, found in alone.items():
            found.append(timers_s(timed))
        for number, found in steps.items():
            found.append(decode_step_s(core, number, options.steps, 0.0 if options.greedy else 1.0))
    print("\n| sequences | step, us | timers, us | of the step | with layers, us | of the step |")
    print("|---:|---:|---:|---:|---:|---:|")
    plain, layered = (1e6 * statistics.median(found) for found in alone.values())
    for number, found in steps.items():
        step = 1e6 * statistics.median(found)
        print(f"| {number} | {step:.0f} | {plain:.1f} | {plain / step:.2%} | {layered:.1f} | {layered / step:.2%} |")
    core.scheduler.check(idle=True)


if __name__ == "__main__":
    main()
