"""A decode step of Llama 3.1 8B's shape: seconds from its schedule to its tokens, against bytes over bandwidth; and short prompts.

The bytes are those of every weight but the embedding, of which a step reads a row per sequence, and of all keys and values. The
bandwidth is a copy's, from the same process.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import fields, replace
from typing import Any

from gpu.bench import NOT_MEASURED, Bench, folder_of
from gpu.engine import LLAMA_8B, TINY, Engine, load_shape, write_shape
from pdserve.common.settings.worker_settings import GPU_STEP_TOKENS
from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.loading.loaded_model import LoadedModel
from pdserve.engine.runner.pool.memory_needs import weight_bytes

CONTEXT = 1024
NUM_STEPS, WARM_STEPS = 30, 6
BATCHES = (1, 8, 32, 64)
PROMPTS, NUM_PROMPTS = (16, 128, 512, 1024), 12
"""Tokens of a prompt, and how many are computed one after the other."""


def run(bench: Bench) -> None:
    batches, context = ((1, 2), 20) if bench.dry else (BATCHES, CONTEXT)
    folder = write_shape(folder_of(bench.rows, "llama_8b"), **(TINY if bench.dry else {}))
    # the first sequence still decodes when the last one begins to
    prefill_steps = -(-max(batches) * context // GPU_STEP_TOKENS)
    num_new = 4 if bench.dry else NUM_STEPS + WARM_STEPS + 2 + 2 * prefill_steps
    num_blocks = max(batches) * (-(-(context + num_new) // 16) + 1)
    settings = {"num_blocks": num_blocks, "max_num_seqs": max(batches), "max_model_len": context + num_new}
    began = time.monotonic()
    loaded, config = load_shape(folder, bench.device, bench.default, **settings)
    bench.rows.add("load", start_s=NOT_MEASURED if bench.dry else time.monotonic() - began)
    measure_modes(bench, loaded, config, batches, context, num_new)
    del loaded
    if bench.is_late("w4a16"):
        return
    # on a CPU, where dry runs are, this is another product
    loaded, config = load_shape(folder, bench.device, bench.default, quantization="int4", **settings)
    engine = Engine(loaded, config)
    engine.core.warm_up()
    for batch in batches:
        name = f"B {batch}, {context} tokens, w4a16"
        if bench.is_late(name):
            return
        with bench.case(name):
            measure(bench, name, loaded, engine, batch, context, num_new, judged=False)


def measure_modes(
    bench: Bench, loaded: LoadedModel, config: EngineConfig, batches: tuple[int, ...], context: int, num_new: int
) -> None:
    for number, (mode, changes) in enumerate(modes().items()):
        began = time.monotonic()
        engine = Engine(loaded, replace(config, **changes))
        engine.core.warm_up()
        bench.rows.add(f"start, {mode}", start_s=NOT_MEASURED if bench.dry else time.monotonic() - began)
        for batch in batches:
            name = f"B {batch}, {context} tokens, {mode}"
            if bench.is_late(name):
                return
            with bench.case(name):
                measure(bench, name, loaded, engine, batch, context, num_new, judged=number == 0)
        for num_tokens in (5, 16) if bench.dry else PROMPTS:
            name = f"prompt of {num_tokens} tokens, {mode}"
            with bench.case(name):
                measure_prompt(bench, name, engine, num_tokens)
        del engine
        bench.wait()


def modes() -> dict[str, dict[str, Any]]:
    """Changes of the engine's settings; the first changes none, and has the goal."""
    known = {field.name for field in fields(EngineConfig)}
    graphs = "enforce_eager" in known
    found: dict[str, dict[str, Any]] = {"graphs" if graphs else "eager: no graphs here": {}}
    if "async_scheduling" in known:
        found["next step launched ahead"] = {"async_scheduling": True}
    return found | ({"eager": {"enforce_eager": True}} if graphs else {})


def measure(
    bench: Bench,
    name: str,
    loaded: LoadedModel,
    engine: Engine,
    batch: int,
    context: int,
    num_new: int,
    *,
    judged: bool,
) -> None:
    draw = random.Random(batch)
    for _ in range(batch):
        engine.add([draw.randrange(3, engine.vocab_size) for _ in range(context)], max_tokens=num_new)
    began = time.monotonic()
    started = 0
    while started < batch:  # prefill; rows that are complete decode beside it
        started += sum(output.first_position == 0 for output in engine.step() if output.new_token_ids)
    prefill_s = time.monotonic() - began
    times = []
    while engine.core.has_work:
        began = time.perf_counter()
        num_outputs = len(engine.step())
        if num_outputs == batch:
            times.append((time.perf_counter() - began) * 1e3)
    steady = times[WARM_STEPS:][:NUM_STEPS] if len(times) > WARM_STEPS else times
    need = step_bytes(bench, loaded, batch, context)
    step_ms = NOT_MEASURED if bench.dry else statistics.median(steady)
    floor_ms = need / bench.copy_bytes_per_s * 1e3
    fields = {
        "step_ms": step_ms,
        "floor_ms": floor_ms,
        "rate_tokens_per_s": None if bench.dry else batch / step_ms * 1e3,
        "steps": len(steady),
        "prefill_s": NOT_MEASURED if bench.dry else prefill_s,
    }
    if judged:
        bench.rows.judge(name, "decode_step", step_ms / floor_ms, **fields)
    else:
        bench.rows.add(name, **fields, ratio=step_ms / floor_ms, goal=None, met=None)


def measure_prompt(bench: Bench, name: str, engine: Engine, num_tokens: int) -> None:
    """The step that computes a whole prompt and samples its first token."""
    draw = random.Random(num_tokens)
    times = []
    for _ in range(NUM_PROMPTS):
        engine.add([draw.randrange(3, engine.vocab_size) for _ in range(num_tokens)], max_tokens=1)
        began = time.perf_counter()
        while engine.core.has_work:
            engine.step()
        times.append((time.perf_counter() - began) * 1e3)
    fields = {"step_ms": NOT_MEASURED if bench.dry else statistics.median(times[2:]), "steps": len(times) - 2}
    bench.rows.add(name, **fields)


def step_bytes(bench: Bench, loaded: LoadedModel, batch: int, context: int) -> int:
    config = loaded.decoder.config
    """Of weights in bfloat16, whatever form they have, so that steps with others can be compared."""
    weights = weight_bytes(loaded.folder, LLAMA_8B["dtype"], "dummy")
    embedding = config.vocab_size * config.hidden_size * 2
    token = loaded.layout.shapes[0].block_bytes // loaded.layout.block_size
    return weights - embedding + batch * context * token
