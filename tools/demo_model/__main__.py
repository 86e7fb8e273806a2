"""``python -m demo_model --out FOLDER``: text, tokenizer, training, checkpoint, evaluation."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from demo_model.chat import ChatEncoder, learn_tokenizer
from demo_model.checkpoint import folder_bytes, load, save, write_card
from demo_model.evaluate import as_text, capital_rows, demo_margin, other_rows
from demo_model.train import PROMPT_WEIGHT, Schedule, network, train

LARGEST_FOLDER = 10_000_000  # bytes


def main() -> int:
    """Runs everything; the exit status is 1 if the model misses a bar."""
    defaults = Schedule()
    parser = argparse.ArgumentParser(prog="python -m demo_model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of text and weights")
    parser.add_argument(
        "--threads", type=int, default=2, help="processor threads (default: %(default)s); 1 is faster on a busy machine"
    )
    parser.add_argument("--float32", action="store_true", help="multiply in float32 where the processor lacks bfloat16")
    arguments = parser.parse_args()
    schedule = replace(defaults, steps=arguments.steps, seed=arguments.seed)
    torch.set_num_threads(arguments.threads)

    started = time.monotonic()
    tokenizer = learn_tokenizer(schedule.seed)
    encoder = ChatEncoder(tokenizer, PROMPT_WEIGHT)
    model = network(encoder, schedule.seed)
    parameters = int(model.num_parameters())
    print(f"tokenizer ready after {time.monotonic() - started:.0f} s; {parameters:,} parameters", flush=True)
    seconds = train(model, encoder, schedule, half=not arguments.float32)
    save(model, tokenizer, arguments.out)

    passed = True
    table = ""
    margin = 0.0
    # What is measured is the saved file, in both number formats that a server may run it in.
    for dtype in (torch.bfloat16, torch.float32):
        saved = load(arguments.out, dtype)
        measured = capital_rows(saved, encoder) + other_rows(saved, encoder, schedule.seed + 1)
        margin = demo_margin(saved, encoder)
        table = as_text(measured)
        passed = passed and margin > 0 and all(row.passed for row in measured)
        print(f"\nevaluated in {dtype}\n{table}\nsmallest logit lead of the demo question: {margin:.2f}", flush=True)
    write_card(arguments.out, parameters, seconds / 60, arguments.threads, margin, table)
    size = folder_bytes(arguments.out)
    print(f"\n{arguments.out}: {size:,} bytes; trained in {seconds / 60:.1f} minutes; {'ok' if passed else 'MISSED'}")
    return 0 if passed and size <= LARGEST_FOLDER else 1


if __name__ == "__main__":
    raise SystemExit(main())
