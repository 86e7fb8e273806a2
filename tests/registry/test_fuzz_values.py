"""Changed values in Redis: read as they are, or refused by name; nothing that was changed verifies."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.common.block_hash import PLACEMENT_HASH_BYTES
from pdserve.common.errors import InvalidRequest
from pdserve.common.kv_events import KvCacheEvents
from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.registry.registry import (
    RECORD_FIELDS,
    NumberedChange,
    RecordSigner,
    WorkerRecord,
    read_change,
    read_entry_id,
    read_record,
    read_worker_id,
)
from pdserve.common.security.deployment_key import DeploymentKey
from tests.support.inputs.fuzz_cases import Fuzzer
from tests.support.run.loop_watch import LOOP_S

pytestmark = [pytest.mark.fuzz(share=0.5), pytest.mark.timeout(0)]

SIGNER = RecordSigner(DeploymentKey(b"a key for tests, of no worth at all"), "pdserve")
RECORD = SIGNER.signed(
    WorkerRecord(
        worker_id="decode-1", epoch=7, registered_us=1_000_000, role="decode", address="127.0.0.1:7002",
        protocol_version=PROTOCOL_VERSION, model_fingerprint="ab" * 16, layout_fingerprint="cd" * 8,
        tokenizer_fingerprint="ef" * 8, seq=3, count=9,
    )
)  # fmt: skip
MAX_MESSAGE_CHARS = 400


def assert_bounded(fuzzer: Fuzzer) -> None:
    assert fuzzer.longest_s < LOOP_S
    fuzzer.check_memory()


def test_records(fuzzer: Fuzzer) -> None:
    good = [str(RECORD.fields()[name]).encode() for name in RECORD_FIELDS]
    longest = 0
    for _ in fuzzer.cases():
        values: list[object] = list(good)
        for _ in range(fuzzer.draw.choice((1, 1, 2))):
            at = fuzzer.draw.randrange(len(values))
            values[at] = None if fuzzer.draw.random() < 0.1 else fuzzer.bytes(good[at])
        try:
            record = read_record(read_worker_id(b"decode-1"), values)
            assert record is not None
            if msgspec.structs.replace(record, signature="") != msgspec.structs.replace(RECORD, signature=""):
                with pytest.raises(InvalidRequest):
                    SIGNER.verify(record)
        except InvalidRequest as error:
            longest = max(longest, len(error.message))
    assert longest < MAX_MESSAGE_CHARS
    assert_bounded(fuzzer)


def test_changes(fuzzer: Fuzzer) -> None:
    size = PLACEMENT_HASH_BYTES
    change = NumberedChange(seq=4, change=KvCacheEvents(stored=(b"a" * size, b"b" * size), removed=(b"c" * size,)))
    good = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in change.fields().items()
    }
    longest = 0
    for _ in fuzzer.cases():
        name = fuzzer.draw.choice(list(good))
        try:
            found = read_change(good | {name: fuzzer.bytes(good[name])})
            assert all(len(block) == size for block in (*found.change.stored, *found.change.removed)), str(fuzzer)
            read_entry_id(fuzzer.bytes(b"1700000000000-0"))
        except InvalidRequest as error:
            longest = max(longest, len(error.message))
    assert longest < MAX_MESSAGE_CHARS
    assert_bounded(fuzzer)
