"""`GroupReads`: the reads of one transfer, one per published range, head group and receiving rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import XXH3, BlockDigest
from pdserve.kv_transfer.connector import BlockRead, BlockToRead, ReadListener, ReadOrder
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.heads.group_digest import GroupDigest
from pdserve.kv_transfer.heads.head_groups import GroupSource, RankPart

MakeListener = Callable[[int, list[int]], ReadListener]
"""(number of the read, place of each of its blocks) -> a listener for it."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the source's blocks are read, by its last `Accepted`."""

    connector: str = ""
    groups: Sequence[GroupSource] = ()
    digest: BlockDigest = XXH3


class GroupReads:
    """Places are counted from the transfer's first wanted block. A block has landed when every rank has its heads."""

    def __init__(self, connectors: ConnectorSet, make_listener: MakeListener) -> None:
        self.way = Way()
        self.num_landed = 0
        """Landed blocks without a gap from the first."""
        self._connectors = connectors
        self._make_listener = make_listener
        self._first_index = 0
        self._local_blocks: tuple[int, ...] = ()
        self._shapes: tuple[int, ...] = ()
        self._unused: DeviceEvent | None = None
        self._asked: list[bool] = []
        self._missing: list[int] = []
        """Place -> reads that have not delivered their part of the block; at first one more than there can be."""
        self._active: dict[int, BlockRead] = {}
        self._num_reads = 0

    def __bool__(self) -> bool:
        """True while a read is active."""
        return bool(self._active)

    @property
    def num_asked(self) -> int:
        """Blocks of which reads may still write a part."""
        return sum(asked and missing > 0 for asked, missing in zip(self._asked, self._missing, strict=True))

    @property
    def num_begun(self) -> int:
        """Blocks that were asked for, landed ones among them."""
        return sum(self._asked)

    def reserve(
        self, first_index: int, local_blocks: Sequence[int], shapes: Sequence[int], unused: DeviceEvent | None
    ) -> None:
        """Set the blocks to read into. shapes: of each. unused: as in `BlockConnector.read`."""
        self._first_index, self._local_blocks, self._unused = first_index, tuple(local_blocks), unused
        self._shapes = tuple(shapes)
        self._asked = [False] * len(local_blocks)
        self._missing = [1] * len(local_blocks)

    def begin(self, first_index: int, digests: Sequence[int], locations: Sequence[int]) -> None:
        """Read the published blocks that are wanted and not requested yet.

        digests: per block one for each head group of its shape. locations: one per block, or none. Raises: TransferFailed for wrong
        counts.
        """
        groups = self.way.groups
        of_shape: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            of_shape.setdefault(group.source.shape, []).append(number)
        firsts = self._first_digests(first_index, digests, of_shape)
        if firsts is None or len(locations) not in (0, len(firsts)):
            raise TransferFailed(
                f"{len(digests)} digests came with {len(locations)} locations, for {len(groups)} head groups"
            )
        # a source may publish more blocks than wanted
        begin = max(0, self._first_index - first_index)
        end = min(len(firsts), self._first_index + len(self._asked) - first_index)
        offsets = [offset for offset in range(begin, end) if not self._asked[self._place(first_index, offset)]]
        for offset in offsets:
            place = self._place(first_index, offset)
            parts = sum(len(groups[number].receivers) for number in of_shape[self._shapes[place]])
            self._asked[place], self._missing[place] = True, parts
        for shape, numbers in of_shape.items():
            own = [offset for offset in offsets if self._shapes[self._place(first_index, offset)] == shape]
            if not own:
                continue
            places = [self._place(first_index, offset) for offset in own]
            for position, number in enumerate(numbers):
                group = groups[number]
                own_digests = [digests[firsts[offset] + position] for offset in own]
                there = group.source.numbers([locations[offset] if locations else 0 for offset in own])
                digest = self.way.digest if len(groups) == 1 else GroupDigest(self.way.digest, len(groups), number)
                for part in group.receivers:
                    self._read(group, part, places, own_digests, there, digest)

    def _first_digests(
        self, first_index: int, digests: Sequence[int], of_shape: Mapping[int, Sequence[int]]
    ) -> Sequence[int] | None:
        """Of each published block, the place of its first digest; None if these are not whole blocks, or with several shapes not
        blocks that are wanted."""
        if len(of_shape) == 1:
            [numbers] = of_shape.values()
            return None if len(digests) % len(numbers) else range(0, len(digests), len(numbers))
        firsts, first, place = [], 0, first_index - self._first_index
        while first < len(digests):
            if not 0 <= place < len(self._shapes) or self._shapes[place] not in of_shape:
                return None
            firsts.append(first)
            first += len(of_shape[self._shapes[place]])
            place += 1
        return firsts if first == len(digests) else None

    def _place(self, first_index: int, offset: int) -> int:
        return first_index + offset - self._first_index

    def _read(
        self,
        group: GroupSource,
        part: RankPart,
        places: list[int],
        digests: Sequence[int],
        locations: Sequence[int],
        digest: BlockDigest,
    ) -> None:
        local = part.numbers([self._local_blocks[place] for place in places])
        blocks = [
            BlockToRead(self._first_index + place, expected, block, location)
            for place, expected, block, location in zip(places, digests, local, locations, strict=True)
        ]
        number = self._num_reads
        self._num_reads += 1
        listener = self._make_listener(number, places)
        order = ReadOrder(group.metadata, group.token, blocks, digest, self._unused, part.parts, group.source.parts)
        self._active[number] = self._connectors.of_part(part).read(self.way.connector, order, listener)

    def landed(self, places: Sequence[int]) -> bool:
        """Note that one read has delivered its part of these blocks; True if `num_landed` grew."""
        for place in places:
            self._missing[place] -= 1
        before = self.num_landed
        while self.num_landed < len(self._missing) and not self._missing[self.num_landed]:
            self.num_landed += 1
        return self.num_landed > before

    def ended(self, number: int) -> None:
        self._active.pop(number, None)

    def cancel(self) -> None:
        """Stop all reads as soon as it is safe; the end of each follows."""
        for read in list(self._active.values()):
            read.cancel()

    def ask_again(self) -> None:
        """After all reads have ended: blocks that have not landed in all their parts may be read once more."""
        self._asked = [not missing for missing in self._missing]
