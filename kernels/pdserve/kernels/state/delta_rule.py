"""The gated delta rule: a matrix per head, which each token decays and corrects towards its value.

    S_t = a_t S_(t-1) + k_t u_t^T       u_t = b_t (v_t - (a_t S_(t-1))^T k_t)       o_t = S_t^T q_t

A decay a is one number per head, or one per row of its matrix, that is per channel of its keys. In a chunk with the products A_t of
its decays up to t, and S_0 before it, the u solve a triangular system, for all tokens at once:

    (1 + L) U = b (V - (A K) S_0)       L_ij = b_i k_i . (A_i / A_j) k_j  for j < i
    O = (A Q) S_0 + M U                 M_ij = q_i . (A_i / A_j) k_j  for j <= i
    S = A_n S_0 + sum_j (A_n / A_j) k_j u_j^T

Sources: Yang et al. 2024, Gated Delta Networks, section 3; Kimi Team 2025, Kimi Linear, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.state.decay_products import ChunkDecays
from pdserve.kernels.state.recurrence import Recurrence

CHUNK = 64
"""Tokens at once: the system has as many rows."""


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences; all float32.

    query, key `[B, Hv, Dk]`, value `[B, Hv, Dv]`, decay (its logarithm) `[B, Hv, 1]` or `[B, Hv, Dk]`, beta `[B, Hv]`, state
    `[B, Hv, Dk, Dv]` -> results `[B, Hv, Dv]` and the states after the token.
    """
    state = state * decay.exp().unsqueeze(-1)
    found = torch.matmul(key.unsqueeze(-2), state).squeeze(-2)
    update = (value - found) * beta.unsqueeze(-1)
    state = state + key.unsqueeze(-1) * update.unsqueeze(-2)
    return torch.matmul(query.unsqueeze(-2), state).squeeze(-2), state


def delta_chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence at once; all float32.

    query, key `[n, Hv, Dk]`, value `[n, Hv, Dv]`, decay (its logarithm) `[n, Hv, 1]` or `[n, Hv, Dk]`, beta `[n, Hv]`, state
    `[Hv, Dk, Dv]` -> results `[n, Hv, Dv]` and the state after the last token.
    """
    query, key, value, decay = (each.transpose(0, 1) for each in (query, key, value, decay))
    decays, beta = ChunkDecays.of(decay), beta.t().unsqueeze(-1)
    pairs, seen = decays.products(key, key, query)
    known = (value - torch.matmul(key * decays.whole, state)) * beta
    update = torch.linalg.solve_triangular(pairs * beta, known, upper=False, unitriangular=True)
    found = torch.matmul(query * decays.whole, state) + torch.matmul(seen, update)
    state = decays.whole[:, -1:].transpose(-1, -2) * state + torch.matmul((key * decays.left).transpose(-1, -2), update)
    return found.transpose(0, 1), state


DELTA_RULE = Recurrence(delta_step, delta_chunk, CHUNK, 2)
