"""Steps that are launched before the tokens of the last one are known: the same answers, and at most one step ahead."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.device_event import DeviceEvent
from pdserve.engine.executor.executor import Executor, StepResult
from pdserve.engine.scheduler_output import CopyEnd, GrammarOutput, LookupEnd, ModelRunnerOutput, SchedulerOutput
from tests.support.engine.engine_harness import Answer, Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer, prompt_of, sampled_answer

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"bad_words_token_ids": ((3, 4), (9,)), "min_tokens": 6},
    {"logprobs": 3, "logit_bias": {7: 3.0}},
    {"temperature": 0.7, "seed": 6, "top_k": 9, "stop_token_ids": (11, 12, 13, 14)},
]


class WatchedExecutor:
    """Records when steps are launched and awaited."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.calls: list[tuple[str, int]] = []
        """(call, number of the step)."""
        self._launched = self._sampled = 0

    @property
    def hidden_size(self) -> int:
        return self._executor.hidden_size

    @property
    def kv_written(self) -> DeviceEvent | None:
        return None

    def check_health(self) -> None:
        self._executor.check_health()

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.calls.append(("launch", self._launched))
        self._launched += 1
        self._executor.execute_model(scheduled)

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        self.calls.append(("sample", self._sampled))
        self._sampled += 1
        return _WatchedResult(self, self._sampled - 1, self._executor.sample_tokens(grammar))

    def copy_blocks(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        return self._executor.copy_blocks(scheduled)

    def finished_copies(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        return self._executor.finished_copies(timeout_s)

    def warm_up(self) -> None:
        self._executor.warm_up()

    def close(self) -> None:
        self._executor.close()


class _WatchedResult:
    def __init__(self, executor: WatchedExecutor, number: int, pending: StepResult) -> None:
        self._executor, self._number, self._pending = executor, number, pending

    def result(self) -> ModelRunnerOutput:
        self._executor.calls.append(("await", self._number))
        return self._pending.result()


def watched(engine: Harness) -> WatchedExecutor:
    executor = WatchedExecutor(engine.core.executor)
    engine.core.executor = executor
    return executor


class LateEvents(WatchedExecutor):
    """As on a GPU with a draft head: a step writes entries of the cache when it is launched, and more when it is sampled."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.events: list[DeviceEvent] = []

    @property
    def kv_written(self) -> DeviceEvent | None:
        return self.events[-1] if self.events else None

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        super().execute_model(scheduled)
        self.events.append(_Passed())

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        result = super().sample_tokens(grammar)
        self.events.append(_Passed())
        return result


class _Passed:
    def synchronize(self) -> None: ...


def answers(engine: Harness) -> list[Answer]:
    """Sequences that come and go, end by a token or by length, and fork."""
    ids = []
    for number, params in enumerate(PARAMETERS * 2):
        ids.append(engine.add(prompt_of(3 + 5 * number), params={"max_tokens": 5 + 3 * number} | params, eos=(21, 22)))
        engine.step()
        engine.step()
    found = engine.run()
    siblings = engine.ask_many(prompt_of(9), 3, params={"max_tokens": 7, "temperature": 1.0, "seed": 4})
    return [*(found[request_id] for request_id in ids), *siblings]


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 3}, {"num_blocks": 24, "max_model_len": 96}], ids=str)
def test_answers_are_those_of_steps_one_after_the_other(make_engine: MakeEngine, limits: dict[str, int]) -> None:
    expected = answers(make_engine(**limits))
    engine = make_engine(async_scheduling=True, **limits)
    calls = watched(engine).calls
    assert answers(engine) == expected
    ahead = [
        number
        for place, (name, number) in enumerate(calls)
        if name == "launch" and ("await", number - 1) in calls[place:]
    ]
    assert len(ahead) > 20, "few steps were ahead"


def test_at_most_one_step_is_ahead_and_rules_see_every_token(make_engine: MakeEngine) -> None:
    """A step is awaited before the step after the next is launched, and before the next is sampled."""
    engine = make_engine(async_scheduling=True)
    calls = watched(engine).calls
    engine.ask(prompt_of(5), params={"max_tokens": 12})
    place = {call: index for index, call in enumerate(calls)}
    steps = range(1 + max(number for _, number in calls))
    for step in steps[2:]:
        assert place["launch", step] > place["await", step - 2]
    for step in steps[1:]:
        assert place["sample", step] > place["await", step - 1]
    assert sum(place["launch", step] < place["await", step - 1] for step in steps[1:]) == 11


def test_every_chunk_of_a_prompt_is_awaited_before_the_next(make_engine: MakeEngine) -> None:
    """A long prompt would else be queued within milliseconds, and the tick then stand still until it is computed."""
    for runs_ahead in (False, True):
        engine = make_engine(async_scheduling=runs_ahead, max_num_batched_tokens=4)
        calls = watched(engine).calls
        engine.ask(prompt_of(40), params={"max_tokens": 1})
        launches = [call for call in calls if call[0] != "sample"]
        assert launches == [(name, step) for step in range(10) for name in ("launch", "await")]


def test_a_step_ahead_says_nothing_for_sequences_that_have_ended(make_engine: MakeEngine) -> None:
    engine = make_engine(async_scheduling=True)
    prompt = prompt_of(6)
    answer = greedy_answer(prompt, 20)
    ends = answer[4]
    assert ends not in answer[:4]
    engine.add(prompt_of(8), "other", params={"max_tokens": 20})
    engine.add(prompt, "ends", params={"max_tokens": 20}, eos=(ends,))
    found = engine.run()
    assert found["ends"].token_ids == answer[:5]
    assert found["other"].token_ids == greedy_answer(prompt_of(8), 20)
    # alone, the step ahead has no other row
    assert engine.ask(prompt, eos=(ends,), params={"max_tokens": 20}).token_ids == answer[:5]
    assert not engine.core.has_work


def test_a_request_with_the_name_of_one_whose_step_is_ahead(make_engine: MakeEngine) -> None:
    """The result of the step ahead belongs to the aborted request alone."""
    engine = make_engine(async_scheduling=True)
    engine.add(prompt_of(5), "a", params={"max_tokens": 30})
    for _ in range(4):
        engine.step()
    assert engine.core._ahead is not None
    engine.core.abort_request("a")
    engine.collect()
    del engine.answers["a"]
    engine.add(prompt_of(7), "a", params={"max_tokens": 6})
    assert engine.run()["a"].token_ids == greedy_answer(prompt_of(7), 6)


def test_a_request_that_arrives_enters_after_the_step_that_is_ahead(make_engine: MakeEngine) -> None:
    engine = make_engine(async_scheduling=True)
    engine.add(prompt_of(5), "first", params={"max_tokens": 30})
    for _ in range(4):
        engine.step()
    engine.add(prompt_of(9), "second", params={"temperature": 1.0, "seed": 3})
    engine.step()
    assert "second" not in engine.running()
    engine.step()
    assert "second" in engine.running()
    assert engine.run()["second"].token_ids == sampled_answer(prompt_of(9), 4, seed=3)


def test_requests_that_did_not_fit_a_step_enter_the_next_ones(make_engine: MakeEngine) -> None:
    """The first two fill a step exactly. The others wait for its tokens, not for blocks: none is ahead before each was tried."""
    prompts = [prompt_of(length) for length in (4, 6, 3, 7)]
    engine = make_engine(async_scheduling=True, max_num_batched_tokens=10)
    names = [engine.add(prompt, params={"max_tokens": 30}) for prompt in prompts]
    for _ in range(8):
        engine.step()
    assert engine.running() == names
    answers = engine.run()
    assert [answers[name].token_ids for name in names] == [greedy_answer(prompt, 30) for prompt in prompts]


def test_the_end_of_a_turn_while_its_step_is_ahead(make_engine: MakeEngine) -> None:
    engine = make_engine(async_scheduling=True)
    turn = greedy_answer(prompt_of(5), 4)
    engine.add(prompt_of(5), "s", resumable=True, params={"max_tokens": 9}, eos=(turn[3],))
    engine.add(prompt_of(8), "other", params={"max_tokens": 30})
    while "s" not in engine.turns:
        engine.step()
    assert engine.core._ahead is not None
    engine.resume("s", [4, 5], max_tokens=3)
    while len(engine.turns["s"]) < 2:
        engine.step()
    engine.core.abort_request("s")
    engine.run()
    assert [turn.token_ids for turn in engine.turns["s"]] == [
        turn,
        greedy_answer([*prompt_of(5), *turn, 4, 5], 3),
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_wait_for_what_a_step_writes_after_its_launch(make_engine: MakeEngine, is_async: bool) -> None:
    """Events of steps are numbered 0, 2, .. at their launch and 1, 3, .. at their sampling."""
    engine = make_engine(async_scheduling=is_async)
    executor = LateEvents(engine.core.executor)
    engine.core.executor = executor
    engine.add(prompt_of(40), params={"max_tokens": 6})
    num_applied = 0
    while engine.core.has_work:
        engine.step()
        published = engine.scheduler.sources.device_event
        reused = engine.scheduler.receives.launched_event
        assert published is executor.events[2 * num_applied + 1]
        assert reused is executor.events[-1]
        assert len(executor.events) % 2 == 0
        num_applied += 1
    assert num_applied >= 6
