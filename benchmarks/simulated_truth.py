"""Simulated latencies next to those that vLLM measured on GPUs that are not here: tables of LLMServingSim's authors.

A folder has `profiles/DEVICE/ORG/MODEL/FORM/tpN/*.csv`, `measured/DEVICE/MODEL/{meta.json,requests.jsonl}` and
`workloads/*.jsonl`; a config.json for each model comes from `--configs`. One worker serves both roles with vLLM's settings of
scheduling, and requests arrive when they did there. With `--fit`, each step takes so much longer that the first half of the answers
has the measured mean time per token; the figures are then those of the second half.

Usage: python benchmarks/simulated_truth.py FOLDER --configs CONFIGS [--fit]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.cli.bench.run_load import RequestRecord
from pdserve.cli.bench.summary import Latencies
from pdserve.cli.bench.traces.read_trace import read_trace
from pdserve.cli.simulate.run_simulate import simulate
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.models.read_config import read_config
from pdserve.simulator.layer_tables import profile_of_layers
from pdserve.simulator.profile import ProfileStepTimes
from pdserve.simulator.virtual_fleet import FleetPlan, WorkerPlan
from pdserve.simulator.virtual_transfer import Link

MEMORY_USE = 0.9
"""vLLM's gpu_memory_utilization, where a run does not say how many blocks it had."""
BLOCK_TOKENS = 16
GOALS = {"ttft": (5.0, 10.0), "tpot": (2.0, 10.0)}
"""Percent that the mean and the 99th percentile may be off."""


@dataclass(frozen=True)
class Run:
    """One measured run."""

    device: str
    model: str
    tables: Path
    config: Path
    workload: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    meta: dict[str, Any]
    memory_gib: float

    @property
    def num_blocks(self) -> int:
        """Of the run if it tells, else what is left of the memory after the weights."""
        if blocks := self.meta.get("kv_cache", {}).get("num_gpu_blocks"):
            return int(blocks)
        config = read_config(self.config)
        place = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * BLOCK_TOKENS
        per_layer = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
        per_layer += 3 * config.hidden_size * config.intermediate_size
        weights = 2 * (config.num_layers * per_layer + 2 * config.vocab_size * config.hidden_size)
        return int((MEMORY_USE * self.memory_gib * 2**30 - weights) / place)

    def measured(self) -> list[RequestRecord]:
        began = min(each["arrival_time"] for each in self.requests)
        records = []
        for number, each in enumerate(self.requests):
            sent_s = each["arrival_time"] - began
            first_s = sent_s + each["first_token_ts"] - each["queued_ts"]
            last_s = first_s + each["last_token_ts"] - each["first_token_ts"]
            records.append(
                RequestRecord(str(number), sent_s, sent_s, [first_s, last_s], output_tokens=each["output_toks"])
            )
        return records

    def simulated(self, overhead_s: float) -> list[RequestRecord]:
        config = read_config(self.config)
        times = ProfileStepTimes(profile_of_layers(self.tables, self.model, config, self.device, overhead_s))
        given = self.meta["engine_kwargs"]
        limits = {"max_num_seqs": given["max_num_seqs"], "max_num_batched_tokens": given["max_num_batched_tokens"]}
        limits |= {"max_model_len": given["max_model_len"] or 32768, "num_blocks": self.num_blocks}
        # vLLM's queue has no limit
        patient = {"queue_timeout_s": 3600.0, "request_timeout_s": 7200.0, "max_running_requests": 1 << 16}
        model = {"model": str(self.config)}
        router = load_settings(RouterSettings, flags=model | patient | {"max_queued_requests": 1 << 16})
        worker = load_settings(
            DecodeSettings,
            flags=model
            | limits
            | {"connector": "tcp", "dtype": "bfloat16", "max_waiting": 1 << 13, "async_scheduling": True},
        )
        plan = FleetPlan(self.config, router, [WorkerPlan(worker, 1, times, Link(1e9, 1e-4))])
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            began = min(each["arrival_time"] for each in self.requests)
            trace.write_text(
                "".join(
                    json.dumps(line | {"block_size": BLOCK_TOKENS, "timestamp": 1e3 * (each["arrival_time"] - began)})
                    + "\n"
                    for line, each in zip(self.workload, self.requests, strict=True)
                )
            )
            sessions = read_trace(trace, len(self.requests), trace_format="mooncake")
            records = simulate(plan, sessions, 0, lambda record: None).records
        failed = [record.error for record in records if record.error]
        if failed:
            raise SystemExit(f"{len(failed)} simulated requests failed: {failed[0]}")
        return sorted(records, key=lambda record: record.sent_s)


