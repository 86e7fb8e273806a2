"""Token ids that the model does not have, and that no check before the engine has seen: they end their request alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.common.request.engine_types import FinishReason, StreamingUpdate
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import VOCAB_SIZE, greedy_answer, prompt_of

GOOD = prompt_of(10)


def _add_unchecked(engine: Harness, fields: dict[str, Any], **changes: Any) -> str:
    request = engine.request(GOOD, **fields)
    return engine.submit(msgspec.structs.replace(request, **changes))


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 10**9, -1])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "params": {"n": 3, "temperature": 1.0, "seed": 1}},
        {"transfer_source": True, "wanted_from": 0},
        {"remote_prefill": True},
        {"pooling_params": PoolingParams()},
        {"resumable": True},
    ],
    ids=str,
)
def test_a_prompt_ends_its_request_alone(make_engine: MakeEngine, fields: dict[str, Any], token_id: int) -> None:
    engine = make_engine()
    good = engine.add(GOOD)
    engine.step()
    bad = _add_unchecked(engine, fields, prompt_token_ids=[*GOOD[:4], token_id, *GOOD[5:]])
    engine.run()
    assert engine.answers[good].token_ids == greedy_answer(GOOD, 4)
    ended = [answer for name, answer in engine.answers.items() if name.partition("/")[0] == bad]
    assert len(ended) == fields.get("n", 1)
    for answer in ended:
        assert (answer.finish_reason, answer.error_code, answer.token_ids) == (
            FinishReason.ERROR,
            "invalid_request",
            [],
        )
        assert answer.error_message.startswith(f"prompt_token_ids[4] is {token_id}, outside the vocabulary")


def test_output_of_an_earlier_attempt_is_held_to_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine()
    bad = _add_unchecked(engine, {"output": [1, 2]}, output_token_ids=[1, VOCAB_SIZE])
    engine.run()
    assert engine.answers[bad].error_message.startswith(f"output_token_ids[1] is {VOCAB_SIZE}")


def test_a_turn_ends_its_session_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    session = engine.add(GOOD, resumable=True)
    engine.run()
    params = SamplingParams(temperature=0.0, max_tokens=4)
    engine.core.resume_request(
        StreamingUpdate(request_id=session, prompt_token_ids=[VOCAB_SIZE], sampling_params=params)
    )
    good = engine.add(GOOD)
    engine.run()
    assert engine.answers[session].error_message.startswith(f"prompt_token_ids[0] is {VOCAB_SIZE}")
    assert engine.answers[good].token_ids == greedy_answer(GOOD, 4)


def test_a_repeated_name_does_not_end_the_first(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.add(GOOD, "same")
    _add_unchecked(engine, {"request_id": "same"}, prompt_token_ids=[VOCAB_SIZE])
    engine.run()
    assert engine.answers[first].token_ids == greedy_answer(GOOD, 4)
