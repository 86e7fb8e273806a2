"""Messages about KV blocks between rank 0 and the process of another rank, as msgpack values.

rank 0 -> rank   `GrantReads`, `PublishBlocks`, `CloseGrant`; `BeginRead`, `CancelRead`; `DigestBlocks`; `MeetPeer`, `ForgetPeer`
rank -> rank 0   `RankServes`, first; then `GrantFenced`, `ReadLanded`, `ReadEnded`, `DigestsFound`

They have a socket of their own, so that no message waits for a step. Block numbers refer to the pool of a shape of blocks, with
each block divided into `parts`. When the socket closes, the peer has ended.
"""

from __future__ import annotations

import msgspec

from pdserve.common.security.block_digest import XXH3, BlockDigest, Gmac
from pdserve.kv_transfer.connector import BlockToRead, ReadOutcome
from pdserve.kv_transfer.heads.group_digest import GroupDigest


class DigestValues(msgspec.Struct, frozen=True, array_like=True):
    """A `BlockDigest` as values."""

    key: bytes
    """The key of `gmac`; empty for `xxh3_64`."""
    num_groups: int
    group: int

    @classmethod
    def of(cls, digest: BlockDigest) -> DigestValues:
        num_groups, group = 1, 0
        if isinstance(digest, GroupDigest):
            num_groups, group, digest = digest.num_groups, digest.group, digest.whole
        return cls(digest.key if isinstance(digest, Gmac) else b"", num_groups, group)

    def digest(self) -> BlockDigest:
        whole: BlockDigest = Gmac(self.key) if self.key else XXH3
        return whole if self.num_groups == 1 else GroupDigest(whole, self.num_groups, self.group)


class BlockValues(msgspec.Struct, frozen=True, array_like=True):
    """A `BlockToRead`."""

    index: int
    digest: int
    local_block: int
    location: int

    @classmethod
    def of(cls, block: BlockToRead) -> BlockValues:
        return cls(block.index, block.digest, block.local_block, block.location)

    def block(self) -> BlockToRead:
        return BlockToRead(self.index, self.digest, self.local_block, self.location)


class GrantReads(msgspec.Struct, frozen=True, array_like=True, tag=True):
    token: bytes
    parts: int
    shape: int


class PublishBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    token: bytes
    first_index: int
    blocks: list[int]


class CloseGrant(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered by `GrantFenced`."""

    call_id: int
    token: bytes


class BeginRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered by any number of `ReadLanded`, then one `ReadEnded`."""

    read_id: int
    connector: str
    metadata: bytes
    token: bytes
    blocks: list[BlockValues]
    digest: DigestValues
    parts: int
    source_parts: int
    shape: int


class CancelRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    read_id: int


class DigestBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered by `DigestsFound`."""

    call_id: int
    blocks: list[int]
    indexes: list[int]
    digest: DigestValues
    parts: int
    shape: int


class MeetPeer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    worker_id: str
    epoch: int


class ForgetPeer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    connector: str
    metadata: bytes
    shape: int


class RankServes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank's connectors serve its pools."""

    metadata: list[dict[str, bytes]]
    """Per shape of blocks: connector -> the pool's endpoint."""


class GrantFenced(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int


class ReadLanded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """As `ReadListener.landed`."""

    read_id: int
    first: int
    count: int


class ReadEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """As `ReadListener.ended`."""

    read_id: int
    outcome: ReadOutcome
    cause: str | None


class DigestsFound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    digests: list[int]
    error: str | None


ToRank = GrantReads | PublishBlocks | CloseGrant | BeginRead | CancelRead | DigestBlocks | MeetPeer | ForgetPeer
FromRank = RankServes | GrantFenced | ReadLanded | ReadEnded | DigestsFound

decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
encode = msgspec.msgpack.Encoder().encode
