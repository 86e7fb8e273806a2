"""The selective scan in chunks and by token, against the recurrence in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pdserve.kernels.state.selective_scan import CHUNK, ELEMENT_BLOCK, ELEMENT_CHUNK, SELECTIVE_SCAN

NUM_HEADS, HEAD_DIM, STATE_SIZE = 3, 5, 8


class Sequence(NamedTuple):
    x: Tensor
    b: Tensor
    c: Tensor
    rates: Tensor
    steps: Tensor
    state: Tensor


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def sequence(num_tokens: int, strength: float, seed: int = 1) -> Sequence:
    """With a decay per head. strength: mean of the decays' negative logarithms."""
    generator = torch.Generator().manual_seed(seed)
    rates = -torch.arange(1.0, NUM_HEADS + 1).view(-1, 1, 1) / NUM_HEADS
    return Sequence(
        normal(generator, num_tokens, NUM_HEADS, HEAD_DIM),
        normal(generator, num_tokens, NUM_HEADS, STATE_SIZE),
        normal(generator, num_tokens, NUM_HEADS, STATE_SIZE),
        rates.expand(num_tokens, -1, -1, -1),
        strength * torch.rand((num_tokens, NUM_HEADS, 1), generator=generator) * 3,
        normal(generator, NUM_HEADS, HEAD_DIM, STATE_SIZE),
    )


def sequence_of_elements(num_tokens: int, strength: float, seed: int = 1) -> Sequence:
    """With a decay per element. strength: mean of the decays' negative logarithms in the first column; in the last they are 8 times
    as large."""
    generator = torch.Generator().manual_seed(seed)
    # the same for all seeds
    rates = -torch.arange(1, STATE_SIZE + 1) * torch.linspace(0.1, 0.9, NUM_HEADS * HEAD_DIM).view(
        NUM_HEADS, HEAD_DIM, 1
    )
    return Sequence(
        normal(generator, num_tokens, NUM_HEADS, HEAD_DIM),
        normal(generator, num_tokens, 1, STATE_SIZE).expand(-1, NUM_HEADS, -1),
        normal(generator, num_tokens, 1, STATE_SIZE).expand(-1, NUM_HEADS, -1),
        rates.expand(num_tokens, -1, -1, -1),
        strength * torch.rand((num_tokens, NUM_HEADS, HEAD_DIM), generator=generator) * 4,
        normal(generator, NUM_HEADS, HEAD_DIM, STATE_SIZE),
    )


MAKE = {"a decay per head": sequence, "per element": sequence_of_elements}
with_both = pytest.mark.parametrize("make", MAKE.values(), ids=list(MAKE))


def recurrence(given: Sequence) -> tuple[Tensor, Tensor]:
    *tokens, state = (each.double() for each in given)
    found = []
    for x, b, c, rates, steps in zip(*tokens, strict=True):
        state = (steps.unsqueeze(-1) * rates).exp() * state + torch.einsum("hp,hn->hpn", x, b)
        found.append(torch.einsum("hpn,hn->hp", state, c))
    return torch.stack(found), state


@with_both
@pytest.mark.parametrize("strength", [0.01, 0.3, 3.0, 80.0], ids=lambda strength: f"decay {strength}")
@pytest.mark.parametrize(
    "num_tokens",
    [
        1, 2, ELEMENT_BLOCK, ELEMENT_BLOCK + 1, ELEMENT_CHUNK - 1, ELEMENT_CHUNK, ELEMENT_CHUNK + 1, 2 * ELEMENT_CHUNK + 13,
        CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7,
    ],
)  # fmt: skip
def test_chunks_are_the_recurrence(make: Callable[[int, float], Sequence], num_tokens: int, strength: float) -> None:
    given = make(num_tokens, strength)
    found, state = SELECTIVE_SCAN.in_chunks(given[:5], given.state)
    expected, last = recurrence(given)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(state.double(), last, atol=2e-4, rtol=2e-4)


@with_both
def test_a_sequence_may_be_cut_anywhere(make: Callable[[int, float, int], Sequence]) -> None:
    """A chunk, and then a token of each of two sequences at once."""
    both = [make(40, 0.3, seed) for seed in (1, 2)]
    halves = [SELECTIVE_SCAN.in_chunks([each[:39] for each in given[:5]], given.state) for given in both]
    tokens = [torch.stack([given[place][39] for given in both]) for place in range(5)]
    found, states = SELECTIVE_SCAN.step(*tokens, torch.stack([state for _, state in halves]))
    for place, given in enumerate(both):
        expected, last = recurrence(given)
        torch.testing.assert_close(found[place].double(), expected[39], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(states[place].double(), last, atol=2e-5, rtol=2e-5)
