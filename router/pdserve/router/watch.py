"""The router's side of `WorkerService`: a worker's watch stream as plain values, and introductions."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc.aio

from pdserve.common.block_hash import PLACEMENT_HASH_BYTES
from pdserve.common.errors import WorkerLost
from pdserve.common.held_blocks import BlocksChange
from pdserve.common.rpc import PROTOCOL_VERSION, from_rpc_error
from pdserve.common.wire import layout_from_wire
from pdserve.router.worker import WorkerIdentity, WorkerLoad, WorkerRole
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceStub

MEET_TIMEOUT_S = 5.0
_ROLES = {worker_pb2.ROLE_PREFILL: WorkerRole.PREFILL, worker_pb2.ROLE_DECODE: WorkerRole.DECODE}


async def watch(
    channel: grpc.aio.Channel, *, blocks: bool = False
) -> AsyncGenerator[WorkerIdentity | WorkerLoad | BlocksChange, None]:
    """What the worker at the other end says, until its stream ends or breaks.

    blocks: ask for the blocks it holds as well.
    Raises: PdServeError when it breaks or contradicts itself. Closing the iterator ends the call.
    """
    request = worker_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION, blocks=blocks)
    call = WorkerServiceStub(channel).Watch(request)
    sequence = 0
    try:
        async for event in call:
            match event.WhichOneof("event"):
                case "identity":
                    yield _identity(event.identity)
                case "load":
                    yield _load(event.load)
                case "blocks":
                    sequence += 1
                    yield _blocks(event.blocks, sequence)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


async def introduce(channel: grpc.aio.Channel, peer: WorkerIdentity) -> None:
    """Tell the worker at the other end of a peer. Raises: PdServeError."""
    try:
        await WorkerServiceStub(channel).Meet(
            worker_pb2.MeetRequest(worker_id=peer.worker_id, epoch=peer.epoch, address=peer.address),
            timeout=MEET_TIMEOUT_S,
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def _identity(message: worker_pb2.Identity) -> WorkerIdentity:
    return WorkerIdentity(
        worker_id=message.worker_id,
        epoch=message.epoch,
        role=_ROLES.get(message.role),
        protocol_version=message.protocol_version,
        address=message.address,
        layout=layout_from_wire(message.layout),
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        key_check=message.key_check,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        num_blocks=message.num_blocks,
        connectors=tuple(message.connectors),
        max_local_prefill_tokens=(
            message.max_local_prefill_tokens if message.HasField("max_local_prefill_tokens") else None
        ),
        hidden_size=message.hidden_size,
        **({"max_num_seqs": message.max_num_seqs} if message.max_num_seqs else {}),
    )


def _load(message: worker_pb2.Load) -> WorkerLoad:
    return WorkerLoad(
        engine_tick=message.engine_tick,
        draining=message.draining,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_remote_kv=message.num_remote_kv,
        num_waiting_tokens=message.num_waiting_tokens,
        blocks_total=message.blocks_total,
        blocks_free=message.blocks_free,
        blocks_in_use=message.blocks_in_use,
        num_sessions=message.num_sessions,
        max_sessions=message.max_sessions,
        max_waiting=message.max_waiting,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
    )


def _blocks(blocks: worker_pb2.Blocks, sequence: int) -> BlocksChange:
    """Raises: WorkerLost when a change is missing or malformed: what was told before cannot be trusted."""
    if blocks.sequence != sequence:
        raise WorkerLost(f"its change of blocks {blocks.sequence} came where {sequence} was expected")
    return BlocksChange(cleared=blocks.cleared, stored=_hashes(blocks.stored), removed=_hashes(blocks.removed))


def _hashes(joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % PLACEMENT_HASH_BYTES:
        raise WorkerLost(
            f"its change of blocks has {len(joined)} bytes of hashes, not a multiple of {PLACEMENT_HASH_BYTES}"
        )
    return tuple(joined[at : at + PLACEMENT_HASH_BYTES] for at in range(0, len(joined), PLACEMENT_HASH_BYTES))
