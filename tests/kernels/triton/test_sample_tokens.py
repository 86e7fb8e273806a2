"""Sampling in kernels draws the tokens that the engine draws on a CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pdserve.engine.sampling.sampler import Sampler, SamplingMetadata
from pdserve.engine.sampling.seeded_uniform import gumbel, gumbel_of_bits
from pdserve.kernels.sampled_rows import PARAMETERS, PackedRows, SamplingStages, packed
from pdserve.kernels.triton import kept_border
from pdserve.kernels.triton.launch_configs import TABLE, LaunchConfigs, launch_configs
from pdserve.kernels.triton.layer_ops import TritonLayerOps
from pdserve.kernels.triton.noise import exact_gumbel, lead_words, noise_bits, rough_gumbel
from pdserve.kernels.triton.sample_tokens import SamplingLaunches, sample_tokens
from tests.support.kernels.compiled_kernels import recorded_launches
from tests.support.kernels.sampled_rows import SAMPLING_FIELDS, coordinates, metadata, rows_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ops(**configs: Any) -> TritonLayerOps:
    return TritonLayerOps(DEVICE, replace(launch_configs(DEVICE), **configs))


def drawn(
    logits: torch.Tensor, asked: SamplingMetadata, **configs: Any
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids, and the highest logit of each row."""
    rows = PackedRows(torch.from_numpy(packed(asked)).to(DEVICE), SamplingStages.of(asked, logits.shape[1]))
    token_ids, highest = ops(**configs).sample(logits, rows).cpu().numpy()
    return token_ids, highest.astype(np.int32).view(np.float32)


def mixed(vocab_size: int, first: int = 0) -> SamplingMetadata:
    """A row for each of `SAMPLING_FIELDS`. first: where the rows' coordinates begin."""
    asked = metadata(len(SAMPLING_FIELDS), vocab_size)
    for row, given in enumerate(SAMPLING_FIELDS):
        for name, value in given.items():
            getattr(asked, name)[row] = value
    noise = coordinates(len(SAMPLING_FIELDS), first)
    return replace(asked, seeds=noise.seeds, indexes=noise.indexes, positions=noise.positions)


def check(logits: NDArray[np.float32], asked: SamplingMetadata, **configs: Any) -> None:
    here = Sampler()(torch.from_numpy(logits.copy()), asked).sampled_token_ids
    # rows lie apart, and what lies between them is NaN
    held = torch.full((logits.shape[0], logits.shape[1] + 5), torch.nan)
    held[:, : logits.shape[1]] = torch.from_numpy(logits)
    there, highest = drawn(held.to(DEVICE)[:, : logits.shape[1]], asked, **configs)
    np.testing.assert_array_equal(highest, logits.max(-1))
    np.testing.assert_array_equal(there, here)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["flat", "peaked", "steep", "equal", "two", "one", "masked"])
def test_rows_of_every_kind(kind: str) -> None:
    check(rows_of(kind, len(SAMPLING_FIELDS), 500), mixed(500))


@pytest.mark.few(1)
@pytest.mark.parametrize("vocab_size", [1, 17, 257])
def test_small_vocabularies(vocab_size: int) -> None:
    check(rows_of("flat", len(SAMPLING_FIELDS), vocab_size), mixed(vocab_size))


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [16, 1024])
def test_ties_are_cut_by_their_ids(limit: int) -> None:
    """As logits in bfloat16 have them; among them both zeros, which are equal."""
    logits = torch.from_numpy(rows_of("flat", len(SAMPLING_FIELDS), 500)).bfloat16().mul_(4).round_().float().numpy()
    logits[:, ::50], logits[:, 1::50] = 0.0, -0.0
    check(logits, mixed(500), sample_list=limit)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["flat", "masked"])
