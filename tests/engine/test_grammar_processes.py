"""Grammars in processes of their own: what one costs is nobody else's, and no process is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pdserve.common.errors import GrammarUnavailable, InvalidRequest, PdServeError, PeerError
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs import grammar_compiler
from pdserve.engine.structured_outputs.grammar import GrammarJob, JobQueue
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.grammar_messages import GrammarLimits
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.engine.engine_harness import Harness
from tests.support.engine.grammar_jobs import Ask
from tests.support.engine.hash_model import VOCAB_SIZE as HASH_VOCAB_SIZE
from tests.support.engine.hesitant_grammars import HesitantCompiler, pass_time
from tests.support.engine.late_grammars import EOS as HASH_EOS
from tests.support.engine.late_grammars import Form, LateCompiler
from tests.support.inputs.hostile_grammars import EITHER_WAY, SLOW_TO_COMPILE, SLOW_TO_MATCH
from tests.support.run.waiting import HANG_S, wait_until

VOCAB_SIZE = 320
EOS = 2
PROMPT = list(range(40, 60))
LIMITS = GrammarLimits(compile_s=HANG_S, token_s=0.02, kill_s=0.1, request_s=0.2)
MakeCompiler = Callable[..., GrammarCompiler]


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def letter(folder: Path) -> int:
    """The token `a`."""
    [token] = Tokenizer.from_folder(folder).encode("a", add_special_tokens=False)
    return token


@pytest.fixture
def make_compiler(folder: Path) -> Iterator[MakeCompiler]:
    made: list[GrammarCompiler] = []

    def make(limits: GrammarLimits = LIMITS, **options: Any) -> GrammarCompiler:
        made.append(GrammarCompiler(folder, VOCAB_SIZE, limits, **options))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


def asked(n: int = 1, max_tokens: int = 2000, **form: Any) -> dict[str, Any]:
    params = StructuredOutputsParams(**form)
    return {"max_tokens": max_tokens, "temperature": 1.0, "seed": 1, "structured_outputs": params, "n": n}


def children() -> list[psutil.Process]:
    """The fork servers of this process, and the processes under them."""
    return [
        child
        for server in psutil.Process().children()
        if "grammar_process" in " ".join(server.cmdline())
        for child in (server, *server.children())
    ]


# ---- what a form may cost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "n"),
    [
        pytest.param(
            form, n, id=f"{name}-{n}", marks=() if n == 16 or (name, n) == ("200 rules", 1) else pytest.mark.slow
        )
        for name, form in SLOW_TO_MATCH.items()
        for n in (1, 8, 16)
    ],
)
def test_a_form_that_is_slow_to_match_ends_and_takes_no_step_with_it(
    make_real_engine: Callable[..., Harness],
    folder: Path,
    make_compiler: MakeCompiler,
    letter: int,
    form: dict[str, Any],
    n: int,
) -> None:
    # nothing of a grammar's text is looked at in this process: a step costs what it costs without grammars
    limits = GrammarLimits(token_s=0.005, kill_s=0.05, request_s=0.05, per_token_s=0.0)
    engine = make_real_engine(folder, grammars=make_compiler(limits), num_blocks=2000, max_num_seqs=32)
    engine.ask(PROMPT, eos=(EOS,), params=asked(max_tokens=4, regex="[a-z]{9}"))  # the fork server is there
    params = asked(n, **form) | {"logit_bias": {letter: 100.0}}
    hostile = engine.add(PROMPT, "hostile", eos=(EOS,), params=params, n=n)
    mate = engine.add(PROMPT, params={"max_tokens": 40})
    longest_s = 0.0
    while engine.scheduler.requests:
        started = time.thread_time()
        engine.step()
        longest_s = max(longest_s, time.thread_time() - started)
    assert longest_s < 0.2
    ends = [answer for name, answer in engine.answers.items() if name.startswith(hostile)]
    assert len(ends) == n
    assert {answer.error_code for answer in ends} == {InvalidRequest.code}
    assert all(answer.error_message.startswith("structured_outputs takes too long to be matched") for answer in ends)
    assert len(engine.answers[mate].token_ids) == 40
    assert not engine.answers[mate].error_code


@pytest.mark.slow
def test_output_that_a_request_begins_with_counts(make_compiler: MakeCompiler, letter: int) -> None:
    ask = Ask(make_compiler(GrammarLimits(request_s=0.2, per_token_s=0.0002)))
    result = ask.result(ask.submit(output=(letter,) * 2000, **SLOW_TO_MATCH["nested stars"]))
    assert isinstance(result, InvalidRequest)
    assert result.message.startswith("structured_outputs takes too long to be matched")


@pytest.mark.slow
def test_output_that_the_form_does_not_allow_is_the_fault_of_whoever_sampled_it(
    make_compiler: MakeCompiler, letter: int
) -> None:
    ask = Ask(make_compiler())
    result = ask.result(ask.submit(output=(letter,), choice=("yes", "no")))
    assert isinstance(result, PeerError)
    assert "output position 0 does not fit" in result.message


@pytest.mark.slow
def test_output_longer_than_a_message_is_replayed(make_compiler: MakeCompiler, letter: int) -> None:
    ask = Ask(make_compiler(GrammarLimits()))
    grammar = ask.grammar(ask.submit(output=(letter,) * 20_000, regex="a{20001}"))
    assert grammar.is_prompt
    assert not grammar.has_ended
    allowed = grammar.allowed(0.0)
    assert allowed is not None
    assert np.flatnonzero(np.unpackbits(allowed, bitorder="little")).tolist() == [letter]


@pytest.mark.few(1)
@pytest.mark.parametrize("compile_s", [1.0, 3.0])
def test_a_compile_that_is_given_up_frees_its_place(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch, compile_s: float
) -> None:
    monkeypatch.setattr(grammar_compiler, "WAIT_FACTOR", HANG_S)  # it gets its CPU time, however busy the machine is
    ask = Ask(make_compiler(GrammarLimits(compile_s=compile_s), num_compiling=1))
    ask.grammar(ask.submit(choice=("no", "yes"))).close()  # the fork server is there
    slow = ask.submit(**SLOW_TO_COMPILE)
    quick = ask.submit(choice=("yes", "no"))
    result = ask.result(slow)
    assert isinstance(result, InvalidRequest)
    assert f"could not be compiled within {compile_s:g} s of CPU time" in result.message
    ask.grammar(quick).close()
    # the fork server, and those of the first and the last
    wait_until(lambda: len(children()) == 3, "the process that compiled is still there")


@pytest.mark.slow
def test_one_that_nobody_waits_for_any_more_frees_its_place(make_compiler: MakeCompiler) -> None:
    ask = Ask(make_compiler(GrammarLimits(compile_s=HANG_S), num_compiling=1))
    is_wanted = True
    begun = threading.Event()
    params = StructuredOutputsParams(**SLOW_TO_COMPILE)
    ask.compiler.submit(GrammarJob(params, (EOS,), (), lambda: is_wanted, begun.set, lambda result: None))
    assert begun.wait(HANG_S)
    is_wanted = False
    started = time.monotonic()
    ask.grammar(ask.submit(choice=("yes", "no"))).close()
    assert time.monotonic() - started < HANG_S / 2


@pytest.mark.slow
def test_who_shares_a_killed_process_may_try_elsewhere(
    make_real_engine: Callable[..., Harness], folder: Path, make_compiler: MakeCompiler, letter: int
) -> None:
    limits = GrammarLimits(token_s=10.0, kill_s=0.05, request_s=10.0)
    engine = make_real_engine(folder, grammars=make_compiler(limits), num_blocks=600)
    cheap = asked(300, **EITHER_WAY) | {"logit_bias": {letter: -100.0}, "n": 1}
    other = engine.add(PROMPT, "other", eos=(EOS,), params=cheap | {"max_tokens": 1500})
    while "other" not in engine.answers:
        engine.step()
    engine.add(PROMPT, "hostile", eos=(EOS,), params=asked(**EITHER_WAY) | {"logit_bias": {letter: 100.0}})
    answers = engine.run()
    assert answers["hostile"].error_code == InvalidRequest.code
    if answers[other].error_code:  # unless it had ended by itself
        assert answers[other].error_code == GrammarUnavailable.code


@pytest.mark.slow
def test_masks_that_the_engine_does_not_read_keep_no_request_waiting(make_compiler: MakeCompiler, letter: int) -> None:
    ask = Ask(make_compiler(GrammarLimits(request_s=HANG_S)))
    first = ask.grammar(ask.submit(regex="[a-z]*"))
    others = [first.fork() for _ in range(8_000)]
    for other in others:
        assert other.accept(letter)
    [process] = [child for child in children() if child.ppid() != os.getpid()]
    spent_s = [before := sum(process.cpu_times()[:2])]
    ask.compiler.hosts.flush()
    # more than sockets hold is on its way once the process rests

    def rests() -> bool:
        time.sleep(0.5)
        spent_s.append(sum(process.cpu_times()[:2]))
        return spent_s[-1] == spent_s[-2] > before

    wait_until(rests, "it does not rest")
    late = ask.grammar(ask.submit(regex="[a-z]*"))
    assert late.allowed(0.0) is not None
    give_up_at = time.monotonic() + HANG_S
    assert all(other.allowed(give_up_at) is not None for other in others)
    for grammar in (first, late, *others):
        grammar.close()


# ---- whose turn it is, and who shares


def test_tenants_take_turns() -> None:
    jobs = JobQueue()
    made = [
        GrammarJob(StructuredOutputsParams(regex=str(n)), (), (), lambda: True, lambda: None, lambda _: None, tenant)
        for n, tenant in enumerate([b"greedy"] * 5 + [b"modest", b"", b"modest"])
    ]
    for job in made:
        jobs.add(job)
    assert len(jobs) == 8
    order = [job.params.regex for job in iter(jobs.next, None)]
    assert order == ["0", "5", "6", "1", "7", "2", "3", "4"]
    assert not len(jobs)


@pytest.mark.few(1)
@pytest.mark.parametrize("compile_s", [1.0, 3.0])
def test_a_greedy_tenant_does_not_keep_others_waiting(make_compiler: MakeCompiler, compile_s: float) -> None:
    ask = Ask(make_compiler(GrammarLimits(compile_s=compile_s), num_compiling=1))
    greedy = [ask.submit(b"greedy", regex=SLOW_TO_COMPILE["regex"] + "b" * n) for n in range(20)]
    modest = ask.submit(b"modest", choice=("yes", "no"))
    ask.grammar(modest).close()
    begun_before = [number for number in greedy if number in ask.begun[: ask.begun.index(modest)]]
    assert len(begun_before) <= 2


@pytest.mark.slow
def test_one_form_of_one_tenant_is_compiled_once(make_compiler: MakeCompiler) -> None:
    ask = Ask(make_compiler())
    grammars = [ask.grammar(ask.submit(tenant, choice=("yes", "no"))) for tenant in (b"a", b"a", b"b", b"a")]
    assert len(children()) == 3
    for grammar in grammars:
        grammar.close()


@pytest.mark.slow
def test_processes_that_nobody_uses_are_kept_within_bounds(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_IDLE_PROCESSES", 2)
    ask = Ask(make_compiler(max_processes=3))
    for n in range(6):
        grammar = ask.grammar(ask.submit(choice=(f"choice {n}",)))
        grammar.close()
        ask.compiler.hosts.flush()
    ask.grammar(ask.submit(choice=("choice 5",))).close()
    wait_until(lambda: len(children()) <= 4, "more processes than may be kept")


# ---- no process is left


def test_close_ends_every_process_and_leaves_no_zombie(make_compiler: MakeCompiler) -> None:
    ask = Ask(make_compiler())
    ask.grammar(ask.submit(choice=("yes", "no")))
    busy = ask.submit(**SLOW_TO_COMPILE)
    wait_until(lambda: busy in ask.begun, "its turn did not come")
    before = children()
    assert len(before) >= 2
    ask.compiler.close()
    wait_until(lambda: not any(process.is_running() for process in before), "a process is left")


def test_a_killed_worker_takes_its_processes_with_it(folder: Path) -> None:
    program = f"""
