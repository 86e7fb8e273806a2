"""Quantised weights and KV caches: right answers and probabilities of the bundled model, and time per token of any model.

Answers: the bundled model's evaluation (`demo_model.evaluate`), generated greedily and compared with the expected answer to the
last character. Probabilities: the answers in float32, read again as prompts: by how much the log-probability of a token differs
from that in float32. Time: batches of sequences that decode after a prompt of `--prompt` tokens, in engines that take turns; the
time of a step is the difference of two lengths of output whose prompts are in the prefix cache. It is also given in CPU time,
which others on the machine disturb less.

Usage: python benchmarks/quantization.py [--model FOLDER] [--load-format dummy] [--variants own int8 int4 ...] [--batches 1 8 16]
                                         [--prompt 128] [--rounds 5] [--threads 2] [--cases 40] [--groups TITLE ...]
                                         [--no-answers]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from conditions import conditions, print_conditions

from demo_model import facts
from demo_model.evaluate import Case, capital_cases, other_groups
from pdserve.llm import LLM, RequestOutput, SamplingParams

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "own": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
    "both": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
"""`own`: the dtype of the checkpoint."""
SHORT, LONG = 8, 40


def answered(llm: LLM, cases: Sequence[Case]) -> list[RequestOutput]:
    conversations = [[{"role": each.role, "content": each.content} for each in case.messages] for case in cases]
    longest = max(len(case.answer) for case in cases)
    return llm.chat(conversations, SamplingParams(temperature=0, max_tokens=longest), use_tqdm=False)


def logprobs(llm: LLM, answers: Sequence[RequestOutput]) -> list[float]:
    """The log-probability of each token of these answers."""
    texts = [[*(answer.prompt_token_ids or ()), *answer.outputs[0].token_ids] for answer in answers]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for answer, text, output in zip(answers, texts, llm.generate(texts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        first = len(text) - len(answer.outputs[0].token_ids)
        for token, each in zip(text[first:], output.prompt_logprobs[first:], strict=True):
            assert each is not None
            found.append(each[token].logprob)
    return found


def print_answers(names: Sequence[str], threads: int, num_cases: int | None, chosen: tuple[str, ...]) -> None:
    groups = [(f"held out: {phrasing}", capital_cases(phrasing, None)) for phrasing in facts.HELD_OUT_PHRASINGS]
    groups = [(title, cases) for title, cases in [*groups, *other_groups(0)] if title.startswith(chosen)]
    names = ["float32", *(name for name in names if name != "float32")]
    engines = [LLM("demo", num_threads=threads, num_blocks=4096, **VARIANTS[name]) for name in names]
    right: list[list[bool]] = [[] for _ in names]
    values: list[list[float]] = [[] for _ in names]
    for title, every in groups:
        cases = every if num_cases is None else random.Random(0).sample(every, min(num_cases, len(every)))
        first = answered(engines[0], cases)
        row = []
        for number, llm in enumerate(engines):
            outputs = answered(llm, cases) if number else first
            each = [output.outputs[0].text == case.answer for output, case in zip(outputs, cases, strict=True)]
            row.append(sum(each))
            right[number] += each
            values[number] += logprobs(llm, first)
        print(f"{title:<55} {len(cases):>5} " + " ".join(f"{count / len(cases):6.1%}" for count in row), flush=True)
    print(f"\n{len(right[0])} questions, {len(values[0])} tokens of answers, each against float32")
    print("variant  right   other verdict  log-probability: mean of token, mean and largest difference")
    for name, verdicts, found in zip(names, right, values, strict=True):
        differences = [abs(one - other) for one, other in zip(found, values[0], strict=True)]
        others = sum(one != other for one, other in zip(verdicts, right[0], strict=True))
        print(
            f"{name:<8} {sum(verdicts) / len(verdicts):6.2%} {others:>5} {sum(found) / len(found):>14.5f} "
            f"{sum(differences) / len(differences):>10.5f} {max(differences):>8.4f}",
            flush=True,
        )
    for llm in engines:
        llm.shutdown()


def step_ms(llm: LLM, batch: int, num_tokens: int) -> tuple[float, float]:
    """(milliseconds, milliseconds of CPU time) per token of each sequence while `batch` sequences decode."""
    prompts = [[3 + (7 * row + place) % 500 for place in range(num_tokens)] for row in range(batch)]
    taken = []
    for length in (SHORT, LONG):
        start = time.perf_counter(), time.process_time()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True), use_tqdm=False)
        taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall, used = ((long - short) / (LONG - SHORT) * 1e3 for short, long in zip(*taken, strict=True))
    return wall, used


def print_times(options: argparse.Namespace) -> None:
    engines = [
        LLM(
            options.model,
            load_format=options.load_format,
            num_threads=options.threads,
            kv_cache_mib=256,
            max_model_len=options.prompt + LONG + 16,
            **VARIANTS[name],
        )
        for name in options.variants
    ]
    print(f"\nmodel {options.model}, {options.threads} threads, prompts of {options.prompt} tokens")
    blocks = [llm.llm_engine.client.info.num_blocks for llm in engines]
    print("tokens in a pool of 256 MiB: " + ", ".join(map(str, (16 * count for count in blocks))))
    print(
        f"ms per token and sequence, medians of {options.rounds} rounds in turns; times as fast as {options.variants[0]}"
    )
    for batch in options.batches:
        rounds = [[step_ms(llm, batch, options.prompt) for llm in engines] for _ in range(options.rounds + 1)][1:]
        for clock, title in enumerate(("clock", "processor")):
            parts = []
            for place, name in enumerate(options.variants):
                ratios = sorted(row[0][clock] / row[place][clock] for row in rounds)
                span = f", {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if place else ""
                parts.append(f"{name} {median(row[place][clock] for row in rounds):.2f}{span}")
            print(f"batch {batch:>2}, {title:<9}: " + "; ".join(parts), flush=True)
    for llm in engines:
        llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="measure the time of this folder; default: of none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS)[1:])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", type=int, help="of each kind of question, drawn at random; default: all")
    parser.add_argument("--groups", nargs="+", default=[""], help="beginnings of the titles of kinds of questions")
    parser.add_argument("--no-answers", action="store_true")
    options = parser.parse_args()
    print_conditions()
    if options.model:
        print_times(options)
    if not options.no_answers:
        print_answers(options.variants, options.threads, options.cases, tuple(options.groups))
    print(f"\nload after   {conditions()['load before']}")


if __name__ == "__main__":
    main()
