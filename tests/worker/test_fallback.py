"""A transfer whose connector fails goes on over the next one: the request does not notice, and no block is written twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.common.errors import TransferFailed
from tests.support.engine.hash_model import greedy_answer
from tests.support.run.waiting import HANG_S, eventually

PROMPT = [(7 * i) % 60 for i in range(100)]


async def test_both_ends_have_both_and_the_best_is_used(make_pair: Any) -> None:
    pair = await make_pair("both")
    asked = pair.ask(PROMPT)
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(PROMPT, 4)
    assert (await asked.landed).connector_name == "local"
    assert pair.d.connectors.num_fallbacks == 0


@pytest.mark.parametrize("num_blocks", [0, 3])
async def test_i13_a_silent_connector_is_left_without_failing_the_request(make_pair: Any, num_blocks: int) -> None:
    pair = await make_pair("both", local_stall_s=0.3)
    pair.p.connector.serve_only(num_blocks)
    asked = pair.ask(PROMPT)
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(PROMPT, 4)
    transfer = await asked.landed
    assert (transfer.connector_name, transfer.given_up) == ("tcp", {"local"})
    assert pair.d.connectors.num_fallbacks == 1
    # For a while nothing is tried again that has just failed with this source.
    other = [token + 1 for token in PROMPT[:-1]]
    asked = pair.ask(other)
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(other, 4)
    assert (await asked.landed).connector_name == "tcp"
    assert pair.d.connectors.num_fallbacks == 1
    pair.p.connector.resume()
    await pair.idle()


async def test_wrong_bytes_over_one_connector_are_fetched_over_the_other(make_pair: Any) -> None:
    pair = await make_pair("both")
    pair.p.connector.flip_bits(10_000)
    asked = pair.ask(PROMPT)
    assert await asyncio.wait_for(asked.answer(), HANG_S) == greedy_answer(PROMPT, 4)
    assert (await asked.landed).connector_name == "tcp"


async def test_i6_when_the_last_connector_fails_too_the_request_fails(make_pair: Any) -> None:
    pair = await make_pair("both", local_stall_s=0.3)
    pair.p.connector.serve_only(3)
    await asyncio.to_thread(pair.p.connectors.get("tcp").close)
    asked = pair.ask(PROMPT)
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(asked.answer(), HANG_S)
    pair.leave(asked)
    pair.p.connector.resume()
    await pair.idle()


async def test_i13_a_worker_whose_pool_is_in_quarantine_takes_no_more(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair()
    stats = pair.d.door.side.stats

    def is_full() -> bool:
        # the engine's own numbers may still arrive, from its start
        pair.d.door.side.stats = type(stats)(num_blocks_total=64, num_blocks_quarantined=7)
        return bool(pair.d.adapter.is_quarantine_full)

    assert not is_full(), "reads of an evicted request may be ending"
    monkeypatch.setattr("pdserve.worker.kv_transfer_manager.QUARANTINE_FULL_AFTER_S", 0.05)
    await eventually(is_full, "the quarantine counts as full")
    with pytest.raises(TransferFailed, match="7 blocks"):
        pair.ask(PROMPT)
    pair.d.door.side.stats = stats
    assert not pair.d.adapter.is_quarantine_full
    assert await asyncio.wait_for(pair.ask(PROMPT).answer(), HANG_S) == greedy_answer(PROMPT, 4)


async def test_i7_a_call_that_leaves_in_the_middle_of_a_fallback_leaves_no_block_behind(make_pair: Any) -> None:
    pair = await make_pair("both", local_stall_s=0.3)
    for delay_s in (0.0, 0.3, 0.31):
        pair.d.connectors._avoided.clear()
        pair.p.connector.serve_only(2)
        asked = pair.ask([(token + int(1000 * delay_s)) % 60 for token in PROMPT])
        await asyncio.sleep(delay_s)
        pair.leave(asked)
        await pair.idle()
        pair.p.connector.resume()
