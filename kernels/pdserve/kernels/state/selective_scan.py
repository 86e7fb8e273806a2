"""The selective scan of Mamba 2: a matrix per head, which each token decays and adds to.

    S_t = a_t S_(t-1) + x_t b_t^T       y_t = S_t c_t

In a chunk with the products A_t of its decays up to t, and S_0 before it, all tokens at once:

    Y = A (C S_0^T) + M X               M_ij = (A_i / A_j) c_i . b_j  for j <= i
    S = A_n S_0 + sum_j (A_n / A_j) x_j b_j^T

Source: Dao and Gu 2024, Transformers are SSMs, section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.state.decay_products import ChunkDecays
from pdserve.kernels.state.recurrence import Recurrence

CHUNK = 128
"""Tokens at once."""


def scan_step(x: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences; all float32.

    x `[B, H, P]`, b and c `[B, H, N]`, decay (its logarithm) `[B, H]`, state `[B, H, P, N]` -> results `[B, H, P]` and the states
    after the token.
    """
    state = state * decay.exp()[..., None, None] + x.unsqueeze(-1) * b.unsqueeze(-2)
    return torch.matmul(state, c.unsqueeze(-1)).squeeze(-1), state


def scan_chunk(x: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence at once; all float32.

    x `[n, H, P]`, b and c `[n, H, N]`, decay (its logarithm) `[n, H]`, state `[H, P, N]` -> results `[n, H, P]` and the state after
    the last token.
    """
    x, b, c = (each.transpose(0, 1) for each in (x, b, c))
    decays = ChunkDecays.of(decay.t().unsqueeze(-1))
    [seen] = decays.products(b, c)
    found = decays.whole * torch.matmul(c, state.transpose(-1, -2)) + torch.matmul(seen, x)
    state = decays.whole[:, -1:] * state + torch.matmul(x.transpose(-1, -2), b * decays.left)
    return found.transpose(0, 1), state


SELECTIVE_SCAN = Recurrence(scan_step, scan_chunk, CHUNK, 0)
