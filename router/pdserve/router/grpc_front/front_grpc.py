"""The gRPC front end: `InferenceService`, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc.aio
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.common.address.peer_address import peer_host
from pdserve.common.errors import Cancelled, DeadlineExceeded, InvalidRequest, PdServeError
from pdserve.common.method_handler import Context
from pdserve.common.net.health_probe import LIVE_SERVICE, READY_SERVICES
from pdserve.common.net.public_server import make_public_server
from pdserve.common.net.rpc import abort_with, metadata_values
from pdserve.common.request.sampling_params import RequestOutputKind
from pdserve.common.request.wire.params_wire import sampling_from_wire, verify_entries
from pdserve.common.tasks.first_done import first_of
from pdserve.router.grpc_front.audio_prompt import AUDIO_FIELD, audio_prompt
from pdserve.router.grpc_front.embed_servicer import (
    CALLER,
    call_fields,
    caller,
    truncation_of,
)
from pdserve.router.grpc_front.generate_response import generate_response
from pdserve.router.grpc_front.health_servicer import HealthServicer
from pdserve.router.grpc_front.pooling_servicer import PoolingServicer
from pdserve.router.grpc_front.request_fields import beam_params, chat_input, verify_chat_counts
from pdserve.router.grpc_front.whole_answer import room_for, write_whole
from pdserve.router.requests.answer_reader import AnswerReader, with_visible_markers
from pdserve.router.requests.fields.output_constraint import OutputConstraint
from pdserve.router.requests.fields.prompt_embeds_field import read_embeds
from pdserve.router.requests.generation import Generation
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.output_pump import OutputPump
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.requests.session import ClientSession
from pdserve.text.outputs.merged_outputs import merged
from pdserve.text.outputs.request_output import CompletionOutput
from pdserve.text.prompt import LengthRule, Prompt, TextInput, TokenInput
from pdserve.text.prompt_preparer import embeds_fields
from pdserve.v1 import inference_pb2, request_pb2
from pdserve.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server

SERVICE_NAME = "pdserve.v1.InferenceService"
_TOKENS_ON_LOOP = 128
"""Tokens up to which an answer's message is made in the event loop."""
_TOKEN_BYTES = 1024
"""Cost of a token with log-probabilities in a message, in bytes of a body that take the same time."""


