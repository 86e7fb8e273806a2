"""One token out of the kept ones: noise that is not drawn decides nothing, and a device draws as the processor does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pretend_device import CUDA, DEVICE, PretendTensor, usable

from pdserve.engine.kept_tokens import Border
from pdserve.engine.noise import gumbel
from pdserve.engine.sampler import Sampler, SamplingMetadata
from pdserve.engine.scratch import Scratch
from pdserve.engine.token_draw import KeptRows, NoiseRows, draw, highest_sums


def coordinates(count: int, first: int = 0) -> NoiseRows:
    rows = np.arange(first, first + count)
    return NoiseRows(rows * 31 - 9, rows % 3, rows)


def drawn_with_all_noise(kept: KeptRows, noise: NoiseRows) -> NDArray[np.int64]:
    num_rows, vocab_size = kept.logits.shape
    token_ids, winners = np.arange(vocab_size), []
    for row in range(num_rows):
        of_row = [np.full(vocab_size, values[row]) for values in (noise.seeds, noise.indexes, noise.positions)]
        sums = kept.scaled(np.full(vocab_size, row), token_ids) + gumbel(*of_row, token_ids)
        if kept.border is not None:
            sums[~kept.border.keeps(kept.logits[row], np.full(vocab_size, row), token_ids)] = -np.inf
        winners.append(int(sums.argmax()))
    return np.array(winners)


def rows_of(kind: str, count: int, vocab_size: int) -> NDArray[np.float32]:
    random = np.random.default_rng(9)
    if kind == "peaked":
        logits = -1.5 * np.log(random.permuted(np.tile(np.arange(1, vocab_size + 1), (count, 1)), axis=1))
    elif kind == "equal":
        logits = np.full((count, vocab_size), 3.0)
    elif kind == "two":
        logits = np.full((count, vocab_size), -np.inf)
        logits[:, [5, vocab_size - 1]] = 1.0
    else:
        logits = random.normal(size=(count, vocab_size)) * {"flat": 1.0, "steep": 12.0}[kind]
    return logits.astype(np.float32)


@pytest.mark.parametrize("kind", ["flat", "peaked", "steep", "equal", "two"])
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 100.0])
def test_noise_that_is_not_drawn_decides_nothing(kind: str, temperature: float) -> None:
    logits, noise = rows_of(kind, 24, 6000), coordinates(24)
    temperatures = np.full(24, temperature, dtype=np.float32)
    part = np.partition(logits, -500, axis=-1)[:, -500]
    borders = {
        "none": None,
        "many": Border(part, np.full(24, 3000)),
        "few": Border(np.partition(logits, -9, axis=-1)[:, -9], np.full(24, 6000)),
    }
    for name, border in borders.items():
        kept = KeptRows(logits, logits.max(-1), temperatures, border)
        np.testing.assert_array_equal(draw(kept, noise, Scratch()), drawn_with_all_noise(kept, noise), err_msg=name)


def test_of_equal_sums_the_lowest_id_wins() -> None:
    sums = np.array([1, 3, 3, 2, 2, 7, 7, 7], dtype=np.float32)
    assert highest_sums(sums, np.array([0, 0, 0, 1, 1, 2, 2, 2]), 3).tolist() == [1, 3, 5]


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


@pytest.fixture(params=[str(DEVICE), CUDA])
def device(request: Any) -> Any:
    with usable(request.param):
        yield torch.device(request.param)


@pytest.mark.parametrize("kind", ["flat", "peaked", "equal", "two"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.4},
        {"top_p": 0.9},
        {"top_k": 20},
        {"top_k": 1},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    ],
    ids=str,
)
def test_a_device_draws_as_the_processor_does(device: torch.device, kind: str, fields: dict[str, Any]) -> None:
    logits = rows_of(kind, 40, 1500)
    asked = metadata(40, 1500, **fields)
    asked.temperature[::7] = 0
    here = Sampler()(torch.from_numpy(logits.copy()), asked).sampled_token_ids
    there_logits = torch.from_numpy(logits.copy()).to(device)
    assert isinstance(there_logits, PretendTensor) or device.type == "cuda"
    np.testing.assert_array_equal(Sampler()(there_logits, asked).sampled_token_ids, here)
