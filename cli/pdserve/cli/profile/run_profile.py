"""One run of `pdserve profile`: a worker's start, its steps and its transfers, measured here, or a profile of tables of layers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pdserve.cli.bench.run_bench import progress_bar
from pdserve.cli.profile.step_bench import StepBench
from pdserve.cli.profile.step_grid import StepLimits, step_grid
from pdserve.cli.profile.transfer_bench import measure_transfer
from pdserve.cli.up.cluster_plan import ChildPlan, WorkerRole, make_plan
from pdserve.cli.up.worker_child import WorkerChild
from pdserve.common.errors import ConfigError
from pdserve.common.settings.settings import load_settings, values_of
from pdserve.common.settings.worker_settings import WORKER_SETTINGS, WorkerSettings
from pdserve.engine.runner.device.cuda_devices import device_name
from pdserve.engine.runner.loading.loaded_model import LoadedModel, load_model, verify_model, verify_worker
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.model_folder import model_folder
from pdserve.models.model_impl import read_model_config
from pdserve.simulator.layer_tables import profile_of_layers
from pdserve.simulator.profile import Profile, Spread, write_profile
from pdserve.simulator.whole_steps import StepShape, with_steps

NOTED = (
    "device", "dtype", "quantization", "kv_cache_dtype", "tensor_parallel_size", "block_size", "max_num_seqs", "num_threads",
    "attention_backend", "kernels", "enforce_eager", "load_format",
)  # fmt: skip
"""Settings that a profile names: those that change its times."""
OF_CONFIG = ("model", "dtype", "model_impl")
"""Settings with which a config.json is read."""
SECONDS = 120.0
DRAIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of one run."""

    role: WorkerRole
    """Whose settings are read."""
    settings: Mapping[str, Any]
    """Of the worker, as the command line has them."""
    config: Path | None
    out: Path
    seconds: float | None = None
    """For steps; those of the first round are measured in any case. None: `SECONDS`."""
    layers: Path | None = None
    """Folder with tables of layers, from which the profile is made instead."""
    device_name: str | None = None
    overhead_us: float | None = None

    def verify(self) -> None:
        """Raises: ConfigError naming the option, its value and its limit."""
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ConfigError(f"--seconds is {self.seconds:g}, above 0 is needed")
        if self.out.is_dir() or not os.access(self.out.parent, os.W_OK):
            raise ConfigError(f"--out is {self.out}, which cannot be written")
        if self.layers is None:
            if self.overhead_us is not None:
                raise ConfigError(f"--overhead-us is {self.overhead_us:g}, but there is no --layers")
            return
        if self.device_name is None:
            raise ConfigError(f"--layers is {self.layers}: --device-name is needed, of the device of these tables")
        if self.overhead_us is not None and not 0 <= self.overhead_us < math.inf:
            raise ConfigError(f"--overhead-us is {self.overhead_us:g}, at least 0 is needed")
        if self.seconds is not None:
            raise ConfigError(f"--seconds is {self.seconds:g} and --layers is {self.layers}: tables are not measured")
        for name, value in self.settings.items():
            if name not in OF_CONFIG:
                raise ConfigError(
                    f"{name} is {value!r} and --layers is {self.layers}: tables have settings of their own"
                )


def run_profile(options: ProfileOptions) -> None:
    """Measure, show and write. Raises: ConfigError, UnsupportedModel; WorkerLost when a rank has ended."""
    options.verify()
    settings = load_settings(WORKER_SETTINGS[options.role], flags=options.settings, toml=options.config)
    if options.layers is not None:
        config = read_model_config(model_folder(settings.model), settings.dtype, settings.model_impl)
        overhead_s = (options.overhead_us or 0.0) / 1e6
        profile = profile_of_layers(options.layers, settings.model, config, options.device_name or "", overhead_s)
        write_profile(profile, options.out)
        Console(stderr=True).print(f"{options.out}: {len(profile.attention)} samples of attention")
        return
    profile, steps = measured_profile(options, settings)
    write_profile(profile, options.out)
    console = Console()
    console.print(steps_table(steps))
    console.print(rest_table(profile))


