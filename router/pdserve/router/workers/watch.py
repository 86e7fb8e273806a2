"""The router's side of `WorkerService`: a worker's watch stream as plain values, `Meet`, `Drain` and `SetRole`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple, cast

import grpc.aio
from google.protobuf.message import DecodeError, Message

from pdserve.common.block_hash import PLACEMENT_HASH_BYTES
from pdserve.common.errors import PeerError, WorkerLost
from pdserve.common.kv_events import MAX_HASHES, KvCacheEvents
from pdserve.common.net.rpc import from_rpc_error
from pdserve.common.net.service_channel import DRAIN, MEET, SET_ROLE, Method, ServiceChannel, decoder, readable
from pdserve.common.request.generation_request import LORA_FINGERPRINT
from pdserve.common.request.known_adapters import MAX_ADAPTERS, KnownAdapters, read_known_adapters
from pdserve.common.request.wire.messages import layout_from_wire, role_from_wire, role_to_wire
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.watch_proof import WatchChallenge
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.router.workers.announced_identity import verify_identity
from pdserve.router.workers.worker import WorkerLoad
from pdserve.v1 import worker_pb2

CALL_TIMEOUT_S = 5.0
_WATCH = "/pdserve.v1.WorkerService/Watch"


class OfferedAdapters(NamedTuple):
    """All adapters that a worker offers, in place of those before."""

    known: KnownAdapters


_Call = grpc.aio.StreamStreamCall[worker_pb2.WatchRequest, worker_pb2.WatchEvent]


async def watch(
    channel: grpc.aio.Channel, key: DeploymentKey, where: str, *, blocks: bool = False
) -> AsyncGenerator[WorkerIdentity | WorkerLoad | KvCacheEvents | OfferedAdapters, None]:
    """Yield the worker's identity, after it has authenticated, then its reports until the stream ends or breaks.

    The router authenticates when the second value is requested. where: the worker's name in warnings. blocks: also request block
    events.
    Raises: KeyMismatch, ClockSkew, ProtocolMismatch, InvalidRequest for an identity that cannot be used, PeerError for
    a message that cannot be decoded, and other PdServeErrors when the stream breaks or contradicts itself. Closing the
    iterator ends the call.
    """
    challenge = WatchChallenge(key, blocks=blocks)
    make = channel.stream_stream(
        _WATCH, worker_pb2.WatchRequest.SerializeToString, decoder(worker_pb2.WatchEvent, where)
    )
    call = cast(_Call, make())
    try:
        await call.write(challenge.opening)
        yield _proved(challenge, readable(await _first(call)))
        await call.write(challenge.answer)
        async for event in _events(call):
            yield event
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


async def _first(call: _Call) -> worker_pb2.WatchEvent:
    event = await call.read()
    if event is grpc.aio.EOF:
        raise WorkerLost("its watch stream ended before its identity arrived")
    return cast(worker_pb2.WatchEvent, event)


def _proved(challenge: WatchChallenge, event: worker_pb2.WatchEvent) -> WorkerIdentity:
    if event.WhichOneof("event") != "welcome":
        raise WorkerLost("its first message was not its identity")
    try:
        identity = _identity(challenge.read(event))
    except DecodeError:
        raise PeerError("its identity cannot be decoded") from None
    verify_identity(identity)
    return identity


async def _events(call: _Call) -> AsyncIterator[WorkerLoad | KvCacheEvents | OfferedAdapters]:
    sequence = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        event = readable(cast(worker_pb2.WatchEvent, message))
        match event.WhichOneof("event"):
            case "load":
                yield _load(event.load)
            case "adapters":
                yield OfferedAdapters(_adapters(event.adapters))
            case "blocks":
                sequence += 1
                yield _blocks(event.blocks, sequence)


async def introduce(channel: ServiceChannel, peer: WorkerIdentity) -> None:
    """Introduce a peer to the worker at the other end. Raises: PdServeError."""
    me = worker_pb2.MeetRequest(worker_id=peer.worker_id, epoch=peer.epoch, address=peer.attach_address)
    await _call(channel, MEET, me)


async def ask_to_drain(channel: ServiceChannel) -> None:
    """Have the worker at the other end drain. Raises: PdServeError."""
    await _call(channel, DRAIN, worker_pb2.DrainRequest())


async def set_role(channel: ServiceChannel, role: WorkerRole, dwell_s: float = 0.0) -> None:
    """Have the worker at the other end take a role. dwell_s: unless its role was changed less than this many seconds ago. Raises:
    PdServeError, with the worker's reason if it refuses."""
    await _call(channel, SET_ROLE, worker_pb2.SetRoleRequest(role=role_to_wire(role), dwell_s=dwell_s))


async def _call(channel: ServiceChannel, method: Method[Any, Any], request: Message) -> None:
    try:
        readable(await channel.unary_unary(method, request, timeout=CALL_TIMEOUT_S))
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def _identity(message: worker_pb2.Identity) -> WorkerIdentity:
    fields = {name: getattr(message, name) for name in WorkerIdentity.__struct_fields__}
    for name in ("max_local_prefill_tokens", "data_parallel_rank"):
        if not message.HasField(name):
            fields[name] = None
    return WorkerIdentity(
        **fields
        | {
            "role": role_from_wire(message.role),
            "layout": layout_from_wire(message.layout),
            "connectors": tuple(message.connectors),
        }
    )


LEAST_RATE, MOST_RATE = 1e-3, 1e9
"""Range of tokens per second in reports; other values count as unknown."""


def _load(message: worker_pb2.Load) -> WorkerLoad:
    fields = {name: getattr(message, name) for name in WorkerLoad.__struct_fields__}
    # estimates divide by the rate; values outside the range would overflow, and NaN is outside
    if not LEAST_RATE <= message.prefill_tokens_per_s <= MOST_RATE:
        fields["prefill_tokens_per_s"] = 0.0
    loaded = message.loaded_adapters[:MAX_ADAPTERS]
    fields["role"] = role_from_wire(message.role)
    fields["loaded_adapters"] = tuple(filter(LORA_FINGERPRINT.fullmatch, loaded))
    return WorkerLoad(**fields)


def _adapters(message: worker_pb2.Adapters) -> KnownAdapters:
    """Raises: InvalidRequest."""
    pairs = ((adapter.name, adapter.fingerprint) for adapter in message.adapters)
    return read_known_adapters(pairs, len(message.adapters))


def _blocks(blocks: worker_pb2.Blocks, sequence: int) -> KvCacheEvents:
    """Decode block events. Raises: WorkerLost if a change is missing or malformed, since the index would then be wrong."""
    if blocks.sequence != sequence:
        raise WorkerLost(f"its change of blocks {blocks.sequence} came where {sequence} was expected")
    return KvCacheEvents(cleared=blocks.cleared, stored=_hashes(blocks.stored), removed=_hashes(blocks.removed))


def _hashes(joined: bytes) -> tuple[bytes, ...]:
    size = PLACEMENT_HASH_BYTES
    if len(joined) % size or len(joined) > MAX_HASHES * size:
        raise WorkerLost(
            f"its change of blocks has {len(joined)} bytes of hashes, a multiple of {size} up to {MAX_HASHES * size} is "
            "needed"
        )
    return tuple(joined[at : at + size] for at in range(0, len(joined), size))
