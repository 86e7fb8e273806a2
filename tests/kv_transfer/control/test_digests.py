"""The digest of blocks is agreed upon in the control stream, and neither side can be brought to take less than it asks for."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import pytest

from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import GMAC, XXH3, XXH3_64, BlockDigest, Gmac
from pdserve.kv_transfer.control.transfer_state import ReceiverState, SourceState
from pdserve.kv_transfer.pull.digest import block_digests
from pdserve.kv_transfer.pull.digest_rule import DigestRule
from pdserve.v1 import kv_source_pb2

from .conftest import NUM_BLOCKS, sub_key


async def land(rig: Any, until: Any, **changes: Any) -> str:
    """One block from end to end; the digest's name."""
    source = rig.expect()
    transfer = rig.receive(**changes)
    transfer.room(0, [10], [0])
    await until(lambda: source.is_wanted)
    rig.settle(source, 0, 1)
    rig.compute(source)
    await until(lambda: transfer.state is ReceiverState.LANDED)
    assert rig.same(1, 10)
    name: str = source.digest.name
    return name


async def test_beyond_loopback_blocks_in_the_clear_have_a_code(rig: Any, until: Any) -> None:
    # the rig's receiver knows its source by no address of this machine
    assert await land(rig, until) == GMAC


async def test_under_tls_a_checksum_is_enough(rig: Any, until: Any) -> None:
    rig.source_digests = rig.digests = DigestRule("auto", sub_key, clear=False)
    assert await land(rig, until) == XXH3_64


@pytest.mark.parametrize("forged_with", [XXH3, Gmac(bytes(32))], ids=["no key", "another key"])
async def test_blocks_that_were_forged_with_their_digests_are_not_taken(
    rig: Any, until: Any, forged_with: BlockDigest
) -> None:
    """Whoever sits between the two rewrites the bytes and what is published of them."""
    source = rig.expect()
    transfer = rig.receive()
    transfer.room(0, [10], [0])
    await until(lambda: source.is_wanted)
    rig.source_pool.block(1)[:] = b"\xff" * len(rig.source_pool.block(1))
    source.settled(0, [1], [tuple(block_digests(rig.source_pool, [1], forged_with))])
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert type(rig.owner.cause) is TransferFailed
    assert "does not match its digest" in rig.owner.cause.message
    assert transfer.num_landed == 0


async def test_blocks_of_one_transfer_cannot_change_places(rig: Any, until: Any) -> None:
    source = rig.expect()
    transfer = rig.receive()
    transfer.room(0, [10, 11], [0, 0])
    await until(lambda: source.is_wanted)
    first, second = block_digests(rig.source_pool, [1, 2], source.digest)
    source.settled(0, [2, 1], [(second,), (first,)])
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "does not match its digest" in rig.owner.cause.message


@pytest.mark.parametrize("name", [XXH3_64, "md5", ""])
async def test_a_digest_that_was_not_offered_ends_the_transfer(rig: Any, until: Any, name: str) -> None:
    """Or whoever sits between the two would choose one that needs no key."""

    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        opening = (await anext(aiter(requests))).open
        assert list(opening.digest_algorithms) == [GMAC]
        yield kv_source_pb2.AttachEvent(
            accepted=kv_source_pb2.Accepted(connector="local", metadata=b"", token=b"k" * 16, digest_algorithm=name)
        )
        async for _ in requests:
            pass

    await rig.play(source)
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert f"the digest algorithm {name!r}, which was not asked for" in rig.owner.cause.message


async def test_sides_without_a_common_digest_say_so(rig: Any, until: Any) -> None:
    source = rig.expect()
    rig.source_digests = DigestRule("gmac", sub_key, clear=True)
    await rig.server.stop(None)
    await rig.serve(rig.port)
    transfer = rig.receive(digests=DigestRule("xxh3_64", sub_key, clear=True))
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "no common digest algorithm: gmac here, xxh3_64 there (kv_digest)" in rig.owner.cause.message
    assert not source.has_ended


async def test_other_deployment_keys_make_other_digests(rig: Any, until: Any) -> None:
    source = rig.expect()
    other = DigestRule("auto", lambda context: sub_key(b"other" + context), clear=True)
    # its answer would not be taken either, see test_odd_sources.py
    other.answer_proof = rig.digests.answer_proof  # type: ignore[method-assign]
    transfer = rig.receive(digests=other)
    transfer.room(0, [10], [0])
    await until(lambda: source.is_wanted)
    rig.settle(source, 0, 1)
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "does not match its digest" in rig.owner.cause.message


@pytest.mark.parametrize(("first_index", "num_blocks"), [(0, NUM_BLOCKS + 1), (NUM_BLOCKS, 1), (2**32 - 1, 2**32 - 1)])
async def test_a_wish_beyond_the_prompt_is_its_receivers_error_and_pins_nothing(
    rig: Any, until: Any, first_index: int, num_blocks: int
) -> None:
    source = rig.expect()
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.ATTACHED)
    transfer._stream.want(first_index, num_blocks)
    await until(lambda: source.has_ended)
    assert source.state is SourceState.FAILED
    assert source.num_wanted == 0
    assert ("wanted", first_index) not in rig.source_owner.heard
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert (
        f"Want.first_index is {first_index}, Want.num_blocks is {num_blocks}: together at most {NUM_BLOCKS}"
        in rig.owner.cause.message
    )


async def test_a_receiver_that_has_everything_wants_nothing(rig: Any, until: Any) -> None:
    source = rig.expect()
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.ATTACHED)
    transfer.room(NUM_BLOCKS, [], [])
    await until(lambda: source.is_wanted)
    rig.compute(source)
    await until(lambda: transfer.state is ReceiverState.LANDED)