import sys, threading
from pathlib import Path
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.grammar import GrammarJob
compiler = GrammarCompiler(Path({str(folder)!r}), {VOCAB_SIZE})
begun = threading.Event()
params = StructuredOutputsParams(regex={SLOW_TO_COMPILE["regex"]!r})
compiler.submit(GrammarJob(params, (2,), (), lambda: True, begun.set, lambda result: None))
begun.wait()
print("begun", flush=True)
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "begun\n"
        below = psutil.Process(worker.pid).children(recursive=True)
        wait_until(lambda: len(psutil.Process(worker.pid).children(recursive=True)) == 2, "no process compiles")
        below = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    wait_until(lambda: not any(is_alive(process) for process in below), "a process outlived its worker")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_fork_server_that_ends_is_started_again(make_compiler: MakeCompiler) -> None:
    ask = Ask(make_compiler())
    grammar = ask.grammar(ask.submit(choice=("yes", "no")))
    [server] = [child for child in children() if child.ppid() == os.getpid()]
    server.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(server), "it lives")
    result = ask.result(ask.submit(choice=("a", "b")))
    if isinstance(result, PdServeError):  # it came before the end was seen
        assert isinstance(result, GrammarUnavailable)
        result = ask.grammar(ask.submit(choice=("a", "b")))
    for each in (grammar, result):
        each.close()


