"""`LLM` of pdserve beside vLLM's `LLM`, offline on the same cores: rounds in turns, the idle side stopped, each beside the floor.

A process per side has loaded the model once; a round asks each side once per shape, and all processes of the other side are stopped
meanwhile. A measurement beside which other processes were busy is repeated. Prompts are random token numbers, so nothing is found
in a cache. Greedy, without end of text. `floor.py` says what a floor is, `vllm_peer.py` how vLLM's environment is made.

Usage: python benchmarks/offline_side_by_side.py --model DIR --vllm-python ENVIRONMENT/bin/python [--rounds 7] [--threads 2]
       [--shapes 1x128+64 8x256+64 32x128+64 1x1024+1 8x1024+64 8x4096+64 32x1024+64] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from conditions import conditions
from floor import Floor, Workload
from process_trees import end, running, send
from quiet_rounds import quiet
from vllm_peer import environment

SHAPES = ["1x128+64", "8x256+64", "32x128+64", "1x1024+1", "8x1024+64", "8x4096+64", "32x1024+64"]
SHAPE = re.compile(r"(\d+)x(\d+)\+(\d+)")
OURS, PEER = "pdserve", "vLLM"
MAX_MODEL_LEN = 8192


def workload_of(text: str) -> Workload:
    match = SHAPE.fullmatch(text)
    if match is None:
        raise SystemExit(f"--shapes: {text!r} is not REQUESTSxPROMPT+OUTPUT")
    return Workload(*(int(number) for number in match.groups()))


def serve(side: str, model: str, threads: int, options: dict[str, Any]) -> None:
    """Answer each line of stdin, a shape and a seed, with the seconds of one batch. Runs in each side's own environment."""
    from importlib import import_module

    api = import_module("pdserve.llm" if side == OURS else "vllm")
    own = {"num_threads": threads} if side == OURS else {"dtype": "bfloat16", "enforce_eager": True}
    llm = api.LLM(model, max_model_len=MAX_MODEL_LEN, **own, **options)
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    print("ready", flush=True)
    for line in sys.stdin:
        text, seed = line.split()
        num_requests, num_prompt, num_output = (int(number) for number in SHAPE.fullmatch(text).groups())  # type: ignore[union-attr]
        draw = random.Random(int(seed))
        prompts = [
            {"prompt_token_ids": [draw.randrange(10, vocabulary) for _ in range(num_prompt)]}
            for _ in range(num_requests)
        ]
        params = api.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert all(len(output.outputs[0].token_ids) == num_output for output in outputs)
        print(json.dumps(seconds), flush=True)


class Side:
    """One side's process."""

    def __init__(self, name: str, python: Path, model: Path, threads: int, options: str, scratch: Path) -> None:
        variables = dict(os.environ)
        if name == PEER:
            variables = environment(scratch) | {
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
        command = [
            str(python), __file__, "--serve", name, "--model", str(model), "--threads", str(threads), "--options", options,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self._line_is("ready")

    @property
    def pid(self) -> int:
        return self._process.pid

    def _line_is(self, wanted: str | None = None) -> str:
        """Next line of results; lines that a library prints are left out."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == wanted or (wanted is None and re.fullmatch(r"[\d.e-]+", line.strip())):
                return line
        raise RuntimeError(f"process {self.pid} ended")

    def seconds(self, text: str, seed: int) -> float:
        assert self._process.stdin is not None
        with running([self.pid]):
            self._process.stdin.write(f"{text} {seed}\n")
            self._process.stdin.flush()
            return float(self._line_is())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--options", default="{}", help="further options of pdserve's LLM, JSON")
    parser.add_argument("--vllm-options", default="{}", help="the same of vLLM's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, str(options.model), options.threads, json.loads(options.options))
        return
    if options.vllm_python is None:
        parser.error("--vllm-python is missing")
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {
        "conditions": conditions() | {"model": options.model.name, "threads": options.threads, "idle side": "stopped"}
    }
    with tempfile.TemporaryDirectory() as scratch:
        own = {OURS: (Path(sys.executable), options.options), PEER: (options.vllm_python, options.vllm_options)}
        sides: dict[str, Side] = {}
        try:
            for name, (python, its_options) in own.items():
                sides[name] = Side(name, python, options.model, options.threads, its_options, Path(scratch))
                send([sides[name].pid], signal.SIGSTOP)
            floor = Floor(options.model)
            for text in options.shapes:
                report[text] = measured(sides, floor, text, options.rounds)
                if options.out:
                    options.out.write_text(json.dumps(report, indent=2) + "\n")
        finally:
            end([side.pid for side in sides.values()])


def measured(sides: dict[str, Side], floor: Floor, text: str, rounds: int) -> dict[str, Any]:
    """Seconds of each side and of the floor, and ratios of their medians. The first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in [*sides, "floor"]}
    for number in range(rounds + 1):
        for name in sides if number % 2 else reversed(sides):
            seed = number

            def measure(side: Side = sides[name]) -> float:
                nonlocal seed
                seed += 1000
                return side.seconds(text, seed)

            seconds = quiet(measure)
            if number:
                taken[name].append(seconds)
        if number:
            taken["floor"].append(quiet(lambda: floor.seconds(workload_of(text))))
    middle = {name: statistics.median(values) for name, values in taken.items()}
    per_round = [theirs / ours for ours, theirs in zip(taken[OURS], taken[PEER], strict=True)]
    result = {
        "seconds": middle,
        "speed over vLLM's: medians, lowest, highest": [middle[PEER] / middle[OURS], min(per_round), max(per_round)],
        "share of the floor": {name: middle["floor"] / middle[name] for name in sides},
        "rounds": taken,
    }
    print(text, json.dumps({key: value for key, value in result.items() if key != "rounds"}), flush=True)
    return result


if __name__ == "__main__":
    main()
