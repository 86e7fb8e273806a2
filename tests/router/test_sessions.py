"""Streaming sessions over the router's gRPC front end: turns, refusals, and every way in which one ends."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import grpc
import pytest

from pdserve.common.errors import DeadlineExceeded, Draining, Overloaded, WorkerLost
from pdserve.common.net.rpc import ERROR_CODE_KEY, make_channel
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.router.attempts.worker_calls import SessionCall
from pdserve.router.requests.session import ClientSession
from pdserve.router.workers.step_stream import StepStream
from pdserve.v1 import inference_pb2, request_pb2
from tests.router import candidates
from tests.router.fake_worker import ADMITTED, TEXT, decode_outputs, forever, play, said, tokens
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.signed_channel import signed


def turn(text="hello", max_tokens=4, *, chat=False, token_ids=None, stream=True, sampling=None, **fields):
    prompt: dict[str, Any] = {"text": inference_pb2.TextPrompt(text=text)}
    if chat:
        prompt = {"chat": inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content=text)])}
    if token_ids is not None:
        prompt = {"tokens": inference_pb2.TokenPrompt(token_ids=token_ids)}
    sampling = request_pb2.SamplingParams(max_tokens=max_tokens, **(sampling or {}))
    return inference_pb2.GenerateRequest(**prompt, sampling=sampling, stream=stream, **fields)


async def answer(call):
    """One turn's responses."""
    responses: list[Any] = []
    while not responses or not responses[-1].finish_reason:
        response = await call.read()
        assert response is not grpc.aio.EOF, "the call ended within a turn"
        responses.append(response)
    return responses


async def ask(call, request):
    await call.write(request)
    return await answer(call)


async def send_and_read(call, request):
    if request is not None:
        await call.write(request)
    while await call.read() is not grpc.aio.EOF:
        pass


