"""Sampling alone and in batches of 16 and 64: how many sequences differ, from which token on, and by what margin.

A random Llama of 2 layers, 9 query heads on 3 KV heads, 16,000 tokens of vocabulary: random weights are flat, so that more
tokens are near each other than in a trained model. Prompts of 8 to 24 tokens, each with a seed; six mixes of
temperature, top_p, top_k and min_p in turn. Each batch size has an engine of its own, on one thread.

Usage: python benchmarks/batch_invariance.py [--sequences 10000] [--dtype float32] [--max-margins 200]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from conditions import conditions, print_conditions

sys.path.append(str(Path(__file__).parents[1]))
from pdserve.llm import LLM, SamplingParams
from tests.support.engine.same_seeds import MIXES, answers, difference, params, prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.oracle import Oracle

VOCAB_SIZE = 16_000
BATCHES = (1, 16, 64)
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}

Asked = Sequence[tuple[list[int], SamplingParams]]
Pairs = Sequence[tuple[list[int], list[int]]]


def first_difference(pair: tuple[list[int], list[int]]) -> int:
    """Output position of the first token that differs."""
    return next(place for place, (alone, among) in enumerate(zip(*pair, strict=True)) if alone != among)


def report(batch: int, pairs: Pairs, num_tokens: int) -> list[int]:
    """Print the differences; returns the numbers of the sequences that differ."""
    differing = [number for number, (alone, among) in enumerate(pairs) if alone != among]
    places = [first_difference(pairs[number]) for number in differing]
    # after the first difference the contexts differ, so later tokens cannot be compared
    compared = len(pairs) * num_tokens - sum(num_tokens - place - 1 for place in places)
    print(f"\namong {batch}: {len(differing):,} of {len(pairs):,} sequences differ, ", end="")
    print(f"{len(differing) / compared:.1e} of {compared:,} tokens after equal beginnings")
    print(f"  by the first token that differs: {np.bincount(places, minlength=num_tokens).tolist()}")
    for mix, fields in enumerate(MIXES):
        count = sum(number % len(MIXES) == mix for number in differing)
        print(f"  {count:>6,} of {len(pairs[mix :: len(MIXES)]):,} with {fields or 'temperature 1'}")
    return differing


def print_margins(oracle: Oracle, asked: Asked, pairs: Pairs, differing: Sequence[int], max_margins: int) -> None:
    """Print the margins of the sampled tokens of some sequences, in the float32 logits of the oracle."""
    chosen = differing[:: max(1, -(-len(differing) // max_margins))]
    margins = []
    for number in chosen:
        one = difference(oracle, number, *asked[number], *pairs[number])
        if one is not None:
            margins.append(one.margin)
            if len(margins) <= 20:
                print(f"  {one}")
    if margins:
        print(
            f"  margins of {len(margins):,} of them: median {np.median(margins):.1e}, "
            f"99 % {np.quantile(margins, 0.99):.1e}, largest {max(margins):.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--initializer-range", type=float, default=0.3, help="deviation of the random weights")
    parser.add_argument("--max-margins", type=int, default=200, help="sequences whose margins are computed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_conditions()
    print(f"model        {options.dtype}, vocabulary {VOCAB_SIZE:,}, deviation of weights {options.initializer_range}")
    print(f"asked        {options.sequences:,} sequences of {options.max_tokens} tokens, one thread\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        fields = HEADS | {"initializer_range": options.initializer_range}
        folder = make_checkpoint(Path(name), "llama", vocab_size=VOCAB_SIZE, **fields)
        make = partial(
            LLM, folder, dtype=options.dtype, max_num_seqs=64, num_blocks=1024, max_model_len=128, num_threads=1
        )
        given = params(options.sequences, options.max_tokens)
        asked = list(zip(prompts(options.sequences, VOCAB_SIZE), given, strict=True))
        found = {}
        for batch in BATCHES:
            start = time.process_time()
            found[batch] = list(answers(make, batch, asked))
            print(f"batches of {batch}: {time.process_time() - start:.0f} s of CPU time", flush=True)
        oracle = Oracle(folder)
        for batch in BATCHES[1:]:
            pairs = list(zip(found[1], found[batch], strict=True))
            differing = report(batch, pairs, options.max_tokens)
            print_margins(oracle, asked, pairs, differing, options.max_margins)
    print(f"\nload after   {conditions()['load before']}\n")


if __name__ == "__main__":
    main()
