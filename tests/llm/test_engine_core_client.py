"""The contract of `EngineCoreClient`: an engine in this process and one in its own do the same."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import Cancelled, ConfigError, InternalError, InvalidRequest, PeerError, WorkerLost
from pdserve.common.ipc import frames as socket_frames
from pdserve.common.ipc.child import _LoopThread
from pdserve.common.ipc.frames import MAX_FRAME_BYTES, receive_frame, send_frame
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from pdserve.common.request.multimodal import MultiModalFeatureSpec, PlaceholderRange
from pdserve.common.request.sampling_params import NamedLogitsProcessor, SamplingParams
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.client import messages, process_client
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.client.inproc_client import InprocClient
from pdserve.engine.client.loaded_engine import LoadedEngine, local_hasher
from pdserve.engine.client.process_client import ENGINE_PROGRAM, ProcessClient
from pdserve.engine.executor.executor import SingleDeviceExecutor
from pdserve.engine.output_stream import engine_error
from pdserve.engine.request_messages import encode, unsendable
from tests.support.engine.forked_engine import BUG, FATAL_TOKEN, fail_at_fatal_token, start_failing, start_forked
from tests.support.engine.llm_requests import prompts_of
from tests.support.models.oracle import Oracle
from tests.support.run.waiting import HANG_S

SETTINGS = WorkerSettings(dtype="float32", block_size=4, num_blocks=128, max_model_len=256, max_num_batched_tokens=64)
BOTH = pytest.mark.parametrize("kind", [InprocClient, ProcessClient])
MakeClient = Callable[..., EngineCoreClient]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "start_program", start_forked)


@pytest.fixture
def make_client(folder: Path) -> Iterator[MakeClient]:
    made: list[EngineCoreClient] = []

    def make(kind: type, at: Path = folder) -> EngineCoreClient:
        if kind is ProcessClient:
            made.append(ProcessClient.load(at, SETTINGS))
        else:
            made.append(InprocClient(LoadedEngine.load(at, SETTINGS)))
        return made[-1]

    yield make
    for client in made:
        client.close()


def request(name: str, prompt: Sequence[int], n: int = 1, **params: Any) -> EngineCoreRequest:
    """Greedy, 8 tokens."""
    hasher = local_hasher(SETTINGS.block_size)
    root = hasher.root("any")
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(
            **({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "seed": 1} | params)
        ),
        block_hashes=hasher.extend(root, [token for token in prompt if token >= 0]),
        hash_root=root,
        n=n,
    )


class Answers:
    """The tokens of each sequence, in order and without a gap, and its last output."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.last: dict[tuple[str, int], EngineCoreOutput] = {}

    def add(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.last, f"{key} has an output after its end"
            tokens = self.tokens.setdefault(key, [])
            assert output.first_position == len(tokens)
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                self.last[key] = output

    def error(self, name: str) -> Exception:
        return engine_error(self.last[name, 0])


def read(client: EngineCoreClient, num_ends: int, answers: Answers | None = None) -> Answers:
    """Outputs until so many sequences have ended."""
    answers = answers or Answers()
    while len(answers.last) < num_ends:
        answers.add(client.get_output().outputs)
    return answers


@BOTH
def test_requests_run_together_and_each_answer_is_whole(make_client: MakeClient, oracle: Oracle, kind: type) -> None:
    client, prompts = make_client(kind), prompts_of([3, 30, 70])
    for number, prompt in enumerate(prompts):
        client.add_request(request(str(number), prompt))
    client.add_request(request("several", prompts[0], n=3, temperature=1.0, logprobs=2))
    answers = read(client, 6)
    for number, prompt in enumerate(prompts):
        oracle.check(prompt, answers.tokens[str(number), 0])
        assert answers.last[str(number), 0].finish_reason is FinishReason.LENGTH
    assert [len(answers.tokens["several", index]) for index in range(3)] == [8, 8, 8]
    assert len({tuple(answers.tokens["several", index]) for index in range(3)}) > 1
    assert client.utility("check_pool") is True


@pytest.mark.few(1)
@BOTH
def test_aborted_requests_and_ended_sequences_end_alone(make_client: MakeClient, oracle: Oracle, kind: type) -> None:
    client, prompts = make_client(kind), prompts_of([20, 21, 22])
    for name, prompt in zip("abc", prompts, strict=True):
        client.add_request(request(name, prompt, max_tokens=8 if name == "c" else 200))
    answers = Answers()
    while len(answers.tokens) < 3:
        answers.add(client.get_output().outputs)
    client.abort_requests(["a", "unknown"])
    client.end_sequence("b", 0)
    client.end_sequence("unknown", 0)
    read(client, 3, answers)
    reasons = [answers.last[name, 0].finish_reason for name in "abc"]
    assert reasons == [FinishReason.ABORT, FinishReason.STOP, FinishReason.LENGTH]
    assert len(answers.tokens["a", 0]) < 200
    oracle.check(prompts[2], answers.tokens["c", 0])
    assert client.utility("check_pool") is True


@pytest.mark.few(1)
@BOTH
def test_a_bad_request_ends_alone_and_names_its_field(make_client: MakeClient, oracle: Oracle, kind: type) -> None:
    client, [good] = make_client(kind), prompts_of([9])
    bad = {
        "prompt_token_ids": request("prompt_token_ids", [5, 10**6]),
        "top_p": request("top_p", good, top_p=2.0),
        "n": request("n", good, n=65),
        "logits_processors": request(
            "logits_processors", good, logits_processors=(NamedLogitsProcessor(name="nobody"),)
        ),
        "remote_prefill": msgspec.structs.replace(request("remote_prefill", good), remote_prefill=True),
        "transfer_source": msgspec.structs.replace(request("transfer_source", good), transfer_source=True),
    }
    client.add_request(request("good", good))
    for one in bad.values():
        client.add_request(one)
    answers = read(client, 1 + len(bad))
    for field in bad:
        error = answers.error(field)
        assert isinstance(error, InvalidRequest)
        assert (error.field, field in str(error)) == (field, True)
    oracle.check(good, answers.tokens["good", 0])


@pytest.mark.few(1)
@BOTH
def test_utilities(make_client: MakeClient, kind: type) -> None:
    client, [prompt] = make_client(kind), prompts_of([41])
    cached = []
    for name in ("first", "again", "reset"):
        if name == "reset":
            assert client.utility("reset_prefix_cache") is True
        client.add_request(request(name, prompt))
        cached.append(read(client, 1).last[name, 0].num_cached_tokens)
    assert cached == [0, 40, 0]
    client.add_request(request("open", prompt, max_tokens=200))
    client.get_output()
    assert client.utility("reset_prefix_cache") is False
    stats = client.utility("get_stats")
    assert (stats["num_running_reqs"], stats["num_blocks_total"]) == (1, 128)
    with pytest.raises(
        InvalidRequest, match="utility is 'nothing', there are get_stats, reset_prefix_cache, check_pool"
    ):
        client.utility("nothing")
    with pytest.raises(InvalidRequest, match="get_stats has 1 arguments"):
        client.utility("get_stats", {"a": [1]})
    client.abort_requests(["open"])
    while not client.utility("check_pool"):
        client.get_output()


@pytest.mark.few(1)
@BOTH
async def test_in_an_event_loop(make_client: MakeClient, oracle: Oracle, kind: type) -> None:
    client, prompts = make_client(kind), prompts_of([3, 30])
    answers = Answers()
    async with asyncio.timeout(HANG_S):
        for number, prompt in enumerate(prompts):
            client.add_request(request(str(number), prompt))
        while len(answers.last) < 2:
            answers.add((await client.get_output_async()).outputs)
            assert (await client.utility_async("get_stats"))["num_added_reqs"] == 2
        with pytest.raises(InvalidRequest, match="utility is 'nothing'"):
            await client.utility_async("nothing")
        waiting = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0)
        await asyncio.to_thread(client.close)
        with pytest.raises(Cancelled, match="shut down"):
            await waiting
    for number, prompt in enumerate(prompts):
        oracle.check(prompt, answers.tokens[str(number), 0])


