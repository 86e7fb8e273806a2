"""``python -m demo_image_model --out FOLDER``: pictures, training, checkpoint, evaluation."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from demo_image_model.batches import Batches
from demo_image_model.checkpoint import CARD, load, save
from demo_image_model.conversations import learn_tokenizer
from demo_image_model.evaluate import rows
from demo_image_model.network import network
from demo_image_model.pictures import plain
from demo_image_model.train import BATCH, train
from demo_model.checkpoint import fill_card, folder_bytes, threads_text
from demo_model.evaluate import as_text
from demo_model.train import Schedule

LARGEST_FOLDER = 4_000_000  # bytes


def main() -> int:
    """Runs everything; the exit status is 1 if the model misses a bar."""
    parser = argparse.ArgumentParser(prog="python -m demo_image_model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--start", type=Path, help="checkpoint of this tool to train further; default: fresh weights")
    parser.add_argument("--steps", type=int, default=2000, help="training steps (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="seed of pictures and weights")
    parser.add_argument("--threads", type=int, default=1, help="processor threads (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=1000, help="pictures of the evaluation (default: %(default)s)")
    parser.add_argument("--float32", action="store_true", help="multiply in float32 where the processor lacks bfloat16")
    parser.add_argument("--example", type=Path, help="file for a picture of a red circle")
    arguments = parser.parse_args()
    if arguments.example is not None:
        plain("red", "circle", 128).image.save(arguments.example, "PNG", optimize=True)
    schedule = replace(Schedule(), steps=arguments.steps, seed=arguments.seed, peak_rate=arguments.rate)
    torch.set_num_threads(arguments.threads)

    tokenizer = learn_tokenizer(schedule.seed)
    batches = Batches(tokenizer)
    model = network(batches.encoder, schedule.seed) if arguments.start is None else load(arguments.start, torch.float32)
    parameters = int(model.num_parameters())
    print(f"{parameters:,} parameters", flush=True)
    seconds = train(model, batches, schedule, not arguments.float32, lambda: save(model, tokenizer, arguments.out))
    save(model, tokenizer, arguments.out)

    passed = True
    table = ""
    # What is measured is the saved file, in both number formats that a server may run it in.
    for dtype in (torch.bfloat16, torch.float32):
        measured = rows(load(arguments.out, dtype), batches, schedule.seed + 1, arguments.pictures)
        table = as_text(measured)
        passed = passed and all(row.passed for row in measured)
        print(f"\nevaluated in {dtype}\n{table}", flush=True)
    values = {"PARAMETERS": f"{parameters:,}", "MINUTES": f"{seconds / 60:.0f}", "TABLE": table, "BATCH": str(BATCH)}
    values |= {"STEPS": f"{schedule.steps:,}", "THREADS": threads_text(arguments.threads)}
    values["START"] = "fresh weights" if arguments.start is None else "the weights of an earlier run"
    fill_card(CARD, arguments.out, values)
    size = folder_bytes(arguments.out)
    print(f"\n{arguments.out}: {size:,} bytes; trained in {seconds / 60:.1f} minutes; {'ok' if passed else 'MISSED'}")
    return 0 if passed and size <= LARGEST_FOLDER else 1


if __name__ == "__main__":
    raise SystemExit(main())
