"""`GroupDigest`: digests of one head group, so that the groups of a transfer cannot be exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.kv_transfer.block_digest import BlockDigest
from pdserve.kv_transfer.heads.head_groups import HeadGroup
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
    of_rank: Callable[[int], RankTransfers],
    groups: Sequence[HeadGroup],
    blocks: Sequence[int],
    first_index: int,
    digest: BlockDigest,
) -> list[int]:
    """The digests of blocks in every group, all groups of a block together; ranks compute theirs at the same time.

    Raises: as the futures of `RankTransfers.digests`; TimeoutError after `DIGEST_WAIT_S`.
    """
    # rank 0 computes in this thread, so the others begin before it
    order = sorted(range(len(groups)), key=lambda number: -groups[number].source.rank)
    futures = {}
    for number in order:
        part = groups[number].source
        own = digest if len(groups) == 1 else GroupDigest(digest, len(groups), number)
        futures[number] = of_rank(part.rank).digests(part.numbers(blocks), first_index, own, part.parts)
    by_group = [futures[number].result(DIGEST_WAIT_S) for number in range(len(groups))]
    return [value for values in zip(*by_group, strict=True) for value in values]