@pytest.mark.few(1)
@BOTH
@pytest.mark.parametrize("in_loop", [False, True])
async def test_the_error_that_ends_an_engine_reaches_its_reader(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, kind: type, in_loop: bool
) -> None:
    monkeypatch.setattr(process_client, "start_program", start_failing)
    execute = SingleDeviceExecutor.execute_model
    monkeypatch.setattr(SingleDeviceExecutor, "execute_model", fail_at_fatal_token(execute))
    client = make_client(kind)
    client.add_request(request("open", [5, 6], max_tokens=200))
    client.add_request(request("fatal", [FATAL_TOKEN, 5]))

    async def read_on() -> None:
        while True:
            step = await client.get_output_async() if in_loop else await asyncio.to_thread(client.get_output)
            errors = [engine_error(output) for output in step.outputs if output.error_code]
            assert all(isinstance(error, WorkerLost) and BUG in str(error) for error in errors)

    with pytest.raises(WorkerLost, match=f"log has the details: ValueError: {BUG}"):
        await asyncio.wait_for(read_on(), HANG_S)
    if in_loop or kind is ProcessClient:
        for call in (partial(client.add_request, request("late", [5, 6])), partial(client.utility, "get_stats")):
            with pytest.raises(WorkerLost, match=BUG):
                call()
        client.abort_requests(["open"])


