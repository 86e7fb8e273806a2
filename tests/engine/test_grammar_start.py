"""Grammars on a machine without CPU time: requests end at their bounds with a retryable error, and no progress is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pdserve.common.errors import GrammarUnavailable, InvalidRequest, Overloaded
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs import grammar_compiler
from pdserve.engine.structured_outputs import structured_output_manager as grammar_waits
from pdserve.engine.structured_outputs.grammar_compiler import START_S, GrammarCompiler
from pdserve.engine.structured_outputs.grammar_fork_server import GrammarForkServer
from pdserve.engine.structured_outputs.grammar_messages import GrammarLimits
from tests.support.engine.engine_harness import Harness
from tests.support.engine.grammar_jobs import Ask
from tests.support.inputs.hostile_grammars import SLOW_TO_COMPILE
from tests.support.run.waiting import HANG_S, wait_until

VOCAB_SIZE = 320
EOS = 2
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture
def make_compiler(folder: Path) -> Iterator[Callable[..., GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def make(limits: GrammarLimits | None = None) -> GrammarCompiler:
        made.append(GrammarCompiler(folder, VOCAB_SIZE, limits))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


def fork_servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "grammar_process" in " ".join(child.cmdline())]


def test_a_request_that_waits_for_the_start_ends_at_its_bound(
    make_real_engine: Callable[..., Harness],
    folder: Path,
    make_compiler: Callable[..., GrammarCompiler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(grammar_waits, "clock", SimpleNamespace(monotonic=lambda: now))
    compiler = make_compiler()
    compiler.is_starting = True
    monkeypatch.setattr(compiler, "submit", lambda job: None)
    engine = make_real_engine(folder, grammars=compiler, grammar_timeout_s=10.0)
    params: dict[str, Any] = {"max_tokens": 8, "structured_outputs": StructuredOutputsParams(choice=("yes",))}
    first = engine.add(PROMPT, eos=(EOS,), params=params)
    now += START_S - 1.0
    late = engine.add(PROMPT, eos=(EOS,), params=params)
    engine.step()
    assert len(engine.scheduler.requests) == 2
    now += 2.0
    engine.step()
    assert list(engine.scheduler.requests) == [late]
    assert (engine.answers[first].error_code, engine.answers[first].error_message) == (
        GrammarUnavailable.code,
        "the process that compiles structured_outputs was not ready within 61 s",
    )
    now += START_S
    engine.step()
    assert engine.answers[late].error_code == GrammarUnavailable.code
    assert not engine.scheduler.requests


def test_it_is_retryable_and_not_the_clients_rate() -> None:
    assert issubclass(GrammarUnavailable, Overloaded)
    assert (GrammarUnavailable.http_status, GrammarUnavailable.retryable) == (503, True)


@pytest.mark.slow
def test_a_fork_server_that_makes_progress_is_kept(
    make_compiler: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "START_S", 0.3)
    made: list[int] = []

    class Slow(GrammarForkServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self.process_id)

        def processor_ticks(self) -> int:
            return time.monotonic_ns()  # more at each look, as of a process that gets some CPU time

    monkeypatch.setattr(grammar_compiler, "GrammarForkServer", Slow)
    ask = Ask(make_compiler())
    ask.grammar(ask.submit(choice=("yes", "no"))).close()
    assert len(made) == 1


@pytest.mark.slow
def test_a_fork_server_that_stands_still_is_started_again(
    make_compiler: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "START_S", 1.0)
    made: list[int] = []

    class Stopped(GrammarForkServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self.process_id)
            if len(made) == 1:
                os.kill(self.process_id, signal.SIGSTOP)

    monkeypatch.setattr(grammar_compiler, "GrammarForkServer", Stopped)
    ask = Ask(make_compiler())
    result = ask.result(ask.submit(choice=("yes", "no")))
    assert isinstance(result, GrammarUnavailable)
    assert "made no progress for 1 s" in result.message
    monkeypatch.setattr(grammar_compiler, "START_S", HANG_S)
    ask.grammar(ask.submit(choice=("yes", "no"))).close()
    assert len(made) == 2


@pytest.mark.slow
def test_a_client_is_blamed_for_processor_time_only(make_compiler: Callable[..., GrammarCompiler]) -> None:
    """A compilation that gets no CPU time ends its request as retryable, and goes on for those who come again."""
    ask = Ask(make_compiler(GrammarLimits(compile_s=1.0)))
    ask.grammar(ask.submit(choice=("no", "yes"))).close()  # the fork server is there
    [server] = fork_servers()
    os.kill(server.pid, signal.SIGSTOP)  # its next process cannot begin
    starved = ask.submit(regex="[a-c]{5}")
    result = ask.result(starved)
    assert isinstance(result, GrammarUnavailable)
    assert "was not compiled within 3 s, for lack of CPU time" in result.message
    again = ask.submit(regex="[a-c]{5}")
    os.kill(server.pid, signal.SIGCONT)
    ask.grammar(again).close()
    assert ask.begun.count(again) == 1
    blamed = ask.result(ask.submit(**SLOW_TO_COMPILE))
    if isinstance(blamed, InvalidRequest):  # it had its CPU time before the wait ended
        assert "could not be compiled within 1 s of CPU time" in blamed.message
    else:
        assert isinstance(blamed, GrammarUnavailable)


@pytest.mark.slow
def test_the_fork_server_computes_shared_masks_when_it_rests(make_compiler: Callable[..., GrammarCompiler]) -> None:
    ask = Ask(make_compiler())
    ask.grammar(ask.submit(choice=("yes", "no"))).close()
    [server] = fork_servers()
    before_s = sum(server.cpu_times()[:2])
    wait_until(lambda: sum(server.cpu_times()[:2]) > before_s, "it computes nothing")
    # it serves meanwhile
    ask.grammar(ask.submit(json={"type": "string", "maxLength": 60})).close()
