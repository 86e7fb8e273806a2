"""Measure one server with `pdserve bench`, `aiperf` and `vllm bench serve` in turns, and compare their medians.

Every tool runs unchanged, as a command of its own, with the same load: random prompts, a closed loop, greedy sampling, answers of
fixed length. Rounds have different seeds, so that no prompt is found in the prefix cache, and the order of the tools rotates. Two
tools agree in a measure if the medians of their rounds differ by no more than the larger of both spreads (the largest less the
smallest value of the rounds).

Usage: python benchmarks/bench_agreement.py --aiperf "venv/bin/aiperf" --vllm "env HF_HUB_OFFLINE=1 venv/bin/vllm" \\
           [--rounds 5] [--num 40] [--input-tokens 200] [--output-tokens 32] [--concurrency 4] [--output FILE]
           [--url http://127.0.0.1:8000]   # a running server with the bundled model; default: a cluster of its own
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

from cluster_of_processes import serving
from conditions import conditions

from pdserve.models.model_folder import model_folder

MODEL = "demo"
MEASURES = ("TTFT ms", "ITL ms", "TPOT ms", "E2E ms", "requests/s", "output tokens/s")
"""The first four are medians of a run."""
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one run, lengths in tokens."""

    url: str
    num: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Tool:
    """A command that measures: its arguments for a load and a folder, and the values of MEASURES in the file that it writes."""

    name: str
    command: list[str]
    arguments: Callable[[Load, Path], list[str]]
    file: str
    values: Callable[[dict[str, Any]], list[float]]

    def run(self, load: Load) -> list[float]:
        """The values of MEASURES."""
        with tempfile.TemporaryDirectory() as folder:
            command = [*self.command, *self.arguments(load, Path(folder))]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder)
            if done.returncode:
                sys.exit(f"{shlex.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
            return self.values(json.loads((Path(folder) / self.file).read_text()))


def pdserve_arguments(load: Load, folder: Path) -> list[str]:
    return [
        "bench", "--url", load.url, "--num", str(load.num), "--input-tokens", str(load.input_tokens),
        "--output-tokens", str(load.output_tokens), "--concurrency", str(load.concurrency), "--seed", str(load.seed),
        "--temperature", str(load.temperature), "--json", str(folder / "result.json"),
    ]  # fmt: skip


def vllm_arguments(load: Load, folder: Path) -> list[str]:
    return [
        "bench", "serve", "--backend", "openai", "--base-url", load.url, "--model", MODEL,
        "--tokenizer", str(model_folder(MODEL)), "--dataset-name", "random", "--random-input-len", str(load.input_tokens),
        "--random-output-len", str(load.output_tokens), "--ignore-eos", "--temperature", str(load.temperature),
        "--num-prompts", str(load.num), "--num-warmups", "1", "--max-concurrency", str(load.concurrency),
        "--seed", str(load.seed), "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result",
        "--result-dir", str(folder), "--result-filename", "result.json",
    ]  # fmt: skip


def same_names(result: dict[str, Any]) -> list[float]:
    """`pdserve bench` uses the names of `vllm bench serve`."""
    if result["completed"] != result.get("num_prompts", result["completed"]) or result.get("failed"):
        sys.exit(f"requests failed: {result}")
    names = [f"median_{name}_ms" for name in ("ttft", "itl", "tpot", "e2el")]
    return [result[name] for name in (*names, "request_throughput", "output_throughput")]


def aiperf_arguments(load: Load, folder: Path) -> list[str]:
    return [
        "profile", "--model", MODEL, "--url", load.url, "--endpoint-type", "completions", "--streaming",
        "--tokenizer", str(model_folder(MODEL)), "--synthetic-input-tokens-mean", str(load.input_tokens),
        "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", str(load.output_tokens),
        "--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true", "--extra-inputs", f"temperature:{load.temperature}",
        "--use-server-token-count", "--concurrency", str(load.concurrency), "--request-count", str(load.num),
        "--num-dataset-entries", str(load.num), "--warmup-request-count", "1", "--random-seed", str(load.seed),
        "--output-artifact-dir", str(folder), "--ui", "none",
    ]  # fmt: skip


def aiperf_values(result: dict[str, Any]) -> list[float]:
    """aiperf calls ITL what others call TPOT, and inter-chunk latency what others call ITL."""
    names = ("time_to_first_token", "inter_chunk_latency", "inter_token_latency", "request_latency")
    rates = (result[name]["avg"] for name in ("request_throughput", "output_token_throughput"))
    return [*(result[name]["p50"] for name in names), *rates]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", required=True, help="command, as one argument")
    parser.add_argument("--vllm", required=True, help="command, as one argument")
    for name, default in (("rounds", 5), ("num", 40), ("input-tokens", 200), ("output-tokens", 32), ("concurrency", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--url", help="a running server")
    parser.add_argument("--output", type=Path, help="file that the results are added to")
    return parser.parse_args()


def report(rounds: dict[str, list[list[float]]]) -> str:
    """rounds: tool -> per round the values of MEASURES."""
    lines = [f"{'median of the rounds [smallest, largest]':<40}" + "".join(f"{name:>30}" for name in rounds)]
    for place, measure in enumerate(MEASURES):
        values = {name: [one[place] for one in of_tool] for name, of_tool in rounds.items()}
        cells = (f"{statistics.median(v):.2f} [{min(v):.2f}, {max(v):.2f}]" for v in values.values())
        apart = [
            f"{first} and {second} disagree"
            for first, second in combinations(values, 2)
            if abs(statistics.median(values[first]) - statistics.median(values[second]))
            > max(max(values[name]) - min(values[name]) for name in (first, second))
        ]
        lines.append(
            f"{measure:<40}" + "".join(f"{cell:>30}" for cell in cells) + "   " + ("; ".join(apart) or "agree")
        )
    return "\n".join(lines)


def main() -> None:
    options = parse_arguments()
    aiperf, vllm = shlex.split(options.aiperf), shlex.split(options.vllm)
    own = [sys.executable, "-m", "pdserve.cli.main"]
    tools = [
        Tool("pdserve bench", own, pdserve_arguments, "result.json", same_names),
        Tool("aiperf", aiperf, aiperf_arguments, "profile_export_aiperf.json", aiperf_values),
        Tool("vllm bench serve", vllm, vllm_arguments, "result.json", same_names),
    ]
    versions = {
        tool.name: subprocess.run(
            [*tool.command, "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for tool in tools[1:]
    }
    text = "".join(f"{name:<18} {value}\n" for name, value in (conditions() | versions).items())
    text += (
        f"{'pdserve':<18} {version('pdserve')}, bundled model, {options.url or 'one prefill and one decode worker'}\n"
    )
    text += f"{'load':<18} {options.num} requests of {options.input_tokens}+{options.output_tokens} tokens, "
    text += f"{options.concurrency} at once, {options.rounds} rounds in turns\n\n"
    text += f"{'':<27}" + "".join(f"{measure:>17}" for measure in MEASURES) + "\n"
    rounds: dict[str, list[list[float]]] = {tool.name: [] for tool in tools}
    with nullcontext(options.url) if options.url else serving(model_folder(MODEL)) as url:
        for number in range(options.rounds):
            turn = number % len(tools)
            load = Load(
                url,
                options.num,
                options.input_tokens,
                options.output_tokens,
                options.concurrency,
                options.temperature,
                seed=number + 1,
            )
            for tool in tools[turn:] + tools[:turn]:
                rounds[tool.name].append(tool.run(load))
                values = "".join(f"{value:17.2f}" for value in rounds[tool.name][-1])
                text += (line := f"round {number + 1}  {tool.name:<18}{values}\n")
                print(line, end="", flush=True)
    text += f"\n{report(rounds)}\n"
    print(report(rounds))
    if options.output is not None:
        with options.output.open("a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
