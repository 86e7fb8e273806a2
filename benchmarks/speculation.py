"""Milliseconds of CPU time per output token with and without drafts (`speculative_config`), in turns.

Usage: python benchmarks/speculation.py [--model DIR] [--dtype bfloat16] [--batches 1 16] [--rounds 3] [--tokens 128]
                                        [--config JSON] [--text repeats|random] [--draft-layers N] [--first-prompt N]
                                        [--head deepseek_v3|qwen3_5_text] [--noise 0 7]

The prompt is a list of random records, each of which is followed by the same record again, up to the last: a trained model copies
it. With `--load-format dummy` the text is that of random weights, which falls into a loop or not. The part of the drafts that is
accepted is printed beside each time. `--text random` asks at temperature 1, where n-grams are hardly ever found again.

`--draft-layers N` drafts with a copy of the model that has its first N layers alone, in place of the method of `--config`: a draft
model that costs N of the model's layers and agrees with it as far as it happens to.

`--head FAMILY` writes a model of that family with an MTP head, 100 million parameters, in place of `--model`. Its layers compute as
any layers do and add nothing, so that the next token is a function of the last one, and the head knows that function. `--noise`
disturbs what the head sees: at 0 every draft is right, at 7 some are, from 20 on none is. So a head's cost and gain are measured
at an acceptance that is chosen, which random weights do not have and trained ones would.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from conditions import conditions
from known_head import FAMILIES, write_model_with_head

from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.client.loaded_engine import LoadedEngine, local_hasher
from pdserve.engine.engine_core import EngineCore
from pdserve.models.model_folder import model_folder


def prompt_of(number: int, vocab_size: int, num_tokens: int) -> list[int]:
    """Records of 24 tokens, each twice."""
    draw = random.Random(number)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        record = [draw.randrange(3, vocab_size) for _ in range(24)]
        tokens += record + record
    return tokens[:num_tokens]


def with_first_layers(folder: Path, num_layers: int, target: Path) -> Path:
    """Write a checkpoint with the first layers of the model in `folder`, and return its folder."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (target / "config.json").write_text(json.dumps(config))
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        numbers = {name: re.search(r"\.layers\.(\d+)\.", name) for name in tensors}
        kept = [name for name, number in numbers.items() if number is None or int(number[1]) < num_layers]
        save_file({name: tensors[name] for name in kept}, path, metadata={"format": "pt"})
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    return target


def ask(core: EngineCore, name: str, number: int, args: argparse.Namespace, vocab_size: int) -> None:
    hasher = local_hasher(core.config.block_size)
    prompt = prompt_of(number, vocab_size, args.prompt)
    root = hasher.root("speculation", name)
    temperature = 1.0 if args.text == "random" else 0.0
    params = SamplingParams(temperature=temperature, seed=number, max_tokens=args.tokens, ignore_eos=True)
    core.add_request(
        EngineCoreRequest(
            request_id=f"{name}-{number}",
            prompt_token_ids=prompt,
            sampling_params=params,
            hash_root=root,
            block_hashes=hasher.extend(root, prompt),
            prefill_here=True,
        )
    )


def decode(
    core: EngineCore, name: str, batch: int, args: argparse.Namespace, vocab_size: int
) -> tuple[float, list[list[int]]]:
    """(milliseconds of CPU time per token of one sequence, from the step after the last first token on; texts)."""
    texts: dict[str, list[int]] = {}
    numbers = range(args.first_prompt, args.first_prompt + batch)
    for number in numbers:
        ask(core, name, number, args, vocab_size)
    while len(texts) < batch:
        for output in core.step().outputs:
            texts.setdefault(output.request_id, []).extend(output.new_token_ids)
    before, started = sum(map(len, texts.values())), time.process_time()
    while core.has_work:
        for output in core.step().outputs:
            texts[output.request_id].extend(output.new_token_ids)
    spent_s = time.process_time() - started
    num_tokens = sum(map(len, texts.values())) - before
    return spent_s / num_tokens * batch * 1e3, [texts[f"{name}-{number}"] for number in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--first-prompt", type=int, default=0, help="number of the first prompt; each has other records"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", choices=["repeats", "random"], default="repeats")
    parser.add_argument(
        "--config",
        default='{"num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2, "disable_by_batch_size": null}',
    )
    parser.add_argument("--draft-layers", type=int)
    parser.add_argument("--head", choices=FAMILIES)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0])
    args = parser.parse_args()
    for name, value in conditions().items():
        print(f"{name}: {value}")
    print(args)
    with tempfile.TemporaryDirectory() as scratch:
        fields = json.loads(args.config)
        limits = {name: fields[name] for name in ("num_speculative_tokens", "disable_by_batch_size") if name in fields}
        if args.head:
            for noise in args.noise:
                folder = Path(scratch) / f"{args.head} {noise}"
                write_model_with_head(folder, args.head, noise)
                print(f"noise {noise}")
                measure(args, folder, SpeculativeConfig(method="mtp", **limits))
            return
        folder = model_folder(args.model) if args.model == "demo" else Path(args.model)
        if args.draft_layers:
            draft = with_first_layers(folder, args.draft_layers, Path(scratch) / "draft")
            fields = limits | {"model": str(draft)}
        measure(args, folder, SpeculativeConfig(**fields))


def measure(args: argparse.Namespace, folder: Path, config: SpeculativeConfig) -> None:
    import torch

    torch.set_num_threads(args.threads)
    engines = {}
    for name, drafts in (("undrafted", None), ("drafted", config)):
        settings = WorkerSettings(
            dtype=args.dtype,
            load_format=args.load_format,
            num_threads=args.threads,
            max_model_len=args.prompt + args.tokens + 16,
            max_num_seqs=max(args.batches),
            kv_cache_mib=1024,
            speculative_config=drafts,
        )
        engines[name] = LoadedEngine.load(folder, settings)
    vocab_size = engines["drafted"].info.vocab_size
    print("batch | ms of CPU per token undrafted | drafted | ratio | accepted of drafted | equal texts")
    for batch in args.batches:
        times: dict[str, list[float]] = {name: [] for name in engines}
        counts, equal = (0, 0), 0
        for turn in range(args.rounds + 1):
            found = {}
            for name, engine in engines.items():
                core = engine.make_core()
                spent_ms, texts = decode(core, f"{name}-{turn}", batch, args, vocab_size)
                found[name] = texts
                if turn:
                    times[name].append(spent_ms)
                if (stats := core.scheduler.drafts.stats) is not None:
                    counts = stats.num_accepted_tokens, stats.num_draft_tokens
            equal = sum(a == b for a, b in zip(found["undrafted"], found["drafted"], strict=True))
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratio = medians["undrafted"] / medians["drafted"]
        print(
            f"{batch:5} | {medians['undrafted']:.2f} | {medians['drafted']:.2f} | {ratio:.2f} | "
            f"{counts[0]} of {counts[1]} | {equal} of {batch}",
            flush=True,
        )
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
