"""Blocks between a pool on a device and the memory that connectors reach: order, failure, and what waits for what."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pdserve.common.errors import TransferFailed
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.output_stream import OutputStream
from tests.support.engine.hash_model import greedy_answer
from tests.support.run.waiting import HANG_S, eventually

PROMPT = [(7 * i) % 60 for i in range(41)]
ON_DEVICE = {"p": {"on_device": True}, "d": {"on_device": True}}


def _instead(pool: Any, name: str, copy: Any) -> None:
    """Replace a copy of a `DevicePool`; `copy` is given the real one."""
    real = getattr(pool, name)
    setattr(pool, name, lambda *args: copy(real, *args))


async def test_i13_blocks_that_are_being_copied_are_nobody_elses(make_pair: Any) -> None:
    pair = await make_pair(**ON_DEVICE)
    begun, go_on = threading.Event(), threading.Event()

    def slow(real: Any, *args: Any) -> None:
        begun.set()
        assert go_on.wait(HANG_S)
        real(*args)

    _instead(pair.d.device_pool, "move_in", slow)
    asked = pair.ask(PROMPT)
    await asyncio.to_thread(begun.wait, HANG_S)
    pair.leave(asked)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    pair.d.door.side.post(lambda _: loop.call_soon_threadsafe(told.set))
    await asyncio.wait_for(told.wait(), HANG_S)
    assert pair.d.core.scheduler.pool.num_in_use == 11, "blocks went back while a copy still writes them"
    go_on.set()
    await pair.idle()
    assert await asyncio.wait_for(pair.ask(PROMPT).answer(), HANG_S) == greedy_answer(PROMPT, 4)


@pytest.mark.parametrize(("side", "copy"), [("p", "digests"), ("d", "move_in")])
async def test_a_copy_that_fails_fails_its_transfer_alone(make_pair: Any, side: str, copy: str) -> None:
    pair = await make_pair(**ON_DEVICE)
    pool = getattr(pair, side).device_pool
    num_failures = 1

    def once(real: Any, *args: Any) -> Any:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise RuntimeError("an uncorrectable memory error")
        return real(*args)

    _instead(pool, copy, once)
    asked = pair.ask(PROMPT)
    with pytest.raises(TransferFailed):  # decode's call; prefill's may end before its token
        await asyncio.wait_for(_all_of(asked.decode), HANG_S)
    if side == "p":
        await asyncio.wait_for(asyncio.shield(asked.transfer.over), HANG_S)
        assert "uncorrectable" in asked.transfer.cause.message
    pair.leave(asked)
    await pair.idle()
    assert await asyncio.wait_for(pair.ask(PROMPT).answer(), HANG_S) == greedy_answer(PROMPT, 4)


async def test_what_landed_before_a_failure_is_cached_though_it_was_still_being_copied(make_pair: Any) -> None:
    pair = await make_pair(**ON_DEVICE, local_stall_s=0.3)
    go_on = threading.Event()

    def slow(real: Any, *args: Any) -> None:
        assert go_on.wait(HANG_S)
        real(*args)

    _instead(pair.d.device_pool, "move_in", slow)
    pair.p.connector.serve_only(3)
    asked = pair.ask(PROMPT)
    transfer = pair.d.adapter.transfer(asked.decode.request_id)
    await eventually(lambda: pair.d.connector.read_counters["failed_windows"])
    assert not transfer.is_ending, "the failure was reported before what had landed"
    go_on.set()
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(_all_of(asked.decode), HANG_S)
    pair.leave(asked)
    pair.p.connector.resume()
    await pair.idle()
    assert pair.d.core.scheduler.pool.num_cached == transfer.num_landed == 3
    assert await asyncio.wait_for(pair.ask(PROMPT).answer(), HANG_S) == greedy_answer(PROMPT, 4)


async def test_a_step_of_the_blocks_last_owner_overwrites_nothing_that_landed(make_pair: Any) -> None:
    """An aborted prefill's step may still be running on the device when its blocks receive another prompt."""
    pair = await make_pair(
        p={"on_device": True, "late": True}, d={"on_device": True, "late": True, "num_blocks": 12, "max_model_len": 48}
    )
    aborted = EngineCoreRequest(
        request_id="aborted",
        prompt_token_ids=[(5 * i) % 60 for i in range(40)],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=4),
        prefill_here=True,
    )

    def begin_and_abort(core: EngineCore) -> None:
        core.add_request(aborted)
        core.step()
        core.abort_request("aborted")

    pair.d.door.side.post(begin_and_abort)
    asked = pair.ask(PROMPT)
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(PROMPT, 4)
    pair.leave(asked)
    await pair.idle()


async def _all_of(stream: OutputStream) -> None:
    async for _ in stream:
        pass
