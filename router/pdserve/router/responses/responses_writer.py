"""`ResponsesWriter`: whole responses and streamed events of the Responses API."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from pdserve.common import clock
from pdserve.common.errors import InvalidRequest, Overloaded, PdServeError
from pdserve.common.timeline import Timeline
from pdserve.router.openai.chat_choice_writer import ChatChoiceWriter
from pdserve.router.openai.logprobs import chat_logprobs
from pdserve.router.openai.response_writer import raw_list, timeline_json
from pdserve.router.requests.fields.service_tier import DEFAULT
from pdserve.router.requests.preparation import ClientRequest
from pdserve.router.requests.usage import Usage
from pdserve.router.responses.output_items import OutputItems
from pdserve.router.responses.response_store import StoredResponse
from pdserve.router.responses.responses_body import ResponsesBody
from pdserve.text.outputs.request_output import CompletionOutput
from pdserve.text.parsers.deltas import Delta, TextDelta

_encode = msgspec.json.Encoder().encode


def fixed_fields(body: ResponsesBody, request: ClientRequest, model: str) -> bytes:
    """The fields of a response that repeat its request, as JSON without braces."""
    params = request.sampling_params
    text = body.text.format if body.text is not None else None
    fields = {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if text is None else text, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
        "background": False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
    }
    return _encode(fields)[1:-1]


class ResponsesWriter:
    """Writes one response. A token costs one event; fields that repeat the request are encoded once."""

    def __init__(
        self,
        request_id: str,
        request: ClientRequest,
        fixed: bytes,
        *,
        parsed: ChatChoiceWriter | None,
        include_timeline: bool,
    ) -> None:
        """request: as it runs. fixed: of `fixed_fields`. parsed: set if the answer may contain reasoning or calls."""
        self.response_id = f"resp_{request_id}"
        head = {
            "id": self.response_id,
            "object": "response",
            "created_at": int(clock.unix_s()),
            "service_tier": request.service_tier or DEFAULT,
        }
        self._head = _encode(head)[:-1] + b"," + fixed + b","
        self._parsed = parsed
        self._num_logprobs = request.sampling_params.logprobs
        self._include_timeline = include_timeline
        self._items = OutputItems()
        self._logprobs: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is held back."""
        self._num_events = 0
        self._ended = b""
        """The response without log-probabilities, once it has ended."""

    def whole(self, outputs: list[CompletionOutput], usage: Usage, timeline: Timeline) -> bytes:
        """The body of an answer that is not streamed."""
        [output] = outputs
        logprobs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        """Item's id -> those of its tokens."""

        def keep(events: list[dict[str, Any]]) -> None:
            for event in events:
                if event["type"] == "response.output_text.delta":
                    logprobs[event["item_id"]] += event["logprobs"]

        for piece in self._pieces(output):
            keep(self._new(piece))
        status, ends = self._end(output)
        keep(ends)
        self._ended = self._final(status, usage, timeline)
        if self._num_logprobs is None:
            return self._ended
        parts = [(item["id"], item["content"][0]) for item in self._items.items if item["type"] == "message"]
        for item_id, part in parts:
            part["logprobs"] = raw_list(logprobs[item_id])
        body = self._final(status, usage, timeline)
        for _, part in parts:
            part["logprobs"] = []
        return body

    def _pieces(self, output: CompletionOutput) -> Iterator[CompletionOutput]:
        """The whole output, token by token where each token's log-probabilities have to find their item."""
        offsets, logprobs = output.text_offsets, output.logprobs
        if self._parsed is None or not offsets or logprobs is None:
            yield output
            return
        last = len(offsets) - 1
        for place, token_id in enumerate(output.token_ids):
            yield CompletionOutput(
                index=output.index,
                text=output.text[0 if place == 0 else offsets[place] : None if place == last else offsets[place + 1]],
                token_ids=[token_id],
                logprobs=[logprobs[place]],
                prompt_token_ids=output.prompt_token_ids,
                finish_reason=output.finish_reason if place == last else None,
            )

    def chunk(self, output: CompletionOutput, usage: Usage) -> bytes:
        """Events of new output; before the first, the events that open the response."""
        return self._opening() + b"".join(map(self._event, self._new(output)))

    def last_chunk(self, output: CompletionOutput, usage: Usage, timeline: Timeline) -> bytes:
        """As `chunk`, for the output that ends the request, followed by the events of the end."""
        events = self.chunk(output, usage)
        status, ends = self._end(output)
        events += b"".join(map(self._event, ends))
        self._ended = self._final(status, usage, timeline)
        return events + self._response_event(f"response.{status}", self._ended)

    def stored(self, conversation: bytes, num_input: int) -> StoredResponse:
        """The response for the store, after its end. conversation: its input as a JSON list of `num_input` items."""
        output = map(_encode, self._items.items)
        return StoredResponse(self._ended, b",".join([conversation[:-1], *output]) + b"]", num_input)

    def failed(self, error: PdServeError) -> bytes:
        """Events for an error after the first output."""
        kind = "server_error"
        if isinstance(error, InvalidRequest):
            kind = "invalid_prompt"
        elif error.http_status == Overloaded.http_status:
            kind = "rate_limit_exceeded"
        event = self._event({"type": "error", "code": error.code, "message": error.message, "param": error.field})
        state = self._state("failed", error={"code": kind, "message": error.message})
        return self._opening() + event + self._response_event("response.failed", state)

    def _opening(self) -> bytes:
        if self._num_events:
            return b""
        state = self._state("in_progress")
        return b"".join(self._response_event(f"response.{name}", state) for name in ("created", "in_progress"))

    def _new(self, output: CompletionOutput) -> list[dict[str, Any]]:
        if self._num_logprobs is not None:
            self._logprobs += chat_logprobs(output, self._num_logprobs)["content"]
        events: list[dict[str, Any]] = []
        deltas = self._deltas(output, is_last=output.finish_reason is not None)
        if deltas and not any(isinstance(delta, TextDelta) for delta in deltas):
            # tokens of reasoning and of calls, which would fill memory until the next text
            self._logprobs = []
        for delta in deltas:
            logprobs: list[dict[str, Any]] = []
            if isinstance(delta, TextDelta):
                logprobs, self._logprobs = self._logprobs, []
            events += self._items.add(delta, logprobs)
        return events

    def _deltas(self, output: CompletionOutput, *, is_last: bool) -> list[Delta]:
        if self._parsed is not None:
            return self._parsed.deltas(output, is_last=is_last)
        return [TextDelta(output.text)] if output.text else []

    def _end(self, output: CompletionOutput) -> tuple[str, list[dict[str, Any]]]:
        """The response's status and the events before it. An answer without any item gets an empty message."""
        status = "completed" if output.finish_reason == "stop" else "incomplete"
        # the last tokens may have no text
        events = self._items.add(TextDelta(""), self._logprobs) if self._items.is_text else []
        return status, events + self._items.close(status)

    def _final(self, status: str, usage: Usage, timeline: Timeline) -> bytes:
        more = {"pdserve": timeline_json(timeline)} if self._include_timeline else {}
        return self._state(status, usage=self._usage(usage), **more)

    def _state(self, status: str, **fields: Any) -> bytes:
        """The response as it is now."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        state = {
            "status": status,
            "output": self._items.items,
            "incomplete_details": reason,
            "completed_at": int(clock.unix_s()) if status == "completed" else None,
            "error": None,
            "usage": None,
            **fields,
        }
        return self._head + _encode(state)[1:]

    def _usage(self, usage: Usage) -> dict[str, Any]:
        reasoning_tokens = self._parsed.reasoning_tokens if self._parsed is not None else None
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _event(self, event: dict[str, Any]) -> bytes:
        return self._framed(event["type"], _encode(event)[1:])

    def _response_event(self, kind: str, response: bytes) -> bytes:
        return self._framed(kind, b'"type":"%s","response":%s}' % (kind.encode(), response))

    def _framed(self, kind: str, rest: bytes) -> bytes:
        """An event of the stream. rest: its JSON without the opening brace."""
        number, self._num_events = self._num_events, self._num_events + 1
        return b'event: %s\ndata: {"sequence_number":%d,%s\n\n' % (kind.encode(), number, rest)
