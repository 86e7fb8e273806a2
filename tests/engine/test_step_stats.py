"""Statistics of steps: stages and layers of the model runner, sums and states of the scheduler, lines of the profile."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import Cancelled
from pdserve.common.request.engine_types import EngineCoreOutputs, ModelRunnerStats
from pdserve.engine.stats.step_profile import StepProfile
from tests.support.engine.engine_harness import Harness, MakeEngine

PROMPT = list(range(10, 21))


def steps(engine: Harness) -> list[EngineCoreOutputs]:
    """The outputs of all steps until there is nothing to do."""
    outputs = []
    while engine.core.has_work:
        outputs.append(engine.core.step())
        engine._book(outputs[-1].outputs)
    return outputs


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_each_step_has_its_batch_and_its_stages(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(max_num_batched_tokens=8, async_scheduling=async_scheduling)
    for _ in range(2):
        engine.add(PROMPT)
    taken = steps(engine)
    computed = [outputs.model_runner_stats for outputs in taken if outputs.model_runner_stats is not None]
    assert sum(stats.num_tokens for stats in computed) == engine.model.num_tokens
    assert {stats.num_reqs for stats in computed} == {1, 2}
    for stats in computed:
        assert min(stats.prepare_s, stats.forward_s, stats.sample_s) >= 0
        assert stats.execution_s == stats.prepare_s + stats.forward_s + stats.sample_s > 0
        assert stats.tokens_per_s == stats.num_tokens / stats.execution_s
        assert stats.layer_s == []
    last = taken[-1].scheduler_stats
    assert last is not None
    assert (last.num_steps, last.num_scheduled_tokens) == (len(computed), engine.model.num_tokens)
    assert last.scheduling_s > 0
    assert last.update_s > 0


def test_a_step_without_work_has_no_statistics(make_engine: MakeEngine) -> None:
    outputs = make_engine().core.step()
    assert outputs.model_runner_stats is None
    assert not outputs.has_results


def test_layers_are_timed_on_request(
    make_real_engine: Callable[..., Harness], tiny_checkpoints: Callable[..., Path]
) -> None:
    engine = make_real_engine(tiny_checkpoints("llama"), collect_layer_times=True)
    ticks = engine.core.heartbeat.tick
    engine.add(PROMPT)
    for outputs in steps(engine):
        stats = outputs.model_runner_stats
        assert stats is not None
        assert len(stats.layer_s) == engine.model.config.num_layers
        assert all(layer_s > 0 for layer_s in stats.layer_s)
        assert sum(stats.layer_s) <= stats.forward_s
    # the heartbeat is still called before each layer
    assert engine.core.heartbeat.tick - ticks >= 4 * (1 + engine.model.config.num_layers)


def test_sequences_are_counted_by_what_they_wait_for(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_num_seqs=1)
    engine.must_be_idle = False  # the receiver of `remote` never returns its blocks
    engine.add(PROMPT, "session", resumable=True)
    steps(engine)
    engine.add(PROMPT, "runs")
    engine.add(PROMPT, "waits")
    engine.add(PROMPT, "remote", remote_prefill=True)
    engine.step()
    stats = engine.core.stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_capacity_reqs) == (1, 1, 1)
    assert (stats.num_remote_kv_reqs, stats.num_idle_sessions, stats.num_grammar_reqs) == (1, 1, 0)
    assert stats.num_dropped_events == 0
    engine.add(PROMPT, "waits")
    assert engine.core.stats().num_dropped_events == 1
    engine.resume("session", [1])
    assert engine.core.stats().num_idle_sessions == 0
    engine.core.fail_all(Cancelled("the test ends"))
    assert engine.core.stats().num_idle_sessions == 0


@pytest.mark.parametrize("ends", ["abort_request", "finish_session"])
def test_an_ended_session_is_not_counted(make_engine: MakeEngine, ends: str) -> None:
    engine = make_engine()
    engine.add(PROMPT, "session", resumable=True)
    steps(engine)
    assert engine.core.stats().num_idle_sessions == 1
    getattr(engine.core, ends)("session")
    assert engine.core.stats().num_idle_sessions == 0


LINE = re.compile(
    r"(\d+) steps in [\d.]+ s, per step: ([\d.]+) sequences, ([\d.]+) tokens, [\d.]+ ms: "
    r"schedule [\d.]+, inputs [\d.]+, forward [\d.]+, sample [\d.]+, update [\d.]+(; layers [\d. ]+)?"
)


def lines(caplog: Any) -> list[re.Match[str]]:
    found = [LINE.fullmatch(record.message) for record in caplog.records if "per step" in record.message]
    assert all(found)
    return [match for match in found if match]


def test_the_profile_is_one_line_after_its_steps(make_engine: MakeEngine, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    engine = make_engine(profile_steps=3, collect_layer_times=True)
    engine.add(PROMPT, params={"max_tokens": 8})
    steps(engine)
    [line] = lines(caplog)
    assert line.group(1, 2) == ("3", "1.0")
    assert float(line[3]) == round((len(PROMPT) + 2) / 3, 1)
    assert line[4] is not None


def test_lines_are_no_closer_than_the_interval(monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    profile = StepProfile(interval_s=2.0, max_steps=9)
    for _ in range(12):
        now += 0.5
        profile.add(0.001, 0.002, ModelRunnerStats(num_reqs=2, num_tokens=4, forward_s=0.01))
    assert [line[1] for line in lines(caplog)] == ["4", "4", "1"]
    assert "forward 10.000" in caplog.text
    assert (profile.num_steps, profile.num_tokens) == (12, 48)


def test_without_a_setting_nothing_is_logged(make_engine: MakeEngine, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    engine = make_engine()
    engine.ask(PROMPT)
    assert not lines(caplog)
