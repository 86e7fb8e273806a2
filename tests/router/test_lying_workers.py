"""Workers with valid credentials that say each field of each event wrong: only their own call ends, and clients hear what
docs/failure.md says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio
import msgspec
import pytest
from google.protobuf.message import Message

from pdserve.common.errors import BY_CODE, InvalidRequest, TransferFailed
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.telemetry.logging_setup import is_news
from pdserve.router.telemetry.status_view import StatusView
from pdserve.v1 import decode_pb2, prefill_pb2, request_pb2, worker_pb2
from tests.router.conftest import Cluster
from tests.router.fake_worker import (
    PREFILL_ADMITTED,
    RELEASED,
    VOCAB_SIZE,
    Call,
    FakeWorker,
    Script,
    computed,
    decode_outputs,
    first,
    forever,
    play,
    said,
    tokens,
)
from tests.support.inputs.wrong_fields import FEW, LIE, MANY, PARTS, Wrong, one_of_each, part_of, wrong_messages
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.run.waiting import HANG_S

TIMEOUT_S = 1.0
"""Limit of a request: a worker may leave out what would end it."""
NEVER = {400, 401, 403, 404, 499}
DOCUMENTED = {"digest_mismatch", "position_conflict", "deadline_exceeded", "internal_error"}
"""Codes of one lie that another worker does not mend."""


class Raw:
    """A message of any bytes, for watches and step streams alike."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def SerializeToString(self) -> bytes:
        return self.raw


