"""One run of `pdserve plan`: the cheapest fleet that meets targets for a trace, and how sure that is."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pdserve.cli.bench.run_bench import progress_bar
from pdserve.cli.bench.run_load import RequestRecord
from pdserve.cli.bench.traces.trace import TraceSession
from pdserve.cli.exit_status import EXIT_FAILED
from pdserve.cli.plan.deployment_files import write_deployment_files
from pdserve.cli.plan.fleet_search import FleetSearch, Size, Trial
from pdserve.cli.plan.targets import Target
from pdserve.cli.simulate.device_times import DeviceOptions
from pdserve.cli.simulate.run_simulate import SimulateOptions, simulate
from pdserve.common.errors import ConfigError
from pdserve.simulator.profile import Level
from pdserve.simulator.step_times import StepTimes
from pdserve.simulator.virtual_fleet import FleetPlan

MORE_LOAD = 1.2
"""Factor on the trace's speed, for what the plan is worth with more load."""
WORTH = 0.98
"""Other settings are taken if the worst target comes so much closer, as a factor."""
MAX_WORKERS = 4096
WINDOW_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of one run."""

    load: SimulateOptions
    """Trace, times and settings; its numbers of workers are not used."""
    device: DeviceOptions
    """Of `load.times`, for the spread of a profile's times."""
    targets: Sequence[Target]
    max_workers: int
    prefill_cost: float
    decode_cost: float
    num_check: int
    """Sessions for which the exact mode says how far off the coarse one is; 0: none."""
    folder: Path | None
    """For the files of the deployment."""

    def verify(self) -> None:
        """Raises: ConfigError naming the option, its value and its limits."""
        self.load.verify()
        if not self.targets:
            raise ConfigError("--slo is needed, such as --slo ttft_p99=0.3")
        if not 1 <= self.max_workers <= MAX_WORKERS:
            raise ConfigError(f"--workers is {self.max_workers}, 1 to {MAX_WORKERS} is needed")
        for name, value in (("--prefill-cost", self.prefill_cost), ("--decode-cost", self.decode_cost)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value:g}, above 0 is needed")
        if self.num_check < 0:
            raise ConfigError(f"--check is {self.num_check}, at least 0 is needed")

    def cost(self, size: Size) -> float:
        return size.num_prefill * self.prefill_cost + size.num_decode * self.decode_cost


