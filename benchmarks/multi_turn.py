"""Conversations of ten turns on two workers of each role, with and without moves of cached blocks.

Clusters run side by side, one per value of `block_moves`, and get the same conversations in alternating rounds; while one is asked,
the others are idle. A round has several conversations at once, each with a pause between an answer and the next turn, as agents
have. A turn's prompt is everything that was said before, and new input. An infinite cache would compute those of its tokens that
were in no full block of the conversation before; what is computed beyond them counts as recomputed. In float32 all clusters say the
same; in bfloat16 keys and values of decoded tokens are rounded otherwise than those of prefilled ones.

Usage: python benchmarks/multi_turn.py [--model demo] [--rounds 6] [--conversations 4] [--think 0.2] [--set name=value]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cluster_of_processes import serving
from completions import completion_body, stream_completion
from conditions import print_conditions

from pdserve.models.model_folder import model_folder

SETTINGS = ("never", "auto", "always")
NUM_TURNS, FIRST_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS = 10, 400, 60, 60
BLOCK_SIZE = 16
SEED = 11


@dataclass
class Served:
    """Results of one cluster."""

    ttft_s: list[list[float]] = field(default_factory=lambda: [[] for _ in range(NUM_TURNS)])
    """By turn."""
    computed: int = 0
    """Prompt tokens of turns after the first."""
    necessary: int = 0
    """Those that an infinite cache would compute."""
    texts: list[list[int]] = field(default_factory=list)

    @property
    def later_s(self) -> list[float]:
        """Times to the first token of turns after the first."""
        return [seconds for of_turn in self.ttft_s[1:] for seconds in of_turn]


async def converse(http: httpx.AsyncClient, url: str, seed: int, vocabulary: int, think_s: float, into: Served) -> None:
    draw = random.Random(seed)
    text = [draw.randrange(10, vocabulary) for _ in range(FIRST_TOKENS)]
    known = 0
    for turn in range(NUM_TURNS):
        answer = await stream_completion(http, f"{url}/v1/completions", completion_body(text, OUTPUT_TOKENS))
        into.ttft_s[turn].append(answer.ttft_s)
        if turn:
            into.computed += len(text) - answer.num_cached_tokens
            into.necessary += len(text) - known
        text = [*text, *answer.token_ids]
        # the last token of an answer is never computed
        known = (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
        text += [draw.randrange(10, vocabulary) for _ in range(INPUT_TOKENS)]
        await asyncio.sleep(think_s)
    into.texts.append(text)


async def measure(urls: dict[str, str], options: argparse.Namespace, vocabulary: int) -> dict[str, Served]:
    results = {setting: Served() for setting in urls}
    async with httpx.AsyncClient(timeout=600) as http:
        for number in range(options.rounds + 1):
            order = list(urls) if number % 2 else list(reversed(urls))
            for setting in order:
                into = results[setting] if number else Served()  # the first round warms up
                seeds = [SEED + 1000 * number + place for place in range(options.conversations)]
                await asyncio.gather(
                    *(converse(http, urls[setting], seed, vocabulary, options.think, into) for seed in seeds)
                )
    return results


async def moves_of(url: str) -> dict[str, float]:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{url}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("pdserve_block_moves_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--think", type=float, default=0.2, help="seconds between an answer and the next turn")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--set", action="append", default=[], help="a setting of all clusters, name=value")
    options = parser.parse_args()
    folder = model_folder(options.model)
    vocabulary = (
        1000
        if not (folder / "config.json").exists()
        else json.loads((folder / "config.json").read_text())["vocab_size"]
    )
    flags = ["--prefill", "2", "--decode", "2", *(f"--{setting}" for setting in options.set)]
    print_conditions()
    print(
        f"{options.rounds} rounds of {options.conversations} conversations, {NUM_TURNS} turns, {FIRST_TOKENS} tokens first, then "
        f"{INPUT_TOKENS} each, answers of {OUTPUT_TOKENS}; pause {options.think:g} s; {' '.join(options.set)}"
    )
    with ExitStack() as stack:
        urls = {
            setting: stack.enter_context(
                serving(
                    Path(options.model) if Path(options.model).exists() else folder, [*flags, "--block-moves", setting]
                )
            )
            for setting in options.settings
        }
        results = asyncio.run(measure(urls, options, vocabulary))
        moves = {setting: asyncio.run(moves_of(url)) for setting, url in urls.items()}
    base: Any = results[options.settings[0]]
    for setting, served in results.items():
        same = sum(text in base.texts for text in served.texts)
        later = served.later_s
        print(
            f"{setting:<7} TTFT of turns 2 to {NUM_TURNS}: mean {statistics.fmean(later) * 1e3:6.1f} ms "
            f"({statistics.fmean(later) / statistics.fmean(base.later_s):.2f}), p50 {statistics.median(later) * 1e3:6.1f}, "
            f"p90 {statistics.quantiles(later, n=10)[-1] * 1e3:6.1f}; recomputed {served.computed - served.necessary:6d} of "
            f"{served.necessary} necessary ({served.computed / served.necessary - 1:.1%}); moves {moves[setting]}; "
            f"{same} of {len(served.texts)} texts as with {options.settings[0]}"
        )


if __name__ == "__main__":
    main()
