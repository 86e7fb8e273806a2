"""Two checkouts of this repository in turn, round after round: what a change costs per token and per hand-over.

Each checkout has a virtual environment in `.venv` and runs its own `token_cost.py` and `handover.py`, which know its
names; `first_token.py` is that of this checkout. `offline.py --baseline` does the same for `LLM`.

Usage: python benchmarks/before_after.py --before DIR --after DIR [--rounds 7] [--out results/house.txt]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from conditions import conditions

HERE = Path(__file__).parent
COLUMNS = [f"{role} {part}" for role in ("router", "prefill", "decode") for part in ("asyncio", "other threads")]
TIMEOUT_S = 900


def commands(checkout: Path) -> Iterator[tuple[str, list[str]]]:
    """(name, arguments after `python`) of each measurement."""
    theirs = checkout / "benchmarks"
    yield "token", [str(theirs / "token_cost.py"), "--streams", "16", "--seconds", "6"]
    for streams in ("0", "4"):
        yield f"{streams} other streams", [str(theirs / "handover.py"), "--streams", streams]
    yield "first token, idle", [str(HERE / "first_token.py")]


def run(checkout: Path, arguments: list[str]) -> str:
    """Run the command and return its output. Raises: CalledProcessError."""
    environ = os.environ | {"PYTHONSAFEPATH": "", "PYTHONPATH": str(Path(arguments[0]).parent)}
    command = [str(checkout / ".venv/bin/python"), *arguments]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, cwd=checkout
    )
    return done.stdout


def figures(name: str, output: str) -> Iterator[tuple[str, float]]:
    """(label, value) of each line of a benchmark's output that has a figure."""
    for line in output.splitlines():
        words = line.split()
        if name == "token" and words and words[0] in ("grpc", "http"):
            yield f"{words[0]}, {words[1]} streams: tokens/s", float(words[2])
            for column, value in zip(COLUMNS, words[3:], strict=True):
                yield f"{words[0]}, {words[1]} streams: {column}, us per token", float(value)
        elif found := re.match(r"(.+?)\s+p50\s+([\d.]+) ms", line):
            yield f"{name}: {found[1].strip()}, p50 ms", float(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides = {"before": options.before.resolve(), "after": options.after.resolve()}
    head = [f"{name:<12} {value}" for name, value in conditions().items()]
    found: dict[str, dict[str, list[float]]] = {side: defaultdict(list) for side in sides}
    for number in range(options.rounds):
        order = list(sides.items())
        for side, checkout in order if number % 2 == 0 else reversed(order):
            for name, arguments in commands(checkout):
                for label, value in figures(name, run(checkout, arguments)):
                    found[side][label].append(value)
        sys.stderr.write(f"round {number + 1} of {options.rounds}\n")
    lines = [f"{options.rounds} rounds, both sides in turn; medians, and smallest to largest of the rounds", ""]
    lines.append(f"{'':<60}{'before':>34}{'after':>34}")
    for label in found["before"]:
        cells = "".join(_cell(found[side][label]) for side in sides)
        lines.append(f"{label:<60}{cells}")
    text = "\n".join([*head, "", *lines]) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):>12.2f} {min(values):>9.2f} to {max(values):>8.2f}" if values else f"{'-':>34}"


if __name__ == "__main__":
    main()
