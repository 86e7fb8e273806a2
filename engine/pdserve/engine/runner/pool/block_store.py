"""`BlockStore`: a place for KV blocks below host memory, by name. `SealedStore` believes nothing that comes back from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.common.security.block_digest import BlockDigest


class BlockStore(Protocol):
    """Thread-safe. A call takes as long as the device or the network does, so the engine thread makes none."""

    def names(self) -> list[bytes]:
        """Names of the blocks that it has from before, first written first; none of a store that workers share."""

    def find(self, names: Sequence[bytes]) -> list[bytes]:
        """Those of the names that it has now. Called for a store that workers share, where nothing else tells.

        Raises: OSError if it does not answer.
        """

    def write(self, name: bytes, data: memoryview, digest: int) -> list[bytes]:
        """Keep a block; returns the names of those that it does not have any more, or its own."""

    def read(self, name: bytes, into: memoryview) -> int | None:
        """Read a block of as many bytes; returns the digest that it was written with. None if it is not there, or cannot be had;
        `into` may have anything then. Raises: OSError."""

    def forget(self, name: bytes) -> None:
        """What it has by this name is not what was written."""

    def clear(self) -> None:
        """Give up every block: none of them is found or read afterwards. Raises: OSError."""

    def close(self) -> None:
        """Keep the blocks for the next start; no other call follows."""


@dataclass(frozen=True, slots=True)
class SealedStore:
    """Blocks that are written with a digest of name and bytes, which is compared when they are read."""

    store: BlockStore
    digest: BlockDigest

    def write(self, name: bytes, data: memoryview) -> list[bytes]:
        """As `BlockStore.write`."""
        return self.store.write(name, data, self._digest(name, data))

    def read(self, name: bytes, into: memoryview) -> bool:
        """True if `into` now has the bytes that were written by this name."""
        try:
            written = self.store.read(name, into)
        except OSError:
            written = None
        if written is None:
            return False
        is_whole = written == self._digest(name, into)
        if not is_whole:
            self.store.forget(name)
        return is_whole

    def _digest(self, name: bytes, data: memoryview) -> int:
        number = hashlib.blake2b(name, digest_size=8).digest()
        return self.digest.of(data, int.from_bytes(number, "big"))
