"""xxh3_64 of blocks, where they lie: the same numbers that `xxhash` computes on a CPU.

XXH3 keeps eight 64-bit sums. Within a kibibyte (16 stripes of 64 bytes) they only add terms, so all kibibytes are summed in
parallel, at the speed of memory; a short step between kibibytes (shift, xor, multiply) is a chain of one step per kibibyte.
Source: the specification of XXH3, xxHash 0.8 (Collet), for inputs above 240 bytes with the default secret and seed 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.layer_ops import check_digested
from pdserve.kernels.triton.launch_configs import LaunchConfigs

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_FIRST_SUMS = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
_SUMS_AT = tl.constexpr(192)
"""Place of `_FIRST_SUMS` after the words of the secret."""
_WORDS_OF_KIBIBYTE = tl.constexpr(128)


def secret_words() -> Tensor:
    """`[200]` int64: the 8 bytes of the secret from byte i on, at place i; then the eight sums that a digest begins with."""
    padded = _SECRET + bytes(8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(len(_SECRET))]
    return torch.tensor([word - (word >> 63 << 64) for word in (*words, *_FIRST_SUMS)])


@triton.jit
def _unsigned(words):
    return words.to(tl.uint64, bitcast=True)


@triton.jit
def _product_of_halves(keyed):
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def sum_kibibytes(pool, blocks, secret, sums, words, KIBIBYTES: tl.constexpr):
    """`sums[i, k, :]` over the stripes of kibibyte k of block `blocks[i]`.

    The last kibibyte may be short; its last, incomplete stripe belongs to `chain_sums`.
    """
    i = tl.program_id(0).to(tl.int64)
    kibibyte = tl.program_id(1) * KIBIBYTES + tl.arange(0, KIBIBYTES)
    stripe, word = tl.arange(0, 16), tl.arange(0, 8)
    num_whole = (words - 1) // _WORDS_OF_KIBIBYTE
    rest = (words - 1 - num_whole * _WORDS_OF_KIBIBYTE) // 8
    num_stripes = tl.where(kibibyte < num_whole, 16, tl.where(kibibyte == num_whole, rest, 0))
    is_summed = (stripe[None, :] < num_stripes[:, None])[:, :, None] & (word < 8)[None, None, :]
    at = (kibibyte * _WORDS_OF_KIBIBYTE)[:, None, None] + (stripe * 8)[None, :, None] + word[None, None, :]
    data = _unsigned(tl.load(pool + tl.load(blocks + i) * words + at, mask=is_summed, other=0))
    # a sum also takes the word of its neighbour as it is
    even, odd = tl.split(tl.reshape(data, (KIBIBYTES, 16, 4, 2)))
    neighbour = tl.reshape(tl.join(odd, even), (KIBIBYTES, 16, 8))
    key = _unsigned(tl.load(secret + (stripe * 8)[:, None] + (word * 8)[None, :]))
    terms = tl.where(is_summed, _product_of_halves(data ^ key[None, :, :]) + neighbour, 0)
    target = sums + (i * (num_whole + 1) + kibibyte)[:, None] * 8 + word[None, :]
    tl.store(target, tl.sum(terms, 1).to(tl.int64, bitcast=True), mask=(kibibyte <= num_whole)[:, None])


@triton.jit
def _scrambled(total, key):
    return (total ^ (total >> 47) ^ key) * 0x9E3779B1


@triton.jit
def chain_sums(pool, blocks, secret, sums, digests, words, UNROLL: tl.constexpr):
    """Joins the sums of one block's kibibytes, adds its last 64 bytes, and mixes the eight sums into one number."""
    i = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, 8)
    total = _unsigned(tl.load(secret + _SUMS_AT + word))
    key = _unsigned(tl.load(secret + 128 + word * 8))
    num_whole = (words - 1) // _WORDS_OF_KIBIBYTE
    of_block = sums + i * (num_whole + 1) * 8 + word
    num_unrolled = num_whole // UNROLL * UNROLL
    for first in range(0, num_unrolled, UNROLL):
        for step in tl.static_range(UNROLL):
            total = _scrambled(total + _unsigned(tl.load(of_block + (first + step) * 8)), key)
    for step in range(num_unrolled, num_whole):
        total = _scrambled(total + _unsigned(tl.load(of_block + step * 8)), key)
    total += _unsigned(tl.load(of_block + num_whole * 8))
    last = pool + tl.load(blocks + i) * words + words - 8
    data, neighbour = _unsigned(tl.load(last + word)), _unsigned(tl.load(last + (word ^ 1)))
    total += neighbour + _product_of_halves(data ^ _unsigned(tl.load(secret + 121 + word * 8)))
    left, right = tl.split(tl.reshape(total ^ _unsigned(tl.load(secret + 11 + word * 8)), (4, 2)))
    mixed = tl.sum((left * right) ^ tl.umulhi(left, right), 0) + (words * 8).to(tl.uint64) * 0x9E3779B185EBCA87
    mixed = (mixed ^ (mixed >> 37)) * 0x165667919E3779F9
    tl.store(digests + i, (mixed ^ (mixed >> 32)).to(tl.int64, bitcast=True))


def block_digests(pool: Tensor, blocks: Sequence[int], secret: Tensor, configs: LaunchConfigs) -> Tensor:
    """See `LayerOps.digests`. secret: `secret_words` on the pool's device."""
    words = check_digested(pool, blocks) // 8
    digests = torch.empty(len(blocks), dtype=torch.int64, device=pool.device)
    if not blocks:
        return digests
    numbers = torch.tensor(blocks).to(pool.device, non_blocking=True)
    num_sums = (words - 1) // 128 + 1
    sums = torch.empty((len(blocks), num_sums, 8), dtype=torch.int64, device=pool.device)
    flat, kibibytes = pool.view(-1).view(torch.int64), configs.digest_kibibytes
    sum_kibibytes[(len(blocks), triton.cdiv(num_sums, kibibytes))](
        flat, numbers, secret, sums, words,
        KIBIBYTES=kibibytes, num_warps=configs.digest_warps, enable_fp_fusion=True,
    )  # fmt: skip
    chain_sums[(len(blocks),)](
        flat, numbers, secret, sums, digests, words,
        UNROLL=configs.digest_unroll, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return digests
