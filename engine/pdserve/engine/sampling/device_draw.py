"""Stages 7 to 9 of the sampler for logits on a device: the rules of `kept_tokens.py` and `token_draw.py`.

Arrays of the vocabulary's size stay on the device. Only the few tokens whose noise can decide are copied to the host, where the
same function computes their noise. Exponentials of the device may differ from the processor's in the last place, so a token at the
border of top_p may be kept on a device and not on a processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.arrays import FloatArray, IntArray
from pdserve.engine.sampling.kept_tokens import LOWEST, MASS_OF_HIGHEST, Cut
from pdserve.engine.sampling.seeded_uniform import TOKENS_PER_LEAD_CALL, gumbel
from pdserve.engine.sampling.token_draw import SLACK, NoiseRows, highest_sums

_KEY_BITS = 32
_LOW = 0xFFFFFFFF
_PHILOX_MULTIPLIERS, _PHILOX_WEYL, _PHILOX_ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 7


def most_likely(logits: Tensor) -> tuple[IntArray, FloatArray]:
    """`[N]` ids of the most likely tokens, the lowest of equal ones, and their logits. logits `[N, V]`."""
    best = logits.max(-1)
    return best.indices.cpu().numpy().copy(), best.values.cpu().numpy()


def draw(logits: Tensor, rows: IntArray, highest: FloatArray, cut: Cut, noise: NoiseRows) -> IntArray:
    """`[R]` token ids of these rows of the logits. logits `[N, V]`; highest `[R]`, finite."""
    device = logits.device
    logits = logits[torch.from_numpy(rows).to(device)]
    scaled = (logits - _column(highest, device)) / _column(cut.temperature, device)
    kept = _kept(logits, scaled, cut)
    has_no_lead = (_leads(noise, logits.shape[1], device) == 0) & kept
    pivot = scaled.masked_fill(~has_no_lead, -torch.inf).amax(-1, keepdim=True)
    candidates = (has_no_lead | (scaled >= pivot - SLACK)) & kept
    places = candidates.nonzero().cpu().numpy()
    of_row, token_ids = places[:, 0], places[:, 1]
    own = noise.of(of_row)
    sums = scaled[candidates].cpu().numpy() + gumbel(own.seeds, own.indexes, own.positions, token_ids)
    return token_ids[highest_sums(sums, of_row, len(rows))]


def _column(values: NDArray[Any], device: torch.device) -> Tensor:
    """`[R, 1]`"""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device).unsqueeze(-1)


def _kept(logits: Tensor, scaled: Tensor, cut: Cut) -> Tensor:
    """`[R, V]` bool."""
    device, vocab_size = logits.device, logits.shape[1]
    with np.errstate(divide="ignore"):
        floor = np.maximum(np.log(cut.min_p.astype(np.float64)).astype(np.float32), LOWEST)
    kept = scaled >= _column(floor, device)
    if (cut.top_k < vocab_size).any():
        kept &= _beginning(logits, kept.double(), _column(cut.top_k.astype(np.float64), device))
    if (cut.top_p < 1).any():
        masses = (scaled.exp() * MASS_OF_HIGHEST).round().double() * kept
        wanted = _column(cut.top_p.astype(np.float64), device) * masses.sum(-1, keepdim=True)
        kept &= _beginning(logits, masses, wanted) | _column(cut.top_p >= 1, device)
    return kept


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


def _leads(noise: NoiseRows, vocab_size: int, device: torch.device) -> Tensor:
    """`[R, V]`; Philox4x32-7 in 64-bit integers, whose products wrap as unsigned ones do."""
    calls = -(-vocab_size // TOKENS_PER_LEAD_CALL)
    seeds = _column(noise.seeds, device)
    words = [
        torch.arange(calls, device=device).expand(len(noise.seeds), calls),
        _column(noise.positions, device),
        _column(noise.indexes, device),
        torch.zeros_like(seeds),
    ]
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
    leads = [(word.expand(-1, calls) >> shift) & 0xFF for word in words for shift in (0, 8, 16, 24)]
    return torch.stack(leads, dim=-1).flatten(1)[:, :vocab_size]