async def error_of(call, request=None):
    """The call's error, after one more turn if one is given."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send_and_read(call, request)
    error = caught.value
    return error.code(), dict(error.trailing_metadata() or ()).get(ERROR_CODE_KEY), error.details()


async def test_turns_go_on_in_one_call_to_one_worker(cluster):
    await cluster.start(prefill=1, decode=2)
    call = cluster.grpc.Session()
    first = await ask(call, turn("hello"))
    second = await ask(call, turn("more", 1))
    third = await ask(call, turn(token_ids=[5, 6, 7], max_tokens=30, stream=False))
    assert ["".join(response.text for response in turn) for turn in (first, second, third)] == [said(4), "a", said(30)]
    assert len(third) == 1
    usages = [(turn[-1].usage.prompt_tokens, turn[-1].usage.completion_tokens) for turn in (first, second, third)]
    assert usages == [(5, 4), (5 + 4 + 4, 1), (13 + 1 + 3, 30)]
    assert len({turn[-1].request_id for turn in (first, second, third)}) == 1
    assert dict(await call.initial_metadata())["x-request-id"] == first[-1].request_id
    [session] = [call for worker in cluster.workers for call in worker.calls]
    assert [turn.prompt_token_ids for turn in session.seen] == [tokens("hello"), tokens("more"), [5, 6, 7]]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    await asyncio.wait_for(session.ended.wait(), HANG_S)


async def test_a_turn_may_be_sent_before_the_last_one_has_ended(cluster):
    await cluster.start()
    call = cluster.grpc.Session()
    for _ in range(3):
        await call.write(turn(max_tokens=2))
    await call.done_writing()
    texts = ["".join(response.text for response in await answer(call)) for _ in range(3)]
    assert texts == [said(2)] * 3
    assert await call.read() is grpc.aio.EOF


async def test_trace_and_sampling_are_those_of_each_turn(cluster):
    await cluster.start()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call = cluster.grpc.Session(metadata=(("traceparent", parent),))
    await ask(call, turn(sampling={"temperature": 0.5, "seed": 1}))
    await ask(call, turn(sampling={"temperature": 0.25}))
    [session] = cluster.of("decode").calls
    opened, following = session.seen
    first, second = opened.sampling_params, following.sampling_params
    assert (first.temperature, first.seed, second.temperature) == (0.5, 1, 0.25)
    assert second.seed is not None
    for headers in (opened.trace_headers, following.trace_headers):
        assert headers["traceparent"].split("-")[1] == parent.split("-")[1]
    call.cancel()


REFUSED_FIRST = [
    (turn(""), "text is empty"),
    (turn(token_ids=[]), "tokens is empty"),
    (inference_pb2.GenerateRequest(), "prompt is missing"),
    (turn(sampling={"top_p": 2.0}), "top_p must be"),
    (turn(sampling={"n": 2}), "sampling.n is above 1, but a session has one sequence"),
    (turn(sampling={"best_of": 2}), "sampling.best_of is above 1"),
    (turn(max_tokens=300), "sampling.max_tokens is 300"),
    (turn(token_ids=[10**6]), "outside the vocabulary"),
]
REFUSED_LATER = [
    (turn(""), "session is empty"),
    (turn(chat=True), "chat may only come with a session's first message"),
    (turn(cache_salt="x"), "cache_salt may only come"),
    (turn(client_request_id="x"), "client_request_id may only come"),
    (turn(priority=1), "priority may only come"),
    (turn(speculative_tokens=0), "speculative_tokens may only come"),
    (turn(token_ids=[10**6]), "outside the vocabulary"),
    (turn("x" * 250), "session has 259 tokens; the model's length is 256"),
    (turn("x" * 13 * 250), "session has at least 259 tokens; the model's length is 256"),
    (turn(max_tokens=250), "sampling.max_tokens is 250 and session has 14 tokens"),
]


async def test_wrong_turns_end_the_session_and_say_why(cluster):
    await cluster.start()
    for later, cases in ((False, REFUSED_FIRST), (True, REFUSED_LATER)):
        for request, message in cases:
            call = cluster.grpc.Session()
            if later:
                await ask(call, turn())
            code, name, details = await error_of(call, request)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (request, details)
            assert name in ("invalid_request", "prompt_too_long")
            assert message in details
    sessions = cluster.of("decode").calls
    assert len(sessions) == len(REFUSED_LATER)
    for session in sessions:
        await asyncio.wait_for(session.ended.wait(), HANG_S)
    call = cluster.grpc.Session()
    assert "".join(response.text for response in await ask(call, turn(chat=True))) == said(4)
    call.cancel()


async def test_a_model_that_is_not_served(cluster):
    await cluster.start()
    call = cluster.grpc.Session()
    assert (await error_of(call, turn(model="other")))[0] is grpc.StatusCode.NOT_FOUND


async def test_keys_and_limits_hold_for_sessions(cluster):
    await cluster.start(api_keys=("secret",), max_requests_per_key=1)
    assert (await error_of(cluster.grpc.Session(), turn()))[0] is grpc.StatusCode.UNAUTHENTICATED
    metadata = (("authorization", "Bearer secret"),)
    cluster.of("decode").step_s = 0.05
    one, two = cluster.grpc.Session(metadata=metadata), cluster.grpc.Session(metadata=metadata)
    await ask(one, turn())  # between turns it counts for no limit
    await two.write(turn(max_tokens=200))
    await two.read()
    code, name, _ = await error_of(one, turn())
    assert (code, name) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")
    two.cancel()


async def test_sessions_need_decode_workers_that_may_prefill(cluster):
    await cluster.start(local_prefill="never")
    code, _, details = await error_of(cluster.grpc.Session(), turn())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "local_prefill is never" in details


@pytest.mark.parametrize("idle", [False, True])
async def test_a_client_that_leaves_ends_the_call_to_the_worker(cluster, idle):
    await cluster.start()
    cluster.of("decode").step_s = 0.0 if idle else 0.02
    call = cluster.grpc.Session()
    await call.write(turn(max_tokens=4 if idle else 200))
    if idle:
        await answer(call)
    else:
        await call.read()
    call.cancel()
    [session] = cluster.of("decode").calls
    await asyncio.wait_for(session.ended.wait(), HANG_S)
    await cluster.idle()


@pytest.mark.parametrize("idle", [False, True])
async def test_i6_a_workers_death_ends_the_session(cluster, idle):
    await cluster.start()
    cluster.of("decode").step_s = 0.0 if idle else 0.02
    call = cluster.grpc.Session()
    await call.write(turn(max_tokens=4 if idle else 200))
    if idle:
        await answer(call)
    else:
        await call.read()
    await cluster.of("decode").kill()
    code, name, _ = await error_of(call)
    assert (code, name) == (grpc.StatusCode.UNAVAILABLE, "worker_lost")
    assert len(cluster.of("decode").calls) == 1, "it was tried again elsewhere"


async def test_i6_a_workers_death_ends_a_turn_that_never_reached_it():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        # it takes the connection, and says nothing
        worker = candidates.worker("d")
        worker.channel = signed(make_channel(f"127.0.0.1:{mute.getsockname()[1]}"), worker.key)
        worker.bulk_stream = StepStream(worker.channel, "d")
        session = ClientSession()
        request = GenerationRequest(
            request_id="r",
            prompt_token_ids=[1],
            sampling_params=SamplingParams(),
            eos_token_ids=(),
            hash_root=b"",
            request_digest=b"",
            deadline=time.monotonic() + 30,
        )
        session.open(worker, SessionCall(worker, request))
        connection, _ = await asyncio.to_thread(mute.accept)
        worker.mark_lost("its watch stream broke")
        async with asyncio.timeout(HANG_S):
            with pytest.raises(WorkerLost, match="its watch stream broke"):
                await session.next()
        await eventually(lambda: not [task for task in asyncio.all_tasks() if "step stream" in task.get_name()])
        connection.close()
        await worker.channel.channel.close()


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("the session was idle for 60 s"), Draining("the worker is draining")]
)
@pytest.mark.parametrize("between", [False, True])
async def test_what_the_worker_says_reaches_the_client(cluster, error, between):
    await cluster.start()

    async def script(worker, call):
        await anext(call.turns)
        yield ADMITTED
        yield decode_outputs(0, TEXT[0], "length" if between else None)
        raise error

    cluster.of("decode").session_script = script
    call = cluster.grpc.Session()
    await call.write(turn(max_tokens=1 if between else 5))
    await call.read()
    code, name, details = await error_of(call)
    assert (code, name) == (error.grpc_status, error.code)
    if isinstance(error, DeadlineExceeded):
        assert details == error.message
    else:
        assert details.startswith("the service is leaving and takes no new requests; the router's log has the details")


async def test_a_refused_session_hears_why(cluster):
    await cluster.start()

    async def refuse(worker, call):
        await anext(call.turns)
        raise Overloaded("64 sessions are open on this worker", 2.0)
        yield

    cluster.of("decode").session_script = refuse
    for _ in range(20):
        code, name, details = await error_of(cluster.grpc.Session(), turn())
        assert (code, name) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")
        assert details == "64 sessions are open on this worker"


async def test_a_router_that_leaves_ends_idle_sessions_with_its_cause(cluster):
    await cluster.start()
    call = cluster.grpc.Session()
    await ask(call, turn())
    cluster.stop.set()
    code, name, details = await error_of(call)
    assert (code, name, details) == (grpc.StatusCode.UNAVAILABLE, "draining", "this router is shutting down")


async def test_a_client_that_sends_nothing_is_ended(cluster):
    await cluster.start(request_timeout_s=0.2)
    call = cluster.grpc.Session()
    code, _, details = await error_of(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "first message" in details


async def test_a_turn_with_a_field_that_is_not_known_ends_it(cluster):
    await cluster.start(prefill=1, decode=1)
    call = cluster.grpc.Session()
    await ask(call, turn())
    newer = turn("more")
    newer.MergeFromString(b"\xf8\x06\x01")
    await call.write(newer)
    code, _, details = await error_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "GenerateRequest has a field number 111, which is not known here"


async def test_turns_may_tell_everything_so_far(cluster):
    await cluster.start(prefill=1, decode=1)
    call = cluster.grpc.Session()
    for _ in range(2):
        # each turn from its own first token on
        responses = await ask(call, turn(sampling={"output_kind": request_pb2.OUTPUT_KIND_CUMULATIVE}))
        assert responses[-1].text == said(4)
        assert all(said(4).startswith(response.text) for response in responses)
    [response] = await ask(call, turn(sampling={"output_kind": request_pb2.OUTPUT_KIND_FINAL_ONLY}))
    assert response.text == said(4)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_a_turn_that_waits_for_a_place_hears_at_once_that_its_worker_died(cluster):
    await cluster.start(prefill=0, decode=2, max_running_requests=1)
    call = cluster.grpc.Session()
    await ask(call, turn())
    [ours] = [worker for worker in cluster.workers if worker.calls]
    [other] = [worker for worker in cluster.workers if worker is not ours]
    other.script = play(ADMITTED, forever)
    # goes to the one that has been used least
    busy = asyncio.create_task(cluster.complete())
    await other.called()
    await call.write(turn("more"))
    await cluster.queued(1)
    await ours.kill()
    code, name, _ = await asyncio.wait_for(error_of(call), HANG_S)
    assert (code, name) == (grpc.StatusCode.UNAVAILABLE, "worker_lost")
    assert not busy.done()
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
