"""Workers without an engine: real gRPC servers that follow a script, and the tokenizer and the text they speak."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pdserve.common.errors import PdServeError
from pdserve.common.kv_layout import KvLayout
from pdserve.common.net.rpc import bind, make_server
from pdserve.common.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.wire.messages import layout_to_wire
from pdserve.common.request.wire.request_bytes import decode_request
from pdserve.common.security.call_guard import CallGuard
from pdserve.common.security.call_proof import CallVerifier
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY, DeploymentKey
from pdserve.common.security.peer_message import COMMAND_BYTES
from pdserve.common.security.tls import ServerTls
from pdserve.common.security.watch_proof import WatchAnswer
from pdserve.v1 import decode_pb2, prefill_pb2, request_pb2, worker_pb2
from pdserve.v1.step_stream_pb2 import Submission
from pdserve.v1.step_stream_pb2_grpc import add_StepStreamServiceServicer_to_server
from pdserve.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from pdserve.worker.step_stream.step_call import StepCall
from pdserve.worker.step_stream.step_stream_servicer import StepStreamServicer
from tests.support.models.kv_layouts import make_layout
from tests.support.run.waiting import HANG_S

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
EOS = len(ALPHABET)
VOCAB_SIZE = len(ALPHABET) + len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAYOUT = make_layout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, model_fingerprint="m" * 32)
MAX_MODEL_LEN = 256
HIDDEN_SIZE = 8
MAX_ANY_LEN = 1 << 20
"""Tokens of a request that a scripted worker takes, whatever its `max_model_len` says."""
TEXT = "abcdefghijklmnopqrstuvwxyz"
"""The text of every fake worker, repeated."""


def save_tokenizer(folder: Path) -> Path:
    """One token a byte, three special ones, a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = Backend(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    (folder / "config.json").write_text("{}")
    return folder


def token(char: str) -> int:
    return ALPHABET.index(char)


def tokens(text: str) -> list[int]:
    return [token(char) for char in text]


def said(num_tokens: int, index: int = 0) -> str:
    """The first `num_tokens` characters of what fake workers say; sequence 1 begins with b."""
    return "".join(itertools.islice(itertools.cycle(TEXT), index, index + num_tokens))


def outputs(
    position: int,
    text: str = "",
    finish: str | None = None,
    token_ids: list[int] | None = None,
    cached: int = 0,
    logprobs: request_pb2.Logprobs | None = None,
    index: int = 0,
) -> request_pb2.Outputs:
    reason = request_pb2.FinishReason.Value(f"FINISH_REASON_{finish.upper() if finish else 'UNSPECIFIED'}")
    return request_pb2.Outputs(
        index=index,
        first_position=position,
        token_ids=tokens(text) if token_ids is None else token_ids,
        finish_reason=reason,
        cached_tokens=request_pb2.CachedTokens(pool=cached) if cached else None,
        logprobs=logprobs,
    )


def decode_outputs(*args: Any, **kwargs: Any) -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(outputs=outputs(*args, **kwargs))


def computed(request: GenerationRequest, *first: request_pb2.Outputs) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(
        computed=prefill_pb2.Computed(
            num_tokens=len(request.given_token_ids),
            request_digest=request.request_digest,
            first_outputs=first,
            moments=[request_pb2.Moment(name="prefill_computed", unix_ns=1)],
        )
    )


PREFILL_ADMITTED = prefill_pb2.PrefillEvent(admitted=prefill_pb2.Admitted())
ADMITTED = decode_pb2.DecodeEvent(admitted=prefill_pb2.Admitted())
LANDED = decode_pb2.DecodeEvent(landed=decode_pb2.Landed(num_blocks=1, transfer_bytes=4096, connector="local"))
LOCALLY = decode_pb2.DecodeEvent(prefilling_locally=decode_pb2.PrefillingLocally())
RELEASED = prefill_pb2.PrefillEvent(ended=prefill_pb2.Ended(how=prefill_pb2.Ended.RELEASED))
ENDED_NEWLY = prefill_pb2.PrefillEvent(ended=prefill_pb2.Ended(how=99))  # type: ignore[arg-type]
REVOKED = prefill_pb2.PrefillEvent(ended=prefill_pb2.Ended(how=prefill_pb2.Ended.REVOKED, cause="drains"))


def needs_prefill(uncached: int = 100) -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(needs_prefill=decode_pb2.NeedsPrefill(uncached_tokens=uncached))


@dataclass
class Call:
    """One call that a worker was asked for."""

    sent: Submission
    request: GenerationRequest
    """As it was sent; of a session, the first turn."""
    later: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    """Later turns of a session that its script has not read."""
    seen: list[GenerationRequest] = field(default_factory=list)
    """The turns that a session's script has read."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Also set when the call just ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    async def turns(self) -> AsyncIterator[GenerationRequest]:
        """A session's turns."""
        while True:
            turn = decode_request(await self.later.get(), MAX_ANY_LEN) if self.seen else self.request
            self.seen.append(turn)
            yield turn


class Ended(NamedTuple):
    """Sequences whose texts are complete."""

    request_id: str
    attempt: int
    indexes: list[int]
    turn: int | None


Script = Callable[["FakeWorker", Call], AsyncIterator[Any]]


def sequences(request: GenerationRequest) -> range:
    """Indexes that are asked for."""
    return range(request.index, request.index + request.n)


async def prefill_well(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
    yield PREFILL_ADMITTED
    position = len(call.request.output_token_ids)
    finish = "length" if position == call.request.sampling_params.output_limit - 1 else None
    await asyncio.sleep(worker.step_s)
    yield computed(
        call.request,
        *(
            outputs(position, said(1, index + position), finish, cached=3, index=index)
            for index in sequences(call.request)
        ),
    )
    if call.sent.prefill.transfer_id:
        await asyncio.sleep(worker.step_s)
        yield RELEASED


async def decode_well(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
    yield ADMITTED
    remote = call.sent.decode.HasField("source")
    if remote:
        await asyncio.sleep(worker.step_s)
        yield LANDED
    start, max_tokens = len(call.request.output_token_ids), call.request.sampling_params.output_limit
    for position in range(start + remote, max_tokens):
        await asyncio.sleep(worker.step_s)
        finish = "length" if position == max_tokens - 1 else None
        for index in sequences(call.request):
            yield decode_outputs(position, said(1, index + position), finish, index=index)


async def well(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
    """What a call of its kind says."""
    events = prefill_well(worker, call) if call.sent.HasField("prefill") else decode_well(worker, call)
    async for event in events:
        yield event


async def session_well(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
    async for turn in call.turns:
        max_tokens = turn.sampling_params.output_limit
        yield ADMITTED
        for position in range(max_tokens):
            await asyncio.sleep(worker.step_s)
            yield decode_outputs(position, TEXT[position % 26], "length" if position == max_tokens - 1 else None)


def embedding(prompt: list[int], dimensions: int | None = None) -> list[float]:
    """The embedding of a prompt at fake workers."""
    size = HIDDEN_SIZE if dimensions is None else dimensions
    return [len(prompt) + (prompt[0] + place) / 16 for place in range(size)]


def classes(token_ids: Sequence[int], num_labels: int) -> list[float]:
    """One number per label; prompts with other tokens have others."""
    return [((sum(token_ids) + 7 * label) % 16) / 16 for label in range(num_labels)]


async def embed_well(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
    await asyncio.sleep(worker.step_s)
    token_ids, pooling = call.request.prompt_token_ids, call.request.pooling_params
    assert pooling is not None
    classified = classes(token_ids, worker.num_labels)
    yield prefill_pb2.PoolingResult(
        values=classified or embedding(token_ids, pooling.dimensions),
        cached_tokens=request_pb2.CachedTokens(pool=min(2, len(token_ids))),
        moments=[request_pb2.Moment(name="prefill_computed", unix_ns=1)],
    )


class FakeWorker(WorkerServiceServicer):
    """One worker. `script` may be replaced at any time; `scripts`, while there are any, are used once each, first."""

    def __init__(
        self,
        role: str,
        fingerprint: str,
        *,
        worker_id: str | None = None,
        layout: KvLayout = LAYOUT,
        key: DeploymentKey = DEVELOPMENT_KEY,
        protocol_version: int = PROTOCOL_VERSION,
        said_role: str | None = None,
        max_local_prefill_tokens: int | None = None,
        epoch: int = 1,
        tls: ServerTls | None = None,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self._tls = tls
        self.role, self.said_role = role, said_role or role
        self.worker_id = worker_id or role
        self.fingerprint, self.layout, self.key = fingerprint, layout, key
        self.protocol_version = protocol_version
        self.max_local_prefill_tokens = max_local_prefill_tokens
        self.epoch = epoch
        self.hidden_size = HIDDEN_SIZE
        self.num_labels = 0
        self.sampler_version = 2
        self.max_request_bytes = MAX_MESSAGE_BYTES - COMMAND_BYTES
        self.data_parallel_rank: int | None = None
        self.max_logprobs = 20
        self.max_n_sequences = 16
        self.interceptors: list[grpc.aio.ServerInterceptor] = []
        """Interceptors of its server, from the next start on; before the guard of calls."""
        self.clock: Callable[[], float] = time.time
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.port = 0
        self.step_s = 0.0
        self.script: Script = well
        self.session_script: Script = session_well
        self.scripts: list[Script] = []
        self.calls: list[Call] = []
        self.num_watches = 0
        self.ended_sequences: asyncio.Queue[Ended] = asyncio.Queue()
        self.met: list[worker_pb2.MeetRequest] = []
        self.num_drains = 0
        """Times that it was asked to drain; it then says so, and goes on."""
        self.roles_asked: list[worker_pb2.SetRoleRequest] = []
        """Each change of role that it was asked for; it then says that it has the role."""
        self.role_error: PdServeError | None = None
        """With which it refuses."""
        self.load = worker_pb2.Load(engine_tick=1)
        self.adapters: dict[str, str] = {}
        """Name -> fingerprint; said in the watch before the first load, and with each `report`."""
        self.ticking = True
        self.blocks: list[worker_pb2.Blocks] = []
        """Changes that go out next, on the watch that asks for them."""
        self._changed = asyncio.Event()
        self._called = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> FakeWorker:
        """Listen; after the first time on the same port, with a new epoch."""
        self.epoch += 1
        guard = CallGuard(CallVerifier(self.key, lambda: (self.worker_id, self.epoch)))
        self._server = make_server(*self.interceptors, guard)
        add_WorkerServiceServicer_to_server(self, self._server)
        kinds = ("prefill", "embed", "decode", "session")
        add_StepStreamServiceServicer_to_server(StepStreamServicer(dict.fromkeys(kinds, self._begin)), self._server)
        self.port = bind(self._server, "127.0.0.1", self.port, self._tls)
        await self._server.start()
        return self

    async def kill(self) -> None:
        """End all calls and the connections."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def live_on(self) -> None:
        """Listen again after `kill`, in the same life: only its connections had been lost."""
        self.epoch -= 1
        await self.start()

    async def called(self, times: int = 1) -> None:
        """Returns when this worker was asked for so many calls."""
        async with asyncio.timeout(HANG_S):
            while len(self.calls) < times:
                self._called.clear()
                await self._called.wait()

    def report(self, **load: Any) -> None:
        """Say this in the watch, now."""
        for name, value in load.items():
            setattr(self.load, name, value)
        self._changed.set()

    def identity(self) -> worker_pb2.Identity:
        """This worker's own description in a watch."""
        return worker_pb2.Identity(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=worker_pb2.Role.Value(f"ROLE_{self.said_role.upper()}"),
            protocol_version=self.protocol_version,
            address=self.address,
            attach_address=self.address,
            layout=layout_to_wire(self.layout),
            tokenizer_fingerprint=self.fingerprint,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_labels=self.num_labels,
            sampler_version=self.sampler_version,
            data_parallel_rank=self.data_parallel_rank,
            num_blocks=100,
            max_local_prefill_tokens=self.max_local_prefill_tokens,
            max_logprobs=self.max_logprobs,
            max_n_sequences=self.max_n_sequences,
            max_num_seqs=64,
            max_request_bytes=self.max_request_bytes,
        )

    async def Watch(self, request_iterator, context):
        request = await anext(request_iterator, None)
        if request is None:
            return
        self.num_watches += 1
        answer = WatchAnswer(self.key, self.identity().SerializeToString(), request, clock=self.clock)
        yield worker_pb2.WatchEvent(welcome=answer.welcome)
        proof = await anext(request_iterator, None)
        if proof is None:
            return
        answer.verify(proof)
        said: dict[str, str] = {}
        while True:
            if said != self.adapters:
                said = dict(self.adapters)
                entries = [worker_pb2.Adapter(name=name, fingerprint=value) for name, value in said.items()]
                yield worker_pb2.WatchEvent(adapters=worker_pb2.Adapters(adapters=entries))
            self.load.engine_tick += self.ticking
            yield worker_pb2.WatchEvent(load=self.load)
            while request.blocks and self.blocks:
                yield worker_pb2.WatchEvent(blocks=self.blocks.pop(0))
            self._changed.clear()
            try:
                async with asyncio.timeout(0.2):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def tell_blocks(self, sequence: int, stored: bytes = b"", removed: bytes = b"", cleared: bool = False) -> None:
        """Say in the watch, now, which blocks this worker holds."""
        self.blocks.append(worker_pb2.Blocks(sequence=sequence, stored=stored, removed=removed, cleared=cleared))
        self._changed.set()

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        self.num_drains += 1
        self.report(draining=True)
        return worker_pb2.DrainResponse()

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Any) -> worker_pb2.SetRoleResponse:
        self.roles_asked.append(request)
        if self.role_error is not None:
            raise self.role_error
        self.report(role=request.role)
        return worker_pb2.SetRoleResponse()

    async def Meet(self, request, context):
        self.met.append(request)
        return worker_pb2.MeetResponse()

    def _begin(self, submission: Submission, call: StepCall) -> None:
        played = Call(submission, decode_request(submission.request, MAX_ANY_LEN))
        kind, script = submission.WhichOneof("call"), None
        if kind == "session":
            script = self.session_script
            call.on_turn = played.later.put_nowait
        elif kind == "embed" and not self.scripts:
            script = embed_well
        call.on_ended_sequences = lambda indexes, turn: self.ended_sequences.put_nowait(
            Ended(played.request.request_id, submission.attempt, list(indexes), turn)
        )
        events = self._play(played, script)
        call.serve(self._stepped(events, call) if kind == "decode" else events)

    async def _stepped(self, events: AsyncGenerator[Any], call: StepCall) -> AsyncGenerator[Any]:
        """Send what is tokens alone in columns, as a worker does."""
        async with contextlib.aclosing(events):
            async for event in events:
                new = event.outputs
                alone = request_pb2.Outputs(index=new.index, first_position=new.first_position, token_ids=new.token_ids)
                if event.HasField("outputs") and new.token_ids and new == alone:
                    call.tokens(new.index, new.first_position, list(new.token_ids))
                else:
                    yield event

    async def _play(self, call: Call, script: Script | None = None) -> AsyncGenerator[Any]:
        self.calls.append(call)
        self._called.set()
        if script is None:
            script = self.scripts.pop(0) if self.scripts else self.script
        events = script(self, call)
        try:
            async for event in events:
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            call.cancelled.set()
            raise
        finally:
            call.ended.set()


def play(*events: object) -> Script:
    """A script of these: events, exceptions to raise, seconds to sleep, functions of (worker, call).

    A function may return an event, None, or something to await.
    """

    async def script(worker: FakeWorker, call: Call) -> AsyncIterator[object]:
        for step in events:
            result: object = step
            if isinstance(step, Exception):
                raise step
            if isinstance(step, (int, float)):
                await asyncio.sleep(step)
                continue
            if callable(step):
                result = step(worker, call)
            if isinstance(result, Awaitable):
                result = await result
            # what a wait returns is no event
            if result is not None and result is not True:
                yield result

    return script


async def forever(worker: FakeWorker, call: Call) -> None:
    """A step that never ends by itself."""
    await asyncio.Event().wait()


def first(text: str = TEXT[0], finish: str | None = None, **kwargs: Any) -> Callable[[FakeWorker, Call], Any]:
    """A step: prefill has computed this request."""
    return lambda worker, call: computed(call.request, outputs(0, text, finish, **kwargs))
