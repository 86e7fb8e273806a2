"""Decode steps replayed from CUDA graphs against eager ones: equal tokens, log-probabilities and bytes of the KV pool.

A graph has a fixed number of rows. The goal is judged where a step has as many: with padded rows a matrix product may use another
kernel, which adds in another order. The requests' prompts have one token, so that both engines compute decode steps only.

Prompts in graphs are padded, and all their rows pass the last layer: their first tokens are compared, and how far the
log-probabilities of these differ.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.bench import Bench, Skipped, folder_of
from gpu.engine import TINY, Engine, has_graphs, load_shape, write_shape
from pdserve.engine.runner.loading.loaded_model import LoadedModel

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Some layers with heads of 128 numbers."""
FULL, PADDED = (1, 2, 4, 8, 32, 64), (3, 13)
"""Numbers of rows that have a graph, and such that are padded."""
NUM_NEW = 54
"""The contexts end in the fourth block."""
PROMPTS = ((16,), (20,), (128,), (500,), (3, 200, 150), (30,) * 12)
"""Tokens of the prompts of one step."""
DIFFERENCE = 0.1
"""Largest difference of a log-probability in bfloat16, whose products add in another order."""


def run(bench: Bench) -> None:
    if not has_graphs():
        raise Skipped("this engine has no CUDA graphs: EngineConfig has no field enforce_eager")
    folder = write_shape(folder_of(bench.rows, "graphs"), **(TINY if bench.dry else SHAPE))
    for batch in (2,) if bench.dry else (*FULL, *PADDED):
        name = f"{batch} rows"
        if bench.is_late(name):
            return
        with bench.case(name):
            compare(bench, name, folder, batch)
    engines = [
        made(bench, folder, max_model_len=512, num_blocks=64, max_num_seqs=16, enforce_eager=e) for e in (True, False)
    ]
    for lengths in PROMPTS[:2] if bench.dry else PROMPTS:
        name = f"prompts of {', '.join(map(str, lengths))} tokens"
        with bench.case(name):
            compare_prompts(bench, name, engines, lengths)


def compare(bench: Bench, name: str, folder: Path, batch: int) -> None:
    eager, graphs = (answers(bench, folder, batch, enforce_eager=eager) for eager in (True, False))
    same_outputs, same_pool = eager.outputs == graphs.outputs, torch.equal(eager.pool, graphs.pool)
    fields = {"same_outputs": same_outputs, "same_pool": same_pool, "captured": graphs.captured}
    if bench.dry:
        bench.rows.check(name, same_outputs and same_pool, **fields)
    elif not graphs.captured or eager.captured:
        bench.rows.fail(name, "graphs were captured with enforce_eager, or not captured without it")
    elif batch in FULL:
        bench.rows.judge(name, "graphs", float(same_outputs and same_pool), ok=same_outputs and same_pool, **fields)
    else:
        bench.rows.add(f"{name}, padded", **fields)


@dataclass(frozen=True, slots=True)
class Seen:
    outputs: list[Any]
    """Tokens and log-probabilities by request."""
    pool: Tensor
    """Bits of the KV pool."""
    captured: bool
    """True if decode steps were replayed from graphs."""


def answers(bench: Bench, folder: Path, batch: int, *, enforce_eager: bool) -> Seen:
    """Greedy and random rows of equal length, so that all end with the same step."""
    settings: dict[str, Any] = {"max_num_seqs": 2 if bench.dry else max(FULL), "max_model_len": 64}
    settings |= {"num_blocks": 8 * batch + 8, "enforce_eager": enforce_eager}
    engine, loaded = made(bench, folder, **settings)
    draw = random.Random(batch)
    for row in range(batch):
        prompt = [draw.randrange(3, engine.vocab_size)]
        temperature = 0.8 if row % 3 == 2 else 0.0
        engine.add(prompt, max_tokens=3 if bench.dry else NUM_NEW, temperature=temperature, seed=row, logprobs=2)
    outputs = [(output.request_id, output.new_token_ids, _numbers(output.new_logprobs)) for output in engine.run()]
    [pool] = loaded.kv_caches
    runner = getattr(engine.core.executor, "runner", None)
    return Seen(sorted(outputs), pool.view(torch.int16).cpu(), getattr(runner, "_graphs", None) is not None)


def made(bench: Bench, folder: Path, **settings: Any) -> tuple[Engine, LoadedModel]:
    loaded, config = load_shape(folder, bench.device, bench.default, **settings)
    engine = Engine(loaded, config)
    engine.core.warm_up()
    return engine, loaded


def compare_prompts(
    bench: Bench, name: str, engines: list[tuple[Engine, LoadedModel]], lengths: tuple[int, ...]
) -> None:
    """The first tokens of prompts, of an eager engine and of one with graphs."""
    found = []
    for engine, _ in engines:
        draw = random.Random(len(lengths))
        for length in lengths:
            engine.add([draw.randrange(3, engine.vocab_size) for _ in range(length)], max_tokens=1, logprobs=2)
        found.append([(output.new_token_ids, _numbers(output.new_logprobs)) for output in engine.run()])
    eager, graphs = found
    pairs = [
        pair for one, other in zip(eager, graphs, strict=True) for pair in zip(one[1][0], other[1][0], strict=True)
    ]
    difference = max(abs(one - other) for one, other in pairs)
    same_tokens = sum(one[0] == other[0] for one, other in zip(eager, graphs, strict=True))
    bench.rows.check(name, difference < DIFFERENCE, same_tokens=same_tokens, difference=difference)


def _numbers(logprobs: Any) -> Any:
    return None if logprobs is None else [list(map(float, row)) for row in logprobs.logprobs]
