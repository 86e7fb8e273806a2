"""`HeadGroup`: KV heads that move together, from one rank of the source to the ranks of the receiver that have them.

A group has as many heads as the greatest common divisor of both sides' heads per rank, so blocks of either side divide evenly:

    source, 2 ranks      block of rank 0 [ h0 h1 h2 h3 ]   block of rank 1 [ h4 h5 h6 h7 ]
    groups                               [ 0    | 1    ]                   [ 2    | 3    ]
    receiver, 4 ranks    rank            [ 0   ][ 1    ]                   [ 2   ][ 3    ]

Each group has its own digest per block. Between two workers of one rank each there is one group for each shape of blocks: whole
blocks. Blocks of different shapes lie in pools of their own, and each pool of a rank has its own endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.common.errors import TransferFailed
from pdserve.common.kv_layout import KvLayout


class RankPart(NamedTuple):
    """One of `parts` equal parts of every block of one shape on a rank. In a pool of such parts its numbers are
    `block * parts + part`."""

    rank: int = 0
    parts: int = 1
    part: int = 0
    shape: int = 0
    """Index in `KvLayout.shapes`."""

    def numbers(self, blocks: Sequence[int]) -> list[int]:
        """The numbers of this part of these blocks of the shape in the pool of parts."""
        return [block * self.parts + self.part for block in blocks]


class HeadGroup(NamedTuple):
    """Heads `first_head` to `first_head + num_heads - 1` of every block of one shape."""

    first_head: int
    num_heads: int
    source: RankPart
    """The lowest rank of the source that has them."""
    receivers: tuple[RankPart, ...]
    """Several if the receiver has more ranks than heads."""


def head_groups(source: KvLayout, receiver: KvLayout) -> tuple[HeadGroup, ...]:
    """The groups of a transfer, in the order of shapes and heads. The layouts must have no `differences`."""
    groups = []
    for number, (ours, theirs) in enumerate(zip(source.shapes, receiver.shapes, strict=True)):
        size = math.gcd(ours.num_kv_heads, theirs.num_kv_heads)
        groups += [
            HeadGroup(
                first, size, rank_parts(source, number, first, size)[0], rank_parts(receiver, number, first, size)
            )
            for first in range(0, ours.total_num_kv_heads, size)
        ]
    return tuple(groups)


def rank_parts(layout: KvLayout, number: int, first_head: int, num_heads: int) -> tuple[RankPart, ...]:
    """The part with these heads on each rank that has them. number: of the shape. num_heads: divides the rank's number of heads,
    and `first_head`."""
    shape = layout.shapes[number]
    parts = shape.num_kv_heads // num_heads
    part = first_head // num_heads % parts
    return tuple(RankPart(rank, parts, part, number) for rank in shape.ranks_with(first_head, layout.tp_size))


WHOLE = RankPart()
"""Whole blocks of a worker's only rank, where they have one shape."""


@dataclass(frozen=True, slots=True)
class GroupSource:
    """A group of a transfer that the source has accepted: where its bytes are, and where they go."""

    metadata: bytes
    """The endpoint of the source's rank, for the chosen connector."""
    token: bytes
    source: RankPart = WHOLE
    receivers: tuple[RankPart, ...] = (WHOLE,)


HeadRange = tuple[int, int, int]
"""(shape, first head, number of heads)"""


def receiving_ranks(layout: KvLayout, ranges: Sequence[HeadRange]) -> list[tuple[RankPart, ...]]:
    """Per group, the parts of this worker's ranks that receive it. ranges: of the source's groups.

    Raises: TransferFailed unless the groups are all heads of all shapes in order, in equal parts of each rank.
    """
    for number, shape in enumerate(layout.shapes):
        given = [(first, count) for of_shape, first, count in ranges if of_shape == number]
        size = given[0][1] if given else 0
        expected = [(first, size) for first in range(0, shape.total_num_kv_heads, size)] if size > 0 else []
        if not given or given != expected or shape.num_kv_heads % size:
            shown = ", ".join(f"{first}+{count}" for first, count in given[:8]) or "none"
            of_shape = f" of blocks of shape {number}" if len(layout.shapes) > 1 else ""
            raise TransferFailed(
                f"the source sends the heads {shown} in {len(given)} groups{of_shape}; each rank here has {shape.num_kv_heads} of "
                f"{shape.total_num_kv_heads} heads ({layout.tp_size} ranks)"
            )
    if [shape for shape, _, _ in ranges] != sorted(shape for shape, _, _ in ranges if shape < len(layout.shapes)):
        raise TransferFailed(f"the source's head groups are of shapes {[shape for shape, _, _ in ranges][:8]}")
    return [rank_parts(layout, shape, first, count) for shape, first, count in ranges]
