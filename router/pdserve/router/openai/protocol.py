"""Bodies of OpenAI clients and their meaning here. Unknown fields, wrong types and NaN are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.generation_request import verify_client_request_id
from pdserve.common.request.sampling_params import MAX_ENTRIES, NamedLogitsProcessor, SamplingParams
from pdserve.router.openai.caller_fields import verify_caller
from pdserve.router.openai.no_op_fields import verify_neutral
from pdserve.router.openai.prompts import OpenAIPrompts, as_prompts, num_prompts
from pdserve.router.openai.response_format import ResponseFormat, output_form
from pdserve.router.openai.shared_body import SharedBody
from pdserve.router.requests.fields.beam_fields import BeamFields
from pdserve.router.requests.fields.chat_fields import ChatFields
from pdserve.router.requests.fields.output_constraint import OutputConstraint
from pdserve.router.requests.fields.prompt_embeds_field import read_base64_embeds
from pdserve.router.requests.fields.request_limits import MAX_ALLOWED_TOKEN_IDS, MAX_METADATA, MAX_PROMPTS
from pdserve.router.requests.fields.tools import NamedTool, ToolBody
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.text.parsers.tool_call_parser import HERMES_CALLS, ForcedCalls
from pdserve.text.prompt import Prompt, Truncation
from pdserve.text.prompt_preparer import embeds_fields
from pdserve.text.templates.chat_template import plain_message


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's field: usage so far in every chunk. Without `include_usage` no effect, as there."""
    include_obfuscation: bool | None = None
    """No effect: chunks have no padding."""


