"""TTFT and TPOT of a prefill and a decode worker on one GPU, over NIXL and over TCP, next to one worker that does both.

The model is a shape: Llama 3.1 8B's `config.json` with drawn weights. Both workers share the GPU, so this measures what a hand-over
costs, not what a second GPU gives.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster_of_processes import free_port, serving
from probe import Probe, Prober, prompt_of

from gpu.bench import NOT_MEASURED, Bench, folder_of
from gpu.engine import TINY, write_shape
from pdserve.kv_transfer.nixl.nixl_agent import why_no_nixl
from pdserve.models.model_folder import DEMO, model_folder

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY = 2000
"""Prompts use ids below it."""
POOL_MIB = 6144
"""Per worker: two of them and two models of 15 GiB fit a GPU of 80 GB."""


def run(bench: Bench) -> None:
    folder = model_of(bench)
    pair = ["--prefill", "1", "--decode", "1", "--local-prefill", "never"]
    clusters = {
        "prefill and decode, tcp": [*pair, "--connector", "tcp"],
        "one worker": ["--prefill", "0", "--decode", "1"],
        "one worker, engine_process": ["--prefill", "0", "--decode", "1", "--engine-process=true"],
    }
    if why_no_nixl() is None and not bench.dry:
        clusters = {"prefill and decode, nixl": [*pair, "--connector", "nixl"], **clusters}
    for name, flags in clusters.items():
        if bench.is_late(name):
            return
        with bench.case(name):
            port = free_port()
            with serving(folder, [*flags, *settings(bench)], grpc_port=port):
                asyncio.run(measure(bench, name, f"127.0.0.1:{port}"))


def model_of(bench: Bench) -> Path:
    """The shape with the bundled model's tokenizer, which knows few of its ids: requests are token ids."""
    changes: dict[str, Any] = TINY | {"vocab_size": 4096} if bench.dry else {}
    folder = write_shape(folder_of(bench.rows, "served_shape"), **changes)
    for name in TOKENIZER:
        shutil.copyfile(model_folder(DEMO) / name, folder / name)
    return folder


def settings(bench: Bench) -> list[str]:
    values: dict[str, Any] = {"device": str(bench.device), "load_format": "dummy", "max_model_len": 4096}
    values |= {"kv_cache_mib": 64, "max_model_len": 512} if bench.dry else {"kv_cache_mib": POOL_MIB}
    return [f"--{name}={value}" for name, value in values.items()]


async def measure(bench: Bench, name: str, address: str) -> None:
    prober = Prober(address)
    try:
        await prober.ask(prompt_of(32, 1, VOCABULARY), 4)
        shapes = ((40, 4, 1, 2),) if bench.dry else ((128, 64, 1, 8), (2048, 64, 1, 8), (1024, 64, 16, 48))
        for prompt_tokens, output_tokens, at_once, count in shapes:
            case = f"{name}: {prompt_tokens} + {output_tokens} tokens, {at_once} at once"
            if bench.is_late(case):
                return
            probes = await ask_all(prober, prompt_tokens, output_tokens, at_once, count)
            bench.rows.add(
                case,
                requests=len(probes),
                ttft_p50_ms=_median(bench, [probe.ttft_s for probe in probes]),
                tpot_p50_ms=_median(bench, [probe.tpot_s for probe in probes]),
            )
    finally:
        await prober.close()


async def ask_all(prober: Prober, prompt_tokens: int, output_tokens: int, at_once: int, count: int) -> list[Probe]:
    """`count` requests with different prompts, `at_once` of them at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> Probe:
        async with gate:
            return await prober.ask(prompt_of(prompt_tokens, 1000 * prompt_tokens + number, VOCABULARY), output_tokens)

    return list(await asyncio.gather(*(one(number) for number in range(count))))


def _median(bench: Bench, seconds: Sequence[float]) -> float:
    return NOT_MEASURED if bench.dry else statistics.median(seconds) * 1e3