def runs(folder: Path, configs: Path) -> list[Run]:
    """Those whose tables are of the same number of ranks."""
    found = []
    for meta_file in sorted((folder / "measured").glob("*/*/meta.json")):
        meta = json.loads(meta_file.read_text())
        device, model = meta_file.parts[-3:-1]
        ranks = meta["engine_kwargs"]["tensor_parallel_size"]
        tables = sorted((folder / "profiles" / device).glob(f"*/{model}/*/tp{ranks}"))
        config = next((each for each in sorted(configs.iterdir()) if each.name.endswith(model)), None)
        if not tables or config is None:
            print(f"{device} {model}: no tables for {ranks} ranks, or no config.json")
            continue
        name = Path(meta["dataset_path"]).name.split("-300")[0]
        lines = [json.loads(line) for line in (folder / "workloads" / f"{name}.jsonl").read_text().splitlines()]
        requests = [json.loads(line) for line in (meta_file.parent / "requests.jsonl").read_text().splitlines()]
        hardware = json.loads((meta_file.parent / "config.json").read_text())
        memory = hardware["nodes"][0]["instances"][0]["npu_mem"]["mem_size"]
        found.append(Run(device, model, tables[0], config, lines, requests, meta, memory))
    return found


def values(records: Sequence[RequestRecord], name: str) -> list[float]:
    return [value for record in records if (value := getattr(Latencies.of(record), name)) is not None]


def compare(title: str, measured: Sequence[RequestRecord], simulated: Sequence[RequestRecord]) -> None:
    for name, goals in GOALS.items():
        theirs, ours = values(measured, name), values(simulated, name)
        cells = []
        for word, of in (("mean", np.mean), ("p50", np.median), ("p99", lambda each: np.percentile(each, 99))):
            there, here = float(of(theirs)), float(of(ours))
            cells.append(f"{word} {there:8.3f} s {here:8.3f} s {100 * (here / there - 1):+6.1f} %")
        print(f"{title:32s} {name}  {'   '.join(cells)}   (goals {goals[0]:g} and {goals[1]:g} %)")


def fitted_overhead_s(run: Run, measured: Sequence[RequestRecord]) -> float:
    """By which the first half's mean time per token is the measured one."""
    half = len(measured) // 2
    goal = float(np.mean(values(measured[:half], "tpot")))
    low, high = 0.0, 0.004
    for _ in range(5):
        middle = (low + high) / 2
        mean = float(np.mean(values(run.simulated(middle)[:half], "tpot")))
        low, high = (middle, high) if mean < goal else (low, middle)
    return (low + high) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--configs", type=Path, required=True, help="folders with a config.json, each named ...MODEL")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    print(f"{'':32s}       measured  simulated")
    for run in runs(options.folder, options.configs):
        measured = run.measured()
        compare(f"{run.device} {run.model}", measured, run.simulated(0.0))
        if options.fit:
            overhead_s, half = fitted_overhead_s(run, measured), len(measured) // 2
            title = f"  second half, +{1e3 * overhead_s:.2f} ms a step"
            compare(title, measured[half:], run.simulated(overhead_s)[half:])


if __name__ == "__main__":
    main()
