"""Cost of sampling compared with an earlier rule: 152k tokens, float32, both rules in turn in one process.

The earlier rule: one uniform number per row and the cumulative distribution in the order of the ids; with top_p, top_k or min_p, in
the order of a stable sort of the vocabulary. It is implemented here in torch.

Usage: python benchmarks/sampler.py [--rounds 7] > benchmarks/results/sampler.txt
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from conditions import print_conditions
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.sampling.sampler import Sampler, SamplingMetadata

CASES: dict[str, dict[str, float]] = {
    "temperature alone": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20": {"top_k": 20},
    "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
    "min_p 0.05": {"min_p": 0.05},
}


def rows_of(kind: str, count: int, vocab_size: int) -> Tensor:
    """flat: normal logits, of which top_p 0.9 keeps a third; peaked: by Zipf's law, of which it keeps a hundred.

    masked: as a grammar leaves them, 50 normal logits and -inf.
    """
    random = np.random.default_rng(0)
    if kind == "flat":
        return torch.from_numpy(random.normal(size=(count, vocab_size)).astype(np.float32))
    if kind == "masked":
        logits = np.full((count, vocab_size), -np.inf, dtype=np.float32)
        for row in logits:
            row[random.choice(vocab_size, 50, replace=False)] = random.normal(size=50)
        return torch.from_numpy(logits)
    ranks = random.permuted(np.tile(np.arange(1, vocab_size + 1), (count, 1)), axis=1)
    return torch.from_numpy((-1.6 * np.log(ranks) + random.normal(size=ranks.shape) * 0.5).astype(np.float32))


def metadata(count: int, vocab_size: int, fields: dict[str, float]) -> SamplingMetadata:
    rows = np.arange(count)
    return SamplingMetadata(
        temperature=np.full(count, 0.9, dtype=np.float32),
        top_p=np.full(count, fields.get("top_p", 1.0), dtype=np.float32),
        top_k=np.full(count, fields.get("top_k", vocab_size), dtype=np.int64),
        min_p=np.full(count, fields.get("min_p", 0.0), dtype=np.float32),
        seeds=rows + 7,
        indexes=rows * 0,
        positions=rows,
    )


def before(logits: Tensor, asked: SamplingMetadata) -> NDArray[np.int64]:
    """Sample by the earlier rule."""
    columns = (asked.top_p, asked.top_k, asked.min_p, asked.temperature)
    top_p, top_k, min_p, temperature = (torch.from_numpy(values).unsqueeze(-1) for values in columns)
    logits.max(-1)
    scaled = logits / temperature
    is_cut = (asked.top_k < logits.shape[1]).any() or (asked.top_p < 1).any() or (asked.min_p > 0).any()
    if not is_cut:
        return _inverse_cdf(torch.softmax(scaled, dim=-1), asked).numpy()
    scaled, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(scaled, dim=-1)
    keep = probs >= probs[:, :1] * min_p
    keep &= torch.arange(probs.shape[-1]) < top_k
    left = torch.where(keep, probs, 0)
    left = left / left.sum(-1, keepdim=True)
    keep &= left.cumsum(-1) - left < top_p
    keep[:, 0] = True
    chosen = _inverse_cdf(torch.where(keep, probs, 0), asked)
    return token_ids.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).numpy()


def _inverse_cdf(weights: Tensor, asked: SamplingMetadata) -> Tensor:
    cdf = weights.double().cumsum(-1)
    uniform = np.random.default_rng(1).random(len(asked.seeds))
    target = torch.from_numpy(uniform).unsqueeze(-1) * cdf[:, -1:]
    chosen = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.int8).max(-1).indices
    return torch.minimum(chosen, last)


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Wall time, and CPU time of all threads."""
    start, used = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3


def measured(vocab_size: int, num_rounds: int) -> Iterator[tuple[int, str, str, int, NDArray[np.float64]]]:
    """Threads, kind, case, rows, and `[2, 2, rounds]` milliseconds: wall and CPU time; before, now.

    Rounds alternate between the two rules.
    """
    rules: tuple[Callable[..., object], ...] = (before, Sampler())
    for kind in ("flat", "peaked", "masked"):
        every = rows_of(kind, 64, vocab_size)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, fields in CASES.items():
                for count in (1, 8, 64):
                    logits, asked = every[:count], metadata(count, vocab_size, fields)
                    # short cases get more rounds: one interruption is a larger part of them
                    num_turns = num_rounds * (8 if not fields or count == 1 else 1)
                    times = np.empty((2, 2, num_turns))
                    for turn in range(-1, num_turns):
                        for place, rule in enumerate(rules):
                            took = milliseconds(partial(rule, logits, asked))
                            if turn >= 0:  # the first turn warms up
                                times[:, place, turn] = took
                    yield threads, kind, name, count, times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    options = parser.parse_args()
    print_conditions()
    print(f"numpy        {np.__version__}")
    print(f"vocabulary   {options.vocab_size:,}; temperature 0.9")
    print(f"numbers      ms per step of all rows; {options.rounds} rounds or more, the two rules in turns")
    print("             wall time: least and median; CPU time of all threads: least\n")
    columns = ("threads", "rows", "before", "median", "now", "median", "before", "now", "wall", "median", "cpu")
    print(f"{'':<47}{'wall':<35}{'processor':<18}before / now")
    print(f"{'':<30}" + "".join(f"{name:>9}" for name in columns))
    for threads, kind, name, count, times in measured(options.vocab_size, options.rounds):
        (before_ms, now_ms), (before_cpu, now_cpu) = times.min(-1)
        before_median, now_median = np.median(times[0], axis=-1)
        numbers = (before_ms, before_median, now_ms, now_median, before_cpu, now_cpu)
        ratios = (before_ms / now_ms, before_median / now_median, before_cpu / now_cpu)
        line = "".join(f"{each:>9.2f}" for each in (*numbers, *ratios))
        print(f"{kind:<8}{name:<22}{threads:>9}{count:>9}{line}", flush=True)
    print(f"\nload after   {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