@dataclass(slots=True)
class Planner:
    """Simulates fleets on the sessions of one trace."""

    options: PlanOptions
    sessions: list[TraceSession]
    num_trials: int = 0

    def fleet(self, size: Size, changes: Mapping[str, Any] = {}, times: StepTimes | None = None) -> FleetPlan:
        """changes: of settings. times: others than the load's."""
        load = self.options.load
        settings, times = {**load.settings, **changes}, times or load.times
        return replace(
            load, num_prefill=size.num_prefill, num_decode=size.num_decode, settings=settings, times=times
        ).fleet()

    def attempt(
        self,
        size: Size,
        changes: Mapping[str, Any] = {},
        sessions: list[TraceSession] | None = None,
        times: StepTimes | None = None,
    ) -> Trial:
        """Coarsely. sessions: others than the trace's. changes, times: as of `fleet`."""
        self.num_trials += 1
        simulated = simulate(
            self.fleet(size, changes, times), sessions or self.sessions, self.options.load.seed, _ignore, is_coarse=True
        )
        records = simulated.records
        duration_s = max(record.ended_s or 0.0 for record in records) - min(record.sent_s for record in records)
        return Trial(size, records, simulated.busy_s or 0.0, duration_s)

    def search(self, changes: Mapping[str, Any], max_workers: int) -> FleetSearch:
        return FleetSearch(
            lambda size: self.attempt(size, changes), self.options.targets, self.options.cost, max_workers
        )

    def variations(self) -> list[dict[str, Any]]:
        """Settings that may serve the load better than the given ones: one change each."""
        given = self.options.load.settings
        changes: list[dict[str, Any]] = []
        if "policy" not in given:
            changes.append({"policy": "least_loaded"})
        if "local_prefill" not in given:
            changes.append({"local_prefill": "never"})
        if "max_num_batched_tokens" not in given:
            tokens = self.fleet(Size(1, 1)).workers[0].settings.step_tokens
            changes += [{"max_num_batched_tokens": tokens // 2}, {"max_num_batched_tokens": 2 * tokens}]
        return changes

    def distance(self, trial: Trial) -> float:
        """How much of its limit the worst target takes; above 1, it is missed."""
        return max(target.value_s(trial.records) / target.limit_s for target in self.options.targets)


def run_plan(options: PlanOptions) -> int:
    """Search and show. Returns the exit status: 1 if no fleet meets the targets. Raises: ConfigError."""
    options.verify()
    console, began = Console(), time.monotonic()
    planner = Planner(options, options.load.sessions())
    with progress_bar() as progress:
        progress.add_task("fleets", total=None)
        search = planner.search({}, options.max_workers)
        best, changes = search.cheapest(), {}
        searches = [search]
        if best is not None:
            tried = {planner.distance(planner.attempt(best.size, each)): each for each in planner.variations()}
            if tried and min(tried) < WORTH * planner.distance(best):
                better = planner.search(tried[min(tried)], best.size.num_prefill + best.size.num_decode)
                if (found := better.cheapest()) is not None and options.cost(found.size) <= options.cost(best.size):
                    best, changes = found, dict(tried[min(tried)])
                    searches.append(better)
    if best is None:
        console.print(f"no fleet of at most {options.max_workers} workers meets {', '.join(map(str, options.targets))}")
        if frontier := search.frontier():
            console.print(_table(options, frontier[-3:], None))
        return EXIT_FAILED
    console.print(f"{best.size}: the cheapest of the fleets that meet {', '.join(map(str, options.targets))}")
    if changes:
        console.print("with " + ", ".join(f"{name}={value}" for name, value in changes.items()))
    console.print(_table(options, searches[-1].frontier(), best.size))
    _show_doubts(console, planner, best, changes)
    Console(stderr=True).print(f"simulated {planner.num_trials} fleets in {time.monotonic() - began:.1f} s")
    if options.folder is not None:
        write_deployment_files(options.folder, best.size, {**options.load.settings, **changes})
        console.print(f"wrote the files of the deployment to {options.folder}")
    return 0


def _table(options: PlanOptions, trials: Sequence[Trial], chosen: Size | None) -> Table:
    """The frontier: each fleet is better in some target than all cheaper ones that were tried."""
    table = Table("fleet", "cost", *(f"{target.name} p{target.percent:g}, s" for target in options.targets), "in use")
    for trial in trials:
        cells = [_seconds(value) for value in trial.values_s(options.targets)]
        mark = " *" if trial.size == chosen else ""
        table.add_row(f"{trial.size}{mark}", f"{options.cost(trial.size):g}", *cells, f"{100 * trial.use:.0f} %")
    return table


def _seconds(value: float) -> str:
    return "failures" if math.isinf(value) else f"{value:.3g}"


def _show_doubts(console: Console, planner: Planner, best: Trial, changes: Mapping[str, Any]) -> None:
    options, size = planner.options, best.size
    table = Table("and", *(f"{target.name} p{target.percent:g}, s" for target in options.targets), "targets")

    def row(name: str, records: Sequence[RequestRecord]) -> None:
        met = all(target.is_met(records) for target in options.targets)
        cells = [_seconds(target.value_s(records)) for target in options.targets]
        table.add_row(name, *cells, "met" if met else "missed")

    row("as planned", best.records)
    more = [session.timed(MORE_LOAD, math.inf) for session in planner.sessions]
    row(f"{100 * (MORE_LOAD - 1):.0f} % more load", planner.attempt(size, changes, more).records)
    if options.device.profile is not None:
        levels: tuple[Level, ...] = ("low", "high")
        for level in levels:
            times, _ = replace(options.device, level=level).times()
            row(f"the profile's {level} times", planner.attempt(size, changes, times=times).records)
    if options.num_check:
        first, name = planner.sessions[: options.num_check], f"first {options.num_check} sessions"
        row(f"{name}, coarsely", planner.attempt(size, changes, first).records)
        exact = simulate(planner.fleet(size, changes), first, options.load.seed, _ignore)
        row(f"{name}, exactly", exact.records)
    console.print(table)
    windows = _windows(best.records)
    kept = sum(all(target.is_met(each) for target in options.targets) for each in windows)
    num_workers = size.num_prefill + size.num_decode
    least = best.busy_s / best.duration_s
    console.print(f"All targets are met in {kept} of {len(windows)} windows of ten minutes.")
    console.print(
        f"The workers compute in {100 * best.use:.0f} % of their time: no fleet can do the same steps with fewer than "
        f"{math.ceil(least)} of them, and this one has {num_workers}."
    )


def _windows(records: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
    """By the time of sending; without empty ones."""
    windows: dict[int, list[RequestRecord]] = {}
    for record in records:
        windows.setdefault(int(record.sent_s // WINDOW_S), []).append(record)
    return [windows[number] for number in sorted(windows)]


def _ignore(record: RequestRecord) -> None:
    """Progress is shown by the fleet."""
