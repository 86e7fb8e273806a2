"""One run of `pdserve whatif`: what a change of a fleet does to the figures of a trace."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from pdserve.cli.bench.run_bench import progress_bar
from pdserve.cli.bench.summary import TITLES, Summary
from pdserve.cli.bench.traces.trace_file import lines_of
from pdserve.cli.exit_status import EXIT_FAILED
from pdserve.cli.simulate.run_simulate import SimulateOptions, simulate
from pdserve.common.errors import ConfigError

COUNTS = {"prefill": "num_prefill", "decode": "num_decode"}
"""What a change may name that is no setting -> the field of `SimulateOptions`."""
SHOWN = ("ttft", "tpot", "e2el")


class _RecordedWorkers(msgspec.Struct):
    """The part of a record's line that says where a prompt was served."""

    prefill: str = ""
    decode: str = ""


def recorded_workers(trace: Path) -> dict[str, int]:
    """Role -> workers that a record names; 0 in a trace that names none. Raises: ConfigError if it cannot be read."""
    decoder = msgspec.json.Decoder(_RecordedWorkers)
    found: dict[str, set[str]] = {role: set() for role in COUNTS}
    if trace.is_dir():
        return dict.fromkeys(COUNTS, 0)
    for _, line in lines_of(trace):
        try:
            workers = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # a trace of another kind; what is wrong with it is told when its requests are read
            break
        for role, names in found.items():
            names.add(getattr(workers, role))
    return {role: len(names - {""}) for role, names in found.items()}


def fleet_now(trace: Path, num_prefill: int | None, num_decode: int | None) -> tuple[int, int]:
    """The given numbers of prefill and decode workers, else those that a record names, else one of each role."""
    if num_prefill is not None and num_decode is not None:
        return num_prefill, num_decode
    recorded = recorded_workers(trace)
    if not any(recorded.values()):
        recorded = dict.fromkeys(COUNTS, 1)
    return (
        recorded["prefill"] if num_prefill is None else num_prefill,
        recorded["decode"] if num_decode is None else num_decode,
    )


@dataclass(frozen=True, slots=True)
class Change:
    """`decode=+2` or `kv_host_mib=4096`."""

    name: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Change:
        """Raises: ConfigError."""
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise ConfigError(f"--change is {text[:80]!r}, NAME=VALUE is needed, such as decode=+2 or kv_host_mib=4096")
        return cls(name.replace("-", "_"), value)

    def applied(self, options: SimulateOptions) -> SimulateOptions:
        """Raises: ConfigError for a number of workers that cannot be."""
        if self.name not in COUNTS:
            return replace(options, settings={**options.settings, self.name: self.value})
        before = getattr(options, COUNTS[self.name])
        try:
            number = int(self.value)
        except ValueError:
            raise ConfigError(f"--change is {self.name}={self.value[:80]}, an integer is needed, or +N or -N") from None
        count = before + number if self.value[0] in "+-" else number
        if count < (least := 1 if self.name == "decode" else 0):
            raise ConfigError(f"--change {self.name}={self.value} leaves {count} workers, at least {least} is needed")
        if self.name == "prefill":
            return replace(options, num_prefill=count)
        return replace(options, num_decode=count)


def run_whatif(options: SimulateOptions, changes: Sequence[Change]) -> int:
    """Simulate both and show them. Returns the exit status: 1 if a request failed in either. Raises: ConfigError."""
    options.verify()
    if not changes:
        raise ConfigError("--change is needed, such as --change decode=+2")
    changed = options
    for change in changes:
        changed = change.applied(changed)
    fleets = {"now": options, "then": changed}
    # settings that no service can have are told before the first run
    plans = {name: fleet.fleet() for name, fleet in fleets.items()}
    sessions, began, found = options.sessions(), time.monotonic(), dict[str, Summary]()
    with progress_bar() as progress:
        num_requests = sum(len(list(session.requests)) for session in sessions)
        task = progress.add_task("requests", total=len(fleets) * num_requests)
        for name, plan in plans.items():
            simulated = simulate(
                plan, sessions, options.seed, lambda record: progress.advance(task), is_coarse=options.is_coarse
            )
            found[name] = simulated.summary({})
    Console().print("then: " + ", ".join(f"{change.name}={change.value}" for change in changes))
    Console().print(_table(fleets, found))
    Console(stderr=True).print(f"simulated {len(fleets)} fleets in {time.monotonic() - began:.1f} s")
    return EXIT_FAILED if any(summary.failures for summary in found.values()) else 0


def _table(fleets: Mapping[str, SimulateOptions], found: Mapping[str, Summary]) -> Table:
    table = Table("", *found, "change")
    table.add_row("workers", *(f"{each.num_prefill} prefill, {each.num_decode} decode" for each in fleets.values()), "")
    for name in SHOWN:
        for word in ("mean", "p99"):
            values = [
                summary.distributions[name].mean if word == "mean" else summary.distributions[name].percentiles[99]
                for summary in found.values()
            ]
            table.add_row(f"{TITLES[name]} {word}, ms", *map(_number, values), _change(values))
    per_s = [summary.completed / summary.duration_s if summary.duration_s else None for summary in found.values()]
    table.add_row("requests/s", *map(_number, per_s), _change(per_s))
    cached = [
        100.0 * (summary.cached_tokens or 0) / summary.input_tokens if summary.input_tokens else None
        for summary in found.values()
    ]
    table.add_row("cached prompt tokens, %", *map(_number, cached), "")
    table.add_row("failed", *(str(sum(summary.failures.values())) for summary in found.values()), "")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _change(values: Sequence[float | None]) -> str:
    before, after = values
    return f"{100 * (after / before - 1):+.1f} %" if before and after is not None else ""
