"""One row's sampling by the words of docs/parameters.md: a sort, a loop over the tokens, float64, integers of Python.

Shares no code with the engine. Beside each token it gives the margin by which the token won, because two correct
implementations may differ where a margin is no larger than their rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_32, _64 = 1 << 32, 1 << 64


def philox(counter: Sequence[int], key: Sequence[int], rounds: int = 7) -> list[int]:
    """Philox4x32: four words of 32 bits from four and two."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high_0, low_0 = divmod(0xD2511F53 * c[0], _32)
        high_1, low_1 = divmod(0xCD9E8D57 * c[2], _32)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % _32, (k[1] + 0xBB67AE85) % _32]
    return c


def noise_bits(seed: int, index: int, position: int, token_id: int) -> int:
    """`h`, 64 bits."""
    key = (seed % _64 % _32, seed % _64 // _32)
    words = philox((token_id // 16, position, index, 0), key)
    lead = b"".join(word.to_bytes(4, "little") for word in words)[token_id % 16]
    low, high, _, _ = philox((token_id, position, index, 1), key)
    return lead * 2**56 + (high * _32 + low) // 256


def gumbel_of(bits: int) -> float:
    """In float64."""
    if bits < 2**63:
        return -math.log(-math.log1p(-(2 * bits + 1) / 2**65))
    return -math.log(-math.log((2 * (_64 - 1 - bits) + 1) / 2**65))


def gumbel(seed: int, index: int, position: int, token_id: int) -> float:
    return gumbel_of(noise_bits(seed, index, position, token_id))


@dataclass(frozen=True, slots=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def scaled(logits: Sequence[float], temperature: float) -> list[float]:
    highest = max(logits)
    return [(logit - highest) / temperature for logit in logits]


def kept(logits: Sequence[float], params: Params) -> tuple[list[int], float]:
    """Ids of the kept tokens, the most likely first; and how near the border is to lying elsewhere, as part of the mass.

    A border of min_p or top_k counts by the distance in y of the tokens on its two sides.
    """
    y = scaled(logits, params.temperature)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    left, margin = order, math.inf
    if params.min_p > 0:
        floor = math.log(params.min_p)
        left = [token for token in left if y[token] >= floor]
        margin = min(abs(y[token] - floor) for token in order)
    if params.top_k > 0 and params.top_k < len(left):
        margin = min(margin, y[left[params.top_k - 1]] - y[left[params.top_k]])
        left = left[: params.top_k]
    if params.top_p < 1:
        masses = [round(math.exp(y[token]) * 2**34) for token in left]
        total = sum(masses)
        wanted = params.top_p * total
        count, reached = 0, 0
        while reached < wanted:
            margin = min(margin, (wanted - reached) / total)
            reached += masses[count]
            count += 1
        margin = min(margin, (reached - wanted) / total)
        left = left[:count]
    return left, margin


@dataclass(frozen=True, slots=True)
class Sample:
    token_id: int
    lead: float
    """Difference of its sum and the next best one."""
    border: float
    """`kept`'s margin."""

    @property
    def margin(self) -> float:
        return min(self.lead, self.border)


def sample(logits: Sequence[float], params: Params, seed: int, index: int, position: int) -> Sample:
    """The token of one row. logits `[V]`, after every stage before the temperature; temperature 0 is greedy."""
    if params.temperature == 0:
        first, second = sorted(logits, reverse=True)[:2]
        return Sample(list(logits).index(first), first - second, math.inf)
    left, border = kept(logits, params)
    y = scaled(logits, params.temperature)
    # the noise is at most 45.06 and at least -3.82: the others cannot win
    left = [token for token in left if y[token] > -50]
    sums = sorted(((y[token] + gumbel(seed, index, position, token), -token) for token in left), reverse=True)
    lead = sums[0][0] - sums[1][0] if len(sums) > 1 else math.inf
    return Sample(-sums[0][1], lead, border)
