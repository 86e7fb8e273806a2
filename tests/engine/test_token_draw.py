"""One token out of the kept ones: noise that is not drawn decides nothing, and a device draws as the processor does."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdserve.engine.sampling import device_draw
from pdserve.engine.sampling.kept_tokens import Border
from pdserve.engine.sampling.sampler import Sampler, SamplingMetadata
from pdserve.engine.sampling.scratch import Scratch
from pdserve.engine.sampling.seeded_uniform import gumbel, leads
from pdserve.engine.sampling.token_draw import KeptRows, NoiseRows, draw, highest_sums
from tests.support.engine.pretend_device import CUDA, DEVICE, PretendTensor, usable
from tests.support.kernels.sampled_rows import SAMPLING_FIELDS, coordinates, metadata, rows_of


def drawn_with_all_noise(kept: KeptRows, noise: NoiseRows) -> NDArray[np.int64]:
    num_rows, vocab_size = kept.logits.shape
    token_ids, winners = np.arange(vocab_size), []
    for row in range(num_rows):
        seed, index, position = (np.full(vocab_size, of[row]) for of in (noise.seeds, noise.indexes, noise.positions))
        sums = kept.scaled(np.full(vocab_size, row), token_ids) + gumbel(seed, index, position, token_ids)
        sums[~kept.border.keeps(kept.logits[row], np.full(vocab_size, row), token_ids)] = -np.inf
        winners.append(int(sums.argmax()))
    return np.array(winners)


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["flat", "peaked", "steep", "equal", "two", "one", "masked"])
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 100.0])
def test_noise_that_is_not_drawn_decides_nothing(kind: str, temperature: float) -> None:
    logits, noise = rows_of(kind, 24, 6000), coordinates(24)
    temperatures = np.full(24, temperature, dtype=np.float32)
    part = np.partition(logits, -500, axis=-1)[:, -500]
    borders = {
        "none": Border.of_all(24, 6000),
        "many": Border(part, np.full(24, 3000)),
        "few": Border(np.partition(logits, -9, axis=-1)[:, -9], np.full(24, 6000)),
    }
    for name, border in borders.items():
        kept = KeptRows(logits, logits.max(-1), temperatures, border)
        np.testing.assert_array_equal(draw(kept, noise, Scratch()), drawn_with_all_noise(kept, noise), err_msg=name)


def test_of_equal_sums_the_lowest_id_wins() -> None:
    sums = np.array([1, 3, 3, 2, 2, 7, 7, 7], dtype=np.float32)
    assert highest_sums(sums, np.array([0, 0, 0, 1, 1, 2, 2, 2]), 3).tolist() == [1, 3, 5]


@pytest.fixture(params=[str(DEVICE), CUDA])
def device(request: Any) -> Any:
    with usable(request.param):
        yield torch.device(request.param)


FIELDS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
]


def thread_ms(logits: torch.Tensor, asked: SamplingMetadata, sampler: Sampler) -> float:
    """CPU time; the least of several."""
    times = []
    for _ in range(6):
        start = time.thread_time()
        sampler(logits, asked)
        times.append(time.thread_time() - start)
    return min(times) * 1e3


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_rows_that_a_grammar_masks_cost_no_more_than_others(fields: dict[str, Any]) -> None:
    asked, sampler = metadata(2, 151_936, **fields), Sampler()
    whole, masked = (torch.from_numpy(rows_of(kind, 2, 151_936)) for kind in ("flat", "masked"))
    assert thread_ms(masked, asked, sampler) < 2 * thread_ms(whole, asked, sampler)


def test_rows_of_every_kind_are_drawn_among_each_other_as_alone() -> None:
    kinds = ["flat", "peaked", "steep", "equal", "two", "one", "masked"]
    logits = np.concatenate([rows_of(kind, 4 * len(FIELDS), 5000) for kind in kinds])
    count, random = len(logits), np.random.default_rng(14)
    asked = metadata(count, 5000)
    for row in range(count):
        fields = FIELDS[row % len(FIELDS)]
        asked.top_p[row], asked.min_p[row] = fields.get("top_p", 1.0), fields.get("min_p", 0.0)
        asked.top_k[row] = fields.get("top_k", 5000)
    asked.temperature[:] = random.choice(np.array([0.0, 1.1e-5, 0.5, 1.0, 100.0], dtype=np.float32), count)
    sampler = Sampler()
    whole = sampler(torch.from_numpy(logits.copy()), asked).sampled_token_ids
    for size in (1, 3, 50):
        order = random.permutation(count)
        for first in range(0, count, size):
            rows = order[first : first + size]
            part = sampler(torch.from_numpy(logits[rows]), rows_asked(asked, rows)).sampled_token_ids
            np.testing.assert_array_equal(part, whole[rows])


def rows_asked(asked: SamplingMetadata, rows: NDArray[np.int64]) -> SamplingMetadata:
    names = ("temperature", "top_p", "top_k", "min_p", "seeds", "indexes", "positions")
    return SamplingMetadata(**{name: getattr(asked, name)[rows] for name in names})


def test_a_devices_leads_are_the_processors_bit_by_bit(device: torch.device) -> None:
    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**32 - 1, -(2**32), 0x0123456789ABCDEF])
    noise = NoiseRows(seeds, np.arange(9) % 4, np.array([0, 1, 2**32 - 1, 2**31, 5, 6, 7, 8, 70_000]))
    for vocab_size in (1, 16, 33, 4001):
        parameters = torch.from_numpy(np.stack([noise.seeds, noise.indexes, noise.positions])).to(device)
        there = device_draw._leads(parameters, vocab_size).cpu().numpy()
        here = leads(noise.seeds, noise.indexes, noise.positions, vocab_size, Scratch())
        np.testing.assert_array_equal(there, here)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("kind", ["flat", "peaked", "equal", "two", "one", "masked"])
@pytest.mark.parametrize("fields", SAMPLING_FIELDS, ids=str)
def test_a_device_draws_as_the_processor_does(device: torch.device, kind: str, fields: dict[str, Any]) -> None:
    logits = rows_of(kind, 40, 1500)
    asked = metadata(40, 1500, **fields)
    asked.temperature[::7] = 0
    here = Sampler()(torch.from_numpy(logits.copy()), asked).sampled_token_ids
    there_logits = torch.from_numpy(logits.copy()).to(device)
    assert isinstance(there_logits, PretendTensor) or device.type == "cuda"
    np.testing.assert_array_equal(Sampler()(there_logits, asked).sampled_token_ids, here)
