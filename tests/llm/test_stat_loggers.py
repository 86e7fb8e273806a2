"""Stat loggers of the offline API: they see each step, in this process and in another; a broken one ends nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.request.engine_types import FinishReason, SchedulerStats
from pdserve.engine.client import process_client
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.stats import stat_recorder
from pdserve.engine.stats.iteration_stats import IterationStats
from pdserve.llm import LLM, AsyncLLM, EngineArgs, LLMEngine, StatLoggerBase, StreamingInput
from tests.llm.conftest import TINY
from tests.support.engine.forked_engine import start_forked
from tests.support.engine.llm_requests import TEXT, greedy, prompts_of, sampled
from tests.support.models.kv_layouts import make_layout
from tests.support.run.waiting import HANG_S


class Kept(StatLoggerBase):
    """Keeps everything."""

    def __init__(self, engine_info: EngineInfo, engine_index: int = 0) -> None:
        super().__init__(engine_info, engine_index)
        self.steps: list[tuple[SchedulerStats | None, IterationStats]] = []
        self.num_logs = 0

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        assert iteration_stats is not None
        self.steps.append((scheduler_stats, iteration_stats))

    def log(self) -> None:
        self.num_logs += 1

    def total(self, field: str) -> int:
        return sum(getattr(iteration, field) for _, iteration in self.steps)

    @property
    def finished(self) -> list[Any]:
        return [request for _, iteration in self.steps for request in iteration.finished_requests]


class Makes:
    """A factory that keeps what it made."""

    def __init__(self) -> None:
        self.made: list[Kept] = []

    def __call__(self, engine_info: EngineInfo, engine_index: int) -> Kept:
        self.made.append(Kept(engine_info, engine_index))
        return self.made[-1]


class Broken(Kept):
    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        super().record(scheduler_stats, iteration_stats)
        raise RuntimeError("this logger has a bug")


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "start_program", start_forked)


@pytest.mark.few(1)
@pytest.mark.parametrize("engine_process", [False, True])
def test_every_step_is_recorded(folder: Path, engine_process: bool) -> None:
    factory = Makes()
    options = TINY | {"enable_prefix_caching": False}
    with LLM(folder, engine_process=engine_process, stat_loggers=[factory], **options) as llm:
        answers = llm.generate(prompts_of([70, 6]), [greedy(), sampled(n=2, seed=1)], use_tqdm=False)
        llm.embed(prompts_of([5]), use_tqdm=False)
    [kept] = factory.made
    assert (kept.engine_info.block_size, kept.engine_index, kept.num_logs) == (4, 0, 1)
    num_output = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
    assert kept.total("num_generation_tokens") == num_output == 36
    assert kept.total("num_prompt_tokens") == 76
    # two prompts have a first token, and every later token of a sequence has a latency
    assert sum(len(iteration.time_to_first_tokens_iter) for _, iteration in kept.steps) == 2
    assert sum(len(iteration.inter_token_latencies_iter) for _, iteration in kept.steps) == 33
    # the longer prompt takes two steps, the first of which has no output
    computed = [iteration.model_runner_stats for _, iteration in kept.steps if iteration.model_runner_stats]
    last = kept.steps[-1][0]
    assert last is not None
    assert (last.num_steps, last.num_scheduled_tokens) == (len(computed), sum(step.num_tokens for step in computed))
    assert sum(step.num_tokens for step in computed) == 76 + 5 + 11 + 2 * 11
    ends = sorted(
        (ended.num_prompt_tokens, ended.num_generation_tokens, str(ended.finish_reason)) for ended in kept.finished
    )
    assert ends == [(5, 0, "stop"), (6, 24, "length"), (70, 12, "length")]
    for ended in kept.finished:
        assert 0 <= ended.queued_time <= ended.e2e_latency
        if ended.num_generation_tokens:
            assert ended.prefill_time + ended.decode_time == pytest.approx(ended.inference_time)
            assert ended.max_tokens_param == 12
            assert 0 < ended.mean_time_per_output_token <= ended.decode_time


async def test_turns_and_aborts_end_as_requests(folder: Path) -> None:
    async def turns() -> AsyncGenerator[StreamingInput, None]:
        for length in (4, 7):
            yield StreamingInput(prompts_of([length])[0], greedy(max_tokens=3))

    factory = Makes()
    async with AsyncLLM(folder, stat_loggers=[factory], **TINY) as llm, asyncio.timeout(HANG_S):
        async for _ in llm.generate(turns()):
            pass
        async for answer in llm.generate(TEXT, greedy(max_tokens=200), "leaves"):
            await llm.abort("leaves")
            last = answer
        await llm.do_log_stats()
        [kept] = factory.made
        assert kept.num_logs == 1
        ends = [(one.num_prompt_tokens, one.num_generation_tokens, one.finish_reason) for one in kept.finished]
        assert ends[:2] == [(4, 3, FinishReason.LENGTH), (7, 3, FinishReason.LENGTH)]
        # it may have ended before the abort, if this loop had to wait
        assert str(ends[2][2]) == last.outputs[0].finish_reason
        assert llm._recorder is not None
        assert not llm._recorder._turns
    assert kept.num_logs == 2


def test_a_broken_logger_is_reported_and_left_out(folder: Path, caplog: Any) -> None:
    broken, factory = Broken(EngineInfo("", 1, 1, 1, 1, 1, 1, make_layout(), "", False)), Makes()
    with LLM(folder, stat_loggers=[lambda info, index: broken, factory], **TINY) as llm:
        [answer] = llm.generate(TEXT, greedy(), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 12
    assert len(broken.steps) == 1
    assert factory.made[0].total("num_generation_tokens") == 12
    assert caplog.text.count("stat logger Broken failed, and gets no more statistics") == 1


def test_the_built_in_logger_writes_lines(folder: Path, caplog: Any, monkeypatch: Any) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(stat_recorder, "LOG_EVERY_S", 0.0)
    engine = LLMEngine.from_engine_args(EngineArgs(folder, stat_loggers=["logging"], **TINY))
    engine.add_request("a", TEXT, greedy(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    engine.do_log_stats()
    engine.close()
    text = [record.message for record in caplog.records if record.message.startswith("engine 0: prompts")]
    assert len(text) >= 4  # steps, `do_log_stats` and the end
    assert "1 sequences running, 0 waiting; KV cache" in text[0]
    assert "output 0.0 tokens/s; 0 sequences running" in text[-1]


def test_disable_log_stats_leaves_loggers_out(folder: Path) -> None:
    factory = Makes()
    with LLM(folder, stat_loggers=[factory], disable_log_stats=True, **TINY) as llm:
        [answer] = llm.generate(TEXT, greedy(), use_tqdm=False)
    assert answer.metrics is None
    assert not factory.made


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("mine", "stat_loggers names 'mine', which is not installed; there are logging"),
        (5, "stat_loggers has 5, a name or a factory is needed"),
        (lambda info, index: 5, "makes 5, which has no `record` and `log`"),
        (lambda info: 5, "cannot be made: TypeError"),
    ],
)
def test_wrong_loggers_are_named(make_llm: Callable[..., LLM], wanted: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(stat_loggers=[wanted])


def test_an_installed_logger_is_found_by_its_name(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    info = tmp_path / "some_loggers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-loggers\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[pdserve.stat_loggers]\nkept = tests.llm.test_stat_loggers:Kept\nabsent = no_such_module:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with LLM(folder, stat_loggers=["kept"], **TINY) as llm:
        llm.generate(TEXT, greedy(), use_tqdm=False)
        assert llm.llm_engine._recorder is not None
        [kept] = llm.llm_engine._recorder._loggers
        assert type(kept).__name__ == "Kept"
    with pytest.raises(ConfigError, match="stat logger 'absent' cannot be made: ModuleNotFoundError"):
        LLM(folder, stat_loggers=["absent"], **TINY)


def test_metrics_of_an_answer_have_each_token(llm: LLM) -> None:
    [answer] = llm.generate(TEXT, sampled(n=2, seed=3), use_tqdm=False)
    metrics: Any = answer.metrics
    assert (metrics.prompt_tokens, metrics.completion_tokens) == (len(answer.prompt_token_ids), 24)
    assert [len(times) for times in metrics.token_timestamps.values()] == [12, 12]
    latencies = metrics.inter_token_latencies
    assert len(latencies) == 22
    assert min(latencies) >= 0
    first, *_, last = metrics.token_timestamps[0]
    assert sum(latencies[:11]) == pytest.approx(last - first)
    assert metrics.get_total_time() == metrics.finished_time - metrics.arrival_time
    assert metrics.calculate_throughput() == 24 / metrics.get_total_time()
    assert [event.type.name for event in metrics.events] == ["QUEUED", "SCHEDULED"] * 2
