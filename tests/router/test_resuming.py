"""Attempts that go on where the client's text stands: what they carry, and that nothing comes twice."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import Draining, Evicted, InternalError, TransferFailed, WorkerLost
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.router.attempts.attempt import Attempt
from pdserve.v1 import request_pb2
from tests.router.fake_worker import (
    ADMITTED,
    LANDED,
    PREFILL_ADMITTED,
    decode_outputs,
    decode_well,
    first,
    forever,
    play,
    said,
    token,
    tokens,
)
from tests.support.run.waiting import HANG_S


def decode_scripts(cluster, *scripts):
    """These for the decode calls in the order of the attempts, whichever worker gets them; then well."""
    left = list(scripts)

    async def script(worker, call):
        async for event in (left.pop(0) if left else decode_well)(worker, call):
            yield event

    for worker in cluster.workers:
        if worker.role == "decode":
            worker.script = script


def decode_requests(cluster):
    """The requests to decode, by attempt."""
    return [call.request for call in decode_calls(cluster)]


def decode_calls(cluster):
    """The calls to decode, by attempt."""
    calls = [call for worker in cluster.workers if worker.role == "decode" for call in worker.calls]
    return sorted(calls, key=lambda call: call.sent.attempt)


@pytest.fixture
def first_token_known(monkeypatch):
    """Set when the router has heard of a first token: what decode says before is kept back, and lost with it."""
    known = asyncio.Event()
    on_computed = Attempt._on_computed

    def note(attempt, computed):
        on_computed(attempt, computed)
        known.set()

    monkeypatch.setattr(Attempt, "_on_computed", note)
    return known


def begun(first_token_known, num_tokens, *end):
    """Decode says tokens 1 to num_tokens - 1, then ends so."""

    async def wait(worker, call):
        await first_token_known.wait()

    return play(ADMITTED, LANDED, wait, *(decode_outputs(p, said(1, p)) for p in range(1, num_tokens)), *end)


@pytest.mark.parametrize("error", [WorkerLost("gone"), Evicted("no room"), Draining("leaving"), TransferFailed("t")])
async def test_i4_an_attempt_goes_on_where_the_last_one_ended(cluster, first_token_known, error):
    await cluster.start(prefill=2, decode=2)
    decode_scripts(cluster, begun(first_token_known, 20, error))
    response = await cluster.complete(prompt="x" * 40, max_tokens=30, temperature=0.5)
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    assert (choice["text"], choice["finish_reason"]) == (said(30), "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 30)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3, "the second attempt's cache counted"
    begin, resumed = decode_requests(cluster)
    assert not begin.is_resumed
    assert resumed.index == 0
    assert resumed.output_token_ids == tokens(said(20))
    assert resumed.prompt_token_ids == begin.prompt_token_ids
    assert resumed.sampling_params == begin.sampling_params, "seed and limits stay what they were"
    hasher = BlockHasher(DEVELOPMENT_KEY, 16)
    given = [*resumed.prompt_token_ids, *resumed.output_token_ids]
    hashes = hasher.extend(resumed.hash_root, given)
    assert len(hashes) == 3
    assert resumed.request_digest == hasher.request_digest(resumed.hash_root, hashes, given)
    for call in [call for worker in cluster.workers if worker.role == "prefill" for call in worker.calls]:
        if call.sent.attempt == 1:
            assert (call.request.index, call.request.output_token_ids) == (0, resumed.output_token_ids)


async def test_an_attempt_after_which_the_client_has_nothing_begins_anew(cluster):
    await cluster.start(decode=2)
    cluster.of("prefill").scripts = [play(PREFILL_ADMITTED, forever)]
    decode_scripts(cluster, play(ADMITTED, WorkerLost("gone")))
    assert await cluster.text() == said(5)
    assert [request.is_resumed for request in decode_requests(cluster)] == [False, False]


async def test_several_attempts_each_go_on_from_the_last(cluster):
    await cluster.start(prefill=0, decode=3)
    local = [[decode_outputs(p, said(1, p)) for p in range(*places)] for places in ((0, 3), (3, 3), (3, 8))]
    decode_scripts(cluster, *(play(ADMITTED, *events, Draining("leaving")) for events in local[:2]))
    received = await cluster.streamed(lambda: None, prompt="hello", max_tokens=12)
    assert "".join(part.split('"')[0] for part in received.split('"text":"')[1:]) == said(12)
    requests = decode_requests(cluster)
    assert [len(request.output_token_ids) for request in requests] == [0, 3, 3]


async def test_the_last_error_comes_when_every_attempt_has_failed(cluster):
    await cluster.start(prefill=0)
    scripts = [play(ADMITTED, decode_outputs(place, said(1, place)), TransferFailed("again")) for place in range(3)]
    decode_scripts(cluster, *scripts)
    response = await cluster.complete(max_tokens=9)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "transfer_failed")
    assert len(decode_requests(cluster)) == 3


async def test_evictions_are_no_failed_attempts(cluster):
    await cluster.start(prefill=0)
    scripts = [play(ADMITTED, decode_outputs(place, said(1, place)), Evicted("no room")) for place in range(5)]
    decode_scripts(cluster, *scripts)
    assert await cluster.text(max_tokens=9) == said(9)
    assert len(decode_requests(cluster)) == 6


async def test_evictions_without_end_end_with_their_error(cluster, monkeypatch):
    monkeypatch.setattr("pdserve.router.requests.tasks.placed_task.MAX_EVICTIONS", 2)
    await cluster.start(prefill=0)
    decode_scripts(cluster, *[play(ADMITTED, Evicted("no room"))] * 9)
    response = await cluster.complete(max_tokens=9)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "evicted")
    assert len(decode_requests(cluster)) == 2 + 3


async def test_the_last_token_of_a_resumed_request_comes_from_prefill_alone(cluster, first_token_known):
    await cluster.start(prefill=1, decode=1)
    decode_scripts(cluster, begun(first_token_known, 4, Draining("leaving")))
    assert await cluster.text(max_tokens=5) == said(5)
    assert len(decode_requests(cluster)) == 1
    last = cluster.of("prefill").calls[1]
    assert last.sent.prefill.transfer_id == b""
    assert list(last.request.output_token_ids) == tokens(said(4))


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (decode_outputs(2, "x"), "position_conflict"),
        (decode_outputs(1, "b", "length"), "position_conflict"),
        (decode_outputs(3, "d", index=1), "position_conflict"),
    ],
)
async def test_a_worker_that_says_something_else_again_fails_the_request(cluster, event, code):
    await cluster.start(prefill=0, decode=2)
    begins = [decode_outputs(place, said(1, place)) for place in range(3)]
    decode_scripts(cluster, play(ADMITTED, *begins, Draining("leaving")), play(ADMITTED, event, forever))
    response = await cluster.complete(max_tokens=6)
    assert (response.status_code, response.json()["error"]["code"]) == (500, code)


async def test_a_worker_that_repeats_what_was_sent_changes_nothing(cluster):
    await cluster.start(prefill=0, decode=2)
    begins = [decode_outputs(place, said(1, place)) for place in range(3)]
    again = play(
        ADMITTED, *begins[1:], *(decode_outputs(p, said(1, p), "length" if p == 5 else None) for p in (3, 4, 5))
    )
    decode_scripts(cluster, play(ADMITTED, *begins, Draining("leaving")), again)
    response = (await cluster.complete(max_tokens=6)).json()
    assert response["choices"][0]["text"] == said(6)
    assert response["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("cut", [2, 3, 4])
async def test_a_stop_string_that_was_held_back_goes_on_across_attempts(cluster, cut):
    await cluster.start(prefill=0, decode=2)
    begins = [decode_outputs(place, said(1, place)) for place in range(cut)]
    decode_scripts(cluster, play(ADMITTED, *begins, Draining("leaving")))
    choice = (await cluster.complete(max_tokens=9, stop="cde")).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ab", "cde")
    assert list(decode_requests(cluster)[1].output_token_ids) == tokens(said(cut))


def likely(text, *values):
    return request_pb2.Logprobs(width=1, token_ids=tokens(text), logprobs=values, sampled_ranks=[1] * len(text))


async def test_log_probabilities_are_those_of_each_token_once(cluster):
    await cluster.start(prefill=0, decode=2)
    decode_scripts(
        cluster,
        play(ADMITTED, decode_outputs(0, "ab", logprobs=likely("ab", -0.5, -1.0)), Draining("leaving")),
        play(ADMITTED, decode_outputs(2, "cd", "length", logprobs=likely("cd", -2.0, -0.25))),
    )
    logprobs = (await cluster.complete(max_tokens=4, logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d"]
    assert logprobs["token_logprobs"] == [-0.5, -1.0, -2.0, -0.25]


async def test_each_unfinished_sequence_goes_on_in_calls_of_its_own(cluster):
    await cluster.start(prefill=2, decode=2)
    said_by_then = {0: 4, 1: 2, 2: 4}
    events = [
        decode_outputs(p, said(1, index + p), "stop" if index == 2 and p == 3 else None, index=index)
        for index, count in said_by_then.items()
        for p in range(1, count)
    ]
    has_first = asyncio.Event()
    decode_scripts(cluster, play(ADMITTED, lambda *_: has_first.wait(), LANDED, *events, WorkerLost("gone")))
    fields = {"prompt": "hello", "max_tokens": 8, "n": 3, "stream_options": {"include_usage": True}}
    received = await cluster.streamed(has_first.set, **fields)
    *chunks, last = (json.loads(line[6:]) for line in received.split("\n\n") if line.startswith("data: {"))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in range(3)]
    assert texts == [said(8), said(8, 1), said(4, 2)]
    ends = {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    assert ends == {0: "length", 1: "length", 2: "stop"}
    assert last["usage"]["completion_tokens"] == 8 + 8 + 4
    whole, *apart = decode_calls(cluster)
    assert not whole.request.is_resumed
    resumed = {call.request.index: call.request.output_token_ids for call in apart}
    assert resumed == {0: tokens(said(4)), 1: tokens(said(2, 1))}
    assert sorted(call.sent.attempt for call in apart) == [1, 2]
    assert len({call.sent.decode.source.transfer_id for call in apart}) == 2


async def test_a_call_that_speaks_of_another_sequence_than_it_was_given_ends_neither(cluster):
    await cluster.start(prefill=0, decode=1)

    async def script(worker, call):
        request = call.request
        if not request.is_resumed:
            events = play(ADMITTED, decode_outputs(0, "a"), decode_outputs(0, "b", index=1), Draining("leaving"))
        elif request.index == 0:
            events = play(ADMITTED, decode_outputs(1, "cd", "length", index=1), forever)
        else:
            events = play(ADMITTED, forever)
        async for event in events(worker, call):
            yield event

    cluster.of("decode").script = script
    response = await asyncio.wait_for(cluster.complete(max_tokens=3, n=2), HANG_S)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "position_conflict")


async def test_a_sequence_that_fails_for_good_ends_the_others_too(cluster):
    await cluster.start(prefill=0, decode=2)

    async def script(worker, call):
        request = call.request
        if not request.is_resumed:
            events = play(ADMITTED, decode_outputs(0, "a"), decode_outputs(0, "b", index=1), WorkerLost("gone"))
        elif request.index == 0:
            events = play(ADMITTED, forever)
        else:
            events = play(ADMITTED, lambda *_: other_began.wait(), InternalError("broken"))
        if request.is_resumed and request.index == 0:
            other_began.set()
        async for event in events(worker, call):
            yield event

    other_began = asyncio.Event()
    for worker in cluster.workers:
        worker.script = script
    response = await cluster.complete(max_tokens=8, n=2)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    calls = [call for worker in cluster.workers for call in worker.calls]
    assert len(calls) == 3
    await asyncio.wait_for(asyncio.gather(*(call.ended.wait() for call in calls)), HANG_S)
    metrics = (await cluster.http.get("/metrics")).text
    assert 'pdserve_attempts_total{outcome="internal_error"} 2.0' in metrics, "nobody left"


async def test_a_prompt_that_kills_two_workers_in_mid_stream_is_refused_from_its_beginning(cluster):
    await cluster.start(prefill=0, decode=3)

    def next_token(worker, call):
        position = len(call.request.output_token_ids)
        return decode_outputs(position, said(1, position))

    async def die(worker, call):
        await asyncio.sleep(0.3)  # a worker that is lost before its admission has arrived is weaker evidence
        asyncio.get_running_loop().create_task(worker.kill())
        await forever(worker, call)

    decode_scripts(cluster, play(ADMITTED, next_token, die), play(ADMITTED, next_token, die))
    response = await cluster.complete(max_tokens=8)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_lost")
    again = await cluster.complete(max_tokens=8)
    assert "it is refused for another" in again.json()["error"]["message"]
    assert await cluster.text(prompt="another") == said(5)


@pytest.mark.few(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_only_lost_its_connection_serves_the_request_on(cluster, role):
    """There is no other one, and it has not died."""
    await cluster.start(prefill=1, decode=1, local_prefill="never")
    lost = cluster.of(role)
    cuts = []

    async def cut(worker, call):
        cuts.append(asyncio.create_task(lost.kill()))
        await forever(worker, call)

    if role == "prefill":
        lost.scripts = [play(PREFILL_ADMITTED, first(), cut)]
        decode_scripts(cluster, play(ADMITTED, forever))
    else:
        lost.scripts = [play(ADMITTED, LANDED, *[decode_outputs(p, said(1, p)) for p in (1, 2)], cut)]
    asking = asyncio.create_task(cluster.text(max_tokens=6))
    await cluster.live(**{role: 0})
    await lost.live_on()
    assert await asking == said(6)
    assert len(lost.calls) == 2
    await asyncio.gather(*cuts)


async def test_a_prompt_under_which_connections_broke_is_not_refused(cluster, monkeypatch):
    await cluster.start(prefill=0, decode=2)
    cuts = []
    heard: asyncio.Queue[Any] = asyncio.Queue()
    on_decode = Attempt._on_decode

    def note(attempt, event):
        on_decode(attempt, event)
        heard.put_nowait(event)

    monkeypatch.setattr(Attempt, "_on_decode", note)

    async def cut(worker, call):
        await heard.get()  # the router knows that the prompt was admitted
        cuts.append(asyncio.create_task(worker.kill()))
        await forever(worker, call)

    decode_scripts(cluster, play(ADMITTED, cut), play(ADMITTED, cut))
    response = await cluster.complete()
    assert "2 workers died" in response.json()["error"]["message"]
    await asyncio.gather(*cuts)
    await cluster.live(decode=0)
    for num_back, worker in enumerate(cluster.workers):
        if num_back:
            assert await cluster.text() == said(5), "one that lives on is proof enough"
        await worker.live_on()
        await cluster.live(decode=num_back + 1)
    assert await cluster.text() == said(5)


async def test_prefill_that_dies_after_the_first_token_is_not_asked_for_it_again(cluster):
    await cluster.start(prefill=2, decode=1)
    for worker in cluster.workers:
        if worker.role == "prefill":
            worker.scripts = [play(PREFILL_ADMITTED, first(), WorkerLost("gone"))]
    decode_scripts(cluster, play(ADMITTED, forever))
    assert await cluster.text(max_tokens=6) == said(6)
    assert list(decode_requests(cluster)[1].output_token_ids) == [token("a")]


async def test_openai_client_sees_one_stream_of_three_choices(cluster):
    await cluster.start(prefill=1, decode=2)
    events = [decode_outputs(p, said(1, index + p), index=index) for p in range(1, 5) for index in range(3)]
    decode_scripts(cluster, play(ADMITTED, LANDED, *events, Draining("leaving")))
    client = openai.AsyncOpenAI(base_url=f"http://{cluster.addresses[0]}/v1", api_key="none", max_retries=0)
    stream = await client.completions.create(model="fake-model", prompt="hello", max_tokens=9, n=3, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    await client.close()
    assert texts == [said(9, index) for index in range(3)]
