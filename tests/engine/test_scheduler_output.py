"""Scheduler and runner exchange values: encoded, decoded and computed from, each step gives the same answers."""

from __future__ import annotations

import ast
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

import pdserve.engine.runner as runner_package
import pdserve.engine.sampling as sampling_package
from pdserve.common.errors import InternalError, InvalidRequest, LogitsProcessorFailed
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.scheduler_output import (
    GrammarOutput,
    ModelRunnerOutput,
    RequestFailure,
    SchedulerOutput,
)
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer


class EncodingExecutor:
    """Passes everything as bytes, as an executor in another process would."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.num_steps += 1
        self._inner.execute_model(_copied(scheduled, SchedulerOutput))

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        given = None if grammar is None else _copied(grammar, GrammarOutput)
        result: Future[ModelRunnerOutput] = Future()
        result.set_result(_copied(self._inner.sample_tokens(given).result(), ModelRunnerOutput))
        return result


def _copied(value: Any, kind: type) -> Any:
    copy: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    assert copy == value
    return copy


@pytest.fixture
def engine(make_engine: MakeEngine) -> Harness:
    harness = make_engine(num_blocks=24, max_num_seqs=4)
    harness.core.executor = EncodingExecutor(harness.core.executor)
    return harness


def test_answers_are_the_same_through_bytes(engine: Harness) -> None:
    """With chunks, preemption, sequences that part from a prompt, and log-probabilities."""
    prompts = [[1] * 30, [2] * 5, [3] * 17]
    ids = [engine.add(prompt, params={"max_tokens": 20}) for prompt in prompts]
    forked = engine.add([4] * 9, params={"max_tokens": 4, "n": 3, "logprobs": 2, "temperature": 1.0, "seed": 1}, n=3)
    engine.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert engine.answers[request_id].token_ids == greedy_answer(prompt, 20)
    for index in range(3):
        answer = engine.answers[f"{forked}/{index}"]
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids) == 4
    assert cast(EncodingExecutor, engine.core.executor).num_steps > 20


def test_a_failure_is_a_value() -> None:
    error = RequestFailure.of(InvalidRequest("no", "logit_bias")).error()
    assert isinstance(error, InvalidRequest)
    assert (error.message, error.field) == ("no", "logit_bias")
    assert isinstance(RequestFailure.of(LogitsProcessorFailed("x")).error(), LogitsProcessorFailed)
    assert isinstance(RequestFailure.of(InternalError("x")).error(), InternalError)


def test_all_parameters_survive_encoding() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={5: 1.0}, stop_token_ids=(3,), seed=2**63 - 1)
    assert _copied(params, SamplingParams) == params
    assert _copied(PoolingParams(), PoolingParams) == PoolingParams()


@pytest.mark.parametrize("package", [runner_package, sampling_package], ids=["runner", "sampling"])
def test_what_computes_a_step_knows_no_scheduler(package: Any) -> None:
    """Neither a live `Request` nor anything else of the scheduler's."""
    for path in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith(("pdserve.engine.scheduler.", "pdserve.engine.request")), path.name


def test_a_step_in_two_halves(make_engine: Callable[..., Harness]) -> None:
    """Between them, requests may come: the next step takes them."""
    engine = make_engine()
    first = engine.add([1, 2, 3], params={"max_tokens": 2})
    step = engine.core.begin_step()
    second = engine.add([4, 5, 6], params={"max_tokens": 2})
    assert step.result is not None
    assert set(step.scheduled.num_scheduled_tokens) == {first}
    outputs = engine.core.finish_step(step)
    assert [output.request_id for output in outputs.outputs] == [first]
    step = engine.core.begin_step()
    assert set(step.scheduled.num_scheduled_tokens) == {first, second}
    engine.core.finish_step(step)
    engine.core.abort_request(second)
