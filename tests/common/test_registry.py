"""Values read from Redis count only in exactly their form."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.kv_events import MAX_BLOCKS, MAX_HASHES, KvCacheEvents
from pdserve.common.registry.registry import (
    RECORD_FIELDS,
    Keys,
    NumberedChange,
    RecordSigner,
    WorkerRecord,
    layout_fingerprint,
    read_change,
    read_entry_id,
    read_hash,
    read_record,
    read_worker_id,
)
from pdserve.common.security.deployment_key import DeploymentKey
from tests.support.models.kv_layouts import make_layout, with_shape

RECORD = WorkerRecord(
    worker_id="decode-0",
    epoch=0xFEDC_BA98_7654_3210,
    registered_us=1_700_000_000_000_000,
    role="decode",
    address="[::1]:50051",
    protocol_version=2,
    model_fingerprint="ab" * 16,
    layout_fingerprint="cd" * 8,
    tokenizer_fingerprint="ef" * 16,
    seq=7,
    count=3,
    signature="0f" * 32,
)
SIGNER = RecordSigner(DeploymentKey(b"0123456789abcdef"), "test")


def stored(record: WorkerRecord, **changed: Any) -> list[object]:
    """As HMGET answers."""
    values = {name: str(value).encode() for name, value in record.fields().items()} | changed
    return [values[name] for name in RECORD_FIELDS]


def test_a_record_reads_back() -> None:
    assert read_record("decode-0", stored(RECORD)) == RECORD
    assert read_record("decode-0", [None] * len(RECORD_FIELDS)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", b"FEDCBA9876543210"),
        ("epoch", b"1"),
        ("epoch", None),
        ("registered_us", b"-1"),
        ("registered_us", b"9" * 19),
        ("role", b"router"),
        ("role", b"decode\n"),
        ("address", b"unix:/run/x"),
        ("address", b"dns:///evil:80"),
        ("address", b"host:0"),
        ("address", b"host:65536"),
        ("address", b"a b:1"),
        ("address", b"host"),
        ("address", "höst:1".encode()),
        ("protocol_version", b"1.5"),
        ("protocol_version", "１".encode()),
        ("model_fingerprint", b""),
        ("layout_fingerprint", b"xyz"),
        ("tokenizer_fingerprint", b"a" * 65),
        ("signature", b"\xff\xff"),
        ("seq", b"0x10"),
        ("count", str(MAX_BLOCKS + 1).encode()),
        ("count", 5),
    ],
)
def test_a_field_that_is_not_as_it_should_be_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_record("decode-0", stored(RECORD, **{field: value}))
    assert caught.value.field == field
    assert field in caught.value.message
    assert len(caught.value.message) < 300


def test_a_signed_record_verifies_and_no_other_does() -> None:
    signed = SIGNER.signed(RECORD)
    SIGNER.verify(read_record("decode-0", stored(signed)))  # type: ignore[arg-type]
    changes: list[dict[str, object]] = [
        {"worker_id": "decode-1"}, {"epoch": 7}, {"registered_us": 1}, {"role": "prefill"}, {"address": "h:1"},
        {"protocol_version": 3}, {"model_fingerprint": "ac"}, {"layout_fingerprint": "ac"}, {"seq": 8}, {"count": 4},
        {"tokenizer_fingerprint": "ac"}, {"signature": ""}, {"signature": signed.signature.swapcase()},
        {"signature": signed.signature[:-1]},
    ]  # fmt: skip
    assert {name for change in changes for name in change} == set(WorkerRecord.__struct_fields__)
    for change in changes:
        changed = msgspec.structs.replace(signed, **change)
        if changed != signed:
            with pytest.raises(InvalidRequest, match="does not verify"):
                SIGNER.verify(changed)
    for key, namespace in ((b"fedcba9876543210", "test"), (b"0123456789abcdef", "other")):
        with pytest.raises(InvalidRequest, match="does not verify"):
            RecordSigner(DeploymentKey(key), namespace).verify(signed)


def test_a_record_of_no_version_is_refused_by_name() -> None:
    values = stored(RECORD, protocol_version=b"0", signature=None)
    with pytest.raises(InvalidRequest, match="version 0, which no release has"):
        read_record("decode-0", values)


def test_a_record_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        read_record("decode-0", stored(RECORD)[:-1])


@pytest.mark.parametrize("value", [b"", b"a:b", b"a/b", b"{x}", b"x" * 129, "ä".encode(), b"\xff", None, 3])
def test_ids_that_could_not_stand_in_a_key_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest):
        read_worker_id(value)


def test_keys_share_one_slot_of_a_cluster() -> None:
    keys = Keys("prod")
    names = [keys.workers, keys.worker("a"), keys.blocks("a", 10), keys.events("a", 10)]
    assert names == [
        "{prod}:workers", "{prod}:worker:a", "{prod}:blocks:a:000000000000000a", "{prod}:events:a:000000000000000a"
    ]  # fmt: skip


def entry(numbered: NumberedChange, **changed: Any) -> dict[bytes, object]:
    fields = {name.encode(): value for name, value in (numbered.fields() | changed).items()}
    return {name: str(value).encode() if isinstance(value, int) else value for name, value in fields.items()}


CHANGE = NumberedChange(seq=4, change=KvCacheEvents(cleared=True, stored=(b"a" * 8, b"b" * 8), removed=(b"c" * 8,)))


def test_a_change_reads_back() -> None:
    assert read_change(entry(CHANGE)) == CHANGE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", b""),
        ("seq", b"-4"),
        ("cleared", b"2"),
        ("stored", b"x" * 9),
        ("stored", b"x" * 8 * (MAX_HASHES + 1)),
        ("removed", None),
    ],
)
def test_a_malformed_change_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        read_change(entry(CHANGE, **{field: value}))


@pytest.mark.parametrize("fields", [None, [], {}])
def test_an_entry_without_fields_is_refused(fields: object) -> None:
    with pytest.raises(InvalidRequest):
        read_change(fields)


def test_ids_of_entries_and_hashes() -> None:
    assert read_entry_id(b"1700000000000-3") == "1700000000000-3"
    assert read_hash(b"h" * 8) == b"h" * 8
    for value in (b"$", b"1-2-3", None):
        with pytest.raises(InvalidRequest):
            read_entry_id(value)
    no_hashes: tuple[Any, ...] = (b"", b"h" * 7, b"h" * 16, "h" * 8, None)
    for value in no_hashes:
        with pytest.raises(InvalidRequest):
            read_hash(value)


def test_layouts_that_differ_have_other_fingerprints() -> None:
    layout = make_layout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=8, model_fingerprint="a")
    others = [
        *(with_shape(layout, **change) for change in ({"num_layers": 3}, {"block_size": 16}, {"dtype": "float16"})),
        *(
            msgspec.structs.replace(layout, **change)
            for change in ({"model_fingerprint": "b"}, {"format": 0}, {"tp_rank": 1})
        ),
    ]
    assert len({layout_fingerprint(each) for each in [layout, *others]}) == 7
