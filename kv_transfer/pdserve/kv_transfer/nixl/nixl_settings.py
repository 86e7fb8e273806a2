"""Settings of the NIXL connector, and its metadata for peers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.kv_transfer.nixl.nixl_agent import MemoryKind, Region
from pdserve.kv_transfer.pull.block_reader import ReadSettings

METADATA_VERSION = 1
MAX_METADATA_BYTES = 64 << 10
MAX_BLOCKS = 1 << 24
HELLO_BYTES = 16
MAX_DEVICES = 1 << 10

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_ADDRESS_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlSettings(ReadSettings):
    """The agent of a read without progress is destroyed. The first bytes of a new peer must arrive within `connect_timeout_s`."""

    cancel_drain_s: float = 0.5
    """Seconds after which a cancelled read that has not ended has its agent destroyed, since NIXL cannot cancel reads."""
    agents_per_peer: int = 2
    """Most agents that reads from one peer use at once. If a CPU moves the bytes (shared memory), one agent copies while the
    blocks of another are digested."""
    idle_close_s: float = 300.0
    """Seconds without reads after which an agent is destroyed."""
    max_resting_peers: int = 32
    """Most peers whose idle agents are kept; the longest idle are destroyed first. An agent has threads and file descriptors."""
    close_wait_s: float = 5.0
    """Seconds that `close` waits for an agent that cannot be destroyed."""

    def __post_init__(self) -> None:
        ReadSettings.__post_init__(self)
        if self.agents_per_peer < 1:
            raise ConfigError("agents_per_peer must be at least 1")
        if self.max_resting_peers < 0:
            raise ConfigError("max_resting_peers must be at least 0")
        if self.cancel_drain_s <= 0:
            raise ConfigError("cancel_drain_s must be above 0")


class NixlAddress(msgspec.Struct, frozen=True):
    """The address of one epoch of a source, sent as msgpack: its pool, and its agent's metadata."""

    agent: str
    """The agent's name, which is new in each epoch."""
    agent_metadata: bytes
    address: int
    """Address of block 0, in the source's memory."""
    block_bytes: int
    num_blocks: int
    hello_address: int
    """Address of `hello` in the source's memory."""
    hello: bytes
    """Bytes that a first read must return, to check that reads work and reach this epoch of the source."""
    memory: MemoryKind = MemoryKind.DRAM
    device_id: int = 0
    version: int = METADATA_VERSION

    def __str__(self) -> str:
        return self.agent

    @property
    def pool(self) -> Region:
        return Region(self.address, self.block_bytes, self.num_blocks, self.memory, self.device_id)

    @property
    def hello_region(self) -> Region:
        return Region(self.hello_address, HELLO_BYTES, 1)

    def to_metadata(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def verify_block(self, part_bytes: int, parts: int) -> None:
        """Raises: TransferFailed unless a block there has `parts` parts of `part_bytes` bytes."""
        if self.block_bytes != part_bytes * parts:
            here = f"{part_bytes} here" if parts == 1 else f"{parts} parts of {part_bytes} here"
            raise TransferFailed(f"the source's blocks have another size: {self.block_bytes} bytes there, {here}")

    @staticmethod
    def from_metadata(metadata: bytes) -> NixlAddress:
        """Decode and check a peer's metadata. Raises: TransferFailed if it is invalid."""
        if len(metadata) > MAX_METADATA_BYTES:
            raise TransferFailed(f"the source's NIXL metadata has {len(metadata)} bytes, of {MAX_METADATA_BYTES}")
        try:
            address = msgspec.msgpack.decode(metadata, type=NixlAddress, strict=True)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransferFailed(f"the source's NIXL metadata cannot be read: {str(error)[:200]}") from error
        if address.version != METADATA_VERSION:
            raise TransferFailed(f"the source has version {address.version} of the NIXL connector's metadata")
        if not _NAME.fullmatch(address.agent) or len(address.hello) != HELLO_BYTES:
            raise TransferFailed(f"the source's NIXL metadata names no agent: {address.agent[:128]!r}")
        if not 0 <= address.device_id < MAX_DEVICES or not address.agent_metadata:
            raise TransferFailed(
                f"the source's NIXL metadata names the device {address.device_id}, below {MAX_DEVICES} are possible, and "
                f"{len(address.agent_metadata)} bytes of its agent"
            )
        for region in (address.pool, address.hello_region):
            end = region.address + region.num_bytes
            if not 0 < region.address < end <= _ADDRESS_LIMIT or region.count > MAX_BLOCKS:
                raise TransferFailed(
                    f"the source's NIXL metadata names no memory: {region.count} blocks at {region.address:#x}"
                )
        return address
