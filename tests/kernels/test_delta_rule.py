"""The gated delta rule in chunks and by token, against the recurrence in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pdserve.kernels.state.delta_rule import CHUNK, DELTA_RULE

NUM_HEADS, KEY_DIM, VALUE_DIM = 3, 8, 5


class Sequence(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    state: Tensor


def sequence(num_tokens: int, strength: float, num_decays: int, seed: int = 1) -> Sequence:
    """strength: mean of the decays' negative logarithms. num_decays: of a head."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    key = normal(num_tokens, NUM_HEADS, KEY_DIM)
    return Sequence(
        normal(num_tokens, NUM_HEADS, KEY_DIM),
        key / key.norm(dim=-1, keepdim=True),
        normal(num_tokens, NUM_HEADS, VALUE_DIM),
        -strength * torch.rand((num_tokens, NUM_HEADS, num_decays), generator=generator) * 2,
        torch.rand((num_tokens, NUM_HEADS), generator=generator),
        normal(NUM_HEADS, KEY_DIM, VALUE_DIM),
    )


def recurrence(given: Sequence) -> tuple[Tensor, Tensor]:
    query, key, value, decay, beta, state = (each.double() for each in given)
    found = []
    for q, k, v, a, b in zip(query, key, value, decay.exp(), beta, strict=True):
        state = a.unsqueeze(-1) * state
        error = b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, error)
        found.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(found), state


@pytest.mark.parametrize("num_decays", [1, KEY_DIM], ids=["per head", "per channel"])
@pytest.mark.parametrize("strength", [0.0, 0.05, 3.0, 80.0], ids=lambda strength: f"decay {strength}")
@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunks_are_the_recurrence(num_tokens: int, strength: float, num_decays: int) -> None:
    given = sequence(num_tokens, strength, num_decays)
    found, state = DELTA_RULE.in_chunks(given[:5], given.state)
    expected, last = recurrence(given)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state.double(), last, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_decays", [1, KEY_DIM], ids=["per head", "per channel"])
def test_a_sequence_may_be_cut_anywhere(num_decays: int) -> None:
    """A chunk, and then a token of each of two sequences at once."""
    both = [sequence(40, 0.3, num_decays, seed) for seed in (1, 2)]
    halves = [DELTA_RULE.in_chunks([each[:39] for each in given[:5]], given.state) for given in both]
    tokens = [torch.stack([given[place][39] for given in both]) for place in range(5)]
    found, states = DELTA_RULE.step(*tokens, torch.stack([state for _, state in halves]))
    for place, given in enumerate(both):
        expected, last = recurrence(given)
        torch.testing.assert_close(found[place].double(), expected[39], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(states[place].double(), last, atol=2e-5, rtol=2e-5)
