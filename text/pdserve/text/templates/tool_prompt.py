"""Tools in chat messages: prepared for templates that support tools, written as plain text for other templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdserve.common.errors import InvalidRequest
from pdserve.text.parsers.tool_call_parser import BEGIN, END

FIELD = "messages"
MAX_ARGUMENT_CONTAINERS = 1 << 16
"""Most objects and arrays in the arguments of all calls that are JSON texts; the limit of a body does not see them."""


def with_parsed_calls(messages: Sequence[Mapping[str, Any]], *, keeps_text: bool = False) -> list[dict[str, Any]]:
    """Messages with the arguments of earlier calls parsed: clients send JSON text, templates expect objects.

    A model may end within a call, or write one badly, and its client then sends that call in each further request: arguments that
    are no object are an empty one, with `keeps_text` their text.
    Raises: InvalidRequest naming the malformed call, or the tool's message whose `tool_call_id` is not a string; for more than
    `MAX_ARGUMENT_CONTAINERS` before anything is parsed.
    """
    num_containers = sum(text.count("{") + text.count("[") for text in _argument_texts(messages))
    if num_containers > MAX_ARGUMENT_CONTAINERS:
        raise InvalidRequest(
            f"{FIELD} have tool_calls with {num_containers} objects and arrays in function.arguments, at most "
            f"{MAX_ARGUMENT_CONTAINERS} are allowed",
            FIELD,
        )
    return [_with_parsed_calls(message, f"{FIELD}[{place}]", keeps_text) for place, message in enumerate(messages)]


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call, which are empty for an empty text; None for a text that is no JSON object, or no Unicode."""
    try:
        arguments = json.loads(text) if text.strip() else {}
        if "\\u" in text:
            # JSON may spell half of a character, which no text contains
            json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _argument_texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
                yield text


def _with_parsed_calls(message: Mapping[str, Any], where: str, keeps_text: bool) -> dict[str, Any]:
    plain = dict(message)
    if plain.get("role") == "tool" and not isinstance(plain.get("tool_call_id", ""), str):
        raise InvalidRequest(f"{where}.tool_call_id must be a string", FIELD)
    calls = plain.get("tool_calls")
    if calls is None:
        plain.pop("tool_calls", None)
        return plain
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list, not {type(calls).__name__}", FIELD)
    plain["tool_calls"] = [
        _parsed(call, f"{where}.tool_calls[{place}]", keeps_text) for place, call in enumerate(calls)
    ]
    return plain


def _parsed(call: Any, where: str, keeps_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be an object with function.name and function.arguments", FIELD)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        parsed = parsed_arguments(arguments)
        arguments = parsed if parsed is not None or not keeps_text else arguments
    return {**call, "type": "function", "function": {**function, "arguments": {} if arguments is None else arguments}}


def as_plain_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Messages for a template without tools: tools go into the system message, calls and results into the text.

    messages: contents are strings, arguments are objects or texts.
    """
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    instruction = _instruction(tools)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instruction}"}, *plain[1:]]
    return [{"role": "system", "content": instruction}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
        texts.append(f"{BEGIN}\n{written}\n{END}")
    return {"role": message["role"], "content": "\n".join(texts)}


def _instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = json.dumps({"name": "function name", "arguments": {"parameter": "value"}})
    return (
        f"You may call these functions. Each line describes one, its parameters as a JSON schema:\n{signatures}\n\n"
        f"To call one, write exactly this, and nothing else between the tags:\n{BEGIN}\n{form}\n{END}"
    )
