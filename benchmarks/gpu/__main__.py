"""`python -m gpu`, which `make gpu` and `make gpu-dry` call: runs the stages, prints rows as they come, and the table last.

--dry        on a CPU with tiny shapes, to prove that every stage runs; measures nothing
--only NAME  some stages; may be repeated
--out DIR    receives rows.jsonl, table.txt and log.txt; default: gpu-results
--carry DIR  wheels of what is missing here (`make gpu-carry`); default: gpu-carry, where that exists
--seconds N  all stages together

Exit status: 0 if every stage ran and every check passed, 1 if not, 2 without a GPU. A missed goal is a result, not a failure.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import IO

from gpu.carried import ROOT, describe_project, environment, install_wheels
from gpu.plan import BY_NAME, DRY_LIMIT_S, DRY_TOTAL_S, STAGES, TOTAL_S, Stage
from gpu.report import is_in_order, line, table
from gpu.rows import Rows, read_rows

POLL_S = 0.1
END_S = 8.0
"""Seconds in which the process of a stage may end its own processes."""
LOOK = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.__version__)"


class Terminated(BaseException):
    """SIGTERM or SIGINT arrived."""


def _terminate(number: int, _: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Terminated(number)


def why_no_gpu(variables: dict[str, str]) -> str | None:
    """One sentence; None where there is a GPU. In a process of its own: this one needs no torch."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"{sys.executable} cannot import torch ({last})"
    count, version = done.stdout.split()[-2:]
    return None if int(count) else f"torch {version} of {sys.executable} finds no CUDA device"


class Run:
    """One run of some stages."""

    def __init__(self, stages: list[Stage], out: Path, variables: dict[str, str], *, dry: bool, seconds: float) -> None:
        self._stages = stages
        self._rows_path, self._table_path, self._log_path = (
            out / name for name in ("rows.jsonl", "table.txt", "log.txt")
        )
        for path in (self._rows_path, self._table_path, self._log_path):
            path.unlink(missing_ok=True)
        self._variables = variables
        self._dry = dry
        self._ends_at = time.monotonic() + seconds
        self._num_printed = 0

    def stages(self) -> None:
        with self._log_path.open("ab") as log:
            for stage in self._stages:
                limit_s = DRY_LIMIT_S if self._dry else stage.limit_s
                seconds = min(limit_s, self._ends_at - time.monotonic())
                if seconds < 1:
                    self._rows(stage).fail("limit", "not begun: the time for all stages is over")
                    continue
                self._stage(stage, seconds, log)

    def table(self) -> bool:
        """Print and write the table; True if all is in order."""
        self._print_rows()
        rows = read_rows(self._rows_path)
        names = [stage.name for stage in self._stages]
        text = table(rows, names)
        self._table_path.write_text(text)
        print("\n" + text, flush=True)
        return is_in_order(rows, names)

    def _rows(self, stage: Stage) -> Rows:
        return Rows(self._rows_path, stage.name, dry=self._dry)

    def _stage(self, stage: Stage, seconds: float, log: IO[bytes]) -> None:
        log.write(f"\n==== {stage.name}\n".encode())
        log.flush()
        began = time.monotonic()
        command = [sys.executable, "-m", "gpu.stage_process", stage.name, str(self._rows_path), f"{seconds:.0f}"]
        command += ["--dry"] if self._dry else []
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < began + seconds:
                self._print_rows()
                time.sleep(POLL_S)
            status = process.poll()
        finally:
            _end(process)
        took_s = None if self._dry else time.monotonic() - began
        if status is None:
            self._rows(stage).fail("limit", f"ended after {seconds:.0f} s; its rows until then are in the table")
        elif status:
            self._rows(stage).fail("process", f"exit status {status}: see {self._log_path.name}")
        self._rows(stage).add("took", took_s=took_s)
        self._print_rows()

    def _print_rows(self) -> None:
        rows = read_rows(self._rows_path)
        for row in rows[self._num_printed :]:
            if "took_s" not in row:
                print(line(row), flush=True)
        self._num_printed = len(rows)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage's process, and whatever it started and left."""
    for number, wait_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", action="append", choices=list(BY_NAME), default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    parser.add_argument("--carry", type=Path)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    # an environment for tests has what a dry run needs
    options.carry = options.carry or (Path(os.devnull) if options.dry else ROOT / "gpu-carry")
    if not options.dry and (reason := why_no_gpu(dict(os.environ))):
        print(f"make gpu needs a GPU: {reason}; `make gpu-dry` runs the same stages on a CPU.", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _terminate)
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pdserve-gpu-") as folder:
        site = Path(folder) / "site"
        describe_project(site)
        if any(options.carry.glob("*.whl")):
            install_wheels(options.carry, site)
        stages = [stage for stage in STAGES if not options.only or stage.name in options.only]
        seconds = options.seconds or (DRY_TOTAL_S if options.dry else TOTAL_S)
        seconds -= time.monotonic() - began
        run = Run(stages, options.out.resolve(), environment(site), dry=options.dry, seconds=seconds)
        status = 0
        try:
            run.stages()
        except Terminated as signalled:
            status = 128 + int(signalled.args[0])
        in_order = run.table()
    return status or (0 if in_order else 1)


if __name__ == "__main__":
    sys.exit(main())