class AnyBytes(grpc.aio.ServerInterceptor):
    """Sends `Raw` as it is."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or "pdserve" not in handler_call_details.method:
            return handler
        return handler._replace(
            response_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString()
        )


class LyingWorker(FakeWorker):
    """Says `lie` in place of the first event of its kind."""

    event = ""
    lie: Wrong | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.interceptors.append(AnyBytes())

    async def _play(self, call: Call, script: Script | None = None) -> AsyncGenerator[Any]:
        async for event in super()._play(call, script):
            for said_instead in self.instead(event):
                yield said_instead

    async def Watch(self, request_iterator, context):
        async for event in super().Watch(request_iterator, context):
            for said_instead in self.instead(event):
                yield said_instead

    def instead(self, event: Message) -> list[Any]:
        if self.lie is None or kind_of(event) != self.event:
            return [event]
        lie, self.lie = self.lie, None
        return [Raw(raw) for raw in lie.messages]


def kind_of(event: Message) -> str:
    oneofs = event.DESCRIPTOR.oneofs
    name = event.DESCRIPTOR.name
    return f"{name}.{event.WhichOneof(oneofs[0].name)}" if oneofs and oneofs[0].name == "event" else name


LOGPROBS = request_pb2.Logprobs(width=2, token_ids=[1, 2], logprobs=[-0.5, -1.5], sampled_ranks=[1])
MOMENTS = [request_pb2.Moment(name="prefill_computed", unix_ns=1)]
OUTPUTS = request_pb2.Outputs(
    token_ids=tokens("a"), cached_tokens=request_pb2.CachedTokens(pool=1), moments=MOMENTS, logprobs=LOGPROBS
)
EVENTS: dict[str, Message] = {
    "PrefillEvent.admitted": prefill_pb2.PrefillEvent(admitted=prefill_pb2.Admitted(moments=MOMENTS)),
    "PrefillEvent.computed": prefill_pb2.PrefillEvent(
        computed=prefill_pb2.Computed(num_tokens=5, request_digest=bytes(16), first_outputs=[OUTPUTS], moments=MOMENTS)
    ),
    "PrefillEvent.ended": prefill_pb2.PrefillEvent(
        ended=prefill_pb2.Ended(how=prefill_pb2.Ended.RELEASED, cause="x", moments=MOMENTS)
    ),
    "DecodeEvent.admitted": decode_pb2.DecodeEvent(admitted=prefill_pb2.Admitted(moments=MOMENTS)),
    "DecodeEvent.landed": decode_pb2.DecodeEvent(
        landed=decode_pb2.Landed(num_blocks=1, transfer_bytes=4096, connector="local", moments=MOMENTS)
    ),
    "DecodeEvent.outputs": decode_pb2.DecodeEvent(outputs=OUTPUTS),
    "PoolingResult": prefill_pb2.PoolingResult(
        values=[0.5] * 8, cached_tokens=request_pb2.CachedTokens(pool=1), moments=MOMENTS
    ),
    "WatchEvent.load": worker_pb2.WatchEvent(load=worker_pb2.Load(engine_tick=2)),
    "WatchEvent.blocks": worker_pb2.WatchEvent(blocks=worker_pb2.Blocks(sequence=1, stored=bytes(8))),
    "WatchEvent.welcome": worker_pb2.WatchEvent(
        welcome=worker_pb2.Welcome(identity=b"\x0a\x01a", nonce=bytes(32), unix_us=1, proof=bytes(32))
    ),
    "WatchEvent.adapters": worker_pb2.WatchEvent(
        adapters=worker_pb2.Adapters(adapters=[worker_pb2.Adapter(name="a", fingerprint="0" * 32)])
    ),
}
CALLS = sorted(name for name in EVENTS if not name.startswith("WatchEvent"))
LAST = {"DecodeEvent.outputs": ("left out", "finish_reason")}


MIGRATION = ("migrating", "migrated")


def test_every_event_is_in_the_table():
    """Events that only some requests have are made from the descriptor in `extra_events`."""
    for kind, known in (
        (prefill_pb2.PrefillEvent, {"prompt_logprobs"}),
        (decode_pb2.DecodeEvent, {"prompt_logprobs", "needs_prefill", "prefilling_locally", "receiving", *MIGRATION}),
        (worker_pb2.WatchEvent, set()),
    ):
        missing = {f"{kind.DESCRIPTOR.name}.{field.name}" for field in kind.DESCRIPTOR.fields} - set(EVENTS)
        assert missing == {f"{kind.DESCRIPTOR.name}.{name}" for name in known}


def cases(event: str, many: int = MANY) -> Iterator[Wrong]:
    yield from wrong_messages(EVENTS[event], many=many)
    # another event in its place, each once
    for other, message in EVENTS.items():
        if other.partition(".")[0] == event.partition(".")[0] and other != event:
            yield Wrong(f"{other} in its place", [message.SerializeToString()])
    kind = type(EVENTS[event])
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None and f"{kind.DESCRIPTOR.name}.{field.name}" not in EVENTS:
            odd: Any = kind()
            getattr(odd, field.name).SetInParent() if not field.is_repeated else None
            yield Wrong(f"{field.name} in its place", [odd.SerializeToString()])


async def start(cluster: Cluster, **settings: Any) -> list[LyingWorker]:
    for role in ("prefill", "decode"):
        for number in range(2):
            worker = (LyingWorker if not number else FakeWorker)(role, cluster.fingerprint, worker_id=f"{role}{number}")
            cluster.workers.append(await worker.start())
    settings = {"request_timeout_s": TIMEOUT_S, **settings}
    await cluster.start(prefill=0, decode=0, policy="round_robin", **settings)
    return [worker for worker in cluster.workers if isinstance(worker, LyingWorker)]


@pytest.mark.slow
@pytest.mark.parametrize("event", CALLS)
async def test_a_wrong_field_of_an_event_ends_that_attempt_alone(cluster, caplog, event):
    await deceive(cluster, caplog, [event], cases)


@pytest.mark.few(1)
@pytest.mark.parametrize("part", PARTS)
async def test_one_wrong_value_of_each_field_ends_its_attempt_alone(cluster, caplog, part):
    await deceive(cluster, caplog, CALLS, lambda event: part_of(one_of_each(cases(event, FEW)), part))


async def deceive(
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
    events: list[str],
    lies: Callable[[str], Iterator[Wrong]],
) -> None:
    """Ask the cluster for completions while one of its workers says each of the lies in place of an event."""
    caplog.set_level(logging.INFO)
    liars = await start(cluster)
    problems = []
    for event in events:
        liar = next(worker for worker in liars if (worker.role == "decode") == event.startswith("DecodeEvent"))
        liar.event = event
        for case in lies(event):
            problem = await told(cluster, liar, event, case)
            if problem:
                problems.append(f"{event}: {case.name}: {problem}")
    assert not problems, problems
    look_at_log(caplog)
    await cluster.idle()


def look_at_log(caplog: pytest.LogCaptureFixture) -> None:
    """Look at the log of the router: a worker here fails by itself, where a script has nothing to say."""
    for record in filter(is_news, caplog.records):
        if not record.name.startswith(("pdserve.worker", "pdserve.common.net.rpc")):
            assert record.levelno < logging.ERROR, caplog.handler.format(record)[-2000:]
            assert len(record.getMessage()) < 4096, record.getMessage()[:200]


async def told(cluster: Cluster, liar: LyingWorker, event: str, case: Wrong) -> str:
    """Describe what is wrong with the client's answer, and that of others; "" for nothing."""
    before = len(liar.calls)
    liar.lie = case
    others = [asyncio.create_task(cluster.complete(prompt="others")) for _ in range(2)]
    with LoopWatch() as watch:
        if event == "PoolingResult":
            asked = [cluster.http.post("/v1/embeddings", json={"input": "hello"}) for _ in range(2)]
        else:
            asked = [cluster.complete(max_tokens=3) for _ in range(2)]
        answers = list(await asyncio.gather(*asked))
    answers += await asyncio.gather(*others)
    if liar.lie is not None:
        # the odd one out: round robin over two takes another turn after a retry
        liar.lie = None
        if len(liar.calls) == before:
            return "it was not asked"
    failed = [answer for answer in answers if answer.status_code != 200]
    if len(failed) > 1:
        return f"{len(failed)} requests failed for one lie: {[answer.text for answer in failed]}"
    for answer in failed:
        if answer.status_code in NEVER or answer.json()["error"]["code"] not in DOCUMENTED:
            return f"{answer.status_code} {answer.text[:300]}"
    if any(LIE in answer.text for answer in answers):
        return "a worker's text came out"
    if watch.longest_s > LOOP_S:
        # the workers are in this loop, too
        return f"{watch.longest_s} s in {watch.callback}"
    wrong = [answer for answer in answers if answer.status_code == 200 and not is_right(answer.json())]
    # a worker that answers with other tokens of the vocabulary is not told from one whose model says them
    return f"wrong: {wrong[0].text[:300]}" if wrong and not event.endswith(("outputs", "computed")) else ""


