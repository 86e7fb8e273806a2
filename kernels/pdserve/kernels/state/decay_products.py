"""Products of the decays of a chunk's tokens."""

from __future__ import annotations

from torch import Tensor


def decay_products(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """decay (its logarithm) `[H, n]` float32 -> three products for each head, all float32.

    `[H, n, 1]` from the chunk's first token to each token i; `[H, n, n]` after token j up to i, zero for j > i; `[H, n, 1]` after
    each token j up to the last.
    """
    # differences of long sums: in float32 they would lose what a strong decay leaves of the near tokens
    sums = decay.double().cumsum(-1)
    # of pairs with j > i, where the exponent would be positive, nothing is used
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).float().tril().exp().tril()
    left = (sums[:, -1:] - sums).float().exp().unsqueeze(-1)
    return sums.float().exp().unsqueeze(-1), between, left
