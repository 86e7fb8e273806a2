"""Engines with Triton kernels, in float32, against `transformers` on the CPU: one engine, and prefill and decode in two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.bench import Bench, folder_of
from pdserve.engine.config import EngineConfig
from pdserve.models.kv_cache import make_kv_cache
from pdserve.models.loading import load_decoder
from tests.support.engine.engine_harness import Harness
from tests.support.engine.engine_pair import Pair
from tests.support.models.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.models.oracle import NEAR_TIE, Oracle

WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "initializer_range": 0.06,
}  # fmt: skip
"""Heads as wide as those of large models."""
MODELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "llama", {}),
    ("llama, D 128", "llama", WIDE),
    ("qwen3, D 128", "qwen3", WIDE),
    ("mistral, window 24", "mistral", {"sliding_window": 24}),
    ("qwen2, 1 KV head", "qwen2", {"num_key_value_heads": 1}),
    ("qwen3_moe", "qwen3_moe", {}),
)


def run(bench: Bench) -> None:
    models = MODELS[:1] if bench.dry else MODELS
    sizes, num_new = ((3, 20), 3) if bench.dry else ((1, 15, 16, 17, 60, 200, 700), 24)
    for name, family, options in models:
        if bench.is_late(name):
            return
        with bench.case(name):
            folder = make_checkpoint(
                folder_of(bench.rows, name.replace(", ", "-").replace(" ", "_")), family, **options
            )
            prompts = [[(31 * i + 7 * size) % VOCAB_SIZE for i in range(size)] for size in sizes]
            oracle = Oracle(folder)
            one = make_engine(bench, folder, max_num_batched_tokens=24 if bench.dry else 256)
            compare(bench, f"{name}: one engine", oracle, prompts, in_one(one, prompts, num_new))
            pair = Pair(make_engine(bench, folder, max_num_batched_tokens=20), make_engine(bench, folder))
            few = prompts if bench.dry else prompts[:5]
            compare(bench, f"{name}: prefill and decode", oracle, few, in_pair(pair, few, min(num_new, 8)))


def make_engine(bench: Bench, folder: Path, **fields: Any) -> Harness:
    decoder = load_decoder(folder, dtype="float32", device=str(bench.device))
    fields = {"block_size": 16, "num_blocks": 128, "max_model_len": 1024} | fields
    config = EngineConfig(**fields, attention_backend=bench.triton, kernels=bench.triton)
    kv_cache = make_kv_cache(decoder.config.kv_layout(16, "fingerprint").shapes[0], config.num_blocks, bench.device)
    return Harness(config, decoder, kv_cache, decoder.config.vocab_size)


def in_one(engine: Harness, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
    names = [engine.add(prompt, params={"max_tokens": num_new}) for prompt in prompts]
    answers = engine.run()
    engine.scheduler.check(idle=True)
    return [answers[name].token_ids for name in names]


def in_pair(pair: Pair, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
    names = [f"r{len(prompt)}" for prompt in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        pair.add(prompt, name, params={"max_tokens": num_new})
    pair.run()
    return [pair.answer(name).token_ids for name in names]


def compare(
    bench: Bench, name: str, oracle: Oracle, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> None:
    """Tokens are equal up to a near-tie, behind which both go on with other contexts."""
    num_equal = num_tokens = num_ties = 0
    margin = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = oracle.greedy(prompt, len(answer))
        num_tokens += len(answer)
        place = next((i for i, pair in enumerate(zip(answer, expected, strict=True)) if pair[0] != pair[1]), None)
        num_equal += len(answer) if place is None else place
        if place is not None:
            logits = oracle.logits([*prompt, *expected[:place]])[-1]
            num_ties += 1
            margin = max(margin, float(logits[expected[place]] - logits[answer[place]]))
    ok = num_tokens > 0 and margin < NEAR_TIE
    bench.rows.check(
        name, ok, prompts=len(prompts), tokens=num_tokens, equal=num_equal, near_ties=num_ties, margin=margin
    )