def test_the_processes_know_no_secret(make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_DEPLOYMENT_KEY", "not for clients' texts")
    monkeypatch.setenv("REDIS_PASSWORD", "neither")
    ask = Ask(make_compiler())
    ask.grammar(ask.submit(choice=("yes", "no"))).close()
    for process in children():
        assert not {"PDSERVE_DEPLOYMENT_KEY", "REDIS_PASSWORD"} & process.environ().keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "lower", [0, pytest.param(5, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow)]
)
def test_only_compiling_gives_way_to_others(make_compiler: MakeCompiler, lower: int) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0) + lower
    ask = Ask(make_compiler(GrammarLimits(compile_s=HANG_S)))

    def submit() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), mine)  # of this thread, and of what it starts
        ask.submit(**SLOW_TO_COMPILE)

    service = threading.Thread(target=submit)
    service.start()
    service.join()

    def priorities() -> list[int]:
        compiling = [child for child in children() if child.ppid() != os.getpid()]
        return sorted(
            os.getpriority(os.PRIO_PROCESS, int(thread.name))
            for process in compiling
            for thread in Path(f"/proc/{process.pid}/task").iterdir()
        )

    expected = [min(mine, 19), min(mine + 10, 19)]
    wait_until(lambda: priorities() == expected, f"priorities are not {expected}")


