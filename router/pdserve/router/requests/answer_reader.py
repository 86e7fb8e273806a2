"""`AnswerReader`: finds reasoning and calls of tools in the answer to a chat, for both front ends."""

from __future__ import annotations

from typing import Self

import msgspec

from pdserve.router.requests.preparation import ClientRequest
from pdserve.text.outputs.request_output import CompletionOutput
from pdserve.text.parsers.answer_parsers import AnswerParser, AnswerParsers
from pdserve.text.parsers.deltas import Delta
from pdserve.text.parsers.reasoning_parser import ReasoningParser, ReasoningTags, ReasoningTokenCounter
from pdserve.text.parsers.tool_call_parser import ToolCallParser, ToolFormat
from pdserve.text.prompt import ChatInput


class AnswerReader:
    """Parses the text of one request's choices."""

    def __init__(
        self,
        parsers: AnswerParsers,
        *,
        tool_format: ToolFormat | None = None,
        max_calls: int | None = None,
        is_forced: bool = False,
        tags: ReasoningTags | None = None,
        continued: str = "",
        include_reasoning: bool = True,
    ) -> None:
        """tool_format: form of calls; None if they remain text. max_calls: further calls of an answer are dropped.

        is_forced: the answer is nothing but calls. tags: texts around reasoning; None if it remains text. continued: the beginning
        of the answer that the prompt ends with. include_reasoning: False drops reasoning.
        """
        self._deployment = parsers
        self._tool_format = tool_format
        self._max_calls = max_calls
        self._is_forced = is_forced
        self._tags = tags
        self._continued = continued
        self._include_reasoning = include_reasoning
        self._parsers: dict[int, AnswerParser] = {}
        self._counters: dict[int, ReasoningTokenCounter] = {}

    @classmethod
    def of(cls, request: ClientRequest, parsers: AnswerParsers, *, include_reasoning: bool = True) -> Self | None:
        """A reader of the answer to a chat; None if nothing in it is parsed."""
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
            is_forced=request.constraint_field == "tools",
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
        is_cut = is_last and output.finish_reason != "stop"
        return self._parser(output).feed(output.text, is_last=is_last, is_cut=is_cut)

    def _parser(self, output: CompletionOutput) -> AnswerParser:
        """The parser of the output's choice, made with its first output; its tokens are counted."""
        parser = self._parsers.get(output.index)
        if parser is None:
            tools = None
            if self._tool_format is not None:
                tools = ToolCallParser(self._tool_format, self._max_calls, is_forced=self._is_forced)
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
