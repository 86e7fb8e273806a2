"""Blocks by hash between two workers, in both directions: real engine threads, control stream and data plane."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from tests.support.engine.hash_model import greedy_answer
from tests.support.run.waiting import HANG_S, eventually

from .conftest import answer_of

PROMPT = [(7 * i) % 60 for i in range(100)]


@pytest.mark.parametrize("kind", ["local", "tcp"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
async def test_i1_each_worker_reads_what_the_other_has(make_pair: Any, kind: str, on_device: bool) -> None:
    pair = await make_pair(kind, p={"on_device": on_device}, d={"on_device": on_device})
    for number, (reader, source) in enumerate([(pair.p, pair.d), (pair.d, pair.p)]):
        prompt = [50 + number, *PROMPT]
        assert await answer_of(pair.ask_alone(source, prompt)) == greedy_answer(prompt, 4)
        before = reader.model.num_tokens
        assert await answer_of(pair.ask_alone(reader, prompt, source)) == greedy_answer(prompt, 4)
        assert reader.model.num_tokens - before == 1 + 3
        # the answer, too: the next turn of a conversation
        longer = [*prompt, *greedy_answer(prompt, 4), 3, 4, 5]
        assert await answer_of(pair.ask_alone(source, longer)) == greedy_answer(longer, 4)
    await pair.idle()


async def test_a_prefill_worker_reads_the_answer_of_the_turn_before_from_decode(make_pair: Any) -> None:
    """D to P, then P to D."""
    pair = await make_pair("tcp", d={"num_blocks": 128})
    asked = pair.ask(PROMPT, max_tokens=20)
    answer = await asyncio.wait_for(asked.answer(), HANG_S)
    turn = [*PROMPT, *answer, 8, 9]
    before = pair.p.model.num_tokens
    assert await answer_of(pair.ask_alone(pair.p, turn, pair.d, max_tokens=1)) == greedy_answer(turn, 1)
    assert pair.p.model.num_tokens - before == len(turn) - (len(PROMPT) + 19) // 4 * 4
    await pair.idle()


async def test_nothing_is_there(make_pair: Any) -> None:
    pair = await make_pair()
    assert await answer_of(pair.ask_alone(pair.p, PROMPT, pair.d)) == greedy_answer(PROMPT, 4)
    assert await answer_of(pair.ask_alone(pair.d, [1, 2], pair.p)) == greedy_answer([1, 2], 4)
    await pair.idle()


async def test_i8_what_another_tenant_has_is_not_found(make_pair: Any) -> None:
    pair = await make_pair()
    await answer_of(pair.ask_alone(pair.d, PROMPT))
    request = pair._request(PROMPT)
    request.block_hashes = [bytes([block_hash[0] ^ 1]) + block_hash[1:] for block_hash in request.block_hashes]
    assert await pair.d.adapter.look_up("forged", tuple(request.block_hashes)) == 0
    await pair.idle()


async def test_i6_a_source_that_does_not_answer_costs_its_limit(make_pair: Any) -> None:
    pair = await make_pair()
    await answer_of(pair.ask_alone(pair.d, PROMPT))
    assert pair.d.server is not None
    await pair.d.server.stop(None)
    pair.d.server = None
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await answer_of(pair.ask_alone(pair.p, PROMPT, pair.d, limit_s=0.5)) == greedy_answer(PROMPT, 4)
    assert loop.time() - began < 2 * 0.5 + 1
    await pair.idle()


async def test_i6_a_data_plane_that_is_silent_costs_the_limit(make_pair: Any) -> None:
    pair = await make_pair("local", local_stall_s=HANG_S)
    await answer_of(pair.ask_alone(pair.d, PROMPT))
    pair.d.connector.pause()
    assert await answer_of(pair.ask_alone(pair.p, PROMPT, pair.d, limit_s=0.3)) == greedy_answer(PROMPT, 4)
    pair.d.connector.resume()
    await pair.idle()


async def test_a_reader_that_is_busy_itself_does_not_give_its_source_up(make_pair: Any) -> None:
    pair = await make_pair("tcp")
    await answer_of(pair.ask_alone(pair.d, PROMPT))
    before = pair.p.model.num_tokens
    pair.p.adapter.engine.post(lambda core: time.sleep(0.8))  # as long as a step of another request may take
    assert await answer_of(pair.ask_alone(pair.p, PROMPT, pair.d, limit_s=0.4)) == greedy_answer(PROMPT, 4)
    assert pair.p.model.num_tokens - before < 4 + 4, "only the end of the prompt is computed"
    await pair.idle()


async def test_both_read_from_each_other_while_blocks_are_given_up(make_pair: Any) -> None:
    """Pools of a quarter of what is asked for: what was found is often reused before it is wanted, and no answer differs."""
    pair = await make_pair("tcp", p={"num_blocks": 48}, d={"num_blocks": 48})
    draw = random.Random(3)
    stems = [[draw.randrange(60) for _ in range(60)] for _ in range(6)]

    async def one() -> None:
        prompt = [
            *draw.choice(stems)[: draw.randint(10, 60)],
            *(draw.randrange(60) for _ in range(draw.randint(0, 20))),
        ]
        reader, source = draw.sample([pair.p, pair.d], 2)
        assert await answer_of(pair.ask_alone(reader, prompt, source)) == greedy_answer(prompt, 4)

    async with asyncio.timeout(4 * HANG_S):
        for _ in range(20):
            await asyncio.gather(*(one() for _ in range(6)))
    await pair.idle()
    assert pair.p.adapter.num_ended["receiver", "landed"] > 5, "too few reads to show anything"


async def test_calls_that_leave_while_blocks_come_leave_nothing(make_pair: Any) -> None:
    pair = await make_pair("tcp")
    await answer_of(pair.ask_alone(pair.d, PROMPT))
    draw = random.Random(1)
    for number in range(30):
        stream = pair.ask_alone(pair.p, [*PROMPT[: 60 + number], number % 60], pair.d)
        for _ in range(draw.randint(0, 12)):
            await asyncio.sleep(0)
        pair.p.engine.release(stream)
    await eventually(lambda: pair.d.adapter.num_pinned == 0)
    await pair.idle()
