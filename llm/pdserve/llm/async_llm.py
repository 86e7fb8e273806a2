"""`AsyncLLM`: answers as streams, many at a time. The engine runs in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from pdserve.common.errors import Cancelled, InvalidRequest, PdServeError, WorkerLost, from_code
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import RequestOutputKind, SamplingParams
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.output_stream import OutputStream
from pdserve.llm.embedding_output import EmbeddingRequestOutput
from pdserve.llm.local_engine import EngineOptions, LocalEngine
from pdserve.llm.prompts import Conversation, PromptType, PromptWithSalt, as_conversation, as_prompt
from pdserve.llm.request_factory import RequestFactory
from pdserve.text.request_output import RequestOutput
from pdserve.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model and its engine, for one event loop: that of the first request.

    async with AsyncLLM("demo") as llm:
        async for answer in llm.generate("The capital of France is", SamplingParams(temperature=0)):
            print(answer.outputs[0].text)
    """

    def __init__(self, model: str | Path, *, seed: int | None = 0, **options: Unpack[EngineOptions]) -> None:
        """Load the model, which blocks. Parameters and errors: those of `LLM`."""
        self._engine = LocalEngine(model, options)
        self._core = self._engine.make_core()
        self._requests = RequestFactory(self._engine, seed)
        self._streams: dict[str, OutputStream] = {}
        """By the engine's request id."""
        self._active: dict[str, str] = {}
        """The caller's request id -> the engine's."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: EngineThread | None = None
        self._ended_with: PdServeError | None = None

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt: each item is the whole answer so far, the last one `finished`.

        With `output_kind` `DELTA` an item is what is new, with `FINAL_ONLY` there is one. With `best_of` above n there is
        one item alone, since the best are known only at the end.

        Tokens that arrive while the reader is busy are merged into one item. Leaving the generator aborts the request; use
        `contextlib.aclosing` where it is left early. request_id: a name for `abort`, which no other request has now;
        default: a random one.
        Raises, with the first item: InvalidRequest naming the field, its value and its limit; later: WorkerLost when
        the engine fails, Cancelled by `shutdown`.
        """
        return self._answer(partial(as_prompt, prompt), sampling_params, request_id)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation through the model's chat template: `LLM.chat`, as a stream like `generate`."""
        parse = partial(
            as_conversation,
            messages,
            add_generation_prompt=add_generation_prompt,
            template_variables=chat_template_kwargs,
        )
        return self._answer(parse, sampling_params, request_id)

    async def embed(
        self, prompt: PromptType, pooling_params: PoolingParams | None = None, request_id: str | None = None
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt. pooling_params: None is last token, normalised. request_id: as in `generate`.

        Raises: InvalidRequest naming the field, its value and its limit; WorkerLost, Cancelled as in `generate`;
        Cancelled too when it was aborted.
        """
        thread = self._started()
        valid = await asyncio.to_thread(self._requests.validate_embedding, as_prompt(prompt), pooling_params)
        request = self._requests.make_embedding(valid, self._free_name(request_id))
        with self._submitted(thread, request.request_id, request.core) as stream:
            output = await stream.get()
            if output.finish_reason is FinishReason.ABORT:
                raise Cancelled(f"request {request.request_id} was aborted")
            return request.process(output)

    async def abort(self, request_id: str) -> None:
        """End a request: its stream ends with finish reason `abort`. Harmless when it does not exist."""
        if (engine_id := self._active.get(request_id)) is not None and self._thread is not None:
            self._thread.post(lambda core: core.abort_request(engine_id))

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The recommendations of the model's authors, and the usual defaults."""
        return self._requests.default_sampling_params()

    @property
    def is_running(self) -> bool:
        """True if it takes requests: neither shut down nor failed."""
        return self._ended_with is None

    def shutdown(self) -> None:
        """End every request with `Cancelled`, then the engine's thread; waits for the step it is in.

        Any thread may call it, and more than once. It is called at the end of the process if the caller did not.
        """
        ended_with = self._ended_with = self._ended_with or Cancelled("AsyncLLM was shut down")
        if self._thread is None:
            self._engine.close()
            return
        atexit.unregister(self.shutdown)
        self._thread.post(lambda core: core.fail_all(ended_with))
        self._thread.stop()
        self._engine.close()
        self._thread.call_soon(self._end_streams)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _answer(
        self, parse: partial[PromptWithSalt], sampling_params: SamplingParams | None, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        thread = self._started()
        valid = await asyncio.to_thread(self._requests.validate, parse(), sampling_params)
        request = self._requests.make(valid, self._free_name(request_id))
        kind = valid.params.output_kind
        with self._submitted(thread, request.processor.request_id, request.core) as stream:
            async for output in stream:
                delta = request.process(output)
                if request.ended_here(output):
                    thread.post(partial(_end_sequence, request.core.request_id, output.index))
                if delta is not None and not request.is_open:
                    if kind is RequestOutputKind.DELTA and not request.is_best_of:
                        yield request.processor.request_output([delta])
                    elif kind is not RequestOutputKind.FINAL_ONLY or request.finished:
                        yield request.answer
                if request.finished:
                    return

    def _free_name(self, request_id: str | None) -> str:
        """Raises: InvalidRequest for a name that another request has now; what ended the engine meanwhile."""
        self._require_running()
        if request_id in self._active:
            raise InvalidRequest(f"request_id is {request_id!r}, which another request has now", "request_id")
        return secrets.token_hex(8) if request_id is None else request_id

    @contextmanager
    def _submitted(self, thread: EngineThread, request_id: str, core: EngineCoreRequest) -> Iterator[OutputStream]:
        """The outputs of a request, which ends when the context is left. request_id: the caller's.

        Raises: InvalidRequest for one that the engine does not accept.
        """
        self._core.verify(core)
        engine_id = core.request_id
        stream = self._streams[engine_id] = OutputStream(engine_id, num_sequences=core.n)
        self._active[request_id] = engine_id
        thread.post(lambda engine: engine.add_request(core))
        try:
            yield stream
        finally:
            del self._streams[engine_id], self._active[request_id]
            if not stream.has_ended:
                thread.post(lambda engine: engine.abort_request(engine_id))

    def _started(self) -> EngineThread:
        """The engine's thread, bound to the running loop. Raises: what ended it."""
        self._require_running()
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._loop = loop
            self._thread = EngineThread(
                self._core, loop, self._dispatch, self._engine_died, self._engine.num_threads, cpu_core=None
            )
            self._thread.start()
            # torch aborts a process that ends while another thread computes
            atexit.register(self.shutdown)
        if self._loop is not loop:
            raise RuntimeError("this AsyncLLM belongs to another event loop")
        return self._thread

    def _require_running(self) -> None:
        if (cause := self._ended_with) is not None:
            raise from_code(cause.code, cause.message)

    def _dispatch(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    def _engine_died(self) -> None:
        self._ended_with = self._ended_with or WorkerLost("the engine failed; its log has the details")
        self._end_streams()

    def _end_streams(self) -> None:
        """End the streams that the engine has not ended."""
        if (cause := self._ended_with) is None:
            return
        for stream in self._streams.values():
            stream.put(
                EngineCoreOutput(
                    request_id=stream.request_id,
                    finish_reason=FinishReason.ERROR,
                    error_code=cause.code,
                    error_message=cause.message,
                )
            )


def _end_sequence(engine_id: str, index: int, core: EngineCore) -> None:
    core.end_sequence(engine_id, index)