def is_right(body: dict[str, Any]) -> bool:
    if "data" in body:
        return len(body["data"][0]["embedding"]) == 8
    choice = body["choices"][0]
    return choice["text"] in (said(3), said(5))


# ---- error codes


def sends(code: str) -> Script:
    async def script(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
        raise BY_CODE[code](LIE)
        yield

    return script


SOME = {"digest_mismatch", "draining", "internal_error", "invalid_request", "overloaded", "transfer_failed"}
"""Codes of different treatment."""
CODES = [pytest.param(code, marks=() if code in SOME else pytest.mark.slow) for code in sorted(BY_CODE)]
FINAL = {"prefill": {"digest_mismatch"}, "decode": {"digest_mismatch", "internal_error"}}


@pytest.mark.few(4)
@pytest.mark.diagonal
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_error_of_a_worker_is_tried_elsewhere(cluster, role, code):
    await start(cluster, request_timeout_s=HANG_S)
    liar = next(worker for worker in cluster.workers if worker.role == role)
    liar.script = sends(code)
    for _ in range(3):
        answer = await cluster.complete()
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == said(5)
        else:
            assert answer.json()["error"]["code"] in FINAL[role]
            assert answer.status_code >= 500
        assert LIE not in answer.text
    assert liar.calls


@pytest.mark.few(3)
@pytest.mark.diagonal
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_an_error_of_all_workers_is_no_fault_of_the_client(cluster, monkeypatch, code, path):
    monkeypatch.setattr("pdserve.router.requests.tasks.placed_task.WAIT_FOR_WORKER_S", 0.2)
    await cluster.start(prefill=1, decode=1, queue_timeout_s=0.3, request_timeout_s=TIMEOUT_S)
    for worker in cluster.workers:
        worker.scripts = [sends(code)] * 50
    field = "prompt" if path == "/v1/completions" else "input"
    answer = await cluster.http.post(path, json={field: "hello"})
    assert answer.status_code == 429 if code == "overloaded" else answer.status_code >= 500, answer.text
    assert LIE not in answer.text


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("asks_for_one", "codes"), [(True, {"grammar_unavailable"}), (False, {"peer_error", "transfer_failed"})]
)
async def test_a_grammar_is_unavailable_only_to_a_request_that_has_one(cluster, asks_for_one, codes):
    await cluster.start(prefill=1, decode=1, queue_timeout_s=0.3, request_timeout_s=TIMEOUT_S)
    for worker in cluster.workers:
        worker.scripts = [sends("grammar_unavailable")] * 50
    fields = {"structured_outputs": {"choice": ["yes", "no"]}} if asks_for_one else {}
    answer = await cluster.http.post("/v1/completions", json={"prompt": "hello"} | fields)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] in codes, answer.text
    assert LIE not in answer.text


