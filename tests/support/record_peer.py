"""Records the messages of a service of the current protocol version, byte by byte, with a fixed key, time and nonces.

Run it once for each protocol version, before the version is raised: `python tests/support/record_peer.py`. Tests play the files in
`tests/recorded_peers/` to later code. A file is never written again, since the messages of a version do not change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
from google.protobuf.message import Message

from pdserve.common.block_hash import BlockHasher
from pdserve.common.kv_layout import FORMAT
from pdserve.common.net.service_channel import ATTACH, EMBED, END_SEQUENCES, GENERATE, MEET, PREFILL, SESSION
from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.registry.registry import RecordSigner, WorkerRecord
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.watch_proof import WatchAnswer, WatchChallenge
from pdserve.v1 import decode_pb2, kv_source_pb2, prefill_pb2, request_pb2, worker_pb2

FOLDER = Path(__file__).parents[1] / "recorded_peers"
KEY = DeploymentKey(b"a key for recordings, 0123456789")
NOW_S = 1_800_000_000.0
WORKER = ("decode-0", 0x0123_4567_89AB_CDEF)
PROMPT = [3 + place % 50 for place in range(37)]
BLOCK_SIZE = 16
NAMESPACE = "recorded"


def nonce(size: int, number: int) -> bytes:
    return bytes((number + place) % 256 for place in range(size))


def identity() -> worker_pb2.Identity:
    """A decode worker's."""
    layout = kv_source_pb2.KvLayout(
        num_layers=2, num_kv_heads=2, head_dim=16, block_size=BLOCK_SIZE, dtype="float32", model_fingerprint="ab" * 16,
        format=FORMAT, total_num_kv_heads=2, tp_size=1,
    )  # fmt: skip
    return worker_pb2.Identity(
        worker_id=WORKER[0], epoch=WORKER[1], role=worker_pb2.ROLE_DECODE, protocol_version=PROTOCOL_VERSION,
        address="127.0.0.1:7002", attach_address="127.0.0.1:7002", layout=layout,
        tokenizer_fingerprint="cd" * 16, max_model_len=256, vocab_size=300,
        num_blocks=100, connectors=["tcp"], max_num_seqs=8, hidden_size=32,
    )  # fmt: skip


def request() -> GenerationRequest:
    hasher = BlockHasher(KEY, BLOCK_SIZE)
    root = hasher.root("ab" * 16)
    return GenerationRequest(
        request_id="r", prompt_token_ids=PROMPT, sampling_params=SamplingParams(temperature=0.0, max_tokens=4),
        eos_token_ids=(1,), hash_root=root, timeout_s=30.0, trace_headers={"traceparent": "00-1"},
        request_digest=hasher.request_digest(root, hasher.extend(root, PROMPT), PROMPT),
    )  # fmt: skip


def calls() -> dict[str, Message]:
    """Method -> its first message."""
    receiver = prefill_pb2.Receiver(worker_id="decode-1", epoch=5)
    transfer_id = nonce(16, 7)
    source = decode_pb2.Source(worker_id="prefill-0", epoch=9, address="127.0.0.1:7001", transfer_id=transfer_id)
    opening = kv_source_pb2.Open(
        transfer_id=transfer_id, source_epoch=WORKER[1], receiver=receiver, request_digest=request().request_digest,
        layout=identity().layout, digest_algorithms=["xxh3_64"], connectors=["tcp"],
    )  # fmt: skip
    # with what was left of the deadline at that moment
    data = msgspec.msgpack.encode(request())
    return {
        PREFILL.path: prefill_pb2.PrefillRequest(generation_request=data, transfer_id=transfer_id, receiver=receiver),
        EMBED.path: prefill_pb2.PoolingRequest(generation_request=data),
        GENERATE.path: decode_pb2.DecodeRequest(generation_request=data, source=source),
        SESSION.path: decode_pb2.DecodeTurn(generation_request=data),
        END_SEQUENCES.path: decode_pb2.EndSequencesRequest(request_id="r", indexes=[1]),
        ATTACH.path: kv_source_pb2.AttachRequest(open=opening),
        MEET.path: worker_pb2.MeetRequest(worker_id="prefill-0", epoch=9, address="127.0.0.1:7001"),
    }


