"""Attempts: both calls, what each may do wrong and when, and what the client sees of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import pytest

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import (
    DigestMismatch,
    Draining,
    Evicted,
    InternalError,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    WorkerLost,
)
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.timeline import Timeline
from pdserve.router.attempts import attempt as attempt_module
from pdserve.router.attempts.attempt import Attempt
from pdserve.router.attempts.attempt_failure import backoff_s
from pdserve.router.attempts.attempt_state import EDGES, AttemptState, IllegalTransition, moved
from pdserve.router.attempts.call_events import Admitted
from pdserve.router.placement.placement import Placement
from tests.router import candidates
from tests.router.fake_worker import (
    ADMITTED,
    ENDED_NEWLY,
    EOS,
    LANDED,
    LOCALLY,
    PREFILL_ADMITTED,
    RELEASED,
    REVOKED,
    TEXT,
    decode_outputs,
    decode_well,
    first,
    forever,
    needs_prefill,
    play,
    prefill_well,
    said,
)
from tests.support.run.waiting import HANG_S


def refuse(error):
    """A script that fails before anything."""
    return play(error)


def rest(count, start=1):
    """Decode's outputs from a position on, one a message."""
    return [
        decode_outputs(position, TEXT[position], "length" if position == count - 1 else None)
        for position in range(start, count)
    ]


async def test_both_calls_carry_the_same_request_and_name_each_other(cluster):
    await cluster.start()
    prompt = "x" * 40
    assert await cluster.text(prompt=prompt) == said(5)
    [prefill], [decode] = cluster.of("prefill").calls, cluster.of("decode").calls
    sent = decode.request
    assert len(prefill.sent.prefill.transfer_id) == 16
    assert decode.sent.decode.source.transfer_id == prefill.sent.prefill.transfer_id
    assert decode.sent.decode.source.address == cluster.of("prefill").address
    assert decode.sent.decode.source.epoch == cluster.of("prefill").epoch
    assert prefill.sent.prefill.receiver.worker_id == "decode0"
    assert prefill.sent.prefill.receiver.epoch == cluster.of("decode").epoch
    assert not decode.sent.decode.prefill_here
    for request in (sent, prefill.request):
        hasher = BlockHasher(DEVELOPMENT_KEY, 16)
        root = hasher.root("m" * 32)
        assert request.hash_root == root
        hashes = hasher.extend(root, request.prompt_token_ids)
        assert len(hashes) == 2
        assert request.request_digest == hasher.request_digest(root, hashes, request.prompt_token_ids)
        assert request.sampling_params.seed is not None
        assert list(request.eos_token_ids) == [EOS]
        assert "traceparent" in request.trace_headers
        assert 0 < request.timeout_s <= 600
    assert sent.request_id == prefill.request.request_id


async def test_decode_outputs_that_overtake_the_first_token_wait_for_it(cluster):
    await cluster.start()
    said_all = asyncio.Event()

    def note(worker, call):
        said_all.set()

    cluster.of("decode").script = play(ADMITTED, LANDED, *rest(5), note)
    cluster.of("prefill").script = play(PREFILL_ADMITTED, _wait(said_all), 0.05, first(), RELEASED)
    assert await cluster.text() == said(5)


def _wait(event):
    async def step(worker, call):
        await event.wait()

    return step


async def test_first_token_reaches_the_client_before_decode_says_anything(cluster):
    await cluster.start()
    go_on = asyncio.Event()
    cluster.of("decode").script = play(ADMITTED, _wait(go_on), LANDED, *rest(3))
    async with cluster.http.stream(
        "POST", "/v1/completions", json={"prompt": "hello", "max_tokens": 3, "stream": True}
    ) as response:
        lines = response.aiter_lines()
        assert '"text":"a"' in await anext(lines)
        go_on.set()
        assert "[DONE]" in "".join([line async for line in lines])


async def test_one_token_needs_prefill_alone(cluster):
    await cluster.start()
    assert await cluster.text(max_tokens=1) == "a"
    assert not cluster.of("decode").calls
    [call] = cluster.of("prefill").calls
    assert call.sent.prefill.transfer_id == b""
    assert not call.sent.prefill.HasField("receiver")


async def test_one_token_without_a_prefill_worker_comes_from_decode(cluster):
    await cluster.start(prefill=0)
    assert await cluster.text(max_tokens=1) == "a"
    [call] = cluster.of("decode").calls
    assert call.sent.decode.prefill_here
    assert not call.sent.decode.HasField("source")


