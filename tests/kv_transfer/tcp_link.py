"""Two TCP connectors on loopback with a fault link between them."""

from __future__ import annotations

from typing import Any

from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.tcp import TcpConnector
from pdserve.kv_transfer.tcp_settings import TcpAddress, TcpSettings

from .contract_link import WINDOW_BLOCKS
from .fault_link import FaultLink
from .recorded_read import BLOCK_BYTES


def small_settings(**changes: Any) -> TcpSettings:
    """Windows of `WINDOW_BLOCKS` blocks, and short time-outs."""
    settings: dict[str, Any] = {
        "request_bytes": WINDOW_BLOCKS * BLOCK_BYTES,
        "read_window_bytes": 8 * WINDOW_BLOCKS * BLOCK_BYTES,
        "fence_after_s": 0.1,
    }
    return TcpSettings(**(settings | changes))


class TcpLink:
    def __init__(self, source_pool: PoolMemory, receiver_pool: PoolMemory, read_stall_s: float) -> None:
        settings = small_settings(read_stall_s=read_stall_s)
        self.source = TcpConnector(settings)
        self.receiver = TcpConnector(settings)
        self.source.serve(source_pool)
        self.receiver.serve(receiver_pool)
        self.faults = FaultLink(TcpAddress.from_metadata(self.source.metadata).port)

    @property
    def faulty_metadata(self) -> bytes:
        return TcpAddress("127.0.0.1", self.faults.port).to_metadata()

    @property
    def num_reread(self) -> int:
        return self.receiver.read_counters.blocks_reread

    def serve_only(self, num_blocks: int) -> None:
        self.faults.serve_only(num_blocks * BLOCK_BYTES)

    def resume(self) -> None:
        self.faults.serve_only(None)

    def flip_one_bit(self) -> None:
        self.faults.flip_one_bit()

    def close(self) -> None:
        self.receiver.close()
        self.source.close()
        self.faults.close()
