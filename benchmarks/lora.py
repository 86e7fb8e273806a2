"""Decoding with LoRA adapters against the base model alone: one engine, a batch with no adapter, with one, and with several.

The adapters are random, for all seven linear layers of a block. The cases run in turns; the time of a step is the difference of two
lengths of output, so that prefill and the loading of adapters count for nothing. It is CPU time of the process, which other
work on the machine disturbs less than the clock; beside each median is the least of all rounds.

Usage: python benchmarks/lora.py --model FOLDER [--load-format dummy] [--batch 16] [--adapters 8] [--rank 16] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from conditions import conditions
from safetensors.torch import save_file

from pdserve.llm import LLM, LoRARequest, SamplingParams
from pdserve.models.loading import load_decoder
from pdserve.models.lora.lora_targets import LoraTarget, with_lora_targets

SHORT, LONG = 4, 32
PROMPT_TOKENS = 32
SPREAD = 0.02


def make_adapters(model: Path, folder: Path, count: int, rank: int, load_format: str) -> list[LoRARequest]:
    """Write random adapters for all layers of the model."""
    decoder = load_decoder(model, device="meta", load_format=load_format)
    targets = with_lora_targets(decoder, max_loras=1, max_rank=rank)[1].by_name
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ".*_proj",
    }
    requests = []
    for number in range(1, count + 1):
        path = folder / str(number)
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(config))
        save_file(drawn(targets, rank, number), path / "adapter_model.safetensors")
        requests.append(LoRARequest(f"adapter-{number}", number, str(path)))
    return requests


def drawn(targets: Mapping[str, LoraTarget], rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Tensor name -> random bfloat16 values."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, target in targets.items():
        for side, shape in (("A", (rank, target.in_size)), ("B", (target.out_size, rank))):
            values = torch.empty(shape).normal_(0.0, SPREAD, generator=generator)
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = values.bfloat16()
    return tensors


def step_ms(llm: LLM, rows: Sequence[LoRARequest | None]) -> float:
    """Milliseconds of CPU time per step while one sequence per entry of `rows` decodes with its adapter."""
    prompts = [[3 + (7 * row + place) % 500 for place in range(PROMPT_TOKENS)] for row in range(len(rows))]
    taken = []
    for num_tokens in (SHORT, LONG):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        start = time.process_time()
        llm.generate(prompts, params, lora_request=list(rows), use_tqdm=False)
        taken.append(time.process_time() - start)
    return (taken[1] - taken[0]) / (LONG - SHORT) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--kernels", choices=("auto", "torch"), default="auto", help="torch: products in torch operations"
    )
    options = parser.parse_args()
    for name, value in conditions().items():
        print(f"{name}: {value}")
    with tempfile.TemporaryDirectory() as folder:
        requests = make_adapters(options.model, Path(folder), options.adapters, options.rank, options.load_format)
        cases: dict[str, list[LoRARequest | None]] = {
            "none": [None] * options.batch,
            "1 adapter": [requests[0]] * options.batch,
            f"{options.adapters} adapters": [requests[row % options.adapters] for row in range(options.batch)],
        }
        with LLM(
            options.model, load_format=options.load_format, num_threads=options.threads, num_blocks=1024,
            max_model_len=512, enable_lora=True, max_loras=options.adapters, max_lora_rank=options.rank,
            kernels=options.kernels,
        ) as llm:  # fmt: skip
            for rows in cases.values():
                step_ms(llm, rows)
            rounds = [[step_ms(llm, rows) for rows in cases.values()] for _ in range(options.rounds)]
    print(
        f"batch {options.batch}, rank {options.rank}, {options.threads} threads, kernels {options.kernels}, "
        f"{options.rounds} rounds in turns"
    )
    for place, name in enumerate(cases):
        ratios, least = sorted(each[0] / each[place] for each in rounds), min(each[place] for each in rounds)
        print(
            f"{name:<12} {median(each[place] for each in rounds):8.2f} ms per step, least {least:.2f}; speed against none "
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), by the least "
            f"{min(each[0] for each in rounds) / least:.2f}"
        )


if __name__ == "__main__":
    main()
