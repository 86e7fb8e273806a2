"""The noise of sampling on a device, by the formula of `engine/sampling/seeded_uniform.py`, whose letters are used here."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-7; counters and key are uint32, or arrays of uint32 of one shape."""
    for _ in tl.static_range(7):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def lead_words(first, seed, index, position, QUADS: tl.constexpr):
    """`[QUADS]` uint32: the leads of tokens first + 4 q to first + 4 q + 3, the lowest byte first.

    first is a multiple of 16, QUADS of 4: one call of the generator gives the leads of 16 tokens.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    call = (first // 16 + tl.arange(0, QUADS // 4)).to(tl.uint32)
    none = call * 0
    w0, w1, w2, w3 = philox(call, none + position.to(tl.uint32), none + index.to(tl.uint32), none, k0, k1)
    # pairs (0, 2) and (1, 3) are joined to [.., k, j] = word 2 k + j
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (QUADS,))


@triton.jit
def noise_bits(tokens, seed, index, position):
    """`h`, uint64, of any tokens, int32 in an array of one dimension."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    token = tokens.to(tl.uint32)
    none = token * 0
    position, index = none + position.to(tl.uint32), none + index.to(tl.uint32)
    w0, w1, w2, w3 = philox(token // 16, position, index, none, k0, k1)
    quad = (token // 4) % 4
    word = tl.where(quad < 2, tl.where(quad == 0, w0, w1), tl.where(quad == 2, w2, w3))
    lead = ((word >> ((token % 4) * 8)) & 0xFF).to(tl.uint64)
    t0, t1, _, _ = philox(token, position, index, none + 1, k0, k1)
    return (lead << 56) | (t1.to(tl.uint64) << 24) | (t0.to(tl.uint64) >> 8)


@triton.jit
def rough_gumbel(bits):
    """The noise of `h` to within 1e-4, in float32."""
    is_upper = bits >= 0x8000000000000000
    small = (tl.where(is_upper, 0xFFFFFFFFFFFFFFFF - bits, bits).to(tl.float32) + 0.5) * 5.421010862427522e-20
    # near 0 the logarithm of 1 - v loses all digits, so its series is taken
    lower = tl.where(small < 0.015625, small * (1.0 + small * (0.5 + small * 0.33333333)), -tl.log(1.0 - small))
    return -tl.log(tl.where(is_upper, -tl.log(small), lower))


@triton.jit
def exact_gumbel(bits):
    """The noise of `h`, computed in float64 and rounded to float32, as on a CPU.

    `ln(1 - v)` is computed as `ln(u) v / (1 - u)` with u = 1 - v rounded, which is exact to some units in the last place of float64
    (Kahan); libraries have `log1p` for it, which Triton's interpreter lacks.
    """
    is_upper = bits >= 0x8000000000000000
    small = (tl.where(is_upper, 0xFFFFFFFFFFFFFFFF - bits, bits).to(tl.float64) + 0.5) * 5.421010862427522e-20
    rest = 1.0 - small
    is_tiny = rest == 1.0
    lower = tl.where(is_tiny, small, -tl.log(rest) * (small / tl.where(is_tiny, 1.0, 1.0 - rest)))
    return (-tl.log(tl.where(is_upper, -tl.log(small), lower))).to(tl.float32)
