"""Decode steps replayed from CUDA graphs against eager ones: equal tokens, log-probabilities and bytes of the KV pool."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from gpu.bench import Bench, Skipped, folder_of
from gpu.engine import TINY, Engine, has_graphs, load_shape, write_shape

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
}
"""Some layers with heads of 128 numbers."""
BATCHES = (1, 3, 8, 13, 64)
Seen = tuple[list[Any], Tensor]
"""Tokens and log-probabilities by request, and the pool as whole numbers."""


def run(bench: Bench) -> None:
    if not has_graphs():
        raise Skipped("this engine has no CUDA graphs: EngineConfig has no field enforce_eager")
    changes = (
        TINY
        if bench.dry
        else SHAPE | {"num_key_value_heads": 2, "vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2}
    )
    folder = write_shape(folder_of(bench.rows, "graphs"), **changes)
    for batch in (2,) if bench.dry else BATCHES:
        name = f"B {batch}"
        if bench.is_late(name):
            return
        with bench.case(name):
            eager, graphs = (answers(bench, folder, batch, enforce_eager=eager) for eager in (True, False))
            same_pool = torch.equal(eager[1], graphs[1])
            equal = eager[0] == graphs[0] and same_pool
            ratio = float("nan") if bench.dry else float(equal)
            bench.rows.judge(name, "graphs", ratio, ok=equal, same_outputs=eager[0] == graphs[0], same_pool=same_pool)


def answers(bench: Bench, folder: Any, batch: int, *, enforce_eager: bool) -> Seen:
    """Prompts of different lengths, greedy and random, of which some end early: rows become free and padded."""
    settings = {
        "num_blocks": 32 * batch + 8,
        "max_num_seqs": batch,
        "max_model_len": 256,
        "enforce_eager": enforce_eager,
    }
    loaded, config = load_shape(folder, bench.device, bench.default, **settings)
    engine = Engine(loaded, config)
    engine.core.warm_up()
    draw = random.Random(batch)
    for row in range(batch):
        size = draw.randrange(1, 20 if bench.dry else 120)
        temperature = 0.8 if row % 3 == 2 else 0.0
        prompt = [draw.randrange(3, engine.vocab_size) for _ in range(size)]
        engine.add(
            prompt, max_tokens=3 if bench.dry else 20 + 3 * (row % 7), temperature=temperature, seed=row, logprobs=2
        )
    seen = [(output.request_id, output.new_token_ids, _numbers(output.new_logprobs)) for output in engine.run()]
    [pool] = loaded.kv_caches
    return sorted(seen), pool.view(torch.int16).cpu()


def _numbers(logprobs: Any) -> Any:
    return None if logprobs is None else [list(map(float, row)) for row in logprobs.logprobs]
