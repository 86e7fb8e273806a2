"""Sampling alone and in batches of 16 and 64: how many sequences differ, and by what margin their tokens had won.

A random Llama of 2 layers, 9 query heads on 3 KV heads, 16,000 tokens of vocabulary: random weights are flat, so that more
tokens are near each other than in a trained model. Prompts of 8 to 24 tokens, each with a seed; six mixes of
temperature, top_p, top_k and min_p in turn. Each batch size has an engine of its own.

Usage: python benchmarks/batch_invariance.py [--sequences 10000] [--dtype float32] [--without-margins]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from conditions import conditions

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from checkpoints import make_checkpoint
from oracle import Oracle
from same_seeds import MIXES, answers, difference, params, prompts

from pdserve.llm import LLM

VOCAB_SIZE = 16_000
BATCHES = (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--initializer-range", type=float, default=0.3, help="deviation of the random weights")
    parser.add_argument("--without-margins", action="store_true", help="count only")
    options = parser.parse_args()
    for name, value in conditions().items():
        print(f"{name:<12} {value}")
    print(
        f"model        {options.dtype}, vocabulary {VOCAB_SIZE:,}; {options.sequences:,} sequences of {options.max_tokens} tokens\n"
    )
    with tempfile.TemporaryDirectory() as name:
        heads = {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 144,
            "initializer_range": options.initializer_range,
        }
        folder = make_checkpoint(Path(name), "llama", vocab_size=VOCAB_SIZE, **heads)
        make = partial(LLM, folder, dtype=options.dtype, max_num_seqs=64, num_blocks=1024, max_model_len=128)
        asked = list(
            zip(prompts(options.sequences, VOCAB_SIZE), params(options.sequences, options.max_tokens), strict=True)
        )
        found = {}
        for batch in BATCHES:
            start = time.monotonic()
            found[batch] = list(answers(make, batch, asked))
            print(f"batches of {batch}: {time.monotonic() - start:.0f} s", flush=True)
        oracle = Oracle(folder)
        for batch in BATCHES[1:]:
            pairs = list(zip(found[1], found[batch], strict=True))
            differing = [number for number, (alone, among) in enumerate(pairs) if alone != among]
            print(f"\namong {batch}: {len(differing)} of {len(pairs):,} sequences differ")
            by_mix = [sum(number % len(MIXES) == mix for number in differing) for mix in range(len(MIXES))]
            print("  " + "; ".join(f"{mix or 'plain'}: {count}" for mix, count in zip(MIXES, by_mix, strict=True)))
            if options.without_margins:
                continue
            margins = []
            for number in differing:
                one = difference(oracle, number, *asked[number], *pairs[number])
                if one is not None:
                    margins.append(one.margin)
                    print(f"  {one}")
            print(f"  largest margin: {max(margins, default=0.0):.1e}")


if __name__ == "__main__":
    main()
