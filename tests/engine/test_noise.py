"""The noise of sampling: the formula bit by bit, both tails, uniform and independent in every coordinate."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.engine.sampling.scratch import Scratch
from pdserve.engine.sampling.seeded_uniform import gumbel, gumbel_of_bits, gumbel_of_leads, leads
from tests.support.kernels import sampling_reference

COORDINATES = ("seed", "index", "position", "token")


def noise(count: int = 1, **coordinates: int | NDArray[np.int64]) -> NDArray[np.float32]:
    values = [np.broadcast_to(coordinates.get(name, 0), count).astype(np.int64) for name in COORDINATES]
    return gumbel(*values)


def uniform(gumbels: NDArray[np.float32]) -> NDArray[np.float64]:
    """In (0, 1): the numbers that the noise was made of."""
    return -np.expm1(-np.exp(-gumbels.astype(np.float64)))


def test_philox_gives_its_authors_known_answers() -> None:
    """The reference does; `test_the_noise_is_the_formulas_bit_by_bit` compares the engine's with the reference."""
    full, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for counter, key, of_seven, of_ten in (
        ((0,) * 4, (0,) * 2, "5f6fb709 0d893f64 4f121f81 4f730a48", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((full,) * 4, (full,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi[:4], pi[4:], "4dfccaba 190a87f0 c47362ba b6b5242a", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        for rounds, answer in ((7, of_seven), (10, of_ten)):
            assert " ".join(f"{word:08x}" for word in sampling_reference.philox(counter, key, rounds)) == answer


def test_the_noise_is_the_formulas_bit_by_bit() -> None:
    random = np.random.default_rng(1)
    seeds = np.concatenate([[0, 1, -1, 2**63 - 1, -(2**63)], random.integers(-(2**63), 2**63 - 1, 300)])
    indexes, positions = random.integers(0, 16, len(seeds)), random.integers(0, 2**32, len(seeds))
    token_ids = random.integers(0, 2**18, len(seeds))
    ours = gumbel(seeds, indexes, positions, token_ids)
    coordinates = zip(seeds.tolist(), indexes.tolist(), positions.tolist(), token_ids.tolist(), strict=True)
    theirs = np.array([sampling_reference.gumbel(*each) for each in coordinates])
    assert (np.abs(ours - theirs) <= np.spacing(np.abs(ours))).all()


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 2560, 151_936])
def test_leads_are_the_first_byte_of_each_tokens_noise(vocab_size: int) -> None:
    scratch = Scratch()
    seeds, indexes, positions = np.array([5, -7, 2**40]), np.array([0, 3, 1]), np.array([0, 1, 70_000])
    every = leads(seeds, indexes, positions, vocab_size, scratch)
    assert every.shape == (3, vocab_size)
    token_ids = np.unique(np.random.default_rng(2).integers(0, vocab_size, 200))
    for row in range(3):
        seed, index, position = (np.full(len(token_ids), values[row]) for values in (seeds, indexes, positions))
        whole = gumbel(seed, index, position, token_ids)
        np.testing.assert_array_equal(gumbel_of_leads(every[row, token_ids], seed, index, position, token_ids), whole)
        v, lead = uniform(whole), every[row, token_ids].astype(np.float64)
        assert ((lead / 256 <= v * (1 + 1e-6)) & (v * (1 - 1e-6) <= (lead + 1) / 256)).all()
    alone = leads(seeds[1:2], indexes[1:2], positions[1:2], vocab_size, Scratch())
    np.testing.assert_array_equal(alone[0], leads(seeds, indexes, positions, vocab_size, scratch)[1])


@pytest.mark.parametrize(
    "bits", [0, 1, 2, 1000, 2**24, 2**40, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 2**40, 2**64 - 2, 2**64 - 1]
)
def test_both_tails_are_right_to_the_last_place(bits: int) -> None:
    ours = float(gumbel_of_bits(np.array([bits], dtype=np.uint64))[0])
    with localcontext() as context:
        context.prec = 50
        exact = -(-(1 - (Decimal(bits) + Decimal("0.5")) / 2**64).ln()).ln()
    assert abs(ours - float(exact)) <= abs(float(exact)) * 2**-23
    assert ours == pytest.approx(sampling_reference.gumbel_of(bits), rel=2e-7)


def test_the_ends_of_the_noise_are_finite_and_a_larger_number_is_less_noise() -> None:
    bits = np.sort(np.random.default_rng(3).integers(0, 2**64 - 1, 10_000, dtype=np.uint64))
    bits[0], bits[-1] = 0, 2**64 - 1
    values = gumbel_of_bits(bits)
    assert values[0] == pytest.approx(45.06, abs=0.01)
    assert values[-1] == pytest.approx(-3.81, abs=0.01)
    assert (np.diff(values) <= 0).all()


def test_a_tokens_noise_does_not_depend_on_its_place_in_the_array() -> None:
    bits = np.random.default_rng(4).integers(0, 2**64 - 1, 500, dtype=np.uint64)
    whole = gumbel_of_bits(bits)
    for first in range(0, 40):
        np.testing.assert_array_equal(gumbel_of_bits(bits[first : first + 37]), whole[first : first + 37])
    np.testing.assert_array_equal([gumbel_of_bits(bits[place : place + 1])[0] for place in range(500)], whole)


@pytest.mark.parametrize("name", COORDINATES)
def test_noise_is_uniform_along_every_coordinate_and_its_neighbours_are_independent(name: str) -> None:
    count = 100_000
    spread = uniform(noise(count, **({"seed": 7, "position": 3} | {name: np.arange(count)})))
    counts = np.bincount((spread * 50).astype(int), minlength=50)
    assert ((counts - 2000) ** 2 / 2000).sum() < 112  # 99.9999 % of 49 degrees of freedom
    for distance in (1, 2, 15, 16, 17, 256):
        first, second = spread[:-distance], spread[distance:]
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.017  # 5 standard deviations
        cells = np.bincount((first * 16).astype(int) * 16 + (second * 16).astype(int), minlength=256)
        expected = len(first) / 256
        assert ((cells - expected) ** 2 / expected).sum() < 370  # 99.9999 % of 255


def test_the_tail_of_the_noise_has_its_share() -> None:
    """A number below 1/256 has lead 0: what is sampled hangs on how the rest of its bits lie."""
    gumbels = noise(1_000_000, seed=11, token=np.arange(1_000_000))
    for level in (5.0, 7.0, 9.0):
        share = 1 - np.exp(-np.exp(-level))
        assert abs((gumbels > level).sum() - 1e6 * share) < 5 * np.sqrt(1e6 * share)
    small = uniform(gumbels[gumbels > 5.5432]) * 256
    counts = np.bincount((small * 20).astype(int), minlength=20)
    expected = len(small) / 20
    assert ((counts - expected) ** 2 / expected).sum() < 70  # 99.9999 % of 19


def test_seeds_indexes_and_positions_do_not_stand_for_one_another() -> None:
    values = {
        float(noise(seed=seed, index=index, position=position, token=token)[0])
        for seed in (0, 1, 2**32, -1)
        for index in range(3)
        for position in range(20)
        for token in (0, 1, 16, 17)
    }
    assert len(values) == 4 * 3 * 20 * 4
