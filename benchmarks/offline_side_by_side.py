"""`LLM` of pdserve beside other engines, offline on the same cores: rounds in turns, idle sides stopped, each beside the floor.

A process per side has loaded the model once (`offline_engine.py`); a round asks each side once per shape, and all processes of the
other sides are stopped meanwhile. A measurement beside which other processes were busy is repeated. The first round warms up, with
at most 8 new tokens. Prompts are random token numbers, others in each measurement, so that nothing is found in a cache. Greedy,
without end of text. `floor.py` says what a floor is, `vllm_peer.py` how vLLM's environment is made.

Usage: python benchmarks/offline_side_by_side.py --model DIR [--vllm-python ENVIRONMENT/bin/python]
       [--vllm-also DIR OPTIONS]
       [--llama-cpp ENVIRONMENT/bin/python FILE.gguf] [--openvino ENVIRONMENT/bin/python FOLDER] [--rounds 7] [--threads 2]
       [--shapes 1x128+64 8x256+64 32x128+64 1x1024+1 8x1024+64 8x4096+64 32x1024+64] [--out FILE]

Drafts and int8 beside vLLM without and with its own, where `int8_checkpoint.py` has written DIR-INT8, and random weights make texts
that repeat themselves after some hundred tokens:
    python benchmarks/offline_side_by_side.py --model DIR --vllm-python ENVIRONMENT/bin/python --shapes 1x192+800
        --options '{"quantization": "int8", "speculative_config": {"method": "ngram", "num_speculative_tokens": 4,
                   "prompt_lookup_max": 4, "prompt_lookup_min": 2}}'
        --vllm-also DIR-INT8 '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 4,
                   "prompt_lookup_max": 4, "prompt_lookup_min": 2}}'

llama.cpp and its files, float16 and 8-bit weights likewise:
    python3 -m venv FOLDER && CMAKE_ARGS=-DLLAVA_BUILD=OFF FOLDER/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0
    python vendor/llama.cpp/convert_hf_to_gguf.py DIR --outtype bf16 --outfile m-bf16.gguf    # from the sdist
OpenVINO and its folders:
    python3 -m venv FOLDER && FOLDER/bin/pip install openvino-genai==2026.4.1.0 optimum-intel==2.2.0
    FOLDER/bin/optimum-cli export openvino --model DIR --weight-format fp16 FOLDER-OF-MODEL    # or int8
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from conditions import conditions
from floor import Floor, Workload
from process_trees import end, resident_mib, running, send
from quiet_rounds import quiet
from vllm_peer import environment

SHAPES = ["1x128+64", "8x256+64", "32x128+64", "1x1024+1", "8x1024+64", "8x4096+64", "32x1024+64"]
SHAPE = re.compile(r"(\d+)x(\d+)\+(\d+)")
OURS, FLOOR = "pdserve", "floor"
ENGINE = Path(__file__).with_name("offline_engine.py")
WARM_UP_TOKENS = 8


def workload_of(text: str) -> Workload:
    match = SHAPE.fullmatch(text)
    if match is None:
        raise SystemExit(f"--shapes: {text!r} is not REQUESTSxPROMPT+OUTPUT")
    return Workload(*(int(number) for number in match.groups()))


@dataclass(frozen=True)
class Start:
    """How a side's process is started."""

    engine: str
    """One of `offline_engine.ENGINES`."""
    python: Path
    model: Path
    options: str = "{}"


