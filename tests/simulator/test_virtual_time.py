"""The event loop of virtual time: what waits costs nothing, and the order of everything is fixed."""

from __future__ import annotations

import asyncio
import time

import pytest

from pdserve.common import clock
from pdserve.simulator.virtual_time import Stalled, VirtualTime, run_virtually


def test_an_hour_of_waiting_takes_no_time() -> None:
    async def main(virtual: VirtualTime) -> float:
        await asyncio.gather(*(asyncio.sleep(3600.0) for _ in range(100)))
        return virtual.now_s

    began = time.monotonic()
    assert run_virtually(main) == pytest.approx(3600.0)
    assert time.monotonic() < began + 60.0


def test_timers_run_in_their_order_and_those_of_one_moment_as_they_were_set() -> None:
    async def main(virtual: VirtualTime) -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, int]] = []

        def note(number: int) -> None:
            seen.append((virtual.now_s, number))

        for number, delay_s in enumerate([3.0, 1.0, 2.0] * 40):
            loop.call_later(delay_s, note, number)
        await asyncio.sleep(4.0)
        return seen

    seen = run_virtually(main)
    expected = [
        (delay_s, number) for delay_s, first in ((1.0, 1), (2.0, 2), (3.0, 0)) for number in range(first, 120, 3)
    ]
    assert [number for _, number in seen] == [number for _, number in expected]
    assert [at for at, _ in seen] == pytest.approx([at for at, _ in expected])


def test_the_product_reads_the_virtual_clock_and_the_machines_again_afterwards() -> None:
    async def main(virtual: VirtualTime) -> tuple[float, float]:
        before, unix = clock.monotonic(), clock.unix_s()
        async with asyncio.timeout(None):
            await asyncio.sleep(5.0)
        return clock.monotonic() - before, clock.unix_s() - unix

    assert run_virtually(main) == (pytest.approx(5.0), pytest.approx(5.0))
    assert clock.monotonic() == pytest.approx(time.monotonic(), abs=60.0)


def test_what_waits_for_nothing_stalls() -> None:
    async def main(virtual: VirtualTime) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stalled):
        run_virtually(main)


def test_timeouts_are_of_virtual_time() -> None:
    async def main(virtual: VirtualTime) -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 7.0)
        return virtual.now_s

    assert run_virtually(main) == pytest.approx(7.0)


def test_time_that_is_spent_apart_passes_for_nobody_else() -> None:
    async def main(virtual: VirtualTime) -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[str, float]] = []
        loop.call_later(1.0, lambda: seen.append(("timer", virtual.now_s)))
        with virtual.apart() as spent:
            virtual.spend(2.0)
            # a message that leaves at the end of what was computed
            loop.call_soon_threadsafe(lambda: seen.append(("message", virtual.now_s)))
            seen.append(("apart", virtual.now_s))
        assert spent() == 2.0
        seen.append(("after", virtual.now_s))
        await asyncio.sleep(3.0)
        return seen

    assert run_virtually(main) == [("apart", 2.0), ("after", 0.0), ("timer", 1.0), ("message", 2.0)]


def test_functions_for_threads_run_at_once() -> None:
    async def main(virtual: VirtualTime) -> tuple[int, float]:
        with pytest.raises(ValueError, match="invalid literal"):
            await asyncio.to_thread(int, "x")
        return await asyncio.to_thread(lambda: 3), virtual.now_s

    assert run_virtually(main) == (3, 0.0)
