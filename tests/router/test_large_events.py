"""Workers that send more than they were asked for: refused by name before anything is made of it, and another one answers."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.request.wire.messages import MAX_MOMENTS
from pdserve.v1 import decode_pb2, request_pb2
from tests.router.fake_worker import decode_outputs, decode_well, prefill_well, said

MANY = 50_000


def logprobs(count: int, width: int) -> request_pb2.Logprobs:
    numbers = count * width
    return request_pb2.Logprobs(
        width=width, token_ids=[5] * numbers, logprobs=[0.0] * numbers, sampled_ranks=[1] * count
    )


def decode_event(**outputs: Any) -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(outputs=request_pb2.Outputs(first_position=1, token_ids=[5], **outputs))


LARGE = {
    "tokens": (decode_outputs(1, token_ids=[5] * MANY), "max_tokens is 3"),
    "a position": (decode_outputs(2**31, token_ids=[5]), "max_tokens is 3"),
    "candidates": (decode_event(logprobs=logprobs(1, MANY)), f"{MANY} log-probabilities per token, where None were"),
    "log-probabilities": (decode_event(logprobs=logprobs(MANY, 1)), f"of {MANY} tokens for 1 tokens"),
    "moments": (
        decode_event(moments=[request_pb2.Moment(name=str(number), unix_ns=1) for number in range(MAX_MOMENTS + 1)]),
        f"more than {MAX_MOMENTS} moments",
    ),
    "a moment's name": (decode_event(moments=[request_pb2.Moment(name="x" * MANY)]), f"a name of {MANY} characters"),
    "prompt log-probabilities": (
        decode_pb2.DecodeEvent(
            prompt_logprobs=request_pb2.PromptLogprobs(first_position=1, logprobs=logprobs(MANY, 1))
        ),
        f"of {MANY} prompt tokens",
    ),
    "lists that do not fit": (
        decode_event(logprobs=request_pb2.Logprobs(width=1, sampled_ranks=[1])),
        "0 token ids and 0 values",
    ),
}


@pytest.mark.parametrize("name", LARGE)
async def test_another_worker_answers(cluster, caplog, name):
    event, message = LARGE[name]
    await cluster.start(prefill=1, decode=2)

    async def decode_more(worker, call):
        async for well in decode_well(worker, call):
            yield event if well.HasField("outputs") else well

    for worker in cluster.workers:
        if worker.role == "decode":
            worker.scripts = [decode_more]
            break
    for _ in range(2):
        # one of the two meets the worker
        assert await cluster.text(max_tokens=3) == said(3)
    assert not worker.scripts
    assert message in caplog.text
    assert len(max(caplog.messages, key=len)) < 1000
    assert "Traceback" not in caplog.text


async def test_outputs_of_more_sequences_than_asked_for(cluster, caplog):
    await cluster.start(prefill=2, decode=1)

    async def prefill_more(worker, call):
        async for well in prefill_well(worker, call):
            if well.HasField("computed"):
                well.computed.first_outputs.extend([well.computed.first_outputs[0]] * 4)
            yield well

    for worker in cluster.workers:
        if worker.role == "prefill":
            worker.scripts = [prefill_more]
    assert await cluster.text(max_tokens=3) == said(3)
    assert "outputs of 5 sequences, 1 were requested" in caplog.text