async def test_first_token_that_ends_the_sequence_ends_both_calls(cluster):
    await cluster.start()
    cluster.of("prefill").script = play(
        lambda worker, call: cluster.of("decode").called(), first("", "stop", token_ids=[EOS]), forever
    )
    cluster.of("decode").script = play(ADMITTED, forever)
    response = await cluster.complete()
    assert response.json()["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        # as vLLM has them
        "token_ids": None,
        "prompt_token_ids": None,
        "prompt_logprobs": None,
    }
    assert response.json()["usage"]["completion_tokens"] == 1
    for role in ("prefill", "decode"):
        async with asyncio.timeout(HANG_S):
            await cluster.of(role).calls[0].cancelled.wait()


async def test_stop_string_ends_both_calls(cluster):
    await cluster.start()
    cluster.of("prefill").script = play(first(), forever)
    cluster.of("decode").script = play(ADMITTED, *rest(10), forever)
    response = await cluster.complete(max_tokens=20, stop=["zzz", "def"])
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "def")
    for role in ("prefill", "decode"):
        async with asyncio.timeout(HANG_S):
            await cluster.of(role).calls[0].cancelled.wait()


async def test_without_prefill_workers_decode_prefills(cluster):
    await cluster.start(prefill=0)
    assert await cluster.text() == said(5)
    assert cluster.of("decode").calls[0].sent.decode.prefill_here


async def test_needs_prefill_is_placed_anew_and_not_counted(cluster):
    await cluster.start(local_prefill="always", max_attempts=1)
    cluster.of("decode").scripts = [play(ADMITTED, needs_prefill())]
    assert await cluster.text() == said(5)
    local, remote = cluster.of("decode").calls
    assert not local.sent.decode.HasField("source")
    assert remote.sent.decode.HasField("source")
    assert (local.sent.attempt, remote.sent.attempt) == (0, 1)


async def test_needs_prefill_for_ever_is_an_error(cluster, caplog):
    await cluster.start(local_prefill="always", max_attempts=2)
    cluster.of("decode").script = play(needs_prefill())
    response = await cluster.complete()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_lost"
    assert "decode asks for prefill again and again" in caplog.text
    assert len(cluster.of("decode").calls) < 6


async def test_prefilling_locally_cancels_prefill(cluster):
    await cluster.start()
    cluster.of("prefill").script = play(PREFILL_ADMITTED, forever)
    cluster.of("decode").script = play(ADMITTED, LOCALLY, *rest(5, start=0))
    assert await cluster.text() == said(5)
    async with asyncio.timeout(HANG_S):
        await cluster.of("prefill").calls[0].cancelled.wait()
    assert len(cluster.of("decode").calls) == 1


async def test_prefilling_locally_after_the_first_token_repeats_none(cluster):
    await cluster.start()
    computed_it = asyncio.Event()
    cluster.of("prefill").script = play(first(), lambda w, c: computed_it.set(), forever)
    cluster.of("decode").script = play(_wait(computed_it), 0.02, LOCALLY, *rest(5, start=0))
    assert await cluster.text() == said(5)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(refuse(TransferFailed("t")), decode_well, id="prefill refuses"),
        pytest.param(refuse(Overloaded("full")), decode_well, id="prefill is full"),
        pytest.param(refuse(Draining("bye")), decode_well, id="prefill drains"),
        pytest.param(play(PREFILL_ADMITTED), play(ADMITTED, forever), id="prefill ends early"),
        pytest.param(play(PREFILL_ADMITTED, REVOKED), play(ADMITTED, forever), id="prefill revokes"),
        pytest.param(play(PREFILL_ADMITTED, ENDED_NEWLY), play(ADMITTED, forever), id="prefill ends in a newer way"),
        pytest.param(play(first(), REVOKED), play(ADMITTED, forever), id="prefill revokes after computing"),
        pytest.param(play(first(), TransferFailed("t")), play(ADMITTED, forever), id="prefill fails after computing"),
        pytest.param(play(PREFILL_ADMITTED, forever), refuse(TransferFailed("t")), id="decode cannot fetch"),
        pytest.param(play(first(), forever), play(ADMITTED, 0.02, TransferFailed("t")), id="transfer breaks"),
        pytest.param(play(first(), forever), play(ADMITTED, LANDED, *rest(6)[:2], Evicted("e")), id="decode evicts"),
        pytest.param(play(first(), RELEASED), play(LANDED, *rest(6)[:2], Draining("d")), id="decode drains"),
        pytest.param(play(first(), RELEASED), play(LANDED, *rest(6)[:1]), id="decode ends early"),
        pytest.param(play(first(), forever), refuse(Overloaded("full")), id="decode is full"),
        pytest.param(play(first(), forever), play(LANDED, decode_outputs(3, "d"), forever), id="a position is missing"),
    ],
)
async def test_a_call_that_fails_is_retried_without_a_trace_in_the_text(cluster, prefill, decode):
    await cluster.start(prefill=2, decode=2)
    attempts = {"prefill": [prefill], "decode": [decode]}

    def once(role, well):
        async def script(worker, call):
            wanted = attempts[role].pop() if call.sent.attempt == 0 else well
            async for event in wanted(worker, call):
                yield event

        return script

    for worker in cluster.workers:
        worker.script = once(worker.role, prefill_well if worker.role == "prefill" else decode_well)
    response = await cluster.complete(max_tokens=6)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == said(6)
    assert response.json()["usage"]["completion_tokens"] == 6
    await cluster.idle()
    seeds = {call.request.sampling_params.seed for worker in cluster.workers for call in worker.calls}
    assert len(seeds) == 1