BEYOND = {
    "token": request_pb2.Outputs(token_ids=[VOCAB_SIZE]),
    "second token": request_pb2.Outputs(token_ids=[1, VOCAB_SIZE + 9]),
    "stop token": request_pb2.Outputs(
        token_ids=[1], finish_reason=request_pb2.FINISH_REASON_STOP, stop_token_id=VOCAB_SIZE
    ),
}
"""Outputs with a number that is no token of the model."""


MOST = (1 << 32) - 1


@pytest.mark.parametrize("said", [(MOST,) * 4, (0, 0, 0, MOST), (3, 1, 0, MOST)])
async def test_more_cached_tokens_than_the_prompt_has_are_not_believed(cluster, said):
    """The numbers of a worker end at the prompt, in every view; the sources before them are believed."""
    await cluster.start(prefill=1, decode=1, request_timeout_s=TIMEOUT_S)
    lie = request_pb2.CachedTokens(pool=said[0], host=said[1], store=said[2], peer=said[3])

    async def embeds(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
        yield prefill_pb2.PoolingResult(values=[0.5] * 8, cached_tokens=lie)

    async def prefills(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
        yield PREFILL_ADMITTED
        yield computed(call.request, request_pb2.Outputs(token_ids=tokens("a"), cached_tokens=lie))
        yield RELEASED

    expected = CachedTokens(*said).first(len("hello"))
    cluster.of("prefill").scripts = [embeds, prefills]
    embedded = await cluster.http.post("/v1/embeddings", json={"input": "hello"})
    answers = [embedded, await cluster.complete(prompt="hello")]
    for answer in answers:
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len("hello"), answer.text
    await cluster.idle()
    view = msgspec.json.decode((await cluster.http.get("/debug/status")).content, type=StatusView)
    assert [request.cached_tokens for request in view.slowest] == [expected] * 2
    assert view.recent.cached_tokens == CachedTokens.sum([expected] * 2)
    assert view.recent.cached_fraction == 1


@pytest.mark.parametrize("name", BEYOND)
async def test_tokens_beyond_the_vocabulary_reach_no_client(cluster, monkeypatch, name):
    monkeypatch.setattr("pdserve.router.requests.tasks.placed_task.WAIT_FOR_WORKER_S", 0.2)
    await cluster.start(prefill=1, decode=1, queue_timeout_s=0.3, request_timeout_s=TIMEOUT_S)
    cluster.of("decode").scripts = [play(decode_pb2.DecodeEvent(outputs=BEYOND[name]))] * 50
    answer = await cluster.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "peer_error"
    assert len(cluster.of("decode").calls) > 1


def logprobs_of(token_id: int) -> request_pb2.Logprobs:
    return request_pb2.Logprobs(width=1, token_ids=[token_id], logprobs=[-0.5], sampled_ranks=[1])


@pytest.mark.parametrize(
    "logprobs",
    [None, logprobs_of(VOCAB_SIZE), logprobs_of(1)],
    ids=["left out", "beyond the vocabulary", "of another token"],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_wrong_log_probabilities_reach_no_client(cluster, monkeypatch, role, logprobs):
    monkeypatch.setattr("pdserve.router.requests.tasks.placed_task.WAIT_FOR_WORKER_S", 0.2)
    await cluster.start(prefill=1, decode=1, queue_timeout_s=0.3, request_timeout_s=TIMEOUT_S)
    right = logprobs_of(tokens("a")[0])
    prefill, decode = cluster.of("prefill"), cluster.of("decode")
    prefill.scripts = [play(first("a", logprobs=logprobs if role == "prefill" else right), forever)] * 50
    decode.scripts = [
        play(decode_outputs(0, "a", logprobs=right), decode_outputs(1, "b", logprobs=logprobs), forever)
    ] * 50
    if role == "prefill":
        decode.scripts = [play(0.02, TransferFailed("its source failed"))] * 50
    answer = await cluster.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4, "logprobs": 0})
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] in ("peer_error", "transfer_failed")
    assert len(cluster.of(role).calls) > 1


