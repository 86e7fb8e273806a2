"""`AsyncLLM`: answers as streams, many at a time. The engine runs in a thread or in a process of its own."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self, Unpack

from pdserve.common.errors import Cancelled, InvalidRequest, PdServeError
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.lora_request import LoRARequest
from pdserve.common.request.pooling_params import PoolingParams, PoolingTask
from pdserve.common.request.sampling_params import RequestOutputKind, SamplingParams
from pdserve.engine.output_stream import OutputStream
from pdserve.engine.stats.stat_logger import StatLoggerFactory
from pdserve.llm.engine_options import EngineArgs, EngineOptions
from pdserve.llm.local_engine import LocalEngine
from pdserve.llm.pooling_output import EmbeddingRequestOutput, PoolingOutput, PoolingRequestOutput
from pdserve.llm.requests.local_request import LocalPooling, LocalRequest, ValidRequest
from pdserve.llm.requests.prompts import (
    ChatKwargs,
    Conversation,
    PromptType,
    PromptWithSalt,
    TokenizationKwargs,
    as_conversation,
    as_prompt,
    one_of_both,
)
from pdserve.llm.requests.request_factory import RequestFactory
from pdserve.llm.requests.request_output_collector import RequestOutputCollector
from pdserve.llm.requests.request_streams import RequestStreams
from pdserve.llm.requests.streaming_session import StreamingInput, StreamingSession, first_input
from pdserve.text.outputs.request_output import RequestOutput
from pdserve.text.tokenization.tokenizer import Tokenizer


class AsyncLLM:
    """A model and its engine, for one event loop: that of the first request.

    async with AsyncLLM("demo") as llm:
        async for answer in llm.generate("The capital of France is", SamplingParams(temperature=0)):
            print(answer.outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        seed: int | None = 0,
        engine_process: bool = False,
        disable_log_stats: bool = False,
        stat_loggers: Sequence[str | StatLoggerFactory] = (),
        **options: Unpack[EngineOptions],
    ) -> None:
        """Load the model, which blocks. Parameters and errors: those of `LLM`."""
        engine = LocalEngine(
            model,
            options,
            engine_process=engine_process,
            disable_log_stats=disable_log_stats,
            stat_loggers=stat_loggers,
        )
        self._recorder = engine.recorder
        self._client = engine.client
        self._tokenizer = engine.tokenizer
        self._requests = RequestFactory(engine, seed)
        self._streams = RequestStreams(engine.client)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model, which blocks. Errors: those of `LLM`."""
        return cls(engine_args.model, **engine_args.arguments)

    def generate(
        self,
        prompt: PromptType | AsyncIterable[StreamingInput] | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        priority: int = 0,
        speculative_tokens: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt: each item is the whole answer so far, the last one `finished`.

        An asynchronous iterator of `StreamingInput` is a session: each input follows everything before it, answers included, and
        gets an answer of its own, whose last item has a finish reason; the KV stays in the engine. Only the session's last item is
        `finished`. Inputs may arrive while an answer is made. An error of an input ends the session.

        With `output_kind` `DELTA` an item has only new output, with `FINAL_ONLY` there is one item. With `best_of` above n there is
        one item, too, since the best are known only at the end.

        Tokens that arrive while the reader is busy are merged into one item. Leaving the generator aborts the request; use
        `contextlib.aclosing` where it is left early. request_id: a name for `abort`, which no other request has now;
        default: a random one. prompt_token_ids: in place of `prompt`. priority: lower runs first with
        `scheduling_policy="priority"`. speculative_tokens: tokens to draft per step, at most: see `speculative_config`.
        trace_headers: W3C trace context. data_parallel_rank: None or 0, since there is one engine.
        tokenization_kwargs: see `TokenizationKwargs`. lora_request: the adapter, of a session in all its turns; needs
        `enable_lora`.
        Raises, with the first item: InvalidRequest naming the field, its value and its limit; later: WorkerLost when
        the engine fails, Cancelled by `shutdown`.
        """
        fields: dict[str, object] = {
            "priority": priority,
            "speculative_tokens": speculative_tokens,
            "trace_headers": trace_headers,
            "lora_request": lora_request,
        }
        if isinstance(prompt, AsyncIterable):
            return self._converse(
                prompt, sampling_params, request_id, tokenization_kwargs, fields, data_parallel_rank=data_parallel_rank
            )

        def parse() -> PromptWithSalt:
            _verify_rank(data_parallel_rank)
            return as_prompt(one_of_both(prompt, prompt_token_ids), tokenization_kwargs)

        return self._answer(parse, sampling_params, request_id, **fields)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        speculative_tokens: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: LoRARequest | None = None,
        **template_options: Unpack[ChatKwargs],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation through the model's chat template: `LLM.chat`, as a stream like `generate`."""
        parse = partial(as_conversation, messages, tokenization_kwargs, **template_options)
        fields: dict[str, object] = {
            "priority": priority,
            "speculative_tokens": speculative_tokens,
            "trace_headers": trace_headers,
            "lora_request": lora_request,
        }
        return self._answer(parse, sampling_params, request_id, **fields)

    async def embed(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt. pooling_params: None is last token, normalised. Others: as in `generate`.

        Raises: InvalidRequest naming the field, its value and its limit; WorkerLost, Cancelled as in `generate`;
        Cancelled too when it was aborted.
        """
        return EmbeddingRequestOutput.from_base(
            await self._pooled(prompt, pooling_params, request_id, tokenization_kwargs, lora_request, "embed")
        )

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The result of pooling as one item, in vLLM's form of a stream. Arguments: as in `embed`.

        Without a `task` in pooling_params it is `classify` for a model with a classification head, else `embed`.
        """
        yield await self._pooled(prompt, pooling_params, request_id, tokenization_kwargs, lora_request)

    async def _pooled(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None,
        request_id: str | None,
        tokenization_kwargs: TokenizationKwargs | None,
        lora_request: LoRARequest | None,
        task: PoolingTask | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        self._start()
        parsed = as_prompt(prompt, tokenization_kwargs)
        validate = partial(self._requests.validate_pooling, parsed, pooling_params, task, lora_request=lora_request)
        valid = await asyncio.to_thread(validate)
        request = self._requests.make_pooling(valid, self._streams.free_name(request_id))
        with self._streams.submitted(request.request_id, request.core) as stream:
            return await anext(self._pooling_answers(request, stream))

    async def _pooling_answers(
        self, request: LocalPooling, stream: OutputStream
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        output = await stream.get()
        if output.finish_reason is FinishReason.ABORT:
            raise Cancelled(f"request {request.request_id} was aborted")
        yield request.process(output)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType | None = None,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: TokenizationKwargs | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        speculative_tokens: int | None = None,
    ) -> RequestOutputCollector:
        """Queue a request, whose answers the collector has; it runs whether they are read or not, until `abort`.

        params: None is the model's defaults. arrival_time: seconds since 1970, for the answer's metrics and, with
        `scheduling_policy="priority"`, its turn among equals; default: now. Others: as in `generate`.
        Raises: InvalidRequest naming the field, its value and its limit; what ended the engine.
        """
        self._start()
        _verify_rank(data_parallel_rank)
        parsed = as_prompt(one_of_both(prompt, prompt_token_ids), tokenization_kwargs)
        fields = {
            "priority": priority,
            "speculative_tokens": speculative_tokens,
            "trace_headers": trace_headers,
            "lora_request": lora_request,
        }
        scope = ExitStack()
        if isinstance(params, PoolingParams):
            valid = await asyncio.to_thread(self._requests.validate_pooling, parsed, params, None, **fields)
            embedding = self._requests.make_pooling(valid, self._streams.free_name(request_id))
            collector = RequestOutputCollector(request_id, RequestOutputKind.FINAL_ONLY)
            stream = scope.enter_context(self._streams.submitted(request_id, embedding.core))
            collector.start(self._pooling_answers(embedding, stream), scope)
            return collector
        valid = await asyncio.to_thread(self._requests.validate, parsed, params, **fields)
        request = self._requests.make(valid, self._streams.free_name(request_id), arrival_time)
        collector = RequestOutputCollector(request_id, request.params.output_kind)
        stream = scope.enter_context(self._streams.submitted(request_id, request.core))
        collector.start(self._answers(request, stream), scope)
        return collector

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request or several: their streams end with finish reason `abort`. Harmless for those that do not exist."""
        self._streams.abort([request_id] if isinstance(request_id, str) else request_id)

    async def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache; returns whether it was dropped: not while a request has blocks."""
        return bool(await self._client.utility_async("reset_prefix_cache"))

    async def do_log_stats(self) -> None:
        """Let the stat loggers log now."""
        if self._recorder is not None:
            self._recorder.log()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The recommendations of the model's authors, and the usual defaults."""
        return self._requests.default_sampling_params()

    @property
    def is_running(self) -> bool:
        """True if it takes requests: neither shut down nor failed."""
        return self._streams.ended_with is None

    @property
    def errored(self) -> bool:
        """True if it was shut down or has failed."""
        return self._streams.ended_with is not None

    @property
    def dead_error(self) -> PdServeError | None:
        """The error that ended it; None while it is running."""
        return self._streams.ended_with

    async def check_health(self) -> None:
        """Raises: what ended the engine, if it takes no more requests."""
        self._streams.require_running()

    def shutdown(self) -> None:
        """End every request with `Cancelled`, then the engine; waits for the step it is in.

        Any thread may call it, and more than once. It is called at the end of the process if the caller did not.
        """
        self._streams.ended_with = self._streams.ended_with or Cancelled("AsyncLLM was shut down")
        atexit.unregister(self.shutdown)
        self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _answer(
        self,
        parse: Callable[[], PromptWithSalt],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        **fields: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """fields: as in `RequestFactory.validate`."""
        self._start()
        valid = await asyncio.to_thread(self._requests.validate, parse(), sampling_params, **fields)
        request = self._requests.make(valid, self._streams.free_name(request_id))
        with self._streams.submitted(request.request_id, request.core) as stream:
            async for answer in self._answers(request, stream):
                yield answer

    async def _answers(self, request: LocalRequest, stream: OutputStream) -> AsyncGenerator[RequestOutput, None]:
        async for output in stream:
            new = request.process(output)
            if request.ended_here(output):
                self._client.end_sequence(request.core.request_id, output.index)
            if new is not None and (answer := request.output_of([new])) is not None:
                yield answer
            if request.finished:
                return

    async def _converse(
        self,
        inputs: AsyncIterable[StreamingInput],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        tokenization_kwargs: TokenizationKwargs | None,
        fields: dict[str, object],
        *,
        data_parallel_rank: int | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """fields: as in `RequestFactory.validate`."""
        self._start()
        _verify_rank(data_parallel_rank)

        def validate(each: StreamingInput) -> ValidRequest:
            params, parsed = each.sampling_params or sampling_params, as_prompt(each.prompt, tokenization_kwargs)
            return self._requests.validate_turn(parsed, params, True)

        first, others = await first_input(inputs)
        parsed, params = as_prompt(first.prompt, tokenization_kwargs), first.sampling_params or sampling_params
        valid = await asyncio.to_thread(partial(self._requests.validate_turn, parsed, params, False, **fields))
        request = self._requests.make(valid, self._streams.free_name(request_id), resumable=True)
        engine_id = request.core.request_id
        with self._streams.submitted(request.request_id, request.core) as stream:
            session = StreamingSession(self._client, self._requests, request, stream)
            feeding = asyncio.create_task(session.feed(others, validate))
            try:
                while not session.has_ended:
                    async for output in stream:
                        if (answer := session.process(output)) is not None:
                            yield answer
            except PdServeError:
                if session.input_error is not None:
                    raise session.input_error from None
                raise
            finally:
                feeding.cancel()
                if not session.has_ended:
                    self._client.abort_requests([engine_id])

    def _start(self) -> None:
        """Receive outputs in the running loop from now on. Raises: what ended the engine."""
        if self._streams.start():
            # torch aborts a process that ends while another thread computes
            atexit.register(self.shutdown)


def _verify_rank(rank: int | None) -> None:
    """Raises: InvalidRequest for any rank but that of the only engine."""
    if rank is not None and (type(rank) is not int or rank):
        raise InvalidRequest(
            f"data_parallel_rank must be 0, not {rank!r:.40}: there is one engine", "data_parallel_rank"
        )
