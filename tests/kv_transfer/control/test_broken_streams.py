"""Streams of the receiver that end before they are connected, or during a write."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest

from pdserve.common.net.rpc import make_channel
from pdserve.kv_transfer.control.transfer_state import ReceiverState
from tests.support.processes.reserved_port import reserved_port


class HidingChannel:
    """A channel whose first calls end as grpc.aio ends a call that the server refuses during a write."""

    def __init__(self, channel: Any, num_hidden: int) -> None:
        self._channel, self.num_hidden = channel, num_hidden
        self.num_calls = 0

    def stream_stream(self, *arguments: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            self.num_calls += 1
            made = self._channel.stream_stream(*arguments)(*given, **options)
            if self.num_calls <= self.num_hidden:
                made.read = self._read
            return made

        return call

    async def _read(self) -> Any:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details="Internal error from Core")

    async def close(self) -> None:
        await self._channel.close()


@pytest.mark.parametrize(("num_hidden", "cause"), [(1, "failed to connect"), (2, "Internal error from Core")])
async def test_a_hidden_status_is_asked_for_once_more(rig: Any, until: Any, num_hidden: int, cause: str) -> None:
    await rig.channel.close()
    with reserved_port() as port:
        rig.channel = HidingChannel(make_channel(f"127.0.0.1:{port}"), num_hidden)
        transfer = rig.receive(grace_s=0.0)
        await until(lambda: transfer.state is ReceiverState.FAILED)
    assert cause in rig.owner.cause.message
    assert rig.channel.num_calls == 2


async def test_streams_that_end_before_they_are_connected_leave_no_task(rig: Any, until: Any) -> None:
    """grpc.aio forgets the task that reads an iterator of requests; asyncio then reports an error."""
    before = asyncio.all_tasks()
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, report: reports.append(report))
    await rig.channel.close()
    with reserved_port() as port:
        for num_turns in range(60):
            rig.channel = make_channel(f"127.0.0.1:{port}")
            rig.receive()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            rig.tasks.pop().cancel()
            await rig.channel.close()
    gc.collect()
    await until(lambda: asyncio.all_tasks() <= before)
    # grpc.aio's poller may still call into the closed loop of a test before
    assert [report for report in reports if "task" in report] == []