GIVEN: dict[str, dict[str, Any]] = {
    "structured_outputs": {"structured_outputs": {"regex": "a*"}},
    "allowed_token_ids": {"allowed_token_ids": [1, 2]},
    "min_tokens": {"min_tokens": 2},
}


@pytest.mark.diagonal
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("also", [True, False], ids=["by both", "by one"])
async def test_what_a_request_can_cause_is_its_own_error(cluster, role, given, also):
    """The decode worker may notice first that its source has failed."""

    async def refused(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
        await asyncio.sleep(0.02 if also else 0)
        raise InvalidRequest("what is wrong\nwith it", given)
        yield

    async def lost(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
        raise TransferFailed("its source failed")
        yield

    await cluster.start()
    cluster.of(role).script = refused
    if also and role == "prefill":
        cluster.of("decode").script = lost
    answer = await cluster.complete(**GIVEN[given])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] == "what is wrong with it"


# ---- the watch


WATCHED = sorted(name for name in EVENTS if name.startswith("WatchEvent"))


@pytest.fixture
def reconnects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.router.workers.worker_watcher.RECONNECT_S", 0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("reconnects_at_once")
@pytest.mark.parametrize("event", WATCHED)
async def test_a_wrong_field_of_a_watch_is_that_workers_fault(cluster, caplog, event):
    await misreport(cluster, caplog, [(event, case) for case in cases(event)])


@pytest.mark.few(1)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.usefixtures("reconnects_at_once")
async def test_one_wrong_value_of_each_field_of_a_watch_is_that_workers_fault(cluster, caplog, part):
    lies = [(event, case) for event in WATCHED for case in part_of(one_of_each(cases(event, FEW)), part)]
    await misreport(cluster, caplog, lies)


async def misreport(cluster: Cluster, caplog: pytest.LogCaptureFixture, lies: list[tuple[str, Wrong]]) -> None:
    """Ask the cluster for completions while a worker says each of the lies in its watch."""
    liars = await start(cluster)
    liar = next(worker for worker in liars if worker.role == "decode")
    for event, case in lies:
        liar.event, liar.lie = event, case
        if event == "WatchEvent.blocks":
            liar.tell_blocks(1, stored=bytes(8))
        elif event == "WatchEvent.load":
            liar.report(num_running=1)
        elif event == "WatchEvent.adapters":
            liar.adapters = {"a": "0" * 32}
            liar.report()
        else:
            epoch = liar.epoch
            await liar.kill()
            await liar.start()
            assert liar.epoch == epoch + 1
        with LoopWatch() as watch:
            answers = await asyncio.gather(*(cluster.complete(max_tokens=2) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3, (case.name, [a.text for a in answers])
        assert not any(LIE in answer.text for answer in answers)
        assert watch.longest_s < LOOP_S, (case.name, watch.longest_s, watch.callback)
        liar.lie = None
        liar.load.CopyFrom(worker_pb2.Load(engine_tick=liar.load.engine_tick + 1))
        liar.report()
    look_at_log(caplog)
    await cluster.live(decode=2)
