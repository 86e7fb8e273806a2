"""`MemoryReturn`: when freed memory is given back, and that it is."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time

import pytest

from pdserve.common.processes import memory_return
from pdserve.common.processes.memory_return import CHANGED_BYTES, MemoryReturn
from tests.support.run.process_memory import resident_bytes, settled_bytes
from tests.support.run.waiting import eventually

BLOCK_BYTES = 8 << 10
NUM_BLOCKS = 16_384


def test_it_is_due_when_memory_has_grown_and_grows_no_longer() -> None:
    memory = MemoryReturn()
    start, step = 100 << 20, CHANGED_BYTES
    memory.returned(start, 0)
    assert not memory.is_due(start + step // 2, 0)
    assert not memory.is_due(start + 4 * step, 0)
    assert not memory.is_due(start + 8 * step, 0)
    assert memory.is_due(start + 8 * step, 0)
    # what is left is in use: nothing is tried again until more comes
    memory.returned(start + 6 * step, 0)
    assert not memory.is_due(start + 6 * step, 0)
    # what left by itself is the new measure
    assert not memory.is_due(start, 0)
    assert not memory.is_due(start + 2 * step, 0)
    assert memory.is_due(start + 2 * step, 0)


def test_it_is_due_when_what_was_in_use_at_the_last_return_is_free() -> None:
    memory = MemoryReturn()
    start, step = 100 << 20, CHANGED_BYTES
    memory.returned(start + 8 * step, 9 * step)
    assert not memory.is_due(start + 8 * step, 9 * step)
    assert memory.is_due(start + 8 * step, 2 * step)
    memory.returned(start + step, 2 * step)
    assert not memory.is_due(start + step, 2 * step)


async def test_free_blocks_between_blocks_in_use_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_return, "LOOK_EVERY_S", 0.05)
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    # blocks that earlier tests have left free would be taken first
    before = settled_bytes()
    memory = MemoryReturn()
    running = asyncio.create_task(memory.run())
    await eventually(lambda: memory._last > 0)
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    kept = blocks[:: NUM_BLOCKS // 64]
    assert resident_bytes() > before + 100 * (1 << 20)
    for block in set(blocks) - set(kept):
        libc.free(block)
    try:
        await eventually(
            lambda: resident_bytes() < before + 16 * (1 << 20), lambda: f"{before} then {resident_bytes()} bytes"
        )
    finally:
        running.cancel()
        for block in kept:
            libc.free(block)


async def test_looks_that_take_long_are_rare_and_hold_up_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def look() -> tuple[tuple[int, int], float]:
        assert threading.current_thread() is not threading.main_thread()
        looks.append(time.monotonic())
        return (1, 1), 0.002

    monkeypatch.setattr(memory_return, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(memory_return, "_look", look)
    running = asyncio.create_task(MemoryReturn().run())
    await eventually(lambda: len(looks) == 3)
    running.cancel()
    assert looks[2] - looks[0] >= 2 * 0.2
