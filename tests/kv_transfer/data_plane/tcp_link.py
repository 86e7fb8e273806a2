"""Two TCP connectors on loopback with a fault link between them."""

from __future__ import annotations

import ssl
from dataclasses import replace
from typing import Any

from pdserve.common.security.tls import TlsIdentity
from pdserve.kv_transfer.memory.pool_memory import HostPool, PoolMemory
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress, TcpSettings

from .contract_link import WINDOW_BLOCKS
from .fault_link import FaultLink
from .recorded_read import BLOCK_BYTES


def small_settings(**changes: Any) -> TcpSettings:
    """Windows of `WINDOW_BLOCKS` blocks, and short time-outs."""
    settings: dict[str, Any] = {
        "request_bytes": WINDOW_BLOCKS * BLOCK_BYTES,
        "longest_request_bytes": WINDOW_BLOCKS * BLOCK_BYTES,
        "read_window_bytes": 8 * WINDOW_BLOCKS * BLOCK_BYTES,
        "fence_after_s": 0.1,
    }
    return TcpSettings(**(settings | changes))


class TcpLink:
    def __init__(
        self,
        source_pool: PoolMemory,
        receiver_pool: HostPool,
        read_stall_s: float,
        landings: tuple[HostPool, HostPool] | None = None,
        **changes: Any,
    ) -> None:
        settings = small_settings(read_stall_s=read_stall_s, **changes)
        self.source = TcpConnector(self._of_source(settings))
        self.receiver = TcpConnector(settings)
        self.source.serve(source_pool, landings and landings[0])
        self.receiver.serve(receiver_pool, landings and landings[1])
        self.faults = FaultLink(TcpAddress.from_metadata(self.source.metadata).port)

    def _of_source(self, settings: TcpSettings) -> TcpSettings:
        return settings

    @property
    def faulty_metadata(self) -> bytes:
        return TcpAddress("127.0.0.1", self.faults.port).to_metadata()

    @property
    def num_reread(self) -> int:
        return self.receiver.read_counters["blocks_reread"]

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


class TlsLink(TcpLink):
    """Over TLS. A bit that turns over under way would break the connection, so it is wrong before it is encrypted."""

    def __init__(
        self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float, identity: TlsIdentity
    ) -> None:
        self._flips = _Flips(identity.server.context)
        super().__init__(source_pool, receiver_pool, read_stall_s, tls=identity)

    def _of_source(self, settings: TcpSettings) -> TcpSettings:
        assert settings.tls is not None
        server = replace(settings.tls.server, context=self._flips)  # type: ignore[arg-type]
        return replace(settings, tls=replace(settings.tls, server=server))

    def flip_one_bit(self) -> None:
        self._flips.is_next = True


class _Flips:
    """A TLS context whose connections turn one bit over, in the next piece that is too long to be a frame."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self.is_next = False

    def wrap_bio(self, *arguments: Any) -> _FlippingTls:
        return _FlippingTls(self, self._context.wrap_bio(*arguments))


class _FlippingTls:
    def __init__(self, flips: _Flips, tls: ssl.SSLObject) -> None:
        self._flips = flips
        self._tls = tls
        self.read, self.pending, self.do_handshake = tls.read, tls.pending, tls.do_handshake
        self.getpeercert = tls.getpeercert

    def write(self, piece: memoryview) -> int:
        if self._flips.is_next and len(piece) > 512:
            self._flips.is_next = False
            flipped = bytearray(piece)
            flipped[-1] ^= 1
            return self._tls.write(flipped)
        return self._tls.write(piece)