@pytest.mark.few(1)
@BOTH
def test_close_leaves_nothing(make_client: MakeClient, kind: type) -> None:
    make_client(kind).close()  # what the first one of a process imports and starts remains
    threads, sockets = set(threading.enumerate()), open_sockets()
    client = make_client(kind)
    client.add_request(request("open", [5, 6], max_tokens=200))
    answers = Answers()
    answers.add(client.get_output().outputs)
    process_id = client.process_id if isinstance(client, ProcessClient) else None
    client.close()
    client.close()
    assert set(threading.enumerate()) == threads
    assert open_sockets() == sockets
    assert process_id is None or not Path(f"/proc/{process_id}").exists()
    for call in (
        partial(read, client, 2, answers),  # outputs that had arrived come first
        partial(client.utility, "get_stats"),
        partial(client.add_request, request("r", [5])),
    ):
        with pytest.raises(Cancelled, match="the engine was shut down"):
            call()


def open_sockets() -> set[str]:
    names = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return {name for name in names if name.startswith("socket:")}


@BOTH
def test_a_model_that_cannot_be_loaded(make_client: MakeClient, tmp_path: Path, kind: type) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        make_client(kind, tmp_path)


def test_a_killed_process_ends_what_waits(make_client: MakeClient) -> None:
    client = make_client(ProcessClient)
    assert isinstance(client, ProcessClient)
    client.add_request(request("open", [5, 6], max_tokens=200))
    began = time.monotonic()
    os.kill(client.process_id, signal.SIGSTOP)
    call = client.call_utility("get_stats")
    os.kill(client.process_id, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="the engine's process ended by signal 9"):
        read(client, 1)
    with pytest.raises(WorkerLost, match="signal 9"):
        call.result(10)
    with pytest.raises(WorkerLost, match="signal 9"):
        client.add_request(request("late", [5, 6]))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("reads_first", [False, True])
def test_a_process_killed_while_it_loads(monkeypatch: pytest.MonkeyPatch, folder: Path, reads_first: bool) -> None:
    """reads_first: its end is read before its client is made."""

    def start_killed(descriptor: int, module: str) -> Any:
        process = start_forked(descriptor, module)
        process.kill()
        return process

    run = _LoopThread.run

    def run_and_wait(thread: _LoopThread, function: Any) -> Any:
        found = run(thread, function)
        time.sleep(0.5)
        return found

    if reads_first:
        monkeypatch.setattr(_LoopThread, "run", run_and_wait)
    monkeypatch.setattr(process_client, "start_program", start_killed)
    with pytest.raises(WorkerLost, match="ended by signal 9"):
        ProcessClient.load(folder, SETTINGS)


