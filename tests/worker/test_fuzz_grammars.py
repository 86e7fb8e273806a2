"""Forms at random in the grammar processes of a real worker, beside a stream that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.common.request.wire.params_wire import sampling_from_wire
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.v1 import request_pb2
from pdserve.worker.worker import Worker
from tests.support.inputs.fuzz_cases import Fuzzer
from tests.support.inputs.random_forms import RandomForms
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.run.waiting import eventually
from tests.support.transfers.worker_pair import Pair, decode_call, door_of, generation_request, running_pair

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(0)]

STEP_S = 0.2
"""CPU time of the engine's thread for one step, at most, as next to any hostile form."""
GAP_S = 0.5
AT_A_TIME = 6
LOOK_EVERY = 15
CALL_S = 120.0
EOS = 2
MAX_LINE_CHARS = 4096
REFUSALS = ("invalid_request", "overloaded", "grammar_unavailable")
LIMITS: dict[str, Any] = {
    "grammar_timeout_s": 3.0, "grammar_token_s": 0.01, "grammar_request_s": 0.2, "grammar_memory_mib": 512,
    "num_blocks": 1200, "max_model_len": 256, "max_num_seqs": 64,
}  # fmt: skip


class Victim:
    """An honest stream, again and again, and the gaps between its tokens."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.longest_gap_s = 0.0
        self.longest_own_gap_s = 0.0
        """Without the time for which this process' threads ran, or waited for a CPU: others have the machine, too. How
        long they run is measured per step and callback."""
        self.tokens: set[tuple[int, ...]] = set()

    async def run(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        busy = Busy()
        while True:
            request = generation_request(self._pair.d, sampling_params=params, deadline=time.monotonic() + CALL_S)
            call = decode_call(self._pair, request)
            token_ids: list[int] = []
            last = 0.0
            async for event in call:
                now, busy_s = time.monotonic(), busy.since_last_s()
                if last:
                    self.longest_gap_s = max(self.longest_gap_s, now - last)
                    self.longest_own_gap_s = max(self.longest_own_gap_s, now - last - busy_s)
                last = now
                token_ids += event.outputs.token_ids
            self.tokens.add(tuple(token_ids))

    def check(self, late_s: float) -> None:
        """late_s: by how much a process that does nothing else ran too late."""
        assert self.longest_own_gap_s < GAP_S + 4 * late_s, self.longest_gap_s
        assert len(self.tokens) <= 1, "its streams differ"
        assert all(len(tokens) == 60 for tokens in self.tokens)


class Busy:
    """For how long threads of this process ran, or could have run and had no processor, since the last look."""

    def __init__(self) -> None:
        self._waited_ns: dict[str, int] = {}
        self._ran_ns = 0

    def since_last_s(self) -> float:
        """All threads together, so that it may be more than the time that has passed."""
        ran_ns, waited_ns = time.process_time_ns(), self._waits()
        # a thread that has ended since is left out: its waits are not known any more
        spent_ns = ran_ns - self._ran_ns + sum(ns - self._waited_ns.get(task, 0) for task, ns in waited_ns.items())
        self._ran_ns, self._waited_ns = ran_ns, waited_ns
        return spent_ns / 1e9

    def _waits(self) -> dict[str, int]:
        waits = {}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                waits[task.name] = int((task / "schedstat").read_text().split()[1])
        return waits


class Metronome:
    """A process that wakes up each 5 ms: what a busy machine gives to others than this one, at this moment."""

    PROGRAM = """
import select, sys, time
longest = 0.0
while True:
    began = time.monotonic()
    asked = select.select([sys.stdin], [], [], 0.005)[0]
    longest = max(longest, time.monotonic() - began - 0.005)
    if asked:
        if not sys.stdin.readline():
            break
        print(longest, flush=True)
"""

    def __enter__(self) -> Metronome:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", self.PROGRAM], stdin=pipe, stdout=pipe, text=True)
        return self

    async def longest_s(self) -> float:
        """How late it ever was."""
        return await asyncio.to_thread(self._ask)

    def _ask(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


class Steps:
    """How long the engine's steps take."""

    def __init__(self, worker: Worker) -> None:
        self.longest_s = 0.0
        self._step = door_of(worker).core.step
        door_of(worker).core.step = self._measured  # type: ignore[method-assign]

    def _measured(self) -> Any:
        began = time.thread_time()
        try:
            return self._step()
        finally:
            self.longest_s = max(self.longest_s, time.thread_time() - began)


@pytest.fixture
async def pair(tiny_checkpoints: Callable[..., Path]) -> AsyncIterator[Pair]:
    async with running_pair(tiny_checkpoints("llama"), **LIMITS) as made:
        yield made
    assert not fork_servers()


def fork_servers() -> list[psutil.Process]:
    """Running fork servers of this process; what another test left as a zombie is none."""
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in running if "grammar_process" in " ".join(child.cmdline())]