@pytest.mark.parametrize("short", ["sample_hits", "sample_list"])
def test_lists_that_are_too_short_change_nothing(kind: str, short: str) -> None:
    check(rows_of(kind, len(SAMPLING_FIELDS), 500), mixed(500), **{short: 16})


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a compiled kernel has no function to take away")
@pytest.mark.parametrize("kind", ["flat", "peaked", pytest.param("steep", marks=pytest.mark.slow)])
def test_no_row_is_searched_whole_with_the_sizes_of_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals of pivots are right, and their lists long enough, also where many logits are equal."""
    monkeypatch.setattr(kept_border, "weight_of_row", None)
    sizes = {
        field.name: getattr(TABLE["sm_90"], field.name) for field in fields(LaunchConfigs) if "sample" in field.name
    }
    sizes["sample_pivot_tile"] = sizes["sample_tile"]  # which changes no pivot, and takes the interpreter less time
    logits = rows_of(kind, len(SAMPLING_FIELDS), 12_000)
    check(logits, mixed(12_000), **sizes)
    check(torch.from_numpy(logits).bfloat16().float().numpy(), mixed(12_000, 100), **sizes)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("spread", "given", "vocab_size", "seed"),
    [
        pytest.param(4.0, {}, 65_536, 0, id="random"),
        pytest.param(1.0, {"min_p": 0.02}, 65_536, 0, id="min_p"),
        pytest.param(1.0, {"top_p": 0.9}, 128_256, 77, id="top_p of flat logits"),
        pytest.param(4.0, {"top_k": 50, "top_p": 0.9}, 128_256, 31, id="top_k and top_p of peaked logits"),
    ],
)
def test_lists_hold_what_rows_of_many_tokens_need(
    spread: float, given: dict[str, Any], vocab_size: int, seed: int
) -> None:
    """One row, so each part is one tile that knows nothing of the others, and borders near a pivot, and far from each other."""
    logits = (np.random.default_rng(seed).normal(size=(1, vocab_size)) * spread).astype(np.float32)
    asked = metadata(1, vocab_size, **given)
    configs = TABLE["sm_90"] if DEVICE.type == "cpu" else launch_configs(DEVICE)
    if DEVICE.type == "cpu" and "top_p" in given:  # large tiles change no pivot and take the interpreter less time
        configs = replace(configs, sample_tile=8192, sample_pivot_tile=8192)
    stages = SamplingStages.of(asked, vocab_size)
    rows = PackedRows(torch.from_numpy(packed(asked)).to(DEVICE), stages)
    launches = SamplingLaunches(torch.from_numpy(logits).to(DEVICE), rows, configs)
    token_ids = launches.run()[0].cpu().numpy()
    hits, between = launches.counts[:, 0].tolist()
    assert hits <= configs.sample_hits // 2
    assert between <= configs.sample_list // 2
    np.testing.assert_array_equal(token_ids, Sampler()(torch.from_numpy(logits), asked).sampled_token_ids)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a compiled kernel keeps its constants")
def test_tokens_near_the_border_of_top_p_are_decided_by_exact_masses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound of the error of masses so large that such tokens win."""
    monkeypatch.setattr(kept_border, "_ROUNDING", tl.constexpr(0.1))
    check(rows_of("flat", len(SAMPLING_FIELDS), 500), mixed(500), sample_list=512)


@pytest.mark.few(1)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_lowest_logit_is_the_last_whose_y_is_not_too_low(scale: float) -> None:
    """Among logits that differ in the last place, above and below zero."""
    asked = metadata(4, 300, min_p=0.25, temperature=scale)
    logits = np.empty((4, 300), np.float32)
    for row, highest in enumerate((0.0, scale, 1.4 * scale, -5e3 * scale)):
        border = np.float32(highest + np.log(0.25) * scale)
        logits[row, 0] = highest
        for token in range(150, 0, -1):
            logits[row, token] = border = np.nextafter(border, np.float32(-np.inf))
        border = np.float32(highest + np.log(0.25) * scale)
        for token in range(150, 300):
            logits[row, token] = border = np.nextafter(border, np.float32(np.inf))
    for first in range(0, 40, 4):
        noise = coordinates(4, first)
        check(logits, replace(asked, seeds=noise.seeds, indexes=noise.indexes, positions=noise.positions))


@pytest.mark.parametrize(
    ("given", "kernels"),
    [
        ({"temperature": 0.0}, ["scan_rows", "choose"]),
        ({}, ["scan_rows", "choose"]),
        ({"min_p": 0.1}, ["scan_rows", "list_kept", "choose"]),
        ({"top_k": 9}, ["scan_rows", *["weigh_pivots"] * 3, "list_kept", "choose"]),
        ({"top_p": 0.9}, ["scan_rows", *["weigh_pivots"] * 3, "list_kept", "choose", "weigh_exactly", "choose_again"]),
    ],
    ids=str,
)
def test_launches(given: dict[str, Any], kernels: list[str]) -> None:
    """And their grids depend on shapes alone, as a graph needs it."""
    with recorded_launches() as launches:
        for count in (1, 3):
            stages = SamplingStages.of(metadata(count, 500, **given), 500)
            parameters = torch.empty(PARAMETERS, count, dtype=torch.int64, device="meta")
            sample_tokens(torch.empty(count, 500, device="meta"), PackedRows(parameters, stages), TABLE["interpreter"])
    assert [launch.kernel.__name__ for launch in launches] == kernels * 2
    grids = [[launch.grid for launch in launches[first : first + len(kernels)]] for first in (0, len(kernels))]
    for rows, found in zip((1, 3), grids, strict=True):
        assert found == [(rows,) if "choose" in name else (rows, 2) for name in kernels]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_many_seeds(first: int) -> None:
    check(rows_of("peaked", len(SAMPLING_FIELDS), 2000), mixed(2000, first))


@pytest.mark.few(1)
@pytest.mark.parametrize("programs", [1, 10_000])
def test_the_number_of_parts_changes_nothing(programs: int) -> None:
    """One part per row, and a part per tile."""
    check(rows_of("peaked", len(SAMPLING_FIELDS), 600), mixed(600), sample_programs=programs)


