"""The selective scan: a matrix per head, which each token decays and adds to.

    S_t = a_t S_(t-1) + x_t b_t^T       y_t = S_t c_t       a_t = exp(step_t rate)

In Mamba 2 step, rate and decay are one number per head. In a chunk with the products A_t of its decays up to t, and S_0 before it,
all tokens at once:

    Y = A (C S_0^T) + M X               M_ij = (A_i / A_j) c_i . b_j  for j <= i
    S = A_n S_0 + sum_j (A_n / A_j) x_j b_j^T

Source: Dao and Gu 2024, Transformers are SSMs, section 6.

In Mamba there is a step per row of the matrix, and a rate, and so a decay, per element; M would be a matrix per row and column. A
chunk is therefore cut into blocks, and the first token of each is taken at once, then the second, and so on: once from zeros, which
gives what each block adds to the state before it, and once from the state before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.state.decay_products import ChunkDecays
from pdserve.kernels.state.recurrence import Recurrence

CHUNK = 128
"""Tokens at once."""
ELEMENT_CHUNK, ELEMENT_BLOCK = 32, 8
"""The same where decays are those of elements, and tokens of a block."""


def scan_step(x: Tensor, b: Tensor, c: Tensor, rates: Tensor, steps: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences; all float32.

    x `[B, H, P]`, b and c `[B, H, N]`, rates (negative) `[B, H, 1, 1]` and steps `[B, H, 1]`, or `[B, H, P, N]` and `[B, H, P]`,
    state `[B, H, P, N]` -> results `[B, H, P]` and the states after the token.
    """
    state = torch.addcmul(x.unsqueeze(-1) * b.unsqueeze(-2), _decays(rates, steps), state)
    return _read(state, c), state


def scan_chunk(x: Tensor, b: Tensor, c: Tensor, rates: Tensor, steps: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence at once; all float32.

    x `[n, H, P]`, b and c `[n, H, N]`, rates (negative) `[n, H, 1, 1]` and steps `[n, H, 1]`, or `[n, H, P, N]` and `[n, H, P]`,
    state `[H, P, N]` -> results `[n, H, P]` and the state after the last token. All tokens have the rates of the first.
    """
    if rates.shape[2:].numel() > 1:
        return _BY_ELEMENT.in_chunks((x, b, c, rates, steps), state)
    x, b, c, steps = (each.transpose(0, 1) for each in (x, b, c, steps))
    decays = ChunkDecays.of(steps * rates[0])
    [seen] = decays.products(b, c)
    found = decays.whole * torch.matmul(c, state.transpose(-1, -2)) + torch.matmul(seen, x)
    state = decays.whole[:, -1:] * state + torch.matmul(x.transpose(-1, -2), b * decays.left)
    return found.transpose(0, 1), state


def _element_chunk(
    x: Tensor, b: Tensor, c: Tensor, rates: Tensor, steps: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`scan_chunk` with rates of elements."""
    num_tokens, length = len(x), min(len(x), ELEMENT_BLOCK)
    num_blocks = -(-num_tokens // length)

    def in_blocks(tokens: Tensor) -> Tensor:
        """`[n, ...]` -> `[blocks, length, ...]`: steps of nothing by nothing at the end leave the state as it is."""
        missing = num_blocks * length - num_tokens
        if missing:
            tokens = torch.cat((tokens, tokens.new_zeros((missing, *tokens.shape[1:]))))
        return tokens.reshape(num_blocks, length, *tokens.shape[1:])

    x, b, c, steps = (in_blocks(each) for each in (x, b, c, steps))
    decays, added = _decays(rates[0], steps), x.unsqueeze(-1) * b.unsqueeze(-2)
    before = [state]
    if num_blocks > 1:
        ends = added[:-1, 0]
        for place in range(1, length):
            ends = torch.addcmul(added[:-1, place], decays[:-1, place], ends)
        for end, decay in zip(ends, _decays(rates[0], steps[:-1].sum(1)), strict=True):
            before.append(torch.addcmul(end, decay, before[-1]))
    states, found = torch.stack(before), torch.empty_like(x)
    for place in range(length):
        states = torch.addcmul(added[:, place], decays[:, place], states)
        found[:, place] = _read(states, c[:, place])
    return found.flatten(0, 1)[:num_tokens], states[-1]


def _decays(rates: Tensor, steps: Tensor) -> Tensor:
    """`[..., H, 1, 1]` and `[..., H, 1]`, or `[..., H, P, N]` and `[..., H, P]` -> of the first's shape."""
    return (steps.unsqueeze(-1) * rates).exp_()


def _read(state: Tensor, c: Tensor) -> Tensor:
    """`[..., H, P, N]` and `[..., H, N]` -> `[..., H, P]`"""
    return torch.matmul(state, c.unsqueeze(-1)).squeeze(-1)


SELECTIVE_SCAN = Recurrence(scan_step, scan_chunk, CHUNK, 0)
_BY_ELEMENT = Recurrence(scan_step, _element_chunk, ELEMENT_CHUNK, 0)