def answers() -> dict[str, Message]:
    """Events of a worker, by the message's name."""
    outputs = request_pb2.Outputs(first_position=1, token_ids=[7, 8], finish_reason=request_pb2.FINISH_REASON_LENGTH)
    return {
        "WatchEvent": worker_pb2.WatchEvent(load=worker_pb2.Load(engine_tick=5, blocks_total=100, blocks_free=90)),
        "PrefillEvent": prefill_pb2.PrefillEvent(
            computed=prefill_pb2.Computed(num_tokens=37, request_digest=request().request_digest)
        ),
        "DecodeEvent": decode_pb2.DecodeEvent(outputs=outputs),
        "AttachEvent": kv_source_pb2.AttachEvent(
            accepted=kv_source_pb2.Accepted(
                connector="tcp", digest_algorithm="xxh3_64", token=nonce(16, 9), proof=nonce(32, 11)
            )
        ),
    }


def watches() -> dict[str, dict[str, str]]:
    """The other side's version -> a watch: of this version's router, and of this version's worker."""
    found = {}
    said = identity().SerializeToString(deterministic=True)
    for other in (PROTOCOL_VERSION, PROTOCOL_VERSION + 1):
        # this version's router with a worker of the other
        mine = WatchChallenge(KEY, blocks=True, clock=lambda: NOW_S, nonce=lambda: nonce(32, 1))
        theirs = WatchAnswer(KEY, said, mine.opening, version=other, clock=lambda: NOW_S, nonce=lambda: nonce(32, 2))
        mine.read(worker_pb2.WatchEvent(welcome=theirs.welcome))
        # this version's worker with a router of the other
        asked = WatchChallenge(KEY, blocks=True, version=other, clock=lambda: NOW_S, nonce=lambda: nonce(32, 3))
        told = WatchAnswer(KEY, said, asked.opening, clock=lambda: NOW_S, nonce=lambda: nonce(32, 4))
        found[str(other)] = {
            "router_opening": mine.opening.SerializeToString().hex(),
            "router_answer": mine.answer.SerializeToString().hex(),
            "worker_event": worker_pb2.WatchEvent(welcome=told.welcome).SerializeToString().hex(),
        }
    return found


def record() -> dict[str, str]:
    """The worker's record in Redis."""
    plain = WorkerRecord(
        worker_id=WORKER[0], epoch=WORKER[1], registered_us=1, role="decode", address="127.0.0.1:7002",
        protocol_version=PROTOCOL_VERSION, model_fingerprint="ab", layout_fingerprint="cd", tokenizer_fingerprint="ef",
        seq=3, count=2,
    )  # fmt: skip
    return {name: str(value) for name, value in RecordSigner(KEY, NAMESPACE).signed(plain).fields().items()}


def main() -> None:
    path = FOLDER / f"version_{PROTOCOL_VERSION}.json"
    if path.exists():
        sys.exit(f"{path} is there already: what a version says does not change")
    signer = CallSigner(KEY, clock=lambda: NOW_S, nonce=lambda: nonce(16, 5))
    recorded = {
        "identity": identity().SerializeToString(deterministic=True).hex(),
        "watches": watches(),
        "calls": {
            method: {"message": (raw := message.SerializeToString(deterministic=True)).hex(),
                     "proof": signer.metadata(method, WORKER, raw)[0][1].hex()}
            for method, message in calls().items()
        },
        "answers": {name: message.SerializeToString(deterministic=True).hex() for name, message in answers().items()},
        "record": record(),
    }  # fmt: skip
    path.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
