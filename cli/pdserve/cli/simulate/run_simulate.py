"""One run of `pdserve simulate`: a trace, a fleet that exists only in virtual time, and the figures of `pdserve bench`."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from pdserve.cli.bench.report import as_json, tables
from pdserve.cli.bench.run_bench import make_draw_tokens, progress_bar, show_errors, write_report
from pdserve.cli.bench.run_load import LoadPlan, LoadRun, RequestRecord
from pdserve.cli.bench.summary import Summary, parse_targets
from pdserve.cli.bench.trace_options import TraceFormat
from pdserve.cli.bench.traces.read_trace import fitted, read_trace
from pdserve.cli.bench.traces.trace import TraceSession
from pdserve.cli.bench.traces.trace_text import TraceTexts
from pdserve.cli.exit_status import EXIT_FAILED
from pdserve.cli.simulate.fleet_endpoint import FleetEndpoint
from pdserve.cli.up.cluster_plan import settings_by_role
from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.models.model_folder import model_folder
from pdserve.simulator.step_times import LinearStepTimes
from pdserve.simulator.virtual_fleet import FleetPlan, WorkerPlan, running_fleet
from pdserve.simulator.virtual_tiers import DISK_LINK, HOST_LINK
from pdserve.simulator.virtual_time import VirtualTime, run_virtually
from pdserve.simulator.virtual_transfer import Link

TIMEOUT_S = 3600.0
"""Virtual seconds of a request, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of one run."""

    trace: Path
    trace_format: TraceFormat | None
    """None: by the content."""
    num_sessions: int
    trace_speed: float
    trace_scale: int
    num_prefill: int
    num_decode: int
    times: LinearStepTimes
    link: Link
    host: Link = HOST_LINK
    disk: Link = DISK_LINK
    draft_acceptance: float | None = None
    """As of `WorkerPlan`, with the two before."""
    settings: Mapping[str, Any]
    """Of the services, as the command line has them."""
    config: Path | None
    goodput: list[str]
    seed: int
    json_file: Path | None

    def verify(self) -> None:
        """Raises: ConfigError naming the option, its value and its limit."""
        limits: list[tuple[str, float, float]] = [
            ("--num", self.num_sessions, 1),
            ("--trace-scale", self.trace_scale, 1),
            ("--step-ms", 1e3 * self.times.base_s, 0),
            ("--token-us", 1e6 * self.times.token_s, 0),
            ("--attended-ns", 1e9 * self.times.context_s, 0),
        ]
        for name, value, least in limits:
            if not least <= value < float("inf"):
                raise ConfigError(f"{name} is {value:g}, at least {least:g} is needed")
        positive = {
            "--trace-speed": self.trace_speed,
            "--bandwidth": self.link.bytes_per_s / 1e9,
            "--host-bandwidth": self.host.bytes_per_s / 1e9,
            "--disk-bandwidth": self.disk.bytes_per_s / 1e9,
        }
        for name, value in positive.items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value:g}, above 0 is needed")
        if self.draft_acceptance is not None and not 0 <= self.draft_acceptance <= 1:
            raise ConfigError(f"--draft-acceptance is {self.draft_acceptance:g}, 0 to 1 is needed")
        if not self.times.base_s and not self.times.token_s:
            raise ConfigError("--step-ms and --token-us are 0: a step takes some time")

    def fleet(self) -> FleetPlan:
        """Raises: ConfigError for settings that no service can have."""
        given = settings_by_role({"connector": "tcp", **self.settings})
        router = load_settings(RouterSettings, flags=given["router"], toml=self.config)
        prefill = load_settings(PrefillSettings, flags=given["prefill"], toml=self.config)
        decode = load_settings(DecodeSettings, flags=given["decode"], toml=self.config)
        return FleetPlan(
            model_folder(router.model),
            router,
            [
                WorkerPlan(settings, count, self.times, self.link, self.host, self.disk, self.draft_acceptance)
                for settings, count in ((prefill, self.num_prefill), (decode, self.num_decode))
            ],
        )

    def sessions(self) -> list[TraceSession]:
        """Raises: ConfigError for a trace that cannot be read, or has no requests."""
        read = read_trace(self.trace, self.num_sessions, trace_format=self.trace_format, seed=self.seed)
        if not read:
            raise ConfigError(f"{self.trace} has no requests")
        return fitted(read, self.trace_scale, self.trace_speed, float("inf"))


def run_simulate(options: SimulateOptions) -> int:
    """Run and show. Returns the exit status: 1 if a request failed. Raises: ConfigError."""
    options.verify()
    targets = parse_targets(options.goodput)
    plan, sessions = options.fleet(), options.sessions()
    random.seed(options.seed)  # the product draws the jitter of its waits
    began = time.monotonic()
    with progress_bar() as progress:
        records = run_virtually(lambda virtual: _run(plan, sessions, options.seed, progress, virtual))
    summary = Summary.of(records, targets)
    for table in tables(summary):
        Console().print(table)
    Console(stderr=True).print(f"simulated {summary.duration_s:.1f} s in {time.monotonic() - began:.1f} s")
    show_errors(records)
    if options.json_file is not None:
        write_report(options.json_file, as_json(summary, {"simulated": True}, records))
    return EXIT_FAILED if summary.failures else 0


async def _run(
    plan: FleetPlan, sessions: list[TraceSession], seed: int, progress: Progress, virtual: VirtualTime
) -> list[RequestRecord]:
    tokenizer = plan.tokenizer()
    texts = TraceTexts(seed, make_draw_tokens(tokenizer))
    texts.prepare(sessions)
    task = progress.add_task("requests", total=sum(len(list(session.requests)) for session in sessions))
    async with running_fleet(plan, virtual) as router:
        run = LoadRun(
            FleetEndpoint(router, TIMEOUT_S), texts, tokenizer.decode, as_text=False, timeout_s=TIMEOUT_S,
            on_end=lambda record: progress.advance(task),
        )  # fmt: skip
        await run.run(sessions, LoadPlan(follows_trace=True, seed=seed))
    return run.records
