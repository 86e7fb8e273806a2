"""`LLM`: prompts in, answers out, in batches. The engine runs in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import torch

from pdserve.common.errors import InternalError, InvalidRequest
from pdserve.common.sampling_params import SamplingParams
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.output_stream import engine_error
from pdserve.llm.local_engine import EngineOptions, LocalEngine
from pdserve.llm.progress import MakeBar, Progress
from pdserve.llm.prompts import (
    Conversation,
    PromptType,
    SaltedPrompt,
    as_conversation,
    as_prompt,
    is_one_conversation,
    is_one_prompt,
    named,
)
from pdserve.llm.request_factory import LocalRequest, RequestFactory
from pdserve.text.output_processor import RequestOutput
from pdserve.text.tokenizer import Tokenizer

_GRAMMAR_POLL_S = 0.05
"""While only grammars are awaited: how often to look at their deadlines."""


class LLM:
    """A model and its engine, for one call at a time. The prefix cache stays from call to call.

    with LLM("demo") as llm:
        [answer] = llm.generate("The capital of France is", SamplingParams(temperature=0))
        print(answer.outputs[0].text)
    """

    def __init__(self, model: str | Path, *, seed: int | None = 0, **options: Unpack[EngineOptions]) -> None:
        """Load the model.

        model: a folder with a Hugging Face checkpoint, or `demo` for the bundled one.
        seed: requests without a seed of their own draw it from this, so that the same calls in the same order give the
        same answers; None: from the operating system.
        Raises: ConfigError naming the option, UnsupportedModel.
        """
        self._engine: LocalEngine | None = LocalEngine(model, options)
        self._core: EngineCore | None = self._engine.make_core()
        self._requests = RequestFactory(self._engine, seed)
        self._tokenizer = self._engine.tokenizer
        self._busy = threading.Lock()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
    ) -> list[RequestOutput]:
        """Continue each prompt. Answers come in the order of the prompts.

        prompts: one or many; each a text, token ids, or a dict of either that may have a `cache_salt`.
        sampling_params: for all prompts, or one for each; None: `get_default_sampling_params`.
        use_tqdm: show progress; or what makes a bar, in place of tqdm.
        Raises: InvalidRequest naming the field, its value and its limit, before anything is computed. After any other
        error, Ctrl-C included, the engine is empty and ready.
        """
        if is_one_prompt(prompts):
            return self._answer(as_prompt, [prompts], None, sampling_params, use_tqdm)
        if not isinstance(prompts, Sequence):
            raise InvalidRequest(f"prompts must be a prompt or a list of them, not {type(prompts).__name__}", "prompts")
        return self._answer(as_prompt, prompts, "prompts", sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of many, through the model's chat template.

        sampling_params: as in `generate`; without any, an answer may be as long as the model's length allows.
        chat_template_kwargs: variables of this template, such as `enable_thinking`.
        Raises: as `generate` does.
        """
        parse = partial(
            as_conversation, add_generation_prompt=add_generation_prompt, template_variables=chat_template_kwargs
        )
        if is_one_conversation(messages):
            return self._answer(parse, [messages], None, sampling_params, use_tqdm)
        return self._answer(parse, messages, "conversations", sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, and the usual defaults."""
        return self._requests.default_sampling_params()

    def shutdown(self) -> None:
        """Let model and cache go; harmless when called again."""
        self._engine = self._core = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _answer(
        self,
        parse: Callable[[object], SaltedPrompt],
        values: Sequence[object],
        label: str | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | MakeBar,
    ) -> list[RequestOutput]:
        """label: what many values are called; None for a single one."""
        with self._exclusive() as (engine, core):
            requests = self._prepare(parse, values, label, sampling_params)
            progress = Progress(len(requests), use_tqdm)
            try:
                with _torch_threads(engine.num_threads):
                    _run(core, requests, progress)
            except BaseException:
                # it may have stopped anywhere in a step: the next call gets a new engine over the same pool
                self._core = engine.make_core()
                raise
            finally:
                progress.close()
        return [request.answer for request in requests]

    def _prepare(
        self,
        parse: Callable[[object], SaltedPrompt],
        values: Sequence[object],
        label: str | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[LocalRequest]:
        """All of them valid. Raises: InvalidRequest; no seed was drawn then."""
        params = _for_each(sampling_params, len(values))
        valid = []
        for place, value in enumerate(values):
            with named(None if label is None else f"{label}[{place}]"):
                valid.append(self._requests.validate(parse(value), params[place]))
        return [self._requests.make(request) for request in valid]

    @contextmanager
    def _exclusive(self) -> Iterator[tuple[LocalEngine, EngineCore]]:
        """The engine, for this call alone. Raises: RuntimeError when another call has it, or after `shutdown`."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this LLM is at work: it serves one call at a time (AsyncLLM serves many)")
        try:
            if self._engine is None or self._core is None:
                raise RuntimeError("this LLM was shut down")
            yield self._engine, self._core
        finally:
            self._busy.release()


def _run(core: EngineCore, requests: Sequence[LocalRequest], progress: Progress) -> None:
    """Step until every request has ended. Raises: the error with which the engine ended one."""
    unfinished = {request.core.request_id: request for request in requests}
    for request in requests:
        core.add_request(request.core)
    while unfinished:
        if not core.has_work:
            raise InternalError(f"the engine has nothing to do, but {len(unfinished)} requests have not ended")
        core.wait_for_grammar(_GRAMMAR_POLL_S)
        for output in core.step().outputs:
            answered = unfinished.get(output.request_id)
            if answered is None:
                continue  # the last word of a request that a stop string has ended
            if output.error_code:
                raise engine_error(output)
            answered.process(output)
            if answered.ended_here(output):
                core.end_sequence(output.request_id, output.index)
            if answered.processor.finished:
                del unfinished[output.request_id]
                progress.finished(answered.processor.request_output())


def _for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams or a list of them, not {type(sampling_params).__name__}",
            "sampling_params",
        )
    if len(sampling_params) != num_prompts:
        raise InvalidRequest(
            f"sampling_params has {len(sampling_params)} entries, one for each of {num_prompts} prompts is needed",
            "sampling_params",
        )
    return sampling_params


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    """torch's setting is the caller's own: it is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
