"""`LLMEngine`: step by step, the answers of `LLM`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import InternalError, InvalidRequest
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.llm import (
    LLM,
    LLMEngine,
    NamedLogitsProcessor,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
)
from tests.llm.conftest import TINY
from tests.support.engine.llm_requests import TEXT, greedy, prompts_of
from tests.support.engine.logits_plugins import installed


@pytest.fixture
def engine(folder: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine(folder, **TINY)
    yield engine
    assert engine.client.utility("check_pool") is True
    engine.close()


def run(engine: LLMEngine) -> dict[str, list[Any]]:
    """The outputs of each request."""
    outputs: dict[str, list[Any]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_each_kind_of_output_comes_step_by_step(engine: LLMEngine, llm: LLM) -> None:
    [prompt] = prompts_of([9])
    [expected] = llm.generate(prompt, greedy(), use_tqdm=False)
    [vector] = llm.embed(prompt, use_tqdm=False)
    for name, kind in (("whole", "CUMULATIVE"), ("new", "DELTA"), ("last", "FINAL_ONLY")):
        engine.add_request(name, prompt, greedy(output_kind=RequestOutputKind[kind]))
    engine.add_request("vector", prompt, PoolingParams())
    engine.add_request("default", TEXT, None)
    outputs = run(engine)
    assert [answer.outputs for answer in outputs["last"]] == [expected.outputs]
    assert [len(answer.outputs[0].token_ids) for answer in outputs["whole"]] == list(range(1, 13))
    assert outputs["whole"][-1].outputs == expected.outputs
    assert [t for answer in outputs["new"] for t in answer.outputs[0].token_ids] == expected.outputs[0].token_ids
    [embedding] = outputs["vector"]
    assert embedding.outputs.data == pytest.approx(vector.outputs.embedding, abs=1e-5)
    assert all(answers[-1].finished for answers in outputs.values())
    assert engine.step() == []


def test_an_aborted_request_has_no_further_output(engine: LLMEngine, llm: LLM) -> None:
    [expected] = llm.generate(TEXT, greedy(), use_tqdm=False)
    engine.add_request("stays", TEXT, greedy(output_kind=RequestOutputKind.FINAL_ONLY))
    engine.add_request("ends", TEXT, greedy(max_tokens=200))
    assert {output.request_id for output in engine.step() + engine.step()} <= {"stays", "ends"}
    engine.abort_request(["ends", "unknown"])
    engine.add_request("ends", [5, 6], greedy(max_tokens=1))
    outputs = run(engine)
    assert [output.outputs for output in outputs["stays"]] == [expected.outputs]
    assert [output.prompt_token_ids for output in outputs["ends"]] == [[5, 6]]


def test_a_name_is_used_once_at_a_time_and_bad_requests_are_named(engine: LLMEngine) -> None:
    engine.add_request("mine", TEXT, greedy(max_tokens=1))
    with pytest.raises(InvalidRequest, match="request_id is 'mine', which another request has now"):
        engine.add_request("mine", TEXT, greedy())
    with pytest.raises(InvalidRequest) as caught:
        engine.add_request("other", TEXT, greedy(top_p=2.0))
    assert caught.value.field == "top_p"
    assert set(run(engine)) == {"mine"}
    engine.add_request("mine", TEXT, greedy(max_tokens=1))
    assert set(run(engine)) == {"mine"}


def test_an_error_ends_its_request_and_loses_no_output_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogitsProcessors, "from_entry_points", lambda names: installed())
    engine = LLMEngine(folder, **TINY, logits_processors=["broken"])
    [prompt] = prompts_of([5])
    broken = NamedLogitsProcessor(name="broken", args={"how": "raise", "at": 1})
    for name, plug_ins in (("first", ()), ("wrong", (broken,)), ("last", ())):
        params = greedy(max_tokens=3, output_kind=RequestOutputKind.DELTA, logits_processors=plug_ins)
        engine.add_request(name, prompt, params)
    tokens: dict[str, int] = {}
    errors = []
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.outputs[0].token_ids)
        except InternalError as error:
            errors.append(str(error))
    assert tokens == {"first": 3, "wrong": 1, "last": 3}
    assert len(errors) == 1
    assert "logits processor 'broken' failed" in errors[0]
    engine.close()
