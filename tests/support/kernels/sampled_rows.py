"""Logits and sampling parameters of rows, for tests of samplers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.sampling.sampler import SamplingMetadata
from pdserve.engine.sampling.token_draw import NoiseRows

SAMPLING_FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.1e-5},
    {"temperature": 0.4, "top_p": 0.95},
    {"temperature": 100.0},
    {"top_p": 0.9},
    {"top_k": 20},
    {"top_k": 1},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 300, "top_p": 0.999},
    {"temperature": 0.05, "top_k": 500},
]
"""Parameters that take every path of the draw: greedy, nearly greedy, each limit alone and all together, short and long lists."""


def coordinates(count: int, first: int = 0) -> NoiseRows:
    rows = np.arange(first, first + count)
    return NoiseRows(rows * 31 - 9, rows % 3, rows)


def rows_of(kind: str, count: int, vocab_size: int) -> NDArray[np.float32]:
    random = np.random.default_rng(9)
    if kind == "peaked":
        logits = -1.5 * np.log(random.permuted(np.tile(np.arange(1, vocab_size + 1), (count, 1)), axis=1))
    elif kind == "equal":
        logits = np.full((count, vocab_size), 3.0)
    elif kind == "two":
        logits = np.full((count, vocab_size), -np.inf)
        logits[:, [5, vocab_size - 1]] = 1.0
    elif kind == "one":
        logits = np.full((count, vocab_size), -np.inf)
        logits[np.arange(count), random.integers(0, vocab_size, count)] = random.normal(size=count) * 9
    elif kind == "masked":
        logits = random.normal(size=(count, vocab_size))
        logits[random.random(logits.shape) > 20 / vocab_size] = -np.inf
        logits[:, 7] = 0.0
    else:
        logits = random.normal(size=(count, vocab_size)) * {"flat": 1.0, "steep": 12.0}[kind]
    rows: NDArray[np.float32] = logits.astype(np.float32)
    return rows


def metadata(count: int, vocab_size: int, **fields: Any) -> SamplingMetadata:
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": vocab_size, "min_p": 0.0} | fields
    noise = coordinates(count)
    return SamplingMetadata(
        temperature=np.full(count, given["temperature"], dtype=np.float32),
        top_p=np.full(count, given["top_p"], dtype=np.float32),
        top_k=np.full(count, given["top_k"], dtype=np.int64),
        min_p=np.full(count, given["min_p"], dtype=np.float32),
        seeds=noise.seeds,
        indexes=noise.indexes,
        positions=noise.positions,
    )
