"""One run of `pdserve simulate`: a trace, a fleet that exists only in virtual time, and the figures of `pdserve bench`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pdserve.cli.bench.report import as_json, tables
from pdserve.cli.bench.run_bench import make_draw_tokens, progress_bar, show_errors, write_report
from pdserve.cli.bench.run_load import LoadPlan, LoadRun, RequestRecord
from pdserve.cli.bench.summary import Distribution, Summary, parse_targets
from pdserve.cli.bench.trace_options import TraceFormat
from pdserve.cli.bench.traces.read_trace import fitted, read_trace
from pdserve.cli.bench.traces.trace import TraceSession
from pdserve.cli.bench.traces.trace_text import TraceTexts
from pdserve.cli.exit_status import EXIT_FAILED
from pdserve.cli.simulate.coarse_run import run_coarsely
from pdserve.cli.simulate.fleet_endpoint import FleetEndpoint
from pdserve.cli.up.cluster_plan import settings_by_role
from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.models.model_folder import model_folder
from pdserve.simulator.coarse.coarse_fleet import CoarseFleet
from pdserve.simulator.step_times import StepTimes
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
    times: StepTimes
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
    is_coarse: bool = False
    json_file: Path | None

    def verify(self) -> None:
        """Raises: ConfigError naming the option, its value and its limit."""
        limits: list[tuple[str, float, float]] = [
            ("--num", self.num_sessions, 1),
            ("--trace-scale", self.trace_scale, 1),
        ]
        for name, value, least in limits:
            if not least <= value < float("inf"):
                raise ConfigError(f"{name} is {value:g}, at least {least:g} is needed")
        if not 0 < self.trace_speed < float("inf"):
            raise ConfigError(f"--trace-speed is {self.trace_speed:g}, above 0 is needed")
        if self.draft_acceptance is not None and not 0 <= self.draft_acceptance <= 1:
            raise ConfigError(f"--draft-acceptance is {self.draft_acceptance:g}, 0 to 1 is needed")

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
    began = time.monotonic()
    with progress_bar() as progress:
        task = progress.add_task("requests", total=sum(len(list(session.requests)) for session in sessions))
        simulated = simulate(
            plan, sessions, options.seed, lambda record: progress.advance(task), is_coarse=options.is_coarse
        )
    records, summary = simulated.records, simulated.summary(targets)
    for table in tables(summary):
        Console().print(table)
    Console(stderr=True).print(f"simulated {summary.duration_s:.1f} s in {time.monotonic() - began:.1f} s")
    show_errors(records)
    if options.json_file is not None:
        write_report(
            options.json_file, as_json(summary, {"simulated": "coarse" if options.is_coarse else "exact"}, records)
        )
    return EXIT_FAILED if summary.failures else 0


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the clients of a simulation saw."""

    records: list[RequestRecord]
    gaps_s: Mapping[float, int] | None = None
    """Times between chunks -> how often; None: those of the records."""
    busy_s: float | None = None
    """Seconds in which the workers together computed steps; None: not known."""

    def summary(self, targets_ms: dict[str, float]) -> Summary:
        summary = Summary.of(self.records, targets_ms)
        if self.gaps_s is None:
            return summary
        return replace(summary, distributions=summary.distributions | {"itl": Distribution.counted(self.gaps_s)})


def simulate(
    plan: FleetPlan,
    sessions: list[TraceSession],
    seed: int,
    on_record: Callable[[RequestRecord], None],
    *,
    is_coarse: bool = False,
) -> Simulated:
    """Replay the sessions. Raises: ConfigError, UnsupportedModel."""
    if is_coarse:
        fleet, records = CoarseFleet(plan), list[RequestRecord]()

        def ended(record: RequestRecord) -> None:
            records.append(record)
            on_record(record)

        run_coarsely(fleet, sessions, ended)
        return Simulated(records, fleet.step_gaps, fleet.busy_s)
    random.seed(seed)  # the product draws the jitter of its waits
    return Simulated(run_virtually(lambda virtual: _run(plan, sessions, seed, on_record, virtual)))


async def _run(
    plan: FleetPlan,
    sessions: list[TraceSession],
    seed: int,
    on_record: Callable[[RequestRecord], None],
    virtual: VirtualTime,
) -> list[RequestRecord]:
    tokenizer = plan.tokenizer()
    texts = TraceTexts(seed, make_draw_tokens(tokenizer))
    texts.prepare(sessions)
    async with running_fleet(plan, virtual) as router:
        run = LoadRun(
            FleetEndpoint(router, TIMEOUT_S),
            texts,
            tokenizer.decode,
            as_text=False,
            timeout_s=TIMEOUT_S,
            on_end=on_record,
        )
        await run.run(sessions, LoadPlan(follows_trace=True, seed=seed))
    return run.records