class GenerationBody(SharedBody, forbid_unknown_fields=True, kw_only=True):
    """Fields that completions and chat completions have in common."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    # extensions with vLLM's names
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[NamedLogitsProcessor] | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt; false for a chat, whose template adds them."""
    truncate_prompt_tokens: int | None = None
    """Keep this number of the prompt's last tokens; -1: as many as fit."""
    truncation_side: str | None = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens as `token_id:N`."""
    request_id: str | None = None
    """The client's id of the request, if no header has one."""
    # accepted, and without effect
    metadata: dict[str, str] | None = None
    store: bool | None = None
    prediction: Any = None
    session_id: str | None = None
    stream_interval: int | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_payload: str | None = None
    return_mm_kwargs: bool | None = None
    return_token_offsets: bool | None = None
    routed_experts_prompt_start: int | None = None
    # of a beam search
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    # known, but only with the value that changes nothing
    beam_width: int | None = None
    watermarking: bool | None = None
    thinking_token_budget: Any = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: Any = None
    return_prompt_text: bool | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def verify(self) -> None:
        """Raises: InvalidRequest for unsupported values."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs comes with a whole answer, not with stream true", "prompt_logprobs")
        verify_neutral(self)
        verify_caller(self)

    def verify_counts(self, num_prompts: int) -> None:
        """Raises: InvalidRequest for too many entries of a field, before they are converted."""
        for field, (limit, unit) in _MOST_ENTRIES.items():
            entries = getattr(self, field, None)
            if isinstance(entries, list | dict) and len(entries) > limit:
                raise InvalidRequest(f"{field} must be at most {limit}{unit}, not {len(entries)}", field)
        num_allowed = num_prompts * len(self.allowed_token_ids or ())
        if num_allowed > MAX_ALLOWED_TOKEN_IDS:
            raise InvalidRequest(
                f"allowed_token_ids has {len(self.allowed_token_ids or ())} entries for each of {num_prompts} prompts, "
                f"at most {MAX_ALLOWED_TOKEN_IDS} are allowed for all of them together",
                "allowed_token_ids",
            )

    def _requests(
        self,
        prompts: Sequence[Prompt],
        field: str,
        *,
        form: OutputConstraint,
        defaults: Mapping[str, float | int],
        call: CallFields,
        **fields: Any,
    ) -> list[ClientRequest]:
        """One `ClientRequest` per prompt; parts that are equal for all prompts are built and verified once.

        fields: further ones of each `ClientRequest`.
        """
        self.verify()
        form.verify()
        if self.request_id is not None and not call.client_request_id:
            verify_client_request_id(self.request_id, "request_id")
            call = call._replace(client_request_id=self.request_id)
        beam_fields = BeamFields(**{name: getattr(self, name) for name in BeamFields.__struct_fields__})
        # defaults of the model change probabilities, by which beams are not chosen
        sampling = self.sampling({} if self.use_beam_search else defaults, form)
        beams = beam_fields.params(sampling, form)
        truncation = Truncation.of(self.truncate_prompt_tokens, self.truncation_side)
        fields |= self.request_fields(call)
        return [
            ClientRequest(
                prompt=prompt,
                field=field if len(prompts) == 1 else f"{field}[{place}]",
                sampling_params=sampling,
                constraint_field=form.field,
                truncation=truncation,
                beams=beams,
                returns_token_ids=bool(self.return_token_ids),
                **(fields | embeds_fields(prompt)),
            )
            for place, prompt in enumerate(prompts)
        ]


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    prompt: OpenAIPrompts | None = None
    prompt_embeds: str | list[str] | None = None
    """In place of `prompt`: base64 of a safetensors file with one tensor, or several."""
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def requests(
        self,
        defaults: Mapping[str, float | int],
        call: CallFields,
        forced_calls: ForcedCalls = HERMES_CALLS,
        embeds_len: int = 0,
    ) -> list[ClientRequest]:
        """One request per prompt. forced_calls: for chats alone. embeds_len: tokens of a prompt that is embeddings, at most; 0:
        these are refused. Raises: InvalidRequest."""
        if (self.prompt is None) == (self.prompt_embeds is None):
            told = "prompt is missing" if self.prompt is None else "prompt and prompt_embeds are given"
            raise InvalidRequest(f"{told}: one of prompt and prompt_embeds is needed", "prompt")
        prompts, field = self._prompts(embeds_len)
        return self._requests(
            prompts,
            field,
            form=output_form(self.response_format, self.structured_outputs),
            defaults=defaults,
            call=call,
            # workers compute a prompt up to its first token, which is not returned then
            max_tokens=1 if self.echoes_alone else self.max_tokens,
        )

    def _prompts(self, embeds_len: int) -> tuple[Sequence[Prompt], str]:
        """The prompts, and their field."""
        if self.prompt_embeds is None:
            self.verify_counts(num_prompts(self.prompt or [], "prompt", MAX_PROMPTS))
            adds = self.add_special_tokens is not False
            return as_prompts(self.prompt or [], "prompt", add_special_tokens=adds), "prompt"
        given = [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds
        if not 0 < len(given) <= MAX_PROMPTS:
            raise InvalidRequest(
                f"prompt_embeds has {len(given)} entries, 1 to {MAX_PROMPTS} are allowed", "prompt_embeds"
            )
        if self.echo:
            raise InvalidRequest("echo is true, and prompt_embeds have no text", "echo")
        self.verify_counts(len(given))
        names = ["prompt_embeds"] if len(given) == 1 else [f"prompt_embeds[{place}]" for place in range(len(given))]
        embeds = (read_base64_embeds(text, name, embeds_len) for text, name in zip(given, names, strict=True))
        return list(embeds), "prompt_embeds"

    @property
    def echoes_alone(self) -> bool:
        """True if the prompts are returned without any output."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each; None for no log-probabilities."""
        return self.logprobs

    def sampling(self, defaults: Mapping[str, float | int], form: OutputConstraint) -> SamplingParams:
        params = super().sampling(defaults, form)
        if not self.echo or self.logprobs is None:
            return params
        # the echoed prompt has log-probabilities, too
        most = max(self.logprobs, params.prompt_logprobs or 0)
        return msgspec.structs.replace(params, prompt_logprobs=most)


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's fields for the chat template
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    """vLLM's field: false leaves reasoning out of the answer."""
    reasoning_effort: str | None = None
    """A variable of the chat template."""
    # OpenAI's and vLLM's, but only with the value that changes nothing
    chat_template: str | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    verbosity: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def echoed(self) -> str:
        """Text before each answer, with `echo`: the last message, if it is the assistant's. Takes time linear in its length.

        Raises: InvalidRequest for a malformed message.
        """
        if not self.echo:
            return ""
        last = plain_message(self.messages[-1], len(self.messages) - 1)
        return last["content"] if last["role"] == "assistant" else ""

    def requests(
        self, defaults: Mapping[str, float | int], call: CallFields, forced_calls: ForcedCalls = HERMES_CALLS
    ) -> list[ClientRequest]:
        """A list of one request. forced_calls: texts around the calls that `tool_choice` forces. Raises: InvalidRequest."""
        self.verify_counts(1)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        chat = ChatFields(**{name: getattr(self, name) for name in ChatFields.__struct_fields__})
        prompt, tools = chat.prompt(forced_calls)
        newer = self.max_completion_tokens is not None
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise InvalidRequest(
                f"max_completion_tokens must be at least 1, not {self.max_completion_tokens}", "max_completion_tokens"
            )
        return self._requests(
            [prompt],
            "messages",
            form=output_form(self.response_format, self.structured_outputs).forced(tools.form),
            defaults=defaults,
            call=call,
            max_tool_calls=tools.max_calls,
            max_tokens=self.max_completion_tokens if newer else self.max_tokens,
            max_tokens_field="max_completion_tokens" if newer else "max_tokens",
            logprobs_field="top_logprobs",
        )


_MOST_ENTRIES: Mapping[str, tuple[int, str]] = {
    **MAX_ENTRIES,
    "metadata": (MAX_METADATA, " pairs"),
}
