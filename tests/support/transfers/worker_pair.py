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
from pdserve.common.errors import ConfigError
from pdserve.common.net.rpc import make_channel
from pdserve.common.net.service_channel import ServiceChannel
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import without_pixels
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.decode.decode_servicer import decode_calls
from pdserve.engine.client.inproc_client import InprocClient
from pdserve.prefill.prefill_servicer import prefill_calls
from pdserve.v1 import decode_pb2, prefill_pb2
from pdserve.worker.transfers.worker_transfers import WorkerTransfers
from pdserve.worker.worker import Worker
from pdserve.worker.worker_process import make_engine
from tests.support.engine.settings_with import settings_with
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.signed_channel import signed
from tests.support.transfers.worker_call import WorkerCall

CALLS = {WorkerRole.PREFILL: prefill_calls, WorkerRole.DECODE: decode_calls}
KINDS: dict[WorkerRole, type[WorkerSettings]] = {WorkerRole.PREFILL: PrefillSettings, WorkerRole.DECODE: DecodeSettings}
KEY = DeploymentKey(b"the key of this deployment")
PROMPT = list(range(3, 43))
BLOCK_SIZE = 16


def door_of(worker: Worker) -> InprocClient:
    """The engine of a worker, in this process."""
    assert isinstance(worker.core, InprocClient)
    return worker.core


def transfers_of(worker: Worker) -> WorkerTransfers:
    """The transfers of a worker, in this process."""
    transfers = door_of(worker).side.transfers
    assert isinstance(transfers, WorkerTransfers)
    return transfers


async def check_at_rest(worker: Worker) -> None:
    """The pool check, when the engine has removed what has ended: blocks of a transfer stay a while after its answer."""
    scheduler, manager = door_of(worker).core.scheduler, transfers_of(worker).manager
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
    may_switch: bool = False,
    **fields: Any,
) -> AsyncIterator[Pair]:
    """prefill, decode: settings of one worker alone. may_switch: workers can take the other role. fields: settings of both."""
    fields = {"connector": "tcp", "drain_s": 0.0, "attach_timeout_s": HANG_S, **fields}
    workers = []
    for settings, role in (
        (settings_with(PrefillSettings, **{**fields, **(prefill or {})}), WorkerRole.PREFILL),
        (settings_with(DecodeSettings, **{**fields, **(decode or {})}), WorkerRole.DECODE),
    ):
        engine = await make_engine(settings, folder, key)
        other: WorkerSettings | ConfigError = ConfigError("this pair keeps its roles")
        if may_switch:
            other = settings_with(KINDS[role.other], **fields)
        workers.append(Worker(settings, role, engine, key, CALLS, other=other))
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


def decode_call(pair: Pair, request: GenerationRequest, **fields: Any) -> WorkerCall:
    """A call to the decode worker, which prefills the prompt. fields: those of `Decode`."""
    return WorkerCall(pair.service(pair.d), "decode", request, **fields)


def calls(
    pair: Pair, at_p: GenerationRequest, at_d: GenerationRequest | None = None, transfer_id: bytes = b""
) -> tuple[WorkerCall, WorkerCall]:
    """The prefill call and the decode call of one attempt, as a router makes them. at_d: default: the same request."""
    transfer_id = transfer_id or secrets.token_bytes(16)
    p, d = pair.p.identity, pair.d.identity
    others = {"without_draft_head": not p.layout.has_draft_head_of(d.layout)}
    receiver = prefill_pb2.Receiver(worker_id=d.worker_id, epoch=d.epoch, **others)
    source = decode_pb2.Source(
        worker_id=p.worker_id, epoch=p.epoch, address=p.attach_address, transfer_id=transfer_id, **others
    )
    prefill = WorkerCall(pair.service(pair.p), "prefill", at_p, transfer_id=transfer_id, receiver=receiver)
    return prefill, decode_call(pair, at_p if at_d is None else at_d, source=source)


async def ask(pair: Pair, prompt: list[int], **changes: Any) -> PairAnswer:
    """A greedy request of 4 tokens, prefilled and decoded. changes: fields of `GenerationRequest`. Raises: PdServeError."""
    request = generation_request(pair.p, prompt, **changes)
    return await _answer(pair, request, request)


async def ask_with_images(pair: Pair, request: GenerationRequest) -> PairAnswer:
    """As `ask`; decode gets no pixels, as from a router."""
    return await _answer(
        pair, request, msgspec.structs.replace(request, mm_features=without_pixels(request.mm_features))
    )


async def _answer(pair: Pair, at_p: GenerationRequest, at_d: GenerationRequest) -> PairAnswer:
    prefill, decode = calls(pair, at_p, at_d)
    first, rest, num_landed = list[int](), list[int](), 0
    try:
        async with asyncio.timeout(HANG_S):
            admitted = await prefill.read()
            assert admitted.HasField("admitted")
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
