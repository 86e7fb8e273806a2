"""The selective scan in chunks and by token, against the recurrence in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pdserve.kernels.state.selective_scan import CHUNK, SELECTIVE_SCAN

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
