"""Older services against today's code: what they said, byte by byte, as `record_peer.py` wrote it down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import InvalidRequest, KeyMismatch, ProtocolMismatch
from pdserve.common.net.service_channel import ATTACH, EMBED, END_SEQUENCES, GENERATE, MEET, PREFILL, SESSION
from pdserve.common.protocol import OLDEST_AUTHENTICATED, PROTOCOL_VERSION
from pdserve.common.registry.registry import RECORD_FIELDS, RecordSigner, read_record
from pdserve.common.security.call_proof import CallVerifier
from pdserve.common.security.watch_proof import WatchAnswer, WatchChallenge
from pdserve.v1 import decode_pb2, kv_source_pb2, prefill_pb2, worker_pb2
from pdserve.worker.request_reader import RequestReader
from tests.support.record_peer import BLOCK_SIZE, FOLDER, KEY, NAMESPACE, NOW_S, WORKER, nonce

METHODS = {one.path: one for one in (ATTACH, EMBED, END_SEQUENCES, GENERATE, MEET, PREFILL, SESSION)}
EVENTS: dict[str, Any] = {
    "WatchEvent": worker_pb2.WatchEvent,
    "PrefillEvent": prefill_pb2.PrefillEvent,
    "DecodeEvent": decode_pb2.DecodeEvent,
    "AttachEvent": kv_source_pb2.AttachEvent,
}
HASHER = BlockHasher(KEY, BLOCK_SIZE)


def recorded(version: int) -> dict[str, Any]:
    return json.loads((FOLDER / f"version_{version}.json").read_text())


OLDER = [max(PROTOCOL_VERSION - 1, OLDEST_AUTHENTICATED)]
PAIRS = [(older, ours) for older in OLDER for ours in {PROTOCOL_VERSION, older + 1}]
"""(version of the recording, version that answers it): today's, and the next while there is no older one to play."""
both = pytest.mark.parametrize(("older", "ours"), PAIRS)


def clock() -> float:
    return NOW_S


def test_every_version_that_pairs_with_todays_is_recorded() -> None:
    assert {int(path.stem.removeprefix("version_")) for path in FOLDER.iterdir()} >= {1, *OLDER}


@both
def test_an_older_router_watches_a_worker_of_today(older: int, ours: int) -> None:
    watch = recorded(older)["watches"][str(ours)]
    opening = worker_pb2.WatchRequest.FromString(bytes.fromhex(watch["router_opening"]))
    assert opening.protocol_version == older
    said = bytes.fromhex(recorded(older)["identity"])
    told = WatchAnswer(KEY, said, opening, version=ours, clock=clock, nonce=lambda: nonce(32, 2))
    told.verify(worker_pb2.WatchRequest.FromString(bytes.fromhex(watch["router_answer"])))


@both
def test_a_router_of_today_watches_an_older_worker(older: int, ours: int) -> None:
    asked = WatchChallenge(KEY, blocks=True, version=ours, clock=clock, nonce=lambda: nonce(32, 3))
    event = worker_pb2.WatchEvent.FromString(bytes.fromhex(recorded(older)["watches"][str(ours)]["worker_event"]))
    identity = asked.read(event)
    assert (identity.worker_id, identity.epoch, identity.protocol_version) == (*WORKER, older)
    assert asked.answer.proof


@both
def test_calls_of_an_older_service_are_taken(older: int, ours: int) -> None:
    calls = recorded(older)["calls"]
    assert set(calls) == set(METHODS)
    for method, call in calls.items():
        # each with a verifier of its own: the recording has one nonce
        checking = CallVerifier(KEY, lambda: WORKER, version=ours, clock=clock)
        raw = bytes.fromhex(call["message"])
        checking.verify_message(method, checking.verify(method, bytes.fromhex(call["proof"])), raw)
        message: Any = METHODS[method].request.FromString(raw)
        if method in (PREFILL.path, EMBED.path, GENERATE.path, SESSION.path):
            assert len(RequestReader(HASHER, 256).request(message).block_hashes) == 2


@pytest.mark.parametrize("older", OLDER)
def test_answers_and_the_record_of_an_older_service_are_read(older: int) -> None:
    for name, raw in recorded(older)["answers"].items():
        assert EVENTS[name].FromString(bytes.fromhex(raw)).WhichOneof("event")
    found = recorded(older)["record"]
    record = read_record(WORKER[0], [found[name].encode() if name in found else None for name in RECORD_FIELDS])
    assert record is not None
    RecordSigner(KEY, NAMESPACE).verify(record)


def test_a_router_of_version_1_is_refused_by_name() -> None:
    opening = worker_pb2.WatchRequest.FromString(bytes.fromhex(recorded(1)["watch"]["router_opening"]))
    with pytest.raises(ProtocolMismatch, match="speaks protocol version 1, which does not authenticate"):
        WatchAnswer(KEY, b"", opening)


def test_a_worker_of_version_1_is_refused_by_name() -> None:
    event = worker_pb2.WatchEvent.FromString(bytes.fromhex(recorded(1)["watch"]["worker_event"]))
    with pytest.raises(ProtocolMismatch, match="speaks protocol version 1, which does not authenticate"):
        WatchChallenge(KEY, blocks=True).read(event)


def test_a_call_of_version_1_is_refused_by_name() -> None:
    for method in recorded(1)["calls"]:
        with pytest.raises(KeyMismatch, match="protocol version 1, which does not authenticate"):
            CallVerifier(KEY, lambda: WORKER).verify(method, None)


def test_a_record_of_version_1_is_refused_by_name() -> None:
    found = recorded(1)["record"]
    with pytest.raises(InvalidRequest, match="speaks protocol version 1, which does not authenticate"):
        read_record(WORKER[0], [found[name].encode() if name in found else None for name in RECORD_FIELDS])