async def test_prefill_may_fail_once_everything_has_landed(cluster):
    await cluster.start(max_attempts=1)
    landed = asyncio.Event()
    cluster.of("prefill").script = play(first(), _wait(landed), 0.15, InternalError("late"))
    cluster.of("decode").script = play(ADMITTED, LANDED, lambda w, c: landed.set(), 0.3, *rest(5))
    assert await cluster.text() == said(5)
    assert len(cluster.of("decode").calls) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("role", "error", "status", "code"),
    [
        ("prefill", InvalidRequest("bad", "structured_outputs"), 400, "invalid_request"),
        ("prefill", DigestMismatch("other"), 503, "digest_mismatch"),
        ("decode", InvalidRequest("bad", "structured_outputs"), 400, "invalid_request"),
        ("decode", DigestMismatch("other"), 503, "digest_mismatch"),
        ("decode", InternalError("bug"), 500, "internal_error"),
    ],
)
async def test_errors_that_no_attempt_can_mend_go_to_the_client(cluster, caplog, role, error, status, code):
    await cluster.start()
    other = "decode" if role == "prefill" else "prefill"
    cluster.of(role).script = refuse(error)
    cluster.of(other).script = play(forever)
    response = await cluster.complete(**({"structured_outputs": {"regex": "a*"}} if status == 400 else {}))
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    told = response.json()["error"]["message"]
    assert told == error.message or (error.message not in told and error.message in caplog.text)
    assert (told == error.message) == (status == 400)
    await cluster.idle()
    assert len(cluster.of(role).calls) == 1


async def test_attempts_are_bounded_and_the_last_error_is_told(cluster, caplog):
    await cluster.start(max_attempts=3, on_kv_failure="remote")
    cluster.of("decode").script = refuse(TransferFailed("no bytes came"))
    response = await cluster.complete()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "transfer_failed"
    assert "ends with transfer_failed: no bytes came" in caplog.text
    assert response.headers["retry-after"] == "1"
    assert len(cluster.of("decode").calls) == 3


@pytest.mark.parametrize("num_failed", [1, 2, 7, 100, 5000])
def test_the_wait_between_attempts_is_bounded(num_failed):
    mean = min(0.02 * 2.0 ** min(num_failed - 1, 60), 1.0)
    assert all(0.5 * mean <= backoff_s(num_failed) <= 1.5 * mean for _ in range(20))


async def test_worker_overload_is_told_as_overload(cluster):
    await cluster.start(max_attempts=2, queue_timeout_s=0.3)
    cluster.of("decode").script = refuse(Overloaded("full"))
    # each attempt may relay prefill's token before decode refuses: 200 attempts do not fit into the time
    response = await cluster.complete(max_tokens=200)
    assert response.status_code == 429
    assert "retry-after" in response.headers


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("policy", "local_prefill", "second"),
    [("local", "auto", "local"), ("remote", "auto", "remote"), ("local", "never", "remote"), ("fail", "auto", None)],
)
async def test_what_follows_a_failed_transfer(cluster, policy, local_prefill, second):
    await cluster.start(prefill=2, on_kv_failure=policy, local_prefill=local_prefill)
    cluster.of("decode").scripts = [play(ADMITTED, TransferFailed("lost"))]
    response = await cluster.complete()
    calls = cluster.of("decode").calls
    if second is None:
        assert response.status_code == 503
        assert len(calls) == 1
        return
    assert response.json()["choices"][0]["text"] == said(5)
    assert calls[1].sent.decode.HasField("source") == (second == "remote")
    if second == "remote":
        assert calls[0].sent.decode.source.worker_id != calls[1].sent.decode.source.worker_id


