"""Stages 7 to 9 of the sampler for logits on a device: the rules of `kept_tokens.py` and `token_draw.py`, in torch operations.

For devices without Triton's kernels. Nothing is read back: noise is computed for every token of the vocabulary, for some rows at a
time. Exponentials and logarithms of the device may differ from the CPU's in the last place, so a token at the border of
top_p may be kept on a device and not on a CPU, and two sums that are equal but for that place may be decided otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.sampling.kept_tokens import MASS_OF_HIGHEST
from pdserve.engine.sampling.seeded_uniform import TOKENS_PER_LEAD_CALL
from pdserve.kernels.sampled_rows import PackedRows, SamplingStages

_KEY_BITS = 32
_LOW = 0xFFFFFFFF
_PHILOX_MULTIPLIERS, _PHILOX_WEYL, _PHILOX_ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 7
_AT_ONCE = 1 << 22
"""Logits whose noise is computed at once: a dozen arrays of 8 bytes per logit are in memory then."""


def sample_tokens(logits: Tensor, rows: PackedRows) -> Tensor:
    """See `LayerOps.sample`."""
    best = logits.max(-1)  # of equal ones the first
    tokens = best.indices
    if rows.stages.is_random and len(logits):
        at_once = max(1, _AT_ONCE // logits.shape[1])
        blocks = [slice(first, first + at_once) for first in range(0, len(logits), at_once)]
        parts = [_draw(logits[block], best.values[block], rows.parameters[:, block], rows.stages) for block in blocks]
        # a row whose highest logit is NaN or infinite has no distribution, so it gets the most likely token
        is_drawn = (_floats(rows.parameters[4]) > 0) & best.values.isfinite()
        tokens = torch.where(is_drawn, torch.cat(parts), tokens)
    return torch.stack((tokens, best.values.view(torch.int32).long()))


def _floats(numbers: Tensor) -> Tensor:
    """int64 numbers whose low half is a float32."""
    return numbers.to(torch.int32).view(torch.float32)


def _draw(logits: Tensor, highest: Tensor, parameters: Tensor, stages: SamplingStages) -> Tensor:
    """`[R]` token ids. logits `[R, V]`, highest `[R]`, parameters `[PARAMETERS, R]`."""
    temperature = _floats(parameters[4])
    scaled = (logits - highest.unsqueeze(-1)) / torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
    kept = scaled >= _floats(parameters[5]).unsqueeze(-1)
    if stages.has_top_k:
        kept &= _beginning(logits, kept.double(), parameters[3].double().unsqueeze(-1))
    if stages.has_top_p:
        top_p = parameters[6].view(torch.float64).unsqueeze(-1)
        masses = (scaled.exp() * MASS_OF_HIGHEST).round().double() * kept
        kept &= _beginning(logits, masses, top_p * masses.sum(-1, keepdim=True)) | (top_p >= 1)
    sums = scaled + _gumbel(parameters, logits.shape[1])
    return torch.where(kept, sums, -torch.inf).max(-1).indices


def _beginning(logits: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """`[R, V]` bool: the shortest beginning whose weights reach `wanted`, or all tokens if none does.

    weights `[R, V]`, whole numbers in float64; wanted `[R, 1]`, above 0.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    border = torch.full_like(wanted, -(1 << (_KEY_BITS - 1)), dtype=torch.int64)
    for bit in reversed(range(_KEY_BITS)):
        trial = border + (1 << bit)
        reaches = torch.where(keys >= trial, weights, 0.0).sum(-1, keepdim=True) >= wanted
        border = torch.where(reaches, trial, border)
    missing = wanted - torch.where(keys > border, weights, 0.0).sum(-1, keepdim=True)
    equal = keys == border
    return (keys > border) | (equal & ((equal.cumsum(-1) - 1) * weights < missing))


def _gumbel(parameters: Tensor, vocab_size: int) -> Tensor:
    """`[R, V]` float32: the noise of `seeded_uniform.py`, whose letters are used here."""
    lead = _leads(parameters, vocab_size)
    w0, w1 = _philox(parameters, torch.arange(vocab_size, device=parameters.device), 1)[:2]
    h = (lead << 56) | (w1 << 24) | (w0 >> 8)  # 64 bits; from 2^63 on the number is negative
    is_upper = h < 0
    small = (torch.where(is_upper, ~h, h).double() + 0.5) * 2.0**-64
    return (-torch.log(-torch.where(is_upper, torch.log(small), torch.log1p(-small)))).float()


def _leads(parameters: Tensor, vocab_size: int) -> Tensor:
    """`[R, V]` int64, each 0 to 255."""
    calls = -(-vocab_size // TOKENS_PER_LEAD_CALL)
    words = _philox(parameters, torch.arange(calls, device=parameters.device), 0)
    leads = [(word.expand(-1, calls) >> shift) & 0xFF for word in words for shift in (0, 8, 16, 24)]
    return torch.stack(leads, dim=-1).flatten(1)[:, :vocab_size]


def _philox(parameters: Tensor, counters: Tensor, stream: int) -> list[Tensor]:
    """The four words of Philox4x32-7 for each row and counter `[K]`, `[R, K]` each, in 64-bit integers, whose products wrap as
    unsigned ones do."""
    seeds, indexes, positions = (parameters[number].unsqueeze(-1) for number in range(3))
    words = [counters.expand(len(seeds), -1), positions & _LOW, indexes & _LOW, torch.full_like(seeds, stream)]
    keys = [seeds & _LOW, (seeds >> 32) & _LOW]
    for _ in range(_PHILOX_ROUNDS):
        first, second = words[0] * _PHILOX_MULTIPLIERS[0], words[2] * _PHILOX_MULTIPLIERS[1]
        words = [
            ((second >> 32) & _LOW) ^ words[1] ^ keys[0],
            second & _LOW,
            ((first >> 32) & _LOW) ^ words[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(key + weyl) & _LOW for key, weyl in zip(keys, _PHILOX_WEYL, strict=True)]
    return words
