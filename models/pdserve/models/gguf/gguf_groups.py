"""Integers in groups from the blocks of GGUF's types, without widening them.

Source: the types' definitions in ggml; each is compared with what the package `gguf` widens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from gguf.quants import Q4_K
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Groups(NamedTuple):
    """Weights are `values * scales + offsets`."""

    values: NDArray[np.int8]
    """`[rows, columns]`"""
    scales: NDArray[np.float32]
    """`[rows, groups]`"""
    offsets: NDArray[np.float32] | None


class GroupedType(NamedTuple):
    """A type of blocks that holds integers in groups."""

    num_bits: int
    group_size: int
    has_offsets: bool
    groups: Callable[[Bytes], Groups]
    """Of blocks `[rows, blocks, bytes]`."""


def _halves(numbers: Bytes) -> NDArray[np.float32]:
    """float16 `[..., 2]` bytes -> `[...]`."""
    return np.ascontiguousarray(numbers).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(numbers: Bytes) -> NDArray[np.int8]:
    """Bytes `[..., N]` -> `[..., 2 N]` from -8 on: first all low halves, then all high ones."""
    return np.concatenate((numbers & 15, numbers >> 4), -1).astype(np.int8) - 8


def _rows(numbers: NDArray[np.int8]) -> NDArray[np.int8]:
    return numbers.reshape(len(numbers), -1)


def _q4_0(blocks: Bytes) -> Groups:
    return Groups(_rows(_nibbles(blocks[..., 2:])), _halves(blocks[..., :2]), None)


def _q4_1(blocks: Bytes) -> Groups:
    scales = _halves(blocks[..., :2])
    return Groups(_rows(_nibbles(blocks[..., 4:])), scales, _halves(blocks[..., 2:4]) + 8 * scales)


def _fives(low: Bytes, high: Bytes) -> NDArray[np.int8]:
    """Nibbles as of `_nibbles` and their fifth bits, in the order of the numbers -> from -16 on."""
    fours = np.concatenate((low & 15, low >> 4), -1)
    found: NDArray[np.int8] = (fours | (high << 4)).astype(np.int8) - 16
    return found


def _bits(words: Bytes) -> Bytes:
    """Bytes `[..., N]` -> their bits `[..., 8 N]`, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(words), -1, bitorder="little")


def _q5_0(blocks: Bytes) -> Groups:
    return Groups(_rows(_fives(blocks[..., 6:], _bits(blocks[..., 2:6]))), _halves(blocks[..., :2]), None)


def _q5_1(blocks: Bytes) -> Groups:
    scales = _halves(blocks[..., :2])
    values = _fives(blocks[..., 8:], _bits(blocks[..., 4:8]))
    return Groups(_rows(values), scales, _halves(blocks[..., 2:4]) + 16 * scales)


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(_rows(np.ascontiguousarray(blocks[..., 2:]).view(np.int8)), _halves(blocks[..., :2]), None)


def _scales_and_minima(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of the eight groups of each block `[rows, groups]`: a weight is `number * scale - minimum`, numbers from 0 on."""
    rows = len(blocks)
    whole, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    scales = whole[..., None] * scales.reshape(rows, -1, 8).astype(np.float32)
    minima = least[..., None] * minima.reshape(rows, -1, 8).astype(np.float32)
    return scales.reshape(rows, -1), minima.reshape(rows, -1)


def _q4_k(blocks: Bytes) -> Groups:
    scales, minima = _scales_and_minima(blocks)
    # runs of 32 bytes: the low halves are one group, the high ones the next
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Groups(_rows(values), scales, 8 * scales - minima)


def _q5_k(blocks: Bytes) -> Groups:
    scales, minima = _scales_and_minima(blocks)
    # bit 2 j of a byte belongs to the low halves of run j, bit 2 j + 1 to the high ones
    fifths = np.stack([(blocks[..., 16:48] >> bit) & 1 for bit in range(8)], -2).reshape(*blocks.shape[:2], 4, 64)
    values = _fives(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32), fifths)
    return Groups(_rows(values), scales, 16 * scales - minima)


def _q6_k(blocks: Bytes) -> Groups:
    rows = len(blocks)
    low, high = (
        blocks[..., :128].reshape(*blocks.shape[:2], 2, 64),
        blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32),
    )
    fours = np.concatenate((low & 15, low >> 4), -1)
    twos = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    values = (fours | (twos << 4)).astype(np.int8) - 32
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return Groups(_rows(values), (_halves(blocks[..., 208:])[..., None] * scales).reshape(rows, -1), None)


GROUPED_TYPES: Mapping[str, GroupedType] = {
    "Q4_0": GroupedType(4, 32, False, _q4_0),
    "Q4_1": GroupedType(4, 32, True, _q4_1),
    "Q5_0": GroupedType(8, 32, False, _q5_0),
    "Q5_1": GroupedType(8, 32, True, _q5_1),
    "Q8_0": GroupedType(8, 32, False, _q8_0),
    "Q4_K": GroupedType(4, 32, True, _q4_k),
    "Q5_K": GroupedType(8, 32, True, _q5_k),
    "Q6_K": GroupedType(8, 16, False, _q6_k),
}
"""Name of a type -> its integers."""
