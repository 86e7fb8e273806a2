"""`CompletionResponseWriter`: whole responses, chunks of a stream, and errors in OpenAI's formats."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from pdserve.common import clock
from pdserve.common.errors import Overloaded, PdServeError
from pdserve.common.timeline import Timeline
from pdserve.router.openai.chat_choice_writer import ChatChoiceWriter, plain_answer
from pdserve.router.openai.echo import Echo
from pdserve.router.openai.logprobs import chat_logprobs, completion_logprobs, named_by_ids, prompt_logprobs
from pdserve.router.requests.preparation import ClientRequest
from pdserve.router.requests.usage import Usage
from pdserve.text.outputs.request_output import CompletionOutput
from pdserve.text.prompt import ChatInput

_encode = msgspec.json.Encoder().encode
_SLICE = 512
"""Entries that are encoded in one call."""
DONE = b"data: [DONE]\n\n"
_NULLS: dict[str, None] = dict.fromkeys(("system_fingerprint", "kv_transfer_params"))
"""Fields of whole answers that OpenAI and vLLM have, and that no answer here has a value of."""
_CHAT_NULLS: dict[str, None] = _NULLS | dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
_CHOICE_NULLS: dict[str, None] = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
"""The same fields, which each choice of a completion has."""
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class CompletionResponseWriter:
    """Writes one request's response, in one of OpenAI's two shapes.

    The parts of a chunk that never change are encoded once: a token costs one encoded string and two joins.
    """

    def __init__(
        self,
        *,
        request_id: str,
        request: ClientRequest,
        model: str,
        include_usage: bool,
        include_timeline: bool,
        continuous_usage: bool = False,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        echo: Echo | None = None,
        echoed: str = "",
        tokens_as_ids: bool = False,
        parsed: ChatChoiceWriter | None = None,
    ) -> None:
        """request: the first prompt's, as it runs. num_logprobs: most likely tokens to report per token; None: no
        log-probabilities. num_prompt_logprobs: the same per prompt token, in a whole response.

        continuous_usage: write the usage so far in every chunk. echo: begin each choice with its prompt. echoed: text that
        precedes each answer of a chat. tokens_as_ids: name tokens as `token_id:N` in log-probabilities. parsed: set if the
        answer of a chat may contain reasoning or calls.
        """
        self._chat = chat = isinstance(request.prompt, ChatInput)
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._include_usage = include_usage
        self._include_timeline = include_timeline
        self._continuous_usage = continuous_usage
        self._num_streamed = 0
        self._echo = echo
        self._echoed = echoed
        self._tokens_as_ids = tokens_as_ids
        self._parsed = parsed
        self._service_tier = request.service_tier
        self._returns_token_ids = request.returns_token_ids
        self._choices_each = request.sampling_params.n
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(clock.unix_s()),
            "model": model,
        }
        chunk_head = self._head | ({"object": "chat.completion.chunk"} if chat else {})
        if chat and self._service_tier is not None:
            chunk_head["service_tier"] = self._service_tier
        # an object without its closing brace, so that fields can be appended
        self._chunk_head = b"data: " + _encode(chunk_head)[:-1]
        opening = b'{"content":' if chat else b""
        key = b'"delta":' if chat else b'"text":'
        self._before_text = b',"choices":[{"index":%d,' + key + opening
        self._after_text = (b"}" if chat else b"") + b',"logprobs":'
        self._started: set[int] = set()
        """Choices whose opening event, or prompt, is written."""
        self._is_plain = (
            echo is None
            and parsed is None
            and num_logprobs is None
            and not (tokens_as_ids or request.returns_token_ids or continuous_usage)
        )
        """True if a chunk has nothing but text."""
        self._plain_heads: dict[int, bytes] = {}
        """Choice -> what comes before the text of its chunks."""
        self._no_stop = b"" if chat else b',"stop_reason":null'
        self._no_ids = b',"token_ids":null' + (b"" if chat else b',"prompt_token_ids":null')
        self._no_usage = b"" if chat and not include_usage else b',"usage":null'
        """Fields without a value, in the chunks that have them null in OpenAI's and vLLM's streams."""
        self._plain_end = b'%bnull,"finish_reason":null%b%b}]%b}\n\n' % (
            self._after_text, self._no_stop, self._no_ids, self._no_usage,
        )  # fmt: skip

    def whole(self, outputs: list[CompletionOutput], usage: Usage, timeline: Timeline) -> bytes:
        """The body of an answer that is not streamed."""
        outputs = [self._shown(output) for output in outputs]
        body = self._head | {
            "choices": [self._choice(output) for output in outputs],
            "usage": self._usage(usage),
            "service_tier": self._service_tier,
            **(_CHAT_NULLS if self._chat else _NULLS),
        }
        if self._chat and self._returns_token_ids:
            body["prompt_token_ids"] = raw_list(outputs[0].prompt_token_ids or [])
        if self._chat and self._num_prompt_logprobs is not None:
            body["prompt_logprobs"] = raw_list(prompt_logprobs(outputs[0], self._num_prompt_logprobs))
        return _encode(body | self._vendor(timeline))

    def chunk(self, output: CompletionOutput, usage: Usage) -> bytes:
        """The event for one choice's new text; before a chat choice's first, the event that opens it."""
        if self._is_plain and output.finish_reason is None and (output.index in self._started or not self._chat):
            head = self._plain_heads.get(output.index)
            if head is None:
                head = self._plain_heads[output.index] = self._chunk_head + self._before_text % output.index
            return head + _encode(output.text) + self._plain_end
        output, opening = self._shown(output), b""
        if self._chat and output.index not in self._started:
            self._started.add(output.index)
            prompt = self._prompt_ids(None if output.index else output)
            opening = self._chunk_head + (
                prompt + b',"choices":[{"index":%d,"delta":{"role":"assistant","content":%b},"logprobs":null,'
                b'"finish_reason":null}]' % (output.index, _encode(self._echoed))
            )
            opening += self._usage_so_far(0, usage) + b"}\n\n"
        return opening + self._text_chunk(output) + self._usage_so_far(len(output.token_ids), usage) + b"}\n\n"

    def last_chunk(self, output: CompletionOutput, usage: Usage, timeline: Timeline) -> bytes:
        """As `chunk`, for the output that ends the request, followed by usage and the end of the stream."""
        event = self.chunk(output, usage)
        vendor = self._vendor(timeline)
        if self._include_usage:
            return event + self._chunk_head + _tail({"choices": [], "usage": self._usage(usage)} | vendor) + DONE
        return (event[:-3] + _tail(vendor) if vendor else event) + DONE

    def failed(self, error: PdServeError) -> bytes:
        """The event for an error after the first output. A stream without [DONE] is incomplete for clients."""
        return b"data: " + error_body(error) + b"\n\n"

    def _text_chunk(self, output: CompletionOutput) -> bytes:
        if self._parsed is not None:
            choice = self._parsed.streamed_choice(output, self._logprobs(output))
            choice["token_ids"] = output.token_ids if self._returns_token_ids else None
            return self._chunk_head + b',"choices":' + _encode([choice])
        text = _encode(self._text(output))
        logprobs = b"null" if self._num_logprobs is None else _encode(self._logprobs(output))
        reason = b',"finish_reason":null' + self._no_stop
        if output.finish_reason is not None:
            reason = (
                b',"finish_reason":' + _encode(output.finish_reason) + b',"stop_reason":' + _encode(output.stop_reason)
            )
        head = self._chunk_head + self._before_text % output.index
        ids = self._no_ids
        if self._returns_token_ids:
            ids = b',"token_ids":' + _encode(output.token_ids)
            if not self._chat:
                is_first = self._is_first_of_prompt(output) and output.index not in self._started
                ids += self._prompt_ids(output if is_first else None)
                self._started.add(output.index)
        return head + text + self._after_text + logprobs + reason + ids + b"}]"

    def _shown(self, output: CompletionOutput) -> CompletionOutput:
        """The part of an output that is written."""
        if self._echo is not None and self._echo.alone:
            return msgspec.structs.replace(
                output, text="", token_ids=[], logprobs=[], text_offsets=[], finish_reason="length", stop_reason=None
            )
        if self._tokens_as_ids and output.logprobs is not None:
            return msgspec.structs.replace(output, logprobs=list(map(named_by_ids, output.logprobs)))
        return output

    def _is_first_of_prompt(self, output: CompletionOutput) -> bool:
        return output.index % self._choices_each == 0

    def _prompt_ids(self, output: CompletionOutput | None) -> bytes:
        """A further field with the prompt's token ids, null if they are not returned. output: the first one of a choice."""
        if output is None or not self._returns_token_ids:
            return b',"prompt_token_ids":null'
        return b',"prompt_token_ids":' + bytes(raw_list(output.prompt_token_ids or []))

    def _text(self, output: CompletionOutput) -> str:
        return output.text if self._echo is None else self._echo.before(output) + output.text

    def _usage_so_far(self, num_tokens: int, usage: Usage) -> bytes:
        """A further field of a chunk: usage including this chunk's tokens, without outputs that are not written yet."""
        if not self._continuous_usage:
            return self._no_usage
        self._num_streamed += num_tokens
        so_far = msgspec.structs.replace(usage, completion_tokens=self._num_streamed)
        return b',"usage":' + _encode(self._usage(so_far))

    def _usage(self, usage: Usage) -> dict[str, Any]:
        if self._echo is not None and self._echo.alone:
            usage = msgspec.structs.replace(usage, completion_tokens=0)
        written = usage_json(usage)
        if self._parsed is not None and (num_tokens := self._parsed.reasoning_tokens) is not None:
            written["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return written

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        text: dict[str, Any] = {"message": plain_answer(output.text)} if self._chat else {"text": self._text(output)}
        choice = {
            "index": output.index,
            **text,
            "logprobs": _in_slices(self._logprobs(output)),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": raw_list(output.token_ids) if self._returns_token_ids else None,
            **({} if self._chat else _CHOICE_NULLS),
        }
        if not self._chat and self._num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = raw_list(prompt_logprobs(output, self._num_prompt_logprobs))
        if not self._chat and self._returns_token_ids and self._is_first_of_prompt(output):
            choice["prompt_token_ids"] = raw_list(output.prompt_token_ids or [])
        choice |= {} if self._parsed is None else self._parsed.message(output)
        if self._echoed:
            choice["message"]["content"] = self._echoed + (choice["message"]["content"] or "")
        return choice

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        if self._echo is not None:
            return self._echo.logprobs(output, self._num_logprobs, as_token_ids=self._tokens_as_ids)
        write = chat_logprobs if self._chat else completion_logprobs
        return write(output, self._num_logprobs)

    def _vendor(self, timeline: Timeline) -> dict[str, Any]:
        if not self._include_timeline:
            return {}
        return {"pdserve": timeline_json(timeline)}


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    return {
        "timeline": {phase.name: seconds for phase, seconds in timeline.phases()},
        "moments": timeline.moments_unix_ns,
    }


def _in_slices(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Log-probabilities with their lists encoded as JSON."""
    if logprobs is None:
        return None
    return {key: raw_list(value) if isinstance(value, list) else value for key, value in logprobs.items()}


def raw_list(entries: list[Any]) -> msgspec.Raw:
    """A list as JSON, encoded in slices, because one call for 100,000 entries would hold the GIL too long."""
    slices = (_encode(entries[first : first + _SLICE]) for first in range(0, len(entries), _SLICE))
    return msgspec.Raw(b"[" + b",".join(part[1:-1] for part in slices) + b"]")


def _tail(fields: dict[str, Any]) -> bytes:
    """Further fields of an open object, its end, and the end of the event."""
    return b"," + _encode(fields)[1:] + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_json(status: int, message: str, code: str, field: str | None = None) -> bytes:
    kind = _ERROR_TYPES.get(status, "server_error")
    return _encode({"error": {"message": message, "type": kind, "param": field, "code": code}})


def error_body(error: PdServeError) -> bytes:
    return error_json(error.http_status, error.message, error.code, error.field)


def error_headers(error: PdServeError) -> dict[str, str]:
    """`Retry-After` for errors that a later retry can avoid."""
    if isinstance(error, Overloaded):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {"retry-after": "1"} if error.http_status == 503 and error.retryable else {}
