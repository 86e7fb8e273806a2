"""vLLM's values around an engine, read as code for vLLM does: prompts, forms, pools, queues, statistics, observers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import EngineCoreOutputs, SchedulerStats
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.kv_cache.block_pool import BlockPool
from pdserve.engine.stats.iteration_stats import IterationStats
from pdserve.llm import LLM, PoolingParams, StatLoggerBase, StructuredOutputsParams, TextPrompt, TokensPrompt
from tests.support.engine.llm_requests import TEXT, core_of, greedy


def test_each_form_of_a_prompt(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(TEXT)
    prompts = [TEXT, token_ids, TextPrompt(prompt=TEXT), TokensPrompt(prompt_token_ids=token_ids), {"prompt": TEXT}]
    answers = [llm.generate(prompt, greedy(), use_tqdm=False)[0] for prompt in prompts]  # type: ignore[arg-type]
    assert all(answer.outputs == answers[0].outputs for answer in answers)
    for key in ("mm_processor_kwargs", "prompt_embeds"):
        with pytest.raises(InvalidRequest, match=f"this one has .*'{key}'"):
            llm.generate({"prompt": TEXT, key: {}}, greedy(), use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputsParams(json={"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}),
        StructuredOutputsParams(regex="(ab|cd){2}"),
        StructuredOutputsParams(choice=["positive", "negative"]),
        StructuredOutputsParams(grammar='root ::= "yes" | "no"'),
    ],
)
def test_forms_of_output(llm: LLM, form: StructuredOutputsParams) -> None:
    [answer] = llm.generate(TEXT, greedy(max_tokens=80, ignore_eos=False, structured_outputs=form), use_tqdm=False)
    text = answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
    if form.json is not None:
        assert json.loads(text)["a"] in (1, 2)
    else:
        assert text in ("abab", "abcd", "cdab", "cdcd", "positive", "negative", "yes", "no")


def test_blocks_are_taken_shared_and_found_again() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert (first.ref_cnt, sum(pool.available)) == (1, 2)
    pool.touch([first])
    pool.remember(first, b"hash")
    pool.release([first, second])
    assert (first.ref_cnt, sum(pool.available)) == (1, 3)
    pool.release([first])
    assert (pool.find(b"hash"), pool.num_cached, sum(pool.available)) == (first, 1, 4)
    pool.allocate(4)  # the cached one is reused last
    assert pool.find(b"hash") is None


def test_metrics_and_statistics_of_a_request(make_llm: Callable[..., LLM]) -> None:
    seen: list[SchedulerStats] = []
    finished = []

    class Observer(StatLoggerBase):
        def __init__(self, info: EngineInfo, engine_index: int = 0) -> None:
            assert (info.block_size, engine_index) == (4, 0)

        def record(
            self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                seen.append(scheduler_stats)
            if iteration_stats is not None:
                finished.extend(iteration_stats.finished_requests)

        def log(self) -> None: ...

    llm = make_llm(stat_loggers=[Observer])
    [answer] = llm.generate(TEXT, greedy(max_tokens=5), use_tqdm=False)
    metrics = answer.metrics
    assert metrics is not None
    assert (metrics.prompt_tokens, metrics.completion_tokens) == (len(answer.prompt_token_ids), 5)
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.get_total_time() == metrics.finished_time - metrics.arrival_time
    assert (metrics.calculate_throughput() or 0) > 0
    assert len(metrics.inter_token_latencies) == 4
    assert [each.num_generation_tokens for each in finished] == [5]
    assert max(stats.num_running_reqs for stats in seen) == 1
    assert 0 < max(stats.kv_cache_usage for stats in seen) < 1


def test_pooling_outputs_compare_by_value(llm: LLM) -> None:
    first, again = (llm.encode(TEXT, PoolingParams(dimensions=8), use_tqdm=False)[0] for _ in range(2))
    assert (first.finished, len(first.outputs.data)) == (True, 8)
    assert first.outputs.data == pytest.approx(again.outputs.data, abs=1e-5)
    assert type(first.outputs)(data=[1.0]) == type(first.outputs)(data=[1.0])


def test_a_step_says_what_it_computes(llm: LLM) -> None:
    core = core_of(llm)
    steps = []
    schedule = core.scheduler.schedule

    def noted() -> object:
        steps.append(schedule())
        return steps[-1]

    core.scheduler.schedule = noted  # type: ignore[method-assign, assignment]
    llm.generate([5] * 70, greedy(max_tokens=3), use_tqdm=False)
    computing = [step for step in steps if step is not None and step.num_scheduled_tokens]
    assert [step.total_num_scheduled_tokens for step in computing] == [64, 6, 1, 1]
    assert [len(step.scheduled_new_reqs) for step in computing] == [1, 0, 0, 0]
    assert isinstance(EngineCoreOutputs().outputs, list)
