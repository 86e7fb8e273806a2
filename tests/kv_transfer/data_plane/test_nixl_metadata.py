"""A source's NIXL metadata with any field wrong: what no library may get is refused before, in time."""

from __future__ import annotations

import time

import pytest

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.nixl.nixl_settings import HELLO_BYTES, MAX_BLOCKS, MAX_DEVICES, MAX_METADATA_BYTES, NixlAddress
from tests.support.inputs.wrong_fields import wrong_structs
from tests.support.run.loop_watch import LOOP_S

GOOD = NixlAddress(
    agent="a-source", agent_metadata=b"m" * 64, address=1 << 40, block_bytes=4096, num_blocks=64, hello_address=1 << 41,
    hello=b"h" * HELLO_BYTES,
)  # fmt: skip


def test_metadata_is_read_as_it_was_written() -> None:
    assert NixlAddress.from_metadata(GOOD.to_metadata()) == GOOD


def test_a_wrong_field_is_refused_or_within_its_range() -> None:
    refusals = []
    for case in wrong_structs(GOOD.to_metadata(), NixlAddress):
        began_at = time.thread_time()
        try:
            taken = NixlAddress.from_metadata(case.messages[0])
        except TransferFailed as error:
            refusals.append(error.message)
        else:
            assert len(case.messages[0]) <= MAX_METADATA_BYTES
            assert 0 <= taken.device_id < MAX_DEVICES, case.name
            assert 0 < taken.num_blocks <= MAX_BLOCKS, case.name
            for region in (taken.pool, taken.hello_region):
                assert 0 < region.address < region.address + region.num_bytes <= 1 << 63, case.name
        assert time.thread_time() - began_at < LOOP_S, case.name
    assert len(refusals) > 100
    assert max(map(len, refusals)) < 1000


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xc1", b"\x91" * 50_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xff" * (1 << 25)],
    ids=["nothing", "no msgpack", "nested", "a huge array", "a huge map", "32 MiB"],
)
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(TransferFailed):
        NixlAddress.from_metadata(raw)