async def test_never_local_without_prefill_says_so(cluster, monkeypatch):
    monkeypatch.setattr("pdserve.router.requests.tasks.placed_task.WAIT_FOR_WORKER_S", 0.1)
    await cluster.start(prefill=0, local_prefill="never")
    response = await cluster.complete()
    assert response.status_code == 503
    assert "no prefill address was given" in response.json()["error"]["message"]
    assert (await cluster.http.get("/health")).status_code == 503


async def test_a_request_waits_for_a_worker_that_comes_late(cluster):
    late = cluster.worker("decode")
    await cluster.start(prefill=0, decode=0, wait=False)
    asking = asyncio.create_task(cluster.text())
    async with asyncio.timeout(HANG_S):
        while not (await cluster.http.get("/health")).json()["requests"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await late.start()
    assert await asking == said(5)


async def test_another_continuation_is_an_error_not_a_wrong_text(cluster):
    await cluster.start()
    cluster.of("prefill").script = play(first("a"), forever)
    go_on = asyncio.Event()
    cluster.of("decode").scripts = [play(LANDED, decode_outputs(1, "b"), _wait(go_on), Evicted("gone"))]
    cluster.of("decode").script = play(LOCALLY, decode_outputs(0, "XYZ", "length"))
    received = await cluster.streamed(go_on.set, prompt="hello")
    assert '"code":"position_conflict"' in received
    assert "X" not in received
    assert "[DONE]" not in received


async def test_computed_for_another_request_is_refused(cluster):
    await cluster.start()

    def wrong(worker, call):
        event = first()(worker, call)
        event.computed.request_digest = b"?" * 16
        return event

    cluster.of("prefill").script = play(wrong, forever)
    cluster.of("decode").script = play(forever)
    response = await cluster.complete()
    assert response.json()["error"]["code"] == "digest_mismatch"


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["at once", "after a token"])
async def test_a_worker_that_dies_is_replaced(cluster, role, when):
    await cluster.start(prefill=2, decode=2)
    dying = []

    async def die(worker, call):
        dying.append(asyncio.create_task(worker.kill()))
        await asyncio.Event().wait()

    steps = [die] if when == "at once" else ([first(), 0.05, die] if role == "prefill" else [LANDED, *rest(6)[:2], die])
    victims = [worker for worker in cluster.workers if worker.role == role]
    well = prefill_well if role == "prefill" else decode_well

    def choose(worker, call):
        return play(*steps)(worker, call) if call.sent.attempt == 0 else well(worker, call)

    for victim in victims:
        victim.script = choose
    if role == "prefill" and when == "after a token":
        for worker in cluster.workers:
            if worker.role == "decode":
                worker.script = lambda w, c: play(ADMITTED, forever)(w, c) if c.sent.attempt == 0 else decode_well(w, c)
    assert await cluster.text(max_tokens=6) == said(6)
    await asyncio.gather(*dying)
    assert len(dying) == 1


