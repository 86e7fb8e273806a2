"""`ToolCallWriter`: the choices of a chat's answer in which the model may call tools."""

from __future__ import annotations

import uuid
from typing import Any

from pdserve.text.request_output import CompletionOutput
from pdserve.text.tool_calls import Delta, TextDelta, ToolCallDelta, ToolCallParser


class ToolCallWriter:
    """Parses the text of one request's choices, and writes calls of tools as `tool_calls`."""

    def __init__(self, max_calls: int | None) -> None:
        """max_calls: further calls of an answer are dropped."""
        self._max_calls = max_calls
        self._parsers: dict[int, ToolCallParser] = {}

    def streamed_choice(self, output: CompletionOutput, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A choice of a chunk, with the text and calls since the choice's last one."""
        parser = self._parsers.setdefault(output.index, ToolCallParser(self._max_calls))
        delta: dict[str, Any] = {}
        for part in _parts(parser, output):
            if isinstance(part, TextDelta):
                delta["content"] = delta.get("content", "") + part.text
            else:
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
        parser = ToolCallParser(self._max_calls)
        text, calls = "", list[dict[str, Any]]()
        for part in _parts(parser, output):
            if isinstance(part, TextDelta):
                text += part.text
            elif part.name is not None:
                calls.append(_call(part.name, part.arguments))
            else:
                calls[-1]["function"]["arguments"] += part.arguments
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = calls
        else:
            message["content"] = text
        return {"message": message, "finish_reason": _finish_reason(parser, output)}


def _parts(parser: ToolCallParser, output: CompletionOutput) -> list[Delta]:
    parts = parser.feed(output.text)
    return parts if output.finish_reason is None else parts + parser.flush()


def _finish_reason(parser: ToolCallParser, output: CompletionOutput) -> str | None:
    return "tool_calls" if output.finish_reason == "stop" and parser.num_calls else output.finish_reason


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
