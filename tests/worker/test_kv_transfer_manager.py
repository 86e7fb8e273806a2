"""`KvTransferManager` between two real engine threads: blocks over `local` and `tcp`, and every way in which it may end."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import pytest

from pdserve.common.errors import Evicted, InvalidRequest, TransferFailed
from pdserve.common.request.engine_types import EngineCoreRequest, FinishReason
from pdserve.kv_transfer.control.transfer_state import ReceiverState, SourceState
from tests.support.engine.hash_model import greedy_answer
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.transfer_fakes import expected

PROMPTS = [[(n * 7 + i) % 60 for i in range(n)] for n in (1, 3, 4, 5, 16, 23, 60, 100)]


@pytest.mark.diagonal
@pytest.mark.parametrize("d_on_device", [False, True], ids=["d-host", "d-device"])
@pytest.mark.parametrize("p_on_device", [False, True], ids=["p-host", "p-device"])
@pytest.mark.parametrize("kind", ["local", "tcp"])
async def test_i1_requests_through_p_and_d_give_one_engines_answers(
    make_pair: Any, kind: str, p_on_device: bool, d_on_device: bool
) -> None:
    pair = await make_pair(kind, p={"on_device": p_on_device}, d={"num_blocks": 128, "on_device": d_on_device})
    asked = [pair.ask(prompt, max_tokens=6) for prompt in PROMPTS]
    answers = await asyncio.wait_for(asyncio.gather(*(one.answer() for one in asked)), HANG_S)
    assert answers == [greedy_answer(prompt, 6) for prompt in PROMPTS]
    assert {one.finish_reason for one in asked} == {FinishReason.LENGTH}
    for one in asked:
        transfer = await asyncio.wait_for(one.landed, HANG_S)
        assert transfer.state is ReceiverState.LANDED
        assert await asyncio.wait_for(asyncio.shield(one.transfer.over), HANG_S) is SourceState.RELEASED
    await pair.idle()
    assert pair.d.model.num_tokens == 5 * len(PROMPTS), "decode prefilled something itself"


async def test_what_decode_has_cached_is_not_moved_again(make_pair: Any) -> None:
    pair = await make_pair()
    prompt = PROMPTS[-1]
    for expected_blocks in (25, 0):
        asked = pair.ask(prompt)
        assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(prompt, 4)
        assert (await asked.landed).num_blocks == expected_blocks
        await pair.idle()
    longer = [*prompt, 1, 2, 3]
    asked = pair.ask(longer)
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(longer, 4)
    assert (await asked.landed).num_blocks == 1


async def test_a_prefill_that_ended_before_it_was_wanted_is_done_again_from_cache(make_pair: Any) -> None:
    pair = await make_pair(d={"num_blocks": 32})
    blocker = pair.ask(PROMPTS[-1], max_tokens=28)
    wanted = threading.Event()
    pair.d.model.before_step = lambda: wanted.wait(HANG_S)
    late = pair.ask(PROMPTS[-2], max_tokens=4)
    assert (await asyncio.wait_for(late.prefill.get(), HANG_S)).transfer_unwanted
    wanted.set()
    answers = await asyncio.wait_for(asyncio.gather(blocker.answer(), _rest(late)), HANG_S)
    assert answers[0] == greedy_answer(PROMPTS[-1], 28)
    assert answers[1] == greedy_answer(PROMPTS[-2], 4)[1:]


@pytest.mark.parametrize("index", [0, 2])
async def test_a_prefill_that_is_done_again_ends_with_the_token_of_the_first(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """Without its grammar the second might sample another, and the last entry of a draft head's cache would belong to that one."""
    pair = await make_pair(p={"num_blocks": 32}, d={"num_blocks": 32})
    again: list[EngineCoreRequest] = []
    side = pair.p.adapter.engine
    submit = side.submit_quietly

    def kept(request: EngineCoreRequest) -> None:
        again.append(request)
        submit(request)

    monkeypatch.setattr(side, "submit_quietly", kept)
    wanted = threading.Event()
    pair.d.model.before_step = lambda: wanted.wait(HANG_S)
    blocker = pair.ask(PROMPTS[-1], max_tokens=28)
    late = pair.ask(PROMPTS[-2], max_tokens=4, index=index)
    first = await asyncio.wait_for(late.prefill.get(), HANG_S)
    assert first.transfer_unwanted
    for number in (57, 58, 59):  # take every block of the pool
        other = pair.ask([number] * 60)
        await asyncio.wait_for(other.prefill.get(), HANG_S)
        pair.leave(other)
    wanted.set()
    answers = await asyncio.wait_for(asyncio.gather(blocker.answer(), _rest(late)), HANG_S)
    assert answers[1] == greedy_answer(PROMPTS[-2], 4)[1:]
    assert [request.sampling_params.allowed_token_ids for request in again] == [tuple(first.new_token_ids)]


async def _rest(asked: Any) -> list[int]:
    return [token async for output in asked.decode for token in output.new_token_ids]


async def test_small_pools_on_both_sides_lose_no_request(make_pair: Any) -> None:
    pair = await make_pair("local", p={"num_blocks": 32}, d={"num_blocks": 32})
    prompts = [[(n * 11 + i) % 60 for i in range(10 + 9 * n)] for n in range(10)]

    async def serve(prompt: list[int]) -> list[int]:
        """With the router's part: an evicted request is placed anew."""
        while True:
            asked = pair.ask(prompt, max_tokens=12)
            try:
                return await asked.answer()
            except Evicted:
                pair.leave(asked)

    answers = await asyncio.wait_for(asyncio.gather(*(serve(prompt) for prompt in prompts)), HANG_S)
    assert answers == [greedy_answer(prompt, 12) for prompt in prompts]