class InferenceServicer(PoolingServicer):
    """Serves clients over gRPC."""

    def __init__(self, inference: Inference) -> None:
        super().__init__(inference)
        self._hanging_up: set[asyncio.Task[None]] = set()

    async def authenticate(self, context: Context) -> None:
        """Authenticate a call before its messages are read, in the task that serves it.

        Raises: Unauthenticated, InvalidRequest.
        """
        with self.inference.telemetry.count_rejections():
            authorizations = metadata_values(context, "authorization")
            CALLER.set(await self.inference.keys.authenticate(authorizations, peer_host(context.peer())))

    async def decode(self, data: bytes, parse: Callable[[bytes], Any]) -> Any:
        """Decode a message for the server. Raises: InvalidRequest, BodyTooLarge."""
        with self.inference.telemetry.count_rejections():
            caller()
            return await self.inference.bodies.message(data, parse)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        # it writes to `context` itself: a generator, and each one around it, would be resumed for each token
        with self.inference.telemetry.count_rejections():
            client = caller()
            client_request = await self._read(request, context)
            generation = self.inference.generation([client_request], stream=_streams(request), client=client)
        generation.on_stalled = lambda error: self._hang_up(context, error)
        async with generation:
            await self._answer(generation, client_request, request, context)

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[inference_pb2.GenerateRequest], context: Context
    ) -> None:
        refusals = self.inference.telemetry.count_rejections
        with refusals():
            client = caller()
            session_id = uuid.uuid4().hex
            session = self.inference.session(session_id, client)
        is_first = True
        try:
            while (request := await self._next_turn(request_iterator, session)) is not None:
                with refusals():
                    turn = await self._read(request, context, session)
                    stream = _streams(request)
                    generation = self.inference.turn(session, session_id, turn, stream=stream, client=client)
                generation.on_stalled = lambda error: self._hang_up(context, error)
                async with generation:
                    await self._answer(generation, turn, request, context, headers=is_first)
                is_first = False
        finally:
            session.close()

    def _hang_up(self, context: Context, error: PdServeError) -> None:
        """End a call whose handler will be cancelled while it waits for the client to read."""

        async def tell() -> None:
            # AbortError is the normal end of `abort`; the others mean that the client has disconnected
            with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
                await abort_with(context, error)

        telling = asyncio.create_task(tell())
        self._hanging_up.add(telling)
        telling.add_done_callback(self._hanging_up.discard)

    async def _next_turn(
        self, requests: AsyncIterator[inference_pb2.GenerateRequest], session: ClientSession
    ) -> inference_pb2.GenerateRequest | None:
        """The client's next message; None if the client has closed its side. Raises: the error that ends the session."""
        reading = asyncio.ensure_future(_next(requests))
        ends = [asyncio.ensure_future(end) for end in (session.ended(), self.inference.admission.until_closed())]
        # the worker limits the idle time of an open session
        timeout_s = self.inference.settings.limits.request_timeout_s if session.worker is None else None
        async with first_of(reading, *ends, timeout_s=timeout_s):
            if reading.done():
                return reading.result()
            for end in ends:
                if end.done():
                    end.result()
        raise DeadlineExceeded(f"the session's first message did not come within {timeout_s:g} s")

    async def _answer(
        self,
        generation: Generation,
        asked: ClientRequest,
        request: inference_pb2.GenerateRequest,
        context: Context,
        *,
        headers: bool = True,
    ) -> None:
        """Write the answer's messages. headers: True if response headers have not been sent."""
        stream, kind = generation.stream, _output_kind(request)
        metadata = tuple(generation.answer_headers.items())
        context.set_trailing_metadata(metadata)
        if kind is RequestOutputKind.FINAL_ONLY:
            await stream.until_whole()
        else:
            await stream.until_ready()
        outputs = stream.take_now()
        if headers:
            # not before the first token, since a proxy may retry a call that fails without headers
            await context.send_initial_metadata(metadata)
        so_far: list[CompletionOutput] = []
        reader = self._reader(asked, request)

        async def write(outputs: list[CompletionOutput], *, is_end: bool = False) -> None:
            nonlocal so_far, reader
            if kind is RequestOutputKind.CUMULATIVE:
                new = {output.index for output in outputs}
                so_far = merged([*so_far, *outputs])
                outputs = [output for output in so_far if output.index in new]
                # each message has the whole answer
                reader = self._reader(asked, request)
            for output in outputs:
                last = is_end and output is outputs[-1]
                num_tokens = len(output.token_ids) + len(output.prompt_logprobs or ())
                if num_tokens <= _TOKENS_ON_LOOP:
                    response = generate_response(generation, output, request.sampling, reader, last=last)
                else:
                    make = partial(generate_response, generation, output, request.sampling, reader, last=last)
                    response = await self.inference.bodies.in_background_pool(_TOKEN_BYTES * num_tokens, make)
                if kind is RequestOutputKind.FINAL_ONLY:
                    async with room_for(self.inference.bodies.unread, response.ByteSize()) as room:
                        await write_whole(context, response, room)
                    continue
                try:
                    await context.write(response)
                except grpc.aio.InternalError:
                    raise Cancelled("the client left") from None

        await write(await OutputPump(stream, generation.num_choices, write).run(outputs), is_end=True)

    def _reader(self, asked: ClientRequest, request: inference_pb2.GenerateRequest) -> AnswerReader | None:
        """A reader of the answer; None if the client wants its text as it is."""
        return AnswerReader.of(asked, self.inference.parsers) if request.chat.parse_answer else None

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        limits = self.inference.limits()
        return inference_pb2.GetModelResponse(
            model=self.inference.models.base,
            adapters=self.inference.models.adapters(caller()),
            max_model_len=limits.max_model_len if limits else 0,
            vocab_size=limits.vocab_size if limits else self.inference.tokenizer.vocab_size,
            model_fingerprint=self.inference.model_fingerprint(),
            hidden_size=self.inference.hidden_size(),
            num_labels=self.inference.num_labels(),
        )

    async def _read(
        self, request: inference_pb2.GenerateRequest, context: Context, session: ClientSession | None = None
    ) -> ClientRequest:
        """The request in a message; a large one is read in a thread. Raises: InvalidRequest, NotFound."""
        lora_name = self.inference.models.lora_name(request.model, caller())
        if session is not None and session.token_ids and request.model and lora_name != session.lora_name:
            began = session.lora_name or self.inference.models.base
            raise InvalidRequest(f"model is {request.model[:128]!r}, and the session began with {began!r}", "model")
        call = call_fields(self.inference, context, request.client_request_id)._replace(lora_name=lora_name)
        build = partial(self._client_request, request, call, session)
        return await self.inference.bodies.in_background_pool(request.ByteSize(), build)

    def _client_request(
        self, request: inference_pb2.GenerateRequest, call: CallFields, session: ClientSession | None
    ) -> ClientRequest:
        sampling = request.sampling
        self._verify_counts(request)
        goes_on = session is not None and bool(session.token_ids)
        if session is not None:
            _verify_turn(request, goes_on)
        if sampling.bad_words_token_ids:
            raise InvalidRequest(
                "sampling.bad_words_token_ids is made here; send sampling.bad_words", "sampling.bad_words_token_ids"
            )
        defaults = {} if request.use_beam_search else self.inference.tokenizer.generation_defaults
        params = sampling_from_wire(sampling, defaults)
        form, max_tool_calls = OutputConstraint(params.structured_outputs), None
        is_sound = request.WhichOneof("prompt") == "audio"
        if is_sound:
            prompt: Prompt | None = audio_prompt(request, self.inference.preparation)
        else:
            prompt = _prompt(request, goes_on, self.inference.bodies.embeds_len)
        if prompt is None:
            prompt, form, max_tool_calls = chat_input(request.chat, form, self.inference.parsers.forced_calls)
        form.verify()
        params = msgspec.structs.replace(params, structured_outputs=form.params)
        drafts = request.speculative_tokens if request.HasField("speculative_tokens") else None
        asked = ClientRequest(
            prompt=prompt,
            field=AUDIO_FIELD if is_sound else "session" if goes_on else request.WhichOneof("prompt") or "prompt",
            sampling_params=params,
            beams=beam_params(request, params, form),
            constraint_field=form.field,
            max_tool_calls=max_tool_calls,
            max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
            max_tokens_field="sampling.max_tokens",
            cache_salt=request.cache_salt or None,
            priority=request.priority,
            truncation=truncation_of(request),
            **call._replace(data_parallel_rank=_rank(request))._asdict(),
            **({"speculative_tokens": drafts} | embeds_fields(prompt)),
        )
        return with_visible_markers(asked, self.inference.parsers) if request.chat.parse_answer else asked

    def _verify_counts(self, request: inference_pb2.GenerateRequest) -> None:
        """Raises: InvalidRequest for too many entries of a field, before they are converted."""
        verify_chat_counts(request.chat, self.inference.bodies.model_len)
        limits = self.inference.limits()
        truncates = request.HasField("truncate_prompt_tokens")
        if request.WhichOneof("prompt") == "tokens" and limits is not None and not truncates:
            LengthRule(limits.max_model_len).verify(len(request.tokens.token_ids), "tokens")
        verify_entries(request.sampling, limits.vocab_size if limits is not None else None)