# ---- masks that come late


@pytest.mark.parametrize("num_blocks", [200, 7], ids=["room", "preempted"])
@pytest.mark.parametrize("patience", [1, 2])
def test_i5_a_late_mask_changes_no_token(make_engine: Callable[..., Harness], patience: int, num_blocks: int) -> None:
    form = Form((1, 2, 3, 4), (5, 6, 7), 4, 9)
    compiler = HesitantCompiler()
    compiler.patience = patience
    engine = make_engine(grammars=compiler, num_blocks=num_blocks, max_model_len=28, max_num_batched_tokens=8)
    prompts = {f"r{n}": [n] * 9 for n in range(3)}
    for name, prompt in prompts.items():
        params = {"temperature": 1.0, "seed": 3, "max_tokens": 18, "structured_outputs": form.params}
        engine.add(prompt, name, eos=(HASH_EOS,), params=params)
    plain = engine.add([9] * 8, params={"max_tokens": 12})
    for _ in range(2000):
        if not engine.scheduler.requests:
            break
        engine.step()
        pass_time(engine)
    assert not engine.scheduler.requests
    for name, prompt in prompts.items():
        assert engine.answers[name].token_ids == form.answer(prompt, 18, temperature=1.0, seed=3)
    assert len(engine.answers[plain].token_ids) == 12
    assert HASH_VOCAB_SIZE == 64


# ---- the place in the queue


def test_a_grammar_costs_no_place_in_the_queue(make_engine: Callable[..., Harness]) -> None:
    compiler = LateCompiler()
    engine = make_engine(grammars=compiler, max_num_seqs=1)
    engine.grammar_wait_s = 0.0
    form = Form((1, 2), (3, 4), 1, 1)
    running = engine.add([5] * 8, "running", params={"max_tokens": 6})
    engine.step()
    engine.add([6] * 8, "first", eos=(HASH_EOS,), params={"max_tokens": 4, "structured_outputs": form.params})
    engine.add([7] * 8, "second", params={"max_tokens": 4})
    engine.add([8] * 8, "third", params={"max_tokens": 4})
    engine.step()
    assert running in engine.scheduler.requests
    compiler.release()
    ended: list[str] = []
    while engine.scheduler.requests:
        before = set(engine.scheduler.requests)
        engine.step()
        ended += sorted(before - set(engine.scheduler.requests))
    assert ended == ["running", "first", "second", "third"]


@pytest.mark.slow
def test_a_fork_server_whose_worker_was_killed_ends_without_a_traceback(folder):
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    command = [
        sys.executable,
        "-P",
        "-m",
        "pdserve.engine.structured_outputs.grammar_process",
        str(its.fileno()),
        str(folder),
        str(VOCAB_SIZE),
        "16",
    ]
    ended = subprocess.run(command, pass_fds=(its.fileno(),), capture_output=True, text=True, timeout=HANG_S)
    its.close()
    assert (ended.returncode, ended.stderr) == (0, "")
