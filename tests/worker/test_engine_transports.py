"""`EngineClient` with transfers, over both transports: an engine in this process and one in its own do the same."""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    PdServeError,
    TransferFailed,
    WorkerLost,
)
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest, FinishReason, StreamingUpdate
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.engine.client import process_client
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.executor.executor import SingleDeviceExecutor
from pdserve.kv_transfer.control.receiver_transfer import SourceRef
from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, PeerId
from pdserve.kv_transfer.control.transfer_state import SourceState
from pdserve.worker.engine_client import EngineClient, RequestEnd, RequestStream
from pdserve.worker.worker_process import make_engine
from tests.support.engine.forked_engine import FATAL_TOKEN, fail_at_fatal_token, start_failing, start_forked
from tests.support.engine.settings_with import settings_with
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.worker_pair import KEY

pytestmark = pytest.mark.asyncio(loop_scope="module")
KINDS = ("in this process", "in its own")
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_blocks": 64, "max_model_len": 1000, "connector": "tcp", "attach_timeout_s": HANG_S,
}  # fmt: skip
PEER = PeerId("decode-1", 7)


async def loaded(folder: Path, kind: str) -> EngineCoreClient:
    return await make_engine(
        settings_with(PrefillSettings, **SETTINGS, engine_process=kind == "in its own"), folder, KEY
    )


async def started(folder: Path, kind: str) -> EngineClient:
    engine = await loaded(folder, kind)
    client = EngineClient(engine)
    engine.call_utility("begin_transfers", "prefill-1", 3)
    await asyncio.wrap_future(engine.start(warm_up=True))
    return client


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def client(request: pytest.FixtureRequest, tiny_checkpoints: Callable[..., Path]) -> AsyncIterator[EngineClient]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "freeze", lambda: None)  # the objects of a test go with it
        patched.setattr(process_client, "start_program", start_forked)
        made = await started(tiny_checkpoints("llama"), request.param)
    yield made
    await eventually(lambda: not (made.stats.num_blocks_in_use or made.transfer_counts.num_open))
    assert (made.num_waiting, made.num_streams) == (0, 0)
    await made.close()
    await made.close()


@pytest.fixture(scope="module")
def oracle(tiny_checkpoints: Callable[..., Path]) -> Oracle:
    return Oracle(tiny_checkpoints("llama"))


def request_of(prompt: Sequence[int], *, max_tokens: int = 8, **fields: Any) -> EngineCoreRequest:
    """Greedy."""
    hasher = BlockHasher(KEY, 16)
    root = hasher.root("any")
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    given: dict[str, Any] = {
        "request_id": secrets.token_hex(4),
        "sampling_params": params,
        "arrival_time": time.monotonic(),
    } | fields
    return EngineCoreRequest(
        prompt_token_ids=list(prompt), block_hashes=hasher.extend(root, list(prompt)), hash_root=root, **given
    )


def expected(request: EngineCoreRequest, transfer_id: bytes | None = None) -> ExpectedTransfer:
    return ExpectedTransfer(transfer_id or secrets.token_bytes(16), request.request_id, PEER, bytes(16), 60.0, 3)


async def read(stream: RequestStream) -> list[int]:
    """All tokens that were not read yet, or those of a session's turn."""
    tokens: list[int] = []
    first = None
    async with asyncio.timeout(HANG_S):
        async for output in stream:
            if output.index == 0:
                first = output.first_position if first is None else first
                assert output.first_position == first + len(tokens)
                tokens += output.new_token_ids
    return tokens


async def error_of(stream: RequestStream) -> PdServeError:
    with pytest.raises(PdServeError) as caught:
        await read(stream)
    return caught.value


async def end_of(client: EngineClient, stream: RequestStream) -> RequestEnd:
    """Release it: what the engine says last."""
    told: asyncio.Queue[RequestEnd] = asyncio.Queue()
    client.release(stream, told.put_nowait)
    client.release(stream, told.put_nowait)
    async with asyncio.timeout(HANG_S):
        end = await told.get()
    assert told.empty()
    return end


