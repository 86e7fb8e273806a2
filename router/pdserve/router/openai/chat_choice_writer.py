"""`ChatChoiceWriter`: the choices of a chat's answer in which there may be reasoning and calls of tools."""

from __future__ import annotations

import uuid
from typing import Any

from pdserve.router.requests.answer_reader import AnswerReader
from pdserve.text.outputs.request_output import CompletionOutput
from pdserve.text.parsers.answer_parsers import AnswerParser
from pdserve.text.parsers.deltas import ReasoningDelta, TextDelta, ToolCallDelta

_NULLS: dict[str, None] = dict.fromkeys(
    ("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content")
)


class ChatChoiceWriter(AnswerReader):
    """Writes reasoning as `reasoning` and calls of tools as `tool_calls`."""

    def streamed_choice(self, output: CompletionOutput, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A choice of a chunk, with what is new since the choice's last one."""
        delta: dict[str, Any] = {}
        for part in self.deltas(output, is_last=output.finish_reason is not None):
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
            "finish_reason": _finish_reason(self._parsers[output.index], output),
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return choice

    def message(self, output: CompletionOutput) -> dict[str, Any]:
        """`message` and `finish_reason` of a whole choice."""
        text, reasoning, calls = "", "", list[dict[str, Any]]()
        for part in self.deltas(output, is_last=True):
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
        message = plain_answer(text if text or not (calls or reasoning) else None)
        if reasoning and self._include_reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "finish_reason": _finish_reason(self._parsers[output.index], output)}


def plain_answer(text: str | None) -> dict[str, Any]:
    """An assistant's message; fields of OpenAI's and vLLM's messages that it has no value of are null."""
    return {"role": "assistant", "content": text, **_NULLS}


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
