"""`LLM`: answers batches of prompts. The engine runs in the caller's thread, or in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self, Unpack

from pdserve.common.request.lora_request import LoRARequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.stats.stat_logger import StatLoggerFactory
from pdserve.llm.beam_search import BeamSearchOutput, BeamSearchSequence, BeamStep
from pdserve.llm.engine_options import EngineOptions
from pdserve.llm.llm_engine import LLMEngine
from pdserve.llm.pooling_calls import PoolingCalls
from pdserve.llm.progress import MakeBar, Progress
from pdserve.llm.requests.checked_fields import checked
from pdserve.llm.requests.local_request import ValidRequest
from pdserve.llm.requests.prompt_lists import many_prompts, one_for_each, validated
from pdserve.llm.requests.prompts import (
    ChatKwargs,
    Conversation,
    PromptType,
    PromptWithSalt,
    TokenizationKwargs,
    as_conversation,
    as_prompt,
    is_one_conversation,
    one_of_both,
)
from pdserve.text.beam_search import Beam, BeamSearch, BeamSearchParams
from pdserve.text.outputs.request_output import RequestOutput
from pdserve.text.tokenization.tokenizer import Tokenizer


class LLM(PoolingCalls):
    """A model and its engine; one call at a time. The prefix cache persists between calls.

    with LLM("demo") as llm:
        [answer] = llm.generate("The capital of France is", SamplingParams(temperature=0))
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
        """Load the model.

        model: a folder with a Hugging Face checkpoint, or a bundled one: `demo`, `demo-image`.
        seed: requests without a seed of their own draw it from this, so that the same calls in the same order give the
        same answers; None: from the operating system.
        engine_process: run the engine in a process of its own, which ends with `shutdown` and with this process. When it fails,
        calls raise WorkerLost from then on.
        disable_log_stats: answers have no `metrics`, and there are no stat loggers.
        stat_loggers: names of installed ones (`logging` always is), and factories such as subclasses of `StatLoggerBase`.
        Raises: ConfigError naming the option, UnsupportedModel.
        """
        engine = LLMEngine(
            model,
            seed=seed,
            engine_process=engine_process,
            disable_log_stats=disable_log_stats,
            stat_loggers=stat_loggers,
            **options,
        )
        self._engine: LLMEngine | None = engine
        self._requests = engine.requests
        self._tokenizer = engine.tokenizer
        self._busy = threading.Lock()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | MakeBar = True,
        priority: int | Sequence[int] | None = None,
        speculative_tokens: int | Sequence[int] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt. Answers are in the order of the prompts.

        prompts: one or many; each a text, token ids, or a dict of either that may have a `cache_salt`.
        prompt_token_ids: token ids of one or many prompts, in place of `prompts`.
        sampling_params: for all prompts, or one for each; None: `get_default_sampling_params`.
        use_tqdm: show progress; or a callable that makes a bar, in place of tqdm.
        priority: for all prompts, or one for each; lower runs first with `scheduling_policy="priority"`.
        speculative_tokens: for all prompts, or one for each; tokens to draft per step, at most: see `speculative_config`.
        trace_headers: W3C trace context of all prompts. tokenization_kwargs: see `TokenizationKwargs`.
        lora_request: the adapter for all prompts, or one for each, None for the model without one; needs `enable_lora`.
        Raises: InvalidRequest naming the field, its value and its limit, before anything is computed. After any other
        error, Ctrl-C included, the engine is empty and ready.
        """
        values, label = many_prompts(one_of_both(prompts, prompt_token_ids, "prompts"))
        parse = partial(as_prompt, tokenization_kwargs=tokenization_kwargs)
        each = {"priority": priority, "speculative_tokens": speculative_tokens}
        fields = {"trace_headers": trace_headers}
        return self._answer(parse, values, label, sampling_params, use_tqdm, each, lora_request, fields)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        priority: int | Sequence[int] | None = None,
        speculative_tokens: int | Sequence[int] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **template_options: Unpack[ChatKwargs],
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of many, through the model's chat template.

        sampling_params: as in `generate`; without any, an answer may be as long as the model's length allows.
        priority, speculative_tokens, trace_headers, tokenization_kwargs, lora_request: as in `generate`.
        template_options: see `ChatKwargs`. Raises: as `generate` does.
        """
        parse = partial(as_conversation, tokenization_kwargs=tokenization_kwargs, **template_options)
        is_one = is_one_conversation(messages)
        values: Sequence[object] = [messages] if is_one else messages
        label, fields = None if is_one else "conversations", {"trace_headers": trace_headers}
        each = {"priority": priority, "speculative_tokens": speculative_tokens}
        return self._answer(parse, values, label, sampling_params, use_tqdm, each, lora_request, fields)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt that a beam search finds.

        prompts, lora_request: as in `generate`. Raises: as `generate` does.
        """
        values, label = many_prompts(prompts)
        params = checked(params, BeamSearchParams, "params")
        adapters = one_for_each(lora_request, len(values), LoRARequest, "lora_request")
        eos = self._tokenizer.eos_token_ids
        with self._exclusive() as engine:
            validate = self._requests.validate_beams

            def validate_one(place: int, value: object) -> ValidRequest:
                return validate(as_prompt(value), params, lora_request=adapters[place])

            valid = validated(values, label, validate_one)
            searches = [BeamSearch(params, eos) for _ in valid]
            with self._computing(engine, len(searches), use_tqdm) as progress:
                open_searches = list(zip(valid, searches, strict=True))
                while open_searches:
                    self._advance(engine, open_searches)
                    for request, search in open_searches:
                        if search.done:
                            num_tokens = sum(len(one.beam.token_ids) for one in search.finished)
                            progress.finished(len(request.request.prompt_token_ids), num_tokens)
                    open_searches = [(request, search) for request, search in open_searches if not search.done]
        return [self._beams_of(request, search) for request, search in zip(valid, searches, strict=True)]

    def _advance(self, engine: LLMEngine, searches: Sequence[tuple[ValidRequest, BeamSearch]]) -> None:
        """Compute one token for every live beam of all searches, in one batch."""
        steps: list[list[BeamStep]] = [
            [self._requests.make_beam_step(request, beam.token_ids) for beam in search.live]
            for request, search in searches
        ]
        engine.run([step for of_search in steps for step in of_search], lambda step: None)
        for (_, search), of_search in zip(searches, steps, strict=True):
            search.advance([step.candidates for step in of_search])

    def _beams_of(self, request: ValidRequest, search: BeamSearch) -> BeamSearchOutput:
        def text(beam: Beam) -> str:
            before = request.request.prompt_token_ids if self._requests.continues_prompt else []
            detokenizer = self._tokenizer.detokenizer(before)
            return detokenizer.add(beam.token_ids) + detokenizer.flush()

        return BeamSearchOutput(
            sequences=[
                BeamSearchSequence(
                    tokens=[*request.request.prompt_token_ids, *finished.beam.token_ids],
                    cum_logprob=finished.beam.cum_logprob,
                    score=finished.score,
                    text=text(finished.beam),
                    finish_reason=search.finish_reason(finished.beam),
                )
                for finished in search.finished
            ]
        )

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine beneath, for a caller that steps it between two calls. Raises: RuntimeError after `shutdown`."""
        if self._engine is None:
            raise RuntimeError("this LLM was shut down")
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of the model's generation_config.json; for other fields, the defaults of `SamplingParams`."""
        return self._requests.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache; returns whether it was dropped."""
        with self._exclusive() as engine:
            return bool(engine.client.utility("reset_prefix_cache"))

    def shutdown(self) -> None:
        """Free model and cache, and end the engine's process. May be called again."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _answer(
        self,
        parse: Callable[[object], PromptWithSalt],
        values: Sequence[object],
        label: str | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | MakeBar,
        for_each: Mapping[str, int | Sequence[int] | None],
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        fields: Mapping[str, object],
    ) -> list[RequestOutput]:
        """label: the name of a list of values in error messages; None for a single value. fields: of all requests. for_each: fields
        of all requests, or one value for each."""

        def validate(place: int, value: object) -> ValidRequest:
            own: dict[str, object] = {name: given[place] for name, given in numbers.items()}
            own["lora_request"] = adapters[place]
            return self._requests.validate(parse(value), params[place], **fields, **own)

        with self._exclusive() as engine:
            params = one_for_each(sampling_params, len(values), SamplingParams, "sampling_params")
            numbers = {name: one_for_each(given, len(values), int, name) for name, given in for_each.items()}
            adapters = one_for_each(lora_request, len(values), LoRARequest, "lora_request")
            # before any seed is drawn
            valid = validated(values, label, validate)
            requests = [self._requests.make(request) for request in valid]
            with self._computing(engine, len(requests), use_tqdm) as progress:
                engine.run(
                    requests,
                    lambda each: progress.finished(len(each.core.prompt_token_ids), each.processor.num_output_tokens),
                )
        return [request.answer for request in requests]

    @contextmanager
    def _computing(self, engine: LLMEngine, num_requests: int, use_tqdm: bool | MakeBar) -> Iterator[Progress]:
        """Context for the steps of a batch: shows progress, and empties the engine after an error."""
        progress = Progress(num_requests, use_tqdm)
        try:
            yield progress
        except BaseException:
            engine.reset()
            raise
        finally:
            progress.close()

    @contextmanager
    def _exclusive(self) -> Iterator[LLMEngine]:
        """The engine, for the exclusive use of this call. Raises: RuntimeError during another call, or after `shutdown`."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this LLM is at work: it serves one call at a time (AsyncLLM serves many)")
        try:
            if self._engine is None:
                raise RuntimeError("this LLM was shut down")
            yield self._engine
        finally:
            self._busy.release()
