"""The output head of a real model in bfloat16: ties and other tokens, with logits in float32 and rounded to bfloat16, and its time.

Texts of `pydoc_data.topics` are computed in pieces of `--length` tokens, in bfloat16 and in float32, from the same weights. Per
position: the token with the largest logit in float32; in bfloat16, of the logits as the head returns them (`float32 head`) and
after a rounding to bfloat16 (`rounded head`), which is what a product in bfloat16 returns. `exact ties`: positions where the two
largest logits are equal.

Times: the head's product over a few rows, in turns with a product that returns bfloat16 and is widened afterwards; the lowest of
rounds and the median, in ms. One thread: CPU time.

Usage: python benchmarks/output_head.py FOLDER [--positions 5000] [--length 512] [--rows 1 8 64] [--rounds 15] [--threads 1]
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from conditions import print_conditions
from tokenizers import Tokenizer
from torch import Tensor

from pdserve.kernels.cpu.linear import make_linear, make_output_head
from pdserve.models.decoder import Decoder
from pdserve.models.loading import load_decoder
from tests.support.kernels.paged_run import PagedRun


def pieces(folder: Path, length: int, positions: int) -> Iterator[list[int]]:
    """Token ids of texts, `length` at a time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    left = positions
    for _, text in sorted(pydoc_data.topics.topics.items()):
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: min(length, left)]
        if len(ids) < min(length, left):
            continue
        yield ids
        left -= len(ids)
        if not left:
            return


def logits_of(decoder: Decoder, ids: list[int]) -> Tensor:
    """`[T, V]` float32."""
    return PagedRun(decoder, num_blocks=-(-len(ids) // 16) + 1).step({}, {"text": ids})["text"]


def compare(folder: Path, length: int, positions: int) -> None:
    exact = load_decoder(folder, dtype="float32", max_model_len=length)
    served = load_decoder(folder, dtype="bfloat16", max_model_len=length)
    names = ("float32 head", "rounded head")
    ties, others, count = dict.fromkeys(names, 0), dict.fromkeys(names, 0), 0
    for ids in pieces(folder, length, positions):
        expected, found = logits_of(exact, ids).argmax(-1), logits_of(served, ids)
        for name, logits in zip(names, (found, found.bfloat16().float()), strict=True):
            best = logits.topk(2).values
            ties[name] += int((best[:, 0] == best[:, 1]).sum())
            others[name] += int((logits.argmax(-1) != expected).sum())
        count += len(ids)
    print(f"{count} positions: exact ties, tokens other than float32's")
    for name in names:
        print(f"{name:14} {ties[name]:6} {others[name]:6}")


def measure(weight: Tensor, rows: list[int], rounds: int, clock: Callable[[], float]) -> None:
    linear = make_linear(weight)
    heads: dict[str, Callable[[Tensor], Tensor]] = {
        "float32 head": make_output_head(weight),
        "rounded head": lambda x: linear(x).float(),
    }
    print(f"head {list(weight.shape)}, {rounds} rounds, ms: lowest / median")
    for num_rows in rows:
        x = torch.randn(num_rows, weight.shape[1]).to(weight.dtype)
        times: dict[str, list[float]] = {name: [] for name in heads}
        for _ in range(rounds + 1):
            for name, head in heads.items():
                start = clock()
                head(x)
                times[name].append(1e3 * (clock() - start))
        shown = (f"{name} {min(found[1:]):.2f} / {median(found[1:]):.2f}" for name, found in times.items())
        print(f"{num_rows:4} rows: {', '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--positions", type=int, default=5000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print_conditions()
    with torch.inference_mode():
        embedding = load_decoder(options.folder, dtype="bfloat16").embed_input_ids
        vocab_size = Tokenizer.from_file(str(options.folder / "tokenizer.json")).get_vocab_size()
        clock = time.process_time if options.threads == 1 else time.perf_counter
        measure(embedding(torch.arange(vocab_size)), options.rows, options.rounds, clock)
        compare(options.folder, options.length, options.positions)


if __name__ == "__main__":
    main()
