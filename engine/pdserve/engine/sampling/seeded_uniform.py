"""The noise of sampling: a Gumbel number per (seed, sequence index, output position, token id), without generator state.

Preemption, batching, migration and the prefill/decode split therefore change no noise (I5).

The formula, which GPU kernels share; all integers are unsigned, `philox` is Philox4x32-7:

    key      (seed mod 2^32, seed div 2^32), the seed as 64 bits of two's complement
    lead     byte b of the 16 that philox(counter = (token id div 16, position, index, 0), key) gives, b = token id mod 16:
             bits 8 (b mod 4) to 8 (b mod 4) + 7 of word b div 4, bits and words counted from 0
    tail     words w0 and w1 of philox(counter = (token id, position, index, 1), key)
    h        lead 2^56 + (w1 2^32 + w0) div 2^8: 64 bits
    v        (h + 1/2) / 2^64, uniform in (0, 1)
    gumbel   -ln(-ln(1 - v)), rounded to float32: from -3.81 to 45.06

The lead bounds v, lead / 256 < v < (lead + 1) / 256, and one call of `philox` gives the leads of 16 tokens; only a few tokens need
their tail (`token_draw.py`). Both ends keep their precision: below 1/2, ln(1 - v) is log1p(-v); above, 1 - v comes from the
complement of h, (2^64 - 1 - h + 1/2) / 2^64. Here the logarithms are taken in float64. A kernel that takes them in float32, with v
and 1 - v converted from integers by the same two branches, differs by some units in the last place. Sources: Salmon, Moraes, Dror,
Shaw 2011 (Philox); Maddison, Tarlow, Minka 2014 (sampling by the highest perturbed logit).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.arrays import FloatArray, IntArray
from pdserve.engine.sampling.scratch import Scratch

Words = NDArray[np.uint64]
"""32-bit words in 64-bit integers, which hold their products."""

TOKENS_PER_LEAD_CALL = 16
_LEAD, _TAIL = 0, 1
"""Word 3 of the counter."""
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_ROUND_KEYS = np.arange(7, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
"""`[7, 2]`, added to the key in each round. Seven rounds are the fewest that pass all tests of BigCrush."""
_CHUNK = 8192
"""Counters processed at once, so that their words stay in the CPU's cache."""
_BYTE, _LOW, _HALF = np.uint64(0xFF), np.uint64(0xFFFFFFFF), np.uint64(1 << 63)
_8, _24, _32, _56 = (np.uint64(bits) for bits in (8, 24, 32, 56))


def gumbel(seeds: IntArray, indexes: IntArray, positions: IntArray, token_ids: IntArray) -> FloatArray:
    """The noise of K tokens; all `[K]`."""
    count = len(token_ids)
    evens = np.empty((2, 2 * count), dtype=np.uint64)  # counters of the calls for leads, then of those for tails
    odds, keys = np.empty_like(evens), np.empty_like(evens)
    evens[0, :count], evens[0, count:] = token_ids // TOKENS_PER_LEAD_CALL, token_ids
    for half, stream in ((slice(count), _LEAD), (slice(count, None), _TAIL)):
        evens[1, half], odds[0, half], odds[1, half] = indexes, positions, stream
        keys[:, half] = _key_words(seeds)
    _philox(evens, odds, keys, np.empty_like(evens))
    byte = token_ids % TOKENS_PER_LEAD_CALL
    words = np.stack([evens[0, :count], odds[0, :count], evens[1, :count], odds[1, :count]])
    lead = words[byte // 4, np.arange(count)] >> (byte % 4 * 8).astype(np.uint64)
    return gumbel_of_bits(_bits(lead & _BYTE, evens[0, count:], odds[0, count:]))


def gumbel_of_leads(
    lead: NDArray[np.uint8], seeds: IntArray, indexes: IntArray, positions: IntArray, token_ids: IntArray
) -> FloatArray:
    """`gumbel` for known leads; all `[K]`."""
    evens = np.stack([token_ids, indexes]).astype(np.uint64)
    odds = np.stack([positions, np.full_like(positions, _TAIL)]).astype(np.uint64)
    _philox(evens, odds, _key_words(seeds), np.empty_like(evens))
    return gumbel_of_bits(_bits(lead.astype(np.uint64), evens[0], odds[0]))


def leads(
    seeds: IntArray, indexes: IntArray, positions: IntArray, vocab_size: int, scratch: Scratch
) -> NDArray[np.uint8]:
    """`[R, V]`, the leads of all tokens, in scratch memory. seeds, indexes, positions `[R]`."""
    rows, calls = len(seeds), -(-vocab_size // TOKENS_PER_LEAD_CALL)
    words = scratch.array("lead words", (rows, calls, 4), np.uint32)
    at_once = max(1, _CHUNK // calls)
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        shape = (2, len(seeds[part]), calls)
        evens, odds, product = (scratch.array(name, shape, np.uint64) for name in ("evens", "odds", "product"))
        evens[0], evens[1] = np.arange(calls), indexes[part, None]
        odds[0], odds[1] = positions[part, None], _LEAD
        _philox(evens, odds, _key_words(seeds[part])[..., None], product)
        words[part, :, 0], words[part, :, 1], words[part, :, 2], words[part, :, 3] = (
            evens[0],
            odds[0],
            evens[1],
            odds[1],
        )
    in_order = words.astype("<u4", copy=False).view(np.uint8)  # the lowest byte first
    return in_order.reshape(rows, calls * TOKENS_PER_LEAD_CALL)[:, :vocab_size]


def gumbel_of_bits(bits: Words) -> FloatArray:
    """The noise of `h` of the formula; both `[K]`."""
    upper = bits >= _HALF
    distance = np.where(upper, ~bits, bits)  # distance to the nearer end of (0, 1)
    small = (distance.astype(np.float64) + 0.5) * 2.0**-64
    return (-np.log(-np.where(upper, np.log(small), np.log1p(-small)))).astype(np.float32)


def _key_words(seeds: IntArray) -> Words:
    """`[2, K]`"""
    keys = np.ascontiguousarray(seeds).view(np.uint64)
    return np.stack([keys & _LOW, keys >> _32])


def _philox(evens: Words, odds: Words, keys: Words, product: Words) -> None:
    """Philox4x32-7. evens, odds: words 0 and 2, and words 1 and 3 of the counters; overwritten by the words of the results.

    evens and odds `[2, ...]`; keys of the same shape, or broadcast; product: scratch memory in the shape of evens.
    """
    shape = (2,) + (1,) * (evens.ndim - 1)
    multipliers, crossed = _MULTIPLIERS.reshape(shape), product[::-1]
    for round_keys in (keys + _ROUND_KEYS.reshape(-1, *shape)) & _LOW:
        np.multiply(evens, multipliers, out=product)
        np.right_shift(crossed, _32, out=evens)
        np.bitwise_xor(evens, odds, out=evens)
        np.bitwise_xor(evens, round_keys, out=evens)
        np.bitwise_and(crossed, _LOW, out=odds)


def _bits(lead: Words, tail_0: Words, tail_1: Words) -> Words:
    """`h` of the formula."""
    bits: Words = (lead << _56) | (tail_1 << _24) | (tail_0 >> _8)
    return bits
