"""How far simulated latencies are from measured ones: the same trace on a real cluster and on a simulated one, on this machine.

Three commands, one after the other: `pdserve profile`, with the settings of the cluster's workers, `pdserve bench` against
`pdserve up` with one worker of each role, and `pdserve simulate` with the profile. The trace has prompts and answers of random
lengths, no two prompts with a common beginning, and arrives as a Poisson process, whatever the cluster does.

Usage: python benchmarks/simulated.py [--model demo|DIR] [--rate 2] [--requests 60] [--input 256] [--output 32] [--seconds 60]
                                      [--profile FILE] [--folder FOLDER] [--flag=--name=value ...]

--profile takes one that was measured before. --folder keeps the profile, the trace and both reports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster_of_processes import serving
from conditions import print_conditions

from pdserve.models.model_folder import model_folder

BLOCK_SIZE = 16
MEASURES = {
    "TTFT mean": "mean_ttft_ms", "TTFT p50": "median_ttft_ms", "TTFT p99": "p99_ttft_ms",
    "TPOT mean": "mean_tpot_ms", "TPOT p50": "median_tpot_ms", "TPOT p99": "p99_tpot_ms",
}  # fmt: skip
"""Title -> its name in a report."""


def make_trace(num_requests: int, rate: float, input_tokens: int, output_tokens: int, seed: int = 0) -> str:
    """Lines of Mooncake's format. Lengths are drawn evenly from half of the given ones to one and a half times that."""
    draw, numbers, lines, at_s = random.Random(seed), itertools.count(), [], 0.0
    for _ in range(num_requests):
        at_s += draw.expovariate(rate)
        length, answer = (
            draw.randint(max(1, tokens // 2), max(1, 3 * tokens // 2)) for tokens in (input_tokens, output_tokens)
        )
        line = {
            "timestamp": int(1e3 * at_s),
            "input_length": length,
            "output_length": answer,
            "hash_ids": [next(numbers) for _ in range(-(-length // BLOCK_SIZE))],
            "block_size": BLOCK_SIZE,
        }
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def pdserve(*words: object) -> None:
    """Run one command to its end. Raises: CalledProcessError."""
    command = [sys.executable, "-m", "pdserve.cli.main", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def compared(measured: dict[str, Any], simulated: dict[str, Any]) -> list[str]:
    """Rows of a table: milliseconds of both reports, and their ratio."""
    rows = ["| | measured, ms | simulated, ms | ratio |", "|---|---:|---:|---:|"]
    for title, name in MEASURES.items():
        real, virtual = measured[name], simulated[name]
        rows.append(f"| {title} | {real:.2f} | {virtual:.2f} | {virtual / real:.2f} |")
    return rows


def run(options: argparse.Namespace, folder: Path) -> None:
    flags: Sequence[str] = options.flag
    profile: Path = options.profile or folder / "profile.json"
    trace, measured, simulated = (folder / name for name in ("trace.jsonl", "measured.json", "simulated.json"))
    trace.write_text(make_trace(options.requests, options.rate, options.input, options.output))
    if options.profile is None:
        pdserve("profile", options.model, "--out", profile, "--seconds", options.seconds, *flags)
    folder_of_model = model_folder(options.model)
    with serving(folder_of_model, flags) as url:
        asked = ("--url", url, "--tokenizer", folder_of_model, "--trace", trace, "--num", options.requests)
        pdserve("bench", *asked, "--json", measured)
    replayed = ("--trace-format", "mooncake", "--num", options.requests, "--json", simulated)
    pdserve("simulate", trace, "--profile", profile, "--model", options.model, *replayed, *flags)
    print("\n".join(compared(json.loads(measured.read_text()), json.loads(simulated.read_text()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--input", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="of `pdserve profile`")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--flag", action="append", default=[], help="a setting of the workers, as --flag=--max-num-seqs=8"
    )
    options = parser.parse_args()
    print_conditions()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        run(options, options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
