"""The kept set: top_k, top_p and min_p by thresholds against a sort, with ties, extremes, and rows among others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.engine.sampling.kept_tokens import Cut, border, masses, top_p_alone
from pdserve.engine.sampling.scratch import Scratch
from tests.support.kernels import sampling_reference

NEAR = 1e-6
"""A border that is no further from lying elsewhere, in mass or in y, may do so in float32."""


def cut(count: int, vocab_size: int, **fields: Any) -> Cut:
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | fields
    return Cut(
        np.full(count, given["temperature"], dtype=np.float32),
        np.full(count, given["top_p"], dtype=np.float32),
        np.full(count, given["top_k"] or vocab_size, dtype=np.int64),
        np.full(count, given["min_p"], dtype=np.float32),
    )


def kept(logits: NDArray[np.float32], asked: Cut) -> list[list[int]]:
    """Ids of each row's kept tokens, by id; rows of one kind at a time, as the sampler has them."""
    found: list[list[int]] = [[] for _ in logits]
    every = np.arange(logits.shape[1])
    alone = top_p_alone(asked, logits.shape[1])
    for rows in (np.flatnonzero(alone), np.flatnonzero(~alone)):
        if len(rows):
            line = border(logits[rows], logits[rows].max(-1), asked.of(rows), Scratch())
            for place, row in enumerate(rows.tolist()):
                keeps = line.keeps(logits[row], np.full(logits.shape[1], place), every)
                found[row] = np.flatnonzero(keeps).tolist()
    return found


def check(logits: NDArray[np.float32], **fields: Any) -> None:
    answers = kept(logits, cut(len(logits), logits.shape[1], **fields))
    asked: dict[str, Any] = {
        name: float(np.float32(value)) if name != "top_k" else value for name, value in fields.items()
    }
    for row, answer in zip(logits.astype(np.float64).tolist(), answers, strict=True):
        expected, margin = sampling_reference.kept(row, sampling_reference.Params(**asked))
        assert answer == sorted(expected) or margin < NEAR, (fields, margin, len(answer), len(expected))


FIELDS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 299},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 1 - 2**-24},
    {"min_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"min_p": 0.02, "top_p": 0.8},
    {"min_p": 0.01, "top_k": 30, "top_p": 0.95},
]


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("temperature", [1e-5, 0.2, 1.0, 3.0, 100.0])
def test_the_kept_set_is_the_sorts(fields: dict[str, Any], temperature: float) -> None:
    random = np.random.default_rng(4)
    spread = random.normal(size=(12, 300)) * random.uniform(0.1, 8, (12, 1)) + random.uniform(-50, 50, (12, 1))
    check(spread.astype(np.float32), temperature=temperature, **fields)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_of_equal_logits_the_lowest_ids_are_kept(fields: dict[str, Any]) -> None:
    random = np.random.default_rng(5)
    few = random.integers(-4, 3, (20, 300)).astype(np.float32)
    few[0] = 2.5  # all are equal
    few[1, ::2] = -0.0
    few[1, 1::2] = 0.0
    check(few, **fields)


@pytest.mark.diagonal
@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("share", [0.7, 0.99])
def test_tokens_out_of_reach_change_nothing(fields: dict[str, Any], share: float) -> None:
    random = np.random.default_rng(6)
    logits = random.normal(size=(8, 300)).astype(np.float32) * 3
    logits[:, 1:][random.random((8, 299)) < share] = -np.inf
    logits[0] = -np.inf
    logits[0, 7] = -3e38
    for row, answer in zip(logits, kept(logits, cut(8, 300, **fields)), strict=True):
        finite = np.flatnonzero(np.isfinite(row))
        [among_finite] = kept(row[finite][None], cut(1, len(finite), **fields))
        assert [token for token in answer if np.isfinite(row[token])] == finite[among_finite].tolist()


def test_extreme_logits_overflow_nothing() -> None:
    logits = np.array([[3e38, -3e38, 1e-38, 0.0, 2.9e38, -np.inf], [1e-40, 2e-40, -1e-40, 0, 1e-45, -np.inf]])
    for fields in FIELDS[:3] + FIELDS[4:]:
        for temperature in (1e-5, 1.0, 100.0):
            answers = kept(logits.astype(np.float32), cut(2, 6, temperature=temperature, **fields))
            assert 0 in answers[0]
            assert 1 in answers[1]


def test_a_large_vocabulary_is_cut_as_a_small_one() -> None:
    random = np.random.default_rng(7)
    flat = random.normal(size=40_000)
    peaked = -1.2 * np.log(np.arange(1, 40_001)) + random.normal(size=40_000) * 0.3
    narrow = 100 + random.normal(size=40_000) * 1e-3
    logits = np.stack([flat, random.permutation(peaked), narrow]).astype(np.float32)
    for fields in ({"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 20}, {"top_k": 9000, "top_p": 0.5}, {"min_p": 0.05}):
        check(logits, **fields)


def test_a_tokens_mass_does_not_depend_on_its_place_in_the_array() -> None:
    scaled = -np.random.default_rng(9).exponential(6, 500).astype(np.float32)
    whole = masses(scaled.copy())
    for first in range(0, 40):
        np.testing.assert_array_equal(masses(scaled[first : first + 37].copy()), whole[first : first + 37])
    alone = [masses(scaled[place : place + 1].copy())[0] for place in range(len(scaled))]
    np.testing.assert_array_equal(alone, whole)


def test_a_row_is_cut_as_it_is_alone() -> None:
    random = np.random.default_rng(8)
    logits = random.normal(size=(30, 500)).astype(np.float32) * random.uniform(0.1, 9, (30, 1)).astype(np.float32)
    asked = Cut(
        random.uniform(0.1, 3, 30).astype(np.float32),
        np.where(random.random(30) < 0.7, random.uniform(0.1, 1, 30), 1).astype(np.float32),
        np.where(random.random(30) < 0.5, random.integers(1, 500, 30), 500),
        np.where(random.random(30) < 0.3, random.uniform(0, 0.3, 30), 0).astype(np.float32),
    )
    together = kept(logits, asked)
    for row in range(30):
        assert kept(logits[row : row + 1], asked.of(slice(row, row + 1))) == [together[row]]
