"""int8 weights against the model's own dtype: right answers of the bundled model, and time per token of any model.

Answers: the bundled model's evaluation (`demo_model.evaluate`), generated greedily and compared with the expected answer to the
last character. Time: batches of decoding sequences in two engines, one per quantization, in turns; the time of a step is the
difference of two lengths of output, so that prefill counts for nothing.

Usage: python benchmarks/quantization.py [--model FOLDER] [--load-format dummy] [--batches 1 8 16] [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Literal

from conditions import conditions

from demo_model import facts
from demo_model.evaluate import Case, capital_cases, other_groups
from pdserve.llm import LLM, SamplingParams

Quantization = Literal["int8"] | None
BOTH: tuple[Quantization, ...] = (None, "int8")
SHORT, LONG = 8, 40
PROMPT_TOKENS = 128


def answered(llm: LLM, cases: Sequence[Case]) -> list[bool]:
    """Say for each case if the whole answer, and nothing else, is generated."""
    conversations = [[{"role": each.role, "content": each.content} for each in case.messages] for case in cases]
    longest = max(len(case.answer) for case in cases)
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=longest), use_tqdm=False)
    return [output.outputs[0].text == case.answer for output, case in zip(outputs, cases, strict=True)]


def print_answers(threads: int) -> None:
    groups = [(f"held out: {phrasing}", capital_cases(phrasing, None)) for phrasing in facts.HELD_OUT_PHRASINGS]
    groups += other_groups(0)
    print(f"\n{'question':<55} cases  none   int8   other answers")
    totals = [0, 0, 0, 0]
    engines = [LLM("demo", quantization=each, num_threads=threads, num_blocks=4096) for each in BOTH]
    for title, cases in groups:
        plain, rounded = (answered(llm, cases) for llm in engines)
        changed = sum(one != other for one, other in zip(plain, rounded, strict=True))
        row = [len(cases), sum(plain), sum(rounded), changed]
        totals = [one + other for one, other in zip(totals, row, strict=True)]
        print(f"{title:<55} {row[0]:>5} {row[1] / row[0]:6.1%} {row[2] / row[0]:6.1%} {changed:>5}", flush=True)
    print(f"{'all':<55} {totals[0]:>5} {totals[1] / totals[0]:6.1%} {totals[2] / totals[0]:6.1%} {totals[3]:>5}")
    for llm in engines:
        llm.shutdown()


def step_ms(llm: LLM, batch: int) -> float:
    """Milliseconds per token of each sequence while `batch` sequences decode."""
    prompts = [[3 + (7 * row + place) % 500 for place in range(PROMPT_TOKENS)] for row in range(batch)]
    taken = []
    for num_tokens in (SHORT, LONG):
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False)
        taken.append(time.perf_counter() - start)
    return (taken[1] - taken[0]) / (LONG - SHORT) * 1e3


def print_times(options: argparse.Namespace) -> None:
    engines = [
        LLM(
            options.model, quantization=each, load_format=options.load_format, num_threads=options.threads,
            num_blocks=1024, max_model_len=512,
        )
        for each in BOTH
    ]  # fmt: skip
    print(f"\nmodel {options.model}, {options.threads} threads")
    print(f"ms per token and sequence, medians of {options.rounds} rounds in turns")
    for batch in options.batches:
        for llm in engines:
            step_ms(llm, batch)
        rounds = [[step_ms(llm, batch) for llm in engines] for _ in range(options.rounds)]
        plain, rounded = (median(column) for column in zip(*rounds, strict=True))
        ratios = sorted(one / other for one, other in rounds)
        print(
            f"batch {batch:>2}: none {plain:7.2f}  int8 {rounded:7.2f}  none/int8 {median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True,
        )  # fmt: skip
    for llm in engines:
        llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="measure the time of this folder; default: of none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-answers", action="store_true")
    options = parser.parse_args()
    for name, value in conditions().items():
        print(f"{name:<12} {value}")
    if options.model:
        print_times(options)
    if not options.no_answers:
        print_answers(options.threads)
    print(f"\nload after   {conditions()['load before']}")


if __name__ == "__main__":
    main()
