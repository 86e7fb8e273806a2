"""`SourceReader`: reads where blocks are, and the transfers that move them, as a router says."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.address.peer_address import verify_peer_address, verify_worker_id
from pdserve.common.errors import InvalidRequest
from pdserve.common.request.block_source import BlockSource
from pdserve.common.security.deployment_key import is_loopback
from pdserve.kv_transfer.control.source_transfers import TRANSFER_ID_BYTES

MAX_LIMIT_S = 600.0


def verify_transfer_id(field: str, transfer_id: bytes) -> None:
    """Raises: InvalidRequest."""
    if len(transfer_id) != TRANSFER_ID_BYTES:
        raise InvalidRequest(f"{field} has {len(transfer_id)} bytes, not {TRANSFER_ID_BYTES}", field)


@dataclass(frozen=True, slots=True)
class SourceReader:
    """The rule of one worker: no address of another kind than its own is connected to."""

    host: str
    """Where the worker listens."""

    def verify(self, field: str, worker_id: str, address: str) -> None:
        """Raises: InvalidRequest for what is no worker's id or address, and for an address that cannot be reached."""
        verify_worker_id(f"{field}.worker_id", worker_id)
        verify_peer_address(f"{field}.address", address)
        if is_loopback(self.host) and not is_loopback(address):
            raise InvalidRequest(
                f"{field}.address {address!r} cannot be reached from a worker on loopback", f"{field}.address"
            )

    def block_source(self, given: BlockSource | None) -> BlockSource | None:
        """What a submission says, if it may be so. Raises: InvalidRequest."""
        if given is None:
            return None
        self.verify("block_source", given.worker_id, given.address)
        if not 0 < given.limit_s <= MAX_LIMIT_S:
            raise InvalidRequest(
                f"block_source.limit_s is {given.limit_s}, it must be above 0 and at most {MAX_LIMIT_S:.0f}",
                "block_source.limit_s",
            )
        return given