_FIRST_TURN_ONLY = ("cache_salt", "client_request_id", "priority")


def _verify_turn(request: inference_pb2.GenerateRequest, goes_on: bool) -> None:
    """Raises: InvalidRequest for fields that a session's turn does not support."""
    if request.use_beam_search:
        raise InvalidRequest("use_beam_search is true, but a session has one sequence", "use_beam_search")
    if request.WhichOneof("prompt") == "audio":
        raise InvalidRequest("audio is given, and the prompt of a session has no sound", "audio")
    for field in ("n", "best_of"):
        if getattr(request.sampling, field) > 1:
            raise InvalidRequest(f"sampling.{field} is above 1, but a session has one sequence", f"sampling.{field}")
    given = [field for field in _FIRST_TURN_ONLY if getattr(request, field)]
    given += [field for field in ("chat", "data_parallel_rank", "speculative_tokens") if request.HasField(field)]
    for field in given if goes_on else ():
        raise InvalidRequest(f"{field} may only come with a session's first message", field)


async def _next(requests: AsyncIterator[inference_pb2.GenerateRequest]) -> inference_pb2.GenerateRequest | None:
    return await anext(requests, None)


def _output_kind(request: inference_pb2.GenerateRequest) -> RequestOutputKind:
    """The output kind. Raises: InvalidRequest if `stream` and `output_kind` contradict each other."""
    asked = request.sampling.output_kind
    if asked == request_pb2.OUTPUT_KIND_UNSPECIFIED:
        return RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    if request.stream and asked == request_pb2.OUTPUT_KIND_CUMULATIVE:
        return RequestOutputKind.CUMULATIVE
    if request.stream and asked == request_pb2.OUTPUT_KIND_DELTA:
        return RequestOutputKind.DELTA
    if asked == request_pb2.OUTPUT_KIND_DELTA:
        raise InvalidRequest("sampling.output_kind is DELTA, which needs stream to be true", "sampling.output_kind")
    return RequestOutputKind.FINAL_ONLY


