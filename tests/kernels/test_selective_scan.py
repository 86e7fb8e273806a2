"""The selective scans in chunks and by token, against the recurrence in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pdserve.kernels.state.selective_scan import CHUNK, COLUMN_BLOCK, COLUMN_CHUNK, SELECTIVE_SCAN, ColumnScan

NUM_HEADS, HEAD_DIM, STATE_SIZE = 3, 5, 8


class Sequence(NamedTuple):
    x: Tensor
    b: Tensor
    c: Tensor
    decay: Tensor
    state: Tensor


def sequence(num_tokens: int, strength: float, seed: int = 1) -> Sequence:
    """strength: mean of the decays' negative logarithms."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Sequence(
        normal(num_tokens, NUM_HEADS, HEAD_DIM),
        normal(num_tokens, NUM_HEADS, STATE_SIZE),
        normal(num_tokens, NUM_HEADS, STATE_SIZE),
        -strength * torch.rand((num_tokens, NUM_HEADS), generator=generator) * 2,
        normal(NUM_HEADS, HEAD_DIM, STATE_SIZE),
    )


def recurrence(given: Sequence) -> tuple[Tensor, Tensor]:
    x, b, c, decay, state = (each.double() for each in given)
    found = []
    for x_t, b_t, c_t, a_t in zip(x, b, c, decay.exp(), strict=True):
        state = a_t[:, None, None] * state + torch.einsum("hp,hn->hpn", x_t, b_t)
        found.append(torch.einsum("hpn,hn->hp", state, c_t))
    return torch.stack(found), state


@pytest.mark.parametrize("strength", [0.01, 0.05, 3.0, 80.0], ids=lambda strength: f"decay {strength}")
@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_chunks_are_the_recurrence(num_tokens: int, strength: float) -> None:
    given = sequence(num_tokens, strength)
    found, state = SELECTIVE_SCAN.in_chunks(given[:4], given.state)
    expected, last = recurrence(given)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(state.double(), last, atol=2e-4, rtol=2e-4)


def test_a_sequence_may_be_cut_anywhere() -> None:
    """A chunk, and then a token of each of two sequences at once."""
    both = [sequence(40, 0.3, seed) for seed in (1, 2)]
    halves = [SELECTIVE_SCAN.in_chunks([each[:39] for each in given[:4]], given.state) for given in both]
    tokens = [torch.stack([given[place][39] for given in both]) for place in range(4)]
    found, states = SELECTIVE_SCAN.step(*tokens, torch.stack([state for _, state in halves]))
    for place, given in enumerate(both):
        expected, last = recurrence(given)
        torch.testing.assert_close(found[place].double(), expected[39], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(states[place].double(), last, atol=2e-5, rtol=2e-5)


class Channels(NamedTuple):
    """Tokens and state of a scan with a decay per element, and its rates."""

    x: Tensor
    b: Tensor
    c: Tensor
    steps: Tensor
    state: Tensor
    rates: Tensor


def channels(num_tokens: int, strength: float, seed: int = 1) -> Channels:
    """strength: mean of the decays' negative logarithms in the first column; in the last they are 8 times as large."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rates = -torch.arange(1, STATE_SIZE + 1).expand(NUM_HEADS, HEAD_DIM, STATE_SIZE) * torch.rand(
        (NUM_HEADS, HEAD_DIM, 1), generator=generator
    )
    return Channels(
        normal(num_tokens, NUM_HEADS, HEAD_DIM),
        normal(num_tokens, 1, STATE_SIZE),
        normal(num_tokens, 1, STATE_SIZE),
        strength * torch.rand((num_tokens, NUM_HEADS, HEAD_DIM), generator=generator) * 4,
        normal(NUM_HEADS, HEAD_DIM, STATE_SIZE),
        rates,
    )


def recurrence_of_channels(given: Channels) -> tuple[Tensor, Tensor]:
    x, b, c, steps, state, rates = (each.double() for each in given)
    found = []
    for x_t, b_t, c_t, step_t in zip(x, b, c, steps, strict=True):
        state = (step_t[..., None] * rates).exp() * state + torch.einsum("hp,n->hpn", x_t, b_t[0])
        found.append(torch.einsum("hpn,n->hp", state, c_t[0]))
    return torch.stack(found), state


@pytest.mark.parametrize("strength", [0.01, 0.3, 80.0], ids=lambda strength: f"decay {strength}")
@pytest.mark.parametrize(
    "num_tokens",
    [1, 2, COLUMN_BLOCK, COLUMN_BLOCK + 1, COLUMN_CHUNK - 1, COLUMN_CHUNK, COLUMN_CHUNK + 1, 2 * COLUMN_CHUNK + 13],
)
def test_blocks_are_the_recurrence(num_tokens: int, strength: float) -> None:
    given = channels(num_tokens, strength)
    found, state = ColumnScan(given.rates).recurrence.in_chunks(given[:4], given.state)
    expected, last = recurrence_of_channels(given)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state.double(), last, atol=2e-5, rtol=2e-5)


def test_a_sequence_of_channels_may_be_cut_anywhere() -> None:
    """A chunk, and then a token of each of two sequences at once."""
    both = [channels(40, 0.3, seed) for seed in (1, 2)]
    both[1] = both[1]._replace(rates=both[0].rates)
    scan = ColumnScan(both[0].rates).recurrence
    halves = [scan.in_chunks([each[:39] for each in given[:4]], given.state) for given in both]
    tokens = [torch.stack([given[place][39] for given in both]) for place in range(4)]
    found, states = scan.step(*tokens, torch.stack([state for _, state in halves]))
    for place, given in enumerate(both):
        expected, last = recurrence_of_channels(given)
        torch.testing.assert_close(found[place].double(), expected[39], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(states[place].double(), last, atol=2e-5, rtol=2e-5)