class Side:
    """One side's process, which has loaded its model."""

    def __init__(self, start: Start, threads: int, vocabulary: int, scratch: Path) -> None:
        variables = dict(os.environ)
        if start.engine == "vLLM":
            variables = environment(scratch) | {
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
        command = [
            str(start.python), str(ENGINE), start.engine, str(start.model), "--threads", str(threads),
            "--vocabulary", str(vocabulary), "--options", start.options,
        ]  # fmt: skip
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self.version: str = self._answer("ready")
        self.start_s = time.perf_counter() - began

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answer(self, name: str) -> Any:
        """Value of the next line with this name; lines that a library prints are left out."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f'{{"{name}": '):
                return json.loads(line)[name]
        raise RuntimeError(f"process {self.pid} ended")

    def seconds(self, workload: Workload, seed: int) -> float:
        assert self._process.stdin is not None
        numbers = [workload.num_requests, workload.prompt_tokens, workload.output_tokens, seed]
        with running([self.pid]):
            self._process.stdin.write(f"{json.dumps(numbers)}\n")
            self._process.stdin.flush()
            return float(self._answer("seconds"))


def starts_of(options: argparse.Namespace) -> dict[str, Start]:
    """Name of each side -> its start; pdserve is the first."""
    starts = {OURS: Start("pdserve", Path(sys.executable), options.model, options.options)}
    if options.vllm_python is not None:
        starts["vLLM"] = Start("vLLM", options.vllm_python, options.model, options.vllm_options)
        for model, further in options.vllm_also:
            starts[f"vLLM {Path(model).stem} {further}"] = Start("vLLM", options.vllm_python, Path(model), further)
    for engine, given in (("llama.cpp", options.llama_cpp), ("OpenVINO", options.openvino)):
        for python, model, *further in given:
            starts[f"{engine} {Path(model).stem}"] = Start(engine, Path(python), Path(model), *further)
    return starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path)
    for name in ("--llama-cpp", "--openvino"):
        parser.add_argument(
            name, nargs="+", action="append", default=[], metavar=("PYTHON", "MODEL"),
            help="may be repeated; a third value is further options, JSON (offline_engine.py)",
        )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--options", default="{}", help="further options of pdserve's LLM, JSON")
    parser.add_argument("--vllm-options", default="{}", help="the same of vLLM's")
    parser.add_argument(
        "--vllm-also", nargs=2, action="append", default=[], metavar=("MODEL", "OPTIONS"),
        help="a further side of vLLM's with this model and these options, JSON; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if any(len(given) not in (2, 3) for given in options.llama_cpp + options.openvino):
        parser.error("--llama-cpp and --openvino take an interpreter, a model and perhaps options")
    starts = starts_of(options)
    if len(starts) == 1:
        parser.error("no other engine: --vllm-python, --llama-cpp or --openvino")
    torch.set_num_threads(options.threads)
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    report: dict[str, Any] = {
        "conditions": conditions() | {"model": options.model.name, "threads": options.threads, "idle side": "stopped"}
    }
    with tempfile.TemporaryDirectory() as scratch:
        sides: dict[str, Side] = {}
        try:
            for name, start in starts.items():
                sides[name] = Side(start, options.threads, vocabulary, Path(scratch))
                send([sides[name].pid], signal.SIGSTOP)
            floor = Floor(options.model)
            for text in options.shapes:
                report[text] = measured(sides, floor, workload_of(text), options.rounds)
                print(
                    text, json.dumps({key: value for key, value in report[text].items() if key != "rounds"}), flush=True
                )
                report["sides"] = {
                    name: {
                        "version": side.version,
                        "options": json.loads(starts[name].options),
                        "seconds from start until ready": side.start_s,
                        "resident MiB": resident_mib(side.pid),
                    }
                    for name, side in sides.items()
                }
                if options.out:
                    options.out.write_text(json.dumps(report, indent=2) + "\n")
        finally:
            end([side.pid for side in sides.values()])
    print(json.dumps(report["sides"]))


def measured(sides: dict[str, Side], floor: Floor, workload: Workload, rounds: int) -> dict[str, Any]:
    """`summary` of the rounds after the one that warms up."""
    taken: dict[str, list[float]] = {name: [] for name in [*sides, FLOOR]}
    short = replace(workload, output_tokens=min(workload.output_tokens, WARM_UP_TOKENS))
    for number in range(rounds + 1):
        for name in sides if number % 2 else reversed(sides):
            if number == 0:
                sides[name].seconds(short, 0)
                continue
            seed = zlib.crc32(f"{workload} {number}".encode())

            def measure(side: Side = sides[name]) -> float:
                nonlocal seed
                seed += 1
                return side.seconds(workload, seed)

            taken[name].append(quiet(measure))
        if number:
            taken[FLOOR].append(quiet(lambda: floor.seconds(workload)))
    return summary(taken)


def summary(taken: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of the seconds of each side and of the floor, and their ratios. taken: seconds of the rounds."""
    middle = {name: statistics.median(values) for name, values in taken.items()}
    result: dict[str, Any] = {"seconds": middle}
    for peer in taken:
        if peer not in (OURS, FLOOR):
            rounds = [theirs / ours for ours, theirs in zip(taken[OURS], taken[peer], strict=True)]
            result[f"speed over {peer}'s: medians, lowest, highest"] = [
                middle[peer] / middle[OURS], min(rounds), max(rounds),
            ]  # fmt: skip
    result["share of the floor"] = {name: middle[FLOOR] / value for name, value in middle.items() if name != FLOOR}
    return result | {"rounds": taken}


if __name__ == "__main__":
    main()
