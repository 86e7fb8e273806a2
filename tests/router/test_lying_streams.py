"""Step streams of workers with valid credentials in which any column, event or size is wrong: that stream alone ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc.aio
import pytest

from pdserve.v1 import step_stream_pb2
from tests.router.conftest import Cluster
from tests.router.fake_worker import said
from tests.router.test_lying_workers import DOCUMENTED, TIMEOUT_S, look_at_log
from tests.support.inputs.wrong_fields import FEW, LIE, Wrong, one_of_each, wrong_messages
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.run.waiting import HANG_S, eventually


class LyingStream(grpc.aio.ServerInterceptor):
    """Sends the lie in place of the second message of a step stream, which holds tokens."""

    lie: Wrong | None = None
    num_told = 0

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if not handler_call_details.method.endswith("/Open"):
            return handler
        stream = handler.stream_stream

        async def answered(requests: Any, context: Any) -> AsyncIterator[bytes]:
            async for message in stream(requests, context):
                raw = message.SerializeToString()
                lie = self.lie
                if lie is None or not message.keys:
                    yield raw
                    continue
                self.lie = None
                self.num_told += 1
                for said_instead in lie.messages:
                    yield said_instead

        return handler._replace(stream_stream=answered, response_serializer=None)


STEP = step_stream_pb2.StepOutputs(
    keys=[1, 1], indexes=[0, 0], first_positions=[1, 2], num_tokens=[1, 1], token_ids=[5, 6],
    events=[step_stream_pb2.CallEvent(key=1, num_before=1, message=b""), step_stream_pb2.CallEvent(
        key=1, num_before=2, end=step_stream_pb2.CallEnd(code="overloaded", message=LIE, field=LIE, retry_after_s=1.0)
    )],
)  # fmt: skip


def huge_steps() -> Iterator[Wrong]:
    """A million entries, in each column, and in those that fit together."""
    count = 1_000_000
    columns = [field.name for field in STEP.DESCRIPTOR.fields if field.message_type is None]
    ones = [1] * count
    for name in columns:
        message = step_stream_pb2.StepOutputs()
        getattr(message, name).extend(ones)
        yield Wrong(f"{count} {name}", [message.SerializeToString()])
    for name, fields in {
        "entries": {"keys": ones, "first_positions": ones, "token_ids": ones},
        "entries of one call": {
            "keys": ones,
            "first_positions": list(range(count)),
            "num_tokens": ones,
            "token_ids": ones,
        },
        "tokens": {"keys": [1], "first_positions": [1], "num_tokens": [count], "token_ids": ones},
        "entries without tokens": {"keys": ones, "first_positions": ones, "num_tokens": [0] * count},
    }.items():
        yield Wrong(f"{count} {name}", [step_stream_pb2.StepOutputs(**fields).SerializeToString()])  # type: ignore[arg-type]
    events = step_stream_pb2.StepOutputs(events=[step_stream_pb2.CallEvent(key=1)]).SerializeToString()
    yield Wrong("many events", [events * 500_000])
    yield Wrong("16 MiB of tokens", [step_stream_pb2.StepOutputs(token_ids=[1] * (15 << 20)).SerializeToString()])


@pytest.mark.slow
@pytest.mark.parametrize("made", [lambda: wrong_messages(STEP), huge_steps], ids=["fields", "sizes"])
async def test_a_wrong_step_ends_that_stream_alone(cluster, caplog, made):
    await deceive(cluster, caplog, made(), is_final=made is not huge_steps)


async def test_one_wrong_value_of_each_field_ends_its_stream_alone(cluster, caplog):
    await deceive(cluster, caplog, one_of_each(wrong_messages(STEP, many=FEW)), is_final=True)


@pytest.mark.slow
async def test_some_huge_steps_end_their_stream_alone(cluster, caplog):
    await deceive(cluster, caplog, itertools.islice(huge_steps(), 0, None, 4), is_final=False)


async def deceive(cluster: Cluster, caplog: pytest.LogCaptureFixture, lies: Iterable[Wrong], *, is_final: bool) -> None:
    """Ask the cluster for completions while the stream of one of its workers has each of the lies.

    is_final: a lie may be believed, as the end of a call.
    """
    caplog.set_level(logging.INFO)
    for number in range(2):
        worker = cluster.worker("decode")
        if not number:
            liar = LyingStream()
            worker.interceptors.append(liar)
        worker.step_s = 0.002
        await worker.start()
    await cluster.start(prefill=0, decode=0, policy="round_robin", request_timeout_s=TIMEOUT_S)
    told = 0
    for case in lies:
        liar.lie = case
        with LoopWatch() as watch:
            answers = await asyncio.gather(*(cluster.complete(max_tokens=4) for _ in range(4)))
        told += liar.lie is None
        liar.lie = None
        # the lie may be an output, or the end, that a call waits for
        codes = {answer.json()["error"]["code"] for answer in answers if answer.status_code != 200}
        assert codes <= DOCUMENTED, (case.name, codes)
        if not is_final:
            assert not codes, case.name
        assert [answer for answer in answers if answer.status_code == 200], case.name
        assert not any(LIE in answer.text for answer in answers), case.name
        assert watch.longest_s < LOOP_S, (case.name, watch.longest_s, watch.callback)
    assert told
    look_at_log(caplog)
    await eventually(lambda: all(call.ended.is_set() for worker in cluster.workers for call in worker.calls))
    async with asyncio.timeout(HANG_S):
        assert await cluster.text() == said(5)
