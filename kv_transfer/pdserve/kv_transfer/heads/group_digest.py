"""`GroupDigest`: digests of one head group, so that the groups of a transfer cannot be exchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.common.security.block_digest import BlockDigest
from pdserve.kv_transfer.heads.head_groups import HeadGroup, RankPart
from pdserve.kv_transfer.heads.rank_transfers import RankTransfers

DIGEST_WAIT_S = 30.0
"""Longest wait for the digests of another rank; a rank that hangs ends its worker."""


@dataclass(frozen=True, slots=True)
class GroupDigest:
    """A `BlockDigest` of group `group` of `num_groups`: the transfer's algorithm, with an index of its own per block and group."""

    whole: BlockDigest
    """The transfer's algorithm with its key."""
    num_groups: int
    group: int

    @property
    def name(self) -> str:
        return self.whole.name

    def of(self, view: memoryview, index: int) -> int:
        """As `BlockDigest.of`; index: the block's, in its transfer."""
        return self.whole.of(view, index * self.num_groups + self.group)


def group_digests(
    of_part: Callable[[RankPart], RankTransfers],
    groups: Sequence[HeadGroup],
    blocks: Sequence[int],
    shapes: Sequence[int],
    first_index: int,
    digest: BlockDigest,
) -> list[tuple[int, ...]]:
    """Per block its digests in every group of its shape; ranks compute theirs at the same time.

    blocks: numbers, each in the pool of its shape; the first has index `first_index` in its transfer.

    Raises: as the futures of `RankTransfers.digests`; TimeoutError after `DIGEST_WAIT_S`.
    """
    places_of = places_by_shape(shapes)
    # rank 0 computes in this thread, so the others begin before it
    order = sorted(range(len(groups)), key=lambda number: -groups[number].source.rank)
    futures = {}
    for number in order:
        part = groups[number].source
        own = digest if len(groups) == 1 else GroupDigest(digest, len(groups), number)
        places = places_of[part.shape]
        indexes = [first_index + place for place in places]
        numbers = part.numbers([blocks[place] for place in places])
        futures[number] = of_part(part).digests(numbers, indexes, own, part.parts)
    found: list[tuple[int, ...]] = [()] * len(blocks)
    for number, group in enumerate(groups):
        values = futures[number].result(DIGEST_WAIT_S)
        for place, value in zip(places_of[group.source.shape], values, strict=True):
            found[place] += (value,)
    return found


def places_by_shape(shapes: Sequence[int]) -> dict[int, list[int]]:
    """Shape -> places of its blocks in a list of blocks."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, shape in enumerate(shapes):
        places[shape].append(place)
    return places
