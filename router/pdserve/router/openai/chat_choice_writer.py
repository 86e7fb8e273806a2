"""`ChatChoiceWriter`: the choices of a chat's answer in which there may be reasoning and calls of tools."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from pdserve.router.requests.preparation import ClientRequest
from pdserve.text.parsers.answer_parsers import AnswerParser, AnswerParsers
from pdserve.text.parsers.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from pdserve.text.parsers.reasoning_parser import ReasoningParser, ReasoningTags, ReasoningTokenCounter
from pdserve.text.parsers.tool_call_parser import ToolCallParser, ToolFormat
from pdserve.text.prompt import ChatInput
from pdserve.text.request_output import CompletionOutput


class ChatChoiceWriter:
    """Parses the text of one request's choices; writes reasoning as `reasoning` and calls of tools as `tool_calls`."""

    def __init__(
        self,
        parsers: AnswerParsers,
        *,
        tool_format: ToolFormat | None = None,
        max_calls: int | None = None,
        tags: ReasoningTags | None = None,
        continued: str = "",
        include_reasoning: bool = True,
    ) -> None:
        """tool_format: form of calls; None if they remain text. max_calls: further calls of an answer are dropped.

        tags: texts around reasoning; None if it remains text. continued: the beginning of the answer that the prompt
        ends with. include_reasoning: False drops reasoning.
        """
        self._deployment = parsers
        self._tool_format = tool_format
        self._max_calls = max_calls
        self._tags = tags
        self._continued = continued
        self._include_reasoning = include_reasoning
        self._parsers: dict[int, AnswerParser] = {}
        self._counters: dict[int, ReasoningTokenCounter] = {}

    @classmethod
    def of(cls, request: ClientRequest, parsers: AnswerParsers, *, include_reasoning: bool) -> ChatChoiceWriter | None:
        """A writer for the answer to a chat; None if nothing in it is parsed."""
        tool_format, tags = _tool_format(request, parsers), _tags(request, parsers)
        if tool_format is None and tags is None:
            return None
        prompt = request.prompt
        continues = isinstance(prompt, ChatInput) and prompt.continue_final_message
        content = prompt.messages[-1].get("content") if isinstance(prompt, ChatInput) and continues else ""
        return cls(
            parsers,
            tool_format=tool_format,
            max_calls=request.max_tool_calls,
            tags=tags,
            continued=content if isinstance(content, str) else "",
            include_reasoning=include_reasoning,
        )

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning in what has been written; None if reasoning is not parsed."""
        if self._tags is None:
            return None
        return sum(
            self._counters[index].num_tokens
            for index, parser in self._parsers.items()
            if parser.reasoning is not None and parser.reasoning.has_reasoning
        )

    def deltas(self, output: CompletionOutput, *, is_last: bool) -> list[Delta]:
        """New parts of a choice, from its next output. is_last: the choice ends with it."""
        return self._parser(output).feed(output.text, is_last=is_last)

    def streamed_choice(self, output: CompletionOutput, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A choice of a chunk, with what is new since the choice's last one."""
        parser = self._parser(output)
        delta: dict[str, Any] = {}
        for part in parser.feed(output.text, is_last=output.finish_reason is not None):
            match part:
                case TextDelta(text):
                    delta["content"] = delta.get("content", "") + text
                case ReasoningDelta(text):
                    if self._include_reasoning:
                        delta |= _reasoning(text)
                case ToolCallDelta():
                    delta.setdefault("tool_calls", []).append(_call_delta(part))
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": _finish_reason(parser, output),
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return choice

    def message(self, output: CompletionOutput) -> dict[str, Any]:
        """`message` and `finish_reason` of a whole choice."""
        parser = self._parser(output)
        text, reasoning, calls = "", "", list[dict[str, Any]]()
        for part in parser.feed(output.text, is_last=True):
            match part:
                case TextDelta():
                    text += part.text
                case ReasoningDelta():
                    reasoning += part.text
                case ToolCallDelta():
                    if part.name is not None:
                        calls.append(_call(part.name, part.arguments))
                    else:
                        calls[-1]["function"]["arguments"] += part.arguments
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not (calls or reasoning) else None}
        if reasoning and self._include_reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "finish_reason": _finish_reason(parser, output)}

    def _parser(self, output: CompletionOutput) -> AnswerParser:
        """The parser of the output's choice, made with its first output; its tokens are counted."""
        parser = self._parsers.get(output.index)
        if parser is None:
            tools = None if self._tool_format is None else ToolCallParser(self._tool_format, self._max_calls)
            parser = self._parsers[output.index] = AnswerParser(self._reasoning_parser(output), tools)
        if self._tags is not None:
            counter = self._counters.setdefault(output.index, ReasoningTokenCounter(self._tags))
            if not counter.has_ended:
                counter.add(self._deployment.tokenizer.token_piece(token_id) for token_id in output.token_ids)
        return parser

    def _reasoning_parser(self, first: CompletionOutput) -> ReasoningParser | None:
        """first: the choice's first output, which has the prompt's token ids."""
        if self._tags is None:
            return None
        # the last of the two tags in a continued answer says whether its reasoning goes on
        is_open = self._continued.rfind(self._tags.begin) > self._continued.rfind(self._tags.end)
        if not self._continued:
            is_open = self._deployment.opens_reasoning(first.prompt_token_ids)
        elif not is_open:
            return None
        return ReasoningParser(self._tags, is_open=is_open)


def with_visible_markers(request: ClientRequest, parsers: AnswerParsers) -> ClientRequest:
    """The request, with special tokens in its answer's text where the parsers of the answer need them."""
    if not parsers.has_special_markers(_tool_format(request, parsers), _tags(request, parsers)):
        return request
    params = msgspec.structs.replace(request.sampling_params, skip_special_tokens=False)
    return msgspec.structs.replace(request, sampling_params=params)


def _tool_format(request: ClientRequest, parsers: AnswerParsers) -> ToolFormat | None:
    """The form of calls in the answer; None if there can be none, or they remain text."""
    if not isinstance(request.prompt, ChatInput) or not request.prompt.tools:
        return None
    return parsers.forced_format if request.constraint_field == "tools" else parsers.tool_format


def _tags(request: ClientRequest, parsers: AnswerParsers) -> ReasoningTags | None:
    """Texts around the answer's reasoning; None if it can have none, since a form holds from its first token."""
    if not isinstance(request.prompt, ChatInput):
        return None
    form = request.sampling_params.structured_outputs
    is_free = form is None or not form.constraints
    if form is not None and form.structural_tag is not None:
        is_free = request.constraint_field != "tools"
    return parsers.reasoning_tags if is_free else None


def _reasoning(text: str) -> dict[str, str]:
    """A piece of reasoning by vLLM's name of the field, and by its older one, which more clients know."""
    return {"reasoning": text, "reasoning_content": text}


def _finish_reason(parser: AnswerParser, output: CompletionOutput) -> str | None:
    return "tool_calls" if output.finish_reason == "stop" and parser.ends_with_calls else output.finish_reason


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _call_delta(part: ToolCallDelta) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, **_call(part.name, part.arguments)}
