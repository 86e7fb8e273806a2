"""Time of one decode step of `EngineCore` by stage: scheduling, inputs, forward, sampling, booking.

    full       a model's decode steps; B sequences at a context of C tokens, next to the floor of `floor.py` in the same run
    queue      scheduling and booking alone, with an executor that computes nothing: B sequences that run, next to W that wait
               without a place in the batch
    no room    the same where the batch has places and the pool has no block for those that wait

Medians over the steps, us. `queue` and `no room` count the calls of Python functions of a step, too: a number that no other load on
the machine changes.

Usage: python benchmarks/engine_step.py [--model demo|DIR] [--batches 1 8 32 64] [--contexts 128 1024 4096] [--steps 40]
                                        [--waiting 0 10000] [--only full|queue] [--families NAME ...]

`--families` of `families.py`, with random weights, take the place of `--model`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from conditions import conditions
from families import FAMILIES, write_model
from floor import Floor

from pdserve.common.block_hash import BlockHasher
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.client.loaded_engine import LoadedEngine
from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.loading.loaded_model import model_folder
from pdserve.engine.scheduler.kv_messages import NoTransfers
from pdserve.engine.scheduler.scheduler import Scheduler
from pdserve.engine.scheduler_output import ModelRunnerOutput

BLOCK_SIZE = 16
LONG_BLOCK = 256
"""One holds a whole sequence of `queue`: those that run take no further one, and the pool has none for others."""
VOCABULARY = 500


def request(name: str, num_tokens: int, max_tokens: int) -> EngineCoreRequest:
    prompt = [5 + (7 * place + zlib.crc32(name.encode())) % VOCABULARY for place in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, prefill_here=True)


def full(
    model: Path, load_format: Literal["auto", "dummy"], batch: int, context: int, num_steps: int
) -> dict[str, float]:
    """us per stage of a decode step."""
    num_blocks = batch * (-(-(context + num_steps + 2) // BLOCK_SIZE) + 1)
    settings = WorkerSettings(
        max_num_seqs=batch, num_blocks=num_blocks, enable_prefix_caching=False, load_format=load_format
    )
    core = LoadedEngine.load(model, settings).make_core()
    if context + num_steps + 2 > core.scheduler.config.max_model_len:
        raise ValueError(f"context {context}: the model has {core.scheduler.config.max_model_len} positions")
    core.warm_up()
    for number in range(batch):
        core.add_request(request(str(number), context, num_steps + 2))
    while core.scheduler.running.num_uncomputed_tokens != batch or len(core.scheduler.waiting):
        if not core.has_work:
            raise ValueError(f"{num_steps} steps: the first sequences end before all {batch} prompts are computed")
        core.step()
    stages: dict[str, list[float]] = {}
    for _ in range(num_steps):
        scheduling_s, update_s = core.profile.scheduling_s, core.profile.update_s
        began = time.perf_counter()
        stats = core.step().model_runner_stats
        whole = time.perf_counter() - began
        assert stats is not None
        for name, seconds in {
            "schedule": core.profile.scheduling_s - scheduling_s,
            "inputs": stats.prepare_s,
            "forward": stats.forward_s,
            "sample": stats.sample_s,
            "book": core.profile.update_s - update_s,
            "step": whole,
        }.items():
            stages.setdefault(name, []).append(1e6 * seconds)
    while core.has_work:
        core.step()
    core.scheduler.check(idle=True)
    return {name: statistics.median(found) for name, found in stages.items()}


@dataclass
class Queue:
    """A scheduler whose steps have made-up results."""

    batch: int
    num_waiting: int
    has_places: bool
    num_steps: int

    def __post_init__(self) -> None:
        context, ends_at = 128, 128 + self.num_steps + 40
        assert ends_at <= LONG_BLOCK
        config = EngineConfig(
            block_size=LONG_BLOCK,
            num_blocks=2 * self.batch,  # one is kept free for each sequence that runs
            max_num_seqs=2 * self.batch if self.has_places else self.batch,
            max_num_batched_tokens=self.batch * context,
            max_model_len=ends_at,
        )
        self.scheduler = Scheduler(config, BlockHasher(DeploymentKey(b"k" * 32), LONG_BLOCK), NoTransfers(), None)
        for number in range(self.batch):
            self.scheduler.add_request(request(f"r{number}", context, self.num_steps + 20))
        self.step()
        for number in range(self.num_waiting):
            self.scheduler.add_request(request(f"w{number}", ends_at - 20, 10))
        assert len(self.scheduler.running) == self.batch

    def step(self) -> tuple[float, float]:
        """us to schedule, and to book and collect outputs."""
        began = time.perf_counter()
        scheduled = self.scheduler.schedule()
        between = time.perf_counter()
        req_ids = list(scheduled.num_scheduled_tokens)
        computed = ModelRunnerOutput(req_ids=req_ids, sampled_token_ids=[[7] for _ in req_ids])
        resumed = time.perf_counter()
        self.scheduler.update_from_output(scheduled, computed)
        outputs = self.scheduler.outputs.take()
        assert len(outputs) == len(req_ids)
        return 1e6 * (between - began), 1e6 * (time.perf_counter() - resumed)


def calls_of(work: Callable[[], object]) -> int:
    """Calls of Python functions."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", choices=["full", "queue"])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[])
    options = parser.parse_args()
    for name, value in conditions().items():
        print(f"{name}: {value}")
    torch.set_num_threads(1)
    if options.only != "full":
        print("\n| running | waiting | places | schedule, us | book, us | calls of functions |")
        print("|---:|---:|---|---:|---:|---:|")
        for batch in options.batches:
            for num_waiting in options.waiting:
                for has_places in (False, True) if num_waiting else (False,):
                    queue = Queue(batch, num_waiting, has_places, options.steps)
                    times = [queue.step() for _ in range(options.steps)]
                    schedule, book = (statistics.median(found) for found in zip(*times, strict=True))
                    calls = calls_of(queue.step)
                    named = "no room" if has_places else "none" if num_waiting else "-"
                    print(f"| {batch} | {num_waiting} | {named} | {schedule:.0f} | {book:.0f} | {calls} |")
    if options.only != "queue" and not options.families:
        print_full(model_folder(options.model), "auto", options)
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), family)
            print(f"\n{family}")
            print_full(Path(folder), "dummy", options)


def print_full(model: Path, load_format: Literal["auto", "dummy"], options: argparse.Namespace) -> None:
    floor = Floor(model)
    print("\n| batch | context | " + " | ".join(f"{name}, us" for name in STAGES) + " | floor, us |")
    print("|---:" * (3 + len(STAGES)) + "|")
    for batch in options.batches:
        for context in options.contexts:
            found = full(model, load_format, batch, context, options.steps)
            least = 1e6 * (floor.linears_s(batch, batch) + floor.cache_s(batch, context))
            row = [*(found[name] for name in STAGES), least]
            print(f"| {batch} | {context} | " + " | ".join(f"{value:.0f}" for value in row) + " |", flush=True)


STAGES = ("schedule", "inputs", "forward", "sample", "book", "step")

if __name__ == "__main__":
    main()
