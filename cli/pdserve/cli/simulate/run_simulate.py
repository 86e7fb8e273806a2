"""One run of `pdserve simulate`: a trace, a fleet that exists only in virtual time, and the figures of `pdserve bench`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pdserve.cli.bench.report import tables
from pdserve.cli.bench.report_files import ReportFiles
from pdserve.cli.bench.run_bench import make_draw_tokens, progress_bar, show_errors
from pdserve.cli.bench.run_load import LoadPlan, LoadRun, RequestRecord
from pdserve.cli.bench.summary import Distribution, Summary, parse_targets
from pdserve.cli.bench.trace_options import TraceFormat
from pdserve.cli.bench.traces.read_trace import fitted, read_trace
from pdserve.cli.bench.traces.trace import TraceSession
from pdserve.cli.bench.traces.trace_text import TraceTexts
from pdserve.cli.exit_status import EXIT_FAILED
from pdserve.cli.simulate.coarse_run import run_coarsely
from pdserve.cli.simulate.fleet_endpoint import FleetEndpoint
from pdserve.cli.simulate.fleet_timeline import FleetTimeline, TimelineRow
from pdserve.cli.up.cluster_plan import settings_by_role
from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.models.model_folder import model_folder
from pdserve.router.requests.inference import Inference
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
    files: ReportFiles = field(default_factory=ReportFiles)
    timeline_file: Path | None = None
    """CSV of queues and pools."""

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
    options.files.prepare()
    timeline = FleetTimeline()
    if options.timeline_file is not None:
        timeline.write(options.timeline_file)
    began = time.monotonic()
    with progress_bar() as progress:
        task = progress.add_task("requests", total=sum(len(list(session.requests)) for session in sessions))
        simulated = simulate(
            plan, sessions, options.seed, lambda record: progress.advance(task), timeline, is_coarse=options.is_coarse
        )
    records, summary = simulated.records, simulated.summary(targets)
    for table in tables(summary):
        Console().print(table)
    Console(stderr=True).print(f"simulated {summary.duration_s:.1f} s in {time.monotonic() - began:.1f} s")
    show_errors(records)
    conditions = {"simulated": "coarse" if options.is_coarse else "exact"}
    has_pictures = options.files.html_file or options.files.plots_folder
    pictures = {"Queues and pools by time": timeline.picture()} if has_pictures else {}
    options.files.write(summary, conditions, records, saves_requests=True, pictures=pictures)
    if options.timeline_file is not None:
        timeline.write(options.timeline_file)
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
    timeline: FleetTimeline | None = None,
    *,
    is_coarse: bool = False,
) -> Simulated:
    """Replay the sessions. timeline: gets rows. Raises: ConfigError, UnsupportedModel."""
    if is_coarse:
        fleet = CoarseFleet(plan)
        if timeline is not None:
            fleet.watch(timeline.every_s, lambda now_s: timeline.rows.extend(_coarse_rows(fleet, now_s)))
        records = run_coarsely(fleet, sessions, on_record)
        return Simulated(records, fleet.step_gaps, fleet.busy_s)
    random.seed(seed)  # the product draws the jitter of its waits
    return Simulated(run_virtually(lambda virtual: _run(plan, sessions, seed, on_record, timeline, virtual)))


async def _run(
    plan: FleetPlan,
    sessions: list[TraceSession],
    seed: int,
    on_record: Callable[[RequestRecord], None],
    timeline: FleetTimeline | None,
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
        async with contextlib.AsyncExitStack() as stack:
            if timeline is not None:
                watching = asyncio.create_task(_watch(router, timeline, virtual))
                stack.callback(watching.cancel)
            await run.run(sessions, LoadPlan(follows_trace=True, seed=seed))
    return run.records


async def _watch(router: Inference, timeline: FleetTimeline, virtual: VirtualTime) -> None:
    """Note what workers have reported, until cancelled."""
    while True:
        admission = router.admission
        timeline.rows.append(
            TimelineRow(round(virtual.now_s, 6), "router", "router", admission.num_running, admission.num_queued, 0, 0)
        )
        for role in WorkerRole:
            for worker in router.fleet.workers(role):
                load = worker.load
                row = TimelineRow(
                    round(virtual.now_s, 6), worker.identity.worker_id, role.value, load.num_running,
                    load.num_waiting + load.num_remote_kv, load.blocks_in_use, load.blocks_total,
                )  # fmt: skip
                timeline.rows.append(row)
        await asyncio.sleep(timeline.every_s)


def _coarse_rows(fleet: CoarseFleet, now_s: float) -> list[TimelineRow]:
    now_s = round(now_s, 6)
    rows = [TimelineRow(now_s, "router", "router", fleet.num_running, fleet.num_queued, 0, 0)]
    for remote, worker in fleet.workers:
        rows.append(
            TimelineRow(
                now_s,
                remote.identity.worker_id,
                remote.role_name,
                worker.num_running,
                worker.num_waiting,
                worker.num_held,
                worker.num_blocks,
            )
        )
    return rows
