"""Latent attention on a CPU: decode in C++, in torch and in `transformers`, and the two forms of prompt chunks, in turns.

--part decode  A model with DeepSeek-V2-Lite's attention (16 heads, rows of 512 + 64 numbers), 8 layers, a hidden size of 512 and
               dense MLPs, drawn at random: `LLM` with `attention_backend` native and torch, and `generate` of `transformers`, which
               caches rows and expands all of them in each step, over the same weights. Prompts are in each side's cache. us of CPU
               time per step of the batch: what 1 + STEPS tokens take, less what one takes; median, lowest and highest of rounds.
--part forms   One layer's attention of a chunk after a context: expanded, absorbed, and the ratio that the numbers of
               multiplications give. ms of CPU time, the lowest of all rounds.

One thread: CPU time of the process, so that other load counts only by what it does to caches and to the core that it shares.

Usage: python benchmarks/latent_attention.py [--part decode] [--rounds 5] [--batches 1 8] [--contexts 512 4096]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from conditions import print_conditions
from families import write_tokenizer
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionBackend, AttentionPlan
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.latent_heads import LatentHeads, attend_latent
from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from pdserve.kernels.native.native_attention import NativeAttentionBackend
from pdserve.kernels.native.native_library import load_library

NUM_HEADS, NOPE, ROPE, RANK, VALUE, BLOCK_SIZE = 16, 128, 64, 512, 128, 16
STEPS = 16
SIDES = ["torch", "transformers"]
DTYPES = (torch.bfloat16, torch.float32)
CHUNKS = ((0, 512), (512, 8), (512, 128), (512, 192), (512, 512), (3584, 128), (3584, 192), (3584, 256), (3584, 512))
"""Tokens in the cache before the chunk, tokens of the chunk."""
Generate = Callable[[int], list[list[int]]]
"""Number of tokens -> those that follow each prompt."""


# ---- decode


def write_model(folder: Path, dtype: torch.dtype) -> None:
    """A checkpoint of `transformers`."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS, kv_lora_rank=RANK, q_lora_rank=None, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
        v_head_dim=VALUE, first_k_dense_replace=8, max_position_embeddings=8192, bos_token_id=0, eos_token_id=1, pad_token_id=0,
        tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    model = DeepseekV2ForCausalLM(config).to(dtype)
    for name, weight in model.named_parameters():
        if "layernorm" not in name and "norm.weight" not in name:
            torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def make_pdserve(folder: Path, name: str, dtype: torch.dtype, prompts: list[list[int]]) -> Generate:
    """name: of the attention back end."""
    from pdserve.llm import LLM, SamplingParams

    tokens = sum(map(len, prompts)) + len(prompts) * (STEPS + 2 * BLOCK_SIZE)
    llm = LLM(
        str(folder), dtype="float32" if dtype is torch.float32 else "bfloat16", attention_backend=name,
        num_threads=1, engine_process=False,
        max_model_len=len(prompts[0]) + STEPS + 2, num_blocks=tokens // BLOCK_SIZE + 8,
    )  # fmt: skip

    def generate(num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        answers = llm.generate(prompts, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return generate


def make_transformers(folder: Path, dtype: torch.dtype, prompts: list[list[int]]) -> Generate:
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids, known = torch.tensor(prompts), len(prompts[0]) - 1
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for start in range(0, known, 512):
            model(ids[:, start : min(start + 512, known)], past_key_values=cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def generate(num_tokens: int) -> list[list[int]]:
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=num_tokens,
            min_new_tokens=num_tokens, do_sample=False, pad_token_id=0, use_cache=True,
        )  # fmt: skip
        cache.crop(known - cache.get_seq_length())
        new: list[list[int]] = found[:, ids.shape[1] :].tolist()
        return new

    return generate


def measure_decode(dtype: torch.dtype, batch: int, context: int, rounds: int, names: list[str]) -> None:
    prompts = [[10 + (row * 31 + place * (row % 7 + 1)) % 8000 for place in range(context)] for row in range(batch)]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_model(folder, dtype)
        sides: dict[str, Generate] = {
            name: make_transformers(folder, dtype, prompts)
            if name == "transformers"
            else make_pdserve(folder, name, dtype, prompts)
            for name in ("native", *names)
        }
        texts = [sides[side](STEPS) for side in sides]
        same = [sum(a == b for a, b in zip(texts[0], other, strict=True)) for other in texts[1:]]
        times: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds):
            for side in sides if number % 2 else reversed(sides):
                taken = []
                for num_tokens in (1, 1 + STEPS):
                    began = time.process_time()
                    sides[side](num_tokens)
                    taken.append(time.process_time() - began)
                times[side].append((taken[1] - taken[0]) / STEPS * 1e6)
    medians = {side: statistics.median(found) for side, found in times.items()}
    words = ", ".join(
        f"{side} {medians[side]:.0f} [{min(found):.0f}, {max(found):.0f}], {medians[side] / medians['native']:.2f} of native"
        for side, found in times.items()
    )
    print(f"{str(dtype)[6:]} {batch} x {context}: {words}; texts as native's: {same} of {batch}", flush=True)


# ---- forms


class Forced(LatentHeads):
    """Heads whose form is given."""

    form = True

    def expands(self, context: int, num_tokens: int) -> bool:
        return Forced.form


def attend_in(form: bool, plan: AttentionPlan, heads: LatentHeads, queries: Tensor, rows: Tensor) -> Tensor:
    """form: True for the expanded one."""
    Forced.form = form
    return attend_latent(plan, 0, heads, queries, rows)


def measure_forms(dtype: torch.dtype, context: int, num_tokens: int, rounds: int) -> None:
    end = context + num_tokens
    cache = torch.full((end // BLOCK_SIZE + 1, 1, 1, 1, BLOCK_SIZE, RANK + ROPE), 0.01, dtype=dtype)
    spec = AttentionSpec(num_heads=NUM_HEADS, num_kv_heads=1, head_dim=RANK + ROPE, scale=0.07, value_dim=RANK)
    batch = AttentionBatch.from_arrays(
        positions=np.arange(context, end), slot_mapping=np.arange(context, end), query_lens=np.array([num_tokens]),
        seq_lens=np.array([end]), block_tables=np.arange(len(cache))[None], device=torch.device("cpu"),
    )  # fmt: skip
    heads = Forced(
        torch.randn(NUM_HEADS, NOPE, RANK).to(dtype) * 0.05, torch.randn(NUM_HEADS, RANK, VALUE).to(dtype) * 0.05
    )
    queries = torch.randn(num_tokens, NUM_HEADS, NOPE + ROPE).to(dtype)
    rows = torch.randn(num_tokens, 1, RANK + ROPE).to(dtype)
    backends: dict[str, AttentionBackend] = {
        "native": NativeAttentionBackend(cache, load_library()),
        "torch": TorchAttentionBackend(cache),
    }
    runs: dict[tuple[str, bool], Callable[[], Tensor]] = {}
    for name, backend in backends.items():
        for form in (True, False):
            plan = backend.plan(batch, spec)
            plan.store(0, rows, rows[..., :RANK])
            runs[name, form] = partial(attend_in, form, plan, heads, queries, rows)
    lowest = dict.fromkeys(runs, float("inf"))
    for number in range(rounds + 1):
        for key, run in runs.items():
            began = time.process_time()
            run()
            if number:
                lowest[key] = min(lowest[key], (time.process_time() - began) * 1e3)
    pairs, both = num_tokens * context + num_tokens * (num_tokens + 1) / 2, NOPE + VALUE
    counted = (num_tokens * RANK * both + pairs * (2 * RANK + ROPE)) / (end * RANK * both + pairs * (both + ROPE))
    words = ", ".join(
        f"{name} {lowest[name, True]:.1f} expanded, {lowest[name, False]:.1f} absorbed, "
        f"{lowest[name, False] / lowest[name, True]:.2f}"
        for name in backends
    )
    print(f"{str(dtype)[6:]} {num_tokens} after {context}: {words}; by multiplications {counted:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["decode", "forms"], help="default: both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES, help="of decode, next to native")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_conditions()
    for dtype in DTYPES:
        if options.part != "forms":
            for context in options.contexts:
                for batch in options.batches:
                    measure_decode(dtype, batch, context, options.rounds, options.sides)
        if options.part != "decode":
            with torch.inference_mode():
                for context, num_tokens in CHUNKS:
                    measure_forms(dtype, context, num_tokens, options.rounds)


if __name__ == "__main__":
    main()
