"""`FaultyStore`: a `BlockStore` whose answers a test chooses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence

from pdserve.engine.runner.pool.block_store import BlockStore
from tests.support.engine.engine_harness import Harness
from tests.support.engine.hash_model import prompt_of
from tests.support.run.waiting import HANG_S

Fault = Callable[[bytes, memoryview, int | None], int | None]
"""(name, bytes, digest) of what was read -> the digest that is reported; it may change the bytes."""


class FaultyStore:
    """Wraps a `BlockStore`."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.fault: Fault | None = None
        self.num_faults = 0
        self.loses_writes = False
        self.wrong_find: Callable[[Sequence[bytes], list[bytes]], list[bytes]] | None = None
        """(names, those that are there) -> those that a lookup reports."""
        self.goes_on = threading.Event()
        """Reads, writes and lookups wait for it."""
        self.goes_on.set()

    def names(self) -> list[bytes]:
        return self._store.names()

    def find(self, names: Sequence[bytes]) -> list[bytes]:
        assert self.goes_on.wait(HANG_S)
        found = self._store.find(names)
        return found if self.wrong_find is None else self.wrong_find(names, found)

    def write(self, name: bytes, data: memoryview, digest: int) -> list[bytes]:
        assert self.goes_on.wait(HANG_S)
        return [name] if self.loses_writes else self._store.write(name, data, digest)

    def read(self, name: bytes, into: memoryview) -> int | None:
        assert self.goes_on.wait(HANG_S)
        digest = self._store.read(name, into)
        if self.fault is None:
            return digest
        before = bytes(into)
        try:
            found = self.fault(name, into, digest)
        except OSError:
            self.num_faults += 1
            raise
        self.num_faults += found != digest or bytes(into) != before
        return found

    def forget(self, name: bytes) -> None:
        self._store.forget(name)

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        self.goes_on.set()
        self._store.close()


def faulty_store(engine: Harness) -> FaultyStore:
    """From now on, the store of the engine. To be called before the first request."""
    faulty = FaultyStore(engine.core.executor._host_blocks._store.store)  # type: ignore[attr-defined]
    engine.use_store(faulty)
    return faulty


def wrong_finds(draws: random.Random) -> dict[str, Callable[[Sequence[bytes], list[bytes]], list[bytes]]]:
    """Each way in which a lookup can be wrong."""

    def silent(names: Sequence[bytes], found: list[bytes]) -> list[bytes]:
        raise OSError("the store does not answer")

    def everything(names: Sequence[bytes], found: list[bytes]) -> list[bytes]:
        return list(names)

    def nothing(names: Sequence[bytes], found: list[bytes]) -> list[bytes]:
        return []

    def some(names: Sequence[bytes], found: list[bytes]) -> list[bytes]:
        return [name for name in names if draws.random() < 0.5]

    return {kind.__name__: kind for kind in (silent, everything, nothing, some)}


def lies(draws: random.Random) -> dict[str, Fault]:
    """Each way in which a store can be wrong."""
    last: list[tuple[bytes, int | None]] = []

    def missing(name: bytes, data: memoryview, digest: int | None) -> int | None:
        return None

    def flipped(name: bytes, data: memoryview, digest: int | None) -> int | None:
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        return digest

    def truncated(name: bytes, data: memoryview, digest: int | None) -> int | None:
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        return digest

    def swapped(name: bytes, data: memoryview, digest: int | None) -> int | None:
        """The block of another name, with its digest."""
        last.append((bytes(data), digest))
        data[:], found = last[0]
        return found

    def forged(name: bytes, data: memoryview, digest: int | None) -> int | None:
        """Other bytes with a digest that was made without the key."""
        data[:] = bytes(len(data))
        return draws.getrandbits(64)

    def fails(name: bytes, data: memoryview, digest: int | None) -> int | None:
        raise OSError(5, "Input/output error")

    return {fault.__name__: fault for fault in (missing, flipped, truncated, swapped, forged, fails)}


def announced(engine: Harness, faulty: FaultyStore) -> Iterator[set[bytes]]:
    """Serve prompts that come again, the last of them with damaged blocks; gives after each step the hashes that are announced."""
    known: set[bytes] = set()
    for number, length in enumerate((30, 31, 32, 30, 17, 31, 30, 33, 34, 30, 31, 32, 31, 32, 31, 32)):
        faulty.fault = lies(random.Random(number))["flipped"] if number > 10 else None
        engine.add(prompt_of(length))
        while engine.core.has_work:
            outputs = engine.core.step()
            assert known.isdisjoint(outputs.blocks_stored)
            assert known.issuperset(outputs.blocks_removed)
            known = (known | set(outputs.blocks_stored)) - set(outputs.blocks_removed)
            yield known