async def test_requests_run_together_and_each_answer_is_whole(client: EngineClient, oracle: Oracle) -> None:
    prompts = [prompt_of(length, length) for length in (3, 40, 200)]
    streams = [client.submit(request_of(prompt)) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        oracle.check(prompt, await read(stream))
        assert await end_of(client, stream) == RequestEnd()


async def test_everything_of_an_output_arrives(client: EngineClient) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    request = request_of(prompt_of(40, 9), sampling_params=params, n=2)
    outputs: list[EngineCoreOutput] = []
    stream = client.submit(request, outputs.append)
    await read(stream)
    client.release(stream)
    of_first = [output for output in outputs if output.index == 0]
    assert {output.index for output in outputs} == {0, 1}
    assert sum(len(output.new_token_ids) for output in of_first) == 5
    assert all(output.new_logprobs is not None for output in outputs if output.new_token_ids)
    prompt_logprobs = of_first[0].prompt_logprobs
    assert prompt_logprobs is not None
    assert len(prompt_logprobs) == 39
    moments = {name: at for output in of_first for name, at in output.moments.items()}
    assert request.arrival_time <= moments["queued"] <= moments["scheduled"] <= moments["finished"] <= time.monotonic()
    assert [num_tokens for _, num_tokens in of_first[0].prefill_chunks] == [40]


async def test_i7_a_released_request_is_aborted_and_its_last_moments_are_told(client: EngineClient) -> None:
    stream = client.submit(request_of(prompt_of(40, 1), max_tokens=900))
    async with asyncio.timeout(HANG_S):
        await stream.get()
    aborted = (await end_of(client, stream)).aborted
    assert aborted is not None
    assert {"queued", "scheduled", "first_token", "finished"} <= set(aborted.moments)
    assert [num_tokens for _, num_tokens in aborted.prefill_chunks] == [40]
    await eventually(lambda: not client.stats.num_running_reqs)


async def test_a_sequence_ends_where_its_text_ends(client: EngineClient) -> None:
    outputs: list[EngineCoreOutput] = []
    stream = client.submit(request_of(prompt_of(20, 2), max_tokens=900), outputs.append)
    async with asyncio.timeout(HANG_S):
        await stream.get()
        client.end_sequence(stream.request_id, 0)
        await read(stream)
    assert outputs[-1].finish_reason is FinishReason.STOP
    client.release(stream)


async def test_a_deadline_passes_whatever_the_engine_does(client: EngineClient) -> None:
    stream = client.submit(request_of(prompt_of(20, 3), max_tokens=900, deadline=time.monotonic() + 0.05))
    assert isinstance(await error_of(stream), DeadlineExceeded)
    client.release(stream)


async def test_what_no_engine_serves_is_refused_by_name(client: EngineClient) -> None:
    for field, request in {
        "prompt_token_ids": request_of([5, 10**6]),
        "n": request_of([5], n=65),
        "top_p": request_of([5], sampling_params=SamplingParams(top_p=2.0)),
    }.items():
        with pytest.raises(InvalidRequest) as refused:
            client.verify(request)
        assert refused.value.field == field


async def test_i8_a_transfer_that_cannot_begin_ends_its_request_alone(client: EngineClient, oracle: Oracle) -> None:
    transfer_id = secrets.token_bytes(16)
    source = SourceRef("prefill-9", 1, "192.0.2.1:5000", secrets.token_bytes(16), bytes(16))
    prompt = prompt_of(20, 4)
    beside = client.submit(request_of(prompt))
    for transfer, kind, text in (
        (source, InvalidRequest, "192.0.2.1:5000 is not loopback"),
        (transfer_id, None, ""),
        (transfer_id, TransferFailed, "the transfer id was used before"),
    ):
        request = request_of(
            prompt_of(20, 5), remote_prefill=transfer is source, transfer_source=transfer is not source
        )
        stream = client.submit(
            request, transfer=transfer if isinstance(transfer, SourceRef) else expected(request, transfer)
        )
        if kind is None:
            assert len((await stream.get()).new_token_ids) == 1
        else:
            error = await error_of(stream)
            assert type(error) is kind
            assert text in error.message
        client.release(stream)
    oracle.check(prompt, await read(beside))
    client.release(beside)


async def test_the_end_of_a_transfer_is_told_with_its_cause(client: EngineClient) -> None:
    request = request_of(prompt_of(40, 6), transfer_source=True)
    stream = client.submit(request, transfer=expected(request))
    async with asyncio.timeout(HANG_S):
        await stream.get()
        await eventually(lambda: client.transfer_counts.num_expected == 1)
        [view] = (await client.transfers()).under_way
        assert (view.request_id, view.peer, view.state) == (request.request_id, "decode-1", "OPEN")
        client.revoke_transfers(Draining("the source is draining"))
        end = await stream.source_ended
    assert (end.state, type(end.cause), str(end.cause)) == (SourceState.REVOKED, Draining, "the source is draining")
    await eventually(lambda: client.transfer_counts.num_ended["source", "revoked"] == 1)
    client.release(stream)


async def test_sessions_go_on_and_end_while_idle(client: EngineClient, oracle: Oracle) -> None:
    first, more = prompt_of(20, 7), prompt_of(5, 8)
    session = request_of(first, max_tokens=4, resumable=True)
    stream = client.submit(session)
    tokens = await read(stream)
    params = session.sampling_params
    client.resume(StreamingUpdate(request_id=session.request_id, prompt_token_ids=more, sampling_params=params))
    second: list[int] = []
    async with asyncio.timeout(HANG_S):
        async for output in stream:
            second += output.new_token_ids
    oracle.check([*first, *tokens, *more], second)
    client.core.fail_idle_sessions(Draining("the worker is draining"))
    assert isinstance(await error_of(stream), Draining)
    client.release(stream)


async def test_all_requests_can_be_ended_at_once(client: EngineClient) -> None:
    streams = [client.submit(request_of(prompt_of(20, seed), max_tokens=900)) for seed in range(3)]
    async with asyncio.timeout(HANG_S):
        for stream in streams:
            await stream.get()
    client.core.fail_requests(Draining("the worker has drained for as long as it may"))
    for stream in streams:
        assert isinstance(await error_of(stream), Draining)
        client.release(stream)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_i2_i4_random_lives_leave_whole_texts_and_pools(client: EngineClient, oracle: Oracle, seed: int) -> None:
    """Requests that come, are read, left in the middle and ended at any moment; in a pool for a part of them."""
    draw = random.Random(seed)
    stems = [prompt_of(90, number) for number in range(3)]

    async def live(number: int) -> tuple[list[int], list[int], bool]:
        """Prompt, tokens, and whether they are all."""
        await asyncio.sleep(draw.uniform(0.0, 0.5))
        prompt = draw.choice(stems)[: draw.randrange(1, 90)] + prompt_of(draw.randrange(1, 40), number)
        request = request_of(prompt, max_tokens=draw.randrange(1, 40))
        stream = client.submit(request)
        tokens: list[int] = []
        leaves_after = draw.choice([None, None, 0, 1, 9])
        async with asyncio.timeout(HANG_S):
            async for output in stream:
                assert output.first_position == len(tokens)
                tokens += output.new_token_ids
                if leaves_after is not None and len(tokens) > leaves_after:
                    break
        client.release(stream)
        return prompt, tokens, len(tokens) == request.sampling_params.max_tokens

    lives = await asyncio.gather(*(live(number) for number in range(60)))
    assert sum(is_whole for *_, is_whole in lives) > 20
    for prompt, tokens, _ in lives:
        oracle.check(prompt, tokens)
    await eventually(lambda: not client.stats.num_blocks_in_use)
    stats = client.stats
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total


@pytest.mark.few(1)
async def test_an_idle_engine_ticks_on_and_meets_peers(client: EngineClient) -> None:
    client.meet("decode-1", 7, "127.0.0.1:9")
    before = client.tick
    await eventually(lambda: client.tick >= before + 2)
    assert client.tick_age_s < HANG_S


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
async def test_i6_a_failed_step_ends_every_request_and_says_so(
    tiny_checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(process_client, "start_program", start_failing)
    execute = SingleDeviceExecutor.execute_model
    monkeypatch.setattr(SingleDeviceExecutor, "execute_model", fail_at_fatal_token(execute))
    client = await started(tiny_checkpoints("llama"), kind)
    source = request_of(prompt_of(20, 1), transfer_source=True)
    computed = client.submit(source, transfer=expected(source))  # its one token may be there before the engine fails
    streams = [
        client.submit(request_of(prompt_of(20, 2), max_tokens=900)),
        client.submit(request_of([FATAL_TOKEN] * 20)),
    ]
    for stream in streams:
        assert isinstance(await error_of(stream), WorkerLost)
    async with asyncio.timeout(HANG_S):
        try:
            cause = (await computed.source_ended).cause  # the transfer failed before its engine was reported dead
        except WorkerLost as lost:
            cause = lost
        assert type(cause) is WorkerLost
        assert "the engine failed; its log has the details" in cause.message
        await client.died.wait()
    with pytest.raises(WorkerLost):
        client.submit(request_of([5]))
    assert await end_of(client, streams[0]) == RequestEnd()
    await client.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(process_client, "start_program", start_forked)
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        await loaded(tmp_path, kind)
