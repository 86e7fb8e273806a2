"""`RequestFactory`: makes engine requests from a caller's prompts and sampling parameters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdserve.common import clock
from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.request.engine_types import EngineCoreRequest, StreamingUpdate
from pdserve.common.request.generation_request import GenerationRequest, verify_priority_is_used
from pdserve.common.request.lora_request import LoRARequest
from pdserve.common.request.multimodal import hashed_spans
from pdserve.common.request.pooling_params import PoolingParams, PoolingTask, verify_generates
from pdserve.common.request.sampling_params import NamedLogitsProcessor, SamplingParams
from pdserve.common.telemetry.request_metrics import RequestMetrics, monotonic_s, unix_s
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.prompt_embeds_values import verify_finite
from pdserve.llm.beam_search import BeamStep
from pdserve.llm.local_engine import LocalEngine
from pdserve.llm.requests.checked_fields import checked, converted, field_types
from pdserve.llm.requests.local_request import LocalPooling, LocalRequest, ValidRequest
from pdserve.llm.requests.logits_callables import LogitsCallable
from pdserve.llm.requests.prompts import PromptWithSalt
from pdserve.text.beam_search import BeamSearchParams, step_params
from pdserve.text.best_of import for_engines
from pdserve.text.outputs.output_processor import OutputProcessor
from pdserve.text.prompt import EmbedsInput, EncodedPrompt, TextInput
from pdserve.text.prompt_preparer import ModelLimits, PromptPreparer, PromptRequest, embeds_fields

_SEED_BITS = 63


class RequestFactory:
    """`validate` in any thread, then `make` in one. Seeds are drawn in the order of `make`, from one seed."""

    def __init__(self, engine: LocalEngine, seed: int | None) -> None:
        """seed: None draws from the operating system."""
        self._client = engine.client
        self._tokenizer = engine.tokenizer
        self._hasher = engine.hasher
        self._model_fingerprint = engine.info.model_fingerprint
        self._logits_processors = engine.logits_processors
        self._log_stats = engine.log_stats
        self.num_labels = engine.info.num_labels
        """Labels of the model's classification head; 0: it has none, and generates."""
        self._enable_prompt_embeds = engine.settings.enable_prompt_embeds
        self._scheduling_policy = engine.settings.scheduling_policy
        self._preparer = PromptPreparer(engine.tokenizer, engine.images, engine.audio)
        self._encoder_decoder = prompts = engine.info.encoder_decoder
        self._limits = ModelLimits(
            max_model_len=engine.info.max_model_len,
            vocab_size=engine.info.vocab_size,
            hidden_size=engine.info.hidden_size,
            max_logprobs=engine.max_logprobs,
            max_n_sequences=engine.info.max_num_seqs,
            decoder_prompt_len=0 if prompts is None else prompts.num_decoder_prompt_tokens,
        )
        self._numbers = itertools.count()
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def default_sampling_params(self) -> SamplingParams:
        """The recommendations of the model's authors; else the defaults of `SamplingParams`."""
        recommended: dict[str, Any] = dict(self._tokenizer.generation_defaults)
        return SamplingParams(**recommended)

    def validate(
        self, prompt: PromptWithSalt, sampling_params: SamplingParams | None, **fields: object
    ) -> ValidRequest:
        """Tokenize, fill in, check. sampling_params: None takes the defaults, `max_tokens` of the prompt's kind.

        fields: those of `GenerationRequest` that a caller gives next to the prompt, and `lora_request`; None: the default.
        Raises: InvalidRequest naming the field, its value and its limit.
        """
        verify_generates(self.num_labels)
        functions: tuple[LogitsCallable, ...] = ()
        if sampling_params is None:
            params, asked = self.default_sampling_params(), None
        else:
            sampling_params, functions = self._named_functions(sampling_params)
            params = checked(sampling_params, SamplingParams, "sampling_params")
            asked = params.max_tokens
        self._verify_embeds(prompt)
        takes_rest = sampling_params is not None
        request = _request(prompt, fields, sampling_params=params, max_tokens=asked, takes_rest=takes_rest)
        encoded = self._encoded(request)
        bad_words = self._preparer.bad_words(params)
        completed = self._preparer.complete(request, encoded.token_ids, self._limits, bad_words)
        self._logits_processors.verify(params.logits_processors, self._limits.vocab_size)
        return self._valid(completed, encoded, fields)._replace(functions=functions)

    def validate_turn(
        self,
        prompt: PromptWithSalt,
        sampling_params: SamplingParams | None,
        is_later: bool,
        **fields: object,
    ) -> ValidRequest:
        """`validate` of a session's turn. is_later: True if it is not the first, so that it continues a text.

        The length of all turns together is the engine's to check. Raises: as `validate`.
        """
        _verify_without_images(prompt, "a session")
        if is_later and isinstance(prompt.prompt, TextInput):
            prompt = prompt._replace(prompt=msgspec.structs.replace(prompt.prompt, add_special_tokens=False))
        if isinstance(prompt.prompt, EmbedsInput):
            raise InvalidRequest("prompt_embeds is given, and a session's prompt is token ids", "prompt_embeds")
        if is_later and prompt.cache_salt is not None:
            raise InvalidRequest("cache_salt may only come with a session's first input", "cache_salt")
        valid = self.validate(prompt, sampling_params, **fields)
        for field in ("n", "best_of"):
            if (getattr(valid.request.sampling_params, field) or 1) > 1:
                raise InvalidRequest(f"{field} is above 1, but a session has one sequence", field)
        return valid

    def _verify_embeds(self, prompt: PromptWithSalt) -> None:
        """Raises: InvalidRequest."""
        if not isinstance(prompt.prompt, EmbedsInput):
            return
        if not self._enable_prompt_embeds:
            raise InvalidRequest("prompt_embeds is given, and enable_prompt_embeds is False", "prompt_embeds")
        verify_finite(prompt.prompt.embeds)

    def _named_functions(self, params: SamplingParams) -> tuple[SamplingParams, tuple[LogitsCallable, ...]]:
        """The parameters with names in place of the caller's functions. Raises: InvalidRequest where none can be called."""
        given: object = getattr(params, "logits_processors", ())
        if not isinstance(given, Sequence) or not any(map(callable, given)):
            return params, ()
        named = [
            self._logits_processors.register(one, place) if callable(one) else one for place, one in enumerate(given)
        ]
        processors = tuple(
            NamedLogitsProcessor(name=one.name) if isinstance(one, LogitsCallable) else one for one in named
        )
        functions = tuple(one for one in named if isinstance(one, LogitsCallable))
        return msgspec.structs.replace(params, logits_processors=processors), functions

    def validate_pooling(
        self,
        prompt: PromptWithSalt,
        pooling_params: PoolingParams | None,
        task: PoolingTask | None = None,
        **fields: object,
    ) -> ValidRequest:
        """Tokenize and check. task: of the call; None: that of the parameters, else that of the model. fields: as in `validate`.

        Raises: InvalidRequest naming the field, its value and its limit.
        """
        params = PoolingParams() if pooling_params is None else checked(pooling_params, PoolingParams, "pooling_params")
        _verify_without_images(prompt, "an embedding")
        if task is not None and params.task not in (None, task):
            raise InvalidRequest(
                f"pooling_params.task is {params.task!r}, and the call is for {task!r}", "pooling_params"
            )
        task = task or params.task or ("classify" if self.num_labels else "embed")
        params = msgspec.structs.replace(params, task=task)
        params.verify_task(self.num_labels)
        request = _request(prompt, fields, pooling_params=params)
        encoded = self._encoded(request)
        completed = self._preparer.complete_pooling(request, encoded.token_ids, self._limits)
        return self._valid(completed, encoded, fields)

    def validate_beams(self, prompt: PromptWithSalt, params: BeamSearchParams, **fields: object) -> ValidRequest:
        """Tokenize and check. fields: as in `validate`. Raises: InvalidRequest naming the field, its value and its limit."""
        verify_generates(self.num_labels)
        if isinstance(prompt.prompt, EmbedsInput):
            raise InvalidRequest("prompt_embeds is given, and beams begin with token ids", "prompt_embeds")
        eos_len, limits = len(self._tokenizer.eos_token_ids), self._limits
        step = step_params(params.num_candidates(eos_len))
        request = _request(prompt, fields, sampling_params=step, max_tokens=params.max_tokens)
        encoded = self._encoded(request)
        token_ids = self._preparer.prompt_tokens(request, encoded.token_ids, limits)
        params.verify(limits.vocab_size, eos_len)
        self._preparer.max_tokens(request, len(token_ids), limits)
        completed = GenerationRequest(**request.carried() | {"prompt_token_ids": token_ids})
        return self._valid(completed, encoded, fields)

    def _encoded(self, request: PromptRequest) -> EncodedPrompt:
        """The prompt, whose images or sound become those of the request. Raises: InvalidRequest."""
        encoded = self._preparer.encode(request, self._limits.room)
        request.mm_features = list(encoded.features)
        return encoded

    def _valid(self, request: GenerationRequest, encoded: EncodedPrompt, fields: Mapping[str, object]) -> ValidRequest:
        """Raises: InvalidRequest."""
        verify_priority_is_used(request.priority, self._scheduling_policy)
        adapter: Any = fields.get("lora_request")
        request = msgspec.structs.replace(request, **lora_fields(self._client, adapter))
        return ValidRequest(request, encoded.text, lora_request=adapter)

    def make_pooling(self, valid: ValidRequest, request_id: str | None = None) -> LocalPooling:
        """The request for the engine. request_id: as in `make`."""
        name, stem = self._named(request_id)
        return LocalPooling(name, valid.text, self._engine_request(valid.request, stem))

    @property
    def continues_prompt(self) -> bool:
        """See `PromptRoom`."""
        return self._limits.room.continues_prompt

    def make_beam_step(self, valid: ValidRequest, output_token_ids: Sequence[int]) -> BeamStep:
        """The request for the candidates that follow these output tokens."""
        _, stem = self._named(None)
        if self._encoder_decoder is not None:
            params = msgspec.structs.replace(valid.request.sampling_params, max_tokens=len(output_token_ids) + 1)
            fields = {"output_token_ids": list(output_token_ids), "sampling_params": params}
            return BeamStep(self._engine_request(valid.request, stem, **fields))
        token_ids = [*valid.request.prompt_token_ids, *output_token_ids]
        return BeamStep(self._engine_request(valid.request, stem, prompt_token_ids=token_ids))

    def _named(self, request_id: str | None) -> tuple[str, str]:
        """The caller's name for a request, by default its number, and what begins the engine's names of its sequences.

        A caller may use a name again: the number separates a late output of the first from the second.
        """
        number = next(self._numbers)
        name = str(number) if request_id is None else request_id
        return name, f"{name}.{number}"

    def make(
        self,
        valid: ValidRequest,
        request_id: str | None = None,
        arrival_time: float | None = None,
        *,
        resumable: bool = False,
    ) -> LocalRequest:
        """The request for the engine. request_id: the caller's name for it; default: its number.

        arrival_time: seconds since 1970, for its metrics, and among equal priorities for its turn; default: now. resumable: True
        for the first turn of a session.
        """
        request_id, stem = self._named(request_id)
        params = self._seeded(valid.request.sampling_params)
        engine_params = for_engines(params)
        core = self._engine_request(
            valid.request,
            stem,
            sampling_params=engine_params,
            n=engine_params.n,
            eos_token_ids=self._tokenizer.eos_token_ids,
            resumable=resumable,
        )
        if arrival_time is None:
            arrived = unix_s(core.arrival_time)
        else:
            arrived, core.arrival_time = arrival_time, monotonic_s(arrival_time)
        return self._local(core, valid, params, request_id, valid.request.prompt_token_ids, arrived)

    def make_turn(self, valid: ValidRequest, engine_id: str) -> StreamingUpdate:
        """A session's later turn for the engine. engine_id: the engine's name of the session."""
        return StreamingUpdate(
            request_id=engine_id,
            prompt_token_ids=valid.request.prompt_token_ids,
            sampling_params=self._seeded(valid.request.sampling_params),
            arrival_time=clock.monotonic(),
        )

    def begin_turn(
        self, valid: ValidRequest, update: StreamingUpdate, last: LocalRequest, token_ids: list[int], num_before: int
    ) -> LocalRequest:
        """The turn of an update as a request of its own. last: the turn before. token_ids: everything up to the turn's output.

        num_before: tokens before the turn's input.
        """
        core = msgspec.structs.replace(last.core, sampling_params=update.sampling_params)
        valid = valid._replace(lora_request=last.processor.lora_request)
        arrived = unix_s(update.arrival_time)
        return self._local(core, valid, update.sampling_params, last.request_id, token_ids, arrived, num_before)

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if params.seed is not None:
            return params
        return msgspec.structs.replace(params, seed=self._seeds.getrandbits(_SEED_BITS))

    def _local(
        self,
        core: EngineCoreRequest,
        valid: ValidRequest,
        params: SamplingParams,
        request_id: str,
        token_ids: list[int],
        arrived_s: float,
        num_before: int = 0,
    ) -> LocalRequest:
        """params: the caller's. token_ids: all before the output. arrived_s: since 1970."""
        processor = OutputProcessor(
            self._tokenizer,
            request_id=request_id,
            prompt=valid.text,
            # placeholders are no tokens of a text
            prompt_token_ids=token_ids if core.prompt_embeds is None else [],
            sampling_params=core.sampling_params,
            num_sequences=core.sampling_params.n,
            num_tokens_before=num_before,
            continues_prompt=self.continues_prompt,
        )
        if self._log_stats:
            processor.metrics = RequestMetrics(arrival_time=arrived_s, num_prompt_tokens=len(token_ids))
        processor.lora_request = valid.lora_request
        return LocalRequest(core, processor, processor.metrics, params, valid.functions)

    def _engine_request(self, request: GenerationRequest, stem: str, **fields: Any) -> EngineCoreRequest:
        """stem: begins the ids of its sequences. fields: in place of the request's."""
        carried = request.carried() | fields
        root = self._hasher.root(
            self._model_fingerprint, request.cache_salt, request.lora_fingerprint, embeds_digest=request.embeds_digest
        )
        carried |= {"request_id": f"{stem}.0", "hash_root": root}
        if (prompts := self._encoder_decoder) is not None:
            carried |= prompts.hashed(
                carried["prompt_token_ids"], carried["output_token_ids"], root, self._hasher, request.mm_features
            )
        else:
            spans = hashed_spans(request.mm_features)
            carried["block_hashes"] = self._hasher.extend(root, carried["prompt_token_ids"], spans)
        return EngineCoreRequest(**carried, sequence_stem=stem, arrival_time=clock.monotonic())