def test_rows_without_a_distribution_get_their_most_likely_token() -> None:
    logits = rows_of("flat", 4, 300)
    logits[0, 123], logits[1] = np.inf, -np.inf
    logits[2, 40], logits[2, 200] = np.inf, np.inf
    logits[3, 77] = np.nan
    sampled, highest = drawn(torch.from_numpy(logits).to(DEVICE), metadata(4, 300, top_p=0.9, top_k=50))
    assert sampled[:3].tolist() == [123, 0, 40]
    assert highest[:3].tolist() == [np.inf, -np.inf, np.inf]
    assert 0 <= sampled[3] < 300


def test_no_rows_and_rows_that_do_not_fit() -> None:
    sampled, highest = drawn(torch.zeros(0, 300, device=DEVICE), metadata(0, 300))
    assert sampled.shape == highest.shape == (0,)
    with pytest.raises(ValueError, match="for 2 rows"):
        drawn(torch.zeros(3, 300, device=DEVICE), metadata(2, 300))
    with pytest.raises(ValueError, match="float16"):
        drawn(torch.zeros(2, 300, dtype=torch.float16, device=DEVICE), metadata(2, 300))


@triton.jit
def noise_of_tokens(coordinates, bits, leads, V, TILE: tl.constexpr):
    row, first = tl.program_id(0), tl.program_id(1) * TILE
    seed, index, position = (
        tl.load(coordinates + row * 3),
        tl.load(coordinates + row * 3 + 1),
        tl.load(coordinates + row * 3 + 2),
    )
    at = first + tl.arange(0, TILE)
    found = noise_bits(at, seed, index, position)
    tl.store(bits + row * V + at, found.to(tl.int64, bitcast=True), mask=at < V)
    words = lead_words(first, seed, index, position, TILE // 4)
    lead = (words[:, None] >> (tl.arange(0, 4)[None, :] * 8).to(tl.uint32)) & 0xFF
    tl.store(leads + row * V + at, tl.reshape(lead, (TILE,)).to(tl.int64), mask=at < V)


@triton.jit
def gumbels_of_bits(bits, exact, rough, count, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    held = tl.load(bits + at, mask=at < count, other=0).to(tl.uint64, bitcast=True)
    tl.store(exact + at, exact_gumbel(held), mask=at < count)
    tl.store(rough + at, rough_gumbel(held), mask=at < count)


def gumbels(bits: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Exact and rough."""
    exact, rough = torch.empty(2, len(bits), device=DEVICE)
    held = torch.from_numpy(bits.view(np.int64)).to(DEVICE)
    gumbels_of_bits[(triton.cdiv(len(bits), 4096),)](held, exact, rough, len(bits), TILE=4096)
    return exact.cpu().numpy(), rough.cpu().numpy()


def test_noise_is_the_processors_bit_by_bit() -> None:
    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32), 0x0123456789ABCDEF])
    indexes, positions = np.arange(8) % 4, np.array([0, 1, 2**32 - 1, 2**31, 5, 6, 7, 70_000])
    given = torch.from_numpy(np.stack([seeds, indexes, positions], 1).copy()).to(DEVICE)
    bits, first_bytes = torch.empty(2, 8, 1000, dtype=torch.int64, device=DEVICE)
    noise_of_tokens[(8, 4)](given, bits, first_bytes, 1000, TILE=256)
    token_ids = np.arange(1000)
    for row, held in enumerate(bits.cpu().numpy().view(np.uint64)):
        seed, index, position = (np.full(1000, of[row]) for of in (seeds, indexes, positions))
        expected = gumbel(seed, index, position, token_ids)
        np.testing.assert_array_equal(gumbel_of_bits(held), expected)
        np.testing.assert_array_equal(first_bytes[row].cpu().numpy(), held >> np.uint64(56))


def test_logarithms_of_the_noise_differ_by_a_bound() -> None:
    """Exact: one unit in the last place, in fewer than 1 of 10,000 numbers here. Rough: a tenth of the slack."""
    random = np.random.default_rng(4)
    ends = np.array([0, 1, 2, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
    small = random.integers(0, 2**40, 2000, np.uint64)
    bits = np.concatenate([ends, small, ~small, random.integers(0, 2**64 - 1, 30_000, np.uint64, endpoint=True)])
    exact, rough = gumbels(bits)
    expected = gumbel_of_bits(bits)
    off = exact != expected
    assert off.mean() < 1e-4
    np.testing.assert_array_max_ulp(exact, expected, 1)
    np.testing.assert_allclose(rough, expected, atol=1e-4, rtol=0)


def test_tiles_hold_whole_calls_of_the_generator() -> None:
    for configs in TABLE.values():
        assert configs.sample_pivot_tile % 16 == 0
        assert configs.sample_tile % configs.sample_pivot_tile == 0