async def ask(pair: Pair, form: dict[str, Any], fuzzer: Fuzzer, tokenizer: Tokenizer) -> None:
    """One request with the form. Raises: AssertionError for an end that no form may have."""
    draw = fuzzer.draw
    try:
        structured_outputs = form_of(form)
    except InvalidRequest:
        # more choices than a message may have: no request comes of them
        return
    bias = {draw.randrange(3, 320): 100.0} if draw.random() < 0.5 else {}
    params = SamplingParams(
        temperature=1.0, seed=draw.randrange(1 << 32), n=draw.choice((1, 1, 2, 4)), logit_bias=bias,
        max_tokens=draw.choice((1, 10, 60, 200)), ignore_eos=draw.random() < 0.1,
        structured_outputs=structured_outputs,
    )  # fmt: skip
    request = generation_request(
        pair.d, sampling_params=params, eos_token_ids=(EOS,) if draw.random() < 0.9 else (),
        deadline=time.monotonic() + CALL_S, tenant=draw.choice((b"", b"a", b"b")),
    )  # fmt: skip
    call = decode_call(pair, request)
    leaves_after_s = draw.choice((None, None, None, 0.0, 0.05, 0.5))
    token_ids: dict[int, list[int]] = {}
    ended: set[int] = set()
    try:
        async with asyncio.timeout(leaves_after_s):
            async for event in call:
                token_ids.setdefault(event.outputs.index, []).extend(event.outputs.token_ids)
                if event.outputs.finish_reason == request_pb2.FINISH_REASON_STOP:
                    ended.add(event.outputs.index)
    except TimeoutError:
        call.cancel()
    except PdServeError as error:
        if error.code not in REFUSALS:
            raise AssertionError(f"{fuzzer}: {form} ended with {error.code} {error.message}") from error
    for index in ended:
        text = tokenizer.decode([token for token in token_ids[index] if token != EOS], skip_special_tokens=False)
        assert fits(form, text), (str(fuzzer), form, text)


def form_of(form: dict[str, Any]) -> StructuredOutputsParams | None:
    message = request_pb2.SamplingParams(structured_outputs=request_pb2.StructuredOutputs(**form))
    return sampling_from_wire(message).structured_outputs


def fits(form: dict[str, Any], text: str) -> bool:
    """True if a whole output has the form, as far as this can be checked without a matcher."""
    if "choice" in form:
        return text in form["choice"]
    if "json" in form:
        with contextlib.suppress(ValueError):
            json.loads(text)
            return True
        return False
    return True


async def test_forms(
    pair: Pair, fuzzer: Fuzzer, caplog: pytest.LogCaptureFixture, tiny_checkpoints: Callable[..., Path]
) -> None:
    tokenizer, forms = Tokenizer.from_folder(tiny_checkpoints("llama")), RandomForms(fuzzer)
    caplog.set_level(logging.INFO)
    await ask(pair, {"choice": ["yes"]}, Fuzzer(0.0, seed=5), tokenizer)
    [server] = fork_servers()
    victim, steps = Victim(pair), Steps(pair.d)
    running = asyncio.create_task(victim.run())
    with stopped(running), Metronome() as metronome, LoopWatch() as watch:
        fuzzer.watched_by(watch)
        for number in fuzzer.cases():
            batch = [forms.form() for _ in range(AT_A_TIME)]
            await asyncio.gather(*(ask(pair, form, fuzzer, tokenizer) for form in batch))
            assert not running.done(), running
            assert watch.longest_s < LOOP_S, (str(fuzzer), batch, watch.callback)
            assert steps.longest_s < STEP_S, (str(fuzzer), batch)
            if number % LOOK_EVERY == 0:
                await look(victim, metronome, caplog)
        await eventually(lambda: victim.tokens or running.done(), "a whole stream, where there was time for few cases")
        assert victim.tokens, running
        await look(victim, metronome, caplog)
        late_s = await metronome.longest_s()
    await idle(pair.d)
    assert fork_servers() == [server], "it has ended"
    fuzzer.check_memory()
    print(
        f"longest gap {victim.longest_gap_s:.3f} s, {victim.longest_own_gap_s:.3f} s in which nothing of this process could "
        f"run, a process beside was late by {late_s:.3f} s, longest step {steps.longest_s:.3f} s"
    )


@contextlib.contextmanager
def stopped(task: asyncio.Task[None]) -> Iterator[None]:
    """Also where a test fails while it runs."""
    try:
        yield
    finally:
        task.cancel()


async def look(victim: Victim, metronome: Metronome, caplog: pytest.LogCaptureFixture) -> None:
    victim.check(await metronome.longest_s())
    for record in caplog.records:
        assert record.levelno < logging.ERROR, caplog.text[-4000:]
        assert "fork server" not in record.getMessage()
        assert len(record.getMessage()) < MAX_LINE_CHARS
    caplog.clear()
    await asyncio.to_thread(gc.collect)


async def idle(worker: Worker) -> None:
    async with asyncio.timeout(CALL_S):
        while door_of(worker).core.scheduler.requests:  # noqa: ASYNC110 - the engine's thread tells nobody
            await asyncio.sleep(0.02)
    door_of(worker).core.scheduler.check(idle=True)
