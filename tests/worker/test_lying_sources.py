"""A worker that has cached blocks lies about them, damages them or falls silent: the reader computes, and caches nothing wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pdserve.kv_transfer.control.attach_servicer import AttachServicer, answer_parts
from pdserve.v1 import kv_source_pb2
from tests.support.engine.hash_model import greedy_answer, stored_block
from tests.support.run.waiting import HANG_S

from .conftest import BLOCK_SIZE, DIGESTS, HASHER, ROOT, answer_of

Event = kv_source_pb2.AttachEvent


def _number(draw: random.Random, number: int) -> int:
    return max(0, draw.choice([number + 1, number - 1, 0, number + 7, 2**32 - 1]))


def _accepted(draw: random.Random, event: Event) -> None:
    accepted = event.accepted
    match draw.randrange(6):
        case 0 | 1:
            accepted.num_blocks = _number(draw, accepted.num_blocks)
        case 2:
            accepted.token = draw.randbytes(draw.choice([0, 16, 17]))
        case 3:
            accepted.connector = draw.choice(["", "nixl", "nobody"])
        case 4:
            accepted.digest_algorithm = draw.choice(["", "crc", "gmac"])
        case _:
            accepted.metadata = draw.randbytes(draw.choice([0, 9]))


def _published(draw: random.Random, event: Event) -> None:
    published = event.published
    match draw.randrange(4):
        case 0:
            published.first_index = _number(draw, published.first_index)
        case 1:
            published.digests[draw.randrange(len(published.digests))] ^= 1 << draw.randrange(64)
        case 2:
            published.locations[draw.randrange(len(published.locations))] = draw.choice([0, 1, 63, 64, 2**31])
        case _:
            del published.digests[-1]
    if published.HasField("finished") and draw.random() < 0.5:
        _finished(draw, published.finished)


def _finished(draw: random.Random, finished: kv_source_pb2.Finished) -> None:
    match draw.randrange(3):
        case 0:
            finished.num_tokens = _number(draw, finished.num_tokens)
        case 1:
            finished.request_digest = draw.randbytes(16)
        case _:
            finished.first_outputs.add(token_ids=[draw.randrange(60)])


def liar(draw: random.Random, lies: Counter[str]) -> Callable[..., AsyncIterator[Event]]:
    """`AttachServicer.Attach` with one lie in most streams."""
    honest = AttachServicer.Attach

    async def attach(self: AttachServicer, requests: Any, context: Any) -> AsyncIterator[Event]:
        kind, held = draw.choice(["accepted", "published", "drop", "twice", "late", "end", "none"]), None
        place, number = draw.randrange(3), 0
        opening: list[Any] = []

        async def heard() -> AsyncIterator[Any]:
            async for request in requests:
                opening.append(request)
                yield request

        async for event in honest(self, heard(), context):
            what = event.WhichOneof("event")
            if what == "accepted" and kind == "accepted":
                _accepted(draw, event)
                if draw.random() < 0.7:  # it has the key
                    ours = DIGESTS.answer_proof(
                        opening[0].open.transfer_id, opening[0].open.source_epoch, answer_parts(event.accepted)
                    )
                    event.accepted.proof = ours
                lies[kind] += 1
            elif what == "published" and kind == "published":
                _published(draw, event)
                lies[kind] += 1
            elif kind in ("drop", "twice", "late", "end") and number == place:
                lies[kind] += 1
                if kind == "end":
                    return
                if kind == "twice":
                    yield event
                if kind == "late":
                    held = event
                if kind != "twice":
                    number += 1
                    continue
            number += 1
            yield event
            if held is not None:
                yield held
                held = None

    return attach


@pytest.mark.parametrize(
    "num_requests", [150, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
async def test_i3_i8_i15_lies_of_a_source_reach_no_cache_and_no_answer(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch, num_requests: int
) -> None:
    draw, lies, contents = random.Random(7), Counter[str](), dict[bytes, list[int]]()
    monkeypatch.setattr(AttachServicer, "Attach", liar(draw, lies))
    pair = await make_pair("local", local_stall_s=0.2, grace_s=0.05)
    reader, source = pair.p, pair.d
    for number in range(num_requests):
        prompt = [draw.randrange(60) for _ in range(draw.randint(5, 60))]
        answer = greedy_answer(prompt, 2)
        for place, block_hash in enumerate(HASHER.extend(ROOT, [*prompt, *answer])):
            first = place * BLOCK_SIZE
            contents[block_hash] = stored_block([*prompt, *answer][first : first + BLOCK_SIZE], first)
        await answer_of(pair.ask_alone(source, prompt, max_tokens=2))
        if draw.random() < 0.2:
            source.connector.flip_bits(draw.randint(1, 4))
            lies["bits"] += 1
        assert await answer_of(pair.ask_alone(reader, prompt, source, 0.1, max_tokens=2)) == answer, f"request {number}"
        source.connector.flip_bits(0)
        if number % 10 == 0:
            await asyncio.wait_for(reader.idle(), HANG_S)
            for block in reader.core.scheduler.pool.blocks:
                if block.block_hash is not None:
                    assert reader.cache[block.row].tolist() == contents[block.block_hash], f"{block} after {number}"
    assert min(lies.values()) >= num_requests // 50, lies
    assert reader.core.scheduler.receives.num_fetched_tokens > num_requests, "too few honest answers to show anything"
    await pair.idle()
