"""`HeadGroup`: KV heads that move together, from one rank of the source to the ranks of the receiver that have them.

A group has as many heads as the greatest common divisor of both sides' heads per rank, so blocks of either side divide evenly:

    source, 2 ranks      block of rank 0 [ h0 h1 h2 h3 ]   block of rank 1 [ h4 h5 h6 h7 ]
    groups                               [ 0    | 1    ]                   [ 2    | 3    ]
    receiver, 4 ranks    rank            [ 0   ][ 1    ]                   [ 2   ][ 3    ]

Each group has its own digest per block. Between two workers of one rank each there is one group: whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.common.errors import TransferFailed
from pdserve.common.kv_layout import KvLayout


class RankPart(NamedTuple):
    """One of `parts` equal parts of every block of a rank. In a pool of such parts its numbers are `block * parts + part`."""

    rank: int = 0
    parts: int = 1
    part: int = 0

    def numbers(self, blocks: Sequence[int]) -> list[int]:
        """The numbers of this part of these blocks in the pool of parts."""
        return [block * self.parts + self.part for block in blocks]


class HeadGroup(NamedTuple):
    """Heads `first_head` to `first_head + num_heads - 1` of every block."""

    first_head: int
    num_heads: int
    source: RankPart
    """The lowest rank of the source that has them."""
    receivers: tuple[RankPart, ...]
    """Several if the receiver has more ranks than heads."""


def head_groups(source: KvLayout, receiver: KvLayout) -> tuple[HeadGroup, ...]:
    """The groups of a transfer, in the order of their heads. The layouts must have no `differences`."""
    size = math.gcd(source.num_kv_heads, receiver.num_kv_heads)
    return tuple(
        HeadGroup(first, size, rank_parts(source, first, size)[0], rank_parts(receiver, first, size))
        for first in range(0, source.total_num_kv_heads, size)
    )


def rank_parts(layout: KvLayout, first_head: int, num_heads: int) -> tuple[RankPart, ...]:
    """The part with these heads on each rank that has them. num_heads: divides the rank's number of heads, and `first_head`."""
    parts = layout.num_kv_heads // num_heads
    part = first_head // num_heads % parts
    return tuple(RankPart(rank, parts, part) for rank in layout.ranks_with(first_head))


WHOLE = RankPart()
"""Whole blocks of a worker's only rank."""


@dataclass(frozen=True, slots=True)
class GroupSource:
    """A group of a transfer that the source has accepted: where its bytes are, and where they go."""

    metadata: bytes
    """The endpoint of the source's rank, for the chosen connector."""
    token: bytes
    source: RankPart = WHOLE
    receivers: tuple[RankPart, ...] = (WHOLE,)


def receiving_ranks(layout: KvLayout, ranges: Sequence[tuple[int, int]]) -> list[tuple[RankPart, ...]]:
    """Per group, the parts of this worker's ranks that receive it. ranges: (first head, number of heads) of the source's groups.

    Raises: TransferFailed unless the groups are all heads in order, in equal parts of each rank.
    """
    size = ranges[0][1]
    expected = [(first, size) for first in range(0, layout.total_num_kv_heads, size)] if size > 0 else []
    if list(ranges) != expected or layout.num_kv_heads % size:
        shown = ", ".join(f"{first}+{count}" for first, count in ranges[:8])
        raise TransferFailed(
            f"the source sends the heads {shown} in {len(ranges)} groups; each rank here has {layout.num_kv_heads} of "
            f"{layout.total_num_kv_heads} heads ({layout.tp_size} ranks)"
        )
    return [rank_parts(layout, first, count) for first, count in ranges]