@pytest.mark.diagonal
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", ["local", "tcp"])
async def test_i7_calls_that_leave_at_any_moment_leave_no_block_behind(
    make_pair: Any, kind: str, on_device: bool
) -> None:
    pair = await make_pair(
        kind, p={"num_blocks": 48, "on_device": on_device}, d={"num_blocks": 48, "on_device": on_device}
    )
    draw = random.Random(3)
    for _ in range(4):
        asked = [pair.ask(draw.choice(PROMPTS[3:]), max_tokens=8) for _ in range(8)]
        tasks = [asyncio.ensure_future(one.answer()) for one in asked]
        for one in draw.sample(asked, 5):
            await asyncio.sleep(draw.choice([0, 0, 0.001, 0.004]))
            pair.leave(one)
        kept = [(one, task) for one, task in zip(asked, tasks, strict=True) if one.decode.request_id in _streams(pair)]
        for one, task in kept:
            assert await asyncio.wait_for(task, HANG_S) == greedy_answer(one.prompt, 8)
        for one, task in zip(asked, tasks, strict=True):
            task.cancel()
            pair.leave(one)
        await asyncio.gather(*tasks, return_exceptions=True)
        await pair.idle()


def _streams(pair: Any) -> dict[str, object]:
    return dict(pair.d.engine._streams)


async def test_one_turned_bit_is_read_again_and_many_fail_the_transfer(make_pair: Any) -> None:
    pair = await make_pair()
    pair.p.connector.flip_bits(1)
    prompt = PROMPTS[-1]
    assert await asyncio.wait_for(pair.ask(prompt).answer(), HANG_S) == greedy_answer(prompt, 4)
    await pair.idle()
    pair.p.connector.flip_bits(10_000)
    other = [(token + 1) % 60 for token in prompt]
    asked = pair.ask(other)
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(asked.answer(), HANG_S)
    pair.leave(asked)
    pair.p.connector.flip_bits(0)
    await pair.idle()
    assert await asyncio.wait_for(pair.ask(other).answer(), HANG_S) == greedy_answer(other, 4)


async def test_digests_that_fail_after_the_end_of_their_transfer_are_no_unread_error(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair("local", p={"on_device": True})
    begun, may_fail = threading.Event(), threading.Event()

    def digest(*_: object) -> list[int]:
        begun.set()
        may_fail.wait(HANG_S)
        raise TransferFailed("a rank has ended")

    monkeypatch.setattr(pair.p.adapter, "_digest", digest)
    unread: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    asked = pair.ask(PROMPTS[-1])
    assert await asyncio.to_thread(begun.wait, HANG_S)
    pair.leave(asked)
    await eventually(lambda: asked.transfer.has_ended)
    may_fail.set()
    await pair.idle()
    gc.collect()
    assert unread == []


async def test_i6_a_source_whose_data_plane_is_silent_fails_the_request_in_time(make_pair: Any) -> None:
    pair = await make_pair(local_stall_s=0.3)
    pair.p.connector.serve_only(3)
    asked = pair.ask(PROMPTS[-1])
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(asked.answer(), 5)
    pair.leave(asked)
    pair.p.connector.resume()
    await pair.idle()
    assert await asyncio.wait_for(pair.ask(PROMPTS[-1]).answer(), HANG_S) == greedy_answer(PROMPTS[-1], 4)


async def test_i6_a_source_whose_server_dies_fails_the_request_within_the_grace(make_pair: Any) -> None:
    pair = await make_pair(p={"grace_s": 0.4}, d={"grace_s": 0.4})
    pair.p.connector.pause()
    asked = pair.ask(PROMPTS[-1])
    await eventually(lambda: pair.d.adapter.transfer(asked.decode.request_id).state is ReceiverState.RECEIVING)
    await pair.p.server.stop(None)
    pair.p.server = None
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(asked.answer(), 6)
    pair.leave(asked)
    pair.p.connector.resume()
    await pair.idle()


async def test_a_request_that_is_there_already_is_refused_and_disturbs_nothing(make_pair: Any) -> None:
    pair = await make_pair()
    asked = pair.ask(PROMPTS[-1], max_tokens=8)
    receiver = pair.d.adapter._receivers[asked.decode.request_id]
    with pytest.raises(InvalidRequest, match="already"):
        pair.d.adapter.receive(asked.decode.request_id, receiver.transfer.source)
    source = pair.p.adapter._sources[asked.prefill.request_id]
    other = pair.p.transfers.expect(expected(request_id=asked.prefill.request_id))
    with pytest.raises(InvalidRequest, match="already"):
        pair.p.adapter.source(source.request, other)
    assert other.state is SourceState.CANCELLED
    with pytest.raises(InvalidRequest, match="already"):
        pair.d.engine.verify(source.request)
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(PROMPTS[-1], 8)


async def test_a_first_token_that_ends_the_request_ends_both_calls(make_pair: Any) -> None:
    pair = await make_pair()
    prompt = PROMPTS[5]
    asked = pair.ask(prompt, max_tokens=9, stop_token_ids=(greedy_answer(prompt, 1)[0],))
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(prompt, 1)
    pair.leave(asked)