def _request(prompt: PromptWithSalt, fields: Mapping[str, object], **given: Any) -> PromptRequest:
    """fields: as in `RequestFactory.validate`. Raises: InvalidRequest for a field of another type."""
    types = field_types(GenerationRequest)
    named = {name: value for name, value in fields.items() if value is not None and name != "lora_request"}
    given |= {name: converted(name, value, types[name]) for name, value in named.items()}
    return PromptRequest(
        prompt=prompt.prompt, field=prompt.field, cache_salt=prompt.cache_salt, truncation=prompt.truncation,
        images=prompt.images, sounds=prompt.sounds, **(given | embeds_fields(prompt.prompt)),
    )  # fmt: skip


def _verify_without_images(prompt: PromptWithSalt, kind: str) -> None:
    """Raises: InvalidRequest."""
    if prompt.images or prompt.sounds:
        what = "images" if prompt.images else "sound"
        raise InvalidRequest(f"multi_modal_data is given, and the prompt of {kind} has no {what}", "multi_modal_data")


def lora_fields(client: EngineCoreClient, lora_request: object) -> dict[str, Any]:
    """Fields of `GenerationRequest` for a request with this adapter, which the engine reads if it is new; {} for None.

    Raises: InvalidRequest naming the field, its value and its limit.
    """
    if lora_request is None:
        return {}
    if not isinstance(lora_request, LoRARequest):
        raise InvalidRequest(f"lora_request must be LoRARequest, not {type(lora_request).__name__}", "lora_request")
    lora_request.verify()
    folder = Path(lora_request.lora_path).expanduser().absolute()
    try:
        fingerprint = client.utility("add_lora", str(folder))
    except ConfigError as error:
        raise InvalidRequest(f"lora_request: {error.message}", "lora_request") from error
    return {"lora_name": lora_request.lora_name, "lora_fingerprint": fingerprint}