def _rank(request: inference_pb2.GenerateRequest) -> int | None:
    return request.data_parallel_rank if request.HasField("data_parallel_rank") else None


def _streams(request: inference_pb2.GenerateRequest) -> bool:
    """True if the client reads the answer while it is generated."""
    return _output_kind(request) is not RequestOutputKind.FINAL_ONLY


def _prompt(request: inference_pb2.GenerateRequest, goes_on: bool, embeds_len: int) -> Prompt | None:
    """The request's prompt; None for a chat. goes_on: True if it follows earlier turns of a session.

    embeds_len: tokens of a prompt that is embeddings, at most; 0: these are refused. Raises: InvalidRequest.
    """
    match request.WhichOneof("prompt"):
        case "text":
            return TextInput(request.text.text, add_special_tokens=not goes_on)
        case "chat":
            return None
        case "tokens":
            return TokenInput(list(request.tokens.token_ids))
        case "embeds":
            return read_embeds(request.embeds.safetensors, "embeds", embeds_len)
        case _:
            raise InvalidRequest("prompt is missing: one of text, chat, tokens and audio is needed", "prompt")


class GrpcFront:
    """The gRPC server with its services; `bind` it with `common.rpc.bind`, then start it."""

    def __init__(self, inference: Inference, max_connections: int, *, reuse_port: bool = False) -> None:
        """max_connections: most connections at a time; further ones are closed at once. reuse_port: as of `make_public_server`."""
        servicer = InferenceServicer(inference)
        self.server = make_public_server(
            servicer.authenticate,
            servicer.decode,
            inference.bodies.budget,
            max_request_bytes=inference.bodies.max_request_bytes,
            max_connections=max_connections,
            read_timeout_s=inference.bodies.timeout_s,
            reuse_port=reuse_port,
        )
        self._inference = inference
        self._health = HealthServicer()
        add_InferenceServiceServicer_to_server(servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        inference.fleet.listeners.append(self._show_health)

    async def start(self) -> None:
        self._show_health()
        self._health.set(LIVE_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()

    def leave(self) -> None:
        """Refuse new calls; running ones continue."""
        self._health.leave()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls; open calls may continue for `grace_s`."""
        self._inference.fleet.listeners.remove(self._show_health)
        self.leave()
        await self.server.stop(grace_s)

    def _show_health(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        for name in (*READY_SERVICES, SERVICE_NAME):
            self._health.set(name, statuses.SERVING if self._inference.healthy else statuses.NOT_SERVING)