def test_the_process_ends_with_its_client_in_the_middle_of_a_request(folder: Path) -> None:
    """As when the client's process is killed: the kernel closes its end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start_forked(theirs.fileno(), ENGINE_PROGRAM)
        theirs.close()
        send_frame(ours, encode(messages.LoadModel.of(str(folder), SETTINGS, DEVELOPMENT_KEY.secret)))
        asked = request("open", [5, 6], max_tokens=200)
        while not isinstance(next_message(ours), messages.Loaded):
            pass
        send_frame(ours, encode(messages.StartEngine(warm_up=False)))
        send_frame(ours, encode(messages.AddRequest("open", msgspec.Raw(encode(asked)))))
        while not (isinstance(outputs := next_message(ours), EngineCoreOutputs) and outputs.outputs):
            pass
        ours.close()
        assert process.wait(HANG_S) == 0


def next_message(process: socket.socket) -> object:
    payload = receive_frame(process)
    assert payload is not None
    return messages.decode_from_engine(payload)


def test_what_cannot_be_sent_is_refused_by_name(make_client: MakeClient) -> None:
    """In this process these arguments reach the plug-in; msgpack has no integers of more than 64 bits."""
    client = make_client(ProcessClient)
    args = {"args": {"big": 2**70}}
    client.add_request(
        request("r", [5], logits_processors=(NamedLogitsProcessor(name="any", **args),)), is_verified=True
    )
    error = read(client, 1).error("r")
    assert isinstance(error, InvalidRequest)
    assert error.field == "logits_processors"
    assert "logits_processors cannot be sent to the engine's process" in str(error)
    client.add_request(request("negative", [5, -1]))
    error = read(client, 1).error("negative")
    assert isinstance(error, InvalidRequest)
    with pytest.raises(TypeError):
        client.utility("get_stats", object())
    assert client.utility("get_stats")["num_added_reqs"] == 0


def test_the_longest_part_of_a_prompt_that_cannot_be_sent_is_named() -> None:
    with_image = request("r", [5])
    with_image.mm_features = [
        MultiModalFeatureSpec(
            identifier=32 * "0", mm_position=PlaceholderRange(0, 1), grid_thw=(1, 2, 2), data=bytes(48)
        )
    ]
    for given, field in ((with_image, "multi_modal_data"), (request("r", 20 * [5]), "prompt_token_ids")):
        error = unsendable(given, PeerError("a message is too long"))
        assert error.field == field
        assert str(error) == f"{field} cannot be sent to the engine's process: a message is too long"


def test_frames_are_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(PeerError, match=f"4294967295 bytes, at most {MAX_FRAME_BYTES}"):
            receive_frame(theirs)
        monkeypatch.setattr(socket_frames, "MAX_FRAME_BYTES", 10)
        with pytest.raises(PeerError, match="11 bytes, at most 10"):
            send_frame(ours, b"12345678901")
        send_frame(ours, b"1234567890")
        assert receive_frame(theirs) == b"1234567890"
        ours.sendall(b"\x00\x00\x00\x05123")
        ours.close()
        assert receive_frame(theirs) is None


def test_a_failing_utility_is_an_error_of_the_call_alone(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(InprocClient)
    assert isinstance(client, InprocClient)
    with monkeypatch.context() as patched:
        patched.setattr(client.core, "stats", lambda: 1 // 0)
        with pytest.raises(InternalError, match="get_stats failed: ZeroDivisionError"):
            client.utility("get_stats")
    client.add_request(request("r", [5, 6]))
    assert len(read(client, 1).tokens["r", 0]) == 8
