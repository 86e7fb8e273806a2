"""What OpenAI clients may send, and what it means here. Unknown fields, wrong types and NaN are refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.sampling_params import MAX_LOGPROBS, SamplingParams, clamped_logit_bias
from pdserve.router.openai_form import OutputForm, ResponseFormat, StructuredOutputsBody, output_form
from pdserve.router.openai_tools import NamedTool, ToolBody, ToolUse, tool_use
from pdserve.router.preparation import ClientRequest
from pdserve.text.prompt import ChatInput, Prompt, TextInput, TokenInput


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # extensions that go by vLLM's names
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsBody | None = None
    cache_salt: str | None = None
    priority: int | None = None
    n: int | None = None
    # known, but only with the value that changes nothing
    prompt_logprobs: int | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each; None for no log-probabilities."""
        raise NotImplementedError

    def verify(self) -> None:
        """Raises: InvalidRequest for what is not supported."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        for field, neutral in _NEUTRAL.items():
            value = getattr(self, field, None)
            if value is not None and value not in neutral:
                allowed = " or ".join(map(json.dumps, neutral))
                raise InvalidRequest(f"{field} is {_shown(value)}, but only {allowed} is supported so far", field)

    def sampling(self, defaults: Mapping[str, float | int]) -> SamplingParams:
        """Absent fields take `defaults`, then ours; limits are held in `Preparation`, where the lengths are known."""
        given: dict[str, Any] = dict(defaults)
        given |= {name: value for name in _SAMPLING if (value := getattr(self, name, None)) is not None}
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias is not None:
            given["logit_bias"] = _logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            given["allowed_token_ids"] = tuple(self.allowed_token_ids)
        if self.bad_words is not None:
            given["bad_words"] = tuple(self.bad_words)
        return SamplingParams(logprobs=self.num_logprobs, structured_outputs=self.form.params, **given)

    @property
    def form(self) -> OutputForm:
        """What the answer must look like. Raises: InvalidRequest."""
        return output_form(self.response_format, self.structured_outputs)

    def _requests(
        self,
        prompts: list[Prompt],
        field: str,
        *,
        max_tokens: int | None,
        max_tokens_field: str,
        defaults: Mapping[str, float | int],
        timeout_s: float,
        trace_headers: dict[str, str],
    ) -> list[ClientRequest]:
        self.verify()
        sampling = self.sampling(defaults)
        return [
            ClientRequest(
                prompt=prompt,
                field=field if len(prompts) == 1 else f"{field}[{place}]",
                sampling=sampling,
                max_tokens=max_tokens,
                max_tokens_field=max_tokens_field,
                form_field=self.form.field,
                cache_salt=self.cache_salt or None,
                priority=self.priority or 0,
                timeout_s=timeout_s,
                trace_headers=trace_headers,
            )
            for place, prompt in enumerate(prompts)
        ]


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[int | str | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def requests(
        self, defaults: Mapping[str, float | int], timeout_s: float, trace_headers: dict[str, str]
    ) -> list[ClientRequest]:
        """One a prompt. Raises: InvalidRequest."""
        return self._requests(
            self._prompts(),
            "prompt",
            max_tokens=self.max_tokens,
            max_tokens_field="max_tokens",
            defaults=defaults,
            timeout_s=timeout_s,
            trace_headers=trace_headers,
        )

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def _prompts(self) -> list[Prompt]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [TextInput(prompt)]
        if not prompt:
            raise InvalidRequest("prompt is empty, at least one token is needed", "prompt")
        kinds = {type(part) for part in prompt}
        if len(kinds) > 1:
            raise InvalidRequest("prompt mixes kinds: strings, token ids, or lists of token ids are needed", "prompt")
        if kinds == {int}:
            return [TokenInput([part for part in prompt if isinstance(part, int)])]
        return [TokenInput(part) if isinstance(part, list) else TextInput(str(part)) for part in prompt]


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_use(self) -> ToolUse:
        """What the tools come to. Raises: InvalidRequest."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def form(self) -> OutputForm:
        forced = self.tool_use.form
        if forced is None:
            return super().form
        if super().form.params is not None:
            raise InvalidRequest("tool_choice forces a call, so that no other form can be asked for", "tool_choice")
        return OutputForm(forced, "tools")

    def requests(
        self, defaults: Mapping[str, float | int], timeout_s: float, trace_headers: dict[str, str]
    ) -> list[ClientRequest]:
        """Always one. Raises: InvalidRequest."""
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {self.top_logprobs}", "top_logprobs"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if not self.messages:
            raise InvalidRequest("messages is empty, at least one message is needed", "messages")
        newer = self.max_completion_tokens is not None
        return self._requests(
            [ChatInput(self.messages, tools=self.tool_use.tools)],
            "messages",
            max_tokens=self.max_completion_tokens if newer else self.max_tokens,
            max_tokens_field="max_completion_tokens" if newer else "max_tokens",
            defaults=defaults,
            timeout_s=timeout_s,
            trace_headers=trace_headers,
        )


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"logit_bias has the key {_shown(key)}, but its keys are token ids", "logit_bias")
    return clamped_logit_bias({int(key): bias for key, bias in biases.items()})


_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "include_stop_str_in_output",
    "n",
    "best_of",
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "store": (False,),
}
B = TypeVar("B", bound=GenerationBody)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_AT = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)


def parse_body(data: bytes, kind: type[B]) -> B:
    """Raises: InvalidRequest naming the field that is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (field := _not_finite(data)) is not None:
            raise InvalidRequest(f"{field} must be a finite number", field) from error
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def _named(message: str) -> InvalidRequest:
    for pattern, told in ((_UNKNOWN_FIELD, "is not a known field"), (_MISSING_FIELD, "is missing")):
        if match := pattern.fullmatch(message):
            field = ".".join(part for part in (match[2], match[1]) if part)
            return InvalidRequest(f"{field} {told}", field)
    if (match := _AT.fullmatch(message)) and match[2]:
        return InvalidRequest(f"{match[2]}: {match[1][:1].lower()}{match[1][1:]}", match[2].partition("[")[0])
    return InvalidRequest(f"the body is wrong: {message}")


def _not_finite(data: bytes) -> str | None:
    """JSON knows no NaN and no infinity, yet clients send them: the first field that holds one, if that is the fault."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    for key, value in values.items():
        inner = value.values() if isinstance(value, dict) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in inner):
            return str(key)
    return None


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
