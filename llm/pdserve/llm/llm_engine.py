"""`LLMEngine`: requests in, and in each step the outputs of those that have any. `LLM` is built upon it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar, Unpack

from pdserve.common.errors import InternalError, InvalidRequest
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest
from pdserve.common.request.lora_request import LoRARequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.output_stream import engine_error
from pdserve.engine.stats.stat_logger import StatLoggerFactory
from pdserve.llm.engine_options import EngineArgs, EngineOptions
from pdserve.llm.local_engine import LocalEngine
from pdserve.llm.pooling_output import PoolingOutput, PoolingRequestOutput
from pdserve.llm.requests.local_request import LocalPooling, LocalRequest
from pdserve.llm.requests.prompts import PromptType, TokenizationKwargs, as_prompt, one_of_both
from pdserve.llm.requests.request_factory import RequestFactory
from pdserve.text.outputs.request_output import CompletionOutput, RequestOutput
from pdserve.text.tokenization.tokenizer import Tokenizer


class EngineItem(Protocol):
    """A request that processes its own outputs."""

    @property
    def core(self) -> EngineCoreRequest: ...

    @property
    def finished(self) -> bool:
        """True when no further output matters; at the latest with the engine's last output."""

    def process(self, output: EngineCoreOutput) -> object: ...

    def ended_here(self, output: EngineCoreOutput) -> bool:
        """True if a stop string has ended the output's sequence; the engine does not report that."""


R = TypeVar("R", bound=EngineItem)


class LLMEngine:
    """A model and its engine, for one thread.

    engine = LLMEngine("demo")
    engine.add_request("mine", "The capital of France is", SamplingParams(temperature=0))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.outputs[0].text)
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
        """Load the model. Parameters and errors: those of `LLM`."""
        engine = LocalEngine(
            model,
            options,
            engine_process=engine_process,
            disable_log_stats=disable_log_stats,
            stat_loggers=stat_loggers,
        )
        self._recorder = engine.recorder
        self.client = engine.client
        self.tokenizer: Tokenizer = engine.tokenizer
        self.requests = RequestFactory(engine, seed)
        self._unfinished: dict[str, EngineItem] = {}
        """Requests by the engine's request id."""
        self._names: dict[str, str] = {}
        """The caller's request id -> the engine's, of requests of `add_request`."""
        self._outputs: deque[EngineCoreOutput] = deque()
        """Outputs of the last step that are not processed yet."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model. Errors: those of `LLM`."""
        return cls(engine_args.model, **engine_args.arguments)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | None = None,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        tokenization_kwargs: TokenizationKwargs | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        speculative_tokens: int | None = None,
    ) -> None:
        """Queue a request. request_id: a name that no other request has now. params: None is the model's defaults.

        arrival_time: seconds since 1970, for the answer's metrics and, with `scheduling_policy="priority"`, its turn among equals;
        default: now. prompt_token_ids: in place of `prompt`. tokenization_kwargs: see `TokenizationKwargs`.
        trace_headers: W3C trace context. priority: lower runs first with
        `scheduling_policy="priority"`. speculative_tokens: tokens to draft per step, at most: see `speculative_config`.
        lora_request: the adapter; needs `enable_lora`.
        Raises: InvalidRequest naming the field, its value and its limit.
        """
        if request_id in self._names:
            raise InvalidRequest(f"request_id is {request_id!r}, which another request has now", "request_id")
        item: EngineItem
        requests, parsed = self.requests, as_prompt(one_of_both(prompt, prompt_token_ids), tokenization_kwargs)
        fields = {
            "trace_headers": trace_headers,
            "priority": priority,
            "speculative_tokens": speculative_tokens,
            "lora_request": lora_request,
        }
        if isinstance(params, PoolingParams):
            item = requests.make_pooling(requests.validate_pooling(parsed, params, None, **fields), request_id)
        else:
            item = requests.make(requests.validate(parsed, params, **fields), request_id, arrival_time)
        self._names[request_id] = item.core.request_id
        self._submit(item)

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """New outputs, at most one per request, by its `output_kind`; empty without unfinished requests.

        Raises: the error with which the engine ended a request, which is over then; other outputs come with the next call.
        WorkerLost when the engine failed.
        """
        outputs: list[RequestOutput | PoolingRequestOutput[PoolingOutput]] = []
        new: dict[str, list[CompletionOutput]] = {}
        """Engine's request id -> new output of its sequences."""
        advanced: dict[str, LocalRequest] = {}
        for item, output in self._advance() if self._unfinished else ():
            if isinstance(output, PoolingRequestOutput):
                outputs.append(output)
            elif isinstance(item, LocalRequest) and isinstance(output, CompletionOutput):
                advanced[item.core.request_id] = item
                new.setdefault(item.core.request_id, []).append(output)
        answers = (item.output_of(new[engine_id]) for engine_id, item in advanced.items())
        return outputs + [answer for answer in answers if answer is not None]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests of `add_request`; no output follows. Harmless for those that do not exist."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        ended = [self._names[name] for name in names if name in self._names]
        for engine_id in ended:
            self._forget(engine_id)
        self.client.abort_requests(ended)

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        return len(self._unfinished)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache; returns whether it was dropped: not while a request has blocks."""
        return bool(self.client.utility("reset_prefix_cache"))

    def do_log_stats(self) -> None:
        """Let the stat loggers log now."""
        if self._recorder is not None:
            self._recorder.log()

    def run(self, items: Sequence[R], on_finished: Callable[[R], None]) -> None:
        """Step until all items have ended. Raises: the error with which the engine ended one; `reset` must follow."""
        for item in items:
            self._submit(item)
        open_items = {item.core.request_id: item for item in items}
        while open_items:
            for advanced, _ in self._advance():
                if advanced.finished and (ended := open_items.pop(advanced.core.request_id, None)) is not None:
                    on_finished(ended)

    def reset(self) -> None:
        """End every request, after any error."""
        self.client.abort_requests(list(self._unfinished))
        self._unfinished.clear()
        self._names.clear()
        self._outputs.clear()

    def close(self) -> None:
        """End the engine. Harmless when called again."""
        self.client.close()

    def _submit(self, item: EngineItem) -> None:
        self._unfinished[item.core.request_id] = item
        self.client.add_request(item.core)

    def _advance(self) -> list[tuple[EngineItem, object]]:
        """Process the outputs of a step: each request with its new output. An error is raised before or after others."""
        if not self._outputs:
            step = self.client.get_output()
            if not step.has_results:
                raise InternalError(
                    f"the engine has nothing to do, but {len(self._unfinished)} requests have not ended"
                )
            self._outputs.extend(step.outputs)
        advanced: list[tuple[EngineItem, object]] = []
        while self._outputs:
            output = self._outputs[0]
            item = self._unfinished.get(output.request_id)
            if item is not None and output.error_code:
                if advanced:
                    break
                self._outputs.popleft()
                self._forget(output.request_id)
                raise engine_error(output)
            self._outputs.popleft()
            if item is None:
                continue  # the last output of a request that was aborted or that a stop string has ended
            advanced.append((item, item.process(output)))
            if item.ended_here(output):
                self.client.end_sequence(output.request_id, output.index)
            if item.finished:
                self._forget(output.request_id)
        return advanced

    def _forget(self, engine_id: str) -> None:
        item = self._unfinished.pop(engine_id)
        if isinstance(item, LocalRequest | LocalPooling):
            self._names.pop(item.request_id, None)
