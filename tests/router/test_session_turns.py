"""Turns of a session whose text the router ends, and whose prompt has log-probabilities."""

from __future__ import annotations

from typing import Any

from pdserve.common.request.engine_types import LogprobsLists
from pdserve.common.request.wire.messages import prompt_logprobs_to_wire
from pdserve.v1 import decode_pb2
from tests.router.fake_worker import ADMITTED, decode_outputs, tokens
from tests.router.test_sessions import ask, turn


async def test_a_stop_string_ends_the_turn_and_not_the_session(cluster):
    async def until_told(worker, call):
        async for given in call.turns:
            yield ADMITTED
            if given.sampling_params.output_limit < 10:
                yield decode_outputs(0, "xyz", "length")
                continue
            yield decode_outputs(0, "abcdef")
            ended.append(await worker.ended_sequences.get())
            yield decode_outputs(6, "gh")  # was on its way
            yield decode_outputs(8, "", "stop")

    ended: list[Any] = []
    await cluster.start()
    cluster.of("decode").session_script = until_told
    call = cluster.grpc.Session()
    stop = {"stop": ["cd"]}
    answers = [
        await ask(call, request)
        for request in (
            turn("hello", 20, sampling=stop),
            turn("more", 3),
            turn("again", 20, sampling=stop),
            turn("x", 3),
        )
    ]
    texts = ["".join(response.text for response in each) for each in answers]
    assert texts == ["ab", "xyz", "ab", "xyz"]
    assert [each[-1].stop_reason for each in answers] == ["cd", "", "cd", ""]
    # four tokens of each stopped turn stand, of eight that the worker has
    sent = cluster.of("decode").calls[0].seen
    assert [request.num_kept_output_tokens for request in sent] == [None, 4, None, 4]
    assert [each[-1].usage.prompt_tokens for each in answers] == [5, 5 + 4 + 4, 13 + 3 + 5, 21 + 4 + 1]
    assert [(each.turn, each.indexes) for each in ended] == [(0, [0]), (2, [0])]
    call.cancel()


async def test_log_probabilities_of_a_turns_prompt(cluster):
    async def with_logprobs(worker, call):
        sequence: list[int] = []
        async for request in call.turns:
            yield ADMITTED
            first = max(1, len(sequence))
            sequence += request.prompt_token_ids
            num = len(sequence) - first
            lists = LogprobsLists([[token] for token in sequence[first:]], [[-1.0]] * num, [1] * num)
            for piece in prompt_logprobs_to_wire(lists, first):
                yield decode_pb2.DecodeEvent(prompt_logprobs=piece)
            yield decode_outputs(0, "ab", "length")
            sequence += tokens("ab")

    await cluster.start()
    cluster.of("decode").session_script = with_logprobs
    call = cluster.grpc.Session()
    counts = []
    for text in ("hello", "more", "x"):
        responses = await ask(call, turn(text, 2, sampling={"prompt_logprobs": 0}))
        counts.append(sum(len(response.prompt_logprobs) for response in responses))
    assert counts == [4, 4, 1]
    call.cancel()
