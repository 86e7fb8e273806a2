"""A prefill and a decode worker in one process, without a router, and calls to them as one would make them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec

from pdserve.common.block_hash import BlockHasher
from pdserve.common.net.rpc import make_channel
from pdserve.common.net.service_channel import GENERATE, PREFILL, ServiceChannel
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import without_pixels
from pdserve.common.request.protocol_3 import request_to_version_3
from pdserve.common.request.request_bytes import encode_request
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.decode import service as decode_service
from pdserve.prefill import service as prefill_service
from pdserve.v1 import decode_pb2, prefill_pb2, request_pb2
from pdserve.worker.engine_host.host_transfers import HostTransfers
from pdserve.worker.engine_host.inproc_host import InprocHost
from pdserve.worker.engine_host.make_host import make_host
from pdserve.worker.worker import Worker
from tests.support.settings_with import settings_with
from tests.support.signed_channel import signed
from tests.support.waiting import HANG_S, eventually

KEY = DeploymentKey(b"the key of this deployment")
PROMPT = list(range(3, 43))
BLOCK_SIZE = 16


def host_of(worker: Worker) -> InprocHost:
    """The engine of a worker, in this process."""
    assert isinstance(worker.host, InprocHost)
    return worker.host


def transfers_of(worker: Worker) -> HostTransfers:
    """The transfers of a worker, in this process."""
    transfers = host_of(worker).kv_transfers
    assert transfers is not None
    return transfers


async def check_at_rest(worker: Worker) -> None:
    """The pool check, when the engine has removed what has ended: blocks of a transfer stay a while after its answer."""
    scheduler, manager = host_of(worker).core.scheduler, transfers_of(worker).manager
    await eventually(
        lambda: not (scheduler.requests or scheduler.pool.num_in_use or manager.num_open), "the engine is idle"
    )
    scheduler.check(idle=True)


class Pair:
    """Both workers, and a channel to each."""

    def __init__(self, p: Worker, d: Worker, to_p: grpc.aio.Channel, to_d: grpc.aio.Channel) -> None:
        self.p, self.d = p, d
        self._channels = {p.identity.role: to_p, d.identity.role: to_d}

    def channel(self, worker: Worker) -> grpc.aio.Channel:
        return self._channels[worker.identity.role]

    def service(self, worker: Worker, key: DeploymentKey = KEY) -> ServiceChannel:
        return signed(self.channel(worker), worker.identity.key, key)


@contextlib.asynccontextmanager
async def running_pair(
    folder: Path,
    key: DeploymentKey = KEY,
    *,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    **fields: Any,
) -> AsyncIterator[Pair]:
    """prefill, decode: settings of one worker alone. fields: settings of both."""
    fields = {"connector": "tcp", "drain_s": 0.0, "attach_timeout_s": HANG_S, **fields}
    workers = []
    for settings, role, service in (
        (settings_with(PrefillSettings, **{**fields, **(prefill or {})}), WorkerRole.PREFILL, prefill_service),
        (settings_with(DecodeSettings, **{**fields, **(decode or {})}), WorkerRole.DECODE, decode_service),
    ):
        host = await make_host(settings, folder, key)
        workers.append(Worker(settings, role, host, key, service.add_servicers))
    try:
        for worker in workers:
            await worker.start()
        p, d = workers
        async with make_channel(p.identity.address) as to_p, make_channel(d.identity.address) as to_d:
            await asyncio.gather(to_p.channel_ready(), to_d.channel_ready())
            yield Pair(p, d, to_p, to_d)
    finally:
        for worker in workers:
            await worker.stop()


def prepared(
    worker: Worker, prompt: list[int] | None = None, key: DeploymentKey = KEY, **changes: Any
) -> request_pb2.PreparedRequest:
    """`generation_request` as a router of protocol version 3 sends it."""
    return request_to_version_3(generation_request(worker, prompt, key, **changes))


def generation_request(
    worker: Worker, prompt: list[int] | None = None, key: DeploymentKey = KEY, **changes: Any
) -> GenerationRequest:
    """A greedy request of 4 tokens. changes: fields of `GenerationRequest`."""
    prompt = prompt or PROMPT
    hasher = BlockHasher(key, BLOCK_SIZE)
    root = hasher.root(worker.identity.layout.model_fingerprint)
    hashes = hasher.extend(root, prompt)
    fields: dict[str, Any] = {
        "request_id": secrets.token_hex(4),
        "prompt_token_ids": prompt,
        "sampling_params": SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
        "hash_root": root,
        "request_digest": hasher.request_digest(root, hashes, prompt),
        "deadline": time.monotonic() + 2 * HANG_S,
    }
    fields |= changes
    return GenerationRequest(**({"n": fields["sampling_params"].n} | fields))


@dataclass(frozen=True)
class PairAnswer:
    """A request's answer through both workers."""

    token_ids: list[int]
    num_landed: int
    """Blocks that decode received."""


async def ask(pair: Pair, prompt: list[int], **changes: Any) -> PairAnswer:
    """A greedy request of 4 tokens, prefilled and decoded. changes: fields of `GenerationRequest`. Raises: AioRpcError."""
    message = prepared(pair.p, prompt, **changes)
    return await _answer(pair, {"request": message}, {"request": message})


async def ask_with_images(pair: Pair, request: GenerationRequest) -> PairAnswer:
    """As `ask`; decode gets no pixels, as from a router."""
    without = msgspec.structs.replace(request, mm_features=without_pixels(request.mm_features))
    of_p, of_d = ({"generation_request": encode_request(each)} for each in (request, without))
    return await _answer(pair, of_p, of_d)


async def _answer(pair: Pair, of_p: dict[str, Any], of_d: dict[str, Any]) -> PairAnswer:
    """of_p, of_d: fields of the calls' messages that hold the request."""
    transfer_id = secrets.token_bytes(16)
    p, d = pair.p.identity, pair.d.identity
    receiver = prefill_pb2.Receiver(worker_id=d.worker_id, epoch=d.epoch)
    prefill: Any = pair.service(pair.p).unary_stream(
        PREFILL, prefill_pb2.PrefillRequest(**of_p, transfer_id=transfer_id, receiver=receiver)
    )
    source = decode_pb2.Source(worker_id=p.worker_id, epoch=p.epoch, address=p.address, transfer_id=transfer_id)
    decode: Any = pair.service(pair.d).unary_stream(GENERATE, decode_pb2.DecodeRequest(**of_d, source=source))
    first, rest, num_landed = list[int](), list[int](), 0
    try:
        async with asyncio.timeout(HANG_S):
            async for event in decode:
                num_landed += event.landed.num_blocks
                rest += event.outputs.token_ids
            async for event in prefill:
                for output in event.computed.first_outputs:
                    first += output.token_ids
    finally:  # the end of one call ends the other
        prefill.cancel()
        decode.cancel()
    return PairAnswer([*first, *rest], num_landed)
