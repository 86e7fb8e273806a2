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


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(_rows(np.ascontiguousarray(blocks[..., 2:]).view(np.int8)), _halves(blocks[..., :2]), None)


def _q4_k(blocks: Bytes) -> Groups:
    rows = len(blocks)
    whole, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    scales = whole[..., None] * scales.reshape(rows, -1, 8).astype(np.float32)
    minima = least[..., None] * minima.reshape(rows, -1, 8).astype(np.float32)
    # runs of 32 bytes: the low halves are one group, the high ones the next
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Groups(_rows(values), scales.reshape(rows, -1), (8 * scales - minima).reshape(rows, -1))


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
    "Q8_0": GroupedType(8, 32, False, _q8_0),
    "Q4_K": GroupedType(4, 32, True, _q4_k),
    "Q6_K": GroupedType(8, 16, False, _q6_k),
}
"""Name of a type -> its integers."""