async def test_two_deaths_deny_a_prompt(cluster, monkeypatch):
    await cluster.start(prefill=0, decode=3)
    dying = []
    admitted: asyncio.Queue[Any] = asyncio.Queue()
    on_decode = Attempt._on_decode

    def note(attempt, event):
        on_decode(attempt, event)
        if isinstance(event, Admitted):
            admitted.put_nowait(attempt)

    monkeypatch.setattr(Attempt, "_on_decode", note)

    async def die(worker, call):
        await admitted.get()  # the router has heard of it
        dying.append(asyncio.create_task(worker.kill()))
        await asyncio.Event().wait()

    def choose(worker, call):
        bad = len(call.request.prompt_token_ids) == 6
        return (play(ADMITTED, die) if bad else decode_well)(worker, call)

    for worker in cluster.workers:
        worker.script = choose
    response = await cluster.complete(prompt="poison")
    assert response.status_code == 503
    assert "2 workers died" in response.json()["error"]["message"]
    again = await cluster.complete(prompt="poison")
    assert again.status_code == 503
    assert "refused" in again.json()["error"]["message"]
    await asyncio.gather(*dying)
    assert len(dying) == 2
    assert await cluster.text(prompt="sound") == said(5)


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("num_gone", [2, 3])
async def test_workers_that_were_gone_before_a_prompt_came_weigh_less_against_it(cluster, role, num_gone):
    """Several workers go at once, and a request is sent to them before anybody has missed them."""
    await cluster.start(
        prefill=4 * (role == "prefill"),
        decode=1 if role == "prefill" else 4,
        local_prefill="never" if role == "prefill" else "auto",
    )
    dying = []

    async def silent(worker, call):
        dying.append(asyncio.create_task(worker.kill()))
        await asyncio.Event().wait()

    for worker in [worker for worker in cluster.workers if worker.role == role][:num_gone]:
        worker.script = play(silent)
    responses = [await cluster.complete(prompt="unlucky") for _ in range(2)]
    await asyncio.gather(*dying)
    assert len(dying) == num_gone
    if num_gone == 2:
        assert [response.json()["choices"][0]["text"] for response in responses] == [said(5), said(5)]
    else:
        told = [response.json()["error"]["message"] for response in responses]
        assert "3 workers died" in told[0]
        assert "refused for another" in told[1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_prompt_that_fails_two_engines_is_refused(cluster, role):
    await cluster.start(
        prefill=3 * (role == "prefill"), decode=3, local_prefill="never" if role == "prefill" else "auto"
    )
    for worker in cluster.workers:
        # what a worker says of every request it has when a step of its engine raises
        worker.script = refuse(WorkerLost("the engine failed")) if worker.role == role else play(ADMITTED, forever)
    response = await cluster.complete()
    assert response.json()["error"]["code"] == "worker_lost"
    assert "2 workers died while they served this request" in response.json()["error"]["message"]
    assert sum(len(worker.calls) for worker in cluster.workers if worker.role == role) == 2
    assert "it is refused for another" in (await cluster.complete()).json()["error"]["message"]


async def test_a_deadline_ends_both_calls(cluster):
    await cluster.start(request_timeout_s=1.0)
    cluster.of("prefill").script = play(first(), forever)
    cluster.of("decode").script = play(ADMITTED, forever)
    started = time.monotonic()
    response = await cluster.complete()
    assert response.status_code == 504
    assert 0.9 < time.monotonic() - started < 4
    assert response.json()["error"]["code"] == "deadline_exceeded"
    for role in ("prefill", "decode"):
        async with asyncio.timeout(HANG_S):
            await cluster.of(role).calls[0].cancelled.wait()


async def test_unknown_events_of_a_newer_worker_are_ignored(cluster):
    from pdserve.v1 import decode_pb2, prefill_pb2

    await cluster.start()
    cluster.of("prefill").script = play(prefill_pb2.PrefillEvent(), first(), RELEASED)
    cluster.of("decode").script = play(decode_pb2.DecodeEvent(), LANDED, *rest(5))
    assert await cluster.text() == said(5)


async def test_late_and_repeated_events_change_nothing(cluster):
    await cluster.start()
    cluster.of("prefill").script = play(PREFILL_ADMITTED, PREFILL_ADMITTED, first(), first(), RELEASED, RELEASED)
    cluster.of("decode").script = play(
        LANDED, LANDED, decode_outputs(1, "bc"), decode_outputs(1, "bcd"), decode_outputs(2, "cde", "length")
    )
    assert await cluster.text() == said(5)


class SilentCall:
    """A call that says nothing and notes when it is cancelled."""

    opened: ClassVar[list[Any]] = []

    def __init__(self, *args, **kwargs):
        self.cancelled = False
        SilentCall.opened.append(self)

    def cancel(self):
        self.cancelled = True

    def follow(self, on_event, on_end):
        pass


async def test_cancelling_reaches_both_calls_in_the_next_turn_of_the_loop(monkeypatch):
    monkeypatch.setattr(SilentCall, "opened", [])
    monkeypatch.setattr(attempt_module, "PrefillCall", SilentCall)
    monkeypatch.setattr(attempt_module, "DecodeCall", SilentCall)
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(),
        eos_token_ids=(),
        hash_root=b"",
        request_digest=b"",
        deadline=0,
    )
    workers = [candidates.worker(role, role) for role in ("prefill", "decode")]
    attempt = Attempt(0, request, Placement(prefill=workers[0], decode=workers[1]), Timeline(), lambda outputs: False)
    running = asyncio.create_task(attempt.run())
    await asyncio.sleep(0.01)
    assert [worker.num_in_flight for worker in workers] == [1, 1]
    running.cancel()
    await asyncio.sleep(0)
    assert [call.cancelled for call in SilentCall.opened] == [True, True]
    assert [worker.num_in_flight for worker in workers] == [0, 0]
    with pytest.raises(asyncio.CancelledError):
        await running
    assert attempt.state is AttemptState.CANCELLED


@pytest.mark.parametrize("start", list(AttemptState))
def test_only_legal_edges(start):
    for end in AttemptState:
        if end in EDGES[start]:
            assert moved(start, end) is end
        else:
            with pytest.raises(IllegalTransition, match=f"from {start.value} to {end.value}"):
                moved(start, end)
