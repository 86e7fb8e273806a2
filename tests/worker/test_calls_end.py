"""How the two calls of two real workers end when one of the engines fails: each worker speaks for itself."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import Draining
from pdserve.common.net.rpc import make_channel
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.decode.decode_servicer import decode_calls
from pdserve.kv_transfer.control.transfer_state import ReceiverState
from pdserve.prefill.prefill_servicer import prefill_calls
from pdserve.v1 import decode_pb2, prefill_pb2
from pdserve.worker.worker import Worker
from pdserve.worker.worker_process import make_engine
from tests.support.engine.settings_with import settings_with
from tests.support.run.waiting import HANG_S
from tests.support.transfers.signed_channel import signed
from tests.support.transfers.worker_call import WorkerCall
from tests.support.transfers.worker_pair import door_of, transfers_of

PROMPT = list(range(40))


class Two(NamedTuple):
    p: Worker
    d: Worker


@pytest.fixture
async def two(tiny_checkpoints: Callable[..., Path]) -> AsyncIterator[Two]:
    fields: dict[str, Any] = {
        "num_blocks": 16,
        "max_model_len": 64,
        "connector": "tcp",
        "drain_s": 0.0,
        "attach_timeout_s": HANG_S,
    }
    workers = []
    for settings, role, calls in (
        (settings_with(PrefillSettings, **fields), WorkerRole.PREFILL, prefill_calls),
        (settings_with(DecodeSettings, **fields), WorkerRole.DECODE, decode_calls),
    ):
        engine = await make_engine(settings, tiny_checkpoints("llama"), DEVELOPMENT_KEY)
        workers.append(Worker(settings, role, engine, DEVELOPMENT_KEY, {role: calls}))
    try:
        for worker in workers:
            await worker.start()
        yield Two(*workers)
    finally:
        for worker in workers:
            await worker.stop()


def asked(layout: Any) -> GenerationRequest:
    hasher = BlockHasher(DEVELOPMENT_KEY, layout.block_size)
    root = hasher.root(layout.model_fingerprint)
    hashes = hasher.extend(root, PROMPT)
    return GenerationRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=8),
        hash_root=root,
        request_digest=hasher.request_digest(root, hashes, PROMPT),
        deadline=asyncio.get_running_loop().time() + 2 * HANG_S,
    )


async def test_a_source_whose_engine_fails_is_a_failed_transfer_to_decode(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer_id, request = secrets.token_bytes(16), asked(two.p.identity.layout)
    go_on = threading.Event()

    def fail(*_: object) -> None:
        go_on.wait(HANG_S)
        raise ValueError("a bug in a kernel")

    monkeypatch.setattr(door_of(two.p).core.executor, "execute_model", fail)

    async with (
        make_channel(two.p.identity.address) as p_channel,
        make_channel(two.d.identity.address) as d_channel,
        asyncio.timeout(HANG_S),
    ):
        to_p, to_d = signed(p_channel, two.p.identity.key), signed(d_channel, two.d.identity.key)
        receiver = prefill_pb2.Receiver(worker_id=two.d.identity.worker_id, epoch=two.d.identity.epoch)
        prefill = WorkerCall(to_p, "prefill", request, transfer_id=transfer_id, receiver=receiver)
        source = decode_pb2.Source(
            worker_id=two.p.identity.worker_id,
            epoch=two.p.identity.epoch,
            address=two.p.identity.attach_address,
            transfer_id=transfer_id,
        )
        decode = WorkerCall(to_d, "decode", request, source=source)
        for call in (prefill, decode):
            assert (await call.read()).HasField("admitted")
        transfer = transfers_of(two.d).manager.transfer("r.0.0")
        assert transfer is not None
        while transfer.state is ReceiverState.ATTACHING:  # noqa: ASYNC110 - a transfer tells its engine alone
            await asyncio.sleep(0.005)
        go_on.set()
        ends = await asyncio.gather(prefill.code(), decode.code())
    # a router that heard of a lost worker from decode would count decode as dead
    assert ends == ["worker_lost", "transfer_failed"]


async def test_a_lease_that_is_revoked_is_no_success(two: Two) -> None:
    async with make_channel(two.p.identity.address) as channel, asyncio.timeout(HANG_S):
        to_p = signed(channel, two.p.identity.key)
        receiver = prefill_pb2.Receiver(worker_id="nobody", epoch=1)
        request = asked(two.p.identity.layout)
        call = WorkerCall(to_p, "prefill", request, transfer_id=secrets.token_bytes(16), receiver=receiver)
        assert (await call.read()).HasField("admitted")
        assert (await call.read()).HasField("computed")
        two.p.engine.revoke_transfers(Draining("the source is draining"))
        assert (await call.read()).ended.how == prefill_pb2.Ended.REVOKED
        assert await call.code() is None
    counts = (
        'pdserve_calls_total{call="prefill",outcome="draining"} 1.0',
        'pdserve_kv_transfers_total{outcome="revoked",role="source"} 1.0',
    )
    async with asyncio.timeout(HANG_S):
        page = ""
        while not all(count in page for count in counts):
            await asyncio.sleep(0.01)
            page = (await two.p.telemetry.exposition()).decode()
    assert 'call="prefill",outcome="ok"' not in page