def measured_profile(options: ProfileOptions, settings: WorkerSettings) -> tuple[Profile, dict[StepShape, Spread]]:
    """The profile, and the steps for its samples, coarsest first. Raises: as `run_profile`."""
    given = {**options.settings, "num_threads": settings.num_threads}
    [plan] = make_plan(given, options.config, {options.role: 1}).children
    folder = model_folder(settings.model)
    _verify_steps(folder, settings)
    seconds = SECONDS if options.seconds is None else options.seconds
    with progress_bar() as progress:

        def begin(what: str, total: float = 1) -> Callable[[float], None]:
            """Takes what is completed."""
            task = progress.add_task(what, total=total)
            return lambda completed: progress.update(task, completed=min(completed, total))

        ended = begin("start of a worker")
        start_s = asyncio.run(_start_s(plan, folder))
        ended(1)
        ended = begin("weights")
        model = load_model(folder, settings)
        ended(1)
        with contextlib.closing(model):
            ended = begin("transfers")
            connector, transfer = measure_transfer(plan, model.layout.shapes[0])
            ended(1)
            # as a worker does: a full collection over what is loaded would be part of some step
            gc.freeze()
            # last, since it pins this thread if the settings say so, and later processes with it
            steps = measure_steps(model, settings, seconds, begin("seconds of steps", math.ceil(seconds)))
            gc.unfreeze()
    noted = {name: value for name, value in values_of(settings).items() if name in NOTED}
    noted |= {
        "max_num_batched_tokens": settings.step_tokens,
        "max_model_len": model.max_model_len,
        "async_scheduling": settings.runs_ahead,
        "connector": connector,
    }
    profile = Profile(
        model=settings.model,
        device=options.device_name or device_name(settings.device),
        settings=noted,
        conditions=f"pdserve {version('pdserve')}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load before {os.getloadavg()[0]:.1f}",
        tokens=(),
        outputs=(),
        attention=(),
        transfer=transfer,
        start_s=Spread.of([start_s]),
    )
    profile = with_steps(profile, steps)
    profile.verify()
    return profile, steps


def _verify_steps(folder: Path, settings: WorkerSettings) -> None:
    """Raises: ConfigError, UnsupportedModel for a worker that would not start, or has other steps than those that are measured."""
    verify_worker(folder, settings)
    config = verify_model(folder, settings)
    reasons = {
        f"{folder} has an encoder": isinstance(config, EncoderDecoderConfig),
        f"{folder} has a classification head": config.classifier is not None,
        "speculative_config is set": settings.speculative_config is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"{reason}, and such steps are not measured")


async def _start_s(plan: ChildPlan, folder: Path) -> float:
    """Seconds from the start of a worker's process until it serves. Raises: ConfigError."""
    worker = WorkerChild(plan, folder, plan.settings.metrics_port)
    began = time.monotonic()
    await worker.start()
    seconds = time.monotonic() - began
    await worker.stop(DRAIN_S, asyncio.Event())
    return seconds


def measure_steps(
    model: LoadedModel, settings: WorkerSettings, seconds: float, on_step: Callable[[float], None]
) -> dict[StepShape, Spread]:
    """Steps of the first round, and of further ones while there is time, in this order. Ends the model.

    on_step: called with the seconds that are past. Raises: ConfigError for a pool that is too small.
    """
    bench = StepBench(model, settings)
    steps: dict[StepShape, Spread] = {}
    try:
        began = time.monotonic()
        for number, shapes in enumerate(step_grid(StepLimits(bench.config))):
            for shape in shapes:
                past = time.monotonic() - began
                if number and past > seconds:
                    return steps
                steps[shape] = Spread.of(bench.measure(shape))
                bench.check()
                on_step(int(past))
        return steps
    finally:
        bench.close()


def steps_table(steps: Mapping[StepShape, Spread], most: int = 24) -> Table:
    """The first steps, of all sizes."""
    table = Table(title=f"Steps ({min(most, len(steps))} of {len(steps)})")
    for column in ("chunks", "sequences", "outputs", "ms", "10 %", "90 %"):
        table.add_column(column, justify="right")
    for shape, spread in sorted(list(steps.items())[:most]):
        chunks = f"{shape.chunks} x {shape.chunk} after {shape.before}" if shape.chunk else ""
        sequences = f"{shape.sequences} after {shape.context}" if shape.sequences else ""
        times = (f"{1e3 * seconds:.2f}" for seconds in (spread.median_s, spread.low_s, spread.high_s))
        table.add_row(chunks, sequences, str(shape.num_outputs or ""), *times)
    return table


def rest_table(profile: Profile) -> Table:
    table = Table(title=f"{profile.model} on {profile.device}", show_header=False)
    if profile.transfer is not None:
        rate, latency_us = profile.transfer.bytes_per_s / 1e9, 1e6 * profile.transfer.latency_s
        table.add_row(f"blocks over {profile.settings['connector']}", f"{rate:.2f} GB/s after {latency_us:.0f} us")
    if profile.start_s is not None:
        table.add_row("start of a worker", f"{profile.start_s.median_s:.1f} s")
    return table
